"""Functions of local arrays, traced, simulated, and run on eight real devices beside it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Sharding
from meshwise.run.simulate import simulate

CUBE = refine_mesh(("x", "y", "z"), (2, 2, 2))
MESH = refine_mesh(("data", "model"), (2, 4))


def sharding(*dims):
    return Sharding(tuple(tuple(d.split()) for d in dims))


def trace(function, mesh, *avals):
    local = [a if hasattr(a, "dtype") else jax.ShapeDtypeStruct(a, jnp.float32) for a in avals]
    return _jax.make_jaxpr_over_axes(function, mesh.named_sizes, local)


def spec(sharding):
    return P(*(axes or None for axes in sharding.dims))


def on_devices(jaxpr, mesh, ins, outs, args):
    auto = (AxisType.Auto,) * len(mesh.names)
    devices = jax.make_mesh(mesh.sizes, mesh.names, auto)
    function = _jax.jaxpr_as_fun(jaxpr)
    in_specs, out_specs = tuple(map(spec, ins)), list(map(spec, outs))
    run = jax.shard_map(
        function, mesh=devices, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(run)(*args)


def check(function, mesh, ins, outs, args, rtol=1e-6, ways=(True,)):
    """Simulate and run; dims divide. `ways`: compiled or not."""
    local = [
        jax.ShapeDtypeStruct(
            [n // mesh.size(a) for n, a in zip(x.shape, s.dims, strict=True)], x.dtype
        )
        for x, s in zip(args, ins, strict=True)
    ]
    jaxpr = trace(function, mesh, *local)
    wanted = on_devices(jaxpr, mesh, ins, outs, args)
    shapes = [w.shape for w in wanted]
    for compiled in ways:
        got = simulate(jaxpr, mesh, ins, outs, shapes, args, compiled=compiled)
        for g, w in zip(got, wanted, strict=True):
            assert g.dtype == w.dtype
            is_key = jnp.issubdtype(g.dtype, jax.dtypes.prng_key)
            pair = [np.asarray(jax.random.key_data(a) if is_key else a) for a in (g, w)]
            np.testing.assert_allclose(*pair, rtol=rtol, atol=1e-6)
    return wanted


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)


EVERYWHERE = sharding("x y z", "")
