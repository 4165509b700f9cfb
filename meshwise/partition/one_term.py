"""Sums of which one term counts at each place: what arrives is what was sent, bit for bit.

Rows at a place are summed over the devices that may hold them. As floats a sum may be another
number than its only term: XLA on CPU begins with `0.0`, which makes `-0.0` one, and takes
subnormal numbers for zero, such as the bits of a small integer are. So floats go as integers.
Those of less than four bytes go as they are: a TPU sums their integers as ones of four.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise import _jax
from meshwise._jax import Literal, Var
from meshwise.choose.plan import Plan
from meshwise.ir.sharding import Reduction


def added_values(plan: Plan) -> frozenset[Var]:
    """The values of a plan whose terms add up; of others one term counts at each place.

    A term counts alone where whole values were made terms, where a rule moves elements, and where
    it moves those of such terms. What goes round a loop does as long as its start does.
    """
    program = plan.program
    inputs = zip(program.inputs, plan.in_shardings, strict=True)
    added = {var for var, sharding in inputs if sharding.unreduced}
    users: dict[Var, list[Var]] = defaultdict(list)
    goes_round: dict[Any, Any] = {
        eqn.invars[0]: eqn.invars[1] for eqn in program.equations if eqn.primitive is _jax.next_p
    }
    for eqn, rule, decided in zip(program.equations, plan.rules, plan.equations, strict=True):
        operands = zip(eqn.invars, decided.operands, strict=True)
        read = [atom for atom, sharding in operands if sharding.unreduced]
        read += [goes_round[eqn.outvars[0]]] if eqn.primitive is _jax.carry_p else []
        for var, sharding in zip(eqn.outvars, decided.results, strict=True):
            if not sharding.unreduced:
                continue
            if not rule.moves or sharding.reduction is not Reduction.SUM:
                added.add(var)
            for atom in read:
                if not isinstance(atom, Literal):
                    users[atom].append(var)
    found = list(added)
    while found:
        new = set(users[found.pop()]) - added
        added |= new
        found.extend(new)
    return frozenset(added)


def sum_of_bits(reduce: Callable[[Any], Any], terms: Any, devices: int) -> Any:
    """What `reduce` sums over so many devices, all but one of which have nothing at a place.

    `reduce` may be given an array with one more dim behind the others.
    """
    dtype = np.dtype(terms.dtype)
    if issubdtype(dtype, np.complexfloating):
        parts = [lax.expand_dims(x, (x.ndim,)) for x in (lax.real(terms), lax.imag(terms))]
        both = sum_of_bits(reduce, lax.concatenate(parts, terms.ndim), devices)
        return lax.complex(*(lax.index_in_dim(both, i, both.ndim - 1, False) for i in (0, 1)))
    if not issubdtype(dtype, np.floating) or dtype.itemsize < 4:
        return reduce(terms)
    ints = np.dtype(f"uint{8 * dtype.itemsize}")
    total = reduce(lax.bitcast_convert_type(terms, ints))
    if devices % 2 == 0:  # an odd number had the bits of `-0.0`, and of two of those none are left
        nothing = np.asarray(-0.0, dtype).view(ints)  # as `nothing_like` fills it in
        total = lax.sub(total, lax.full_like(total, nothing))
    return lax.bitcast_convert_type(total, dtype)
