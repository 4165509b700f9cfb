"""The collectives of a per-device jaxpr are found wherever they stand, with their trips."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwise._jax import make_jaxpr_over_axes
from meshwise.ir.collectives import CollectiveKind, collectives_of

SIZES = {"a": 2, "b": 4}
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)  # 512 bytes


def found(function, *args):
    args = args or (X,)
    jaxpr = make_jaxpr_over_axes(function, list(SIZES.items()), args)
    return collectives_of(jaxpr, SIZES)


# function, kind, axes, wire bytes
SINGLE = [
    (lambda x: lax.psum(x, "b"), "all_reduce", ("b",), 768),
    (lambda x: lax.psum(x, ("a", "b")), "all_reduce", ("a", "b"), 896),
    (lambda x: lax.pmax(x, "a"), "all_reduce", ("a",), 512),
    (lambda x: lax.pmin(x, "a"), "all_reduce", ("a",), 512),
    (lambda x: lax.all_gather(x, "b", axis=1, tiled=True), "all_gather", ("b",), 3 * 512),
    (lambda x: lax.all_gather(x, ("b", "a")), "all_gather", ("b", "a"), 7 * 512),
    (lambda x: lax.psum_scatter(x, "b", tiled=True), "reduce_scatter", ("b",), 384),
    (lambda x: lax.all_to_all(x, "b", 0, 1, tiled=True), "all_to_all", ("b",), 384),
    (lambda x: lax.ppermute(x, "b", [(0, 1)]), "ppermute", ("b",), 512),
    (lambda x: lax.psum(x, "b", axis_index_groups=[[0, 1], [2, 3]]), "all_reduce", ("b",), 512),
]


@pytest.mark.parametrize(("function", "kind", "axes", "sent"), SINGLE)
def test_each_collective(function, kind, axes, sent):
    [collective] = found(function)
    assert collective.kind == kind and isinstance(collective.kind, CollectiveKind)
    assert collective.axes == axes
    assert (collective.shape, collective.dtype, collective.count) == ((8, 16), X.dtype, 1)
    assert collective.wire_bytes == sent
    assert collective.equation.primitive.name


def test_a_program_without_collectives_has_none():
    assert found(lambda x: lax.axis_index("a") * jnp.sin(x)) == []
    assert found(lambda x: x + lax.psum(1, "a")) == []


def test_one_entry_for_each_array_of_a_tree():
    assert [c.wire_bytes for c in found(lambda x: lax.psum((x, x[0]), "a"))] == [512, 64]


def test_a_few_bytes_are_not_rounded():
    """Of one byte over eight devices an all_reduce sends 1.75; four times that is whole."""
    byte = jax.ShapeDtypeStruct((), jnp.uint8)
    [one] = found(lambda x: lax.pmax(x, ("a", "b")), byte)
    [four] = found(lambda x: lax.fori_loop(0, 4, lambda _, x: lax.pmax(x, ("a", "b")), x), byte)
    assert one.wire_bytes == 1.75 and type(four.wire_bytes) is int and four.wire_bytes == 7


def test_loops_multiply():
    def loop(x):
        def inner(x, _):
            return lax.psum(x, "a"), None

        def outer(x, _):
            return lax.scan(inner, x, None, length=5)[0], lax.pmax(x, "b")

        return lax.scan(outer, x, None, length=3)

    psum, pmax = found(loop)
    assert (psum.count, psum.wire_bytes) == (15, 15 * 512)
    assert (pmax.count, pmax.wire_bytes) == (3, 3 * 768)


def test_a_while_loop_counts_once_and_says_so():
    def loop(x):
        return lax.while_loop(lambda x: lax.pmax(x[0, 0], "a") < 9, lambda x: lax.psum(x, "a"), x)

    condition, body = found(loop)
    assert (condition.count, condition.is_count_known) == (1, False)
    assert (body.count, body.is_count_known, body.wire_bytes) == (1, False, 512)


def test_the_dearest_branch_counts():
    def branches(x):
        return lax.cond(x[0, 0] > 0, lambda: lax.psum(x, "b"), lambda: lax.psum(x, "a"))

    assert [c.axes for c in found(branches)] == [("b",)]


def test_calls_are_entered():
    @jax.custom_vjp
    def custom(x):
        return lax.psum(x, "a")

    custom.defvjp(lambda x: (custom(x), None), lambda _, g: (g,))

    def calls(x):
        return jax.jit(jax.checkpoint(lambda x: lax.psum(x, "a")))(custom(x))

    assert [c.wire_bytes for c in found(calls)] == [512, 512]
