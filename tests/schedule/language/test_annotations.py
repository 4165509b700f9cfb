"""Layouts said in annotations, as text too, in trees, by name; states; calls."""

# ruff: noqa: UP037, F821  (keys of trees in annotations are text too, and no names)

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of
from tests.schedule.language.one_device import on_one_device
from tests.schedule.language.plain import random

MESH = mesh_of(data=4)
ROWS = mw.Sliced(0)


class State(NamedTuple):
    mean: jax.Array
    square: jax.Array


def layouts(program, *args, **kwargs) -> dict[str, str]:
    rows = program.layouts(*args, **kwargs).rows
    return {r.line: r.layout for r in rows if r.made_by in ("argument", "result")}


def test_annotations_that_are_text():
    columns = mw.Sliced(1)

    @mw.program(MESH)
    def program(
        a: mw.Local,
        b: ROWS,
        c: Annotated[jax.Array, mw.Sliced(1), "columns"],
        d: jax.Array,
        e: {"x": mw.Sliced(1, "data"), "y": (mw.Replicated, None)},
        f: columns,
        g: mw.Unreduced,
        h: mw.Local("data") = 2.0,
        scale=3,
    ) -> jax.Array:
        assert columns  # read here, the name is known to the annotation too
        return d * scale

    x = random(4, 8)
    e = {"x": x, "y": (x, {"z": x})}
    assert layouts(program, x, x, x, x, e, x, x) == {
        "a": "Local over data",
        "b": "Sliced(0) over data",
        "c": "Sliced(1) over data",
        "d": "Replicated",
        "e['x']": "Sliced(1) over data",
        "e['y'][0]": "Replicated",
        "e['y'][1]['z']": "Replicated",
        "f": "Sliced(1) over data",
        "g": 'Unreduced("sum") over data',
        "result": "Replicated",
    }


def test_an_annotation_that_cannot_be_read():
    def hidden():
        inner = ROWS

        @mw.program(MESH)
        def program(x: inner):
            return x

        return program

    with pytest.raises(mw.LayoutError) as caught:
        hidden()
    assert str(caught.value) == (
        "The annotation of x of program cannot be read: inner: name 'inner' is not defined\n"
        "Annotations that are text are read where the function is defined in its module; names of "
        "a function around it are not seen there unless it uses them.\n"
        "Give the layout as mw.program(mesh, layouts={'x': ...})."
    )

    def given(x: unknown):
        return x

    program = mw.program(MESH, layouts={"x": ROWS})(given)
    assert layouts(program, random(5))["x"] == "Sliced(0) over data"


def test_layouts_by_name_go_before_annotations():
    @mw.program(MESH, layouts={"x": mw.Replicated})
    def program(x: mw.Sliced(0), *rest: mw.Sliced(1), key, **more: mw.Local):
        return x

    x = random(4, 4)
    found = layouts(program, x, x, x, key=x, b=x, a=x)
    assert found == {
        "x": "Replicated",
        "rest[0]": "Sliced(1) over data",
        "rest[1]": "Sliced(1) over data",
        "a": "Local over data",
        "b": "Local over data",
        "key": "Replicated",
        "result": "Replicated",
    }


def test_keywords_and_trees_reach_their_parameters():
    @mw.program(MESH)
    def program(a: ROWS, b, *rest, c, z: mw.Local = 0.0, **more: ROWS):
        return {"a": a - b, "c": c - rest[0]["x"], "z": mw.all_reduce(z) + c, "more": more}

    a, b, c, d = (random(8, seed=i) for i in range(4))
    z = random(4, 8)
    made = program.partition(a, b, {"x": d}, c=c, y=b, z=z, k=a)
    assert made.in_paths == ("a", "b", "rest[0]['x']", "c", "k", "y", "z")
    got = made.simulate(a, b, {"x": d}, c=c, y=b, z=z, k=a)
    np.testing.assert_array_equal(got["a"], a - b)
    np.testing.assert_array_equal(got["c"], c - d)
    np.testing.assert_allclose(got["z"], z.sum(0) + c, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["more"]["k"], a)
    np.testing.assert_array_equal(got["more"]["y"], b)


