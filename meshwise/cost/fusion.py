"""Which equations are one kernel: a simple model of what XLA fuses.

- Element-wise equations joined by edges over which all elements pass (transposes in between do not
  matter) are one kernel, *a fusion*: it reads what comes from outside once, writes what is read
  outside, and what stays inside costs no memory.
- Reductions and updates in place (`dynamic_update_slice`) join the fusion before them and end it.
- Broadcasts, slices, transposes, iotas and the arithmetic of single elements are *looked through*:
  whoever reads them reads what they are made of, as many elements as it needs, and they are never
  written; unless a kernel that is no fusion reads them, or they are a result. Products and
  convolutions read through transposes and slices too.
- Everything else (products, convolutions, sorts, scatters, gathers, collectives, loops, choices,
  calls named `fused_...`) is a kernel by itself.

A fusion never waits for itself: with each kernel boundary on the way from the arguments the *level*
of an equation grows, and only equations of one level are joined. Then a fusion that one other
fusion alone reads becomes part of it. What a fusion could compute from the few values that it
reads anyway, or from others that are no larger, is not written but computed again. XLA does more
(it joins fusions that read the same, and appends to products), so this is an upper bound of its
traffic more often than not.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import zip_longest

from meshwise._jax import JaxprEqn
from meshwise.cost.steps import LITERAL, Step, Steps
from meshwise.cost.work import updates_operand
from meshwise.ir.operators import CUTS, JOINS, PLACES, PRODUCTS, SPREADS, TURNS, is_among
from meshwise.rules.registry import OpRule


class Role(Enum):
    """What an equation is to the kernels around it."""

    THROUGH = auto()  # looked through
    MAP = auto()  # element by element
    END = auto()  # ends a fusion
    ALONE = auto()  # a kernel by itself


_FEW = 4  # of how many values what is computed again may be made

# A source: a value in memory that is read through views, how many elements, and whether they are
# all of it, each once.
Source = tuple[int, int, bool]


_VIEWS = SPREADS | TURNS | CUTS | PLACES
_READ_BY_PRODUCTS = TURNS | CUTS


def role_of(step: Step, rule: OpRule | None, steps: Steps) -> Role:
    """What a step is to the kernels around it, by its operator's rule (None for what has none)."""
    name = step.eqn.primitive.name
    if rule is None:
        return Role.ALONE
    if is_view(step.eqn):
        return Role.THROUGH
    if is_reduction(step.eqn) or name == "dynamic_update_slice":
        return Role.END
    if is_among(step.eqn, JOINS) or is_elementwise(step.eqn, rule):
        small = all(steps.values[v].elements <= 1 for v in step.writes)
        return Role.THROUGH if small else Role.MAP
    return Role.ALONE


def is_reduction(eqn: JaxprEqn) -> bool:
    """Whether dims of the operand are reduced."""
    name = eqn.primitive.name
    return name == "reduce" or (name.startswith(("reduce_", "arg")) and "axes" in eqn.params)


def is_view(eqn: JaxprEqn) -> bool:
    """Whether each element of the result is one of the operand, or its own place."""
    return is_among(eqn, _VIEWS)


def is_laid(eqn: JaxprEqn) -> bool:
    """Whether the result's elements are those of the operands, joined perhaps."""
    return is_among(eqn, _VIEWS | JOINS)


def is_elementwise(eqn: JaxprEqn, rule: OpRule) -> bool:
    """Whether each element of the results comes of the same elements of the operands."""
    factors = rule.factors
    if rule.opaque or factors.reductions or factors.whole or factors.permuted:
        return False
    if "twin" in eqn.params or not factors.results:
        return False
    dims = factors.results[0]
    return all(other == dims for other in factors.results) and all(
        not operand or all(a in ((), b) for a, b in zip_longest(operand, dims))
        for operand in factors.operands
    )


