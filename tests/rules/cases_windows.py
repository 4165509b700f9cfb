"""Convolutions and reductions over windows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.case import Case


def conv(spec=("NCHW", "OIHW", "NCHW"), strides=(1, 1), padding="VALID", **options):
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=spec, **options
    )


def pool(init, function, window, strides, padding="VALID"):
    return lambda x: lax.reduce_window(x, init, function, window, strides, padding)


def max_pool_gradient(source, operand):
    function = pool(-np.inf, lax.max, (1, 2), (1, 2))
    return jax.vjp(function, operand)[1](source)[0]


def half_square_and_add(x, y):
    return x * x / 8 + y


def gradient_of(function, shape):
    return lambda source, operand: jax.vjp(function, operand)[1](source)[0]


def input_gradient(cotangent, kernel):
    of = conv(strides=(2, 1), padding="SAME")
    return jax.linear_transpose(lambda x: of(x, kernel), jnp.zeros((2, 3, 8, 5)))(cotangent)[0]


def kernel_gradient(cotangent, x):
    of = conv(strides=(2, 1), padding=[(1, 1), (0, 0)])
    return jax.linear_transpose(lambda w: of(x, w), jnp.zeros((4, 3, 3, 2)))(cotangent)[0]


def grouped_kernel_gradient(cotangent, x):
    of = conv(padding="SAME", feature_group_count=2)
    return jax.linear_transpose(lambda w: of(x, w), jnp.zeros((4, 2, 3, 3)))(cotangent)[0]


CONVOLUTION = [
    Case("conv", "conv_general_dilated", conv(), "f32[3,4,6,5] f32[5,4,3,2]",
         "i j k l, m j n o -> i m k l | sum=j whole=n o permute=k l"),
    Case("conv of booleans", "conv_general_dilated", conv(padding="SAME"),
         "bool[3,4,6,5] bool[5,4,3,2]", "i j k l, m j n o -> i m k l | or=j whole=n o permute=k l"),
    Case("conv of booleans over the whole image", "conv_general_dilated", conv(),
         "bool[3,4,6,5] bool[5,4,6,5]", "i j k l, m j k l -> i m 1 1 | or=j k l permute=k l"),
    Case("conv of channels last", "conv_general_dilated", conv(("NHWC", "HWIO", "NHWC")),
         "f32[3,6,5,4] f32[3,2,4,5]", "i j k l, m n l o -> i j k o | sum=l whole=m n permute=j k"),
    Case("conv of size one", "conv_general_dilated", conv(), "f32[3,4,6,5] f32[5,4,1,1]",
         "i j k l, m j 1 1 -> i m k l | sum=j"),
    Case("conv of size one with strides", "conv_general_dilated", conv(strides=(2, 1)),
         "f32[3,4,6,5] f32[5,4,1,1]", "i j k l, m j 1 1 -> i m k l | sum=j permute=k"),
    Case("conv of the whole image", "conv_general_dilated", conv(),
         "f32[3,4,6,5] f32[5,4,6,5]", "i j k l, m j k l -> i m 1 1 | sum=j k l permute=k l"),
    Case("conv with padding", "conv_general_dilated", conv(padding="SAME"),
         "f32[3,4,6,5] f32[5,4,3,3]", "i j k l, m j n o -> i m k l | sum=j whole=n o permute=k l"),
    Case("conv with a dilated input",
         "conv_general_dilated", conv(padding=[(0, 0), (0, 0)], lhs_dilation=(2, 1)),
         "f32[3,4,6,5] f32[5,4,1,1]", "i j k l, m j 1 1 -> i m k l | sum=j permute=k"),
    Case("conv with a dilated kernel", "conv_general_dilated", conv(rhs_dilation=(2, 1)),
         "f32[3,4,6,5] f32[5,4,3,1]", "i j k l, m j k 1 -> i m n l | sum=j k whole=n permute=k"),
    Case("conv in groups of features", "conv_general_dilated", conv(feature_group_count=4),
         "f32[3,24,5,4] f32[24,6,3,2]",
         "i (j k) l m, (j n) k o p -> i (j n) l m | sum=k whole=o p permute=l m"),
    Case("conv by feature", "conv_general_dilated", conv(feature_group_count=5),
         "f32[3,5,6,4] f32[5,1,3,2]", "i j k l, j 1 m n -> i j k l | whole=m n permute=k l"),
    Case("conv in groups of the batch", "conv_general_dilated", conv(batch_group_count=4),
         "f32[24,5,5,4] f32[24,5,3,2]",
         "(i j) k l m, (i n) k o p -> j (i n) l m | sum=k whole=o p permute=l m"),
    Case("conv of integers", "conv_general_dilated",
         conv(preferred_element_type=jnp.int32), "i8[3,4,6,5] i8[5,4,3,2]",
         "i j k l, m j n o -> i m k l | sum=j whole=n o permute=k l"),

    Case("conv to less than its kernel", "conv_general_dilated", conv(),
         "f32[3,4,8,5] f32[5,4,6,3]",
         "i j k l, m j k n -> i m o l | sum=j k whole=n o permute=k l"),
    Case("conv with a kernel wider than shards", "conv_general_dilated", conv(padding="SAME"),
         "f32[1,2,9,12] f32[3,2,7,9]", "1 i j k, l i m n -> 1 l j k | sum=i whole=m n permute=j k"),
    Case("conv with strides", "conv_general_dilated", conv(strides=(2, 3), padding="SAME"),
         "f32[2,3,9,13] f32[4,3,3,2]", "i j k l, m j n o -> i m k l | sum=j whole=n o permute=k l"),
    Case("conv with explicit and negative padding", "conv_general_dilated",
         conv(strides=(2, 1), padding=[(3, -2), (-1, 4)]), "f32[2,3,11,8] f32[4,3,3,2]",
         "i j k l, m j n o -> i m k l | sum=j whole=n o permute=k l"),
    Case("conv with everything", "conv_general_dilated",
         conv(strides=(3, 2), padding=[(-2, 5), (4, 1)], lhs_dilation=(2, 3), rhs_dilation=(2, 1)),
         "f32[2,3,9,7] f32[4,3,3,4]", "i j k l, m j n o -> i m k l | sum=j whole=n o permute=k l"),
    Case("conv with a dilated input whose phases differ", "conv_general_dilated",
         conv(padding=[(1, 2), (0, 0)], lhs_dilation=(3, 1)), "f32[2,3,7,4] f32[4,3,3,1]",
         "i j k l, m j n 1 -> i m k l | sum=j whole=n permute=k"),
    Case("conv to less than its kernel, of rows that nothing reads", "conv_general_dilated",
         conv(("NCH", "OIH", "NCH"), (3,), [(1, -3)], lhs_dilation=(2,)), "f32[1,1,12] f32[1,1,21]",
         "1 1 i, 1 1 i -> 1 1 1 | sum=i permute=i"),
    Case("conv in one dim", "conv_general_dilated", conv(("NCH", "OIH", "NCH"), (1,), "SAME"),
         "f32[2,3,13] f32[4,3,4]", "i j k, l j m -> i l k | sum=j whole=m permute=k"),
    Case("conv in three dims", "conv_general_dilated",
         conv(("NDHWC", "DHWIO", "NDHWC"), (1, 2, 1), "SAME"), "f32[1,5,6,7,2] f32[3,2,3,2,3]",
         "1 i j k l, m n o l p -> 1 i j k p | sum=l whole=m n o permute=i j k"),
    Case("gradient of a conv's input", "conv_general_dilated", input_gradient,
         "f32[2,4,4,5] f32[4,3,3,2]", "i j k l, j m n o -> i m k l | sum=j whole=n o permute=k l"),
    Case("gradient of a conv's kernel", "conv_general_dilated", kernel_gradient,
         "f32[2,4,4,5] f32[2,3,8,6]",
         "i j k l, i m k l -> m j n o | sum=i k l whole=n o permute=k l"),
    Case("gradient of a grouped conv's kernel", "conv_general_dilated", grouped_kernel_gradient,
         "f32[2,4,8,6] f32[2,4,8,6]",
         "i (j k) l m, i (j n) l m -> (j n) k o p | sum=i l m whole=o p permute=l m"),
]  # fmt: skip

WINDOWS = [
    Case("reduce_window_sum", "reduce_window_sum", pool(0.0, lax.add, (1, 3), (1, 1), "SAME"),
         "f32[5,6]", "i j -> i j | permute=j"),
    Case("reduce_window_max", "reduce_window_max", pool(-np.inf, lax.max, (1, 2), (1, 2)),
         "f32[5,6]", "i j -> i j | permute=j"),
    Case("reduce_window_min", "reduce_window_min", pool(np.inf, lax.min, (2, 1), (1, 1)),
         "f32[5,6]", "i j -> i j | permute=i"),
    Case("reduce_window", "reduce_window", pool(np.float32(0), half_square_and_add, (1, 2), (1, 1)),
         "f32[5,6]", "i j,  -> i j | permute=j"),
    Case("select_and_scatter_add", "select_and_scatter_add", max_pool_gradient,
         "f32[5,3] f32[5,6]", "i j, i j -> i j | permute=j"),
    Case("select_and_gather_add", "select_and_gather_add",
         lambda t, x: jax.jvp(pool(-np.inf, lax.max, (1, 2), (1, 2)), (x,), (t,))[1],
         "f32[5,6] f32[5,6]", "i j, i j -> i j | permute=j"),

    Case("reduce_window_sum with dilations", "reduce_window_sum",
         lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 2), (2, 1), ((2, 1), (0, 3)),
                                     base_dilation=(3, 2), window_dilation=(1, 2)),
         "f32[7,9]", "i j -> i j | permute=i j"),
    Case("reduce_window_max over several shards", "reduce_window_max",
         pool(-np.inf, lax.max, (7,), (2,), "SAME"), "f32[13]", "i -> i | permute=i"),
    Case("reduce_window of integers", "reduce_window",
         pool(np.int32(-99), lax.max, (3,), (1,), "SAME"), "i32[11]", "i,  -> i | permute=i"),
    Case("reduce_window of booleans", "reduce_window",
         pool(np.bool_(False), lax.bitwise_or, (3, 2), (1, 1), "SAME"), "bool[7,3]",
         "i j,  -> i j | permute=i j"),
    Case("reduce_window of what is not negative", "reduce_window",
         pool(np.float32(0), lax.max, (3, 3), (2, 2), "SAME"), "f32[9,6]",
         "i j,  -> i j | permute=i j"),
    Case("reduce_window that adds to one", "reduce_window",
         pool(np.float32(1), lax.add, (3,), (1,), "SAME"), "f32[7]", "i,  -> j | whole=i j"),
    Case("reduce_window of nothing", "reduce_window_sum",
         lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (7,), [(-4, -4)], base_dilation=(2,)),
         "f32[5]", "i -> j | whole=i j"),
    Case("reduce_window by a function that pads", "reduce_window",
         pool(np.float32(0.5), half_square_and_add, (3,), (1,), "SAME"), "f32[7]",
         "i,  -> j | whole=i j"),
    Case("gradient of pooling that overlaps", "select_and_scatter_add",
         gradient_of(pool(-np.inf, lax.max, (3, 3), (2, 1), "SAME"), (9, 6)), "f32[5,6] f32[9,6]",
         "i j, i j -> i j | permute=i j"),
    Case("gradient of pooling with gaps", "select_and_scatter_add",
         gradient_of(pool(-np.inf, lax.max, (2,), (5,)), (23,)), "f32[5] f32[23]",
         "i, i -> i | permute=i"),
    Case("gradient of pooling of least numbers", "select_and_scatter_add",
         gradient_of(pool(np.inf, lax.min, (4,), (3,), ((2, 1),)), (14,)), "f32[5] f32[14]",
         "i, i -> i | permute=i"),
    Case("derivative of pooling", "select_and_gather_add",
         lambda t, x: jax.jvp(pool(np.inf, lax.min, (3, 2), (2, 3), "SAME"), (x,), (t,))[1],
         "f32[7,8] f32[7,8]", "i j, i j -> i j | permute=i j"),
]  # fmt: skip

CASES = [*CONVOLUTION, *WINDOWS]
