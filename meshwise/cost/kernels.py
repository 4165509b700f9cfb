"""The kernels of a per-device program, with what each reads, writes and computes.

Which equations are one kernel is decided in `fusion.py`.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwise._jax import ClosedJaxpr, Jaxpr
from meshwise.cost.fusion import Fusion, Role, role_of
from meshwise.cost.steps import LITERAL, Body, Step, Steps, call_body_of, fused_name, steps_of
from meshwise.cost.work import Work, flops_of, total, traffic_of, updates_operand
from meshwise.ir.collectives import (
    Collective,
    collectives_of,
    equation_collectives,
    is_collective,
)
from meshwise.rules import describe_all
from meshwise.rules.registry import OpRule

# How names of operators begin that write where an operand lies, beside updates.
_IN_PLACE = ("psum", "pmax", "pmin", "sort")


@dataclass(frozen=True, eq=False)
class KernelBody:
    """The kernels of a loop's or a choice's body, and how often it runs."""

    program: "KernelProgram"
    body: Body


@dataclass(frozen=True, eq=False)
class Kernel:
    """What the device, or a link, is given to do at once.

    `equation` is where its last equation stands in the jaxpr; `reads` and `writes` are numbers of
    values in memory. A collective's `work` is what its own kernel reads and writes. A result may
    take the memory of one of those that it `replaces`, of its size, which nobody reads after.
    """

    name: str
    equation: int
    work: Work
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    collectives: tuple[Collective, ...] = ()
    bodies: tuple[KernelBody, ...] = ()
    is_choice: bool = False
    is_count_known: bool = True
    replaces: frozenset[int] = frozenset()
    is_collective: bool = False


@dataclass(frozen=True, eq=False)
class KernelProgram:
    """The kernels of a jaxpr, in an order in which they can run, near to the jaxpr's own."""

    steps: Steps
    kernels: tuple[Kernel, ...]

    @property
    def work(self) -> Work:
        """The work of all kernels, one after the other."""
        return total([k.work for k in self.kernels])

    @cached_property
    def waits(self) -> list[list[int]]:
        """For each kernel those that make what it reads, in that order."""
        return _waits_of(self.kernels)

    @cached_property
    def readers(self) -> list[list[int]]:
        """For each kernel those that wait for it."""
        return _readers_of(self.waits)


def kernels_of(
    jaxpr: ClosedJaxpr | Jaxpr, axis_sizes: Mapping[str, int], fuses: bool = True
) -> KernelProgram:
    """The kernels of a per-device jaxpr; without `fuses` every equation is one by itself."""
    return _kernels(steps_of(jaxpr, axis_sizes), axis_sizes, fuses)


def _kernels(steps: Steps, axis_sizes: Mapping[str, int], fuses: bool) -> KernelProgram:
    rules = describe_all([s.eqn for s in steps.steps if _has_rule(s)])
    found = iter(rules)
    roles = [
        role_of(step, next(found) if _has_rule(step) else None, steps) if fuses else Role.ALONE
        for step in steps.steps
    ]
    fusion = Fusion(steps, roles)
    fusion.look_through()
    fusion.join()
    fusion.sink()
    fusion.write()
    build = _Build(fusion, axis_sizes, fuses, dict(zip(_with_rules(steps), rules, strict=True)))
    return KernelProgram(steps, tuple(_ordered(build.kernels())))


def _has_rule(step: Step) -> bool:
    return not (step.bodies or is_collective(step.eqn) or fused_name(step.eqn))


def _with_rules(steps: Steps) -> list[int]:
    return [i for i, step in enumerate(steps.steps) if _has_rule(step)]


