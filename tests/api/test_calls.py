"""What may be passed to and returned by a function under `mw.jit`, as under `jax.jit`."""

import collections
import dataclasses
import functools
import gc
import inspect
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)

Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object = None
    scale: int = dataclasses.field(metadata={"static": True}, default=3)


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, value, label):
        self.value, self.label = value, label

    def tree_flatten(self):
        return (self.value,), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


def specs(tree):
    return jax.tree.map(lambda a: a.sharding.spec, tree)


def assert_trees_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_trees_of_every_kind(mesh2x4):
    def fn(table, pair, layer, box, nothing):
        return {
            "pair": Pair(pair.right, None),
            "layer": Layer(layer.kernel * layer.scale, layer.bias, 5),
            "box": Box([box.value, table["x"]], box.label + "!"),
            "nothing": (nothing, ()),
            "order": collections.OrderedDict(b=table["x"] + 1, a=pair.left),
        }

    args = ({"x": X, "unused": None}, Pair(X, W), Layer(X), Box(W, "box"), None)
    step = mw.jit(
        fn,
        mesh=mesh2x4,
        in_shardings=({"x": P("x"), "unused": None}, Pair(P("x"), P()), P("y"), None, None),
        out_shardings={
            "pair": None,
            "layer": Layer(P("y"), None, 5),
            "box": P("x"),
            "nothing": None,
            "order": P(None, "y"),
        },
    )
    for _ in range(2):
        got = step(*args)
        assert_trees_equal(got, fn(*args))
    assert got["layer"].scale == 5
    assert got["box"].label == "box!"
    assert specs(got["layer"].kernel) == P("y")
    assert specs(got["box"].value) == [P("x"), P("x")]
    assert specs(got["order"]) == collections.OrderedDict(b=P(None, "y"), a=P(None, "y"))


def test_static_parts_of_trees_select_a_program(mesh8):
    traced = []

    @mw.jit(mesh=mesh8)
    def fn(box):
        traced.append(box.label)
        return box.value * len(box.label)

    for label in ("a", "bb", "a", "bb"):
        np.testing.assert_array_equal(fn(Box(X, label)), X * len(label))
    assert traced == ["a", "bb"]


def test_keyword_arguments_and_defaults(mesh2x4):
    def fn(x, w, *, shift=1.0, extra=None):
        return x @ w + shift + (0 if extra is None else extra)

    step = mw.jit(fn, mesh=mesh2x4, in_shardings=P("x"))
    for args, kwargs in [
        ((X, W), {}),
        ((X, W), {"shift": 2.0}),
        ((X,), {"w": W}),
        ((X, W), {"extra": np.float32(3)}),
        ((X, W), {"shift": 2.0, "extra": np.float32(3)}),
        ((X, W), {"extra": np.float32(3), "shift": 2.0}),
    ]:
        # Sums of numbers near 10 that nearly cancel: how they are rounded is the machine's matter.
        found, wanted = step(*args, **kwargs), fn(*args, **kwargs)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    program = step.partition(X, w=W)
    args, kwargs = program.in_shardings
    assert [s.spec for s in args] == [P("x")]
    assert list(kwargs) == ["w"]
    np.testing.assert_allclose(program(X, w=W), fn(X, W), rtol=1e-5)
    without = mw.jit(fn, mesh=mesh2x4)  # hints of positions say nothing of keywords alone
    np.testing.assert_allclose(without(w=W, x=X), fn(X, W), rtol=1e-5, atol=1e-5)


STATICS = {
    "by position": {"static_argnums": 1},
    "from the end": {"static_argnums": (-1,)},
    "by name": {"static_argnames": "times"},
    "by both": {"static_argnums": (1,), "static_argnames": ["times"]},
}


