"""Loops whose steps do not depend on each other: what `lax.map` makes, and its gradient.

Each device takes the steps of its own part of the leading dim. No step may read what another one
made: a value that is carried along is either handed on as it is, or it is a sum that steps only
add to, which is summed over devices in the end. All other loops are computed whole, and so are
all dims of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import (
    ClosedJaxpr,
    JaxprEqn,
    bind,
    jaxpr_as_fun,
    may_not_end,
    scan_counts,
    without_hints,
)
from meshwise.flatten import flatten
from meshwise.ir.bodies import runs
from meshwise.ir.operators import adds_to
from meshwise.ir.program import bytes_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.factoring import Factoring, shapes
from meshwise.rules.registry import (
    Application,
    Exchange,
    LocalContext,
    OpRule,
    all_reduce_of,
    describe_all,
    opaque_rule,
    register,
)


@dataclass(frozen=True)
class _Loop:
    """A scan: its body, where its constants and carried values end, and what becomes of these."""

    body: ClosedJaxpr
    consts: int
    carried: int
    is_summed: tuple[bool, ...]

    @property
    def summed(self) -> list[int]:
        """The results that are sums."""
        return [k for k, is_sum in enumerate(self.is_summed) if is_sum]

    @property
    def sums_alone(self) -> bool:
        """Whether all results are sums, which then need not be reduced by the loop itself."""
        return len(self.summed) == len(self.body.jaxpr.outvars) > 0


def _independent(eqn: JaxprEqn) -> _Loop | None:
    """A scan whose steps do not depend on each other; None for any other."""
    if eqn.effects:
        return None
    body = flatten(eqn.params["jaxpr"])
    consts, carried = scan_counts(eqn)
    becomes = [_becomes(body, consts + k, k) for k in range(carried)]
    if None in becomes:
        return None
    return _Loop(body, consts, carried, tuple(b == "sum" for b in becomes))


def has_independent_steps(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan whose steps do not depend on each other, but for sums."""
    is_loop = eqn.primitive.name == "scan" and not _jax.has_region(eqn.params["jaxpr"])
    return is_loop and _independent(eqn) is not None


def _becomes(body: ClosedJaxpr, operand: int, result: int) -> str | None:
    """Whether a carried value is handed on ("same"), only added to ("sum"), or neither."""
    value = body.jaxpr.invars[operand]
    if body.jaxpr.outvars[result] is value:
        return "same"
    while True:
        reads = [e for e in body.jaxpr.eqns for a in e.invars if a is value]
        returns = [k for k, a in enumerate(body.jaxpr.outvars) if a is value]
        if not reads and returns == [result]:
            return "sum"
        if len(reads) != 1 or returns or not adds_to(reads[0], value):
            return None
        value = reads[0].outvars[0]


@register("scan")
def _scan_rule(application: Application) -> OpRule:
    eqn = application.eqn
    loop = _independent(eqn)
    if loop is None:
        return opaque_rule(application)
    factoring = Factoring()
    kind = Reduction.SUM if loop.sums_alone else "permute" if loop.summed else None
    steps = factoring.new(eqn.params["length"], kind, permuted=bool(loop.summed))

    def stepped(shape: Sequence[int]) -> list[Any]:
        return [steps, *factoring.dims(shape[1:], "whole")]

    first = loop.consts + loop.carried
    operands = shapes(application.operands)
    known = [factoring.dims(shape, "whole") for shape in operands[:first]]
    each = [stepped(shape) for shape in operands[first:]]
    made = [stepped(shape) for shape in shapes(application.results)[loop.carried :]]
    flops, calls = _work(eqn.params["jaxpr"])
    return OpRule(
        factoring.rule([*known, *each], [*known[loop.consts :], *made]),
        local=partial(_scan_local, loop),
        exchanges=partial(_scan_exchanges, loop) if kind == "permute" else None,
        flops=eqn.params["length"] * flops,
        calls=eqn.params["length"] * calls,
    )


def _work(body: ClosedJaxpr) -> tuple[float, float]:
    """Flops of a step, and functions of single numbers; loops in it count as often as they run."""
    eqns = flatten(body, _jax.has_bodies).jaxpr.eqns
    counted = list(zip(describe_all(eqns), runs(eqns), strict=True))
    return sum(r.flops * n for r, n in counted), sum(r.calls * n for r, n in counted)


def _steps_factor(context: LocalContext, loop: _Loop) -> int | None:
    """The factor of the steps, if it is sharded."""
    tensors = context.rule.operands[loop.consts + loop.carried :]
    tensors += context.rule.results[loop.carried :]
    firsts = [dims[0] for dims in tensors]
    return firsts[0][0] if firsts and context.is_split(firsts[0]) else None


def _scan_exchanges(loop: _Loop, context: LocalContext) -> list[Exchange]:
    """One all_reduce of each sum."""
    factor = _steps_factor(context, loop)
    if factor is None:
        return []
    sizes = [bytes_of(context.eqn.outvars[k]) for k in loop.summed]
    return [all_reduce_of(size, context.shards(factor)) for size in sizes]


def _scan_local(loop: _Loop, context: LocalContext, *operands: Any) -> Sequence[Any]:
    factor = _steps_factor(context, loop)
    if factor is None:
        return bind(without_hints(context.eqn), operands)
    first = loop.consts + loop.carried
    starts = operands[loop.consts : first]
    carried = [
        lax.full_like(x, 0) if is_sum else x
        for x, is_sum in zip(starts, loop.is_summed, strict=True)
    ]
    if loop.sums_alone:  # what they start from is the first device's term
        is_first = lax.eq(context.offset(factor), np.int32(0))
        carried = [lax.select(is_first, *pair) for pair in zip(starts, carried, strict=True)]
    results = _own_steps(context, loop, factor, operands[: loop.consts], carried, operands[first:])
    for k in () if loop.sums_alone else loop.summed:
        results[k] = lax.add(starts[k], lax.psum(results[k], context.axes(factor)))
    return results


def _own_steps(
    context: LocalContext,
    loop: _Loop,
    factor: int,
    consts: Sequence[Any],
    carried: Sequence[Any],
    each: Sequence[Any],
) -> list[Any]:
    """The loop over a device's own steps.

    Steps that are padding are left out where they would add to a sum, or might never end.
    """
    eqn, length = without_hints(context.eqn), context.local_size(factor)
    is_even = length * context.shards(factor) == context.rule.sizes[factor]
    if is_even or not (loop.summed or may_not_end(eqn)):
        return bind(eqn, [*consts, *carried, *each], {**eqn.params, "length": length})
    left = context.real_rows(factor)
    real = lax.lt(lax.iota(np.int32, length), lax.broadcast(left, (length,)))
    body = jaxpr_as_fun(eqn.params["jaxpr"])
    made = [v.aval for v in loop.body.jaxpr.outvars[loop.carried :]]

    def step(carry: Sequence[Any], row: tuple[Any, Sequence[Any]]) -> tuple[Any, Any]:
        def take() -> list[Any]:
            return list(body(*consts, *carry, *row[1]))

        def leave() -> list[Any]:
            return [*carry, *(lax.full(aval.shape, 0, aval.dtype) for aval in made)]

        found = lax.cond(row[0], take, leave)
        return found[: loop.carried], found[loop.carried :]

    params = {k: eqn.params[k] for k in ("reverse", "unroll")}
    carry, rows = lax.scan(step, list(carried), (real, list(each)), length=length, **params)
    return [*carry, *rows]
