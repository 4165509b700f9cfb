"""Completion of a program, and the rewritings that only completed shardings call for."""

from collections.abc import Iterator, Sequence
from math import inf

from meshwise.ir.program import Program
from meshwise.propagate.additions import add_apart
from meshwise.propagate.completion import Completion
from meshwise.propagate.constants import split_constants
from meshwise.propagate.extremes import join_extremes
from meshwise.propagate.ghosts import rows_beside
from meshwise.propagate.grids import MOST
from meshwise.propagate.pads import pad_inside
from meshwise.propagate.propagate import propagate
from meshwise.propagate.reversals import cancel_reversals
from meshwise.propagate.transforms import split_transforms
from meshwise.rules.registry import OpRule, describe_all

Completed = tuple[Program, tuple[OpRule, ...], Completion]


def complete(program: Program, rules: Sequence[OpRule] | None = None) -> Completed:
    """A program, what its equations mean, and a sharding for each of its values.

    Where shardings call for other equations (pads inside, transforms one dim after the other, the
    largest and where it is at once, additions apart), the program is rewritten, described and
    completed once more.
    `rules` are what its equations mean, where that is known.
    """
    program, described = split_constants(program, rules or describe_all(program.equations))
    program, described = cancel_reversals(program, described)
    completion = propagate(program, described)
    other = pad_inside(program, described, completion)
    other = join_extremes(split_transforms(other, completion), completion)
    if other is not program:
        program, described, completion = _completed(other)
    return _with_additions_apart((program, described, completion))


def in_parts(completed: Completed) -> Iterator[Completed]:
    """The same with rows beside others in parts: along one dim, along one more, and so on.

    First all grids; then, from the first dim on along which there are such, but for those for which
    more is shifted than they are. Which is best is for plans to say. Along several dims parts
    multiply: none has more than `MOST` times as many equations.
    """
    most = MOST * len(completed[0].equations)
    way, fork = completed, None
    for shifted in (inf, 1.0):
        while True:
            other, found = rows_beside(*way, shifted)
            if other is way[0] or len(other.equations) > most:
                break
            fork = way if fork is None and found > 1 else fork
            way = _with_additions_apart(_completed(other))
            yield way
        if fork is None:
            break
        way = fork


def _with_additions_apart(completed: Completed) -> Completed:
    other = add_apart(*completed)
    return completed if other is completed[0] else _completed(other)


def _completed(program: Program) -> Completed:
    rules = describe_all(program.equations)
    return program, rules, propagate(program, rules)
