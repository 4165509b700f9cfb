"""The kinds of lines that random programs for one device of many are written of."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """A name in a program: its type on one device, the axes along which it may differ.

    `bound` is the largest number that it may hold, if it is a float of an exact program.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    varying: frozenset[str] = frozenset()
    bound: float = 1.0

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return self.dtype in ("float32", "bfloat16")

    @property
    def size(self) -> int:
        """Elements on one device."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Line:
    """One line as it is proposed: what it computes, from what, and what it does to variation.

    `bound` is that of its numbers, `merged` the axes along which devices have the same after it,
    `parted` those along which they no longer have.
    """

    text: str
    operands: tuple[Value, ...]
    bound: float = 0.0
    merged: tuple[str, ...] = ()
    parted: tuple[str, ...] = ()


Kind = Callable[[Any, random.Random], Line | None]


def pick(
    program: Any, rng: random.Random, test: Callable[[Value], bool] = lambda _: True
) -> Value | None:
    """A value, a late one more often than an early one."""
    found = [v for v in program.values if test(v)]
    if not found:
        return None
    return found[-1 - min(int(rng.expovariate(0.3)), len(found) - 1)]


def group_of(program: Any, rng: random.Random) -> tuple[str, ...]:
    """Axes for a collective; mostly one, or all in order."""
    axes = list(program.mesh)
    group = rng.sample(axes, rng.choice([1, 1, len(axes)]))
    return tuple(group if rng.random() < 0.2 else sorted(group))


def count_of(program: Any, group: tuple[str, ...]) -> int:
    """Devices in a group."""
    return math.prod(program.mesh[a] for a in group)


def written(group: tuple[str, ...], rng: random.Random) -> str:
    """A group as an argument: a name, or a tuple."""
    return repr(group[0]) if len(group) == 1 and rng.random() < 0.7 else repr(group)


def sum_over(program: Any, rng: random.Random) -> Line | None:
    """An all_reduce; what it sums varies, mostly."""
    likely = rng.random() < 0.9
    v = pick(program, rng, lambda v: v.dtype != "bool" and (not likely or bool(v.varying)))
    group = group_of(program, rng)
    if v is None or (likely and not v.varying & {*group}):
        return None
    said, count = written(group, rng), count_of(program, group)
    if rng.random() < 0.8:
        return Line(f"lax.psum({{0}}, {said})", (v,), v.bound * count, merged=group)
    if rng.random() < 0.5:
        return Line(f"lax.psum(({{0}}, {{0}}), {said})[0]", (v,), v.bound * count, merged=group)
    return Line(f"lax.p{rng.choice(['max', 'min'])}({{0}}, {said})", (v,), v.bound, merged=group)


def exchange(program: Any, rng: random.Random) -> Line | None:
    """Other collectives."""
    v = pick(program, rng, lambda v: bool(v.shape))
    if v is None:
        return None
    group, dim = group_of(program, rng), rng.randrange(len(v.shape))
    said, count = written(group, rng), count_of(program, group)
    kind = rng.choice(["gather", "gather", "stack", "scatter", "to_all", "permute"])
    if kind == "gather":
        text = f"lax.all_gather({{0}}, {said}, axis={dim}, tiled=True)"
        return Line(text, (v,), v.bound, merged=group)
    if kind == "stack":
        return Line(f"lax.all_gather({{0}}, {said}, axis={dim})", (v,), v.bound, merged=group)
    if kind == "scatter" and v.dtype != "bool":
        text = f"lax.psum_scatter({{0}}, {said}, scatter_dimension={dim}, tiled=True)"
        return Line(text, (v,), v.bound * count, parted=group)
    if kind == "to_all":
        other = rng.randrange(len(v.shape))
        text = f"lax.all_to_all({{0}}, {said}, {dim}, {other}, tiled=True)"
        return Line(text, (v,), v.bound, parted=group)
    pairs = [(i, (i + 1) % count) for i in range(rng.randint(1, count))]
    return Line(f"lax.ppermute({{0}}, {said}, {pairs})", (v,), v.bound, parted=group)


def own_part(program: Any, rng: random.Random) -> Line | None:
    """This device's part of a value, or what only looks like it."""
    v = pick(program, rng, lambda v: bool(v.shape) and not v.varying)
    group = group_of(program, rng)
    if v is None:
        return None
    count = count_of(program, group)
    dims = [d for d, n in enumerate(v.shape) if n % count == 0] or [rng.randrange(len(v.shape))]
    dim = rng.choice(dims)
    size = v.shape[dim]
    index = f"lax.axis_index({group!r})"
    if rng.random() < 0.25:
        index = rng.choice(
            [f"{index}.astype(bool).astype('int32')", f"({count - 1} - {index})", f"({index} % 2)"]
        )
    part, source = max(size // count, 1), "{0}"
    if size % count:
        part = -(-size // count)
        widths = [(0, part * count - n if d == dim else 0) for d, n in enumerate(v.shape)]
        source = f"jnp.pad({{0}}, {widths}, constant_values={rng.choice([0, 0, 3])})"
    text = f"lax.dynamic_slice_in_dim({source}, {index} * {part}, {part}, {dim})"
    return Line(text, (v,), max(v.bound, 3.0), parted=group)


def device_number(program: Any, rng: random.Random) -> Line | None:
    """The device's number along some axes, perhaps added to something."""
    group = group_of(program, rng)
    v = pick(program, rng, lambda v: v.dtype in ("float32", "int32"))
    if v is None or rng.random() < 0.3:
        return Line(f"lax.axis_index({group!r})", (), parted=group)
    text = f"{{0}} + lax.axis_index({group!r}).astype('{v.dtype}')"
    return Line(text, (v,), v.bound + 8, parted=group)


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
    v = pick(program, rng, lambda v: bool(v.shape))
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


def body(program: Any, rng: random.Random) -> Line | None:
    """Loops and branches, some with a sum over devices inside."""
    v = pick(program, rng, lambda v: v.dtype in ("float32", "int32"))
    if v is None:
        return None
    group = group_of(program, rng)
    inner, parted = rng.choice(
        [
            (f"lax.rem({{0}} + lax.psum(c, {group!r}), {{0}} * 0 + 13)", ()),
            (f"lax.rem(c + lax.axis_index({group!r}).astype(c.dtype), {{0}} * 0 + 13)", group),
            ("lax.rem(c * 2 + {0}, {0} * 0 + 13)", ()),
            ("jnp.maximum(c, {0} + 1)", ()),
        ]
    )
    if not program.is_exact and v.is_float:
        inner, parted = "jnp.tanh(c + {0})", ()
    sends = "psum" in inner
    predicate = pick(program, rng, lambda w: w.dtype == "bool" and w.shape == ())
    if predicate is not None and (not sends or not predicate.varying) and rng.random() < 0.5:
        text = f"lax.cond({{1}}, lambda c: {inner}, lambda c: c + 1, {{0}})"
        return Line(text, (v, predicate), v.bound + 13, parted=parted)
    text = rng.choice(
        [
            f"lax.scan(lambda c, _: ({inner}, None), {{0}}, None, length=2)[0]",
            f"lax.scan(lambda c, _: ({inner}, c), {{0}}, None, length=2)[1]",
            f"lax.fori_loop(0, 2, lambda i, c: {inner}, {{0}})",
        ]
    )
    if v.shape and not sends and rng.random() < 0.4:
        text = f"lax.map(lambda c: {inner.replace('{0}', 'c')}, {{0}})"
    return Line(text, (v,), v.bound + 13, parted=parted)


WEIGHTS: tuple[tuple[Kind, int], ...] = (
    (sum_over, 9),
    (exchange, 2),
    (own_part, 3),
    (device_number, 1),
    (unary, 4),
    (cast, 2),
    (binary, 10),
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
)
KINDS = [kind for kind, weight in WEIGHTS for _ in range(weight)]
