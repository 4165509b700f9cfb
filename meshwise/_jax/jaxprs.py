"""Jaxprs: their classes, and how to make, rename and apply equations."""

import operator
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.core
import numpy as np
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.interpreters import pxla as _pxla
from jax._src.literals import TypedComplex, TypedFloat, TypedInt, TypedNdArray
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.core import primitives as _xprimitives

# Lines in here are the user's only where there are no others.
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STANDARD = sysconfig.get_path("stdlib") + os.sep

DropVar = _core.DropVar
ShapedArray = _core.ShapedArray


Tracer = jax.core.Tracer


extended = jax.dtypes.extended


def new_var(aval: Any) -> Var:
    """A fresh variable of a type."""
    return Var(aval)


def var_like(atom: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """A new variable of an atom's type, but of another shape, and maybe of other numbers."""
    return Var(atom.aval.update(shape=tuple(shape), dtype=dtype or atom.aval.dtype))


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of an array that an equation reads or writes."""
    return tuple(atom.aval.shape)


def close_jaxpr(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[Any],
    eqns: Sequence[JaxprEqn],
    consts: Sequence[Any],
) -> ClosedJaxpr:
    """A closed jaxpr of some equations."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    debug_info = _core.DebugInfo("meshwise", "meshwise", ("",) * len(invars), ("",) * len(outvars))
    jaxpr = Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info)
    return ClosedJaxpr(jaxpr, list(consts))


# Of most parameters the type alone says that no jaxpr is in them.
_WITHOUT_BODY = frozenset({int, bool, str, float, type(None)})
_JAXPRS, _SEQUENCES = (ClosedJaxpr, Jaxpr), (tuple, list)


def is_jaxpr(value: Any) -> bool:
    """Whether a jaxpr, open or closed."""
    return isinstance(value, _JAXPRS)


def rewritten(jaxpr: Any, **parts: Any) -> Any:
    """A jaxpr, open or closed, with other equations, variables or results."""
    inner = opened(jaxpr)
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=inner.replace(**parts))
    if "constvars" in parts and hasattr(jaxpr, "consts"):
        parts["consts"] = jaxpr.consts
    return jaxpr.replace(**parts)


def reading(eqn: JaxprEqn, others: Mapping[Any, Var]) -> JaxprEqn:
    """An equation with other operands in the place of some; itself where it reads none of them."""
    read = [a if isinstance(a, Literal) else others.get(a, a) for a in eqn.invars]
    return eqn if read == eqn.invars else eqn.replace(invars=read)


def with_each(jaxpr: Any, change: Callable[[JaxprEqn], Sequence[JaxprEqn]]) -> Any:
    """A jaxpr, open or closed, with others in the place of each equation; itself where none is."""
    before = opened(jaxpr).eqns
    eqns = [new for eqn in before for new in change(eqn)]
    return jaxpr if are_same(eqns, before) else rewritten(jaxpr, eqns=eqns)


def are_same(eqns: Sequence[JaxprEqn], others: Sequence[JaxprEqn]) -> bool:
    """Whether two lists are of the very same equations."""
    return len(eqns) == len(others) and all(map(operator.is_, eqns, others))


