"""Random arguments for a function of the array API, by dice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
FLOATS, INTS, UNSIGNED = ("float32", "bfloat16", "float16"), ("int32", "int8"), ("uint8", "uint32")
WIDE = {"f": "float64", "i": "int64", "u": "uint64", "c": "complex128"}
KINDS = {"f": FLOATS, "i": INTS, "u": UNSIGNED, "c": ("complex64",), "b": ("bool",)}
# Elements of an array at most, so that a sweep of thousands of calls stays quick.
ELEMENTS = 1500


class Scalar(float):
    """A Python number that is an argument of the call (a weak type), not a part of the function."""


@dataclass(frozen=True)
class Call:
    """A function of arrays: `function(*arrays)`; whatever is no array is a part of it."""

    function: Callable[..., Any]
    arrays: list[Any]


def is_array(x: Any) -> bool:
    """Whether a leaf is an argument of the call."""
    return isinstance(x, np.ndarray | np.generic | jax.Array | Scalar)


class Dice:
    """Draws shapes, types and numbers; the same for the same seed.

    `special` is how often an array of floats holds NaN, infinities and negative zeros.
    """

    def __init__(self, seed: int, special: float = 0.15):
        self.rng = np.random.default_rng(seed)
        self.special = special

    def flag(self, chance: float = 0.5) -> bool:
        return bool(self.rng.random() < chance)

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def integer(self, low: int, high: int) -> int:
        """One of low..high, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def size(self) -> int:
        """Of a dim: none in one of twelve."""
        return 0 if self.flag(1 / 12) else self.pick(*SIZES)

    def shape(self, low: int = 0, high: int = 4, least: int = 0) -> tuple[int, ...]:
        """A shape of rank low..high, each dim of `least` at least."""
        while True:
            rank = self.integer(low, high)
            shape = tuple(max(least, self.size()) for _ in range(rank))
            if np.prod(shape) <= ELEMENTS:
                return shape

    def axis(self, shape: Sequence[int]) -> int:
        return self.integer(-len(shape), len(shape) - 1)

    def axes(self, shape: Sequence[int]) -> Any:
        """All dims (None), one, or some."""
        if not shape or self.flag(0.3):
            return None
        if self.flag():
            return self.axis(shape)
        chosen = self.rng.permutation(len(shape))[: self.integer(1, len(shape))]
        return tuple(int(a) - len(shape) * self.flag(0.3) for a in chosen)

    def dtype(self, kinds: str = "f") -> Any:
        """A type of one of some kinds, as numpy's letters; 64 bits where they are on."""
        kind = self.pick(*kinds)
        found = KINDS[kind]
        if jax.config.jax_enable_x64 and kind in WIDE:
            found = (*found, WIDE[kind], WIDE[kind])
        return jnp.dtype(found[0] if self.flag(0.4) else self.pick(*found))

    def array(self, shape: Any = None, kinds: str = "f", dtype: Any = None, **numbers: Any) -> Any:
        """Random numbers; `low`, `high` bound them."""
        shape = self.shape() if shape is None else tuple(shape)
        dtype = self.dtype(kinds) if dtype is None else jnp.dtype(dtype)
        return self.numbers(shape, dtype, **numbers)

    def numbers(self, shape: Any, dtype: Any, low: Any = None, high: Any = None) -> np.ndarray:
        rng = self.rng
        if dtype == np.bool_:
            return np.asarray(rng.random(shape) < 0.5)
        if jnp.issubdtype(dtype, jnp.integer):
            least = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -9
            bounds = (least if low is None else low, 9 if high is None else high)
            return np.asarray(rng.integers(bounds[0], bounds[1], shape, endpoint=True), dtype)
        if low is not None:
            return np.asarray(rng.uniform(low, high, shape)).astype(dtype)
        found = np.asarray(rng.normal(size=shape) * 2)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            found = found + 1j * rng.normal(size=shape)
        elif self.flag(self.special):
            strange = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], size=shape)
            found = np.where(rng.random(shape) < 0.2, strange, found)
        return np.asarray(found).astype(dtype)

    def ordinary(self, shape: Any = None, kinds: str = "f", **numbers: Any) -> np.ndarray:
        """An array without NaN or infinities."""
        before, self.special = self.special, 0
        try:
            return self.array(shape, kinds, **numbers)
        finally:
            self.special = before

    def together(self, count: int, shape: Any = None, least: int = 0) -> list[tuple[int, ...]]:
        """Shapes that broadcast to one."""
        shape = self.shape(least=least) if shape is None else shape
        found = [shape]
        for _ in range(count - 1):
            dims = tuple(1 if self.flag(0.25) else n for n in shape)
            found.append(dims[self.integer(0, len(dims)) :] if self.flag(0.3) else dims)
        return [found[i] for i in self.rng.permutation(count)]

    def matrix(self, batch: Any = (), rows: int | None = None, kinds: str = "f") -> np.ndarray:
        """Square and well conditioned; of kinds that solvers take."""
        n = self.integer(1, 7) if rows is None else rows
        dtype = np.dtype("complex64" if self.pick(*kinds) == "c" else "float32")
        if jax.config.jax_enable_x64 and self.flag(0.7):
            dtype = np.dtype(WIDE[{"c": "c"}.get(dtype.kind, "f")])
        found = self.rng.normal(size=(*batch, n, n)) + 1.5 * n * np.eye(n)
        if dtype.kind == "c":
            found = found + 1j * self.rng.normal(size=found.shape)
        return found.astype(dtype)

    def definite(self, batch: Any = (), rows: int | None = None, kinds: str = "f") -> np.ndarray:
        """Symmetric (or Hermitian) and positive definite."""
        root = self.matrix(batch, rows, kinds)
        scaled = root @ np.conj(np.swapaxes(root, -1, -2)) / root.shape[-1]
        return scaled.astype(root.dtype)

    def batch(self) -> tuple[int, ...]:
        return self.shape(0, 2)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """Arrays among the arguments are the call's, all else is the function's."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if is_array(x)]

        def of_arrays(*arrays: Any) -> Any:
            full = list(leaves)
            for place, x in zip(places, arrays, strict=True):
                full[place] = x
            given, named = jax.tree.unflatten(tree, full)
            return function(*given, **named)

        return Call(of_arrays, [leaves[i] for i in places])
