"""What a device runs in a branch that others do not take: without permutes.

XLA on CPU lets all devices of a program meet for a collective-permute, also those that have nothing
to do with it, and so do those in other branches: they wait for each other, or take what is meant
for others. Collectives in groups wait for their own group alone.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise._jax.groups import named_axes
from meshwise._jax.jaxprs import JaxprEqn, in_place_of, with_bodies, with_each
from meshwise._jax.tracing import make_jaxpr_over_axes


def without_permutes(jaxpr: Any, sizes: Mapping[str, int]) -> Any:
    """The same per-device jaxpr, its permutes gathers of which each device takes one part.

    `sizes` are those of the axes, in the mesh's order. Itself where there are none. A gather over n
    devices sends n - 1 times as much.
    """

    def change(eqn: JaxprEqn) -> list[JaxprEqn]:
        eqn = with_bodies(eqn, lambda body: without_permutes(body, sizes))
        return _gathered(eqn, sizes) if eqn.primitive is lax.ppermute_p else [eqn]

    return with_each(jaxpr, change)


def _gathered(eqn: JaxprEqn, sizes: Mapping[str, int]) -> list[JaxprEqn]:
    named = {*named_axes(eqn)}
    axes = tuple([a for a in sizes if a in named])  # pairs count in the mesh's order
    count = int(np.prod([sizes[a] for a in axes]))
    source_of: dict[int, int] = {to: source for source, to in eqn.params["perm"]}

    def received(*operands: Any) -> list[Any]:
        place = lax.axis_index(axes)
        parts = [lax.all_gather(x, axes) for x in operands]
        source = _source(place, source_of, count)
        found = [lax.dynamic_index_in_dim(x, source, 0, keepdims=False) for x in parts]
        for device in {*range(count)} - {*source_of}:  # nobody sends anything to these
            is_it = lax.eq(place, np.int32(device))
            found = [lax.select(is_it, lax.full_like(x, 0), x) for x in found]
        return found

    avals: list[Any] = [a.aval for a in eqn.invars]
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    closed = make_jaxpr_over_axes(received, [(a, sizes[a]) for a in axes], structs)
    return in_place_of(eqn, closed, eqn.invars)


def _source(place: Any, source_of: Mapping[int, int], count: int) -> Any:
    """The device of which this one, at a place, takes what it sends."""
    steps = {(source - to) % count for to, source in source_of.items()}
    if len(steps) == 1:
        return lax.rem(lax.add(place, np.int32(*steps)), np.int32(count))
    found = place
    for to, source in source_of.items():
        found = lax.select(lax.eq(place, np.int32(to)), np.int32(source), found)
    return found
