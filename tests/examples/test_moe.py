"""The mixture of experts: what it sends, beside formulas and XLA, and the numbers of one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.beside import deviation
from examples.cases import Case, ours, program_of, real_mesh
from examples.moe import experts, hints, model
from examples.sizes import plan
from tests.examples.stepping import (
    F32,
    all_reduce,
    all_to_all,
    check_numbers,
    check_peers,
    check_sent,
    host,
    sent,
)

CONFIG = model.Config()
SCHEMES = {scheme.name: scheme for scheme in (*hints.SCHEMES, hints.DROPLESS)}
CASES = {case.name: case for case in hints.cases(CONFIG)}
SIX = replace(CONFIG, experts=6)  # on four devices


def layer_case(name: str, config: model.Config = CONFIG) -> Case:
    """A mixture alone, forward and backward: its result, and the gradients of all it takes."""
    whole = hints.case(SCHEMES[name], config)
    names = ("gate", "up", "down")
    weights, specs = ({n: tree["layers"][1][n] for n in names} for tree in
                      (whole.types[0], whole.ins[0]))  # fmt: skip
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence, config.width), jnp.float32)

    def step(weights, tokens, cotangent):
        layer = lambda p, x: experts.mixture(p, x, config.capacity)[0]  # noqa: E731
        out, back = jax.vjp(layer, weights, tokens)
        return out, back(cotangent)

    batch = whole.ins[1]
    ins, outs = (specs, batch, batch), (batch, (specs, batch))
    return replace(whole, step=step, types=(weights, tokens, tokens), ins=ins, outs=outs)


# Elements: what all experts have places for in a group, and their weights.
ROWS = CONFIG.experts * CONFIG.capacity * CONFIG.width
GROUPS = CONFIG.batch
EXPERTS = CONFIG.experts * CONFIG.width * CONFIG.hidden
GATE = CONFIG.width * CONFIG.experts
TOKENS = CONFIG.batch * CONFIG.sequence * CONFIG.width

LAYERS = {
    # Rows go to their experts and come back, and so do their gradients. That is all, but for the
    # gradient of the gate.
    "one axis": {
        "all_to_all": (4, 4 * all_to_all(GROUPS // 8 * ROWS, 8)),
        "all_reduce": (1, all_reduce(GATE, 8)),
    },
    # The same in fours; every expert is on two devices, which add up its gradients.
    "nested": {
        "all_to_all": (4, 4 * all_to_all(GROUPS // 8 * ROWS, 4)),
        "all_reduce": (3, all_reduce(GATE, 8) + 2 * all_reduce(EXPERTS // 4, 2)),
    },
    # Tokens are on every device of a row already, and each has a fourth of the experts: what comes
    # of them is summed, and their gradients. So are two numbers of each choice, forward and back.
    # Of the gate's gradient each makes a fourth, which sends as much as all of it would.
    "two axes": {
        "all_reduce": (
            9,
            2 * all_reduce(TOKENS // 2, 4)
            + 4 * all_reduce(CONFIG.batch * CONFIG.sequence // 2, 4)
            + 2 * all_reduce(EXPERTS // 4, 2)
            + all_reduce(GATE // 4, 2),
        ),
        "all_gather": (1, 3 * GATE // 4 * F32),
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_sends_what_the_formula_says(name: str):
    check_sent(layer_case(name), LAYERS[name])


def hybrid_bound(case: Case, expert: str, tensor: str) -> float:
    """What exchanges over the experts' axis and sums over the model's send, and no more."""
    local = EXPERTS // case.mesh[expert] // case.mesh[tensor]
    groups = GROUPS * ROWS // case.devices * case.mesh[tensor]  # rows on a device
    bound = 4 * all_to_all(groups, case.mesh[expert]) + 2 * all_reduce(groups, case.mesh[tensor])
    data = case.devices // case.mesh[expert] // case.mesh[tensor]
    return bound + 2 * all_reduce(local, data) + 2 * all_reduce(GATE, case.devices)


def test_a_hybrid_adds_sums_over_the_model_axis_alone():
    """All_to_alls run over the experts' axis; nothing else that is as large as a group does."""
    case, expert, tensor = layer_case("three"), "y", "z"
    collectives = program_of(case).collectives
    exchanges = [c for c in collectives if str(c.kind) == "all_to_all"]
    assert [c.axes for c in exchanges] == [(expert,)] * 4
    other = [c for c in collectives if c.axes != (tensor,) and str(c.kind) != "all_to_all"]
    assert {str(c.kind) for c in other} == {"all_reduce"}
    local = EXPERTS // case.mesh[expert] // case.mesh[tensor]
    weights = {local, GATE, GATE // case.mesh[tensor]}
    assert {int(np.prod(c.shape)) for c in other} <= weights
    assert sum(c.wire_bytes for c in collectives) <= hybrid_bound(case, expert, tensor)


def test_over_two_axes_a_hybrid_sends_tokens_over_both():
    """An eighth of a group to each device, then to those of its row: less than sums."""
    case = layer_case("hybrid")
    sent = sum(c.wire_bytes for c in program_of(case).collectives)
    assert sent == 206_592 <= 0.85 * hybrid_bound(case, "x", "y")


def test_each_pair_of_layers_adds_as_much():
    """Dense layers add the gradients of their weights, mixtures four all_to_alls besides."""
    two, four = (
        sent(hints.case(SCHEMES["one axis"], replace(CONFIG, layers=n, vocabulary=16)))
        for n in (2, 4)
    )
    m, h = CONFIG.width, CONFIG.hidden
    dense = 8 * m * m + 2 * m * h + GATE
    added = {k: (four[k][0] - two[k][0], four[k][1] - two[k][1]) for k in four}
    assert added["all_to_all"] == (4, 4 * all_to_all(GROUPS // 8 * ROWS, 8))
    assert added["all_reduce"][1] == all_reduce(dense + 1, 8)  # and how uneven loads are
    assert added.keys() == {"all_to_all", "all_reduce"}


def test_a_trillion_parameters_are_planned():
    """Two of the sixty layers: the numbers of the others are the same."""
    *_, trillion, _ = hints.large_cases()
    config = trillion.step.keywords["config"]
    small = replace(config, layers=2)
    scheme = replace(SCHEMES["one axis"], mesh=trillion.mesh)
    found = plan(hints.case(scheme, small))
    m, h, e, v = config.width, config.hidden, config.experts, config.vocabulary
    pair, ends = 8 * m * m + 2 * m * h + e * (2 * m * h + m), 2 * m * v
    assert found.parameters == pair + ends
    assert 30 * pair + ends > 1e12 and config.layers == 60 and trillion.devices == 2048
    tokens = config.sequence + 1
    assert found.held == F32 * (found.parameters - 2 * e * m * h * 2047 // 2048 + tokens)
    assert found.kinds["all_to_all"] == 4 and set(found.kinds) == {"all_to_all", "all_reduce"}
    rows = 4 * all_to_all(e * config.capacity * m, 2048)
    sums = all_reduce(found.parameters - 2 * e * m * h, 2048)
    assert found.sent == pytest.approx(rows + sums, abs=100)  # and a few scalars
    assert found.flops > 6 * config.sequence * (8 * m * m + 2 * m * h + 2 * 2 * m * h + m * v)


def tokens(config: model.Config, steps: int = 2):
    draw = np.random.default_rng(0)
    shape = (steps, config.batch, config.sequence + 1)
    return [(batch,) for batch in draw.integers(0, 256, shape).astype(np.int32)]


def parameters(config: model.Config):
    return host(jax.jit(model.init, static_argnums=1)(jax.random.key(0), config))


def each(quick: set[str]) -> pytest.MarkDecorator:
    """All cases, of which only the quick ones are in the default suite."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in CASES}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


@each({"hybrid"})
def test_training_has_the_numbers_of_one_device(name: str):
    case = CASES[name]
    check_numbers(case, parameters(CONFIG), tokens(case.step.keywords["config"]), 1e-5)


@pytest.mark.slow
def test_six_experts_on_four_devices_have_the_numbers_of_one():
    case = layer_case("nested", SIX)
    whole = parameters(SIX)["layers"][1]
    weights = {name: whole[name] for name in case.types[0]}
    x, cotangent = (
        np.random.default_rng(seed).normal(size=case.types[1].shape).astype(np.float32)
        for seed in (1, 2)
    )
    wanted = jax.jit(case.step)(weights, x, cotangent)
    found = ours(case, real_mesh(case))(weights, x, cotangent)
    assert deviation(found, wanted) < 1e-5


def test_six_experts_on_four_devices_send_padding_of_two():
    rows = 8 * SIX.capacity * SIX.width  # as if there were eight
    assert sent(layer_case("nested", SIX))["all_to_all"] == (4, 4 * all_to_all(rows, 4))


@each({"one axis"})
def test_sends_no_more_than_shardy(name: str):
    check_peers(CASES[name], "shardy")


@each({"dropless"})
def test_sends_no_more_than_gspmd(name: str):
    check_peers(CASES[name], "gspmd")


def test_without_places_comes_to_the_same_where_all_have_one():
    draw = np.random.default_rng(0)
    shapes = {"gate": (16, 8), "up": (8, 16, 24), "down": (8, 24, 16)}
    weights = {n: draw.normal(size=s).astype(np.float32) / 4 for n, s in shapes.items()}
    x = draw.normal(size=(3, 20, 16)).astype(np.float32)

    @jax.jit
    def each(weights, x):
        return experts.mixture(weights, x, 20), experts.dropless(weights, x)

    (places, load), (without, same) = each(weights, x)
    np.testing.assert_allclose(places, without, rtol=1e-4, atol=1e-4)
    assert load == pytest.approx(same)
    few, _ = jax.jit(experts.mixture, static_argnums=2)(weights, x, 1)
    assert np.abs(few - places).max() > 0.1
