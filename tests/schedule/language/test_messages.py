"""What a person is told of a program whose layouts do not go together: every word of it."""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.schedule.language.plain import random
from tests.schedule.language.refusals import AB, GIVEN, ONE, S0, S1, TWO, L, R, T, refused

SAME_AXIS = (
    "Over d one operand is a device's own values, the other its part of a whole: together they are "
    "neither.\nmw.all_reduce or mw.reduce_scatter the Local one, or mw.all_gather the rest."
)
PAIRS = (
    "A device can compute with its parts only where they belong together: the operator pairs them "
    "along one dim, cut over the same axes.\n"
    "mw.all_gather one of them, or mw.all_to_all it to be cut along the dim that matches."
)
MIXES = (
    "The operator mixes elements along that dim, or joins it with others so that parts would not "
    "stay parts: a device needs more than its own.\n"
    "mw.all_gather the value first, or slice along another dim (mw.all_to_all)."
)
JOIN = (
    "Join the terms first: mw.all_reduce(x, op), or mw.reduce_scatter to go on with a part. A norm "
    "of a slice is the square root of the all_reduce of its sum of squares."
)
TERMS = "An Unreduced value passes as terms through what is linear in it."
NOT_LINEAR = (
    f"{TERMS} What this computes of each device's term alone is no term of what is asked for.\n"
    f"{JOIN}"
)


def test_local_with_sliced():
    text = refused(ONE, lambda x, y: x + y, random(4, 8), random(8), x=L, y=S0)
    assert text == (
        f"add at HERE {GIVEN}\n  - f32[8], argument x, is Local over d\n"
        f"  - f32[8], argument y, is Sliced(0) over d\n{SAME_AXIS}"
    )


def test_a_local_scalar_with_sliced():
    text = refused(ONE, lambda x, y: x * y, random(4), random(8), x=L, y=S0)
    assert text.startswith(f"mul at HERE {GIVEN}\n  - f32[], argument x, is Local over d\n")


def test_local_with_unreduced():
    text = refused(ONE, lambda x, y: x * y, random(4, 8), random(4, 8), x=L, y=T)
    assert text == (
        f"mul at HERE {GIVEN}\n  - f32[8], argument x, is Local over d\n"
        '  - f32[8], argument y, is Unreduced("sum") over d\n'
        "Over d one operand is a term of a sum, which means nothing until the terms are added; the "
        "other is Local.\nmw.all_reduce (or mw.reduce_scatter) the Unreduced one first."
    )


def test_sliced_with_unreduced():
    text = refused(ONE, lambda x: x * x.sum(), random(8), x=S0)
    assert "f32[], reduce_sum at HERE, is Unreduced" in text
    assert "until the terms are added; the other is Sliced." in text


def test_rows_with_columns_over_one_axis():
    text = refused(ONE, lambda x, y: x @ y, random(4, 4), random(4, 4), x=S0, y=S1)
    assert text == (
        f"dot_general at HERE {GIVEN}\n  - f32[4,4], argument x, is Sliced(0) over d\n"
        f"  - f32[4,4], argument y, is Sliced(1) over d\n{PAIRS}"
    )


def test_one_dim_cut_over_other_axes():
    layouts = {"x": mw.Sliced(0, "a"), "y": mw.Sliced(0, "b")}
    text = refused(TWO, lambda x, y: x + y, random(6), random(6), **layouts)
    assert text.endswith(PAIRS) and "Sliced(0) over b" in text
    layouts = {"x": mw.Sliced(0, "a"), "y": mw.Sliced(0, AB)}
    assert refused(TWO, lambda x, y: x + y, random(6), random(6), **layouts).endswith(PAIRS)


def test_a_norm_of_a_slice():
    text = refused(ONE, lambda x: jnp.sqrt(jnp.sum(x * x)), random(8), x=S0)
    assert text == (
        f'sqrt at HERE {GIVEN} f32[], reduce_sum at HERE, is Unreduced("sum") over d\n{NOT_LINEAR}'
    )


def test_a_bias_added_to_terms():
    text = refused(ONE, lambda x, y: x + y, random(4, 8), random(8), x=T)
    assert text == (
        f'add at HERE {GIVEN} f32[8], argument x, is Unreduced("sum") over d\n{NOT_LINEAR}'
    )


def test_terms_times_terms():
    assert refused(ONE, lambda x: x * x, random(4, 8), x=T).endswith(NOT_LINEAR)


