"""The call primitive: what `mw.jit` is to JAX's transformations.

A function under `mw.jit` that is called with traced values becomes one `mw_call` equation, as a
function under `jax.jit` becomes one `jit` equation. It is differentiated, batched and split into
known and unknown parts as a whole; each result is an `mw_call` again, so that every program that
runs was partitioned by meshwise. Its parameters: `jaxpr` (closed, without constants), `in_specs`
and `out_specs` (one a leaf, None where completed), `witness`, a jaxpr that names the mesh's devices
(an enclosing `jax.jit` looks for devices in the jaxprs among an equation's parameters), and
`runner`, a hashable object with

- `name`: what errors call the function;
- `mesh`: the mesh to run on;
- `run(jaxpr, in_specs, out_specs, args)`: partition and run on devices;
- `function(jaxpr, in_specs, out_specs)`: the partitioned program as a traceable function.

A jaxpr over Explicit axes is typed, and so are results: what JAX's transformations make of it is
what they make of a function under `jax.jit`, in the same context. Others are made over Auto axes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any

import jax
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.util import weakref_lru_cache as _weakref_lru_cache
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise._jax.bodies import is_of_numbers, without_hints_in
from meshwise._jax.dispatch import InternalNanError, raise_where_found
from meshwise._jax.explicit import auto_mesh, is_explicit, is_typed, plain_type
from meshwise._jax.hints import batched_spec
from meshwise._jax.jaxprs import with_each, without_references
from meshwise._jax.settings import as_wide_as
from meshwise._jax.tracing import with_mesh
from meshwise.errors import HintError, message

mw_call_p = Primitive("mw_call")
mw_call_p.multiple_results = True

Specs = tuple[Any, ...]


def witness_of(mesh: Any) -> ClosedJaxpr | None:
    """A jaxpr with a constraint to some mesh in it, of the line that calls here.

    None for a mesh without devices.
    """
    if isinstance(mesh, AbstractMesh):
        return None
    here = _source_info_util.current()
    return with_each(_witness_of(mesh), lambda eqn: [eqn.replace(source_info=here)])


@lru_cache(maxsize=64)
def _witness_of(mesh: Any) -> ClosedJaxpr:
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    on_mesh = NamedSharding(jax.sharding.Mesh(mesh.devices, mesh.axis_names, auto), PartitionSpec())
    with with_mesh(on_mesh.mesh.abstract_mesh):
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
    jaxpr = without_consts(closed)
    args = [*closed.consts, *args]
    in_specs = (None,) * len(closed.consts) + tuple(in_specs)
    # First the witness: JAX reads results in the first mesh that it finds in the parameters.
    return mw_call_p.bind(*args, **rest, jaxpr=jaxpr, in_specs=in_specs, out_specs=tuple(out_specs))


def setting_of(jaxpr: ClosedJaxpr, runner: Any) -> AbstractContextManager[Any]:
    """What jaxprs are made of one in: its types', or over Auto axes; and numbers as wide."""
    setting = ExitStack()
    setting.enter_context(as_wide_as(jaxpr))
    if not is_typed((*jaxpr.in_avals, *jaxpr.out_avals)):
        setting.enter_context(with_mesh(auto_mesh(runner.mesh)))
    return setting


@_weakref_lru_cache
def without_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The constants as leading inputs, and no references of its own.

    The same object for the same jaxpr, as caches need.
    """
    return without_references(ClosedJaxpr(_pe.convert_constvars_jaxpr(closed.jaxpr), ()))


@mw_call_p.def_impl
def _impl(
    *args: Any, jaxpr: ClosedJaxpr, in_specs: Specs, out_specs: Specs, runner: Any, **_: Any
) -> Any:
    try:
        return runner.run(jaxpr, in_specs, out_specs, args)
    except InternalNanError as found:
        raise_where_found(found, jaxpr_as_fun(without_hints_in(jaxpr)), args, {})


@mw_call_p.def_effectful_abstract_eval
def _abstract_eval(*_: Any, jaxpr: ClosedJaxpr, **__: Any) -> Any:
    return [a if is_typed([a]) else plain_type(a) for a in jaxpr.out_avals], jaxpr.effects


def _lowering(
    ctx: Any,
    *values: Any,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    runner: Any,
    **_: Any,
) -> Any:
    if is_of_numbers(jaxpr):
        whole = jaxpr_as_fun(without_hints_in(jaxpr))
        return _mlir.lower_fun(whole, multiple_results=True)(ctx, *values)
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
    """One call for all: of what is hinted the mapped dim is over `spmd_axis_name`, or open."""
    _refuse_other_axes(axis_data.spmd_name or (), runner)
    axis = axis_data.spmd_name or axis_data.explicit_mesh_axis
    with setting_of(jaxpr, runner):
        batched, dims_out = _batching.batch_jaxpr2(jaxpr, axis_data, tuple(dims))
    outs = mw_call_p.bind(
        *values,
        **rest,
        jaxpr=batched,
        in_specs=tuple([batched_spec(s, d, axis) for s, d in zip(in_specs, dims, strict=True)]),
        out_specs=tuple(
            [batched_spec(s, d, axis) for s, d in zip(out_specs, dims_out, strict=True)]
        ),
        runner=runner,
    )
    return outs, dims_out


_batching.fancy_primitive_batchers[mw_call_p] = _batch


def _refuse_other_axes(axes: Sequence[str], runner: Any) -> None:
    """An error where `jax.vmap` is told to shard over an axis that the mesh has not."""
    names = runner.mesh.axis_names
    if not set(axes) <= set(names):
        raise HintError(
            message(
                f"{runner.name} is mapped over an axis that its mesh has not",
                [f"spmd_axis_name={axis!r}" for axis in axes if axis not in names],
                f"Over spmd_axis_name of jax.vmap the mapped dim of hinted values is sharded; "
                f"the mesh has {', '.join(map(repr, names))}.",
                "Name one of its axes, or leave spmd_axis_name out.",
            )
        )
