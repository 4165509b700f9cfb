"""The command: many random programs; failures shrunk and printed."""

import argparse
import time

import jax

from tests.fuzz.checking import Failure, check
from tests.fuzz.making import make
from tests.fuzz.operators import PROFILES
from tests.fuzz.programs import Case
from tests.fuzz.shrinking import reproducer, shrink


def main() -> int:
    """Run, shrink, print; the exit status says whether anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="how many programs (100)")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed (0)")
    parser.add_argument("--real", action="store_true", help="eight CPU devices, not simulated")
    parser.add_argument("--keep", action="store_true", help="print failures as they are")
    options = parser.parse_args()
    start, failed = time.perf_counter(), 0
    for seed in range(options.seed, options.seed + options.cases):
        case, problems = make(seed, PROFILES)
        for problem in problems:
            print(f"seed {seed}: an operator that cannot be: {problem}", flush=True)
        for failure in run(case, options.real):
            failed += 1
            print(f"\nseed {seed}, {failure.completion}, {failure.kind}: {failure.detail}")
            smallest = case if options.keep else shrunk(case, failure, options.real)
            print(reproducer(smallest, failure.completion), flush=True)
        if seed % 20 == 19:
            jax.clear_caches()
            spent = time.perf_counter() - start
            print(f"seed {seed}: {failed} failures, {spent:.0f} s", flush=True)
    print(f"{options.cases} cases, {failed} failures, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


def run(case: Case, real: bool) -> list[Failure]:
    """Failures; a program that one device cannot run is said so."""
    try:
        return check(case, real=real)
    except Exception as error:
        print(f"seed {case.seed}: one device cannot run this: {error!r:.200}", flush=True)
        return []


def shrunk(case: Case, failure: Failure, real: bool) -> Case:
    """The smallest case that fails alike."""

    def still_fails(smaller: Case) -> bool:
        try:
            found = check(smaller, (failure.completion,), real)
        except Exception:  # the smaller program is none
            return False
        return any(f.same_as(failure) for f in found)

    return shrink(case, still_fails)
