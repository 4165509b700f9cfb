"""The example programs, on several meshes and uneven sizes, against plain one-device functions."""

import functools
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import meshwise as mw
from examples.coconet import programs
from tests.meshes import mesh_of
from tests.schedule.language import plain
from tests.schedule.language.plain import positive, random


def check(program: Any, truth: Any, args: tuple[Any, ...], **tolerance: float) -> mw.SpmdProgram:
    """The program's results are the function's; returns what it is made into."""
    made = program.partition(*args)
    got, want = jax.tree.leaves(made.simulate(*args)), jax.tree.leaves(truth(*args))
    for a, b in zip(got, want, strict=True):
        assert a.shape == np.shape(b)
        np.testing.assert_allclose(a, b, **{"rtol": 2e-5, "atol": 2e-5, **tolerance})
    return made


def kinds(made: mw.SpmdProgram) -> dict[str, int]:
    return dict(Counter(c.kind.value for c in made.collectives))


def optimiser_args(devices: int, size: int) -> tuple[Any, ...]:
    state = random(size, seed=2), random(size, seed=3), positive(size, seed=4), np.float32(3)
    return (random(devices, size, seed=1), *state)


@pytest.mark.parametrize(("devices", "size"), [(8, 64), (4, 61), (1, 7)])
def test_optimisers(devices, size):
    mesh, args = mesh_of(data=devices), optimiser_args(devices, size)
    reduced = {"all_reduce": 1} if devices > 1 else {}
    made = check(programs.sgd(mesh), plain.sgd, args[:2])
    assert (kinds(made), made.states) == (reduced, ((1, 0),))
    for program, truth in ((programs.adam, plain.adam), (programs.lamb, plain.lamb)):
        made = check(program(mesh), truth, args)
        assert (kinds(made), made.states) == (reduced, ((1, 0), (2, 1), (3, 2), (4, 3)))


KEY = jax.random.key(7)


@pytest.mark.parametrize(("devices", "width"), [(8, 16), (4, 10), (3, 7)])
def test_attention_output(devices, width):
    args = (
        random(2, 5, width),
        random(width, 12, scale=0.3),
        random(12),
        random(2, 5, 12, seed=1),
        random(12, seed=2),
        KEY,
    )
    made = check(programs.attention_output(mesh_of(model=devices)), plain.attention_output, args)
    assert kinds(made) == {"all_reduce": 1}


@pytest.mark.parametrize(("sizes", "hidden"), [({"model": 4}, 16), ({"data": 2, "model": 4}, 18)])
def test_mlp(sizes, hidden):
    args = plain.mlp_weights(6, hidden), random(2, 5, 6), KEY
    made = check(programs.mlp(mesh_of(**sizes)), plain.mlp, args)
    assert kinds(made) == {"all_reduce": 1}


@pytest.mark.parametrize(
    ("devices", "heads"),
    [(4, 6), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(4, 8), (2, 3)])],
)
def test_self_attention(devices, heads):
    args = plain.attention_weights(8, heads, 3), random(2, 5, 8), KEY
    made = check(programs.self_attention(mesh_of(model=devices)), plain.self_attention, args)
    assert kinds(made) == {"all_reduce": 1}


def check_pipeline(stages: int, devices: int, rate: float) -> None:
    parts = plain.attention_weights(8, 6, 3), plain.mlp_weights(8, 10)
    weights = jax.tree.map(lambda w: random(stages, *w.shape, scale=0.3), parts)
    args = weights, random(stages, 2, 5, 8), jax.random.split(KEY, stages)
    mesh = mesh_of(stage=stages, model=devices)
    truth = functools.partial(plain.pipeline_stage, rate=rate)
    made = check(programs.pipeline_stage(mesh, rate), truth, args)
    # The only stage has no next one: nothing that it computes is used.
    expected = {"all_reduce": 2} if devices > 1 and stages > 1 else {}
    assert kinds(made) == expected | ({"ppermute": 1} if stages > 1 else {})


@pytest.mark.parametrize(("stages", "devices"), [(2, 4), (1, 2)])
def test_pipeline_stage(stages, devices):
    check_pipeline(stages, devices, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "devices"), [(2, 4), (3, 2), (4, 1)])
def test_pipeline_stage_with_dropout(stages, devices):
    check_pipeline(stages, devices, plain.RATE)
