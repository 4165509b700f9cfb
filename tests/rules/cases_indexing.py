"""Reading and writing at positions that are data."""

import jax.numpy as jnp
from jax import lax

from tests.rules.case import Case

CLIP, FILL, PROMISE = "clip", "fill", "promise_in_bounds"


def rows(mode=FILL, **options):
    """Whole rows of a table, by their numbers."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lambda x, i: lax.gather(x, i, numbers, (1, x.shape[1]), mode=mode, **options)


def columns(mode=CLIP):
    numbers = lax.GatherDimensionNumbers((0,), (1,), (1,))
    return lambda x, i: lax.gather(x, i, numbers, (x.shape[0], 1), mode=mode)


def points(mode=FILL):
    """Single elements, by the numbers of row and column."""
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return lambda x, i: lax.gather(x, i, numbers, (1, 1), mode=mode)


def gather(numbers, sizes, mode=FILL):
    return lambda x, i: lax.gather(x, i, numbers, sizes, mode=mode)


def scatter(function, numbers, mode=FILL, **options):
    return lambda x, i, u: function(x, i, u, numbers, mode=mode, **options)


ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
POINTS = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
KEPT = lax.ScatterDimensionNumbers((0, 1), (), (0,))  # windows of one row that keep their dim
PARTS = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
BATCH = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
EACH = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
WINDOW = lax.ScatterDimensionNumbers((0, 1), (), (0, 1))  # one window of rows and columns
ROW_WINDOW = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
EDGE = lax.ScatterDimensionNumbers((0, 1), (), (0,))  # the first columns of some rows
APPLY = lax.ScatterDimensionNumbers((1,), (0,), (0,))

GATHER = [
    Case("gather of rows, fill", "gather", rows(), "f32[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | sum=i"),
    Case("gather of rows, fill with a number", "gather", rows(fill_value=3.5),
         "f32[7,5] i32[6,1]~7", "i j, k 1 -> k j | sum=i"),
    Case("gather of rows, fill with zero", "gather", rows(fill_value=0), "f32[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | sum=i"),
    Case("gather of rows, clip", "gather", rows(CLIP), "f32[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | sum=i"),
    Case("gather of rows, promise", "gather", rows(PROMISE), "f32[7,5] i32[6,1]<7",
         "i j, k 1 -> k j | sum=i"),
    Case("gather of rows of integers", "gather", rows(), "i8[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | sum=i",
         unclaimed="0: an odd number of the lowest integers adds up to the lowest integer"),
    Case("gather of rows of unsigned", "gather", rows(), "u32[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | sum=i"),
    Case("gather of rows of booleans", "gather", rows(), "bool[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | or=i"),
    Case("gather of rows of bfloat16", "gather", rows(), "bf16[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | sum=i"),
    Case("gather of rows of keys", "gather", rows(CLIP), "key[7,5] i32[6,1]~7",
         "i j, k 1 -> k j | whole=i", timid="i: keys have no sum, though their words do"),
    Case("gather by bytes", "gather", rows(CLIP), "f32[300,5] u8[6,1]<250",
         "i j, k 1 -> k j | sum=i"),
    Case("gather by signed bytes", "gather", rows(), "f32[130,5] i8[6,1]~120",
         "i j, k 1 -> k j | sum=i"),
    Case("gather by unsigned", "gather", rows(), "f32[7,5] u32[6,1]<12", "i j, k 1 -> k j | sum=i"),
    Case("gather of columns", "gather", columns(), "f32[5,7] i32[2,3,1]~7",
         "i j, k l 1 -> i k l | sum=j"),
    Case("gather of points, fill", "gather", points(), "f32[6,7] i32[5,2]~7",
         "i j, k l -> k | sum=i j whole=l"),
    Case("gather of points, clip", "gather", points(CLIP), "f32[6,7] i32[5,2]~7",
         "i j, k l -> k | sum=i j whole=l"),
    Case("gather of one", "gather",
         gather(lax.GatherDimensionNumbers((0,), (0,), (0,)), (1, 5)), "f32[7,5] i32[1]~4",
         "i j, 1 -> j | sum=i"),
    Case("gather that keeps the dim", "gather",
         gather(lax.GatherDimensionNumbers((1, 2), (), (0,)), (1, 5), CLIP),
         "f32[7,5] i32[6,1]~7", "i j, k 1 -> k 1 j | sum=i"),
    Case("gather of parts of rows", "gather",
         gather(lax.GatherDimensionNumbers((1,), (0,), (0, 1)), (1, 2)), "f32[7,5] i32[6,2]<4",
         "i j, k l -> k m | sum=i j whole=l m"),
    Case("gather of parts of rows, clip", "gather",
         gather(lax.GatherDimensionNumbers((1,), (0,), (0, 1)), (1, 2), CLIP),
         "f32[7,5] i32[6,2]~4", "i j, k l -> k m | sum=i j whole=l m"),
    Case("gather of windows", "gather",
         gather(lax.GatherDimensionNumbers((0, 2), (), (0,)), (4, 5)), "f32[7,5] i32[6,1]~4",
         "i j, k 1 -> l k j | sum=i whole=l"),
    Case("gather of windows at two numbers", "gather",
         gather(lax.GatherDimensionNumbers((1, 2), (), (1, 0)), (3, 2), CLIP),
         "f32[7,5] i32[2,2]~4", "i j, k l -> k m n | sum=i j whole=l m n"),
    Case("gather of windows in a batch", "gather",
         gather(lax.GatherDimensionNumbers((1,), (), (1,), (0,), (0,)), (1, 3)),
         "f32[5,7] i32[5,1]~5", "i j, i 1 -> i k | sum=j whole=k"),
    Case("gather of windows in an inner batch", "gather",
         gather(lax.GatherDimensionNumbers((0, 3), (), (0,), (1,), (1,)), (3, 1, 4), PROMISE),
         "i32[7,5,4] i32[2,5,1]<5", "i j k, l j 1 -> m l j k | sum=i whole=m"),
    Case("gather of full rows by two numbers", "gather",
         gather(lax.GatherDimensionNumbers((1,), (0,), (0, 1)), (1, 5)), "f32[7,5] i32[6,2]~1",
         "i j, k l -> k j | sum=i whole=l"),
    Case("gather in a batch", "gather", gather(EACH, (1, 1)), "f32[5,7] i32[5,3,1]~7",
         "i j, i k 1 -> i k | sum=j"),
    Case("gather in a batch, clip", "gather", gather(EACH, (1, 1), CLIP), "f32[5,7] i32[5,1]~7",
         "i j, i 1 -> i | sum=j"),
    Case("gather of the first", "gather",
         gather(lax.GatherDimensionNumbers((1,), (0,), (1,)), (1, 5)), "f32[7,5] i32[6,1]~1",
         "i j, k 1 -> k j | whole=i"),
    Case("gather of nothing", "gather", rows(), "f32[7,5] i32[0,1]<7", "i j, k 1 -> k j | sum=i"),
    Case("dynamic_slice", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 5)), "f32[7,5] i32[]<4",
         "i j, ,  -> k j | sum=i whole=k"),
    Case("dynamic_slice of a window", "dynamic_slice",
         lambda x, i, j: lax.dynamic_slice(x, (i, j), (5, 3), allow_negative_indices=False),
         "f32[7,6] i32[]~4 i32[]<3", "i j, ,  -> k l | sum=i j whole=k l"),
    Case("dynamic_slice of a window of one column", "dynamic_slice",
         lambda x, i, j: lax.dynamic_slice(x, (i, j), (3, 1), allow_negative_indices=False),
         "i8[7,6] i32[]~4 i32[]<3", "i j, ,  -> k 1 | sum=i j whole=k"),
    Case("dynamic_slice past the end of booleans", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i + 9,), (4,)), "bool[7] i32[]<4",
         "i,  -> j | or=i whole=j"),
    Case("dynamic_slice of keys", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i,), (2,)), "key[7] i32[]<4", "i,  -> j | whole=i j"),
    Case("dynamic_slice of one", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 5)), "f32[7,5] i32[]<7",
         "i j, ,  -> 1 j | sum=i"),
    Case("dynamic_slice past the end", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i + 9, 0), (1, 5)), "f32[7,5] i32[]<7",
         "i j, ,  -> 1 j | sum=i"),
    Case("dynamic_slice before the start", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i - 99, 0), (1, 5), allow_negative_indices=False),
         "f32[7,5] i32[]<7", "i j, ,  -> 1 j | sum=i"),
    Case("dynamic_slice of a point", "dynamic_slice",
         lambda x, i, j: lax.dynamic_slice(x, (i, j), (1, 1), allow_negative_indices=False),
         "f32[7,5] i32[]<7 i32[]<5", "i j, ,  -> 1 1 | sum=i j"),
    Case("dynamic_slice of booleans", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 5)), "bool[7,5] i32[]<7",
         "i j, ,  -> 1 j | or=i"),
    Case("dynamic_slice by a byte", "dynamic_slice",
         lambda x, i, j: lax.dynamic_slice_p.bind(x, i, j, slice_sizes=(1, 3)),
         "f32[250,5] u8[]<240 u8[]<1", "i j, ,  -> 1 k | sum=i j whole=k"),
]  # fmt: skip

SCATTER = [
    Case("scatter-add", "scatter-add", scatter(lax.scatter_add, ROWS),
         "f32[7,5] i32[6,1]~7 f32[6,5]", "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-add, clip", "scatter-add", scatter(lax.scatter_add, ROWS, CLIP),
         "f32[7,5] i32[6,1]~7 f32[6,5]", "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-add, promise", "scatter-add", scatter(lax.scatter_add, ROWS, PROMISE),
         "f32[7,5] i32[6,1]<7 f32[6,5]", "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-add of integers", "scatter-add", scatter(lax.scatter_add, ROWS),
         "i8[7,5] i32[6,1]~7 i8[6,5]", "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-add of bfloat16", "scatter-add", scatter(lax.scatter_add, ROWS),
         "bf16[7,5] i32[6,1]~7 bf16[6,5]", "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-add of points", "scatter-add", scatter(lax.scatter_add, POINTS),
         "f32[6,7] i32[5,2]~7 f32[5]", "i j, k l, k -> i j | sum=k whole=l"),
    Case("scatter-add of points, clip", "scatter-add", scatter(lax.scatter_add, POINTS, CLIP),
         "f32[6,7] i32[5,2]~7 f32[5]", "i j, k l, k -> i j | sum=k whole=l"),
    Case("scatter-add in a batch", "scatter-add", scatter(lax.scatter_add, BATCH),
         "f32[5,7] i32[5,3,1]~7 f32[5,3]", "i j, i k 1, i k -> i j | sum=k"),
    Case("scatter-add of kept dims", "scatter-add", scatter(lax.scatter_add, KEPT),
         "f32[7,5] i32[1]<7 f32[1,5]", "i j, 1, 1 j -> i j"),
    Case("scatter-add of parts", "scatter-add", scatter(lax.scatter_add, PARTS),
         "f32[7,5] i32[3,2]<3 f32[3,2,3]", "i j, k l, k m n -> i j | sum=k whole=l m n"),
    Case("scatter-add of parts, some outside", "scatter-add",
         scatter(lax.scatter_add, PARTS), "f32[7,5] i32[4,2]~5 f32[4,2,3]",
         "i j, k l, k m n -> i j | sum=k whole=l m n"),
    Case("scatter-max of windows, clip", "scatter-max",
         scatter(lax.scatter_max, PARTS, CLIP), "f32[7,5] i32[4,2]~5 f32[4,2,3]",
         "i j, k l, k m n -> i j | max=k whole=l m n"),
    Case("scatter-mul of windows before the batch", "scatter-mul",
         scatter(lax.scatter_mul, lax.ScatterDimensionNumbers((0, 2), (), (0,))),
         "f32[7,5] i32[2,1]~5 f32[3,2,5]", "i j, k 1, l k j -> i j | prod=k whole=l"),
    Case("scatter of windows in a batch", "scatter",
         scatter(lax.scatter, lax.ScatterDimensionNumbers((1,), (), (1,), (0,), (0,))),
         "f32[5,7] i32[5,1]~5 f32[5,3]", "i j, i 1, i k -> i j | whole=k"),
    Case("scatter-add of windows in an inner batch", "scatter-add",
         scatter(lax.scatter_add, lax.ScatterDimensionNumbers((1,), (), (0,), (1,), (0,)), CLIP),
         "f32[7,5] i32[5,1]~5 f32[5,3]", "i j, j 1, j k -> i j | whole=k"),
    Case("scatter-add by bytes", "scatter-add", scatter(lax.scatter_add, ROWS, CLIP),
         "f32[300,5] u8[6,1]<250 f32[6,5]", "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-add of unique rows", "scatter-add",
         lambda x, u: lax.scatter_add(x, jnp.arange(6)[:, None], u, ROWS, unique_indices=True,
                                      indices_are_sorted=True), "f32[7,5] f32[6,5]",
         "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-sub", "scatter-sub", scatter(lax.scatter_sub, ROWS),
         "f32[7,5] i32[6,1]~7 f32[6,5]", "i j, k 1, k j -> i j | sum=k"),
    Case("scatter-mul", "scatter-mul", scatter(lax.scatter_mul, ROWS),
         "f32[7,5] i32[6,1]~7 f32[6,5]", "i j, k 1, k j -> i j | prod=k"),
    Case("scatter-min", "scatter-min", scatter(lax.scatter_min, ROWS),
         "f32[7,5] i32[6,1]~7 f32[6,5]", "i j, k 1, k j -> i j | min=k"),
    Case("scatter-max", "scatter-max", scatter(lax.scatter_max, ROWS, CLIP),
         "i32[7,5] i32[6,1]~7 i32[6,5]", "i j, k 1, k j -> i j | max=k"),
    Case("scatter", "scatter", scatter(lax.scatter, ROWS), "f32[7,5] i32[6,1]~7 f32[6,5]",
         "i j, k 1, k j -> i j | whole=k",
         unclaimed="0,2: which of two updates of one position wins is not defined"),
    Case("scatter of one row", "scatter", scatter(lax.scatter, ROWS, CLIP),
         "f32[7,5] i32[1,1]~7 f32[1,5]", "i j, 1 1, 1 j -> i j"),
    Case("scatter of unique rows", "scatter",
         lambda x, u: lax.scatter(x, jnp.arange(6)[:, None], u, ROWS, unique_indices=True),
         "f32[7,5] f32[6,5]", "i j, k 1, k j -> i j | whole=k"),
    Case("scatter of booleans", "scatter", scatter(lax.scatter, ROWS),
         "bool[7,5] i32[6,1]~7 bool[6,5]", "i j, k 1, k j -> i j | whole=k"),
    Case("scatter of a function", "scatter",
         lambda x, i: lax.scatter_apply(x, i, lax.sin, APPLY, update_shape=(6, 5)),
         "f32[7,5] i32[6,1]~7", "i j, k 1, k j -> i j | whole=k"),
    Case("scatter of the first rows", "scatter", lambda x, u: x.at[0:3].set(u),
         "f32[7,5] f32[3,5]", "i j, 1, k j -> i j | whole=k"),
    Case("scatter of a part of a row", "scatter",
         lambda x, u, i, j: x.at[i, lax.dynamic_slice_in_dim(j, 0, 1)[0]].set(u),
         "f32[7,5] f32[] i32[]<7 i32[2]<3", "i j, k,  -> i j | whole=k"),
    Case("scatter of a window", "scatter",
         lambda x, i, u: lax.scatter(x, i, u, WINDOW, mode=FILL),
         "f32[7,6] i32[2]<4 f32[3,2]", "i j, k, l m -> i j | whole=k l m"),
    Case("scatter of a window, dropped", "scatter",
         lambda x, i, u: lax.scatter(x, i, u, WINDOW, mode=FILL),
         "f32[7,6] i32[2]~9 f32[3,2]", "i j, k, l m -> i j | whole=k l m",
         unclaimed="0 0,1: nothing is written"),
    Case("scatter of a window, clipped", "scatter",
         lambda x, i, u: lax.scatter(x, i, u, WINDOW, mode=CLIP),
         "f32[7,6] i32[2]~9 f32[3,2]", "i j, k, l m -> i j | whole=k l m"),
    Case("scatter-add of a window", "scatter-add",
         lambda x, i, u: lax.scatter_add(x, i, u, WINDOW, mode=PROMISE),
         "f32[7,6] i32[2]<4 f32[3,2]", "i j, k, l m -> i j | whole=k l m"),
    Case("scatter-sub of a window of a row", "scatter-sub",
         lambda x, i, u: lax.scatter_sub(x, i, u, ROW_WINDOW, mode=CLIP),
         "f32[7,6] i32[1,2]<5 f32[1,2]", "i j, 1 k, 1 l -> i j | whole=k l"),
    Case("scatter-max of a window at the start", "scatter-max",
         lambda x, i, u: lax.scatter_max(x, i, u, EDGE, mode=FILL),
         "i32[7,6] i32[1]<4 i32[3,2]", "i j, 1, k l -> i j | whole=k l"),
    Case("dynamic_update_slice", "dynamic_update_slice",
         lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), "f32[7,5] f32[3,5] i32[]<5",
         "i j, k j, ,  -> i j | whole=k"),
    Case("dynamic_update_slice past the end", "dynamic_update_slice",
         lambda x, u, i: lax.dynamic_update_slice(x, u, (i + 9, 1)), "f32[7,5] f32[4,2] i32[]<5",
         "i j, k l, ,  -> i j | whole=k l"),
    Case("dynamic_update_slice before the start", "dynamic_update_slice",
         lambda x, u, i: lax.dynamic_update_slice(x, u, (i - 99, 1), allow_negative_indices=False),
         "f32[7,6] f32[4,2] i32[]<5", "i j, k l, ,  -> i j | whole=k l"),
    Case("dynamic_update_slice of one", "dynamic_update_slice",
         lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), "f32[7,5] f32[1,5] i32[]<7",
         "i j, 1 j, ,  -> i j"),
    Case("dynamic_update_slice of a point", "dynamic_update_slice",
         lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
         "f32[7,5] f32[1,1] i32[]<7 i32[]<5", "i j, 1 1, ,  -> i j"),
    Case("dynamic_update_slice of a part of one", "dynamic_update_slice",
         lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
         "i8[7,5] i8[1,2] i32[]<7 i32[]<5", "i j, 1 k, ,  -> i j | whole=k"),
    Case("dynamic_update_slice by a byte", "dynamic_update_slice",
         lax.dynamic_update_slice_p.bind, "f32[250,5] f32[2,4] u8[]<240 u8[]<1",
         "i j, k l, ,  -> i j | whole=k l"),
]  # fmt: skip

CASES = [*GATHER, *SCATTER]
