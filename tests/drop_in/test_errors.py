"""Mistakes: `mw.jit` raises of `jax.jit`'s class, in words of its own where it finds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Layout
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import X, mesh_of, named, outcome, put

ROWS, COLUMNS = named("x"), named(None, "y")


def in_mesh(code):
    def inside(jit):
        with jax.set_mesh(mesh_of(4, 2)):
            return code(jit)

    return inside


def _beside_context(function):
    def code(jit):
        x = put("x", mesh=mesh_of(2, 2))
        with jax.set_mesh(mesh_of(4, 2)):
            return jit(function)(x)

    return code


def quietly_deprecated(jit, **options):
    with pytest.warns(DeprecationWarning):
        return jit(lambda x: x, **options)


def identity(x):
    return x


# What jax.jit says when a function is jitted; mw.jit has JAX say it.
WHEN_JITTED = {
    "no function": lambda jit: jit(3),
    "None": lambda jit: jit(None),
    "two functions": lambda jit: jit(identity, identity),
    "an argument that jit has not": lambda jit: jit(identity, colour="blue"),
    "a static argument out of range": lambda jit: jit(identity, static_argnums=7),
    "a static argument that is no number": lambda jit: jit(identity, static_argnums="x"),
    "a static name that is none": lambda jit: jit(identity, static_argnames="y"),
    "a static name that is no text": lambda jit: jit(identity, static_argnames=3),
    "a donated argument out of range": lambda jit: jit(identity, donate_argnums=7),
    "a donated name that is none": lambda jit: jit(identity, donate_argnames="y"),
    "static and donated": lambda jit: jit(identity, static_argnums=0, donate_argnums=0),
    "device and backend": lambda jit: quietly_deprecated(
        jit, device=jax.devices()[0], backend="cpu"
    ),
    "device and shardings": lambda jit: quietly_deprecated(
        jit, device=jax.devices()[0], in_shardings=ROWS
    ),
    "backend and shardings": lambda jit: quietly_deprecated(jit, backend="cpu", out_shardings=ROWS),
    "a sharding that is none": lambda jit: jit(identity, in_shardings="x"),
    "a device for a sharding": lambda jit: jit(identity, in_shardings=(jax.devices()[0],)),
    "a number for a sharding": lambda jit: jit(identity, out_shardings=3),
    "a layout without a sharding": lambda jit: jit(identity, in_shardings=Layout((0, 1))),
    "an axis twice": lambda jit: jit(identity, in_shardings=P("x", "x")),
    "open dims of an argument": lambda jit: jit(identity, in_shardings=named(P.UNCONSTRAINED, "x")),
}

# What is found in a call, or in the function: JAX's errors and Python's come through.
IN_A_CALL = {
    "an argument too few": lambda jit: jit(lambda x, y: x)(put("x")),
    "an argument too many": lambda jit: jit(identity)(put("x"), y=1),
    "a static value without a hash": lambda jit: jit(
        lambda x, n: x, static_argnums=1, in_shardings=ROWS
    )(X, [1]),
    "the same beside what is donated": lambda jit: jit(
        lambda x, n: x, static_argnums=1, donate_argnums=0, in_shardings=ROWS
    )(X, [1]),
    "an integer too large": lambda jit: jit(lambda x, y: x)(put("x"), 2**70),
    "a result that is no array": lambda jit: jit(lambda x: object())(put("x")),
    "a branch on a traced value": lambda jit: jit(lambda x: 1 if x.sum() > 0 else 2)(put("x")),
    "an error of the function": lambda jit: jit(lambda x: {}["key"])(put("x")),
    "keys that have no order": lambda jit: jit(identity)({1: put("x"), "a": 2}),
    "a mesh, for a device": in_mesh(lambda jit: quietly_deprecated(jit, backend="cpu")(X)),
    "options that are none": lambda jit: jit(identity, compiler_options={"nothing": True})(
        put("x")
    ),
    "options inside another jit": lambda jit: jax.jit(
        lambda x: jit(identity, compiler_options={"nothing": True})(x) + 1
    )(X),
    "arrays on two devices": lambda jit: jit(jnp.add)(
        jax.device_put(X, jax.devices()[1]), jax.device_put(X, jax.devices()[2])
    ),
    "a constraint without a mesh": lambda jit: jit(lambda x: lax.with_sharding_constraint(x, P()))(
        X
    ),
    "tracing forbidden": lambda jit: _no_tracing(jit)(put("x")),
    "NaNs found": lambda jit: _debug_nans(jit)(put("x")),
}

# What meshwise finds: its own errors, which are of JAX's classes.
FOUND_BY_US = {
    "axes without a mesh": lambda jit: jit(identity, in_shardings=P("x"))(X),
    "axes of results without a mesh": lambda jit: jit(identity, out_shardings=P("x"))(X),
    "an axis that the mesh has not": in_mesh(lambda jit: jit(identity, in_shardings=P("w"))(X)),
    "the same of a result": in_mesh(lambda jit: jit(identity, out_shardings=P("w"))(X)),
    "more entries than dims": lambda jit: jit(identity, in_shardings=named("x", None, None))(X),
    "more entries than a result's dims": lambda jit: jit(jnp.sum, out_shardings=ROWS)(X),
    "too few shardings": lambda jit: jit(lambda x, y: x, in_shardings=(ROWS,))(X, X),
    "too many shardings": lambda jit: jit(identity, in_shardings=(ROWS, ROWS))(X),
    "shardings of other keys": lambda jit: jit(identity, in_shardings=({"a": ROWS},))({"b": X}),
    "two shardings of one result": lambda jit: jit(identity, out_shardings=(ROWS, ROWS))(X),
    "keywords and shardings": lambda jit: jit(jnp.add, in_shardings=ROWS)(X, y=X),
    "a static keyword and shardings": lambda jit: jit(
        lambda x, n: x * n, in_shardings=ROWS, static_argnames="n"
    )(X, n=2),
    "a text": lambda jit: jit(lambda x, y: x)(put("x"), "text"),
    "a text alone": lambda jit: jit(identity)("text"),
    "an array of texts": lambda jit: jit(lambda x, y: x)(put("x"), np.array(["text"])),
    "an array that lies otherwise": lambda jit: jit(identity, in_shardings=ROWS)(put("x", "y")),
    "one that is differentiated at": lambda jit: jax.grad(
        lambda x: jit(identity, in_shardings=ROWS)(x * 2).sum()
    )(put("x", "y")),
    "one over another mesh, linearized at": lambda jit: jax.linearize(
        jit(identity, in_shardings=ROWS), put("x", mesh=mesh_of(8))
    ),
    "one beside what is differentiated": lambda jit: jax.grad(
        lambda x: (x * jit(identity, in_shardings=ROWS)(put())).sum()
    )(X),
    "an array on one device": lambda jit: jit(identity, in_shardings=ROWS)(
        jax.device_put(X, jax.devices()[0])
    ),
    "arrays on other devices": lambda jit: jit(jnp.add)(put("x"), put("x", mesh=mesh_of(2, 2))),
    "arrays beside the context": _beside_context(lambda x: x),
    "shardings for other devices": lambda jit: jit(
        lambda x, y: (x, y), out_shardings=(ROWS, named("x", mesh=mesh_of(2, 2)))
    )(X, X),
    "a constraint for other devices": lambda jit: jit(
        lambda x: lax.with_sharding_constraint(x, named("x", mesh=mesh_of(2, 2)))
    )(put("x")),
    "an array that is deleted": lambda jit: _deleted(jit)(jnp.copy(jnp.asarray(X))),
    "an array donated and read": lambda jit: _twice(jit)(jnp.copy(jnp.asarray(X))),
}


def _no_tracing(jit):
    def call(x):
        with jax.no_tracing():
            return jit(identity)(x)

    return call


def _debug_nans(jit):
    def call(x):
        with jax.debug_nans(True):
            return jit(lambda x: jnp.log(-1 - x))(x)

    return call


def _deleted(jit):
    step = jit(lambda x: x + 1, donate_argnums=0)

    def call(x):
        step(x)
        return step(x)

    return call


def _twice(jit):
    return lambda x: jit(jnp.add, donate_argnums=0)(x, x)


@pytest.mark.parametrize(
    "code", [*WHEN_JITTED.values(), *IN_A_CALL.values()], ids=[*WHEN_JITTED, *IN_A_CALL]
)
def test_jaxs_errors_come_through(code):
    theirs, ours = (outcome(code, jit).error for jit in (jax.jit, mw.jit))
    assert theirs is not None
    assert type(ours) is type(theirs), ours


@pytest.mark.parametrize("code", FOUND_BY_US.values(), ids=FOUND_BY_US)
def test_our_errors_are_of_jaxs_classes(code):
    theirs, ours = (outcome(code, jit).error for jit in (jax.jit, mw.jit))
    assert theirs is not None
    assert isinstance(ours, mw.MeshwiseError), ours
    assert isinstance(ours, type(theirs)), (ours, theirs)
    assert len(str(ours).splitlines()) >= 3  # what was asked, the rule, the way out


@pytest.mark.parametrize("donated", [None, 0])
def test_a_program_for_a_static_value_without_a_hash(donated):
    fn = mw.jit(lambda x, n: x, mesh=mesh_of(4, 2), static_argnums=1, donate_argnums=donated)
    for call in (fn, fn.partition):
        with pytest.raises(ValueError, match="Non-hashable static arguments"):
            call(X, [1])


def test_keywords_beside_shardings_of_a_mesh_of_our_own():
    """With `mesh=`, which `jax.jit` has not, what comes by keyword is completed."""
    add = mw.jit(lambda x, y: x + y, mesh=mesh_of(4, 2), in_shardings=P("x"))
    np.testing.assert_array_equal(add(X, y=X), X + X)


def test_what_must_not_lie_otherwise_may_where_a_trace_has_it_whole():
    """In a jit all is moved, as under `jax.jit`; a dim that does not divide is whole in between."""
    twice, odd = mw.jit(lambda x: x * 2, in_shardings=ROWS), X[:7]
    x = put()
    np.testing.assert_array_equal(jax.jit(lambda y: twice(x) + y)(X), X * 3)
    step = mw.jit(lambda x: x * 2, mesh=mesh_of(4, 2), in_shardings=P("x"))
    np.testing.assert_array_equal(jax.grad(lambda x: step(step(x)).sum())(odd), odd * 0 + 4)
