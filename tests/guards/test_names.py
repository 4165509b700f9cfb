"""A module is named by what it is or does; every module says so in its docstring."""

import ast
from collections.abc import Sequence

from tests.guards.source import Module, package, plant

NAMELESS = {"util", "utils", "helper", "helpers", "common", "misc"}


def nameless_modules(modules: Sequence[Module]) -> list[str]:
    """Modules with a word in their path that says nothing about what they hold."""
    return [
        f"{m.path}: name it by what it holds; what one file uses stays in that file"
        for m in modules
        if NAMELESS & set(m.name.replace(".", "_").split("_"))
    ]


def modules_without_docstring(modules: Sequence[Module]) -> list[str]:
    return [m.path for m in modules if not (ast.get_docstring(m.tree) or "").strip()]


def test_no_module_is_a_dumping_ground():
    assert not nameless_modules(package())


def test_every_module_has_a_docstring():
    assert not modules_without_docstring(package())


def test_planted_dumping_grounds_are_found():
    paths = ["utils.py", "ir/misc.py", "helpers/mesh.py", "rules/_common.py", "graph_utils.py"]
    assert len(nameless_modules(plant({f"meshwise/{p}": "" for p in paths}))) == len(paths)
    assert not nameless_modules(plant({"meshwise/utility_function.py": ""}))


def test_planted_missing_docstrings_are_found():
    files = {
        "meshwise/a.py": '"""What a is."""',
        "meshwise/b.py": "# a comment\nx = 1",
        "meshwise/c/__init__.py": "",
        "meshwise/d.py": '"""  """',
    }
    assert modules_without_docstring(plant(files)) == [
        "meshwise/b.py",
        "meshwise/c/__init__.py",
        "meshwise/d.py",
    ]
