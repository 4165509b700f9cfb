"""No hidden state: no `global`, and no container of a module that a function changes.

Seen are the containers a module makes at its top level, and item assignment to a name imported
from another module of the package. Not seen: a container reached through an attribute of a module
or an object. `functools.cache` is no offence: a cache keyed by all its inputs changes no result.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

from tests.guards.source import PACKAGE, FunctionNode, Module, dotted, functions, package, plant

# "meshwise/x.py::NAME" -> why it may change. An entry that is no longer needed fails too.
REGISTRIES: Mapping[str, str] = {
    "meshwise/_jax/lowering.py::_idle": "contexts of MLIR between two programs; no result depends "
    "on which one a program is lowered in",
}

CONTAINERS = {
    "dict",
    "list",
    "set",
    "bytearray",
    "Counter",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "defaultdict",
    "deque",
}
CHANGES = {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "move_to_end",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
}


def global_statements(modules: Sequence[Module]) -> list[str]:
    return [
        f"{m.at(node)} says global {', '.join(node.names)}"
        for m in modules
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Global)
    ]


def changed_containers(modules: Sequence[Module]) -> dict[str, str]:
    """`path::name` of each module-level container changed in a function, and where."""
    found = {}
    for module in modules:
        own, imported = set(_own_containers(module.tree)), set(_imported_names(module.tree))
        for function in functions(module.tree):
            shadowed = _local_names(function)
            for name, node, is_item in _changes(function):
                if name not in shadowed and (name in own or (is_item and name in imported)):
                    found.setdefault(f"{module.path}::{name}", module.at(node))
    return found


def offences(found: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    unlisted = [f"{where} changes {name}" for name, where in found.items() if name not in allowed]
    stale = [f"{name} changes nowhere: remove the entry" for name in allowed if name not in found]
    mute = [f"{name} has no reason" for name, reason in allowed.items() if not reason.strip()]
    return unlisted + stale + mute


def _own_containers(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_container(node.value):
            yield from (t.id for t in targets if isinstance(t, ast.Name))


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return bool(CONTAINERS & set(dotted(value.func)[-1:]))
    literals = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return isinstance(value, literals)


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").split(".")[0] == PACKAGE:
                yield from (alias.asname or alias.name for alias in node.names)


def _local_names(function: FunctionNode) -> set[str]:
    names = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names - {n for g in ast.walk(function) if isinstance(g, ast.Global) for n in g.names}


def _changes(function: FunctionNode) -> Iterator[tuple[str, ast.AST, bool]]:
    """(name, node, whether an item is assigned) of each change of a plain name in a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if isinstance(node.value, ast.Name):
                yield node.value.id, node, True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES and isinstance(node.func.value, ast.Name):
                yield node.func.value.id, node, False


def test_no_global_statement():
    assert not global_statements(package())


def test_no_function_changes_a_module_level_container():
    assert not offences(changed_containers(package()), REGISTRIES)


def test_planted_global_statement_is_found():
    assert global_statements(plant({"meshwise/a.py": "def f():\n    global x\n    x = 1"}))


def test_planted_changes_are_found():
    text = """
from meshwise.rules.registry import RULES, update
TABLE: dict[str, int] = {}
SEEN = set()
COUNTS = collections.defaultdict(int)
FIXED = {"a": 1}
FIXED["b"] = 2
NAMES = ("a", "b")

def put(key):
    TABLE[key] = 1
    SEEN.add(key)
    del COUNTS[key]
    RULES[key] = 1
    update.add(key)
    return FIXED[key], NAMES

def local(FIXED):
    FIXED["c"] = 1
    SEEN = set()
    SEEN.add(1)
"""
    found = changed_containers(plant({"meshwise/a.py": text}))
    assert sorted(name.split("::")[1] for name in found) == ["COUNTS", "RULES", "SEEN", "TABLE"]


def test_planted_stale_or_empty_allowance_is_found():
    assert not offences({"a::X": "a:1"}, {"a::X": "the registry of rules"})
    assert offences({"a::X": "a:1"}, {"a::X": ""})
    assert offences({}, {"a::X": "the registry of rules"})
