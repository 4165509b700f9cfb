"""Donated arguments: their buffers are reused, and reading them afterwards is an error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

X = np.arange(32, dtype=np.float32).reshape(4, 8)


def put(mesh, *spec):
    return jax.device_put(X, NamedSharding(mesh, P(*spec)))


def pointers(array):
    return {s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


# A buffer that NumPy holds too is not reused: a test that wants it to be copies what came from
# NumPy, and what it looks at (since jax 0.11 NumPy views an array of several CPU devices).


def add(state, x):
    return {"sum": state["sum"] + x, "twice": state["twice"] * 2 + x}


@pytest.mark.parametrize("donated", [{"donate_argnums": 0}, {"donate_argnames": ("state",)}])
def test_buffers_are_reused(mesh2x4, donated):
    step = mw.jit(add, mesh=mesh2x4, in_shardings=P("x"), out_shardings=P("x"), **donated)
    state = {name: jnp.copy(put(mesh2x4, "x")) for name in ("sum", "twice")}
    x = put(mesh2x4, "x")
    for i in range(4):  # from Python, then from C++
        before, held = state, pointers(state["sum"]) | pointers(state["twice"])
        state = step(state, x)
        assert all(a.is_deleted() for a in before.values())
        assert not x.is_deleted()
        assert pointers(state["sum"]) | pointers(state["twice"]) == held
        np.testing.assert_array_equal(jnp.copy(state["sum"]), X * (i + 2))


def test_a_keyword_is_donated_by_name_and_by_number(mesh2x4):
    for donated in ({"donate_argnames": "state"}, {"donate_argnums": 1}):
        step = mw.jit(lambda x, state: state + x, mesh=mesh2x4, **donated)
        state = put(mesh2x4, "x")
        np.testing.assert_array_equal(step(X, state=state), X * 2)
        assert state.is_deleted()


def test_static_arguments_do_not_shift_what_is_donated(mesh2x4):
    step = mw.jit(lambda n, x, y: x * n + y, mesh=mesh2x4, static_argnums=0, donate_argnums=2)
    x, y = put(mesh2x4, "x"), put(mesh2x4, "x")
    for _ in range(3):
        y = step(2, x, y)
    np.testing.assert_array_equal(y, X * 7)
    assert not x.is_deleted()


def test_what_came_from_elsewhere_is_kept(mesh2x4):
    step = mw.jit(lambda x: x + 1, mesh=mesh2x4, in_shardings=P("x"), donate_argnums=0)
    host, loose = X.copy(), jnp.asarray(X)
    for _ in range(2):
        np.testing.assert_array_equal(step(host), X + 1)
        np.testing.assert_array_equal(step(loose), X + 1)
    np.testing.assert_array_equal(host, X)


def test_what_cannot_be_reused_warns_as_in_jax(mesh8):
    step = mw.jit(lambda x: x.sum(), mesh=mesh8, donate_argnums=0)
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        step(put(mesh8, None, "x"))


@pytest.fixture
def step(mesh2x4):
    def step(state, x):
        return {"a": state["a"] + x, "b": state["b"] - x}

    return mw.jit(step, mesh=mesh2x4, donate_argnums=0)


GONE = """step was called with arrays whose buffers are gone:
  - args[0]['a']: Array has been deleted with shape=float32[4,8].
  - args[0]['b']: Array has been deleted with shape=float32[4,8].
A call that donates an argument (donate_argnums, donate_argnames) gives its buffers to the results.
Go on with the results of that call, or do not donate what is needed again."""


def test_reading_what_was_donated(step, mesh2x4):
    state = {"a": put(mesh2x4, "x"), "b": put(mesh2x4, "x")}
    x = put(mesh2x4)
    step(state, x)
    for _ in range(2):
        with pytest.raises(mw.DeletedArrayError) as caught:
            step(state, x)
        assert str(caught.value) == GONE
    assert isinstance(caught.value, RuntimeError)  # as JAX's
    kept = mw.jit(lambda s: s["a"] * 2, mesh=mesh2x4)
    fresh = {"a": put(mesh2x4, "x"), "b": put(mesh2x4, "x")}
    np.testing.assert_array_equal(kept(fresh), X * 2)
    with pytest.raises(mw.DeletedArrayError, match=re.escape("args[0]['b']: Array has been")):
        kept(state)
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        state["a"] + 1
    np.testing.assert_array_equal(step(fresh, x)["a"], X * 2)


SHARED = """step donates an array that it reads twice: args[0]['a'] and args[1] are one array
The buffers of a donated argument become those of a result, and cannot be read as another argument,\
 or as what the function closes over.
