"""How one value lies on a mesh.

A `Sharding` says, for each dim, the ordered tuple of sub-axes it is sharded over (major to
minor), and over which axes the value is *unreduced*: there every device holds a term, and their
sum (or max, min, ...) is the value. Over every other axis the value is replicated.

A dim may lie *turned* along axes: the devices hold its shards in the other order, the last one
first. Nobody wants a value so; a reversal leaves it so, and its shards go from there straight to
where they are wanted.

Invariants: an axis is used at most once, in dims and unreduced together; unreduced axes are
sorted; a value without unreduced axes has `Reduction.SUM` as its reduction; turned axes are sorted,
and all axes of some dims, that divide.

A dim of size `n` sharded over `k` devices has local size `ceil(n / k)`; where that is more than
`n / k` the tail is padding, whose content is undefined.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from meshwise.ir.mesh import Axes, Mesh

DimAxes = tuple[Axes, ...]


class Reduction(Enum):
    """The operator that joins the terms of an unreduced value."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    AND = "and"
    OR = "or"


@dataclass(frozen=True, slots=True)
class Sharding:
    """Axes of each dim, and the axes over which the value is unreduced."""

    dims: DimAxes
    unreduced: Axes = ()
    reduction: Reduction = Reduction.SUM
    turned: Axes = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the invariants in the module's docstring."""
        key = self.dims, self.unreduced, self.reduction, self.turned
        object.__setattr__(self, "_hash", hash(key))
        used = [axis for axes in self.dims for axis in axes] + list(self.unreduced)
        assert len(used) == len(set(used)), f"an axis is used twice in {self}"
        assert self.unreduced == tuple(sorted(self.unreduced)), self
        assert self.unreduced or self.reduction is Reduction.SUM, self
        assert self.turned == tuple(sorted(self.turned)), self
        own = [axes for axes in self.dims if not set(axes).isdisjoint(self.turned)]
        assert {a for axes in own for a in axes} == set(self.turned), self

    def __hash__(self) -> int:
        """Made once: shardings are the keys of every table of the search."""
        return self._hash

    def __reduce__(self) -> Any:
        """Made anew where it is read: texts have another hash in each process."""
        return Sharding, (self.dims, self.unreduced, self.reduction, self.turned)

    def __str__(self) -> str:
        """Short text, e.g. `[data, -] sum over model`."""
        dims = ", ".join("*".join(axes) or "-" for axes in self.dims)
        terms = (
            f" {self.reduction.value} over {', '.join(self.unreduced)}" if self.unreduced else ""
        )
        turned = f" turned along {', '.join(self.turned)}" if self.turned else ""
        return f"[{dims}]{terms}{turned}"

    @property
    def used_axes(self) -> frozenset[str]:
        """Every axis over which the value is sharded or unreduced."""
        return frozenset(a for axes in self.dims for a in axes).union(self.unreduced)

    @property
    def reduced(self) -> "Sharding":
        """The same dims with nothing left to reduce."""
        return Sharding(self.dims) if self.unreduced else self

    @property
    def straight(self) -> "Sharding":
        """The same with every shard where it belongs."""
        return unreduced(self.dims, self.unreduced, self.reduction) if self.turned else self


def replicated(rank: int) -> Sharding:
    """The sharding that keeps a value of some rank whole on every device."""
    return Sharding(((),) * rank)


def unreduced(
    dims: DimAxes, axes: Sequence[str], reduction: Reduction, turned: Sequence[str] = ()
) -> Sharding:
    """A sharding with unreduced axes, in canonical form; of the same axes the same object."""
    if turned:
        kept = reduction if axes else Reduction.SUM
        return _made(dims, tuple(sorted(axes)), kept, tuple(sorted(turned)))
    if not axes:
        return sharding_of(dims)
    return _made(dims, tuple(sorted(axes)), reduction)


def sharding_of(dims: DimAxes) -> Sharding:
    """A sharding with nothing unreduced; of the same axes the same object."""
    return _made(dims)


# Searches ask for few shardings, and for each of them thousands of times.
_made = lru_cache(maxsize=1 << 16)(Sharding)


def local_shape(shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    """Shape on each device of a value of a global shape: `ceil(size / shards)` for each dim."""
    return tuple(
        -(-size // mesh.size(axes)) if axes else size
        for size, axes in zip(shape, sharding.dims, strict=True)
    )


def padded_shape(shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    """Global shape with each dim rounded up to a multiple of its shards."""
    local = local_shape(shape, sharding, mesh)
    return tuple(n * mesh.size(axes) for n, axes in zip(local, sharding.dims, strict=True))


def is_part(held: Sharding, wanted: Sharding) -> bool:
    """Whether each device has its shard of what is wanted in what it holds."""
    return not (held.unreduced or held.turned or wanted.turned) and all(
        own[: len(axes)] == axes for axes, own in zip(held.dims, wanted.dims, strict=True)
    )


def is_part_of_rows(whole: Sharding, part: Sharding) -> bool:
    """Whether one sharding is the other one but for axes of the leading dim, which was whole."""
    (first, *rest), (own, *others) = part.dims, whole.dims
    terms, as_whole = (part.unreduced, part.reduction), (whole.unreduced, whole.reduction)
    return bool(first) and not own and rest == others and terms == as_whole


def local_bytes(shape: Sequence[int], itemsize: int, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes that each device holds, padding included."""
    return math.prod(local_shape(shape, sharding, mesh)) * itemsize
