"""A jaxpr of local arrays in MLIR, in a context that several programs use after each other.

JAX 0.10 makes a context for every program. That takes 3 ms, as long as to lower a small program;
JAX 0.11 uses one for ten, as is done here. More would be held for long: what a context has once
seen of types, attributes and lines it keeps.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import core as _core
from jax._src import sharding_impls as _sharding_impls
from jax._src import util as _util
from jax._src.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from meshwise._jax.jaxprs import ClosedJaxpr

_IS_SHARED_BY_JAX = jax.__version_info__ >= (0, 11)
_MOST_USES = 10
_idle: list[tuple[Any, int]] = []  # contexts that no thread uses, and for how many programs so far


@contextmanager
def mlir_context() -> Iterator[Any]:
    """A context for one program, which nobody else uses meanwhile; None where JAX has its own."""
    if _IS_SHARED_BY_JAX:
        yield None
        return
    try:
        context, uses = _idle.pop()
    except IndexError:
        context, uses = _mlir.make_ir_context(), 0
    yield context
    if uses + 1 < _MOST_USES:  # after an error it is not used again
        _idle.append((context, uses + 1))


def is_of_no_lowering(error: Exception) -> bool:
    """Whether JAX has no program for an operator that a user made."""
    return isinstance(error, NotImplementedError) and "translation rule for primitive" in str(error)


def lowered(
    jaxpr: ClosedJaxpr, mesh: Any, name: str, donated: Sequence[bool], context: Any
) -> Any:  # fmt: skip
    """The module of a jaxpr of local arrays, all axes of the mesh manual."""
    axes, client = frozenset(mesh.axis_names), mesh.devices.flat[0].client
    axis_context = _sharding_impls.SPMDAxisContext(mesh, axes)
    with _core.extend_axis_env_nd(list(mesh.shape.items())):
        if context is not None:
            return _in_context(jaxpr, client, f"jit_{name}", donated, axis_context, context)
        # Since 0.11 the types of the results are given.
        more: dict[str, Any] = {"out_avals": jaxpr.out_avals} if _IS_SHARED_BY_JAX else {}
        return _mlir.lower_jaxpr_to_module(
            f"jit_{name}",
            jaxpr,
            num_const_args=0,
            in_avals=jaxpr.in_avals,
            ordered_effects=[],
            platforms=(client.platform,),
            backend=client,
            axis_context=axis_context,
            donated_args=list(donated),
            lowering_parameters=_mlir.LoweringParameters(),
            **more,
        ).module


def _in_context(
    jaxpr: ClosedJaxpr,
    client: Any,
    name: str,
    donated: Sequence[bool],
    axis_context: Any,
    context: Any,
) -> Any:
    """What `lower_jaxpr_to_module` of JAX 0.10 does, but in a context that is given."""
    _util.test_event("lower_jaxpr_to_module")
    platforms = (client.platform,)
    module = _mlir.ModuleContext(
        platforms=platforms,
        backend=client,
        axis_context=axis_context,
        keepalives=[],
        channel_iterator=itertools.count(_mlir.COLLECTIVE_CHANNEL_ID + 1),
        host_callbacks=[],
        lowering_parameters=_mlir.LoweringParameters(),
        context=context,
    )
    aliases, for_xla = _reused(jaxpr, donated)
    with context, _ir.Location.unknown(context):
        attributes = module.module.operation.attributes
        attributes["sym_name"] = _ir.StringAttr.get(_mlir.sanitize_name(name).rstrip("_"))
        attributes["mhlo.num_replicas"] = _mlir.i32_attr(1)
        attributes["mhlo.num_partitions"] = _mlir.i32_attr(1)
        _mlir.lower_jaxpr_to_fun(
            module,
            name,
            jaxpr,
            [],
            num_const_args=0,
            main_function=True,
            in_avals=jaxpr.in_avals,
            input_output_aliases=aliases,
            xla_donated_args=for_xla,
        )
    if not module.module.operation.verify():
        raise ValueError(_mlir.dump_module_message(module.module, "verification"))
    _util.test_event("mlir.collect_lowered_jaxprs", jaxpr, module.module)
    return module.module


def _reused(jaxpr: ClosedJaxpr, donated: Sequence[bool]) -> tuple[Any, Any]:
    """Which result takes the buffer of each argument that is donated, and what XLA may reuse."""
    if not any(donated):
        return None, None
    what = None, jaxpr.in_avals, jaxpr.out_avals, list(donated), *(None,) * 5
    aliases, unused, for_xla = _mlir._set_up_aliases(*what)
    if any(unused):
        avals = ", ".join(str(a) for a, one in zip(jaxpr.in_avals, unused, strict=True) if one)
        warnings.warn(
            "Some donated buffers were not usable:"
            f" {avals}.\nSee an explanation at https://docs.jax.dev/en/latest/faq.html"
            "#buffer-donation.",
            stacklevel=2,
        )
    return aliases, for_xla
