"""Primitives of libraries are partitioned as what they are written as, where they are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.rules.registry import REGISTRY

MESH = AbstractMesh((8,), ("x",))
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def primitive(name, impl, written=None):
    made = Primitive(name)
    made.def_impl(impl)
    made.def_abstract_eval(lambda x, **params: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(made, mlir.lower_fun(written or impl, multiple_results=False))
    return made


def scaled(x, *, by):
    return jnp.tanh(x) * by


def partitioned(function):
    step = mw.jit(function, mesh=MESH, in_shardings=P("x"), out_shardings=P("x"))
    return step.partition(X)


scaled_p = primitive("scaled", scaled)
twice_p = primitive("scaled_twice", lambda x: scaled_p.bind(scaled_p.bind(x, by=2.0), by=3.0))


class Tag(Primitive):
    """With its function as a method, as layers are told to an optimiser of second order."""

    def impl(self, y, x):
        return y


tag_p = Tag("tag")
tag_p.def_abstract_eval(lambda y, x: y)
mlir.register_lowering(tag_p, lambda ctx, y, x: [y])


def of_two(x):
    return jnp.tanh(x), x * 2


# As JAX's page on primitives has it: what is called applies the primitive, which is lowered.
lowered_p, pair_p = Primitive("lowered"), Primitive("pair")
pair_p.multiple_results = True
for own, function, results in (
    (lowered_p, lambda x: jnp.cumsum(x, 1), lambda x: jax.core.ShapedArray(x.shape, x.dtype)),
    (pair_p, of_two, lambda x: [jax.core.ShapedArray(x.shape, x.dtype)] * 2),
):
    own.def_impl(partial(dispatch.apply_primitive, own))
    own.def_abstract_eval(results)
    mlir.register_lowering(own, mlir.lower_fun(function, own.multiple_results))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: scaled_p.bind(x, by=2.0),
        lambda x: tag_p.bind(jnp.sin(x), x) + 1,
        lowered_p.bind,
        lambda x: jnp.stack(pair_p.bind(x), 1).sum(1),
        twice_p.bind,
        lambda x: jax.lax.fori_loop(0, 3, lambda _, x: scaled_p.bind(x, by=2.0), x),
        lambda x: jax.jit(lambda x: jax.lax.cond(x[0, 0] > 9, jnp.sin, twice_p.bind, x))(x * 1),
    ],
    ids=[
        "alone",
        "a method",
        "lowered",
        "lowered, of two",
        "of another",
        "in a loop",
        "in a branch",
    ],
)
def test_nothing_is_whole(function):
    program = partitioned(function)
    assert program.per_device.whole == ()
    assert program.wire_bytes <= 8  # of a branch the number that decides
    np.testing.assert_allclose(program.simulate(X), jax.jit(function)(X), rtol=1e-6)


def test_what_is_called_with_numbers_may_be_lowered_from_a_function():
    either_p = primitive("either", lambda x: np.cos(np.asarray(x)), lambda x: jnp.cos(x) * 1)
    assert partitioned(either_p.bind).per_device.whole == ()


def test_what_cannot_be_traced_is_whole():
    numbers_p = primitive("of_numbers", lambda x: np.sort(np.asarray(x), 0), jnp.cos)
    itself_p = primitive("of_itself", lambda x: jnp.sin(itself_p.bind(x)), jnp.cos)
    other_p = primitive("of_other_types", lambda x: x.sum(0), jnp.cos)
    for one in (numbers_p, itself_p, other_p):
        program = partitioned(one.bind)
        assert [text.split(" at ")[0] for text in program.per_device.whole] == [one.name]
        np.testing.assert_allclose(program.simulate(X), np.cos(X), rtol=1e-6)


def test_a_kernel_of_one_platform_is_whole():
    kernel_p = primitive("kernel", jnp.tanh)
    mlir.register_lowering(kernel_p, mlir.lower_fun(jnp.tanh, multiple_results=False), "cuda")
    assert [text.split(" at ")[0] for text in partitioned(kernel_p.bind).per_device.whole] == [
        "kernel"
    ]


def test_a_rule_comes_first(monkeypatch):
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))
    ruled_p = primitive("ruled", jnp.tanh)
    mw.register_rule(ruled_p, "i j -> i j")
    program = partitioned(ruled_p.bind)
    assert "ruled" in {eqn.primitive.name for eqn in program.jaxpr.eqns}


@jax.tree_util.register_pytree_node_class
class Logits:
    """Has its numbers as a leaf only where they are one, as distributions of libraries do."""

    def __init__(self, numbers):
        self.numbers = numbers

    def tree_flatten(self):
        one = self.numbers
        if isinstance(one, jax.Array) or type(one) is object:
            return (one,), None
        return (None,), one

    @classmethod
    def tree_unflatten(cls, meta, leaves):
        return cls(leaves[0] if meta is None else meta)


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}, {"out_shardings": P("x")}])
def test_classes_that_look_at_their_leaves(options, mesh8):
    step = mw.jit(lambda d: Logits(2 * d.numbers), mesh=mesh8, in_shardings=P("x"), **options)
    found = step(Logits(jnp.asarray(X)))
    np.testing.assert_allclose(found.numbers, 2 * X)


class Rows:
    """Makes an array of its leaf, and counts it, whenever one is made."""

    def __init__(self, numbers):
        self.numbers = jnp.asarray(numbers)
        self.count = self.numbers.shape[0]


jax.tree_util.register_pytree_node(
    Rows, lambda r: ((r.numbers,), None), lambda _, parts: Rows(*parts)
)


def twice(rows, *, beside):
    return Rows(2 * rows.numbers * rows.count), {"beside": beside.numbers}


CALLS_OF_ROWS = {
    "call": lambda jit: jit(twice)(Rows(X), beside=Rows(X)),
    "donated": lambda jit: jit(twice, donate_argnames="beside")(Rows(X), beside=Rows(X)),
    "jit": lambda jit: jax.jit(jit(twice))(Rows(X), beside=Rows(X)),
    "grad": lambda jit: jax.grad(lambda x: jit(twice)(Rows(x), beside=Rows(x))[0].numbers.sum())(X),
}


@pytest.mark.parametrize("call", CALLS_OF_ROWS.values(), ids=CALLS_OF_ROWS)
def test_classes_that_make_arrays_of_their_leaves(call, mesh8):
    found, wanted = call(partial(mw.jit, mesh=mesh8)), call(jax.jit)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want)


def test_what_is_said_of_classes_that_make_arrays_of_their_leaves(mesh8):
    """Their parts have numbers, as for JAX."""
    shardings = {"in_shardings": (P("x"),), "out_shardings": (None, {"beside": P("x")})}
    program = mw.jit(twice, mesh=mesh8, **shardings).partition(Rows(X), beside=Rows(X))
    assert program.in_paths == ("args[0][<flat index 0>]", "kwargs['beside'][<flat index 0>]")
    assert program.out_paths == ("result[0][<flat index 0>]", "result[1]['beside']")
    assert program.placements[1][1].spec == P("x")
    with pytest.raises(mw.ArgumentError, match="than it was partitioned for"):
        program(X)
    wrong = mw.jit(twice, mesh=mesh8, out_shardings=({"a": P()}, None))
    with pytest.raises(mw.TreeError, match=r"\[0\] is a dict with 'a', result\[0\] is a Rows of 1"):
        wrong(Rows(X), beside=Rows(X))
