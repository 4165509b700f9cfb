"""Calls of `mw.jit` are calls of `jax.jit`: every argument of its signature, every kind of call."""

import collections
import concurrent.futures
import dataclasses
import functools
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import X, assert_same_outcome, mesh_of, named, put

Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object = None
    scale: int = dataclasses.field(metadata={"static": True}, default=3)


class Unshown:
    def __call__(self):
        pass

    def __repr__(self):
        raise ValueError("no text")


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def in_mesh(code, *sizes):
    """Code in the context of a mesh."""

    def inside(jit):
        with jax.set_mesh(mesh_of(*(sizes or (4, 2)))):
            return code(jit)

    return inside


def in_block(code):
    """Code in the older context of a mesh."""

    def inside(jit):
        with mesh_of(4, 2):
            return code(jit)

    return inside


def constrained(spec):
    return lambda x: lax.with_sharding_constraint(x + 1, spec)


def on_device(jit, **options):
    with pytest.warns(DeprecationWarning, match="backend and device argument"):
        return jit(lambda x: x * 2, **options)


def disabled(jit, *args):
    with jax.disable_jit():
        return jit(lambda x: 1 if x.sum() > 0 else 2)(*args)


def _scaled_by(step, *factors):
    x = put("x", x=np.arange(8))
    return [step(x, n) for n in factors]


def _added(jit, held):
    return jit(lambda x: x + held)(put("x"))


def _checking_leaks(jit):
    def call(x):
        with jax.checking_leaks():
            return jit(lambda x: x + 1)(x)

    return call


def by_default_device(jit):
    step = jit(lambda x: x + 1)
    with jax.default_device(jax.devices()[3]):
        there = step(X)
    return there, step(X)


S, ROWS = named("x", "y"), named("x")

WITHOUT_A_MESH = {
    "an array": lambda jit: jit(lambda x: x + 1)(X),
    "numbers": lambda jit: jit(lambda x, y: x * y)(2, 3.5),
    "a number of NumPy": lambda jit: jit(lambda x, y: x * y)(np.float32(2), True),
    "trees": lambda jit: jit(lambda d: {"a": d["a"], "b": [d["b"], None]})({"a": 1, "b": X}),
    "no arguments": lambda jit: jit(lambda: (jnp.ones(4), 3))(),
    "no results": lambda jit: jit(lambda x: None)(X),
    "results of another call": lambda jit: jit(lambda x: x + 1)(jit(lambda x: x * 2)(X)),
    "a committed array": lambda jit: jit(lambda x, y: x + y)(
        jax.device_put(X, jax.devices()[1]), X
    ),
    "a default device": by_default_device,
    "a mesh of one device": lambda jit: jit(lambda x: x + 1)(put("x", mesh=mesh_of(1))),
    "shardings over one device": lambda jit: jit(
        lambda x: x + 1,
        in_shardings=named("x", mesh=mesh_of(1)),
        out_shardings=named(mesh=mesh_of(1)),
    )(X),
    "a sharding of one device": lambda jit: jit(
        lambda x: x + 1, in_shardings=SingleDeviceSharding(jax.devices()[1])
    )(X),
    "results on one device": lambda jit: jit(
        lambda x: x + 1, out_shardings=SingleDeviceSharding(jax.devices()[1])
    )(X),
    "a device": lambda jit: on_device(jit, device=jax.devices()[2])(X),
    "a device, of a sharded array": lambda jit: on_device(jit, device=jax.devices()[2])(put("x")),
    "a backend": lambda jit: on_device(jit, backend="cpu")(X),
    "a function of a function": lambda jit: jit(lambda x: jit(lambda y: y * 2)(x) + 1)(X),
    "a gradient": lambda jit: jax.grad(jit(lambda x: (x**2).sum()))(X),
    "jit disabled": lambda jit: disabled(jit, X),
    "older mesh context": in_block(lambda jit: jit(lambda x: x + 1)(X)),
    "a token": lambda jit: jit(lambda x, t: x)(X, lax.create_token(None)),
}

