"""What a person is told of a program whose layouts do not go together: every word of it."""

# ruff: noqa: PLW0108  (a lambda has a line of its own, which messages name)

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.schedule.language.plain import mesh_of, random

ONE = mesh_of(d=4)
TWO = mesh_of(a=2, b=3)
L, R, S0, S1, T = mw.Local, mw.Replicated, mw.Sliced(0), mw.Sliced(1), mw.Unreduced("sum")
AB = ("a", "b")


def refused(mesh: Any, fn: Any, *args: Any, axes: Any = None, **layouts: Any) -> str:
    with pytest.raises(mw.LayoutError) as caught:
        mw.program(mesh, axes=axes, layouts=layouts)(fn).partition(*args)
    return str(caught.value).replace(f"{__file__}:{fn.__code__.co_firstlineno}", "HERE")


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
NOT_TERMS = (
    "A Sliced value is reduced by an operator of its own first (jnp.sum, jnp.max); a Replicated "
    "one needs no reduction."
)
EVEN = (
    "A part is cut further, or joined in part, only where it divides: else parts of parts are no "
    "parts of the whole.\nUse another dim for one of the axes, or pad the dim."
)
GIVEN = "does not go with the layouts it is given:"


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


def test_verbs_in_a_loop():
    fn = lambda x: lax.fori_loop(0, 3, lambda i, v: mw.all_reduce(v), x)  # noqa: E731
    assert refused(ONE, fn, random(4, 8), x=L) == (
        f"scan at HERE {GIVEN} mw.all_reduce at HERE is in its body\n"
        "Verbs stand in the program itself, not in bodies of loops and conditionals.\n"
        "Unroll the loop; or write the function for one device, and read it with "
        "mw.SpmdProgram.from_shard_map."
    )


@pytest.mark.parametrize(("layout", "kind"), [(S0, "Sliced(0) over d"), (R, "Replicated")])
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "reduce"])
def test_reductions_of_what_has_no_terms(verb, layout, kind):
    text = refused(ONE, lambda x: getattr(mw, verb)(x), random(8), x=layout)
    assert text == (
        f"mw.{verb} at HERE {GIVEN} f32[8], argument x, is {kind}\n"
        f"mw.{verb} over d takes a value that is Local or Unreduced there; over d this one is "
        f"{kind.split('(', maxsplit=1)[0]}.\n{NOT_TERMS}"
    )


def test_joined_by_another_operator():
    assert refused(ONE, lambda x: mw.all_reduce(x.max()), random(8), x=S0) == (
        f'mw.all_reduce at HERE {GIVEN} f32[], reduce_max at HERE, is Unreduced("max") over d\n'
        'Terms are joined by the operator that they are terms of, not by sum.\nGive it op="max".'
    )


@pytest.mark.parametrize("layout", [R, L, T])
def test_gathers_of_what_is_no_slice(layout):
    args = random(8) if layout is R else random(4, 8)
    text = refused(ONE, lambda x: mw.all_gather(x), args, x=layout)
    assert "mw.all_gather over d takes a value that is Sliced there" in text
    assert text.endswith(
        "\nmw.all_reduce what is Local or Unreduced; a Replicated value needs no gathering. To see "
        "all devices' own values, return the Local value: it has a leading dim outside."
    )


def test_exchanges_that_are_none():
    assert refused(ONE, lambda x: mw.all_to_all(x, 0), random(4, 4), x=S0) == (
        f"mw.all_to_all at HERE {GIVEN} f32[4,4], argument x, is Sliced(0) over d; dim=0\n"
        "An all_to_all joins the parts along the one dim that they are cut along, and cuts "
        "another.\nName another dim than the value is cut along now."
    )
    text = refused(ONE, lambda x: mw.all_to_all(x, 0), random(4, 4), x=L)
    assert text.endswith("mw.reduce_scatter makes parts of what is to be reduced.")
    grid = {"x": mw.Sliced(0, "a") & mw.Sliced(1, "b")}
    text = refused(TWO, lambda x: mw.all_to_all(x, 2, AB), random(6, 6, 6), **grid)
    assert "An all_to_all joins the parts along the one dim" in text


def test_a_dim_that_is_none():
    assert refused(ONE, lambda x: mw.reduce_scatter(x, 3), random(4, 8), x=L) == (
        f"mw.reduce_scatter at HERE {GIVEN} f32[8], argument x, is Local over d; dim=3\n"
        "Parts are cut along a dim of the value.\n"
        "Name one of its dims; a scalar cannot be cut."
    )


def test_a_root_that_is_none():
    assert refused(ONE, lambda x: mw.broadcast(x, 4), random(4, 8), x=L) == (
        f"mw.broadcast at HERE {GIVEN} root=4, and d has 4 devices\n"
        "The root is a device of the group, counted from 0.\nName another one."
    )


def test_broadcasts_and_sends_of_others():
    text = refused(ONE, lambda x: mw.broadcast(x), random(4, 8), x=T)
    assert "takes a value that is Local there; over d this one is Unreduced." in text
    text = refused(ONE, lambda x: mw.send(x, "d"), random(8), x=S0)
    assert "takes a value that is Local or Replicated there; over d this one is Sliced." in text
    assert text.endswith("over other axes it may be either.")


