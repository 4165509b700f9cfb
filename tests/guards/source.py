"""The package's source as the guards see it: modules, their trees, their imports."""

import ast
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "meshwise"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file: `meshwise/ir/mesh.py` is `meshwise.ir.mesh`."""

    path: str
    text: str

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{node.lineno}"


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is the module that is read, `is_local` that a function does."""

    target: str
    where: str
    is_local: bool


@functools.cache
def package() -> tuple[Module, ...]:
    """Every module of meshwise."""
    return tuple(read_folder(PACKAGE))


def read_folder(folder: str) -> Iterator[Module]:
    """Every Python file under a folder of the repository."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        yield Module(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))


def plant(files: Mapping[str, str]) -> tuple[Module, ...]:
    """Modules that exist only in a test: path to text."""
    return tuple(Module(path, text) for path, text in files.items())


def first_party_imports(module: Module, modules: Sequence[Module]) -> list[Import]:
    """Imports of meshwise by meshwise, wherever in the file they stand."""
    known = {m.name for m in modules}
    local = {id(n) for f in functions(module.tree) for n in ast.walk(f)}
    found = []
    for node in ast.walk(module.tree):
        for base, name in _imported(node, module):
            if base.split(".")[0] != PACKAGE:
                continue
            target = f"{base}.{name}" if name and f"{base}.{name}" in known else base
            found.append(Import(target, module.at(node), id(node) in local))
    return found


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    """Every function and method, nested ones included."""
    return (n for n in ast.walk(tree) if isinstance(n, FunctionNode))


def dotted(node: ast.expr) -> tuple[str, ...]:
    """The names of `a.b.c`; empty for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return (*base, node.attr)
    return ()


def _imported(node: ast.AST, module: Module) -> Iterator[tuple[str, str]]:
    """The (module, name) pairs of an import statement; the name is empty for `import module`."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = module.name.split(".")
            kept = len(parents) - node.level + module.is_package
            base = ".".join([*parents[:kept], *([base] if base else [])])
        yield from ((base, alias.name) for alias in node.names)
