"""Trees of results compared: structure, types, weak types, values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def type_of(x: Any) -> Any:
    """What decides the type of what is computed of a leaf."""
    return x.dtype, tuple(x.shape), getattr(x, "weak_type", False)


def assert_same(found: Any, wanted: Any, rounding: float = 100.0) -> None:
    """Equal trees; floats to some roundings of the largest number of their array."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type_of(got) == type_of(want)
        if got.dtype != jax.dtypes.float0:
            assert_near(numbers_of(got), numbers_of(want), rounding)


def numbers_of(x: Any) -> np.ndarray:
    """An array's elements; of keys their words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


def assert_near(got: np.ndarray, want: np.ndarray, rounding: float) -> None:
    """Of two arrays of one type."""
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        np.testing.assert_array_equal(got, want)
        return
    limit = rounding * float(jnp.finfo(want.dtype).eps)
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    scale = float(finite.max()) if finite.size else 1.0
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit * scale)