def test_the_results_annotation_is_checked():
    @mw.program(MESH)
    def right(x: ROWS) -> (ROWS, {"sum": mw.Unreduced}):
        return 2 * x, {"sum": x.sum()}

    assert layouts(right, random(6))["result[0]"] == "Sliced(0) over data"

    @mw.program(MESH)
    def wrong(x: ROWS) -> (ROWS, mw.Replicated):
        return 2 * x, {"sum": x.sum()}

    with pytest.raises(mw.LayoutError) as caught:
        wrong.partition(random(6))
    assert str(caught.value) == (
        "wrong has results that do not lie as its annotation says: result[1]['sum'] is "
        'Unreduced("sum") over data, not Replicated\n'
        "The layouts of results follow from those of arguments; an annotation of the result is "
        "checked.\n"
        "Change the layout with a verb, or the annotation."
    )


def test_updates_tie_arguments_and_results():
    @mw.program(MESH)
    def step(weights, state: ROWS, gradient: mw.Local, untouched):
        mean = mw.reduce_scatter(gradient) / 4
        state = mw.update(state, State(0.9 * state.mean + mean, state.square + mean**2))
        weights = mw.update(weights, weights - state.mean)
        return state.square.sum(), untouched, mw.all_gather(weights), state

    def truth(weights, state, gradient, untouched):
        mean = gradient.mean(0)
        state = State(0.9 * state.mean + mean, state.square + mean**2)
        return state.square.sum(), untouched, weights - state.mean, state

    state = State(random(7), random(7, seed=1))
    args = random(7, seed=2), state, random(4, 7), random(2)
    made = step.partition(*args)
    assert made.in_paths[:3] == ("weights", "state.mean", "state.square")
    assert made.states == ((0, 2), (1, 3), (2, 4))
    terms, *got = made.simulate(*args)
    total, *want = truth(*args)
    np.testing.assert_allclose(np.asarray(terms).sum(), total, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_replicated_argument_may_be_updated_in_slices():
    @mw.program(MESH)
    def step(x, y: ROWS):
        return mw.update(x, x * y)

    made = step.partition(random(7), random(7, seed=1))
    assert made.states == ((0, 0),)
    assert (made.in_shardings[0].spec, made.out_shardings.spec) == (P(), P("data"))
    got = made.simulate(random(7), random(7, seed=1))
    np.testing.assert_allclose(got, random(7) * random(7, seed=1), rtol=1e-6)


def test_gradients_inside_of_a_program_are_terms():
    """The batch in slices, the loss a mean: what jax.grad makes is to be added up."""

    def loss(weights, batch):
        hidden = jnp.tanh(batch["x"] @ weights["a"])
        return jnp.mean((hidden @ weights["b"] - batch["y"]) ** 2)

    @mw.program(MESH)
    def step(weights, batch: ROWS):
        terms, gradients = jax.value_and_grad(loss)(weights, batch)
        total = mw.all_reduce(terms)
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, mw.all_reduce(gradients))
        return total, mw.update(weights, moved)

    weights = {"a": random(3, 5), "b": random(5, 2)}
    batch = {"x": random(10, 3, seed=1), "y": random(10, 2, seed=2)}
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    total, moved = step.partition(weights, batch).simulate(weights, batch)
    np.testing.assert_allclose(total, value, rtol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(
            moved[name], weight - 0.1 * gradients[name], rtol=1e-5, atol=1e-6
        )


def test_a_partial_is_a_program_too():
    def scaled(factor, x: ROWS):
        return x * factor

    program = mw.program(MESH)(functools.partial(scaled, 3))
    assert program.name == "scaled"
    np.testing.assert_array_equal(program.partition(random(5)).simulate(random(5)), 3 * random(5))
    np.testing.assert_array_equal(on_one_device(scaled)(3, random(5)), 3 * random(5))


def test_types_alone_make_a_program():
    @mw.program(mesh_of(data=2, model=2), axes="data")
    def program(x: mw.Local):
        return mw.all_reduce(x)

    made = program.partition(jax.ShapeDtypeStruct((2, 5), jnp.bfloat16))
    assert [t.str_short() for t in made.per_device.out_types] == ["bfloat16[5]"]
    assert made.wire_bytes == 10
    assert program.partition(jax.ShapeDtypeStruct((2, 5), jnp.bfloat16)) is made
    assert program.__name__ == "program" and program.mesh.axis_names == ("data", "model")


def test_specs_print_as_they_are_written():
    said = mw.Sliced(0, "data") & mw.Local("model") & mw.Unreduced("max")
    assert repr(said) == "Sliced(0, 'data') & Local('model') & Unreduced('max')"
    assert repr(mw.Replicated() & mw.Local) == "Local"
    assert repr(mw.Replicated() & mw.Replicated) == "Replicated"
    assert said == mw.Sliced(0, "data") & (mw.Local("model") & mw.Unreduced("max"))
