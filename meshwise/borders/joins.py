"""Rows that are laid side by side again: joins, and rows moved round."""

from itertools import accumulate
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal
from meshwise.borders.equations import Makers, maker_of, one_equation
from meshwise.ir.program import shape_of
from meshwise.pairing import Counts


def merge_concatenate(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """The end of a dim and then its beginning."""
    dim = eqn.params["dimension"]
    if len(eqn.invars) != 2:
        return None
    end, begin = (_part_of_dim(x, dim, makers) for x in eqn.invars)
    if end is None or begin is None or end[0] is not begin[0]:
        return None
    size = shape_of(end[0])[dim]
    at = end[1]
    if not 0 < at < size or (end[1:], begin[1:]) != ((at, size), (0, at)):
        return None
    return one_equation(eqn, _jax.roll_p, [end[0]], dimension=dim, shift=size - at)


def _part_of_dim(atom: Any, dim: int, makers: Makers) -> tuple[Any, int, int] | None:
    """Of which value something is a part of one dim, and from where to where."""
    split = maker_of(atom, makers, "split")
    if split is not None:
        if split.params["axis"] != dim:
            return None
        ends = list(accumulate(split.params["sizes"]))
        end = ends[split.outvars.index(atom)]
        return split.invars[0], end - shape_of(atom)[dim], end
    cut = maker_of(atom, makers, "slice")
    if cut is None or any(s != 1 for s in cut.params["strides"] or ()):
        return None
    shape = shape_of(cut.invars[0])
    starts, limits = list(cut.params["start_indices"]), list(cut.params["limit_indices"])
    found = cut.invars[0], starts[dim], limits[dim]
    starts[dim], limits[dim] = 0, shape[dim]
    return found if (starts, limits) == ([0] * len(shape), list(shape)) else None


def merge_add(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """The sum of two pads with zero that share no row: the rows side by side.

    It is what the gradient of a split, or of `jnp.roll`, consists of. Zero is added to the rows as
    it was, which makes 0.0 of -0.0.
    """
    pads = [zero_pad(atom, makers) for atom in eqn.invars]
    for first, second in (pads, pads[::-1]):
        dim = _padded_dim(first, high=True)
        if first is None or second is None or dim is None or dim != _padded_dim(second, high=False):
            continue
        parts = [first.invars[0], second.invars[0]]
        sizes = [shape_of(part)[dim] for part in parts]
        if sum(sizes) == shape_of(eqn.outvars[0])[dim] and 0 not in sizes:
            rows = eqn.replace(outvars=[_jax.new_var(eqn.outvars[0].aval)])
            (joined,) = one_equation(rows, lax.concatenate_p, parts, dimension=dim)
            moved = merge_concatenate(joined, makers, counts) or [joined]
            operands = [rows.outvars[0], first.invars[1]]
            return [*moved, *one_equation(eqn, lax.add_p, operands)]
    return None


def _padded_dim(pad: JaxprEqn | None, *, high: bool) -> int | None:
    """The one dim that a pad makes longer, at its end or at its beginning alone."""
    if pad is None:
        return None
    config = [tuple(map(int, amounts)) for amounts in pad.params["padding_config"]]
    padded = [d for d, amounts in enumerate(config) if amounts != (0, 0, 0)]
    if len(padded) != 1:
        return None
    low, after, interior = config[padded[0]]
    more, other = (after, low) if high else (low, after)
    return padded[0] if more > 0 and other == interior == 0 else None


def zero_pad(atom: Any, makers: Makers) -> JaxprEqn | None:
    """The pad with zero that makes a value."""
    inner = maker_of(atom, makers, "pad")
    if inner is None or not isinstance(inner.invars[1], Literal) or inner.invars[1].val:
        return None
    return inner
