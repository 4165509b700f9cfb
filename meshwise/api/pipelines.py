"""`mw.pipeline_value_and_grad`: a loss and its gradients, computed by a pipeline of stages."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise._jax.explicit import auto_mesh
from meshwise._jax.pipelines import hints_as_specs, hints_in, pipeline_p
from meshwise.api.arguments import name_of
from meshwise.api.in_stages import axes_named, check_hints, check_stages, refuse_references
from meshwise.api.options import check_is_mesh
from meshwise.api.pipeline_inputs import check_arrays, check_loss, check_pipeline, show_type
from meshwise.api.specs import given_in_specs
from meshwise.errors import ArgumentError, PipelineError, message
from meshwise.ir.mesh import refine_mesh
from meshwise.pipeline.axis import check_axis
from meshwise.pipeline.call import PipelineCall
from meshwise.pipeline.inner import Placement, place, without_axis
from meshwise.pipeline.local import has_gradient
from meshwise.pipeline.parameters import PackedParams, Packing, Rows
from meshwise.pipeline.schedules import SCHEDULES
from meshwise.pipeline.stages import Cut, cut
from meshwise.pipeline.tiles import axes_of, whole


@_jax.hides_frames
def pipeline_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis: str,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    stages: int | None = None,
    in_shardings: Any = None,
    has_aux: bool = False,
) -> "PipelinedLoss":
    """`jax.value_and_grad` of a loss, its model cut into stages along an axis of the mesh.

    The result is called inside of `mw.jit` as `loss, gradients = step(params, batch)`: the mean of
    `loss(params, microbatch)` over the microbatches, and its gradients. One program runs on all
    devices: a loop over the ticks of the schedule, in which each device takes its own stage, and
    activations and gradients go to its neighbours. Outside of `mw.jit`, and on one device, the same
    is computed without a pipeline.

    Args:
        loss: a function of (params, microbatch) that returns a floating-point scalar, with
            `mw.stage_boundary` between the stages of its model; or without, and with `stages`.
        axis: the axis of the mesh along which the stages lie, in order.
        microbatches: how many parts the batch is cut into. Each array of the batch has as its first
            dim the rows, and row i belongs to microbatch `i % microbatches`, so that a batch that
            is sharded stays where it is.
        schedule: "1f1b", "eager", "gpipe" or "interleaved"; see `meshwise.pipeline.schedules`.
        chunks: with "interleaved", how many stages each device has. Stage k lies on device `k % S`.
        stages: cut a model that has no marks into so many stages that take alike long: as many as
            devices along the axis, times chunks.
        in_shardings: hints for (params, batch) over the other axes of the mesh, as `mw.jit` takes
            them. Hints inside of the function count too.
        has_aux: the function returns (loss, aux), aux a tree of floating-point arrays. Their mean
            over the microbatches comes with the loss: `(loss, aux), gradients = step(...)`.

    Raises:
        PipelineError, ArgumentError, MeshError: when called, for what does not fit.
    """
    count, each, cut_into = check_pipeline(loss, axis, microbatches, schedule, chunks, stages)
    return PipelinedLoss(loss, axis, count, schedule, each, cut_into, in_shardings, has_aux)


@dataclass(frozen=True, eq=False)
class PipelinedLoss:
    """A loss and its gradients by a pipeline: `loss, gradients = step(params, batch)`."""

    loss: Callable[..., Any]
    axis: str
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1
    stages: int | None = None
    in_shardings: Any = None
    has_aux: bool = False

    @property
    def __name__(self) -> str:
        """What messages call the loss function; a partial is called as what it calls."""
        return name_of(self.loss)

    @_jax.hides_frames
    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The mean loss over the microbatches, and its gradients, a tree like `params`.

        `params` is a tree of arrays, which every device along the axis then has all of, or
        `PackedParams`.
        """
        check_arrays(self.__name__, "params", params)
        check_arrays(self.__name__, "batch", batch)
        fed = jax.tree.map(self._microbatches, self._checked(batch))
        packed = params if isinstance(params, PackedParams) else None
        tree = packed.tree if packed else jax.tree.structure(params)
        types = list(packed.types) if packed else _types(jax.tree.leaves(params), are_weak=True)
        call, held, aux = self._call(types, tree, batch, packed is not None)
        if packed and packed.packing != call.packing:
            raise self._packed_otherwise()
        given = list(packed.buffers.values()) if packed else jax.tree.leaves(params)
        operands = call.operands([jnp.asarray(x) for x in given], held, jax.tree.leaves(fed))
        hinted = map(self._hinted, operands, call.leads)
        found = pipeline_p.bind(*hinted, call=call)
        means, found = found[: call.means], found[call.means :]
        value = (means[0], jax.tree.unflatten(aux, means[1:])) if self.has_aux else means[0]
        gradients = call.gradients([*means, *map(self._hinted, found, call.leads)])
        if not packed:
            return value, jax.tree.unflatten(tree, gradients)
        buffers = dict(zip(packed.buffers, gradients, strict=True))
        return value, PackedParams(buffers, packed.packing, packed.tree)

    @_jax.hides_frames
    def pack(self, params: Any, batch: Any, mesh: Any = None) -> PackedParams:
        """Parameters in rows, one a stage, for devices to have only their own.

        Of `batch` the shapes are read alone: `jax.ShapeDtypeStruct`s will do. The mesh, by default
        that in context (`jax.set_mesh`), is needed where its other axes shard parameters. Where it
        has devices, each gets its rows; without one, and in a trace, rows lie as they are made.
        """
        check_is_mesh(mesh, f"pack of {self.__name__}")
        check_arrays(self.__name__, "params", params)
        check_arrays(self.__name__, "batch", batch, are_types=True)
        leaves, tree = jax.tree.flatten(params)
        context = auto_mesh(mesh) if mesh is not None else jax.sharding.get_abstract_mesh()
        with _jax.with_mesh(context):
            call, *_ = self._call(_types(leaves), tree, self._checked(batch), is_packed=True)
        rows, mesh = call.packing.pack(leaves), _jax.context_mesh() if mesh is None else mesh
        if isinstance(mesh, Mesh) and not any(isinstance(x, _jax.Tracer) for x in leaves):
            rows = jax.device_put(rows, NamedSharding(mesh, call.packing.spec(self.axis)))
        return PackedParams(rows, call.packing, tree)

    def _call(
        self, types: Sequence[Any], tree: Any, batch: Any, is_packed: bool
    ) -> tuple[PipelineCall, list[Any], Any]:
        """The loss function traced, cut and placed; the values it closes over; the tree of aux."""
        params = jax.tree.unflatten(tree, types)
        self._check_params(params)
        if self.stages is not None:
            self._devices(self.stages, [f"stages={self.stages}"])
        parts = jax.tree.map(self._microbatch_type, batch)
        closed, held, aux = self._traced(types, tree, parts)
        closed = hints_as_specs(_jax.without_references(closed))
        if jax.sharding.get_abstract_mesh().axis_names:
            check_stages(self.__name__, closed, jax.sharding.get_abstract_mesh())
        found = cut(closed, len(types), len(held), self.__name__, self.stages)
        lines = _boundaries(found.lines) or ["no boundary at all"]
        devices = self._devices(len(found.stages), lines)
        placement = self._placed(found, params, parts)
        extra = (self.chunks,) if self.schedule == "interleaved" else ()
        schedule = SCHEDULES[self.schedule](devices, self.microbatches, *extra)
        local = tuple(t.local for t in placement.params)
        rows = Rows(local, tuple(stage.params for stage in found.stages), devices)
        others = axes_of(placement.params, jax.sharding.get_abstract_mesh().axis_names)
        sizes = dict(pair for t in placement.params for pair in t.sizes)
        packing = Packing(rows, placement.params, tuple((a, sizes[a]) for a in others))
        call = PipelineCall(closed, found, packing, placement, schedule, self.axis, is_packed)
        return call, held, aux

    def _placed(self, found: Cut, params: Any, parts: Any) -> Placement:
        """How all lies over the other axes of the mesh; whole where there is no mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        tree = jax.tree.structure(((params, parts), {}))
        specs = given_in_specs(self.__name__, self.in_shardings, tree, (0, 1))
        if not mesh.axis_names:
            known = found.params + found.held
            tilings = tuple(map(whole, found.chain.in_avals))
            boundaries = tuple(tuple(map(whole, s.leaving)) for s in found.stages[:-1])
            return Placement(tilings[: found.params], tilings[known:], boundaries, (), 0.0)
        first = found.params
        paths = [f"params{p}" for p in _paths(params)]
        paths += [f"closed-over value {i}" for i in range(found.held)]
        paths += [f"batch{p}" for p in _paths(parts)]
        hints = [*specs[:first], *[None] * found.held, *specs[first:]]
        said = [*zip(paths, hints, strict=True), *hints_in(found.chain)]
        check_hints(self.__name__, self.axis, said)
        others = without_axis(refine_mesh(mesh.axis_names, mesh.axis_sizes), self.axis)
        placed = place(found, others, hints, paths, self.__name__)
        self._check_placed(placed, specs, [*paths[:first], *paths[first + found.held :]])
        return placed

    def _check_placed(self, placed: Placement, specs: Sequence[Any], paths: Sequence[str]) -> None:
        """An error for what cannot lie as it was hinted."""
        inputs, mesh = [*placed.params, *placed.fed], jax.sharding.get_abstract_mesh()
        alone = {axis for axis, size in mesh.shape.items() if size == 1}
        offenders = [
            f"{path} of shape {t.shape} is to be {spec}"
            for path, t, spec in zip(paths, inputs, specs, strict=True)
            if spec is not None and axes_named(spec) - set(t.axes) - alone
        ]
        if offenders:
            raise PipelineError(
                message(
                    f"{self.__name__} has shardings that do not divide",
                    offenders,
                    "What is sharded over other axes than the pipeline's has dims that their sizes "
                    "divide; rows of the batch count by microbatch.",
                    "Choose other sizes, or leave the dim whole.",
                )
            )

    def _packed_otherwise(self) -> PipelineError:
        return PipelineError(
            message(
                f"{self.__name__} was given parameters that are packed for something else",
                ["the rows were made for other stages, shapes, or shardings"],
                "Rows are made for one model, cut in one way, over one mesh.",
                "Pack them with this step's own `pack`, and its mesh.",
            )
        )

    def _traced(self, types: Sequence[Any], tree: Any, parts: Any) -> tuple[Any, list[Any], Any]:
        """The loss function's jaxpr, closed-over values as inputs between the others; and these.

        Its results are the loss and the leaves of aux, whose tree comes last.
        """
        fed, fed_tree = jax.tree.flatten(parts)

        def flat(*args: Any) -> Any:
            leaves, rest = args[: len(types)], args[len(types) :]
            found = self.loss(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(fed_tree, rest))
            check_loss(self.__name__, found, self.has_aux)
            return found

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*types, *fed)
        refuse_references(self.__name__, closed.consts)
        aux = shape[1] if self.has_aux else ()
        inner = closed.jaxpr
        first = len(types)
        inputs = [*inner.invars[:first], *inner.constvars, *inner.invars[first:]]
        opened = _jax.close_jaxpr([], inputs, inner.outvars, inner.eqns, [])
        return opened, [jnp.asarray(c) for c in closed.consts], jax.tree.structure(aux)

    def _devices(self, stages: int, said: Sequence[str]) -> int:
        """How many devices the stages are for; an error where the mesh has another number."""
        mesh = jax.sharding.get_abstract_mesh()
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        check_axis(self.__name__, self.axis, sizes)
        wanted = sizes.get(self.axis, stages // self.chunks) * self.chunks
        if stages != wanted:
            each = "" if self.chunks == 1 else f" of {self.chunks} chunks each"
            devices = sizes.get(self.axis)
            along = f"{devices} devices" if devices else "devices"
            found = "1 stage" if stages == 1 else f"{stages} stages"
            raise PipelineError(
                message(
                    f"{self.__name__} has {found}, for {along}{each} along {self.axis!r}",
                    said,
                    "A model with n stage boundaries has n + 1 stages, and there are to be as many "
                    "as devices times chunks.",
                    self._way_out(wanted, bool(devices)),
                )
            )
        return stages // self.chunks

    def _way_out(self, wanted: int, is_number_known: bool) -> str:
        """What to do about another number of stages."""
        if not is_number_known:
            return "Put mw.stage_boundary in other places, or choose other chunks."
        if self.stages is not None:
            return f"Say stages={wanted}."
        places = {1: "no place", 2: "1 place"}.get(wanted, f"{wanted - 1} places")
        return f"Put mw.stage_boundary in {places}, or say stages={wanted} without any."

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

    def _check_params(self, params: Any) -> None:
        leaves = zip(_paths(params), jax.tree.leaves(params), strict=True)
        offenders = [f"params{p} is {show_type(t)}" for p, t in leaves if not has_gradient(t)]
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
        """`[b * M, ...]` to `[b, M, ...]`: row i belongs to microbatch `i % M`; nothing moves."""
        x = jnp.asarray(x)
        return x.reshape(x.shape[0] // self.microbatches, self.microbatches, *x.shape[1:])

    def _hinted(self, x: Any, lead: Sequence[str | None]) -> Any:
        """An array whose leading dims are axes of the mesh, each to lie along it."""
        mesh = jax.sharding.get_abstract_mesh()
        if not any(lead) or self.axis not in mesh.axis_names:
            return x
        entries = [PartitionSpec.UNCONSTRAINED if axis is None else axis for axis in lead]
        return _jax.hint_p.bind(x, sharding=PartitionSpec(*entries))


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _types(leaves: Sequence[Any], are_weak: bool = False) -> list[Any]:
    """Types of leaves; with `are_weak` those that give way, as Python's numbers, do so."""
    types = [_jax.array_type(x) for x in leaves]
    return [
        jax.ShapeDtypeStruct(jnp.shape(x), _dtype(x), weak_type=are_weak and t.weak_type)
        for x, t in zip(leaves, types, strict=True)
    ]


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _boundaries(lines: Sequence[str]) -> list[str]:
    """Where the boundaries of a model are; those of one line together."""
    return [
        f"a boundary at {line}" if count == 1 else f"{count} boundaries at {line}"
        for line, count in Counter(lines).items()
    ]
