"""Padding is never seen: masks before whatever mixes elements along an uneven dim."""

from collections.abc import Sequence
from typing import Any

from meshwise.rules.identity import mask_padding, reduction_identity
from meshwise.rules.registry import LocalContext, OpRule


def mask_operands(rule: OpRule, context: LocalContext, operands: Sequence[Any]) -> list[Any]:
    """Overwrite padding along sharded reduction factors with the reduction's identity.

    A factor that is a permutation as well is left to the local rule, which moves rows first.
    """
    masked = list(operands)
    reduced = rule.factors.reduction_of.keys() - rule.factors.permuted
    for position, dims in enumerate(rule.factors.operands):
        if rule.masked is not None and position not in rule.masked:
            continue
        for dim, factors in enumerate(dims):
            if len(factors) != 1 or factors[0] not in reduced:
                continue
            if not context.axes(factors[0]):
                continue
            array = masked[position]
            identity = reduction_identity(rule.factors.reduction_of[factors[0]], array.dtype)
            masked[position] = mask_padding(context, array, dim, factors[0], identity)
    return masked
