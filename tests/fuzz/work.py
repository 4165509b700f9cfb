"""What one process of a long run does: blocks of seeds, and shrinking."""

import gc
from dataclasses import dataclass, field, replace

import jax

from tests.fuzz.checking import Failure, check, ways_of
from tests.fuzz.making import make
from tests.fuzz.operators import PROFILES, PROFILES_BY_NAME
from tests.fuzz.pipeline import COMPLETIONS
from tests.fuzz.programs import Case
from tests.fuzz.shrinking import shrink

BLOCK = 50
COMPILED_EVERY = 50  # one program in so many is compiled as well: numpy is held to XLA
DICE = tuple(f"dice {k}" for k in range(6))


@dataclass(frozen=True)
class Found:
    """A failing case, and how it is run."""

    case: Case
    failure: Failure
    engine: str


@dataclass
class Outcome:
    """What a block of seeds gave."""

    start: int
    programs: int = 0
    plans: int = 0
    failures: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """Programs of the seeds from `start` to `end`; alone: each of one operator, one to three times.

    only: the name of that operator; else the seed says which.
    """

    start: int
    end: int
    engine: str = "numpy"
    way: str | None = None
    alone: bool = False
    only: str | None = None

    def program(self, seed: int) -> tuple[Case, list[str]]:
        """The program of a seed, and what went wrong while it was made."""
        if not self.alone and self.only is None:
            return make(seed, PROFILES)
        names = [self.only] if self.only else list(PROFILES_BY_NAME)
        return make(seed, (PROFILES_BY_NAME[names[seed % len(names)]],), (1, 2, 3))


def do_block(task: Task) -> Outcome:
    """Make and check the programs of some seeds."""
    start, end, engine, way = task.start, task.end, task.engine, task.way
    outcome = Outcome(start)
    gc.disable()  # jaxprs are many small objects: looking through them takes a tenth of the time
    for seed in range(start, end):
        case, problems = task.program(seed)
        outcome.notes += [f"seed {seed}: an operator that cannot be: {p}" for p in problems]
        if engine == "numpy":
            ways = (way,) if way else ways_of(seed)
        else:
            ways = (way,) if way else COMPLETIONS
        _check(outcome, case, ways, engine)
        if engine == "numpy" and seed % COMPILED_EVERY == COMPILED_EVERY - 1:
            _check(outcome, case, ways[-1:], "compiled")
    jax.clear_caches()
    gc.enable()
    gc.collect()
    return outcome


def _check(outcome: Outcome, case: Case, ways: tuple[str, ...], engine: str) -> None:
    outcome.programs += engine != "compiled" or len(ways) > 1
    outcome.plans += len(ways)
    try:
        failures = check(case, ways, engine)
    except Exception as error:
        text = f"seed {case.seed}: one device cannot run this ({engine}): {error!r:.300}"
        outcome.notes.append(text)
        return
    outcome.failures += [Found(case, f, engine) for f in failures]


def shrunk(found: Found) -> tuple[Case, Found]:
    """The smallest case that fails alike, and how it fails."""
    failure = found.failure
    is_dice = failure.completion.startswith("dice")
    ways = DICE if is_dice else (failure.completion,)
    last = {found.case: failure}

    def still_fails(smaller: Case) -> bool:
        try:
            failures = check(smaller, ways, found.engine)
        except Exception:  # the smaller program is none
            return False
        for other in failures:
            if replace(other, completion=failure.completion).same_as(failure):
                last[smaller] = other
                return True
        return False

    smallest = shrink(found.case, still_fails)
    return smallest, replace(found, case=smallest, failure=last[smallest])