@pytest.mark.parametrize("statics", STATICS.values(), ids=STATICS)
def test_static_arguments(mesh8, statics):
    traced = []

    def fn(x, times):
        assert isinstance(times, int)
        traced.append(times)
        return x * times if times > 2 else x + times

    step = mw.jit(fn, mesh=mesh8, in_shardings=P(None, "x"), **statics)
    for times in (3, 1, 3, 1):
        np.testing.assert_array_equal(step(X, times), X * 3 if times == 3 else X + 1)
        if statics != STATICS["from the end"]:  # the last of one is not the last of two
            named = step(X, times=times)
            np.testing.assert_array_equal(named, X * 3 if times == 3 else X + 1)
    assert traced in ([3, 3, 1, 1], [3, 1])  # by keyword is another structure


def test_static_values_of_any_hashable_kind(mesh8):
    step = mw.jit(lambda f, x, mode: f(x) if mode else x, mesh=mesh8, static_argnums=(0, 2))
    np.testing.assert_array_equal(step(jnp.negative, X, ("a", 1)), -X)
    np.testing.assert_array_equal(step(jnp.negative, X, ()), X)
    np.testing.assert_array_equal(step(jnp.abs, -X, "on"), X)
    assert step.partition(jnp.negative, X, "on").in_tree == jax.tree.structure(((0,), {}))


def test_shardings_skip_static_arguments(mesh2x4):
    step = mw.jit(
        lambda n, x, w: x * n @ w,
        mesh=mesh2x4,
        static_argnums=0,
        in_shardings=(P("x"), P(None, "y")),
        out_shardings=P("x", "y"),
    )
    np.testing.assert_allclose(step(2, X, W), X * 2 @ W, rtol=1e-5)
    assert specs(step(2, X, W)) == P("x", "y")


def test_what_is_wrong_with_static_arguments_is_said_as_jax_says_it(mesh8):
    for wrap in (jax.jit, functools.partial(mw.jit, mesh=mesh8)):
        with pytest.raises(ValueError, match=r"static_argnums=\(5,\), but only accepts 2"):
            wrap(lambda x, n: x, static_argnums=5)
        with pytest.raises(ValueError, match=r"invalid argnames {'m'} in static_argnames"):
            wrap(lambda x, n: x, static_argnames="m")
        with pytest.raises(ValueError, match="cannot intersect"):
            wrap(lambda x, n: x, static_argnames="n", donate_argnames="n")
        with pytest.raises(TypeError, match="Expected a callable value, got 3"):
            wrap(3)
        with pytest.raises(ValueError, match="Non-hashable static arguments are not supported"):
            wrap(lambda x, n: x, static_argnums=1)(X, [1])
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            wrap(lambda x, n: x)(X)
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            wrap(lambda x: x)(X, y=X)


def test_as_a_decorator(mesh8):
    @mw.jit
    def bare(x):
        """Twice."""
        return x * 2

    @mw.jit(mesh=mesh8, in_shardings=P(None, "x"))
    def with_arguments(x, /, n: int = 2):
        return x * n

    @functools.partial(mw.jit, mesh=mesh8, static_argnames="n")
    def through_partial(x, n):
        return x * n

    with jax.set_mesh(mesh8):
        np.testing.assert_array_equal(bare(X), X * 2)
    np.testing.assert_array_equal(with_arguments(X), X * 2)
    np.testing.assert_array_equal(through_partial(X, n=2), X * 2)
    assert bare.__name__ == "bare"
    assert bare.__doc__ == "Twice."
    assert bare.__module__ == __name__
    assert bare.__wrapped__(3) == 6
    assert str(inspect.signature(with_arguments)) == "(x, /, n: int = 2)"
    assert "bare" in repr(bare)


class Model:
    def __init__(self, factor):
        self.factor = factor

    @functools.partial(mw.jit, static_argnums=0)
    def scaled(self, x, shift=0):
        """Scale."""
        return x * self.factor + shift

    @staticmethod
    @mw.jit
    def doubled(x):
        return x * 2

    @classmethod
    @functools.partial(mw.jit, static_argnums=0)
    def named(cls, x):
        return x + len(cls.__name__)


