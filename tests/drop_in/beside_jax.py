"""A case run under `jax.jit` and under `mw.jit`: values, shardings and exception classes."""

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

# Multiples of an eighth, whose sums are exact in every order.
X = (np.arange(64, dtype=np.float32).reshape(8, 8) * 7 % 23) / 8 - 0.75


def mesh_of(**axes: int) -> Mesh:
    """A mesh of Auto axes over the first devices."""
    count = int(np.prod(list(axes.values())))
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=jax.devices()[:count])


def on(mesh: Mesh, *spec: Any, array: Any = X) -> jax.Array:
    """An array laid on a mesh."""
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def outcome(case: Callable[[Any], Any], jit: Any) -> tuple[Any, str]:
    """What a case results in, or the error it ends in; and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = jax.block_until_ready(case(jit))
            jax.effects_barrier()
        except Exception as error:
            result = error
    return result, printed.getvalue()


def check_same(case: Callable[[Any], Any], shardings: bool = True) -> None:
    """The case has one outcome under both, shardings and commitment included."""
    wanted, told = outcome(case, jax.jit)
    got, said = outcome(case, mw.jit)
    if isinstance(wanted, Exception):
        assert isinstance(got, type(wanted)), (type(got), got, wanted)
        return
    if isinstance(got, Exception):
        raise got
    assert sorted(said.splitlines()) == sorted(told.splitlines())
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        check_leaf(ours, theirs, shardings)


def check_leaf(ours: Any, theirs: Any, shardings: bool) -> None:
    """One result beside the other."""
    a, b = np.asarray(ours), np.asarray(theirs)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype.kind in "fc":
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(a, b)
    if isinstance(theirs, jax.Array):
        assert isinstance(ours, jax.Array)
        assert ours.sharding.memory_kind == theirs.sharding.memory_kind
        if shardings:
            assert ours.sharding == theirs.sharding
            assert ours.committed == theirs.committed
