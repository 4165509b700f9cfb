"""A per-device jaxpr as the steps that it runs: calls entered, values numbered, the dead dropped.

Calls (`jit`, `remat`, custom derivatives, `shard_map`) are entered, so that what XLA fuses across
them is fused here too. A call whose name begins with `fused_` stays one step: it stands for one
kernel. So do loops and choices, whose bodies are `Steps` of their own; a loop of one trip, which
XLA drops, is entered as a call is. Equations that compute nothing (reshapes, casts of a
device-variance type, collectives over a single device) are no steps: their result is their operand.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwise._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    call_body,
    group_size,
    mw_kernel_p,
    scan_counts,
)
from meshwise._jax.jaxprs import opened
from meshwise.ir.collectives import equation_collectives, is_collective
from meshwise.ir.operators import RECASTS, RESHAPES, is_among

LITERAL = -1  # stands where an operand is a literal

# Equations whose results are their operands in another dress. A `_done` waits for its `_start`.
_ALIASES = (RESHAPES | RECASTS).union(
    """
    stop_gradient name optimization_barrier pvary pcast reshard sharding_constraint
    layout_constraint device_put reduced_vary_cast_p
    psum_done psum_invariant_done unreduced_psum_done reduce_scatter_done all_gather_done
    unreduced_reduce_scatter_done all_gather_reduced_done all_to_all_done ppermute_done
    pbroadcast_done
    """.split()
)


@dataclass(frozen=True)
class Value:
    """The type of a numbered value: how many elements, and the bytes of all of them."""

    elements: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Body:
    """A body of a loop or choice: its steps, and how often they run.

    `carried` lists how many leading inputs are constants, and how many after them are carried.
    """

    steps: "Steps"
    trips: int
    carried: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Step:
    """One equation that runs, by the numbers of the values it reads and writes.

    `equation` is where it, or the call around it, stands in the whole jaxpr. `bodies` are those of
    a loop (all of them run) or of a choice (one of them runs). A collective is over so many
    `devices`.
    """

    eqn: JaxprEqn
    equation: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    bodies: tuple[Body, ...] = ()
    devices: int = 1

    @property
    def name(self) -> str:
        """The primitive's name; of a call that is one kernel the call's."""
        return fused_name(self.eqn) or self.eqn.primitive.name

    @property
    def is_choice(self) -> bool:
        """Whether one of the bodies runs, and not all."""
        return self.eqn.primitive.name == "cond"

    @property
    def is_count_known(self) -> bool:
        """Whether it is known how often the bodies run."""
        return self.eqn.primitive.name != "while"


def longest(step: Step, values: Sequence[Value]) -> int:
    """The elements of the longest value that a step reads or writes."""
    known = (v for v in (*step.reads, *step.writes) if v != LITERAL)
    return max((values[v].elements for v in known), default=0)


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a jaxpr in order, and its values by number.

    `outputs` has the number of every result, `LITERAL` for a literal.
    """

    steps: tuple[Step, ...]
    values: tuple[Value, ...]
    constants: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def steps_of(jaxpr: ClosedJaxpr | Jaxpr, axis_sizes: Mapping[str, int]) -> Steps:
    """The steps of a per-device jaxpr whose collectives run over axes of these sizes."""
    inner = opened(jaxpr)
    walk = _Walk(axis_sizes)
    names: dict[Any, int] = {}
    constants = [walk.bind(names, v) for v in inner.constvars]
    inputs = [walk.bind(names, v) for v in inner.invars]
    for index, eqn in enumerate(inner.eqns):
        walk.enter(eqn, index, names)
    outputs = [walk.read(names, a) for a in inner.outvars]
    steps = _without_dead(walk.steps, outputs)
    return Steps(tuple(steps), tuple(walk.values), tuple(constants), tuple(inputs), tuple(outputs))


def fused_name(eqn: JaxprEqn) -> str | None:
    """The name of a call that stands for one kernel, None for any other equation."""
    if eqn.primitive is mw_kernel_p:
        return str(eqn.params["name"])
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    return name if isinstance(name, str) and name.startswith("fused_") else None


