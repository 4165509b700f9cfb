"""Matrix products, convolutions, reductions, windows."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax.scaled_dot import scaled_dot_p

from tests.rules.case import Case


def dot(contract, batch=((), ()), **options):
    return lambda x, y: lax.dot_general(x, y, (contract, batch), **options)


def ragged(contract, batch, groups, group_dims):
    numbers = lax.RaggedDotDimensionNumbers((contract, batch), groups, group_dims)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


def larger_in_size(x, y):
    return lax.select(lax.abs(y) > lax.abs(x), y, x)


def one_line(first, second):
    """`a x + b` after another: what devices found must be joined in their order."""
    return first[0] * second[0], first[1] * second[0] + second[1]


PRODUCT = [
    Case("dot", "dot_general", dot(((1,), (0,))), "f32[5,6] f32[6,4]", "i j, j k -> i k | sum=j"),
    Case("dot of vectors", "dot_general", dot(((0,), (0,))), "f32[7] f32[7]", "i, i ->  | sum=i"),
    Case("dot of an outer product", "dot_general", dot(((), ())), "f32[5] f32[6]", "i, j -> i j"),
    Case("dot of a batch", "dot_general", dot(((2,), (1,)), ((0,), (0,))),
         "f32[3,5,6] f32[3,6,4]", "i j k, i k l -> i j l | sum=k"),
    Case("dot of an inner batch", "dot_general", dot(((0,), (2,)), ((2,), (1,))),
         "f32[6,5,3] f32[4,3,6]", "i j k, l k i -> k j l | sum=i"),
    Case("dot over two dims", "dot_general", dot(((1, 2), (2, 0))), "f32[4,5,3] f32[3,2,5]",
         "i j k, k l j -> i l | sum=j k"),
    Case("dot of one row", "dot_general", dot(((1,), (0,))), "f32[1,6] f32[6,4]",
         "1 i, i j -> 1 j | sum=i"),
    Case("dot over an empty dim", "dot_general", dot(((1,), (0,))), "f32[5,0] f32[0,4]",
         "i j, j k -> i k | sum=j"),
    Case("dot of bfloat16 to float32", "dot_general",
         dot(((1,), (0,)), preferred_element_type=jnp.float32), "bf16[5,6] bf16[6,4]",
         "i j, j k -> i k | sum=j"),
    Case("dot of bfloat16", "dot_general", dot(((1,), (0,))), "bf16[5,6] bf16[6,4]",
         "i j, j k -> i k | sum=j",
         tolerance=0.1),
    Case("dot of complex", "dot_general", dot(((1,), (0,))), "c64[5,6] c64[6,4]",
         "i j, j k -> i k | sum=j"),
    Case("dot of integers", "dot_general", dot(((1,), (0,))), "i32[5,6] i32[6,4]",
         "i j, j k -> i k | sum=j"),
    Case("dot of integers to wider", "dot_general",
         dot(((1,), (0,)), preferred_element_type=jnp.int32), "i8[5,6] i8[6,4]",
         "i j, j k -> i k | sum=j"),
    Case("dot of booleans", "dot_general", dot(((1,), (0,))), "bool[5,6] bool[6,4]",
         "i j, j k -> i k | or=j"),
    Case("scaled dot", "scaled_dot", lambda x, y, s, t: scaled_dot_p.bind(
        x, y, s, t, dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=np.dtype(np.float32)),
        "f8[2,5,24] f8[2,4,24] f8[2,5,6]+ f8[2,4,12]+",
         "i j (k l), i m (k l), i j k, i m (k n) -> i j m | sum=k whole=l n"),
    Case("ragged dot of rows", "ragged_dot_general", ragged(((1,), (1,)), ((), ()), [0], [0]),
         "f32[6,5] f32[3,5,4] i32[3]<3", "i j, k j l, m -> i l | sum=j k whole=m"),
    Case("ragged dot of rows of many groups", "ragged_dot_general",
         ragged(((1,), (1,)), ((), ()), [0], [0]), "f32[13,3] f32[7,3,4] i32[7]<3",
         "i j, k j l, m -> i l | sum=j k whole=m"),
    Case("ragged dot of rows, all in groups", "ragged_dot_general",
         lambda x, y: ragged(((1,), (2,)), ((), ()), [0], [1])(x, y, jnp.array([4, 0, 5, 2])),
         "f32[11,3] f32[4,4,3]", "i j, k l j, m -> i k | sum=j l whole=m"),
    Case("ragged dot of rows of a batch", "ragged_dot_general",
         ragged(((2,), (1,)), ((0,), (3,)), [1], [0]),
         "f32[2,6,5] f32[3,5,4,2] i32[3]<3", "i j k, l k m i, n -> i j m | sum=k l whole=n"),
    Case("ragged dot of rows of a batch with its own groups", "ragged_dot_general",
         ragged(((2,), (1,)), ((0,), (3,)), [1], [0]),
         "f32[2,6,5] f32[3,5,4,2] i32[2,3]<3", "i j k, l k m i, i n -> i j m | sum=k l whole=n"),
    Case("ragged dot of rows of rows", "ragged_dot_general",
         ragged(((2,), (1,)), ((), ()), [1], [0]),
         "f32[4,6,5] f32[3,5,2] i32[4,3]<3", "i j k, l k m, i n -> i j m | sum=k l whole=n"),
    Case("ragged dot of rows of rows of rows, many groups", "ragged_dot_general",
         ragged(((3,), (1,)), ((), ()), [2], [0]),
         "f32[2,3,9,2] f32[7,2,3] i32[2,3,7]<3",
         "i j k l, m l n, i j o -> i j k n | sum=l m whole=o"),
    Case("ragged dot of columns", "ragged_dot_general", ragged(((1,), (0,)), ((), ()), [1], []),
         "f32[4,6] f32[6,5] i32[3]<3", "i j, j k, l -> m i k | sum=j whole=l"),
    Case("ragged dot of columns of many groups", "ragged_dot_general",
         ragged(((0,), (1,)), ((), ()), [0], []), "f32[13,2] f32[3,13] i32[7]<3",
         "i j, k i, l -> m j k | sum=i whole=l"),
    Case("ragged dot of columns of a batch", "ragged_dot_general",
         ragged(((2,), (1,)), ((0,), (0,)), [2], []), "f32[2,4,6] f32[2,6,5] i32[2,3]<3",
         "i j k, i k l, i m -> n i j l | sum=k whole=m"),
    Case("ragged dot of columns, the batch last", "ragged_dot_general",
         ragged(((1,), (0,)), ((2,), (1,)), [1], []), "f32[4,6,2] f32[6,2,5] i32[2,3]<3",
         "i j k, j k l, k m -> n k i l | sum=j whole=m"),
    Case("ragged dot of a batch", "ragged_dot_general",
         ragged(((2,), (1,)), ((0,), (0,)), [0], []), "f32[6,4,5] f32[6,5,3] i32[3]<3",
         "i j k, i k l, m -> i j l | sum=k whole=m",
         unclaimed="0,2 1,2: sizes of groups are no numbers to add"),
]  # fmt: skip

REDUCTION = [
    Case("reduce_sum", "reduce_sum", lambda x: lax.reduce_sum(x, (1,)), "f32[5,6,7]",
         "i j k -> i k | sum=j"),
    Case("reduce_sum of all", "reduce_sum", lambda x: lax.reduce_sum(x, (0, 1)), "f32[5,6]+",
         "i j ->  | sum=i j"),
    Case("reduce_sum of none", "reduce_sum", lambda x: lax.reduce_sum(x, ()), "f32[5,6]",
         "i j -> i j"),
    Case("reduce_sum of integers", "reduce_sum", lambda x: lax.reduce_sum(x, (1,)), "i8[5,7]",
         "i j -> i | sum=j"),
    Case("reduce_sum of complex", "reduce_sum", lambda x: lax.reduce_sum(x, (1,)), "c64[5,7]",
         "i j -> i | sum=j"),
    Case("reduce_sum of an empty dim", "reduce_sum", lambda x: lax.reduce_sum(x, (1,)),
         "f32[5,0]", "i j -> i | sum=j"),
    Case("reduce_max", "reduce_max", lambda x: lax.reduce_max(x, (1,)), "f32[5,7]",
         "i j -> i | max=j"),
    Case("reduce_max of bfloat16", "reduce_max", lambda x: lax.reduce_max(x, (1,)), "bf16[5,7]",
         "i j -> i | max=j"),
    Case("reduce_max of float8", "reduce_max", lambda x: lax.reduce_max(x, (1,)), "f8[5,7]",
         "i j -> i | max=j"),
    Case("reduce_max of integers", "reduce_max", lambda x: lax.reduce_max(x, (1,)), "i8[5,7]",
         "i j -> i | max=j"),
    Case("reduce_max of booleans", "reduce_max", lambda x: lax.reduce_max(x, (1,)), "bool[5,7]",
         "i j -> i | or=j"),
    Case("reduce_min", "reduce_min", lambda x: lax.reduce_min(x, (0,)), "f32[5,7]",
         "i j -> j | min=i"),
    Case("reduce_min of unsigned", "reduce_min", lambda x: lax.reduce_min(x, (0,)), "u8[5,7]",
         "i j -> j | min=i"),
    Case("reduce_min of booleans", "reduce_min", lambda x: lax.reduce_min(x, (0,)), "bool[5,7]",
         "i j -> j | and=i"),
    Case("reduce_prod", "reduce_prod", lambda x: lax.reduce_prod(x, (1,)), "f32[5,7]",
         "i j -> i | prod=j"),
    Case("reduce_prod of integers", "reduce_prod", lambda x: lax.reduce_prod(x, (1,)), "i32[5,7]",
         "i j -> i | prod=j"),
    Case("reduce_and", "reduce_and", lambda x: lax.reduce_and(x, (1,)), "bool[5,7]",
         "i j -> i | and=j"),
    Case("reduce_or", "reduce_or", lambda x: lax.reduce_or(x, (1,)), "bool[5,7]",
         "i j -> i | or=j"),
    Case("reduce_or of integers", "reduce_or", lambda x: lax.reduce_or(x, (1,)), "i32[5,7]",
         "i j -> i | permute=j"),
    Case("reduce_and of integers", "reduce_and", lambda x: lax.reduce_and(x, (1,)), "i32[5,2]",
         "i j -> i | permute=j"),
    Case("reduce_xor", "reduce_xor", lambda x: lax.reduce_xor(x, (1,)), "i32[5,7]",
         "i j -> i | permute=j"),
    Case("reduce_xor of two dims", "reduce_xor", lambda x: lax.reduce_xor(x, (0, 2)),
         "u8[5,3,4]", "i j k -> j | permute=i k"),
    Case("reduce_xor of booleans", "reduce_xor", lambda x: lax.reduce_xor(x, (1,)), "bool[5,7]",
         "i j -> i | permute=j"),
    Case("reduce", "reduce", lambda x: lax.reduce(x, np.float32(0), larger_in_size, (1,)),
         "f32[5,7]", "i j,  -> i | permute=j"),
    Case("reduce of lines after each other", "reduce",
         lambda x, y: lax.reduce((x, y), (np.float32(1), np.float32(0)), one_line, (0,)),
         "f32[12,3] f32[12,3]", "i j, i j, ,  -> j, j | permute=i"),
    Case("reduce from a number", "reduce", lambda x: lax.reduce(x, np.float32(3), lax.add, (1,)),
         "f32[5,7]", "i j,  -> i | whole=j"),
    Case("reduce from zero to the largest", "reduce",
         lambda x: lax.reduce(x, np.float32(0), lax.max, (1,)), "f32[5,7]",
         "i j,  -> i | permute=j"),
    Case("reduce to the last", "reduce",
         lambda x: lax.reduce(x, np.float32(0), lambda a, b: b, (1,)), "f32[5,7]",
         "i j,  -> i | whole=j", unclaimed="0: functions are not looked into"),
    Case("reduce from what is computed", "reduce",
         lambda x, y: lax.reduce(x, y[0], lax.add, (1,)), "f32[5,7] f32[1]",
         "i j,  -> i | whole=j", unclaimed="0,1: functions are not looked into"),
    Case("reduce of two dims", "reduce",
         lambda x: lax.reduce(x, np.float32(0), larger_in_size, (2, 0)),
         "f32[5,3,4]", "i j k,  -> j | permute=i k"),
    Case("argmax", "argmax", lambda x: lax.argmax(x, 1, np.int32), "f32[5,7]",
         "i j -> i | permute=j"),
    Case("argmax of ties", "argmax", lambda x: lax.argmax(x, 0, np.int32), "i32[12,7]<3",
         "i j -> j | permute=i"),
    Case("argmax beside NaN", "argmax", lambda x: lax.argmax(lax.sqrt(x), 1, np.int32),
         "f32[5,7]", "i j -> i | permute=j"),
    Case("argmax of the lowest", "argmax",
         lambda x: lax.argmax(lax.full_like(x, -np.inf), 1, np.int32), "f32[5,7]",
         "i j -> i | permute=j"),
    Case("argmax of booleans", "argmax", lambda x: lax.argmax(x, 1, np.int32), "bool[6,7]",
         "i j -> i | permute=j"),
    Case("argmin", "argmin", lambda x: lax.argmin(x, 1, np.int32), "f32[2,5,7]",
         "i j k -> i k | permute=j"),
    Case("argmin of unsigned", "argmin", lambda x: lax.argmin(x, 0, np.int32), "u8[12]<3",
         "i ->  | permute=i"),
]  # fmt: skip

CASES = [*PRODUCT, *REDUCTION]
