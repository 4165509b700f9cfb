"""Products whose result is put in order to be scattered, made in that order.

What devices get of a sum has to lie together, one part after the other. Where the parts are not
leading rows of a product, all of it is put in order behind it. A product of a few columns with a
few rows is much larger than they are: here they are put in order, so that the parts lead its
result, and once more the part that a device got. XLA on CPU takes 0.8 of the time for both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
from jax import lax

from meshwise._jax.jaxprs import (
    JaxprEqn,
    Literal,
    Var,
    in_place_of,
    opened,
    shape_of,
    with_bodies,
    with_each,
)

_MOVED = (lax.reshape_p, lax.squeeze_p, lax.transpose_p)
# To put in order costs less than it saves where it copies no more than this much of the result.
_SMALL = 0.5


class _Digit(NamedTuple):
    """A part of a dim's index: the dim is a number, of which this is one digit."""

    dim: int
    stride: int
    size: int


class _Lies(NamedTuple):
    """How an operand is to lie: its shape by digits, their order, what is contracted last."""

    shape: list[int]
    order: list[int]
    is_contracted_last: bool

    @property
    def is_so(self) -> bool:
        """Whether nothing is to be put in order."""
        return self.order == sorted(self.order)


@dataclass(frozen=True)
class _Scattered:
    """A sum that is scattered, the product behind it, and the views and transposes between.

    `first` are the digits of the product's result that tell the parts apart, `rest` all others as
    they lie in a part.
    """

    product: JaxprEqn
    between: tuple[JaxprEqn, ...]
    first: list[_Digit]
    rest: list[_Digit]

    @property
    def leading(self) -> int:
        """The operand that the parts are rows or columns of."""
        return int(self.first[0].dim >= len(_free(self.product, 0)))

    @property
    def orders(self) -> list[list[_Digit]]:
        """The digits of the rows of the leading operand, and of the other, as they are to lie."""
        first, dims = len(_free(self.product, 0)), [[], []]
        for digit in sorted((*self.first, *self.rest), key=lambda d: (d.dim, -d.stride)):
            dims[digit.dim >= first].append(digit)
        own = [d for d in dims[self.leading] if d not in self.first]
        return [[*self.first, *own], dims[1 - self.leading]]


def in_scattered_order(jaxpr: Any) -> Any:
    """The same per-device jaxpr with such products; itself where there are none."""
    eqns = opened(jaxpr).eqns
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    read = [*opened(jaxpr).outvars, *(a for eqn in eqns for a in eqn.invars)]
    uses = Counter(a for a in read if not isinstance(a, Literal))
    looked_at = {id(eqn): _scattered(eqn, makers, uses) for eqn in eqns}
    found = {key: scattered for key, scattered in looked_at.items() if scattered}
    gone = {id(e) for s in found.values() for e in (s.product, *s.between)}

    def said(eqn: JaxprEqn) -> list[JaxprEqn]:
        if id(eqn) in gone:
            return []
        if id(eqn) in found:
            return _in_order(eqn, found[id(eqn)])
        return [with_bodies(eqn, in_scattered_order)]

    return with_each(jaxpr, said)


