"""Windows over arrays with borders of their own rows: halos, and nothing is laid side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

MODES = ("wrap", "reflect", "symmetric", "edge")
ROWS, GRID = mesh_of(x=8), mesh_of(x=2, y=4)
BLOCKS = P("x", "y")
ITEM = 4  # bytes


def draw(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def convolved(mode, reach=1, strides=(1, 1), dilation=(1, 1)):
    """Of a plane by a kernel of twice that reach and one."""

    def function(u, kernel):
        padded = jnp.pad(u, reach, mode=mode)[None, None]
        what = strides, "VALID", (1, 1), dilation
        return lax.conv_general_dilated(padded, kernel[None, None], *what)[0, 0]

    return function


def pooled(mode):
    def function(u, kernel):
        padded = jnp.pad(u, 1, mode=mode)
        most = lax.reduce_window(padded, -np.inf, lax.max, (3, 3), (1, 1), "VALID")
        return (
            most * lax.reduce_window(padded, 0.0, lax.add, (3, 3), (1, 1), "VALID") * kernel[0, 0]
        )

    return function


def gradients(mode):
    return jax.grad(lambda u, k: (convolved(mode)(u, k) ** 2).sum(), (0, 1))


def checked(function, mesh, specs, args):
    """The program, whose numbers are those of one device."""
    program = mw.jit(function, mesh=mesh, in_shardings=specs).partition(*args)
    found, wanted = program.simulate(*args), function(*args)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert ours.shape == plain.shape
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)
    return program


@pytest.mark.parametrize("mode", MODES)
def test_each_row_is_sent_once(mode):
    """A border of a plane over eight devices, and borders and corners over two by four."""
    args = draw((64, 64), (3, 3))
    assert checked(convolved(mode), ROWS, (P("x"), P()), args).wire_bytes == 2 * 64 * ITEM
    both = checked(convolved(mode), GRID, (BLOCKS, P()), args).wire_bytes
    # At the walls of other modes nobody sends; of two devices along a dim each has one.
    rows, columns = (1 if mode != "wrap" else 2) * 16, 2 * 34
    assert both == (rows + columns) * ITEM


def test_gradients_of_what_is_wrapped_go_round_too():
    """Rows beyond the ends, added at the other ends, are those of a window that is wrapped."""
    program = checked(gradients("wrap"), ROWS, (P("x"), P()), draw((64, 64), (3, 3)))
    kernel = 2 * 7 / 8 * 9 * ITEM
    assert program.wire_bytes == 2 * 2 * 64 * ITEM + kernel


FOLDED = {
    "wider": lambda u, k: (convolved("wrap", reach=2)(u, jnp.tile(k, (2, 2))[:5, :5]) ** 2).sum(),
    "dilated": lambda u, k: (convolved("wrap", reach=2, dilation=(2, 2))(u, k) ** 2).sum(),
    "strided": lambda u, k: (convolved("wrap", strides=(2, 1))(u, k) ** 2).sum(),
    "pooled": lambda u, k: (pooled("wrap")(u, k) ** 2).sum(),
    "read twice": lambda u, k: ((convolved("wrap")(u, k) + u) ** 2 + jnp.pad(u, 1)[2:, 2:]).sum(),
    "one end": lambda u, k: (convolved_at_one_end(u, k) ** 2).sum(),
    "a wide kernel": lambda u, k: (
        convolved("wrap", reach=3)(u, jnp.tile(k, (3, 3))[:7, :7])
    ).sum(),
}


def convolved_at_one_end(u, kernel):
    """As a causal filter on a circle is."""
    padded = jnp.concatenate([u[-2:], u])[None, None]
    return lax.conv_general_dilated(padded, kernel[None, None], (1, 1), "VALID")[0, 0]


@pytest.mark.parametrize("case", FOLDED)
@pytest.mark.parametrize("shape", [(32, 16), (13, 6), (5, 5)])
def test_other_gradients(case, shape):
    args = draw(shape, (3, 3))
    checked(jax.grad(FOLDED[case], (0, 1)), ROWS, (P("x"), P()), args)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh, spec, shape", [
    (ROWS, P("x"), (61, 9)),
    (ROWS, P(None, "x"), (9, 61)),
    (ROWS, P("x"), (9, 9)),
    (ROWS, P("x"), (5, 7)),
    (ROWS, P("x"), (3, 4)),
    (GRID, BLOCKS, (31, 22)),
    (mesh_of(x=3), P("x"), (7, 6)),
    (mesh_of(x=2), P("x"), (8, 6)),
    (mesh_of(x=2), P("x"), (3, 6)),
])  # fmt: skip
def test_any_sizes(mode, mesh, spec, shape):
    args = draw(shape, (3, 3))
    for function in (convolved(mode), pooled(mode), gradients(mode)):
        checked(function, mesh, (spec, P()), args)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel, more", [
    ((5, 5), {"reach": 2}),
    ((5, 5), {"reach": 2, "strides": (2, 2)}),
    ((3, 3), {"reach": 2, "dilation": (2, 2)}),
    ((3, 3), {"reach": 1, "strides": (3, 2)}),
])  # fmt: skip
def test_wider_windows(mode, kernel, more):
    for shape in ((32, 16), (27, 12)):
        args = draw(shape, kernel)
        checked(convolved(mode, **more), ROWS, (P("x"), P()), args)
        checked(convolved(mode, **more), GRID, (BLOCKS, P()), args)


def test_borders_of_one_side_and_of_unlike_ones():
    """And a border that is of another array, which is joined as it was."""
    u, other, kernel = draw((24, 8), (1, 8), (3, 3))

    def function(u, other, kernel):
        sides = [
            jnp.concatenate([u[:2], u]),
            jnp.concatenate([u[5:7], u, u[-1:]]),
            jnp.concatenate([u, u[3:4], u[:1]]),
            jnp.concatenate([other, u, u[:1]]),
            jnp.concatenate([u, u]),
        ]
        what = kernel[None, None], (1, 1), "VALID"
        return [lax.conv_general_dilated(side[None, None], *what) for side in sides]

    checked(function, ROWS, (P("x"), P(), P()), (u, other, kernel))


def test_joined_where_that_is_read_anyway():
    """Or where a border is of rows from far away, which nobody but the shard at the end wants."""
    u, kernel = draw((64, 32), (3, 3))
    what = (kernel[None, None], (1, 1), "VALID")

    def returned(u):
        padded = jnp.pad(u, ((1, 1), (0, 0)), mode="wrap")
        return lax.conv_general_dilated(padded[None, None], *what), padded

    def far(u):
        joined = jnp.concatenate([u[17:18], u, u[30:31]])
        return lax.conv_general_dilated(joined[None, None], *what)

    def of(function):
        step = mw.jit(function, mesh=GRID, in_shardings=BLOCKS)
        program = step.partition(u)
        for ours, plain in zip(
            *map(jax.tree.leaves, (program.simulate(u), function(u))), strict=True
        ):
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)
        return program.wire_bytes

    assert (of(returned), of(far)) == (368, 368)


def test_images_with_channels_in_a_loop():
    """As a layer that pads in a circle, step after step: two rows of an image in each."""
    images, kernel = draw((2, 32, 16, 4), (3, 3, 4, 4))
    numbers = ("NHWC", "HWIO", "NHWC")

    def layers(images, kernel):
        def layer(_, x):
            padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="wrap")
            made = lax.conv_general_dilated(
                padded, kernel, (1, 1), "VALID", dimension_numbers=numbers
            )
            return jnp.tanh(made)

        return lax.fori_loop(0, 3, layer, images)

    program = checked(layers, ROWS, (P(None, "x"), P()), (images, kernel))
    assert program.wire_bytes == 3 * 2 * 2 * 16 * 4 * ITEM


@pytest.mark.slow  # compiles eight programs
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [24, 21])
def test_on_devices(mode, rows):
    args = draw((rows, 8), (3, 3))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step = mw.jit(gradients(mode), mesh=mesh, in_shardings=(P("x"), P()))
    for ours, plain in zip(step(*args), gradients(mode)(*args), strict=True):
        np.testing.assert_allclose(np.asarray(ours), plain, rtol=1e-4, atol=1e-3)
