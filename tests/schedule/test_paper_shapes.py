"""The programs and schedules of the paper's sizes: values, bytes, and orders that must hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwise as mw
from benchmarks.paper_cases import (
    BERT,
    BLOCKS,
    NODE,
    NODES,
    OPTIMIZERS,
    ROWS,
    SENDS,
    STAGE,
    TRAINING,
    Case,
    Way,
    block_end,
    optimizer,
    stage,
    stage_end,
)
from benchmarks.paper_shapes import (
    MEMORY_BYTES,
    main,
    move_rows,
    predicted,
    rows,
    shown,
    training_rows,
)
from examples.coconet.programs import ATTENTION, MLP, attention_block, mlp_block
from meshwise.cost.links import dgx2

F16, F32 = np.float16, np.float32


def draw(*shape, seed=0, dtype=F16, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def dropped(key, x, rate=0.1):
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0.0).astype(x.dtype)


def check(program, ways, args, wanted, rtol=2e-2):
    """Every schedule computes what one device does, to what a short float keeps."""
    for way in ways:
        name, moves = way.made()[0]
        s = mw.Schedule(program)
        moves(s)
        got = jax.tree.leaves(s.program.simulate(*args))
        for one, want in zip(got, wanted, strict=True):
            scale = np.abs(want).max()
            np.testing.assert_allclose(
                np.asarray(one, F32), want, rtol=0, atol=rtol * scale, err_msg=name
            )


@pytest.mark.parametrize("kind", ["Adam", "LAMB"])
@pytest.mark.parametrize("shape", [(16, 6), (10, 3)])
def test_optimizers_compute_what_one_device_does(kind, shape):
    gradients, weights = draw(8, *shape, scale=0.1), draw(*shape, seed=1, dtype=F32)
    mean = draw(*shape, seed=2, dtype=F32)
    square, count = mean**2 + 0.1, np.float32(3)

    gradient = gradients.astype(F32).mean(0)
    m, v = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
    update = m / (1 - 0.9**4) / (np.sqrt(v / (1 - 0.999**4)) + 1e-6)
    if kind == "LAMB":
        update = update + 0.01 * weights
        update *= np.linalg.norm(weights) / np.linalg.norm(update)
    wanted = weights - 0.1 * update, weights - 0.1 * update, m, v, np.float32(4)

    program = optimizer(kind, shape, devices=8)
    args = gradients, weights, mean, square, count
    check(program, OPTIMIZERS, args, wanted, rtol=2e-3)


@pytest.mark.parametrize("ways", [BLOCKS[5:6], pytest.param(BLOCKS, marks=pytest.mark.slow)])
def test_ends_of_blocks_compute_what_one_device_does(ways):
    x, w, bias = draw(8, 8, 16), draw(16, 12, seed=1), draw(12, seed=2)
    residual, key = draw(8, 8, 12, seed=3), jax.random.key(4)
    wide = np.asarray(x, F32) @ np.asarray(w, F32)
    wanted = residual + np.asarray(dropped(key, jnp.asarray(wide + bias)))
    program = block_end(8, 16, tokens=8, width=12, devices=4)
    check(program, ways, (x, w, bias, residual, key), [wanted])


@pytest.mark.parametrize("ways", [SENDS[4:], pytest.param(SENDS, marks=pytest.mark.slow)])
def test_ends_of_stages_compute_what_one_device_does(ways):
    stages, model = 3, 2
    terms, bias = draw(stages * model, 1, 8, 16), draw(stages, 16, seed=1)
    residual, keys = draw(stages, 1, 8, 16, seed=2), jax.random.split(jax.random.key(4), stages)
    whole = np.asarray(terms, F32).reshape(stages, model, 1, 8, 16).sum(1) + bias[:, None, None]
    made = residual + np.stack(
        [dropped(k, jnp.asarray(x)) for k, x in zip(keys, whole, strict=True)]
    )
    wanted = np.concatenate([np.zeros_like(made[:1]), made[:-1]])
    program = stage_end(model, stages, tokens=8, width=16)
    check(program, ways, (terms, bias, residual, keys), [wanted])


@pytest.mark.slow
def test_stages_compute_what_one_device_does():
    stages, layers, heads, of_head = 2, 2, 4, 4
    program = stage(layers, 2, stages, tokens=8, heads=heads, of_head=of_head)
    types = program.per_device.in_types
    names = iter(range(len(types)))
    leaves = [draw(*t.shape, seed=next(names), scale=0.3) for t in types[:-1]]
    keys = jax.random.split(jax.random.key(4), stages)
    tree = jax.tree.structure(([({**ATTENTION}, {**MLP})] * layers, 0), is_leaf=_is_leaf)
    weights, x = jax.tree.unflatten(tree, leaves)

    def one(weights, x, key):
        for i, (attention, mlp) in enumerate(weights):
            x = attention_block(attention, x, jax.random.fold_in(key, 2 * i), 0.1)
            x = mlp_block(mlp, x, jax.random.fold_in(key, 2 * i + 1), 0.1)
        return x

    mesh = jax.sharding.AbstractMesh((1,), ("model",))
    layouts = {"weights": [(ATTENTION, MLP)] * layers}
    alone = mw.program(mesh, layouts=layouts)(one)
    made = []
    for i in range(stages):
        own = jax.tree.map(lambda w, i=i: w[i].astype(F32), weights)
        args = own, x[i].astype(F32), keys[i]
        made.append(np.asarray(alone.partition(*args).simulate(*args)))
    wanted = np.stack([np.zeros_like(made[0]), made[0]])
    with np.errstate(over="ignore"):
        check(program, STAGE, (weights, x, keys), [wanted], rtol=5e-2)


def _is_leaf(x):
    return not isinstance(x, dict | tuple | list)


@functools.cache
def found(name):
    """Predictions of a case, by schedules' names as they stand in the list."""
    if name in ("Adam", "LAMB"):
        program = optimizer(name, (ROWS, BERT["3.9B"] // ROWS))
        case = Case(name, program, dgx2((), over_all=("data",)), OPTIMIZERS, "")
    elif name in ("attention", "MLP"):
        program = block_end(16, 3072 if name == "attention" else 4 * 3072)
        case = Case(name, program, dgx2(("model",)), BLOCKS, "")
    else:
        links = dgx2(("model",), between=("stage",))
        case = Case(name, stage_end(int(name)), links, SENDS, "")
    return dict(zip([w.name for w in case.ways], predicted(case), strict=True))


CASES = pytest.mark.parametrize("name", ["Adam", "LAMB", "attention", "MLP", "8", "16"])


@CASES
def test_beside_computation_takes_no_longer_than_alone(name):
    for p in found(name).values():
        assert p.beside.seconds <= p.alone.seconds * (1 + 1e-9)
        assert p.beside.seconds >= p.beside.longest_chain_s * (1 - 1e-9)
        assert p.beside.seconds >= max(p.beside.busy_seconds.values()) * (1 - 1e-9)


@CASES
def test_slices_are_never_slower(name):
    ways = found(name)
    first, *others = ways.values()
    for p in others:
        if "whole" in p.schedule:  # four gathers in place of a half
            assert p.beside.seconds > first.beside.seconds
        elif "reorder" in p.moves:
            assert p.beside.seconds < first.beside.seconds, p.schedule


@pytest.mark.parametrize("kind", ["Adam", "LAMB"])
def test_bytes_of_optimizers(kind):
    ways = found(kind)
    count, devices = BERT["3.9B"], NODE * NODES
    sent = (devices - 1) * count // devices
    norms = 0 if kind == "Adam" else 2 * (devices - 1) * 8 // devices
    whole, in_slices = 12 * count + 4, 12 * count // devices + 4
    expected = {
        "AR-C": (2 * 2 * sent, whole),
        "RS-C-AG, state whole": (2 * sent + (3 * 4 + 2) * sent, whole),
        "RS-C-AG, state in slices": (2 * 2 * sent, in_slices),
        "fuse(RS-C-AG)": (2 * 2 * sent, in_slices),
    }
    for name, (wire, state) in expected.items():
        extra = norms if "RS" in name else 0
        assert 0 <= ways[name].sent["data"] - wire - extra <= 2, name
        assert ways[name].state_bytes == state
        assert (ways[name].peak_bytes > MEMORY_BYTES) == (state == whole)
    assert ways["AR-C"].peak_bytes >= 14 * count
    assert ways["RS-C-AG, state in slices"].peak_bytes < 2.1 * count


@pytest.mark.parametrize("name", ["attention", "MLP"])
def test_blocks_send_the_same_bytes_however(name):
    size = 16 * 1024 * 3072 * 2
    assert {p.sent["model"] for p in found(name).values()} == {2 * (NODE - 1) * size // NODE}


@pytest.mark.parametrize("model", [8, 16])
def test_stages_send_a_part_of_what_they_made(model):
    size = 2048 * 12288 * 2
    for p in found(str(model)).values():
        part = size // model if "reorder" in p.moves else size
        assert p.sent == {"model": 2 * (model - 1) * size // model, "stage": part}
    chunked = found(str(model))["RS-C-P2P-AG in {} chunks"]
    links = chunked.beside.busy_seconds
    assert chunked.beside.seconds < links["link model"] + links["link stage"]


def test_products_hide_behind_their_sums():
    ways = found("MLP")
    whole, parts = ways["MM-RS-C-AG"], ways["MM-RS-C-AG in {} chunks"]
    assert parts.beside.seconds < whole.beside.seconds < parts.alone.seconds
    assert parts.beside.exposed_seconds < whole.beside.exposed_seconds


def test_fastest_number_of_chunks_is_shown():
    program = block_end(8, 16, tokens=8, width=12, devices=4)
    links = dgx2(("model",))
    many = Case("", program, links, [Way("{}", BLOCKS[1].moves, (2, 8))], "")
    apart = [Case("", program, links, [Way("{}", BLOCKS[1].moves, (n,))], "") for n in (2, 8)]
    (best,) = predicted(many)
    seconds = {p.schedule: p.beside.seconds for case in apart for p in predicted(case)}
    assert seconds["2"] != seconds["8"]
    assert best.schedule == min(seconds, key=lambda name: seconds[name])
    assert best.beside.seconds == min(seconds.values())


def test_what_is_printed(capsys):
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "no section nothing" in capsys.readouterr().err
    listed = [*rows(list(found("16").values()))]
    lines = shown(listed, markdown=True).splitlines()
    assert len(lines) == len(SENDS) + 3
    assert {line.count("|") for line in lines[1:]} == {8}
    assert listed[1][:4] == ("AR-C-P2P", *listed[1][1:3], "1.00x")
    assert listed[1][4] == "94.4 + 50.3"
    assert listed[-1][4] == "94.4 + 3.1"
    moves = dict(move_rows([list(found(name).values()) for name in ("Adam", "LAMB", "16")]))
    assert moves["AR-C"] == "none"
    assert moves["RS-C-AG, state in slices"] == "split, reorder, bucket, slice_state"
    assert moves["RS-C-P2P-AG in n chunks"] == "split, reorder, overlap"


def test_training_steps():
    cases = {f"{kind}, BERT {size}": list(found(kind).values()) for kind, size in TRAINING}
    head, *lines = training_rows(cases)
    assert {len(line) for line in lines} == {len(head)}
    adam, lamb = lines[2], lines[5]
    rest, first, fused = (float(x.replace(",", "")) for x in adam[1:4])
    assert rest == pytest.approx(6 * 3.9e9 * 32 * 128 / 125e12 * 1e3, abs=0.05)
    assert adam[4] == f"{(rest + first) / (rest + fused):.2f}x"
    assert float(lamb[1].replace(",", "")) == pytest.approx(8 * rest, abs=0.5)
    assert (adam[5], lamb[5]) == ("none", "none")
    assert float(adam[6]) == pytest.approx((32 * 2**30 - 2 * 3.9e9) / 1e9, abs=0.5)
