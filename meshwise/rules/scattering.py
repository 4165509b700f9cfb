"""Scatters: writing at positions that are data.

A dim of which positions or windows are written may be sharded: each device writes what it owns
and drops the rest. The updates may be sharded; then every device has a term of the result, and
what was there before counts on one of them.
"""

import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.dtypes import extended
from jax.numpy import issubdtype

from meshwise._jax import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from meshwise.ir.program import overwrites
from meshwise.ir.sharding import Reduction
from meshwise.rules.dynamic_update import Join, write_window
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes
from meshwise.rules.identity import OF_BOOLS, nothing_like
from meshwise.rules.ordered import are_ordered_alike, extreme_as_integers
from meshwise.rules.overwriting import joined_factors, overwriting_exchanges, overwritten_terms
from meshwise.rules.picked import kind_of_picks
from meshwise.rules.positions import (
    CLIP,
    FILL,
    IndexVectors,
    clamp_position,
    dims_of_windows,
    in_bounds,
    is_first_shard,
    signed_positions,
    start_dtype,
)
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register

# How an update is joined with what was there; None where it takes its place.
_JOINS: dict[str, Join | None] = {
    "scatter": None,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}

_JOINED_BY = {
    "scatter-add": Reduction.SUM,
    "scatter-sub": Reduction.SUM,
    "scatter-mul": Reduction.PROD,
    "scatter-min": Reduction.MIN,
    "scatter-max": Reduction.MAX,
}
_EXTREMES = {Reduction.MIN: lax.scatter_min, Reduction.MAX: lax.scatter_max}


@register("scatter", *_JOINED_BY)
def _scatter_rule(application: Application) -> OpRule:
    operand, indices, updates = shapes(application.operands)
    numbers = application.params["dimension_numbers"]
    windows = written_windows(application.params, operand, updates)
    once = _writes_once(application)
    kind = _kind(application)
    factoring = Factoring()
    at: list[Dim] = []
    for d, n in enumerate(indices[:-1]):
        batching = d in numbers.scatter_indices_batching_dims
        at.append(factoring.new(n, None if batching else kind))
    paired = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    written: list[Dim] = [()] * len(updates)
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    for place, dim in zip(batch, at, strict=True):
        written[place] = dim
    places = iter(numbers.update_window_dims)
    dims: list[Dim] = []
    for d, (n, window) in enumerate(zip(operand, windows, strict=True)):
        if d in paired:
            dims.append(at[paired[d]])
            continue
        moves = d in numbers.scatter_dims_to_operand_dims
        dims.append(factoring.new(n, None if window == n or moves or once else "whole"))
        if d not in numbers.inserted_window_dims:
            written[next(places)] = dims[-1] if window == n else factoring.new(window, "whole")
    at.append(factoring.new(indices[-1], "whole"))
    return OpRule(
        factoring.rule([dims, at, written], [dims]),
        linear=_linear(application, indices),
        local=_scatter_local,
        exchanges=_overwriting_exchanges if overwrites(application.eqn) else None,
        masked=(2,),
        moves=overwrites(application.eqn),
    )


def _overwriting_exchanges(context: LocalContext) -> list[Exchange]:
    shapes_of = [context.global_shape(i) for i in (0, 2)]
    return overwriting_exchanges(context, written_windows(context.params, *shapes_of))


def _kind(application: Application) -> Kind:
    """The kind of the dims of the updates that are not part of a window."""
    reduction = _JOINED_BY.get(application.eqn.primitive.name)
    dtype = application.operands[0].dtype
    if overwrites(application.eqn) and not issubdtype(dtype, extended):
        vectors = math.prod(application.operands[1].shape[:-1])
        return kind_of_picks(dtype) if vectors < np.iinfo(np.int32).max else "whole"
    ordered = reduction in (Reduction.MIN, Reduction.MAX)
    if reduction is None or dtype == np.bool_:
        return OF_BOOLS.get(reduction, "whole")
    return "whole" if ordered and issubdtype(dtype, np.complexfloating) else reduction


