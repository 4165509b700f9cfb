"""What is added to rows at positions, where it lies in shards: a sum by itself.

`x.at[i].add(u)` is a sum over the devices that share `u`, and would be reduced at once to be added
to `x`. As `x + zeros.at[i].add(u)` the sum travels on as any other does: several additions to the
same rows are reduced together, and those in the steps of a loop once after it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import Program, bytes_of, type_of
from meshwise.propagate.completion import Completion
from meshwise.propagate.rewriting import rewritten, without_unread
from meshwise.rules.registry import OpRule

_ADDING = (lax.scatter_add_p, lax.scatter_sub_p)


def add_apart(program: Program, rules: Sequence[OpRule], completion: Completion) -> Program:
    """The program with such additions apart from what they are added to; itself without any.

    One that is alone, in no loop, stays as it is: it is reduced as soon either way.
    """
    reads = _reads(program)
    found = _additions(program, rules, completion)
    made = {program.equations[index].outvars[0] for index in found}
    made |= {v for e in program.equations if e.primitive is _jax.carry_p for v in e.outvars}
    added_to = {base for base in found.values() if base in made and reads[base] == 1}
    # For a result that was written so what is added to what.
    parts: dict[Var, tuple[Var, Var]] = {}
    instead: dict[int, Sequence[JaxprEqn]] = {}
    for index, eqn in enumerate(program.equations):
        if _jax.is_mark(eqn):
            parts = {}  # what is computed in another body stays there
        if index not in found or (base := found[index]) not in added_to:
            continue
        (result,) = eqn.outvars
        base, *more = parts.get(base, (base,))
        nothing = _zeros(eqn)
        own = eqn.replace(invars=[*nothing.outvars, *eqn.invars[1:]], outvars=[_like(result)])
        sums = [_sum([*more, *own.outvars], eqn)] if more else []
        (total,) = (*sums, own)[0].outvars
        parts[result] = base, total
        instead[index] = [nothing, own, *sums, _sum([base, total], eqn, result)]
    return rewritten(program, without_unread(program, instead, set()))


def _reads(program: Program) -> Counter[Var]:
    """How often each value is read; that what is carried comes round again is no reading of it."""
    reads = Counter(a for a in program.outputs if not isinstance(a, Literal))
    for eqn in program.equations:
        read = eqn.invars[1:] if eqn.primitive is _jax.next_p else eqn.invars
        reads.update(a for a in read if not isinstance(a, Literal))
    return reads


def _additions(program: Program, rules: Sequence[OpRule], completion: Completion) -> dict[int, Var]:
    """The equations that add updates in shards to rows of an array of numbers, and that array.

    So many updates that they take longer to gather than the array takes to be reduced.
    """
    found: dict[int, Var] = {}
    for index, (eqn, rule) in enumerate(zip(program.equations, rules, strict=True)):
        if eqn.primitive not in _ADDING:
            continue
        base, _, updates = eqn.invars
        if isinstance(base, Literal) or isinstance(updates, Literal):
            continue
        summed = rule.factors.reduction_of.keys()
        lies = zip(rule.factors.operands[2], completion.dims[updates], strict=True)
        in_shards = any(axes and not summed.isdisjoint(dim) for dim, axes in lies)
        gathered, reduced = bytes_of(*eqn.invars[1:]), 2 * bytes_of(base)
        if in_shards and gathered >= reduced:
            found[index] = base
    return found


def _zeros(eqn: JaxprEqn) -> JaxprEqn:
    """What makes zeros in the place of what an equation adds to."""
    aval = type_of(eqn.outvars[0])
    zero = Literal(np.zeros((), aval.dtype), aval.update(shape=()))
    params = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
    return _jax.new_eqn(lax.broadcast_in_dim_p, [zero], [_like(eqn.outvars[0])], params, eqn)


def _sum(operands: Sequence[Var], eqn: JaxprEqn, result: Var | None = None) -> JaxprEqn:
    made = result or _like(eqn.outvars[0])
    return _jax.new_eqn(lax.add_p, list(operands), [made], {}, eqn)


def _like(var: Var) -> Var:
    return _jax.new_var(var.aval)
