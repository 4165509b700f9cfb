"""Short collectives that wait for the same travel together on CPU, and give what they gave."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.cost.cpu.combined_where_it_fits import combined_where_it_fits
from tests.run.executables import make_mesh

SIZES = {"x": 2, "y": 4}
GROUPS = [[0, 2], [1, 3]]
MOST = 2**18


def of_two(collective, *others):
    """A collective of two arrays of unlike shapes, and others of the first."""

    def function(x):
        second = (x * 2)[:, ::2] + 1
        return sum(jnp.sum(c(v)) * (i + 2) for i, c in enumerate((collective, *others))
                   for v in (x, second))  # fmt: skip

    return function


def gather(axes, dim, **how):
    return lambda x: numbered(lax.all_gather(x, axes, axis=dim, **how))


def scatter(axes, dim, **how):
    return lambda x: numbered(lax.psum_scatter(x, axes, scatter_dimension=dim, **how))


def exchange(axes, split, along, **how):
    return lambda x: numbered(lax.all_to_all(x, axes, split, along, tiled=True, **how))


def numbered(x):
    """With the places of elements in their sum."""
    return x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)


def after(x):
    """The second waits for the first, the others for none."""
    first = lax.psum(x, "y")
    return first + lax.psum(first * 3, "y") + lax.psum(x * 5, "y")


def crossed(x):
    """Two kinds, each the other's operand once."""
    a, b = lax.psum(x, "y"), lax.pmax(x, "y")
    return lax.pmax(a, "y") + 2 * lax.psum(b, "y") + lax.psum(x * 7, "y") + lax.pmax(x * 7, "y")


def in_a_loop(x):
    def step(carry, _):
        return lax.psum(carry, "x") / 4 + jnp.sum(lax.psum(carry[:2], "x")), lax.pmin(carry, "y")

    return lax.scan(step, x, length=3)[0]


def in_a_choice(x):
    return lax.cond(
        x.shape[0] * lax.psum(1, "x") > 3,
        lambda x: jnp.sum(lax.psum(x, "y")) + lax.psum(x * 2, "y"),
        lambda x: x,
        x,
    )


def unlike_types(x):
    whole = x.astype(jnp.int32)
    return jnp.sum(lax.psum(whole, "y")) + lax.psum(x, "y") + lax.psum(x * 3, "y")


def types_of_one_size(collective):
    """What is moved goes as its bits with numbers of another type; of another size it does not."""

    def function(x):
        whole, short = x.astype(jnp.int32)[:, ::2], x.astype(jnp.bfloat16)
        return sum(
            jnp.sum(numbered(collective(v)).astype("float32")) * (i + 2)
            for i, v in enumerate((x, whole, short))
        )

    return function


def over_a_dim(x):
    """Names that `vmap` gave become dims, over which nothing is sent."""
    centred = jax.vmap(lambda v: v - lax.psum(v, "i") * lax.pmax(v, "i"), axis_name="i")
    return centred(x) + jax.vmap(lambda v: lax.psum(v * v, "i"), axis_name="i")(x)


