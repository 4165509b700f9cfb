"""Which results are the next values of which arguments: those of a step's state."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwise._jax import Literal
from meshwise.ir.program import Program, type_of
from meshwise.planner.meeting import meeting
from meshwise.rules.registry import OpRule


def next_values(
    program: Program,
    rules: Sequence[OpRule],
    likely: Mapping[int, Collection[int]],
    first: int = 0,
) -> dict[int, int]:
    """Arguments of a program, from the `first` on, and the results that are their next values.

    A result of which a hint inside says how it lies is none: it may lie otherwise on purpose.

    An argument that meets a result of its type element by element is its last value; of several
    the one that is `likely`: the arguments that trees and names suggest for each result. Where
    none meets it, one that is likely is; and where one result and one argument of a type are left,
    they belong together, as the vector of a power iteration and the next one.
    """
    classes = meeting(program, rules)
    types = {i: _type(var) for i, var in enumerate(program.inputs) if i >= first}
    hinted = {v for index in program.hints for v in program.equations[index].outvars}
    results = {
        result: atom
        for result, atom in enumerate(program.outputs)
        if isinstance(atom, Literal) or atom not in hinted
    }
    tied: dict[int, int] = {}
    left: list[int] = []
    for result, atom in results.items():
        met = [
            argument
            for argument in types
            if not isinstance(atom, Literal)
            and types[argument] == _type(atom)
            and argument not in tied
            and classes.of(program.inputs[argument]) is classes.of(atom)
        ]
        best = [i for i in met if program.inputs[i] is atom]
        best += [i for i in likely.get(result, ()) if i in met] + met
        if best:
            tied[best[0]] = result
        else:
            left.append(result)
    for result in left:
        suggested = [
            argument
            for argument in likely.get(result, ())
            if argument not in tied and types.get(argument) == _type(results[result])
        ]
        if suggested:
            tied[suggested[0]] = result
    return tied | _alone(types, {i: _type(a) for i, a in results.items()}, tied)


def _alone(
    ins: Mapping[int, Any], outs: Mapping[int, Any], tied: Mapping[int, int]
) -> dict[int, int]:
    """An argument and a result that alone are left of a type, but for single numbers."""
    arguments: dict[Any, list[int]] = defaultdict(list)
    results: dict[Any, list[int]] = defaultdict(list)
    for argument, kind in ins.items():
        if argument not in tied and any(size > 1 for size in kind[0]):
            arguments[kind].append(argument)
    for result, kind in outs.items():
        if result not in tied.values():
            results[kind].append(result)
    return {
        found[0]: results[kind][0]
        for kind, found in arguments.items()
        if len(found) == len(results[kind]) == 1
    }


def _type(atom: Any) -> tuple[tuple[int, ...], Any]:
    aval = type_of(atom)
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)
