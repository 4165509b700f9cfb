"""Handles: how a user names values of a program, and finds them again in the next trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn, Var
from meshwise.ir.collectives import kind_of_primitive
from meshwise.ir.mesh import Axes
from meshwise.schedule.layouts import named_axes
from meshwise.schedule.view import View


@dataclass(frozen=True, eq=False)
class Handle:
    """One value of a program, by the equation that makes it.

    `kind` is the kind of a collective (`all_reduce`, ...), else the primitive's name; `line` the
    user's. `expression` is how a script names it, one of so many `siblings`.
    """

    value: Var
    kind: str
    text: str
    line: str
    expression: str
    siblings: int = 1

    def __repr__(self) -> str:
        """What it is and where it comes from."""
        return f"<{self.kind} {self.text} at {self.line}>"


def kind_of(eqn: JaxprEqn) -> str:
    """The kind of a collective, the name of a fused equation, else the primitive's name."""
    kind = kind_of_primitive(eqn.primitive.name)
    if kind is not None:
        return kind.value
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    return str(name) if name else eqn.primitive.name


def handle_of(view: View, value: Var, expression: str, siblings: int = 1) -> Handle:
    """The handle of a value that an equation makes."""
    eqn = view.eqns[view.maker[value]]
    text = value.aval.str_short(short_dtypes=True)
    axes = named_axes(eqn)
    over = f" over {', '.join(axes)}" if axes else ""
    return Handle(value, kind_of(eqn), text + over, _jax.source_summary(eqn), expression, siblings)


def matches(
    view: View, eqn: JaxprEqn, kind: str | None, source: str | None, axes: Axes | None
) -> bool:
    """Whether an equation is one that was asked for."""
    if kind is not None and kind_of(eqn) != kind:
        return False
    if source is not None and source not in _jax.source_summary(eqn):
        return False
    return axes is None or {*named_axes(eqn)} == {*axes}


def found(view: View, kind: str | None, source: str | None, axes: Axes | None) -> list[Var]:
    """The first result of every equation that was asked for, in order."""
    return [
        eqn.outvars[0]
        for eqn in view.eqns
        if eqn.outvars and matches(view, eqn, kind, source, axes)
    ]


def path_of(paths: Sequence[str], name: str) -> list[int]:
    """Positions of the leaves that a name may mean: its path, else the end of one path."""
    exact = [i for i, path in enumerate(paths) if path == name]
    return exact or [i for i, path in enumerate(paths) if _ends_with(path, name)]


def _ends_with(path: str, name: str) -> bool:
    if not path.endswith(name):
        return False
    before = path[: len(path) - len(name)]
    return not (before and before[-1].isalnum() and name[0].isalnum())


def next_values(
    in_paths: Sequence[str], out_paths: Sequence[str], ins: Sequence[Any], outs: Sequence[Any]
) -> dict[int, int]:
    """Arguments that a step makes anew, by position, and the results that they become.

    An argument and a result belong together where their paths end alike and their types are equal,
    and no other argument's do. Where paths say nothing, results that have the types of so many
    arguments in a row, and of no other row, are theirs.
    """
    by_end: dict[tuple[str, Any], list[int]] = {}
    for i, (path, aval) in enumerate(zip(in_paths, ins, strict=True)):
        for end in _ends(path):
            by_end.setdefault((end, _type(aval)), []).append(i)
    tied: dict[int, int] = {}
    for j, (path, aval) in enumerate(zip(out_paths, outs, strict=True)):
        for end in _ends(path):
            left = [i for i in by_end.get((end, _type(aval)), ()) if i not in tied]
            if len(left) == 1:
                tied[left[0]] = j
                break
    return tied or _in_a_row([_type(t) for t in ins], [_type(t) for t in outs])


def _ends(path: str) -> list[str]:
    """A path after the name of the argument or result, and that without the first position."""
    end = path[path.index("[") :] if "[" in path else ""
    rest = end[end.index("]") + 1 :] if end else ""
    return [e for e in dict.fromkeys((end, rest)) if e.strip("[]0123456789")]


def _in_a_row(ins: Sequence[Any], outs: Sequence[Any]) -> dict[int, int]:
    count = len(outs)
    starts = [i for i in range(len(ins) - count + 1) if list(ins[i : i + count]) == list(outs)]
    return {starts[0] + j: j for j in range(count)} if len(starts) == 1 and count else {}


def _type(aval: Any) -> Any:
    return tuple(aval.shape), aval.dtype
