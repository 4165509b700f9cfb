"""What is picked out of a dim in shards: a sum of one term, the other devices having nothing.

It is to arrive bit for bit, and nothing (`nothing_like`) times infinity, or divided by zero, is no
number.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from jax.dtypes import extended
from jax.numpy import float8_e8m0fnu, issubdtype

from meshwise._jax import JaxprEqn, Literal
from meshwise.ir.program import type_of
from meshwise.rules.contraction import sum_of
from meshwise.rules.factoring import Kind
from meshwise.rules.registry import OpRule


def kind_of_picks(dtype: Any) -> Kind:
    """The kind of a dim of which single positions are read: a reduction of terms.

    Keys do not add, and the exponents of scaled blocks (`float8_e8m0fnu`) have no zero to add.
    """
    adds = not issubdtype(dtype, extended) and dtype != float8_e8m0fnu
    return sum_of(dtype) if adds else "whole"


def keeps_picked(eqn: JaxprEqn, rule: OpRule, operands: Collection[int], is_summed: bool) -> bool:
    """Whether what is picked may pass in some operands, before it is summed over the devices.

    Not where it is scaled by what is computed, nor where each element is changed by itself (its
    sign), unless `is_summed` says that a sum of elements follows, which has bits of its own.
    """
    if rule.moves or not issubdtype(type_of(eqn.outvars[0]).dtype, np.inexact):
        return True
    if not all(_is_plain(a) for i, a in enumerate(eqn.invars) if i not in operands):
        return False
    return is_summed or len(operands) > 1 or bool(rule.factors.reductions)


def _is_plain(scale: Any) -> bool:
    """Whether what is scaled by it stays nothing: a finite number other than zero, or no float."""
    if not issubdtype(type_of(scale).dtype, np.inexact):
        return True
    return isinstance(scale, Literal) and bool(np.all(np.isfinite(scale.val)) and scale.val != 0)
