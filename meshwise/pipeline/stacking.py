"""Layers of equal shapes, stacked for the stages of a pipeline: `mw.stack_stages`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise.errors import PipelineError, message
from meshwise.pipeline.bubbles import without_gradient_unless


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedLayers:
    """Layers in stages: leaves `[S, n, ...]`, or `[S, R, n, ...]`; of one stage `[n, ...]`.

    Stage k is `[k % S, k // S]` and has `sizes[k]` layers, at most n; the places after them hold
    copies of its last layer, or of the first stages' where it has none. `real`, which
    `mw.pipeline` fills in, says in each stage which are no copies; None where all are.
    """

    params: Any
    real: Any = None
    sizes: tuple[int, ...] = field(default=(), metadata={"static": True})
    stages: int = field(default=1, metadata={"static": True})

    @property
    def repeat(self) -> int:
        """How many stages a device has."""
        return len(self.sizes) // self.stages

    def masked(self) -> "StackedLayers":
        """The same with `real` filled in where the stages differ in their number of layers."""
        most = max(self.sizes)
        if min(self.sizes) == most:
            return self
        real = np.arange(most) < np.array(self.sizes)[:, None]
        real = real.reshape(self.repeat, self.stages, most).swapaxes(0, 1)
        return replace(self, real=real if self.repeat > 1 else real[:, 0])

    def apply(self, layer: Callable[[Any, Any], Any], x: Any) -> Any:
        """A stage's layers one after the other, `layer(params of one, x)`; copies do nothing."""

        def step(x: Any, own: tuple[Any, Any]) -> tuple[Any, None]:
            params, is_real = own
            if is_real is None:
                return layer(params, x), None
            made = layer(*without_gradient_unless(is_real, (params, x)))
            return jax.tree.map(lambda new, old: jnp.where(is_real, new, old), made, x), None

        return lax.scan(step, x, (self.params, self.real))[0]

    def unstack(self) -> Any:
        """All layers in order, copies left out: leaves `[layers, ...]`."""
        most = max(self.sizes)
        rows = [k * most + i for k, size in enumerate(self.sizes) for i in range(size)]

        def flat(x: Any) -> Any:
            x = jnp.swapaxes(x, 0, 1) if self.repeat > 1 else x
            leads = 2 + (self.repeat > 1)
            lies = _jax.typed_as(x, None, instead_of=leads)
            x = jnp.reshape(x, (len(self.sizes) * most, *x.shape[leads:]), out_sharding=lies)
            return x if len(rows) == x.shape[0] else _rows(x, rows)

        return jax.tree.map(flat, self.params)


@_jax.hides_frames
def stack_stages(layers: Any, stages: int, repeat: int = 1) -> StackedLayers:
    """Layers dealt out to the stages of `mw.pipeline`, in order, as evenly as may be.

    Args:
        layers: a list of trees of parameters, one a layer, all alike; or one tree of arrays that
            are stacked already, `[layers, ...]`.
        stages: S, the devices along the pipeline.
        repeat: R, how often a circular pipeline passes them. There are `S R` stages in all.

    >>> layers = stack_stages([{"w": jax.numpy.full(2, float(i))} for i in range(4)], stages=2)
    >>> layers.params["w"].shape, layers.sizes
    ((2, 2, 2), (2, 2))
    """
    _check_counts(stages=stages, repeat=repeat)
    _check_arrays(layers)
    stacked = layers
    if isinstance(layers, list | tuple):
        _check_alike(layers)
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *layers)
    counts = {jnp.shape(x)[:1] for x in jax.tree.leaves(stacked)}
    total = stages * repeat
    if len(counts) != 1 or counts & {(), (0,)}:
        raise PipelineError(
            message(
                f"mw.stack_stages was asked for {stages} stages, repeat={repeat}",
                [f"first dims of the layers' arrays: {sorted(c[0] if c else 1 for c in counts)}"],
                "Layers are a list with a tree for each, or one tree whose arrays have all layers "
                "along their first dim.",
                "Stack layers of the same shapes alone.",
            )
        )
    ((count,),) = counts
    least, more = divmod(count, total)
    sizes = tuple(least + (k < more) for k in range(total))
    ends = np.cumsum(sizes)
    rows = [
        min(end - size + i, max(end - 1, 0))
        for end, size in zip(ends.tolist(), sizes, strict=True)
        for i in range(max(sizes))
    ]

    def split(x: Any) -> Any:
        x = jnp.asarray(x)
        x = x if rows == list(range(count)) else _rows(x, rows)
        shape = (repeat, stages, max(sizes), *x.shape[1:])
        over = _jax.typed_axes(x, stages) if repeat == 1 else None
        lies = _jax.typed_as(x, None, over, None, instead_of=1)
        x = jnp.reshape(x, shape, out_sharding=lies)
        return jnp.swapaxes(x, 0, 1) if repeat > 1 else x[0]

    return StackedLayers(jax.tree.map(split, stacked), None, sizes, stages)


def _rows(x: Any, rows: list[int]) -> Any:
    """Some rows of an array, whole on every device where its type says how it lies."""
    return x.at[np.array(rows)].get(out_sharding=_jax.typed_as(x, None, instead_of=1))


def _check_counts(**counts: Any) -> None:
    """An error for what is no number of them."""
    offenders = [
        f"{name}={count!r:.60}"
        for name, count in counts.items()
        if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 1
    ]
    if offenders:
        raise PipelineError(
            message(
                "mw.stack_stages was asked for stages that are no number",
                offenders,
                "Layers are dealt out to one stage or more, each passed `repeat` times.",
                "Pass the size of the pipeline's axis, as in mw.stack_stages(layers, stages=4).",
            )
        )


def _check_arrays(layers: Any) -> None:
    """An error for leaves that are no arrays."""
    found = jax.tree_util.tree_flatten_with_path(layers)[0]
    strange = [
        f"layers{jax.tree_util.keystr(path)} is {leaf!r:.60}"
        for path, leaf in found
        if _jax.array_type(leaf) is None
    ]
    if strange:
        raise PipelineError(
            message(
                "mw.stack_stages was given layers that are no arrays",
                strange[:4],
                "Layers are trees of arrays, which are stacked.",
                "Leave out what is no array, or let the function of a layer close over it.",
            )
        )


def _check_alike(layers: Any) -> None:
    """An error where layers differ in structure, shapes or types."""
    described = [
        f"{jax.tree.map(lambda x: f'{jnp.result_type(x)}{list(jnp.shape(x))}', layer)}"
        for layer in layers
    ]
    different = [f"layer {i} is {text}" for i, text in enumerate(described) if text != described[0]]
    if different or not layers:
        raise PipelineError(
            message(
                "mw.stack_stages was given layers that cannot be stacked",
                [f"layer 0 is {described[0]}", *different[:4]] if layers else ["there are none"],
                "Layers that are computed by one function have parameters of the same structure, "
                "shapes and types.",
                "Apply others before or after the pipeline, or cut the model with "
                "mw.stage_boundary.",
            )
        )
