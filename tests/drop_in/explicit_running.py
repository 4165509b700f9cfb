"""A function called under `jax.jit` and under `mw.jit` on a mesh of Explicit axes, and compared.

With the same arrays on the same mesh, and under `jax.jit` on a mesh of one device, where nothing
is partitioned. What the function saw of types inside is compared too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
XY = dict.fromkeys("xy", EXPLICIT)
MIXED = {"x": EXPLICIT, "y": AUTO}
AUTO_XY = dict.fromkeys("xy", AUTO)


def make(kinds, count=2):
    """A mesh of `count` devices along each axis."""
    shape = (count,) * len(kinds)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(kinds), axis_types=tuple(kinds.values()))


def array(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).uniform(0.5, 1.5, shape).astype(dtype)


SEEN = []


def see(x):
    """Note a value's type, and whether it speaks of the mesh in context."""
    mesh = jax.typeof(x).sharding.mesh
    SEEN.append((str(jax.typeof(x)), mesh == jax.sharding.get_abstract_mesh()))
    return x


def bare(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def anew(jit):
    """The same of functions that JAX has not seen yet: by function it keeps what it traced."""

    def of(fn=None, **options):
        return partial(of, **options) if fn is None else jit(partial(fn), **options)

    return of


def run(jit, kinds, function, arrays, count=2):
    """Results, and what the function saw, on a mesh in context."""
    SEEN.clear()
    with jax.set_mesh(make(kinds, count)):
        out = function(anew(jit), *[jax.device_put(a, spec) for a, spec in arrays])
    return out, list(dict.fromkeys(SEEN))


def agrees(kinds, function, arrays):
    got, seen = run(mw.jit, kinds, function, arrays)
    wanted, wanted_seen = run(jax.jit, kinds, function, arrays)
    truth, _ = run(jax.jit, kinds, function, arrays, count=1)
    assert seen == wanted_seen
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    leaves = zip(*map(jax.tree.leaves, (got, wanted, truth)), strict=True)
    for ours, theirs, whole in leaves:
        assert str(jax.typeof(ours)) == str(jax.typeof(theirs))
        assert ours.sharding == theirs.sharding
        for other in (theirs, whole):
            np.testing.assert_allclose(bare(ours), bare(other), rtol=2e-5, atol=2e-5)


def applied(fn):
    """Call the function under jit, twice: the second time from C++."""

    def call(jit, *args):
        step = jit(fn)
        step(*args)
        return step(*args)

    return call


SQUARE = (array(8, 4), P("x", "y"))
ROWS = (array(8, 4), P("x"))
