"""Steps written for one device of many, that schedules are tried on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.schedule.view import View
from tests.meshes import mesh_of


@dataclass(frozen=True)
class Step:
    """A program and arguments for it; `states` are positions of arguments and their next values."""

    program: mw.SpmdProgram
    args: tuple[np.ndarray, ...]
    states: dict[str, tuple[int, int]]

    @property
    def view(self) -> View:
        return View(self.program.per_device)

    def simulate(self, view: View | None = None) -> list[np.ndarray]:
        """Results of the program, or of what a schedule made of it."""
        return simulate(self.program, view or self.view, self.args)


def simulate(program: mw.SpmdProgram, view: View, args: tuple[Any, ...]) -> list[np.ndarray]:
    changed = mw.SpmdProgram(**{**vars_of(program), "per_device": view.program})
    return [np.asarray(x) for x in jax.tree.leaves(changed.simulate(*args))]


def vars_of(program: mw.SpmdProgram) -> dict[str, Any]:
    return {name: getattr(program, name) for name in program.__dataclass_fields__}


def random(*shape: int, seed: int = 0, low: float | None = None) -> np.ndarray:
    drawn = np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)
    return drawn if low is None else np.abs(drawn) + np.float32(low)


def adam(size: int = 64, devices: int = 8) -> Step:
    """Adam, data parallel: every device has its own gradient."""

    def step(g, w, m, v):
        g = lax.psum(g[0], "x") / devices
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        return w - 0.1 * m / (jnp.sqrt(v) + 1e-6), m, v

    return _optimizer(step, size, devices)


def lamb(size: int = 64, devices: int = 8) -> Step:
    """LAMB: as Adam, but that the update is as long as the weights."""

    def step(g, w, m, v):
        g = lax.psum(g[0], "x") / devices
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        u = m / (jnp.sqrt(v) + 1e-6) + 0.01 * w
        ratio = jnp.sqrt(jnp.sum(w * w)) / jnp.sqrt(jnp.sum(u * u))
        return w - 0.1 * ratio * u, m, v

    return _optimizer(step, size, devices)


def _optimizer(step: Callable[..., Any], size: int, devices: int) -> Step:
    args = (
        random(devices, size, seed=1),
        random(size, seed=2),
        random(size, seed=3),
        random(size, seed=4, low=0.1),
    )
    mesh = mesh_of(x=devices)
    specs = (P("x"), P(), P(), P())
    program = mw.SpmdProgram.from_shard_map(step, mesh, specs, (P(), P(), P()), *args)
    return Step(program, args, {"m": (2, 1), "v": (3, 2)})


def kinds(view: View) -> list[str]:
    """The collectives of a program, in order."""
    return [c.kind.value for c in view.program.collectives]


def only(view: View, name: str) -> Any:
    """The result of the one equation of a primitive."""
    (var,) = [e.outvars[0] for e in view.eqns if e.primitive.name == name]
    return var
