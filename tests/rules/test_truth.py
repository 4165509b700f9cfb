"""Every rule against brute force: what it claims is true, and what it refuses would be wrong."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise._jax import Literal
from meshwise.ir.factors import FactorRule, Strategy, fits, result_sharding
from meshwise.ir.mesh import Mesh, refine_mesh
from meshwise.ir.sharding import Reduction
from meshwise.rules.registry import LocalContext
from tests.rules.case import Case, apply, numbers
from tests.rules.cases import CASES
from tests.rules.devices import (
    assert_close,
    coordinates,
    join,
    on_one_device,
    raw,
    run,
    split,
    split_and_join,
)

ROWS = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
MISCOMPILED = {
    "scatter-add by bytes": "XLA without fusion emitters clips positions at 299 - 256",
}
COMPILED_ROWS = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c, marks=pytest.mark.skip(MISCOMPILED[c.name]) if c.name in MISCOMPILED else ()
        )
        for c in CASES
    ],
    ids=lambda case: case.name,
)


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def single_splits(rule: FactorRule, factors: Sequence[int]) -> Iterator[tuple[Strategy, Mesh]]:
    """Each factor over two and over three devices, where that is allowed."""
    for factor, shards in itertools.product(factors, (2, 3)):
        mesh = refine_mesh(("a",), (shards,))
        yield from _allowed(rule, {factor: ("a",)}, mesh)


def double_splits(rule: FactorRule, factors: Sequence[int]) -> Iterator[tuple[Strategy, Mesh]]:
    """Two pairs of factors over two by three devices, and one factor over both axes."""
    mesh = refine_mesh(("a", "b"), (2, 3))
    for pair in itertools.islice(itertools.combinations(factors, 2), 2):
        yield from _allowed(rule, {pair[0]: ("a",), pair[1]: ("b",)}, mesh)
    if factors:
        yield from _allowed(rule, {factors[-1]: ("b", "a")}, mesh)


def _allowed(
    rule: FactorRule, axes: dict[int, tuple[str, ...]], mesh: Mesh
) -> Iterator[tuple[Strategy, Mesh]]:
    strategy = Strategy(tuple(axes.get(f, ()) for f in range(len(rule.sizes))))
    if fits(rule, strategy, mesh):
        yield strategy, mesh


def show(case: Case, strategy: Strategy) -> str:
    return f"{case.name}: {case.rule.factors} with {strategy.axes} carried {strategy.carried}"


Split = tuple[Strategy, Mesh]


def every_split(case: Case) -> list[Split]:
    """Each factor, pairs of them, and one over two axes."""
    factors = case.rule.factors
    free = [f for f in range(len(factors.sizes)) if f not in factors.whole]
    return [*single_splits(factors, free), *double_splits(factors, free)]


def check_splits(case: Case, splits: Sequence[Split], compiled: bool = False) -> None:
    expected = on_one_device(case.equation, case.operands, compiled)
    for strategy, mesh in splits:
        if is_declined(case, strategy, mesh):
            continue
        found = split_and_join(case.equation, case.rule, strategy, mesh, case.operands, compiled)
        for value, want in zip(found, expected, strict=True):
            assert_close(value, want, case.tolerance, show(case, strategy))


@ROWS
def test_claimed_splits_are_true(case: Case):
    check_splits(case, every_split(case))


@pytest.mark.slow
@COMPILED_ROWS
def test_claimed_splits_are_true_as_xla_computes(case: Case):
    check_splits(case, every_split(case), compiled=True)


@COMPILED_ROWS
def test_numpy_computes_what_xla_does(case: Case):
    """So that what is shown with numpy is said of the operator that XLA has."""
    expected = [raw(v) for v in apply(case.equation, case.operands)]
    found = on_one_device(case.equation, case.operands)
    for value, want in zip(found, expected, strict=True):
        assert_close(value, want, max(case.tolerance, 1e-5), case.name)


def is_declined(case: Case, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether the local rule says that it cannot follow a strategy."""
    rule = case.rule
    context = LocalContext(case.equation, rule.factors, strategy, mesh)
    return rule.exchanges is not None and rule.exchanges(context) is None


@ROWS
def test_refused_splits_are_wrong(case: Case):
    """A whole factor, split all the same as if it passed through or were summed."""
    timid = [f for f in sorted(case.rule.factors.whole) if not is_wrong(case, f)]
    names = "".join(str(case.rule.factors).partition("->")[0] and _letter(f) for f in timid)
    assert names == case.timid.partition(":")[0], "these may be split, or the reason is stale"


def _letter(factor: int) -> str:
    return "ijklmnopqrstuvwxyz"[factor]