Pass a copy (x.copy()) in one of the places, or do not donate it."""


def test_donating_what_is_read_twice(step, mesh2x4):
    a, b = put(mesh2x4, "x"), put(mesh2x4, "x")
    for _ in range(2):
        with pytest.raises(mw.DeletedArrayError) as caught:
            step({"a": a, "b": b}, a)
        assert str(caught.value) == SHARED
    np.testing.assert_array_equal(step({"a": a, "b": b}, a.copy())["a"], X * 2)


def key_and_its_data(mesh, _):
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))
    return key, jax.random.key_data(key)


def uneven(mesh):
    return mw.reshard(np.arange(13.0, dtype=np.float32), NamedSharding(mesh, P("x")))


def lone(mesh, _):
    held = jnp.arange(64.0)  # on one device, whose buffer is the first of those of the other
    return jax.device_put(held, NamedSharding(mesh, P())), held


OF_ONE_BUFFER = {
    "resharded": lambda m8, m24: (
        put(m8, None, "x"),
        lambda x: mw.reshard(x, NamedSharding(m24, P(None, ("x", "y")))),
    ),
    "put": lambda m8, m24: (
        put(m8, None, "x"),
        lambda x: jax.device_put(x, NamedSharding(m24, P(None, ("x", "y")))),
    ),
    "uneven": lambda m8, _: (uneven(m8), lambda u: mw.UnevenArray(u.padded, u.shape)),
    "padded": lambda m8, _: (uneven(m8), lambda u: u.padded),
    "uneven resharded": lambda m8, m24: (
        uneven(m8),
        lambda u: mw.reshard(u, NamedSharding(m24, P(("x", "y")))),
    ),
    "key": key_and_its_data,
    "lone": lone,
}


@pytest.mark.parametrize("case", OF_ONE_BUFFER)
def test_donating_what_is_read_under_another_name(case, mesh8, mesh2x4):
    x, other = OF_ONE_BUFFER[case](mesh8, mesh2x4)
    other = other(x) if callable(other) else other
    step = mw.jit(lambda x, y: (x, y), mesh=mesh8, donate_argnums=0)
    program = step.partition(x, other)
    for call in (step, step, program):
        with pytest.raises(mw.DeletedArrayError, match="are of the same buffers"):
            call(x, other)
    assert not x.is_deleted()


def test_donating_beside_what_lies_alike(mesh8, mesh2x4):
    step = mw.jit(lambda x, y: (x + 1, y.sum()), mesh=mesh8, donate_argnums=0)
    y = jnp.copy(put(mesh2x4, None, ("x", "y")))
    for _ in range(3):
        x = jnp.copy(put(mesh8, None, "x"))
        np.testing.assert_array_equal(step(x, y)[0], X + 1)
        assert x.is_deleted()
        assert not y.is_deleted()


CLOSED_OVER = "closed-over array 0 and args[0] are one array"


def test_donating_what_is_closed_over(mesh2x4):
    weight, x = put(mesh2x4, "x"), put(mesh2x4, "x")

    def step(state):
        return state * 2 + weight

    donating = mw.jit(step, mesh=mesh2x4, donate_argnums=0)
    for state in (weight, x, weight):  # before there is a program, then from C++
        if state is weight:
            with pytest.raises(mw.DeletedArrayError, match=re.escape(CLOSED_OVER)):
                donating(state)
        else:
            np.testing.assert_array_equal(donating(state), X * 3)
    with pytest.raises(mw.DeletedArrayError, match=re.escape(CLOSED_OVER)):
        donating.partition(weight)(weight)
    np.testing.assert_array_equal(donating(weight.copy()), X * 3)
    assert not weight.is_deleted()


def test_donating_what_is_closed_over_under_another_sharding(mesh8, mesh2x4):
    weight = put(mesh8, None, "x")
    step = mw.jit(lambda x: x * 2 + weight, mesh=mesh8, donate_argnums=0)
    np.testing.assert_array_equal(step(jnp.copy(weight)), X * 3)
    for _ in range(2):
        other = mw.reshard(weight, NamedSharding(mesh2x4, P(None, ("x", "y"))))
        with pytest.raises(mw.DeletedArrayError, match="are of the same buffers"):
            step(other)


def test_what_is_closed_over_is_donated_elsewhere(mesh2x4):
    weight = put(mesh2x4, "x")
    reading = mw.jit(lambda x: x * 2 + weight, mesh=mesh2x4)
    np.testing.assert_array_equal(reading(put(mesh2x4, "x")), X * 3)
    mw.jit(lambda x: x + 1, mesh=mesh2x4, donate_argnums=0)(weight)
    for _ in range(2):
        with pytest.raises(ValueError, match="has been deleted"):
            reading(put(mesh2x4, "x"))


def test_uneven_state_is_donated(mesh8):
    step = mw.jit(
        lambda s: s + 1, mesh=mesh8, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0
    )
    state = step(np.zeros(17, np.float32))
    for i in range(3):
        before, held = state, pointers(state.padded)
        state = step(state)
        assert before.is_deleted()
        assert pointers(state.padded) == held
        np.testing.assert_array_equal(state.copy(), np.full(17, i + 2.0))
    with pytest.raises(mw.DeletedArrayError, match=r"shape=float32\[17\]"):
        step(before)


def test_keys_are_donated(mesh8):
    step = mw.jit(lambda k: jax.random.fold_in(k, 1), mesh=mesh8, donate_argnums=0)
    wanted = jax.random.key(3)
    key = step(jax.device_put(jax.random.key(3), NamedSharding(mesh8, P())))
    for _ in range(3):
        before, key = key, step(key)
        assert before.is_deleted()
    for _ in range(4):
        wanted = jax.random.fold_in(wanted, 1)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(wanted))


def test_a_program_donates_what_it_is_called_with(mesh2x4):
    x = put(mesh2x4, "x")
    program = mw.jit(lambda x, y: x * 2 + y, mesh=mesh2x4, donate_argnums=0).partition(x, x)
    with pytest.raises(mw.DeletedArrayError, match="are one array"):
        program(x, x)
    np.testing.assert_array_equal(program(x, x.copy()), X * 3)
    with pytest.raises(mw.DeletedArrayError, match=re.escape("args[0]: Array has been deleted")):
        program(x, put(mesh2x4, "x"))
    reading = mw.jit(lambda x: x * 2, mesh=mesh2x4).partition(x)
    with pytest.raises(mw.DeletedArrayError, match=re.escape("args[0]: Array has been deleted")):
        reading(x)
