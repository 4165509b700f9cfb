"""Kinds of lines of random programs that every device computes for itself, and how often each."""

import math
import random
from typing import Any

from tests.schedule.random_lines import (
    Kind,
    Line,
    Value,
    added_up,
    body,
    device_number,
    exchange,
    group_of,
    own_part,
    pick,
    sum_over,
)


def unary(program: Any, rng: random.Random) -> Line | None:
    """Each element by itself."""
    v = pick(program, rng, lambda v: v.dtype != "bool")
    if v is None:
        return None
    if program.is_exact or not v.is_float:
        text, bound = rng.choice(
            [
                ("-{0}", v.bound),
                ("jnp.abs({0})", v.bound),
                ("{0} * {0}", v.bound**2),
                ("{0} + 1", v.bound + 1),
                ("3 * {0}", v.bound * 3),
                ("jnp.sign({0})", 1.0),
                ("jnp.clip({0}, -3, 5)", 5.0),
                ("jax.nn.relu({0})", v.bound),
            ]
        )
        return Line(text, (v,), bound)
    functions = ["jnp.tanh", "jnp.sin", "jax.nn.sigmoid", "jax.nn.silu", "0.5 *", "1 +"]
    return Line(f"{rng.choice(functions)}({{0}})", (v,))


def cast(program: Any, rng: random.Random) -> Line | None:
    """Another dtype; floats of an inexact program keep theirs."""
    v = pick(program, rng, lambda v: program.is_exact or not v.is_float)
    dtype = rng.choice(["float32", "float32", "int32", "bfloat16", "bool", "int8"])
    return v and Line(f"{{0}}.astype('{dtype}')", (v,), max(v.bound, 200.0 * (not v.is_float)))


def binary(program: Any, rng: random.Random) -> Line | None:
    """Two values of one shape and dtype, or one of them a scalar, or broadcast."""
    a = pick(program, rng)
    if a is None:
        return None

    def fits(v: Value) -> bool:
        alike = v.shape in (a.shape, (), a.shape[1:])
        return v.dtype == a.dtype and alike

    b = pick(program, rng, fits) or a
    if a.dtype == "bool":
        return Line(f"{{0}} {rng.choice('&|^')} {{1}}", (a, b))
    text, bound = rng.choice(
        [
            ("{0} + {1}", a.bound + b.bound),
            ("{0} - {1}", a.bound + b.bound),
            ("{0} * {1}", a.bound * b.bound),
            ("jnp.maximum({0}, {1})", max(a.bound, b.bound)),
        ]
    )
    return Line(text, (a, b), bound)


def compare(program: Any, rng: random.Random) -> Line | None:
    """Where one value is larger than another."""
    a = pick(program, rng, lambda v: program.is_exact or not v.is_float)
    b = a and pick(program, rng, lambda v: v.dtype == a.dtype and v.shape in (a.shape, ()))
    return a and b and Line(f"{{0}} {rng.choice(['<', '>=', '=='])} {{1}}", (a, b))


def select(program: Any, rng: random.Random) -> Line | None:
    """One of two, by a mask."""
    mask = pick(program, rng, lambda v: v.dtype == "bool")
    a = mask and pick(program, rng, lambda v: v.shape == mask.shape and v.dtype != "bool")
    b = a and pick(program, rng, lambda v: v.dtype == a.dtype and v.shape in (a.shape, ()))
    if not (mask and a and b):
        return None
    return Line("jnp.where({0}, {1}, {2})", (mask, a, b), max(a.bound, b.bound))


def reduce(program: Any, rng: random.Random) -> Line | None:
    """Some dims, or all, to one number."""
    v = pick(program, rng, lambda v: bool(v.shape))
    if v is None:
        return None
    dims = rng.sample(range(len(v.shape)), rng.randint(1, len(v.shape)))
    count = math.prod(v.shape[d] for d in dims)
    options = f"{{0}}, axis={tuple(sorted(dims))}, keepdims={rng.random() < 0.4}"
    if v.dtype == "bool":
        return Line(f"jnp.{rng.choice(['any', 'all', 'sum'])}({options})", (v,))
    name, bound = rng.choice([("sum", v.bound * count)] * 3 + [("max", v.bound), ("min", v.bound)])
    if not program.is_exact and v.is_float:
        name = rng.choice(["sum", "mean", "max", "var"])
    return Line(f"jnp.{name}({options})", (v,), bound)


