"""From the moves of a search to the steps of a plan, each with its bytes."""

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Reduction, Sharding, local_shape, unreduced
from meshwise.reshard.canonical import Naming
from meshwise.reshard.moves import Move
from meshwise.reshard.plan import Part, Reshard, Step, StepKind
from meshwise.reshard.rounds import plan_rounds
from meshwise.reshard.tiles import tiles_over
from meshwise.rules.halo import realignment

# From here on an array is not put in order twice to save a launch: it is larger than a cache.
LARGE_BYTES = 1 << 15


def steps_of(path: Sequence[Move], naming: Naming, asked: Reshard) -> tuple[Step, ...]:
    """Steps of a path of moves: moves that share a launch become one."""
    _, itemsize, mesh, source, target, _ = asked
    steps: list[Step] = []
    shape = naming.ends.whole
    before = replace(source, dims=naming.source)
    before_shape = local_shape(shape, before, mesh)
    for move in path:
        dims, blocks, terms, _ = move.state
        left = (*naming.axes(terms), *target.unreduced)
        after = unreduced(naming.all_dims(dims), left, source.reduction)
        after_shape = naming.local_shape(blocks)
        parts = tuple(naming.part(part) for part in move.parts)
        if steps and move.joins:
            last = steps.pop()
            before, before_shape = last.source, last.source_shape
            parts = _join(last.parts, parts)
        steps.append(
            _step(
                move.kind, parts, before, after, (before_shape, after_shape), shape, itemsize, mesh
            )
        )
        before, before_shape = after, after_shape
    return tuple(steps)


def gathered_in_turn(steps: Sequence[Step], itemsize: int, mesh: Mesh) -> tuple[Step, ...]:
    """The steps, where a large all_gather of several dims is one of each dim, the leading one last.

    One collective brings blocks, that must be put in order in a second array of that size; the
    last of several writes rows where they belong.
    """
    found: list[Step] = []
    for step in steps:
        several = step.kind is StepKind.ALL_GATHER and len(step.parts) > 1
        if not several or math.prod(step.target_shape) * itemsize < LARGE_BYTES:
            found.append(step)
            continue
        dims, before = list(step.source.dims), list(step.source_shape)
        for part in sorted(step.parts, key=lambda part: -(part.dim or 0)):
            assert part.dim is not None, "a dim is gathered"
            source = replace(step.source, dims=tuple(dims)), tuple(before)
            dims[part.dim] = dims[part.dim][: len(dims[part.dim]) - len(part.axes)]
            before[part.dim] *= mesh.size(part.axes)
            if not dims[part.dim]:
                before[part.dim] = step.target_shape[part.dim]
            target = replace(step.source, dims=tuple(dims)), tuple(before)
            out, group = math.prod(source[1]) * itemsize, mesh.size(part.axes)
            sent = wire_bytes(CollectiveKind.ALL_GATHER, out, out * group, group)
            ends = source[0], target[0], source[1], target[1]
            found.append(Step(step.kind, (part,), *ends, sent, 1))
    return tuple(found)


def _step(
    kind: StepKind,
    parts: tuple[Part, ...],
    source: Sharding,
    target: Sharding,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    global_shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
) -> Step:
    """One step with its wire bytes, padding included."""
    before, after = shapes
    group = mesh.size(axis for part in parts for axis in part.axes)
    operand = math.prod(before) * itemsize
    collective = kind.collective
    if collective is None:
        return Step(kind, parts, source, target, before, after, 0, 0)
    if kind is StepKind.REALIGN:
        dim = parts[0].dim
        assert dim is not None, "a dim is realigned"
        shards = mesh.size(source.dims[dim])
        fetch = realignment(global_shape[dim], shards, before[dim], after[dim])
        sent = fetch.exchange(operand // before[dim])
        return Step(kind, parts, source, target, before, after, sent.wire_bytes, sent.launches)
    if kind is StepKind.ROUNDS:
        axes = parts[0].axes
        ends = (
            tiles_over(axes, global_shape, b, s, mesh)
            for s, b in ((source, before), (target, after))
        )
        rounds = plan_rounds(*ends)
        assert rounds is not None, "the search has found them"
        sizes = [math.prod(r.shape) * itemsize for r in rounds if r.is_sent]
        return Step(kind, parts, source, target, before, after, sum(sizes), len(sizes), rounds)
    if kind in (StepKind.ALL_TO_ALL, StepKind.REDUCE_SCATTER):
        padded = list(before)
        for part in parts:
            assert part.to_dim is not None, "a dim gains the axes"
            padded[part.to_dim] = after[part.to_dim]
        for part in parts:
            assert part.to_dim is not None, "a dim gains the axes"
            padded[part.to_dim] *= mesh.size(part.axes)
        operand = math.prod(padded) * itemsize
    sent = wire_bytes(collective, operand, operand * group, group)
    if kind is StepKind.ALL_REDUCE and source.reduction is Reduction.PROD:
        sent = wire_bytes(CollectiveKind.ALL_GATHER, operand, operand * group, group)
    return Step(kind, parts, source, target, before, after, sent, 1)


def _join(first: tuple[Part, ...], second: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts of two steps as one: gathered axes go from minor to major, added ones the other way."""
    parts = list(first)
    for new in second:
        for i, old in enumerate(parts):
            if (old.dim, old.to_dim) == (new.dim, new.to_dim):
                axes = new.axes + old.axes if new.to_dim is None else old.axes + new.axes
                parts[i] = Part(axes, new.dim, new.to_dim)
                break
        else:
            parts.append(new)
    return tuple(parts)
