"""What a loop reads from around it in another sharding: made once before it, or in every step.

Before the loop it is sent once and held throughout; in every step it is sent as often as the loop
runs, and held while it is used. Before is the rule; a limit on the bytes that a device may hold
that way keeps the rest inside.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwise import _jax
from meshwise._jax import Literal, Var
from meshwise.choose.plan import Plan
from meshwise.cost.hardware import Hardware
from meshwise.ir.bodies import Nested
from meshwise.ir.program import itemsize_of, shape_of
from meshwise.ir.sharding import Sharding, local_bytes
from meshwise.reshard.search import plan_reshard

Copy = tuple[Var, Sharding]


@dataclass(frozen=True)
class LoopRead:
    """One value that a loop reads in another sharding, and where that copy is made.

    `held_bytes` is the copy on each device, `wire_bytes` what a device sends for it each time.
    """

    loop: str
    value: str
    held_bytes: int
    wire_bytes: float
    trips: int
    is_before: bool

    def __str__(self) -> str:
        """One line, e.g. `scan at train.py:12: f32[16,16] [x, -] -> [-, -] once before it, ...`."""
        where = "once before it" if self.is_before else f"in each of its {self.trips} steps"
        return (
            f"{self.loop}: {self.value} {where}, {self.wire_bytes:,.0f} bytes sent each time, "
            f"{self.held_bytes:,} held"
        )


def read_before(
    plan: Plan,
    loop: Nested,
    sources: Mapping[Copy, Sharding],
    hardware: Hardware,
    most_bytes: int | None,
) -> tuple[list[Copy], list[LoopRead]]:
    """The copies to make before a loop, in the order in which it reads them, and what is sent.

    What is worth most for its bytes comes first where not all fit in `most_bytes`.
    """
    copies = list(dict.fromkeys(_reads(plan, loop)))
    sent: dict[Copy, tuple[int, float]] = {}
    for var, sharding in copies:
        source = sources.get((var, sharding))
        if source is None:
            continue
        what = shape_of(var), itemsize_of(var), plan.program.mesh
        wire = plan_reshard(*what, source, sharding, hardware).wire_bytes
        if wire:
            sent[var, sharding] = local_bytes(*what[:2], sharding, what[2]), wire
    left = float("inf") if most_bytes is None else most_bytes
    inside = set()
    for copy in sorted(sent, key=lambda c: -sent[c][1] / max(sent[c][0], 1)):
        held = sent[copy][0]
        if held > left:
            inside.add(copy)
        else:
            left -= held
    control = loop.control
    name = f"{control.name} at {_jax.source_summary(control.eqn)}"
    notes = [
        LoopRead(
            name,
            f"{var.aval.str_short(short_dtypes=True)} {sources[var, sharding]} -> {sharding}",
            held,
            wire,
            control.trips,
            (var, sharding) not in inside,
        )
        for (var, sharding), (held, wire) in sent.items()
    ]
    return [copy for copy in copies if copy not in inside], notes


def _reads(plan: Plan, loop: Nested) -> Iterator[Copy]:
    """What the equations of a loop read from around it; those of branches may never run."""
    eqns = plan.program.equations
    made = {v for p in loop.positions() for v in eqns[p].outvars}
    for position in loop.positions(branches=False):
        eqn, decided = eqns[position], plan.equations[position]
        for atom, sharding in zip(eqn.invars, decided.operands, strict=True):
            if not isinstance(atom, Literal) and atom not in made and not decided.remade:
                yield atom, sharding
