"""Ways to lay the Conformer of `model.py` over a mesh, as data beside the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.cases import Case
from examples.conformer import model


@dataclass(frozen=True)
class Scheme:
    """Stages along "stage", the batch along `data`, the layers' products along `tensor`."""

    name: str
    title: str
    mesh: Mapping[str, int]
    data: str | None = None
    tensor: str | None = None
    repeat: int = 1


SCHEMES = (
    Scheme("stages", "8 stages", {"stage": 8}),
    Scheme("data", "4 stages, data parallel", {"stage": 4, "data": 2}, "data"),
    Scheme("circle", "4 devices, twice round", {"stage": 4, "data": 2}, "data", None, 2),
    Scheme(
        "three",
        "2 stages, data and tensor parallel",
        {"stage": 2, "data": 2, "tensor": 2},
        "data",
        "tensor",
    ),
)


def specs(scheme: Scheme, params: Any) -> Any:
    """The spec of every parameter, in the parameters' tree."""
    lead = ("stage", None) if scheme.repeat == 1 else ("stage", None, None)
    spread = {"up": (None, scheme.tensor), "down": (scheme.tensor, None)}

    def choose(path: tuple[Any, ...], _: Any) -> P:
        names = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
        return P(*lead, *spread.get(names[-1], ())) if "layers" in names else P()

    return jax.tree_util.tree_map_with_path(choose, params)


def case(scheme: Scheme, config: model.Config) -> Case:
    """A training step under a scheme."""
    config = replace(config, stages=scheme.mesh["stage"], repeat=scheme.repeat)
    params = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    rows = config.batch, config.frames
    frames = jax.ShapeDtypeStruct((*rows, config.features), jnp.float32)
    labels = jax.ShapeDtypeStruct(rows, jnp.int32)
    parameters = specs(scheme, params)
    return Case(
        scheme.name,
        scheme.title,
        scheme.mesh,
        partial(model.train_step, config=config),
        (params, frames, labels),
        (parameters, P(scheme.data), P(scheme.data)),
        (parameters, P()),
    )


def large_cases() -> Iterator[Case]:
    """The Conformers of the GSPMD paper, 6.5 and 13 billion parameters in pipelines."""
    paper = model.Config(
        width=3072, hidden=12288, heads=16, taps=32, features=80, classes=1024, frames=1024
    )
    _, data, circle, _ = SCHEMES
    for layers, stages, repeat in ((32, 8, 1), (32, 8, 4), (64, 16, 1), (64, 16, 4)):
        config = replace(paper, layers=layers, batch=256, microbatches=4 * stages)
        title = f"{layers} layers, {stages} stages" + (f",\n{repeat} times round" * (repeat > 1))
        scheme = replace(circle if repeat > 1 else data, title=title, repeat=repeat)
        yield case(replace(scheme, mesh={"stage": stages, "data": 64 // stages}), config)
