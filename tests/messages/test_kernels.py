"""What a person is told about kernels and callbacks that do not fit: every word of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.rules.registry import REGISTRY
from tests.messages.exactly import check, lines_of

line_of = lines_of(__file__)

X = np.zeros((8, 4), np.float32)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Rules that a test registers are gone after it."""
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))


X_TYPE = jax.core.ShapedArray(X.shape, X.dtype)


def doubled(x):
    return 2 * x


def test_kernels_that_are_not_like_their_reference():
    rest = (
        "\nA reference computes what the kernel does.\n"
        "Correct one of the two; a cast in the reference costs nothing, as it is not run."
    )
    head = "doubled and its reference in mw.like do not return the same:"
    check(
        mw.RuleError,
        f"{head} result 0: the kernel's is float32[8,4], the reference's float32[4]" + rest,
        lambda: mw.like(doubled, lambda x: x.sum(0))(X),
    )
    check(
        mw.RuleError,
        f"{head} the kernel returns PyTreeDef(*), the reference PyTreeDef((*, *))" + rest,
        lambda: mw.like(doubled, lambda x: (x, x))(X),
    )


def test_kernels_of_what_is_no_array():
    check(
        mw.ArgumentError,
        "doubled, a kernel of mw.like, was called with arguments that are no arrays:"
        " a str: 'rows'\n"
        "Arguments are arrays, numbers, or trees of them.\n"
        "Bind others to the kernel and to its reference with functools.partial.",
        lambda: mw.like(doubled, doubled)("rows"),
    )


def test_kernels_that_close_over_traced_values(mesh2x4):
    def fn(x):
        def plus(y):
            return y + x

        return mw.like(plus, plus)(2 * x)

    with pytest.raises(mw.ArgumentError) as caught:
        mw.jit(fn, mesh=mesh2x4, in_shardings=P("x"))(X)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("the kernel of mw.like for plus closes over traced values: a traced")
    assert rest == [
        "A kernel is called with each device's part of its arguments, and of nothing else.",
        "Pass them as arguments.",
    ]


def needs_eight(x):
    if x.shape[0] != 8:
        raise ValueError("eight rows")
    return 2 * x


def test_kernels_that_cannot_be_called_with_a_part(mesh2x4):
    rest = (
        "\nA kernel of mw.like is called with the shapes of one device's part.\n"
        "Let it take any size, or keep the dim whole with mw.shard on operands and results."
    )

    def fn(x):
        return mw.like(needs_eight, doubled)(x)  # eight rows

    def other(x):
        return mw.like(lambda x: jnp.zeros((8, 4)), doubled)(x)  # always as large

    check(
        mw.RuleError,
        f"needs_eight cannot be called at {line_of('eight rows')} with each device's f32[4,4]:"
        " ValueError: eight rows" + rest,
        lambda: mw.jit(fn, mesh=mesh2x4, in_shardings=P("x"))(X),
    )
    check(
        mw.RuleError,
        f"<lambda> cannot be called at {line_of('always as large')} with each device's f32[4,4]:"
        " result 0 is f32[8,4], expected f32[4,4]" + rest,
        lambda: mw.jit(other, mesh=mesh2x4, in_shardings=P("x"))(X),
    )

    def whole(x):
        return mw.shard(fn(mw.shard(x, P())), P())

    hinted = mw.jit(whole, mesh=mesh2x4, in_shardings=P("x"), out_shardings=P("x"))
    assert hinted(X).shape == (8, 4)


def test_strict_mode_names_the_way_out_of_a_kernel(mesh2x4):
    def block(x, out):
        out[...] = 2 * x[...]

    def fn(x):
        return pl.pallas_call(block, X_TYPE, interpret=True)(x)  # a kernel

    check(
        mw.MissingRuleError,
        f"fn (strict) has operators without a rule: pallas_call at {line_of('a kernel')}\n"
        "Without a rule an operator is computed whole on every device.\n"
        "Say how they are partitioned, with mw.register_rule or, for kernels, mw.like"
        " (docs/extending.md). Or leave out strict=True; program.explain() then lists them.",
        lambda: mw.jit(fn, mesh=mesh2x4, strict=True)(X),
    )


def custom(rule, local=doubled):
    @custom_partitioning
    def function(x):
        return 2 * x

    def partition(mesh, operands, result):
        return mesh, local, result.sharding, tuple(x.sharding for x in operands)

    function.def_partition(partition, sharding_rule=rule)
    return function


def test_sharding_rules_that_do_not_fit(mesh2x4):
    cases = {
        "i j k -> i j k": " 'i j k' for (8, 4)",
        "i j, i -> i j": " it is for 3 operands and results, there are 2",
    }
    for rule, problem in cases.items():
        function = custom(rule)

        def fn(x, function=function):
            return function(x)  # sharding rule

        check(
            mw.RuleError,
            "the sharding rule of function does not fit what it is applied to at "
            f"{line_of('sharding rule')}:{problem}\n"
            "The types are f32[8,4] -> f32[8,4].\n"
            "Correct the sharding_rule that is given to def_partition.",
            lambda fn=fn: mw.jit(fn, mesh=mesh2x4)(X),
        )


def test_callbacks_whose_functions_give_something_else(mesh2x4):
    function = custom("i j -> i j", lambda x: x.sum(0))

    def fn(x):
        return function(x)  # sums instead

    check(
        mw.RuleError,
        f"the partition callback of function at {line_of('sums instead')} was asked for"
        " P('x', None), P('x', None): result 0 is f32[4], expected"
        " f32[4,4]\n"
        "Its sharding rule says that it can be split so.\n"
        "Make the callback and the sharding_rule that are given to def_partition agree.",
        lambda: mw.jit(fn, mesh=mesh2x4, in_shardings=P("x"))(X),
    )


def test_kernels_that_are_no_functions():
    check(
        mw.ArgumentError,
        "mw.like was given what is no function:\n"
        "  - kernel: a NumPy array of float32\n"
        "  - reference: a str: 'x'\n"
        "A kernel and its reference are functions of the same arrays.\n"
        "Pass both, as in mw.like(kernel, reference); the call comes after.",
        lambda: mw.like(np.zeros(3, np.float32), "x"),
    )
