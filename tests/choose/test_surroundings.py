"""What is found once for nodes that lie alike is what is found for each of them."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw

SEARCH = importlib.import_module("meshwise.choose.search")
SURROUNDINGS = importlib.import_module("meshwise.choose.surroundings")
DESCENT = importlib.import_module("meshwise.choose.descend")
MESH = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def attention(x, weights):
    q, k, v = (jnp.einsum("bsm,mhd->bshd", x, w) for w in weights)
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return jnp.einsum("bhst,bthd->bshd", scores, v).reshape(x.shape)


def loss(layers, x):
    for weights, up, down in layers:
        x = x + attention(norm(x), weights)
        x = x + jax.nn.gelu(norm(x) @ up) @ down
    return (x**2).mean()


def trained(layers, moments, x):
    """A step with a momentum, and gradients cut where their norm is large."""
    gradients = jax.grad(loss)(layers, x)
    size = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
    moments = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(size, 1.0), moments, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, layers, moments), moments


def transformer(heads, up, down, layers=3):
    """Its types, and how they lie."""
    weights = [([f32(64, 8, 8)] * 3, f32(64, 256), f32(256, 64))] * layers
    specs = [([heads] * 3, up, down)] * layers
    return trained, (weights, weights, f32(16, 32, 64)), (specs, specs, P("x")), (specs, specs)


def recurrent(steps, weight):
    def total(weight, x):
        state = jnp.zeros_like(x[0])
        for row in x:
            state = jnp.tanh(state @ weight + row)
        return (state**2).sum()

    return jax.grad(total), (f32(64, 64), f32(steps, 32, 64)), (weight, P(None, "x")), weight


def branches(weight):
    """A value that is read in a branch is told apart."""

    def chosen(flag, x, weight):
        for _ in range(3):
            x = lax.cond(flag, lambda x: jnp.tanh(x @ weight), lambda x: x * 2, x)
        return x

    types = jax.ShapeDtypeStruct((), bool), f32(64, 64), f32(64, 64)
    return chosen, types, (P(), P("x"), weight), P("x")


PROGRAMS = {
    "weights in shards of rows": transformer(P("x"), P("x"), P("x")),
    "weights over both": transformer(P("x", "y"), P("x", "y"), P("y", "x")),
    "heads and hidden units over one": transformer(P(None, "y"), P(None, "y"), P("y")),
    "weights on all devices": transformer(P(), P(), P()),
    "recurrent": recurrent(6, P("y")),
    "branches": branches(P(None, "y")),
}


def plan_of(name):
    function, types, given, wanted = PROGRAMS[name]
    how = {"mesh": MESH, "in_shardings": given, "out_shardings": wanted}

    def fresh(*args):  # of what was planned before nothing is found again
        return function(*args)

    plan = mw.jit(fresh, **how).partition(*types).plan
    return [(e.strategy, e.operands, e.results) for e in plan.equations], plan.seconds


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_are_those_of_each_node_by_itself(name, monkeypatch):
    asked, alike = [], []
    found, told = DESCENT.found_once, SURROUNDINGS._told
    monkeypatch.setattr(DESCENT, "found_once", lambda *a: asked.append(1) or found(*a))
    monkeypatch.setattr(SURROUNDINGS, "_told", lambda *a: alike.append(told(*a)) or alike[-1])
    plan = plan_of(name)
    known = [key for key in alike if key is not None]
    assert len(known) < len(asked)
    if name != "branches":
        assert len(set(known)) < len(known)  # some are found for others
    monkeypatch.setattr(SURROUNDINGS, "_told", lambda *a: None)
    assert plan_of(name) == plan


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_are_the_same_however_many_values_are_many(name, monkeypatch):
    plan = plan_of(name)
    for module in (SEARCH, SURROUNDINGS, DESCENT):
        monkeypatch.setattr(module, "WIDE", 2)
    assert plan_of(name) == plan