def is_wrong(case: Case, factor: int) -> bool:
    """Whether splitting a factor, over two or over three devices, fails or changes the result."""
    rule = case.rule
    factors = rule.factors
    summed = not any(factor in dim for result in factors.results for dim in result)
    opened = replace(
        factors,
        whole=factors.whole - {factor},
        reductions=((factor, Reduction.SUM),) if summed else (),
    )
    expected = on_one_device(case.equation, case.operands)
    splits = list(single_splits(opened, [factor])) if says_something(case) else []
    for strategy, mesh in splits:
        try:
            found = split_and_join(
                case.equation, replace(rule, factors=opened), strategy, mesh, case.operands
            )
            for value, want in zip(found, expected, strict=True):
                assert_close(value, want, 1e-3, case.name)
        except Exception:  # a local shape that does not fit is as good as a wrong number
            return True
    return not splits


def terms_of(value: Any, count: int, seed: int) -> list[np.ndarray]:
    """Random numbers of mixed signs that sum to a value."""
    rng = np.random.default_rng(seed)
    value = raw(value)
    if jax.dtypes.issubdtype(value.dtype, np.integer):  # of any size, so that sums wrap around
        info = jnp.iinfo(value.dtype)
        parts = [
            rng.integers(info.min, info.max, value.shape, value.dtype, endpoint=True)
            for _ in range(count - 1)
        ]
    else:
        parts = [numbers(rng, value.dtype, value.shape) for _ in range(count - 1)]
    with np.errstate(all="ignore"):
        return [*parts, np.asarray(value - sum_terms(parts), value.dtype)]


def sums_pass(case: Case, carried: Sequence[int], is_local: bool = True) -> bool:
    """Whether applying the operator to terms of some operands gives terms of its results.

    By its local rule, or as it is.
    """
    rule, eqn = case.rule if is_local else replace(case.rule, local=None), case.equation
    strategy = Strategy(tuple(() for _ in rule.factors.sizes), ("a",))
    mesh = refine_mesh(("a",), (3,))
    terms = {o: terms_of(case.operands[o], 3, seed=o) for o in carried}
    shards = [
        {(d,): terms[o][d] if o in carried else raw(value) for d in range(3)}
        for o, value in enumerate(case.operands)
    ]
    whole = [sum_terms(terms[o]) if o in carried else v for o, v in enumerate(case.operands)]
    local = run(eqn, rule, strategy, mesh, shards)
    inexact = [v.dtype for v in whole if jax.dtypes.issubdtype(v.dtype, np.inexact)]
    coarse = max([1e-3, *(16 * float(jnp.finfo(dtype).eps) for dtype in inexact)])
    for found, want in zip(local, on_one_device(eqn, whole), strict=True):
        try:
            assert_close(sum_terms(list(found.values())), want, coarse, case.name)
        except AssertionError:
            return False
    return True


def sum_terms(terms: Sequence[np.ndarray]) -> np.ndarray:
    """The sum in the terms' own dtype; integers wrap around."""
    with np.errstate(all="ignore"):
        return np.add.reduce(np.stack(terms), axis=0, dtype=terms[0].dtype)


def says_something(case: Case) -> bool:
    """Whether numbers could differ: there are some, and of more than a few bits."""
    avals = [v.aval for v in (*case.equation.invars, *case.equation.outvars)]
    coarse = any(
        jnp.finfo(a.dtype).nmant < 7 for a in avals if jax.dtypes.issubdtype(a.dtype, np.inexact)
    )
    return not coarse and not any(0 in a.shape for a in avals)


def numeric(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, np.number)


@ROWS
def test_sums_pass_only_where_claimed(case: Case):
    rule = case.rule
    claimed = set(rule.linear)
    operands = [o for o, a in enumerate(case.equation.invars) if numeric(a.aval.dtype)]
    if not all(numeric(v.aval.dtype) for v in case.equation.outvars):
        return  # booleans and keys have no sum
    subsets = [s for r in (1, 2) for s in itertools.combinations(operands, r)]
    numbers_only = all(set(s) <= set(operands) for s in claimed)
    assert numbers_only, "claimed for an operand that cannot be summed"
    wrong = [s for s in claimed if not sums_pass(case, s)]
    assert not wrong, f"a sum does not pass through operands {wrong}"
    literal = {o for o in operands if isinstance(case.equation.invars[o], Literal)}
    missed = [
        s
        for s in subsets
        if s not in claimed and not literal & set(s) and says_something(case) and sums_pass(case, s)
    ]
    stated = case.unclaimed.partition(":")[0]
    assert " ".join(",".join(map(str, s)) for s in missed) == stated, "could be claimed"


