"""Stages as a device runs them: forward, and backward with the forward computed again.

The backward of a stage is what `jax.vjp` of its forward gives, from the stage's input alone, so
that nothing else is saved for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise._jax import ClosedJaxpr
from meshwise._jax.bodies import without_hints_in
from meshwise.pipeline.packing import Layout
from meshwise.pipeline.stages import Stage


@dataclass(frozen=True, eq=False)
class LocalStage:
    """One stage on a device: its two jaxprs, and how what they take and give is laid out.

    `forward` maps (parameters, held values, leaves of a microbatch, what arrives) to what leaves;
    the last stage has none, as its backward computes it again at once. `backward` maps the same
    and the gradients of what leaves to the gradients of the parameters and of what arrives; the
    last stage's needs no gradients, and gives the function's results before all others, the loss
    first. Only floating-point values have gradients. The results and the gradients of parameters
    may be unreduced, all over the same axes.
    """

    forward: ClosedJaxpr | None
    backward: ClosedJaxpr
    params: tuple[int, ...]
    held: tuple[int, ...]
    fed: tuple[int, ...]

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
        return Layout(tuple(filter(has_gradient, self.leaving.types)))

    @cached_property
    def leaving_gradients(self) -> Layout:
        """The gradients that go to the stage before."""
        return Layout(tuple(filter(has_gradient, self.arriving.types)))

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


def local_stage(stage: Stage, is_last: bool) -> LocalStage:
    """A stage that every device along the other axes computes whole."""
    forward = _jax.without_context_mesh(without_hints_in(stage.jaxpr))
    backward = make_backward(forward, len(stage.params), len(stage.arriving), is_last)
    own = stage.params, stage.held, stage.fed
    return LocalStage(None if is_last else forward, backward, *own)


def make_backward(forward: ClosedJaxpr, params: int, arriving: int, is_last: bool) -> ClosedJaxpr:
    """The backward of a stage's forward; see `LocalStage`."""
    run = _jax.jaxpr_as_fun(forward)
    count = len(forward.in_avals)
    places = [*range(params), *range(count - arriving, count)]
    moving = [i for i in places if has_gradient(forward.in_avals[i])]
    returned = [i for i, aval in enumerate(forward.out_avals) if has_gradient(aval)]

    def backward(*args: Any) -> list[Any]:
        inputs, gradients = list(args[:count]), args[count:]

        def along(*moved: Any) -> list[Any]:
            values = list(inputs)
            for i, x in zip(moving, moved, strict=True):
                values[i] = x
            outs = run(*values)
            return [outs[i] for i in returned]

        outs, pull = jax.vjp(along, *(inputs[i] for i in moving))
        if not is_last:
            return list(pull(list(gradients)))
        loss, *others = outs
        return [*outs, *pull([jnp.ones_like(loss), *map(jnp.zeros_like, others)])]

    types = list(forward.in_avals)
    types += [] if is_last else [forward.out_avals[i] for i in returned]
    return jax.make_jaxpr(backward)(*map(_struct, types))


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def distinct(stages: Sequence[LocalStage]) -> tuple[list[LocalStage], list[int]]:
    """Stages that run different code, and for each stage which of them it is."""
    number: dict[Any, int] = {}
    numbers = [number.setdefault(stage.key, len(number)) for stage in stages]
    return [stages[numbers.index(i)] for i in range(len(number))], numbers
