"""How XLA on CPU compiles the kernels of a small per-device program: by which maker, and how much.

LLVM does less for them than all it can where arrays are very short: that takes less time, and what
it makes of them is as fast.

Until JAX 0.11 XLA has two makers. The newer writes each kernel in MLIR and takes 15 to 20 ms for
it, but once only for kernels that are equal. The older writes LLVM at once, many kernels in one
module, and takes half as long or less. What it makes of most short arrays is as fast; long ones it
sums, moves and scatters slower. Behind a product it computes functions as `tanh` in the product's
buffer, one number after another; and it is slow to put in order what was gathered along a minor
dim. Of numbers of two bits it cannot make all kernels, and ends the process; nor can it clamp
booleans, as XLA has it do for a minimum behind a maximum. What it reads before and behind a choice
of places, as a pad, a concatenation, a reversal or a gather makes, it makes twice, and all that
this is made of: of many in a row 2**n times.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from math import prod
from operator import and_, or_
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import compiler as _compiler
from jax._src import dtypes as _dtypes

from meshwise._jax.groups import group_size
from meshwise._jax.jaxprs import JaxprEqn, Literal, bodies_of, opened, shape_of, threefry2x32_p
from meshwise._jax.minor_dims import of_leading_dim
from meshwise._jax.wide_positions import SCATTERS

# Arrays over which a kernel of either maker takes no longer than a collective takes to begin.
SHORT_BYTES = 2**18
# Functions that the older computes one after another in the buffer of a product.
_FUNCTIONS = (
    lax.exp_p,
    lax.exp2_p,
    lax.expm1_p,
    lax.log_p,
    lax.log1p_p,
    lax.logistic_p,
    lax.tanh_p,
    lax.erf_p,
    lax.pow_p,
    lax.sin_p,
    lax.cos_p,
    lax.tan_p,
)
# So many of them for each equation, or so many elements that come in another order, and a call is
# longer by a tenth or more; what an equation compiles sooner is worth less than that.
MANY_FUNCTIONS = 150
MANY_REORDERED = 1500
# So many numbers scattered, and calls by the older may be longer; of fewer they are as short.
MANY_SCATTERED = 2**14
# Where the older chooses among places, and what begins a new kernel. What is doubled so often is
# made in a tenth of a second, and each time more takes twice as long.
_CHOICES = (lax.pad_p, lax.concatenate_p, lax.rev_p, lax.gather_p)
_OF_THEIR_OWN = (
    lax.dot_general_p,
    lax.conv_general_dilated_p,
    lax.scan_p,
    lax.while_p,
    lax.cond_p,
    lax.sort_p,
    lax.all_gather_p,
    lax.all_to_all_p,
    lax.ppermute_p,
    lax.psum_p,
    lax.pmax_p,
    lax.pmin_p,
)
MOST_DOUBLED = 6
# Sums over two dims that LLVM writes out as the older makes them, up to 32 steps in each of 16, 32
# or 64: one takes it up to 0.4 s, as long as the newer needs more for so many equations.
WRITTEN_OUT = 32
AS_MANY_EQUATIONS = 120
# Equations whose kernels are compiled together: modules are compiled beside each other, each anew.
TOGETHER = 32
# So many equations of which each is there so often, as layers that no loop repeats, and the kernels
# that the newer makes once are compiled sooner by it.
MANY_EQUATIONS, OFTEN = 1000, 5
# How much LLVM does for kernels of very short arrays. At 3, which is all, it unrolls far longer
# loops: a gradient of windows of 176 KiB takes twice as long at 2, k-means of 256 KiB 1.15 times.
LEVEL = 2
VERY_SHORT_BYTES = 2**16
# So many random numbers, each of twenty rounds, and a call is a fifth longer at 2; at 3 the older
# maker takes longer than the newer.
MANY_DRAWN = 4096


def kernel_options(jaxpr: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Options by which XLA on CPU compiles a per-device jaxpr over axes of some sizes sooner.

    None where an array is long: then a kernel that runs faster is worth the time.
    """
    counted = list(_all_equations(jaxpr))
    arrays = _arrays(counted)
    longest = max(map(_bytes, arrays), default=0)
    options: dict[str, Any] = {}
    is_short = longest <= VERY_SHORT_BYTES and _drawn(counted) <= MANY_DRAWN
    if is_short and not any(map(_is_of_short_floats, arrays)) and _level_said() > LEVEL:
        options["xla_backend_optimization_level"] = LEVEL
    if _older_makes(counted, sizes):
        options["xla_cpu_use_fusion_emitters"] = False
        options["xla_cpu_parallel_codegen_split_count"] = 1 + len(counted) // TOGETHER
    return options


