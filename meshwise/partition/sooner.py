"""Sums are scattered before anything is computed of them.

A linear equation that a sum passes through alone belongs to the node that makes the sum, so that
both move together. Where the sum is scattered after it, each device computes with all of its term
what it could with its own part of the sum: every device scales the whole gradient of weights that
lie in shards. Here the scatter moves before such equations. As many bytes are sent.

And before a hint that says that the sum is whole, where nobody reads it so: the gradient of weights
that a hint gathers has that hint too, while what is kept of it lies in shards. So are rows cut
before a loop stacks them, where only parts of the stack are read.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshwise._jax import JaxprEqn, Literal, Var, is_mark, stack_p
from meshwise.choose.carries import Use, uses_of
from meshwise.choose.plan import EquationPlan, Plan
from meshwise.choose.tree import Edge
from meshwise.ir import bodies
from meshwise.ir.factors import FactorRule, Strategy, fits, operand_sharding
from meshwise.ir.program import shape_of, type_of
from meshwise.ir.sharding import Sharding, is_part
from meshwise.rules.registry import OpRule


def scatter_sooner(plan: Plan) -> Plan:
    """The plan with each sum scattered before the linear equations that it passes through alone."""
    plan = _parts_alone(plan)
    program = plan.program
    equations, copies = list(plan.equations), dict(plan.copies)
    uses = uses_of(program)
    scopes, read_in = bodies.scopes(program.equations), bodies.read_in(program.equations)
    makers = {v: i for i, eqn in enumerate(program.equations) for v in eqn.outvars}

    for index, eqn in reversed(list(enumerate(program.equations))):
        position = _passing(eqn, plan.rules[index], equations[index])
        if position is None or index in program.hints:
            continue
        read, (made,) = eqn.invars[position], eqn.outvars
        assert isinstance(read, Var), "a literal is no sum"
        if len(uses[read]) > 1 or read in copies or read not in makers:
            continue
        if is_mark(program.equations[makers[read]]):  # what goes round a loop is read again
            continue
        near = [scopes[makers[read]], *(read_in(*use) for use in uses[made] if use[0] >= 0)]
        if any(scope != scopes[index] for scope in near):
            continue
        (source,) = equations[index].results
        scatter = _only_scatter(copies.get(made, ()), source)
        if scatter is None or any(_wanted(plan, equations, use) == source for use in uses[made]):
            continue
        moved = _moved(plan.rules[index].factors, equations[index], position, scatter[1])
        cuts = [
            (atom, (held, needed))
            for k, atom in enumerate(eqn.invars)
            if k != position and not isinstance(atom, Literal)
            for held, needed in [(equations[index].operands[k], moved.operands[k])]
            if held != needed
        ]
        if not fits(plan.rules[index].factors, moved.strategy, program.mesh):
            continue
        if not all(is_part(*edge) for _, edge in cuts):
            continue
        copies[made] = tuple([edge for edge in copies[made] if edge != scatter])
        copies[read] = ((equations[index].operands[position], moved.operands[position]),)
        for atom, (held, needed) in cuts:
            edges = copies.get(atom, ())
            if needed not in {sharding for edge in edges for sharding in edge}:
                copies[atom] = (*edges, (held, needed))
        equations[index] = moved
    return replace(plan, equations=tuple(equations), copies=copies)


def _parts_alone(plan: Plan) -> Plan:
    """The plan with rows cut before they are stacked, and sums scattered before a hint.

    That is done where all who read a stack, or what has the hint, read the same part of it.
    """
    program, uses = plan.program, uses_of(plan.program)
    equations, copies = list(plan.equations), dict(plan.copies)

    for index, eqn in reversed(list(enumerate(program.equations))):
        is_stack = eqn.primitive is stack_p
        if not (is_stack or index in program.hints) or isinstance(eqn.invars[0], Literal):
            continue
        read, made, said = eqn.invars[0], eqn.outvars[0], equations[index].results[0]
        edges = copies.get(made, ())
        wanted = {_wanted(plan, equations, use) for use in uses[made]}
        if len(edges) != 1 or wanted != {edges[0][1]} or not is_part(said, edges[0][1]):
            continue
        target = edges[0][1]
        if target.unreduced or (is_stack and target.dims[0]):
            continue
        whole = equations[index].operands[0]
        moved = _moved(plan.rules[index].factors, equations[index], 0, target)
        (part,) = moved.operands
        if part == whole:  # a dim of one element, which is all of no factor
            continue
        before = copies.get(read, ())
        wanting = [use for use in uses[read] if _wanted(plan, equations, use) == whole]
        is_alone = wanting == [(index, 0)] and not any(edge[0] == whole for edge in before)
        if is_alone and any(edge[1] == whole and edge[0].unreduced for edge in before):
            copies[read] = tuple([(e[0], part) if e[1] == whole else e for e in before])
        elif not is_stack or whole.unreduced:
            continue
        elif part not in {sharding for edge in before for sharding in edge}:
            copies[read] = (*before, (whole, part))
        del copies[made]
        equations[index] = moved
    return replace(plan, equations=tuple(equations), copies=copies)


def _wanted(plan: Plan, equations: Sequence[EquationPlan], use: Use) -> Sharding:
    """How a value is read at one place."""
    index, position = use
    return plan.out_shardings[position] if index < 0 else equations[index].operands[position]


def _passing(eqn: JaxprEqn, rule: OpRule, decided: EquationPlan) -> int | None:
    """The operand that is a sum, where an equation makes an array as large of that one alone."""
    sums = [k for k, sharding in enumerate(decided.operands) if sharding.unreduced]
    if len(sums) != 1 or len(eqn.outvars) != 1 or is_mark(eqn):
        return None
    if rule.opaque or rule.exchanges is not None or rule.factors.reductions:
        return None
    read, made = eqn.invars[sums[0]], eqn.outvars[0]
    alike = type_of(read).dtype == type_of(made).dtype
    return sums[0] if alike and sorted(shape_of(read)) == sorted(shape_of(made)) else None


def _only_scatter(edges: Sequence[Edge], source: Sharding) -> Edge | None:
    """The one reshard of what is made, if all it does is to scatter it."""
    first = [edge for edge in edges if edge[0] == source]
    if len(first) != 1:
        return None
    target = first[0][1]
    added = {a for axes in target.dims for a in axes} - {a for axes in source.dims for a in axes}
    scatters = added and added.isdisjoint(target.unreduced) and added.issubset(source.unreduced)
    return first[0] if scatters and is_part(source.reduced, target.reduced) else None


def _moved(
    rule: FactorRule, decided: EquationPlan, position: int, target: Sharding
) -> EquationPlan:
    """An equation that makes its result as it is wanted, of what is scattered or cut already."""
    axes = list(decided.strategy.axes)
    for factors, own in zip(rule.results[0], target.dims, strict=True):
        if len(factors) == 1:
            axes[factors[0]] = own
    strategy = Strategy(tuple(axes), target.unreduced)
    operands = tuple(
        operand_sharding(rule, strategy, k, carries=k == position)
        for k in range(len(rule.operands))
    )
    return replace(decided, strategy=strategy, operands=operands, results=(target,))
