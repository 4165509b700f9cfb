"""Primitives that are written in JAX, as what they are written as.

Those of libraries, and sums over an axis of `vmap`.
"""

from collections.abc import Callable, Container
from functools import cache, partial
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import mlir as _mlir

from meshwise._jax.jaxprs import ClosedJaxpr, JaxprEqn, Primitive, opened, with_bodies, with_each
from meshwise._jax.tracing import without_mesh

# Whose primitives are no functions of others, or are known.
_KNOWN = ("jax", "jaxlib", "meshwise")


def spelled_out(closed: Any, known: Container[str]) -> Any:
    """A jaxpr, open or closed, with primitives of libraries as calls of what they are written as.

    That is what they compute when they are called outside of any function, or what their lowering
    is made of, if it can be traced.
    Those whose names are `known` have rules, and stay, as do kernels of one platform.
    """

    def change(eqn: JaxprEqn) -> list[JaxprEqn]:
        functions = () if eqn.primitive.name in known else _functions_of(eqn.primitive)
        if _goes_along_dims(eqn):
            functions = (eqn.primitive.impl,)
        own = next(filter(None, (_written(eqn, function) for function in functions)), None)
        if own is not None:
            params = {"call_jaxpr": spelled_out(own, known)}
            return [eqn.replace(primitive=_core.closed_call_p, params=params)]
        return [with_bodies(eqn, lambda body: spelled_out(body, known))]

    return with_each(closed, change)


def _goes_along_dims(eqn: JaxprEqn) -> bool:
    """Whether a collective names no axis of a mesh but dims, as `vmap` makes it of its own axis."""
    is_one = eqn.primitive in (jax.lax.psum_p, jax.lax.pmax_p, jax.lax.pmin_p)
    return is_one and all(isinstance(axis, int) for axis in eqn.params["axes"])


@cache
def _functions_of(primitive: Primitive) -> tuple[Callable[..., Any], ...]:
    """What a library's primitive says that it is written as, of arrays and its parameters."""
    # A kernel of its own on some platform is faster than what it is written as elsewhere.
    if any(primitive in rules for rules in _mlir._platform_specific_lowerings.values()):
        return ()
    written = (primitive.impl, _lowered_from(primitive))
    return tuple([own for own in written if own is not None and _is_a_librarys(own)])


def _lowered_from(primitive: Primitive) -> Callable[..., Any] | None:
    """The function that `mlir.lower_fun` made a primitive's lowering of: its closure has it."""
    entry: Any = _mlir._lowerings.get(primitive)
    rule = getattr(entry, "rule", entry)
    code = getattr(rule, "__code__", None)
    if code is None or rule.__qualname__ != f"{_mlir.lower_fun.__qualname__}.<locals>.f_lowered":
        return None
    cells = (cell.cell_contents for cell in rule.__closure__)
    return dict(zip(code.co_freevars, cells, strict=True)).get("fun")


def _is_a_librarys(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or "jax"
    return module.partition(".")[0] not in _KNOWN


def _written(eqn: JaxprEqn, function: Callable[..., Any]) -> ClosedJaxpr | None:
    """What a library's primitive computes; None where that cannot be traced, or is the same."""
    if eqn.effects:
        return None
    try:
        with without_mesh():
            body = jax.make_jaxpr(partial(function, **eqn.params))(*[a.aval for a in eqn.invars])
    except Exception:  # it may want numbers, or do what no function of JAX does
        return None
    eqns = opened(body).eqns
    is_itself = any(e.primitive is eqn.primitive for e in eqns)
    types = [[(a.shape, a.dtype) for a in avals] for avals in (body.out_avals, _avals(eqn))]
    return None if is_itself or body.effects or types[0] != types[1] else body


def _avals(eqn: JaxprEqn) -> list[Any]:
    return [v.aval for v in eqn.outvars]
