"""A mesh whose axes are split in prime factors.

The user's axis `model` of size 8 becomes the sub-axes `model.0, model.1, model.2` of size 2,
major to minor. Reshaping the device array this way moves no device, so a sharding over the
sub-axes of an axis is the same placement as one over the axis. Axes of prime size keep their
name; axes of size one are dropped, as nothing can be sharded over them.

Invariants of `Mesh`:

- names are unique, and no axis has size one;
- `user_axes` lists each axis of the user's mesh with its sub-axes, in the user's order, and
  their concatenation is `names`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Mesh:
    """A refined mesh: sub-axes, and the user's axes they come from.

    Planning uses prime sub-axes; an emitted program joins those that it never takes apart.
    """

    names: Axes
    sizes: tuple[int, ...]
    user_axes: tuple[tuple[str, Axes], ...]

    def __post_init__(self) -> None:
        """Check the invariants in the module's docstring."""
        assert len(self.names) == len(self.sizes) == len(set(self.names)), self.names
        assert tuple(a for _, sub in self.user_axes for a in sub) == self.names, self.user_axes
        assert all(size > 1 for size in self.sizes), self.sizes

    @cached_property
    def axis_size(self) -> dict[str, int]:
        """Size of each sub-axis."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def named_sizes(self) -> list[tuple[str, int]]:
        """Each sub-axis with its size, in order."""
        return list(self.axis_size.items())

    @cached_property
    def sub_axes(self) -> dict[str, Axes]:
        """Sub-axes of each of the user's axes, major to minor."""
        return dict(self.user_axes)

    @cached_property
    def user_axis_of(self) -> dict[str, str]:
        """The user's axis that a sub-axis is part of."""
        return {sub: user for user, subs in self.user_axes for sub in subs}

    @property
    def device_count(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """Product of the sizes of some sub-axes."""
        sizes = self.axis_size
        total = 1
        for axis in axes:
            total *= sizes[axis]
        return total

    def dividing(self, axes: Axes, size: int) -> Axes:
        """The longest prefix of some sub-axes that divides a size."""
        for count in range(len(axes), 0, -1):
            if size % self.size(axes[:count]) == 0:
                return axes[:count]
        return ()

    def refine(self, axes: Iterable[str]) -> Axes:
        """The sub-axes of a sequence of the user's axes, or of sub-axes."""
        known = self.sub_axes
        return tuple(sub for axis in axes for sub in known.get(axis, (axis,)))

    def restore(self, axes: Axes) -> Axes | None:
        """The user's axes that a sequence of sub-axes is, or None where one is not whole."""
        restored = []
        position = 0
        while position < len(axes):
            user = self.user_axis_of[axes[position]]
            subs = self.sub_axes[user]
            if axes[position : position + len(subs)] != subs:
                return None
            restored.append(user)
            position += len(subs)
        return tuple(restored)

    def under(self, names: Sequence[str], sizes: Sequence[int]) -> "Mesh | None":
        """The same sub-axes as those of another mesh over the same devices in the same order.

        None where an axis of that mesh is no run of sub-axes.

        >>> refine_mesh(("x", "y"), (2, 2)).under(("a", "b"), (4, 1)).sub_axes
        {'a': ('x', 'y'), 'b': ()}
        """
        if math.prod(sizes) != self.device_count:
            return None
        user_axes, start = [], 0
        for name, size in zip(names, sizes, strict=True):
            stop = start
            while self.size(self.names[start:stop]) < size:
                stop += 1
            if self.size(self.names[start:stop]) != size:
                return None
            user_axes.append((name, self.names[start:stop]))
            start = stop
        return Mesh(self.names, self.sizes, tuple(user_axes))

    def permute_order(self, axes: Iterable[str]) -> Axes:
        """The same axes in the mesh's order, the only one in which `lax.ppermute` counts devices.

        In jax 0.10 its numbers follow the mesh's order whatever the order of the tuple, unlike
        those of `axis_index` and every other collective; 0.11 refuses any other order.
        """
        wanted = frozenset(axes)
        return tuple(axis for axis in self.names if axis in wanted)

    def permute_numbers(self, axes: Axes) -> tuple[int, ...]:
        """For each shard of a dim over `axes`, the number `lax.ppermute` gives its device."""
        ordered = self.permute_order(axes)
        numbers = np.arange(self.size(axes)).reshape([self.axis_size[a] for a in ordered])
        return tuple(numbers.transpose([ordered.index(a) for a in axes]).ravel().tolist())

    def show(self, axes: Axes) -> str:
        """Axes as text: the user's where whole, else the sub-axes."""
        return ", ".join(self.restore(axes) or axes)


def refine_mesh(names: Sequence[str], sizes: Sequence[int]) -> Mesh:
    """Split each axis in its prime factors, major to minor.

    >>> refine_mesh(("data", "model"), (3, 4)).names
    ('data', 'model.0', 'model.1')
    """
    user_axes = []
    prime_sizes: list[int] = []
    for name, size in zip(names, sizes, strict=True):
        primes = _prime_factors(size)
        user_axes.append((name, sub_names(str(name), len(primes), names)))
        prime_sizes.extend(primes)
    all_names = tuple(sub for _, subs in user_axes for sub in subs)
    return Mesh(all_names, tuple(prime_sizes), tuple(user_axes))


def sub_names(name: str, count: int, taken: Sequence[str]) -> Axes:
    """Names for the sub-axes of an axis, which sort as these do; no other axis has them.

    >>> sub_names("model", 2, ("data", "model")), sub_names("m", 2, ("m", "m.0"))
    (('model.0', 'model.1'), ('m..0', 'm..1'))
    """
    if count == 1:
        return (name,)
    digits, dots = len(str(count - 1)), "."
    while any(str(other).startswith(name + dots) for other in taken):
        dots += "."
    return tuple(f"{name}{dots}{i:0{digits}}" for i in range(count))


def plain_mesh(names: Sequence[str], sizes: Sequence[int]) -> Mesh:
    """A mesh whose axes are those of the user's, none taken apart; those of size one are dropped.

    >>> plain_mesh(("data", "model"), (1, 4)).names
    ('model',)
    """
    kept = [(str(n), s) for n, s in zip(names, sizes, strict=True) if s > 1]
    subs = [
        (name, (str(name),) if size > 1 else ()) for name, size in zip(names, sizes, strict=True)
    ]
    return Mesh(tuple([n for n, _ in kept]), tuple([s for _, s in kept]), tuple(subs))


def _prime_factors(size: int) -> list[int]:
    factors = []
    divisor = 2
    while divisor * divisor <= size:
        while size % divisor == 0:
            factors.append(divisor)
            size //= divisor
        divisor += 1
    return factors + ([size] if size > 1 else [])
