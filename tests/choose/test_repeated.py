"""Work that repeated layers, and more devices, do not add: counted, not timed."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of_sizes

# `meshwise.reshard` is a function of the public interface, too.
SEARCH = importlib.import_module("meshwise.reshard.search")
STARTS = importlib.import_module("meshwise.choose.starts")
REGISTRY = importlib.import_module("meshwise.rules.registry")
DESCENT = importlib.import_module("meshwise.choose.search")


COUNTED = ("paths", "rules", "nodes", "changes")


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def forget():
    """Drop what is remembered from call to call."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "meshwise":
            for function in vars(module).values():
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def loss(x, weights):
    for first, second in weights:
        hidden = mw.shard(jax.nn.gelu(norm(x) @ first), P("x", "y"))
        x = x + hidden @ second
    return (x**2).sum()


def step(x, weights):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss, 1)(x, weights))


def partitioned(layers, on, rows=1 << 16, width=512):
    types = f32(rows, width), [(f32(width, 4 * width), f32(4 * width, width))] * layers
    shardings = (P("x"), [(P(None, "y"), P("y"))] * layers)
    how = {"mesh": on, "in_shardings": shardings, "out_shardings": shardings[1]}

    def fresh(x, weights):  # of what was planned before nothing is found again
        return step(x, weights)

    return mw.jit(fresh, **how).partition(*types)


def work(monkeypatch, layers):
    """What a plan of so many layers takes: searches, rules read, nodes priced; changes priced."""
    forget()
    counts = dict.fromkeys(COUNTED, 0)

    def counted(name, function):
        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name, owner, attribute in (
            ("paths", SEARCH, "shortest_path"),
            ("nodes", STARTS, "_find_cheapest"),
            ("rules", REGISTRY.REGISTRY, "describe"),
            ("changes", DESCENT.Search, "_delta"),
        ):
            patch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
        program = partitioned(layers, mesh_of_sizes(2, 4))
    return {**counts, "equations": len(program.plan.program.equations)}


def test_layers_that_are_alike_are_planned_once(monkeypatch):
    """Not a change more is priced for them: what lies alike among what does is decided once."""
    few, many = (work(monkeypatch, layers) for layers in (4, 16))
    assert few["paths"] > 0 and few["rules"] > 20 and few["nodes"] > 10 and few["changes"] > 1000
    assert many["equations"] > 3.5 * few["equations"]
    assert [many[k] for k in COUNTED] == [few[k] for k in COUNTED]


def calls(layers):
    """How many functions Python calls for a plan of so many layers."""
    count = 0

    def seen(_, event, __):
        nonlocal count
        count += event == "call"

    forget()
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        partitioned(layers, mesh_of_sizes(2, 4))
    finally:
        sys.setprofile(before)
    return count


def test_nothing_takes_the_square_of_the_layers():
    """One region holds what all layers begin with: none may be gone through for each of them."""
    calls(4)  # JAX remembers what it traced for the first time
    small, middle, large = map(calls, (8, 16, 32))
    assert large - middle < 2.15 * (middle - small)


@pytest.mark.parametrize("x", [8, 128])
def test_more_devices_make_no_larger_program(x):
    """Of as many rows for each: of few it may be less to sum them than to gather weights."""
    few, many = (partitioned(2, mesh_of_sizes(n, 4), rows=(1 << 15) * n) for n in (2, x))
    assert len(many.jaxpr.eqns) == len(few.jaxpr.eqns)
    assert [c.kind for c in many.collectives] == [c.kind for c in few.collectives]


def test_a_descent_that_ends_like_another_asks_nothing_again(monkeypatch):
    """Of a placement that was left as it is, all is known; of one that differs, what is far off."""
    asked = []
    begun = importlib.import_module("meshwise.choose.descents")
    found = importlib.import_module("meshwise.choose.found")
    descent = importlib.import_module("meshwise.choose.descend")
    best, best_move, descended = descent._best, descent._best_move, found.descended
    monkeypatch.setattr(descent, "_best", lambda *a: asked.append(1) or best(*a))
    monkeypatch.setattr(descent, "_best_move", lambda *a: asked.append(1) or best_move(*a))
    counts = []

    def again(search, limits):
        one = descended(search, limits)
        ended = one.search.axes
        asked.clear()
        same = descended(DESCENT.Search(search.graph, ended), limits)
        counts.append((len(asked), same.seconds - one.seconds))
        asked.clear()
        descended(DESCENT.Search(search.graph, ended, seconds_per_byte=1.0), limits)
        assert asked  # what is held has a price there: nothing is known
        return one

    monkeypatch.setattr(begun, "descended", again)
    partitioned(2, mesh_of_sizes(2, 4))
    assert counts
    assert all(count == 0 and more == 0 for count, more in counts)


def test_those_who_read_what_many_read_are_asked_once(monkeypatch):
    """What one of them does depends on how the others read it, not on which of them does."""
    asked = []
    descent = importlib.import_module("meshwise.choose.descend")
    best = descent._best
    monkeypatch.setattr(descent, "_best", lambda *a: asked.append(1) or best(*a))

    def products(x, weights):
        x = jnp.tanh(x)
        return [(x @ w).sum() for w in weights]

    counts = []
    for count in (40, 120):
        asked.clear()
        hints = P("x"), [P("y"), P(None, "y")] * (count // 2)
        step = mw.jit(products, mesh=mesh_of_sizes(2, 4), in_shardings=hints)
        step.partition(f32(64, 64), [f32(64, 64)] * count)
        counts.append(len(asked))
    assert 0 < counts[1] <= counts[0]


@pytest.mark.parametrize(
    "shuffle",
    [
        lambda x: jnp.concatenate(jnp.split(x, 4)[::-1]),
        lambda x: jnp.concatenate([x[0::2], x[1::2]]),
    ],
)
def test_ways_through_what_is_laid_otherwise_are_not_counted(shuffle):
    """Each step reads the one before at several places: in so many ways none could be counted."""

    def shuffled(x):
        for _ in range(30):
            x = shuffle(x)
        return x * 2

    x = np.arange(64.0, dtype=np.float32).reshape(16, 4)
    program = mw.jit(shuffled, mesh=mesh_of_sizes(2, 4), in_shardings=(P("x"),)).partition(x)
    np.testing.assert_array_equal(program.simulate(x), shuffled(x))
