"""A jaxpr of local arrays run by every device of a mesh, as `jax.shard_map` runs a function.

`jax.shard_map` traces what it is given. A program that is partitioned is a jaxpr already, often of
hundreds of equations: where a jaxpr is being made, it goes into it as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import shard_map as _shard_map
from jax._src import source_info_util
from jax._src.interpreters import partial_eval as _pe
from jax.sharding import PartitionSpec

from meshwise._jax.jaxprs import ClosedJaxpr, jaxpr_as_fun, opened


def mapped(
    jaxpr: ClosedJaxpr,
    mesh: Any,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    name: str,
) -> Callable[..., list[Any]]:
    """A function of global arrays: the jaxpr on every device of the mesh, all axes manual.

    Dims divide. `name` is what JAX shows of it.
    """
    flat = jaxpr_as_fun(jaxpr)

    def per_device(*args: Any) -> list[Any]:
        return list(flat(*args))

    per_device.__name__ = name
    traced = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=list(out_specs),
        check_vma=False,
    )

    def function(*args: Any) -> list[Any]:
        trace = _core.trace_ctx.trace
        is_ready = isinstance(trace, _pe.DynamicJaxprTrace) and not trace.requires_low
        # What checks types of jaxprs wants those inside to speak of the manual axes.
        if not is_ready or _config.enable_checks.value:
            return list(traced(*args))
        return _inserted(trace, jaxpr, mesh, in_specs, out_specs, args)

    function.__name__ = name
    return function


def _inserted(
    trace: Any,
    jaxpr: ClosedJaxpr,
    mesh: Any,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    args: Sequence[Any],
) -> list[Any]:
    """The equation that `jax.shard_map` makes, added to the jaxpr that is being made."""
    separate, consts = _pe.separate_consts(jaxpr)
    inner = opened(separate)
    source = source_info_util.current()
    operands = [
        trace.to_jaxpr_tracer(x, source_info=source)
        for x in (*map(_dtypes.canonicalize_value, consts), *args)
    ]
    params = {
        "mesh": mesh,
        "in_specs": (*[PartitionSpec()] * len(consts), *in_specs),
        "out_specs": tuple(out_specs),
        "jaxpr": inner,
        "check_vma": False,
        "newly_manual_axes": frozenset(mesh.axis_names),
    }
    effects = _core.filter_named_axis_effects(inner.effects, mesh.axis_names)
    types = [
        _core.unshard_aval(mesh, False, spec, v.aval)
        for spec, v in zip(out_specs, inner.outvars, strict=True)
    ]
    return trace.emit_eqn(operands, types, _shard_map.shard_map_p, params, effects, source)
