"""What an exchange is priced at is what is emitted, for every variant that exchanges anything."""

from dataclasses import replace

import jax
import pytest

from meshwise._jax import make_jaxpr_over_axes
from meshwise.ir.collectives import collectives_of
from meshwise.ir.factors import Strategy, operand_sharding
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import local_shape
from meshwise.rules.registry import LocalContext
from tests.rules.case import Case
from tests.rules.cases import CASES
from tests.rules.test_truth import double_splits, is_declined, show, single_splits

EXCHANGING = [case for case in CASES if case.rule.exchanges is not None]


@pytest.mark.parametrize("case", EXCHANGING, ids=lambda case: case.name)
def test_priced_as_emitted(case: Case):
    factors = case.rule.factors
    free = [f for f in range(len(factors.sizes)) if f not in factors.whole]
    for strategy, mesh in (*single_splits(factors, free), *double_splits(factors, free)):
        if not is_declined(case, strategy, mesh):
            check(case, strategy, mesh)


def check(case: Case, strategy: Strategy, mesh: Mesh) -> None:
    rule, eqn = case.rule, case.equation
    context = LocalContext(eqn, rule.factors, strategy, mesh)
    assert rule.exchanges is not None and rule.local is not None
    priced: dict[str, list[float]] = {}
    for exchange in rule.exchanges(context) or ():
        known = priced.setdefault(exchange.kind.value, [0, 0])
        known[0] += exchange.launches
        known[1] += exchange.wire_bytes
    types = []
    for i, atom in enumerate(eqn.invars):
        sharding = operand_sharding(rule.factors, replace(strategy, carried=()), i)
        shape = local_shape(atom.aval.shape, sharding, mesh)
        types.append(jax.ShapeDtypeStruct(shape, atom.aval.dtype))
    axes = mesh.named_sizes
    closed = make_jaxpr_over_axes(lambda *xs: list(rule.local(context, *xs)), axes, types)
    emitted: dict[str, list[float]] = {}
    for collective in collectives_of(closed, mesh.axis_size):
        known = emitted.setdefault(collective.kind.value, [0, 0])
        known[0] += collective.count
        known[1] += collective.wire_bytes
    assert emitted == {k: v for k, v in priced.items() if v[0]}, show(case, strategy)
