"""Fields between walls, whose rows at the ends follow from those beside them; queues of stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.suite.program import GRID, LOCAL, SECOND, Array, Best, Program, X, passed

science = partial(Program, "science")
pipeline = partial(Program, "pipeline")


def heat(u: Any) -> Any:
    return u.at[1:-1].set(u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]))


def insulated(u: Any) -> Any:
    u = heat(u)
    return u.at[0].set(u[1]).at[-1].set(u[-2])


def on_a_circle(u: Any) -> Any:
    u = heat(u)
    return u.at[0].set(u[-2]).at[-1].set(u[1])


def plate(u: Any) -> Any:
    """A step inside, and the temperature of the four sides."""
    around = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
    u = u.at[1:-1, 1:-1].set(u[1:-1, 1:-1] + 0.1 * (around - 4 * u[1:-1, 1:-1]))
    u = u.at[0].set(u[1]).at[-1].set(u[-2])
    return u.at[:, 0].set(u[:, 1]).at[:, -1].set(u[:, -2])


def waves(u: Any, old: Any) -> Any:
    """A step of waves that leave at both ends (Mur)."""
    new = (2 * u - old).at[1:-1].add(0.25 * (u[2:] - 2 * u[1:-1] + u[:-2]))
    new = new.at[0].set(u[1] + 0.3 * (new[1] - u[0]))
    return new.at[-1].set(u[-2] + 0.3 * (new[-2] - u[-1]))


def flow_at_walls(p: Any, q: Any) -> Any:
    """Pressure is mirrored, and what flows turns round."""
    p = p.at[:2].set(p[2:4][::-1]).at[-2:].set(p[-4:-2][::-1])
    return p.at[2].add(q[1] - q[0]), q.at[0].set(-q[1]).at[-1].set(-q[-2])


def many(step: Callable[..., Any], count: int) -> Callable[..., Any]:
    return lambda u: lax.fori_loop(0, count, lambda _, u: step(u), u)


def gradient(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda u: (jnp.sin(step(u)) ** 2).sum())


def stages(slots: Any, made: Any) -> Any:
    """What is made goes on by one place, the last of it to the end of the queue."""
    made = jnp.tanh(made)
    return jnp.roll(slots, -1, 0).at[-1].set(made[-1]), made.at[0].set(slots[0])


FIELD, FLAT = Array((512, 64), X), Array((128, 128), GRID)
ROW = 64

TABLE = [
    science("heat between insulated walls", insulated, (FIELD,), X,
            best=Best(passed(2 * ROW), "a row to each neighbour")),
    science("heat between insulated walls, 20 steps", many(insulated, 20), (FIELD,), X,
            best=Best(passed(2 * ROW, 20), "a row to each neighbour in every step")),
    science("heat between insulated walls, columns sharded", insulated,
            (Array((512, 64), SECOND),), SECOND, best=LOCAL),
    science("heat between insulated walls, gradient", gradient(insulated), (FIELD,), X),
    science("heat on a circle, ends as ghosts", on_a_circle, (FIELD,), X,
            best=Best(passed(4 * ROW), "a row to each neighbour, and the ends change theirs")),
    science("a plate with insulated sides, 2x4", plate, (FLAT,), GRID, (2, 4),
            best=Best(passed(2 * 64 + 32), "a column to each neighbour, a row to the other")),
    science("a plate with insulated sides, 10 steps, 2x4", many(plate, 10), (FLAT,), GRID, (2, 4),
            best=Best(passed(2 * 64 + 32, 10), "as in one step")),
    science("waves that leave", waves, (FIELD, FIELD), X,
            best=Best(passed(2 * ROW), "a row to each neighbour")),
    science("flow mirrored at walls", flow_at_walls, (FIELD, FIELD), (X, X), best=LOCAL),
    pipeline("slots and what stages made, one place on", stages,
             (Array((8, 16, 64), X), Array((8, 16, 64), X)), (X, X),
             best=Best(passed(16 * 64), "a slot to the stage before")),
]  # fmt: skip
