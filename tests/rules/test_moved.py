"""Rules that say they only move elements: of the terms of a sum one counts, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwise.ir.factors import Strategy, fits, result_sharding
from meshwise.ir.mesh import Mesh, refine_mesh
from tests.rules.case import Case
from tests.rules.cases import CASES
from tests.rules.devices import coordinates, join, on_one_device, run, split
from tests.rules.test_truth import is_declined, show

NOTHING = np.array(-0.0, np.float32)
MESH = refine_mesh(("a", "b"), (2, 3))


def holds_floats(case: Case) -> bool:
    return all(
        v.aval.dtype == np.float32 for v in (case.equation.invars[0], case.equation.outvars[0])
    )


MOVES = [case for case in CASES if case.rule.moves and holds_floats(case)]


def patterns(rng: np.random.Generator, value: Any) -> Any:
    """The bits of small integers, subnormal or NaN, in the place of floats; others stay."""
    if getattr(value, "dtype", None) != np.float32:
        return value
    return rng.integers(-40, 40, np.shape(value)).astype(np.int32).view(np.float32)


def sum_of_bits(values: dict[Any, np.ndarray], shape: Any, sharding: Any, mesh: Mesh) -> np.ndarray:
    """The global value if one term counts at each place, and others are nothing."""
    others = mesh.size(sharding.unreduced) - 1
    total = join({d: v.view(np.uint32) for d, v in values.items()}, shape, sharding, mesh)
    return total - np.uint32(others % 2) * NOTHING.view(np.uint32)


def terms(operand: Any, device: int, places: np.ndarray) -> Any:
    """What one of two devices holds of an operand that it carries: the value at some places."""
    return np.where(places == (device == 0), operand, NOTHING)


def strategies(case: Case, carried: tuple[str, ...]) -> Iterator[Strategy]:
    """No factor split, and each over three devices."""
    factors = case.rule.factors
    for split_factor in (None, *range(len(factors.sizes))):
        axes = tuple(("b",) if f == split_factor else () for f in range(len(factors.sizes)))
        strategy = Strategy(axes, carried)
        if fits(factors, strategy, MESH) and not is_declined(case, strategy, MESH):
            yield strategy


@pytest.mark.parametrize("case", MOVES, ids=lambda case: case.name)
def test_one_term_counts(case: Case):
    rule, eqn, rng = case.rule, case.equation, np.random.default_rng(0)
    operands = [patterns(rng, value) for value in case.operands]
    expected = on_one_device(eqn, operands)
    for carried in ((), *rule.linear):
        places = {o: rng.random(np.shape(operands[o])) < 0.5 for o in carried}
        held = [
            [terms(x, i, places[o]) if o in carried else x for o, x in enumerate(operands)]
            for i in range(2)
        ]
        for strategy in strategies(case, ("a",) if carried else ()):
            plain = replace(strategy, carried=())
            parts = [split(eqn, rule, plain, MESH, operands) for operands in held]
            shards = [
                {d: parts[d[0]][o][d] for d in coordinates(MESH)} for o in range(len(parts[0]))
            ]
            for i, values in enumerate(run(eqn, rule, strategy, MESH, shards)):
                sharding = result_sharding(rule.factors, strategy, i)
                found = sum_of_bits(values, eqn.outvars[i].aval.shape, sharding, MESH)
                bits, what = expected[i].view(np.uint32), show(case, strategy)
                np.testing.assert_array_equal(found, bits, what)
