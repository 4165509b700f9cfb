"""Programs on eight real devices inside other transformations, and behind dispatch from C++."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise.errors import MeshError
from meshwise.run.execute import Executable
from tests.run.executables import (
    W,
    X,
    check_matmul,
    doubled,
    matmul,
    program,
    shape_of,
    sharding,
)


def test_inside_other_transformations(mesh):
    function = matmul(mesh).as_function()
    with jax.set_mesh(mesh):
        outs = jax.jit(function)([X, W])
        np.testing.assert_allclose(outs[0], X @ W)
        assert outs[0].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
        assert outs[1].sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
        placed = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
        both = jax.jit(lambda x: function([x, W])[1] + x)(placed)
        np.testing.assert_allclose(both, 2 * X + 1)
        gradient = jax.jit(jax.grad(lambda x: function([x, W])[0].sum()))(placed)
        np.testing.assert_allclose(gradient, np.broadcast_to(W.sum(1), X.shape))
    np.testing.assert_allclose(jax.jit(function)([X, W])[0], X @ W)
    batched = jax.vmap(lambda x: function([x, W])[0])(np.stack([X, X + 1]))
    np.testing.assert_allclose(batched[1], (X + 1) @ W)
    np.testing.assert_allclose(jax.jit(lambda x: matmul(mesh)([x, W])[0])(X), X @ W)
    assert jax.eval_shape(function, [X, W])[0].shape == (4, 4)


def test_uneven_dims_inside_other_transformations(mesh):
    function = doubled(mesh, 7).as_function()
    x = np.arange(7, dtype=np.float32)
    u, _ = doubled(mesh, 7)([x])
    with jax.set_mesh(mesh):
        out, total = jax.jit(function)([jnp.asarray(x)])
        assert isinstance(out, jax.Array)
        np.testing.assert_array_equal(out, x * 2)
        assert total == 21
        np.testing.assert_array_equal(jax.jit(function)([u])[0], x * 4)
        gradient = jax.jit(jax.grad(lambda x: (function([x])[0] ** 2).sum()))(x)
        np.testing.assert_array_equal(gradient, 8 * x)
        np.testing.assert_array_equal(jax.jit(lambda v: doubled(mesh, 7)([v])[0])(x), x * 2)


def test_constants_that_lie_on_a_mesh(mesh):
    whole = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P()))
    part = jax.device_put(whole, NamedSharding(mesh, P("model")))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 2), NamedSharding(mesh, P("data")))
    types = [(shape_of(8), sharding("model"))]
    x = np.ones(8, np.float32)

    def function(x):
        bits = jax.random.key_data(keys).sum() * 0
        return [x + whole[1] + lax.reduce_max(part, (0,)) + bits.astype(x.dtype)]

    for context in (None, mesh):
        with jax.set_mesh(context):
            run = Executable(program(function, mesh, types, types), mesh)
            np.testing.assert_array_equal(run([x])[0], 9)
            np.testing.assert_array_equal(jax.jit(run.as_function())([x])[0], 9)


def dispatched(run, calls):
    """The executable of a function of a dict, behind C++ dispatch; `calls` counts Python's."""

    def miss(tree, *, w):
        calls.append(tree)
        args = [tree["x"], w]
        outs = run(args)
        results = {"a": outs[0], "b": outs[1:]}
        return results, run.fast_path(args, results), False

    return _jax.dispatcher("step", lambda *args, **kwargs: miss(*args, **kwargs)[0], miss)


def test_dispatch_without_python(mesh):
    calls = []
    run = matmul(mesh)
    step = dispatched(run, calls)
    first = step({"x": X}, w=W)
    check_matmul([first["a"], *first["b"]], mesh)
    for _ in range(3):
        again = step({"x": X}, w=W)
        check_matmul([again["a"], *again["b"]], mesh)
    assert len(calls) == 1
    for _ in range(3):
        moved = step({"x": again["b"][0]}, w=W)
        np.testing.assert_array_equal(moved["b"][0], X + 2)
    assert len(calls) == 2
    elsewhere = jax.device_put(X, NamedSharding(mesh, P("model")))
    check_matmul(jax.tree.leaves(step({"x": elsewhere}, w=W)), mesh)
    check_matmul(jax.tree.leaves(step({"x": elsewhere}, w=W)), mesh)
    with pytest.raises(MeshError, match="argument 1 is on"):
        step({"x": X}, w=jax.device_put(W, jax.devices()[3]))
    with jax.disable_jit():
        check_matmul(jax.tree.leaves(step({"x": X}, w=W)), mesh)


def test_dispatch_of_what_has_to_stay_in_python(mesh):
    calls = []

    def count(function, run, *args):
        def miss(*args):
            calls.append(args)
            outs = run(args)
            return outs, run.fast_path(args, outs), False

        calls.clear()
        step = _jax.dispatcher("step", run, miss)
        results = [step(*args) for _ in range(3)]
        function(results[-1])
        return len(calls)

    uneven = doubled(mesh, 7)
    x = np.arange(7, dtype=np.float32)
    assert count(lambda outs: np.testing.assert_array_equal(outs[0], 2 * x), uneven, x) == 3
    u, _ = uneven([x])
    assert count(lambda outs: np.testing.assert_array_equal(outs[0], 4 * x), uneven, u) == 3


def test_dispatch_with_an_unused_argument_a_constant_and_keys(mesh):
    table = jnp.arange(100.0)
    keys = jax.random.split(jax.random.key(1), 8)
    key_type = (shape_of(8, dtype=keys.dtype), sharding("model"))
    vector = (shape_of(8), sharding("model"))

    def function(unused, x, k):
        del unused
        return [x + table[3], k]

    run = Executable(
        program(function, mesh, [vector, vector, key_type], [vector, key_type]), mesh, donated=(1,)
    )
    calls = []

    def miss(*args):
        calls.append(args)
        outs = run(args)
        return outs, run.fast_path(args, outs), False

    step = _jax.dispatcher("step", run, miss)
    unused, x = (jax.device_put(np.ones(8, np.float32), s) for s in run.in_shardings[:2])
    for _ in range(4):
        before = x
        x, keys = step(unused, x, keys)
        assert before.is_deleted()
    np.testing.assert_array_equal(x, 13)
    np.testing.assert_array_equal(
        jax.random.key_data(keys), jax.random.key_data(jax.random.split(jax.random.key(1), 8))
    )
    assert len(calls) <= 3  # keys from Python and from C++ differ in how their sharding is written
