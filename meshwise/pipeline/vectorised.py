"""Pipelines of equal stages as an ordinary loop (GSPMD 2021, section 3.3).

All stages are one function under `jax.vmap`, over a dim of stages that is sharded over an axis of
the mesh: each device computes its own. A loop shifts the activations by one stage and applies all
stages; the shift is one `ppermute`. It is plain JAX with hints, so it may be differentiated, and
stand in any function.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwise import _jax
from meshwise.errors import PipelineError, message
from meshwise.ir.numbers import whole_number
from meshwise.pipeline.axis import check_axis
from meshwise.pipeline.bubbles import without_gradient_unless
from meshwise.pipeline.stacking import StackedLayers

# Of leaves that do not fit an error shows so many.
MOST_SHOWN = 4


@_jax.hides_frames
def pipeline(
    stage: Callable[[Any, Any], Any],
    params: Any,
    inputs: Any,
    *,
    axis: str | None = None,
    schedule: str = "gpipe",
    repeat: int = 1,
    remat: bool = True,
) -> Any:
    """Apply S equal stages one after the other to each of M microbatches, all stages at a time.

    Args:
        stage: a function of (parameters of a stage, activations) that returns activations of the
            same structure, shapes and types.
        params: the stages' parameters, leaves `[S, ...]`; of a circular pipeline `[S, R, ...]`,
            whose stage k is `[k % S, k // S]`. See `mw.stack_stages`.
        inputs: the microbatches' activations, leaves `[M, ...]`.
        axis: the axis of the mesh over which stages are sharded.
        schedule: "gpipe", which takes `M + S - 1` iterations, or "circular", in which microbatches
            pass all devices `repeat` times, in `R M + S - 1` iterations; then `M >= S`.
        repeat: R.
        remat: compute the stages again in the backward pass, from their inputs.

    Returns:
        The results of the last stage, like `inputs`.

    Raises:
        PipelineError, MeshError: for what does not fit.

    >>> w = jax.numpy.array([[2.0], [3.0]])
    >>> pipeline(lambda w, x: w * x, w, jax.numpy.arange(3.0)[:, None]).tolist()
    [[0.0], [6.0], [12.0]]
    """
    params = params.masked() if isinstance(params, StackedLayers) else params
    stages, count = _sizes(params, inputs, schedule, repeat)
    if axis is not None:
        name = getattr(stage, "__name__", "the function")
        check_axis(name, axis, jax.sharding.get_abstract_mesh().shape)

    def apply(own: Any, state: Any, is_used: Any) -> Any:
        return jax.vmap(stage)(*without_gradient_unless(is_used, (own, state)))

    apply = jax.checkpoint(apply) if remat else apply

    def run(params: Any, inputs: Any) -> Any:
        _check_stage(stage, params, inputs, repeat)
        return _run(apply, params, inputs, (stages, count, repeat), axis)

    return _jax.run_over_auto_axes(run, (params, inputs), like=inputs)


def _run(
    apply: Callable[[Any, Any, Any], Any],
    params: Any,
    inputs: Any,
    sizes: tuple[int, int, int],
    axis: str | None,
) -> Any:
    """The loop: shift, let in, apply all stages. `sizes` are S, M and R."""
    stages, count, repeat = sizes
    params = _along(params, axis)
    types = inputs
    inputs = jax.tree.map(_jax.without_key_type, inputs)  # keys travel as the numbers that they are
    numbers = np.arange(stages, dtype=np.int32)
    delay = count - stages if repeat > 1 else 0

    def iteration(carry: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
        state, waiting = carry
        tick, fresh = at
        back = jax.tree.map(lambda x: jnp.roll(x, 1, 0), state)
        again, waiting = _delayed(back, waiting, tick, delay)
        entering = [numbers == 0, tick < count]
        state = jax.tree.map(lambda *x: _enter(entering, *x), back, again, fresh)
        own = params
        if repeat > 1:
            turn = jnp.clip((tick - numbers) // count, 0, repeat - 1)
            own = jax.tree.map(lambda p: jax.vmap(_row)(p, turn), params)
        is_used = (tick >= numbers) & (tick - numbers < repeat * count)
        typed = jax.tree.map(_jax.with_key_type, _along(state, axis), types)
        state = _along(jax.tree.map(_jax.without_key_type, apply(own, typed, is_used)), axis)
        return (state, waiting), state

    length = repeat * count + stages - 1
    # Stages without a microbatch compute with ones, of which nothing comes.
    state = jax.tree.map(lambda x: jnp.ones((stages, *x.shape[1:]), x.dtype), inputs)
    waiting = jax.tree.map(lambda x: jnp.ones((delay, *x.shape), x.dtype), state)
    rows = jnp.arange(length, dtype=jnp.int32), jax.tree.map(lambda x: _longer(x, length), inputs)
    _, made = lax.scan(iteration, (_along(state, axis), waiting), rows)
    last = jax.tree.map(lambda x: x[length - count :, stages - 1], made)
    return jax.tree.map(_jax.with_key_type, last, types)


def _delayed(arrived: Any, waiting: Any, tick: Any, delay: int) -> tuple[Any, Any]:
    """What arrived `delay` iterations ago, and the queue `[delay, S, ...]` with what has now."""
    if not delay:
        return arrived, waiting
    place = tick % delay
    found = jax.tree.map(lambda x: _row(x, place), waiting)
    kept = jax.tree.map(
        lambda x, new: lax.dynamic_update_index_in_dim(x, new, place, 0), waiting, arrived
    )
    return found, kept


def _enter(entering: Any, back: Any, again: Any, fresh: Any) -> Any:
    """What each stage takes: the first a new microbatch or one that comes again, others the last's.

    All are `[S, ...]`, but `fresh` is a microbatch.
    """
    is_first, is_new = entering
    is_first = jnp.reshape(is_first, (-1,) + (1,) * fresh.ndim)
    return jnp.where(is_first, jnp.where(is_new, fresh[None], again), back)


def _row(x: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _longer(x: Any, length: int) -> Any:
    """`[M, ...]` to `[length, ...]`, with ones that no result comes of."""
    widths = [(0, length - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, constant_values=1)


def _along(tree: Any, axis: str | None) -> Any:
    """Leaves whose first dim is sharded over an axis; all others are left open."""
    if axis is None:
        return tree

    def hinted(x: Any) -> Any:
        x = jnp.asarray(x)
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        written = f"axis={axis!r} of mw.pipeline", PartitionSpec(axis), x.shape[:1]
        return _jax.hint_p.bind(x, sharding=PartitionSpec(axis, *rest), written=written)

    return jax.tree.map(hinted, tree)


def _sizes(params: Any, inputs: Any, schedule: str, repeat: int) -> tuple[int, int]:
    """The number of stages and of microbatches; an error where leaves differ in them."""
    stacked, given = _shapes("params", params), _shapes("inputs", inputs)
    stages = next((shape[:1] for shape in stacked.values()), ())
    count = next((shape[:1] for shape in given.values()), ())
    is_count = (whole_number(repeat) or 0) >= 1
    wanted = (*stages, repeat) if is_count and repeat > 1 else stages
    offenders = _unlike(stacked, wanted) + _unlike(given, count or (None,))
    if isinstance(params, StackedLayers) and params.repeat != repeat:
        offenders = [f"layers stacked with repeat={params.repeat}, and repeat={repeat!r}"]
    if not is_count or schedule not in ("circular", "gpipe")[: 2 if repeat == 1 else 1]:
        offenders = [f"schedule={schedule!r}, repeat={repeat!r}"]
    elif not offenders and repeat > 1 and stages and count and count < stages:
        offenders = [f"{count[0]} microbatches, {stages[0]} stages at a time, repeat={repeat}"]
    if not offenders and stages and count:
        return stages[0], count[0]
    raise PipelineError(
        message(
            "mw.pipeline was given what is no pipeline",
            offenders or ["params or inputs have no arrays with a first dim"],
            "Leaves of params are [S, ...], those of inputs [M, ...]. A 'circular' pipeline of "
            "repeat=R has params [S, R, ...] and M of at least S; a 'gpipe' is not repeated.",
            "Stack parameters with mw.stack_stages, and the microbatches along a first dim.",
        )
    )


def _unlike(shapes: Mapping[str, tuple[int, ...]], wanted: tuple[Any, ...]) -> list[str]:
    """The first few leaves whose shapes do not begin as wanted, after one that does."""
    found = {n: s for n, s in shapes.items() if s[: len(wanted)] != wanted}
    alike = [f"{n} has shape {s}" for n, s in shapes.items() if n not in found][:1]
    shown = [f"{n} has shape {s}" for n, s in found.items()][:MOST_SHOWN]
    rest = len(found) - len(shown)
    return (
        [*alike, *shown, *([f"and {rest} more whose first dims differ from that"] if rest else [])]
        if found
        else []
    )


def _shapes(name: str, tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf, by its path."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {f"{name}{jax.tree_util.keystr(p)}": tuple(jnp.shape(x)) for p, x in found}


def _check_stage(stage: Any, params: Any, inputs: Any, repeat: int) -> None:
    """An error where a stage's results are not like its inputs."""
    own = jax.tree.map(lambda p: _part(p, 2 if repeat > 1 else 1), params)
    given = jax.tree.map(lambda x: _part(x, 1), inputs)
    made = jax.eval_shape(stage, own, given)
    if jax.tree.structure(made) == jax.tree.structure(given):
        pairs = zip(
            jax.tree_util.tree_flatten_with_path(given)[0], jax.tree.leaves(made), strict=True
        )
        offenders = [
            f"inputs{jax.tree_util.keystr(path)} is {_show(a)}, the result {_show(b)}"
            for (path, a), b in pairs
            if (a.shape, a.dtype) != (b.shape, b.dtype)
        ]
    else:
        offenders = [f"it takes {jax.tree.structure(given)} and returns {jax.tree.structure(made)}"]
    if offenders:
        raise PipelineError(
            message(
                f"{getattr(stage, '__name__', 'the function')} is no stage of mw.pipeline",
                offenders,
                "What a stage returns goes into the next, which is the same function.",
                "Return activations like those that came in; what changes shape belongs before "
                "or after the pipeline, or into mw.pipeline_value_and_grad.",
            )
        )


def _part(x: Any, leads: int) -> jax.ShapeDtypeStruct:
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return jax.ShapeDtypeStruct(jnp.shape(x)[leads:], dtype)


def _show(t: Any) -> str:
    return f"{t.dtype}[{','.join(map(str, t.shape))}]"
