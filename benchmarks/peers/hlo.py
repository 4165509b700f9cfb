"""The collectives that XLA's partitioner emits, and the bytes that each device sends for them.

    with partitioner("shardy"):
        report = read(jax.jit(f, ...).lower(*args))
    report.wire_bytes, report.credited_bytes, report.by_kind

The text read is the one right after XLA's SPMD partitioning, before the passes of one backend
change it; `stage="final"` reads the compiled program instead. Bytes follow the ring formulas,
n devices in a group: all_gather (n-1)/n of its output, reduce_scatter and all_to_all (n-1)/n of
their input, all_reduce 2(n-1)/n, ppermute its input; times the trips of the loops around it.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import jax
from jax.stages import Lowered

from benchmarks.peers.hlo_text import Computation, Instruction, Shape, parse_module
from benchmarks.peers.invariant import Loops
from benchmarks.peers.replica_groups import Groups, parse_groups, parse_pairs
from benchmarks.peers.scattered import Scope, scatter_ways

Partitioner = Literal["gspmd", "shardy"]
Stage = Literal["partitioned", "final"]

SHARDY = "jax_use_shardy_partitioner"
PARTITIONERS: tuple[Partitioner, ...] = ("gspmd", "shardy")
KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
    "collective-permute": "ppermute",
    "ragged-all-to-all": "all_to_all",
    "reduce-scatter": "reduce_scatter",
}
# The backend's own work changes nothing in the partitioned text, so as little of it as may be.
DUMP_OPTIONS: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_dump_hlo_pass_re": "spmd-partitioning",
    "xla_dump_large_constants": True,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True)
class Collective:
    """One collective instruction. Bytes are per device, all its runs (`count`) together.

    `shapes` and `dtypes` are those of its local operands. `credited_bytes` are the wire bytes if
    an all-reduce of which each device keeps a part were a reduce-scatter, and what sends the same
    in every trip of a loop were sent before it.
    """

    kind: str
    groups: Groups
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    count: int
    wire_bytes: float
    credited_bytes: float
    name: str
    op_name: str

    @property
    def group_size(self) -> int:
        return max((len(group) for group in self.groups), default=1)


@dataclass(frozen=True)
class Report:
    """The collectives of one program. `unknown_trips` names loops counted as one trip."""

    collectives: tuple[Collective, ...]
    unknown_trips: tuple[str, ...] = ()

    @cached_property
    def wire_bytes(self) -> float:
        return sum(c.wire_bytes for c in self.collectives)

    @cached_property
    def credited_bytes(self) -> float:
        return sum(c.credited_bytes for c in self.collectives)

    @cached_property
    def by_kind(self) -> Mapping[str, int]:
        """How many collectives of each kind run, trips included."""
        found: Counter[str] = Counter()
        for collective in self.collectives:
            found[collective.kind] += collective.count
        return found


@contextmanager
def partitioner(which: Partitioner) -> Iterator[None]:
    """Lower and compile with XLA's older (GSPMD) or newer (Shardy) completion of shardings."""
    before = getattr(jax.config, SHARDY)
    jax.config.update(SHARDY, which == "shardy")
    try:
        yield
    finally:
        jax.config.update(SHARDY, before)


def read(lowered: Lowered, stage: Stage = "partitioned") -> Report:
    """Compile a lowered function and read its collectives. Call it where it was lowered."""
    return parse(partitioned_text(lowered) if stage == "partitioned" else final_text(lowered))


def partitioned_text(lowered: Lowered) -> str:
    """HLO right after SPMD partitioning; the final HLO where nothing was partitioned."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **DUMP_OPTIONS})
        dumps = sorted(Path(folder).glob("*.after_spmd-partitioning.*txt"))
        return dumps[-1].read_text() if dumps else compiled.as_text() or ""


def final_text(lowered: Lowered) -> str:
    """HLO of the compiled program."""
    return lowered.compile().as_text() or ""


def parse(text: str) -> Report:
    """The collectives in a module's text."""
    module = parse_module(text)
    unknown: list[str] = []
    walked = _walk(Scope(module, module.computations[module.entry]), Loops(), unknown)
    return Report(tuple(walked), tuple(unknown))


def _walk(scope: Scope, loops: Loops, unknown: list[str]) -> Iterator[Collective]:
    """The collectives of a computation, and of those it calls."""
    for instruction in scope.computation.instructions.values():
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            continue  # the start was counted
        base = opcode.removesuffix("-start")
        if base in KINDS and not _goes_on(scope, instruction):
            yield _collective(scope, instruction, base, loops)
        elif opcode == "while":
            trips = trip_count(scope, instruction)
            if trips is None:
                unknown.append(instruction.name)
            for part in ("condition", "body"):
                inner = Scope(
                    scope.module,
                    scope.module.computations[instruction.attribute(part) or ""],
                    (scope, instruction),
                )
                inside = loops.in_body(inner, 1 if trips is None else trips)
                yield from _walk(inner, inside, unknown)
        elif opcode == "conditional":
            # One branch runs; the dearest is a bound for all of them.
            inside = loops.in_branch()
            branches = [
                list(_walk(Scope(scope.module, scope.module.computations[name]), inside, unknown))
                for name in instruction.called
            ]
            yield from max(branches, key=lambda found: sum(c.wire_bytes for c in found))
        elif instruction.called and opcode in ("fusion", "call", "async-start"):
            inner = scope.called(instruction)
            yield from _walk(inner, loops.in_call(inner), unknown)


