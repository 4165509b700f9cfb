"""What is known while a program is read: its mesh, its group, its values' layouts and makers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.errors import LayoutError, message
from meshwise.ir.mesh import Axes, Mesh
from meshwise.schedule.language.verbs import VERBS, verb_name
from meshwise.schedule.layouts import Layout, replicated


@dataclass(frozen=True)
class AllAxes(Mesh):
    """A mesh as layouts see it: axes of one device count too, so a program means the same on any.

    The program that is made of it goes over the others alone.
    """

    def __post_init__(self) -> None:
        """Sizes may be one."""

    @classmethod
    def of(cls, names: Iterable[str], sizes: Iterable[int]) -> "AllAxes":
        """From the axes of the user's mesh."""
        named = tuple([str(n) for n in names])
        return cls(named, tuple(sizes), tuple([(n, (n,)) for n in named]))


@dataclass(frozen=True)
class Scene:
    """A program while its layouts are found; `group` are the axes that are meant by default."""

    mesh: AllAxes
    group: Axes | None
    layouts: dict[Var, Layout] = field(default_factory=dict)
    makers: dict[Var, JaxprEqn] = field(default_factory=dict)
    names: Mapping[Var, str] = field(default_factory=dict)

    def layout(self, atom: Any) -> Layout:
        """A value's layout; a number written in the program is replicated."""
        return replicated(0) if isinstance(atom, Literal) else self.layouts[atom]

    def text(self, atom: Any) -> str:
        """A value in words: its type, where it comes from, its layout."""
        short = atom.aval.str_short(short_dtypes=True)
        if isinstance(atom, Literal):
            return f"{short} {atom.val} is Replicated"
        if atom in self.names:
            made = f", argument {self.names[atom]},"
        elif atom in self.makers:
            maker = self.makers[atom]
            made = f", {shown(maker)} at {_jax.source_summary(maker)},"
        else:
            made = ""
        return f"{short}{made} is {self.layouts[atom]}"

    def along(self, axis: str, atom: Any) -> str:
        """What a value is along one axis, in a word."""
        layout = self.layout(atom)
        if axis in layout.local:
            return "Local"
        if axis in layout.unreduced:
            return "Unreduced"
        return "Sliced" if axis in layout.sliced else "Replicated"


def shown(eqn: JaxprEqn) -> str:
    """What errors and listings call an operator."""
    if eqn.primitive in VERBS:
        return verb_name(eqn.primitive)
    return _jax.operator_name(eqn)


def refuse(eqn: JaxprEqn, offenders: Iterable[str], rule: str, way_out: str) -> LayoutError:
    """The error for an equation whose operands' layouts do not go together."""
    asked = f"{shown(eqn)} at {_jax.source_summary(eqn)} does not go with the layouts it is given"
    return LayoutError(message(asked, dict.fromkeys(offenders), rule, way_out))
