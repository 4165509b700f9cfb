"""Arguments that are to lie alike, as one decision: a weight with its moments, those of all layers.

Arguments of one shape that meet in element-wise equations, as a weight and its moments do in an
optimiser, are one group: in another layout one of them would have to be moved. So are those that
meet one value in the same way, as weights of queries, keys and values do. Where groups are many,
arguments of one shape whose paths differ in numbers alone are one, too: the same weight of every
layer.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshwise.ir.program import Program, bytes_of, shape_of
from meshwise.planner.meeting import laid_alike
from meshwise.rules.registry import OpRule

MOST_GROUPS = 24  # more are joined by their paths
# Of more groups than so many those with less than this part of all bytes follow from the others.
FEW, SMALL_PART = 8, 1e-2


@dataclass(frozen=True)
class Group:
    """Arguments, by position, that take one sharding: of one shape, with their bytes in all.

    One is kept if a step makes some of it anew for the next. One that follows is not decided of:
    it lies as completion has it.
    """

    arguments: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    is_kept: bool
    follows: bool = False


def groups_of(
    program: Program,
    rules: Sequence[OpRule],
    free: Collection[int],
    kept: Collection[int],
) -> tuple[Group, ...]:
    """The groups among the `free` arguments of more than one element, the largest first.

    Where they are many, small ones of what a step makes anew, `kept`, follow; of others none: what
    little a batch of tokens takes says how all that is computed of it lies.
    """
    together = laid_alike(program, rules)
    classes: dict[object, list[int]] = defaultdict(list)
    for argument in sorted(free):
        var = program.inputs[argument]
        if any(size > 1 for size in shape_of(var)):
            classes[together.of(var), shape_of(var)].append(argument)
    found = list(classes.values())
    if len(found) > MOST_GROUPS:
        found = _joined_by_path(program, found)
    least = SMALL_PART * bytes_of(*program.inputs) if len(found) > FEW else 0.0
    groups = []
    for members in found:
        variables = [program.inputs[i] for i in members]
        shape, size = shape_of(variables[0]), bytes_of(*variables)
        is_kept = not set(kept).isdisjoint(members)
        groups.append(Group(tuple(members), shape, size, is_kept, is_kept and size < least))
    return tuple(sorted(groups, key=lambda one: (one.follows, -one.bytes, one.arguments)))


def _joined_by_path(program: Program, classes: Sequence[list[int]]) -> list[list[int]]:
    """Classes as one where their first arguments' shapes are equal, and paths but for numbers."""
    joined: dict[object, list[int]] = defaultdict(list)
    for members in classes:
        paths = {_without_numbers(program.in_paths[i]) for i in members}
        joined[min(paths), shape_of(program.inputs[members[0]])] += members
    return [sorted(members) for members in joined.values()]


def _without_numbers(path: str) -> str:
    """A path with its numbers left out, but for that of the argument itself."""
    name, bracket, rest = path.partition("[")
    first, close, rest = rest.partition("]") if name == "args" else ("", "", rest)
    return name + bracket + first + close + re.sub(r"\d+", "*", rest)
