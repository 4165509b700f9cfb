"""Shallow water: the edges of each tile are sent; XLA's bytes; the numbers of one device."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from examples.beside import deviation
from examples.cases import Case, ours, real_mesh
from examples.stencil import hints, model
from examples.stencil.__main__ import COLUMNS, LINES, picture
from tests.examples.stepping import F32, all_reduce, check_peers, host, sent

EVEN = model.Config(rows=32, columns=48)
UNEVEN = model.Config(rows=29, columns=43)
MANY = model.Config(rows=131072, columns=131071)
NAMES = pytest.mark.parametrize("name", hints.SCHEMES)
CONFIGS = pytest.mark.parametrize("config", [EVEN, UNEVEN], ids=["even", "uneven"])


def edges(case: Case, config: model.Config) -> tuple[int, int]:
    """Ppermutes and bytes of a step: along each cut dim four arrays are read across the edge."""
    sizes = [config.rows, config.columns]
    spec = (*case.outs, None)[:2]
    shards = [
        np.prod([case.mesh[axis] for axis in (axes if isinstance(axes, tuple) else (axes,))])
        if axes
        else 1
        for axes in spec
    ]
    local = [-(-size // pieces) for size, pieces in zip(sizes, shards, strict=True)]
    cut = [dim for dim in (0, 1) if shards[dim] > 1]
    return 4 * len(cut), sum(4 * local[1 - dim] * F32 for dim in cut)


@NAMES
@pytest.mark.parametrize("config", [EVEN, UNEVEN, MANY], ids=["even", "uneven", "many"])
def test_sends_the_edges_of_each_tile_to_the_byte(name: str, config: model.Config):
    case = hints.case(name, config)
    assert sent(case) == {"ppermute": edges(case, config)}


def test_thousands_of_devices_send_the_edges_of_each_tile_to_the_byte():
    for case in hints.large_cases():
        assert sent(case) == {"ppermute": edges(case, case.step.keywords["config"])}


def in_a_loop(name: str, config: model.Config) -> Case:
    """Twenty steps in one program, and the energy after each."""
    case = hints.case(name, config)
    return replace(case, step=partial(model.steps, config=config, count=20), outs=(case.outs, P()))


# Fields of short rows may go to columns before the loop and back after it: their edges cost more.
LESS = {("rows", EVEN): {"ppermute": (80, 10_240), "all_to_all": (6, 4_032)}}


@NAMES
@CONFIGS
def test_a_loop_sends_as_much_as_its_steps_and_the_energies_once(name: str, config: model.Config):
    count, total = edges(hints.case(name, config), config)
    found = sent(in_a_loop(name, config))
    assert found.pop("all_reduce") == (1, all_reduce(20, 8))
    assert found == LESS.get((name, config), {"ppermute": (20 * count, 20 * total)})
    assert sum(sent for _, sent in found.values()) <= 20 * total


@pytest.mark.parametrize("config", [UNEVEN])
def test_a_loop_has_the_numbers_of_one_device(config: model.Config):
    case = in_a_loop("tiles", config)
    start = host(model.init(config))
    (wanted, energies), (found, those) = (
        jax.jit(case.step)(start),
        ours(case, real_mesh(case))(start),
    )
    assert deviation(wanted.height, start.height) > 0.1
    assert deviation((found, those), (wanted, energies)) < 1e-5


@NAMES
@CONFIGS
def test_steps_have_the_numbers_of_one_device(name: str, config: model.Config):
    case = hints.case(name, config)
    single, many = jax.jit(case.step), ours(case, real_mesh(case))
    start = wanted = found = host(model.init(config))
    for _ in range(30):
        wanted, found = single(wanted), many(found)
    assert deviation(wanted.height, start.height) > 0.1
    assert deviation(found, wanted) < 1e-5


@pytest.mark.parametrize("which", ["gspmd", "shardy"])
@pytest.mark.parametrize(
    "name, config",
    [("tiles", EVEN), ("tiles", UNEVEN), *((n, EVEN) for n in hints.SCHEMES if n != "tiles")],
)
def test_sends_no_more_than_xla(name: str, config: model.Config, which):
    check_peers(hints.case(name, config), which)


def test_water_is_kept_and_energy_nearly():
    """Water neither comes nor goes; the scheme keeps energy but for what its steps are long."""
    config = model.Config()
    step = jax.jit(lambda state: model.step(state, config))
    start = state = model.init(config)
    for _ in range(200):
        state = step(state)
    volume = [float(np.asarray(s.height, np.float64).sum()) for s in (start, state)]
    assert volume[1] == pytest.approx(volume[0], rel=1e-3, abs=0.5)
    energies = [float(model.energy(s, config)) for s in (start, state)]
    assert energies[1] == pytest.approx(energies[0], rel=0.02)
    assert np.abs(state.north[-1]).max() == 0 and np.abs(state.north).max() > 0.05
    without = replace(config, coriolis=0.0)
    turned = jax.jit(lambda state: model.step(state, without))(state)
    assert deviation(turned, step(state)) > 1e-3


def test_the_picture_shows_the_hill():
    text = picture(np.asarray(model.init(model.Config()).height))
    lines = text.plain.splitlines()
    assert [len(line) for line in lines] == [COLUMNS] * LINES
    top = [str(span.style) for span in text.spans]
    assert "rgb(235,0,0) on rgb(235,0,0)" in top and any("rgb(118,118,235)" in s for s in top)
