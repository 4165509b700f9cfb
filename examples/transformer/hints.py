"""Ways to lay the transformer of `model.py` over a mesh, as data beside the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.cases import Case
from examples.transformer import model


@dataclass(frozen=True)
class Scheme:
    """How the weights [M, H] and [H, M] of a layer lie, and alike those of attention; the batch.

    `inwards` are the axes of M and H of what reads the stream, `outwards` those of H and M of what
    is added to it.
    """

    name: str
    title: str
    mesh: Mapping[str, int]
    batch: P
    inwards: tuple[str | None, str | None]
    outwards: tuple[str | None, str | None]


SCHEMES = (
    Scheme("data", "data parallel", {"x": 8}, P("x"), (None, None), (None, None)),
    Scheme("zero3", "fully sharded", {"x": 8}, P("x"), ("x", None), (None, "x")),
    Scheme("megatron", "tensor parallel", {"x": 2, "y": 4}, P("x"), (None, "y"), ("y", None)),
    Scheme("2d", "two-dimensional", {"x": 2, "y": 4}, P("x"), ("x", "y"), ("y", "x")),
    Scheme(
        "3d",
        "data beside two-dimensional",
        {"z": 2, "x": 2, "y": 2},
        P(("z", "x")),
        ("x", "y"),
        ("y", "x"),
    ),
)


def specs(scheme: Scheme) -> Any:
    """The spec of every parameter, in the parameters' tree."""
    m, h = scheme.inwards
    back, stream = scheme.outwards
    heads, dense = P(None, m, h, None), P(None, m, h)
    layers = {name: heads for name in ("query", "key", "value")}
    layers |= {"out": P(None, back, None, stream), "up": dense, "gate": dense}
    layers |= {"down": P(None, back, stream), "norm_1": P(), "norm_2": P()}
    return {"embed": P(h, m), "layers": layers, "norm": P()}


def case(scheme: Scheme, config: model.Config) -> Case:
    """A training step under a scheme."""
    params = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence + 1), jnp.int32)
    return Case(
        scheme.name,
        scheme.title,
        scheme.mesh,
        partial(model.train_step, config=config),
        (params, tokens),
        (specs(scheme), scheme.batch),
        (specs(scheme), P()),
    )


def large_cases() -> Iterator[Case]:
    """The dense models of the GSPMD paper, two-dimensional, on up to 2,048 devices."""
    two = SCHEMES[3]
    paper = model.Config(
        width=8192, hidden=65536, heads=128, head_width=128, vocabulary=32000, sequence=1024
    )
    for layers, x, y, batch in ((32, 8, 16, 64), (64, 16, 32, 512), (256, 32, 64, 512)):
        config = replace(paper, layers=layers, batch=batch)
        title = f"dense, {layers} layers"
        yield case(replace(two, title=title, mesh={"x": x, "y": y}), config)
    config = replace(paper, width=16384, hidden=131072, heads=256, layers=128, batch=512)
    yield case(replace(two, title="dense, wide, 128 layers", mesh={"x": 32, "y": 64}), config)
