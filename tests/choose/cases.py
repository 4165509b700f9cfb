"""Small programs with the exact collectives of their plans."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


N8, N24 = mesh_of(d=8), mesh_of(x=2, y=4)
X, W, V = f32(64, 32), f32(32, 128), f32(128, 32)
LONG_X, LONG_W = f32(64, 4096), f32(4096, 128)
CASES = {
    "batch": (jnp.matmul, (X, W), (P("d"), P()), P("d"), N8, []),
    "features": (jnp.matmul, (X, W), (P(), P(None, "d")), P(None, "d"), N8, []),
    "contraction, result whole": (
        jnp.matmul,
        (LONG_X, LONG_W),
        (P(None, "d"), P("d")),
        P(),
        N8,
        [("all_reduce", "d", (64, 128))],
    ),
    "quantiles are looked up on every device, where all is sorted": (
        jnp.quantile,
        (f32(512), f32(32)),
        (P("d"), P()),
        P(),
        N8,
        [("all_gather", "d", (64,))],
    ),
    "contraction, result sharded": (
        jnp.matmul,
        (LONG_X, LONG_W),
        (P(None, "d"), P("d")),
        P("d"),
        N8,
        [("reduce_scatter", "d", (64, 128))],
    ),
    "two contractions are added before one reduction": (
        lambda x, w: x @ w + (2 * x) @ w,
        (LONG_X, LONG_W),
        (P(None, "d"), P("d")),
        P(),
        N8,
        [("all_reduce", "d", (64, 128))],
    ),
    "a linear reduction is done before the sum between devices": (
        lambda x, w: (x @ w).sum(0),
        (LONG_X, LONG_W),
        (P(None, "d"), P("d")),
        P(),
        N8,
        [("all_reduce", "d", (128,))],
    ),
    "a sum is scattered before a product with what lies in shards": (
        lambda x, w, u: u * (x @ w),
        (f32(64, 96), f32(96, 64), f32(64, 64)),
        (P(None, "d"), P("d"), P("d")),
        P("d"),
        N8,
        [("reduce_scatter", "d", (64, 64))],
    ),
    "a sum is scattered before it is divided and summed further": (
        lambda x, w, u: ((x @ w) / u).sum(1),
        (f32(64, 96), f32(96, 64), f32(64, 64)),
        (P(None, "d"), P("d"), P("d")),
        P("d"),
        N8,
        [("reduce_scatter", "d", (64, 64))],
    ),
    "a sum is scattered before a product with a vector in shards": (
        lambda x, w, u: u[:, None] * (x @ w),
        (f32(64, 96), f32(96, 64), f32(64)),
        (P(None, "d"), P("d"), P("d")),
        P("d"),
        N8,
        [("reduce_scatter", "d", (64, 64))],
    ),
    "a mean with weights scatters both of its sums": (
        lambda x, w: (x * w[..., None]).sum(1) / w.sum(1)[:, None],
        (f32(64, 256, 32), f32(64, 256)),
        P(None, "d"),
        P("d"),
        N8,
        [("reduce_scatter", "d", (64, 32)), ("reduce_scatter", "d", (64, 1))],
    ),
    "a sum goes on with what was made of nothing": (
        lambda table, ids: jax.grad(lambda table: (table[ids] ** 2).sum())(table),
        (f32(1024, 64), jax.ShapeDtypeStruct((256,), jnp.int32)),
        (P(), P("d")),
        P(),
        N8,
        [("all_gather", "d", (32, 1))],
    ),
    "three products share a gather": (
        lambda x, w: (x @ w[:, :32]) + (x @ w[:, 32:64]) + jnp.tanh(x @ w[:, 64:96]),
        (f32(64, 512), f32(512, 96)),
        (P("d"), P()),
        P("d"),
        N8,
        [],
    ),
    "two axes at once": (
        jnp.matmul,
        (LONG_X, LONG_W),
        (P(None, ("x", "y")), P(("x", "y"))),
        P(),
        N24,
        [("all_reduce", "x, y", (64, 128))],
    ),
    "finalised two-dimensional sharding": (
        lambda x, w: x @ w,
        (f32(64, 32), f32(32, 128)),
        (P("x", "y"), P("x", "y")),
        P("x", "y"),
        N24,
        [("all_gather", "y", (32, 8)), ("all_gather", "x", (16, 32))],
    ),
    "megatron MLP": (
        lambda x, w, v: jax.nn.gelu(x @ w) @ v,
        (X, W, V),
        (P(), P(None, "d"), P("d")),
        P(),
        N8,
        [("all_reduce", "d", (64, 32))],
    ),
    "softmax over a sharded dim": (
        jax.nn.softmax,
        (f32(64, 128),),
        (P(None, "d"),),
        P(None, "d"),
        N8,
        [("all_reduce", "d", (64,)), ("all_reduce", "d", (64, 1))],
    ),
    "sums that meet are each reduced to the shards of the result": (
        lambda x, y: x.sum(0) / y.sum(0),
        (f32(64, 4096), f32(64, 4096)),
        (P("d"), P("d")),
        P("d"),
        N8,
        [("reduce_scatter", "d", (4096,)), ("reduce_scatter", "d", (4096,))],
    ),
    "of a maximum that rows read whole, another sum reads a shard": (
        lambda x: jax.scipy.special.logsumexp(x, 0),
        (f32(64, 4096),),
        (P("d"),),
        P("d"),
        N8,
        [
            ("all_to_all", "d", (8, 512)),
            ("all_gather", "d", (512,)),
            ("reduce_scatter", "d", (4096,)),
        ],
    ),
    "embedding, rows sharded": (
        lambda t, i: t[i],
        (f32(8192, 128), jax.ShapeDtypeStruct((64,), jnp.int32)),
        (P("d"), P()),
        P(),
        N8,
        [("all_reduce", "d", (64, 128))],
    ),
    "embedding, features sharded": (
        lambda t, i: t[i],
        (W, jax.ShapeDtypeStruct((64,), jnp.int32)),
        (P(None, "d"), P()),
        P(None, "d"),
        N8,
        [],
    ),
    "of short keys only what devices cannot make is gathered": (
        lambda a, b: jnp.lexsort((a, b)),
        (f32(512), f32(512)),
        (P("d"), P("d")),
        P("d"),
        N8,
        [("all_gather", "d", (64,)), ("all_gather", "d", (64,))],
    ),
    "of two branches each gathers what it reads": (
        lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: b @ a),
        (f32(64, 64), f32(64, 64)),
        (P("d"), P("d")),
        P("d"),
        N8,
        [("all_gather", "d", (8, 64))],
    ),
    "what both branches read is gathered once": (
        lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.sin(a) @ b),
        (f32(64, 64), f32(64, 64)),
        (P("d"), P("d")),
        P("d"),
        N8,
        [("all_gather", "d", (8, 64))],
    ),
    "what one branch reads whole, and the other in parts, is exchanged for the other": (
        lambda q, x, w: lax.cond(
            q[0, 0] > 5, lambda: x @ w, lambda: x @ lax.optimization_barrier(w.T)
        ),
        (f32(1, 1), f32(64, 64), f32(64, 64)),
        (P(), P(None, "d"), P("d")),
        P("d"),
        N8,
        [("all_gather", "d", (64, 8)), ("all_to_all", "d", (64, 8))],
    ),
    "a bias in shards is no reason to have features in shards": (
        lambda x, u, b, v: jnp.tanh(x @ u + b) @ v,
        (f32(384, 64), f32(64, 256), f32(256), f32(256, 64)),
        (P("d"), P("d"), P("d"), P("d")),
        P("d"),
        N8,
        [("all_gather", "d", (8, 256)), ("all_gather", "d", (32,)), ("all_gather", "d", (32, 64))],
    ),
    "a sum that is reversed and wanted whole is reduced before it is gathered": (
        lambda x: jnp.rot90(x, 2).sum(0),
        (f32(64, 512),),
        (P("x", "y"),),
        P(),
        N24,
        [("all_reduce", "x", (128,)), ("all_gather", "y", (128,))],
    ),
    "an unused gather is not made": (
        lambda x: mw.shard(x, P()) * 0 + 1,
        (X,),
        (P("d"),),
        P("d"),
        N8,
        [("all_gather", "d", (8, 32))],
    ),
}
