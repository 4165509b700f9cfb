"""Errors show what the user wrote, and no frame of this package or of JAX's core."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.messages.exactly import lines_of

line_of = lines_of(__file__)
OWN = str(Path(mw.__file__).parent)
X = np.ones((8, 8), np.float32)


def misfit(x):
    return x @ jnp.ones((3, 4))


def fails(x):
    raise KeyError("the user's own")


def program(mesh):
    return mw.jit(jnp.sin, mesh=mesh).partition(X)


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
    "a mesh that is none": (mw.ArgumentError, lambda m: mw.jit(jnp.sin, mesh=(2, 4))),
    "a decorator": (mw.ArgumentError, lambda m: mw.jit(mesh=m, hoist_bytes=-1)(jnp.sin)),
    "a completion": (mw.ArgumentError, lambda m: mw.jit(jnp.sin, mesh=m, completion="best")),
    "figures": (mw.ArgumentError, lambda m: mw.jit(jnp.sin, mesh=m, hardware="h100")),
    "shard": (mw.ArgumentError, lambda m: mw.shard("x", P("x"))),
    "plan": (mw.ArgumentError, lambda m: mw.plan(jnp.sin, X, mesh=m, max_bytes=1.5)),
    "autotune": (mw.ArgumentError, lambda m: mw.autotune(program(m), budget_s=-1)),
    "calibrate": (mw.ArgumentError, lambda m: mw.calibrate([])),
    "register_rule": (mw.RuleError, lambda m: mw.register_rule(3, "i -> i")),
    "like": (mw.ArgumentError, lambda m: mw.like(3, jnp.sin)),
    "a kernel": (mw.ArgumentError, lambda m: mw.like(jnp.sin, jnp.sin)("x")),
    "mw.program": (mw.MeshError, lambda m: mw.program(m, axes="z")),
    "a move": (mw.ArgumentError, lambda m: mw.Schedule(program(m)).split(None)),
    "of a schedule": (mw.ArgumentError, lambda m: mw.Schedule(3)),
    "a verb": (mw.LayoutError, lambda m: mw.all_reduce(X, op="product of all")),
    "dropout": (mw.LayoutError, lambda m: mw.dropout(3, X, 0.5)),
    "no function": (mw.ArgumentError, lambda m: mw.program(m)(3)),
    "an uneven array": (mw.ArgumentError, lambda m: mw.UnevenArray(X, 3)),
    "of another call": (mw.ArgumentError, lambda m: program(m)(X[:4])),
    "simulated": (mw.ArgumentError, lambda m: program(m).simulate(X[:4])),
    "timeline": (mw.ArgumentError, lambda m: program(m).timeline("h100")),
    "pipeline": (mw.PipelineError, lambda m: mw.pipeline(misfit, np.ones(4), np.ones(()))),
    "stages": (mw.PipelineError, lambda m: mw.stack_stages([], stages=2)),
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


def test_lines_that_jax_names_are_the_users(mesh2x4, caplog):
    part = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])

    def on_two(x):
        x = mw.jit(jnp.sin, mesh=mesh2x4)(x)  # one mesh
        return mw.jit(jnp.cos, mesh=part)(x)  # another

    mw.jit(jnp.exp, mesh=part)(X)
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        jax.jit(on_two)(X)
    assert line_of("one mesh") in str(caught.value)
    assert line_of("another") in str(caught.value)
    with jax.explain_cache_misses(True):
        mw.jit(lambda x: x * 2, mesh=mesh2x4)(X)  # traced
    told = [r.getMessage() for r in caplog.records if "TRACING CACHE MISS" in r.getMessage()]
    assert any(line_of("traced") in text for text in told)
    assert not any(OWN in text for text in told)
