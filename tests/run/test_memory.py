"""Peak temporaries of the compiled program beside those that jax.jit takes of the same."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")


def heat(x):
    return x + 0.1 * (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) - 2 * x)


f32 = jnp.float32
CASES = {
    "halo of an argument": (conv, ((4, 256, 32), (5, 32, 32)), (P(None, "x"), P()), P(None, "x")),
    "halo of what is computed": (
        lambda x, w: conv(jnp.sin(x), w),
        ((4, 256, 32), (5, 32, 32)),
        (P(None, "x"), P()),
        P(None, "x"),
    ),
    "windows of an argument": (pooled, ((64, 4096),), (P("x"),), P("x")),
    "rolls of an argument": (heat, ((64, 4096),), (P("x"),), P("x")),
}


@pytest.mark.parametrize("function, shapes, in_specs, out_spec", CASES.values(), ids=CASES)
def test_no_more_than_jax_takes(function, shapes, in_specs, out_spec):
    mesh = jax.make_mesh((8,), ("x",))
    args = [jax.ShapeDtypeStruct(shape, f32) for shape in shapes]
    shardings = [NamedSharding(mesh, spec) for spec in in_specs]
    peer = jax.jit(function, in_shardings=shardings, out_shardings=NamedSharding(mesh, out_spec))
    taken = peer.lower(*args).compile().memory_analysis().temp_size_in_bytes
    ours = mw.jit(function, mesh=mesh, in_shardings=in_specs, out_shardings=out_spec)
    compiled = ours.partition(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= taken
