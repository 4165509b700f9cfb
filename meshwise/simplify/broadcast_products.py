"""A product with an operand that is spread along its own dims is a smaller product, spread.

All columns of `x @ broadcast_to(c, (k, n))` are one: it is `x @ broadcast_to(c, (k,))`, spread. So
are gradients of means of what is linear, whose cotangent is one number. Shards then sum a vector
where they would sum a matrix, and XLA's library of kernels on CPU has no such operand to make
something wrong of (docs/design/0020-where-the-library-errs.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import equations_of

Spread = Mapping[Var, JaxprEqn]  # the equations that spread values, by what they make


@dataclass(frozen=True)
class _Operand:
    """An operand of a product, and how it is made without the dims along which it is spread.

    `summed` and `batch` are its dims in the product, `spread` those free ones in which its rows are
    all alike. `source` is what is read for it; that has dims `laid`, or is the operand itself.
    """

    source: Any
    shape: tuple[int, ...]
    laid: tuple[int, ...]
    summed: tuple[int, ...]
    batch: tuple[int, ...]
    spread: frozenset[int]

    @property
    def free(self) -> list[int]:
        """The dims that are neither summed nor of a batch, as they are in the result."""
        return [d for d in range(len(self.shape)) if d not in {*self.summed, *self.batch}]

    @property
    def kept(self) -> list[int]:
        """The dims along which it is not spread."""
        return [d for d in range(len(self.shape)) if d not in self.spread]

    def made(self, source: Any) -> Any:
        """The operand without the dims along which it is spread."""
        if not self.spread:
            return source
        kept = self.kept
        ones = [i for i, d in enumerate(self.laid) if d in self.spread]
        laid = [kept.index(d) for d in self.laid if d not in self.spread]
        return lax.broadcast_in_dim(lax.squeeze(source, ones), [self.shape[d] for d in kept], laid)

    def numbers(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dims of the operand as they are counted in what is `made`."""
        return tuple(map(self.kept.index, dims))


def broadcast_after_products(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations of a flat program, products made of what is spread before it is."""
    makers: dict[Var, JaxprEqn] = {}
    kept: list[JaxprEqn] = []
    for eqn in eqns:
        for own in _made_small(eqn, makers) or (eqn,):
            kept.append(own)
            if own.primitive is lax.broadcast_in_dim_p and len(own.invars) == 1:
                makers[own.outvars[0]] = own
    return kept


def _made_small(eqn: JaxprEqn, makers: Spread) -> list[JaxprEqn] | None:
    """A product as a smaller one, spread; None for one whose operands are not."""
    if eqn.primitive is not lax.dot_general_p or eqn.params["out_sharding"] is not None:
        return None
    summed, batch = eqn.params["dimension_numbers"]
    operands = [
        _operand(atom, makers, *dims) for atom, *dims in zip(eqn.invars, summed, batch, strict=True)
    ]
    if not any(one.spread for one in operands):
        return None

    def spread(*sources: Any) -> Any:
        numbers = tuple(
            tuple(one.numbers(getattr(one, of)) for one in operands) for of in ("summed", "batch")
        )
        params = eqn.params | {"dimension_numbers": numbers}
        made = [one.made(source) for one, source in zip(operands, sources, strict=True)]
        product = lax.dot_general_p.bind(*made, **params)
        free = [(one, d) for one in operands for d in one.free]
        laid = [i for i, (one, d) in enumerate(free, len(batch[0])) if d not in one.spread]
        leading = range(len(batch[0]))
        return lax.broadcast_in_dim(product, shape_of(eqn.outvars[0]), [*leading, *laid])

    return equations_of(eqn, [one.source for one in operands], spread)


def _operand(atom: Any, makers: Spread, summed: Sequence[int], batch: Sequence[int]) -> _Operand:
    shape, maker = shape_of(atom), None if isinstance(atom, Literal) else makers.get(atom)
    as_it_is = _Operand(
        atom, shape, tuple(range(len(shape))), tuple(summed), tuple(batch), frozenset()
    )
    if maker is None or not math.prod(shape):
        return as_it_is
    source, laid = maker.invars[0], maker.params["broadcast_dimensions"]
    sizes = dict(zip(laid, shape_of(source), strict=True))
    spread = frozenset(d for d in as_it_is.free if sizes.get(d, 1) == 1 < shape[d])
    if not spread:
        return as_it_is
    return _Operand(source, shape, tuple(laid), tuple(summed), tuple(batch), spread)
