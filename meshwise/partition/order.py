"""The order in which equations are emitted: a sum's followers come right after it.

What a sum passes through on its way to its reduction (a scale, a transpose, an addition of other
sums) is emitted as soon as its operands exist. Then the sum is ready for its reduction early, and
small reductions that wait for the same axes can be done together.
"""

from collections.abc import Sequence

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.choose.plan import Plan
from meshwise.ir.bodies import Item


def emission_order(items: Sequence[Item], plan: Plan) -> list[Item]:
    """The items of one body, each once and after those that make what it reads."""
    eqns = plan.program.equations
    reads, makes = zip(*(_reads_and_makes(item, eqns) for item in items), strict=True)
    missing = set().union(*makes)
    followers: dict[Var, int] = {}
    for place, item in enumerate(items):
        if isinstance(item, int) and plan.equations[item].strategy.carried:
            unreduced = zip(eqns[item].invars, plan.equations[item].operands, strict=True)
            followers.update(
                {a: place for a, s in unreduced if s.unreduced and not isinstance(a, Literal)}
            )
    order: dict[int, None] = {}
    for place in range(len(items)):
        waiting = [place]
        while waiting:
            found = waiting.pop()
            if found in order or not missing.isdisjoint(reads[found]):
                continue
            order[found] = None
            missing.difference_update(makes[found])
            waiting += [followers[v] for v in makes[found] if v in followers]
    return [items[place] for place in order]


def _reads_and_makes(item: Item, eqns: Sequence[JaxprEqn]) -> tuple[set[Var], dict[Var, None]]:
    """What an item reads from around it, and what it makes, in an order."""
    positions = [item] if isinstance(item, int) else list(item.positions())
    reads = {a for p in positions for a in eqns[p].invars if not isinstance(a, Literal)}
    makes = dict.fromkeys(v for p in positions for v in eqns[p].outvars)
    return reads - makes.keys(), makes
