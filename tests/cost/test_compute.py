"""Flops and memory traffic: exact where they can be counted by hand, and beside XLA's count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import make_jaxpr_over_axes
from meshwise.cost.compute import program_work
from meshwise.cost.kernels import kernels_of
from meshwise.cost.work import Work

SIZES = {"a": 2, "b": 4}
F32 = jnp.float32


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(function, *args):
    return make_jaxpr_over_axes(function, list(SIZES.items()), args)


def work(function, *args, fuses=True):
    return program_work(traced(function, *args), SIZES, fuses=fuses)


def names_of(function, *args):
    return [k.name for k in kernels_of(traced(function, *args), SIZES).kernels]


X = array(8, 16)  # 512 bytes, 128 elements

# function, arguments, flops, bytes read, bytes written
EXACT = [
    pytest.param(lambda x: x @ x.T, (X,), 2 * 8 * 16 * 8, 2 * 512, 256, id="product"),
    pytest.param(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID"),
        (array(2, 3, 8, 8), array(5, 3, 3, 3)),
        2 * (3 * 9) * (2 * 5 * 36),
        4 * (2 * 3 * 64 + 5 * 27),
        4 * 2 * 5 * 36,
        id="convolution",
    ),
    pytest.param(lambda x, y: jnp.tanh(x + y) * x, (X, X), 3 * 128, 1024, 512, id="chain"),
    pytest.param(lambda x: (x * 2).sum(), (X,), 256, 512, 4, id="chain into a reduction"),
    pytest.param(lambda x: (x + 1, x * 2), (X,), 256, 1024, 1024, id="nothing joins them"),
    pytest.param(lambda x, b: x + b, (X, array(16)), 128, 512 + 64, 512, id="broadcast"),
    pytest.param(lambda x: x[:4] * 2, (X,), 64, 256, 256, id="slice"),
    pytest.param(lambda x: x[:4], (X,), 0, 256, 256, id="slice alone"),
    pytest.param(
        lambda x: lax.dynamic_slice(x, (lax.axis_index("a"), 0), (4, 16)),
        (X,),
        0,
        256,
        256,
        id="a device's own rows",
    ),
    pytest.param(lambda x: x.reshape(128) + 1, (X,), 128, 512, 512, id="reshape"),
    pytest.param(lambda x, y: x.T + y, (X, array(16, 8)), 128, 1024, 512, id="transpose"),
    pytest.param(
        lambda t, i: t.at[i].get(mode="promise_in_bounds"),
        (array(1000, 16), array(4, dtype=np.uint32)),
        4,
        16 + 16 + 256,
        16 + 256,
        id="rows by number, which are cast",
    ),
    pytest.param(
        lambda t, i, u: t.at[i].add(u, mode="promise_in_bounds"),
        (array(1000, 16), array(4, dtype=np.uint32), array(4, 16)),
        4,
        16 + 16 + 2 * 256,
        16 + 256,
        id="rows added to, by number",
    ),
    pytest.param(
        lambda c, u: lax.dynamic_update_slice(c, u * 2, (3, 0)),
        (array(1000, 16), array(4, 16)),
        64,
        256,
        256,
        id="update in place",
    ),
    pytest.param(
        lambda c, u: (lax.dynamic_update_slice(c, u, (3, 0)), c),
        (array(1000, 16), array(4, 16)),
        0,
        256 + 64000,
        256 + 64000,
        id="update of what is kept",
    ),
    pytest.param(lambda x: lax.psum(x * 2, "b") + 1, (X,), 256, 3 * 512, 3 * 512, id="all_reduce"),
    pytest.param(lambda x: x.astype(jnp.bfloat16), (X,), 128, 512, 256, id="cast"),
]


@pytest.mark.parametrize(("function", "args", "flops", "read", "written"), EXACT)
def test_counted_by_hand(function, args, flops, read, written):
    assert work(function, *args) == Work(flops, read, written)


def test_without_fusion_every_equation_reads_and_writes():
    found = work(lambda x, y: jnp.tanh(x + y) * x, X, X, fuses=False)
    assert found == Work(3 * 128, 5 * 512, 3 * 512)


def test_a_fusion_ends_at_products_reductions_and_collectives():
    def function(x, w):
        hidden = lax.psum(jnp.tanh(x @ w) * 2, "a")
        return hidden - hidden.sum(), hidden + 1

    assert names_of(function, X, array(16, 16)) == [
        "dot_general",
        "mul and 1 more",
        "psum",
        "reduce_sum",
        "sub",
        "add",
    ]


def test_a_fusion_does_not_wait_for_itself():
    """What is scaled by its own sum is read twice: before and after."""
    kernels = kernels_of(traced(lambda x: (x * 2) / (x * 2).sum(), X), SIZES).kernels
    assert [k.work.read_bytes for k in kernels] == [512, 516]


def test_what_a_fusion_can_compute_from_what_it_reads_is_not_written():
    """A gradient reads the product again and not the tangents made of it before."""

    def function(x, w):
        hidden, pull = jax.vjp(jnp.tanh, x @ w)
        return pull(hidden @ w)[0]

    kernels = kernels_of(traced(function, X, array(16, 16)), SIZES).kernels
    assert [k.work.written_bytes for k in kernels] == [512, 512, 512, 512]


def test_one_value_in_memory_may_stand_for_another():
    """`1 - hidden` is made of what the second product reads anyway, and is no kernel's result."""

    def function(x, w):
        hidden = jnp.tanh(x @ w)
        return (hidden @ w) * (1 - hidden)

    kernels = kernels_of(traced(function, X, array(16, 16)), SIZES).kernels
    assert [k.work.written_bytes for k in kernels] == [512, 512, 512, 512]
    assert [k.work.read_bytes for k in kernels[-1:]] == [1024]
    assert sum(k.work.flops for k in kernels[2:]) == 4096 + 2 * 128  # once more


