"""Rolls: each shard takes the rows that come round to it, the border from its neighbours."""

from typing import Any

from meshwise._jax import roll
from meshwise.rules.factoring import Factoring
from meshwise.rules.halo import Fetch, fetch_rows
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.window import exchanges


@register("roll")
def _roll_rule(application: Application) -> OpRule:
    rolled = application.params["dimension"]
    factoring = Factoring()
    dims = [
        factoring.new(n, "permute" if d == rolled else None)
        for d, n in enumerate(application.operands[0].shape)
    ]
    return OpRule(
        factoring.rule([dims], [dims]),
        linear=((0,),),
        local=_roll_local,
        exchanges=_roll_exchanges,
    )


def _fetch(context: LocalContext) -> Fetch | None:
    dim = context.params["dimension"]
    axes = context.operand_axes(0, dim)
    if not axes:
        return None
    block, size = context.local_shape(0)[dim], context.global_shape(0)[dim]
    firsts = range(0, block * context.mesh.size(axes), block)
    starts = tuple(first - context.params["shift"] for first in firsts)
    needed = tuple(min(block, max(size - first, 0)) for first in firsts)
    return Fetch(size, block, starts, block, wraps=True, needed=needed)


def _roll_exchanges(context: LocalContext) -> list[Exchange] | None:
    fetch = _fetch(context)
    fetches = [] if fetch is None else [(context.params["dimension"], fetch)]
    return exchanges(fetches, context.local_shape(0), context.itemsize(0))


def _roll_local(context: LocalContext, operand: Any) -> list[Any]:
    fetch, dim = _fetch(context), context.params["dimension"]
    if fetch is None:
        return [roll(operand, **context.params)]
    return [fetch_rows(operand, dim, context.operand_axes(0, dim), context.mesh, fetch)]
