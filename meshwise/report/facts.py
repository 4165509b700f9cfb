"""What is said of a program, as data: text and page are made of the same facts."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise import _jax
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.cost.memory import Memory, peak_memory
from meshwise.ir.collectives import Collective
from meshwise.ir.mesh import Mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import Sharding, local_bytes
from meshwise.ir.source import place
from meshwise.report.text import (
    aligned,
    array_text,
    count,
    hint_text,
    in_user_axes,
    kib,
    sharding_text,
)

Row = tuple[str, str, str, str]  # of a value: what calls it, type, how it lies, why


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind, axes, type, line and reason; `sources` are their lines in full."""

    bytes: float
    share: float
    times: str
    kind: str
    axes: str
    operand: str
    line: str
    reason: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """A strategy that equations took, and what it beat.

    `added` is what the next best would add in all of them, `beaten` says what in one.
    """

    added: str
    operator: str
    line: str
    times: int
    rule: str
    taken: str
    beaten: str


@dataclass(frozen=True, eq=False)
class Facts:
    """All that is said of a program.

    `figures` are pairs of a name and a text; what belongs to the same name has an empty one.
    `whole` are the operators that are computed whole for want of a rule. `loops` says what loops
    read from around them, and `others` of how many more equations decisions were made.
    """

    program: PerDeviceProgram
    title: str
    figures: tuple[tuple[str, str], ...]
    memory: Memory
    arguments: tuple[Row, ...]
    results: tuple[Row, ...]
    hardware: Hardware = GENERIC
    decisions: tuple[Decision, ...] = ()
    others: int = 0

    @property
    def whole(self) -> list[str]:
        """Operators without a rule, with their lines."""
        found: dict[str, int] = defaultdict(int)
        for operator in self.program.whole:
            name, _, source = operator.partition(" at ")
            found[f"{name} at {place(source)}"] += 1
        return [f"{text}{f', {times} times' if times > 1 else ''}" for text, times in found.items()]

    @property
    def sent(self) -> list[Sent]:
        """Every collective, alike ones as one, dearest first."""
        mesh = self.program.mesh
        alike: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
        for c in self.program.collectives:
            kind = (c.kind.value, mesh.show(c.axes), array_text(c.shape, c.dtype))
            alike[(*kind, place(c.source), in_user_axes(c.reason, mesh))].append(c)
        total = sum(c.wire_bytes for c in self.program.collectives)
        found = []
        for (kind, axes, operand, line, reason), same in alike.items():
            size = sum(c.wire_bytes for c in same)
            known = all(c.is_count_known for c in same)
            times = f"{sum(c.count for c in same)}{'' if known else ' a trip'}"
            sources = tuple([c.source for c in same])
            share = size / total if total else 0.0
            found.append(Sent(size, share, times, kind, axes, operand, line, reason, sources))
        return sorted(found, key=lambda one: -one.bytes)


def facts_of_program(
    program: PerDeviceProgram,
    name: str,
    paths: tuple[Sequence[str], Sequence[str]],
    donated: Sequence[int],
    hints: Sequence[Sequence[str | None]],
) -> Facts:
    """The facts of a program without a plan: it was made in another way.

    `paths` call its arguments and results, `hints` are what the user said of them.
    """
    memory = memory_of(program, donated)
    equations = ("equations", f"{_jax.equation_count(program.jaxpr):,} for each device")
    ins = zip(program.in_types, program.in_shardings, strict=True)
    outs = zip(program.out_types, program.out_shardings, strict=True)
    return Facts(
        program,
        title_of(program, name),
        (equations, *figures(program, memory)),
        memory,
        tuple(_given(paths[0], ins, hints[0], program.mesh)),
        tuple(_given(paths[1], outs, hints[1], program.mesh)),
    )


def _given(
    paths: Sequence[str],
    lie: Iterable[tuple[Any, Sharding]],
    hints: Sequence[str | None],
    mesh: Mesh,
) -> Iterable[Row]:
    """Arguments or results, with how each lies and what the user said of it."""
    said = [hint_text(hint) if hint else "" for hint in hints] or [""] * len(paths)
    for path, (t, s), hint in zip(paths, lie, said, strict=True):
        yield path, array_text(t.shape, t.dtype), sharding_text(s, mesh), hint


def memory_of(program: PerDeviceProgram, donated: Sequence[int]) -> Memory:
    """What one call takes on a device."""
    return peak_memory(program.jaxpr, program.mesh.axis_size, donated=donated)


def title_of(program: PerDeviceProgram, name: str) -> str:
    """The program and the mesh."""
    mesh = program.mesh
    axes = ", ".join(f"{axis} {mesh.size(subs)}" for axis, subs in mesh.user_axes)
    return f"{name}, one program for {count(mesh.device_count, 'device')} (mesh: {axes})"


def figures(program: PerDeviceProgram, memory: Memory) -> list[tuple[str, str]]:
    """What a device holds and sends."""
    mesh, sent = program.mesh, program.collectives
    trip = "" if all(c.is_count_known for c in sent) else "; a `while` counts for one trip"
    return [
        ("arguments", _held(program.in_types, program.in_shardings, mesh)),
        ("results", _held(program.out_types, program.out_shardings, mesh)),
        ("sent", f"{kib(program.wire_bytes)} by each device in a call, in "
                 f"{count(sum(c.count for c in sent), 'collective')}{trip}"),
        *(("", text) for text in _kinds(sent)),
        ("memory", f"{kib(memory.peak_bytes)} at most on each device, "
                   f"{kib(memory.temporary_bytes)} more than arguments and results"),
    ]  # fmt: skip


def _held(types: Sequence[Any], shardings: Sequence[Sharding], mesh: Mesh) -> str:
    """What a device holds of some values, beside what they are together."""
    whole = held = 0
    for aval, sharding in zip(types, shardings, strict=True):
        itemsize = int(getattr(aval.dtype, "itemsize", 0))
        whole += local_bytes(aval.shape, itemsize, Sharding(((),) * len(aval.shape)), mesh)
        held += local_bytes(aval.shape, itemsize, sharding, mesh)
    return f"{kib(held)} on each device, of {kib(whole)}"


def _kinds(collectives: Sequence[Collective]) -> list[str]:
    """How many collectives of each kind, and their bytes; dearest kind first."""
    sent: dict[str, float] = defaultdict(float)
    runs: dict[str, int] = defaultdict(int)
    for collective in collectives:
        sent[collective.kind.value] += collective.wire_bytes
        runs[collective.kind.value] += collective.count
    kinds = sorted(sent, key=lambda kind: (-sent[kind], kind))
    rows = [(str(runs[kind]), kind, kib(sent[kind])) for kind in kinds]
    return aligned(rows, "><>", indent=0) if rows else []
