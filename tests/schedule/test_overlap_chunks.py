"""overlap of a chain of equations in chunks: pipelines within a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.schedule.moves.overlap import overlap
from meshwise.schedule.view import View
from tests.meshes import mesh_of
from tests.schedule.steps import kinds, only, random, simulate

MESH = mesh_of(pp=2, tp=4)
# Since 0.12 XLA adds up a product of fewer rows in another order.
ROUNDING = 0.0 if jax.__version_info__ < (0, 12) else 4e-6


def to_next_stage(tokens=24):
    """CoCoNeT's pipeline block: a sum within a stage, dropout of the tile, its send, a gather."""

    def fn(x, w, b, key):
        y = lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True)
        y = jax.nn.gelu(y + b)
        y = jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, y.shape), y, 0.0)
        y = lax.ppermute(y, "pp", [(0, 1)])
        return lax.all_gather(y, "tp", axis=1, tiled=True)

    key = np.asarray(jax.random.key_data(jax.random.key(1)))
    args = random(tokens, 16), random(16, 8, seed=1), random(8), key
    specs = (P("pp", "tp"), P("tp"), P("tp"), P())
    return mw.SpmdProgram.from_shard_map(fn, MESH, specs, P("pp"), *args), args


def made_by(view, name):
    return [e.outvars[0] for e in view.eqns if e.primitive.name == name]


def ancestors(view, var):
    """Indices of the equations that a value is computed from."""
    found: set[int] = set()
    todo = [var]
    while todo:
        index = view.maker.get(todo.pop())
        if index is not None and index not in found:
            found.add(index)
            todo += [a for a in view.eqns[index].invars if not hasattr(a, "val")]
    return found


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("first", ["reduce_scatter", "dot_general"])
def test_a_chain_in_chunks_computes_the_same(first, chunks):
    program, args = to_next_stage()
    view = View(program.per_device)
    done = overlap(view, [only(view, first), only(view, "all_gather")], chunks=chunks)
    assert sorted(kinds(done.view)) == sorted(kinds(view) * chunks)
    assert done.view.program.wire_bytes == view.program.wire_bytes
    assert {c.reason[:7] for c in done.view.program.collectives} == {"overlap"}
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING)


def test_no_chunk_waits_for_another():
    program, _ = to_next_stage()
    view = View(program.per_device)
    done = overlap(view, [only(view, "reduce_scatter"), only(view, "all_gather")], chunks=3).view
    for name in ("reduce_scatter", "ppermute", "all_gather"):
        sets = [ancestors(done, v) for v in made_by(done, name)]
        assert len(sets) == 3
        for i, mine in enumerate(sets):
            others = {done.maker[v] for v in made_by(done, "reduce_scatter")[:i]}
            later = {done.maker[v] for v in made_by(done, "reduce_scatter")[i + 1 :]}
            assert not mine & (others | later)


def test_collectives_of_different_links_alternate():
    """While a chunk is sent, the next one is summed and the one before gathered."""
    program, _ = to_next_stage()
    view = View(program.per_device)
    done = overlap(view, [only(view, "reduce_scatter"), only(view, "all_gather")], chunks=4).view
    short = {"reduce_scatter": "s", "ppermute": "p", "all_gather": "g"}
    assert "".join(short[k] for k in kinds(done)) == "sspsgpsgpgpg"


def test_dropout_draws_the_bits_of_the_whole():
    """Random bits made within the chain are those of their place, not of their chunk."""

    def fn(x, key):
        y = lax.psum(x, "tp")
        y = y * jax.random.bernoulli(jax.random.wrap_key_data(key[0]), 0.5, y.shape)
        y = y + lax.broadcasted_iota(np.float32, y.shape, 0)
        return lax.ppermute(y, "pp", [(0, 1), (1, 0)])

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 2)))
    args = random(24, 8), keys
    program = mw.SpmdProgram.from_shard_map(fn, MESH, (P("pp", "tp"), P("pp")), P("pp"), *args)
    view = View(program.per_device)
    drawn = made_by(view, "random_bits") + made_by(view, "iota")
    done = overlap(view, [*drawn, only(view, "psum"), only(view, "ppermute")], chunks=3)
    assert sorted(kinds(done.view)) == ["all_reduce"] * 3 + ["ppermute"] * 3
    shapes = {e.outvars[0].aval.shape for e in done.view.eqns if e.primitive.name == "random_bits"}
    assert shapes != {(12, 2)}
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    np.testing.assert_array_equal(got, want)


def test_values_of_a_chain_that_others_read_are_joined():
    def fn(x, w):
        y = lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True)
        z = lax.ppermute(y, "pp", [(0, 1), (1, 0)])
        return z * 2.0, jnp.sum(y, axis=0), y

    args = random(8, 16), random(16, 8, seed=1)
    specs = (P("pp", "tp"), P("tp"))
    outs = (P("pp", "tp"), P(("pp", "tp")), P("pp", "tp"))
    program = mw.SpmdProgram.from_shard_map(fn, MESH, specs, outs, *args)
    view = View(program.per_device)
    done = overlap(view, [only(view, "dot_general"), only(view, "ppermute")], chunks=2)
    assert len(done.values) == 2
    for got, want in zip(
        simulate(program, done.view, args), simulate(program, view, args), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)  # the sum may be fused


