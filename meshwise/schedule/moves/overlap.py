"""overlap: communication and the computation next to it at the same time (CoCoNeT, section 3.2).

Either a collective becomes a ring of sends, in which each device computes with what it holds while
that is sent on (`ring_gather`, `ring_scatter`), or a chain of equations is cut in chunks that
follow each other through it (`chunks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise._jax import Var
from meshwise.schedule.moves.chunks import overlap_chunks
from meshwise.schedule.moves.fuse import between
from meshwise.schedule.moves.refusal import refuse
from meshwise.schedule.moves.ring_gather import overlap_gather
from meshwise.schedule.moves.ring_scatter import overlap_all_reduce, overlap_scatter
from meshwise.schedule.view import GATHERS, SUMS, View

MOVE = "overlap"


@dataclass(frozen=True)
class Overlapped:
    """The program after an overlap, and its new results.

    `values` are the products after a gather; this device's part of a sum; or of a chain what others
    read. `whole` is the all_gather that an all_reduce ends with, or a gathered value that a ring
    laid together for others.
    """

    view: View
    values: tuple[Var, ...]
    whole: Var | None = None


def overlap(
    view: View,
    values: Var | Sequence[Var],
    chunks: int | None = None,
    dim: int | None = None,
    operand: int | None = None,
    bidirectional: bool = False,
    keeps: bool = False,
) -> Overlapped:
    """Communication and the computation next to it at the same time.

    What is meant is read from what makes `values`:

    - a product, or several of one gathered operand (`operand` says which of two), or the all_gather
      itself, for all products that read it: a ring with the all_gather. `keeps` lays the gathered
      value together for others that read it;
    - a reduce_scatter, or an all_reduce (cut along `dim`): a ring with the products before it;
    - with `chunks`, any equations, cut along `dim` of the last value.

    A ring of n devices sends n - 1 times, the bytes of the collective it is in place of; if
    `bidirectional`, half of them each way. Raises `IllegalMove`.
    """
    given = [values] if isinstance(values, Var) else [*values]
    if chunks is not None and given:
        chunked = overlap_chunks(view, given, chunks, dim)
        return Overlapped(chunked.view, chunked.values)
    kinds = {view.eqns[view.maker[v]].primitive.name if v in view.maker else "" for v in given}
    (kind,) = kinds if len(kinds) == 1 else ("",)
    if kind == "dot_general":
        ring = overlap_gather(view, given, operand, bidirectional, keeps)
        return Overlapped(ring.view, ring.products, ring.whole)
    if len(given) == 1 and (kind == "reduce_scatter" or kind in SUMS):
        (value,) = given
        if kind == "reduce_scatter":
            sums = overlap_scatter(view, value, bidirectional)
        else:
            sums = overlap_all_reduce(view, value, dim, bidirectional)
        return Overlapped(sums.view, (sums.part,), sums.whole)
    if len(given) == 1 and (kind in GATHERS or given[0] in view.gathers):
        ring = overlap_gather(view, _products_of(view, given[0]), None, bidirectional, keeps)
        return Overlapped(ring.view, ring.products, ring.whole)
    made = {view.maker[v] for v in given if v in view.maker}
    inner = [view.eqns[i].outvars[0] for i in sorted(between(view, made))]
    raise refuse(
        MOVE,
        [*map(view.text, given), *(f"between them {view.text(v)}" for v in inner)] or ["no values"],
        "What overlaps is a product with the all_gather, reduce_scatter or all_reduce next to it.",
        "Name the result of one of these alone, of a sum with what comes between: that comes along "
        "where it can; or cut a chain of equations in chunks, with chunks=.",
    )


def _products_of(view: View, gathered: Var) -> list[Var]:
    """The products that read a gathered value."""
    found = _dots(view, gathered)
    if not found:
        cuts = [v for i in view.readers[gathered] for v in view.eqns[i].outvars]
        found = [p for v in cuts if v in view.gathers for p in _dots(view, v)]
    if not found:
        raise refuse(
            MOVE,
            [f"no product reads {view.text(gathered)}"],
            "An all_gather is overlapped with the products of what it gathers.",
            "Reorder it past the computations between it and a product.",
        )
    return found


def _dots(view: View, value: Var) -> list[Var]:
    eqns = [view.eqns[i] for i in view.readers[value]]
    return [eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "dot_general"]
