"""Operators that go along a dim, and what they are of what is reversed in it.

A convolution of reversed rows with a reversed kernel is the reversed convolution, where padding
changes ends and every row has a window; sums from the first element on become sums from the last;
of rows that are cut out or joined it is others, or in the other order: a scan by halves, backwards.
Reductions and products are the same along other dims than they reduce, and smaller than what they
are of.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.operators import REDUCTIONS
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import equations_of

# For each dim of a result the dims of the operands that are reversed with it; None for no dim.
Passing = Mapping[int, tuple[int | None, ...]]


@dataclass(frozen=True)
class Directed:
    """How reversals pass through an operator, and its parameters where dims are reversed.

    Operands that it joins along one of these, `in_order`, are then in the other order.
    """

    passing: Callable[[JaxprEqn], Passing]
    turned: Callable[[JaxprEqn, frozenset[int]], dict[str, Any]]
    in_order: Callable[[JaxprEqn], int | None] = lambda eqn: None

    def operands(self, eqn: JaxprEqn, dims: frozenset[int], reversed_: list[Any]) -> list[Any]:
        """The operands, reversed already, as an equation reads them whose dims are reversed."""
        return reversed_[::-1] if self.in_order(eqn) in dims else reversed_


def _convolved(eqn: JaxprEqn) -> Passing:
    numbers, strides = eqn.params["dimension_numbers"], eqn.params["window_strides"]
    specs = numbers.out_spec, numbers.lhs_spec, numbers.rhs_spec
    spatial = zip(*(spec[2:] for spec in specs), strides, strict=True)
    return {out: (lhs, rhs) for out, lhs, rhs, stride in spatial if stride == 1}


def _convolved_back(eqn: JaxprEqn, dims: frozenset[int]) -> dict[str, Any]:
    spatial = eqn.params["dimension_numbers"].out_spec[2:]
    pairs = zip(spatial, eqn.params["padding"], strict=True)
    return {"padding": tuple(p[::-1] if d in dims else p for d, p in pairs)}


def _windowed(eqn: JaxprEqn) -> Passing:
    return {d: (d,) for d, stride in enumerate(eqn.params["window_strides"]) if stride == 1}


def _windowed_back(eqn: JaxprEqn, dims: frozenset[int]) -> dict[str, Any]:
    ends: Sequence[Any] = eqn.params["padding"]
    return {"padding": tuple(p[::-1] if d in dims else p for d, p in enumerate(ends))}


def _added_up(eqn: JaxprEqn) -> Passing:
    return {d: (d,) for d in range(len(shape_of(eqn.outvars[0])))}


def _added_up_back(eqn: JaxprEqn, dims: frozenset[int]) -> dict[str, Any]:
    return {"reverse": eqn.params["reverse"] != (eqn.params["axis"] in dims)}


def _padded(eqn: JaxprEqn) -> Passing:
    return {d: (d, None) for d in range(len(eqn.params["padding_config"]))}


def _padded_back(eqn: JaxprEqn, dims: frozenset[int]) -> dict[str, Any]:
    ends = enumerate(eqn.params["padding_config"])
    turned = [
        (high, low, inner) if d in dims else (low, high, inner) for d, (low, high, inner) in ends
    ]
    return {"padding_config": tuple(turned)}


def _sliced(eqn: JaxprEqn) -> Passing:
    return {d: (d,) for d in range(len(shape_of(eqn.invars[0])))}


def _sliced_back(eqn: JaxprEqn, dims: frozenset[int]) -> dict[str, Any]:
    params, sizes = eqn.params, shape_of(eqn.invars[0])
    starts = list(params["start_indices"])
    limits, steps = list(params["limit_indices"]), _jax.strides_of(eqn)
    for d in dims:
        count = shape_of(eqn.outvars[0])[d]
        last = starts[d] + max(0, count - 1) * steps[d]
        starts[d], limits[d] = sizes[d] - 1 - last, sizes[d] - starts[d]
        if not count:
            starts[d] = limits[d] = 0
    return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}


def _set(eqn: JaxprEqn) -> Passing:
    rank = len(shape_of(eqn.outvars[0]))
    return {d: tuple(d if shape_of(a) else None for a in eqn.invars) for d in range(rank)}


def _set_back(eqn: JaxprEqn, dims: frozenset[int]) -> dict[str, Any]:
    params = eqn.params
    own = list(zip(params["dims"], params["rows"], strict=True))

    def turned(x: Any, starts: Sequence[int]) -> tuple[int, ...]:
        each = zip(own, starts, strict=True)
        return tuple(shape_of(x)[d] - k - n if d in dims else k for (d, n), k in each)

    read = zip(eqn.invars[1:], params["starts"], strict=True)
    return {
        "at": turned(eqn.outvars[0], params["at"]),
        "starts": tuple(None if k is None else turned(x, k) for x, k in read),
    }


def _joined(eqn: JaxprEqn) -> Passing:
    return {d: (d,) * len(eqn.invars) for d in range(len(shape_of(eqn.outvars[0])))}


def _reduced(eqn: JaxprEqn) -> Passing:
    rank, axes = len(shape_of(eqn.invars[0])), eqn.params["axes"]
    return {d: (own,) for d, own in enumerate(own for own in range(rank) if own not in axes)}


def _multiplied(eqn: JaxprEqn) -> Passing:
    (contracted, batch) = eqn.params["dimension_numbers"]
    found: list[tuple[int | None, int | None]] = list(zip(*batch, strict=True))
    ranks = [len(shape_of(a)) for a in eqn.invars]
    left, right = (
        [d for d in range(rank) if d not in (*summed, *shared)]
        for rank, summed, shared in zip(ranks, contracted, batch, strict=True)
    )
    return dict(enumerate([*found, *((d, None) for d in left), *((None, d) for d in right)]))


def _as_before(eqn: JaxprEqn, dims: frozenset[int]) -> dict[str, Any]:
    return {}


_REDUCTIONS = Directed(_reduced, _as_before)
_WINDOWS = Directed(_windowed, _windowed_back)
_SUMS = Directed(_added_up, _added_up_back)
DIRECTED: Mapping[str, Directed] = {
    "conv_general_dilated": Directed(_convolved, _convolved_back),
    "pad": Directed(_padded, _padded_back),
    "slice": Directed(_sliced, _sliced_back),
    "set_rows": Directed(_set, _set_back),
    "concatenate": Directed(_joined, _as_before, lambda eqn: eqn.params["dimension"]),
    "reduce_window_sum": _WINDOWS,
    "reduce_window_max": _WINDOWS,
    "reduce_window_min": _WINDOWS,
    "cumsum": _SUMS,
    "cumprod": _SUMS,
    "cummax": _SUMS,
    "cummin": _SUMS,
    "cumlogsumexp": _SUMS,
    "dot_general": Directed(_multiplied, _as_before),
    "argmax": _REDUCTIONS,
    "argmin": _REDUCTIONS,
    "last_argmax": _REDUCTIONS,
    "last_argmin": _REDUCTIONS,
    **dict.fromkeys(REDUCTIONS, _REDUCTIONS),
}

# What finds the last of equals, by what finds the first; and the other way round.
OTHER_END: Mapping[Any, Any] = {
    lax.argmax_p: _jax.last_argmax_p,
    lax.argmin_p: _jax.last_argmin_p,
    _jax.last_argmax_p: lax.argmax_p,
    _jax.last_argmin_p: lax.argmin_p,
}


def from_other_end(eqn: JaxprEqn, operands: list[Any]) -> list[JaxprEqn]:
    """The equations of where something is, of what is reversed in the dim that is searched."""
    search, (axis,) = OTHER_END[eqn.primitive], eqn.params["axes"]
    last = shape_of(operands[0])[axis] - 1
    found = equations_of(eqn, operands, lambda x: last - search.bind(x, **eqn.params))
    assert found is not None, "what is searched is no key"
    return found
