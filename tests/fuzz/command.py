"""The command: many random programs on several processes; failures shrunk and printed."""

import argparse
import json
import multiprocessing
import pathlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.programs import Case
from tests.fuzz.shrinking import reproducer
from tests.fuzz.work import BLOCK, Found, Outcome, Task, do_block, shrunk

MOST_SHRUNK = 60  # of one run; more failures than that are one bug, or a bad day


def main() -> int:
    """Run, shrink, print; the exit status says whether anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="how many programs (100)")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed (0)")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    parser.add_argument("--engine", default="numpy", help="numpy, compiled or real (numpy)")
    parser.add_argument("--way", help="plan in this way only: gspmd, improved, spread, 'dice 3'")
    parser.add_argument("--alone", action="store_true", help="programs of one operator each")
    parser.add_argument("--only", help="of this one: a function's name in operators_*.py")
    parser.add_argument("--state", help="a file that remembers what is done: run again to go on")
    parser.add_argument("--keep", action="store_true", help="print failures as they are")
    options = parser.parse_args()
    run = _Run(options, State.read(options.state))
    run.all()
    return 1 if run.state.failures else 0


@dataclass
class State:
    """What is done: blocks by their first seed, counts, and failures as text."""

    path: pathlib.Path | None
    done: list[int] = field(default_factory=list)
    programs: int = 0
    plans: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @staticmethod
    def read(name: str | None) -> "State":
        """The state in a file, or a fresh one."""
        path = pathlib.Path(name) if name else None
        if path is None or not path.exists():
            return State(path)
        return State(path, **json.loads(path.read_text(encoding="utf-8")))

    def write(self) -> None:
        """Keep it."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = {k: v for k, v in vars(self).items() if k != "path"}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(known), encoding="utf-8")
        part.replace(self.path)


class _Run:
    def __init__(self, options: Any, state: State):
        self.options, self.state = options, state
        self.start, self.before = time.perf_counter(), state.seconds
        self.shrunk = 0
        self.later: list[Any] = []

    def all(self) -> None:
        """Every block that is not done."""
        options, state = self.options, self.state
        last = options.seed + options.cases
        starts = [s for s in range(options.seed, last, BLOCK) if s not in set(state.done)]
        rest = options.engine, options.way, options.alone, options.only
        tasks = [Task(s, min(s + BLOCK, last), *rest) for s in starts]
        if options.workers <= 1:
            for task in tasks:
                self.note(do_block(task), shrunk)
        else:
            context = multiprocessing.get_context("spawn")
            # A process is replaced after some blocks: JAX keeps everything that it ever traced.
            with context.Pool(options.workers, maxtasksperchild=20) as pool:
                for outcome in pool.imap_unordered(do_block, tasks):
                    self.note(outcome, lambda f: self.later.append(pool.apply_async(shrunk, (f,))))
                    self.later = list(self.finished())
                for task in self.later:
                    self.show(task.get())
        print(self.summary(), flush=True)

    def finished(self) -> Iterator[Any]:
        """Show what has been shrunk; the rest."""
        for task in self.later:
            if task.ready():
                self.show(task.get())
            else:
                yield task

    def note(self, outcome: Outcome, to_shrink: Any) -> None:
        """Count a block, and have its failures shrunk."""
        state = self.state
        for line in outcome.notes:
            print(line, flush=True)
        for found in outcome.failures:
            failure = found.failure
            text = f"seed {found.case.seed}, {failure.completion}, {failure.kind}"
            state.failures.append(f"{text}: {failure.detail[:300]}")
            print(f"\n{text}: {failure.detail}", flush=True)
            if self.options.keep or self.shrunk >= MOST_SHRUNK:
                continue
            self.shrunk += 1
            smallest = to_shrink(found)
            if isinstance(smallest, tuple):
                self.show(smallest)
        state.done.append(outcome.start)
        state.programs += outcome.programs
        state.plans += outcome.plans
        state.seconds = self.before + time.perf_counter() - self.start
        state.write()
        print(self.summary(), flush=True)

    def show(self, smallest: tuple[Case, Found]) -> None:
        """A failure's smallest case, as a person can run it."""
        case, found = smallest
        failure = found.failure
        print(f"\nsmallest of seed {case.seed}, {failure.completion}, {failure.kind}:")
        print(f"{failure.detail}\n{reproducer(case, failure.completion)}", flush=True)

    def summary(self) -> str:
        """Counts so far."""
        state = self.state
        rate = 3600 * state.programs / max(state.seconds, 1e-9)
        return (
            f"{state.programs} programs, {state.plans} plans of them, {len(state.failures)} "
            f"failures, {state.seconds:.0f} s: {rate:.0f} programs an hour"
        )
