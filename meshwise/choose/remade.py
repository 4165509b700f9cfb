"""Which values each device makes for itself, in whatever part of them is wanted there.

What depends on nothing that is placed (an iota, a broadcast scalar, random bits) every device can
make a part of. So it can of what follows from these, and from arguments that every device has
whole, element by element: masks of positions, parameters in another form. No sharding of such a
value costs anything, it is never sent, and only parts that are wanted are held.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from meshwise._jax import JaxprEqn, Literal, Var, hint_p, is_mark
from meshwise.choose.carries import Carries
from meshwise.cost.fusion import is_elementwise, is_view
from meshwise.ir.bodies import OUTERMOST, scopes
from meshwise.ir.operators import RESHAPES, is_among
from meshwise.ir.program import Program, shape_of
from meshwise.ir.sharding import DimAxes
from meshwise.rules.registry import OpRule


def remade_equations(
    program: Program, rules: Sequence[OpRule], carries: Carries, lying: Mapping[Var, DimAxes]
) -> dict[int, int]:
    """The equations whose results each device makes for itself; `lying` is where inputs lie.

    And of how many elements: the most that are given or drawn, of what each follows from.
    """
    eqns, inside, readers = program.equations, scopes(program.equations), _readers(program)
    given = [v for v in program.inputs if not any(lying[v])] + program.jaxpr.jaxpr.constvars
    made_in = dict.fromkeys(given, OUTERMOST)
    made_of = {var: _elements(var) for var in given}
    found: dict[int, int] = {}
    follow = set[int]()
    for index, (eqn, rule, scope) in enumerate(zip(eqns, rules, inside, strict=True)):
        if carries[index] or not _makes_any_part(eqn, rule):
            continue
        operands = zip(eqn.invars, rule.factors.operands, strict=True)
        placed = {a for a, dims in operands if any(dims) and not isinstance(a, Literal)}
        # Not across the bounds of a loop: it would be made in each of its steps.
        read_in = {inside[reader] for v in eqn.outvars for reader in readers[v] if reader >= 0}
        here = read_in <= {scope} and all(made_in.get(v) == scope for v in placed)
        if not placed or (here and _is_cheap(eqn, rule)):
            own = [made_of[v] for v in placed] or map(_elements, eqn.outvars)
            found[index] = max(own)
            made_in.update(dict.fromkeys(eqn.outvars, scope))
            made_of.update(dict.fromkeys(eqn.outvars, found[index]))
            follow |= {index} if placed else set()
    return _without_steps_to_one(eqns, found, follow, readers)


def _without_steps_to_one(
    eqns: Sequence[JaxprEqn],
    found: dict[int, int],
    follow: Set[int],
    readers: Mapping[Var, Sequence[int]],
) -> dict[int, int]:
    """Without what follows from others and is read once, by what is none of them.

    That lies as its reader wants it anyway, and is decided with it.
    """
    kept = dict(found)
    for index in sorted(follow, reverse=True):
        read = [reader for v in eqns[index].outvars for reader in readers[v]]
        if len(read) <= 1 and not kept.keys() & set(read):
            del kept[index]
    return kept


def _readers(program: Program) -> Mapping[Var, list[int]]:
    """The equations that read each value; -1 where it is returned."""
    found: dict[Var, list[int]] = defaultdict(list)
    for index, eqn in enumerate(program.equations):
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                found[atom].append(index)
    for atom in program.outputs:
        if not isinstance(atom, Literal):
            found[atom].append(-1)
    return found


def _elements(var: Var) -> int:
    return math.prod(shape_of(var))


def _is_cheap(eqn: JaxprEqn, rule: OpRule) -> bool:
    """Whether it is part of its readers' kernels; a reshape is, where dims keep their elements."""
    return is_view(eqn) or is_among(eqn, RESHAPES) or is_elementwise(eqn, rule)


def _makes_any_part(eqn: JaxprEqn, rule: OpRule) -> bool:
    """Whether a part of the results takes only the same part of the operands."""
    factors = rule.factors
    if rule.opaque or eqn.effects or is_mark(eqn) or eqn.primitive is hint_p:
        return False
    if not factors.sizes or not factors.results:
        return False
    if factors.whole or factors.permuted or factors.compound:
        return False
    everything = set(range(len(factors.sizes)))
    return all({f for dim in dims for f in dim} == everything for dims in factors.results)
