"""Which arguments are laid alike, as one decision."""

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwise as mw
from tests.meshes import mesh_of
from tests.planner.test_search import f32, momentum, train


def adam(params, state, x):
    def loss(params):
        return (jnp.tanh(x @ params["up"]) @ params["down"]).mean()

    updates, state = optax.adam(1e-3).update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


def attention(q, k, v, out, x):
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ q, x @ k))
    return scores @ (x @ v) @ out


def deep(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return x


FEED = {"up": f32(64, 256), "down": f32(256, 64)}
LAYER = {"up": f32(64, 256), "bias": f32(256), "down": f32(256, 64)}


def decayed(params, x):
    grads = jax.grad(lambda p: (jnp.tanh(x @ p["first"]) @ p["last"]).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * (g + 0.01 * p), params, grads)


SQUARE = {"first": f32(64, 64), "last": f32(64, 64)}
CASES = {
    "a number that all meet": (
        decayed,
        (SQUARE, f32(32, 64)),
        [["args[0]['first']"], ["args[0]['last']"]],
    ),
    "a weight and its mean": (
        momentum,
        (FEED, FEED, f32(32, 64), f32(32, 64)),
        [["args[0]['down']", "args[1]['down']"], ["args[0]['up']", "args[1]['up']"]],
    ),
    "a weight and its moments": (
        adam,
        (FEED, jax.eval_shape(optax.adam(1e-3).init, FEED), f32(32, 64)),
        [
            [f"args[0]['{name}']", f"args[1][0].mu['{name}']", f"args[1][0].nu['{name}']"]
            for name in ("down", "up")
        ],
    ),
    "what meets a value in the same way": (
        attention,
        (*[f32(64, 64)] * 4, f32(4, 32, 64)),
        [["args[0]", "args[1]", "args[2]"]],
    ),
    "each weight of few layers": (
        train,
        ([f32(64, 64)] * 3, f32(32, 64), f32(32, 64)),
        [[f"args[0][{i}]"] for i in range(3)],
    ),
    "weights of many layers": (
        deep,
        ([LAYER] * 12, f32(32, 64)),
        [[f"args[0][{i}]['{name}']" for i in range(12)] for name in ("down", "up")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_lies_alike(case):
    fun, args, expected = CASES[case]
    found = mw.plan(fun, *args, mesh=mesh_of(x=4), most_tried=2)
    paths = found.program.in_paths
    groups = [[paths[i] for i in group.arguments] for group in found.groups]
    assert all(sorted(group) in map(sorted, groups) for group in expected), groups


def biased(params, x):
    def loss(params):
        h = x
        for up, bias, down in params:
            h = jnp.tanh(h @ up + bias) @ down
        return h.mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_of_many_the_little_that_is_kept_follows_and_what_comes_anew_does_not():
    sizes = (128, 256, 384, 512)
    params = [(f32(64, n), f32(n), f32(n, 64)) for n in sizes]
    found = mw.plan(biased, params, f32(2, 64), mesh=mesh_of(x=2), most_tried=2)
    paths = found.program.in_paths
    follow = {paths[i] for group in found.groups if group.follows for i in group.arguments}
    assert follow == {f"args[0][{layer}][1]" for layer in range(len(sizes))}
    assert "args[1]" in {paths[i] for g in found.groups if not g.follows for i in g.arguments}
    assert "4 small ones that follow" in str(found)
