"""What schedules are predicted to take at the shapes of CoCoNeT's evaluation, on its machine.

    python -m benchmarks.paper_shapes [SECTION ...] [--markdown]

Of each schedule of `paper_cases.py`: what `cost/timeline.py` and `cost/memory.py` predict for DGX-2
nodes of 16 V100 (`cost/links.py`), beside what the paper (arXiv 2105.05720) reports. Nothing is
run and nothing is measured. `alone` is with kernels and collectives one after another, `beside`
with collectives beside what does not wait for them; of numbers of chunks the fastest is shown.
Ratios are of the first schedule over each, both beside. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import meshwise as mw
from benchmarks.paper_cases import BERT, SECTIONS, TOKENS, TRAINING, Case, Moves
from meshwise.cost.hardware import V100
from meshwise.cost.memory import peak_memory
from meshwise.cost.timeline import Timeline, timeline
from meshwise.ir.program import bytes_of
from meshwise.report.text import aligned

GIB = 2**30
MEMORY_BYTES = 32 * GIB  # of a V100 in a DGX-2


@dataclass(frozen=True)
class Predicted:
    """What one schedule is predicted to take on a device.

    Its timelines with collectives alone and beside computation; bytes sent over each axis; bytes of
    state (of arguments that a step makes anew), and the most at once. `moves` are its script's.
    """

    schedule: str
    moves: tuple[str, ...]
    alone: Timeline
    beside: Timeline
    sent: Mapping[str, int]
    state_bytes: int
    peak_bytes: int


def predicted(case: Case) -> list[Predicted]:
    """Every schedule of a case, in order; of several numbers of chunks the fastest."""
    return [
        min((predict(case, *made) for made in way.made()), key=lambda p: p.beside.seconds)
        for way in case.ways
    ]


def predict(case: Case, name: str, moves: Moves) -> Predicted:
    """One schedule."""
    s = mw.Schedule(case.program)
    moves(s)
    program = s.view.program
    sizes = program.mesh.axis_size
    alone, beside = (
        timeline(program.jaxpr, sizes, case.links, overlaps=overlaps) for overlaps in (False, True)
    )
    sent: dict[str, int] = {}
    for c in program.collectives:
        axis = program.mesh.show(c.axes)
        sent[axis] = sent.get(axis, 0) + c.wire_bytes
    state = sum(bytes_of(s.view.inputs[argument]) for argument, _ in case.program.states)
    # All arguments may be written over: state is made anew, gradients are not needed again.
    memory = peak_memory(program.jaxpr, sizes, donated=range(len(s.view.inputs)))
    return Predicted(name, moves_of(s.script()), alone, beside, sent, state, memory.peak_bytes)


def moves_of(script: str) -> tuple[str, ...]:
    """The moves of a script, each once, in order; not what only finds values."""
    names = dict.fromkeys(re.findall(r"\bs\.(\w+)\(", script))
    return tuple(name for name in names if name != "find")


def rows(found: Sequence[Predicted]) -> Iterator[tuple[str, ...]]:
    """A line of figures for each schedule, after a line of heads."""
    yield "", "alone ms", "beside ms", "ratio", "sent MB", "state GB", "peak GB"
    for p in found:
        yield (
            p.schedule,
            f"{p.alone.seconds * 1e3:,.2f}",
            f"{p.beside.seconds * 1e3:,.2f}",
            f"{found[0].beside.seconds / p.beside.seconds:.2f}x",
            " + ".join(f"{size / 1e6:,.1f}" for size in p.sent.values()),
            f"{p.state_bytes / 1e9:.2f}" if p.state_bytes else "-",
            f"{p.peak_bytes / 1e9:.2f}",
        )


def move_rows(cases: Iterable[Sequence[Predicted]]) -> Iterator[tuple[str, ...]]:
    """The moves that make each schedule; where cases differ, the most."""
    known: dict[str, tuple[str, ...]] = {}
    for p in (p for found in cases for p in found):
        name = re.sub(r"\d+ chunks", "n chunks", p.schedule)
        known[name] = max(known.get(name, ()), p.moves, key=len)
    yield "", "moves"
    for name, moves in known.items():
        yield name, ", ".join(moves) or "none"


def training_rows(cases: Mapping[str, Sequence[Predicted]]) -> Iterator[tuple[str, ...]]:
    """What a whole training step gains from its optimizer alone, and memory left beside it.

    The rest of a step takes 6 flops a parameter and token, at the rate of the data sheet; where it
    takes longer, the ratio is nearer to one. Memory is left by AR-C, and by RS-C-AG with its state
    in slices, of 32 GiB.
    """
    yield "", "rest ms", "AR-C ms", "fused ms", "step", "left GB", "in slices", "reported"
    for (kind, size), reported in TRAINING.items():
        name = f"{kind}, BERT {size}"
        first, *_, sliced, fused = cases[name]
        rest = 6 * BERT[size] * TOKENS[kind] / V100.flops_per_s
        times = [p.beside.seconds for p in (first, fused)]
        left = [(MEMORY_BYTES - p.peak_bytes) / 1e9 for p in (first, sliced)]
        yield (
            name,
            *(f"{t * 1e3:,.1f}" for t in (rest, *times)),
            f"{(rest + times[0]) / (rest + times[1]):.2f}x",
            *(f"{b:.1f}" if b > 0 else "none" for b in left),
            reported,
        )


def shown(found: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Rows as a table, the first one its heads: text, or markdown."""
    if not markdown:
        last = "<" if found[0][-1] in ("moves", "reported") else ">"
        align = "<" + ">" * (len(found[0]) - 2) + last
        return "\n".join(aligned(found, align))
    head, *body = ["| " + " | ".join(row) + " |" for row in found]
    return "\n".join(["", head, "|---" + "|---:" * (len(found[0]) - 1) + "|", *body])


def tables(section: str, markdown: bool = False) -> Iterator[str]:
    """What is predicted of a section, a piece of text for each case; the moves; training steps."""
    cases: dict[str, list[Predicted]] = {}
    for case in SECTIONS[section]():
        cases[case.name] = predicted(case)
        title = f"{case.name}; reported: {case.reported}"
        yield f"{title}\n{shown([*rows(cases[case.name])], markdown)}"
    yield shown([*move_rows(cases.values())], markdown)
    if section == "optimizers":
        yield f"Training steps\n{shown([*training_rows(cases)], markdown)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.paper_shapes")
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args(argv)
    unknown = sorted({*given.sections} - {*SECTIONS})
    if unknown:
        parser.error(f"no section {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    for section in given.sections or SECTIONS:
        for text in tables(section, given.markdown):
            print(text, end="\n\n")


if __name__ == "__main__":
    main()
