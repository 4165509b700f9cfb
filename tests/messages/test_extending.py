"""What a person is told about rules, kernels and callbacks that do not fit: every word of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.rules.registry import REGISTRY, OpRule, opaque_rule
from tests.messages.exactly import check, lines_of

line_of = lines_of(__file__)

X = np.zeros((8, 4), np.float32)
X_TYPE = jax.core.ShapedArray(X.shape, X.dtype)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Rules that a test registers are gone after it."""
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))


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


def fails(application):
    raise KeyError("rows")


@pytest.mark.parametrize(
    ("rule", "options", "what", "offender"),
    [
        (fails, {}, "rule function", "it raises KeyError: 'rows'"),
        ("i j -> i j", {"flops": fails}, "flops", "it raises KeyError: 'rows'"),
        ("i j -> i j", {"flops": lambda application: -1.0}, "flops", "it is -1.0"),
        (lambda a: OpRule(opaque_rule(a).factors, flops=np.nan), {}, "flops", "it is nan"),
    ],
)
def test_functions_that_say_nothing_of_an_application(mesh2x4, rule, options, what, offender):
    riddle = primitive("riddle")

    def fn(x):
        return riddle.bind(x)  # nothing said

    mw.register_rule(riddle, rule, **options)
    check(
        mw.RuleError,
        f"the {what} of 'riddle' says nothing of what is applied at {line_of('nothing said')}:"
        f" {offender}\n"
        "A rule's functions are called with an application: its params, and the types of its"
        " operands and results. flops is a finite number, 0 or more.\n"
        "Let it answer for every application of the primitive.",
        lambda: mw.jit(fn, mesh=mesh2x4, in_shardings=P("x"))(X),
    )


@pytest.mark.parametrize("flops", [-1, float("nan"), float("inf"), True, "many"])
def test_flops_that_are_no_number(flops):
    check(
        mw.RuleError,
        f"mw.register_rule was given what says nothing of a rule: flops={flops!r}\n"
        "`linear` has sets of operands' positions, as ((0,), (1,)) or ((0, 1),); `flops` is a"
        " finite number, 0 or more, or a function, `local` a function.\n"
        "Leave out what is as by default.",
        lambda: mw.register_rule("riddle", "i -> i", flops=flops),
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
    "none": (lambda context, x: None, "result 0 is None, no array"),
    "an error": (lambda context, x: {}["scale"], "it raises KeyError: 'scale'"),
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


@pytest.mark.parametrize("ask", [mw.Schedule, mw.autotune])
def test_a_schedule_of_a_function_without_its_arguments(ask):
    step = mw.jit(lambda x, y: x + y, in_shardings=(P(), P()))
    check(
        mw.ArgumentError,
        f"a schedule was asked for of a function without its arguments: {step!r:.60}: missing a"
        " required argument: 'y'\n"
        "A program is of a function and of the types of its arguments.\n"
        "Pass step.partition(*args), or step and its arguments.",
        lambda: ask(step, 1.0),
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


def test_a_builtin_says_itself_what_it_takes():
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    schedule = mw.Schedule(mw.jit(dict, mesh=mesh), {"a": np.ones(2)})
    assert schedule.program.in_paths == ("args[0]['a']",)
    with pytest.raises(TypeError, match="getattr expected at least 2 arguments"):
        mw.Schedule(mw.jit(getattr, mesh=mesh), 1.0)