def with_bodies(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """An equation with each jaxpr among its parameters changed; itself where none is."""
    if not has_jaxpr(eqn):
        return eqn
    params = {k: _changed(v, change) for k, v in eqn.params.items()}
    same = all(params[k] is v for k, v in eqn.params.items())
    return eqn if same else eqn.replace(params=params)


def bodies_of(eqn: JaxprEqn) -> Iterator[Any]:
    """The jaxprs, open or closed, among an equation's parameters, in their order."""
    for value in eqn.params.values():
        for item in value if isinstance(value, _SEQUENCES) else (value,):
            if is_jaxpr(item):
                yield item


def may_not_end(eqn: JaxprEqn) -> bool:
    """Whether an equation is, or holds, a loop that ends when its data says so."""
    inner = (e for body in bodies_of(eqn) for e in opened(body).eqns)
    return eqn.primitive is _xprimitives.while_p or any(map(may_not_end, inner))


def has_jaxpr(eqn: JaxprEqn) -> bool:
    """Whether a jaxpr is among an equation's parameters."""
    return _has_body(eqn.params.values())


def _has_body(values: Iterable[Any]) -> bool:
    """Whether a jaxpr is among some values, or within tuples and lists of them."""
    for value in values:  # asked of every equation in many passes, so without a generator
        if type(value) in _WITHOUT_BODY:
            continue
        if _has_body(value) if isinstance(value, _SEQUENCES) else is_jaxpr(value):
            return True
    return False


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        parts = [_changed(v, change) for v in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return getattr(type(value), "_make", type(value))(parts)  # a named tuple counts its parts
    return change(value) if is_jaxpr(value) else value


def opened(jaxpr: Any) -> Any:
    """What holds the equations of a jaxpr, open or closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def hoisted(closed: ClosedJaxpr, chosen: Sequence[bool]) -> tuple[ClosedJaxpr, list[Any]]:
    """Some of the constants as leading inputs, and these constants."""
    jaxpr = closed.jaxpr
    pairs = list(zip(jaxpr.constvars, closed.consts, chosen, strict=True))
    kept = [(v, c) for v, c, is_chosen in pairs if not is_chosen]
    held = [(v, c) for v, c, is_chosen in pairs if is_chosen]
    inputs = [*(v for v, _ in held), *jaxpr.invars]
    made = close_jaxpr(
        [v for v, _ in kept], inputs, jaxpr.outvars, jaxpr.eqns, [c for _, c in kept]
    )
    return made, [c for _, c in held]


@contextmanager
def at_source(eqn: JaxprEqn) -> Iterator[None]:
    """Equations bound inside carry the source line and names of a given equation."""
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack):
        yield


def bits_by_position(eqn: JaxprEqn) -> bool:
    """Whether threefry makes bits of key and position alone, as set where it was traced."""
    return bool(eqn.ctx.threefry_partitionable)


def bind(eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Apply an equation's primitive to other arguments, perhaps with other parameters.

    What the equation's own context and output shardings say of the mesh of the user's trace is left
    behind; how random bits are made there is kept.
    """
    params = dict(eqn.params if params is None else params)
    params.update({name: None for name in ("sharding", "out_sharding") if name in params})
    bind_params = eqn.primitive.get_bind_params(params)
    with jax.threefry_partitionable(bits_by_position(eqn)):
        out = eqn.primitive.bind(*args, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def source_summary(eqn: JaxprEqn) -> str:
    """The user's line of an equation as `file:line`, or `unknown`.

    Where a library's code is called there, its line follows: `file:line (library's file:line)`.
    """
    frames = _user_frames(eqn.source_info.traceback)
    inner = next(frames, None)
    if inner is None:
        return "unknown"
    own = inner if _is_users(inner) else next(filter(_is_users, frames), inner)
    return _line(own) if own is inner else f"{_line(own)} ({_line(inner)})"


def _line(frame: Any) -> str:
    return f"{frame.file_name}:{frame.start_line}"


def _user_frames(traceback: Any) -> Iterator[Any]:
    """Frames outside of JAX and of this package (`tracebacks.py`), the innermost first."""
    return iter(source_info_util.user_frames(traceback))


def _is_users(frame: Any) -> bool:
    """Whether a frame is in no installed library."""
    name = frame.file_name
    return not (name.startswith(_STANDARD) or any(part in name for part in _LIBRARIES))


def rename(
    eqn: JaxprEqn, invars: Sequence[Any], outvars: Sequence[Var], call: JaxprEqn | None = None
) -> JaxprEqn:
    """The same equation on other variables; inside a call its names are prefixed by the call's."""
    if call is None:
        return eqn.replace(invars=list(invars), outvars=list(outvars))
    info = eqn.source_info
    stack = call.source_info.name_stack + info.name_stack
    # What a library keeps from an earlier trace knows no line of this user.
    has_line = next(_user_frames(info.traceback), None) is not None
    traceback = info.traceback if has_line else call.source_info.traceback
    info = info.replace(name_stack=stack, traceback=traceback)
    return eqn.replace(invars=list(invars), outvars=list(outvars), source_info=info)


def without_names(eqn: JaxprEqn) -> JaxprEqn:
    """An equation at its line, but in no scope of names."""
    nowhere = source_info_util.NameStack()
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=nowhere))


def key_impl_name(aval: Any) -> str | None:
    """The name of the generator of a typed key array, None for other arrays."""
    if not jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return None
    return aval.dtype._impl.name


def without_key_type(array: Any) -> Any:
    """The numbers of an array of typed keys; others as they are."""
    return array if key_impl_name(array) is None else jax.random.key_data(array)


def with_key_type(array: Any, aval: Any) -> Any:
    """Numbers as typed keys, where a type says so: the inverse of `without_key_type`."""
    kind = key_impl_name(aval)
    return array if kind is None else jax.random.wrap_key_data(array, impl=kind)


def new_eqn(
    primitive: Primitive,
    invars: Sequence[Any],
    outvars: Sequence[Var],
    params: dict[str, Any],
    like: JaxprEqn,
) -> JaxprEqn:
    """An equation without effects that carries another one's source line and context."""
    return _core.new_jaxpr_eqn(
        list(invars), list(outvars), primitive, params, _core.no_effects, like.source_info, like.ctx
    )


def applied(
    primitive: Primitive, operands: Sequence[Any], params: dict[str, Any], like: JaxprEqn
) -> JaxprEqn:
    """An equation that applies a primitive of one result, of the type that JAX says it has."""
    aval, _ = primitive.abstract_eval(*(a.aval for a in operands), **params)
    return new_eqn(primitive, operands, [new_var(aval)], params, like)


def in_place_of(eqn: JaxprEqn, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[JaxprEqn]:
    """The equations of a jaxpr without constants, of some operands, in the place of an equation.

    What it returns without making it, or twice, is copied: each result has an equation.
    """
    names: dict[Var, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    for inner in closed.jaxpr.eqns:
        names.update((v, new_var(v.aval)) for v in inner.outvars)
    copied = []
    for atom, out in zip(closed.jaxpr.outvars, eqn.outvars, strict=True):
        if isinstance(atom, Literal) or atom in closed.jaxpr.invars or names[atom] in eqn.outvars:
            copied.append((atom, out))
        else:
            names[atom] = out
    made = [
        inner.replace(
            invars=[a if isinstance(a, Literal) else names[a] for a in inner.invars],
            outvars=[names[v] for v in inner.outvars],
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for inner in closed.jaxpr.eqns
    ]
    given = [(a if isinstance(a, Literal) else names[a], out) for a, out in copied]
    return [*made, *(new_eqn(jax.lax.copy_p, [a], [out], {}, eqn) for a, out in given)]


def equation_count(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those of the bodies of loops, choices and calls included."""
    eqns = opened(jaxpr).eqns
    inside = (body for eqn in eqns for body in bodies_of(eqn))
    return len(eqns) + sum(map(equation_count, inside))


def names_of(eqn: JaxprEqn) -> str:
    """The name scopes an equation was traced in, as text."""
    return str(eqn.source_info.name_stack)


def is_on_host(aval: Any) -> bool:
    """Whether a value of a type is kept in the memory of the host."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def array_type(value: Any) -> Any:
    """The abstract value of anything that JAX takes as an array; None for anything else."""
    try:
        return _core.shaped_abstractify(value)
    except (TypeError, ValueError):
        return None


threefry2x32_p: Primitive = _xprimitives.threefry2x32_p


_TYPED = {int: TypedInt, float: TypedFloat, complex: TypedComplex}


def literal_value(atom: Literal) -> Any:
    """A literal's value without the mesh of the trace it comes from; weak types stay weak.

    It is of the literal's own type, whether x64 is on or off where it is read.
    """
    aval: Any = atom.aval
    value = np.asarray(atom.val, aval.dtype)
    if getattr(aval, "weak_type", False):
        number = value.item()
        return _TYPED[type(number)](number, aval.dtype)
    return TypedNdArray(value)


def cast_literal(eqn: JaxprEqn, operands: Sequence[Any]) -> Literal | None:
    """The literal that an equation makes of one by a cast, where the types hold the same number.

    So `jnp.pad` pads with a literal, and not with what is cast from one.
    """
    if eqn.primitive is not _xprimitives.convert_element_type_p:
        return None
    (operand,), (result,) = operands, eqn.outvars
    if not isinstance(operand, Literal):
        return None
    value = np.asarray(literal_value(operand))
    aval: Any = result.aval
    if value.shape or not (_is_real(value.dtype) and _is_real(aval.dtype)):
        return None
    with np.errstate(all="ignore"):
        cast = value.astype(aval.dtype)
        same = cast.astype(value.dtype) == value
    return Literal(cast[()], aval) if same else None


def _is_real(dtype: Any) -> bool:
    kinds = (np.bool_, np.integer, np.floating)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)


def without_references(jaxpr: Any) -> Any:
    """A closed jaxpr whose own references (`jax.new_ref`) are the values that stand in them."""
    if not any(isinstance(e, _core.InternalMutableArrayEffect) for e in jaxpr.effects):
        return jaxpr
    return _pxla._discharge_internal_refs(jaxpr)