@dataclass
class Fusion:
    """Which steps are one kernel: `group[i]` is the number of the kernel of step `i`."""

    steps: Steps
    roles: list[Role]
    maker: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)
    is_seen_through: list[bool] = field(default_factory=list)
    sources: list[list[Source]] = field(default_factory=list)
    level: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    again: dict[int, frozenset[int]] = field(default_factory=dict)

    def look_through(self) -> None:
        """Find the steps that are never written, and what each step reads through them."""
        for index, step in enumerate(self.steps.steps):
            self.maker.update(dict.fromkeys(step.writes, index))
            for value in step.reads:
                self.readers.setdefault(value, []).append(index)
        results = frozenset(self.steps.outputs)
        for step, role in zip(self.steps.steps, self.roles, strict=True):
            self.is_seen_through.append(
                role is Role.THROUGH
                and results.isdisjoint(step.writes)
                and all(self._sees_through(r, step) for w in step.writes for r in self._of(w))
            )
        for step in self.steps.steps:
            self.sources.append([s for value in step.reads for s in self.trace(value)])

    def _of(self, value: int) -> Sequence[int]:
        return self.readers.get(value, ())

    def _sees_through(self, reader: int, view: Step) -> bool:
        """Whether a reader reads through a view."""
        if self.roles[reader] is not Role.ALONE:
            return True
        is_product = is_among(self.steps.steps[reader].eqn, PRODUCTS)
        return is_product and is_among(view.eqn, _READ_BY_PRODUCTS)

    def trace(self, value: int) -> list[Source]:
        """What is read in memory to read a value."""
        if value == LITERAL:
            return []
        elements = self.steps.values[value].elements
        maker = self.maker.get(value)
        if maker is None or not self.is_seen_through[maker]:
            return [(value, elements, True)]
        is_all = is_among(self.steps.steps[maker].eqn, TURNS)
        found = [
            (source, min(read, elements), every and is_all)
            for source, read, every in self.sources[maker]
        ]
        # A number that is made of a number twice, and so on, is of it in very many ways.
        return list(dict.fromkeys(found)) if elements <= 1 else found

    def join(self) -> None:
        """Join what is element by element and of one level."""
        self.group = list(range(len(self.roles)))
        for index, sources in enumerate(self.sources):
            found = 0
            for source in sources:
                if (maker := self.maker.get(source[0])) is not None:
                    found = max(found, self.level[maker] + (not self._fuses(maker, index, source)))
            self.level.append(found)
            for source in sources:
                maker = self.maker.get(source[0])
                if maker is not None and self.level[maker] == found:
                    self._unite(maker, index)

    def _fuses(self, maker: int, reader: int, source: Source) -> bool:
        """Whether an edge can lie inside a kernel."""
        if self.roles[maker] not in (Role.MAP, Role.THROUGH) or not source[2]:
            return False
        if self.roles[reader] is Role.ALONE or self.is_seen_through[reader]:
            return False
        return source[1] == self._elements(reader)

    def _sinks(self, maker: int, reader: int, source: Source) -> bool:
        """Whether a fusion could be part of its reader, perhaps for each element of a broadcast."""
        if self.roles[maker] not in (Role.MAP, Role.THROUGH) or self.roles[reader] is Role.ALONE:
            return False
        return source[1] == self.steps.values[source[0]].elements

    def _elements(self, index: int) -> int:
        """Over how many elements the loop of a step runs."""
        step = self.steps.steps[index]
        values = self.steps.values
        if self.roles[index] is not Role.END:
            return values[step.writes[0]].elements
        written = updates_operand(step.eqn)
        read = step.reads if written is None else (step.reads[written],)
        return max((values[v].elements for v in read if v != LITERAL), default=0)

    def sink(self) -> None:
        """Make a fusion that one other fusion alone reads a part of it."""
        results = frozenset(self.steps.outputs)
        leaving: dict[int, set[int]] = {}  # readers of each group, -1 for one that cannot fuse
        for index, sources in enumerate(self.sources):
            if self.is_seen_through[index]:
                continue
            for source in sources:
                maker = self.maker.get(source[0])
                if maker is not None and self.root(maker) != self.root(index):
                    reader = index if self._sinks(maker, index, source) else -1
                    leaving.setdefault(self.root(maker), set()).add(reader)
        for index, step in enumerate(self.steps.steps):
            if self.roles[index] is Role.END or results.intersection(step.writes):
                leaving.setdefault(self.root(index), set()).add(-1)
        for group in sorted(leaving, key=lambda g: -self.level[g]):
            readers = {self.root(r) if r >= 0 else -1 for r in leaving[group]}
            if len(readers) == 1 and -1 not in readers:
                self.group[group] = readers.pop()

    def write(self) -> None:
        """Find the values that are written: results, and what another kernel reads.

        Not what fusions alone read, each of which can compute it from values that it reads anyway,
        or from others in memory that are no larger together.
        """
        read: dict[int, set[int]] = {}
        outside: dict[int, list[tuple[int, Source]]] = {}
        for index, sources in enumerate(self.sources):
            for source in () if self.is_seen_through[index] else sources:
                maker = self.maker.get(source[0])
                if maker is None or self.root(maker) != self.root(index):
                    read.setdefault(self.root(index), set()).add(source[0])
                    outside.setdefault(source[0], []).append((index, source))
        self.written.update(self.steps.outputs)
        for value, readers in outside.items():
            maker = self.maker.get(value)
            if maker is not None and not all(self._fuses(maker, *reader) for reader in readers):
                self.written.add(value)
        known = frozenset(self.written)
        ways = (self._made_of(known), self._made_of(frozenset()))
        for value, readers in outside.items():
            if value in self.written or (maker := self.maker.get(value)) is None:
                continue
            groups = {self.root(reader) for reader, _ in readers}
            needed = [needs for way in ways if (needs := way[maker]) is not None]
            needed.sort(key=lambda needs: max(len(needs - read[group]) for group in groups))
            for needs in needed:
                if all(self._replaces(needs - read[group], value, known) for group in groups):
                    self.again[value] = needs
                    break
            else:
                self.written.add(value)

    def _replaces(self, more: AbstractSet[int], value: int, known: AbstractSet[int]) -> bool:
        """Whether a fusion may as well read some more values and not this one.

        They lie in memory anyway, and are no larger together.
        """
        values = self.steps.values
        return sum(values[v].bytes for v in more) <= values[value].bytes and all(
            v in known or v not in self.maker or self._is_end(self.maker[v]) for v in more
        )

    def _is_end(self, index: int) -> bool:
        return self.roles[index] in (Role.ALONE, Role.END)

    def _made_of(self, known: AbstractSet[int]) -> list[frozenset[int] | None]:
        """From which values outside its kernel, or known ones, each step is made.

        None for more than a few.
        """
        found: list[frozenset[int] | None] = []
        for index, sources in enumerate(self.sources):
            needs: frozenset[int] | None = frozenset()
            for value, _, _ in () if self.is_seen_through[index] else sources:
                maker = self.maker.get(value)
                more: frozenset[int] | None = frozenset({value})
                if maker is not None and self.root(maker) == self.root(index):
                    more = more if value in known else found[maker]
                needs = None if needs is None or more is None else needs | more
            found.append(None if needs is None or len(needs) > _FEW else needs)
        return found

    def computed_again(self, index: int) -> Iterator[int]:
        """The steps that make what a step reads of another fusion that does not write it."""
        for value, _, _ in self.sources[index]:
            maker = self.maker.get(value)
            if maker is not None and value not in self.written:
                yield maker

    def root(self, index: int) -> int:
        """The kernel that a step is part of."""
        while self.group[index] != index:
            self.group[index] = self.group[self.group[index]]
            index = self.group[index]
        return index

    def _unite(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        self.group[max(one, other)] = min(one, other)
