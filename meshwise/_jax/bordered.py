"""Windows over an array with borders of its own rows around it: wrapped, mirrored or repeated.

`jnp.pad(u, 1, mode="wrap")` lays rows side by side, and a convolution or pooling reads that.
Tracing writes both as one equation, as only together they say that the rows around belong to
whoever computes beside them. Parameters are those of the window, which pads as many rows as there
are in a border, the window itself and the `borders`. It stands in no program that is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from meshwise._jax.jaxprs import JaxprEqn, Primitive, new_eqn

WINDOWS = (
    lax.conv_general_dilated_p,
    lax.reduce_window_sum_p,
    lax.reduce_window_max_p,
    lax.reduce_window_min_p,
)


@dataclass(frozen=True, slots=True)
class Border:
    """Which rows of an array lie before its first one, along a dim, and behind its last one."""

    dim: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def goes_round(self, size: int) -> bool:
        """Whether they are those at the other ends of so many rows, in their order."""
        first = size - len(self.before)
        ends = tuple(range(first, size)), tuple(range(len(self.after)))
        return (self.before, self.after) == ends

    def laid_around(self, x: Any) -> Any:
        """The array with these rows around it."""

        def row(k: int) -> Any:
            return lax.slice_in_dim(x, k, k + 1, axis=self.dim)

        return lax.concatenate([*map(row, self.before), x, *map(row, self.after)], self.dim)


def _run(*operands: Any, window: Any, borders: Sequence[Border], **params: Any) -> Any:
    x, *others = operands
    padding = [*params["padding"]]
    for border in borders:
        x = border.laid_around(x)
        padding[padded_dim(window, params, border.dim)] = (0, 0)
    return window.bind(x, *others, **{**params, "padding": tuple(padding)})


def _bordered(window: Any) -> Primitive:
    primitive = Primitive(f"bordered_{window.name}")
    primitive.def_impl(_run)

    def result(*operands: Any, **params: Any) -> Any:
        (aval,) = jax.make_jaxpr(lambda *x: _run(*x, **params))(*operands).out_avals
        return aval

    primitive.def_abstract_eval(result)
    return primitive


BORDERED = {window: _bordered(window) for window in WINDOWS}


def padded_dim(window: Any, params: Any, dim: int) -> int:
    """Which of the amounts that a window pads is that of a dim of what it reads; -1 for none."""
    if window is not lax.conv_general_dilated_p:
        return dim
    spatial = params["dimension_numbers"].lhs_spec[2:]
    return spatial.index(dim) if dim in spatial else -1


def with_borders(
    eqn: JaxprEqn, x: Any, borders: Sequence[Border], outvars: Sequence[Any]
) -> JaxprEqn:
    """A window, which may have borders along other dims already, over an array with these."""
    window, padding = eqn.params.get("window", eqn.primitive), [*eqn.params["padding"]]
    for border in borders:
        amounts = len(border.before), len(border.after)
        padding[padded_dim(window, eqn.params, border.dim)] = amounts
    every = (*eqn.params.get("borders", ()), *borders)
    params = {**eqn.params, "padding": tuple(padding), "borders": every, "window": window}
    return new_eqn(BORDERED[window], [x, *eqn.invars[1:]], outvars, params, eqn)


def without_borders(eqn: JaxprEqn) -> JaxprEqn:
    """The window itself, which pads as many rows."""
    params = {k: v for k, v in eqn.params.items() if k not in ("window", "borders")}
    return eqn.replace(primitive=eqn.params["window"], params=params)
