"""A file has at most 400 lines, a function at most 60, or a reason written down here."""

import ast
from collections.abc import Iterator, Mapping, Sequence

from tests.guards.source import FunctionNode, Module, package, plant

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# "meshwise/x.py" -> why it is not split. An entry that is no longer needed fails too.
LONG_FILES: Mapping[str, str] = {}
# "meshwise/x.py::Class.method" or "meshwise/x.py::function" -> why it is not split.
LONG_FUNCTIONS: Mapping[str, str] = {}


def file_lengths(modules: Sequence[Module]) -> dict[str, int]:
    return {m.path: len(m.text.splitlines()) for m in modules}


def function_lengths(modules: Sequence[Module]) -> dict[str, int]:
    """Lines from the first decorator to the last; a nested function counts in its outer one."""
    return {
        f"{m.path}::{name}": node.end_lineno
        - min(n.lineno for n in (node, *node.decorator_list))
        + 1
        for m in modules
        for name, node in _outer_functions(m.tree.body)
    }


def offences(lengths: Mapping[str, int], limit: int, allowed: Mapping[str, str]) -> list[str]:
    long = {name: length for name, length in lengths.items() if length > limit}
    found = [
        f"{name} has {n} lines, at most {limit} are wanted: split it, or give the reason here"
        for name, n in long.items()
        if name not in allowed
    ]
    found += [
        f"{name} is allowed to be long, but is not: remove the entry"
        for name in allowed
        if name not in long
    ]
    found += [f"{name} has no reason" for name, reason in allowed.items() if not reason.strip()]
    return found


def _outer_functions(
    body: Sequence[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, FunctionNode]]:
    for node in body:
        if isinstance(node, FunctionNode):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _outer_functions(node.body, f"{prefix}{node.name}.")
        else:  # a function defined under `if` or `try`
            for inner in (getattr(node, field, []) for field in ("body", "orelse", "finalbody")):
                yield from _outer_functions(inner, prefix)


def test_files_are_short():
    assert not offences(file_lengths(package()), MAX_FILE_LINES, LONG_FILES)


def test_functions_are_short():
    assert not offences(function_lengths(package()), MAX_FUNCTION_LINES, LONG_FUNCTIONS)


def test_planted_long_file_is_found():
    at_limit, over = "x = 1\n" * MAX_FILE_LINES, "x = 1\n" * (MAX_FILE_LINES + 1)
    modules = plant({"meshwise/a.py": at_limit, "meshwise/b.py": over})
    found = offences(file_lengths(modules), MAX_FILE_LINES, {})
    assert [f.split()[0] for f in found] == ["meshwise/b.py"]


def test_planted_long_functions_are_found():
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    method = "class C:\n  def m(self):\n" + "      x = 1\n" * MAX_FUNCTION_LINES
    text = f"def fits():\n{body}\n@decorated\ndef over():\n{body}\n{method}"
    text += f"if True:\n  def hidden():\n{body}{body}"
    found = offences(function_lengths(plant({"meshwise/a.py": text})), MAX_FUNCTION_LINES, {})
    assert [f.split()[0].split("::")[1] for f in found] == ["over", "C.m", "hidden"]


def test_planted_stale_or_empty_allowance_is_found():
    assert not offences({"long": 9}, 5, {"long": "one table"})
    assert offences({"long": 9}, 5, {"long": " "})
    assert offences({"short": 5}, 5, {"short": "was long once"})
    assert offences({}, 5, {"gone": "was long once"})