def test_methods(mesh8):
    model = Model(3)
    with jax.set_mesh(mesh8):
        np.testing.assert_array_equal(model.scaled(X), X * 3)
        np.testing.assert_array_equal(model.scaled(X, shift=np.float32(1)), X * 3 + 1)
        np.testing.assert_array_equal(Model.scaled(Model(2), X), X * 2)
        np.testing.assert_array_equal(model.doubled(X), X * 2)
        np.testing.assert_array_equal(Model.named(X), X + 5)
        program = model.scaled.partition(X)
        np.testing.assert_array_equal(program(X), X * 3)
        bound = mw.jit(types.MethodType(lambda self, x: x * self.factor, model))
        np.testing.assert_array_equal(bound(X), X * 3)


def test_callables_of_other_kinds(mesh8):
    class Adder:
        def __call__(self, x):
            return x + 1

    for fn, wanted in [
        (functools.partial(jnp.multiply, 2.0), X * 2),
        (functools.partial(lambda x, *, n: x * n, n=2.0), X * 2),
        (Adder(), X + 1),
        (jnp.sin, jnp.sin(X)),
        (jax.jit(lambda x: x * 2), X * 2),
        (lambda *xs, **_: -xs[0], -X),
    ]:
        np.testing.assert_allclose(mw.jit(fn, mesh=mesh8)(X), wanted, rtol=1e-6)
    assert mw.jit(functools.partial(Model), mesh=mesh8).name == "Model"


def test_a_jit_of_a_jit_has_its_own_options(mesh2x4):
    inner = mw.jit(lambda x: x * 2, mesh=mesh2x4, in_shardings=P("x"), out_shardings=P("x"))
    outer = mw.jit(inner, mesh=mesh2x4, out_shardings=P("y"))
    assert specs(inner(X)) == P("x")
    assert specs(outer(X)) == P("y")
    assert outer.partition(X).in_shardings[0].spec == P("x")


def test_a_function_is_forgotten_with_its_jit(mesh8):
    def fn(x):
        return x + 1

    step = mw.jit(fn, mesh=mesh8)
    step(X)
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


def test_no_arguments_and_constant_results(mesh8):
    step = mw.jit(
        lambda: (1, 2.0, jnp.ones(8), np.zeros(3), None),
        mesh=mesh8,
        out_shardings=(None, None, P("x"), None, None),
    )
    for _ in range(2):
        one, two, ones, zeros, nothing = step()
        assert (one, two, nothing) == (1, 2.0, None)
        assert one.weak_type
        assert specs(ones) == P("x")
        np.testing.assert_array_equal(zeros, np.zeros(3))
    assert mw.jit(lambda: None, mesh=mesh8)() is None
    assert mw.jit(lambda x: (), mesh=mesh8)(X) == ()
    assert mw.jit(lambda x: 5, mesh=mesh8)(X) == 5


def test_an_argument_returned_unchanged(mesh2x4):
    step = mw.jit(lambda x: x, mesh=mesh2x4, in_shardings=P("x"))
    placed = jax.device_put(X, NamedSharding(mesh2x4, P("x")))
    for arg in (X, placed, placed):
        out = step(arg)
        np.testing.assert_array_equal(out, X)
        assert specs(out) == P("x")
    assert out is not placed
    assert not placed.is_deleted()


def test_one_value_returned_with_two_shardings(mesh2x4):
    def fn(x):
        y = x * 2
        return y, y, x, x, {"again": y}

    step = mw.jit(
        fn,
        mesh=mesh2x4,
        in_shardings=P("x"),
        out_shardings=(P("x"), P(None, "y"), P(), P("y", "x"), {"again": P(None, ("x", "y"))}),
    )
    got = step(X)
    assert_trees_equal(got, fn(X))
    assert specs(got) == (
        P("x"),
        P(None, "y"),
        P(),
        P("y", "x"),
        {"again": P(None, ("x", "y"))},
    )


def test_one_array_passed_twice(mesh2x4):
    step = mw.jit(lambda a, b: a - 2 * b, mesh=mesh2x4, in_shardings=(P("x"), None))
    placed = jax.device_put(X, NamedSharding(mesh2x4, P("x")))
    np.testing.assert_array_equal(step(placed, placed), -X)
    np.testing.assert_array_equal(step(X, X), -X)
