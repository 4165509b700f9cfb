"""Small per-device programs as executables on meshes of devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.run.execute import Executable

MODEL = ("model.0", "model.1")


def make_mesh(kind=AxisType.Auto, devices=None, **axes):
    axes = axes or {"data": 2, "model": 4}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=devices)


def shape_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sharding(*dims):
    """Axes of each dim, `model` in full."""
    parts = [d.replace("model", " ".join(MODEL)) if d == "model" else d for d in dims]
    return Sharding(tuple(tuple(p.split()) for p in parts))


def program(function, jax_mesh, ins, outs):
    """A per-device program; `ins` and `outs` are pairs of a global type and a sharding."""
    mesh = refine_mesh(jax_mesh.axis_names, jax_mesh.devices.shape)
    local = [jax.ShapeDtypeStruct(local_shape(t.shape, s, mesh), t.dtype) for t, s in ins]
    jaxpr = _jax.make_jaxpr_over_axes(function, mesh.named_sizes, local)
    in_types, in_shardings = zip(*ins, strict=True) if ins else ((), ())
    out_types, out_shardings = zip(*outs, strict=True) if outs else ((), ())
    return PerDeviceProgram(jaxpr, mesh, in_shardings, out_shardings, in_types, out_types)


X, W = np.arange(32, dtype=np.float32).reshape(4, 8), np.ones((8, 4), np.float32) / 8


def matmul(mesh, **options):
    """`x @ w` and `x + 1`, the contracted dim sharded over model."""
    ins = [(shape_of(4, 8), sharding("data", "model")), (shape_of(8, 4), sharding("model", ""))]
    outs = [(shape_of(4, 4), sharding("data", "")), (shape_of(4, 8), sharding("data", "model"))]
    made = program(lambda x, w: [lax.psum(x @ w, MODEL), x + 1], mesh, ins, outs)
    return Executable(made, mesh, **options)


def doubled(mesh, size, dtype=jnp.float32, axes="model", **options):
    """Twice a vector, and its sum."""

    def function(x):
        index = lax.axis_index(axes_of_dim) * x.size + jnp.arange(x.size)
        total = lax.psum(jnp.where(index < size, x, 0).sum(), axes_of_dim)
        return [x * 2, total]

    place = sharding(axes)
    (axes_of_dim,) = place.dims
    vector = shape_of(size, dtype=dtype)
    made = program(
        function, mesh, [(vector, place)], [(vector, place), (shape_of(dtype=dtype), sharding())]
    )
    return Executable(made, mesh, **options)


def check_matmul(outs, mesh):
    np.testing.assert_allclose(outs[0], X @ W)
    np.testing.assert_allclose(outs[1], X + 1)
    assert [o.sharding for o in outs] == [
        NamedSharding(mesh, P("data")),
        NamedSharding(mesh, P("data", "model")),
    ]