def _goes_on(scope: Scope, instruction: Instruction) -> bool:
    """Whether it is a later part of a collective that TPUs run in the background of fusions.

    Such a one is written in each fusion it runs beside; the first is called its start.
    """
    if "chain_id=" not in instruction.attributes or scope.caller is None:
        return False
    return not scope.caller[1].name.startswith("async-collective-start")


def _collective(scope: Scope, instruction: Instruction, base: str, loops: Loops) -> Collective:
    """The record of one instruction; sizes are those of its operands, as local as it gets."""
    known = scope.computation.instructions
    operands = [known[name].shapes[0] for name in instruction.operands if name in known]
    permute = base == "collective-permute"
    if base in ("collective-broadcast", "ragged-all-to-all"):
        operands = operands[:1]  # others are buffers or offsets
    elif permute and len(operands) == 4:  # in place: a buffer, and where in both
        operands = operands[:1]
    devices = scope.module.devices
    attributes = instruction.attributes
    groups = parse_pairs(attributes) if permute else parse_groups(attributes, devices)
    plain = credited = 0.0
    for element, shape in enumerate(operands):
        sent = wire_bytes(base, shape, groups)
        plain += sent
        if base == "all-reduce":
            ways = scatter_ways(scope, instruction.name, element, groups)
            sent = credited_all_reduce(shape, groups, ways)
        credited += sent
    return Collective(
        KINDS[base],
        groups,
        tuple(shape.dims for shape in operands),
        tuple(shape.dtype for shape in operands),
        loops.count,
        plain * loops.count,
        credited * loops.count_of(instruction),
        instruction.name,
        instruction.op_name,
    )


def wire_bytes(opcode: str, operand: Shape, groups: Groups) -> float:
    """Bytes that a device (of the largest group) sends for one operand of a collective, once."""
    n = max((len(group) for group in groups), default=1)
    if opcode == "collective-permute":
        return float(operand.size) if any(source != target for source, target in groups) else 0.0
    share = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n}
    return operand.size * share.get(opcode, (n - 1) / n)


def credited_all_reduce(operand: Shape, groups: Groups, ways: int) -> float:
    """Bytes of an all-reduce of which a group's devices keep `ways` different parts.

    A reduce-scatter among `ways` devices, then an all-reduce of the part among those that keep
    the same one: with 1 way the all-reduce it was, with all n a reduce-scatter.
    """
    n = max((len(group) for group in groups), default=1)
    return operand.size * ((ways - 1) / ways + 2 * (n / ways - 1) / n)


def trip_count(scope: Scope, loop: Instruction) -> int | None:
    """How often a while loop runs: as the compiler notes, or counted from its condition."""
    noted = re.search(r'"?known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)', loop.attributes)
    if noted:
        return int(noted[1])
    computations = scope.module.computations
    condition = computations[loop.attribute("condition") or ""]
    body = computations[loop.attribute("body") or ""]
    compare = condition.root
    if compare.opcode != "compare":
        return None
    direction = compare.attribute("direction") or ""
    counter, limit = (_copied(condition, name) for name in compare.operands)
    if counter.opcode == "constant":
        counter, limit = limit, counter
        direction = direction.translate(str.maketrans("LG", "GL"))
    place, end = counter.attribute("index"), _integer(limit)
    if counter.opcode != "get-tuple-element" or place is None or end is None:
        return None
    first = _integer_at(scope.computation, loop.operands[0], int(place))
    step = _step(body, int(place))
    return None if first is None or not step else _passes(first, step, end, direction)


def _passes(first: int, step: int, end: int, direction: str) -> int | None:
    """How often a counter passes a comparison with its end; None where it always may."""
    if direction in ("GT", "GE") or (direction == "NE" and step < 0):
        first, step, end = -first, -step, -end  # the same, counted up
    if direction in ("LE", "GE"):
        end += 1
    elif direction == "NE" and (end < first or (end - first) % step):
        return None
    elif direction not in ("LT", "GT", "NE"):
        return None
    if end <= first:
        return 0
    return -(-(end - first) // step) if step > 0 else None


def _integer(value: Instruction) -> int | None:
    """An integer that is written in the text."""
    is_one = value.opcode == "constant" and value.shapes[0].dtype[0] in "su"
    return int(value.arguments) if is_one else None


def _integer_at(computation: Computation, name: str, place: int) -> int | None:
    """The integer at a place of a tuple, if it is one written in the text."""
    made = computation.instructions[name]
    if made.opcode != "tuple":
        return None
    return _integer(_copied(computation, made.operands[place]))


def _step(body: Computation, place: int) -> int | None:
    """What a loop's body adds to the counter at a place of its carry."""
    if body.root.opcode != "tuple":
        return None
    value = _copied(body, body.root.operands[place])
    terms = [_copied(body, name) for name in value.operands]
    if value.opcode not in ("add", "subtract") or len(terms) != 2:
        return None
    counter, step = terms
    if value.opcode == "add" and counter.opcode == "constant":
        counter, step = step, counter
    is_own = counter.opcode == "get-tuple-element" and counter.attribute("index") == str(place)
    number = _integer(step) if is_own else None
    return -number if number is not None and value.opcode == "subtract" else number


def _copied(computation: Computation, name: str) -> Instruction:
    """The instruction of a name, or of what that is a copy."""
    value = computation.instructions[name]
    while value.opcode in ("copy", "bitcast", "reshape"):
        value = computation.instructions[value.operands[0]]
    return value
