"""Reshapes: the factors that dims before and after have in common, and borders that move.

Dims before and after fall into *groups*: the smallest runs of neighbours that hold the same
elements. In a group, what is left of the two current dims shares its greatest common divisor as
the next factor: `(6, 4) -> (24)` is `"i j -> (i j)"`, `(4, 6) -> (8, 3)` is `"i (j k) -> (i j) k"`.
Where nothing is left in common, the rest of the group is whole.

The leading factor of a group may be sharded by any axes: elements are in the same order on both
sides, so shard `r` holds a run of them before and another one after, and the misplaced border
goes to neighbours (GSPMD, arXiv 2105.04663 section 4.6). 12 heads of 128 over 8 devices are 6
runs of 256 elements, where the 1536 features were 8 runs of 192.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from meshwise.rules.factoring import Dim, Factoring, shapes
from meshwise.rules.halo import Fetch, fetch_rows
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.window import exchanges

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Dims before and after that hold the same elements; dims of size one are in no group."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def groups(operand: Sizes, result: Sizes) -> Iterator[Group]:
    """The groups of two shapes of the same size, which is not zero."""
    left = [d for d, n in enumerate(operand) if n != 1][::-1]
    right = [d for d, n in enumerate(result) if n != 1][::-1]
    while left:
        before, after = [left.pop()], [right.pop()]
        sizes = [operand[before[0]], result[after[0]]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                before.append(left.pop())
                sizes[0] *= operand[before[-1]]
            else:
                after.append(right.pop())
                sizes[1] *= result[after[-1]]
        yield Group(tuple(before), tuple(after))


@register("reshape")
def _reshape_rule(application: Application) -> OpRule:
    (operand,), (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    before: list[Dim] = [()] * len(operand)
    after: list[Dim] = [()] * len(result)
    if application.params["dimensions"] is not None:
        before, after = factoring.dims(operand, "whole"), factoring.dims(result, "whole")
    elif 0 in operand:
        before, after = _empty_dims(factoring, operand, result)
    else:
        for group in groups(operand, result):
            _share_factors(factoring, group, operand, result, before, after)
    return OpRule(
        factoring.rule([before], [after]),
        linear=((0,),),
        local=_reshape_local,
        exchanges=_exchanges,
        moves=True,
    )


def _share_factors(
    factoring: Factoring,
    group: Group,
    operand: Sizes,
    result: Sizes,
    before: list[Dim],
    after: list[Dim],
) -> None:
    """Give the dims of a group their factors, major to minor."""
    left = [[d, operand[d]] for d in group.before][::-1]
    right = [[d, result[d]] for d in group.after][::-1]
    alone = len(left) == len(right) == 1
    common = math.gcd(left[-1][1], right[-1][1])
    lead = factoring.new(
        operand[group.before[0]] if common == 1 else common, None if alone else "permute"
    )
    if common == 1:  # both dims have it, of two sizes
        before[left.pop()[0]], after[right.pop()[0]] = lead, lead
    while common > 1:
        for side, dims in ((left, before), (right, after)):
            dims[side[-1][0]] += lead
            side[-1][1] //= common
            if side[-1][1] == 1:
                side.pop()
        common = math.gcd(left[-1][1], right[-1][1]) if left and right else 1
        lead = factoring.new(common)
    for side, dims in ((left, before), (right, after)):
        for dim, size in reversed(side):
            dims[dim] += factoring.new(size, "whole")


def _empty_dims(factoring: Factoring, operand: Sizes, result: Sizes) -> tuple[list[Dim], list[Dim]]:
    """An empty array: leading dims of equal size pass through, the rest is whole."""
    before: list[Dim] = []
    while len(before) < min(len(operand), len(result)) and (
        operand[len(before)] == result[len(before)]
    ):
        before.append(factoring.new(operand[len(before)]))
    after = list(before)
    before += [factoring.new(n, "whole") for n in operand[len(before) :]]
    after += [factoring.new(n, "whole") for n in result[len(after) :]]
    return before, after


def _runs(context: LocalContext) -> list[tuple[Group, tuple[str, ...], Fetch | None]]:
    """The groups, the axes of each one's leading factor, and the elements that change shards."""
    operand, result = context.global_shape(0), context.result_shape(0)
    if context.params["dimensions"] is not None or 0 in operand:
        return []
    found = []
    for group in groups(operand, result):
        first, then = group.before[0], group.after[0]
        axes = context.axes(context.rule.operands[0][first][0])
        shards = context.mesh.size(axes)
        held, wanted = -(-operand[first] // shards), -(-result[then] // shards)
        held *= math.prod(operand[d] for d in group.before[1:])
        wanted *= math.prod(result[d] for d in group.after[1:])
        fetch = None
        if held != wanted and _is_alone(context, group):
            size = math.prod(operand[d] for d in group.before)
            starts = tuple(shard * wanted for shard in range(shards))
            fetch = Fetch(size, held, starts, wanted)
        found.append((group, axes, fetch))
    return found


def _is_alone(context: LocalContext, group: Group) -> bool:
    """Whether no factor of a group but the leading one is sharded."""
    dims = [context.rule.operands[0][d] for d in group.before]
    others = [f for dim in dims for f in dim][1:]
    return not any(context.axes(f) for f in others)


def _flat_sizes(context: LocalContext, runs: Sequence[Any]) -> list[int]:
    """Local sizes with the dims of each group that exchanges joined, and those of size one gone."""
    local = context.local_shape(0)
    sizes = []
    for group, _, fetch in runs:
        joined = math.prod(local[d] for d in group.before)
        sizes += [local[d] for d in group.before] if fetch is None else [joined]
    return sizes


def _positions(runs: Sequence[Any]) -> Iterator[int]:
    """Where each group begins in the flat sizes."""
    position = 0
    for group, _, fetch in runs:
        yield position
        position += len(group.before) if fetch is None else 1


def _exchanges(context: LocalContext) -> list[Exchange] | None:
    runs = _runs(context)
    fetches = [
        (at, fetch)
        for at, (_, _, fetch) in zip(_positions(runs), runs, strict=True)
        if fetch is not None
    ]
    return exchanges(fetches, _flat_sizes(context, runs), context.itemsize(0))


def _reshape_local(context: LocalContext, operand: Any) -> list[Any]:
    runs = _runs(context)
    if any(fetch is not None for _, _, fetch in runs):
        operand = lax.reshape(operand, _flat_sizes(context, runs))
        for at, (_, axes, fetch) in zip(_positions(runs), runs, strict=True):
            if fetch is not None:
                operand = fetch_rows(operand, at, axes, context.mesh, fetch)
    return context.bind(operand, new_sizes=context.local_result_shape(0))
