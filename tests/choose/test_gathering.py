"""What is gathered once: before transforms that would exchange again and again, or later parts."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from benchmarks.suite.programs.again import dispersed, in_order, in_order_both_ways, whirled
from benchmarks.suite.programs.control_flow import newton

N8, N24 = AbstractMesh((8,), ("x",)), AbstractMesh((2, 4), ("x", "y"))


def there_and_back(u):
    return jnp.fft.irfft(jnp.fft.rfft(u))


def filtered(u, h):
    n = 2 * u.shape[0]
    return jnp.fft.irfft(jnp.fft.rfft(u, n) * jnp.fft.rfft(h, n), n)[: u.shape[0]]


def runs_counted(x):
    """How often each number is there, of numbers in order."""
    ordered = jnp.sort(jnp.floor(8 * x))
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    run = jnp.cumsum(first) - 1
    return jax.ops.segment_sum(jnp.ones_like(x), run, 128)


def along_each_in_turn(x):
    """Transforms along one dim and then the other, each scaled and moved, again and again."""
    for i in range(4):
        x = jnp.fft.fftshift(jnp.fft.fft(x, axis=(i + 1) % 2), axes=i % 2) * 0.5
    return x.real


def likelihood(x, y):
    """Of numbers at some places under a Gaussian process, and its gradient by the places' scale."""

    def of(scale):
        kernel = jnp.exp(-scale * (x[:, None] - x) ** 2) + jnp.eye(x.shape[0])
        half = jnp.linalg.cholesky(kernel)
        solved = jax.scipy.linalg.solve_triangular(half, y, lower=True)
        return 0.5 * solved @ solved + jnp.log(jnp.diag(half)).sum()

    return jnp.stack(jax.value_and_grad(of)(1.0))


def ranks_correlated(x, y):
    """Ranks are made of what is gathered, and so is all that follows from them."""
    ranks = [jnp.argsort(jnp.argsort(z)).astype(jnp.float32) for z in (x, y)]
    return jnp.corrcoef(*ranks)


def projected(x, w):
    """What is in order, and its product with a matrix that every device has."""
    return jnp.sort(x) @ w, jnp.sort(x) @ jnp.arange(x.size, dtype=x.dtype)


def each_with_each(x):
    """A kernel between all pairs, summed along either dim."""
    kernel = jnp.exp(-((x[:, None] - x) ** 2))
    return kernel.sum(0) + kernel.sum(1)


# The function, shapes, specs of arguments, of the result, the mesh, and the bytes that are sent.
CASES = {
    "there and back, exchanged": (there_and_back, [(4096,)], [P("x")], P("x"), N8, 13664),
    "there and back, over the minor axis": (
        there_and_back,
        [(4096,)],
        [P("y")],
        P("y"),
        N24,
        3 / 4 * 4096 * 4,
    ),
    "again and again in a loop": (dispersed, [(2048,)], [P("x")], P("x"), N8, 7 / 8 * 2048 * 4),
    "with what is whole": (
        filtered,
        [(4096,), (4096,)],
        [P("x"), P()],
        P("x"),
        N8,
        7 / 8 * 4096 * 4,
    ),
    "sorted again and again": (in_order, [(4096,)], [P("x")], P("x"), N8, 7 / 8 * 4096 * 4),
    "sorted along rows and columns": (
        lambda x: in_order_both_ways(x, times=6),
        [(64, 64)],
        [P("x")],
        P("x"),
        N8,
        12 * 7 / 64 * 64 * 64 * 4,
    ),
    "in two dims, rows": (whirled, [(64, 64)], [P("x")], P("x"), N8, 7 / 8 * 64 * 64 * 4),
    "in two dims, columns": (
        whirled,
        [(64, 64)],
        [P(None, "x")],
        P(None, "x"),
        N8,
        7 / 8 * 64 * 64 * 4,
    ),
    "in two dims, blocks": (
        whirled,
        [(64, 64)],
        [P("x", "y")],
        P("x", "y"),
        N24,
        7 / 8 * 64 * 64 * 4,
    ),
    "between one dim and the other": (
        along_each_in_turn,
        [(16, 32)],
        [P("x")],
        P(),
        N8,
        7 / 8 * 16 * 32 * 4,
    ),
    "what follows a gather": (runs_counted, [(1024,)], [P("x")], P(), N8, 7 / 8 * 1024 * 4),
    "products of what is gathered": (
        ranks_correlated,
        [(1024,), (1024,)],
        [P("x"), P("x")],
        P(),
        N8,
        2 * 7 / 8 * 1024 * 4,
    ),
    "a large product with what is whole": (
        lambda c, m: jax.nn.relu(m) @ jnp.sort(c, 0),
        [(32, 4), (256, 32)],
        [P("x"), P()],
        P(),
        N8,
        7 / 8 * 32 * 4 * 4,
    ),
    "products with what is whole": (
        projected,
        [(1024,), (1024, 64)],
        [P("x"), P()],
        P(),
        N8,
        7 / 8 * 1024 * 4,
    ),
    "products of rows that are put in order": (
        lambda x, w: x[jnp.argsort(x[:, 0])] @ w,
        [(64, 8), (8, 64)],
        [P("x"), P()],
        P(),
        N8,
        7 / 8 * 64 * 8 * 4,
    ),
    # Not gathered: then every device would do all of the work on pairs, for half of the bytes.
    "pairs": (each_with_each, [(512,)], [P("x")], P("x"), N8, 2 * 7 / 8 * 512 * 4),
    "what is of what might be gathered": (
        likelihood,
        [(128,), (128,)],
        [P("x"), P("x")],
        P(),
        N8,
        2 * 7 / 8 * 128 * 4,
    ),
}


