"""What lowering a program does not do again, and what it leaves as it was."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import core
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import explicit
from meshwise.run.garbage import garbage_later

TABLE = np.arange(6, dtype=np.float32)


def step(x, w):
    """Nested bodies, a constant that is an array, a result that is an argument, a whole number."""
    y = lax.fori_loop(0, 3, lambda i, a: jnp.sin(a @ w) + i, x)
    return jnp.tanh(y) + TABLE, w, jnp.argmax(y, 0), 2


@pytest.fixture
def partitioned():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    args = np.linspace(0, 1, 48, dtype=np.float32).reshape(8, 6), np.eye(6, dtype=np.float32)[::-1]
    fn = mw.jit(step, mesh=mesh, in_shardings=(P("x", "y"), P()), out_shardings=P())
    return fn.partition(*args), args


def test_no_equation_is_bound_again(partitioned, monkeypatch):
    program, args = partitioned
    expected = step(*args)

    def refuse(*_, **__):
        raise AssertionError("traced again")

    # JAX lowers a loop by binding what is in it.
    monkeypatch.setattr(lax.tanh_p, "bind", refuse)
    compiled = program.compile()
    monkeypatch.undo()
    assert "tanh" in compiled.as_text()
    for found, wanted in zip(program(*args), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_same_with_jaxs_own_checks(partitioned):
    program, args = partitioned
    with jax.enable_checks(True):
        found = program(*args)
    for one, wanted in zip(found, step(*args), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5)


def test_types_are_watched_once():
    def layers(value):
        """How often a type is asked for on the way."""
        count, type_of = 0, core.pytype_aval_mappings[type(value)]
        while type_of := getattr(type_of, "watched", None):
            count += 1
        return count

    for _ in range(2):
        with explicit.plain_types():
            assert layers(jnp.ones(3)) == 1


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, KeyError])
def test_garbage_is_looked_for_again(enabled, error):
    (gc.enable if enabled else gc.disable)()
    try:
        with garbage_later():
            assert not gc.isenabled()
            with garbage_later():
                pass
            assert not gc.isenabled()
            if error:
                raise error
    except KeyError:
        assert error
    finally:
        found = gc.isenabled()
        gc.enable()
    assert found == enabled


def test_nothing_is_looked_through_while_a_program_is_lowered(partitioned):
    looked = []

    def note(phase, info):
        looked.append(phase)

    partitioned[0].executable.lower()  # what is made once a program, or once a process, is made
    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        looked.clear()
        lowered = partitioned[0].executable.lower()
        count = len(looked)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert "stablehlo" in lowered.as_text()
    assert count < 20