@dataclass
class _Walk:
    """What is found so far: the steps, and the type of each value."""

    axis_sizes: Mapping[str, int]
    steps: list[Step] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def bind(self, names: dict[Any, int], var: Any) -> int:
        """A new value for a variable."""
        names[var] = len(self.values)
        self.values.append(_value_of(var.aval))
        return names[var]

    def read(self, names: Mapping[Any, int], atom: Any) -> int:
        """The value that an operand is."""
        return LITERAL if isinstance(atom, Literal) else names[atom]

    def enter(self, eqn: JaxprEqn, index: int, names: dict[Any, int]) -> None:
        """Add the steps of one equation."""
        operands = [self.read(names, a) for a in eqn.invars]
        if self._is_alias(eqn) and len(eqn.outvars) <= len(operands):
            for var, operand in zip(eqn.outvars, operands, strict=False):
                if operand == LITERAL:
                    self.bind(names, var)
                else:
                    names[var] = operand
            return
        body = None if fused_name(eqn) else _runs_once(eqn) or call_body_of(eqn)
        if body is not None:
            self._enter_call(body, index, operands, eqn.outvars, names)
            return
        written = tuple(self.bind(names, v) for v in eqn.outvars)
        bodies = tuple(_bodies_of(eqn, self.axis_sizes))
        devices = group_size(eqn, self.axis_sizes) if is_collective(eqn) else 1
        self.steps.append(Step(eqn, index, tuple(operands), written, bodies, devices))

    def _enter_call(
        self,
        body: Any,
        index: int,
        operands: Sequence[int],
        results: Sequence[Any],
        names: dict[Any, int],
    ) -> None:
        inside: dict[Any, int] = {}
        for var, operand in zip(body.invars, operands, strict=True):
            if operand == LITERAL:
                self.bind(inside, var)
            else:
                inside[var] = operand
        for var in body.constvars:
            self.bind(inside, var)
        for eqn in body.eqns:
            self.enter(eqn, index, inside)
        for var, atom in zip(results, body.outvars, strict=True):
            number = self.read(inside, atom)
            if number == LITERAL:
                self.bind(names, var)
            else:
                names[var] = number

    def _is_alias(self, eqn: JaxprEqn) -> bool:
        if is_collective(eqn):
            return not any(equation_collectives(eqn, self.axis_sizes))
        return is_among(eqn, _ALIASES)


def call_body_of(eqn: JaxprEqn) -> Any:
    """The open jaxpr of a call, None for any other equation."""
    if eqn.primitive.name in ("shard_map", "mw_kernel"):
        return opened(eqn.params["jaxpr"])
    body = call_body(eqn)
    return None if body is None else opened(body.jaxpr)


def _runs_once(eqn: JaxprEqn) -> Any:
    """The open body of a loop of one trip: operands and results are its own, under other dims."""
    is_once = eqn.primitive.name == "scan" and eqn.params["length"] == 1
    return opened(eqn.params["jaxpr"]) if is_once else None


def _bodies_of(eqn: JaxprEqn, axis_sizes: Mapping[str, int]) -> Iterator[Body]:
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            steps = steps_of(params["jaxpr"], axis_sizes)
            yield Body(steps, params["length"], scan_counts(eqn))
        case "while":
            for name in ("cond", "body"):
                steps = steps_of(params[f"{name}_jaxpr"], axis_sizes)
                constants = params[f"{name}_nconsts"]
                yield Body(steps, 1, (constants, len(steps.inputs) - constants))
        case "cond":
            for branch in params["branches"]:
                yield Body(steps_of(branch, axis_sizes), 1)


def _value_of(aval: Any) -> Value:
    """Tokens and the like have no bytes."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return Value(0, 0)
    elements = math.prod(aval.shape)
    return Value(elements, elements * aval.dtype.itemsize)


def _acts(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than make its results; to name a mesh axis is no act."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _without_dead(steps: Sequence[Step], outputs: Sequence[int]) -> list[Step]:
    """The steps that some result, or an effect, needs."""
    needed = set(outputs)
    kept = []
    for step in reversed(steps):
        if _acts(step.eqn) or needed.intersection(step.writes):
            needed.update(step.reads)
            kept.append(step)
    return kept[::-1]
