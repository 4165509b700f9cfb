"""Shardings of every kind that JAX takes: what is asked for, where arguments lie, what comes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import X, assert_same_outcome, mesh_of, put

DEVICES = jax.devices()[:8]
MESH, OTHER, ROW = mesh_of(4, 2), mesh_of(2, 4, names="ab"), mesh_of(4, 2, names="pq")
HALF, FLAT, ONE = mesh_of(2, 2), mesh_of(2, 1), mesh_of(1, 1)
TURNED = Mesh(np.array(DEVICES[::-1]).reshape(4, 2), ("x", "y"))
U = P.UNCONSTRAINED


def at(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


def gspmd(*spec):
    sharding = at(*spec)
    return jax._src.sharding_impls.GSPMDSharding(tuple(DEVICES), sharding._to_xla_hlo_sharding(2))


def step(x):
    return x * 2 + 1


def alone(number):
    return jax.device_put(X, DEVICES[number])


# What is said of arguments and results, and the argument.
SAID = {
    "nothing, of the host": ({}, lambda: X),
    "nothing, of one device": ({}, lambda: jnp.asarray(X)),
    "nothing, committed to a device": ({}, lambda: alone(3)),
    "nothing, on a mesh": ({}, lambda: put("x", "y")),
    "nothing, both axes of a dim": ({}, lambda: put(("y", "x"))),
    "nothing, on half of the devices": ({}, lambda: put("y", "x", mesh=HALF)),
    "nothing, on turned devices": ({}, lambda: put("x", "y", mesh=TURNED)),
    "nothing, on axes of size one": ({}, lambda: put("x", "y", mesh=FLAT)),
    "nothing, on a mesh of one device": ({}, lambda: put("x", "y", mesh=ONE)),
    "nothing, as XLA says it": ({}, lambda: jax.device_put(X, gspmd("x", "y"))),
    "the argument": ({"in_shardings": at("x")}, lambda: X),
    "the argument, uncommitted": ({"in_shardings": at("x")}, lambda: jnp.asarray(X)),
    "the argument, as it lies": ({"in_shardings": at("x")}, lambda: put("x", None)),
    "the argument, by another name": ({"in_shardings": at("x")}, lambda: put("p", mesh=ROW)),
    "the result": ({"out_shardings": at("y", None)}, lambda: X),
    "both": ({"in_shardings": at("x", None), "out_shardings": at(("x", "y"))}, lambda: X),
    "both, a prefix": ({"in_shardings": (at("x"),), "out_shardings": at(None, "y")}, lambda: X),
    "both, over two meshes": (
        {"in_shardings": at("a", mesh=OTHER), "out_shardings": at("x")},
        lambda: X,
    ),
    "both, as XLA says it": (
        {"in_shardings": gspmd("x", "y"), "out_shardings": gspmd(None, "x")},
        lambda: X,
    ),
    "a device": ({"in_shardings": SingleDeviceSharding(DEVICES[2])}, lambda: X),
    "a device, for the result": ({"out_shardings": SingleDeviceSharding(DEVICES[2])}, lambda: X),
    "a mesh of one device": ({"out_shardings": at("x", mesh=ONE)}, lambda: X),
    "no array without elements": ({"in_shardings": at("x"), "out_shardings": at()}, lambda: X[:0]),
    # Mistakes.
    "another place": ({"in_shardings": at("x")}, lambda: put("y")),
    "another place, by another name": ({"in_shardings": at("x")}, lambda: put("q", mesh=ROW)),
    "other devices": ({"in_shardings": at("x")}, lambda: put("x", mesh=HALF)),
    "one of the devices": ({"in_shardings": at("x")}, lambda: alone(0)),
    "another device": ({"in_shardings": SingleDeviceSharding(DEVICES[2])}, lambda: alone(1)),
    "devices in another order": ({"in_shardings": at("x")}, lambda: put("x", mesh=TURNED)),
    "results elsewhere": (
        {"in_shardings": at("x", mesh=HALF), "out_shardings": at("x")},
        lambda: X,
    ),
    "results on turned devices": (
        {"in_shardings": at("x"), "out_shardings": at("x", mesh=TURNED)},
        lambda: X,
    ),
    "too many dims": ({"in_shardings": at("x", "y", None)}, lambda: X),
    "too many dims of the result": ({"out_shardings": at("x", "y", None)}, lambda: X),
    "axes of no mesh": ({"in_shardings": P("x")}, lambda: X),
    "axes of no mesh, for the result": ({"out_shardings": P("x")}, lambda: X),
    "open dims": ({"in_shardings": at(U, "y")}, lambda: X),
    "open dims of the result": ({"out_shardings": at(U, "y")}, lambda: put("x")),
    "no sharding": ({"in_shardings": "x"}, lambda: X),
    "no sharding of the result": ({"out_shardings": 5}, lambda: X),
    "another tree": ({"in_shardings": (at("x"), at("x"))}, lambda: X),
    "another tree of results": ({"out_shardings": (at("x"),)}, lambda: X),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name):
    options, arg = SAID[name]
    # Of two names for one placement JAX gives the argument's back, meshwise that of in_shardings.
    is_named_twice = name == "the argument, by another name"
    turned = name == "devices in another order"
    assert_same_outcome(
        lambda jit: jit(step, **options)(arg()), places=not is_named_twice, falls_back=turned
    )


# Functions that name shardings themselves.
INSIDE = {
    "a constraint": lambda x: lax.with_sharding_constraint(x * 2, at("x", "y")),
    "a constraint amid": lambda x: lax.with_sharding_constraint(x * 2, at("x", "y")) + 1,
    "two of them": lambda x: (
        lax.with_sharding_constraint(x, at("x")) + 1,
        lax.with_sharding_constraint(x * 2, at(None, "y")) + 1,
    ),
    "an open dim": lambda x: lax.with_sharding_constraint(x * 2, at(U, "y")),
    "a device": lambda x: lax.with_sharding_constraint(x, SingleDeviceSharding(DEVICES[0])),
    "as XLA says it": lambda x: lax.with_sharding_constraint(x, gspmd("x", "y")),
    "what does not divide": lambda x: lax.with_sharding_constraint(x[:5], at("x")),
    "put on a mesh": lambda x: jax.device_put(x * 2, at("x")),
    "put on a device": lambda x: jax.device_put(x * 2, DEVICES[1]),
    "too many dims": lambda x: lax.with_sharding_constraint(x, at("x", "y", None)),
    "axes of no mesh": lambda x: lax.with_sharding_constraint(x, P("x", "y")),
    "a nested jit": lambda x: jax.jit(step, in_shardings=at("x"), out_shardings=at("y"))(x) + 1,
    "a nested jit elsewhere": lambda x: jax.jit(step, in_shardings=at("x", mesh=HALF))(x) + 1,
}


@pytest.mark.parametrize("name", INSIDE)
def test_functions_that_name_shardings(name):
    assert_same_outcome(lambda jit: jit(INSIDE[name])(X))


# JAX reads these over the arguments' mesh, XLA completes what is left.
FROM_A_MESH = (
    "a constraint",
    "two of them",
    "an open dim",
    "put on a mesh",
    "a nested jit elsewhere",
)


@pytest.mark.parametrize("name", FROM_A_MESH)
def test_the_same_with_arguments_on_the_mesh(name):
    assert_same_outcome(lambda jit: jit(INSIDE[name])(put("x")), places=name != "two of them")


def in_context(jit, run):
    with jax.set_mesh(MESH):
        return run(jit)


CONTEXT = {
    "nothing": lambda jit: jit(step)(X),
    "an argument": lambda jit: jit(step)(jax.device_put(X, P("x"))),
    "specs": lambda jit: jit(step, in_shardings=P("x"), out_shardings=P(None, "y"))(X),
    "a constraint": lambda jit: jit(lambda x: lax.with_sharding_constraint(x * 2, P("y")))(X),
    "put": lambda jit: jit(lambda x: jax.device_put(x * 2, P("x")))(X),
    "no argument": lambda jit: jit(lambda: jnp.zeros((8, 8)), out_shardings=P("x"))(),
    "another device": lambda jit: jit(step)(alone(0)),
}


@pytest.mark.parametrize("name", CONTEXT)
def test_a_mesh_in_context(name):
    assert_same_outcome(lambda jit: in_context(jit, CONTEXT[name]))


MANY = {
    "a product": (lambda x, y: x @ y, [("x", None), (None, "y")]),
    "passed on": (lambda x, y: (y, x), [("x", "y"), (("y", "x"),)]),
    "one unused": (lambda x, y: y, [("x",), ("y",)]),
    "sums, numbers, parts": (lambda x, y: (x.sum(), 1, 2.0, True, y[:5]), [("x",), ("y",)]),
    "laid otherwise": (lambda x, y: (x.T, x.reshape(-1), y[None]), [("x", "y"), ("y",)]),
}


@pytest.mark.parametrize("name", MANY)
def test_several_arguments(name):
    fn, specs = MANY[name]
    assert_same_outcome(lambda jit: jit(fn)(*[put(*s) for s in specs]))
    assert_same_outcome(lambda jit: jit(fn)(put(*specs[0]), X), places=False)
    # An argument that is not read may lie anywhere.
    for other in (
        lambda: alone(3),
        lambda: put(*specs[1], mesh=TURNED),
        lambda: put(*specs[1], mesh=HALF),
    ):
        assert_same_outcome(lambda jit, x=other: jit(fn)(put(*specs[0]), x()), falls_back=True)


def test_several_meshes_in_one_program():
    """Each hint holds over its own mesh; XLA does not say over which a result lies."""

    def fn(x, y):
        z = lax.with_sharding_constraint(x @ y, at("b", "a", mesh=OTHER))
        return lax.with_sharding_constraint(z + 1, at("q", "p", mesh=ROW)), z

    shardings = at("y", "x"), at("b", mesh=OTHER)
    args = put("x"), put(None, "b", mesh=OTHER)
    for jit in (jax.jit, mw.jit):
        outs = jit(fn, out_shardings=shardings)(*args)
        for out, wanted, sharding in zip(outs, (X @ X + 1, X @ X), shardings, strict=True):
            np.testing.assert_allclose(out, wanted, rtol=1e-5)
            assert out.sharding == sharding
    program = mw.jit(fn, out_shardings=shardings).partition(*args)
    np.testing.assert_allclose(program.simulate(*args)[0], X @ X + 1, rtol=1e-5)


EIGHT = Mesh(np.array(DEVICES), ("x",))


def heads(x):
    """Of four heads a device of eight cannot have any whole."""
    return x.reshape(4, 4, -1)


def test_results_lie_over_whole_axes():
    """Over a part of an axis no other function of JAX could read them, with the mesh in context."""

    def run(jit):
        with jax.set_mesh(EIGHT):
            made = jit(heads, in_shardings=P("x"))(X4)
            assert made.sharding.mesh == EIGHT
            rest = made + 1, made[0], jax.vmap(jnp.tanh)(made), jax.nn.softmax(made)
            return made, *rest, lax.with_sharding_constraint(made, P(None, None, "x"))

    X4 = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    assert_same_outcome(run)
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    made = mw.jit(heads, in_shardings=at("x", mesh=explicit))(X4)
    assert made.sharding == at(mesh=explicit)


def test_with_a_mesh_given_results_lie_over_parts_of_axes():
    """Then they are as completed. All programs know one such mesh, of prime sub-axes."""
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    made = mw.jit(heads, mesh=EIGHT, in_shardings=P("x"))(x)
    assert made.sharding.spec == P(("x.0", "x.1"), "x.2")
    again = mw.jit(jnp.tanh, mesh=EIGHT)
    for _ in range(3):
        wanted, made = np.tanh(made), again(made)
        np.testing.assert_allclose(made, wanted, rtol=1e-5)
        assert made.sharding.spec == P(("x.0", "x.1"), "x.2")
    assert again._cache_size() == 1


ABSTRACT = OTHER.abstract_mesh


def plainly(y):
    return y * 2


def constrained_to(mesh):
    return lambda y: lax.with_sharding_constraint(y * 2, at("a", mesh=mesh))


@pytest.mark.parametrize(
    "double",
    [plainly, constrained_to(OTHER), constrained_to(ABSTRACT)],
    ids=["an argument's", "a constraint's", "a constraint's, without devices"],
)
def test_a_result_lies_on_the_mesh_over_whose_axes_it_is(double):
    """Half of eight devices in a row is no axis of theirs, but one of another mesh."""
    x = jax.device_put(X, at("x", mesh=EIGHT))
    y = jax.device_put(X, at("a", mesh=OTHER))
    one, two = mw.jit(lambda x, y: (x + 1, double(y) + 1))(x, y)
    np.testing.assert_allclose(one, X + 1, rtol=1e-5)
    np.testing.assert_allclose(two, X * 2 + 1, rtol=1e-5)
    assert (one.sharding, two.sharding) == (at("x", mesh=EIGHT), at("a", mesh=OTHER))


def test_a_mesh_of_turned_devices_is_none_for_results():
    """Its first axis is over as many devices, but over others."""
    turned = Mesh(np.array(DEVICES).reshape(4, 2).T, ("a", "b"))
    double = constrained_to(turned)
    made = mw.jit(lambda y: double(y) + 1)(jax.device_put(X, at("x", mesh=EIGHT)))
    np.testing.assert_allclose(made, X * 2 + 1, rtol=1e-5)
    assert made.sharding.mesh == EIGHT


def test_results_are_ordinary_arrays():
    def run(jit):
        made = jit(step, out_shardings=at("x"))(X)
        part = jit(lambda x: x[:5])(put("x"))
        shards = [(s.device.id, str(s.index), s.replica_id) for s in made.addressable_shards]
        facts = (made.is_fully_replicated, made.is_fully_addressable, part.is_fully_replicated)
        return made, part, np.array(facts), made + 1, made[0], str(shards), [*made]

    assert_same_outcome(run)


def test_donated_and_deleted():
    def run(jit):
        x = put("x")
        y = jit(step, donate_argnums=0)(x)
        return y, x.is_deleted()

    assert_same_outcome(run)


def test_the_older_context():
    """Under `with mesh:` JAX runs what names no axis on one device; meshwise on the mesh."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with MESH:
            constrained = [
                jit(lambda x: lax.with_sharding_constraint(x, P("x")))(X)
                for jit in (jax.jit, mw.jit)
            ]
    assert constrained[0].sharding == constrained[1].sharding == at("x")


def test_a_loop_of_steps_keeps_its_places():
    fn = mw.jit(lambda w, x: (w - 0.1 * (x.T @ (x @ w)), (x @ w).sum()))
    w, x = put(None, "y"), put("x")
    places = set()
    for _ in range(3):
        w, _ = fn(w, x)
        places.add(w.sharding)
    assert places == {at(None, "y")}
    assert fn._cache_size() == 1
