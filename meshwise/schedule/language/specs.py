"""What a program says of how its arguments lie: `Replicated`, `Sliced`, `Local`, `Unreduced`.

Each speaks of some axes of the mesh, by default of the program's group; several are joined with
`&`. They are what a user writes; inside, values have a `Layout`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.errors import LayoutError, message
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import Reduction
from meshwise.schedule.layouts import Layout

REDUCTIONS: Mapping[str, Reduction] = {r.value: r for r in Reduction}


class LayoutSpec:
    """What is said of an argument's layout; `a & b` says both, along different axes."""

    @property
    def parts(self) -> "tuple[LayoutSpec, ...]":
        """What is said, one kind each."""
        return (self,)

    def __and__(self, other: Any) -> "LayoutSpec":
        return _joined((*self.parts, *as_spec(other).parts))

    def __rand__(self, other: Any) -> "LayoutSpec":
        return _joined((*as_spec(other).parts, *self.parts))


@dataclass(frozen=True)
class Replicated(LayoutSpec):
    """The same on every device; what is not said is this.

    >>> Replicated() & Sliced(0) & Local("model")
    Sliced(0) & Local('model')
    """

    @property
    def parts(self) -> tuple[LayoutSpec, ...]:
        """Nothing: along axes of which nothing is said a value is replicated."""
        return ()

    def __repr__(self) -> str:
        return "Replicated"


@dataclass(frozen=True)
class Sliced(LayoutSpec):
    """Each device has a part along a dim, in the order of the devices; the program sees all."""

    dim: int
    axes: str | Axes | None = None

    def __post_init__(self) -> None:
        is_dim = isinstance(self.dim, int | np.integer) and not isinstance(self.dim, bool)
        _refuse(self, [] if is_dim else [f"dim={self.dim!r:.60}"])

    def __repr__(self) -> str:
        return _shown("Sliced", self.dim, self.axes)


@dataclass(frozen=True)
class Local(LayoutSpec):
    """Each device has a value of its own, of the shape that the program sees.

    As an argument or a result it is an array with a leading dim that counts the devices.
    """

    axes: str | Axes | None = None

    def __post_init__(self) -> None:
        _refuse(self, [])

    def __repr__(self) -> str:
        return "Local" if self.axes is None else _shown("Local", self.axes)


@dataclass(frozen=True)
class Unreduced(LayoutSpec):
    """Each device has a term, and their sum (`op`: max, min, prod, ...) is the value.

    As an argument or a result it is an array with a leading dim that counts the terms.
    """

    op: str = "sum"
    axes: str | Axes | None = None

    def __post_init__(self) -> None:
        is_known = isinstance(self.op, str) and self.op in REDUCTIONS
        _refuse(self, [] if is_known else [f"op={self.op!r:.60}"])

    def __repr__(self) -> str:
        return _shown("Unreduced", self.op, self.axes)


def _refuse(spec: Any, offenders: list[str]) -> None:
    """Raise `LayoutError` where a layout is none: if there are offenders, or axes are no names."""
    if not _are_names(spec.axes):
        offenders = [*offenders, f"axes={spec.axes!r:.60}"]
    if offenders:
        raise LayoutError(
            message(
                f"mw.{type(spec).__name__} was given what it does not take",
                offenders,
                "A dim is an integer (from the end, if negative), axes are names of a mesh's axes, "
                f"and an operator is one of {', '.join(REDUCTIONS)}.",
                'For example mw.Sliced(0, "data"), mw.Local("data"), mw.Unreduced("max", "data").',
            )
        )


def _are_names(axes: Any) -> bool:
    return (
        axes is None
        or isinstance(axes, str)
        or (isinstance(axes, Sequence) and all(isinstance(axis, str) for axis in axes))
    )


@dataclass(frozen=True)
class _Both(LayoutSpec):
    """Several parts, each along axes of its own."""

    said: tuple[LayoutSpec, ...]

    @property
    def parts(self) -> tuple[LayoutSpec, ...]:
        """What is said, one kind each."""
        return self.said

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.said))


def _shown(kind: str, *said: Any) -> str:
    return f"{kind}({', '.join(repr(s) for s in said if s is not None)})"


def _joined(parts: tuple[LayoutSpec, ...]) -> LayoutSpec:
    if not parts:
        return Replicated()
    return parts[0] if len(parts) == 1 else _Both(parts)


def is_spec(value: Any) -> bool:
    """Whether a layout, or the class of one, which may stand for it."""
    return isinstance(value, LayoutSpec) or (
        isinstance(value, type) and issubclass(value, LayoutSpec)
    )


