"""What a person is told about rules, kernels and callbacks that do not fit: every word of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.rules.registry import REGISTRY, OpRule

X = np.zeros((8, 4), np.float32)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Rules that a test registers are gone after it."""
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))


def check(error, text, call):
    with pytest.raises(mw.MeshwiseError) as caught:
        call()
    assert str(caught.value) == text
    assert type(caught.value) is error


def line_of(marker):
    """`file:line` of the line of this file that ends in a comment with a marker."""
    with open(__file__, encoding="utf-8") as file:
        lines = [i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {marker}")]
    assert len(lines) == 1
    return f"{__file__}:{lines[0]}"


LANGUAGE = (
    "\nA rule is 'operands -> results | kinds', such as 'b i, i o -> b o | sum=i': a name for the"
    " factors of each dim, and the kind of each that does not simply pass through.\n"
    "The factors of a dim, and what kinds there are: docs/extending.md."
)
NOT_A_TEXT = {
    "i j": "it has to have one '->', between operands and results",
    "i -> i -> i": "it has to have one '->', between operands and results",
    "(i j -> i": "'(i j' is no list of dims",
    "i ... -> i": "'i ...' is no list of dims",
    "i $ -> i": "'i $' is no list of dims",
    "(i) -> i": "'(i)' is no list of dims",
    "i j -> j | sum": "'sum' is no list of kinds, such as 'sum=i j whole=k'",
    "i -> i | total=i": "'total' is no kind of factor: it is one of sum, max, min, prod, and, or,"
    " whole, permute",
    "i j -> i | sum=j whole=j": "j is of two kinds, sum and whole",
    "i -> i | sum=k": "k is a factor of no dim",
    "i i -> i": "i stands twice in 'i i'",
    "i j -> i": "j is in no result: is it sum=j, max=j, ... or whole=j?",
    "i j -> i j | max=j": "j is reduced (max=j), and is in a result",
    "i -> i j": "j is in no operand: whole=j, or a local function, is wanted",
    "i j -> i j | permute=j": "j is permuted, which takes a local function that does the exchange",
}


@pytest.mark.parametrize("text", NOT_A_TEXT)
def test_texts_that_cannot_be_right(text):
    problems = NOT_A_TEXT[text]
    if text == "i j -> j | sum":
        problems = f"\n  - {problems}\n  - i is in no result: is it sum=i, max=i, ... or whole=i?"
    else:
        problems = f" {problems}"
    check(
        mw.RuleError,
        f"mw.register_rule cannot read the rule {text!r} for 'riddle':{problems}" + LANGUAGE,
        lambda: mw.register_rule("riddle", text),
    )
    assert "riddle" not in REGISTRY.rules


@pytest.mark.parametrize("text", ["i j, ... k -> (i j) 1 | whole=k", "-> i | whole=i", " -> "])
def test_texts_that_may_be_right(text):
    mw.register_rule("riddle", text)
    mw.register_rule("puzzle", "i -> j | permute=i", local=lambda context, x: [x])


def test_several_problems_are_all_told():
    check(
        mw.RuleError,
        "mw.register_rule cannot read the rule 'i j k -> j | max=j' for 'riddle':\n"
        "  - i is in no result: is it sum=i, max=i, ... or whole=i?\n"
        "  - k is in no result: is it sum=k, max=k, ... or whole=k?\n"
        "  - j is reduced (max=j), and is in a result" + LANGUAGE,
        lambda: mw.register_rule("riddle", "i j k -> j | max=j"),
    )


def test_what_is_no_rule():
    check(
        mw.RuleError,
        "mw.register_rule cannot read the rule for 'riddle':"
        " 3 is neither a text nor a function" + LANGUAGE,
        lambda: mw.register_rule("riddle", 3),
    )


def test_a_second_rule():
    text = (
        "mw.register_rule was given a primitive that has a rule already: '{}'\n"
        "A primitive has one rule, which holds for the whole process.\n"
        "Register it once, where the primitive is made."
    )
    mw.register_rule(Primitive("riddle"), "i -> i")
    for name, given in (("riddle", "riddle"), ("sin", lax.sin_p)):
        check(mw.RuleError, text.format(name), lambda given=given: mw.register_rule(given, "i->i"))


def test_linear_in_an_operand_that_is_none():
    check(
        mw.RuleError,
        "mw.register_rule was given operands of 'riddle' that it has not:"
        " linear=((0,), (1, 2)) for 2 operands, counted from 0\n"
        "linear lists sets of operands through which an unreduced sum may pass.\n"
        "Write ((0,), (1,)) for a product and ((0, 1),) for a sum of two operands.",
        lambda: mw.register_rule("riddle", "i, i -> i", linear=[(0,), (1, 2)]),
    )


def primitive(name, types=lambda x: x):
    made = Primitive(name)
    made.def_abstract_eval(types)
    return made


def test_rules_that_do_not_fit_their_operands(mesh2x4):
    riddle = primitive("riddle")

    def fn(x):
        return riddle.bind(x)  # riddle

    mw.register_rule(riddle, "i j k -> i j k")
    check(
        mw.RuleError,
        f"the rule of 'riddle' does not fit what it is applied to at {line_of('riddle')}:"
        " rule 'i j k -> i j k' has a tensor of rank 3; the shape is (8, 4)\n"
        "The rule is 'i j k -> i j k', the types are f32[8,4] -> f32[8,4].\n"
        "Begin a tensor with '...' where it may have more dims, or register a function that makes"
        " the text of an application.",
        lambda: mw.jit(fn, mesh=mesh2x4)(X),
    )


@pytest.mark.parametrize("text", ["i i -> i", "i -> ", "... i j k -> ... i j k"])
def test_rules_of_functions_are_checked_too(mesh2x4, text):
    riddle = primitive("riddle")
    mw.register_rule(riddle, lambda application: text)
    with pytest.raises(mw.RuleError, match="'riddle'"):
        mw.jit(riddle.bind, mesh=mesh2x4)(X)


def test_a_function_that_makes_no_rule(mesh2x4):
    riddle = primitive("riddle")
    mw.register_rule(riddle, lambda application: None)
    check(
        mw.RuleError,
        "mw.register_rule cannot read the rule for 'riddle':"
        " the function returned None, no text and no OpRule" + LANGUAGE,
        lambda: mw.jit(riddle.bind, mesh=mesh2x4)(X),
    )


WRONG_RESULTS = {
    "too many": (lambda context, x: [x, x], "2 results, expected 1"),
    "whole": (
        lambda context, x: jnp.zeros((8, 4)),
        "result 0 is f32[8,4], expected f32[4,4]",
    ),
    "another dtype": (
        lambda context, x: [x.astype(jnp.int32)],
        "result 0 is i32[4,4], expected f32[4,4]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_RESULTS)
def test_local_functions_with_wrong_results(mesh2x4, wrong):
    local, problem = WRONG_RESULTS[wrong]
    riddle = primitive("riddle")

    def fn(x):
        return riddle.bind(x)  # wrong results

    mw.register_rule(riddle, "i j -> i j", local=local)
    check(
        mw.RuleError,
        f"the local function of 'riddle', computed at {line_of('wrong results')} on each device's"
        f" f32[4,4], is not what its rule says: {problem}\n"
        "The rule is 'i j -> i j', of f32[8,4] in all.\n"
        "Compute local results of these types, correct the rule, or give a local function where"
        " parameters of the primitive hold global sizes.",
        lambda: mw.jit(fn, mesh=mesh2x4, in_shardings=P("x"))(X),
    )


def test_a_whole_rule_has_its_local_function_checked(mesh2x4):
    riddle = primitive("riddle")
    mw.register_rule("puzzle", "i j -> i j")
    puzzle = REGISTRY.rules["puzzle"]
    mw.register_rule(riddle, lambda a: OpRule(puzzle(a).factors, local=lambda context, x: [x, x]))
    with pytest.raises(mw.RuleError, match="2 results, expected 1"):
        mw.jit(riddle.bind, mesh=mesh2x4, in_shardings=P("x"))(X)


def test_primitives_that_are_not_the_same_on_a_part(mesh2x4):
    def types(x, *, rows):
        if x.shape[0] != rows:
            raise TypeError(f"{x.shape[0]} rows, not {rows}")
        return x

    riddle, puzzle = primitive("riddle", types), primitive("puzzle", lambda x: X_TYPE)

    def fn(x):
        return riddle.bind(x, rows=8)  # the same on a part

    def other(x):
        return puzzle.bind(x)  # as large on a part

    mw.register_rule(riddle, "i j -> i j")
    mw.register_rule(puzzle, "i j -> i j")
    text = (
        "{} itself, computed at {} on each device's f32[4,4], is not what its rule says: {}\n"
        "The rule is 'i j -> i j', of f32[8,4] in all.\n"
        "Compute local results of these types, correct the rule, or give a local function where"
        " parameters of the primitive hold global sizes."
    )
    problem = "it cannot be: 4 rows, not 8"
    check(
        mw.RuleError,
        text.format("'riddle'", line_of("the same on a part"), problem),
        lambda: mw.jit(fn, mesh=mesh2x4, in_shardings=P("x"))(X),
    )
    problem = "result 0 is f32[8,4], expected f32[4,4]"
    check(
        mw.RuleError,
        text.format("'puzzle'", line_of("as large on a part"), problem),
        lambda: mw.jit(other, mesh=mesh2x4, in_shardings=P("x"))(X),
    )


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
        "Let it take any size, or keep the dim whole with mw.shard on the operand."
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
    hinted = mw.jit(lambda x: fn(mw.shard(x * 1, P())), mesh=mesh2x4, in_shardings=P("x"))
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


def test_a_rule_for_what_is_no_primitive():
    check(
        mw.RuleError,
        "mw.register_rule was given what is no primitive: 3 is int\n"
        "A rule is for a jax.extend.core.Primitive, or for one of a name.\n"
        "Pass what is bound inside of the function, or its name, as jax.make_jaxpr shows.",
        lambda: mw.register_rule(3, "i -> i"),
    )


@pytest.mark.parametrize("ask", [mw.Schedule, mw.autotune])
def test_a_schedule_of_what_is_no_program(ask):
    check(
        mw.ArgumentError,
        "a schedule was asked for of what is no program: 3 is int\n"
        "A schedule is one of an mw.SpmdProgram, or of what has `partition`, as mw.jit(f) and"
        " mw.program(f) have.\n"
        "Pass step.partition(*args), or step and its arguments.",
        lambda: ask(3),
    )


@pytest.mark.parametrize("devices", [3, [], "cpu"])
def test_figures_of_no_devices(devices):
    check(
        mw.ArgumentError,
        f"mw.calibrate was asked for figures of no devices: {devices!r}\n"
        "Figures are measured on devices, all at once, or along the axes of a mesh.\n"
        "Pass jax.devices(), some of them, a jax.sharding.Mesh, or nothing.",
        lambda: mw.calibrate(devices),
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
