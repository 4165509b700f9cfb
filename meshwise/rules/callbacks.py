"""What calls the host, or draws from a generator that keeps its state, with whole arrays.

Where it matters how often, or each device would get something else, the first device of the mesh
does it, and tells the others what it got: bit patterns are added up that are zero elsewhere. A pure
function is called by every device, as none then waits for one whose call failed. Of a callback that
is said to be `partitioned` each device calls with its own part. Who inspects a sharding is told
while the program is written.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise.ir.factors import dims_sharding
from meshwise.ir.program import bytes_of
from meshwise.rules.factoring import Factoring, shapes, total_size
from meshwise.rules.registry import (
    Application,
    Exchange,
    LocalContext,
    OpRule,
    all_reduce_of,
    opaque_rule,
    register,
)


@register("pure_callback")
def _pure_rule(application: Application) -> OpRule:
    rule = opaque_rule(application)
    return replace(rule, local=lambda context, *arrays: context.bind(*arrays), masked=())


@register("debug_callback", "debug_print", "io_callback", "rng_uniform")
def _callback_rule(application: Application) -> OpRule:
    if application.params.get("partitioned"):
        return _each_with_its_own(application)
    rule = opaque_rule(application)
    return replace(rule, local=_first_calls, exchanges=_told, masked=(), opaque=False)


def _each_with_its_own(application: Application) -> OpRule:
    factoring = Factoring()
    operands = [factoring.dims(shape) for shape in shapes(application.operands)]
    return OpRule(
        factoring.rule(operands, []),
        local=lambda context, *arrays: context.bind(*arrays),
        masked=(),
        flops=total_size(application.operands),
    )


def _first_calls(context: LocalContext, *operands: Any) -> Sequence[Any]:
    """The first device calls; the others take what it got."""
    names = context.mesh.names
    if not names:
        return context.bind(*operands)
    types: list[Any] = [v.aval for v in context.eqn.outvars]

    def call() -> list[Any]:
        return context.bind(*operands)

    def wait() -> list[Any]:
        return [lax.full(t.shape, 0, t.dtype) for t in types]

    results = lax.cond(lax.axis_index(names) == 0, call, wait)
    return [_from_first(x, names) for x in results]


def _from_first(array: Any, names: tuple[str, ...]) -> Any:
    """An array that is zero on all devices but the first, as it is there, bit by bit."""
    dtype = array.dtype
    if jax.numpy.issubdtype(dtype, np.complexfloating):
        return lax.complex(*[_from_first(part, names) for part in (array.real, array.imag)])
    if dtype == np.bool_:
        return lax.psum(array.astype(np.uint8), names).astype(bool)
    if not jax.numpy.issubdtype(dtype, np.floating):
        return lax.psum(array, names)
    bits = lax.bitcast_convert_type(array, np.dtype(f"uint{8 * dtype.itemsize}"))
    return lax.bitcast_convert_type(lax.psum(bits, names), dtype)


def _told(context: LocalContext) -> list[Exchange]:
    """One all_reduce of what the host answers."""
    devices = context.mesh.device_count
    if devices == 1:
        return []
    return [all_reduce_of(bytes_of(v), devices) for v in context.eqn.outvars]


@register("inspect_sharding")
def _inspection_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.operands[0].shape)
    return OpRule(factoring.rule([dims], []), local=_tell, masked=())


def _tell(context: LocalContext, array: Any) -> list[Any]:
    mesh = context.mesh
    dims = dims_sharding(context.rule.operands[0], context.strategy.axes)
    whole = [mesh.restore(axes) for axes in dims]
    known = tuple([w for w in whole if w is not None])
    told = known if len(known) == len(dims) else dims
    context.params["callback"].tell(told, mesh.names, mesh.sizes)
    return []
