"""A per-device program as XLA on CPU compiles it right.

Collectives of integers of two bits are those of bytes: XLA packs four of them in a byte, and sends
and joins some of the wrong ones (under `jax.jit` too); it sums none. Short floats that are only
moved go as their bits: XLA would make them twice as long and send them so. Positions of writes go
in types that hold every place. Results of Fourier transforms lie row by row: XLA may choose another
layout where a collective follows, and then fails when it runs.

And as it compiles into less memory, in less time, or into what is faster: an argument whose borders
are sent is read behind a barrier; pieces of an exchange are cut alike; what is gathered or
scattered along a minor dim goes along a leading one, and products of which little is put in order
for it are made so; ragged products go group after group; the largest of each row are found apart
from what is cut of them; what is wanted late is made late.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir

from meshwise._jax.cuts import VIEWS, cut_alike, cut_before_joined
from meshwise._jax.emitters import is_for_older, kernel_options
from meshwise._jax.jaxprs import (
    DropVar,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    new_eqn,
    opened,
    reading,
    rewritten,
    with_bodies,
    with_each,
)
from meshwise._jax.led_products import in_scattered_order
from meshwise._jax.minor_dims import of_leading_dim
from meshwise._jax.ragged import group_after_group
from meshwise._jax.tracing import without_mesh
from meshwise._jax.wide_positions import at_wide_positions

_BYTES = {jnp.dtype(jnp.int2): jnp.int8, jnp.dtype(jnp.uint2): jnp.uint8}
_AXES = ("axis_name", "axes")
# Floats that XLA on CPU moves as wider ones, and collectives that only move.
_WIDENED = {jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)}
_MOVES = (lax.all_to_all_p, lax.all_gather_p, lax.ppermute_p)
_REDUCTIONS = (lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p)
_ALL_REDUCES = (lax.psum_p, lax.pmax_p, lax.pmin_p)
# Until JAX 0.11 XLA makes longer floats of what a product of short ones reads and writes.
WIDENS_PRODUCTS = jax.__version_info__ < (0, 11)
# Since then its library of kernels has sines, cosines and tangents.
LIBRARY_HAS_SINES = jax.__version_info__ >= (0, 11)
# The most dims of an array, and rows of a product, with which it is right around a reduction.
LIBRARY_ERRS_OVER = (6, 2**15) if jax.__version_info__ < (0, 11) else (math.inf, math.inf)
# The library makes nothing but products, each for itself.
PRODUCTS_ALONE = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@without_mesh()  # types of what is traced here would speak of a mesh in context
def as_cpu_compiles(jaxpr: Any, sizes: Mapping[str, int]) -> Any:
    """The same per-device jaxpr over axes of some sizes; itself where nothing is said otherwise."""
    compiling = _scattered_apart(_compiling(at_wide_positions(jaxpr)))
    compiling = _sums_apart(_borders_in_order(in_scattered_order(compiling)))
    # The older maker of kernels compiles each piece, and sooner where it is cut at a known place.
    cut = cut_before_joined if is_for_older(jaxpr, sizes) else cut_alike
    return cut(compiling, sizes)


def _compiling(jaxpr: Any) -> Any:
    return with_each(jaxpr, lambda eqn: _said(with_bodies(eqn, _compiling)))


def cpu_options(
    jaxpr: Any, sizes: Mapping[str, int], as_wanted: bool, products_alone: bool = False
) -> dict[str, Any]:
    """Options by which XLA on CPU compiles a per-device jaxpr soon, and so that it holds little.

    XLA computes what is ready as early as it can, and gathers at once what is read in the end. In
    the order that holds least each value is made where it is wanted, which is worth it for some
    (`as_wanted`). Where its library errs it is given `products_alone`.
    """
    soon = kernel_options(jaxpr, sizes) | (PRODUCTS_ALONE if products_alone else {})
    late = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return soon | (late if as_wanted else {})


def _bordered(body: Any) -> set[Any]:
    """The values of which several pieces are cut and sent on."""
    sends = [eqn for eqn in body.eqns if eqn.primitive is lax.ppermute_p]
    sent = {a for eqn in sends for a in eqn.invars if not isinstance(a, Literal)}
    cut = Counter(
        eqn.invars[0]
        for eqn in body.eqns
        if eqn.primitive is lax.slice_p and not sent.isdisjoint(eqn.outvars)
    )
    return {var for var, pieces in cut.items() if pieces > 1}


def _borders_in_order(jaxpr: Any) -> Any:
    """With a barrier behind each argument of which several pieces are cut and sent on.

    XLA enters a region by hand with the readers of its parameters in reverse, and takes them in
    that order. Then the piece that was cut first is sent last, and what is received finds no place
    in the result's buffer. The barrier, of which nothing is left in the end, reverses them again.
    """
    body = opened(jaxpr)
    bordered = _bordered(body)
    behind = {var: Var(var.aval) for var in body.invars if var in bordered}
    if not behind:
        return jaxpr
    barriers = [_barrier(var, held, body.eqns[0]) for var, held in behind.items()]
    eqns = [reading(eqn, behind) for eqn in body.eqns]
    return rewritten(jaxpr, eqns=[*barriers, *eqns])


def _scattered_apart(jaxpr: Any) -> Any:
    """With a barrier behind each reduce_scatter whose result is joined with others and exchanged.

    A piece that is all of that result XLA sends as it lies, which may be in another layout than the
    other pieces: then it refuses its own all_to_all.
    """
    joined = _joined_and_exchanged(opened(jaxpr))

    def behind(eqn: JaxprEqn) -> list[JaxprEqn]:
        eqn = with_bodies(eqn, _scattered_apart)
        if eqn.primitive.name != "reduce_scatter" or joined.isdisjoint(eqn.outvars):
            return [eqn]
        (out,) = eqn.outvars
        made = Var(out.aval)
        return [eqn.replace(outvars=[made]), _barrier(made, out, eqn)]

    return with_each(jaxpr, behind)


def _joined_and_exchanged(body: Any) -> set[Var]:
    """The values that are all of a part of what is joined, and then pieces of an all_to_all."""
    exchanged: set[Var] = set()
    joined: set[Var] = set()
    for eqn in reversed(body.eqns):
        read = {a for a in eqn.invars if not isinstance(a, Literal)}
        is_exchanged, is_joined = (not s.isdisjoint(eqn.outvars) for s in (exchanged, joined))
        shows = eqn.primitive is lax.pad_p or eqn.primitive in VIEWS
        joins = eqn.primitive is lax.concatenate_p
        if eqn.primitive is lax.all_to_all_p or (shows and is_exchanged):
            exchanged |= read
        if (joins and is_exchanged) or ((joins or shows) and is_joined):
            joined |= read
    return joined


def _sums_apart(jaxpr: Any) -> Any:
    """With barriers before readers, but the first, of what is reduced here, then by an all_reduce.

    Such are means and norms, which are spread again over what they are of. A difference from a mean
    is written to memory where XLA finds it in two places, though each of its readers could make it
    anew at no cost.
    """
    reduced = _reduced(opened(jaxpr))
    read: set[Var] = set()

    def behind(eqn: JaxprEqn) -> list[JaxprEqn]:
        eqn = with_bodies(eqn, _sums_apart)
        own = [a for a in eqn.invars if not isinstance(a, Literal) and a in reduced]
        again = {a: Var(a.aval) for a in own if a in read}
        read.update(own)
        barriers = [_barrier(a, b, eqn) for a, b in again.items()]
        return [*barriers, reading(eqn, again)]

    return with_each(jaxpr, behind)


def _reduced(body: Any) -> set[Var]:
    """The results of all_reduces of what is reduced on the device before."""
    partial = {out for eqn in body.eqns if eqn.primitive in _REDUCTIONS for out in eqn.outvars}
    sums = [eqn for eqn in body.eqns if eqn.primitive in _ALL_REDUCES]
    return {
        out for eqn in sums for a, out in zip(eqn.invars, eqn.outvars, strict=True) if a in partial
    }


def _barrier(var: Var, behind: Var, like: JaxprEqn) -> JaxprEqn:
    return new_eqn(lax.optimization_barrier_p, [var], [behind], {}, like)


def _said(eqn: JaxprEqn) -> list[JaxprEqn]:
    if eqn.primitive.name == "fft":
        return _in_rows(eqn)
    if eqn.primitive.name == "ragged_dot_general":
        return group_after_group(eqn)
    if eqn.primitive is lax.top_k_p and jax.__version_info__ < (0, 11):
        return _whole(eqn)
    return [new for sent in _sent(eqn) for new in of_leading_dim(sent)]


def _in_rows(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A transform, and a constraint of its result to the usual layout."""
    (out,) = eqn.outvars
    made = Var(out.aval)
    return [eqn.replace(outvars=[made]), new_eqn(_row_by_row_p, [made], [out], {}, eqn)]


