"""Types that carry axes of an Explicit mesh, and jaxprs without them.

Over Explicit axes a function is traced as `jax.jit` traces it: the types of its values say how
these are sharded, and what JAX refuses there is refused. Such a jaxpr is *typed*. What is
partitioned is its plain twin (`plain_jaxpr`): the axes are out of its types, and what the user
said in their words (`out_sharding=`, `jax.sharding.reshard`) are hints.

Over Auto axes a function may close over arrays that lie on an Explicit mesh; while `plain_types`
is entered their types say nothing of it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe
from jax._src.util import weakref_lru_cache as _weakref_lru_cache
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise._jax.dispatch import ARRAY_CLASSES
from meshwise._jax.hints import auto_twin, hint_p
from meshwise._jax.jaxprs import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies_of,
    opened,
    rewritten,
    with_bodies,
)
from meshwise._jax.specs import axes_of


class _Trace(threading.local):
    """What types say in a thread."""

    is_plain = False


_TRACE = _Trace()


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


def type_mesh(aval: Any) -> AbstractMesh:
    """The mesh that a type speaks of; an empty one where it speaks of none."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return NO_MESH if mesh is None else mesh.abstract_mesh


NO_MESH = AbstractMesh((), ())


def is_typed(avals: Sequence[Any]) -> bool:
    """Whether some types have axes of an Explicit mesh."""
    return any(is_explicit(type_mesh(a)) for a in avals)


def struct_of(aval: Any, mesh: Any = None) -> jax.ShapeDtypeStruct:
    """A type as a struct; what it says of other meshes than the one given, if any, is left out.

    Numbers of 64 bits have 32 where x64 is off, as `jax.jit` takes them.
    """
    theirs = type_mesh(aval)
    says = not theirs.empty and (mesh is None or theirs == mesh)
    weak = bool(getattr(aval, "weak_type", False))
    sharding = aval.sharding if says else None
    is_extended = jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)
    dtype = aval.dtype if is_extended else jax.dtypes.canonicalize_dtype(aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=weak, sharding=sharding)


@contextmanager
def plain_types() -> Iterator[None]:
    """Types of arrays from outside say nothing of an Explicit mesh, in this thread."""
    _watch_types()
    before = _TRACE.is_plain
    _TRACE.is_plain = True
    try:
        yield
    finally:
        _TRACE.is_plain = before


def _watch_types() -> None:
    """From now on JAX asks here for the types of arrays and tracers."""
    types = _core.pytype_aval_mappings
    for kind in (*ARRAY_CLASSES, _core.Tracer, _pe.DynamicJaxprTracer):
        if not hasattr(types[kind], "watched"):
            types[kind] = _plain_where_wanted(types[kind])


