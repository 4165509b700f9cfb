"""`max(x)` and `argmax(x)` along a sharded dim: one exchange of pairs serves both.

An `argmax` sends the largest number of each shard with its place, so the maximum of the same rows
is known then: the largest logit, where the likeliest token is wanted too; the score of the best
path to a state, and where that comes from.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal
from meshwise.ir.bodies import scopes
from meshwise.ir.program import Program, type_of
from meshwise.propagate.completion import Completion
from meshwise.propagate.rewriting import rewritten

# The primitive that says where, by the one that says what; one that says both.
_WHERE: Mapping[Any, Any] = {
    lax.reduce_max_p: lax.argmax_p,
    lax.reduce_min_p: lax.argmin_p,
    lax.reduce_or_p: lax.argmax_p,
    lax.reduce_and_p: lax.argmin_p,
}
_BOTH: Mapping[Any, Any] = {
    lax.argmax_p: _jax.max_and_argmax_p,
    lax.argmin_p: _jax.min_and_argmin_p,
}


def join_extremes(program: Program, completion: Completion) -> Program:
    """The program with extremes and their places found together along dims that are sharded."""
    instead: dict[int, list[JaxprEqn]] = {}
    waiting: dict[Any, int] = {}
    for index, (eqn, scope) in enumerate(
        zip(program.equations, scopes(program.equations), strict=True)
    ):
        search = _WHERE.get(eqn.primitive, eqn.primitive)
        if search not in _BOTH or not _is_exchanged(eqn, completion):
            continue
        key = scope, search, eqn.invars[0], eqn.params["axes"]
        is_where = eqn.primitive is search
        other = waiting.pop((*key, not is_where), None)
        if other is None:
            waiting.setdefault((*key, is_where), index)
            continue
        what, where = (other, index) if is_where else (index, other)
        instead[other] = [_both(program.equations[what], program.equations[where])]
        instead[index] = []
    return rewritten(program, instead)


def _is_exchanged(eqn: JaxprEqn, completion: Completion) -> bool:
    """Whether an equation finds an extreme along one dim that is sharded, or its place."""
    operand, axes = eqn.invars[0], eqn.params["axes"]
    if isinstance(operand, Literal) or len(axes) != 1 or operand not in completion.dims:
        return False
    dtype = type_of(operand).dtype
    bitwise = eqn.primitive in (lax.reduce_or_p, lax.reduce_and_p) and dtype != np.bool_
    return not bitwise and bool(completion.dims[operand][axes[0]])


def _both(what: JaxprEqn, where: JaxprEqn) -> JaxprEqn:
    results = [*what.outvars, *where.outvars]
    return _jax.new_eqn(_BOTH[where.primitive], where.invars, results, where.params, where)
