"""`mw.reshard` inside functions: there it is a constraint, at which the value is resharded.

Under `mw.jit` and `jax.jit`, under gradients and `vmap` with and without them. What a function
closes over is an array like any other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.api.resharding import ORDER, XY, check, lay, numbers, on

ROWS, COLUMNS, WHOLE = on((2, 4), XY), on((2, 4), None, "y"), on((2, 4))
VALUE = numbers((8, 8))


def jits(where):
    """The ways to compile a function for a mesh."""
    return {"jax": jax.jit, "mw": lambda fn, **kw: mw.jit(fn, mesh=where.mesh, **kw)}


@pytest.mark.parametrize("target", [ROWS, COLUMNS, WHOLE], ids=["rows", "columns", "whole"])
@pytest.mark.parametrize("way", ["jax", "mw"])
def test_the_value_is_where_it_is_asked(way, target):
    jit = jits(ROWS())[way]
    found = jit(lambda x: mw.reshard(x * 2, target()))(lay(VALUE, ROWS()))
    check(found, VALUE * 2, found.sharding)
    assert found.sharding.is_equivalent_to(target(), 2)


@pytest.mark.parametrize("way", ["jax", "mw"])
def test_a_spec_is_on_the_mesh_of_the_program(way):
    x = lay(VALUE, ROWS())
    if way == "mw":
        found = mw.jit(lambda x: mw.reshard(x + 1, P(None, "y")), mesh=ROWS().mesh)(x)
    else:
        with jax.set_mesh(ROWS().mesh):
            found = jax.jit(lambda x: mw.reshard(x + 1, P(None, "y")))(x)
    np.testing.assert_array_equal(found, VALUE + 1)
    assert found.sharding.is_equivalent_to(COLUMNS(), 2)


@pytest.mark.parametrize("way", ["jax", "mw"])
def test_trees_and_open_dims(way):
    def fn(x):
        tree = {"a": x + 1, "b": [x * 2, None, x.sum()], "host": np.arange(3)}
        specs = {"a": WHOLE(), "b": None, "host": None}
        first = mw.reshard(tree, specs, donate=True)
        assert first["host"] is tree["host"] and first["b"][0] is tree["b"][0]
        open_rows = NamedSharding(ROWS().mesh, P(P.UNCONSTRAINED, "y"))
        return first | {"b": mw.reshard(tree["b"], [open_rows, None, WHOLE()])}

    found = jits(ROWS())[way](fn)(lay(VALUE, ROWS()))
    np.testing.assert_array_equal(found["a"], VALUE + 1)
    np.testing.assert_array_equal(found["b"][0], VALUE * 2)
    assert found["b"][1] is None
    assert found["b"][2] == VALUE.sum()
    assert found["a"].sharding.is_equivalent_to(WHOLE(), 2)
    spec = found["b"][0].sharding.spec
    assert len(spec) == 2 and spec[1] in ("y", ("y",))


def test_uneven_arrays_under_mw_jit():
    value = numbers((7, 8))
    x = lay(value, on((2, 4), XY)())
    found = mw.jit(lambda x: mw.reshard(x * 2, P("y", "x")), mesh=x.sharding.mesh)(x)
    check(found, value * 2, on((2, 4), "y", "x")())
    whole = mw.jit(lambda x: mw.reshard(x * 2, P(None, "y")), mesh=x.sharding.mesh)(x)
    check(whole, value * 2, COLUMNS())


def test_a_limit_holds_under_mw_jit():
    """From rows to columns no device needs more than the columns; one byte less is refused."""
    least = 8 * 2 * 4

    def program(max_bytes):
        return mw.jit(
            lambda x: mw.reshard(x + 1, P(None, "y"), max_bytes=max_bytes), mesh=ROWS().mesh
        )

    x = lay(VALUE, ROWS())
    check(program(least)(x), VALUE + 1, COLUMNS())
    with pytest.raises(mw.MemoryLimitError, match=f"the least possible is {least}\n"):
        program(least - 1)(x)


def test_what_is_asked_is_what_is_sent():
    """One all_gather of x after a slice, with the bytes of the plan."""
    x = lay(VALUE, on((2, 4), "x")())
    program = mw.jit(lambda x: mw.reshard(x, P(None, "y")), mesh=x.sharding.mesh).partition(x)
    [sent] = program.collectives
    plan = mw.reshard_plan((8, 8), "float32", x.sharding.mesh, P("x"), P(None, "y"))
    assert (sent.kind.value, sent.wire_bytes) == ("all_gather", plan.wire_bytes)


def loss(x, target, **limits):
    return (mw.reshard(jnp.sin(x), target, **limits) ** 3).sum()


@pytest.mark.parametrize("way", ["eager", "jax", "mw"])
def test_gradients_are_those_of_nothing(way):
    x = lay(VALUE / 9, ROWS())
    wanted = jax.grad(lambda x: (jnp.sin(x) ** 3).sum())(VALUE / 9)
    gradient = jax.grad(lambda x: loss(x, COLUMNS()))
    jit = (jits(ROWS()) | {"eager": lambda fn: fn})[way]
    np.testing.assert_allclose(jit(gradient)(x), wanted, rtol=1e-5)
    primal, tangent = jit(lambda x, t: jax.jvp(lambda x: mw.reshard(x, COLUMNS()), (x,), (t,)))(
        x, x
    )
    np.testing.assert_array_equal(primal, tangent)
    assert primal.sharding.is_equivalent_to(COLUMNS(), 2)
    assert tangent.sharding.is_equivalent_to(COLUMNS(), 2)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("way", ["eager", "jax", "mw"])
def test_a_mapped_dim_is_left_open(way, dim):
    x = lay(VALUE, WHOLE())
    rows = NamedSharding(x.sharding.mesh, P("y"))
    mapped = jax.vmap(lambda row: mw.reshard(row * 2, rows), in_axes=dim, out_axes=dim)
    jit = (jits(ROWS()) | {"eager": lambda fn: fn})[way]
    found = jit(mapped)(x)
    np.testing.assert_array_equal(found, VALUE * 2)
    spec = [*found.sharding.spec, None, None][: x.ndim]
    assert spec[1 - dim] in ("y", ("y",))


def test_keys_in_functions():
    keys = jax.random.split(jax.random.key(0), 8)
    x = lay(keys, on((8,), "x")())
    for jit in jits(on((8,))()).values():
        check(jit(lambda k: mw.reshard(k, on((8,))()))(x), keys, on((8,))())


CLOSED_OVER = {  # what a function closes over, where it is asked to be
    "one mesh": (lambda: lay(VALUE, ROWS()), COLUMNS),
    "a spec": (lambda: lay(VALUE, ROWS()), lambda: P(None, "y")),
    "as it is": (lambda: lay(VALUE, ROWS()), ROWS),
    "beside traced ones": (lambda: lay(VALUE, ROWS()), COLUMNS),
    "on the host": (lambda: VALUE, COLUMNS),
    "uneven": (lambda: lay(numbers((7, 8)), ROWS()), COLUMNS),
}


@pytest.mark.parametrize("way", ["jax", "mw"])
@pytest.mark.parametrize("case", CLOSED_OVER)
def test_what_a_function_closes_over(case, way):
    make, target = CLOSED_OVER[case]
    array = make()
    beside = case == "beside traced ones"

    def fn(x):
        moved = mw.reshard([array, x] if beside else [array], target())[0]
        return moved + x[: len(array)]

    found = jits(ROWS())[way](fn)(lay(VALUE, ROWS()))
    np.testing.assert_array_equal(found, np.asarray(array) + VALUE[: len(array)])


HIDDEN = "JAX does not see the sharding of a hint equation, and compiles for where arguments lie"


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=HIDDEN)
def test_jax_jit_of_what_lies_nowhere():
    found = jax.jit(lambda x: mw.reshard(x * 2, COLUMNS()))(VALUE)
    check(found, VALUE * 2, COLUMNS())


@pytest.mark.xfail(strict=True, reason=HIDDEN + ": it would refuse other devices than they are on")
@pytest.mark.parametrize(
    "target", [on((4,), "x"), on((8,), "x", order=ORDER)], ids=["few", "order"]
)
def test_jax_jit_is_for_the_devices_of_its_arguments(target):
    x = lay(VALUE, on((8,), "x")())
    with pytest.raises(ValueError):
        jax.jit(lambda x: mw.reshard(x * 2, target()))(x)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap], ids=["grad", "vmap"])
def test_a_limit_holds_in_eager_transforms(transform):
    x = lay(VALUE, ROWS())
    fn = {jax.grad: lambda x: loss(x, WHOLE(), max_bytes=8)}
    fn[jax.vmap] = lambda row: mw.reshard(row, NamedSharding(x.sharding.mesh, P()), max_bytes=8)
    with pytest.raises(mw.MemoryLimitError):
        transform(fn[transform])(x)


def test_eager_gradients_through_uneven_shardings():
    value = numbers((7, 8)) / 9
    gradient = jax.grad(lambda x: loss(x, ROWS()))(value)
    wanted = jax.grad(lambda x: (jnp.sin(x) ** 3).sum())(value)
    np.testing.assert_allclose(np.asarray(gradient), wanted, rtol=1e-5)


def test_eager_gradients_between_meshes():
    value = numbers((8, 8)) / 9
    gradient = jax.grad(lambda x: loss(x, on((4,), "x")()))(lay(value, ROWS()))
    wanted = jax.grad(lambda x: (jnp.sin(x) ** 3).sum())(value)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5)
    assert gradient.sharding.is_equivalent_to(ROWS(), 2)


EXPLICIT = jax.make_mesh((2, 4), XY)


def typed(value, *entries):
    return jax.device_put(value, NamedSharding(EXPLICIT, P(*entries)))


@pytest.mark.parametrize("word", [mw.reshard, mw.shard])
@pytest.mark.parametrize("jit", [mw.jit, jax.jit])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("entries", [(None, "y"), (), (("y", "x"),)], ids=str)
def test_over_explicit_axes_the_type_says_it_too(word, jit, named, entries):
    """Without a mesh in context: that of the array's type is the one."""
    spec = NamedSharding(EXPLICIT, P(*entries)) if named else P(*entries)

    def fn(x):
        moved = word(x * 2, spec)
        assert jax.typeof(moved).sharding.spec == P(*entries, *[None] * (2 - len(entries)))
        return jnp.sin(moved)

    value, x = VALUE + 0.5, typed(VALUE + 0.5, "x")
    found = jit(fn)(x)
    assert found.sharding.is_equivalent_to(NamedSharding(EXPLICIT, P(*entries)), 2)
    np.testing.assert_allclose(found, np.sin(value * 2), rtol=1e-5, atol=1e-5)
    gradient = jit(jax.grad(lambda x: fn(x).sum()))(x)
    assert gradient.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_allclose(gradient, 2 * np.cos(value * 2), rtol=1e-5, atol=1e-5)


def test_over_explicit_axes_it_is_sent_once():
    x = typed(VALUE, "x")
    ours = mw.jit(lambda x: jnp.sin(mw.reshard(x * 2, P(None, "y")))).partition(x)
    with jax.set_mesh(EXPLICIT):
        jaxs = mw.jit(lambda x: jnp.sin(jax.sharding.reshard(x * 2, P(None, "y")))).partition(x)
    assert ours.wire_bytes == jaxs.wire_bytes > 0


def test_dims_left_open_over_explicit_axes_keep_what_their_type_says():
    x = typed(VALUE, "x", "y")
    for word in (mw.shard, mw.reshard):
        found = mw.jit(lambda x, word=word: word(x, P("y", P.UNCONSTRAINED)))(x)
        assert found.sharding.spec == P("y", None)
    assert mw.jit(lambda x: mw.shard(x, P(P.UNCONSTRAINED, None)))(x).sharding.spec == P("x", None)


def test_a_bound_over_explicit_axes():
    x = typed(VALUE, "x")
    found = mw.jit(lambda x: mw.reshard(x, P("y"), max_bytes=10**6))(x)
    assert found.sharding.spec == P("y", None)
