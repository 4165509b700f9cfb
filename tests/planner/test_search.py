"""The planner beside every other way to lay the arguments, and what it does with its limits."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import meshwise as mw
from meshwise.api import plan as api
from meshwise.planner.groups import Group
from meshwise.planner.search import Outcome, Until, search
from tests.meshes import mesh_of


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def mlp(x, up, down):
    return jnp.tanh(x @ up) @ down


def train(weights, x, y):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return ((h - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def momentum(params, means, x, y):
    def loss(params):
        return ((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2).mean()

    means = jax.tree.map(lambda m, g: 0.9 * m + g, means, jax.grad(loss)(params))
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, means), means


def experts(x, gate, up, down):
    share = jax.nn.softmax(x @ gate)
    hidden = jax.nn.relu(jnp.einsum("tm,emh->eth", x, up))
    return jnp.einsum("eth,ehm,te->tm", hidden, down, share)


def likelihood(table, tokens):
    return jax.nn.log_softmax(table[tokens] @ table.T).mean()


def layers(weights, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def heat(u):
    return u.at[1:-1].add(0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]))


def forces(x):
    return jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1)).sum(1)


FEED = {"up": f32(512, 2048), "down": f32(2048, 512)}
ONE, TWO = mesh_of(d=8), mesh_of(a=2, b=4)
CASES = {
    "a large batch": (ONE, mlp, (f32(4096, 64), f32(64, 256), f32(256, 64))),
    "large weights": (ONE, mlp, (f32(16, 1024), f32(1024, 4096), f32(4096, 1024))),
    "a step, a large batch": (ONE, train, ([f32(256, 256)] * 2, f32(8192, 256), f32(8192, 256))),
    "a step, large weights": (ONE, train, ([f32(2048, 2048)] * 2, f32(32, 2048), f32(32, 2048))),
    "momentum": (ONE, momentum, (FEED, FEED, f32(64, 512), f32(64, 512))),
    "experts": (ONE, experts, (f32(256, 64), f32(64, 16), f32(16, 64, 256), f32(16, 256, 64))),
    "words": (ONE, likelihood, (f32(8192, 64), jax.ShapeDtypeStruct((512,), "int32"))),
    "scanned layers": (ONE, layers, (f32(4, 256, 256), f32(4096, 256))),
    "heat": (ONE, heat, (f32(4096, 512),)),
    "all pairs": (ONE, forces, (f32(4096, 8),)),
    "words, 2x4": (TWO, likelihood, (f32(8192, 64), jax.ShapeDtypeStruct((512,), "int32"))),
    "scanned layers, 2x4": (TWO, layers, (f32(4, 2048, 2048), f32(32, 2048))),
    "all pairs, 2x4": (TWO, forces, (f32(4096, 8),)),
}


def every_layout(group, axis_sizes):
    """All ways to put axes on the dims of a group that they divide."""
    for places in itertools.product((None, *range(len(group.shape))), repeat=len(axis_sizes)):
        dims = [
            tuple([a for a, place in zip(axis_sizes, places, strict=True) if place == dim])
            for dim in range(len(group.shape))
        ]
        shards = [math.prod(axis_sizes[a] for a in axes) for axes in dims]
        if all(size % n == 0 for size, n in zip(group.shape, shards, strict=True)):
            yield tuple(dims)


def score(outcome):
    return outcome.seconds * outcome.peak_bytes**0.235


@pytest.mark.parametrize("case", CASES)
def test_nothing_else_is_much_better(case, monkeypatch):
    mesh, fun, args = CASES[case]
    asked = []
    monkeypatch.setattr(api, "search", lambda *a, **k: asked.append(a) or search(*a, **k))
    found = mw.plan(fun, *args, mesh=mesh)
    ((groups, axis_sizes, evaluate),) = asked
    every = itertools.product(*[every_layout(g, axis_sizes) for g in groups])
    outcomes = [evaluate(layouts) for layouts in every]
    assert 1 < len(outcomes) < 200
    assert score(found.best) <= 1.01 * min(map(score, outcomes))
    assert score(found.best) <= score(found.unplanned) * (1 + 1e-9)


GROUPS = (Group((0,), (8, 6), 192, True), Group((1,), (8,), 32, False))


def by_shards(layouts):
    """Each shard of the first group saves memory and costs time, each of the second saves time."""
    first, second = [sum(map(len, own or ())) for own in layouts]
    whole = [own or ((),) * n for own, n in zip(layouts, (2, 1), strict=True)]
    return Outcome(layouts, tuple(whole), 10 + 0.1 * first - 2 * second, 100 - 30 * first, 0.0)


@pytest.mark.parametrize(
    ("most", "shards"), [(None, 2), (100, 0), (80, 1), (40, 2), (10, 2)], ids=str
)
def test_a_limit_is_kept_first(most, shards):
    sizes = {"x": 2, "y": 2}
    found = search(GROUPS, sizes, by_shards, max_bytes=most, until=Until(100))
    first, second = found.best.layouts
    assert sum(map(len, first)) == shards
    assert second == (("x", "y"),)


def test_no_more_is_tried_than_allowed():
    for most in range(1, 12):
        tried = []

        def evaluate(layouts, tried=tried):
            tried.append(layouts)
            return by_shards(layouts)

        found = search(GROUPS, {"x": 2}, evaluate, until=Until(most))
        assert found.tried == len(tried) == len(set(tried)) <= most


def test_the_best_so_far_is_taken_when_time_is_over():
    late = iter([False] * 4 + [True] * 99)
    told = []
    found = search(
        GROUPS, {"x": 2, "y": 2}, by_shards, until=Until(99, lambda: next(late)), tell=told.append
    )
    assert found.was_ended
    assert found.tried == 5
    assert found.best == told[-1]
    assert not search(GROUPS, {"x": 2, "y": 2}, by_shards, until=Until(99)).was_ended
    scores = [one.seconds * one.peak_bytes**0.235 for one in told]
    assert scores == sorted(scores, reverse=True)


def test_what_cannot_be_planned_is_passed_over():
    def evaluate(layouts):
        return None if layouts[0] == (("x",), ()) else by_shards(layouts)

    found = search(GROUPS, {"x": 2}, evaluate, max_bytes=80, until=Until(100))
    assert found.best.layouts == (((), ("x",)), (("x",),))


# Of dims of 8, 6 and 8, by the devices of an axis and whether parts may be uneven.
FITS = {
    (3, False): ({((), ("z",))}, set()),
    (3, True): ({(("z",), ()), ((), ("z",))}, {(("z",),)}),
    (5, True): (set(), set()),  # two rows on each of four devices, none on the fifth
    (6, True): ({((), ("z",))}, set()),
}


@pytest.mark.parametrize(("size", "uneven"), FITS)
def test_only_what_fits_is_tried(size, uneven):
    layouts = FITS[size, uneven]
    tried = []
    search(
        GROUPS,
        {"z": size},
        lambda own: tried.append(own) or by_shards(own),
        until=Until(100),
        uneven=uneven,
    )
    assert {own for own, _ in tried} == {None, ((), ())} | layouts[0]
    assert {own for _, own in tried} == {None, ((),)} | layouts[1]


def test_what_lies_over_parts_of_axes_is_tried_whole():
    def evaluate(layouts):
        whole = layouts == (((), ()),)
        return Outcome(layouts, layouts if whole else (None,), 1.0 if whole else 10.0, 64, 0.0)

    groups = (Group((0,), (2, 4), 32, False),)
    assert search(groups, {"x": 8}, evaluate, until=Until(9)).best.seconds == 1.0
