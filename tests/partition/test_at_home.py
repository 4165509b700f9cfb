"""Exchanges of what every device holds: nothing is sent, each computes its part, numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import CPU
from tests.meshes import mesh_of


def draw(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def conv(x, w, stride=1, padding="SAME"):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=dims)


def pool(window, stride, padding):
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (window, 1), (stride, 1), padding)


IMAGES, KERNEL, ROWS = (2, 32, 6, 3), (3, 3, 3, 4), P(None, "x")
WHOLE = {
    "convolution": (conv, (IMAGES, KERNEL), ROWS),
    "convolution, no padding": (
        lambda x, w: conv(x, w, padding="VALID"), ((2, 34, 6, 3), KERNEL), ROWS,
    ),
    "convolution by twos": (lambda x, w: conv(x, w, 2), (IMAGES, KERNEL), ROWS),
    "convolution, uneven": (conv, ((2, 29, 6, 3), KERNEL), ROWS),
    "windows": (pool(3, 1, "VALID"), ((66, 5),), P("x")),
    "windows by twos, uneven": (pool(3, 2, "SAME"), ((61, 5),), P("x")),
    "differences": (lambda x: x[1:] - x[:-1], ((65, 5),), P("x")),
    "of columns": (lambda x: x[:, 1:] * x[:, :-1], ((5, 65),), P(None, "x")),
    "three rows added, uneven": (lambda x: x[2:] + x[1:-1] + x[:-2], ((63, 5),), P("x")),
    "every other row": (lambda x: x[::2] + 1, ((64, 5),), P("x")),
    "rolled": (lambda x: jnp.roll(x, 3, 0) + x, ((64, 5),), P("x")),
    "padded": (lambda x: jnp.pad(x, ((3, 5), (0, 0))) + 1, ((56, 5),), P("x")),
    "joined": (lambda x, y: jnp.concatenate([x, y]) + 1, ((24, 5), (40, 5)), P("x")),
    "turned round": (lambda x: x[::-1] + 1, ((64, 5),), P("x")),
}  # fmt: skip
MESHES = {"8": mesh_of(x=8), "3": mesh_of(x=3), "2x4": mesh_of(x=4, y=2)}


@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("name", WHOLE)
def test_nothing_is_sent_of_what_is_whole(name, on):
    function, shapes, spec = WHOLE[name]
    args = draw(*shapes)
    for hardware in (None, CPU):
        given = {} if hardware is None else {"hardware": hardware}
        jitted = mw.jit(function, mesh=MESHES[on], in_shardings=P(), out_shardings=spec, **given)
        program = jitted.partition(*args)
        assert program.wire_bytes == 0
        np.testing.assert_allclose(program.simulate(*args), function(*args), rtol=1e-4, atol=1e-4)


def test_each_device_computes_its_part():
    args = draw(IMAGES, KERNEL)
    program = mw.jit(conv, mesh=MESHES["8"], in_shardings=P(), out_shardings=ROWS).partition(*args)
    (made,) = [e for e in program.jaxpr.eqns if e.primitive is lax.conv_general_dilated_p]
    assert made.outvars[0].aval.shape == (2, 4, 6, 4)


def test_what_is_whole_over_one_axis_is_sent_over_the_other():
    """Of the first convolution's rows borders are there, of the second's none are."""
    args = draw((4, 32, 6, 3), (3, 3, 3, 3), (3, 3, 3, 3))
    jitted = mw.jit(
        lambda x, a, b: conv(jax.nn.relu(conv(x, a)), b),
        mesh=MESHES["2x4"],
        in_shardings=(P("y"), P(), P()),
        out_shardings=P("y", "x"),
    )
    program = jitted.partition(*args)
    assert program.wire_bytes == 2 * (2 * 6 * 3 * 4)
    wanted = conv(jax.nn.relu(conv(*args[:2])), args[2])
    np.testing.assert_allclose(program.simulate(*args), wanted, rtol=1e-4, atol=1e-4)


def test_what_is_alike_may_be_sent_for_one_and_not_for_another():
    args = draw(IMAGES, IMAGES, KERNEL)
    jitted = mw.jit(
        lambda x, y, w: conv(x, w) * jnp.tanh(conv(y, w)),
        mesh=MESHES["8"],
        in_shardings=(P(), ROWS, P()),
        out_shardings=ROWS,
    )
    program = jitted.partition(*args)
    assert program.wire_bytes == 2 * (2 * 6 * 3 * 4)
    made = [e for e in program.jaxpr.eqns if e.primitive is lax.conv_general_dilated_p]
    assert [e.outvars[0].aval.shape for e in made] == [(2, 4, 6, 4)] * 2
    wanted = conv(args[0], args[2]) * jnp.tanh(conv(args[1], args[2]))
    np.testing.assert_allclose(program.simulate(*args), wanted, rtol=1e-4, atol=1e-4)


def test_a_shard_is_still_sent():
    jitted = mw.jit(lambda x: jnp.roll(x, 1, 0), mesh=MESHES["8"], in_shardings=P("x"))
    assert jitted.partition(*draw((64, 5))).wire_bytes == 5 * 4


def test_what_is_computed_of_shards_is_sent():
    """The rows are a sum over another axis: nobody has them but by sending."""
    (x,) = args = draw((64, 16))
    jitted = mw.jit(
        lambda x: jnp.roll(x.sum(1), 1),
        mesh=MESHES["2x4"],
        in_shardings=P(None, "y"),
        out_shardings=P("x"),
    )
    program = jitted.partition(*args)
    np.testing.assert_allclose(program.simulate(*args), jnp.roll(x.sum(1), 1), rtol=1e-4, atol=1e-4)


# How two arrays of 32 x 32 lie that are joined along dim 1, over x then, and what is sent at most:
# by parts of what lies over y, which nobody has all of, and the result moved.
LYING = {
    "rows and columns": (P("y"), P(None, "y"), 2048),
    "rows and whole": (P("y"), P(), 1024),
    "columns": (P(None, "y"), P(None, "y"), 2304),
}


@pytest.mark.parametrize("name", LYING)
def test_what_lies_over_another_axis_is_priced_as_it_is_sent(name):
    """Over x everybody has the same; but of what they have of each other's columns only a part."""
    *specs, most = LYING[name]
    args = draw((32, 32), (32, 32))
    jitted = mw.jit(
        lambda *xs: jnp.concatenate(xs, 1),
        mesh=MESHES["2x4"],
        in_shardings=tuple(specs),
        out_shardings=P(None, "x"),
    )
    program = jitted.partition(*args)
    np.testing.assert_array_equal(program.simulate(*args), jnp.concatenate(args, 1))
    assert program.wire_bytes <= most
