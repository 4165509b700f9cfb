"""Every value of a program with its line and its layout, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwise._jax import ClosedJaxpr
from meshwise.ir.program import type_of
from meshwise.schedule.language.lower import Lowered
from meshwise.schedule.language.scene import Scene, shown
from meshwise.schedule.view import short_line


@dataclass(frozen=True)
class Row:
    """One value: the user's line, what makes it, its type (in the program) and layout."""

    line: str
    made_by: str
    type: str
    layout: str


@dataclass(frozen=True)
class Listing:
    """Every value of a program in order: arguments, what is computed, results."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        """A table."""
        cells = [(r.line, r.made_by, r.type, r.layout) for r in self.rows]
        widths = [max(len(c[i]) for c in cells) if cells else 0 for i in range(3)]
        return "\n".join(
            "  ".join([*(t.ljust(w) for t, w in zip(c, widths, strict=False)), c[3]]) for c in cells
        )

    __repr__ = __str__


def listing(flat: ClosedJaxpr, lowered: Lowered, scene: Scene, out_paths: Sequence[str]) -> Listing:
    """The rows of a program that was lowered."""
    jaxpr = flat.jaxpr
    rows = [Row(scene.names[v], "argument", _type(v), str(scene.layouts[v])) for v in jaxpr.invars]
    for typed in lowered.typed:
        line = short_line(typed.eqn)
        for var, layout in zip(typed.eqn.outvars, typed.results, strict=True):
            rows.append(Row(line, shown(typed.eqn), _type(var), str(layout)))
    for path, atom in zip(out_paths, jaxpr.outvars, strict=True):
        rows.append(Row(path, "result", _type(atom), str(scene.layout(atom))))
    return Listing(tuple(rows))


def _type(atom: Any) -> str:
    return type_of(atom).str_short(short_dtypes=True)