def is_short_float(dtype: Any) -> bool:
    """Whether XLA on CPU computes numbers of a type as `float32`, and rounds in between."""
    return jax.numpy.issubdtype(dtype, np.floating) and dtype.itemsize < 4


def _is_of_short_floats(array: Any) -> bool:
    """Whether an array is of numbers that are rounded in between.

    LLVM does that many at a time at 3, and one after another at 2: layers in `bfloat16` take 1.6
    times as long.
    """
    dtype = _dtype(array)
    return dtype is not None and is_short_float(dtype) and array.size > 1


def _level_said() -> int:
    """How much LLVM is to do for any program: by default all it can."""
    options: Any = _compiler.get_compile_options(num_replicas=1, num_partitions=1)
    return options.executable_build_options.debug_options.xla_backend_optimization_level


def is_for_older(jaxpr: Any, sizes: Mapping[str, int]) -> bool:
    """Whether the older maker compiles a per-device jaxpr, if nobody says otherwise."""
    return _older_makes(list(_all_equations(jaxpr)), sizes)


def _older_makes(counted: Sequence[tuple[JaxprEqn, int]], sizes: Mapping[str, int]) -> bool:
    """Whether the older maker compiles equations.

    It does not where an array is long, where the pieces of exchanges, which are equal kernels, are
    more than the equations, or many equations are repeated often, and where it cannot make all
    kernels, not soon, or makes slower ones; nor where LLVM is told to do nothing. It writes what a
    kernel reads twice as two computations, and if they stay two they may be rounded differently:
    then `x == min(x, y)` holds for no `x`.
    """
    if jax.__version_info__ >= (0, 11) or not _level_said():  # 0.11 has no older one
        return False
    eqns, arrays = [eqn for eqn, _ in counted], _arrays(counted)
    pieces = sum(group_size(eqn, sizes) for eqn in eqns if eqn.primitive is lax.all_to_all_p)
    is_for_newer = any(map(_array_is_for_newer, arrays)) or _clamp_booleans(eqns)
    if pieces > len(eqns) or _are_repeated(eqns) or is_for_newer or _is_slower(counted):
        return False
    return _times_doubled(eqns) <= MOST_DOUBLED


