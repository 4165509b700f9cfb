"""Loops and branches: what they send, and the numbers of one device, gradients too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.end_to_end.control import (
    accumulated,
    accumulated_at_times,
    accumulated_from,
    accumulated_twice,
    accumulated_wide,
    added_to_largest,
    attracted,
    best_paths,
    chosen,
    clipped,
    collected,
    counted,
    counted_to,
    ends,
    gradient,
    halved,
    hinted,
    if_large,
    in_vain,
    invariant,
    layer,
    layers,
    likelihood,
    losses,
    nested,
    noisy,
    of_rows,
    ranked,
    recurrent,
    residual,
    solved,
    swapped,
    total_loss,
    with_hinted_literal,
)
from tests.end_to_end.sent import (
    NOTHING,
    Row,
    below,
    check_numbers,
    mesh_of,
    names,
    program_of,
    reals,
    reduced,
    sent_by,
)

LAYERS, WIDTH, BATCH = 3, 16, 64
W = reals(LAYERS, WIDTH, WIDTH) / 4
X = reals(BATCH, WIDTH)
ROWS = reals(4, BATCH, WIDTH)
STACK = P(None, "x")
WEIGHT = WIDTH * WIDTH
WHOLE_WEIGHTS = {"all_gather": (LAYERS, LAYERS * 7 * WEIGHT * 4 // 8)}


def with_policy(policy: Any) -> Callable[..., Any]:
    return gradient(partial(layers, step=jax.checkpoint(layer, policy=policy)))


def gathered(times: int, elements: int) -> tuple[int, int]:
    return times, times * 7 * elements * 4 // 8


def add(total: Any, more: Any) -> Any:
    return total + more


def add_twice(total: Any, more: Any) -> Any:
    return total + more + 2 * more


def keep(total: Any, more: Any) -> Any:
    return total


POLICIES = jax.checkpoint_policies
FSDP_GRADIENT = {
    "all_gather": gathered(2 * LAYERS, WEIGHT),
    "reduce_scatter": gathered(LAYERS, WEIGHT),
}
TABLE = [
    Row("layers, batch sharded", layers, (W, X), (8,), (P(), P("x")), P("x"), NOTHING, 1e-5),
    Row("layers, weights sharded: gathered one by one", layers, (W, X), (8,), (STACK, P("x")),
        P("x"), WHOLE_WEIGHTS, 1e-5),
    Row("stack of weights in shards of layers", layers, (reals(8, WIDTH, WIDTH) / 4, X), (8,),
        (P("x"), P("x")), P("x"),
        {"all_to_all": gathered(1, WEIGHT), "all_gather": gathered(8, WEIGHT)}, 1e-5),
    Row("gradient of layers, data parallel", gradient(layers), (W, X), (8,), (P(), P("x")), P(),
        reduced(LAYERS * WEIGHT), 1e-5),
    Row("gradient of layers, weights sharded", gradient(layers), (W, X), (8,), (STACK, P("x")),
        STACK, FSDP_GRADIENT, 1e-5),
    *(Row(f"gradient of layers, recomputed but {name}", with_policy(getattr(POLICIES, name)),
          (W, X), (8,), (STACK, P("x")), STACK, FSDP_GRADIENT, 1e-5)
      for name in ("nothing_saveable", "everything_saveable", "dots_saveable",
                   "dots_with_no_batch_dims_saveable")),
    Row("gradient of layers with a gain, recomputed", gradient(partial(layers, step=residual)),
        (reals(LAYERS, WIDTH + 1, WIDTH) / 4, X), (8,), (P(), P("x")), P(),
        reduced(LAYERS * (WEIGHT + WIDTH)), 1e-5),
    Row("gradient over microbatches", accumulated, (W[0], ROWS), (8,), (P(), STACK), P(),
        reduced(WEIGHT), 1e-5),
    Row("gradient over microbatches, two axes", accumulated, (W[0], ROWS), (2, 4),
        (P(), P(None, ("x", "y"))), P(), reduced(WEIGHT), 1e-5),
    Row("gradient over microbatches, scattered", accumulated, (W[0], ROWS), (8,), (P(), STACK),
        P("x"), {"reduce_scatter": gathered(1, WEIGHT)}, 1e-5),
    Row("gradient over microbatches, added to another", accumulated_from,
        (reals(WIDTH, WIDTH), W[0], ROWS), (8,), (P(), P(), STACK), P(), reduced(WEIGHT), 1e-5),
    Row("gradient over microbatches of microbatches", accumulated_twice,
        (W[0], reals(2, 3, BATCH, WIDTH)), (8,), (P(), P(None, None, "x")), P(),
        reduced(WEIGHT), 1e-5),
    Row("gradient over every second microbatch", accumulated_at_times([add, keep]), (W[0], ROWS),
        (8,), (P(), STACK), P(), reduced(WEIGHT), 1e-5),
    Row("gradient over microbatches, of which one begins anew",
        accumulated_at_times([add, add_twice, lambda _, g: g], 3), (W[0], ROWS), (8,),
        (P(), STACK), P(), reduced(WEIGHT), 1e-5),
    Row("loss over microbatches", total_loss, (W[0], ROWS), (8,), (P(), STACK), P(),
        reduced(1), 1e-5),
    Row("gradient of few bits added to one of more", accumulated_wide,
        (W[0].astype(jnp.bfloat16), ROWS.astype(jnp.bfloat16)), (8,), (P(), STACK), P(),
        reduced(WEIGHT), 5e-2),
    Row("losses added up and stacked", losses, (W[0], ROWS), (8,), (P(), STACK), P(),
        reduced(1 + len(ROWS)), 1e-5),
    Row("gradient through a loop over microbatches", jax.grad(total_loss), (W[0], ROWS), (8,),
        (P(), STACK), P(), reduced(WEIGHT), 1e-5),
    Row("gradient of rows read at positions", jax.grad(of_rows), (W, ROWS), (8,), (P(), STACK),
        P(), reduced(LAYERS * WEIGHT), 1e-5),
    Row("recurrent, batch sharded", recurrent, (W[0], ROWS, X), (8,), (P(), STACK, P("x")),
        (P("x"), STACK), NOTHING, 1e-5),
    Row("recurrent, time sharded", recurrent, (W[0], reals(8, BATCH, WIDTH), X), (8,),
        (P(), P("x"), P()), (P("x"), STACK), {"all_to_all": gathered(1, BATCH * WIDTH)}, 1e-5),
    Row("recurrent, uneven batch", recurrent, (W[0], reals(4, 13, WIDTH), reals(13, WIDTH)), (8,),
        (P(), STACK, P("x")), (P("x"), STACK), NOTHING, 1e-5),
    Row("backwards", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x, reverse=True), (ROWS,),
        (8,), (STACK,), (P("x"), STACK)),
    Row("counted", counted, (X,), (8,), (P("x"),), P("x")),
    Row("counted by data", counted_to, (X, np.int32(3)), (8,), (P("x"), P()), P("x")),
    Row("a branch of three", chosen, (np.int32(1), X), (2, 4), (P(), P("x", "y")), P("x", "y"),
        {"all_reduce": (1, 16)}, 1e-6),
    Row("carried the other way round", swapped, (X, X + 1), (8,), (P("x"), P("x")), P("x"),
        NOTHING, 1e-5),
    Row("keys carried", noisy, (ROWS,), (8,), (STACK,), P("x"), NOTHING, 1e-5),
    Row("hints inside", hinted, (W, X), (8,), (P(), P(None, "x")), P(None, "x"),
        {"all_to_all": gathered(2 * LAYERS, BATCH * WIDTH // 8)}, 1e-5),
    Row("forces of all pairs", attracted, (reals(64, 3), reals(64, 3), reals(64)), (8,),
        (P("x"),) * 3, P("x"), {"all_gather": (6, 7 * 4 * (64 + 5 * 64 * 3) // 8)}, 1e-5),
    Row("a sum of a constant is taken once", invariant, (X, reals(5, BATCH, WIDTH), X), (8,),
        (P("x"), STACK, P("x")), P("x"), reduced(WIDTH), 1e-4),
    Row("links of a page are counted once", ranked,
        (below(64, 512), below(64, 512), reals(512), reals(64)), (8,), (P("x"),) * 3 + (P(),), P(),
        reduced(64, times=6), 1e-4),
    Row("a rule for derivatives inside", gradient(partial(layers, step=lambda h, w: clipped(
        layer(h, w)))), (W, X), (8,), (P(), P("x")), P(), reduced(LAYERS * WEIGHT), 1e-5),
    Row("three axes", gradient(layers), (W, X), (2, 2, 2), (P(None, "x", "y"), P(("x", "z"), "y")),
        P(None, "x", "y"), None, 1e-5),
    Row("best paths, states sharded: scores gathered", best_paths, (reals(32, 32), reals(6, 32)),
        (8,), (STACK, STACK), STACK, {"all_gather": gathered(5, 32)}),
    Row("gradient of likelihoods, states sharded", gradient(likelihood),
        (reals(32, 32), reals(6, 4, 32)), (8,), (STACK, P(None, None, "x")), STACK,
        {"all_gather": gathered(5, 4 * 32), "reduce_scatter": gathered(5, 4 * 32)}, 1e-4),
]  # fmt: skip
FREE = [
    Row("gradient over microbatches, of which one takes the largest",
        accumulated_at_times([add, jnp.maximum]), (W[0], ROWS), (8,),
        (P(), STACK), P(), None, 1e-5),
    Row("gradient over microbatches, added to and squared in branches",
        accumulated_at_times([add, lambda c, g: c * c + g, keep], 3), (W[0], ROWS), (2, 4),
        (P(), P(None, ("x", "y"))), P("x"), None, 1e-5),
    Row("gradient over microbatches, branches in branches", accumulated_at_times([
        lambda c, g: lax.cond(g[0, 0] > 0, add, keep, c, g), add_twice]), (W[0], ROWS), (8,),
        (P(), STACK), P("x"), None, 1e-5),
    Row("results of a pipeline collected", collected, (W[:2], ROWS[:, :8]), (2, 4),
        (P("x"), P(None, "y")), P(None, "y"), None, 1e-5),
    Row("while, uneven", halved, (reals(13, 6),), (8,), (P("x"),), P("x"), None, 1e-5),
    Row("while, two axes", halved, (reals(12, 6),), (2, 4), (P("y", "x"),), P("y", "x"), None,
        1e-5),
    Row("if", if_large, (reals(13, 6),), (8,), (P("x"),), P("x"), None, 1e-5),
    Row("if not", if_large, (reals(13, 6) / 100,), (8,), (P("x"),), P("x"), None, 1e-5),
    *(Row(f"branch {i}", chosen, (np.int32(i), reals(13, 6)), (8,), (P(), P("x")), P("x"), None,
          1e-5) for i in range(-1, 4)),
    Row("nested", nested, (reals(13, 6),), (8,), (P("x"),), None, None, 1e-5),
    Row("nested, three axes", nested, (reals(12, 8),), (2, 2, 2), (P(("x", "y"), "z"),), None,
        None, 1e-5),
    Row("gradient of a branch", jax.grad(lambda x: (if_large(x) ** 3).sum()), (reals(13, 6),),
        (8,), (P("x"),), P("x"), None, 1e-4),
    Row("loops that end one by one", jax.vmap(ends, (0, None)), (reals(13, 6), reals(8, 5)), (8,),
        (P("x"), P()), P("x"), None, 1e-5),
    Row("loops that end one by one, rows shared out in each", jax.vmap(ends, (0, None)),
        (reals(13, 6), reals(8, 5)), (8,), (P(), P("x")), None, None, 1e-5),
    Row("conjugate gradients", solved, (reals(8, 8), reals(8)), (8,), (P("x"), P("x")), P("x"),
        None, 1e-4),
    Row("a hint on a literal that is carried", with_hinted_literal, (X,), (8,), (P("x"),), None),
    Row("added to the largest", added_to_largest, (ROWS,), (8,), (STACK,), P(), None, 1e-5),
    Row("loops in vain", in_vain, (reals(13, 6), np.int32(3)), (8,), (P("x"), P()), P("x")),
    Row("best paths, uneven states", best_paths, (reals(13, 13), reals(6, 13)), (2, 4),
        (P("x", "y"), P(None, "y")), P(None, "y")),
    Row("gradient of likelihoods, uneven states", gradient(likelihood),
        (reals(13, 13), reals(6, 3, 13)), (2, 4), (P("x", "y"), P(None, "x", "y")), P("x", "y"),
        None, 1e-4),
    Row("rows scattered", lambda c, u: lax.scan(lambda c, t: (c.at[jnp.arange(16) * 7 % 24].add(t),
        None), c, u)[0], (reals(24, 8), reals(5, 16, 8)), (8,), (P("x"), STACK), None, None, 1e-5),
    Row("products of what is carried", lambda a, x: lax.fori_loop(0, 4, lambda _, x:
        a.T @ (a @ x), x), (reals(16, 6), reals(6)), (8,), (P("x"), P()), P(), None, 1e-5),
    Row("no steps", lambda x: lax.scan(lambda c, r: (c + r, c), x[0] if len(x) else 1.0,
        jnp.zeros((0, 6))), (reals(13, 6),), (8,), (P("x"),), None, None, 1e-5),
]  # fmt: skip


@pytest.mark.parametrize("row", [r for r in TABLE if r.sent is not None], ids=lambda r: r.name)
def test_sends_no_more(row: Row):
    assert not program_of(row).partition(*row.args).per_device.whole
    assert sent_by(row) == row.sent


@pytest.mark.parametrize("row", TABLE + FREE, ids=names(TABLE + FREE))
def test_numbers_of_one_device(row: Row):
    check_numbers(row, real=False)


ON_DEVICES = ("gradient over microbatches, added to another", "while, uneven", "nested", "if")


@pytest.mark.parametrize("name", ON_DEVICES)
def test_on_devices(name: str):
    (row,) = [r for r in TABLE + FREE if r.name == name]
    check_numbers(row, real=True)


def count(jaxpr: Any) -> int:
    """Equations, those of bodies included."""
    inner = [x for e in jaxpr.eqns for x in jax.tree.leaves(list(e.params.values()))]
    return len(jaxpr.eqns) + sum(count(x.jaxpr) for x in inner if hasattr(x, "jaxpr"))


def equations(function: Callable[..., Any], devices: int, *shapes: tuple[int, ...]) -> int:
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    step = mw.jit(function, mesh=mesh_of(devices), in_shardings=(STACK, P("x")))
    return count(step.partition(*types).jaxpr)


def test_size_depends_on_neither_trips_nor_devices():
    """Of few devices another plan sends less, and has an equation less."""
    sizes = {
        (trips, devices): equations(gradient(layers), devices, (trips, 4096, 4096), (4096, 4096))
        for trips in (2, 200)
        for devices in (8, 512, 4096)
    }
    few = 20 if jax.__version_info__ < (0, 12) else 18  # tanh's derivative, three operators or one
    assert sizes[2, 8] == sizes[200, 8] == few
    assert {sizes[trips, devices] for trips in (2, 200) for devices in (512, 4096)} == {few + 1}
