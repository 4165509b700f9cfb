"""Hand-written `jax.shard_map` regions and other meshes in a program, in the words of its mesh.

A region becomes one `manual_region` equation between hints: its operands are to lie as `in_specs`
says, and its results as `out_specs`. A sharding over another mesh of the same devices becomes a
`PartitionSpec` of sub-axes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from meshwise._jax.bodies import constraint_of
from meshwise._jax.hints import hint_p
from meshwise._jax.jaxprs import (
    JaxprEqn,
    Primitive,
    Var,
    bodies_of,
    new_eqn,
    opened,
    source_summary,
    with_bodies,
    with_each,
)
from meshwise._jax.manual import region_of

region_p = Primitive("manual_region")
region_p.multiple_results = True

# For each axis of a mesh the axes of the program's mesh that it is; None where it is nothing there.
Spelled = Callable[[Any], Mapping[str, tuple[str, ...]] | None]


def spell(sharding: Any, axes_of: Spelled) -> Any:
    """A sharding over another mesh as a spec of the program's axes; others as they are."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return sharding
    axes = axes_of(sharding.mesh)
    if axes is None or is_same(axes):
        return sharding
    return _spelled(sharding.spec, axes)


def is_same(axes: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the axes of a mesh are the program's own."""
    return all(own == (name,) for name, own in axes.items())


def _spelled(spec: Any, axes: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    def entry(e: Any) -> Any:
        if e is None or e is PartitionSpec.UNCONSTRAINED:
            return e
        return tuple([s for a in (e if isinstance(e, tuple) else (e,)) for s in axes[a]])

    return PartitionSpec(*map(entry, spec))


def as_regions(jaxpr: Any, axes_of: Spelled, devices: int) -> Any:
    """A jaxpr, open or closed, with its regions as equations between hints, meshes spelled out.

    A region over fewer than all `devices` leaves axes alone: over these its operands and results
    may be sharded as well.
    """

    def spelled_out(eqn: JaxprEqn) -> list[JaxprEqn]:
        if eqn.primitive.name == "shard_map":
            axes = axes_of(eqn.params["mesh"])
            return [eqn] if axes is None else _between_hints(eqn, axes, devices)
        inside = with_bodies(eqn, lambda body: as_regions(body, axes_of, devices))
        return [_spelled_out(inside, axes_of)]

    return with_each(jaxpr, spelled_out)


_SHARDINGS = ("in_shardings", "out_shardings", "in_specs", "out_specs")


def _spelled_out(eqn: JaxprEqn, axes_of: Spelled) -> JaxprEqn:
    """An equation that names shardings, over the program's own axes."""
    params = dict(eqn.params)
    if eqn.primitive is hint_p or constraint_of(eqn) is not None:
        spelled = spell(constraint_of(eqn) or params.get("sharding"), axes_of)
        if isinstance(spelled, PartitionSpec):
            said = {**params, "sharding": spelled} if eqn.primitive is hint_p else None
            params = said or {"sharding": spelled, "reshards": True}
            return new_eqn(hint_p, eqn.invars, eqn.outvars, params, eqn)
        return eqn
    for name in _SHARDINGS:
        if isinstance(params.get(name), tuple):
            params[name] = tuple([spell(s, axes_of) for s in params[name]])
    return eqn if params == eqn.params else eqn.replace(params=params)


def _between_hints(
    eqn: JaxprEqn, axes: Mapping[str, tuple[str, ...]], devices: int
) -> list[JaxprEqn]:
    region = region_of(eqn)
    covers = math.prod(size for _, size in region.axes) == devices
    rest = None if covers else PartitionSpec.UNCONSTRAINED
    before: list[JaxprEqn] = []
    operands: list[Any] = []
    for atom, dims in zip(eqn.invars, region.operands, strict=True):
        if isinstance(atom, Literal):
            operands.append(atom)
            continue
        operands.append(Var(atom.aval))
        before.append(_hint(eqn, atom, operands[-1], dims, axes, rest))
    results = [Var(v.aval) for v in eqn.outvars]
    names = tuple((a, tuple(own)) for a, own in axes.items())
    params = {"region": region, "names": names}
    made = eqn.replace(primitive=region_p, invars=operands, outvars=results, params=params)
    after = [
        _hint(eqn, v, out, dims, axes, rest)
        for v, out, dims in zip(results, eqn.outvars, region.results, strict=True)
    ]
    return [*before, made, *after]


def _hint(
    eqn: JaxprEqn,
    atom: Any,
    out: Var,
    dims: Sequence[tuple[str, ...]],
    axes: Mapping[str, tuple[str, ...]],
    rest: Any,
) -> JaxprEqn:
    spec = PartitionSpec(
        *[tuple([s for a in own for s in axes[a]]) if own else rest for own in dims]
    )
    return new_eqn(hint_p, [atom], [out], {"sharding": spec, "reshards": True}, eqn)


def has_region(jaxpr: Any) -> bool:
    """Whether a region is among the equations of a jaxpr, bodies included."""
    return next(_regions(jaxpr), None) is not None


def regions_in(jaxpr: Any) -> list[str]:
    """Where the regions of a jaxpr stand, bodies included."""
    return [f"that at {source_summary(eqn)}" for eqn in _regions(jaxpr)]


def axis_sizes_in(jaxpr: Any) -> dict[str, int]:
    """The sizes of the axes that the regions of a jaxpr are over."""
    meshes = [eqn.params["mesh"] for eqn in _regions(jaxpr) if "mesh" in eqn.params]
    return {axis: size for mesh in meshes for axis, size in mesh.shape.items()}


def _regions(jaxpr: Any) -> Iterator[JaxprEqn]:
    for eqn in opened(jaxpr).eqns:
        if eqn.primitive is region_p or eqn.primitive.name == "shard_map":
            yield eqn
        else:
            for body in bodies_of(eqn):
                yield from _regions(body)
