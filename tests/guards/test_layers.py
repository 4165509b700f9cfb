"""A module imports only from layers below its own, never in a circle, never inside a function."""

import graphlib
from collections.abc import Sequence

from tests.guards.source import PACKAGE, Module, first_party_imports, package, plant

# Lowest first. A name is a module or a package of modules directly in meshwise.
LAYERS = (
    "errors",
    "_jax",
    "ir",
    "simplify",
    "flatten",
    "trace",
    "rules",
    "cost",
    "reshard",
    "propagate",
    "choose",
    "planner",
    "partition",
    "schedule",
    "pipeline",
    "run",
    "report",
    "api",
    "cli",
    "__main__",
)


def layer(name: str) -> str:
    """The layer of a module; meshwise itself is above all, so nothing may import it."""
    return name.split(".")[1] if "." in name else PACKAGE


def rank(name: str) -> int:
    return len(LAYERS) if layer(name) == PACKAGE else LAYERS.index(layer(name))


def unknown_layers(modules: Sequence[Module]) -> list[str]:
    return [
        f"{m.path} is in no layer: put {layer(m.name)!r} in LAYERS and in the layout page"
        for m in modules
        if layer(m.name) not in (*LAYERS, PACKAGE)
    ]


def upward_imports(modules: Sequence[Module]) -> list[str]:
    placed = [m for m in modules if layer(m.name) in (*LAYERS, PACKAGE)]
    return [
        f"{i.where} imports {i.target}, which is above it"
        for m in placed
        for i in first_party_imports(m, modules)
        if layer(i.target) in (*LAYERS, PACKAGE)
        and rank(i.target) >= rank(m.name)
        and layer(i.target) != layer(m.name)
    ]


def cycles(modules: Sequence[Module]) -> list[str]:
    """One circle of imports, if there is any; imports inside functions count."""
    graph = {m.name: {i.target for i in first_party_imports(m, modules)} for m in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def imports_in_functions(modules: Sequence[Module]) -> list[str]:
    return [
        f"{i.where} imports {i.target} inside a function"
        for m in modules
        for i in first_party_imports(m, modules)
        if i.is_local
    ]


def test_every_module_has_a_layer():
    assert not unknown_layers(package())


def test_imports_go_downward():
    assert not upward_imports(package())


def test_imports_have_no_cycle():
    assert not cycles(package())


def test_no_first_party_import_inside_a_function():
    assert not imports_in_functions(package())


def test_planted_module_without_a_layer_is_found():
    assert unknown_layers(plant({"meshwise/magic.py": ""}))
    assert not unknown_layers(plant({"meshwise/__init__.py": "", "meshwise/ir/mesh.py": ""}))


def test_planted_upward_imports_are_found():
    files = {
        "meshwise/__init__.py": "from meshwise.api import jit",
        "meshwise/api.py": "from meshwise import report",
        "meshwise/report/__init__.py": "",
        "meshwise/errors.py": "import meshwise._jax",
        "meshwise/ir/mesh.py": "from ..rules import registry",
        "meshwise/ir/sharding.py": "from . import mesh\nfrom meshwise.ir.mesh import Mesh",
        "meshwise/rules/registry.py": "from meshwise.ir import mesh",
        "meshwise/run.py": "import jax\ndef f():\n    from meshwise import jit",
    }
    assert [f.split()[0] for f in upward_imports(plant(files))] == [
        "meshwise/errors.py:1",
        "meshwise/ir/mesh.py:1",
        "meshwise/run.py:3",
    ]


def test_planted_cycles_are_found():
    straight = {
        "meshwise/ir/__init__.py": "from meshwise.ir.mesh import Mesh",
        "meshwise/ir/mesh.py": "",
        "meshwise/ir/sharding.py": "from meshwise.ir.mesh import Mesh",
    }
    assert not cycles(plant(straight))
    circle = straight | {"meshwise/ir/mesh.py": "from . import sharding"}
    assert set(cycles(plant(circle))[0].split(" -> ")) == {
        "meshwise.ir.mesh",
        "meshwise.ir.sharding",
    }
    through_package = straight | {"meshwise/ir/mesh.py": "from meshwise.ir import Axes"}
    assert cycles(plant(through_package))
    hidden = straight | {"meshwise/ir/mesh.py": "def f():\n    import meshwise.ir.sharding"}
    assert cycles(plant(hidden))


def test_planted_import_inside_a_function_is_found():
    text = "import meshwise.errors\nclass C:\n  def m(self):\n    from meshwise import errors\n"
    text += "    import scipy.optimize\n"
    found = imports_in_functions(plant({"meshwise/errors.py": "", "meshwise/run.py": text}))
    assert found == ["meshwise/run.py:4 imports meshwise.errors inside a function"]
