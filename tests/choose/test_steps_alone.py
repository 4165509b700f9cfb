"""Steps of a loop that pair what goes round with what is made before it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.choose.graph import build_graph
from meshwise.choose.holding import peak_bytes
from meshwise.choose.parts import Apart
from meshwise.choose.search import Search
from meshwise.cost.hardware import GENERIC
from tests.meshes import mesh_of

STATES, ROWS, SYMBOLS, STEPS = 32, 16, 20, 11
COLUMNS = P(None, "x")


def step(scores, transitions):
    return logsumexp(scores[:, :, None] + transitions, 1)


def forward(transitions, scores):
    """Scores of all paths to each state, whose transitions are made probabilities first."""
    transitions = log_softmax(transitions)
    return lax.scan(lambda a, _: (step(a, transitions), None), scores, None, length=STEPS)[0]


def observed(transitions, emissions, start, seen):
    """The same of a hidden Markov model, with what is observed."""
    transitions, emissions = log_softmax(transitions), log_softmax(emissions)
    begun = log_softmax(start) + emissions[:, seen[:, 0]].T
    later = seen[:, 1:].T
    return lax.scan(lambda a, o: (step(a, transitions) + emissions[:, o].T, None), begun, later)[0]


DRAW = np.random.default_rng(0)
TRANSITIONS = DRAW.normal(size=(STATES, STATES)).astype(np.float32)
SCORES = DRAW.normal(size=(ROWS, STATES)).astype(np.float32)
EMISSIONS = DRAW.normal(size=(STATES, SYMBOLS)).astype(np.float32)
SEEN = DRAW.integers(0, SYMBOLS, (ROWS, STEPS + 1))

GATHERED = 7 / 8 * TRANSITIONS.nbytes  # once
MOVED = 7 / 8 * SCORES.nbytes / 8  # between rows and columns
# Where scores lie in columns, each step gathers them.
CASES = {
    "forward": (forward, (TRANSITIONS, SCORES), COLUMNS, GATHERED + 2 * MOVED),
    "gradient": (
        jax.grad(lambda *args: forward(*args).mean()),
        (TRANSITIONS, SCORES),
        COLUMNS,
        3 * GATHERED + MOVED + 7 / 8 * STATES * 4,
    ),
    "observed": (
        observed,
        (TRANSITIONS, EMISSIONS, EMISSIONS[:, 0], SEEN),
        (COLUMNS, P("x"), P("x"), P()),
        None,
    ),
}


def likelihood(scores, transitions):
    """Of all paths through a chain, by transitions that are no probabilities."""
    begun, later = scores[:, 0], scores[:, 1:].swapaxes(0, 1)
    ended = lax.scan(lambda a, e: (step(a, transitions) + e, None), begun, later)[0]
    return logsumexp(ended, -1).mean()


def test_columns_of_a_matrix_may_have_the_axis_that_states_claim():
    """The states before are dims of both terms of an addition, and keep a quarter of the bytes."""
    args = DRAW.normal(size=(8, 6, STATES)).astype(np.float32), TRANSITIONS
    lie, gradient = (P(None, None, "x"), COLUMNS), jax.grad(likelihood, (0, 1))
    program = mw.jit(gradient, mesh=mesh_of(x=8), in_shardings=lie, out_shardings=lie).partition(
        *args
    )
    for found, wanted in zip(program.simulate(*args), jax.jit(gradient)(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    once = 7 / 8 * args[0][:, 0].nbytes  # there and back; and two reductions at the end
    assert program.wire_bytes == 2 * 5 * once + 2 * 2 * 7 / 8 * 8 * 4


@pytest.mark.parametrize("name", CASES)
def test_what_goes_round_moves_to_rows_and_what_it_meets_is_gathered_once(name):
    function, args, lie, sent = CASES[name]
    program = mw.jit(function, mesh=mesh_of(x=8), in_shardings=lie).partition(*args)
    wanted = jax.jit(function)(*args)
    np.testing.assert_allclose(program.simulate(*args), wanted, rtol=1e-4, atol=1e-5)
    in_columns = STEPS * 7 / 8 * SCORES.nbytes
    assert program.wire_bytes == sent if sent else program.wire_bytes < in_columns / 2


def is_of_its_graph(plan):
    """Whether members of a node have the same axes, in the graph that says what lost, and why."""
    graph = build_graph(plan.program, plan.rules, plan.completion, plan.hardware, plan.apart)
    for node in graph.nodes:
        found = {}
        for member in node.members:
            own = plan.equations[member.equation].strategy.axes
            for factor, axes in zip(member.factors, own, strict=True):
                if factor >= 0 and found.setdefault(factor, axes) != axes:
                    return False
    return True


def test_what_lost_is_priced_in_the_graph_of_the_plan():
    """Steps alone send less here, and are other nodes than those of the graph that is first."""

    def expected(*args):
        return logsumexp(observed(*args), -1).mean()

    gradient = jax.grad(expected, (0, 1, 2))
    args = TRANSITIONS, EMISSIONS, EMISSIONS[:, 0], SEEN
    lie = P(None, "y"), P("y"), P("y"), P("x")
    program = mw.jit(gradient, mesh=mesh_of(x=2, y=4), in_shardings=lie).partition(*args)
    for found, wanted in zip(program.simulate(*args), jax.jit(gradient)(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert program.wire_bytes == 22_098  # 37,138 where what is made before binds the steps
    assert is_of_its_graph(program.plan)
    assert not is_of_its_graph(replace(program.plan, apart=Apart()))


def test_of_a_stack_in_shards_of_steps_a_device_holds_its_own():
    def states(w, rows):
        def step(state, row):
            state = jnp.tanh(state @ w + row)
            return state, state

        return lax.scan(step, jnp.zeros(rows.shape[1:]), rows)[1]

    def held(out):
        fn = mw.jit(states, mesh=mesh_of(x=8), in_shardings=P(), out_shardings=out)
        plan = fn.partition(np.ones((8, 8), "f"), np.ones((64, 8), "f")).plan
        graph = build_graph(plan.program, plan.rules, plan.completion, GENERIC)
        return peak_bytes(Search(graph, [((),) * len(n.rule.sizes) for n in graph.nodes]))

    rows = 64 * 8 * 4
    assert held(P()) - held(P("x")) == rows - rows // 8


def test_a_part_of_an_argument_is_little_to_hold_for_what_each_step_sends():
    """Half of the shard of a matrix is cut, and both products of a step send less for it."""

    def powers(a, v):
        def one(v, _):
            v = a.T @ (a @ v)
            return v / jnp.linalg.norm(v), None

        return lax.scan(one, v, None, length=5)[0]

    hints = {"in_shardings": P("y"), "out_shardings": P("x")}
    program = mw.jit(powers, mesh=mesh_of(x=2, y=4), **hints).partition(
        np.ones((48, 64), "f"), np.ones(64, "f")
    )
    rows, columns, number = 48 // 4 * 4, 3 / 2 * 64 // 2 * 4, 4
    assert program.wire_bytes == 5 * (rows + columns + number) + 2 * 64
