"""A piece of code run with `jax.jit` and with `mw.jit` in its place: what it gives is the same."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

Code = Callable[[Any], Any]
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def mesh_of(*sizes: int, first: int = 0) -> Mesh:
    """A mesh of axes x, y, z over devices from the first on."""
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[first : first + count]).reshape(sizes)
    names = ("x", "y", "z")[: len(sizes)]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def named(*spec: Any, mesh: Mesh | None = None) -> NamedSharding:
    """A sharding over four by two devices, or over another mesh."""
    return NamedSharding(mesh or mesh_of(4, 2), P(*spec))


def put(*spec: Any, x: Any = X, mesh: Mesh | None = None) -> jax.Array:
    """An array in its place, in buffers of its own."""
    return jnp.copy(jax.device_put(x, named(*spec, mesh=mesh)))


def outcome(code: Code, jit: Any) -> tuple[Any, Exception | None]:
    """What a piece of code gives, or the error it ends in; warnings are another test's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", mw.FallbackWarning)
        try:
            return code(jit), None
        except Exception as error:
            return None, error


def assert_same_outcome(code: Code) -> None:
    """The same values in the same places, or an error of the same class."""
    theirs, refusal = outcome(code, jax.jit)
    if isinstance(refusal, jax.errors.JaxRuntimeError) and "INTERNAL" in str(refusal):
        return  # a mistake of XLA's, such as for donated arguments of which a result is a part
    ours, error = outcome(code, mw.jit)
    if refusal is not None:
        assert isinstance(error, type(refusal)), (refusal, error)
        return
    if error is not None:
        raise error
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert_same(mine, other)


def assert_same(ours: Any, theirs: Any) -> None:
    """Two leaves of results: arrays with their types and places, or plain values."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, np.ndarray):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        return
    if not isinstance(theirs, jax.Array):
        assert ours == theirs
        return
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert (ours.weak_type, ours.committed) == (theirs.weak_type, theirs.committed)
    assert ours.sharding.is_equivalent_to(theirs.sharding, theirs.ndim)
    if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
        ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5)
