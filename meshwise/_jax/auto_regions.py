"""Functions of ours inside of what is traced over Explicit axes: run over Auto ones.

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
from meshwise._jax.specs import axes_of
from meshwise._jax.tracing import over_auto_axes, trace_function


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
    axes = tuple(a for a, t in _axes(mesh) if t == AxisType.Explicit)
    shardings = [_said_of(x, mesh) for x in jax.tree.leaves(like)]
    run: Any = jax.sharding.auto_axes(
        lambda consts, *given: _core.eval_jaxpr(plain.jaxpr, consts, *given),
        axes=axes,
        out_sharding=shardings,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.tree.unflatten(out_tree, run(list(plain.consts), *captured, *leaves))


def _said_of(x: Any, mesh: AbstractMesh) -> NamedSharding:
    """How a value's type says that it lies; whole, where it says nothing."""
    aval = jax.typeof(x)
    spec = PartitionSpec() if type_mesh(aval).empty else aval.sharding.spec
    return NamedSharding(mesh, spec)


def typed_as(x: Any, *entries: Any, instead_of: int = 0) -> NamedSharding | None:
    """The sharding of a type, with other entries instead of its first; None where it has none."""
    aval = jax.typeof(x)
    if not is_explicit(type_mesh(aval)):
        return None
    said = aval.sharding.spec.partitions
    is_there = isinstance(x, jax.Array) and not isinstance(x, _core.Tracer)
    mesh = x.sharding.mesh if is_there else type_mesh(aval)  # outside of a trace, with its devices
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


def _axes(mesh: AbstractMesh) -> list[tuple[str, AxisType]]:
    return list(zip(mesh.axis_names, mesh.axis_types, strict=True))