def as_spec(value: Any) -> LayoutSpec:
    """A layout; `Local` is short for `Local()`, None for `Replicated()`. Raises `LayoutError`."""
    if value is None:
        return Replicated()
    if isinstance(value, LayoutSpec):
        return value
    if is_spec(value) and value is not Sliced:
        return value()
    raise LayoutError(
        message(
            "A layout was expected",
            ["Sliced, without a dim" if value is Sliced else f"{value!r:.60}"],
            "A layout is mw.Replicated, mw.Sliced(dim), mw.Local or mw.Unreduced(op), or several "
            "joined with &.",
            "Write mw.Sliced(0) for parts along the first dim; leave out what is replicated.",
        )
    )


def axes_of(axes: str | Sequence[str] | None) -> Axes | None:
    """One axis, or several, as a tuple; None stays None. Raises `LayoutError`."""
    if not _are_names(axes):
        raise LayoutError(
            message(
                "Axes were expected",
                [f"axes={axes!r:.60}"],
                "Axes are the name of an axis of the mesh, or several.",
                'For example axes="data", or axes=("data", "model").',
            )
        )
    return (axes,) if isinstance(axes, str) else axes if axes is None else tuple(axes)


@dataclass(frozen=True)
class Boundary:
    """How an argument or result lies: its layout in the program, and outside of it.

    `own` are the axes, major to minor, whose devices the leading dim counts that the array has
    outside; None where it has none.
    """

    layout: Layout
    own: Axes | None = None

    def body_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that the program sees of an array of a shape outside."""
        return tuple(shape) if self.own is None else tuple(shape[1:])


def boundary(
    spec: LayoutSpec, shape: Sequence[int], group: Axes | None, sizes: Mapping[str, int]
) -> Boundary:
    """What a layout says of an array of a shape (outside of the program).

    `sizes` are all the mesh's axes. Raises `ValueError` with what does not fit, in words.
    """
    parts = _parts_over(spec, group, sizes)
    own = tuple(a for part, axes in parts if not isinstance(part, Sliced) for a in axes)
    has_own = any(not isinstance(part, Sliced) for part, _ in parts)
    count = 1
    for axis in own:
        count *= sizes[axis]
    if has_own and (not shape or shape[0] != count):
        leading = f"{shape[0]} as its first dim" if shape else "no dim"
        raise ValueError(
            f"{spec!r} wants a first dim of {count}, one entry for each device of "
            f"{', '.join(own)}, and it has {leading}"
        )
    rank = len(shape) - has_own
    return Boundary(_layout(spec, parts, rank), own if has_own else None)


def says(spec: LayoutSpec, layout: Layout, group: Axes | None, sizes: Mapping[str, int]) -> bool:
    """Whether a value of a layout is what is said of it. Raises `ValueError` as `boundary` does."""
    rank = len(layout.dims)
    return _layout(spec, _parts_over(spec, group, sizes), rank) == layout


def _parts_over(
    spec: LayoutSpec, group: Axes | None, sizes: Mapping[str, int]
) -> list[tuple[LayoutSpec, Axes]]:
    parts = [(part, _axes_of_part(part, group, sizes)) for part in spec.parts]
    named = [a for _, axes in parts for a in axes]
    if len(named) != len(set(named)):
        twice = next(a for a in named if named.count(a) > 1)
        raise ValueError(f"{spec!r} names axis {twice!r} twice")
    return parts


def _layout(spec: LayoutSpec, parts: Sequence[tuple[LayoutSpec, Axes]], rank: int) -> Layout:
    dims: list[Axes] = [()] * rank
    for part, axes in parts:
        if isinstance(part, Sliced):
            if not -rank <= part.dim < rank:
                raise ValueError(f"{spec!r}, but it has {rank} dims in the program")
            dims[part.dim] = (*dims[part.dim], *axes)
    local = sorted(a for part, axes in parts if isinstance(part, Local) for a in axes)
    terms = [(part, axes) for part, axes in parts if isinstance(part, Unreduced)]
    operators = {part.op for part, _ in terms}
    if len(operators) > 1:
        raise ValueError(f"{spec!r}: terms are joined by one operator")
    unreduced = tuple(sorted(a for _, axes in terms for a in axes))
    reduction = REDUCTIONS[operators.pop()] if unreduced else Reduction.SUM
    return Layout(tuple(dims), unreduced, reduction, tuple(local))


def _axes_of_part(part: Any, group: Axes | None, sizes: Mapping[str, int]) -> Axes:
    axes = axes_of(part.axes)
    if axes is None and group is None:
        raise ValueError(f"{part!r} names no axes, and the program has no group")
    axes = axes if axes is not None else group or ()
    unknown = [a for a in axes if a not in sizes]
    if unknown:
        raise ValueError(f"{part!r} names {unknown[0]!r}, which is no axis of {tuple(sizes)}")
    return axes
