"""Explicit axes: types, values and shardings are those of `jax.jit`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import auto_axes, reshard

from tests.drop_in.explicit_functions import FUNCTIONS, odd_sine
from tests.drop_in.explicit_running import MIXED, ROWS, SEEN, SQUARE, XY, agrees, applied, see


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    kinds, fn, arrays = FUNCTIONS[name]
    agrees(kinds, applied(fn), arrays)


def loss(fn):
    return lambda *args: sum(jnp.sum(jnp.square(out)) for out in jax.tree.leaves(fn(*args)))


def gradients(jit, fn, *args):
    step = jit(loss(fn))
    return (
        jax.grad(step)(*args),
        jit(jax.grad(step))(*args),
        jax.value_and_grad(loss(jit(fn)))(*args),
    )


def forward(jit, fn, *args):
    step = jit(fn)
    return jax.jvp(step, args, args), jax.linearize(step, *args)[1](*args)


def mapped(jit, fn, *args):
    stacked = [jnp.stack([a] * 3) for a in args]
    return jax.vmap(jit(fn))(*stacked), jit(jax.vmap(jit(fn), out_axes=1))(*stacked)


def nested(jit, fn, *args):
    inner = jit(fn)
    return jit(lambda *args: jax.tree.map(see, inner(*args)))(*args), jax.jit(inner)(*args)


def rematerialised(jit, fn, *args):
    return jax.grad(jit(jax.checkpoint(loss(fn))))(*args)


def ahead_of_time(jit, fn, *args):
    step = jit(fn)
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in args]
    compiled = step.lower(*structs).compile()
    SEEN.extend(map(str, jax.tree.leaves(jax.eval_shape(step, *structs))))
    SEEN.extend(s.spec for s in jax.tree.leaves(compiled.output_shardings))
    SEEN.extend(map(str, jax.make_jaxpr(step)(*args).out_avals))
    return compiled(*args)


def to_placements(jit, fn, *args):
    return jit(fn, out_shardings=P("y"))(*args), jit(fn, out_shardings=None)(*args)


WAYS = {
    w.__name__: w
    for w in (gradients, forward, mapped, nested, rematerialised, ahead_of_time, to_placements)
}
CROSSED = {
    "elementwise": WAYS,
    "product, summed": WAYS,
    "gather": ("nested", "ahead_of_time"),
    "scan": ("gradients", "mapped", "rematerialised"),
    "auto_axes": ("gradients", "mapped", "nested"),
    "mixed, constrained": ("gradients", "mapped", "ahead_of_time"),
    "unreduced": ("gradients", "nested"),
    "other meshes": ("nested", "ahead_of_time"),
    "pads, slices, joins": ("gradients",),
    "random": ("nested",),
}


LONG = {
    ("random", "nested"),
    ("scan", "gradients"),
    ("scan", "mapped"),
    ("scan", "rematerialised"),
    ("auto_axes", "gradients"),
    ("auto_axes", "mapped"),
    ("pads, slices, joins", "gradients"),
}


def marked(*case):
    return pytest.param(*case, marks=[pytest.mark.slow] if case in LONG else [])


@pytest.mark.parametrize(
    ("name", "way"), [marked(n, w) for n, ways in CROSSED.items() for w in ways]
)
def test_ways_of_calling(name, way):
    kinds, fn, arrays = FUNCTIONS[name]
    agrees(kinds, lambda jit, *args: WAYS[way](jit, fn, *args), arrays)


def custom_rules(jit, x):
    return jax.grad(jit(lambda x: odd_sine(x).sum()))(x), jit(jax.grad(loss(odd_sine)))(x)


def mapped_over_a_sharded_dim(jit, x):
    inner = jit(lambda row: see(jnp.sin(see(row)) * 2))
    twice = jit(jax.vmap(lambda row: reshard(row, P(None))))
    return jax.vmap(inner)(x), twice(x), jax.vmap(inner, in_axes=1, out_axes=1)(x)


def transposed(jit, x):
    linear = jit(lambda x: reshard(x, P(None, "x")) * 3)
    return jax.linear_transpose(linear, x)(reshard(x, P(None, "x")))


def twice_differentiated(jit, x):
    step = jit(loss(jnp.sin))
    return jax.grad(lambda x: jax.grad(step)(x).sum())(x)


def trained(jit, w):
    @partial(jit, donate_argnums=0)
    def step(w):
        return jax.tree.map(
            lambda v, g: v - 0.1 * g, w, jax.grad(lambda w: loss(jnp.tanh)(w["a"]))(w)
        )

    state = {"a": w}
    for _ in range(3):
        state = step(state)
    return state


def closed_over(jit, x):
    return jit(lambda y: see(y * x + x.sum(0)))(x), jit(lambda: see(x) * 2)()


def of_the_host(jit, x):
    host = np.asarray(x)
    return [
        jit(lambda x: see(x) * 2)(host),
        jit(lambda x: see(x) * 2, in_shardings=P("x"))(host),
        jit(lambda x: see(x) * 2)(3.0),
        jit(lambda x, y: x + y)(x, host),
        jit(lambda x: x, out_shardings=P("y"))(host),
    ]


def outside(jit, x):
    matmul = jit(lambda x: see(x) @ x.T)
    late = auto_axes(jit(lambda x: x * 2))
    return auto_axes(matmul, out_sharding=P("x", "y"))(x), late(x, out_sharding=P("y"))


def of_keys(jit, x):
    keys = reshard(jax.random.split(jax.random.key(0), 8), P("x"))
    return (
        jit(jax.vmap(lambda key: jax.random.normal(key, (3,))))(keys),
        jit(see)(keys),
        jit(lambda: reshard(jax.random.key(5), P()))(),
    )


CALLS = {
    "custom rules": (XY, custom_rules, [SQUARE]),
    "vmap over a sharded dim": (XY, mapped_over_a_sharded_dim, [SQUARE]),
    "linear_transpose": (XY, transposed, [SQUARE]),
    "grad of grad": (XY, twice_differentiated, [SQUARE]),
    "a training loop": (XY, trained, [SQUARE]),
    "a mixed training loop": (MIXED, trained, [SQUARE]),
    "closed over": (XY, closed_over, [SQUARE]),
    "arrays of the host": (XY, of_the_host, [ROWS]),
    "under auto_axes": (XY, outside, [SQUARE]),
    "keys": (XY, of_keys, [SQUARE]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    agrees(*CALLS[name])
