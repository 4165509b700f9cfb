"""Ways to lay the mixture of experts of `model.py` over a mesh, as data beside the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.cases import Case
from examples.moe import model

SPARSE = r"layers/\d*[13579]/"  # the layers that are mixtures
EVERYWHERE = (r"", P())


@dataclass(frozen=True)
class Scheme:
    """Hints: the first regex found in a parameter's path ("layers/1/up") says how it lies."""

    name: str
    title: str
    mesh: Mapping[str, int]
    batch: P
    parameters: tuple[tuple[str, P], ...]


def megatron(experts: str | None, model: str) -> tuple[tuple[str, P], ...]:
    """Experts over one axis; products, those of the experts too, over another one."""
    return (
        (rf"{SPARSE}up", P(experts, None, model)),
        (rf"{SPARSE}down", P(experts, model)),
        (r"up|query|key|value|head", P(None, model)),
        (r"down|out|embed", P(model)),
        EVERYWHERE,
    )


HYBRID = Scheme(
    "hybrid",
    "groups and experts on one axis, Megatron on the other",
    {"x": 2, "y": 4},
    P("x"),
    megatron("x", "y"),
)
DROPLESS = Scheme(
    "dropless",
    "no places: groups on one axis, Megatron in the experts",
    {"x": 2, "y": 4},
    P("x"),
    megatron(None, "y"),
)
SCHEMES = (
    Scheme(
        "one axis",
        "groups and experts on one axis",
        {"x": 8},
        P("x"),
        ((rf"{SPARSE}(up|down)", P("x")), EVERYWHERE),
    ),
    Scheme(
        "nested",
        "groups on both axes, experts on the second",
        {"x": 2, "y": 4},
        P(("x", "y")),
        ((rf"{SPARSE}(up|down)", P("y")), EVERYWHERE),
    ),
    Scheme(
        "two axes",
        "groups on one axis, experts on the other",
        {"x": 2, "y": 4},
        P("x"),
        ((rf"{SPARSE}(up|down)", P("y")), EVERYWHERE),
    ),
    HYBRID,
    Scheme(
        "three",
        "data, experts and Megatron on an axis each",
        {"x": 2, "y": 2, "z": 2},
        P(("x", "y")),
        megatron("y", "z"),
    ),
)


def parameter_specs(scheme: Scheme, params: Any) -> Any:
    """The spec of every parameter, in the parameters' tree."""

    def choose(path: tuple[Any, ...], _: Any) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return next(spec for pattern, spec in scheme.parameters if re.search(pattern, name))

    return jax.tree_util.tree_map_with_path(choose, params)


def case(scheme: Scheme, config: model.Config) -> Case:
    """A training step under a scheme."""
    params = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence + 1), jnp.int32)
    specs = parameter_specs(scheme, params)
    return Case(
        scheme.name,
        scheme.title,
        scheme.mesh,
        partial(model.train_step, config=config),
        (params, tokens),
        (specs, scheme.batch),
        (specs, P()),
    )


def cases(config: model.Config) -> list[Case]:
    """All schemes, with places for the experts' tokens and without."""
    dropless = replace(config, dropless=True)
    return [*(case(scheme, config) for scheme in SCHEMES), case(DROPLESS, dropless)]


def large_cases() -> Iterator[Case]:
    """The models of the GShard paper, a device for each expert; and a hybrid of as many devices."""
    paper = model.Config(
        width=1024, hidden=8192, heads=16, layers=36, vocabulary=32000, sequence=2048
    )
    for experts, layers in ((512, 36), (2048, 36), (2048, 60)):
        config = replace(paper, experts=experts, batch=experts, layers=layers)
        title = f"GShard, {experts} experts\n{layers} layers"
        yield case(replace(SCHEMES[0], title=title, mesh={"x": experts}), config)
    config = replace(paper, experts=512, batch=512, layers=12, width=2048, hidden=16384)
    title = "hybrid, 512 experts\nof 4 devices, 12 layers"
    yield case(replace(HYBRID, title=title, mesh={"x": 512, "y": 4}), config)
