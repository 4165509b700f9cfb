"""Windows, convolutions, loops and branches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.drop_in.drawing import Call, Dice
from tests.drop_in.tables.numbers import Row


def _conv(d: Dice) -> Call:
    dims = d.integer(1, 2)
    groups = d.pick(1, 1, 2, 4)
    batch_groups = 1 if groups > 1 else d.pick(1, 1, 2)
    channels, outs = d.pick(1, 2, 3) * groups, d.pick(1, 2) * groups * batch_groups
    spatial = [d.integer(3, 9) for _ in range(dims)]
    window = [d.integer(1, 3) for _ in range(dims)]
    dtype = d.dtype("ffc")
    letters = "HW"[:dims]
    numbers = d.pick(
        (f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        (f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        (f"{letters}NC", f"O{letters}I", f"C{letters}N"),
    )
    sizes = dict(zip(letters, spatial, strict=True))
    sizes |= {"N": d.pick(1, 2, 3, 4) * batch_groups, "C": channels}
    kernel = dict(zip(letters, window, strict=True)) | {"O": outs, "I": channels // groups}
    padding = d.pick("SAME", "VALID", [(d.integer(-1, 2), d.integer(0, 3)) for _ in range(dims)])
    given: dict[str, Any] = {"window_strides": [d.integer(1, 3) for _ in range(dims)]}
    if not isinstance(padding, str):
        given["lhs_dilation"] = [d.integer(1, 2) for _ in range(dims)]
    given["rhs_dilation"] = [d.integer(1, 2) for _ in range(dims)]
    return d.call(
        lambda x, k: lax.conv_general_dilated(
            x, k, padding=padding, dimension_numbers=numbers, feature_group_count=groups,
            batch_group_count=batch_groups, **given),
        d.ordinary([sizes[c] for c in numbers[0]], dtype=dtype),
        d.ordinary([kernel[c] for c in numbers[1]], dtype=dtype),
    )  # fmt: skip


def _reduce_window(d: Dice) -> Call:
    shape = d.shape(1, 3, 1)
    window = tuple(d.integer(1, min(3, n)) for n in shape)
    strides = tuple(d.integer(1, 3) for _ in shape)
    base, dilation = ([d.integer(1, 2) for _ in shape] for _ in range(2))
    init, operator = d.pick((0.0, lax.add), (-np.inf, lax.max), (np.inf, lax.min), (1.0, lax.mul))
    pads = [(d.integer(0, 2), d.integer(0, 2)) for _ in shape]
    return d.call(
        lambda x: lax.reduce_window(
            x, x.dtype.type(init), operator, window, strides, pads, base, dilation),
        d.array(shape, dtype="float32"))  # fmt: skip


def _pool_gradient(d: Dice) -> Call:
    shape = (d.integer(1, 4), d.integer(3, 9), d.integer(3, 9), 2)
    window, strides = (1, d.integer(1, 3), d.integer(1, 3), 1), (1, d.pick(1, 2), d.pick(1, 2), 1)
    pads = d.pick("SAME", "VALID")

    def pooled(x: Any) -> Any:
        return (lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads) ** 2).sum()

    return d.call(jax.grad(pooled), d.ordinary(shape, dtype="float32"))


def _scan(d: Dice) -> Call:
    n, shape = d.size(), d.shape(1, 2)
    reverse, unroll = d.flag(), d.pick(1, 1, 2)

    def step(carry: Any, x: Any) -> Any:
        carry = carry * 0.5 + x
        return carry, (carry.sum(0), x[::-1])

    return d.call(
        lambda c, xs: lax.scan(step, c, xs, reverse=reverse, unroll=unroll),
        d.ordinary(shape, dtype="float32"), d.ordinary((n, *shape), dtype="float32"),
    )  # fmt: skip


def _while(d: Dice) -> Call:
    shape = d.shape(1, 3)
    return d.call(
        lambda x: lax.while_loop(
            lambda c: (jnp.abs(c[1]).sum() > 0.5) & (c[0] < 20),
            lambda c: (c[0] + 1, c[1] * 0.5), (0, x)),
        d.ordinary(shape, dtype="float32"))  # fmt: skip


def _cond(d: Dice) -> Call:
    shape = d.shape(1, 3)
    return d.call(
        lambda p, x, y: lax.cond(p, lambda x, y: (x + y, x.sum()), lambda x, y: (x[::-1], 1.0),
            x, y),
        d.array((), "b"), d.ordinary(shape, dtype="float32"), d.ordinary(shape, dtype="float32"),
    )  # fmt: skip


def _switch(d: Dice) -> Call:
    return d.call(
        lambda i, x: lax.switch(i, [jnp.sin, lambda x: x[..., ::-1], jnp.zeros_like], x),
        d.array((), dtype="int32", low=-2, high=4), d.array(d.shape(1, 3), dtype="float32"),
    )  # fmt: skip


def _map(d: Dice) -> Call:
    shape = d.shape(2, 3, 1)
    size = d.pick(None, None, 2, 3)
    return d.call(
        lambda xs: lax.map(lambda x: (x.sum(), x * 2), xs, batch_size=size),
        d.ordinary(shape, dtype="float32"))  # fmt: skip


def _root(d: Dice) -> Call:
    def root(x: Any) -> Any:
        return lax.custom_root(
            lambda y: y**3 - x, x,
            lambda f, y: lax.fori_loop(0, 30, lambda _, y: y - f(y) / (3 * y**2), y),
            lambda g, y: y / g(jnp.ones_like(y)))  # fmt: skip

    return d.call(
        lambda x: (root(x), jax.grad(lambda x: root(x).sum())(x)),
        d.array(d.shape(0, 2, 1), dtype="float32", low=1, high=4),
    )


def _linear_solve(d: Dice) -> Call:
    def solve(a: Any, b: Any) -> Any:
        return lax.custom_linear_solve(
            lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b),
            lambda _, b: jnp.linalg.solve(a.T, b))  # fmt: skip

    a = d.matrix((), 5, "f").astype(np.float32)
    return d.call(
        lambda a, b: (solve(a, b), jax.grad(lambda b: solve(a, b).sum())(b)),
        a, d.ordinary((5,), dtype="float32"))  # fmt: skip


LAX: dict[str, Row] = {
    "lax.conv_general_dilated": _conv,
    "lax.conv_general_dilated gradient": lambda d: (lambda c: d.call(
        jax.grad(lambda x, k: (jnp.abs(c.function(x, k)) ** 2).sum(), (0, 1)),
        *[a.astype(np.float32) for a in map(np.real, c.arrays)]))(_conv(d)),
    "lax.conv": lambda d: d.call(
        lax.conv, d.ordinary((2, 3, 8, 7), dtype="float32"), d.ordinary(
            (4, 3, 3, 2), dtype="float32"), (1, 2), "SAME"),
    "lax.conv_with_general_padding": lambda d: d.call(
        lax.conv_with_general_padding, d.ordinary((2, 3, 8, 7), dtype="float32"), d.ordinary(
            (4, 3, 3, 2), dtype="float32"), (1, 2), ((1, 1), (0, 2)), (2, 1), (1, 1)),
    "lax.conv_transpose": lambda d: d.call(
        lax.conv_transpose, d.ordinary((2, 6, 5, 3), dtype="float32"), d.ordinary(
            (3, 2, 3, 4), dtype="float32"), (2, 1), d.pick("SAME", "VALID"),
        transpose_kernel=False),
    "lax.conv_general_dilated_patches": lambda d: d.call(
        lax.conv_general_dilated_patches, d.ordinary((2, 3, 8, 7), dtype="float32"), (3, 2), (1, 2),
        "SAME"),
    "lax.conv_general_dilated_local": lambda d: d.call(
        lax.conv_general_dilated_local, d.ordinary((2, 3, 8), dtype="float32"), d.ordinary(
            (4, 9, 6), dtype="float32"), (1,), "VALID", (3,)),
    "lax.reduce_window": _reduce_window,
    "lax.reduce_window gradient": _pool_gradient,
    "lax.scan": _scan,
    "lax.scan gradient": lambda d: (lambda c: d.call(
        jax.grad(lambda *a: sum(jnp.sum(x**2) for x in jax.tree.leaves(c.function(*a))), (0, 1)),
        *c.arrays))(_scan(d)),
    "lax.while_loop": _while,
    "lax.fori_loop": lambda d: (lambda s: d.call(
        lambda n, x: lax.fori_loop(0, n, lambda i, x: x.at[i].add(1) + x.sum(0), x),
        d.array((), dtype="int32", low=0, high=4), d.ordinary(s, dtype="float32")))(
            d.shape(1, 2, 1)),
    "lax.cond": _cond,
    "lax.switch": _switch,
    "lax.map": _map,
    "lax.custom_root": _root,
    "lax.custom_linear_solve": _linear_solve,
    "lax.platform_dependent": lambda d: d.call(
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), d.array()),
    "lax.rng_uniform": lambda d: d.call(
        lambda x: (lax.rng_uniform(0.0, 1.0, (4,)).shape, x + 1), d.array()),
    "lax.rng_bit_generator": lambda d: d.call(
        lambda k: lax.rng_bit_generator(k, (5, 6)), d.array((4,), dtype="uint32")),
    "lax.composite": lambda d: d.call(
        lax.composite(lambda x: jnp.sin(x) * 2, "my.double_sine"), d.array()),
    "jax.checkpoint": lambda d: d.call(
        jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x) @ x.T).sum())), d.ordinary(
            d.shape(2, 2), dtype="float32")),
}  # fmt: skip
