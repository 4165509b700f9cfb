"""The command: each mutant in a copy of the package; a table of those killed and those alive."""

import argparse
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.table import MUTANTS

COPIED = ("meshwise", "tests", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
FAILED, PASSED = 1, 0  # pytest's exit statuses
MOST_SECONDS = 300


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: killed, survived, timed out, or no test ran."""

    mutant: Mutant
    word: str
    seconds: float
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether a test noticed."""
        return self.word in ("killed", "timed out")


def main() -> int:
    """Run all, or those whose family or name has a word; 1 where one is alive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants of such families or names")
    parser.add_argument("--workers", type=int, default=2, help="copies at work (2)")
    parser.add_argument("--verbose", action="store_true", help="show what pytest said")
    options = parser.parse_args()
    chosen = [
        m
        for m in MUTANTS
        if not options.words or any(w in f"{m.family} {m.name}" for w in options.words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[pathlib.Path] = queue.Queue()
        for k in range(options.workers):
            copies.put(copied(pathlib.Path(folder) / str(k)))
        with ThreadPoolExecutor(options.workers) as pool:
            verdicts = []
            for verdict in pool.map(lambda m: judge(m, copies), chosen):
                verdicts.append(verdict)
                print(line(verdict), flush=True)
                if options.verbose or verdict.word == "no test ran":
                    print(verdict.detail, flush=True)
    alive = [v for v in verdicts if not v.is_good]
    families = len({v.mutant.family for v in verdicts})
    print(f"{len(verdicts) - len(alive)} of {len(verdicts)} killed, {families} families")
    for verdict in alive:
        print(f"alive: {verdict.mutant.name} ({verdict.word})")
    return 1 if alive else 0


def copied(folder: pathlib.Path) -> pathlib.Path:
    """A copy of what the tests need."""
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def judge(mutant: Mutant, copies: "queue.Queue[pathlib.Path]") -> Verdict:
    """Break the rule in one of the copies, run its tests, and mend it."""
    copy = copies.get()
    file = copy / mutant.file
    sound = file.read_text(encoding="utf-8")
    start = time.perf_counter()
    try:
        file.write_text(mutant.text(copy), encoding="utf-8")
        word, detail = _run(mutant, copy)
    except ValueError as error:
        word, detail = "no such text", str(error)
    finally:
        file.write_text(sound, encoding="utf-8")
        copies.put(copy)
    return Verdict(mutant, word, time.perf_counter() - start, detail)


def _run(mutant: Mutant, copy: pathlib.Path) -> tuple[str, str]:
    options = ("-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist")
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FUZZ_SEEDS": "24",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *mutant.tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "timed out", ""
    said = "\n".join(done.stdout.splitlines()[-8:]) + done.stderr[-500:]
    words = {FAILED: "killed", PASSED: "survived"}
    return words.get(done.returncode, "no test ran"), said


def line(verdict: Verdict) -> str:
    """One row of the table."""
    mutant = verdict.mutant
    return f"{verdict.word:12} {mutant.family:12} {mutant.name:58} {verdict.seconds:5.1f} s"
