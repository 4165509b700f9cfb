"""Which equations of a per-device program keep this device's own part of a value.

`x[axis_index * k : axis_index * k + k]` is what partitioners emit and people write for it, with
more or fewer equations around the index: conversions, clamps of negative indices, several axes.
Scalar integers are followed as `constant + sum of coefficient * axis_index`, which is what an index
comes to however it is written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var, literal_value, named_axes, names_of
from meshwise.ir.mesh import Axes
from meshwise.ir.program import shape_of

# The name scope of padding that moves add so that parts are equal: nothing ever reads its content.
# Padding that a program itself writes has a value, and sums may count on it.
PADDING = "meshwise_padding"


@dataclass(frozen=True)
class Affine:
    """`constant + sum(coefficient * axis_index(axis))`, an integer that this device computes."""

    constant: int
    terms: tuple[tuple[str, int], ...] = ()

    def plus(self, other: "Affine", sign: int = 1) -> "Affine":
        """The sum (or difference) of two."""
        terms = dict(self.terms)
        for axis, coefficient in other.terms:
            terms[axis] = terms.get(axis, 0) + sign * coefficient
        kept = tuple(sorted((a, c) for a, c in terms.items() if c))
        return Affine(self.constant + sign * other.constant, kept)

    def times(self, factor: int) -> "Affine":
        """The product with a number."""
        terms = tuple((a, c * factor) for a, c in self.terms if c * factor)
        return Affine(self.constant * factor, terms)

    def bounds(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """The least and the greatest value on any device."""
        ends = [(0, c * (sizes[a] - 1)) for a, c in self.terms]
        return (
            self.constant + sum(min(e) for e in ends),
            self.constant + sum(max(e) for e in ends),
        )


@dataclass(frozen=True)
class Slice:
    """A value's part along a dim: of a device by its number over some axes, major to minor.

    `whole` is the value cut, before padding was added at its end so that parts are equal.
    """

    whole: Any
    dim: int
    axes: Axes


@dataclass
class Positions:
    """What is known of scalar integers and padded values, equation by equation."""

    sizes: Mapping[str, int]
    scalars: dict[Var, Affine] = field(default_factory=dict)
    signs: dict[Var, bool] = field(default_factory=dict)
    padded: dict[Var, Any] = field(default_factory=dict)

    def read(self, eqn: JaxprEqn) -> None:
        """Take note of one equation's result."""
        name = eqn.primitive.name
        if len(eqn.outvars) != 1:
            return
        (result,) = eqn.outvars
        aval: Any = result.aval
        if name == "pad" and PADDING in names_of(eqn):
            config, value = eqn.params["padding_config"], eqn.invars[0]
            if all(low == 0 and inner == 0 and high >= 0 for low, high, inner in config):
                self.padded[result] = value
        if getattr(aval, "shape", None) != ():
            return
        if name == "lt":
            self._compare(eqn, result)
            return
        found = self._scalar(name, eqn)
        if found is not None and self._is_exact(found, aval.dtype):
            self.scalars[result] = found

    def _is_exact(self, found: Affine, dtype: Any) -> bool:
        """Whether an integer fits its type on every device: no wrapping around, no rounding."""
        if not np.issubdtype(dtype, np.integer):
            return False
        low, high = found.bounds(self.sizes)
        return np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max

    def value(self, atom: Any) -> Affine | None:
        """What is known of a scalar integer."""
        if isinstance(atom, Literal):
            number = np.asarray(literal_value(atom))
            is_integer = number.ndim == 0 and np.issubdtype(number.dtype, np.integer)
            return Affine(int(number)) if is_integer else None
        return self.scalars.get(atom)

    def slice_of(self, eqn: JaxprEqn) -> Slice | None:
        """The slice that an equation is, None where it is none or may be another thing."""
        if eqn.primitive is not lax.dynamic_slice_p:
            return None
        whole, *starts = eqn.invars
        shape = shape_of(whole)
        kept: Sequence[int] = eqn.params["slice_sizes"]
        found: tuple[int, Affine] | None = None
        for dim, start in enumerate(starts):
            at = self.value(start)
            if at is None or at.constant:
                return None
            if at.terms:
                if found is not None:
                    return None
                found = dim, at
            elif kept[dim] != shape[dim]:
                return None
        if found is None:
            return None
        dim, at = found
        axes = self._axes(at, kept[dim])
        if axes is None or kept[dim] * math.prod(self.sizes[a] for a in axes) != shape[dim]:
            return None
        return Slice(self._before_padding(whole, dim, axes, kept[dim]), dim, axes)

    def _before_padding(self, whole: Any, dim: int, axes: Axes, part: int) -> Any:
        """The value that was padded along this dim alone, and no more than parts need."""
        if isinstance(whole, Literal) or whole not in self.padded:
            return whole
        before = self.padded[whole]
        sizes = list(whole.aval.shape)
        count = math.prod(self.sizes[a] for a in axes)
        sizes[dim] = before.aval.shape[dim]
        fits = tuple(sizes) == before.aval.shape and part == -(-sizes[dim] // count)
        return before if fits else whole

    def _axes(self, at: Affine, part: int) -> Axes | None:
        """Axes, major to minor, by which an index counts parts; None where it does not."""
        axes: list[str] = []
        stride = part
        for axis, coefficient in sorted(at.terms, key=lambda term: term[1]):
            if coefficient != stride:
                return None
            axes.insert(0, axis)
            stride *= self.sizes[axis]
        return tuple(axes)

    def _compare(self, eqn: JaxprEqn, result: Var) -> None:
        """Whether an index is negative, as clamps ask."""
        left, right = map(self.value, eqn.invars)
        if left is None or right is None:
            return
        low, high = left.plus(right, -1).bounds(self.sizes)
        if low >= 0 or high < 0:
            self.signs[result] = high < 0

    def _scalar(self, name: str, eqn: JaxprEqn) -> Affine | None:
        if name == "axis_index":
            found, stride = Affine(0), 1
            for axis in reversed(named_axes(eqn)):
                found = found.plus(Affine(0, ((axis, stride),) if self.sizes[axis] > 1 else ()))
                stride *= self.sizes[axis]
            return found
        if name == "select_n" and len(eqn.invars) == 3:
            which = eqn.invars[0]
            if isinstance(which, Literal) or which not in self.signs:
                return None
            return self.value(eqn.invars[2 if self.signs[which] else 1])
        operands = [found for a in eqn.invars if (found := self.value(a)) is not None]
        if len(operands) < len(eqn.invars) or name not in _ARITHMETIC:
            return None
        return _ARITHMETIC[name](*operands)


def _product(a: Affine, b: Affine) -> Affine | None:
    if a.terms and b.terms:
        return None
    return a.times(b.constant) if a.terms else b.times(a.constant)


_ARITHMETIC: Mapping[str, Callable[..., Affine | None]] = {
    "add": lambda a, b: a.plus(b),
    "sub": lambda a, b: a.plus(b, -1),
    "mul": _product,
    "convert_element_type": lambda a: a,
    "squeeze": lambda a: a,
    "reshape": lambda a: a,
    "copy": lambda a: a,
    "pvary": lambda a: a,
}
