"""Handles: how a user names values of a program, and finds them again in the next trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, named_axes
from meshwise.ir.collectives import kind_of_primitive
from meshwise.ir.mesh import Axes
from meshwise.ir.operators import COPIES, RESHAPES, is_among
from meshwise.ir.program import shape_of
from meshwise.schedule.rewrite import live
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


def matches(eqn: JaxprEqn, kind: str | None, source: str | None, axes: Axes | None) -> bool:
    """Whether an equation is one that was asked for."""
    if kind is not None and kind_of(eqn) != kind:
        return False
    if source is not None and source not in _jax.source_summary(eqn):
        return False
    return axes is None or {*named_axes(eqn)} == {*axes}


def found(view: View, kind: str | None, source: str | None, axes: Axes | None) -> list[Var]:
    """The first result of every equation that was asked for and that anything needs, in order."""
    return [
        eqn.outvars[0]
        for eqn in live(view.eqns, view.outputs)
        if eqn.outvars and matches(eqn, kind, source, axes)
    ]


def depths(view: View, values: Sequence[Var]) -> dict[Var, int]:
    """For each of some values, how many others stand on the longest way to it."""
    known: dict[Var, int] = {}
    chosen = {*values}
    for eqn in view.eqns:
        reads = [known[a] for a in eqn.invars if not isinstance(a, Literal) and a in known]
        depth = max(reads, default=0)
        is_chosen = any(v in chosen for v in eqn.outvars)
        if reads or is_chosen:
            known.update(dict.fromkeys(eqn.outvars, depth + is_chosen))
    return {v: known[v] - 1 for v in values}


def feeding(view: View, value: Var, primitive: str) -> Var | None:
    """The last result of a primitive that a value is computed from, None where there is none."""
    todo, seen = [view.maker.get(value)], set[int]()
    found_: list[int] = []
    while todo:
        index = todo.pop()
        if index is None or index in seen:
            continue
        seen.add(index)
        eqn = view.eqns[index]
        if eqn.primitive.name == primitive:
            found_.append(index)
        else:
            todo += [view.maker.get(a) for a in eqn.invars if not isinstance(a, Literal)]
    return view.eqns[max(found_)].outvars[0] if found_ else None


def own_states(view: View, states: Mapping[int, int]) -> dict[int, int]:
    """States that are a step's own business: their next value is on the way to another result.

    Momentum is, from which the next weights are computed; the weights, from which nothing else is
    computed, are what the step is for, and others read them.
    """
    return {
        argument: result
        for argument, result in states.items()
        if shape_of(view.inputs[argument]) and _leads_elsewhere(view, result)
    }


def _leads_elsewhere(view: View, result: int) -> bool:
    atom = view.outputs[result]
    while atom in view.maker and is_among(view.eqns[view.maker[atom]], _SAME):
        atom = view.eqns[view.maker[atom]].invars[0]
    if isinstance(atom, Literal) or atom not in view.maker:
        return False
    after = {atom}
    for eqn in view.eqns:
        if any(not isinstance(a, Literal) and a in after for a in eqn.invars):
            after.update(eqn.outvars)
    others = [a for j, a in enumerate(view.outputs) if j != result]
    return any(not isinstance(a, Literal) and a in after for a in others)


_SAME = RESHAPES | COPIES | {"convert_element_type"}


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
            by_end.setdefault((end, type_key(aval)), []).append(i)
    tied: dict[int, int] = {}
    for j, (path, aval) in enumerate(zip(out_paths, outs, strict=True)):
        for end in _ends(path):
            left = [i for i in by_end.get((end, type_key(aval)), ()) if i not in tied]
            if len(left) == 1:
                tied[left[0]] = j
                break
    return tied or _in_a_row([type_key(t) for t in ins], [type_key(t) for t in outs])


def _ends(path: str) -> list[str]:
    """A path after the name of the argument or result, and that without the first position."""
    end = path[path.index("[") :] if "[" in path else ""
    rest = end[end.index("]") + 1 :] if end else ""
    return [e for e in dict.fromkeys((end, rest)) if e.strip("[]0123456789")]


def _in_a_row(ins: Sequence[Any], outs: Sequence[Any]) -> dict[int, int]:
    count = len(outs)
    starts = [i for i in range(len(ins) - count + 1) if list(ins[i : i + count]) == list(outs)]
    return {starts[0] + j: j for j in range(count)} if len(starts) == 1 and count else {}


def type_key(aval: Any) -> Any:
    """Equal for equal shapes and types of numbers."""
    return tuple(aval.shape), aval.dtype
