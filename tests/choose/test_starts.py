"""Where descents begin: plans that no single step of one leads to."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import CPU, GENERIC

VOCABULARY, WIDTH, HEADS = 64, 32, 4
MESH = AbstractMesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
BATCH, INTO, OUT_OF = P(("x", "z")), P("z", "y"), P("y", "z")


def attend(table, tokens, q, k, v, o, last):
    """Logits of one layer of attention."""
    x = table[tokens]

    def heads(w):
        return (x @ w).reshape(*tokens.shape, HEADS, -1)

    scores = jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(v))
    return (x + mixed.reshape(x.shape) @ o) @ last.T


def test_weights_are_gathered_for_a_batch_that_shares_an_axis_with_features():
    """What a table gives has features in shards over z, and tokens are over x and z.

    Left over features, all of the products would be summed over z; one exchange after the table,
    and all further nodes go with the batch, each of them with weights gathered over z.
    """
    numbers = np.random.default_rng(0)
    square = [0.1 * numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(4)]
    table, last = (numbers.normal(size=(VOCABULARY, WIDTH)).astype(np.float32) for _ in range(2))
    tokens = numbers.integers(0, VOCABULARY, (8, 16)).astype(np.int32)
    args = (table, tokens, *square, last)
    specs = (OUT_OF, BATCH, INTO, INTO, INTO, OUT_OF, OUT_OF)
    step = mw.jit(attend, mesh=MESH, in_shardings=specs, out_shardings=P(("x", "z"), None, "y"))
    sent = step.partition(*args)
    square_part, table_part = WIDTH // 2 * WIDTH // 2, VOCABULARY // 2 * WIDTH // 2
    tokens_each = 8 // 4 * 16
    gathered = 4 * square_part + 2 * table_part + tokens_each
    moved, summed = tokens_each * 2 * WIDTH // 2 // 2, tokens_each * WIDTH
    assert sent.wire_bytes == 4 * (gathered + moved + summed)
    np.testing.assert_allclose(sent.simulate(*args), attend(*args), rtol=1e-4, atol=1e-4)


def filtered(places, features, first, second):
    """What all atoms do to each other, by filters of their distances (SchNet), added up."""
    distances = jnp.sqrt(((places[:, None] - places) ** 2).sum(-1) + 1e-6)
    kernels = jnp.exp(-((distances[..., None] - jnp.linspace(0, 5, 8)) ** 2))
    return jnp.einsum("ijf,jf->if", jnp.tanh(kernels @ first) @ second, features).sum()


def test_pairs_lie_as_the_last_of_two_equal_operands_where_that_is_less():
    """Of all pairs the first or the second may be in shards: features are of the second."""
    forces = jax.grad(filtered)
    draw = np.random.default_rng(0)
    shapes = (64, 3), (64, 16), (8, 16), (16, 16)
    args = [(0.3 * draw.normal(size=shape)).astype(np.float32) for shape in shapes]
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    specs = (P("x"), P("x"), P(), P())
    program = mw.jit(forces, mesh=mesh, in_shardings=specs, out_shardings=P("x")).partition(*args)
    places = 7 * 8 * 3 * 4  # are gathered, and what comes back is scattered
    assert program.wire_bytes == 2 * places
    np.testing.assert_allclose(program.simulate(*args), forces(*args), rtol=1e-3, atol=1e-4)


def dropped(weights, x, kept):
    """Layers of which some are left out."""

    def layer(h, of):
        weight, is_kept = of
        return lax.cond(is_kept > 0, lambda h: jnp.tanh(h @ weight), lambda h: h, h), None

    return (lax.scan(layer, x, (weights, kept))[0] ** 2).mean()


def test_what_a_step_of_a_loop_reads_in_a_branch_is_moved_once_a_step():
    """Each weight is gathered twice, and its gradient scattered, however many layers there are."""
    layers, width = 6, 64
    draw = np.random.default_rng(0)
    weights = (0.2 * draw.normal(size=(layers, width, width))).astype(np.float32)
    x, kept = draw.normal(size=(256, width)).astype(np.float32), np.array([1, 0, 1, 1, 0, 1])
    gradient, shards = jax.grad(dropped), P(None, "x")
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    step = mw.jit(gradient, mesh=mesh, in_shardings=(shards, P("x"), P()), out_shardings=shards)
    program = step.partition(weights, x, kept)
    assert program.wire_bytes == 3 * layers * 7 / 8 * width * width * 4
    found = program.simulate(weights, x, kept)
    np.testing.assert_allclose(found, gradient(weights, x, kept), rtol=1e-3, atol=1e-5)


def scanned(a):
    return jax.lax.associative_scan(jnp.add, a)


def test_a_scan_along_shards_is_whole_in_shards_of_columns():
    """It takes two exchanges where launches count for much; fewest bytes are in two dozen."""
    a = np.random.default_rng(0).normal(size=(1024, 64)).astype(np.float32)

    def kinds(hardware):
        mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
        options = {"mesh": mesh, "in_shardings": P("x"), "out_shardings": P("x")}
        program = mw.jit(scanned, **options, hardware=hardware).partition(a)
        np.testing.assert_allclose(program.simulate(a), np.cumsum(a, 0), rtol=1e-4, atol=1e-4)
        return [str(c.kind) for c in program.collectives]

    assert kinds(CPU) == ["all_to_all", "all_to_all"]
    assert len(kinds(GENERIC)) > 10


def test_with_figures_of_a_machine_no_plan_takes_longer_than_the_one_of_fewest_bytes():
    def loss(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ weight.astype(jnp.bfloat16)), None

        return (lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

    weights = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    x, grid = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16), P(None, "x", "y")
    options = {"in_shardings": (grid, P("x")), "out_shardings": grid}
    mesh = AbstractMesh((2, 4), ("x", "y"))
    for figures in (GENERIC, CPU):
        step = mw.jit(jax.grad(loss), mesh=mesh, hardware=figures, **options)
        assert step.partition(weights, x).wire_bytes == 86_016


def windows(x):
    """Windows of 4x4 of shifted images, as in Swin."""
    images, rows, columns, channels = x.shape
    x = jnp.roll(x, (-2, -2), (1, 2)).reshape(images, rows // 4, 4, columns // 4, 4, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)


def test_what_is_laid_otherwise_at_the_end_is_moved_before_it_is_computed():
    """Images in shards of rows and columns are moved to those of the batch before they are shifted.

    The result is laid out of what is shifted; moved then, the shifts of rows send a halo besides.
    """
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
    step = mw.jit(windows, mesh=mesh, in_shardings=P(None, "x", "y"), out_shardings=P("x"))
    program = step.partition(x)
    image = x[0].nbytes
    assert (
        program.wire_bytes == image // 2 * 3 // 4 + image // 2
    )  # exchanged over x, gathered over y
    np.testing.assert_array_equal(program.simulate(x), windows(x))


def slopes(u):
    """A step of a scheme in fluxes (MUSCL), on a circle with two rows of ghosts on either side."""
    ghosts = jnp.concatenate([u[-2:], u, u[:2]])
    before, after = ghosts[1:-1] - ghosts[:-2], ghosts[2:] - ghosts[1:-1]
    slope = jnp.where(before * after > 0, jnp.minimum(jnp.abs(before), jnp.abs(after)), 0)
    left, right = (ghosts[1:-1] + slope / 2)[:-1], (ghosts[1:-1] - slope / 2)[1:]
    flux = jnp.sin(left) * right
    return u - 0.1 * (flux[1:] - flux[:-1])


def test_rows_with_ghosts_go_to_columns_and_back():
    """Rows of the fluxes lie one off from the others, and where those end: most would be sent."""
    u = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    step = mw.jit(slopes, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    program = step.partition(u)
    assert program.wire_bytes <= 2 * 7 / 8 * u.nbytes / 8
    np.testing.assert_allclose(program.simulate(u), slopes(u), rtol=1e-5, atol=1e-5)
