"""Ways to cut the grid of `model.py`: by rows, by columns, and in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from examples.cases import Case
from examples.stencil import model

SCHEMES: Mapping[str, tuple[str, dict[str, int], P]] = {
    "rows": ("rows", {"x": 8}, P("x")),
    "columns": ("columns", {"x": 8}, P(None, "x")),
    "tiles": ("tiles", {"x": 2, "y": 4}, P("x", "y")),
    "narrow": ("tiles, rows over two axes", {"x": 2, "y": 2, "z": 2}, P(("x", "y"), "z")),
}


def case(name: str, config: model.Config) -> Case:
    """A time step; the state comes and goes in the same pieces."""
    title, mesh, spec = SCHEMES[name]
    state = jax.eval_shape(partial(model.init, config))
    return Case(name, title, mesh, partial(model.step, config=config), (state,), (spec,), spec)


def large_cases() -> Iterator[Case]:
    """Grids of a billion cells on up to 2,048 devices."""
    for name, side, mesh in (
        ("rows", 32768, {"x": 64}),
        ("tiles", 32768, {"x": 8, "y": 8}),
        ("rows", 131072, {"x": 2048}),
        ("tiles", 131072, {"x": 32, "y": 64}),
        ("tiles", 131071, {"x": 32, "y": 64}),
    ):
        found = case(name, model.Config(rows=side, columns=side))
        yield replace(found, title=f"{name} of {side:,} a side", mesh=mesh)
