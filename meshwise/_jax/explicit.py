"""Types that carry axes of an Explicit mesh, and traces that want none of them.

meshwise traces a function over Auto axes, where no operator is refused for an ambiguous sharding.
Arrays that the function closes over may lie on an Explicit mesh; while `plain_types` is entered
their types say nothing of it. A function written in the words of Explicit meshes (`out_sharding=`,
`jax.sharding.reshard`) can only be traced as JAX means it; `plain_jaxpr` then takes the axes out
of its types and makes hints of these words.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise._jax.dispatch import ARRAY_CLASSES
from meshwise._jax.hints import auto_twin, hint_p
from meshwise._jax.jaxprs import ClosedJaxpr, JaxprEqn, Literal, Var, is_jaxpr, opened, rewritten

_TRACE = threading.local()


def is_explicit(mesh: Any) -> bool:
    """Whether a mesh has axes that are part of the types of arrays."""
    return AxisType.Explicit in mesh.axis_types


def auto_mesh(mesh: Any) -> AbstractMesh:
    """The same axes, all Auto, on no devices."""
    return auto_twin(getattr(mesh, "abstract_mesh", mesh))


def plain_type(aval: Any) -> Any:
    """The type without axes of a mesh."""
    if not isinstance(aval, _core.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return aval.update(sharding=None)


def explicit_type(aval: Any, sharding: NamedSharding) -> Any:
    """The type with the axes of a sharding over an abstract mesh."""
    return aval.update(sharding=sharding)


@contextmanager
def plain_types() -> Iterator[None]:
    """Types of arrays from outside say nothing of an Explicit mesh, in this thread."""
    _watch_types()
    before = getattr(_TRACE, "is_plain", False)
    _TRACE.is_plain = True
    try:
        yield
    finally:
        _TRACE.is_plain = before


@functools.cache
def _watch_types() -> None:
    """From now on JAX asks here for the types of arrays and tracers."""
    types = _core.pytype_aval_mappings
    for kind in (*ARRAY_CLASSES, _core.Tracer, _pe.DynamicJaxprTracer):
        types[kind] = _plain_where_wanted(types[kind])


def _plain_where_wanted(type_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def plain_or_not(value: Any) -> Any:
        aval = type_of(value)
        if not getattr(_TRACE, "is_plain", False) or not isinstance(aval, _core.ShapedArray):
            return aval
        if is_explicit(aval.sharding.mesh) and not is_explicit(jax.sharding.get_abstract_mesh()):
            return plain_type(aval)
        return aval

    return plain_or_not


def plain_jaxpr(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr over Auto axes: what its types said is gone, what the user said are hints."""
    return _plain(closed)


def _plain(jaxpr: Any) -> Any:
    inner = opened(jaxpr)
    env: dict[Var, Any] = {}

    def bind(var: Var) -> Var:
        if not isinstance(var, _core.DropVar):
            env[var] = Var(plain_type(var.aval))
            return env[var]
        return _core.DropVar(plain_type(var.aval))

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return Literal(atom.val, plain_type(atom.aval))
        return env[atom]

    inputs = {"constvars": [bind(v) for v in inner.constvars]}
    inputs["invars"] = [bind(v) for v in inner.invars]
    eqns: list[JaxprEqn] = []
    for eqn in inner.eqns:
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive.name == "mesh_cast":
            env[eqn.outvars[0]] = operands[0]
            continue
        eqns += _plain_eqn(eqn, operands, [bind(v) for v in eqn.outvars])
    return rewritten(jaxpr, **inputs, eqns=eqns, outvars=[read(a) for a in inner.outvars])


def _plain_eqn(eqn: JaxprEqn, operands: list[Any], results: list[Var]) -> list[JaxprEqn]:
    """An equation over Auto axes, and the hint on its result that its parameters are."""
    if eqn.primitive.name == "reshard":
        return [_hint(eqn, eqn.params["dst_sharding"], operands, results)]
    said = [eqn.params.get(n) for n in ("sharding", "out_sharding")]
    hint = next((s for s in said if isinstance(s, NamedSharding) and any(s.spec)), None)
    params = {k: _plain_param(k, v) for k, v in eqn.params.items()}
    if eqn.primitive is hint_p or eqn.primitive.name in ("sharding_constraint", "shard_map"):
        hint, params = None, eqn.params
    made = results if hint is None else [Var(results[0].aval)]
    plain = eqn.replace(invars=operands, outvars=made, params=params, ctx=_auto_context(eqn))
    return [plain] if hint is None else [plain, _hint(eqn, hint, made, results)]


def _plain_param(name: str, value: Any) -> Any:
    if name in ("sharding", "out_sharding"):
        return None
    if name == "ctx_mesh":
        return auto_mesh(value)
    if isinstance(value, tuple | list) and any(map(is_jaxpr, value)):
        return type(value)(_plain_param("", v) for v in value)
    return _plain(value) if is_jaxpr(value) else value


def _hint(
    eqn: JaxprEqn, sharding: NamedSharding, operands: list[Any], results: list[Var]
) -> JaxprEqn:
    # What JAX reshards to no axis is where its own rules ask for it; that is no hint.
    spec = sharding.spec if any(sharding.spec) else _open(len(sharding.spec))
    params = {"sharding": spec, "reshards": True}
    return _core.new_jaxpr_eqn(
        operands, results, hint_p, params, _core.no_effects, eqn.source_info, _auto_context(eqn)
    )


def _open(rank: int) -> PartitionSpec:
    return PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * rank)


def _auto_context(eqn: JaxprEqn) -> Any:
    with eqn.ctx.manager:
        mesh = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(mesh if mesh.empty else auto_mesh(mesh)):
            return _core.JaxprEqnContext()
