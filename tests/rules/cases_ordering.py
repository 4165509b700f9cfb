"""Operators that go along one dim in order: running sums, the largest k, sorts."""

from functools import partial

import jax
import numpy as np
from jax import lax

from meshwise._jax import last_argmax_p, last_argmin_p, max_and_argmax_p, min_and_argmin_p
from tests.rules.case import Case


def running(name, arguments="f32[5,6]", axis=1, kind="permute", **options):
    """Rows of one running operator, forwards and in reverse, along either dim."""
    function = getattr(lax, name)
    text = f"i j -> i j | {kind}=" + ("j" if axis else "i")
    title = f"{name} of {arguments} along {axis}"
    return [
        Case(title, name, partial(function, axis=axis), arguments, text, **options),
        Case(f"{title} in reverse", name, partial(function, axis=axis, reverse=True), arguments,
             text, **options),
    ]  # fmt: skip


RUNNING = [
    *running("cumsum"),
    *running("cumsum", axis=0),
    *running("cumsum", "i8[5,6]"),
    *running("cumsum", "c64[5,6]"),
    *running("cumsum", "bf16[5,6]", tolerance=0.1),
    *running("cumsum", "f32[8,260]", axis=0),
    *running("cumprod"),
    *running("cumprod", "i32[5,6]"),
    *running("cummax"),
    *running("cummax", "i32[5,6]"),
    *running("cummin", "f16[5,6]"),
    *running("cummin", "u8[5,6]"),
    *running("cumlogsumexp"),
    *running("cumlogsumexp", "f32[7,90]", axis=0),
    Case("cumsum of a vector", "cumsum", lax.cumsum, "f32[13]", "i -> i | permute=i"),
    Case("cumsum of nothing", "cumsum", lax.cumsum, "f32[0,3]", "i j -> i j | permute=i"),
    Case("cumsum of empty rows", "cumsum", lax.cumsum, "f32[3,0]", "i j -> i j | permute=i"),
    Case("cumsum of one", "cumsum", lax.cumsum, "f32[1,5]", "1 i -> 1 i"),
    *running("cummax", "c64[5,6]", kind="whole", timid="j: with a NaN in them they have no order"),
]  # fmt: skip

LARGEST = [
    Case("top_k", "top_k", lambda x: lax.top_k(x, 3), "f32[5,6]",
         "i j -> i k, i k | whole=k permute=j"),
    Case("top_k of rows", "top_k", lambda x: lax.top_k(x, 3, axis=0), "f32[5,6]",
         "i j -> k j, k j | whole=k permute=i"),
    Case("top_k of more than a shard has", "top_k", lambda x: lax.top_k(x, 11), "bf16[13]",
         "i -> j, j | whole=j permute=i"),
    Case("top_k of all", "top_k", lambda x: lax.top_k(x, 6), "i32[5,6]<3",
         "i j -> i k, i k | whole=k permute=j"),
    Case("top_k of many rows", "top_k", lambda x: lax.top_k(x, 2), "i8[150,9]<2",
         "i j -> i k, i k | whole=k permute=j"),
    Case("top_k of none", "top_k", lambda x: lax.top_k(x, 0), "f32[5,6]",
         "i j -> i k, i k | whole=k permute=j"),
    Case("top_k of one", "top_k", lambda x: lax.top_k(x, 1), "f32[5,6]",
         "i j -> i 1, i 1 | permute=j"),
    Case("approx_max_k", "approx_top_k", lambda x: lax.approx_max_k(x, 3), "f32[5,6]",
         "i j -> i k, i k | whole=k permute=j"),
    Case("approx_min_k", "approx_top_k",
         lambda x: lax.approx_min_k(x, 3, reduction_dimension=0), "f32[7,4]",
         "i j -> k j, k j | whole=k permute=i"),
    Case("approx_max_k of blocks", "approx_top_k",
         lambda x: lax.approx_max_k(x, 3, aggregate_to_topk=False), "f32[5,6]",
         "i j -> i k, i k | whole=j k"),
]  # fmt: skip