def test_terms_of_a_maximum():
    text = refused(ONE, lambda x: 2 * x.max(), random(8), x=S0)
    assert text == (
        f'mul at HERE {GIVEN} f32[], reduce_max at HERE, is Unreduced("max") over d\n'
        f"{TERMS} Terms of another operator than a sum (max) are only joined.\n{JOIN}"
    )


def test_terms_over_other_axes():
    layouts = {"x": mw.Unreduced("sum", "a"), "y": mw.Unreduced("sum", "b")}
    text = refused(TWO, lambda x, y: x + y, random(2, 5), random(3, 5), **layouts)
    assert text == (
        f'add at HERE {GIVEN}\n  - f32[5], argument x, is Unreduced("sum") over a\n'
        '  - f32[5], argument y, is Unreduced("sum") over b\n'
        f"{TERMS} Terms are added where they are terms over the same axes.\n{JOIN}"
    )


MIXING = {
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "argmax": lambda x: jnp.argmax(x, 0),
    "rev": lambda x: x[::-1],
    "slice": lambda x: x[1:],
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 0))),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "reshape": lambda x: x.reshape(-1),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_needs_a_dim_whole(name):
    text = refused(ONE, MIXING[name], random(6, 3), x=S0)
    assert text.startswith(f"{name} at HERE {GIVEN} f32[6,3], argument x, is Sliced(0) over d;")
    assert text.endswith(f"dim 0 of 6 is needed whole\n{MIXES}")


@pytest.mark.parametrize("name", ["sort", "mul", "transpose"])
def test_a_dim_of_one_element_has_no_parts(name):
    fn = {"sort": MIXING["sort"], "mul": lambda x: x * 2, "transpose": lambda x: x.T}[name]
    assert refused(ONE, fn, random(3, 1), x=S1) == (
        f"{name} at HERE {GIVEN} f32[3,1], argument x, is Sliced(1) over d; dim 1 of 1 is needed "
        "whole\nA dim of one element has no parts: the first device has all of it, and the others "
        "nothing to compute with. Only verbs take it sliced.\n"
        "mw.all_gather the value first, or slice along another dim (mw.all_to_all)."
    )


def test_a_window_over_slices():
    layouts = {"x": mw.Sliced(2)}
    args = random(1, 1, 8, 8), random(1, 1, 3, 3)
    text = refused(ONE, lambda x, k: lax.conv(x, k, (1, 1), "SAME"), *args, **layouts)
    assert "dim 2 of 8 is needed whole" in text and text.startswith("conv_general_dilated at HERE")


OPAQUE = (
    "is computed by each device as it is, on values that are Replicated or Local.\n"
    "mw.all_gather what is Sliced and mw.all_reduce what is Unreduced first; or write the function "
    "for one device, and read it with mw.SpmdProgram.from_shard_map."
)


def test_a_loop_over_slices():
    text = refused(ONE, lambda x: lax.fori_loop(0, 3, lambda i, v: v * 2, x), random(8), x=S0)
    assert text == (
        f"scan at HERE {GIVEN} f32[8], argument x, is Sliced(0) over d\n"
        f"A loop or conditional {OPAQUE}"
    )
    text = refused(ONE, lambda x, y: lax.cond(y > 0, jnp.sin, jnp.cos, x), random(4, 8), 1.0, x=T)
    assert text.startswith("cond at HERE")
    text = refused(ONE, lambda x: lax.while_loop(lambda v: v[0] < 3, jnp.exp, x), random(8), x=S0)
    assert text.startswith("while at HERE")


def test_hints_and_collectives_of_jax():
    assert refused(ONE, lambda x: mw.shard(x, P("d")), random(8)) == (
        f"hint at HERE {GIVEN} a sharding constraint\n"
        "In a program layouts are said of arguments, and follow for all other values.\n"
        "Leave it out; use a verb (mw.all_gather, mw.all_to_all, ...) where a layout changes."
    )
    text = refused(ONE, lambda x: lax.psum(x, "d"), random(4, 8), x=L)
    assert text.startswith("<lambda> uses a collective of jax.lax: ")
    assert text.endswith(
        "\nA program is written with whole values; verbs say what is communicated.\n"
        "Use mw.all_reduce, mw.reduce_scatter, mw.all_gather, mw.all_to_all, mw.send; a function "
        "of local arrays is read by mw.SpmdProgram.from_shard_map."
    )


ARGUMENTS = (
    "A Sliced argument is the whole array; a Local or Unreduced one has a leading dim that counts "
    "the devices of its axes. Along an axis a value is one thing.\n"
    "Give each argument as its layout says, or another layout; name axes, or give the program a "
    "group with mw.program(mesh, axes=...)."
)


