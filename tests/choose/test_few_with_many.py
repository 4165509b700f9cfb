"""Few arguments in shards are gathered, and the work shared out by the many that they meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

SPLATS = 48


def image(mean, opacity, color, pixels):
    """Splats over pixels, in their order, as in Gaussian splatting: `[pixels, 3]`."""
    near = jnp.exp(-((pixels[:, None] - mean) ** 2).sum(-1)) * opacity
    through = jnp.cumprod(1 - near, 1)
    through = jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], 1)
    return (near * through) @ color


def fitted(mean, opacity, color, pixels, target):
    """The gradient of how far an image is off."""

    def loss(*splats):
        return jnp.mean((image(*splats, pixels) - target) ** 2)

    return jax.grad(loss, (0, 1, 2))(mean, opacity, color)


def drawn(pixels):
    """Splats, pixels and an image of these."""
    draw = np.random.default_rng(0)
    shapes = (SPLATS, 2), (SPLATS,), (SPLATS, 3), (pixels, 2), (pixels, 3)
    return [draw.uniform(0, 0.9, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("pixels", [1024, 1000, 1003])
def test_splats_are_gathered_and_pixels_shared_out(pixels):
    """Gradients are summed to where splats are; sums over splats would be of all pixels."""
    args = drawn(pixels)
    mesh = mesh_of(x=8)
    in_shardings = (P("x"),) * 3 + (P(), P())
    step = mw.jit(fitted, mesh=mesh, in_shardings=in_shardings, out_shardings=P("x"))
    program = step.partition(*args)
    assert program.wire_bytes == 2 * 7 / 8 * SPLATS * (2 + 1 + 3) * 4
    for ours, plain in zip(program.simulate(*args), fitted(*args), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=1e-6)


def test_pixels_keep_the_axis_that_they_lie_over():
    """They take the other one too, and nothing of pixels moves."""
    args = drawn(1024)[:4]
    mesh = mesh_of(x=2, y=4)
    in_shardings = (P("y"),) * 3 + (P("x"),)
    step = mw.jit(image, mesh=mesh, in_shardings=in_shardings)
    program = step.partition(*args)
    assert program.wire_bytes == 3 / 4 * SPLATS * (2 + 1 + 3) * 4
    np.testing.assert_allclose(program.simulate(*args), image(*args), rtol=1e-5)


def test_what_sums_to_less_than_the_few_is_summed():
    """The density at a point is one number for each of the splats."""

    def density(mean, pixels):
        return jnp.exp(-((pixels[:, None] - mean) ** 2).sum(-1)).sum(1).mean()

    mean, _, _, pixels, _ = drawn(1024)
    step = mw.jit(density, mesh=mesh_of(x=8), in_shardings=(P("x"), P()))
    program = step.partition(mean, pixels)
    assert program.wire_bytes < 7 / 8 * mean.nbytes
    np.testing.assert_allclose(program.simulate(mean, pixels), density(mean, pixels), rtol=1e-5)


@pytest.mark.parametrize(("queries", "is_shared_out"), [(17, False), (130, True)])
def test_many_that_would_be_padded_by_much_are_not_shared_out(queries, is_shared_out):
    """17 over eight devices are three for each, and a third of the work is padding."""

    def shifted(points, seeds):
        def step(seeds, _):
            near = jnp.exp(-((points[:, None] - seeds[None]) ** 2).sum(-1))
            moved = (near[:, :, None] * points[:, None]).sum(0) / near.sum(0)[:, None]
            return moved, None

        return jax.lax.scan(step, seeds, None, length=4)[0]

    points, seeds = drawn(64)[3], drawn(queries)[3]
    step = mw.jit(shifted, mesh=mesh_of(x=8), in_shardings=(P("x"), P()), out_shardings=P())
    program = step.partition(points, seeds)
    kinds = {c.kind.value for c in program.collectives}
    assert kinds == ({"all_gather"} if is_shared_out else {"all_reduce"})
    np.testing.assert_allclose(program.simulate(points, seeds), shifted(points, seeds), rtol=1e-4)
