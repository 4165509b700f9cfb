"""A piece of code run with `jax.jit` and with `mw.jit` in its place: what comes of it is the same.

Compared are trees, types and weak types, values, places, what is printed, and classes of errors.
"""

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

Code = Callable[[Any], Any]
# Multiples of an eighth, whose sums are exact in every order.
X = (np.arange(64, dtype=np.float32).reshape(8, 8) * 7 % 23) / 8 - 0.75


def mesh_of(*sizes: int, names: str = "xyz", first: int = 0) -> Mesh:
    """A mesh of Auto axes, of one letter each, over devices from the first on."""
    devices = np.array(jax.devices()[first : first + int(np.prod(sizes))]).reshape(sizes)
    axes = tuple(names[: len(sizes)])
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(sizes))


def named(*spec: Any, mesh: Mesh | None = None) -> NamedSharding:
    """A sharding over four by two devices, or over another mesh."""
    return NamedSharding(mesh or mesh_of(4, 2), P(*spec))


def put(*spec: Any, x: Any = X, mesh: Mesh | None = None) -> jax.Array:
    """An array in its place, in buffers of its own."""
    return jax.device_put(x, named(*spec, mesh=mesh), may_alias=False)


@dataclass(frozen=True)
class Outcome:
    """What a piece of code gives, or the error it ends in; and what it prints."""

    value: Any
    error: Exception | None
    printed: str


def outcome(code: Code, jit: Any, falls_back: bool = False) -> Outcome:
    """What comes of a piece of code; warnings are another test's, but for one of a fallback."""
    value, found, printed = None, None, io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("ignore" if falls_back else "error", mw.FallbackWarning)
        try:
            value = jax.block_until_ready(code(jit))
            jax.effects_barrier()
        except Exception as error:
            found = error
    return Outcome(value, found, printed.getvalue())


def assert_same_outcome(code: Code, places: bool = True, falls_back: bool = False) -> None:
    """The same values, in the same places where that is said, or an error of the same class.

    It is an error to leave a program to `jax.jit`, but where it is said that it falls back.
    """
    theirs = outcome(code, jax.jit)
    if isinstance(theirs.error, jax.errors.JaxRuntimeError) and "INTERNAL" in str(theirs.error):
        return  # a mistake of XLA's, such as for donated arguments of which a result is a part
    ours = outcome(code, mw.jit, falls_back)
    if theirs.error is not None:
        assert isinstance(ours.error, type(theirs.error)), (ours, theirs.error)
        return
    if ours.error is not None:
        raise ours.error
    assert sorted(ours.printed.splitlines()) == sorted(theirs.printed.splitlines())
    assert_same(ours.value, theirs.value)
    pairs = zip(jax.tree.leaves(ours.value), jax.tree.leaves(theirs.value), strict=True)
    for got, want in pairs:
        assert type(got) is type(want)
        if isinstance(want, jax.Array):
            assert_same_place(got, want, places)


def assert_same_place(got: jax.Array, want: jax.Array, places: bool = True) -> None:
    """The same memory, and where that is said, the same sharding and commitment."""
    assert got.sharding.memory_kind == want.sharding.memory_kind
    if places:
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim)
        assert got.sharding == want.sharding
        assert got.committed == want.committed


def assert_same(found: Any, wanted: Any, rounding: float = 100.0) -> None:
    """Equal trees; floats to some roundings of the largest number of their array."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if not hasattr(want, "dtype"):
            assert type(got) is type(want)
            assert got == want
            continue
        assert type_of(got) == type_of(want)
        if got.dtype != jax.dtypes.float0:
            assert_near(numbers_of(got), numbers_of(want), rounding)


def type_of(x: Any) -> Any:
    """What decides the type of what is computed of a leaf."""
    return x.dtype, tuple(x.shape), getattr(x, "weak_type", False)


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
