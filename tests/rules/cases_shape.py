"""Operators that move elements without computing."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from tests.rules.case import Case


def reshape(*shape):
    return lambda x: lax.reshape(x, shape)


def pad(low, high, interior=0, value=None):
    config = [(0, 0, 0), (low, high, interior)]
    if value is not None:
        return lambda x: lax.pad(x, np.float32(value), config)
    return lambda x, v: lax.pad(x, v, config)


def rows_set(function, at, rows, *starts, dims=(0,)):
    """Rows from `at` on, made of as many of each other operand, from some of its own on."""

    def written(x, *operands):
        types = [jax.ShapeDtypeStruct(x.shape if o.shape else (), o.dtype) for o in operands]
        jaxpr = jax.make_jaxpr(function)(*types).jaxpr
        recipe = _jax.OfRows(tuple(jaxpr.invars), tuple(jaxpr.eqns), jaxpr.outvars[0])
        return _jax.set_rows_p.bind(
            x, *operands, dims=dims, at=each(at), rows=each(rows),
            starts=tuple(k if k is None else each(k) for k in starts), function=recipe,
        )  # fmt: skip

    def each(k):
        return k if isinstance(k, tuple) else (k,)

    return written


SET_ROWS = [
    Case("a wall", "set_rows", rows_set(lambda u: u, 0, 1, 1), "f32[6,5] f32[6,5]",
         "i j, i j -> i j | permute=i"),
    Case("a wall of what is far away", "set_rows", rows_set(lambda u: -u, 5, 1, 0),
         "i32[6,5] i32[6,5]", "i j, i j -> i j | permute=i"),
    Case("a wall of two rows and a number", "set_rows",
         rows_set(lambda u, v, n: u * n - v, 7, 1, 2, 5, None), "f32[8,5] f32[8,5] f32[8,5] f32[]",
         "i j, i j, i j,  -> i j | permute=i"),
    Case("rows that several have", "set_rows", rows_set(lambda u, v: u + v, 2, 3, 4, 0),
         "f32[9,5] f32[9,5] f32[9,5]", "i j, i j, i j -> i j | permute=i"),
    Case("rows of something longer, and given ones", "set_rows",
         rows_set(lambda u, v: u * v, 1, 2, 9, None), "f32[6,5] f32[11,5] f32[2,5]",
         "i j, i j, k j -> i j | whole=k permute=i"),
    Case("rows in the other order", "set_rows",
         rows_set(lambda u, v: lax.rev(u, (0,)) - v, 0, 3, 2, 6), "f32[9,5] f32[9,5] f32[9,5]",
         "i j, i j, i j -> i j | permute=i"),
    Case("a wall that is neither", "set_rows",
         rows_set(lambda u, v: lax.select(v > 0, u / 2, v) + 1, 0, 1, 1, 2),
         "f32[6,5] f32[6,5] f32[6,5]", "i j, i j, i j -> i j | permute=i"),
    Case("a wall by a choice", "set_rows",
         rows_set(lambda u, v, w: lax.select(v > 0, u / 2, -w) - w, 0, 1, 1, 2, 0),
         "f32[6,5] f32[6,5] f32[6,5] f32[6,5]", "i j, i j, i j, i j -> i j | permute=i"),
    Case("a corner", "set_rows", rows_set(lambda u: -u, (0, 4), (1, 1), (3, 0), dims=(0, 1)),
         "f32[6,5] f32[6,5]", "i j, i j -> i j | permute=i j"),
    Case("a block, and what is added to it", "set_rows",
         rows_set(lambda u, v: u + v, (1, 3), (2, 3), (4, 0), None, dims=(0, 2)),
         "f32[7,2,8] f32[9,2,8] f32[2,2,3]",
         "i j k, i j k, l j m -> i j k | whole=l m permute=i k"),
    Case("the last columns", "set_rows", rows_set(lambda u: u, 4, 2, 0, dims=(1,)),
         "c64[5,6] c64[5,6]", "i j, i j -> i j | permute=j"),
]  # fmt: skip

RESHAPES = [
    Case("reshape of one", "reshape", lambda x: lax.reshape_p.bind(
        x, new_sizes=(5, 6), dimensions=None, sharding=None), "f32[5,6]", "i j -> i j"),
    Case("reshape that merges", "reshape", reshape(24), "f32[6,4]", "i j -> (i j) | permute=i"),
    Case("reshape that splits", "reshape", reshape(3, 8), "f32[24]", "(i j) -> i j | permute=i"),
    Case("reshape that merges heads", "reshape", reshape(2, 5, 48), "f32[2,5,6,8]",
         "i j k l -> i j (k l) | permute=k"),
    Case("reshape that splits heads", "reshape", reshape(2, 5, 6, 8), "f32[2,5,48]",
         "i j (k l) -> i j k l | permute=k"),
    Case("reshape that regroups", "reshape", reshape(8, 3), "f32[4,6]",
         "i (j k) -> (i j) k | permute=i"),
    Case("reshape that shares a part", "reshape", reshape(4, 6), "f32[6,4]",
         "(i j) k -> (i l) m | whole=j k l m permute=i"),
    Case("reshape that shares none", "reshape", reshape(5, 3), "f32[3,5]",
         "i j -> i k | whole=j k permute=i"),
    Case("reshape in intervals", "reshape", reshape(7, 12, 5), "f32[7,3,4,5]",
         "i j k l -> i (j k) l | permute=j"),
    Case("reshape after none shared", "reshape", reshape(5, 3, 4), "f32[3,5,4]",
         "i j k -> i l k | whole=j l permute=i"),
    Case("reshape with ones", "reshape", reshape(1, 5, 1, 6), "f32[5,1,6]", "i 1 j -> 1 i 1 j"),
    Case("reshape to a scalar", "reshape", reshape(), "f32[1,1]", "1 1 -> "),
    Case("reshape of an empty array", "reshape", reshape(5, 0, 2), "f32[5,2,0]",
         "i j k -> i l m | whole=j k l m"),
    Case("reshape of a transpose", "reshape", lambda x: lax.reshape(x, (4, 6), (1, 0)),
         "f32[6,4]", "i j -> k l | whole=i j k l"),
    Case("reshape of integers", "reshape", reshape(24), "i32[6,4]", "i j -> (i j) | permute=i"),
    Case("reshape that leads with other sizes", "reshape", reshape(2, 15, 4), "f32[3,10,4]",
         "i j k -> i l k | whole=j l permute=i"),
    Case("reshape of several groups", "reshape", reshape(24, 7, 3, 8), "f32[6,4,7,24]",
         "i j k (l m) -> (i j) k l m | permute=i l"),
    Case("reshape of heads", "reshape", reshape(2, 12, 8), "f32[2,96]",
         "i (j k) -> i j k | permute=j"),
    Case("reshape of keys", "reshape", reshape(2, 3), "key[6]", "(i j) -> i j | permute=i"),
]  # fmt: skip

CASES = [
    *RESHAPES,
    *SET_ROWS,
    Case("transpose", "transpose", lambda x: lax.transpose(x, (2, 0, 1)), "f32[5,6,7]",
         "i j k -> k i j"),
    Case("squeeze", "squeeze", lambda x: lax.squeeze(x, (0, 2)), "f32[1,5,1,6]", "1 i 1 j -> i j"),
    Case("broadcast_in_dim", "broadcast_in_dim",
         lambda x: lax.broadcast_in_dim(x, (4, 5, 6), (1, 2)), "f32[5,6]", "i j -> k i j"),
    Case("broadcast_in_dim that stretches", "broadcast_in_dim",
         lambda x: lax.broadcast_in_dim(x, (4, 5, 6), (0, 2)), "f32[1,6]", "1 i -> j k i"),
    Case("broadcast_in_dim of a scalar", "broadcast_in_dim",
         lambda x: lax.broadcast_in_dim(x, (5, 6), ()), "f32[]", " -> i j"),
    Case("broadcast_in_dim of keys", "broadcast_in_dim",
         lambda x: lax.broadcast_in_dim(x, (5, 6), (1,)), "key[6]", "i -> j i"),
    Case("tile", "tile", lambda x: lax.tile(x, (6, 1)), "f32[4,5]", "i j -> (k i) j"),
    Case("tile of one row", "tile", lambda x: lax.tile(x, (5, 2)), "f32[1,6]", "1 i -> j (k i)"),
    Case("iota", "iota", lambda: lax.broadcasted_iota(np.int32, (5, 6), 0), "", " -> i j"),
    Case("iota of bfloat16", "iota", lambda: lax.iota(jnp.bfloat16, 700), "", " -> i"),
    Case("iota of complex", "iota", lambda: lax.iota(jnp.complex64, 7), "", " -> i"),
    Case("iota of narrow integers", "iota", lambda: lax.iota(jnp.int8, 120), "", " -> i"),
    Case("rev", "rev", lambda x: lax.rev(x, (1,)), "f32[5,6]", "i j -> i j | permute=j"),
    Case("rev of two dims", "rev", lambda x: lax.rev(x, (0, 1)), "f32[7,9]",
         "i j -> i j | permute=i j"),
    Case("rev of two even dims", "rev", lambda x: lax.rev(x, (2, 0)), "f32[12,5,4]",
         "i j k -> i j k | permute=i k"),
    Case("rev of keys", "rev", lambda x: lax.rev(x, (0, 1)), "key[4,6]",
         "i j -> i j | permute=i j"),
    Case("slice of a few rows", "slice", lambda x: lax.slice(x, (2,), (5,)), "f32[19]",
         "i -> j | sum=i whole=j"),
    Case("slice of a few rows with strides", "slice",
         lambda x: lax.slice(x, (1, 3), (5, 30), (1, 13)), "f32[5,31]", "i j -> i j | permute=i j"),
    Case("slice of a few booleans", "slice", lambda x: lax.slice(x, (2,), (5,)), "bool[19]",
         "i -> j | or=i whole=j"),
    Case("slice of a few exponents", "slice", lambda x: lax.slice(
        lax.convert_element_type(x, jnp.float8_e8m0fnu), (2,),
         (5,)), "f32[19]+", "i -> j | whole=i j"),
    Case("slice of keys", "slice", lambda x: lax.slice(x, (2,), (7,)), "key[9]",
         "i -> i | permute=i"),
    Case("slice of two dims", "slice", lambda x: lax.slice(x, (3, 0), (13, 7), (3, 2)),
         "f32[13,8]", "i j -> i j | permute=i j"),
    Case("slice", "slice", lambda x: lax.slice(x, (0, 1), (5, 4)), "f32[5,6]",
         "i j -> i j | permute=j"),
    Case("slice with strides", "slice", lambda x: lax.slice(x, (0, 1), (5, 6), (1, 2)),
         "f32[5,6]", "i j -> i j | permute=j"),
    Case("slice of one", "slice", lambda x: lax.slice(x, (0, 2), (5, 3)), "f32[5,6]",
         "i j -> i 1 | sum=j"),
    Case("pad", "pad", pad(1, 2), "f32[5,6] f32[]", "i j,  -> i j | permute=j"),
    Case("pad with zero", "pad", pad(1, 2, value=0), "f32[5,6]", "i j,  -> i j | permute=j"),
    Case("pad that takes away", "pad", pad(-1, 2, value=0), "f32[5,6]", "i j,  -> i j | permute=j"),
    Case("pad in between", "pad", pad(0, 0, 1), "f32[5,6] f32[]", "i j,  -> i j | permute=j"),
    Case("pad to many", "pad", lambda x, v: lax.pad(x, v, [(9, 4, 0), (1, 0, 3)]),
         "f32[3,5] f32[]", "i j,  -> k j | whole=i permute=j"),
    Case("pad to many in between", "pad", lambda x: lax.pad(x, 0.0, [(2, 1, 6)]), "f32[4]",
         "i,  -> i | permute=i"),
    Case("pad to many, less some", "pad", lambda x, v: lax.pad(x, v, [(-4, 12, 8)]),
         "f32[3] f32[]", "i,  -> i | permute=i"),
    Case("pad to many in between and behind", "pad", lambda x, v: lax.pad(x, v, [(40, 90, 3)]),
         "f32[5] f32[]", "i,  -> j | whole=i"),
    Case("pad to few", "pad", lambda x, v: lax.pad(x, v, [(-17, 2, 0)]), "f32[19] f32[]",
         "i,  -> j | whole=i"),
    Case("pad of one row", "pad", lambda x, v: lax.pad(x, v, [(2, 6, 0)]), "f32[1] f32[]",
         "1,  -> i"),
    Case("pad of two dims", "pad", lambda x, v: lax.pad(x, v, [(2, -1, 2), (-2, 3, 1)]),
         "f32[7,6] f32[]", "i j,  -> i j | permute=i j"),
    Case("concatenate of many", "concatenate", lambda *xs: lax.concatenate(xs, 0),
         "f32[7] f32[2] f32[5] f32[1] f32[6] f32[0]",
         "i, j, k, 1, i, l -> i | whole=j k l permute=i"),
    Case("concatenate of keys", "concatenate", lambda x, y: lax.concatenate([x, y], 0),
         "key[3] key[4]", "i, i -> i | permute=i"),
    Case("split in alike parts", "split", lambda x: lax.split(x, (5, 6, 4), 0), "f32[15,3]",
         "i j -> i j, i j, i j | permute=i"),
    Case("concatenate", "concatenate", lambda x, y: lax.concatenate([x, y], 1),
         "f32[5,6] f32[5,4]", "i j, i j -> i j | permute=j"),
    Case("concatenate of a row", "concatenate", lambda x, y, z: lax.concatenate([x, y, z], 0),
         "f32[5,6] f32[1,6] f32[2,6]", "i j, 1 j, i j -> i j | permute=i"),
    Case("split", "split", lambda x: lax.split(x, (2, 4), 1), "f32[5,6]",
         "i j -> i j, i j | permute=j"),
    Case("stack", "stack", lambda x, y: jnp.stack([x, y], 1), "f32[5,6] f32[5,6]",
         "i j, i j -> i k j | whole=k"),
    Case("unstack", "unstack", lambda x: jnp.unstack(x, axis=1), "f32[5,3]",
         "i j -> i, i, i | whole=j"),
    Case("bitcast_convert_type", "bitcast_convert_type",
         lambda x: lax.bitcast_convert_type(x, jnp.int32), "f32[5,6]", "i j -> i j"),
    Case("bitcast_convert_type to narrower", "bitcast_convert_type",
         lambda x: lax.bitcast_convert_type(x, jnp.int8), "f32[5,6]", "i j -> i j k | whole=k"),
    Case("bitcast_convert_type to wider", "bitcast_convert_type",
         lambda x: lax.bitcast_convert_type(x, jnp.int32), "i8[5,6,4]", "i j k -> i j | whole=k"),
]  # fmt: skip
