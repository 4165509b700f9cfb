"""Explicit axes: what is refused, and meshes that are given, or that do not match."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, auto_axes, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.explicit_functions import matmul
from tests.drop_in.explicit_running import (
    AUTO_XY,
    EXPLICIT,
    MIXED,
    ROWS,
    SEEN,
    SQUARE,
    XY,
    anew,
    applied,
    array,
    make,
    run,
    see,
)

REFUSED = {
    "two shardings of one dim": (XY, lambda x, y: x * y, [SQUARE, (array(8, 4), P("y", "x"))]),
    "an ambiguous sum": (XY, jnp.matmul, [SQUARE, (array(4, 6), P("y"))]),
    "another ambiguous sum": (XY, jnp.matmul, [SQUARE, (array(4, 6), P("x"))]),
    "a slice of a sharded dim": (XY, lambda x: x[:3], [ROWS]),
    "a pad of a sharded dim": (XY, lambda x: jnp.pad(x, ((0, 1), (0, 0))), [ROWS]),
    "a split of a sharded dim": (XY, lambda x: lax.split(x, (3, 5)), [ROWS]),
    "a join of two shardings": (XY, lambda *x: jnp.concatenate(x), [SQUARE, ROWS]),
    "an ambiguous reshape": (XY, lambda x: jnp.reshape(x, (2, 16)), [ROWS]),
    "a select of two": (XY, lambda x, y: jnp.where(x > 0, x, y), [SQUARE, (array(8, 4), P("y"))]),
    "a carry that moves": (
        XY,
        lambda x: lax.scan(lambda c, _: (reshard(c, P()), None), x, None, length=2),
        [ROWS],
    ),
    "steps of a sharded dim": (XY, lambda x: lax.scan(lambda c, x: (c, x), 0, x), [ROWS]),
    "branches that differ": (
        XY,
        lambda x: lax.cond(x.sum() > 0, lambda x: x, lambda x: reshard(x, P()), x),
        [ROWS],
    ),
    "a constraint that does not hold": (
        XY,
        lambda x: lax.with_sharding_constraint(x, P("y")),
        [ROWS],
    ),
    "an Auto axis in a type": (
        MIXED,
        lambda x: jnp.einsum("ij->i", jnp.sin(x), out_sharding=P("y")),
        [ROWS],
    ),
    "an uneven dim": (XY, lambda x: reshard(x[:, :3], P(None, "y")), [ROWS]),
    "no such axis": (XY, lambda x: reshard(x, P("z")), [ROWS]),
    "an axis twice": (XY, lambda x: reshard(x, P("x", "x")), [ROWS]),
    "a region's axes": (
        XY,
        jax.shard_map(auto_axes(lambda a: a, out_sharding=P()), in_specs=P("x"), out_specs=P("x")),
        [ROWS],
    ),
    "unreduced over another axis": (
        XY,
        lambda x, y: jnp.einsum("ij,jk->ik", x, y, out_sharding=P(None, unreduced={"x"})),
        [(array(8, 4), P(None, "y")), (array(4, 6), P("y"))],
    ),
    "dims mapped together": (XY, jax.vmap(lambda x, y: x * y), [ROWS, (array(8, 4), P("y"))]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_jax_refuses(name):
    kinds, fn, arrays = REFUSED[name]
    with pytest.raises(Exception) as theirs:
        run(jax.jit, kinds, applied(fn), arrays)
    for call in (applied(fn), lambda jit, *args: jit(jax.jit(jit(fn)))(*args)):
        with pytest.raises(theirs.type):
            run(mw.jit, kinds, call, arrays)


def refused_alike(call):
    with pytest.raises(Exception) as theirs:
        call(jax.jit)
    with pytest.raises(theirs.type):
        call(mw.jit)


def test_placements_that_do_not_divide():
    """Over Auto axes arrays may be uneven at the boundary; a type cannot say so."""
    odd = np.arange(7.0, dtype=np.float32)
    for options in ({"in_shardings": P("x")}, {"out_shardings": {"a": P(("x", "y"))}}):
        for kinds in (XY, MIXED):
            with jax.set_mesh(make(kinds)):
                refused_alike(lambda jit, options=options: jit(lambda x: {"a": x}, **options)(odd))
    with (
        jax.set_mesh(make(XY)),
        pytest.raises(mw.HintError, match=r"args\[0\]: dim 0 of 7 is sharded"),
    ):
        mw.jit(lambda x: x, in_shardings=P("x"))(odd)


def test_meshes_that_do_not_match():
    explicit, auto, other = make(XY), make(AUTO_XY), make({"z": EXPLICIT, "w": EXPLICIT})
    x = jax.device_put(ROWS[0], NamedSharding(explicit, P("x")))
    on_auto, on_other = (jax.device_put(x, NamedSharding(m, P())) for m in (auto, other))
    add = lambda x, y: x + y  # noqa: E731
    for context in (auto, other):
        with jax.set_mesh(context):
            refused_alike(lambda jit: jit(lambda x: x * 2)(x))
    for y in (on_auto, on_other):
        refused_alike(lambda jit, y=y: jit(add)(x, y))
    with jax.set_mesh(explicit):
        refused_alike(lambda jit: jit(lambda x: x * 2, in_shardings=P("y"))(x))
    key = jax.random.key(0)
    where = NamedSharding(explicit, P("x"))
    with jax.set_mesh(explicit):  # JAX keeps what it traces here, of jax.random too
        mw.jit(lambda k: jax.random.normal(k, (8,), out_sharding=P("x")))(key)
    refused_alike(lambda jit: jit(lambda k: jax.random.normal(k, (8,), out_sharding=where))(key))
    refused_alike(lambda jit: jit(matmul(P("x")))(x, x.T))  # a spec, and no mesh in context


def test_without_a_mesh_in_context():
    mesh = make(XY)
    x, y = (jax.device_put(array(4, 4), NamedSharding(mesh, P(*s))) for s in (("x",), (None, "y")))
    where = NamedSharding(mesh, P("y"))

    def fn(x, y):
        drawn = jax.random.normal(jax.random.key(0), (4, 4), out_sharding=where)
        return see(x @ y) * 2, reshard(x, where) + drawn, auto_axes(jnp.sin, out_sharding=where)(x)

    found = []
    for jit in (jax.jit, mw.jit):
        SEEN.clear()
        outs = anew(jit)(fn)(x, y), auto_axes(jit(jnp.cos), out_sharding=where)(x)
        found.append((jax.tree.leaves(outs), list(SEEN)))
    (theirs, seen_by_theirs), (ours, seen_by_ours) = found
    assert seen_by_theirs == seen_by_ours
    for wanted, got in zip(theirs, ours, strict=True):
        assert wanted.sharding == got.sharding
        np.testing.assert_allclose(wanted, got, rtol=1e-5, atol=1e-5)


def test_results_on_meshes_of_other_kinds():
    explicit, auto = make(XY), make(AUTO_XY)
    x = jax.device_put(ROWS[0], NamedSharding(explicit, P("x")))
    y = jax.device_put(ROWS[0], NamedSharding(auto, P("y")))

    def to_auto(x):
        with use_abstract_mesh(auto.abstract_mesh):
            return reshard(x, P(None, None))

    with jax.set_mesh(explicit):
        for ours, theirs in zip(
            *[jit(lambda x, y: (x, y))(x, y) for jit in (mw.jit, jax.jit)], strict=True
        ):
            assert ours.sharding == theirs.sharding
        assert mw.jit(to_auto)(x).sharding.mesh == auto


def test_the_axes_of_a_mesh_that_is_given_are_completions():
    mesh = make(XY)
    SEEN.clear()
    step = mw.jit(lambda x: see(x) * 2, mesh=mesh, in_shardings=P("x"))
    for _ in range(2):
        assert step(ROWS[0]).sharding == NamedSharding(mesh, P("x"))
    assert [seen for seen, _ in SEEN] == ["float32[8,4]"]


def test_types_hold_on_a_mesh_that_is_given_where_the_function_speaks_of_them():
    mesh = make(XY)
    SEEN.clear()
    step = mw.jit(lambda x: reshard(see(x), P(None, "y")), mesh=mesh, in_shardings=P("x"))
    for _ in range(2):
        assert step(ROWS[0]).sharding == NamedSharding(mesh, P(None, "y"))
    assert SEEN[-1] == ("float32[8@x,4]", True)


def test_intermediate_values_are_partitioned_freely():
    """A type says where a value lies for the user; only results and what is asked for are held."""
    mesh = make({"x": EXPLICIT})

    def fn(x, w):
        hidden = jnp.tanh(jnp.einsum("ij,jk->ik", x, w, out_sharding=P(None, None)))
        return reshard(hidden, P("x"))

    with jax.set_mesh(mesh):
        x, w = jax.device_put(array(8, 4), P("x")), jax.device_put(array(4, 6), P())
        program = mw.jit(fn).partition(x, w)
        assert not program.collectives
        assert mw.jit(fn)(x, w).sharding == jax.jit(fn)(x, w).sharding
