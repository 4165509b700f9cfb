"""The dense transformer in a loop: what it sends, and the numbers of one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.peers import hlo
from examples.cases import program_of
from examples.sizes import plan
from examples.transformer import hints, model
from tests.examples.stepping import F32, all_reduce, check_numbers, check_peers, host, sent

CONFIG = model.Config()
SCHEMES = {scheme.name: scheme for scheme in hints.SCHEMES}
M, H, L = CONFIG.width, CONFIG.hidden, CONFIG.layers
PRODUCTS = 4 * M * CONFIG.heads * CONFIG.head_width + 3 * M * H  # weights of a layer's products
LAYER = PRODUCTS + 2 * M


def case(name: str, config: model.Config = CONFIG):
    return hints.case(SCHEMES[name], config)


def added(name: str) -> dict[str, int]:
    """Bytes by kind that two more layers add."""
    few, many = (sent(case(name, replace(CONFIG, layers=n))) for n in (2, 4))
    kinds = few.keys() | many.keys()
    total = {k: many.get(k, (0, 0))[1] - few.get(k, (0, 0))[1] for k in kinds}
    return {k: n for k, n in total.items() if n}


def test_data_parallel_reduces_each_gradient_once():
    found = sent(case("data"))
    parameters = L * LAYER + CONFIG.vocabulary * M + M
    assert found.keys() == {"all_reduce"}
    assert found["all_reduce"][0] <= 13  # a parameter and the loss; all layers' together
    assert found["all_reduce"][1] == pytest.approx(all_reduce(parameters + 1, 8), abs=8)


def test_fully_sharded_gathers_a_layer_at_a_time():
    """Forward and, recomputed, backward; and scatters its gradient. The stack is never gathered."""
    part = 7 * PRODUCTS * F32 // 8
    found, norms = added("zero3"), 2 * all_reduce(2 * M, 8)
    assert sum(found.values()) == 2 * 3 * part + norms
    assert 0 <= found["all_gather"] - 2 * 2 * part <= norms // 2
    assert 0 <= found["reduce_scatter"] - 2 * part <= norms // 2
    largest = max(int(np.prod(c.shape)) for c in program_of(case("zero3")).collectives)
    assert largest <= M * H


@pytest.mark.parametrize("name", ["megatron", "2d", "3d"])
def test_weights_are_never_whole(name: str):
    """What a step gathers of a layer is a product's weight, and no device has all of that."""
    program = program_of(case(name))
    model_axis = SCHEMES[name].mesh["y"]
    gathered = [c for c in program.collectives if str(c.kind) == "all_gather" and c.count == L]
    assert gathered or name == "megatron"
    stream = CONFIG.batch * CONFIG.sequence * M
    for c in gathered:
        devices = np.prod([SCHEMES[name].mesh[a.split(".")[0]] for a in c.axes])
        assert np.prod(c.shape) * devices <= max(M * H // model_axis, stream // 2)


def test_size_does_not_depend_on_layers_or_devices():
    few = program_of(case("2d", replace(CONFIG, layers=2)))
    many = program_of(case("2d", replace(CONFIG, layers=200)))
    assert [c.kind for c in few.collectives] == [c.kind for c in many.collectives]
    assert len(few.jaxpr.eqns) == len(many.jaxpr.eqns)


def test_numbers_of_one_device():
    """All schemes compute the same; one is run here, the others where there is time."""
    check("2d")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "zero3", "megatron", "3d"])
def test_numbers_of_one_device_under_other_schemes(name: str):
    check(name)


def check(name: str) -> None:
    config = replace(CONFIG, layers=2)
    draw = np.random.default_rng(0)
    shape = config.batch, config.sequence + 1
    steps = [(draw.integers(0, config.vocabulary, shape, np.int32),) for _ in range(2)]
    params = host(model.init(jax.random.key(0), config))
    check_numbers(case(name, config), params, steps, 2e-5)


@pytest.mark.parametrize("which", [pytest.param("gspmd", marks=pytest.mark.slow), "shardy"])
@pytest.mark.parametrize("name", ["data", "zero3", "2d"])
def test_sends_no_more_than_xla(name: str, which: hlo.Partitioner):
    check_peers(case(name, replace(CONFIG, layers=2)), which)


def test_a_trillion_parameters_are_planned_without_devices():
    *_, wide = hints.large_cases()
    found = plan(wide)
    assert found.parameters == pytest.approx(1.1e12, rel=0.01)
    assert found.held < 4 * 1.01 * found.parameters / 2048 + 2**25
    tokens = wide.types[1].shape[0] * 1024
    assert found.flops == pytest.approx(8 * found.parameters * tokens / 2048, rel=0.1)
