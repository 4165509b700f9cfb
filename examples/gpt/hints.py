"""Four ways to lay the GPT of `model.py` over a mesh, as data beside the model.

A scheme names its own axes ("batch", "model", "x", "y", ...) and says which axes of the mesh at
hand each of them is, so that one table serves a mesh of one, two or three axes. The hinted step is
an ordinary function with `lax.with_sharding_constraint` in it: `jax.jit` and `meshwise.jit` take it
alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import flax.linen as nn
import jax
import optax
from flax.linen.module import InterceptorContext
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.gpt.model import DEMO, Batch, Config, State, init, optimiser, train_step

Axes = Literal["all", "first", "rest"]
AnyMesh = Mesh | AbstractMesh
Step = Callable[[State, Batch, jax.Array], tuple[State, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Scheme:
    """The hints of one scheme.

    `parameters` and `activations` are (regex, spec) pairs: the first regex found in a parameter's
    path ("block_0/mlp/up/kernel"), or matching a module's whole path ("block_0/mlp/up", for its
    output), decides. A parameter's spec may be "split": one dim that divides, over all the axes.
    """

    name: str
    title: str
    axes: Mapping[str, Axes]
    batch: P
    parameters: tuple[tuple[str, P | Literal["split"]], ...]
    activations: tuple[tuple[str, P], ...]


DATA_PARALLEL = Scheme(
    name="data",
    title="data parallel",
    axes={"batch": "all"},
    batch=P("batch"),
    parameters=((r"", P()),),
    activations=((r"embed|block_\d+|head", P("batch", None, None)),),
)

FULLY_SHARDED = Scheme(
    name="zero3",
    title="fully sharded (ZeRO-3)",
    axes={"batch": "all"},
    batch=P("batch"),
    parameters=((r"", "split"),),
    activations=(
        (r"embed|(.*/)?(q|k|v|out|up|down|norm\w*)|block_\d+|head", P("batch", None, None)),
    ),
)

MEGATRON = Scheme(
    name="megatron",
    title="tensor parallel (Megatron)",
    axes={"batch": "first", "model": "rest"},
    batch=P("batch"),
    parameters=(
        (r"(q|k|v|up|head)/kernel$", P(None, "model")),
        (r"(q|k|v|up)/bias$", P("model")),
        (r"(out|down)/kernel$|embed/embedding$", P("model", None)),
        (r"", P()),
    ),
    activations=(
        (r"(.*/)?(q|k|v|up|head)", P("batch", None, "model")),
        (r"embed|(.*/)?(out|down)|block_\d+", P("batch", None, None)),
    ),
)

# GSPMD's "finalised" layout: weights in both axes, (M, H) -> (x, y) and (H, M) -> (y, x), and
# activations (B, S, M) -> (x, -, y). A weight is gathered over x where it is used, the stream
# over y where it is read, and both are scattered again on the way back.
TWO_DIMENSIONAL = Scheme(
    name="2d",
    title="two-dimensional (GSPMD)",
    axes={"x": "first", "y": "rest"},
    batch=P("x"),
    parameters=(
        (r"(q|k|v|up|head)/kernel$|embed/embedding$|positions$", P("x", "y")),
        (r"(out|down)/kernel$", P("y", "x")),
        (r"", P("y")),
    ),
    activations=((r"embed|(.*/)?(q|k|v|out|up|down|norm\w*)|block_\d+|head", P("x", None, "y")),),
)

SCHEMES = (DATA_PARALLEL, FULLY_SHARDED, MEGATRON, TWO_DIMENSIONAL)


def resolve(scheme: Scheme, mesh: AnyMesh, spec: P) -> P:
    """`spec` in the axes of `mesh`. A scheme's "first" of two is nothing on a mesh of one axis."""
    names = mesh.axis_names
    cut = 1 if len(names) > 1 else 0
    chosen = {"all": names, "first": names[:cut], "rest": names[cut:]}
    return P(*(chosen[scheme.axes[entry]] or None if entry else None for entry in spec))


def split_spec(shape: tuple[int, ...], mesh: AnyMesh) -> P:
    """Every axis of the mesh on the longest dim that they divide (the first of equals)."""
    devices = prod(mesh.axis_sizes)
    fitting = [dim for dim, size in enumerate(shape) if size and size % devices == 0]
    if not fitting:
        return P()
    longest = max(fitting, key=lambda dim: shape[dim])
    return P(*(None for _ in range(longest)), mesh.axis_names)


def parameter_shardings(scheme: Scheme, mesh: AnyMesh, params: Any) -> Any:
    """A NamedSharding for each leaf of `params` (arrays or shapes), in the same tree."""

    def choose(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next(spec for pattern, spec in scheme.parameters if re.search(pattern, name))
        if isinstance(spec, str):
            return NamedSharding(mesh, split_spec(leaf.shape, mesh))
        return NamedSharding(mesh, resolve(scheme, mesh, spec))

    return jax.tree_util.tree_map_with_path(choose, params)


def state_shardings(scheme: Scheme, mesh: AnyMesh, config: Config = DEMO) -> State:
    """Shardings of the whole state: the optimiser's moments lie where their parameters lie."""
    shapes = jax.eval_shape(partial(init, config=config), jax.random.key(0))
    params = parameter_shardings(scheme, mesh, shapes.params)
    opt_state = optax.tree_map_params(
        optimiser(config),
        lambda _, sharding: sharding,
        shapes.opt_state,
        params,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    return State(params, opt_state)


def hint_activations(scheme: Scheme, mesh: AnyMesh, step: Step) -> Step:
    """`step` with a sharding constraint on the output of every module that the scheme names."""

    def constrain(
        call: Callable[..., Any], args: Any, kwargs: Any, context: InterceptorContext
    ) -> Any:
        output = call(*args, **kwargs)
        name = "/".join(context.module.path)
        if context.method_name != "__call__":
            return output
        for pattern, spec in scheme.activations:
            if re.fullmatch(pattern, name):
                sharding = NamedSharding(mesh, resolve(scheme, mesh, spec))
                return lax.with_sharding_constraint(output, sharding)
        return output

    def hinted(state: State, batch: Batch, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        with nn.intercept_methods(constrain):
            return step(state, batch, key)

    return hinted


def hinted_step(
    scheme: Scheme, mesh: AnyMesh, config: Config = DEMO
) -> tuple[Step, tuple[State, Any, NamedSharding], tuple[State, dict[str, NamedSharding]]]:
    """The hinted training step, and the shardings of all it takes and all it returns."""
    state = state_shardings(scheme, mesh, config)
    rows = NamedSharding(mesh, resolve(scheme, mesh, scheme.batch))
    everywhere = NamedSharding(mesh, P())
    metrics = {"loss": everywhere, "grad_norm": everywhere}
    step = hint_activations(scheme, mesh, partial(train_step, config=config))
    return step, (state, Batch._make((rows, rows)), everywhere), (state, metrics)