# What the local rule brings inside, the simulator would not read.
OUTSIDE = {"dynamic_slice past the end", "dynamic_slice before the start"}


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.rule.local and c.rule.linear_as_is and c.name not in OUTSIDE],
    ids=lambda case: case.name,
)
def test_sums_pass_through_operators_as_they_are_but_where_said_otherwise(case: Case):
    """Whoever has each device run the operator itself asks for that (`hoist`, kernels)."""
    types = [a.aval.dtype for a in case.equation.invars]
    sets = [s for s in case.rule.linear_as_is if all(numeric(types[o]) for o in s)]
    wrong = [s for s in sets if not sums_pass(case, s, is_local=False)]
    assert not wrong, f"a sum does not pass through operands {wrong} without the local rule"


@pytest.mark.parametrize(
    ("name", "is_as_it_is"),
    [
        ("gather of rows, clip", True),
        ("gather of rows, fill", True),
        ("gather of rows, fill with zero", True),
        ("gather of rows, fill with a number", False),
        ("gather of rows of integers", False),
    ],
)
def test_what_is_filled_in_comes_into_a_sum_once(name, is_as_it_is):
    """Any number but zero, infinities and NaN, which are the same however often they come."""
    (rule,) = [c.rule for c in CASES if c.name == name]
    assert (rule.linear, rule.linear_as_is) == (((0,),), ((0,),) if is_as_it_is else ())


def complete_splits(rule: FactorRule) -> Iterator[tuple[Strategy, Mesh]]:
    """Compound dims: the major factor over one device an element, and then the minor one."""
    pairs = {dim[:2] for tensor in (*rule.operands, *rule.results) for dim in tensor if dim[1:]}
    for major, minor in sorted(pairs):
        size = rule.sizes[major]
        if major in rule.whole or minor in rule.whole or size > 6:
            continue
        mesh = refine_mesh(("a", "b"), (size, 2 if rule.sizes[minor] % 2 == 0 else 3))
        axes = {major: mesh.sub_axes["a"], minor: mesh.sub_axes["b"]}
        yield from _allowed(rule, axes, mesh)


@pytest.mark.parametrize("case", [c for c in CASES if "(" in c.text], ids=lambda case: case.name)
def test_minor_factors_split_after_major_ones(case: Case):
    expected = on_one_device(case.equation, case.operands)
    for strategy, mesh in complete_splits(case.rule.factors):
        found = split_and_join(case.equation, case.rule, strategy, mesh, case.operands)
        for value, want in zip(found, expected, strict=True):
            assert_close(value, want, case.tolerance, show(case, strategy))


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.rule.local and c.rule.linear], ids=lambda case: case.name
)
def test_sums_pass_while_factors_are_split(case: Case):
    """A sum may pass through a local rule that has its own work to do over other axes."""
    factors = case.rule.factors
    mesh = refine_mesh(("a", "b"), (2, 3))
    for carried in case.rule.linear:
        if not all(numeric(case.equation.invars[o].aval.dtype) for o in carried):
            continue
        terms = {o: terms_of(case.operands[o], 2, seed=o) for o in carried}
        whole = [sum_terms(terms[o]) if o in carried else v for o, v in enumerate(case.operands)]
        expected = on_one_device(case.equation, whole)
        for factor in range(len(factors.sizes)):
            axes = tuple(("b",) if f == factor else () for f in range(len(factors.sizes)))
            strategy = Strategy(axes, ("a",))
            if not fits(factors, strategy, mesh) or not says_something(case):
                continue
            if is_declined(case, strategy, mesh):
                continue
            found = carry(case, strategy, mesh, terms)
            for value, want in zip(found, expected, strict=True):
                assert_close(value, want, 1e-3, show(case, strategy))


def carry(
    case: Case, strategy: Strategy, mesh: Mesh, terms: dict[int, list[np.ndarray]]
) -> list[np.ndarray]:
    """The global results where the devices along the first axis hold terms of some operands."""
    rule, eqn = case.rule, case.equation
    plain = replace(strategy, carried=())
    parts = []
    for i in range(2):
        operands = [terms[o][i] if o in terms else v for o, v in enumerate(case.operands)]
        parts.append(split(eqn, rule, plain, mesh, operands))
    shards = [{d: parts[d[0]][o][d] for d in coordinates(mesh)} for o in range(len(eqn.invars))]
    local = run(eqn, rule, strategy, mesh, shards)
    return [
        join(values, var.aval.shape, result_sharding(rule.factors, strategy, i), mesh)
        for i, (values, var) in enumerate(zip(local, eqn.outvars, strict=True))
    ]