def test_a_dim_that_moves_is_followed():
    """A transpose within the chain; the dim is named where the last value has it."""

    def fn(x, w):
        y = lax.psum(x @ w, "tp").T
        return lax.ppermute(y, "pp", [(0, 1), (1, 0)])

    # Whole numbers: their sums are the same in any order, which differs between processors.
    args = np.rint(9 * random(12, 16)), np.rint(9 * random(16, 5, seed=1))
    specs = (P("pp", "tp"), P("tp"))
    program = mw.SpmdProgram.from_shard_map(fn, MESH, specs, P(None, "pp"), *args)
    view = View(program.per_device)
    done = overlap(view, [only(view, "dot_general"), only(view, "ppermute")], chunks=3, dim=1)
    products = [v.aval.shape for v in made_by(done.view, "dot_general")]
    assert products == [(2, 5)] * 3
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    np.testing.assert_array_equal(got, want)


def test_attention_in_chunks_of_the_batch():
    """Heads split off and joined, products over the batch, a softmax: all of it by sequences."""

    def fn(x, qkv, out):
        whole = lax.all_gather(x, "tp", axis=1, tiled=True)
        q, k, v = jnp.moveaxis((whole @ qkv).reshape(*whole.shape[:2], 3, 2, 4), 2, 0)
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-1)
        heads = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(*whole.shape[:2], 8)
        return lax.psum_scatter(heads @ out, "tp", scatter_dimension=1, tiled=True)

    args = random(8, 12, 6), random(6, 96, seed=1), random(32, 6, seed=2)
    specs = (P("pp", "tp"), P(None, "tp"), P("tp"))
    program = mw.SpmdProgram.from_shard_map(fn, MESH, specs, P("pp", "tp"), *args)
    view = View(program.per_device)
    chain = [only(view, "all_gather"), only(view, "reduce_scatter")]
    done = overlap(view, chain, chunks=4)
    assert sorted(kinds(done.view)) == ["all_gather"] * 4 + ["reduce_scatter"] * 4
    assert {v.aval.shape[0] for v in made_by(done.view, "exp")} == {1}
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    # On some processors XLA adds up a product of fewer rows in another order.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-6)


def refused(fn, specs, out, args, names, match, **options):
    program = mw.SpmdProgram.from_shard_map(fn, MESH, specs, out, *args)
    view = View(program.per_device)
    with pytest.raises(mw.IllegalMove, match=match):
        overlap(view, [only(view, name) for name in names], **options)


def test_what_does_not_divide_or_is_no_chunk_is_refused():
    program, _ = to_next_stage()
    view = View(program.per_device)
    chain = [only(view, "reduce_scatter"), only(view, "all_gather")]
    for options, match in (
        ({"chunks": 5}, "12 elements on each device are not 5 equal chunks"),
        ({"chunks": 1}, "two or more"),
        ({"chunks": 2, "dim": 1}, r"dim 1: all_gather .*mixes elements along the dim"),
        ({"chunks": 2, "dim": 7}, "there is no dim 7"),
    ):
        with pytest.raises(mw.IllegalMove, match=match):
            overlap(view, chain, **options)
    with pytest.raises(mw.IllegalMove, match="no values"):
        overlap(view, [], chunks=2)


@pytest.mark.parametrize("tokens, chunks", [(3, 2), (5, 3)])
def test_what_is_padded_divides_before_too(tokens, chunks):
    """The result of the pad divides, and each chunk of it is of one chunk; but those are unlike."""

    def fn(x):
        y = jnp.pad(jnp.abs(lax.psum(x, "tp")), [(0, 1), (0, 0)])
        return lax.ppermute(y, "pp", [(0, 1)])

    match = rf"pad at .* has {tokens} elements along dim 0 of .* are not {chunks} equal chunks"
    args = (random(2 * tokens, 5),)
    refused(fn, (P("pp"),), P("pp"), args, ["pad", "ppermute"], match, chunks=chunks, dim=0)
    refused(fn, (P("pp"),), P("pp"), args, ["psum", "ppermute"], match, chunks=chunks, dim=0)


def test_a_reduction_that_crosses_the_dim_is_refused():
    def norm(x):
        y = lax.psum(x, "tp")
        return lax.ppermute(y / jnp.sqrt(jnp.sum(y * y, axis=0)), "pp", [(0, 1)])

    def scalar(x):
        return lax.psum(jnp.sum(lax.psum(x, "tp")), "pp")

    args = (random(8, 8),)
    specs = (P("pp", "tp"),)
    refused(
        norm, specs, P("pp"), args, ["psum", "ppermute"], "whole by reduce_sum", chunks=2, dim=0
    )
    refused(norm, specs, P("pp"), args, ["psum", "ppermute"], "equal chunks", chunks=3)
    program = mw.SpmdProgram.from_shard_map(scalar, MESH, specs, P(), *args)
    view = View(program.per_device)
    with pytest.raises(mw.IllegalMove, match="is a scalar"):
        overlap(view, made_by(view, "psum"), chunks=2)
    program = mw.SpmdProgram.from_shard_map(norm, MESH, specs, P("pp"), *args)
    view = View(program.per_device)
    done = overlap(view, [only(view, "psum"), only(view, "ppermute")], chunks=2)  # along dim 1
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_chain_runs_on_real_devices(mesh2x4):
    def fn(x, w):
        y = lax.psum_scatter(x @ w, "y", scatter_dimension=1, tiled=True)
        y = lax.ppermute(jnp.tanh(y), "x", [(0, 1), (1, 0)])
        return lax.all_gather(y, "y", axis=1, tiled=True)

    args = random(24, 16), random(16, 8, seed=1)
    program = mw.SpmdProgram.from_shard_map(fn, mesh2x4, (P("x", "y"), P("y")), P("x"), *args)
    view = View(program.per_device)
    done = overlap(view, [only(view, "dot_general"), only(view, "all_gather")], chunks=3)
    changed = {name: getattr(program, name) for name in program.__dataclass_fields__}
    chunked = mw.SpmdProgram(**{**changed, "per_device": done.view.program})
    np.testing.assert_allclose(chunked(*args), program(*args), rtol=1e-6)
