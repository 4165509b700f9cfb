"""Flops and memory traffic of single equations.

Flops are those of the operators' rules (`rules/`): exact for products and convolutions (two a
multiplication with its addition), about one an element for the rest. Traffic is what an equation
reads and writes where its operands and results lie in memory; of what several equations do
together in one kernel `kernels.py` knows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshwise._jax import JaxprEqn, Literal
from meshwise.ir.collectives import is_collective
from meshwise.ir.operators import CUTS, is_among
from meshwise.rules.registry import OpRule


@dataclass(frozen=True)
class Work:
    """What a device does: floating point operations, bytes read from memory and written to it.

    `serial_flops` are those of all that are done one after the other, `calls` functions of single
    numbers (`OpRule.calls`).
    """

    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    serial_flops: float = 0.0
    calls: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    def __add__(self, other: "Work") -> "Work":
        """Both, one after the other."""
        return total((self, other))

    def times(self, trips: int) -> "Work":
        """The same so many times."""
        return Work(*(trips * own for own in self.figures))

    def largest(self, other: "Work") -> "Work":
        """Of each figure the larger one."""
        return Work(*map(max, self.figures, other.figures))

    @property
    def figures(self) -> tuple[float, ...]:
        """All of them, in their order."""
        return self.flops, self.read_bytes, self.written_bytes, self.serial_flops, self.calls


def total(works: Iterable[Work]) -> Work:
    """All of them, one after the other."""
    return Work(*map(sum, zip(*(work.figures for work in works), strict=True)))


@dataclass(frozen=True)
class Traffic:
    """Bytes that an equation reads of each operand, and writes of each result, by itself."""

    read: tuple[float, ...]
    written: tuple[float, ...]


# Operators that read of their first operand only what they return.
_SELECTING = CUTS | {"gather"}
# Operators that write into their first operand, in place: where their updates stand.
_UPDATES_AT = {"dynamic_update_slice": 1}


def updates_operand(eqn: JaxprEqn) -> int | None:
    """Which operand an equation writes into its first operand, None where it does not."""
    name = eqn.primitive.name
    return 2 if name.startswith("scatter") else _UPDATES_AT.get(name)


def traffic_of(eqn: JaxprEqn) -> Traffic:
    """The bytes of an equation without bodies, its operands in memory.

    Slices and gathers read what they return. Updates are in place: they write the update, and
    a scatter that combines reads the old elements too.
    """
    read = [0.0 if isinstance(a, Literal) else bytes_of(a.aval) for a in eqn.invars]
    written = [bytes_of(v.aval) for v in eqn.outvars]
    name = eqn.primitive.name
    updates = updates_operand(eqn)
    if is_among(eqn, _SELECTING):
        read[0] = min(read[0], sum(written))
    elif updates is not None:
        written = [bytes_of(eqn.invars[updates].aval)]
        read[0] = written[0] if name.startswith("scatter-") else 0.0
    return Traffic(tuple(read), tuple(written))


def flops_of(eqn: JaxprEqn, rule: OpRule) -> float:
    """Flops of an equation without bodies; the additions of a collective are part of its time.

    A Pallas kernel says itself what it costs (`cost_estimate`); one that does not counts once an
    element of its results.
    """
    if is_collective(eqn):
        return 0.0
    estimate = eqn.params.get("cost_estimate")
    return float(getattr(estimate, "flops", rule.flops))


def bytes_of(aval: Any) -> float:
    """Bytes of an array; tokens and the like have none."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0.0
    return float(math.prod(aval.shape) * aval.dtype.itemsize)
