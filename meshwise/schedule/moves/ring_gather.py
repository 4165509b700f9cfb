"""overlap of products with the all_gather of an operand: tiles go round, multiplied on their way.

Along a free dim (or one of the batch) of the product, a tile makes a part of the result; along a
contracted one, a term of it. Products that read one gathered value share its ring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of, type_of
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced
from meshwise.schedule.moves.rings import Ring, filled_from, part_at, visit, with_part
from meshwise.schedule.rewrite import trace_piece
from meshwise.schedule.tiling import pad_dim
from meshwise.schedule.view import Tile, View

MOVE = "overlap"


@dataclass(frozen=True)
class GatherRing:
    """The program after products were overlapped with a gather, their results, and `whole`.

    `whole` is the gathered value, laid together from the tiles that went round, where it is kept.
    """

    view: View
    products: tuple[Var, ...]
    whole: Var | None


@dataclass(frozen=True)
class _Product:
    """A product on tiles of one operand, cut along `dim`.

    Where that dim is in the other operand and in the result; None where it is not.
    """

    index: int
    eqn: JaxprEqn
    operand: int
    dim: int
    other_dim: int | None
    result_dim: int | None

    @property
    def other(self) -> Any:
        """The operand that is not gathered."""
        return self.eqn.invars[1 - self.operand]

    def of_tile(self, tile: jax.Array, other: Any) -> jax.Array:
        """The product of a tile; a term of a sum is at least of single precision."""
        params = dict(self.eqn.params)
        if self.result_dim is None:
            params["preferred_element_type"] = _sum_type(self.eqn.outvars[0])
        operands = [tile, other] if self.operand == 0 else [other, tile]
        with _jax.at_source(self.eqn):
            return _jax.bind(self.eqn, operands, params)[0]

    def so_far(
        self, before: Any, tile: jax.Array, other: Any, owner: Any, size: int, total: int
    ) -> jax.Array:
        """The result with what the tile of one more device makes of it.

        The gathered dim has `size` elements, and `total` with padding, which is never summed.
        """
        if self.other_dim is not None:
            other = part_at(other, self.other_dim, owner, tile.shape[self.dim])
        if self.result_dim is None and total != size:
            tile = filled_from(tile, self.dim, owner, size, np.zeros((), tile.dtype))
        result = self.of_tile(tile, other)
        if self.result_dim is None:
            join = lax.bitwise_or if result.dtype == np.bool_ else lax.add
            return result if before is None else join(before, result)
        whole = _zeros(result, self.result_dim, total) if before is None else before
        return with_part(whole, result, self.result_dim, owner)


def overlap_gather(
    view: View,
    products: Sequence[Var],
    operand: int | None = None,
    bidirectional: bool = False,
    keeps: bool = False,
) -> GatherRing:
    """Products (dot_general) of one gathered operand, in a ring with its all_gather.

    `operand` says which of the first product's two is meant where both are gathered; by default the
    larger. Others that read the gathered value forbid it, unless `keeps`: then the ring lays it
    together for them, which sends nothing more, but holds the whole as before. Along a free dim or
    one of the batch results are the same bit for bit, as far as the machine's product of some rows
    is; along a contracted dim the terms are summed in the order in which they come, in single
    precision at least. Raises `IllegalMove`.
    """
    gathered = _gathered_operand(view, products[0], operand)
    tile = view.gathers[gathered]
    found = [_product(view, p, gathered, tile) for p in dict.fromkeys(products)]
    raw = _raw_gather(view, gathered)
    _check_can_begin(view, raw, found)
    readers = _other_readers(view, raw, gathered, found)
    if readers and not keeps:
        raise refuse(
            MOVE,
            [f"{view.text(gathered)} is read by {line} too" for line in readers],
            "A ring has one tile at a time, and the gathered value nowhere as a whole.",
            "If these are products, name them as well, for one ring; or have the ring lay the "
            "whole together for them, with keeps=True.",
        )
    index = min(p.index for p in found)
    gather = view.eqns[view.maker[raw]]
    ring = Ring(tile.axes, view.mesh, reason_scope(len(view.program.reasons)))
    size = shape_of(gathered)[tile.dim]

    def round_(x: jax.Array, *others: Any) -> list[jax.Array]:
        with _jax.at_source(gather):
            return _round(ring, x, found, others, tile.dim, size, bidirectional, bool(readers))

    piece = trace_piece(round_, [tile.tile, *(p.other for p in found)], view.mesh, index)
    results = piece.results[: len(found)]
    renamed = {p.eqn.outvars[0]: r for p, r in zip(found, results, strict=True)}
    whole = piece.results[len(found)] if readers else None
    if whole is not None:
        renamed[raw] = whole
    jaxpr = replaced(view, MOVE, [p.index for p in found], [piece], renamed)
    reason = Reason(
        f"overlap of all_gather {view.text(raw)} with {len(found)} product(s) of it, ring of "
        f"{ring.size}",
        _jax.source_summary(gather),
    )
    return GatherRing(view.with_jaxpr(jaxpr, [reason]), results, whole)


def _round(
    ring: Ring,
    tile: jax.Array,
    products: Sequence[_Product],
    others: Sequence[Any],
    dim: int,
    size: int,
    bidirectional: bool,
    keeps: bool,
) -> list[jax.Array]:
    """Results of the products, and the whole where it is kept (padded, as gathered)."""
    part = tile.shape[dim]
    total = part * ring.size
    others = [
        o if p.other_dim is None else pad_dim(o, p.other_dim, total)
        for p, o in zip(products, others, strict=True)
    ]

    def use(state: list[Any], held: jax.Array, owner: Any) -> list[Any]:
        new = [
            product.so_far(before, held, other, owner, size, total)
            for product, other, before in zip(products, others, state, strict=False)
        ]
        if keeps:
            whole = _zeros(held, dim, total) if state[-1] is None else state[-1]
            new.append(with_part(whole, held, dim, owner))
        return new

    state = visit(ring, tile, use, [None] * (len(products) + keeps), bidirectional)
    for i, product in enumerate(products):
        if product.result_dim is None:
            state[i] = lax.convert_element_type(state[i], type_of(product.eqn.outvars[0]).dtype)
        elif total != size:
            state[i] = lax.slice_in_dim(state[i], 0, size, axis=product.result_dim)
    return state


def _zeros(part: jax.Array, dim: int, size: int) -> jax.Array:
    return lax.full([size if d == dim else n for d, n in enumerate(part.shape)], 0, part.dtype)


def _sum_type(result: Any) -> Any:
    """The type in which terms of a product are added, as a product adds within itself."""
    dtype = result.aval.dtype
    is_small = jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if is_small else dtype


def _gathered_operand(view: View, product: Var, operand: int | None) -> Var:
    """The gathered operand of a product that is meant."""
    index = equation_of(view, product, MOVE, "dot_general".__eq__, "a matrix product (dot_general)")
    eqn = view.eqns[index]
    wanted = (0, 1) if operand is None else (operand,)
    found = [
        a
        for i, a in enumerate(eqn.invars)
        if i in wanted and not isinstance(a, Literal) and a in view.gathers
    ]
    if not found:
        raise refuse(
            MOVE,
            [f"operand {i} is {view.text(eqn.invars[i])}" for i in wanted],
            "A product is overlapped with an all_gather that makes one of its operands, tiled and "
            "over whole axes of the mesh.",
            "Reorder the all_gather past the computations between it and the product; or name the "
            "result of a reduce_scatter or all_reduce after the product.",
        )
    return max(found, key=lambda a: math.prod(shape_of(a)))


def _product(view: View, product: Var, gathered: Var, tile: Tile) -> _Product:
    """A product with what its factor rule says of the gathered dim."""
    index = equation_of(view, product, MOVE, "dot_general".__eq__, "a matrix product (dot_general)")
    eqn = view.eqns[index]
    operands = [i for i, a in enumerate(eqn.invars) if a is gathered]
    if len(operands) != 1:
        raise refuse(
            MOVE,
            [f"{view.text(product)} reads {view.text(gathered)} as {len(operands)} operands"],
            "A ring has one tile at a time: of a product it is one operand.",
            "Leave this product to XLA, with its all_gather.",
        )
    (operand,) = operands
    found = _Product(index, eqn, operand, tile.dim, *_places(eqn, operand, tile.dim))
    alike = [a for a in tile.axes if a not in view.layout(found.other).varying]
    if found.result_dim is None and alike:
        raise refuse(
            MOVE,
            [
                f"{view.text(product)} sums over the gathered dim, and {view.text(found.other)} is "
                f"the same on all devices along {view.mesh.show(tuple(alike))}"
            ],
            "Each device of a ring adds terms in another order: results that are to be the same "
            "would differ in their last bits.",
            "Let each device compute its own part of the product (reduce_scatter), not all of it; "
            "or gather another dim.",
        )
    return found


def _places(eqn: JaxprEqn, operand: int, dim: int) -> tuple[int | None, int | None]:
    """Where a dim of one operand of a product is in the other one, and in the result."""
    contract, batch = eqn.params["dimension_numbers"]
    if dim in contract[operand]:
        return contract[1 - operand][contract[operand].index(dim)], None
    if dim in batch[operand]:
        place = batch[operand].index(dim)
        return batch[1 - operand][place], place
    free = [
        (i, d)
        for i, atom in enumerate(eqn.invars)
        for d in range(len(shape_of(atom)))
        if d not in contract[i] and d not in batch[i]
    ]
    return None, len(batch[0]) + free.index((operand, dim))


def _check_can_begin(view: View, raw: Var, products: Sequence[_Product]) -> None:
    """No product waits for the gathered value by its other operand."""
    after = {raw}
    for eqn in view.eqns:
        if any(not isinstance(a, Literal) and a in after for a in eqn.invars):
            after.update(eqn.outvars)
    for product in products:
        if not isinstance(product.other, Literal) and product.other in after:
            raise refuse(
                MOVE,
                [f"{view.text(product.other)} is computed from {view.text(raw)}"],
                "A product of tiles begins before all of them are there: its other operand must be "
                "there without the gather.",
                "Leave this product after the gather.",
            )


def _raw_gather(view: View, gathered: Var) -> Var:
    """The all_gather's own result, its padding at the end not cut off."""
    eqn = view.eqns[view.maker[gathered]]
    raw = eqn.invars[0] if eqn.primitive.name == "slice" else gathered
    assert isinstance(raw, Var)
    return raw


def _other_readers(view: View, raw: Var, gathered: Var, products: Sequence[_Product]) -> list[str]:
    """Who reads a gathered value beside some products."""
    known = {p.index for p in products}
    if raw is not gathered:
        known.add(view.maker[gathered])
    found = [i for v in dict.fromkeys((raw, gathered)) for i in view.readers[v] if i not in known]
    lines = [f"{view.eqns[i].primitive.name} at {_jax.source_summary(view.eqns[i])}" for i in found]
    return lines + ["the program's results"] * bool({raw, gathered} & view.returned)
