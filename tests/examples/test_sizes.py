"""What the worked models print: figures of plans and of runs, and tables that fit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from benchmarks.peers import hlo
from examples import beside, sizes
from examples.cases import Case, constrain, ours, peer, real_mesh
from tests.examples.stepping import all_reduce, check_numbers


def down(weights, x):
    """A training step of a linear function."""
    value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(weights)
    return weights - 0.1 * gradient, value


F32 = jax.ShapeDtypeStruct
DATA = Case("data", "data parallel", {"x": 2, "y": 4}, down, (F32((16, 3), "float32"), F32(
    (24, 16), "float32")), (P(), P(("x", "y"))), (P(), P()))  # fmt: skip


def test_a_plan_says_what_a_device_does():
    found = sizes.plan(DATA)
    assert (found.mesh, found.parameters) == ("x 2, y 4", 48)
    assert found.held == 4 * (48 + 24 * 16 // 8)
    assert found.kinds["all_reduce"] == len(found.kinds) == 1 or found.kinds["all_reduce"] == 2
    assert found.sent == all_reduce(48 + 1, 8)
    products = 2 * 2 * 3 * 16 * 3  # x @ w, and the gradient of w: 3 rows on a device
    assert products < found.flops < products + 200


def test_a_plan_counts_padding():
    uneven = replace(DATA, types=(DATA.types[0], F32((17, 16), "float32")))
    assert sizes.plan(uneven).held == 4 * (48 + 3 * 16)
    assert sizes.plan(uneven).flops == pytest.approx(sizes.plan(DATA).flops, rel=0.1)


def test_a_row_has_what_a_case_does_on_its_devices():
    draw = np.random.default_rng(0)
    weights = draw.normal(size=(16, 3)).astype(np.float32)
    steps = [(draw.normal(size=(24, 16)).astype(np.float32),) for _ in range(3)]
    single = beside.run(jax.jit(DATA.step), weights, steps, beside.trained)
    assert len(single.figures) == 3 and single.figures[0] != single.figures[2]
    row = beside.measure(DATA, weights, steps, single.state)
    assert row.deviation < 1e-6 and row.figure == pytest.approx(single.figures[2], rel=1e-6)
    assert row.sent == all_reduce(49, 8) <= min(row.peers.values())
    assert set(row.peers) == set(hlo.PARTITIONERS)
    check_numbers(DATA, weights, steps, 1e-5)


def test_deviation_is_relative_to_each_array():
    wanted = {"large": np.array([100.0, -200.0]), "small": np.array([0.01, 0.03])}
    found = {"large": np.array([100.0, -200.2]), "small": np.array([0.01, 0.0303])}
    assert beside.deviation(found, wanted) == pytest.approx(0.01)
    assert beside.deviation(wanted, wanted) == 0


def test_peers_take_uneven_arguments():
    uneven = replace(DATA, types=(DATA.types[0], F32((17, 16), "float32")))
    assert peer(uneven, "shardy").by_kind["all_reduce"] > 0
    weights, x = jnp.ones((16, 3)) / 7, jnp.arange(17.0 * 16).reshape(17, 16) / 99
    np.testing.assert_allclose(
        ours(uneven, real_mesh(uneven))(weights, x)[0], down(weights, x)[0], rtol=1e-5
    )


def test_specs_of_a_prefix_are_for_all_below_it():
    mesh = real_mesh(DATA)
    tree = {"a": jnp.arange(8.0), "b": [jnp.arange(16.0), jnp.arange(24.0)]}
    specs = {"a": None, "b": P("y")}
    found = jax.jit(lambda t: constrain(t, specs, mesh))(tree)
    assert [x.sharding.spec for x in found["b"]] == [P("y")] * 2
    assert found["a"].sharding.is_fully_replicated


@pytest.mark.parametrize("width", [100, 120])
def test_tables_fit(width: int):
    title = "groups and experts on one axis, Megatron on the other"
    kinds = {"all_gather": 1234, "all_to_all": 72, "reduce_scatter": 136}
    peers = dict.fromkeys(hlo.PARTITIONERS, 12345.6 * 1024)
    row = beside.Row(title, "x 2, y 2, z 2", kinds, 1234.5 * 1024, 2.09059e14, 3e-7, 12.3, peers)
    found = sizes.Plan(
        "GShard, 2048 experts\n60 layers", "x 2048, y 2", 10**12, 5 << 30, 8 << 30, kinds, 3e13, 99
    )
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(beside.runs_table([row], "a title"))
        console.print(sizes.sizes_table([found]))
    text = capture.get()
    assert "…" not in text and "1234 all_gather" in text and "12,345.6" in text
    for part in ("2.09059e+14", "12,300", "5.0 GiB", "8.0 GiB", "1 T", "30 T", "99.0 s"):
        assert part in text, part


@pytest.mark.parametrize(
    "number, text", [(7, "7"), (1500, "1.5 k"), (51.5e9, "51.5 B"), (1.03e12, "1.03 T")]
)
def test_numbers_have_three_digits(number: float, text: str):
    assert sizes.number_text(number) == text