def shape_of(program: Any, rng: random.Random) -> Line | None:
    """The same elements in another shape or order."""
    v = pick(program, rng, lambda v: bool(v.shape))
    if v is None:
        return None
    rank, dim = len(v.shape), rng.randrange(len(v.shape))
    size = v.shape[dim]
    order = rng.sample(range(rank), rank)
    parts = [k for k in range(1, size + 1) if size % k == 0]
    k = rng.choice(parts) if parts else 1
    cut = (*v.shape[:dim], k, size // k, *v.shape[dim + 1 :])
    text = rng.choice(
        [
            "{0}.reshape(-1)",
            "{0}.T",
            f"jnp.transpose({{0}}, {order})",
            f"{{0}}.reshape({cut})",
            f"{{0}}.reshape({rng.choice([(v.size, 1), (1, v.size)])})",
            f"jnp.expand_dims({{0}}, {dim})",
            f"jnp.broadcast_to({{0}}, ({rng.choice([2, 3, 4])}, *{{0}}.shape))",
            f"jnp.squeeze({{0}}, {tuple(d for d, n in enumerate(v.shape) if n == 1)})",
            f"jnp.repeat({{0}}, 2, axis={dim})",
            f"jnp.flip({{0}}, {dim})",
            f"jnp.roll({{0}}, {rng.randint(1, 3)}, {dim})",
        ]
    )
    return Line(text, (v,), v.bound)


def parts(program: Any, rng: random.Random) -> Line | None:
    """Slices, pads, rows by number, values side by side."""
    v = pick(program, rng, lambda v: bool(v.shape) and v.dtype != "bool")
    if v is None:
        return None
    dim = rng.randrange(len(v.shape))
    size = v.shape[dim]
    widths = [(rng.randint(0, 2), rng.randint(0, 3)) if d == dim else (0, 0)
              for d in range(len(v.shape))]  # fmt: skip
    low = rng.randrange(max(size, 1))
    rows = [rng.randrange(max(size, 1)) for _ in range(rng.randint(1, 4))]
    text = rng.choice(
        [
            f"lax.slice_in_dim({{0}}, {low}, {size}, axis={dim})",
            f"lax.slice_in_dim({{0}}, 0, {size}, {rng.randint(1, 3)}, axis={dim})",
            f"jnp.pad({{0}}, {widths}, constant_values={rng.randint(0, 2)})",
            f"jnp.concatenate([{{0}}, {{0}}], axis={dim})",
            f"jnp.take({{0}}, np.array({rows}), axis={dim})",
            f"{{0}}.at[{low}:].add(1)",
            f"{{0}}.at[np.array({rows[:1]})].set(2)",
            f"jnp.split({{0}}, 2, axis={dim})[{rng.randrange(2)}]",
        ]
    )
    return Line(text, (v,), max(v.bound + 1, 2.0))


def mixing(program: Any, rng: random.Random) -> Line | None:
    """Along a dim every element with others."""
    v = pick(program, rng, lambda v: bool(v.shape) and v.dtype not in ("bool", "int8"))
    if v is None:
        return None
    dim = rng.randrange(len(v.shape))
    size = v.shape[dim]
    choices = [(f"jnp.cumsum({{0}}, axis={dim})", v.bound * size),
               (f"lax.cummax({{0}}, axis={dim})", v.bound)]  # fmt: skip
    if program.is_exact or not v.is_float:
        choices += [
            (f"jnp.sort({{0}}, axis={dim})", v.bound),
            (f"jnp.argmax({{0}}, axis={dim})", 0.0),
            ("lax.top_k({0}, 1)[0]", v.bound),
        ]
    else:
        choices += [
            (f"jax.nn.softmax({{0}}, axis={dim})", 1.0),
            ("{0} / (1e-2 + jnp.linalg.norm({0}))", 1.0),
            (f"({{0}} - {{0}}.mean({dim}, keepdims=True)) * "
             f"lax.rsqrt({{0}}.var({dim}, keepdims=True) + 0.1)", 1.0),
        ]  # fmt: skip
    text, bound = rng.choice(choices)
    return Line(text, (v,), bound)


def product(program: Any, rng: random.Random) -> Line | None:
    """A product of matrices, or of batches of them."""
    a = pick(program, rng, lambda v: bool(v.shape) and v.is_float)
    if a is None:
        return None
    b = pick(program, rng, lambda v: v.dtype == a.dtype and v.shape[:1] == a.shape[-1:]) or a
    n = a.shape[-1]
    bound = a.bound * b.bound * n
    if b is a:
        text = rng.choice(["{0} @ {0}.T", "jnp.einsum('...i,...i->...', {0}, {0})"])
        return Line(text, (a,), bound)
    return Line("jnp.tensordot({0}, {1}, 1)", (a, b), bound)


def drawn(program: Any, rng: random.Random) -> Line | None:
    """Random numbers; the key may be made of a value, or of the device's number."""
    v = pick(program, rng, lambda v: v.is_float)
    if v is None:
        return None
    key, parted, operands = f"jax.random.key({rng.randrange(9)})", (), (v,)
    number = pick(program, rng, lambda w: w.dtype == "int32" and w.shape == ())
    if number is not None and rng.random() < 0.4:
        key, operands = f"jax.random.fold_in({key}, {{1}})", (v, number)
    elif rng.random() < 0.15:
        parted = group_of(program, rng)
        key = f"jax.random.fold_in({key}, lax.axis_index({parted!r}))"
    text = rng.choice(
        [
            f"jnp.where(jax.random.bernoulli({key}, 0.5, {{0}}.shape), {{0}} * 2, 0)",
            f"{{0}} + jax.random.randint({key}, {{0}}.shape, -4, 5).astype({{0}}.dtype)",
        ]
    )
    return Line(text, operands, v.bound * 2 + 4, parted=parted)


def counting(program: Any, rng: random.Random) -> Line | None:
    """Positions: of a value's elements, or as a mask."""
    v = pick(program, rng, lambda v: bool(v.shape) and v.dtype in ("float32", "int32"))
    if v is None:
        return None
    dim = rng.randrange(len(v.shape))
    places = f"lax.broadcasted_iota('int32', {{0}}.shape, {dim})"
    text = rng.choice(
        [f"{{0}} + {places}.astype({{0}}.dtype)", f"jnp.where({places} < 3, {{0}}, 0)"]
    )
    return Line(text, (v,), v.bound + 12)


WEIGHTS: tuple[tuple[Kind, int], ...] = (
    (sum_over, 9),
    (exchange, 2),
    (own_part, 6),
    (device_number, 1),
    (unary, 4),
    (cast, 2),
    (binary, 14),
    (compare, 1),
    (select, 2),
    (reduce, 4),
    (shape_of, 4),
    (parts, 3),
    (mixing, 2),
    (product, 2),
    (drawn, 2),
    (counting, 1),
    (body, 2),
    (added_up, 2),
)
KINDS = [kind for kind, weight in WEIGHTS for _ in range(weight)]
