"""The marks of loops and branches: one sharding for what is carried, stepped through or joined.

Marks compute nothing. `carry` and `next` of one carried value are decided together (the cost graph
makes them one node), so what goes round lies the same in every step. Along the dim of the steps a
stack is whole: what lies in shards of steps is moved to other dims before the loop, which costs a
shard's worth, and a step's part is gathered in the loop, if it is wanted whole there.
"""

from meshwise.rules.factoring import Factoring, shapes
from meshwise.rules.registry import Application, OpRule, register


@register("mark_open", "mark_body", "mark_end", "mark_close")
def _bracket_rule(application: Application) -> OpRule:
    return OpRule(Factoring().rule([], []))


@register("mark_test", "mark_branch_index")
def _scalar_rule(application: Application) -> OpRule:
    return OpRule(Factoring().rule([[]], []))


@register("mark_carry")
def _carry_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(shapes(application.results)[0])
    return OpRule(factoring.rule([dims], [dims]), moves=True)


@register("mark_next")
def _next_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(shapes(application.results)[0])
    return OpRule(factoring.rule([dims, dims], [dims]), moves=True)


@register("mark_join")
def _join_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(shapes(application.results)[0])
    branches = range(len(application.operands))
    factors = factoring.rule([dims for _ in branches], [dims])
    return OpRule(factors, linear=(tuple(branches),), moves=True)


@register("mark_step")
def _step_rule(application: Application) -> OpRule:
    factoring = Factoring()
    steps, *_ = shapes(application.operands)[0]
    dims = factoring.dims(shapes(application.results)[0])
    whole = factoring.new(steps, "whole")
    return OpRule(factoring.rule([[whole, *dims]], [dims]))


@register("mark_stack")
def _stack_rule(application: Application) -> OpRule:
    factoring = Factoring()
    steps, *_ = shapes(application.results)[0]
    dims = factoring.dims(shapes(application.operands)[0])
    whole = factoring.new(steps, "whole")
    return OpRule(factoring.rule([dims], [[whole, *dims]]), linear=((0,),), moves=True)