def _linear(application: Application, indices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """What was there, with the updates or times them; overwriting if no position is met twice.

    (Which of two updates of one position wins is not defined, and may differ between terms.)
    """
    name, params = application.eqn.primitive.name, application.params
    if name in ("scatter-add", "scatter-sub"):
        return ((0, 2),)
    if name == "scatter-mul":
        return ((0,),)
    if not overwrites(application.eqn):
        return ()
    batch = params["dimension_numbers"].scatter_indices_batching_dims
    vectors = math.prod(n for d, n in enumerate(indices[:-1]) if d not in batch)
    return ((0, 2),) if params["unique_indices"] or vectors <= 1 else ()


def _writes_once(application: Application) -> bool:
    """Whether a scatter writes a single window, which may then be cut like a dynamic update."""
    return math.prod(application.operands[1].shape[:-1]) == 1


def written_windows(
    params: dict[str, Any], operand: tuple[int, ...], updates: tuple[int, ...]
) -> tuple[int, ...]:
    """How many positions a scatter writes along each dim of its operand."""
    numbers = params["dimension_numbers"]
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sizes = iter([updates[d] for d in numbers.update_window_dims])
    return tuple(1 if d in single else next(sizes) for d in range(len(operand)))


def _scatter_local(context: LocalContext, operand: Any, indices: Any, updates: Any) -> list[Any]:
    if 0 in operand.shape:  # every position is outside
        return [operand]
    params = context.params
    shape, _, written = shapes([v.aval for v in context.eqn.invars])
    joined = joined_factors(context)
    changed: dict[str, Any] = {}
    if joined and context.eqn.primitive.name != "scatter":
        operand = _term_of_operand(context, operand, joined)
        indices = signed_positions(indices)
        # Positions in the padding are arbitrary; the updates there are masked.
        changed = {"unique_indices": False, "indices_are_sorted": False}
    windows = written_windows(params, shape, written)
    numbers = params["dimension_numbers"]
    vectors = _vectors(context, indices, windows, numbers)
    if vectors.is_out_of_order:  # the last update of a position would not be the last one
        numbers, order = _windows_last(numbers, updates.ndim)
        vectors = _vectors(context, indices, windows, numbers)
        updates = lax.transpose(updates, order)
    numbers = _spread_numbers(numbers, vectors)
    if joined and context.eqn.primitive.name == "scatter":
        return [overwritten_terms(context, operand, vectors, updates, windows, numbers)]
    cut = _cut_dims(context, windows)
    if cut and math.prod(indices.shape[:-1]) == 1:
        return _scatter_window(context, operand, vectors, updates, windows, cut)
    if vectors.factors:
        kept = None if params["mode"] is CLIP else vectors.in_range()

        def drop(position: Any, size: int) -> Any:
            here = in_bounds(position, size - 1)
            here = here if kept is None else lax.bitwise_and(here, kept)
            return lax.select(here, position, lax.full_like(position, size))

        indices = vectors.local(drop)
        changed = {"unique_indices": False, "indices_are_sorted": False, "mode": FILL}
        changed["dimension_numbers"] = numbers
    if joined and _JOINED_BY[context.eqn.primitive.name] in _EXTREMES:
        return [_extreme_terms(context, operand, indices, updates, changed)]
    return context.bind(operand, indices, updates, **changed)


def _extreme_terms(
    context: LocalContext, operand: Any, indices: Any, updates: Any, changed: dict[str, Any]
) -> Any:
    """A term of the smallest or largest, of floats as integers in their order.

    As such the terms are joined (`reshard/emit.py`). If they are found as floats, what they are as
    integers takes a buffer of its own, as XLA writes none where one of another type lies.
    """
    if not are_ordered_alike(operand.dtype) or updates.size > operand.size:
        return context.bind(operand, indices, updates, **changed)[0]
    reduction, params = _JOINED_BY[context.eqn.primitive.name], {**context.params, **changed}
    numbers, scatter = params["dimension_numbers"], _EXTREMES[reduction]
    said = {k: params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    return extreme_as_integers(
        reduction, lambda x, new: scatter(x, indices, new, numbers, **said), operand, updates
    )


def _windows_last(numbers: Any, rank: int) -> tuple[Any, list[int]]:
    """A scatter's dimension numbers with windows as its updates' last dims, and the dims' order."""
    windows = numbers.update_window_dims
    batch = [d for d in range(rank) if d not in windows]
    last = tuple(range(len(batch), rank))
    return numbers._replace(update_window_dims=last), [*batch, *windows]


def _vectors(
    context: LocalContext, indices: Any, windows: tuple[int, ...], numbers: Any
) -> IndexVectors:
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = dims_of_windows(len(windows), single, numbers.update_window_dims)
    rank, dims = len(context.global_shape(2)), numbers.scatter_dims_to_operand_dims
    return IndexVectors(context, indices, dims, windows, kept, rank)


def _spread_numbers(numbers: Any, vectors: IndexVectors) -> Any:
    """The dimension numbers of a scatter some of whose windows are spread."""
    inserted = sorted([*numbers.inserted_window_dims, *vectors.spread_dims])
    return numbers._replace(
        update_window_dims=tuple(p for p in numbers.update_window_dims if p not in vectors.places),
        inserted_window_dims=tuple(inserted),
        scatter_indices_batching_dims=tuple(
            vectors.batch[d] for d in numbers.scatter_indices_batching_dims
        ),
    )


def _cut_dims(context: LocalContext, windows: tuple[int, ...]) -> dict[int, int]:
    """The factors of the operand's sharded dims of which only a part is written."""
    sizes = context.rule.sizes
    batching = context.params["dimension_numbers"].operand_batching_dims
    return {
        d: dim[0]
        for d, dim in enumerate(context.rule.operands[0])
        if context.is_split(dim) and windows[d] != sizes[dim[0]] and d not in batching
    }


def _scatter_window(
    context: LocalContext,
    operand: Any,
    vectors: IndexVectors,
    updates: Any,
    windows: tuple[int, ...],
    cut: dict[int, int],
) -> list[Any]:
    """Scatter a single window of which each device writes a part, or nothing.

    A scatter would do where the window is one position, sent outside on the devices that do not
    own it. But of a scatter at one position XLA makes a slice and an update, and reads the wrong
    element where the position is outside and the operand was sliced before (openxla/xla#49121).
    """
    dims = context.params["dimension_numbers"].scatter_dims_to_operand_dims
    shape = context.global_shape(0)
    starts: list[Any] = [start_dtype(vectors.indices.dtype).type(0)] * operand.ndim
    for c, d in enumerate(dims):
        starts[d] = lax.reshape(clamp_position(vectors.given(c), vectors.upper[c]), ())
    sizes = [n if w == m else w for n, w, m in zip(operand.shape, windows, shape, strict=True)]
    kept = None
    if context.params["mode"] is not CLIP:
        kept = lax.reshape(vectors.given_in_range(), ())
    updates = lax.reshape(updates, sizes)
    return write_window(context, operand, updates, starts, windows, cut, _join(context.eqn), kept)


def _join(eqn: JaxprEqn) -> Join | None:
    """How a scatter joins updates with what was there, array by array."""
    if overwrites(eqn) or eqn.primitive.name != "scatter":
        return _JOINS[eqn.primitive.name]
    of_numbers = jaxpr_as_fun(ClosedJaxpr(eqn.params["update_jaxpr"], eqn.params["update_consts"]))
    of_rows = jax.vmap(lambda old, new: of_numbers(old, new)[0])

    def join(old: Any, new: Any) -> Any:
        return lax.reshape(of_rows(old.ravel(), new.ravel()), old.shape)

    return join


def _term_of_operand(context: LocalContext, operand: Any, joined: list[int]) -> Any:
    """What was there before, on one device of those that share the updates.

    The smallest and largest may meet it more than once, sums and products may not.
    """
    reduction = _JOINED_BY[context.eqn.primitive.name]
    if reduction not in (Reduction.SUM, Reduction.PROD):
        return operand
    first = lax.broadcast(is_first_shard(context, joined), operand.shape)
    product = reduction is Reduction.PROD
    nothing = lax.full_like(operand, 1) if product else nothing_like(operand)
    return lax.select(first, operand, nothing)
