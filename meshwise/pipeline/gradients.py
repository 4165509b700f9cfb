"""`mw.pipeline_value_and_grad`: a loss and its gradients, computed by a pipeline of stages."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise import _jax
from meshwise._jax.pipelines import pipeline_p
from meshwise.errors import ArgumentError, MeshError, PipelineError, message
from meshwise.pipeline.call import PipelineCall
from meshwise.pipeline.local import has_gradient
from meshwise.pipeline.parameters import PackedParams, Rows
from meshwise.pipeline.schedules import (
    Schedule,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from meshwise.pipeline.stages import cut

SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "1f1b": one_f_one_b,
    "eager": eager_one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved_one_f_one_b,
}


def pipeline_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis: str,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> "PipelinedLoss":
    """`jax.value_and_grad` of a loss, its model cut into stages along an axis of the mesh.

    The result is called inside of `mw.jit` as `loss, gradients = step(params, batch)`: the mean of
    `loss(params, microbatch)` over the microbatches, and its gradients. One program runs on all
    devices: a loop over the ticks of the schedule, in which each device takes its own stage, and
    activations and gradients go to its neighbours. Outside of `mw.jit`, and on one device, the same
    is computed without a pipeline.

    Args:
        loss: a function of (params, microbatch) that returns a floating-point scalar, with
            `mw.stage_boundary` between the stages of its model.
        axis: the axis of the mesh along which the stages lie, in order.
        microbatches: how many parts the batch is cut into. Each array of the batch has as its first
            dim the rows, and row i belongs to microbatch `i % microbatches`, so that a batch that
            is sharded stays where it is.
        schedule: "1f1b", "eager", "gpipe" or "interleaved"; see `meshwise.pipeline.schedules`.
        chunks: with "interleaved", how many stages each device has. Stage k lies on device `k % S`.

    Raises:
        PipelineError, ArgumentError, MeshError: when called, for what does not fit.
    """
    if schedule not in SCHEDULES or (chunks != 1 and schedule != "interleaved") or chunks < 1:
        raise PipelineError(
            message(
                "mw.pipeline_value_and_grad was asked for a schedule that there is not",
                [f"schedule={schedule!r}, chunks={chunks!r}"],
                f"Schedules are {', '.join(map(repr, SCHEDULES))}; only 'interleaved' has several "
                "chunks a device.",
                "Name one of them.",
            )
        )
    if not isinstance(microbatches, int) or microbatches < 1:
        raise PipelineError(
            message(
                "mw.pipeline_value_and_grad cannot cut a batch",
                [f"microbatches={microbatches!r}"],
                "The number of microbatches is an integer of at least 1.",
                "Use at least as many as there are stages, or most devices are idle.",
            )
        )
    return PipelinedLoss(loss, axis, microbatches, schedule, chunks)


@dataclass(frozen=True)
class PipelinedLoss:
    """A loss and its gradients by a pipeline: `loss, gradients = step(params, batch)`."""

    loss: Callable[..., Any]
    axis: str
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def __name__(self) -> str:
        """What messages call the loss function; a partial is called as what it calls."""
        fn = self.loss
        while isinstance(fn, functools.partial):
            fn = fn.func
        return getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The mean loss over the microbatches, and its gradients, a tree like `params`.

        `params` is a tree of arrays, which every device then has all of, or `PackedParams`.
        """
        fed = jax.tree.map(self._microbatches, self._checked(batch))
        packed = params if isinstance(params, PackedParams) else None
        tree = packed.tree if packed else jax.tree.structure(params)
        types = list(packed.rows.types) if packed else _types(jax.tree.leaves(params))
        call, held = self._call(types, tree, batch, packed is not None)
        if packed is None:
            operands = [jnp.asarray(x) for x in jax.tree.leaves(params)]
        else:
            operands = [self._hinted(x) for x in packed.buffers.values()]
        value, *found = pipeline_p.bind(*operands, *held, *jax.tree.leaves(fed), call=call)
        if packed is None:
            return value, jax.tree.unflatten(tree, found)
        buffers = dict(zip(packed.buffers, map(self._hinted, found), strict=True))
        return value, PackedParams(buffers, packed.rows, packed.tree)

    def pack(self, params: Any, batch: Any) -> PackedParams:
        """Parameters in rows, one a stage, for devices to have only their own.

        Of `batch` the shapes are read alone: `jax.ShapeDtypeStruct`s will do.
        """
        leaves, tree = jax.tree.flatten(params)
        call, _ = self._call(_types(leaves), tree, self._checked(batch), is_packed=True)
        return PackedParams(call.rows.pack(leaves), call.rows, tree)

    def _call(
        self, types: Sequence[Any], tree: Any, batch: Any, is_packed: bool
    ) -> tuple[PipelineCall, list[Any]]:
        """The loss function traced and cut, and the values it closes over."""
        self._check_params(types, tree)
        parts = jax.tree.map(self._microbatch_type, batch)
        closed, held = self._traced(types, tree, parts)
        found = cut(closed, len(types), len(held), self.__name__)
        devices = self._devices(len(found.stages), found.lines)
        rows = Rows(tuple(types), tuple(stage.params for stage in found.stages), devices)
        extra = (self.chunks,) if self.schedule == "interleaved" else ()
        schedule = SCHEDULES[self.schedule](devices, self.microbatches, *extra)
        call = PipelineCall(
            closed, found, rows, schedule, self.axis, is_packed, len(held), self.__name__
        )
        return call, held

    def _traced(self, types: Sequence[Any], tree: Any, parts: Any) -> tuple[Any, list[Any]]:
        """The loss function's jaxpr, closed-over values as inputs between the others; and these."""
        fed, fed_tree = jax.tree.flatten(parts)

        def flat(*args: Any) -> Any:
            leaves, rest = args[: len(types)], args[len(types) :]
            return self.loss(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(fed_tree, rest))

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*types, *fed)
        is_array = isinstance(shape, jax.ShapeDtypeStruct)
        if not is_array or shape.shape or not jnp.issubdtype(shape.dtype, jnp.floating):
            raise ArgumentError(
                message(
                    f"{self.__name__} is no loss",
                    [f"it returns {jax.tree.map(_show, shape)}"],
                    "A loss is one floating-point scalar, the mean over a microbatch.",
                    "Return the loss alone.",
                )
            )
        inner = closed.jaxpr
        first = len(types)
        inputs = [*inner.invars[:first], *inner.constvars, *inner.invars[first:]]
        opened = _jax.close_jaxpr([], inputs, inner.outvars, inner.eqns, [])
        return opened, [jnp.asarray(c) for c in closed.consts]

    def _devices(self, stages: int, lines: Sequence[str]) -> int:
        """How many devices the stages are for; an error where the mesh has another number."""
        mesh = jax.sharding.get_abstract_mesh()
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        if sizes and self.axis not in sizes:
            raise MeshError(
                message(
                    f"{self.__name__} is to be pipelined along an axis that the mesh has not",
                    [f"axis {self.axis!r}; the mesh has {', '.join(map(repr, sizes))}"],
                    "The stages of a pipeline lie along one axis of the mesh.",
                    "Name one of its axes.",
                )
            )
        wanted = sizes.get(self.axis, stages // self.chunks) * self.chunks
        if stages != wanted:
            each = "" if self.chunks == 1 else f" of {self.chunks} chunks each"
            devices = sizes.get(self.axis)
            along = f"{devices} devices" if devices else "devices"
            raise PipelineError(
                message(
                    f"{self.__name__} has {stages} stages, for {along}{each} along {self.axis!r}",
                    [f"a boundary at {line}" for line in lines] or ["no boundary at all"],
                    "A model with n stage boundaries has n + 1 stages, and there are to be as many "
                    "as devices times chunks.",
                    f"Put mw.stage_boundary in {wanted - 1} places."
                    if devices
                    else "Put mw.stage_boundary in other places, or choose other chunks.",
                )
            )
        return stages // self.chunks

    def _checked(self, batch: Any) -> Any:
        """The batch; an error where its arrays have no rows that the microbatches divide."""
        found = jax.tree_util.tree_flatten_with_path(batch)[0]
        shapes = [(jax.tree_util.keystr(p), tuple(jnp.shape(x))) for p, x in found]
        rows = next((shape[0] for _, shape in shapes if shape), 0)
        offenders = [
            f"batch{path} has shape {shape}"
            for path, shape in shapes
            if not shape or shape[0] != rows or shape[0] % self.microbatches
        ]
        if offenders or not shapes:
            raise PipelineError(
                message(
                    f"The batch of {self.__name__} cannot be cut into {self.microbatches} "
                    "microbatches",
                    offenders or ["it has no arrays"],
                    "Every array of the batch has the same number of rows as its first dim, a "
                    "multiple of the number of microbatches.",
                    "Choose another number of microbatches or batch size, and let the loss "
                    "function close over what has no rows.",
                )
            )
        return batch

    def _check_params(self, types: Sequence[Any], tree: Any) -> None:
        paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, types))[0]
        offenders = [
            f"params{jax.tree_util.keystr(path)} is {_show(t)}"
            for path, t in paths
            if not has_gradient(t)
        ]
        if offenders:
            raise ArgumentError(
                message(
                    f"{self.__name__} has parameters that have no gradients",
                    offenders,
                    "Gradients are taken of floating-point arrays.",
                    "Let the loss function close over the others, or put them into the batch.",
                )
            )

    def _microbatch_type(self, x: Any) -> Any:
        shape = jnp.shape(x)
        return jax.ShapeDtypeStruct((shape[0] // self.microbatches, *shape[1:]), _dtype(x))

    def _microbatches(self, x: Any) -> Any:
        """`[M * b, ...]` to `[M, b, ...]`, the rows dealt out in turn."""
        x = jnp.asarray(x)
        return jnp.swapaxes(x.reshape(-1, self.microbatches, *x.shape[1:]), 0, 1)

    def _hinted(self, x: Any) -> Any:
        """`[S, V, length]`, to lie along the pipeline's axis."""
        mesh = jax.sharding.get_abstract_mesh()
        if self.axis not in mesh.axis_names:
            return x
        return _jax.hint_p.bind(x, sharding=PartitionSpec(self.axis))


def _types(leaves: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(jnp.shape(x), _dtype(x)) for x in leaves]


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _show(t: Any) -> str:
    return f"{t.dtype}[{','.join(map(str, t.shape))}]"
