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

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import Program, application_key, atom_key, bytes_of, shape_of
from meshwise.rules.registry import OpRule

MOST_GROUPS = 24  # more are joined by their paths
# A group with less than this part of all bytes that a step keeps follows from the others.
SMALL_PART = 1e-2


@dataclass(frozen=True)
class Group:
    """Arguments, by position, that take one sharding: of one shape, with their bytes in all.

    One is kept that a step makes anew for the next.
    """

    arguments: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    is_kept: bool


def groups_of(
    program: Program,
    rules: Sequence[OpRule],
    free: Collection[int],
    kept: Collection[int],
) -> tuple[Group, ...]:
    """The groups among the `free` arguments that are worth a decision, the largest first.

    Of arguments that a step makes anew, `kept`, small ones are left out; of others none is: what
    little a batch of tokens takes says how all that is computed of it lies.
    """
    together = _meeting(program, rules)
    classes: dict[object, list[int]] = defaultdict(list)
    for argument in sorted(free):
        var = program.inputs[argument]
        if any(size > 1 for size in shape_of(var)):
            classes[together[var], shape_of(var)].append(argument)
    found = list(classes.values())
    if len(found) > MOST_GROUPS:
        found = _joined_by_path(program, found)
    groups = [
        Group(
            tuple(members),
            shape_of(program.inputs[members[0]]),
            bytes_of(*(program.inputs[i] for i in members)),
            set(kept).issuperset(members),
        )
        for members in found
    ]
    least = SMALL_PART * bytes_of(*program.inputs)
    worth = [g for g in groups if g.bytes >= least or not g.is_kept]
    return tuple(sorted(worth, key=lambda group: (-group.bytes, group.arguments)))


def _meeting(program: Program, rules: Sequence[OpRule]) -> dict[Var, Var]:
    """For each argument one that stands for all that are to lie as it does."""
    parent: dict[Var, Var] = {}
    arguments = set(program.inputs)

    def root(var: Var) -> Var:
        while (above := parent.setdefault(var, var)) is not var:
            parent[var] = parent[above]
            var = parent[var]
        return var

    met: dict[object, Var] = {}
    for eqn, rule in zip(program.equations, rules, strict=True):
        for var in _as_result(eqn, rule):
            parent[root(var)] = root(eqn.outvars[0])
        read = {atom for atom in eqn.invars if isinstance(atom, Var)}
        for var in arguments & read if len(read) > 1 else ():
            others = tuple([a.aval if a is var else atom_key(a) for a in eqn.invars])
            key = application_key(eqn, others)
            if key is not None:
                parent[root(var)] = root(met.setdefault(key, var))
    return {var: root(var) for var in program.inputs}


def _as_result(eqn: JaxprEqn, rule: OpRule) -> list[Var]:
    """The operands whose dims are those of an equation's only result, one by one."""
    factors = rule.factors
    if rule.opaque or factors.permuted or factors.whole or len(factors.results) != 1:
        return []
    (dims,) = factors.results
    pairs = zip(eqn.invars, factors.operands, strict=True)
    return [atom for atom, own in pairs if own == dims and dims and not isinstance(atom, Literal)]


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
