"""Functions of arrays over Explicit axes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import auto_axes, explicit_axes, reshard, use_abstract_mesh

from tests.drop_in.explicit_running import AUTO, AUTO_XY, MIXED, ROWS, SQUARE, XY, array, see


def matmul(spec):
    return lambda a, b: see(jnp.einsum("ij,jk->ik", see(a), see(b), out_sharding=spec))


def scanned(carry, xs):
    def body(carry, x):
        y = jnp.einsum("ij,jk->ik", see(carry), see(x), out_sharding=P(None, "y"))
        return jnp.einsum("ij,jk->ik", jnp.tanh(y), x.T, out_sharding=P(None, "x")), see(y)

    return lax.scan(body, carry, xs)


def loops(x):
    doubled = lax.while_loop(lambda c: c.sum() < 100, lambda c: see(c) * 2, x)
    counted = lax.fori_loop(0, 3, lambda i, c: c + i, x)
    return doubled, counted, lax.cond(x.sum() > 3, lambda x: x * 2, lambda x: x - 1, see(x))


@jax.custom_vjp
def odd_sine(x):
    return jnp.sin(x)


odd_sine.defvjp(lambda x: (jnp.sin(x), see(x)), lambda x, g: (2 * see(g) * jnp.cos(x),))


def gathered(table, tokens):
    out = table.at[tokens].get(out_sharding=P("x", None, None))
    return see(out), table.at[tokens, :].get(out_sharding=P("x", None, "y"))


def at_positions(x, i):
    return x.at[:, i].add(5.0), jax.vmap(lambda row, j: row.at[j].set(2.0))(x, reshard(i, P("x")))


def drawn(key):
    shape = (8, 4)
    return (
        jax.random.normal(key, shape, out_sharding=P("x", "y")),
        jax.random.bits(key, shape, out_sharding=P("y")),
        jax.random.randint(key, shape, 0, 9, out_sharding=P("x")),
        jax.random.permutation(key, 8, out_sharding=P("x")),
        jax.random.split(key, 4),
        jax.random.fold_in(key, 3),
    )


def made(x):
    return (
        jnp.zeros(x.shape, out_sharding=P("x")),
        jnp.arange(8, dtype=jnp.float32, out_sharding=P(("x", "y"))),
        lax.broadcasted_iota(jnp.int32, (8, 2), 0, out_sharding=P("x", "y")),
        jnp.broadcast_to(x[0], (4, 4), out_sharding=P("y", "x")),
        lax.full_like(x, 3),
        jnp.ones((3, 5)),
        reshard(np.arange(4.0, dtype=np.float32), P("y")),
    )


def shaped(x):
    return (
        see(jnp.expand_dims(x, 1)),
        jnp.transpose(x)[None],
        jnp.squeeze(see(x[:, :, None, None]), (2, 3)),
        jnp.reshape(x, (2, 16), out_sharding=P("x", "y")),
        jnp.ravel(x, out_sharding=P("y")),
        jnp.repeat(x, 2, axis=1, out_sharding=P("x")),
        jnp.tile(reshard(x, P()), (1, 2)),
        lax.split(x, (4, 4), axis=0) if jax.typeof(x).sharding.spec[0] is None else x,
    )


def reduced(x):
    return (
        see(x.sum(0)),
        x.max(1),
        x.mean(),
        jnp.argmax(x, 0),
        jax.nn.softmax(x, axis=0),
        jnp.cumsum(reshard(x, P(None, "y")), 0),
        jnp.sort(reshard(x, P("x", None)), 1),
        jnp.argsort(reshard(x, P("x", None)), 1),
        lax.reduce_window(x, -np.inf, lax.max, (2, 1), (2, 1), "SAME"),
    )


def by_auto_axes(x):
    @partial(auto_axes, axes="x", out_sharding=P("x", None))
    def partly(y):
        return jnp.einsum("ij,kj->ik", see(jnp.sin(y)), y, out_sharding=P(None, None))

    wholly = auto_axes(lambda y: see(y @ y.T), out_sharding=P("x"))
    return see(partly(x * 2)), wholly(x)


def by_explicit_axes(x):
    @partial(explicit_axes, in_sharding=P("x", "y"))
    def wholly(y):
        return see(jnp.einsum("ij,kj->ik", see(y), jnp.sin(y), out_sharding=P("x", None)))

    partly = explicit_axes(lambda y: see(y) * 2, axes="y", in_sharding=P(None, "y"))
    return see(wholly(x * 2)), partly(x)


def in_other_meshes(x):
    mesh = jax.sharding.get_abstract_mesh()
    with use_abstract_mesh(mesh.update_axis_types({"x": AUTO, "y": AUTO})):
        y = reshard(x, P(None, None))
        y = y @ y.T
    other = mesh.update(axis_sizes=(mesh.size, 1), axis_names=("a", "b"))
    with use_abstract_mesh(other):
        z = see(jnp.sin(reshard(y, P(("a", "b"), None))) * 2)
    return reshard(y, P("x", None)), z, reshard(z, P("y", None))


def in_a_region(x):
    whole = jax.shard_map(lambda a: lax.psum(a.sum(1), "y"), in_specs=P("x", "y"), out_specs=P("x"))
    partly = jax.shard_map(lambda a: a * 3, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    return see(whole(x)), see(partly(x))


def unreduced(a, b):
    partial_sum = jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", unreduced={"y"}))
    return reshard(see(partial_sum + partial_sum), P("x"))


def constrained(x):
    return lax.with_sharding_constraint(x * 2, P("x", "y")), jax.device_put(x, P("y"))


INDICES = np.array([3, 0, 1, 1, 2, 3, 0, 2])

FUNCTIONS = {
    "elementwise": (XY, lambda x, y: see(see(x) * y + 1), [SQUARE, (array(1, 4), P())]),
    "product of rows and columns": (
        XY,
        lambda a, b: see(a @ b),
        [ROWS, (array(4, 6), P(None, "y"))],
    ),
    "product, gathered": (XY, lambda a, b: see(a @ b), [ROWS, (array(4, 6), P("x"))]),
    "product, as said": (XY, matmul(P("y")), [SQUARE, (array(4, 6), P("x", "y"))]),
    "product, summed": (XY, matmul(P("x", None)), [SQUARE, (array(4, 6), P("y", "x"))]),
    "dot": (XY, partial(jnp.dot, out_sharding=P("x")), [SQUARE, (array(4, 6), P("x", "y"))]),
    "shapes": (XY, shaped, [(array(8, 4), P(None, "y"))]),
    "reductions": (XY, reduced, [SQUARE]),
    "scan": (
        XY,
        scanned,
        [(array(2, 4) / 9, P(None, "x")), (array(3, 4, 4) / 9, P(None, "x", "y"))],
    ),
    "loops": (XY, loops, [SQUARE]),
    "gather": (XY, gathered, [(array(16, 4), P(None, "y")), (INDICES.reshape(4, 2), P("x"))]),
    "scatter": (XY, at_positions, [ROWS, (INDICES, P())]),
    "random": (XY, drawn, [(jax.random.key(1), P())]),
    "made inside": (XY, made, [(array(8, 4), P())]),
    "pads, slices, joins": (
        XY,
        lambda x: (lax.pad(x, 0.0, ((2, 2, 0), (0, 0, 0))), x[:, 1:3], jnp.concatenate([x, x], 1)),
        [ROWS],
    ),
    "dynamic slices": (
        XY,
        lambda x, i: (
            lax.dynamic_slice_in_dim(x, i, 2, axis=1),
            lax.dynamic_update_slice_in_dim(x, x[:, :1], i, axis=1),
        ),
        [ROWS, (np.int32(1), P())],
    ),
    "convolution": (
        XY,
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        [(array(4, 8, 3), P("x", "y")), (array(3, 3, 5), P())],
    ),
    "decompositions": (
        XY,
        lambda a: jnp.linalg.slogdet(a + 4 * jnp.eye(3)),
        [(array(8, 3, 3), P("x"))],
    ),
    "auto_axes": (XY, by_auto_axes, [SQUARE]),
    "explicit_axes": (AUTO_XY, by_explicit_axes, [SQUARE]),
    "other meshes": (XY, in_other_meshes, [SQUARE]),
    "regions": (XY, in_a_region, [SQUARE]),
    "unreduced": (XY, unreduced, [SQUARE, (array(4, 6), P("y", None))]),
    "constraints": (XY, constrained, [SQUARE]),
    "callbacks": (
        XY,
        lambda x: x + jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        [SQUARE],
    ),
    "of the host": (XY, lambda x: see(x) * np.float32(2) + np.ones((8, 4), np.float32), [SQUARE]),
    "mixed": (MIXED, lambda x, y: see(jnp.sin(x) @ y), [SQUARE, (array(4, 6), P("y"))]),
    "mixed, minor": (MIXED, lambda x: see(x) * 2, [(array(8, 4), P(("x", "y")))]),
    "mixed, major": (MIXED, lambda x: see(x) * 2, [(array(8, 4), P(("y", "x")))]),
    "mixed, constrained": (MIXED, lambda x: lax.with_sharding_constraint(x, P("y")), [ROWS]),
    "mixed, resharded": (MIXED, lambda x: see(reshard(x, P(None, "x"))), [SQUARE]),
}