def test_parts_of_parts():
    x = random(13, 4)
    both = {"x": mw.Sliced(0, AB)}
    assert refused(TWO, lambda x: mw.all_gather(x, "a"), x, **both) == (
        f"mw.all_gather at HERE {GIVEN} f32[13,4], argument x, is Sliced(0) over a, b; dim 0 is to "
        "be joined over a\n"
        "Neighbouring parts are joined: those of the most minor axes of a dim first.\n"
        "Go over b first, or over all of a, b."
    )
    found = f"is Sliced(0) over a, b; dim 0 of 13 over a, b, 6 devices\n{EVEN}"
    assert refused(TWO, lambda x: mw.all_gather(x, "b"), x, **both).endswith(found)
    own = {"x": mw.Sliced(0, "a") & mw.Local("b")}
    text = refused(TWO, lambda x: mw.reduce_scatter(x, axes="b"), random(3, 13), **own)
    assert text.endswith(f"Local over b; dim 0 of 13 over a, b, 6 devices\n{EVEN}")


def test_axes_that_do_not_fit():
    assert refused(TWO, lambda x: mw.all_reduce(x), random(6, 4), x=mw.Local(AB)) == (
        "mw.all_reduce at HERE names no axes: the mesh has axes a, b, the program no group\n"
        "A verb goes over the axes it names, or over the program's group.\n"
        "Give it axes=, or the program: mw.program(mesh, axes=...)."
    )
    for axes in ("c", ("a", "a")):
        text = refused(TWO, lambda x, axes=axes: mw.all_reduce(x, axes=axes), random(4))
        assert text.endswith("The mesh has axes a, b; each is named once.\nName axes of the mesh.")


UPDATED = "What is updated is an argument of the program: the next call's gets the new value."


def test_updates_that_are_none():
    x = random(8)
    assert refused(ONE, lambda x, y: mw.update(x * 2, y), x, x) == (
        f"mw.update at HERE {GIVEN} the target, f32[8], mul at HERE, is Replicated\n{UPDATED}\n"
        "Give the argument itself as the target."
    )
    assert refused(ONE, lambda x, y: mw.update(x, y), x, x, x=S0) == (
        f"mw.update at HERE {GIVEN}\n  - the target, f32[8], argument x, is Sliced(0) over d\n"
        "  - the value, f32[8], argument y, is Replicated\n"
        "An argument and its next value have one layout; or the argument is Replicated and the "
        "value Sliced, to be gathered later.\n"
        "Change the value's layout with a verb, or give the argument another."
    )
    text = refused(ONE, lambda x, y: mw.update(x, y), x, random(4, 8), y=L)
    assert "the value, f32[8], argument y, is Local over d" in text
    assert refused(ONE, lambda x, y: mw.update(x, y[:3]), x, x) == (
        "mw.update was given a value of another type than its target: the target is float32[8], "
        "the value float32[3]\nThe next value of an argument has its shape and dtype.\n"
        "Reshape or cast the value."
    )
    text = refused(ONE, lambda x, y: mw.update(x, {"y": y}), x, x)
    assert text.startswith("mw.update was given a value of another structure than its target")


def test_updates_that_are_lost():
    x = random(8)
    way_out = (
        "\nAn update gives an argument its next value, once; the caller gets it as a result.\n"
        "Return what mw.update returns."
    )
    assert refused(ONE, lambda x, y: (mw.update(x, y), y)[1], x, x) == (
        "<lambda> updates arguments that it does not hand on: the update at HERE is not among the "
        f"results{way_out}"
    )
    text = refused(ONE, lambda x, y: (mw.update(x, y), mw.update(x, y + 1)), x, x)
    assert text == (
        "<lambda> updates arguments that it does not hand on:"
        + "\n  - the update at HERE is of an argument that has another" * 2
        + way_out
    )
    text = refused(ONE, lambda x, y: 2 * mw.update(x, y), x, x)
    assert "the update at HERE is not among the results" in text


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
        (mw.Unreduced("mean", "a"), (2, 8), "Unreduced('mean', 'a'): the operator is one of sum, "
         "max, min, prod, and, or"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(layout, shape, why):
    short = f"f32[{','.join(map(str, shape))}]"
    assert refused(TWO, lambda x: x, random(*shape), x=layout) == (
        f"<lambda> was called with arguments that do not fit their layouts: x {short}: {why}\n"
        f"{ARGUMENTS}"
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


def test_operators_that_are_none():
    assert refused(ONE, lambda x: mw.all_reduce(x, "mean"), random(4, 8), x=L) == (
        "mw.all_reduce was given an operator that is none: op='mean'\n"
        "It is one of 'sum', 'max', 'min', 'prod', 'and', 'or'.\n"
        "For a mean, divide the sum by the number of devices."
    )


@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", bool), ("prod", bool), ("and", "float32"), ("or", "complex64")]
)
def test_values_that_an_operator_does_not_join(op, dtype):
    values = random(4, 8).astype(dtype)
    assert refused(ONE, lambda x: mw.reduce_scatter(x, 0, op), values, x=L) == (
        f"mw.reduce_scatter was given values that its operator does not join: op={op!r} of "
        f"{values.dtype}\n"
        "and, or: of booleans and integers; sum, prod: of numbers; max, min: of both.\n"
        "Cast the value first."
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


@pytest.mark.parametrize("call", [mw.all_reduce, jax.jit(mw.all_reduce)])
def test_verbs_outside_of_a_program(call):
    with pytest.raises(mw.LayoutError) as caught:
        call(random(8))
    assert str(caught.value) == (
        "mw.all_reduce was called outside of a program: its value has no layout here\n"
        "The verbs speak of devices of a mesh, along which values of an @mw.program lie.\n"
        "Call it in a function under @mw.program(mesh); or, in a function of local arrays under "
        "jax.shard_map, use jax.lax's collectives."
    )
