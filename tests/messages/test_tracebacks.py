"""Errors show what the user wrote, and no frame of this package or of JAX's core."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw

OWN = str(Path(mw.__file__).parent)
X = np.ones((8, 8), np.float32)


def misfit(x):
    return x @ jnp.ones((3, 4))


def fails(x):
    raise KeyError("the user's own")


CALLS = {
    "what the function raises": (KeyError, lambda m: mw.jit(fails, mesh=m)(X)),
    "what JAX raises in the function": (TypeError, lambda m: mw.jit(misfit, mesh=m)(X)),
    "in a loop": (TypeError, lambda m: mw.jit(lambda x: jax.lax.map(misfit, x), mesh=m)(X[None])),
    "inside of another": (KeyError, lambda m: jax.jit(mw.jit(fails, mesh=m))(X)),
    "no array": (mw.ArgumentError, lambda m: mw.jit(jnp.sin, mesh=m)("x")),
    "a wrong hint": (mw.HintError, lambda m: mw.jit(jnp.sin, mesh=m, in_shardings=P("z"))(X)),
    "no int of 32 bits": (OverflowError, lambda m: mw.jit(jnp.sin, mesh=m)({"n": 2**70})),
    "partition": (KeyError, lambda m: mw.jit(fails, mesh=m).partition(X)),
    "trace": (KeyError, lambda m: mw.jit(fails, mesh=m).trace(X)),
    "lower": (TypeError, lambda m: mw.jit(misfit, mesh=m).lower(X)),
    "eval_shape": (TypeError, lambda m: mw.jit(misfit, mesh=m).eval_shape(X)),
    "reshard": (mw.HintError, lambda m: mw.reshard(X, P("x"))),
    "reshard_plan": (mw.HintError, lambda m: mw.reshard_plan((8,), "int8", m, P("z"), P())),
}


def frames(call, mesh, error):
    """Files of the frames of what a call raises."""
    with pytest.raises(error) as raised:
        call(mesh)
    return [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]


@pytest.mark.parametrize("case", CALLS)
def test_own_frames_are_hidden(mesh2x4, case):
    error, call = CALLS[case]
    found = frames(call, mesh2x4, error)
    assert not [file for file in found if file.startswith(OWN)]
    assert found.count(__file__) >= 2  # here, and the call in the table


@pytest.fixture
def unfiltered():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("case", CALLS)
def test_own_frames_are_shown_where_jax_shows_its_own(mesh2x4, case, unfiltered):
    error, call = CALLS[case]
    assert any(file.startswith(OWN) for file in frames(call, mesh2x4, error))


def test_a_number_that_is_too_large_is_named_by_its_path(mesh2x4):
    with pytest.raises(OverflowError) as raised:
        mw.jit(jnp.sin, mesh=mesh2x4)({"n": 2**70})
    assert raised.value.__notes__ == ["It is args[0]['n'] of sin."]
