"""Regions that are written by hand for each device (`jax.shard_map`): they stay as they are.

An axis of the region is a factor, major in every dim that the region's specs shard over it; what is
left of each dim is whole. Where a factor is split over just its axis, operands and results lie as
the specs say. Where it is not, each device takes its block of an operand that it holds whole, and
results are gathered: so a region may stand wherever any other operator may.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from meshwise import _jax
from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.program import itemsize_of
from meshwise.rules.factoring import Dim, Factoring
from meshwise.rules.registry import (
    Application,
    Exchange,
    LocalContext,
    OpRule,
    describe_all,
    register,
)


@register("manual_region")
def _region_rule(application: Application) -> OpRule:
    region: _jax.Region = application.params["region"]
    sizes = {name: size for name, size in region.axes if size > 1}
    factoring = Factoring()
    factors = {name: factoring.new(size, "permute") for name, size in sizes.items()}

    def dims(shape: Sequence[int], spec: Sequence[Sequence[str]]) -> list[Dim]:
        found = []
        for size, own in zip(shape, spec, strict=True):
            rest = size // math.prod(sizes[a] for a in own)
            majors = tuple(f for a in own for f in factors[a])
            found.append((*majors, *factoring.new(rest, "whole")) if size else ())
        return found

    operands = [
        dims(aval.shape, spec)
        for aval, spec in zip(application.operands, region.operands, strict=True)
    ]
    results = [
        dims(aval.shape, spec)
        for aval, spec in zip(application.results, region.results, strict=True)
    ]
    body = describe_all(_jax.opened(region.body).eqns)
    return OpRule(
        factoring.rule(operands, results),
        local=partial(_local, region),
        exchanges=partial(_exchanges, region),
        masked=(),
        flops=math.prod(sizes.values()) * sum(rule.flops for rule in body),
    )


def _names(context: LocalContext) -> _jax.Names:
    """The program's axes that each axis of the region is."""
    known = context.mesh.sub_axes
    names = {
        name: tuple([sub for a in axes for sub in known.get(a, (a,))])
        for name, axes in context.params["names"]
    }
    return _jax.Names(names, context.mesh.names)


def _held(region: _jax.Region, context: LocalContext) -> frozenset[str] | None:
    """The region's axes that its factors are split over; None where one is split otherwise."""
    names = _names(context)
    held = set()
    tensors = [*zip(region.operands, context.rule.operands, strict=True)]
    tensors += zip(region.results, context.rule.results, strict=True)
    for spec, dims in tensors:
        for own, dim in zip(spec, dims, strict=True):
            for name, factor in zip(own, dim, strict=False):
                axes = context.axes(factor)
                if axes == names[name]:
                    held.add(name)
                elif axes:
                    return None
    return frozenset(held)


def _exchanges(region: _jax.Region, context: LocalContext) -> list[Exchange] | None:
    """Gathers of the results along what is not split; the region's own are the same anyway."""
    held = _held(region, context)
    if held is None:
        return None
    names, found = _names(context), []
    for result, spec in enumerate(region.results):
        group = context.mesh.size(s for own in spec for a in own if a not in held for s in names[a])
        if group > 1:
            size = math.prod(context.result_shape(result))
            size *= itemsize_of(context.eqn.outvars[result])
            sent = wire_bytes(CollectiveKind.ALL_GATHER, size // group, size, group)
            found.append(Exchange(CollectiveKind.ALL_GATHER, sent))
    return found


def _local(region: _jax.Region, context: LocalContext, *operands: Any) -> Sequence[Any]:
    held = _held(region, context) or frozenset()
    return _jax.run_region(region, operands, _names(context), held)
