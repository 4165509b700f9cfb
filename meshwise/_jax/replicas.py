"""A jaxpr of local arrays compiled for every device of a mesh, with nothing left to partition.

`jax.shard_map` hands XLA a program of global arrays: its partitioner reads it, takes it apart at
the edges of the region, and writes it again. A per-device program is apart already. Here it is
compiled as what it is, a program of local arrays of which every device runs a replica, as XLA has
it where it partitions nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import stages as _stages
from jax._src.interpreters import pxla as _pxla
from jax.extend.mlir.dialects import stablehlo
from jaxlib import xla_client as _xla_client
from jaxlib.mlir import ir as _ir

from meshwise._jax.jaxprs import ClosedJaxpr
from meshwise._jax.lowering import lowered, mlir_context

# Since 0.12 JAX takes what replicas return for global arrays, and cuts them up again.
KEEPS_WHAT_REPLICAS_RETURN = jax.__version_info__ < (0, 12)
# In partitioned programs these name a channel, and what is numbered are partitions.
_CHANNELED = ("stablehlo.all_to_all", "stablehlo.collective_permute")


def runs_as_replicas(jaxpr: ClosedJaxpr) -> bool:
    """Whether a per-device jaxpr needs nothing that JAX only does for its own programs.

    That is to call the host, to order effects, constants as arguments; and regions or shardings
    within, which it may refuse.
    """
    shardings = _dispatch.get_intermediate_shardings(jaxpr.jaxpr)
    return KEEPS_WHAT_REPLICAS_RETURN and not (
        _dispatch.jaxpr_has_prim_requiring_devices(jaxpr.jaxpr)
        or any(isinstance(s, jax.sharding.Sharding) for s, _ in shardings)
        or any(not isinstance(e, _core.NamedAxisEffect) for e in jaxpr.effects)
        or _config.use_simplified_jaxpr_constants.value
    )


def compiled_as_replicas(
    jaxpr: ClosedJaxpr,
    mesh: Any,
    name: str,
    ins: Sequence[jax.ShapeDtypeStruct],
    outs: Sequence[jax.ShapeDtypeStruct],
    arg_names: Sequence[str],
    donated: Collection[int],
    keep_unused: bool,
    compiler_options: Mapping[str, Any],
) -> Any:
    """JAX's `Compiled` of a jaxpr of local arrays over a mesh of devices.

    `ins` and `outs` are the global arrays whose shards it takes and returns, with their shardings;
    the results come as a list. Errors call them by `arg_names`. Results may reuse the buffers of
    those at the places `donated`. What is not read is not passed, unless `keep_unused`.
    """
    count = len(ins)
    kept = set(range(count))
    open_jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
    if not keep_unused:
        with _core.extend_axis_env_nd(list(zip(mesh.axis_names, mesh.axis_sizes, strict=True))):
            open_jaxpr, kept_consts, kept = _pxla.prune_unused_inputs(open_jaxpr)
        consts = [c for i, c in enumerate(consts) if i in kept_consts]
    reused = [i in donated for i in range(count) if i in kept]
    device_list = _xla_client.DeviceList(tuple(mesh.devices.flat))
    closed = ClosedJaxpr(open_jaxpr, consts)
    with mlir_context() as context:
        module = lowered(closed, mesh, name, reused, context)
        module.operation.walk(_between_replicas)
        executable = _compiled(module, name, device_list, compiler_options)
    in_avals = [_aval(struct) for struct in ins]
    in_tree = jax.tree.structure((tuple(range(count)), {}))
    args_info = _stages.make_args_info(in_tree, in_avals, tuple(donated))
    out_tree = jax.tree.structure([0] * len(outs))
    loaded = _loaded(executable, device_list, name, arg_names, ins, in_avals, outs, kept)
    return _stages.Compiled(loaded, [], args_info, out_tree, no_kwargs=True)


def _loaded(
    executable: Any,
    device_list: Any,
    name: str,
    arg_names: Sequence[str],
    ins: Sequence[jax.ShapeDtypeStruct],
    all_ins: Sequence[Any],
    outs: Sequence[jax.ShapeDtypeStruct],
    kept: Collection[int],
) -> Any:
    """What JAX calls: XLA's executable, and what it takes and returns.

    `all_ins` are the types of all arguments, those of `kept` among them.
    """
    in_avals = [a for i, a in enumerate(all_ins) if i in kept]
    in_shardings = [s.sharding for i, s in enumerate(ins) if i in kept]
    out_avals, out_shardings = [_aval(s) for s in outs], [s.sharding for s in outs]
    in_layouts, out_layouts = _pxla._get_layouts_from_executable(
        executable, [None] * len(in_avals), [None] * len(outs), 0, in_avals, out_avals
    )
    names = tuple(arg_names)
    unloaded = _pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=device_list,
        backend=device_list[0].client,
        input_avals=in_avals,
        input_shardings=in_shardings,
        output_avals=out_avals,
        output_shardings=out_shardings,
        committed=True,
        name=name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(kept),
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=_pxla.get_dispatch_layouts(in_layouts, in_shardings, in_avals),
        xla_out_layouts=out_layouts,
        all_args_info=_pxla.AllArgsInfo(list(all_ins), _core.DebugInfo("jit", name, names, None)),
        pgle_profiler=None,
    )
    return unloaded.load()


def _aval(struct: jax.ShapeDtypeStruct) -> Any:
    """A global array as JAX's programs know it."""
    aval = _core.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type)
    return _core.update_aval_with_sharding(aval, struct.sharding)


def _between_replicas(operation: Any) -> Any:
    """An operation between partitions as the same one between replicas."""
    if operation.name in _CHANNELED and "channel_handle" in operation.attributes:
        del operation.attributes["channel_handle"]
    elif operation.name == "stablehlo.partition_id":
        with operation.context, _ir.InsertionPoint(operation), operation.location:
            number = stablehlo.ReplicaIdOp().result
        operation.results[0].replace_all_uses_with(number)
        operation.erase()
    return _ir.WalkResult.ADVANCE


def _compiled(module: Any, name: str, device_list: Any, compiler_options: Mapping[str, Any]) -> Any:
    """What XLA makes of it: each device runs a replica, in the order of the list."""
    client = device_list[0].client
    devices = np.empty((len(device_list), 1), object)
    devices[:, 0] = list(device_list)
    options = _compiler.get_compile_options(
        num_replicas=len(device_list),
        num_partitions=1,
        device_assignment=devices,
        env_options_overrides=dict(compiler_options),
        backend=client,
    )
    with _dispatch.log_elapsed_time(
        "Finished XLA compilation of {fun_name} in {elapsed_time:.9f} sec",
        fun_name=name,
        event=_dispatch.BACKEND_COMPILE_EVENT,
    ):
        return _compiler.compile_or_get_cached(
            client, module, devices, options, [], device_list, None
        )
