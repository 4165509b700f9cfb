"""Rows that are laid side by side again: joins, and rows moved round."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal
from meshwise.ir.program import atom_key, shape_of
from meshwise.simplify.borders.equations import Makers, any_maker, maker_of, one_equation
from meshwise.simplify.counts import Counts


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


def merge_rolled(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A roll, unless it is of rows that were laid side by side: those change places at no cost.

    Of a roll that nothing else reads it is one roll, by both shifts.
    """
    rolled = merge_concatenate(eqn, makers, counts)
    if rolled is None:
        return None
    (source,), params = rolled[0].invars, rolled[0].params
    if maker_of(source, makers, "concatenate") is not None:
        return None
    inner = maker_of(source, makers, _jax.roll_p.name)
    if inner is None or source in makers.read_whole or not makers.is_made_here(inner.outvars[0]):
        return rolled
    dim = params["dimension"]
    if inner.params["dimension"] != dim:
        return rolled
    shift = (inner.params["shift"] + params["shift"]) % shape_of(source)[dim]
    if not shift:
        return one_equation(eqn, lax.copy_p, inner.invars)
    return one_equation(eqn, _jax.roll_p, inner.invars, dimension=dim, shift=shift)


def _part_of_dim(atom: Any, dim: int, makers: Makers) -> tuple[Any, int, int] | None:
    """Of which value something is a part of one dim, and from where to where."""
    split = maker_of(atom, makers, "split")
    if split is not None:
        if split.params["axis"] != dim:
            return None
        ends = list(accumulate(split.params["sizes"]))
        end = ends[split.outvars.index(atom)]
        return split.invars[0], end - shape_of(atom)[dim], end
    return _jax.rows_cut(any_maker(atom, makers), dim)


def merge_add(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """The sum of two pads with zero whose rows meet: the rows side by side, padded with the rest.

    It is what the gradient of a split, or of `jnp.roll`, consists of; a chain of such sums is the
    gradient of what reads a stack of weights one by one. Zero is added to the rows as it was, which
    makes 0.0 of -0.0 unless XLA leaves it out.
    """
    pads = [zero_pad(atom, makers) for atom in eqn.invars]
    for first, second in (pads, pads[::-1]):
        before, after = _padded_dim(first), _padded_dim(second)
        if first is None or second is None or before is None or after is None:
            return None
        if atom_key(first.invars[1]) != atom_key(second.invars[1]):  # zeros of two signs
            return None
        (dim, low, _), (other, starts, high) = before, after
        end = low + shape_of(first.invars[0])[dim]
        parts = [part for pad in (first, second) for part in _side_by_side(pad, dim, makers)]
        if dim != other or starts != end or 0 in [shape_of(part)[dim] for part in parts]:
            continue
        return _joined(eqn, parts, dim, (low, high), first.invars[1], makers, counts)
    return None


def _joined(
    eqn: JaxprEqn,
    parts: Sequence[Any],
    dim: int,
    around: tuple[int, int],
    zero: Any,
    makers: Makers,
    counts: Counts,
) -> list[JaxprEqn]:
    """Rows side by side, zero added to them, and zeros around them."""
    shape = list(shape_of(eqn.outvars[0]))
    shape[dim] -= sum(around)
    aval: Any = eqn.outvars[0].aval
    rows, added = (
        eqn.replace(outvars=[_jax.new_var(aval.update(shape=tuple(shape)))]) for _ in "ab"
    )
    (joined,) = one_equation(rows, lax.concatenate_p, parts, dimension=dim)
    moved = merge_concatenate(joined, makers, counts) or [joined]
    if not any(around):
        return [*moved, *one_equation(eqn, lax.add_p, [rows.outvars[0], zero])]
    config = tuple((*around, 0) if d == dim else (0, 0, 0) for d in range(len(shape)))
    return [
        *moved,
        *one_equation(added, lax.add_p, [rows.outvars[0], zero]),
        *one_equation(eqn, lax.pad_p, [added.outvars[0], zero], padding_config=config),
    ]


def _side_by_side(pad: JaxprEqn, dim: int, makers: Makers) -> Sequence[Any]:
    """What is padded; of a sum as above that is padded, the rows that it laid side by side."""
    added = maker_of(pad.invars[0], makers, "add")
    if added is None or not isinstance(added.invars[1], Literal) or added.invars[1].val:
        return pad.invars[:1]
    joined = maker_of(added.invars[0], makers, "concatenate")
    return pad.invars[:1] if joined is None or joined.params["dimension"] != dim else joined.invars


def _padded_dim(pad: JaxprEqn | None) -> tuple[int, int, int] | None:
    """The one dim that a pad makes longer, and by how much before and after."""
    if pad is None:
        return None
    config = [tuple(map(int, amounts)) for amounts in pad.params["padding_config"]]
    padded = [d for d, amounts in enumerate(config) if amounts != (0, 0, 0)]
    if len(padded) != 1:
        return None
    low, high, interior = config[padded[0]]
    return (padded[0], low, high) if min(low, high) >= 0 and not interior else None


def zero_pad(atom: Any, makers: Makers) -> JaxprEqn | None:
    """The pad with zero that makes a value."""
    inner = maker_of(atom, makers, "pad")
    if inner is None or not isinstance(inner.invars[1], Literal) or inner.invars[1].val:
        return None
    return inner
