"""Shallow water in a rotating channel, stepped on a staggered grid, written for one device.

The height of the water lies in the middle of the cells, its eastward velocity on their eastern
edges and its northward velocity on the northern ones (Arakawa's C grid). The channel is closed in
the north and the south and goes around from east to west. The whole state is three arrays [Y, X].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Config:
    """Cells, and the constants of the flow in metres and seconds."""

    rows: int = 96
    columns: int = 192
    cell: float = 5e3
    depth: float = 100.0
    gravity: float = 9.81
    coriolis: float = 2e-4
    step: float = 50.0


class State(NamedTuple):
    """Height above the depth at rest, and velocities to the east and north, all [Y, X]."""

    height: jax.Array
    east: jax.Array
    north: jax.Array


def northern(x: jax.Array) -> jax.Array:
    """The value of the cell to the north; at the northern end that of the southern one."""
    return jnp.roll(x, -1, 0)


def southern(x: jax.Array) -> jax.Array:
    """The value of the cell to the south."""
    return jnp.roll(x, 1, 0)


def eastern(x: jax.Array) -> jax.Array:
    """The value of the cell to the east."""
    return jnp.roll(x, -1, 1)


def western(x: jax.Array) -> jax.Array:
    """The value of the cell to the west."""
    return jnp.roll(x, 1, 1)


def step(state: State, config: Config) -> State:
    """The state a time step later: velocities first, and the height that they make."""
    height, east, north = state
    pull = config.gravity / config.cell
    inside = jnp.arange(config.rows)[:, None] < config.rows - 1  # the last edge is the wall

    to_north = north + southern(north)  # of a cell's two edges
    turned = config.coriolis / 4 * (to_north + eastern(to_north))
    east = east + config.step * (turned - pull * (eastern(height) - height))
    to_east = east + western(east)
    turned = config.coriolis / 4 * (to_east + northern(to_east))
    north = north - config.step * (turned + pull * (northern(height) - height))
    north = jnp.where(inside, north, 0)

    flow_east = east * (config.depth + (height + eastern(height)) / 2)
    flow_north = north * (config.depth + (height + northern(height)) / 2)
    gathered = flow_east - western(flow_east) + flow_north - southern(flow_north)
    return State(height - config.step / config.cell * gathered, east, north)


def steps(state: State, config: Config, count: int) -> tuple[State, jax.Array]:
    """The state some time steps later, in one loop, and the energy after each of them."""

    def body(state: State, _: None) -> tuple[State, jax.Array]:
        state = step(state, config)
        return state, energy(state, config)

    return lax.scan(body, state, length=count)


def init(config: Config) -> State:
    """Water at rest with a hill in the west and a jump across the middle of the channel."""
    y = jnp.linspace(0, 1, config.rows)[:, None]
    x = jnp.linspace(0, 2, config.columns)[None, :]
    hill = jnp.exp(-((x - 0.5) ** 2 + (y - 0.5) ** 2) / 0.01)
    jump = jnp.tanh((y - 0.5 - 0.05 * jnp.sin(3 * jnp.pi * x)) / 0.05)
    height = 1.0 * hill + 0.3 * jump
    still = jnp.zeros((config.rows, config.columns))
    return State(height, still, still)


def energy(state: State, config: Config) -> jax.Array:
    """Energy of the flow and of the raised water, in joules for a kilogram in each litre."""
    height, east, north = state
    moving = (config.depth + height) * (east**2 + north**2)
    return 500.0 * config.cell**2 * (moving + config.gravity * height**2).sum()
