"""Peak temporaries of the compiled program beside those that jax.jit takes of the same."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def conv2(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def gradients(x, w):
    return jax.grad(lambda x, w: (conv2(x, w) ** 2).sum(), (0, 1))(x, w)


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
    "halo that two read": (
        gradients,
        ((4, 64, 32, 16), (3, 3, 16, 16)),
        (P(None, "x"), P()),
        (P(None, "x"), P()),
    ),
    "windows of an argument": (pooled, ((64, 4096),), (P("x"),), P("x")),
    "rolls of an argument": (heat, ((64, 4096),), (P("x"),), P("x")),
}


def taken(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("function, shapes, in_specs, out_spec", CASES.values(), ids=CASES)
def test_no_more_than_jax_takes(mesh8, function, shapes, in_specs, out_spec):
    args = [jax.ShapeDtypeStruct(shape, f32) for shape in shapes]
    placed = jax.tree.map(lambda spec: NamedSharding(mesh8, spec), (in_specs, out_spec))
    peer = jax.jit(function, in_shardings=placed[0], out_shardings=placed[1])
    ours = mw.jit(function, mesh=mesh8, in_shardings=in_specs, out_shardings=out_spec)
    assert taken(ours.partition(*args)) <= taken(peer.lower(*args))


def test_a_halo_of_a_halo_takes_its_result_and_little_more():
    """Of two rows of shards each fetches by number, and columns are fetched of what it fetched."""
    mesh = jax.make_mesh((2, 4), ("y", "z"), (AxisType.Auto,) * 2)
    tiles = P(None, "y", "z")
    ours = mw.jit(conv2, mesh=mesh, in_shardings=(tiles, P()), out_shardings=tiles)
    args = jax.ShapeDtypeStruct((4, 64, 64, 16), f32), jax.ShapeDtypeStruct((3, 3, 16, 16), f32)
    rows, both = 4 * 34 * 16 * 16 * 4, 4 * 34 * 18 * 16 * 4
    assert taken(ours.partition(*args)) <= rows + both + 4096 * 4
