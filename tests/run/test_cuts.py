"""Exchanges on eight real devices: pieces that XLA cuts alike, and what arrives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import meshwise as mw
from meshwise._jax import combine_collectives
from meshwise._jax.cuts import cut_alike, cut_before_joined

P = PartitionSpec


# Axes of the mesh, the global shape, how it lies before and after, the type.
CASES = [
    ({"x": 8}, (16, 24), P("x"), P(None, "x"), jnp.float32),
    ({"x": 8}, (16, 24), P(None, "x"), P("x"), jnp.int16),
    ({"x": 8}, (3, 8, 5, 16), P(None, None, None, "x"), P(None, "x"), jnp.complex64),
    ({"x": 8}, (10, 19), P("x"), P(None, "x"), jnp.float32),
    ({"x": 8}, (16, 24), P("x"), P(None, "x"), jnp.bfloat16),
    ({"x": 8}, (16, 24), P(None, "x"), P("x"), jnp.float8_e4m3fn),
    ({"x": 8}, (16, 24), P("x"), P(None, "x"), jnp.int4),
    ({"x": 2, "y": 4}, (8, 16), P("y"), P(None, "y"), jnp.bool_),
    ({"x": 2, "y": 4}, (16, 16), P(("x", "y")), P(None, ("x", "y")), jnp.float32),
    ({"x": 2, "y": 4}, (8, 8, 8), P("x", "y"), P(None, None, ("y", "x")), jnp.float32),
]


def is_value(x):
    return isinstance(x, mw.UnevenArray)


@pytest.mark.parametrize("axes, shape, before, after, dtype", CASES)
def test_what_arrives_is_what_one_device_has(axes, shape, before, after, dtype):
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 9).astype(dtype)
    move = mw.jit(lambda x: x, mesh=mesh, in_shardings=(before,), out_shardings=after)
    assert "all_to_all" in {c.kind.value for c in move.partition(x).collectives}
    y = move(x)
    np.testing.assert_array_equal(y.value if is_value(y) else y, x)


def test_a_transpose_around_what_is_computed_flat(mesh8):
    """XLA moves it past the computation, and the pieces must not be laid differently by that."""
    x = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    function = jax.grad(lambda x: jnp.sin(x.T.ravel()).sum())
    step = mw.jit(function, mesh=mesh8, in_shardings=P("x"), out_shardings=P("x"))
    assert [c.kind.value for c in step.partition(x).collectives] == ["all_to_all"] * 2
    np.testing.assert_allclose(step(x), np.cos(x), rtol=1e-5)


def test_a_scattered_sum_that_is_a_piece_of_what_is_exchanged(mesh2x2x2):
    """XLA takes it for the piece as it lies, and then refuses its own all_to_all (plain JAX)."""

    def of_device(x, rest):
        turned = x.transpose(1, 0, 2)
        scattered = lax.psum_scatter(turned, ("x", "y", "z"), scatter_dimension=0)
        joined = jnp.concatenate([scattered, rest]).reshape(4, 6, 1)
        sent = lax.all_to_all(joined, ("z", "y"), 0, 0, tiled=True)
        columns = sent.reshape(2, 2, 6, 1).transpose(2, 1, 0, 3).reshape(6, 4)
        received = lax.ppermute(columns[:, 3:], ("x",), [(0, 1)])
        is_first = lax.axis_index("x") == 0
        return jnp.where(is_first, jnp.pad(received, ((0, 0), (0, 2))), jnp.ones((6, 3)))

    whole, apart = (P(), P()), P(("x", "y", "z"))
    specs = {"in_specs": whole, "out_specs": apart}
    region = jax.shard_map(of_device, mesh=mesh2x2x2, check_vma=False, **specs)
    rng = np.random.default_rng(0)
    args = tuple(rng.normal(size=n).astype(np.float32) for n in ((6, 8, 1), (18, 1)))
    step = mw.jit(region, mesh=mesh2x2x2, in_shardings=whole, out_shardings=apart)
    ours = step.partition(*args)
    np.testing.assert_allclose(ours(*args), ours.simulate(*args), rtol=1e-6)


def compiled_text(mesh8, shape, before, after, dtype=jnp.float32):
    move = mw.jit(lambda x: x, mesh=mesh8, in_shardings=(before,), out_shardings=after)
    return move.partition(jax.ShapeDtypeStruct(shape, dtype)).compile().as_text()


@pytest.mark.parametrize("before, after", [(P("x"), P(None, "x")), (P(None, "x"), P("x"))])
def test_pieces_are_cut_by_equal_kernels_and_not_joined_before(mesh8, before, after):
    text = compiled_text(mesh8, (16, 24), before, after)
    bodies = re.findall(r"^%fused[^\n]*{\n(.*?)^}", text, re.MULTILINE | re.DOTALL)
    cuts = [b for b in bodies if "dynamic-slice" in b]
    alike = {re.sub(r"%[\w.-]+|, metadata=\{[^}]*\}|stack_frame_id=\d+", "", b) for b in cuts}
    assert len(cuts) == 8 and len(alike) == 1
    assert text.count(" concatenate(") <= 1  # of what was received


@pytest.mark.parametrize("after", [P(), P(None, "x")])
@pytest.mark.parametrize("dtype, bits", [(jnp.bfloat16, 16), (jnp.float8_e5m2, 8)])
def test_short_floats_are_moved_as_they_are(mesh8, after, dtype, bits):
    text = compiled_text(mesh8, (16, 24), P("x"), after, dtype)
    (moved,) = re.findall(r"= \(?(\w+)\[.* (?:all-to-all|all-gather)\(", text)
    assert moved == f"u{bits}"


def test_arrays_that_travel_together_are_joined_in_pieces(mesh8):
    draw = np.random.default_rng(0)
    keys = jnp.asarray(draw.integers(0, 9, (16, 32)), jnp.int32)
    values = jnp.asarray(draw.normal(size=(16, 32)), jnp.float32)
    spec = P(None, "x")
    by_keys = mw.jit(
        lambda k, v: lax.sort((k, v), dimension=1, num_keys=1),
        mesh=mesh8,
        in_shardings=(spec, spec),
        out_shardings=spec,
    )
    for found, wanted in zip(by_keys(keys, values), lax.sort((keys, values), num_keys=1), strict=1):
        np.testing.assert_array_equal(found, wanted)
    apart, sizes = by_keys.partition(keys, values).jaxpr, {"x": 8}
    for jaxpr, joined in ((apart, [1] * 4), (combine_collectives(apart, sizes, 2**16), [2, 2])):
        sent = cut_alike(jaxpr, sizes).jaxpr.eqns
        cuts = [eqn for eqn in sent if eqn.primitive.name == "cut_and_joined"]
        assert [len(eqn.invars) for eqn in cuts] == joined  # there and back: keys and values


def test_what_is_joined_of_arrays_of_other_sizes_is_cut(mesh8):
    """A running sum of totals, each moved on by one, goes back to where its rows are."""
    total = mw.jit(
        lambda x: jnp.cumsum(x, 0), mesh=mesh8, in_shardings=P("x"), out_shardings=P("x")
    )
    program = total.partition(jax.ShapeDtypeStruct((16, 24), jnp.float32))
    eqns = cut_alike(program.jaxpr, {"x": 8}).jaxpr.eqns
    names = [eqn.primitive.name for eqn in eqns]
    assert names.count("all_to_all") == names.count("cut_and_joined") == 2


def test_gradients_and_batches_pass_through(mesh8):
    made = mw.jit(lambda x: x * 1.0, mesh=mesh8, in_shardings=(P("x"),), out_shardings=P(None, "x"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32)
    program = made.partition(x)
    gradient = jax.grad(lambda x: (program(x) ** 2).sum())(x)
    np.testing.assert_allclose(gradient, 2 * x, rtol=1e-6)
    both = jax.vmap(program)(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(both, jnp.stack([x, 2 * x]))


def test_an_exchange_in_a_loop(mesh8):
    def turns(x):
        def step(x, _):
            return mw.shard(mw.shard(x, P(None, "x")) * 2, P("x")), None

        return lax.scan(step, x, None, length=3)[0]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32)
    turned = mw.jit(turns, mesh=mesh8, in_shardings=(P("x"),), out_shardings=P("x"))
    np.testing.assert_array_equal(turned(x), x * 8)


def test_what_is_computed_of_equal_pieces_is_one_kernel(mesh8):
    """Gradients of biases travel together; what is computed of each of them is compiled once."""

    def step(x, biases):
        scaled = jnp.linspace(1, 2, len(biases))

        def loss(biases):
            return sum((jnp.sin(x * s + b) ** 2).sum() for s, b in zip(scaled, biases, strict=True))

        return [b - 0.1 * jnp.tanh(g) for b, g in zip(biases, jax.grad(loss)(biases), strict=True)]

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2048, 96)).astype(np.float32)
    biases = [rng.normal(size=96).astype(np.float32) for _ in range(5)]
    made = mw.jit(step, mesh=mesh8, in_shardings=(P("x"), P()), out_shardings=P())
    program = made.partition(x, biases)
    for found, wanted in zip(made(x, biases), step(x, biases), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    text = program.compile().as_text()
    bodies = re.findall(r"^%fused[^\n]*{\n(.*?)^}", text, re.MULTILINE | re.DOTALL)
    read = [b for b in bodies if "tanh" in b]
    alike = {re.sub(r"%[\w.-]+|, metadata=\{[^}]*\}|stack_frame_id=\d+", "", b) for b in read}
    assert text.count(" all-reduce(") == 1
    assert len(read) == 5 and len(alike) == 1


def test_pieces_of_a_piece_of_what_is_received_are_cut_alike():
    """Sums that were made as one may have travelled with others: they are cut out twice."""

    def of_device(first, rest):
        received = lax.psum(jnp.concatenate([first.reshape(1, 12), rest], 1), "x")
        own = received[:, :12].reshape(12)
        return own[:4], own[4:8], own[8:], received[:, 12:]

    args = jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((1, 7), jnp.float32)
    jaxpr = jax.make_jaxpr(of_device, axis_env=[("x", 8)])(*args)
    eqns = cut_alike(jaxpr, {"x": 8}).jaxpr.eqns
    cut = [eqn for eqn in eqns if eqn.primitive is lax.dynamic_slice_p]
    assert [eqn.outvars[0].aval.shape for eqn in cut] == [(4,)] * 3
    assert sum(eqn.primitive is lax.slice_p for eqn in eqns) == 2  # of other sizes


def test_only_what_travels_together_is_cut_before_it_is_joined():
    def of_device(first, rest):
        together = lax.all_to_all(jnp.concatenate([first, rest], 1), "x", 0, 0, tiled=True)
        alone = lax.all_to_all(first, "x", 0, 0, tiled=True)
        laid_along = jnp.concatenate([first, rest[:, :4]], 0)
        return together, alone, lax.all_to_all(laid_along, "x", 0, 0, tiled=True)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 4), (16, 7))]
    jaxpr = jax.make_jaxpr(of_device, axis_env=[("x", 8)])(*args)
    eqns = cut_before_joined(jaxpr, {"x": 8}).jaxpr.eqns
    (cut,) = [eqn for eqn in eqns if eqn.primitive.name == "cut_and_joined"]
    assert [v.aval.shape for v in cut.invars] == [(16, 4), (16, 7)]
    assert cut.params == {"dim": 0, "pieces": 8, "along": 1}


def test_halves_that_travel_together_are_never_laid_whole(mesh8):
    """Both halves of rows change places at once: what is sent, what came, and nothing besides."""
    x = np.random.default_rng(0).normal(size=(1024, 64)).astype(np.float32)
    halves = mw.jit(
        lambda x: tuple(jnp.split(x, 2)), mesh=mesh8, in_shardings=P("x"), out_shardings=P("x")
    )
    for found, wanted in zip(halves(x), np.split(x, 2), strict=True):
        np.testing.assert_array_equal(found, wanted)
    memory = halves.partition(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * x.nbytes // 8 + 128
