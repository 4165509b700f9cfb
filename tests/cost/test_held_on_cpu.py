"""What programs hold in either order, as XLA says of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.cpu.held import Held, holding_of

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


def step(weights, batch):
    """A step of gradient descent, and its loss."""

    def loss(weights):
        return ((gathered(weights, batch[0]) - batch[1]) ** 2).mean()

    found, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], found


def both_gradients(weight, batch):
    return jax.grad(lambda x, w: ((x @ w - batch[1]) ** 2).sum(), (0, 1))(batch[0], weight)


WEIGHTS = (f32(64, 256), f32(256, 64)) * 2
SQUARE = (f32(256, 256),) * 4
CASES = {
    "gradients of weights that nobody else wants": (
        jax.grad(net), WEIGHTS, f32(64, 64), ((COLUMNS, ROWS) * 2, P()), (COLUMNS, ROWS) * 2,
        Held(49152, 81920),
    ),
    "no gradients": (net, WEIGHTS, f32(64, 64), ((COLUMNS, ROWS) * 2, P()), P(),
        Held(40960, 40960)),
    "weights in shards, and a loss": (
        step, (f32(64, 64),) * 2, (f32(512, 64),) * 2, (ROWS, ROWS), (ROWS, P()),
        Held(65536, 81920),
    ),
    "what is exchanged counts as often as it has pieces": (
        both_gradients, f32(128, 64), (f32(256, 128), f32(256, 64)),
        (ROWS, (COLUMNS, P())), (COLUMNS, ROWS), Held(94208, 106496),
    ),
    "weights gathered as they are wanted": (
        gathered, SQUARE, f32(512, 256), (ROWS, ROWS), ROWS, Held(1048576, 327680),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_held(name):
    function, weights, x, ins, out, expected = CASES[name]
    program = mw.jit(function, mesh=N8, in_shardings=ins, out_shardings=out).partition(weights, x)
    per_device = program.per_device
    assert holding_of(per_device.jaxpr, per_device.mesh.axis_size).held == expected


def test_a_loss_holds_more_where_it_is_told_to_hold_least():
    """XLA holds 24,832 bytes where it is told to hold least, and 12,288 where it is not."""

    def loss(x, table, labels):
        logits = x @ table.T
        most = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        all_rows = jnp.log(jnp.exp(logits - most).sum(-1)) + most[..., 0]
        own = (jax.nn.one_hot(labels, len(table)) * logits).sum(-1)
        return (all_rows - own).mean()

    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    step = mw.jit(
        jax.value_and_grad(loss, (0, 1)),
        mesh=mesh,
        in_shardings=(P("x"), P("y"), P("x")),
        out_shardings=(P(), (P("x"), P("y"))),
    )
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    per_device = step.partition(f32(64, 32), f32(256, 32), labels).per_device
    held = holding_of(per_device.jaxpr, per_device.mesh.axis_size).held
    assert not held.is_less_as_wanted