def test_but_not_a_larger_one():
    def function(x, w):
        hidden = jnp.tanh(x @ w)
        return (hidden @ w).astype(jnp.bfloat16) * hidden.astype(jnp.bfloat16)

    kernels = kernels_of(traced(function, X, array(16, 16)), SIZES).kernels
    assert [k.work.written_bytes for k in kernels] == [512, 512 + 256, 512, 256]


def test_kernels_run_over_one_number_of_elements():
    def function(x):
        hidden = jnp.tanh(x)
        return hidden, lax.pad(hidden, 0.0, [(1, 1, 0), (0, 0, 0)])

    assert names_of(function, X) == ["tanh", "pad"]


def test_what_only_one_fusion_reads_is_part_of_it():
    """However late it is read, and broadcast."""

    def function(x, w, bias):
        early = bias * 2 + 1
        return jnp.tanh(x @ w + early)

    assert names_of(function, X, array(16, 16), array(16)) == ["dot_general", "tanh and 3 more"]


def test_updates_that_share_a_step_size_are_kernels_of_their_own():
    def function(x, y, step):
        rate = 0.1 / jnp.sqrt(step)
        return x - rate * lax.psum(x, "a"), y - rate * lax.psum(y, "b")

    assert names_of(function, X, X, array()) == ["psum", "sub and 1 more", "psum", "sub and 1 more"]


def test_loops_count_their_trips():
    def loop(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, ws)

    once = 2 * 8 * 16 * 16 + 128 + 128
    found = work(loop, X, array(5, 16, 16))
    assert found.flops == 5 * once
    assert found.read_bytes == 5 * ((512 + 1024) + 512 + 512)
    assert found.written_bytes == 5 * (512 + 512 + 4)


def test_while_counts_once_and_a_choice_its_largest_branch():
    def loop(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ jnp.ones((16, 16)), x)

    def choice(x):
        return lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x) + x, lambda: x * 2)

    assert work(loop, X).flops == 2 * 8 * 16 * 16 + 1
    assert work(choice, X).flops - 1 == 2 * 128


def test_calls_are_entered_and_fused_across():
    def calls(x):
        return jax.checkpoint(lambda x: jax.jit(jnp.tanh)(x) + 1)(x) * 2

    assert work(calls, X) == Work(3 * 128, 512, 512)


def test_a_call_named_fused_is_one_kernel():
    def fused_update(x, w):
        return jnp.tanh(x @ w) + lax.psum(x, "a")

    def function(x, w):
        return jax.jit(fused_update)(x, w) * 2

    first, second = kernels_of(traced(function, X, array(16, 16)), SIZES).kernels
    assert first.name == "fused_update" and [c.axes for c in first.collectives] == [("a",)]
    assert first.work == Work(2 * 8 * 16 * 16 + 256, 512 + 1024, 512)
    assert second.work == Work(128, 512, 512)


def test_dead_equations_and_groups_of_one_count_nothing():
    def function(x):
        lax.psum(x, "a")
        jnp.tanh(x)
        return x + 1

    assert work(function, X) == Work(128, 512, 512)
    alone = make_jaxpr_over_axes(lambda x: lax.psum(x, "c") + 1, [("c", 1)], (X,))
    assert program_work(alone, {"c": 1}) == Work(128, 512, 512)


# --- beside XLA ---


def attention(q, k, v):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


def layer_norm(x, gain, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def mlp_step(first, second, x, y):
    def loss(weights):
        return jnp.mean((jax.nn.gelu(x @ weights[0]) @ weights[1] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)((first, second))
    return value, [w - 0.1 * g for w, g in zip((first, second), gradients, strict=True)]


MLP = (array(64, 256), array(256, 64), array(128, 64), array(128, 64))
PROGRAMS = {
    "attention": (attention, *[array(2, 4, 64, 64)] * 3),
    "layer norm": (layer_norm, array(256, 128), array(128), array(128)),
    "adam": (adam, *[array(100, 100)] * 4),
    "mlp step": (mlp_step, *MLP),
    "softmax": (jax.nn.softmax, array(256, 256)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_beside_xla(name):
    """Flops within a third. Bytes: never above XLA's for a CPU, which joins less than others do."""
    function, *args = PROGRAMS[name]
    theirs = jax.jit(function).lower(*args).compile().cost_analysis()
    ours = work(function, *args)
    assert 0.95 <= ours.flops / theirs["flops"] <= 1.33
    assert 0.6 <= ours.memory_bytes / theirs["bytes accessed"] <= 1.01


def test_an_emitted_program():
    """On 2x4 devices, of a step whose weights and batch are sharded, a device does an eighth."""
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = (P(None, "model"), P("model", None), P("data", None), P("data", None))
    program = mw.jit(mlp_step, mesh=mesh, in_shardings=specs).partition(*MLP)
    sizes = program.per_device.mesh.axis_size
    assert program_work(program.jaxpr, sizes).flops == pytest.approx(
        work(mlp_step, *MLP).flops / 8, rel=0.02
    )
