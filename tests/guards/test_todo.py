"""A TODO names an issue, so that somebody can tell when it is done: `TODO(#12): ...`."""

import re
from collections.abc import Sequence

from tests.guards.source import Module, package, plant, read_folder

MARK = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
REFERENCE = re.compile(r"\bTODO\(#\d+\): \S")


def unreferenced_todos(modules: Sequence[Module]) -> list[str]:
    return [
        f"{m.path}:{number}: {line.strip()}"
        for m in modules
        for number, line in enumerate(m.text.splitlines(), start=1)
        if MARK.search(line) and not REFERENCE.search(line)
    ]


def test_every_todo_names_an_issue():
    shown = [*read_folder("examples"), *read_folder("benchmarks")]
    assert not unreferenced_todos([*package(), *shown])


def test_planted_todos_are_found():
    bad = ["# TODO: later", "x = 1  # FIXME", "# XXX(#3): why", "# TODO(someone): x", "# TODO #4"]
    for line in bad:
        assert unreferenced_todos(plant({"meshwise/a.py": line})), line
    good = ["# TODO(#12): sub-axes", "todo = 1", "# a HACKER"]
    for line in good:
        assert not unreferenced_todos(plant({"meshwise/a.py": line})), line
