"""Which results are the next values of which arguments: those of a step's state."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwise._jax import Literal
from meshwise.ir.program import Program, type_of
from meshwise.planner.meeting import meeting
from meshwise.rules.registry import OpRule


def next_values(
    program: Program, rules: Sequence[OpRule], likely: Mapping[int, Collection[int]]
) -> dict[int, int]:
    """Arguments of a program, by position, and the results that are their next values.

    An argument that meets a result of its type element by element is its last value; of several
    the one that is `likely`: the arguments that trees and names suggest for each result. Where
    none meets it, one that is likely is; and where one result and one argument of a type are left,
    they belong together, as the vector of a power iteration and the next one.
    """
    classes = meeting(program, rules)
    types = [_type(var) for var in program.inputs]
    tied: dict[int, int] = {}
    left: list[int] = []
    for result, atom in enumerate(program.outputs):
        met = [
            argument
            for argument, var in enumerate(program.inputs)
            if not isinstance(atom, Literal)
            and types[argument] == _type(atom)
            and argument not in tied
            and classes.of(var) is classes.of(atom)
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
            if argument not in tied and types[argument] == _type(program.outputs[result])
        ]
        if suggested:
            tied[suggested[0]] = result
    return tied | _alone(types, [_type(a) for a in program.outputs], tied)


def _alone(ins: Sequence[Any], outs: Sequence[Any], tied: Mapping[int, int]) -> dict[int, int]:
    """An argument and a result that alone are left of a type, but for single numbers."""
    arguments: dict[Any, list[int]] = defaultdict(list)
    results: dict[Any, list[int]] = defaultdict(list)
    for argument, kind in enumerate(ins):
        if argument not in tied and any(size > 1 for size in kind[0]):
            arguments[kind].append(argument)
    for result, kind in enumerate(outs):
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
