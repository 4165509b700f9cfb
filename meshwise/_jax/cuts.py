"""Pieces of what is sent or received, which XLA on CPU cuts with one kernel.

XLA on CPU makes a slice of each piece of an all_to_all, and a kernel of each slice, each of which
takes as long to compile as any other. It compiles equal kernels once, though: so the pieces are
cut here, all by the same slice, each at a place that is read from an array. XLA cuts them out of
what joins them again, and nothing more is copied or sent.

So are the pieces of what arrays that travelled together are received in: each is cut by whatever
reads it, and what is computed of a hundred gradients of ten shapes is ten kernels, not a hundred.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import core as _core
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from meshwise._jax.groups import group_size
from meshwise._jax.jaxprs import (
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    new_eqn,
    new_var,
    opened,
    shape_of,
    with_bodies,
    with_each,
)
from meshwise._jax.slices import cut_dims, is_plain_slice

# What only shows the same numbers as another array.
VIEWS = (
    lax.reshape_p,
    lax.transpose_p,
    lax.squeeze_p,
    lax.broadcast_in_dim_p,
    lax.convert_element_type_p,
    lax.bitcast_convert_type_p,
)

# Collectives: what they make is one array, of whatever travelled together.
_RECEIVING = (
    "psum",
    "pmax",
    "pmin",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ppermute",
)

# What makes a piece of that, to be cut again: sums that were made as one may travel with others.
_PIECES = (lax.slice_p, lax.reshape_p, lax.squeeze_p)

# Arrays laid end to end along one dim, as the pieces of all of them along another, joined again.
cut_and_joined_p = Primitive("cut_and_joined")
# A place in a dim as a number, of which XLA on CPU learns only when it runs.
place_p = Primitive("place")
_INT32 = _core.ShapedArray((), np.dtype(np.int32))


def cut_alike(jaxpr: Any, sizes: Mapping[str, int]) -> Any:
    """The same per-device jaxpr over axes of some sizes; itself where nothing is cut."""
    eqns = opened(jaxpr).eqns
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    shapes = Counter(_of_received(eqn, makers) for eqn in eqns)

    def cut(eqn: JaxprEqn) -> list[JaxprEqn]:
        received = _of_received(eqn, makers)
        if received is not None and shapes[received] > 1:
            return _cut_at_place(eqn)
        inner = with_bodies(eqn, lambda body: cut_alike(body, sizes))
        return _cut(inner, sizes, makers)

    return with_each(jaxpr, cut)


def cut_before_joined(jaxpr: Any, sizes: Mapping[str, int]) -> Any:
    """The same, where only exchanges of arrays that travel together are of pieces: never whole."""
    makers = {var: eqn for eqn in opened(jaxpr).eqns for var in eqn.outvars}

    def cut(eqn: JaxprEqn) -> list[JaxprEqn]:
        inner = with_bodies(eqn, lambda body: cut_before_joined(body, sizes))
        return _cut(inner, sizes, makers) if _travels_with(eqn, makers) else [inner]

    return with_each(jaxpr, cut)


def _of_received(eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn]) -> Any:
    """For a piece along one dim of what is received: of what, along which, and how large."""
    if not is_plain_slice(eqn):
        return None
    (x,) = eqn.invars
    maker = _maker_behind(_PIECES, x, makers)
    if maker is None or maker.primitive.name not in _RECEIVING:
        return None
    along, shape = cut_dims(eqn), shape_of(eqn.outvars[0])
    # Numbers by themselves, as those of a norm, are mostly read by one kernel, which grows by each.
    return (x, *along, shape) if len(along) == 1 and prod(shape) > 1 else None


def _maker_behind(
    kinds: Sequence[Primitive], x: Any, makers: Mapping[Any, JaxprEqn]
) -> JaxprEqn | None:
    """What makes a value, seen through equations of some kinds, by what these read first."""
    maker = makers.get(x)
    while maker and maker.primitive in kinds:
        maker = makers.get(maker.invars[0])
    return maker


def _cut_at_place(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The same piece, cut at a place that is read."""
    (along,), starts = cut_dims(eqn), eqn.params["start_indices"]
    place = new_var(_INT32)
    made = new_eqn(place_p, [], [place], {"at": starts[along]}, eqn)
    firsts = [place if dim == along else Literal(np.int32(0), _INT32) for dim in range(len(starts))]
    params = {"slice_sizes": shape_of(eqn.outvars[0])}
    return [made, new_eqn(lax.dynamic_slice_p, [*eqn.invars, *firsts], eqn.outvars, params, eqn)]


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
    if joining := _travels_with(eqn, makers):
        parts, along = list(joining.invars), joining.params["dimension"]
    if pieces == 1 or 0 in aval.shape or any(_is_in(pieces, part, makers) for part in parts):
        return [eqn]
    joined = Var(aval)
    made = new_eqn(cut_and_joined_p, parts, [joined], params | {"along": along}, eqn)
    return [made, eqn.replace(invars=[joined])]


def _travels_with(eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn]) -> JaxprEqn | None:
    """What joins the arrays of an exchange along a dim that is not exchanged, if that is so."""
    if eqn.primitive is not lax.all_to_all_p:
        return None
    maker = makers.get(eqn.invars[0])
    if maker is None or maker.primitive is not lax.concatenate_p:
        return None
    return maker if maker.params["dimension"] != eqn.params["split_axis"] else None


def _is_in(pieces: int, x: Any, makers: Mapping[Any, JaxprEqn]) -> bool:
    """Whether a value is joined from pieces, of which XLA itself finds those that are wanted."""
    maker = _maker_behind(VIEWS, x, makers)
    if maker is None or maker.primitive is not lax.concatenate_p:
        return maker is not None and maker.primitive is lax.all_to_all_p
    # Of others it makes slices, and a kernel of each.
    avals: list[Any] = [part.aval for part in maker.invars]
    return len(avals) == pieces and len({aval.shape for aval in avals}) == 1


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
    zero = mlir.ir_constant(np.int32(0))
    held = stablehlo.OptimizationBarrierOp(parts).results
    cut = []
    for place in _places([piece * size for piece in range(pieces)]):
        piece = []
        for part, shape in zip(held, shapes, strict=True):
            starts = [place if d == dim else zero for d in range(len(shape))]
            cut_shape = [size if d == dim else n for d, n in enumerate(shape)]
            sizes = mlir.dense_int_array(cut_shape)
            piece.append(stablehlo.DynamicSliceOp(part, starts, sizes).result)
        cut.append(stablehlo.ConcatenateOp(piece, along).result if len(piece) > 1 else piece[0])
    return [stablehlo.ConcatenateOp(cut, dim).result]


def _places(numbers: Sequence[int]) -> list[Any]:
    """Numbers, each the first of an array behind a barrier.

    A number, or an array that one number and a step make, would become part of the kernel.
    """
    arrays = [mlir.ir_constant(np.array([n, -1, -1], np.int32)) for n in numbers]
    scalar = mlir.ir_constant(np.int32(0)).type
    one_at = [mlir.dense_int_array([n]) for n in (0, 1, 1)]
    held = stablehlo.OptimizationBarrierOp(arrays).results
    firsts = [stablehlo.SliceOp(array, *one_at).result for array in held]
    return [stablehlo.ReshapeOp(scalar, first).result for first in firsts]


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

place_p.def_abstract_eval(lambda at: _INT32)
mlir.register_lowering(place_p, lambda context, at: [mlir.ir_constant(np.int32(at))])
mlir.register_lowering(place_p, lambda context, at: _places([at]), platform="cpu")
