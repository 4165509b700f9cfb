"""What a person is told of a verb that does not go with its value's layout: every word of it."""

# ruff: noqa: PLW0108  (a lambda has a line of its own, which messages name)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshwise as mw
from tests.schedule.language.plain import random
from tests.schedule.language.refusals import AB, EVEN, GIVEN, ONE, S0, TWO, L, R, T, refused

NOT_TERMS = (
    "A Sliced value is reduced by an operator of its own first (jnp.sum, jnp.max); a Replicated "
    "one needs no reduction."
)


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
        "<lambda> updates arguments that it does not hand on: the update at HERE is of an argument "
        f"that has another{way_out}"
    )
    text = refused(ONE, lambda x, y: 2 * mw.update(x, y), x, x)
    assert "the update at HERE is not among the results" in text


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


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather"])
def test_values_that_are_no_arrays(verb):
    with pytest.raises(mw.LayoutError) as caught:
        getattr(mw, verb)({"x": 1.0, "axes": "data"})
    assert str(caught.value) == (
        f"mw.{verb} was given what is no array: 'data'\n"
        "A verb takes an array, or a tree of arrays, and then what is said of it.\n"
        f'Write mw.{verb}(x, ...) with the value first, and axes by name: axes="data".'
    )


NUMBERS = {
    "dim=1.5": lambda x: mw.reduce_scatter(x, dim=1.5),
    "dim=None": lambda x: mw.all_to_all(x, dim=None),
    "root=1.5": lambda x: mw.broadcast(x, root=1.5),
    "root=True": lambda x: mw.reduce(x, root=True),
    "root=JitTracer(int32[])": lambda x: mw.broadcast(x, root=jnp.int32(1)),
    "shift='1'": lambda x: mw.send(x, "d", "1"),
}


@pytest.mark.parametrize("given", NUMBERS)
def test_numbers_that_are_none(given):
    text = refused(ONE, NUMBERS[given], random(4, 8), x=L)
    assert text.splitlines()[0].endswith(f" was given a number that is none: {given}")


def test_numbers_of_any_kind():
    root = jnp.int32(1)

    def fn(x):
        return mw.send(mw.broadcast(x, root=root) + x, "d", np.int8(1)).sum()

    program = mw.program(ONE, layouts={"x": L})(fn).partition(random(4, 8))
    assert "ppermute" in str(program)
