"""Ways to cut the volumes of `model.py`: in slabs, in bars, in blocks, and by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.cases import Case
from examples.unet import model

SCHEMES: Mapping[str, tuple[str, dict[str, int], P]] = {
    "slabs": ("slabs: depth over all devices", {"x": 8}, P(None, "x")),
    "bars": ("bars: depth and height", {"x": 2, "y": 4}, P(None, "x", "y")),
    "blocks": ("blocks: depth, height and width", {"x": 2, "y": 2, "z": 2}, P(None, "x", "y", "z")),
    "batch": ("volumes over one axis, slabs over the other", {"x": 2, "y": 4}, P("x", "y")),
}


def case(name: str, config: model.Config) -> Case:
    """A training step; hints are given for the volumes and their labels alone."""
    title, mesh, spec = SCHEMES[name]
    params = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    labels = jax.ShapeDtypeStruct((config.batch, *config.size), jnp.float32)
    volumes = jax.ShapeDtypeStruct((*labels.shape, 1), jnp.float32)
    step = partial(model.train_step, config=config)
    return Case(name, title, mesh, step, (params, volumes, labels), (P(), spec, spec), (P(), P()))


def large_cases() -> Iterator[Case]:
    """Volumes of 256 voxels a side, and of 1,024, on up to 2,048 devices."""
    widths = (32, 64, 128, 256)
    one = model.Config(batch=1, size=(256, 256, 256), channels=widths)
    large = model.Config(batch=1, size=(1024, 1024, 1024), channels=widths)
    for name, config, mesh in (
        ("slabs", one, {"x": 16}),
        ("bars", one, {"x": 4, "y": 4}),
        ("blocks", one, {"x": 4, "y": 4, "z": 4}),
        ("blocks", large, {"x": 8, "y": 8, "z": 8}),
        ("batch", replace(one, batch=128), {"x": 128, "y": 16}),
    ):
        found = case(name, config)
        title = f"{name}, {config.batch} of {config.size[0]} a side"
        yield replace(found, title=title, mesh=mesh)
