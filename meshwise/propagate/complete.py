"""Completion of a program, and the rewritings that only completed shardings call for."""

from collections.abc import Sequence

from meshwise.ir.program import Program
from meshwise.propagate.additions import add_apart
from meshwise.propagate.completion import Completion
from meshwise.propagate.constants import split_constants
from meshwise.propagate.extremes import join_extremes
from meshwise.propagate.ghosts import rows_beside
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
    # Of what has rows beside others along several dims, along one of these at a time.
    while (other := rows_beside(program, described, completion)) is not program:
        program, described, completion = _completed(other)
    other = add_apart(program, described, completion)
    return (program, described, completion) if other is program else _completed(other)


def _completed(program: Program) -> Completed:
    rules = describe_all(program.equations)
    return program, rules, propagate(program, rules)