@dataclass
class _Build:
    """Makes kernels of groups of steps."""

    fusion: Fusion
    axis_sizes: Mapping[str, int]
    fuses: bool
    rules: Mapping[int, OpRule]

    def kernels(self) -> Iterator[Kernel]:
        """The kernels, by their first step."""
        members: dict[int, list[int]] = {}
        for index in range(len(self.fusion.roles)):
            if not self.fusion.is_seen_through[index]:
                members.setdefault(self.fusion.root(index), []).append(index)
        for group in sorted(members.values()):
            if self.fusion.roles[group[0]] is Role.ALONE:
                yield self._alone(group[0])
            elif any(
                not self.fusion.written.isdisjoint(self.fusion.steps.steps[i].writes)
                or self.fusion.steps.steps[i].eqn.effects
                for i in group
            ):
                yield self._fused(group)

    def _fused(self, group: Sequence[int]) -> Kernel:
        fusion, values = self.fusion, self.fusion.steps.values
        written = fusion.written
        steps = [fusion.steps.steps[i] for i in group]
        inside = {w for step in steps for w in step.writes}
        read: dict[int, float] = {}
        written_bytes = 0.0
        for step in steps:
            traffic = traffic_of(step.eqn)
            for operand, value in enumerate(step.reads):
                for source, elements, _ in fusion.trace(value):
                    if source in inside:
                        continue
                    if source in fusion.again:
                        read.update({v: values[v].bytes for v in fusion.again[source]})
                        continue
                    size = values[source]
                    share = size.bytes * elements / max(size.elements, 1)
                    share = min(share, traffic.read[operand])
                    read[source] = min(read.get(source, 0.0) + share, size.bytes)
            for value, size in zip(step.writes, traffic.written, strict=True):
                written_bytes += size if value in written else 0.0
        copied = sum(self._copied(i) for i in group)
        moved = Work(0.0, sum(read.values()) + copied, written_bytes + copied)
        work = total([moved, *map(self._computing, self._computed(group))])
        others = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
        return Kernel(
            steps[-1].name + others,
            steps[-1].equation,
            work,
            tuple(read),
            tuple(w for step in steps for w in step.writes if w in written),
            replaces=frozenset(read),
        )

    def _computing(self, index: int) -> Work:
        """A step's flops alone; none where it has no rule."""
        eqn, rule = self.fusion.steps.steps[index].eqn, self.rules.get(index)
        if rule is None:
            return Work()
        flops = flops_of(eqn, rule)
        return Work(flops, serial_flops=flops if rule.serial else 0.0, calls=rule.calls)

    def _computed(self, group: Sequence[int]) -> set[int]:
        """The steps of a fusion, and those of others that it computes again."""
        found = set(group)
        open_steps = list(group)
        while open_steps:
            for index in self.fusion.computed_again(open_steps.pop()):
                if index not in found:
                    found.add(index)
                    open_steps.append(index)
        return found

    def _alone(self, index: int) -> Kernel:
        """A kernel of one step."""
        step = self.fusion.steps.steps[index]
        reads = tuple(dict.fromkeys(source for source, _, _ in self.fusion.sources[index]))
        bodies = tuple(
            KernelBody(_kernels(b.steps, self.axis_sizes, self.fuses), b) for b in step.bodies
        )
        collectives: list[Collective] = []
        if is_collective(step.eqn):
            collectives += equation_collectives(step.eqn, self.axis_sizes)
        elif fused_name(step.eqn):
            collectives += collectives_of(call_body_of(step.eqn), self.axis_sizes)
        return Kernel(
            step.name,
            step.equation,
            self._work_alone(index, bodies),
            reads,
            step.writes,
            tuple(collectives),
            bodies,
            step.is_choice,
            step.is_count_known,
            frozenset(reads if self._is_in_place(step) else ()),
            is_collective(step.eqn),
        )

    def _is_in_place(self, step: Step) -> bool:
        """Whether a step writes where an operand lies; the carries of a loop do."""
        is_loop = bool(step.bodies) and not step.is_choice
        in_place = updates_operand(step.eqn) is not None or step.name.startswith(_IN_PLACE)
        return is_loop or in_place

    def _work_alone(self, index: int, bodies: Sequence[KernelBody]) -> Work:
        step = self.fusion.steps.steps[index]
        if step.is_choice:
            work = Work()
            for body in bodies:
                work = work.largest(body.program.work)
            return work
        if bodies:
            return total([b.program.work.times(b.body.trips) for b in bodies])
        traffic = traffic_of(step.eqn)
        copied = self._copied(index)
        read, written = sum(traffic.read) + copied, sum(traffic.written) + copied
        if fused_name(step.eqn):
            inner = kernels_of(call_body_of(step.eqn), self.axis_sizes, self.fuses)
            return replace(inner.work, read_bytes=read, written_bytes=written)
        return self._computing(index) + Work(0.0, read, written)

    def _copied(self, index: int) -> float:
        """Bytes of what an update in place copies first, as somebody reads the old one later."""
        step = self.fusion.steps.steps[index]
        if updates_operand(step.eqn) is None or step.reads[0] == LITERAL:
            return 0.0
        old = step.reads[0]
        is_read = any(r > index for r in self.fusion.readers[old])
        is_kept = is_read or old in self.fusion.steps.outputs
        return float(self.fusion.steps.values[old].bytes) if is_kept else 0.0


def _ordered(kernels: Iterator[Kernel]) -> Iterator[Kernel]:
    """The kernels, each after what it reads, else as they come."""
    found = list(kernels)
    waits = _waits_of(found)
    readers = _readers_of(waits)
    missing = [len(others) for others in waits]
    ready = [k for k, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        k = heapq.heappop(ready)
        yield found[k]
        for reader in readers[k]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)


def _waits_of(kernels: Sequence[Kernel]) -> list[list[int]]:
    """For each kernel those that make what it reads, in that order."""
    makers = {value: k for k, kernel in enumerate(kernels) for value in kernel.writes}
    return [
        list(dict.fromkeys(makers[v] for v in kernel.reads if makers.get(v, k) != k))
        for k, kernel in enumerate(kernels)
    ]


def _readers_of(waits: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each kernel those that wait for it."""
    readers: list[list[int]] = [[] for _ in waits]
    for k, others in enumerate(waits):
        for other in others:
            readers[other].append(k)
    return readers
