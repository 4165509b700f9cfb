"""Words of ours inside of what is traced over Explicit axes.

There types say how values lie, and what is done to a value has to say how its result does. A
function that is free to move values about runs over the same axes as Auto ones instead, as under
`jax.sharding.auto_axes`, and its results have the types that it is to give. Other than there it
may close over values whose types have axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise._jax.explicit import is_explicit, plain_jaxpr, plain_type, struct_of, type_mesh
from meshwise._jax.hints import hint_p
from meshwise._jax.specs import axes_of
from meshwise._jax.tracing import over_auto_axes, trace_function, with_mesh


def run_over_auto_axes(function: Callable[..., Any], args: Sequence[Any], like: Any) -> Any:
    """What a function makes of trees of arrays; results lie as the leaves of a tree `like` them.

    Where no type of an argument says how it lies it is an ordinary call.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    mesh = _typed_mesh(leaves)
    if mesh is None:
        return function(*args)
    leaves = [jax.numpy.asarray(x) for x in leaves]

    def call(given: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        return jax.tree.unflatten(tree, given), {}

    structs = [struct_of(plain_type(jax.typeof(x))) for x in leaves]
    with over_auto_axes(mesh):
        closed, captured, out_tree = trace_function(function, call, structs, (), ())
    plain = plain_jaxpr(closed)
    axes = tuple(a for a, t in _kinds(mesh) if t == AxisType.Explicit)
    shardings = [_said_of(x, mesh) for x in jax.tree.leaves(like)]
    run: Any = jax.sharding.auto_axes(
        lambda consts, *given: _core.eval_jaxpr(plain.jaxpr, consts, *given),
        axes=axes,
        out_sharding=shardings,
    )
    with with_mesh(mesh):
        return jax.tree.unflatten(out_tree, run(list(plain.consts), *captured, *leaves))


def hinted(x: Any, spec: Any, **params: Any) -> Any:
    """A traced value behind a hint. Where its type says how it lies it says the hint from there on.

    A hint that no type can say leaves it as it is: what does not fit, or divide, or is of another
    mesh.
    """
    x = jax.numpy.asarray(x)
    target = typed_target(x, spec)
    if target is None:
        return hint_p.bind(x, sharding=spec, **params)
    if params.get("max_bytes") is not None:  # a bound on the move, which comes first then
        return jax.sharding.reshard(hint_p.bind(x, sharding=spec, **params), target)
    return hint_p.bind(jax.sharding.reshard(x, target), sharding=spec, **params)


def typed_target(x: Any, spec: Any) -> NamedSharding | None:
    """What the type of a value behind a hint says of Explicit axes; None where it says nothing.

    Dims that the hint leaves open stay as they are, but for axes that it wants elsewhere.
    """
    aval = jax.typeof(x)
    mesh, said = type_mesh(aval), _on_same_mesh(type_mesh(aval), spec)
    if not is_explicit(mesh) or not isinstance(said, PartitionSpec) or len(said) > aval.ndim:
        return None
    entries = _typed_entries(aval, said)
    if entries is None:
        return None
    shards = [math.prod(mesh.shape[a] for a in axes) for axes in entries]
    if any(size % count for size, count in zip(aval.shape, shards, strict=True)):
        return None
    plain = [axes[0] if len(axes) == 1 else axes or None for axes in entries]
    return NamedSharding(mesh, PartitionSpec(*plain))


def _on_same_mesh(mesh: AbstractMesh, spec: Any) -> Any:
    """The bare spec of a hint; None where it is of another mesh."""
    if not isinstance(spec, NamedSharding):
        return spec
    return spec.spec if _sizes(mesh) == _sizes(spec.mesh) else None


def is_in_no_type(x: Any, spec: Any) -> bool:
    """Whether types say how a value lies, and none can say a spec, which fits it else."""
    mesh = type_mesh(jax.typeof(x))
    is_asked = is_explicit(mesh) and _on_same_mesh(mesh, spec) is not None
    return is_asked and typed_target(x, spec) is None


def _typed_entries(aval: Any, said: PartitionSpec) -> list[tuple[str, ...]] | None:
    """The Explicit axes of each dim; None where it names others than its mesh has, or one twice."""
    kinds = dict(_kinds(type_mesh(aval)))
    asked = axes_of(said, aval.ndim)
    named = [a for axes in asked if axes is not PartitionSpec.UNCONSTRAINED for a in axes]
    if len({*named}) < len(named) or not {*named} <= {*kinds}:
        return None
    entries = [
        tuple(a for a in typed if a not in named) if axes is PartitionSpec.UNCONSTRAINED else axes
        for axes, typed in zip(asked, axes_of(aval.sharding.spec, aval.ndim), strict=True)
    ]
    return [tuple(a for a in axes if kinds[a] == AxisType.Explicit) for axes in entries]


def _said_of(x: Any, mesh: AbstractMesh) -> NamedSharding:
    """How a value's type says that it lies; whole, where it says nothing."""
    aval = jax.typeof(x)
    spec = PartitionSpec() if type_mesh(aval).empty else aval.sharding.spec
    return NamedSharding(mesh, spec)


def typed_as(x: Any, *entries: Any, instead_of: int = 0) -> NamedSharding | None:
    """The sharding of a type, with other entries instead of its first; None where it has none."""
    aval: Any = jax.typeof(x)
    if not is_explicit(type_mesh(aval)):
        return None
    said = aval.sharding.spec.partitions
    lies = None if isinstance(x, _core.Tracer) else getattr(x, "sharding", None)
    mesh = getattr(lies, "mesh", type_mesh(aval))  # outside of a trace, with its devices
    return NamedSharding(mesh, PartitionSpec(*entries, *said[instead_of:]))


def typed_axes(x: Any, size: int) -> tuple[str, ...] | None:
    """The axes of the first dim in a value's type, for a dim of another size if they divide it."""
    aval = jax.typeof(x)
    if not is_explicit(type_mesh(aval)):
        return None
    axes = axes_of(aval.sharding.spec, aval.ndim)[0]
    return axes if size % math.prod(type_mesh(aval).shape[a] for a in axes) == 0 else None


def _typed_mesh(leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with Explicit axes that types speak of; None where they speak of none."""
    meshes = (type_mesh(jax.typeof(x)) for x in leaves)
    return next((m for m in meshes if is_explicit(m)), None)


def _sizes(mesh: Any) -> list[tuple[str, int]]:
    return list(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def _kinds(mesh: AbstractMesh) -> list[tuple[str, AxisType]]:
    return list(zip(mesh.axis_names, mesh.axis_types, strict=True))