def _plain_where_wanted(type_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def plain_or_not(value: Any) -> Any:
        aval = type_of(value)
        if not _TRACE.is_plain or not isinstance(aval, _core.ShapedArray):
            return aval
        if is_explicit(aval.sharding.mesh) and not is_explicit(jax.sharding.get_abstract_mesh()):
            return plain_type(aval)
        return aval

    vars(plain_or_not)["watched"] = type_of
    return plain_or_not


@_weakref_lru_cache
def plain_jaxpr(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr over Auto axes: what its types said is gone, what the user said are hints."""
    return _plain(closed) if _speaks_of_meshes(opened(closed)) else closed


def _speaks_of_meshes(jaxpr: Any) -> bool:
    """Whether a jaxpr has axes of a mesh in its types, or words of Explicit meshes."""
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    if any(not type_mesh(v.aval).empty for v in (*jaxpr.constvars, *jaxpr.invars, *made)):
        return True
    if any(eqn.primitive.name in ("reshard", "mesh_cast") for eqn in jaxpr.eqns):
        return True
    return any(_speaks_of_meshes(opened(b)) for eqn in jaxpr.eqns for b in _bodies(eqn))


# Types inside are of local arrays, and stay.
_MANUAL = ("shard_map",)


def _bodies(eqn: JaxprEqn) -> list[Any]:
    if eqn.primitive.name in _MANUAL:
        return []
    return list(bodies_of(eqn))


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
        if eqn.primitive.name == "mesh_cast" or _reshards_to_no_mesh(eqn):
            env[eqn.outvars[0]] = operands[0]
            continue
        eqns += _plain_eqn(eqn, operands, [bind(v) for v in eqn.outvars])
    return rewritten(jaxpr, **inputs, eqns=eqns, outvars=[read(a) for a in inner.outvars])


def _plain_eqn(eqn: JaxprEqn, operands: list[Any], results: list[Var]) -> list[JaxprEqn]:
    """An equation over Auto axes, and the hint on its result that its parameters are."""
    rank = _rank(results[0]) if results else 0
    if eqn.primitive.name == "reshard":
        return [_hint(eqn, _said(eqn.params["dst_sharding"], rank), operands, results)]
    if eqn.primitive.name == "sharding_constraint" and is_typed([eqn.invars[0].aval]):
        return [_hint(eqn, _constrained(eqn, rank), operands, results)]
    ctx = _auto_context(eqn)
    if eqn.primitive is hint_p or eqn.primitive.name in ("sharding_constraint", *_MANUAL):
        return [eqn.replace(invars=operands, outvars=results, ctx=ctx)]
    said = [eqn.params.get(n) for n in ("sharding", "out_sharding")]
    hint = next((s for s in said if isinstance(s, NamedSharding) and any(s.spec.partitions)), None)
    params = {k: _plain_param(k, v) for k, v in eqn.params.items()}
    eqn = with_bodies(eqn.replace(params=params), _plain)
    if hint is None:
        return [eqn.replace(invars=operands, outvars=results, ctx=ctx)]
    # Of several results the last is what is said to lie somewhere: bits, after the next state.
    *others, last = results
    made = Var(last.aval)
    plain = eqn.replace(invars=operands, outvars=[*others, made], ctx=ctx)
    return [plain, _hint(eqn, _said(hint, _rank(last)), [made], [last])]


def _reshards_to_no_mesh(eqn: JaxprEqn) -> bool:
    """Whether an equation only says that a value may lie anywhere."""
    return eqn.primitive.name == "reshard" and eqn.params["dst_sharding"].mesh.empty


def _rank(var: Var) -> int:
    return len(getattr(var.aval, "shape", ()))


def _plain_param(name: str, value: Any) -> Any:
    if name in ("sharding", "out_sharding"):
        return None
    if type(value) in (tuple, list):  # the types of results, of a callback to the host
        return type(value)([plain_type(v) for v in value])
    return auto_mesh(value) if name == "ctx_mesh" else plain_type(value)


def _hint(
    eqn: JaxprEqn, sharding: NamedSharding, operands: list[Any], results: list[Var]
) -> JaxprEqn:
    params = {"sharding": sharding, "reshards": True}
    return _core.new_jaxpr_eqn(
        operands, results, hint_p, params, _core.no_effects, eqn.source_info, _auto_context(eqn)
    )


def _said(sharding: NamedSharding, rank: int) -> NamedSharding:
    """What a type says that a value is to be: open in dims that it leaves to Auto axes.

    What JAX reshards to no axis is where its own rules ask for it; that is no hint. Nor is a sum
    that is to stay unreduced: it is left to where it is needed.
    """
    entries: Sequence[Any] = axes_of(sharding.spec, rank)
    if not any(entries) or getattr(sharding.spec, "unreduced", None):
        entries = [_OPEN] * rank
    elif any(t != AxisType.Explicit for t in sharding.mesh.axis_types):
        entries = [e or _OPEN for e in entries]
    return NamedSharding(auto_mesh(sharding.mesh), PartitionSpec(*entries))


_OPEN = PartitionSpec.UNCONSTRAINED


def _constrained(eqn: JaxprEqn, rank: int) -> NamedSharding:
    """A constraint over the Auto axes of a value, minor to the axes that its type names."""
    aval: Any = eqn.invars[0].aval
    sharding = eqn.params["sharding"]
    pairs = zip(axes_of(aval.sharding.spec, rank), axes_of(sharding.spec, rank), strict=True)
    entries = [(typed or asked) if asked is _OPEN else (*typed, *asked) for typed, asked in pairs]
    return NamedSharding(auto_mesh(sharding.mesh), PartitionSpec(*entries))


def _auto_context(eqn: JaxprEqn) -> Any:
    with eqn.ctx.manager:
        mesh = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(mesh if mesh.empty else auto_mesh(mesh)):
            return _core.JaxprEqnContext()
