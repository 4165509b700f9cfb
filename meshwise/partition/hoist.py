"""What a loop reads from around it in another sharding: made once before it, or in every step.

Before the loop it is sent once and held throughout; in every step it is sent as often as the loop
runs, and held while it is used. Before is the rule; a limit on the bytes that a device may hold
that way keeps the rest inside.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise import _jax
from meshwise._jax import Literal, Var
from meshwise.choose.plan import Plan
from meshwise.ir.bodies import Item, Nested
from meshwise.ir.program import itemsize_of, shape_of
from meshwise.ir.sharding import Sharding, local_bytes
from meshwise.partition.reshards import plan_of_edge

Copy = tuple[Var, Sharding]


@dataclass(frozen=True)
class LoopRead:
    """One value that a loop reads in another sharding, and where that copy is made.

    `held_bytes` is the copy on each device, `wire_bytes` what a device sends for it each time;
    `trips` is None where only the data knows how often the loop runs.
    """

    loop: str
    value: str
    held_bytes: int
    wire_bytes: float
    trips: int | None
    is_before: bool

    def __str__(self) -> str:
        """One line, e.g. `scan at train.py:12: f32[16,16] [x, -] -> [-, -] once before it, ...`."""
        steps = "step" if self.trips is None else f"of its {self.trips} steps"
        where = "once before it" if self.is_before else f"in each {steps}"
        return (
            f"{self.loop}: {self.value} {where}, {self.wire_bytes:,.0f} bytes sent each time, "
            f"{self.held_bytes:,} held"
        )


def read_before(
    plan: Plan,
    loop: Nested,
    sources: Mapping[Copy, Sharding],
    known: Container[Copy],
    most_bytes: int | None,
) -> tuple[list[Copy], list[LoopRead]]:
    """The copies to make before a loop, in the order in which it reads them, and what is sent.

    Those that are `known` are there already. What is worth most for its bytes comes first where not
    all fit in `most_bytes`. A copy stands before the loop only with all that it is made of, be that
    read in the loop or not.
    """
    copies = [copy for copy in _reads(plan, loop) if copy not in known]
    ways = {copy: _made_of(copy, sources, known) for copy in copies}
    sends = {step: _send(plan, step, sources[step]) for way in ways.values() for step in way}
    sent = {step: send for step, send in sends.items() if send.wire_bytes}

    def worth(copy: Copy) -> float:
        steps = [sent[step] for step in ways[copy] if step in sent]
        return sum(s.wire_bytes for s in steps) / max(sum(s.held_bytes for s in steps), 1)

    left = float("inf") if most_bytes is None else most_bytes
    before: set[Copy] = set()
    inside: set[Copy] = set()
    for copy in sorted(copies, key=worth, reverse=True):
        missing = [step for step in ways[copy] if step in sent and step not in before]
        held = sum(sent[step].held_bytes for step in missing)
        if held > left:
            inside.add(copy)
        else:
            left -= held
            before.update(missing)
    control = loop.control
    name = f"{control.name} at {_jax.source_summary(control.eqn)}"
    notes = [
        LoopRead(
            name,
            f"{var.aval.str_short(short_dtypes=True)} {sources[var, sharding]} -> {sharding}",
            send.held_bytes,
            send.wire_bytes,
            control.trips if control.are_trips_known else None,
            (var, sharding) in before,
        )
        for (var, sharding), send in sent.items()
    ]
    return [copy for copy in copies if copy not in inside], notes


@dataclass(frozen=True)
class _Send:
    """What a device holds of a copy, and sends to make it of its source."""

    held_bytes: int
    wire_bytes: float


def _send(plan: Plan, copy: Copy, source: Sharding) -> _Send:
    var, sharding = copy
    held = local_bytes(shape_of(var), itemsize_of(var), sharding, plan.program.mesh)
    return _Send(held, plan_of_edge(plan, var, (source, sharding)).wire_bytes)


def _made_of(copy: Copy, sources: Mapping[Copy, Sharding], known: Container[Copy]) -> list[Copy]:
    """The copies that must be made for one, itself the last."""
    way: list[Copy] = []
    while copy in sources and copy not in known:
        way.append(copy)
        copy = copy[0], sources[copy]
    return way[::-1]


def read_anyway(plan: Plan, choice: Nested, beside: Sequence[Item]) -> Iterator[Copy]:
    """What some branch reads from around it that is read whichever is taken.

    Either all branches read it, or something `beside` the choice does, in the same body.
    """
    eqns = plan.program.equations
    made = {v for p in choice.positions() for v in eqns[p].outvars}
    read = _all_read(plan, beside)
    for position in choice.positions():
        for var, sharding in _copies_read(plan, position):
            if var not in made and (var, sharding) in read:
                yield var, sharding


def _reads(plan: Plan, loop: Nested) -> Iterator[Copy]:
    """What a loop reads from around it, in order; of branches only what all of them read."""
    eqns = plan.program.equations
    made = {v for p in loop.positions() for v in eqns[p].outvars}
    for var, sharding in _reads_of(plan, loop):
        if var not in made:
            yield var, sharding


def _reads_of(plan: Plan, nested: Nested) -> dict[Copy, None]:
    """The copies that a loop or choice reads whichever way it goes."""
    marks = [p for found in nested.marks.values() for p in found]
    joins = nested.of(_jax.join_p)
    found = _all_read(plan, [p for p in marks if p not in joins])
    bodies = {number: _all_read(plan, items) for number, items in nested.bodies.items()}
    if not nested.control.is_choice:
        return found | {copy: None for reads in bodies.values() for copy in reads}
    for number, reads in bodies.items():
        reads.update((copy, None) for p in joins for copy in _copies_read(plan, p, number))
    first, *others = bodies.values()
    return found | {copy: None for copy in first if all(copy in reads for reads in others)}


def _all_read(plan: Plan, items: Sequence[Item]) -> dict[Copy, None]:
    found: dict[Copy, None] = {}
    for item in items:
        if isinstance(item, int):
            found.update(dict.fromkeys(_copies_read(plan, item)))
        else:
            found.update(_reads_of(plan, item))
    return found


def _copies_read(plan: Plan, position: int, operand: int | None = None) -> list[Copy]:
    """The copies that an equation reads, or one operand of it."""
    eqn, decided = plan.program.equations[position], plan.equations[position]
    if decided.remade:
        return []
    pairs = list(zip(eqn.invars, decided.operands, strict=True))
    pairs = pairs if operand is None else pairs[operand : operand + 1]
    return [(atom, sharding) for atom, sharding in pairs if not isinstance(atom, Literal)]