OVER_A_MESH = {
    "an array that lies there": lambda jit: jit(lambda x: x + 1)(put("x", "y")),
    "shardings": lambda jit: jit(lambda x: x + 1, in_shardings=S, out_shardings=ROWS)(X),
    "shardings by context": in_mesh(
        lambda jit: jit(lambda x: x + 1, in_shardings=P("x", "y"), out_shardings=P("y"))(X)
    ),
    "context alone": in_mesh(lambda jit: jit(lambda x: x + 1)(X)),
    "context and no arguments": in_mesh(lambda jit: jit(lambda: jnp.ones(8))()),
    "a constraint": lambda jit: jit(constrained(ROWS))(X),
    "a constraint in older context": in_block(lambda jit: jit(constrained(P("x")))(X)),
    "no arguments, placed results": lambda jit: jit(lambda: jnp.ones(8), out_shardings=ROWS)(),
    "results placed in part": lambda jit: jit(
        lambda: (jnp.zeros(8), jnp.ones(8)), out_shardings=(None, ROWS)
    )(),
    "shardings given in part": lambda jit: jit(
        lambda x, y: (x * 2, y + 1), in_shardings=(S, None), out_shardings=(None, ROWS)
    )(put("x", "y"), X),
    "a list of shardings": lambda jit: jit(lambda x, y: x + y, in_shardings=[ROWS, None])(X, X),
    "one sharding for a tree": lambda jit: jit(lambda d: d, in_shardings=ROWS)({"a": X, "b": [X]}),
    "a prefix of trees": lambda jit: jit(
        lambda p, q: Pair(q, p), in_shardings=((ROWS, None), None), out_shardings=(None, ROWS)
    )((X, X), X),
    "None in trees": lambda jit: jit(lambda p: (p.right, p.left, None))(Pair(put("x"), None)),
    "a dataclass": lambda jit: (
        jit(
            lambda d: dataclasses.replace(d, kernel=d.kernel * d.scale),
            in_shardings=Layer(ROWS, None),
        )(Layer(X)).kernel
    ),
    "an ordered dict": lambda jit: list(
        jit(lambda d: d)(collections.OrderedDict(z=put("x"), a=1)).values()
    ),
    "keywords": lambda jit: jit(lambda x, *, y, z=2: x * y + z)(put("x"), y=X),
    "keywords in another order": lambda jit: jit(lambda **k: k["a"] - k["b"])(b=X, a=put("x")),
    "variadic": lambda jit: jit(lambda *xs: sum(xs))(put("x"), X, 1.0),
    "static by number": lambda jit: jit(lambda x, n: x * n, static_argnums=1)(put("x"), 3),
    "static from the end": lambda jit: jit(lambda x, n: x * n, static_argnums=-1)(put("x"), 3),
    "static by name": lambda jit: jit(lambda x, n: x * n, static_argnames=["n"])(put("x"), n=3),
    "static, by number, given by name": lambda jit: jit(lambda x, n: x * n, static_argnums=1)(
        put("x"), n=3
    ),
    "static values that are equal, of other types": lambda jit: _scaled_by(
        jit(lambda x, n: x * n, static_argnums=1), 1, True, 1.0, 1
    ),
    "static with a default": lambda jit: jit(lambda x, n=3: x * n, static_argnums=1)(put("x")),
    "a static spec": lambda jit: jit(
        lambda shape, spec: lax.with_sharding_constraint(
            jnp.zeros(shape), NamedSharding(mesh_of(4, 2), spec)
        ),
        static_argnums=(0, 1),
    )((8, 8), P("y")),
    "shardings besides static ones": lambda jit: jit(
        lambda n, x: x * n, static_argnums=0, in_shardings=(ROWS,)
    )(2, X),
    "keep_unused": lambda jit: jit(lambda x, y: x, keep_unused=True)(put("x"), X),
    "inline": lambda jit: jit(lambda x: x + 1, inline=True)(put("x")),
    "compiler options": lambda jit: jit(
        lambda x: x + 1, compiler_options={"xla_embed_ir_in_executable": True}
    )(put("x")),
    "a callable": lambda jit: jit(Scaler(3))(put("x")),
    "a partial": lambda jit: jit(functools.partial(jnp.multiply, 2.0))(put("x")),
    "a bound method": lambda jit: jit(Scaler(2).__call__)(put("x")),
    "what is passed through": lambda jit: jit(lambda x: x)(put("x", "y")),
    "constants beside": lambda jit: jit(lambda x: (x, 3, jnp.ones(4)))(put("x"))[0],
    "a closed-over array": lambda jit: _added(jit, put("x")),
    "a subset of devices": lambda jit: jit(lambda x: x + 1)(put("x", mesh=mesh_of(2, 2, first=4))),
    "one function, two meshes": lambda jit: [
        jit(lambda x: x + 1)(put("x", mesh=mesh_of(2, first=first))) for first in (0, 2, 0)
    ],
    "a function of a function": lambda jit: jit(
        lambda x: jit(lambda y: y * 2, in_shardings=ROWS)(x) + 1, in_shardings=ROWS
    )(X),
    "a function that closes over a traced value": lambda jit: jit(
        lambda x: jit(lambda y: y + x)(x * 2)
    )(put("x")),
    "jit disabled": lambda jit: disabled(jit, put("x")),
    "leaks looked for": lambda jit: _checking_leaks(jit)(put("x")),
}


@pytest.mark.parametrize("code", WITHOUT_A_MESH.values(), ids=WITHOUT_A_MESH)
def test_without_a_mesh_a_call_is_jaxs(code):
    assert_same_outcome(code)


@pytest.mark.parametrize("code", OVER_A_MESH.values(), ids=OVER_A_MESH)
def test_over_a_mesh_results_and_places_are_jaxs(code):
    assert_same_outcome(code)


def is_donated(jit, function, *args, **options):
    jit(function, **options)(*args)
    return [leaf.is_deleted() for leaf in jax.tree.leaves(args)]


