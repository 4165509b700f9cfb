"""Lines of random programs for one device of many: what they are, and those that communicate."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """A name in a program: its type on one device, the axes along which it may differ.

    `bound` is the largest number that it may hold, if it is a float of an exact program;
    `is_total` says that it comes from a sum over devices, and all of them have it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    varying: frozenset[str] = frozenset()
    bound: float = 1.0
    is_total: bool = False

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
    totals = [v for v in found if v.is_total]
    if totals and rng.random() < 0.5:
        return rng.choice(totals)
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
    group = group_of(program, rng)
    count = count_of(program, group)
    likely = rng.random() < 0.9
    v = pick(
        program,
        rng,
        lambda v: bool(v.shape) and (not likely or (not v.varying and max(v.shape) >= count)),
    )
    if v is None:
        return None
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
    exact = program.is_exact
    asked = pick(program, rng, lambda w: w.dtype == "int32" or (exact and w.dtype == "float32"))
    if asked is not None and (not sends or not asked.varying) and rng.random() < 0.5:
        text = rng.choice(
            [
                f"lax.cond(jnp.sum({{1}}) > 0, lambda c: {inner}, lambda c: c + 1, {{0}})",
                f"lax.fori_loop(0, jnp.sum({{1}}).astype(int) % 3, lambda i, c: {inner}, {{0}})",
            ]
        )
        return Line(text, (v, asked), v.bound + 13, parted=parted)
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


def added_up(program: Any, rng: random.Random) -> Line | None:
    """What steps of a loop compute of sums over devices and add up; devices may have some rows."""
    v = pick(program, rng, lambda v: bool(v.size) and v.dtype in ("float32", "int32"))
    if v is None:
        return None
    group = group_of(program, rng)
    count, columns = count_of(program, group), rng.choice([1, 2, 3])
    scatters = rng.random() < 0.6
    tiled, rows = rng.random() < 0.7, count * rng.choice([1, 1, 2])
    shape = (rows, columns) if tiled else (count, columns, rng.choice([2, columns]))
    total = f"lax.psum(r, {group!r})"
    if scatters:
        total = f"lax.psum_scatter(r, {group!r}, tiled={tiled})"
    same = ["p * 2", "-p", "jnp.flip(p, 0)", "jnp.flip(p, 1)", "jnp.cumsum(p, 0)", "jnp.sum(p) * 2"]
    fill = rng.choice([0, 7])
    taken = f"p.at[np.array([0, 1, 99])].get(mode='fill', fill_value={fill})"
    done = rng.choice([*same, taken, taken])
    if rng.random() < 0.3:
        done = f"(lambda p: {rng.choice(same[:4])})({done})"
    steps = f"jnp.stack([jnp.resize({{0}}, {shape}), jnp.resize({{0}} * 2, {shape})])"
    text = (
        "(lambda f, x: lax.scan(lambda c, r: (c + f(r), None), "
        "jnp.zeros_like(jax.eval_shape(f, x[0])), x)[0])"
        f"(lambda r: (lambda p: {done})({total}), {steps})"
    )
    bound = v.bound * 3 * count * math.prod(shape) * 2 + 28
    return Line(text, (v,), bound, merged=() if scatters else group, parted=group * scatters)
