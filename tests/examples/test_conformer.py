"""The Conformer in a pipeline: what it sends, beside XLA, and the numbers of one device."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import meshwise as mw
from benchmarks.peers import hlo
from examples.cases import program_of
from examples.conformer import hints, model
from examples.sizes import plan
from tests.examples.stepping import F32, check_numbers, check_peers, host

CONFIG = model.Config()
SCHEMES = {scheme.name: scheme for scheme in hints.SCHEMES}
ACTIVATION = CONFIG.batch // CONFIG.microbatches * CONFIG.frames * CONFIG.width * F32


@cache
def program(name: str) -> mw.SpmdProgram:
    return program_of(hints.case(SCHEMES[name], CONFIG))


def iterations(name: str) -> int:
    scheme = SCHEMES[name]
    return scheme.repeat * CONFIG.microbatches + scheme.mesh["stage"] - 1


@pytest.mark.parametrize(
    "name",
    ["circle", "data", "three", pytest.param("stages", marks=pytest.mark.slow)],
)
def test_stages_shift_once_each_way(name: str):
    """One ppermute of a microbatch's activation an iteration, forward and backward."""
    assert not program(name).per_device.whole
    shifts = [c for c in program(name).collectives if str(c.kind) == "ppermute"]
    own = ACTIVATION // SCHEMES[name].mesh.get("data", 1)
    assert [c.count for c in shifts] == [iterations(name)] * 2
    assert [c.wire_bytes for c in shifts] == [iterations(name) * own] * 2


@pytest.mark.parametrize("name", ["data", "circle"])
def test_gradients_are_reduced_once(name: str):
    """Over the data axis after the loop; nothing else runs in an iteration but the shift."""
    for c in program(name).collectives:
        assert c.count == 1 or str(c.kind) == "ppermute", c


@pytest.mark.slow
def test_size_does_not_depend_on_microbatches_or_layers():
    counts = set()
    for layers, microbatches in ((8, 8), (32, 16)):
        batch = 2 * microbatches
        config = replace(CONFIG, layers=layers, microbatches=microbatches, batch=batch)
        found = program_of(hints.case(SCHEMES["data"], config))
        counts.add((len(found.jaxpr.eqns), len(found.collectives)))
    assert len(counts) == 1


@pytest.mark.parametrize(
    "name", ["circle", *(pytest.param(n, marks=pytest.mark.slow) for n in SCHEMES if n != "circle")]
)
def test_numbers_of_one_device(name: str):
    case = hints.case(SCHEMES[name], CONFIG)
    config = case.step.keywords["config"]
    draw = np.random.default_rng(0)
    rows = config.batch, config.frames
    steps = [
        (
            draw.normal(size=(*rows, config.features)).astype(np.float32),
            draw.integers(0, config.classes, rows, np.int32),
        )
        for _ in range(2)
    ]
    check_numbers(case, host(model.init(jax.random.key(0), config)), steps, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("which", hlo.PARTITIONERS)
@pytest.mark.parametrize("name", ["stages", "circle"])
def test_sends_no_more_than_xla(name: str, which: hlo.Partitioner):
    check_peers(hints.case(SCHEMES[name], CONFIG), which)


@pytest.mark.slow
def test_large_models_are_planned_without_devices():
    first, circle, *_ = hints.large_cases()
    found, again = plan(first), plan(circle)
    assert found.parameters == again.parameters > 6e9
    assert found.held < 4 * 1.01 * found.parameters / 8 + 2**26
    layers = 8 * 32 * 256 * 1024 * 200e6 / 64  # operations a device without the pipelines' idling
    for stages, turns, plans in ((8, 1, found), (8, 4, again)):
        idling = 1 + (stages - 1) / (turns * 32)
        assert plans.flops == pytest.approx(layers * idling, rel=0.2)
