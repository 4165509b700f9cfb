"""Products that are summed and scattered on CPU are made with the parts leading, unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from meshwise import _jax

SIZES = {"x": 2, "y": 4}
BOTH = ("x", "y")


def scatter(dim, axes=BOTH, **how):
    how.setdefault("tiled", True)
    return lambda x: lax.psum_scatter(x, axes, scatter_dimension=dim, **how)


def scattered_product(equation, after, **how):
    return lambda a, b: after(jnp.einsum(equation, a, b, **how))


def blocks(x):
    """Both leading dims over a device each, as a reshard says it."""
    parts = lax.transpose(x.reshape(2, 8, 4, 4, 16), (2, 0, 1, 3, 4)).reshape(8, 8, 4, 16)
    return scatter(0, ("y", "x"))(parts)[0]


def of_two(a, b):
    product = a @ b
    return scatter(1)(product) + scatter(0)(product).sum()


def in_a_loop(a, b):
    return lax.fori_loop(0, 2, lambda _, y: y + scatter(1)((a + y.mean()) @ b), jnp.zeros((64, 4)))


# What each device computes, and the local shapes of both operands.
LED = {
    "columns": (scattered_product("mk,kn->mn", scatter(1)), (64, 4), (4, 32)),
    "columns, the second turned": (scattered_product("mk,nk->mn", scatter(1)), (64, 4), (32, 4)),
    "columns, the first turned": (scattered_product("km,kn->mn", scatter(1)), (4, 64), (4, 32)),
    "columns that go": (
        scattered_product("mk,kn->mn", scatter(1, tiled=False)), (64, 4), (4, 8)
    ),
    "columns over one axis": (scattered_product("mk,kn->mn", scatter(1, "y")), (64, 4), (4, 32)),
    "rows in groups": (
        scattered_product("abk,kn->abn", scatter(1, "y", axis_index_groups=[[0, 2], [1, 3]])),
        (6, 16, 2), (2, 24),
    ),
    "blocks": (scattered_product("abk,kn->abn", blocks), (16, 16, 4), (4, 16)),
    "two contracted": (
        scattered_product("mjk,kjn->mn", scatter(1)), (64, 2, 3), (3, 2, 32)
    ),
    "rows between": (scattered_product("abk,kn->abn", scatter(1)), (6, 16, 2), (2, 24)),
    "columns between": (scattered_product("mk,kab->mab", scatter(1)), (64, 2), (2, 8, 3)),
    "columns behind others": (scattered_product("mk,kab->mab", scatter(2)), (64, 2), (2, 3, 8)),
    "longer sums": (
        scattered_product("mk,kn->mn", scatter(1), preferred_element_type=jnp.float32),
        (64, 4), (4, 32),
    ),
    "in a loop": (in_a_loop, (64, 4), (4, 32)),
}  # fmt: skip
AS_THEY_ARE = {
    "rows": (scattered_product("mk,kn->mn", scatter(0)), (64, 4), (4, 32)),
    "a batch": (scattered_product("bmk,bkn->bmn", scatter(2)), (2, 64, 4), (2, 4, 32)),
    "halves, of which one is put in order": (
        scattered_product("mk,kn->mn", scatter(1, "x")), (64, 4), (4, 32)
    ),
    "operands as large": (scattered_product("mk,kn->mn", scatter(1)), (16, 64), (64, 32)),
    "read twice": (of_two, (64, 4), (4, 32)),
    "a part of both": (
        lambda a, b: scatter(0)((a @ b).reshape(2, 2, 2, 4).transpose(0, 2, 1, 3).reshape(8, 4)),
        (4, 1), (1, 8),
    ),
    "one operand at another precision": (
        scattered_product("mk,kn->mn", scatter(1), precision=("highest", "default")),
        (64, 4), (4, 32),
    ),
}  # fmt: skip


def traced(per_device, *shapes):
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.make_jaxpr(per_device, axis_env=[*SIZES.items()])(*structs)


def run(closed, operands, mesh):
    mapped = jax.shard_map(
        lambda *args: _jax.jaxpr_as_fun(closed)(*[a[0] for a in args])[0][None],
        mesh=mesh,
        in_specs=P(BOTH),
        out_specs=P(BOTH),
        check_vma=False,
    )
    return jax.jit(mapped)(*operands)


def is_led(jaxpr):
    """Whether the operands of a product are put in order, and it is scattered as it is."""
    eqns = list(_every(jaxpr.jaxpr))
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    for eqn in eqns:
        if eqn.primitive.name == "reduce_scatter":
            maker = makers[eqn.invars[0]]
            while maker.primitive is lax.reshape_p:
                maker = makers[maker.invars[0]]
            if maker.primitive is lax.dot_general_p:
                return True
    return False


def _every(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _every(inner)


@pytest.mark.parametrize("per_device, first, second", LED.values(), ids=LED)
def test_the_same_sums_of_a_product_in_order(per_device, first, second, mesh2x4):
    before = traced(per_device, first, second)
    after = _jax.as_cpu_compiles(before, SIZES)
    assert is_led(after)
    assert before.out_avals == after.out_avals
    assert str(after).count("dot_general[") == str(before).count("dot_general[")
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=(8, *s)), jnp.float32) for s in (first, second)]
    found, wanted = (run(closed, operands, mesh2x4) for closed in (after, before))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per_device, first, second", AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_other_products_are_put_in_order_behind(per_device, first, second):
    before = traced(per_device, first, second)
    after = _jax.as_cpu_compiles(before, SIZES)
    products = [eqn for eqn in after.jaxpr.eqns if eqn.primitive is lax.dot_general_p]
    assert products == [e for e in before.jaxpr.eqns if e.primitive is lax.dot_general_p]


def test_the_result_is_held_once():
    """Neither in two orders, as without, nor much more beside it."""
    closed = traced(LED["columns"][0], (512, 32), (32, 128))
    (most,) = {
        max(v.aval.size for eqn in jaxpr.jaxpr.eqns for v in eqn.outvars)
        for jaxpr in (closed, _jax.as_cpu_compiles(closed, SIZES))
    }
    after = _jax.as_cpu_compiles(closed, SIZES)
    made = [e for e in after.jaxpr.eqns if e.outvars[0].aval.size == most]
    assert {e.primitive.name for e in made} == {"dot_general", "reshape"}
