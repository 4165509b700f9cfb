"""Loops and branches whose bodies stand in a flat program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.flatten import flatten
from meshwise.ir.bodies import Item, nest, scopes, trips

OPEN = P.UNCONSTRAINED
X = np.ones((4, 3), np.float32)
W = np.ones((5, 3, 3), np.float32)


def flat(function: Callable[..., Any], *args: Any) -> Any:
    closed = jax.make_jaxpr(function)(*args)
    return flatten(_jax.without_dead(closed), _jax.has_bodies).jaxpr


def shown(items: list[Item], eqns: list[Any]) -> Any:
    """Names of primitives, and of each loop or choice its bodies."""
    return [
        eqns[item].primitive.name
        if isinstance(item, int)
        else {item.control.name: [shown(body, eqns) for _, body in sorted(item.bodies.items())]}
        for item in items
    ]


def tree(function: Callable[..., Any], *args: Any) -> Any:
    eqns = flat(function, *args).eqns
    return shown(nest(eqns), eqns)


def marks(function: Callable[..., Any], *args: Any) -> list[str]:
    """What is carried, stepped through, stacked and joined."""
    brackets = ("mark_open", "mark_body", "mark_end", "mark_close")
    found = [e.primitive.name for e in flat(function, *args).eqns if _jax.is_mark(e)]
    return [name.removeprefix("mark_") for name in found if name not in brackets]


def scanned_by(step, x, w):
    return lax.scan(lambda h, w: (step(h, w), None), x, w)[0]


def scanned(x, w):
    return scanned_by(lambda h, w: jnp.tanh(h @ w), x, w)


def test_bodies_are_nested():
    def function(x):
        def step(h, _):
            return lax.cond(h[0, 0] > 0, jnp.sin, lambda h: scanned(h, W), h), None

        return lax.scan(step, jnp.cos(x), None, length=2)[0]

    (inner,) = tree(scanned, X, W)
    assert inner == {"scan": [["dot_general", "tanh"]]}
    tests = ["slice", "squeeze", "gt", "convert_element_type"]
    assert tree(function, X) == ["cos", {"scan": [[*tests, {"cond": [[inner], ["sin"]]}]]}]


def test_a_while_loop_has_its_test_first():
    found = tree(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x), X)
    assert found == [{"while": [["reduce_sum", "lt"], ["mul"]]}]


PASSED_ON = {
    "carried and changed": (scanned, ["carry", "step", "next"]),
    "carried as it is": (
        lambda x, w: lax.scan(lambda c, w: ((c[0], c[1] @ w), None), (x, x), w)[0],
        ["carry", "step", "next"],
    ),
    "stacked as it came": (
        lambda x, w: lax.scan(lambda h, w: (h @ w, w), x, w),
        ["carry", "step", "next"],
    ),
    "stacked": (
        lambda x, w: lax.scan(lambda h, w: (h @ w, h), x, w),
        ["carry", "step", "next", "stack"],
    ),
    "dropped": (
        lambda x, w: lax.scan(lambda c, w: ((c[0] @ w, c[1] * 2), c[1]), (x, x), w)[0][0],
        ["carry", "step", "next"],
    ),
    "joined": (
        lambda x, w: lax.cond(x[0, 0] > 0, lambda: (x, x + 1), lambda: (x * 2, x)),
        ["branch_index", "join", "join"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSED_ON)
def test_marks_of_what_is_passed_on(name: str):
    function, wanted = PASSED_ON[name]
    assert marks(function, X, W) == wanted


TURNS = [jnp.sin, jnp.cos]
KNOWN = {
    "predicate": (lambda x: lax.cond(jnp.int32(0) + 1 >= 30, *TURNS, x), "cos"),
    "index": (lambda x: lax.switch(jnp.int32(1) + 1, [*TURNS, jnp.exp], x), "exp"),
    "index past the end": (lambda x: lax.switch(7, TURNS, x), "cos"),
    "of what is counted": (
        lambda x: lax.cond((jnp.arange(4) * 2).astype(jnp.uint8)[3] > 5, *TURNS, x),
        "sin",
    ),
    "in a branch": (
        lambda x: lax.cond(True, lambda x: lax.cond(False, *TURNS, x), jnp.exp, x),
        "cos",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_of_branches_the_one_that_runs_is_left(name: str):
    function, left = KNOWN[name]
    assert tree(function, X)[-1] == left
    (found,) = jax.tree.leaves(mw.jit(function, mesh=jax.make_mesh((8,), ("x",)))(X))
    np.testing.assert_allclose(found, function(X), rtol=1e-6)


def test_branches_by_a_carry_that_begins_known_stay():
    def step(i, x):
        return lax.cond(i > 1, jnp.sin, jnp.cos, x)

    (loop,) = (item for item in tree(lambda x: lax.fori_loop(0, 4, step, x), X) if "scan" in item)
    assert {"cond": [["cos"], ["sin"]]} in loop["scan"][0]


def test_what_a_loop_makes_in_vain_is_dropped():
    """JAX drops it from a scan, but not inside a while loop."""

    def step(c):
        n, h = c
        lax.while_loop(lambda g: g.sum() > 1, lambda g: g / 2, h)
        (h, _), _ = lax.scan(lambda c, _: ((c[0] * 2, jnp.sin(c[1])), 0.5), (h, h), None, length=3)
        return n - 1, h

    (loop,) = tree(lambda x, n: lax.while_loop(lambda c: c[0] > 0, step, (n, x)), X, 3)
    assert loop == {"while": [["gt"], [{"scan": [["mul"]]}, "sub"]]}


def test_what_does_not_depend_on_the_step_stands_before_the_loop():
    def function(x, w):
        def step(h, w):
            row = jnp.sin(x).sum(0)  # moved out
            wide = jnp.broadcast_to(row, (4, 3))  # would take memory: stays
            return jnp.tanh(h @ w) + wide, None

        return lax.scan(step, x, w)[0]

    found = tree(function, X, W)
    assert found[:2] == ["sin", "reduce_sum"]
    assert found[2] == {"scan": [["broadcast_in_dim", "dot_general", "tanh", "add"]]}


def test_what_is_only_laid_otherwise_stays_in_the_loop_unless_it_is_computed_with_before():
    """Held before the loop, a transpose would take memory for as long as the loop runs."""

    def function(x, w):
        def step(h, w):
            turned = x.T.reshape(2, -1)  # both stay, and are not shared with the one outside
            moved = jnp.sin(x[:, None]).sum(0)  # moved out, with what it is made of
            return jnp.tanh(h @ w) + turned.reshape(x.shape) + moved, None

        return lax.scan(step, x, w)[0] + x.T.sum()

    found = tree(function, X, W)
    assert found[:3] == ["broadcast_in_dim", "sin", "reduce_sum"]
    body = ["transpose", "reshape", "dot_general", "tanh", "reshape", "add", "add"]
    assert {"scan": [body]} in found and found.count("transpose") == 1


def test_what_stands_in_a_branch_stays_there():
    def function(x, w):
        def step(h, w):
            return lax.cond(h[0, 0] > 0, lambda: h @ w, lambda: h + jnp.sin(x).sum()), None

        return lax.scan(step, x, w)[0]

    (loop,) = tree(function, X, W)
    (branch_0, _) = loop["scan"][0][-1]["cond"]
    assert branch_0[:2] == ["sin", "reduce_sum"]


def test_equal_equations_are_shared_inwards_only():
    def function(x, w):
        y = jnp.sin(x)
        h = lax.scan(lambda h, w: (h @ w + jnp.sin(x) + jnp.cos(h), None), y, w)[0]
        return h + jnp.cos(y)

    found = tree(function, X, W)
    assert found == ["sin", {"scan": [["dot_general", "add", "cos", "add"]]}, "cos", "add"]


def test_names_begin_anew_in_a_body_and_what_has_no_line_has_its_loops():
    def function(x, w):
        with jax.named_scope("outside"):
            step = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))
            return jax.jit(lambda x, w: scanned_by(step, x, w))(x, w)

    gradient = jax.grad(lambda x, w: function(x, w).sum(), 1)
    eqns = flat(gradient, X, W).eqns
    assert all("outside" in _jax.names_of(e) for e in eqns if e.primitive is _jax.open_p)
    assert not any("outside" in _jax.names_of(e) for e in eqns if e.primitive.name == "tanh")
    barriers = [e for e in eqns if e.primitive.name == "optimization_barrier"]
    assert {_jax.source_summary(e).rpartition(":")[0] for e in barriers} == {__file__}


def test_scopes_and_trips():
    def function(x):
        return lax.scan(lambda h, _: (scanned(h, W), h), x, None, length=7)

    eqns = flat(function, X).eqns
    times = {e.primitive.name: n for e, n in zip(eqns, trips(eqns), strict=True)}
    assert times["dot_general"] == times["tanh"] == 35
    assert times["mark_stack"] == 1
    around = scopes(eqns)
    depth = {e.primitive.name: len(s) for e, s in zip(eqns, around, strict=True)}
    assert depth["tanh"] == 4 and depth["mark_stack"] == 0


def test_a_loop_left_whole_is_one_equation():
    closed = jax.make_jaxpr(scanned)(X, W)
    assert [e.primitive.name for e in flatten(closed).jaxpr.eqns] == ["scan"]


def test_a_move_to_no_place_is_what_it_moves():
    found = flat(lambda x: jnp.sin(jax.device_put((x, jnp.zeros_like(x)))[1]), X)
    assert [e.primitive.name for e in found.eqns] == ["broadcast_in_dim", "sin"]
    assert found.eqns[1].invars[0] is found.eqns[0].outvars[0]


def test_a_move_to_another_memory_stays():
    found = flat(lambda x: jax.device_put(x, jax.memory.Space.Host), X)
    assert [e.primitive.name for e in found.eqns] == ["device_put"]


@pytest.mark.parametrize(
    ("entries", "left"),
    [((OPEN, OPEN), []), ((OPEN,), ["hint"]), ((OPEN, None), ["hint"]), ((), ["hint"])],
    ids=str,
)
def test_a_hint_that_leaves_every_dim_open_is_none(entries, left):
    found = flat(lambda x: mw.shard(x, P(*entries)), X)
    assert [e.primitive.name for e in found.eqns] == left
