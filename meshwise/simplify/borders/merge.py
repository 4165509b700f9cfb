"""Moves of rows that are several equations, written as the one that says what moves.

Each of these would be right as it stands, and send more than it must: of a slice of a pad the pad
is shared out anew over the devices, and then the slice again. So, in a traced program,

- a slice of a slice, a slice of a pad and a pad of a slice become one slice or pad, but along dims
  that only one of them changes, where several read it; a slice of rows laid side by side what it
  takes of each, laid side by side, but of borders around what has borders in another dim each dim
  is cut for itself, so that what is diagonally off is a shift of a shift;
- a pad with what a window over it would pad with (the gradient of average pooling, `jnp.pad` before
  a convolution) becomes the window's own padding and dilation;
- a split into unlike parts becomes a slice for each, which sends what its own part needs;
- pads with zero whose rows meet, added up, are rows laid side by side; of other pads that are
  added up, what is cut of the sum is the sum of what is cut of them;
- two slices laid side by side the other way round (`jnp.roll`, its gradient) become one roll,
  before they become slices of something else, and a roll of a roll is one by both shifts;
- rows of one value side by side, each near where it was (its neighbours, with a border repeated),
  become a choice between shifts of it;
- a sum of what was scattered into zeros (the gradient of a loss that reads one logit a row) becomes
  a sum of what was scattered;
- a reduction over windows of what is repeated along other dims is taken once, and repeated; of what
  is repeated along theirs (the counts of average pooling) it is computed of numbers of rows;
- a reduction over one window that covers a dim (pooling of a whole image) becomes a plain one, and
  its gradient is spread;
- a reshape that transposes first becomes a transpose and a reshape;
- copies of rows that are told apart right after they were laid end to end (`jnp.tile`) become a dim
  of their own, copies of a single row (`jnp.pad(u, 2, mode="edge")`) that row, spread;
- a slice, or an update of most of a dim, at positions that are known while tracing becomes a
  plain slice, or a pad and a choice between old and new (`u.at[1:-1].set(...)` of a stencil);
- an update of few rows by what is made of few rows becomes one equation with the slices that cut
  them (`u.at[0].set(u[1])` of a wall).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.bodies import OUTERMOST, Scope, scopes
from meshwise.simplify.borders import (
    copies,
    cut_sums,
    ends,
    folded,
    joins,
    rows,
    sums,
    updates,
    windows,
)
from meshwise.simplify.borders.equations import Makers, any_maker
from meshwise.simplify.borders.shifts import choose_shifts, goes_round, near_shifts
from meshwise.simplify.borders.slices import times_read
from meshwise.simplify.counts import Counts

Merge = Callable[[JaxprEqn, Makers, Counts], list[JaxprEqn] | None]


def _first_of(*merges: Merge) -> Merge:
    """The first of several that finds something."""

    def merge(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
        found = (one(eqn, makers, counts) for one in merges)
        return next((made for made in found if made is not None), None)

    return merge


_MERGES: Mapping[str, Merge] = {
    "reshape": _first_of(copies.merge_reshape, copies.repeat_row),
    "slice": _first_of(rows.merge_slice, cut_sums.merge_cut),
    "pad": _first_of(rows.merge_pad, cut_sums.merge_cut),
    "reduce_sum": sums.merge_reduce_sum,
    "reduce_window_sum": _first_of(
        windows.merge_pad,
        windows.count_rows,
        windows.narrow,
        windows.merge_covered,
    ),
    **dict.fromkeys(
        ("reduce_window_max", "reduce_window_min"),
        _first_of(windows.narrow, windows.merge_covered),
    ),
    "conv_general_dilated": rows.merge_convolution,
    "concatenate": _first_of(joins.merge_concatenate, ends.merge_concatenate),
    **dict.fromkeys(
        ("add", "add_any"), _first_of(folded.merge_folded, joins.merge_add, ends.merge_add)
    ),
    "dynamic_slice": rows.merge_dynamic_slice,
    "dynamic_update_slice": _first_of(updates.merge_dynamic_update_slice, ends.merge_update),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul"),
        _first_of(updates.merge_scatter, ends.merge_update),
    ),
}


# Before slices are merged with what they are of, as no two slices of that might be a roll of it.
_FIRST: Mapping[str, Merge] = {"concatenate": joins.merge_rolled}


def merge_moves(
    eqns: Sequence[JaxprEqn], outputs: Sequence[Any], constants: Mapping[Var, Any]
) -> list[JaxprEqn]:
    """The equations, each move of rows as one; what is no longer used is still there.

    Where a split is read by nothing but a join, both are one move; so splits are for a second call
    of the equations that are still needed then (`slice_splits`).
    """
    counts = Counts(eqns, constants)
    return choose_shifts(_merged(_merged(eqns, _FIRST, counts), _MERGES, counts), outputs)


def _merged(
    eqns: Sequence[JaxprEqn], merges: Mapping[str, Merge], counts: Counts
) -> list[JaxprEqn]:
    merging = Merging(eqns, counts)
    found: list[JaxprEqn] = []
    for eqn, scope in zip(eqns, scopes(eqns), strict=True):
        made = merging.merged(eqn, scope, merges)
        merging.add(made, scope)
        found += made
    return found


class Merging:
    """What is known of equations, one after the other, to merge the next one with what it is of."""

    def __init__(self, eqns: Sequence[JaxprEqn], counts: Counts, shares: bool = True):
        """Of all of these nothing is known yet but what reads values otherwise than in part.

        With `shares` what is kept of a slice for one equation is read by others too: not where an
        equation may stay as it was after all.
        """
        others = (e for e in eqns if e.primitive is not lax.slice_p)
        read = {a for e in others for a in e.invars if not isinstance(a, Literal)}
        self._known: dict[Var, JaxprEqn] = {}
        self._made_in: dict[Var, Scope] = {}
        self._makers = Makers(self._known, read, self._made_in, times_read=times_read(eqns))
        self._counts, self._shares = counts, shares

    def merged(
        self, eqn: JaxprEqn, scope: Scope, merges: Mapping[str, Merge] = _MERGES
    ) -> list[JaxprEqn]:
        """What is written in the place of an equation; it itself where nothing is merged."""
        merge = merges.get(eqn.primitive.name)
        kept = self._makers.kept if self._shares else {}
        makers = replace(self._makers, here=scope, kept=kept)
        found = merge(eqn, makers, self._counts) if merge else None
        return [eqn] if found is None else found

    def maker(self, atom: Any) -> JaxprEqn | None:
        """The equation that makes a value, if it is one of these."""
        return any_maker(atom, self._makers)

    def shifted(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Rows side by side near where they were, as shifts of these; others as they are."""
        return near_shifts(eqn, self._makers) or [eqn]

    def goes_round(self, eqn: JaxprEqn, count: int) -> bool:
        """Whether an equation lays so many rows of one value side by side, and on round the end."""
        return eqn.primitive is lax.concatenate_p and goes_round(eqn, count, self._makers)

    def add(self, eqns: Sequence[JaxprEqn], scope: Scope) -> None:
        """Take in equations that follow, in a body."""
        results = [(v, eqn) for eqn in eqns for v in eqn.outvars]
        self._known.update(results)
        if scope != OUTERMOST:
            self._made_in.update((v, scope) for v, _ in results)