def first(name, arguments, axis=1, index=np.int32):
    """A row of argmax or argmin."""
    text = "i j -> i | permute=j" if axis else "i j -> j | permute=i"
    title = f"{name} of {arguments} along {axis}"
    return Case(title, name, lambda x: getattr(lax, name)(x, axis, index), arguments, text)


FIRST = [
    first("argmax", "bool[7,6]"),
    first("argmin", "bool[7,6]"),
    first("argmax", "i32[7,6]<2", 0),
    first("argmin", "u8[7,6]<3", 0, np.uint8),
    first("argmin", "bf16[5,7]", 1, np.int8),
    first("argmax", "f32[4,300]", 0),
    first("argmax", "f32[3,0]", 0),
]


def last(primitive, arguments, axis=1, find=lambda x: x):
    """A row of where the largest or smallest is last."""
    text = "i j -> i | permute=j" if axis else "i j -> j | permute=i"
    title = f"{primitive.name} of {arguments} along {axis}"
    search = partial(primitive.bind, axes=(axis,), index_dtype=np.dtype(np.int32))
    return Case(title, primitive.name, lambda x: search(find(x)), arguments, text)


LAST = [
    last(last_argmax_p, "f32[5,7]"),
    last(last_argmax_p, "i32[12,7]<3", 0),
    last(last_argmin_p, "bool[7,6]", 0),
    last(last_argmin_p, "u8[4,300]<3"),
    last(last_argmax_p, "f32[6,7]", 1, lambda x: lax.full_like(x, -np.inf)),
    last(last_argmin_p, "f32[7,6]", 0, lax.sqrt),
]


def both(primitive, arguments, axis=1, index=np.int32):
    """A row of the largest or smallest and where it is."""
    text = "i j -> i, i | permute=j" if axis else "i j -> j, j | permute=i"
    name = primitive.name
    title = f"{name} of {arguments} along {axis}"
    find = partial(primitive.bind, axes=(axis,), index_dtype=np.dtype(index))
    return Case(title, name, find, arguments, text)


BOTH = [
    both(max_and_argmax_p, "f32[5,7]"),
    both(min_and_argmin_p, "bf16[7,6]", 0, np.int8),
    both(max_and_argmax_p, "i32[12,7]<3", 0),
    both(min_and_argmin_p, "bool[7,6]"),
    both(max_and_argmax_p, "u8[4,300]<3"),
    both(max_and_argmax_p, "f32[3,0]", 0),
]


def by_last(*operands):
    """All operands sorted by all but the last."""
    return lax.sort(operands, num_keys=max(1, len(operands) - 1), dimension=0)


# What is sent least depends on the sizes. tests/rules/test_sorting.py tries every way.
SORTED = [
    Case("sort", "sort", lax.sort, "f32[5,6]", "i j -> i j | permute=j"),
    Case("sort of rows", "sort", lambda x: lax.sort(x, dimension=0), "f32[5,6]",
         "i j -> i j | permute=i"),
    Case("sort of several", "sort", lambda x, y, z: lax.sort((x, y, z), num_keys=2),
         "i32[5,6]<3 i32[5,6]<3 f32[5,6]", "i j, i j, i j -> i j, i j, i j | permute=j"),
    Case("sort of a vector", "sort", lax.sort, "f32[13]", "i -> i | permute=i"),
    Case("argsort of booleans", "sort", jax.numpy.argsort, "bool[17]", "i, i -> i, i | permute=i"),
    Case("sort of complex numbers", "sort", by_last, "c64[7] u8[7]<2 bf16[7]",
         "i, i, i -> i, i, i | permute=i"),
    Case("sort of nothing", "sort", lax.sort, "f32[3,0]", "i j -> i j | permute=j"),
    Case("sort of empty rows", "sort", lambda x: lax.sort(x, dimension=1), "f32[0,3]",
         "i j -> i j | permute=j"),
    Case("sort of many", "sort", by_last, "i8[1001]<3 f32[1001]", "i, i -> i, i | permute=i"),
    Case("sort of many by two keys", "sort", by_last, "u8[2000]<3 bool[2000] f16[2000]",
         "i, i, i -> i, i, i | permute=i"),
]  # fmt: skip

CASES = [*RUNNING, *LARGEST, *FIRST, *LAST, *BOTH, *SORTED]