@pytest.mark.parametrize(
    ("layout", "shape", "why"),
    [
        (
            L(AB),
            (3, 8),
            "Local(('a', 'b')) wants a first dim of 6, one entry for each device of a, b, and it "
            "has 3 as its first dim",
        ),
        (L("a"), (), "Local('a') wants a first dim of 2, one entry for each device of a, and it "
         "has no dim"),
        (mw.Sliced(2, "a"), (8,), "Sliced(2, 'a'), but it has 1 dims in the program"),
        (mw.Sliced(1, "a") & L("b"), (3, 8), "Sliced(1, 'a') & Local('b'), but it has 1 dims in "
         "the program"),
        (mw.Sliced(0, "a") & L("a"), (2, 8), "Sliced(0, 'a') & Local('a') names axis 'a' twice"),
        (S0, (8,), "Sliced(0) names no axes, and the program has no group"),
        (mw.Sliced(0, "c"), (8,), "Sliced(0, 'c') names 'c', which is no axis of ('a', 'b')"),
        (mw.Unreduced("max", "a") & mw.Unreduced("sum", "b"), (6, 8), "Unreduced('max', 'a') & "
         "Unreduced('sum', 'b'): terms are joined by one operator"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(layout, shape, why):
    short = f"f32[{','.join(map(str, shape))}]"
    assert refused(TWO, lambda x: x, random(*shape), x=layout) == (
        f"<lambda> was called with arguments that do not fit their layouts: x {short}: {why}\n"
        f"{ARGUMENTS}"
    )


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: mw.Sliced("x"), "mw.Sliced was given what it does not take: dim='x'"),
        (lambda: mw.Sliced(True), "mw.Sliced was given what it does not take: dim=True"),
        (lambda: mw.Local(3), "mw.Local was given what it does not take: axes=3"),
        (lambda: mw.Unreduced("mean", 3), "mw.Unreduced was given what it does not take:\n"
         "  - op='mean'\n  - axes=3"),
    ],
)  # fmt: skip
def test_layouts_of_what_is_no_dim_axis_or_operator(make, what):
    with pytest.raises(mw.MeshwiseError) as caught:
        make()
    assert str(caught.value) == (
        f"{what}\nA dim is an integer (from the end, if negative), axes are names of a mesh's axes,"
        " and an operator is one of sum, max, min, prod, and, or.\n"
        'For example mw.Sliced(0, "data"), mw.Local("data"), mw.Unreduced("max", "data").'
    )


def test_layouts_that_are_none():
    kinds = (
        "A layout is mw.Replicated, mw.Sliced(dim), mw.Local or mw.Unreduced(op), or several "
        "joined with &.\n"
        "Write mw.Sliced(0) for parts along the first dim; leave out what is replicated."
    )
    for given, shown in ((mw.Sliced, "Sliced, without a dim"), ("Sliced", "'Sliced'"), (0, "0")):
        text = refused(ONE, lambda x: x, random(8), x=given)
        assert text == f"A layout was expected: {shown}\n{kinds}"
    assert refused(ONE, lambda x: x, random(8), y=S0) == (
        "layouts= of <lambda> names parameters that it does not have: y\n"
        "Its parameters are x; 'return' is its result.\n"
        "Give layouts by the names of parameters."
    )


def test_trees_of_layouts_that_do_not_match():
    with pytest.raises(mw.TreeError, match="the layout of x of <lambda> does not match the tree"):
        mw.program(ONE, layouts={"x": [S0, R]})(lambda x: x).partition(random(8))


def test_arguments_that_are_no_arrays():
    with pytest.raises(mw.ArgumentError) as caught:
        mw.program(ONE)(lambda x: x).partition({"a": "text"})
    assert str(caught.value) == (
        "<lambda> was called with arguments that are no arrays: x['a'] is a str: 'text'\n"
        "Arguments of a program are arrays, numbers, or trees of them.\n"
        "Let the function close over anything else, or be a functools.partial."
    )


def test_meshes_and_groups_that_are_none():
    with pytest.raises(mw.MeshError, match=r"mw\.program was given no mesh: mesh=None"):
        mw.program(None)
    with pytest.raises(mw.MeshError) as caught:
        mw.program(TWO, axes=("a", "c"))
    assert str(caught.value) == (
        "mw.program was given a group that is none: axes=('a', 'c')\n"
        "A group is one or more axes of the mesh, a, b.\nName axes of the mesh."
    )
    with pytest.raises(mw.ArgumentError):
        mw.program("data")
