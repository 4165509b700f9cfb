"""`fused_all_reduce` against sums and computations on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise.schedule.kernels import fused_all_reduce
from tests.schedule.kernels.running import WATCHED, mesh_of, run, run_without_races


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(expected, np.float64), tolerance, tolerance
    )


def fused(computation, *args, **options):
    """Watched for races, along x, unless said otherwise."""
    return fused_all_reduce(computation, *args, **{"axis": "x", "interpret": WATCHED, **options})


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_descent_step(n):
    size = n * 1024
    gradients, weights, rate = draw(n, size), draw(size), np.float32(0.1)

    def step(gradient, weight, rate):
        return fused(lambda g, w, r: [w - r * g], [gradient[0]], [weight], [rate], gathered=[0])

    (found,) = run_without_races(
        step, mesh_of(x=n), (P("x"), P("x"), P()), [P()], gradients, weights, rate
    )
    close(found, weights - 0.1 * gradients.sum(0))


def adam(g, m, v, w, rate, count):
    g = g.astype(jnp.float32)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    update = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-6)
    w = w - rate * update
    return [w.astype(jnp.bfloat16), w, m, v]


def test_adam_sums_short_numbers_and_keeps_long_ones():
    n, size = 4, 4 * 4096
    gradients = draw(n, size).astype(jnp.bfloat16)
    m, v, w = draw(size, seed=1), draw(size, seed=2) ** 2, draw(size, seed=3)
    numbers = np.float32(0.1), np.float32(3)

    def step(gradient, m, v, w, rate, count):
        return fused(adam, [gradient[0]], [m, v, w], [rate, count], gathered=[0, None, None, None])

    specs = (*(P("x"),) * 4, P(), P())
    found = run_without_races(
        step, mesh_of(x=n), specs, [P(), *(P("x"),) * 3], gradients, m, v, w, *numbers
    )
    total = np.asarray(gradients, np.float32).sum(0)
    expected = adam(jnp.asarray(total), m, v, w, *numbers)
    assert found[0].dtype == jnp.bfloat16
    # A sum of four short numbers is rounded three times.
    for got, wanted in zip(found, expected, strict=True):
        close(got, wanted, 0.05)
    close(found[2], 0.9 * m + 0.1 * total, 2e-2 * 0.4)


def lamb(g, m, w, rate):
    m = 0.9 * m + 0.1 * g
    update = m + 0.01 * w
    squares = jnp.stack([jnp.sum(w * w), jnp.vdot(update, update)])
    norm_w, norm_u = jnp.sqrt(lax.psum(squares, "x"))
    ratio = jnp.where(norm_w > 0, norm_w / norm_u, 1.0)
    return [w - rate * ratio * update, m, ratio, lax.pmax(jnp.max(update), "x")]


@pytest.mark.parametrize("n", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_norms_inside(n):
    size = n * 1024
    gradients, m, w = draw(n, size), draw(size, seed=1), draw(size, seed=2)

    def step(gradient, m, w):
        w, m, ratio, top = fused(
            lamb, [gradient[0]], [m, w], [np.float32(0.5)], gathered=[0, None, None, None]
        )
        return w, m, ratio[None], top[None]

    specs = (P("x"),) * 3
    found = run_without_races(step, mesh_of(x=n), specs, (P(), *specs), gradients, m, w)
    total = gradients.sum(0)
    m = 0.9 * m + 0.1 * total
    update = m + 0.01 * w
    ratio = np.linalg.norm(w) / np.linalg.norm(update)
    close(found[0], w - 0.5 * ratio * update)
    close(found[1], m)
    close(found[2], np.full(n, ratio))
    assert len(set(found[2])) == 1, "every device has the same norm, bit for bit"
    close(found[3], np.full(n, update.max()))


def test_a_norm_of_what_a_norm_scaled_takes_three_passes():
    n, size = 2, 2 * 1024
    terms = draw(n, size)

    def computation(g, start):
        start = lax.psum(start, "x")
        g = g / jnp.sqrt(lax.psum(jnp.sum(g * g), "x"))
        g = g - lax.psum(jnp.sum(jnp.abs(g)), "x") + start
        return [g / lax.pmax(jnp.max(g), "x")]

    def step(term, start):
        return fused(computation, [term[0]], [], [start[0]], gathered=[0])[0]

    found = run_without_races(
        step, mesh_of(x=n), (P("x"), P("x")), P(), terms, np.float32([1.5, 2.5])
    )
    g = terms.sum(0)
    g = g / np.linalg.norm(g)
    g = g - np.abs(g).sum() + 4
    close(found, g / g.max())


def block(sums, mask, residual, bias, gain):
    """What follows a row-parallel product: bias, dropout, residual, layer norm."""
    y = jnp.where(mask, (sums + bias) * 1.25, 0.0) + residual
    mean = y.mean(-1, keepdims=True)
    return [(y - mean) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5) * gain, y, mask & (y > 0)]


@pytest.mark.parametrize(
    ("axes", "axis"),
    [
        ({"x": 4}, "x"),
        ({"x": 2, "y": 4}, "y"),
        ({"x": 2, "y": 4}, "x"),
        ({"x": 2, "y": 2, "z": 2}, ("x", "z")),
        ({"x": 2, "y": 2, "z": 2}, ("z", "x")),
    ],
)
def test_rows_of_matrices_on_any_axes(axes, axis):
    mesh = mesh_of(**axes)
    along = (axis,) if isinstance(axis, str) else axis
    others = tuple(a for a in axes if a not in along)
    n = int(np.prod([axes[a] for a in along]))
    count = int(np.prod([axes[a] for a in others]))
    terms = draw(count, n, n * 8, 128)
    mask, residual = draw(count, n * 8, 128) > -0.5, draw(count, n * 8, 128, seed=1)
    bias, gain = draw(128), draw(128, seed=1)

    def step(term, mask, residual, bias, gain):
        results = fused(
            block,
            [term[0, 0]],
            [mask[0], residual[0]],
            [bias, gain],
            gathered=[0, None, None],
            axis=axis,
        )
        return [r[None] for r in results]

    rows = P(others or None, along)
    out = [P(others or None), rows, rows]
    found = run_without_races(
        step, mesh, (rows, rows, rows, P(), P()), out, terms, mask, residual, bias, gain
    )
    expected = jax.jit(block)(terms.sum(1), mask, residual, bias, gain)
    for got, wanted in zip(found[:2], expected[:2], strict=True):
        close(got, wanted, 1e-4)
    assert found[2].dtype == bool
    assert (found[2] == np.asarray(expected[2]))[np.abs(expected[1]) > 1e-3].all()


@pytest.mark.parametrize(("dim", "gathered"), [(1, 1), (0, 1), (2, 0)])
def test_chunks_along_other_dims(dim, gathered):
    n, shape = 2, [8, 16, 128]
    terms = draw(n, *[s * n if i == dim else s for i, s in enumerate(shape)])

    def step(term):
        return fused(lambda g: [g * 2, g + 1], [term[0]], gathered=[gathered, None], dim=dim)

    spec = P(*[None] * dim, "x")
    found = run_without_races(step, mesh_of(x=n), (P("x"),), [P(), spec], terms)
    total = terms.sum(0)
    parts = np.split(total, n, dim)
    close(found[0], np.concatenate(parts, gathered) * 2)
    close(found[1], total + 1)


def test_many_pieces_and_blocks(monkeypatch):
    """Four pieces, two each way, and several blocks in each."""
    monkeypatch.setattr("meshwise.schedule.kernels.planning.VMEM_BLOCK_BYTES", 2**17)
    n, size = 3, 3 * 128 * 128
    terms, w = draw(n, size), draw(size)

    def computation(g, w):
        return [w - g / jnp.sqrt(lax.psum(jnp.sum(g * g), "x"))]

    def step(term, w):
        return fused(computation, [term[0]], [w], gathered=[0])[0]

    found = run_without_races(step, mesh_of(x=n), (P("x"), P("x")), P(), terms, w)
    total = terms.sum(0)
    close(found, w - total / np.linalg.norm(total))


def test_several_sums_and_exact_integers():
    n, size = 4, 4 * 1024
    terms, counts = draw(n, size), (draw(n, size) * 100).astype(np.int32)

    def step(term, count):
        return fused(
            lambda g, c: [jnp.where(c > 0, g / c, 0.0), c, jnp.sum(c)],
            [term[0], count[0]],
            gathered=[0, 0, None],
        )

    specs = (P("x"), P("x"))
    found = run_without_races(
        lambda *a: [r.reshape(-1) for r in step(*a)],
        mesh_of(x=n),
        specs,
        [P(), P(), P("x")],
        terms,
        counts,
    )
    total, count = terms.sum(0), counts.sum(0)
    close(found[0], np.where(count > 0, total / np.where(count > 0, count, 1), 0))
    np.testing.assert_array_equal(found[1], count)
    np.testing.assert_array_equal(found[2], count.reshape(n, -1).sum(1))


def test_rows_cut_and_joined():
    """Slices, joins, products with a whole matrix, and what is known without the kernel."""
    n = 2
    terms, table, is_used = draw(n, n * 8, 256), draw(128, 128), np.bool_(True)

    def computation(g, table, is_used):
        g = jnp.where(is_used, g, 0)
        halves = jnp.concatenate([g[:, 128:], g[:, :128]], 1)
        product = jnp.dot(g[:, :128], table, precision="highest")
        return [halves, product.reshape(8, 4, 32).sum(2), jnp.sum(g, 0), table @ table, 7]

    def step(term, table):
        return fused(computation, [term[0]], [], [table, is_used], gathered=[0, *[None] * 4])

    found = run_without_races(
        lambda *a: [jnp.atleast_1d(r) for r in step(*a)],
        mesh_of(x=n),
        (P("x"), P()),
        [P(), P("x"), P("x"), P(), P()],
        terms,
        table,
    )
    total = terms.sum(0)
    close(found[0], np.roll(total, 128, 1))
    close(found[1], (total[:, :128] @ table).reshape(n * 8, 4, 32).sum(2), 1e-3)
    close(found[2], total.reshape(n, 8, 256).sum(1).reshape(-1))
    close(found[3], table @ table, 1e-4)
    assert found[4] == 7


def test_traced_without_a_mesh():
    """As a scheduler does it: a jaxpr traced for axes by name, run later on a mesh."""
    n, size = 2, 2 * 1024
    terms = draw(n, size)
    chunk = jax.ShapeDtypeStruct((1024,), np.float32)
    computation = jax.make_jaxpr(lambda g: [g * 3])(chunk)

    def step(term):
        return fused(computation, [term[0]], gathered=[0], mesh_axes=("x",))

    closed = _jax.make_jaxpr_over_axes(
        step, [("x", n)], [jax.ShapeDtypeStruct((1, size), np.float32)]
    )
    (found,) = run_without_races(_jax.jaxpr_as_fun(closed), mesh_of(x=n), (P("x"),), [P()], terms)
    close(found, terms.sum(0) * 3)


def test_one_device_needs_no_kernel():
    terms = draw(1, 100)
    found = run(
        lambda t: fused(lambda g: [g * 3], [t[0]], gathered=[0])[0],
        mesh_of(x=1),
        (P("x"),),
        P(),
        terms,
    )
    close(found, terms[0] * 3)


@pytest.mark.parametrize(
    ("computation", "options", "message"),
    [
        (lambda g: [jnp.cumsum(g, 0)], {}, "cumsum of .* cannot be done in a kernel"),
        (lambda g: [lax.psum(g, "x")], {}, "only small arrays, such as norms"),
        (lambda g: [lax.psum(jnp.sum(g), "y")], {}, r"goes over \('y',\), and the kernel's ring"),
        (lambda g: [lax.all_gather(g, "x")], {}, "it has an effect, or communicates"),
        (lambda g: [jnp.ones((8, 8)).at[0].set(g[0])], {}, "cannot be done in a kernel"),
        (lambda g: [g.T], {}, "transpose of .* kernels have no rule"),
        (lambda g: [g @ g], {}, "it adds over the rows of a matrix"),
        (lambda g: [g.T @ g], {}, "cannot be done in a kernel"),
        (lambda g: [g + np.arange(64.0).reshape(8, 8)], {}, "give it as a tile"),
        (lambda g: [g + jnp.arange(8.0)[:, None]], {}, "give it as a tile"),
        (lambda g: [g.reshape(64)], {}, "rows must stay the first dim"),
        (lambda g: [jnp.sum(g)], {"gathered": [0]}, "it cannot be gathered inside the kernel"),
        (lambda g: [g], {"dim": 2}, "dim 2 of a summand of shape"),
        (lambda g: [g], {"gathered": [-3]}, "result 0 has 2 dims, so none is dim -3"),
    ],
)
def test_what_kernels_cannot_do(computation, options, message):
    def step(term):
        return fused(computation, [term[0]], **{"gathered": [None], **options})

    with pytest.raises(ValueError, match=message):
        run(step, mesh_of(x=2, y=2), (P("x"),), [P("x")], draw(2, 16, 8))


def test_tiles_of_other_rows_are_refused():
    def step(term):
        return fused(lambda g, t: [g, t], [term[0]], [jnp.zeros(3)], gathered=[0, None])

    with pytest.raises(ValueError, match="tiles of a kernel have the same rows"):
        run(step, mesh_of(x=2), (P("x"),), [P(), P("x")], draw(2, 16))


def test_rows_that_do_not_fit_are_refused():
    def step(term):
        return fused(lambda g: [g], [term], gathered=[0])

    with pytest.raises(ValueError, match="does not fit in fast memory"):
        run(step, mesh_of(x=2), (P(),), [P()], np.zeros((2, 2**20), np.float32))


@pytest.mark.parametrize("shape", [(100,), (5, 3), (7, 3, 2)])
def test_chunks_of_odd_sizes(shape):
    n = 2
    terms = draw(n, n * shape[0], *shape[1:])

    def step(term):
        return fused(
            lambda g: [g / lax.psum(jnp.sum(g * g), "x")], [term[0]], gathered=[0], pieces=4
        )[0]

    found = run_without_races(step, mesh_of(x=n), (P("x"),), P(), terms)
    close(found, terms.sum(0) / (terms.sum(0) ** 2).sum())


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16])
def test_short_integers_wrap(dtype):
    n, size = 2, np.iinfo(dtype)
    terms = np.random.default_rng(4).integers(size.min, size.max, (n, 16, 8)).astype(dtype)

    def step(term):
        return fused(
            lambda g: [g, g + lax.reduce_sum(g, (1,))[:, None]], [term[0]], gathered=[0, 0]
        )

    found = run_without_races(step, mesh_of(x=n), (P("x"),), [P(), P()], terms)
    total = terms.sum(0, dtype=dtype)
    np.testing.assert_array_equal(found[0], total)
    np.testing.assert_array_equal(found[1], total + total.sum(1, dtype=dtype, keepdims=True))


def test_dims_from_the_end():
    n = 2
    terms = draw(n, 8, 16)

    def step(term):
        return fused(lambda g: [2 * g], [term[0]], dim=-1, gathered=[-1])[0]

    close(run_without_races(step, mesh_of(x=n), (P("x"),), P(), terms), 2 * terms.sum(0))
