"""The order in which equations are emitted: a sum's followers come right after it.

What a sum passes through on its way to its reduction (a scale, a transpose, an addition of other
sums) is emitted as soon as its operands exist. Then the sum is ready for its reduction early, and
small reductions that wait for the same axes can be done together.
"""

from meshwise._jax import Literal, Var
from meshwise.choose.plan import Plan


def emission_order(plan: Plan) -> list[int]:
    """Every equation once, each after those that make its operands."""
    program = plan.program
    available = {*program.inputs, *program.jaxpr.jaxpr.constvars}
    followers: dict[Var, int] = {}
    for index, (eqn, decided) in enumerate(zip(program.equations, plan.equations, strict=True)):
        if decided.strategy.carried:
            unreduced = zip(eqn.invars, decided.operands, strict=True)
            followers.update(
                {a: index for a, s in unreduced if s.unreduced and not isinstance(a, Literal)}
            )
    order: dict[int, None] = {}
    for index in range(len(program.equations)):
        waiting = [index]
        while waiting:
            found = waiting.pop()
            eqn = program.equations[found]
            exist = all(isinstance(a, Literal) or a in available for a in eqn.invars)
            if found in order or not exist:
                continue
            order[found] = None
            available.update(eqn.outvars)
            waiting += [followers[v] for v in eqn.outvars if v in followers]
    return list(order)
