"""Exchanges whose pieces XLA on CPU cuts with one kernel.

XLA on CPU makes a slice of each piece of an all_to_all, and a kernel of each slice, each of which
takes as long to compile as any other. It compiles equal kernels once, though: so the pieces are
cut here, all by the same slice, each at a place that is read from an array. XLA cuts them out of
what joins them again, and nothing more is copied or sent.
"""

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from meshwise._jax.jaxprs import JaxprEqn, Primitive, Var, new_eqn, opened, with_bodies, with_each

# What only shows the same numbers as another array.
VIEWS = (
    lax.reshape_p,
    lax.transpose_p,
    lax.squeeze_p,
    lax.broadcast_in_dim_p,
    lax.convert_element_type_p,
    lax.bitcast_convert_type_p,
)

# Arrays laid end to end along one dim, as the pieces of all of them along another, joined again.
cut_and_joined_p = Primitive("cut_and_joined")


def cut_alike(jaxpr: Any, sizes: Mapping[str, int]) -> Any:
    """The same per-device jaxpr over axes of some sizes; itself where nothing is exchanged."""
    makers = {var: eqn for eqn in opened(jaxpr).eqns for var in eqn.outvars}

    def cut(eqn: JaxprEqn) -> list[JaxprEqn]:
        inner = with_bodies(eqn, lambda body: cut_alike(body, sizes))
        return _cut(inner, sizes, makers)

    return with_each(jaxpr, cut)


def _cut(eqn: JaxprEqn, sizes: Mapping[str, int], makers: Mapping[Any, JaxprEqn]) -> list[JaxprEqn]:
    """An exchange of what was cut and joined; of anything else the equation itself.

    What was joined along another dim is cut before: it is joined in pieces, and never whole.
    """
    if eqn.primitive is not lax.all_to_all_p:
        return [eqn]
    (x,) = eqn.invars
    aval: Any = x.aval
    pieces, along = group_size(eqn, sizes), eqn.params["split_axis"]
    params = {"dim": along, "pieces": pieces}
    parts = [x]
    maker = makers.get(x)
    if maker and maker.primitive is lax.concatenate_p and maker.params["dimension"] != along:
        parts, along = list(maker.invars), maker.params["dimension"]
    if pieces == 1 or 0 in aval.shape or any(_is_in(pieces, part, makers) for part in parts):
        return [eqn]
    joined = Var(aval)
    made = new_eqn(cut_and_joined_p, parts, [joined], params | {"along": along}, eqn)
    return [made, eqn.replace(invars=[joined])]


def _is_in(pieces: int, x: Any, makers: Mapping[Any, JaxprEqn]) -> bool:
    """Whether a value is joined from pieces, of which XLA itself finds those that are wanted."""
    maker = makers.get(x)
    while maker and maker.primitive in VIEWS:
        maker = makers.get(maker.invars[0])
    if maker is None or maker.primitive is not lax.concatenate_p:
        return maker is not None and maker.primitive is lax.all_to_all_p
    # Of others it makes slices, and a kernel of each.
    avals: list[Any] = [part.aval for part in maker.invars]
    return len(avals) == pieces and len({aval.shape for aval in avals}) == 1


def group_size(eqn: JaxprEqn, sizes: Mapping[str, int]) -> int:
    """How many devices exchange with one another."""
    groups = eqn.params["axis_index_groups"]
    names = eqn.params["axis_name"]
    names = names if isinstance(names, tuple | list) else (names,)
    return len(groups[0]) if groups else prod(sizes[name] for name in names)


def _joined(first: Any, *rest: Any, along: int, **_: Any) -> Any:
    """What comes of it: the arrays laid end to end."""
    return lax.concatenate((first, *rest), along) if rest else first


def _lowered(context: Any, *parts: Any, dim: int, pieces: int, along: int) -> Any:
    """Slices of the arrays, at places behind a barrier, and their concatenation.

    The arrays are behind one, too: XLA moves a transpose and a reshape past what is computed
    between them, leaves the slices in different layouts, and refuses its own all_to_all.
    """
    shapes = [aval.shape for aval in context.avals_in]
    size = shapes[0][dim] // pieces
    # A number, or an array that one number and a step make, would become part of the kernel.
    firsts = [np.array([piece * size, -1, -1], np.int32) for piece in range(pieces)]
    zero = mlir.ir_constant(np.int32(0))
    one_at = [mlir.dense_int_array([n]) for n in (0, 1, 1)]
    held = stablehlo.OptimizationBarrierOp(parts).results
    cut = []
    for first in stablehlo.OptimizationBarrierOp([mlir.ir_constant(f) for f in firsts]).results:
        place = stablehlo.ReshapeOp(zero.type, stablehlo.SliceOp(first, *one_at).result).result
        piece = []
        for part, shape in zip(held, shapes, strict=True):
            starts = [place if d == dim else zero for d in range(len(shape))]
            cut_shape = [size if d == dim else n for d, n in enumerate(shape)]
            sizes = mlir.dense_int_array(cut_shape)
            piece.append(stablehlo.DynamicSliceOp(part, starts, sizes).result)
        cut.append(stablehlo.ConcatenateOp(piece, along).result if len(piece) > 1 else piece[0])
    return [stablehlo.ConcatenateOp(cut, dim).result]


def _type(first: Any, *rest: Any, along: int, **_: Any) -> Any:
    shape = list(first.shape)
    shape[along] += sum(aval.shape[along] for aval in rest)
    return first.update(shape=tuple(shape))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(partial(_joined, **params), primals, tangents)


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    return jax.vmap(partial(_joined, **params), dims)(*args), 0


cut_and_joined_p.def_abstract_eval(_type)
mlir.register_lowering(cut_and_joined_p, mlir.lower_fun(_joined, multiple_results=False))
mlir.register_lowering(cut_and_joined_p, _lowered, platform="cpu")
ad.primitive_jvps[cut_and_joined_p] = _jvp
batching.primitive_batchers[cut_and_joined_p] = _batched
