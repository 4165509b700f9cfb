"""What programs hold in either order, as XLA says of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.cpu.held import Held, held_by_xla

N8 = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
COLUMNS, ROWS = P(None, "x"), P("x")


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def net(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


def gathered(weights, x):
    """Each weight may be gathered at once, and is read after the one before."""
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


WEIGHTS = (f32(64, 256), f32(256, 64)) * 2
SQUARE = (f32(256, 256),) * 4
CASES = {
    "gradients of weights that nobody else wants": (
        jax.grad(net), WEIGHTS, f32(64, 64), ((COLUMNS, ROWS) * 2, P()), (COLUMNS, ROWS) * 2,
        Held(49152, 49152),
    ),
    "no gradients": (net, WEIGHTS, f32(64, 64), ((COLUMNS, ROWS) * 2, P()), P(),
        Held(40960, 40960)),
    "weights gathered as they are wanted": (
        gathered, SQUARE, f32(512, 256), (ROWS, ROWS), ROWS, Held(1048576, 327680),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_held(name):
    function, weights, x, ins, out, expected = CASES[name]
    program = mw.jit(function, mesh=N8, in_shardings=ins, out_shardings=out).partition(weights, x)
    per_device = program.per_device
    assert held_by_xla(per_device.jaxpr, per_device.mesh.axis_size) == expected
