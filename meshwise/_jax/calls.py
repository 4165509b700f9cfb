"""The call primitive: what `mw.jit` is to JAX's transformations.

A function under `mw.jit` that is called with traced values becomes one `mw_call` equation, as a
function under `jax.jit` becomes one `jit` equation. It is differentiated, batched and split into
known and unknown parts as a whole; each result is an `mw_call` again, so that every program that
runs was partitioned by meshwise. Its parameters: `jaxpr` (closed, without constants, over Auto
axes), `in_specs` and `out_specs` (one a leaf, None where completed), `witness`, a jaxpr that names
the mesh's devices (an enclosing `jax.jit` looks for devices in the jaxprs among an equation's
parameters), and `runner`, a hashable object with

- `mesh`: the mesh to run on;
- `run(jaxpr, in_specs, out_specs, args)`: partition and run on devices;
- `function(jaxpr, in_specs, out_specs)`: the partitioned program as a traceable function;
- `result_shardings(jaxpr, in_specs, out_specs)`: where its results lie, as far as types over the
  mesh can say it.

Where axes of an Explicit mesh are part of types, results are typed by where they lie.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.util import weakref_lru_cache as _weakref_lru_cache
from jax.extend.core import ClosedJaxpr, Primitive
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise._jax.explicit import auto_mesh, explicit_type, is_explicit, plain_type
from meshwise._jax.hints import batched_spec

mw_call_p = Primitive("mw_call")
mw_call_p.multiple_results = True

Specs = tuple[Any, ...]


@lru_cache(maxsize=64)
def witness_of(mesh: Any) -> ClosedJaxpr | None:
    """A jaxpr with a constraint to some mesh in it; None for a mesh without devices."""
    if isinstance(mesh, AbstractMesh):
        return None
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    on_mesh = NamedSharding(jax.sharding.Mesh(mesh.devices, mesh.axis_names, auto), PartitionSpec())
    with jax.sharding.use_abstract_mesh(on_mesh.mesh.abstract_mesh):
        return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, on_mesh))(0.0)


def call(
    closed: ClosedJaxpr,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    rest: dict[str, Any],
    args: Sequence[Any],
) -> list[Any]:
    """Bind a closed jaxpr to traced (or concrete) arguments as one call.

    `rest` are the parameters that every call made of this one keeps: `runner` and `witness`.
    """
    runner = rest["runner"]
    jaxpr = without_consts(closed)
    args = [*closed.consts, *args]
    in_specs = (None,) * len(closed.consts) + tuple(in_specs)
    types = [jax.typeof(a) for a in args]
    mesh = explicit_mesh_of(types)
    if mesh is not None:
        in_specs = tuple([s or spec_of_type(a, mesh) for s, a in zip(in_specs, types, strict=True)])
        out_types = result_types(runner, jaxpr, in_specs, tuple(out_specs), mesh)
        out_specs = [s.spec for s in out_types]
    return mw_call_p.bind(*args, jaxpr=jaxpr, in_specs=in_specs, out_specs=tuple(out_specs), **rest)


def spec_of_type(aval: Any, mesh: Any) -> PartitionSpec | None:
    """What a type says over the axes of a mesh; None where it says nothing."""
    theirs = aval.sharding.mesh if hasattr(aval, "sharding") else mesh
    if not is_explicit(theirs) or not _same_axes(theirs, mesh):
        return None
    return aval.sharding.spec


def _same_axes(theirs: Any, ours: Any) -> bool:
    return (theirs.axis_names, theirs.axis_sizes) == (ours.axis_names, ours.axis_sizes)


@_weakref_lru_cache
def without_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The constants as leading inputs; the same object for the same jaxpr, as caches need."""
    return ClosedJaxpr(_pe.convert_constvars_jaxpr(closed.jaxpr), ())


@mw_call_p.def_impl
def _impl(
    *args: Any, jaxpr: ClosedJaxpr, in_specs: Specs, out_specs: Specs, runner: Any, **_: Any
) -> Any:
    return runner.run(jaxpr, in_specs, out_specs, args)


@mw_call_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any, jaxpr: ClosedJaxpr, in_specs: Specs, out_specs: Specs, runner: Any, **_: Any
) -> Any:
    mesh = explicit_mesh_of(avals)
    if mesh is None:
        return [plain_type(a) for a in jaxpr.out_avals], jaxpr.effects
    shardings = result_types(runner, jaxpr, in_specs, out_specs, mesh)
    typed = [explicit_type(a, s) for a, s in zip(jaxpr.out_avals, shardings, strict=True)]
    return typed, jaxpr.effects


def explicit_mesh_of(avals: Sequence[Any]) -> Any:
    """The abstract Explicit mesh of the context, or of some types; None where there is none."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [a.sharding.mesh for a in avals if hasattr(a, "sharding")]
    return next((m for m in meshes if is_explicit(m)), None)


def result_types(
    runner: Any, jaxpr: ClosedJaxpr, in_specs: Specs, out_specs: Specs, mesh: Any
) -> list[NamedSharding]:
    """What the types of a call's results say over an Explicit mesh; of another mesh nothing."""
    if not _same_axes(runner.mesh, mesh):
        specs = [PartitionSpec()] * len(jaxpr.out_avals)
    else:
        specs = [s.spec for s in runner.result_shardings(jaxpr, in_specs, out_specs)]
    ranks = [len(a.shape) for a in jaxpr.out_avals]
    whole = [(*s, *[None] * (rank - len(s))) for s, rank in zip(specs, ranks, strict=True)]
    return [NamedSharding(mesh, PartitionSpec(*s)) for s in whole]


def _lowering(
    ctx: Any,
    *values: Any,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    runner: Any,
    **_: Any,
) -> Any:
    types = [a.sharding if is_explicit(a.sharding.mesh) else None for a in ctx.avals_out]

    def lowered(*args: Any) -> list[Any]:
        outs = runner.function(jaxpr, in_specs, out_specs)(args)
        return [
            o if t is None else jax.sharding.reshard(o, t) for o, t in zip(outs, types, strict=True)
        ]

    return _mlir.lower_fun(lowered, multiple_results=True)(ctx, *values)


_mlir.register_lowering(mw_call_p, _lowering)


def _batch(
    axis_data: Any,
    values: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    runner: Any,
    **rest: Any,
) -> tuple[list[Any], Sequence[Any]]:
    """One call for all: the mapped dim is sharded over `spmd_axis_name`, else completed."""
    axis = axis_data.spmd_name or axis_data.explicit_mesh_axis
    with jax.sharding.use_abstract_mesh(auto_mesh(runner.mesh)):
        batched, dims_out = _batching.batch_jaxpr2(jaxpr, axis_data, tuple(dims))
    outs = mw_call_p.bind(
        *values,
        jaxpr=batched,
        in_specs=tuple([batched_spec(s, d, axis) for s, d in zip(in_specs, dims, strict=True)]),
        out_specs=tuple(
            [batched_spec(s, d, axis) for s, d in zip(out_specs, dims_out, strict=True)]
        ),
        runner=runner,
        **rest,
    )
    return outs, dims_out


_batching.fancy_primitive_batchers[mw_call_p] = _batch