def _are_repeated(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether there are many equations, each of them often."""
    alike = {(e.primitive, *(a.aval for a in (*e.invars, *e.outvars))) for e in eqns}
    return len(eqns) > max(MANY_EQUATIONS, OFTEN * len(alike))


def _all_equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """The equations of a jaxpr and of all bodies in it, with how often each runs, where known."""
    for eqn in opened(jaxpr).eqns:
        yield eqn, times
        steps = eqn.params["length"] if eqn.primitive is lax.scan_p else 1
        for body in bodies_of(eqn):
            yield from _all_equations(body, times * steps)


def _arrays(counted: Sequence[tuple[JaxprEqn, int]]) -> list[Any]:
    """The types of all that the equations read and make."""
    return [atom.aval for eqn, _ in counted for atom in (*eqn.invars, *eqn.outvars)]


def _is_slower(counted: Sequence[tuple[JaxprEqn, int]]) -> bool:
    """Whether the older takes longer itself, or calls much longer than its compiling spares."""
    functions = reordered = 0
    for eqn, times in counted:
        if eqn.primitive in _FUNCTIONS:
            functions += times * _size(eqn.outvars[0])
        transposes = [e for e in of_leading_dim(eqn) if e.primitive is lax.transpose_p]
        reordered += times * sum(_size(e.outvars[0]) for e in transposes)
    if not any(eqn.primitive is lax.dot_general_p for eqn, _ in counted):
        functions = 0
    sums = sum(_is_written_out(eqn) for eqn, _ in counted)
    return (
        sums * AS_MANY_EQUATIONS > len(counted)
        or functions > MANY_FUNCTIONS * len(counted)
        or reordered > MANY_REORDERED * len(counted)
        or _drawn(counted) > MANY_DRAWN
        or _scattered(counted) > MANY_SCATTERED
    )


def _is_written_out(eqn: JaxprEqn) -> bool:
    """Whether LLVM makes one row of additions of a sum that the older maker writes as loops."""
    if eqn.primitive is not lax.reduce_sum_p:
        return False
    shape = shape_of(eqn.invars[0])
    first, *others = [shape[d] for d in eqn.params["axes"]] or [1]
    is_long = WRITTEN_OUT // 2 < prod(others) <= WRITTEN_OUT
    return is_long and first in (WRITTEN_OUT // 2, WRITTEN_OUT, 2 * WRITTEN_OUT)


def _drawn(counted: Sequence[tuple[JaxprEqn, int]]) -> int:
    """How many random numbers a device draws."""
    draws = [(eqn, times) for eqn, times in counted if eqn.primitive is threefry2x32_p]
    return sum(times * _size(eqn.outvars[0]) for eqn, times in draws)


def _scattered(counted: Sequence[tuple[JaxprEqn, int]]) -> int:
    """How many numbers a device scatters."""
    scatters = [(eqn, times) for eqn, times in counted if eqn.primitive in SCATTERS]
    return sum(times * _size(eqn.invars[2]) for eqn, times in scatters)


def _times_doubled(eqns: Sequence[JaxprEqn]) -> int:
    """How often, in one kernel, something is read both before and behind a choice of places.

    That is where an equation's operands are made of some choices in common, and of others.
    """
    choices: dict[Any, int] = {}  # those that a value is made of in its kernel, as bits
    doubled: dict[Any, int] = {}
    for k, eqn in enumerate(eqns):
        read = [a for a in eqn.invars if not isinstance(a, Literal) and choices.get(a)]
        own = {choices[a] for a in read}
        common, made = reduce(and_, own, -1), reduce(or_, own, 0)
        made |= 1 << k if eqn.primitive in _CHOICES else 0
        more = len(own) > 1 and common != 0
        times = max((doubled[a] for a in read), default=0) + more
        if eqn.primitive not in _OF_THEIR_OWN:
            choices.update(dict.fromkeys(eqn.outvars, made))
            doubled.update(dict.fromkeys(eqn.outvars, times))
    return max(doubled.values(), default=0)


def _size(atom: Any) -> int:
    return atom.aval.size


def _dtype(aval: Any) -> np.dtype | None:
    """The type of an array's numbers; None of tokens, keys and what has none."""
    dtype = getattr(aval, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0 else None


def _bytes(aval: Any) -> int:
    dtype = _dtype(aval)
    return 0 if dtype is None else aval.size * dtype.itemsize


def _array_is_for_newer(aval: Any) -> bool:
    """Whether an array is long, of numbers that share a byte, or of floats of one."""
    dtype = _dtype(aval)
    if dtype is None:
        return False
    if _bytes(aval) > SHORT_BYTES:
        return True
    bits = _dtypes.itemsize_bits(dtype)
    return bits < 8 or (bits == 8 and jax.numpy.issubdtype(dtype, np.floating))


def _clamp_booleans(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether there is a clamp that the older refuses, or what one is made of."""
    bounds = [eqn for eqn in eqns if eqn.primitive in (lax.clamp_p, lax.max_p, lax.min_p)]
    found = {eqn.primitive for eqn in bounds if _dtype(eqn.outvars[0].aval) == np.bool_}
    return lax.clamp_p in found or len(found) > 1
