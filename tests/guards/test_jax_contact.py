"""`meshwise/_jax/` alone touches what JAX may change without notice."""

import ast
from collections.abc import Iterator, Sequence

from tests.guards.source import Module, dotted, package, plant

CONTACT = "meshwise/_jax/"
UNSTABLE = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")


def unstable_uses(modules: Sequence[Module]) -> list[str]:
    return [
        f"{m.at(node)} uses {name}: reach it through {CONTACT}"
        for m in modules
        if not m.path.startswith(CONTACT)
        for node, name in _names(m.tree)
        if any(name == u or name.startswith(f"{u}.") for u in UNSTABLE)
    ]


def _names(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every imported name in full, and every `a.b` whose `a` is an imported module."""
    aliases = dict(_aliases(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and (names := dotted(node)):
            yield node, ".".join((aliases.get(names[0], names[0]), *names[1:]))


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.asname, a.name) for a in node.names if a.asname)


def test_only_the_contact_file_touches_unstable_jax():
    assert not unstable_uses(package())


def test_planted_uses_are_found():
    offending = [
        "import jax._src.core",
        "from jax._src import source_info_util",
        "from jax import core",
        "from jax.core import Jaxpr",
        "import jax.extend as jex",
        "from jax.extend.core import Literal",
        "from jax.interpreters import partial_eval",
        "import jaxlib",
        "import jax\nx: jax.core.Tracer",
        "import jax\ndef f():\n    return jax.extend.core.jaxpr_as_fun",
        "import jax as j\nj.interpreters.mlir.register_lowering()",
    ]
    for text in offending:
        assert unstable_uses(plant({"meshwise/a.py": text})), text
        assert not unstable_uses(plant({f"{CONTACT}a.py": text})), text


def test_stable_uses_are_no_offence():
    text = "import jax\nfrom jax import lax\nfrom meshwise import _jax\n"
    text += "x = jax.lax.psum\ny = _jax.core.Jaxpr\nz = program.jax.core\nw = jax.errors\n"
    assert not unstable_uses(plant({"meshwise/a.py": text}))