def _scattered(
    eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn], uses: Mapping[Any, int]
) -> _Scattered | None:
    """Such a sum, where its product is worth another order."""
    if eqn.primitive.name != "reduce_scatter" or eqn.params["scatter_dimension"] != 0:
        return None
    between: list[JaxprEqn] = []
    value = eqn.invars[0]
    maker = makers.get(value)
    while maker and uses[value] == 1 and maker.primitive in _MOVED:
        between.insert(0, maker)
        value = maker.invars[0]
        maker = None if isinstance(value, Literal) else makers.get(value)
    if maker is None or uses[value] != 1 or not _is_plain(maker):
        return None
    parts = _parts(maker, between, eqn.params["axis_size"])
    if not parts:
        return None
    scattered = _Scattered(maker, tuple(between), *parts)
    free = len(_free(maker, 0))
    is_of_one = len({digit.dim < free for digit in scattered.first}) == 1
    return scattered if is_of_one and _is_worth_it(scattered) else None


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether it is a product without a batch, and nothing is said of one operand only."""
    if eqn.primitive is not lax.dot_general_p or any(0 in shape_of(a) for a in eqn.invars):
        return False
    precision, batch = eqn.params["precision"], eqn.params["dimension_numbers"][1][0]
    is_alike = isinstance(precision, tuple) and precision[0] == precision[1]
    return not batch and (precision is None or is_alike)


def _parts(
    product: JaxprEqn, between: Sequence[JaxprEqn], count: int
) -> tuple[list[_Digit], list[_Digit]] | None:
    """The digits of a product that say which of some parts it is, and those within a part."""
    shape = shape_of(product.outvars[0])
    dims: list[list[_Digit]] | None = [[_Digit(d, 1, n)] for d, n in enumerate(shape)]
    for eqn in between:
        if eqn.primitive is lax.transpose_p:
            dims = [dims[d] for d in eqn.params["permutation"]]
            continue
        is_as_it_lies = eqn.primitive is not lax.reshape_p or eqn.params["dimensions"] is None
        dims = _reshaped(dims, shape_of(eqn.outvars[0])) if is_as_it_lies else None
        if dims is None:
            return None
    found = _reshaped(dims, (count, prod(shape) // count))
    return (found[0], found[1]) if found else None


def _reshaped(dims: Sequence[Sequence[_Digit]], shape: Sequence[int]) -> list[list[_Digit]] | None:
    """The digits of each dim in another shape, split where they must be; None if they cannot be."""
    left = [digit for dim in dims for digit in dim if digit.size > 1]
    found: list[list[_Digit]] = []
    for size in shape:
        found.append([])
        wanted = size
        while wanted > 1:
            digit = left.pop(0)
            if digit.size > wanted and digit.size % wanted == 0:
                inner = digit.size // wanted
                left.insert(0, digit._replace(size=inner))
                digit = digit._replace(stride=digit.stride * inner, size=wanted)
            if wanted % digit.size:
                return None
            found[-1].append(digit)
            wanted //= digit.size
    return found


def _is_worth_it(scattered: _Scattered) -> bool:
    """Whether little is put in order beside the result, which else would be."""
    now = [*scattered.first, *scattered.rest]
    if now == sorted(now, key=lambda d: (d.dim, -d.stride)):
        return False
    copied = sum(
        prod(shape_of(scattered.product.invars[side]))
        for side, lies in zip(_sides(scattered), _operands(scattered), strict=True)
        if not lies.is_so
    )
    rows, columns = scattered.orders
    part = [*rows[len(scattered.first) :], *columns]
    size = prod(shape_of(scattered.product.outvars[0]))
    copied += 0 if part == scattered.rest else prod(d.size for d in part)
    return copied <= _SMALL * size


def _sides(scattered: _Scattered) -> tuple[int, int]:
    return scattered.leading, 1 - scattered.leading


def _operands(scattered: _Scattered) -> list[_Lies]:
    """How the leading operand and the other one are to lie.

    Rows of the one, the contracted dims behind them; columns of the other, those before them or,
    where nothing is to be put in order for that, behind them.
    """
    found = []
    for side, order in zip(_sides(scattered), scattered.orders, strict=True):
        free = _free(scattered.product, side)
        first = 0 if side == 0 else len(_free(scattered.product, 0))
        at = {dim: first + number for number, dim in enumerate(free)}
        pieces: list[Any] = []
        for dim, size in enumerate(shape_of(scattered.product.invars[side])):
            own = [d for d in order if d.dim == at.get(dim)]
            pieces += sorted(own, key=lambda d: -d.stride) if dim in at else [(dim, size)]
        contracted = scattered.product.params["dimension_numbers"][0][side]
        sizes = shape_of(scattered.product.invars[side])
        inner = [pieces.index((dim, sizes[dim])) for dim in contracted]
        outer = [pieces.index(digit) for digit in order]
        last = _Lies([piece[-1] for piece in pieces], outer + inner, True)
        is_last = side == scattered.leading or last.is_so
        found.append(
            last if is_last else last._replace(order=inner + outer, is_contracted_last=False)
        )
    return found


def _in_order(eqn: JaxprEqn, scattered: _Scattered) -> list[JaxprEqn]:
    """The product with the parts leading, the sum, and the part put in order."""
    product, count = scattered.product, eqn.params["axis_size"]
    lies, (rows, columns) = _operands(scattered), scattered.orders
    heights = prod(d.size for d in rows), prod(d.size for d in columns)
    depth = prod(shape_of(product.invars[scattered.leading])) // heights[0]
    said = {k: product.params[k] for k in ("precision", "preferred_element_type")}
    out: Any = eqn.outvars[0].aval

    def made(*operands: Any) -> Any:
        first, other = (
            _put(operands[side], *how[:2])
            for side, how in zip(_sides(scattered), lies, strict=True)
        )
        dim = int(lies[1].is_contracted_last)
        shape = (heights[1], depth) if dim else (depth, heights[1])
        dims = ((1,), (dim,)), ((), ())
        found = lax.dot_general(
            first.reshape(heights[0], depth), other.reshape(shape), dims, **said
        )
        return found.reshape(count, heights[0] // count, heights[1])

    def ordered(part: Any) -> Any:
        got = [*rows[len(scattered.first) :], *columns]
        order = [got.index(digit) for digit in scattered.rest]
        return lax.transpose(part.reshape([d.size for d in got]), order).reshape(out.shape)

    closed = jax.make_jaxpr(made)(*[_struct(a.aval) for a in product.invars])
    led, part = Var(closed.out_avals[0]), Var(out.update(shape=closed.out_avals[0].shape[1:]))
    params = {**eqn.params, "scatter_dimension": 0, "tiled": False}
    behind = jax.make_jaxpr(ordered)(_struct(part.aval))
    is_ready = not behind.jaxpr.eqns
    return [
        *in_place_of(product.replace(outvars=[led]), closed, product.invars),
        eqn.replace(invars=[led], outvars=eqn.outvars if is_ready else [part], params=params),
        *([] if is_ready else in_place_of(eqn, behind, [part])),
    ]


def _put(x: Any, shape: Sequence[int], order: Sequence[int]) -> Any:
    """An operand in some order, behind a barrier: XLA would make it part of a slower product."""
    if list(order) == sorted(order):
        return x
    return lax.optimization_barrier(lax.transpose(x.reshape(shape), order))


def _free(product: JaxprEqn, side: int) -> list[int]:
    """The dims of an operand that are in the result, in their order."""
    contracted = product.params["dimension_numbers"][0][side]
    return [d for d in range(len(shape_of(product.invars[side]))) if d not in contracted]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
