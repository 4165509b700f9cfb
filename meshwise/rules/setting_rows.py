"""Few rows written of few rows: whoever has the place fetches what the others have of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshwise._jax import Literal, OfRows, set_rows
from meshwise.ir.operators import ADDITIONS, is_among
from meshwise.ir.program import shape_of
from meshwise.rules.dynamic_update import write_in_one, write_window
from meshwise.rules.factoring import Dim, Factoring
from meshwise.rules.halo import Fetch, fetch_rows
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.window import all_exchanges, exchanges


@register("set_rows")
def _set_rows_rule(application: Application) -> OpRule:
    params = application.params
    dim, rows = params["dimension"], params["rows"]
    factoring = Factoring()
    shape = application.operands[0].shape
    dims = [factoring.new(n, "permute" if d == dim else None) for d, n in enumerate(shape)]
    given = [*dims[:dim], factoring.new(rows, "whole"), *dims[dim + 1 :]]
    # What rows are read of may have some more than what they are written into, or less.
    read: list[list[Dim]] = [
        dims if start is not None else given if operand.shape else []
        for operand, start in zip(application.operands[1:], params["starts"], strict=True)
    ]
    return OpRule(
        factoring.rule([dims, *read], [dims]),
        linear=tuple(_linear(params["function"])),
        local=_local,
        exchanges=_exchanges,
    )


def _linear(function: OfRows) -> Iterator[tuple[int, ...]]:
    """What is written into and operands that the rows are linear in: all of them, or one."""
    everyone = tuple(k for k, var in enumerate(function.inputs) if shape_of(var))
    for given in dict.fromkeys([everyone, *((k,) for k in everyone)]):
        if _is_linear(function, {function.inputs[k] for k in given}):
            yield 0, *(k + 1 for k in given)


def _is_linear(function: OfRows, given: set[Any]) -> bool:
    """Whether rows are linear in some inputs, by operators that are so in any of them."""
    for eqn in function.eqns:
        is_given = [atom in given for atom in eqn.invars if not isinstance(atom, Literal)]
        if not any(is_given):
            continue
        others = [a for a in eqn.invars if isinstance(a, Literal) or a not in given]
        is_factor = eqn.primitive.name == "mul" and len(others) == 1
        is_divided = eqn.primitive.name == "div" and others == eqn.invars[1:]
        is_chosen = eqn.primitive.name == "select_n" and others == eqn.invars[:1]
        is_sum = is_among(eqn, ADDITIONS | {"neg", "rev"}) and not others
        if not (is_factor or is_divided or is_chosen or is_sum):
            return False
        given = given | {*eqn.outvars}
    return function.made in given


def _homes(context: LocalContext) -> list[bool]:
    """Which shards have some of the rows that are written."""
    dim, at, rows = (context.params[k] for k in ("dimension", "at", "rows"))
    block = context.local_shape(0)[dim]
    shards = range(context.mesh.size(context.operand_axes(0, dim)))
    return [at < (shard + 1) * block and shard * block < at + rows for shard in shards]


def _fetches(context: LocalContext) -> list[Fetch | None]:
    """The rows that are needed of each operand after the first where these are written."""
    dim, rows = context.params["dimension"], context.params["rows"]
    if not context.operand_axes(0, dim):
        return [None] * len(context.params["starts"])
    homes, found = _homes(context), list[Fetch | None]()
    for operand, start in enumerate(context.params["starts"], 1):
        if start is None:
            found.append(None)
            continue
        size, block = context.global_shape(operand)[dim], context.local_shape(operand)[dim]
        # The others need those behind the last one, of which there are none.
        found.append(Fetch(size, block, tuple(start if h else size for h in homes), rows))
    return found


def _exchanges(context: LocalContext) -> list[Exchange] | None:
    dim = context.params["dimension"]
    return all_exchanges(
        exchanges([(dim, fetch)], context.local_shape(k), context.itemsize(k))
        for k, fetch in enumerate(_fetches(context), 1)
        if fetch is not None
    )


def _local(context: LocalContext, x: Any, *operands: Any) -> list[Any]:
    params = context.params
    dim, at, rows = (params[k] for k in ("dimension", "at", "rows"))
    axes = context.operand_axes(0, dim)
    if not axes:
        return [set_rows(x, *operands, **params)]
    given = [
        operand if fetch is None else fetch_rows(operand, dim, axes, context.mesh, fetch)
        for operand, fetch in zip(operands, _fetches(context), strict=True)
    ]
    starts: list[Any] = [np.int32(at) if d == dim else np.int32(0) for d in range(x.ndim)]
    windows = [rows if d == dim else n for d, n in enumerate(context.global_shape(0))]
    ((factor,),) = context.rule.operands[0][dim : dim + 1]
    new, split = params["function"](*given), {dim: factor}
    if sum(_homes(context)) == 1:
        return write_in_one(context, x, new, starts, split)
    return write_window(context, x, new, starts, windows, split)