ROUND = [(i, (i + 1) % 4) for i in range(4)]
BACK = [(i, (i - 1) % 4) for i in range(4)]
# What each device computes; collectives of a call before and after (of all bodies, once each).
CASES = {
    "sums": (of_two(lambda x: numbered(lax.psum(x, "y"))), (3, 8), 2, 1),
    "over both axes": (of_two(lambda x: numbered(lax.psum(x, ("x", "y")))), (3, 8), 2, 1),
    "largest": (of_two(lambda x: numbered(lax.pmax(x, "x"))), (3, 8), 2, 1),
    "permutes": (of_two(lambda x: numbered(lax.ppermute(x, "y", ROUND))), (3, 8), 2, 1),
    "to both sides": (
        of_two(*[lambda x, p=p: numbered(lax.ppermute(x, "y", p)) for p in (ROUND, BACK)]),
        (3, 8), 4, 2,
    ),
    "some receive nothing": (
        of_two(lambda x: numbered(lax.ppermute(x, "y", ROUND[:2]))), (3, 8), 2, 1,
    ),
    "gathers": (of_two(gather("y", 0, tiled=True), gather("y", 1, tiled=True)), (3, 8), 4, 1),
    "gathers, a new dim": (of_two(gather(("x", "y"), 1), gather(("x", "y"), 2)), (3, 8), 4, 1),
    "gathers in groups": (
        of_two(gather("y", 1, tiled=True, axis_index_groups=GROUPS)), (3, 8), 2, 1,
    ),
    "scatters": (of_two(scatter("y", 1, tiled=True)), (3, 8), 2, 1),
    "scatters, of two dims": (
        of_two(scatter("x", 1, tiled=True), scatter("x", 0, tiled=True)), (4, 8), 4, 1,
    ),
    "scatters, a dim that goes": (of_two(scatter("y", 0), scatter("y", 0)), (4, 8), 4, 1),
    "exchanges": (of_two(exchange("y", 1, 0), exchange("y", 0, 1)), (4, 8), 4, 1),
    "exchanges over both axes": (of_two(exchange(("y", "x"), 1, 1)), (3, 16), 2, 1),
    "in groups": (of_two(exchange("y", 1, 0, axis_index_groups=GROUPS)), (3, 8), 2, 1),
    "one after another": (after, (3, 4), 3, 2),
    "kinds behind each other": (crossed, (3, 4), 6, 4),
    "in a loop": (in_a_loop, (4, 4), 3, 2),
    "in a choice": (in_a_choice, (3, 4), 2, 1),
    "types": (unlike_types, (3, 4), 3, 2),
    "gathers of types of one size": (
        types_of_one_size(lambda x: lax.all_gather(x, "y", axis=1, tiled=True)), (3, 8), 3, 2,
    ),
    "exchanges of types of one size": (
        types_of_one_size(lambda x: lax.all_to_all(x, "y", 1, 0, tiled=True)), (3, 8), 3, 2,
    ),
    "permutes of types of one size": (
        types_of_one_size(lambda x: lax.ppermute(x, "y", ROUND)), (3, 8), 3, 2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(x=2, y=4)


def traced(per_device, shape, dtype=jnp.float32):
    return jax.make_jaxpr(per_device, axis_env=[*SIZES.items()])(jax.ShapeDtypeStruct(shape, dtype))


def run(closed, x, mesh):
    """What all devices have, one after another."""
    mapped = jax.shard_map(
        lambda x: jnp.atleast_1d(_jax.jaxpr_as_fun(closed)(x)[0]),
        mesh=mesh,
        in_specs=P(("x", "y")),
        out_specs=P(("x", "y")),
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(x))


def kinds(jaxpr):
    """Collectives of a jaxpr and its bodies, by name."""
    names = ("psum", "pmax", "pmin", "ppermute", "all_gather", "reduce_scatter", "all_to_all")
    found = Counter()
    for eqn in _jax.opened(jaxpr).eqns:
        found[eqn.primitive.name] += eqn.primitive.name in names
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                found += kinds(one) if hasattr(one, "jaxpr") or hasattr(one, "eqns") else Counter()
    return +found


@pytest.mark.parametrize("case", CASES)
def test_together_they_give_the_same(mesh, case):
    per_device, shape, before, after = CASES[case]
    closed = traced(per_device, shape)
    found = _jax.combine_collectives(closed, SIZES, MOST)
    assert sum(kinds(closed).values()) == before
    assert sum(kinds(found).values()) == after
    draw = np.random.default_rng(1)  # whole numbers, whose sums are the same in any order
    x = draw.integers(-4, 5, (8 * shape[0], *shape[1:])).astype("float32")
    np.testing.assert_array_equal(run(found, x, mesh), run(closed, x, mesh))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.complex64, jnp.bool_])