def partitioned(case):
    function, shapes, specs, out, mesh, _ = CASES[case]
    step = mw.jit(function, mesh=mesh, in_shardings=tuple(specs), out_shardings=out)
    return step.partition(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent(case):
    assert partitioned(case).wire_bytes == CASES[case][-1]


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    function, shapes, *_ = CASES[case]
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) for s in shapes]
    wanted = jax.jit(function)(*args)
    found = partitioned(case).simulate(*args)
    for ours, one in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, one, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_products_of_matrices_are_shared():
    """Also of those that every device has: only products with vectors follow what is gathered."""
    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    inverted = mw.jit(newton, mesh=N8, in_shardings=(P(), P()), out_shardings=P("x"))
    assert inverted.partition(matrix, matrix).wire_bytes == 16_128


def test_what_is_hinted_in_shards_stays_so():
    def hinted(u):
        return jnp.fft.irfft(mw.shard(jnp.fft.rfft(u), P("y")))

    step = mw.jit(hinted, mesh=N24, in_shardings=P("y"), out_shardings=P("y"))
    program = step.partition(jax.ShapeDtypeStruct((4096,), jnp.float32))
    assert "all_to_all" in {str(c.kind) for c in program.collectives}


def convolved(x, kernels):
    for kernel in kernels:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return x


@pytest.mark.parametrize("channels", [(1, 4, 4, 4, 1), (1,) * 13])
def test_convolutions_of_small_shards_are_not_gathered(channels):
    """Two rows of three are borders, and several convolutions send more than gathering once.

    But no partitioner has every device make all of them to save that.
    """
    spec = P(None, "x", "y")
    step = mw.jit(convolved, mesh=N24, in_shardings=(spec, P()), out_shardings=spec)
    kernels = [
        jax.ShapeDtypeStruct((3, 3, before, after), jnp.float32)
        for before, after in pairwise(channels)
    ]
    program = step.partition(jax.ShapeDtypeStruct((2, 28, 12, 1), jnp.float32), kernels)
    assert {str(c.kind) for c in program.collectives} == {"ppermute"}


def recomputed(weights, x):
    """Layers whose weights each step gathers, forward and, computed anew, back."""
    layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ mw.shard(w, P())))
    return (jax.lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0] ** 2).mean()


def test_no_stack_is_gathered_for_hints_in_the_steps_of_a_loop():
    """All layers at once would send a third less, and every device would hold all of them."""
    layers, width = 4, 64
    draw = np.random.default_rng(0)
    weights = (0.2 * draw.normal(size=(layers, width, width))).astype(np.float32)
    x = draw.normal(size=(256, width)).astype(np.float32)
    shards, gradient = P(None, "x"), jax.grad(recomputed)
    step = mw.jit(gradient, mesh=N8, in_shardings=(shards, P("x")), out_shardings=shards)
    program = step.partition(weights, x)
    gathered = [c for c in program.collectives if str(c.kind) == "all_gather"]
    assert {c.shape for c in gathered} == {(width // 8, width)}
    assert program.wire_bytes == 3 * layers * 7 / 8 * width * width * 4
    found = program.simulate(weights, x)
    np.testing.assert_allclose(found, gradient(weights, x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_a_small_kernel_over_more_devices_than_its_image_is_gathered(whole):
    """Half of the images' rows each, a kernel in eighths: nobody asks for an eighth of the work."""
    numbers = ("NHWC", "HWOI", "NHWC")

    def back(images, kernel):
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )

    mesh = AbstractMesh((2, 4), ("x", "y"))
    lies, shards = P(None, "x"), P() if whole else P(None, None, ("x", "y"))
    step = mw.jit(back, mesh=mesh, in_shardings=(lies, shards), out_shardings=lies)
    draw = np.random.default_rng(0)
    images = draw.normal(size=(8, 32, 32, 16)).astype(np.float32)
    kernel = draw.normal(size=(3, 3, 16, 16)).astype(np.float32)
    program = step.partition(images, kernel)
    np.testing.assert_allclose(
        program.simulate(images, kernel), jax.jit(back)(images, kernel), rtol=1e-4, atol=1e-4
    )
    row = images[:, 0].nbytes
    assert program.wire_bytes == row + (0 if whole else kernel.nbytes * 7 // 8)
