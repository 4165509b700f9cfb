"""Stages as a device runs them: forward, and backward with the forward computed again.

The backward of a stage is what `jax.vjp` of its forward gives, from the stage's input alone, so
that nothing else is saved for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise._jax import ClosedJaxpr
from meshwise._jax.bodies import without_hints_in
from meshwise._jax.pipelines import without_last_casts
from meshwise.pipeline.packing import Layout, sum_dtype
from meshwise.pipeline.stages import Stage


@dataclass(frozen=True)
class Crossing:
    """Which values that arrive at a stage, and which that leave it, have gradients that cross.

    Those of which the loss has a derivative. A gradient that is none is no zero to compute with:
    times the infinite derivative of a root at zero it would be no number.
    """

    arriving: tuple[bool, ...]
    leaving: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class LocalStage:
    """One stage on a device: its two jaxprs, and how what they take and give is laid out.

    `forward` maps (parameters, held values, leaves of a microbatch, what arrives) to what leaves;
    the last stage has none, as its backward computes it again at once. `backward` maps the same
    and the gradients of what leaves to the gradients of the parameters (as they are, or as they are
    added up) and of what arrives; the last stage's needs no gradients, and gives the function's
    results before all others, the loss first. The results and the gradients of parameters may be
    unreduced, all over the same axes.
    """

    forward: ClosedJaxpr | None
    backward: ClosedJaxpr
    params: tuple[int, ...]
    held: tuple[int, ...]
    fed: tuple[int, ...]
    crossing: Crossing

    @property
    def is_last(self) -> bool:
        """Whether the stage makes the loss."""
        return self.forward is None

    @property
    def _takes(self) -> list[Any]:
        """Types of everything that goes in, gradients left out."""
        return list((self.forward or self.backward).in_avals)

    @cached_property
    def row(self) -> Layout:
        """The stage's parameters."""
        return Layout(tuple(self._takes[: len(self.params)]))

    @cached_property
    def arriving(self) -> Layout:
        """What arrives from the stage before."""
        first = len(self.params) + len(self.held) + len(self.fed)
        return Layout(tuple(self._takes[first:]))

    @cached_property
    def leaving(self) -> Layout:
        """What goes to the next stage."""
        return Layout(tuple(self.forward.out_avals) if self.forward else ())

    @property
    def results(self) -> list[Any]:
        """Types of the function's results, of the last stage."""
        others = len(self.params) + len(self.leaving_gradients.types)
        return list(self.backward.out_avals[: len(self.backward.out_avals) - others])

    @cached_property
    def arriving_gradients(self) -> Layout:
        """The gradients that come from the next stage."""
        return Layout(tuple(compress(self.leaving.types, self.crossing.leaving)))

    @cached_property
    def leaving_gradients(self) -> Layout:
        """The gradients that go to the stage before."""
        return Layout(tuple(compress(self.arriving.types, self.crossing.arriving)))

    @cached_property
    def key(self) -> Any:
        """Equal for stages that run the same code on the same leaves."""
        counts = len(self.params), self.held, self.fed
        # Both: what a `custom_vjp` says of gradients is no part of the forward program's key.
        forward = _jax.structure_key(self.forward) if self.forward else None
        return forward, _jax.structure_key(self.backward), counts


def has_gradient(aval: Any) -> bool:
    """Whether a value is one that derivatives are taken of."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def crossing_of_loss(jaxpr: ClosedJaxpr, arriving: tuple[bool, ...]) -> Crossing:
    """That of a stage which makes the loss, its first result."""
    return Crossing(arriving, tuple(i == 0 for i in range(len(jaxpr.out_avals))))


def crossings(stages: Sequence[Stage]) -> list[Crossing]:
    """What gradients cross the boundaries of stages, from the last one's loss back."""
    leaving = crossing_of_loss(stages[-1].jaxpr, ()).leaving
    found: list[Crossing] = []
    for stage in reversed(stages):
        arriving = _reached(stage, leaving)
        found.insert(0, Crossing(arriving, leaving))
        leaving = arriving
    return found


def _reached(stage: Stage, leaving: Sequence[bool]) -> tuple[bool, ...]:
    """The values that arrive at a stage whose gradients come of those of what leaves it."""
    forward, first = stage.jaxpr, len(stage.jaxpr.in_avals) - len(stage.arriving)
    moving = [first + i for i, aval in enumerate(stage.arriving) if has_gradient(aval)]
    given = [i for i, moves in enumerate(leaving) if moves]

    def pulled(inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        return _derived(forward, inputs, moving, given)[1](list(gradients))

    types = list(map(_struct, forward.in_avals)), [_struct(forward.out_avals[i]) for i in given]
    back = jax.make_jaxpr(pulled)(*types)
    count = len(forward.in_avals)
    reached = {
        i
        for k, i in enumerate(moving)
        if any(_jax.inputs_read(back, [k == n for n in range(len(moving))])[count:])
    }
    return tuple(first + i in reached for i in range(len(stage.arriving)))


def _derived(
    forward: ClosedJaxpr, inputs: Sequence[Any], moving: Sequence[int], given: Sequence[int]
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """A forward's results, and what gradients of some make of those of some inputs."""
    run = _jax.jaxpr_as_fun(forward)

    def along(*moved: Any) -> tuple[list[Any], list[Any]]:
        values = list(inputs)
        for i, x in zip(moving, moved, strict=True):
            values[i] = x
        outs = list(run(*values))
        return [outs[i] for i in given], outs

    _, pull, outs = jax.vjp(along, *(inputs[i] for i in moving), has_aux=True)
    return outs, pull


def local_stage(stage: Stage, is_last: bool, crossing: Crossing) -> LocalStage:
    """A stage that every device along the other axes computes whole."""
    forward = _jax.without_context_mesh(without_hints_in(stage.jaxpr))
    backward = make_backward(forward, len(stage.params), crossing, is_last)
    own = stage.params, stage.held, stage.fed, crossing
    return LocalStage(None if is_last else forward, backward, *own)


def make_backward(
    forward: ClosedJaxpr, params: int, crossing: Crossing, is_last: bool
) -> ClosedJaxpr:
    """The backward of a stage's forward; see `LocalStage`."""
    count = len(forward.in_avals)
    first = count - len(crossing.arriving)
    moving = [i for i in range(params) if has_gradient(forward.in_avals[i])]
    moving += [first + i for i, moves in enumerate(crossing.arriving) if moves]
    given = [i for i, moves in enumerate(crossing.leaving) if moves]

    def backward(*args: Any) -> list[Any]:
        outs, pull = _derived(forward, args[:count], moving, given)
        if not is_last:
            return list(pull(list(args[count:])))
        results = [x for x in outs if has_gradient(x)]
        return [*results, *pull([jnp.ones_like(outs[0])])]

    types = list(forward.in_avals)
    types += [] if is_last else [forward.out_avals[i] for i in given]
    made = jax.make_jaxpr(backward)(*map(_struct, types))
    # What is to be added up is not made short before.
    own = range(len(made.out_avals) - len(moving), len(made.out_avals))[:params]
    return without_last_casts(made, {i: sum_dtype(made.out_avals[i].dtype) for i in own})


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def distinct(stages: Sequence[LocalStage]) -> tuple[list[LocalStage], list[int]]:
    """Stages that run different code, and for each stage which of them it is."""
    number: dict[Any, int] = {}
    numbers = [number.setdefault(stage.key, len(number)) for stage in stages]
    return [stages[numbers.index(i)] for i in range(len(number))], numbers