DONATED = {
    "by number": lambda jit: is_donated(
        jit, lambda x, y: x + y, put("x"), put("x"), donate_argnums=0
    ),
    "by name": lambda jit: is_donated(
        jit, lambda x, y: x + y, put("x"), put("x"), donate_argnames="y"
    ),
    "a tree": lambda jit: is_donated(
        jit,
        lambda s, x: jax.tree.map(lambda a: a + x, s),
        {"a": put("x"), "b": put("x")},
        put("x"),
        donate_argnums=0,
    ),
    "what no result can use": lambda jit: is_donated(
        jit, lambda x: x @ x.T, put("x", x=X[:, :2]), donate_argnums=0
    ),
    "on one device": lambda jit: is_donated(
        jit, lambda x: x + 1, jnp.copy(jnp.asarray(X)), donate_argnums=0
    ),
    "nothing where NaNs are looked for": lambda jit: _debugging(
        lambda: is_donated(jit, lambda x: x + 1, put("x"), donate_argnums=0)
    ),
}


def _debugging(code):
    with jax.debug_nans(True):
        return code()


@pytest.mark.parametrize("code", DONATED.values(), ids=DONATED)
def test_the_same_buffers_are_donated(code):
    assert_same_outcome(code)


def step(x: jax.Array, n: int = 2) -> jax.Array:
    """Twice."""
    return x * n


def test_a_jitted_function_looks_like_its_function():
    ours, theirs = mw.jit(step), jax.jit(step)
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__wrapped__"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert isinstance(ours, jax.stages.Wrapped)
    assert mw.jit(functools.partial(step, n=3)).__name__ == "step"
    step.some_value = 4
    assert mw.jit(step).some_value == 4
    assert repr(mw.jit(Unshown())) == "<mw.jit>"
    outer = functools.wraps(ours)(lambda x: ours(x) + 1)
    assert not hasattr(outer, "lower")


def test_decorators_and_methods():
    class Model:
        factor = 3

        @functools.partial(mw.jit, static_argnums=0)
        def scaled(self, x):
            return x * self.factor

        @mw.jit(static_argnames=["self", "n"])
        def raised(self, x, n):
            return x**n

    model, x = Model(), put("x")
    np.testing.assert_array_equal(model.scaled(x), X * 3)
    np.testing.assert_array_equal(model.raised(x, n=2), X**2)
    assert model.scaled.__self__ is model
    assert model.scaled.__func__ is Model.scaled
    assert model.scaled.__name__ == "scaled"
    lowered = Model.scaled.lower(model, x)
    np.testing.assert_array_equal(lowered.compile()(x), X * 3)
    np.testing.assert_array_equal(model.scaled.partition(x)(x), X * 3)


@pytest.mark.parametrize("place", [(), ("x",)], ids=["one device", "a mesh"])
def test_caches(place):
    traced = []

    def function(x):
        traced.append(x)
        return x + 1

    x = put(*place) if place else X
    first = mw.jit(function)
    assert first._cache_size() == 0
    for _ in range(2):
        first(x)
    assert first._cache_size() == 1
    mw.jit(function)(x)
    mw.jit(function, keep_unused=True)(x)
    assert len(traced) == 1  # as with jax.jit, another jit of it traces nothing anew
    first(X[:4])
    assert first._cache_size() == 2
    first.clear_cache()
    assert first._cache_size() == 0
    first(x)
    assert len(traced) == 3
    jax.clear_caches()
    first(x)
    assert len(traced) == 4


def test_nothing_is_kept_of_a_function_that_is_gone():
    def function(x):
        return x + 1

    jitted = mw.jit(function)
    jitted(put("x"))
    gone = weakref.ref(function), weakref.ref(jitted)
    del jitted
    assert gone[1]() is None
    del function
    assert gone[0]() is None  # nothing is left to the garbage collector


def test_threads_call_alike():
    calls = 12
    one = mw.jit(lambda x, n: x @ x.T + n, static_argnums=1)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        args = [put("x"), *[put("x")] * (calls - 1)]
        found = list(pool.map(lambda i: one(args[i], i % 3), range(calls)))
    for i, result in enumerate(found):
        np.testing.assert_allclose(result, X @ X.T + i % 3, rtol=1e-5)


def test_what_jax_takes_and_meshwise_does_not_is_left_to_xla_with_a_warning():
    both = mw.jit(lambda x, t: x + 1)
    token = lax.create_token(None)
    with pytest.warns(mw.FallbackWarning, match=r"args\[1\] is a Token") as caught:
        result = both(put("x"), token)
    np.testing.assert_array_equal(result, X + 1)
    assert [warning.filename for warning in caught] == [__file__]  # the line that calls
    np.testing.assert_array_equal(both(put("x"), token), X + 1)  # said once
    with pytest.raises(mw.UnplannedError, match="is a Token"):
        mw.jit(lambda x, t: x + 1, mesh=mesh_of(4, 2))(put("x"), token)


def test_what_was_donated_is_an_error_wherever_it_is_read():
    """With jax 0.10 a process of several devices ends where `jax.jit` donated it."""
    x = put("x")
    mw.jit(lambda x: x + 1, donate_argnums=0)(x)
    for read in (jax.jit(jnp.sin), mw.jit(jnp.sin), mw.jit(jnp.sin, donate_argnums=0)):
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            read(x)
