"""Collectives: their kinds, their bytes, and the list of those that a per-device jaxpr runs.

Bytes are *wire bytes*: what one device sends under the ring model. With `n` devices in a group:

| kind           | wire bytes            |
|----------------|-----------------------|
| all_gather     | (n - 1) / n * result  |
| reduce_scatter | (n - 1) / n * operand |
| all_reduce     | 2 (n - 1) / n * operand |
| all_to_all     | (n - 1) / n * operand |
| ppermute       | operand               |

A collective inside a loop counts once a trip; of a conditional the branch with most bytes counts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from meshwise._jax import ClosedJaxpr, Jaxpr, JaxprEqn, bodies_of, group_size, named_axes
from meshwise.ir.mesh import Axes


class CollectiveKind(StrEnum):
    """The five ways in which devices exchange data."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "ppermute"


# JAX's primitives by kind. The `_start` of a pair that runs in the background moves the bytes, its
# `_done` none. Casts between JAX's own device-variance types (`pvary`, ...) move nothing.
_KIND_OF_PRIMITIVE: Mapping[str, CollectiveKind] = {
    "psum": CollectiveKind.ALL_REDUCE,
    "psum_start": CollectiveKind.ALL_REDUCE,
    "psum_invariant": CollectiveKind.ALL_REDUCE,
    "psum_invariant_start": CollectiveKind.ALL_REDUCE,
    "unreduced_psum": CollectiveKind.ALL_REDUCE,
    "unreduced_psum_start": CollectiveKind.ALL_REDUCE,
    "pmax": CollectiveKind.ALL_REDUCE,
    "pmin": CollectiveKind.ALL_REDUCE,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_start": CollectiveKind.REDUCE_SCATTER,
    "unreduced_reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "unreduced_reduce_scatter_start": CollectiveKind.REDUCE_SCATTER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "all_gather_start": CollectiveKind.ALL_GATHER,
    "all_gather_invariant": CollectiveKind.ALL_GATHER,
    "all_gather_reduced": CollectiveKind.ALL_GATHER,
    "all_gather_reduced_start": CollectiveKind.ALL_GATHER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "all_to_all_start": CollectiveKind.ALL_TO_ALL,
    "ragged_all_to_all": CollectiveKind.ALL_TO_ALL,
    "ppermute": CollectiveKind.PERMUTE,
    "ppermute_start": CollectiveKind.PERMUTE,
    "pbroadcast": CollectiveKind.PERMUTE,
    "pbroadcast_start": CollectiveKind.PERMUTE,
}


@dataclass(frozen=True)
class Collective:
    """One collective equation of a per-device program, its loop trips included.

    `shape` and `dtype` are those of the local operand; `count` is how often it runs and
    `wire_bytes` what a device sends in all of these. `is_count_known` is False inside a `while`
    loop, whose body counts once. `source` is the user's line and `reason` the decision that made
    it, where known; `equation` is where it stands, by which a caller attaches the two.
    """

    kind: CollectiveKind
    axes: Axes
    shape: tuple[int, ...]
    dtype: Any
    count: int
    wire_bytes: float
    source: str = ""
    reason: str = ""
    is_count_known: bool = True
    equation: JaxprEqn | None = None


def wire_bytes(
    kind: CollectiveKind, operand_bytes: float, result_bytes: float, group_size: int
) -> float:
    """Bytes that a device sends for one collective over a group, under the ring model."""
    if group_size <= 1:
        return 0
    sent = (group_size - 1) / group_size
    if kind is CollectiveKind.ALL_GATHER:
        return sent * result_bytes
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * sent * operand_bytes
    if kind is CollectiveKind.PERMUTE:
        return operand_bytes
    return sent * operand_bytes


def whole_or_exact(sent: float) -> float:
    """A number of bytes, as an int where it is whole: of one byte, an all_reduce sends 1.75."""
    nearest = round(sent)
    return nearest if math.isclose(sent, nearest, rel_tol=1e-12) else sent


def collectives_of(
    jaxpr: ClosedJaxpr | Jaxpr, axis_sizes: Mapping[str, int], trips: int = 1
) -> list[Collective]:
    """Every collective that a per-device jaxpr runs, in order.

    Loops multiply by their length, conditionals give the branch with most bytes, and calls
    (jit, remat, custom derivatives, shard_map, ...) are entered. `trips` is how often the jaxpr
    itself runs.
    """
    found: list[Collective] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if is_collective(eqn):
            found.extend(equation_collectives(eqn, axis_sizes, trips))
        elif name == "cond":
            branches = [collectives_of(b, axis_sizes, trips) for b in eqn.params["branches"]]
            found.extend(max(branches, key=lambda b: sum(c.wire_bytes for c in b)))
        elif name == "while":
            inner = [c for j in bodies_of(eqn) for c in collectives_of(j, axis_sizes, trips)]
            found.extend(replace(c, is_count_known=False) for c in inner)
        else:
            length = eqn.params["length"] if name == "scan" else 1
            for inner_jaxpr in bodies_of(eqn):
                found.extend(collectives_of(inner_jaxpr, axis_sizes, trips * length))
    return found


def kind_of_primitive(name: str) -> CollectiveKind | None:
    """The kind of collective that one of JAX's primitives is, None where it is none."""
    return _KIND_OF_PRIMITIVE.get(name)


def is_collective(eqn: JaxprEqn) -> bool:
    """Whether an equation is itself a collective; one over a group of one device counts too."""
    return eqn.primitive.name in _KIND_OF_PRIMITIVE


def equation_collectives(
    eqn: JaxprEqn, axis_sizes: Mapping[str, int], trips: int = 1
) -> Iterator[Collective]:
    """What a collective equation runs: one an operand, as JAX's psum of several is several.

    None over a group of one device, where nothing is sent.
    """
    kind = _KIND_OF_PRIMITIVE[eqn.primitive.name]
    axes, group = named_axes(eqn), group_size(eqn, axis_sizes)
    if group <= 1:
        return
    data = 1 if eqn.primitive.name.startswith("ragged") else len(eqn.invars)
    results = [v.aval for v in eqn.outvars]
    operands: list[Any] = [v.aval for v in eqn.invars[:data]]
    for i, operand in enumerate(operands):
        result = results[min(i, len(results) - 1)]
        sent = wire_bytes(kind, _bytes_of(operand), _bytes_of(result), group)
        yield Collective(
            kind,
            axes,
            tuple(operand.shape),
            operand.dtype,
            trips,
            whole_or_exact(sent * trips),
            equation=eqn,
        )


def _bytes_of(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