def test_types_that_are_moved(mesh, dtype):
    def function(x):
        return lax.ppermute(x, "y", ROUND)[:, :2] + lax.ppermute(x[:, 1:3], "y", ROUND)

    closed = traced(function, (3, 4), dtype)
    found = _jax.combine_collectives(closed, SIZES, MOST)
    assert kinds(found) == {"ppermute": 1}
    x = jnp.asarray(np.random.default_rng(1).integers(0, 5, (24, 4)), dtype)
    np.testing.assert_array_equal(run(found, x, mesh), run(closed, x, mesh))


def test_what_is_long_or_too_much_goes_alone():
    closed = traced(of_two(lambda x: lax.psum(x, "y")), (3, 8))
    assert _jax.combine_collectives(closed, SIZES, 3 * 8 * 4) is closed
    long = traced(of_two(lambda x: lax.psum(x, "y")), (2**10, 2**6))
    assert _jax.combine_collectives(long, SIZES, 2**30) is long


def test_packed_and_empty_arrays_go_alone():
    def function(x):
        return lax.ppermute(x, "y", ROUND) + lax.ppermute(x * 3, "y", ROUND)

    for shape, dtype in (((3, 8), jnp.int4), ((0, 8), jnp.float32)):
        closed = traced(function, shape, dtype)
        assert _jax.combine_collectives(closed, SIZES, MOST) is closed


def test_what_is_over_a_dim_stays_as_it_is():
    closed = traced(over_a_dim, (3, 8))
    assert kinds(closed) == {"psum": 2, "pmax": 1}
    assert _jax.combine_collectives(closed, SIZES, MOST) is closed


def test_what_is_printed_keeps_its_order():
    def function(x):
        jax.debug.print("{}", lax.psum(x, "y"))
        return lax.psum(x * 2, "y")

    closed = traced(function, (3,))
    assert _jax.combine_collectives(closed, SIZES, MOST) is closed


def test_no_more_is_held():
    """Gathered at once both are whole at the same time; one after another only one is."""

    def one_by_one(x, y):
        a = jnp.sin(lax.all_gather(x, "y", tiled=True) @ jnp.ones((64, 8)))
        b = jnp.sin(lax.all_gather(y, "y", tiled=True) @ jnp.ones((64, 8)))
        return a.sum() + b.sum()

    some = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    closed = jax.make_jaxpr(one_by_one, axis_env=[*SIZES.items()])(some, some)
    assert kinds(_jax.combine_collectives(closed, SIZES, MOST)) == {"all_gather": 1}
    assert combined_where_it_fits(closed, SIZES)[0] is closed


@pytest.mark.parametrize("rows, is_apart", [(64, True), (256, False)])
def test_a_five_hundredth_more_may_be_held(rows, is_apart):
    """What is laid end to end takes 2 KiB, beside 256 KiB or 1 MiB that wait."""

    def function(x, u, v):
        much = lax.sort(x * 2)
        u, v = (lax.sort(lax.all_gather(w, "y", tiled=True)) for w in (u, v))
        return u + v + lax.sort(much, dimension=0)[0, :1]

    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 1024), (64,), (64,))]
    closed = jax.make_jaxpr(function, axis_env=[*SIZES.items()])(*types)
    assert (combined_where_it_fits(closed, SIZES)[0] is closed) is is_apart


def test_rows_of_several_arrays_are_sent_at_once(mesh):
    """As compiled; the program that is shown has a permute for each."""

    def function(u, v):
        return jnp.roll(u, 1, 0) - u, jnp.roll(v, 1, 0) * v

    rows = P(("x", "y"))
    step = mw.jit(function, mesh=mesh, in_shardings=rows, out_shardings=rows)
    draw = np.random.default_rng(2).normal
    u, v = (jnp.asarray(draw(size=(16, n)), jnp.float32) for n in (6, 5))
    partitioned = step.partition(u, v)
    assert len(partitioned.collectives) == 2
    assert partitioned.executable.lower().as_text().count("stablehlo.collective_permute") == 1
    for found, wanted in zip(step(u, v), function(u, v), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