def _constrained(x: Any) -> Any:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _lowered_row_by_row(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    """A constraint to the usual layout; none in what is exported, which may not have any."""
    if ctx.module_context.lowering_parameters.for_export:
        return [x]
    return mlir.lower_fun(_constrained, multiple_results=False)(ctx, x)


_row_by_row_p = Primitive("row_by_row")
_row_by_row_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_row_by_row_p, _lowered_row_by_row)


def _whole(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The largest of each row, behind a barrier; so is where they are.

    XLA of JAX 0.10 knows them by the slice of a sort that it makes of them. Another slice behind it
    is made one with it, and then it sorts all rows, which takes fifty times as long. Each has a
    barrier of its own: one for both reads the pair as it is, for which XLA ends the process.
    """
    made = {out: Var(out.aval) for out in eqn.outvars if not isinstance(out, DropVar)}
    barriers = [_barrier(largest, out, eqn) for out, largest in made.items()]
    return [eqn.replace(outvars=[made.get(out, out) for out in eqn.outvars]), *barriers]


def _sent(eqn: JaxprEqn) -> list[JaxprEqn]:
    if not any(a in eqn.params for a in _AXES) or not any(_sent_as(eqn, a) for a in eqn.invars):
        return [eqn]
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    operands: list[Any] = []
    results: list[Any] = []
    for atom in eqn.invars:
        operands.append(_other(atom, _sent_as(eqn, atom)))
        if operands[-1] is not atom:
            before.append(_cast(atom, operands[-1], eqn))
    for var in eqn.outvars:
        results.append(_other(var, _sent_as(eqn, var)))
        if results[-1] is not var:
            after.append(_cast(results[-1], var, eqn))
    return [*before, eqn.replace(invars=operands, outvars=results), *after]


def _sent_as(eqn: JaxprEqn, atom: Any) -> Any:
    """The type in which a collective sends a value, if not in its own."""
    if isinstance(atom, Literal) or not hasattr(atom.aval, "dtype"):
        return None
    dtype = atom.aval.dtype
    if eqn.primitive in _MOVES and dtype in _WIDENED:
        return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
    return _BYTES.get(dtype)


def _other(atom: Any, dtype: Any) -> Any:
    return atom if dtype is None else Var(atom.aval.update(dtype=dtype))


def _cast(atom: Any, var: Any, like: JaxprEqn) -> JaxprEqn:
    if _WIDENED.isdisjoint((atom.aval.dtype, var.aval.dtype)):
        params = {"new_dtype": var.aval.dtype, "weak_type": False, "sharding": None}
        return new_eqn(lax.convert_element_type_p, [atom], [var], params, like)
    return new_eqn(lax.bitcast_convert_type_p, [atom], [var], {"new_dtype": var.aval.dtype}, like)
