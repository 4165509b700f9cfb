"""Few rows written of few rows: whoever has the place fetches what the others have of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise._jax import Literal, OfRows, set_rows
from meshwise.ir.mesh import Axes
from meshwise.ir.operators import ADDITIONS, is_among
from meshwise.ir.program import shape_of, type_of
from meshwise.rules.dynamic_update import write_in_one, write_window
from meshwise.rules.factoring import Dim, Factoring
from meshwise.rules.halo import Fetch, fetch_rows
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.window import all_exchanges, exchanges


@register("set_rows")
def _set_rows_rule(application: Application) -> OpRule:
    params = application.params
    counts = dict(zip(params["dims"], params["rows"], strict=True))
    factoring = Factoring()
    shape = application.operands[0].shape
    dims = [factoring.new(n, "permute" if d in counts else None) for d, n in enumerate(shape)]
    given = [
        factoring.new(counts[d], "whole") if d in counts else own for d, own in enumerate(dims)
    ]
    # What rows are read of may have some more than what they are written into, or less.
    read: list[list[Dim]] = [
        dims if start is not None else given if operand.shape else []
        for operand, start in zip(application.operands[1:], params["starts"], strict=True)
    ]
    return OpRule(
        factoring.rule([dims, *read], [dims]),
        linear=tuple(_linear(params["function"])),
        local=_local,
        exchanges=_exchanges,
    )


def _linear(function: OfRows) -> Iterator[tuple[int, ...]]:
    """What is written into and operands that the rows are linear in: all of them, or one."""
    everyone = tuple(k for k, var in enumerate(function.inputs) if shape_of(var))
    for given in dict.fromkeys([everyone, *((k,) for k in everyone)]):
        if _is_linear(function, {function.inputs[k] for k in given}):
            yield 0, *(k + 1 for k in given)


def _is_linear(function: OfRows, given: set[Any]) -> bool:
    """Whether rows are linear in some inputs, by operators that are so in any of them."""
    for eqn in function.eqns:
        is_given = [atom in given for atom in eqn.invars if not isinstance(atom, Literal)]
        if not any(is_given):
            continue
        others = [a for a in eqn.invars if isinstance(a, Literal) or a not in given]
        is_factor = eqn.primitive.name == "mul" and len(others) == 1
        is_exact = issubdtype(type_of(eqn.outvars[0]).dtype, np.inexact)  # integers round each term
        is_divided = is_exact and eqn.primitive.name == "div" and others == eqn.invars[1:]
        is_chosen = eqn.primitive.name == "select_n" and others == eqn.invars[:1]
        is_sum = is_among(eqn, ADDITIONS | {"neg", "rev"}) and not others
        if not (is_factor or is_divided or is_chosen or is_sum):
            return False
        given = given | {*eqn.outvars}
    return function.made in given


@dataclass(frozen=True)
class _Place:
    """So many rows of a sharded dim that are written, and which of its shards have some of them."""

    dim: int
    axes: Axes
    count: int
    homes: tuple[bool, ...]

    def reading(self, size: int, block: int, start: int) -> tuple[int | None, Fetch]:
        """How as many rows of another array, from one of its own on, come to where these are.

        First every shard cuts so many from the row that is told, if one of them has all that count;
        then some go on.
        """
        owner, first = divmod(start, block)
        if first + self.count > block:
            return None, self._fetch(size, block, start)
        return first, self._fetch(self.count * len(self.homes), self.count, owner * self.count)

    def _fetch(self, size: int, block: int, start: int) -> Fetch:
        # The others need those behind the last one, of which there are none.
        starts = tuple(start if is_home else size for is_home in self.homes)
        return Fetch(size, block, starts, self.count)


def _places(context: LocalContext) -> list[_Place]:
    """Where rows are written along dims that are sharded."""
    params, found = context.params, []
    for dim, at, count in zip(params["dims"], params["at"], params["rows"], strict=True):
        axes, block = context.operand_axes(0, dim), context.local_shape(0)[dim]
        if axes:
            firsts = [shard * block for shard in range(context.mesh.size(axes))]
            homes = tuple(at < first + block and first < at + count for first in firsts)
            found.append(_Place(dim, axes, count, homes))
    return found


@dataclass(frozen=True)
class _Reading:
    """How a device gets the rows of an operand: `cuts` (dim, first, rows), then `fetches`."""

    cuts: tuple[tuple[int, int, int], ...]
    fetches: tuple[tuple[_Place, Fetch], ...]


def _reading(context: LocalContext, operand: int, starts: Sequence[int]) -> _Reading:
    params, places = context.params, {place.dim: place for place in _places(context)}
    shape, local = context.global_shape(operand), context.local_shape(operand)
    cuts, fetches = [], []
    for dim, start, count in zip(params["dims"], starts, params["rows"], strict=True):
        first: int | None = start
        if place := places.get(dim):
            first, fetch = place.reading(shape[dim], local[dim], start)
            fetches.append((place, fetch))
        if first is not None:
            cuts.append((dim, first, count))
    return _Reading(tuple(cuts), tuple(fetches))


def _exchanges(context: LocalContext) -> list[Exchange] | None:
    return all_exchanges(
        _exchanges_of(context, operand, starts)
        for operand, starts in enumerate(context.params["starts"], 1)
        if starts is not None
    )


def _exchanges_of(
    context: LocalContext, operand: int, starts: Sequence[int]
) -> list[Exchange] | None:
    reading, local = _reading(context, operand, starts), list(context.local_shape(operand))
    for dim, _, count in reading.cuts:
        local[dim] = count
    fetches = [(place.dim, fetch) for place, fetch in reading.fetches]
    return exchanges(fetches, local, context.itemsize(operand))


def _local(context: LocalContext, x: Any, *operands: Any) -> list[Any]:
    places, params = _places(context), context.params
    if not places:
        return [set_rows(x, *operands, **params)]
    each = enumerate(zip(operands, params["starts"], strict=True), 1)
    given = [
        rows if starts is None else _read(context, rows, _reading(context, operand, starts))
        for operand, (rows, starts) in each
    ]
    new = params["function"](*given)
    starts, windows = [np.int32(0)] * x.ndim, list(context.global_shape(0))
    for dim, at, count in zip(params["dims"], params["at"], params["rows"], strict=True):
        starts[dim], windows[dim] = np.int32(at), count
    split = {place.dim: context.rule.operands[0][place.dim][0] for place in places}
    if all(sum(place.homes) == 1 for place in places):
        return write_in_one(context, x, new, starts, split)
    return write_window(context, x, new, starts, windows, split)


def _read(context: LocalContext, found: Any, reading: _Reading) -> Any:
    """Rows of a local operand, on the devices that write them; on others something else."""
    for dim, first, count in reading.cuts:
        found = lax.slice_in_dim(found, first, first + count, axis=dim)
    for place, fetch in reading.fetches:
        found = fetch_rows(found, place.dim, place.axes, context.mesh, fetch)
    return found
