"""Operators that move: reshapes, slices, joins, gathers, scatters; hints, calls, random bits."""

import math

from tests.fuzz.making import FLOATS, INTEGERS, Maker, Value
from tests.fuzz.operators_numbers import stretched_operand
from tests.fuzz.programs import random_spec

ANY = (*FLOATS, "int32", "bool", "uint8", "complex64")


def same(value: Value) -> float:
    """Moving does not make a number larger."""
    return value.bound


def reshape(maker: Maker) -> None:
    """Merge neighbours, split a dim, or regroup all."""
    value = maker.pick(ANY)
    shape = list(value.shape)
    for _ in range(maker.draw.randint(1, 3)):
        kind = maker.draw.randrange(4)
        if kind == 0 and len(shape) > 1:
            d = maker.draw.randrange(len(shape) - 1)
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        elif kind == 1 and shape:
            d = maker.draw.randrange(len(shape))
            divisors = [k for k in range(1, shape[d] + 1) if shape[d] % k == 0]
            k = maker.draw.choice(divisors)
            shape[d : d + 1] = [k, shape[d] // k]
        elif kind == 2:
            shape.insert(maker.draw.randint(0, len(shape)), 1)
        elif kind == 3 and len(shape) > 1 and maker.chance(0.3):
            maker.draw.shuffle(shape)
    maker.add(f"jnp.reshape({{0}}, {tuple(shape)})", value, bound=same(value))


def transpose(maker: Maker) -> None:
    """Dims in another order."""
    value = maker.pick(ANY, least=2)
    order = list(range(value.rank))
    maker.draw.shuffle(order)
    maker.add(f"jnp.transpose({{0}}, {tuple(order)})", value, bound=same(value))


def ones(maker: Maker) -> None:
    """Dims of size one come and go; dims are broadcast and repeated."""
    value = maker.pick(ANY)
    d = maker.draw.randint(0, value.rank)
    n = maker.size()
    options = [
        f"jnp.expand_dims({{0}}, {d})",
        f"jnp.broadcast_to({{0}}, {(n, *value.shape)})",
        "jnp.squeeze({0})",
    ]
    if value.rank:
        d = min(d, value.rank - 1)
        options += [
            f"jnp.repeat({{0}}, 2, axis={d})",
            f"jnp.stack([{{0}}, {{0}}], axis={d})",
            f"jnp.tile({{0}}, {tuple([2] + [1] * (value.rank - 1))})",
        ]
    if value.rank and value.dtype == "float32":
        total = f"jnp.sum({{0}}, axis={d}, keepdims=True)"
        options.append(f"jnp.broadcast_to({total} * 0.1, {value.shape})")
    maker.add(maker.draw.choice(options), value, bound=same(value))


def slices(maker: Maker) -> None:
    """Slices with strides and backwards, pads, rolls, flips."""
    value = maker.pick(ANY, least=1)
    d = maker.draw.randrange(value.rank)
    n = value.shape[d]
    start = maker.draw.randrange(n)
    stop = maker.draw.randint(start + 1, n)
    step = maker.draw.choice((1, 1, 2, -1))
    begin, end = (start, stop) if step > 0 else (stop - 1, start - 1 if start else "")
    before = ":, " * d
    low, high = maker.draw.choice(((0, 1), (1, 0), (2, 3), (0, 7)))
    widths = tuple((low, high) if k == d else (0, 0) for k in range(value.rank))
    config = tuple((-1, low, 1) if k == d else (0, 0, 0) for k in range(value.rank))
    zero = "False" if value.dtype == "bool" else "0"
    inner = (
        f"lax.pad({{0}}, jnp.zeros((), {{0}}.dtype), {config})"
        if n > 1
        else f"jnp.flip({{0}}, {d})"
    )
    maker.add(
        maker.draw.choice(
            (
                f"{{0}}[{before}{begin}:{end}:{step}]",
                f"{{0}}[{before}{begin}:{end}:{step}]",
                f"jnp.flip({{0}}, {d})",
                f"jnp.roll({{0}}, {maker.draw.randint(-3, 5)}, axis={d})",
                f"jnp.pad({{0}}, {widths}, constant_values={zero})",
                inner,
                f"jnp.pad({{0}}, {widths}, mode='edge')",
                f"{{0}}[{before}{start}]",
                f"lax.slice_in_dim({{0}}, {start}, {stop}, axis={d})",
            )
        ),
        value,
        bound=same(value),
    )


def joins(maker: Maker) -> None:
    """Concatenate and stack; split and join again the other way round."""
    value = maker.pick((*FLOATS, "int32"), least=1)
    d = maker.draw.randrange(value.rank)
    other_shape = list(value.shape)
    kind = maker.draw.randrange(4)
    if kind == 0:
        other_shape[d] = maker.size()
        other = maker.like(other_shape, value.dtype)
        maker.add(f"jnp.concatenate([{{0}}, {{1}}], axis={d})", value, other, bound=same(value))
    elif kind == 1:
        other = maker.like(other_shape, value.dtype)
        text = f"jnp.stack([{{0}}, {{1}}], axis={maker.draw.randint(0, value.rank)})"
        maker.add(text, value, other, bound=same(value))
    elif kind == 2:
        k = maker.draw.randrange(value.shape[d] + 1)
        text = f"jnp.concatenate(jnp.split({{0}}, [{k}], axis={d})[::-1], axis={d})"
        maker.add(text, value, bound=same(value))
    else:
        parts = [k for k in (2, 3, 4) if value.shape[d] % k == 0]
        if parts:
            part = maker.draw.randrange(k := maker.draw.choice(parts))
            maker.add(f"jnp.split({{0}}, {k}, axis={d})[{part}]", value, bound=same(value))


def positions(maker: Maker, shape: tuple[int, ...], n: int) -> Value:
    """Positions along a dim of size n, some out of range: an input, or something computed."""
    dtype = maker.draw.choice(("int32", "int32", "int32", "uint8", "int8", "uint32"))
    if n > 100:  # JAX itself compares a position with the size
        dtype = "int32"
    low = 0 if dtype.startswith("u") else -n - 2
    found = [v for v in maker.values if v.dtype == "int32" and v.shape == shape]
    if found and maker.chance(0.3):
        made = maker.add(f"{{0}} % {n + 1}", maker.draw.choice(found), bound=n)
        if made is not None:
            return made
    return maker.fresh(shape, dtype, low, n + 1)


def gather(maker: Maker) -> None:
    """Read at positions that are data."""
    value = maker.pick(ANY, least=1)
    d = maker.draw.randrange(value.rank)
    n = value.shape[d]
    kind = maker.draw.randrange(6)
    mode = maker.draw.choice(("clip", "fill", "fill") if kind == 2 else ("clip", "fill", "wrap"))
    fill = ", fill_value=0" if maker.chance(0.7) or mode != "fill" else ""
    if value.dtype in ("complex64", "bool"):
        mode, fill = "clip", ""
    before = ":, " * d
    if kind in (0, 1):
        at = positions(maker, maker.shape(0, 2), n)
        taken = f".at[{before}{{1}}].get(mode='{mode}'{fill})"
        text = maker.draw.choice(
            (
                f"jnp.take({{0}}, {{1}}, axis={d}, mode='{mode}'{fill})",
                f"{{0}}[{before}{{1}}]",
                f"{{0}}{taken}" if mode != "wrap" else f"{{0}}[{before}{{1}}]",
            )
        )
        maker.add(text, value, at, bound=same(value))
    elif kind == 2:
        shape = list(value.shape)
        shape[d] = maker.size()
        at = positions(maker, tuple(shape), n)
        text = f"jnp.take_along_axis({{0}}, {{1}}, axis={d}, mode='{mode}'{fill})"
        maker.add(text, value, at, bound=same(value))
    elif kind == 3 and value.rank >= 2:
        shape = maker.shape(1, 2)
        rows = positions(maker, shape, value.shape[0])
        columns = positions(maker, shape[-1:], value.shape[1])
        maker.add("{0}[{1}, {2}]", value, rows, columns, bound=same(value))
    elif kind == 4 and value.rank >= 2:
        shape = maker.shape(1, 2)
        rows = positions(maker, shape, value.shape[0])
        columns = positions(maker, shape, value.shape[-1])
        maker.add(
            f"{{0}}[{{1}}, {':, ' * (value.rank - 2)}{{2}}]",
            value,
            rows,
            columns,
            bound=same(value),
        )
    else:
        at = positions(maker, (), n)
        maker.add(
            maker.draw.choice(
                (
                    f"{{0}}[{before}{{1}}]",
                    f"lax.dynamic_index_in_dim({{0}}, {{1}}, {d}, False)",
                    f"lax.dynamic_index_in_dim({{0}}, {{1}}, {d})",
                    f"lax.dynamic_slice_in_dim({{0}}, {{1}}, {maker.draw.randint(1, n)}, {d})",
                )
            ),
            value,
            at,
            bound=same(value),
        )


def scatter(maker: Maker) -> None:
    """Write at positions that are data, or at fixed ones."""
    value = maker.pick((*FLOATS, "int32", "uint8"), least=1)
    d = maker.draw.randrange(value.rank)
    n = value.shape[d]
    before = ":, " * d
    mode = maker.draw.choice(("", ", mode='drop'", ", mode='clip'"))
    integers = value.dtype not in FLOATS  # JAX has no gradient of a scatter that multiplies
    how = maker.draw.choice(("add", "add", "add", "max", "min", "mul" if integers else "add"))
    kind = maker.draw.randrange(5)
    if kind == 0:  # one position: no two can meet, so it may be overwritten
        at = positions(maker, (), n)
        update = maker.like(value.shape[:d] + value.shape[d + 1 :], value.dtype)
        how = str(maker.some("set", how))
        maker.add(f"{{0}}.at[{before}{{1}}].{how}({{2}}{mode})", value, at, update, bound=8)
    elif kind == 1:
        at = positions(maker, maker.shape(0, 2), n)
        update = maker.like(
            value.shape[:d] + at.shape + value.shape[d + 1 :] if maker.chance(0.8) else (),
            value.dtype,
        )
        maker.add(f"{{0}}.at[{before}{{1}}].{how}({{2}}{mode})", value, at, update, bound=16)
    elif kind == 2 and value.rank >= 2:
        shape = maker.shape(1, 1)
        rows = positions(maker, shape, value.shape[0])
        columns = positions(maker, shape, value.shape[1])
        update = maker.like(shape + value.shape[2:], value.dtype)
        maker.add(
            f"{{0}}.at[{{1}}, {{2}}].{how}({{3}}{mode})", value, rows, columns, update, bound=16
        )
    elif kind == 3:
        start = maker.draw.randrange(n)
        text = f"{{0}}.at[{before}{start}:{maker.draw.randint(start + 1, n)}].{how}(2)"
        maker.add(text, value, bound=same(value) * 2 + 2)
    else:
        shape = tuple(maker.draw.randint(1, k) for k in value.shape)
        starts = [positions(maker, (), k) for k in value.shape[:2]]
        rest = ", 0" * (value.rank - len(starts))
        given = ", ".join(f"{{{k + 2}}}.astype('int32')" for k in range(len(starts)))
        text = f"lax.dynamic_update_slice({{0}}, {{1}}, ({given}{rest},))"
        maker.add(text, value, maker.like(shape, value.dtype), *starts, bound=same(value) + 2)


def made_of_nothing(maker: Maker) -> None:
    """Iotas, constants, masks, one-hot rows."""
    value = maker.pick(("float32",), least=1)
    n, k = value.shape[-1], maker.size()
    if n == 0:
        return
    text = maker.draw.choice(
        (
            f"{{0}} * jnp.arange({n}) * 0.1",
            f"jnp.arange({n * 2}, dtype='float32')[{n}:] * 0.1 + {{0}}",
            f"{{0}} + jnp.eye({n})[{maker.draw.randrange(n)}]",
            f"jnp.where(lax.broadcasted_iota('int32', {value.shape}, 0) < {k}, {{0}}, 0)",
            f"{{0}}[..., None] * jax.nn.one_hot(jnp.arange({n}) % {k}, {k})",
            f"jnp.linspace(0, 1, {n}) * {{0}}",
            f"jnp.full({value.shape}, 0.5) - {{0}}",
            f"{{0}} + np.arange({n}, dtype='float32') / {n}",
            "jnp.tril({0})" if value.rank >= 2 else "{0}[::-1]",
        )
    )
    maker.add(text, value, bound=value.bound * 2 + 2)


def random_numbers(maker: Maker) -> None:
    """Random bits from a key: an input, split, or folded."""
    keys = [
        v
        for v in maker.values
        if v.dtype in ("key", "raw") and (v.shape == () if v.dtype == "key" else v.shape == (2,))
    ]
    key = (
        maker.draw.choice(keys)
        if keys and maker.chance(0.8)
        else (maker.fresh((), "key") if maker.chance(0.7) else maker.fresh((2,), "raw"))
    )
    text = "{0}" if maker.chance(0.5) else f"jax.random.fold_in({{0}}, {maker.draw.randrange(9)})"
    value = maker.pick(FLOATS)
    shape = value.shape if maker.chance(0.7) else maker.shape()
    kind = maker.draw.randrange(8)
    if kind == 0:
        maker.add(f"jax.random.uniform({text}, {shape})", key, bound=1)
    elif kind == 1:
        maker.add(f"jax.random.normal({text}, {shape})", key, bound=3)
    elif kind == 2:
        maker.add(f"jax.random.bernoulli({text}, 0.4, {shape})", key)
    elif kind == 3:
        maker.add(f"jax.random.randint({text}, {shape}, -4, 9)", key, bound=9)
    elif kind == 4:
        text = f"jax.random.bernoulli({text.replace('{0}', '{1}')}, 0.8, {value.shape})"
        maker.add(f"jnp.where({text}, {{0}} / 0.8, 0)", value, key, bound=value.bound * 1.25)
    elif kind == 5:
        maker.add(f"jax.random.split({text}, 3)[{maker.draw.randrange(3)}]", key)
    elif kind == 6 and value.rank:
        maker.add(
            f"jax.random.permutation({text.replace('{0}', '{1}')}, {{0}})",
            value,
            key,
            bound=value.bound,
        )
    else:
        maker.add(f"jax.random.bits({text}, {shape}, 'uint8')", key, bound=255)


def hint(maker: Maker) -> None:
    """A hint in the middle, once a value; or a constraint, on anything."""
    value = maker.pick(ANY)
    stated = maker.chance(0.5) and value.name not in maker.hinted
    spec = random_spec(maker.draw, value.rank, maker.axes, True)
    text = "hint({0}, {spec})" if stated else "constrain({0}, {spec})"
    result = maker.add(text, value, bound=same(value), spec=spec)
    if result is not None:
        maker.hinted.update((value.name, result.name))


def call(maker: Maker) -> None:
    """Nested calls: jit, checkpoint, vmap, a function with its own derivative."""
    value = maker.pick(("float32",), least=1)
    n = value.shape[-1]
    weights = maker.like((n, n))
    other = stretched_operand(maker, value)
    text, operands = maker.draw.choice(
        (
            ("jax.jit(lambda x, w: jnp.tanh(x @ w))({0}, {1})", (value, weights)),
            ("jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x) @ w))({0}, {1})", (value, weights)),
            ("jax.checkpoint(lambda x, y: jax.nn.softmax(x * y) + y)({0}, {1})", (value, other)),
            ("jax.vmap(lambda x: jnp.tanh(x) - jnp.max(x))({0})", (value,)),
            ("jax.jit(lambda x, y: bent(x) * scaled(y))({0}, {1})", (value, other)),
            ("jax.checkpoint(jax.jit(lambda x: scaled(jnp.cumsum(x, 0))))({0})", (value,)),
            ("jax.jvp(lambda x: jnp.sum(jnp.sin(x) * x, 0), ({0},), ({0} * 0.5,))[1]", (value,)),
            ("jax.vjp(lambda x: jnp.tanh(x) * 2, {0})[1]({0})[0]", (value,)),
        )
    )
    maker.add(text, *operands, bound=1 + value.bound**2 + math.sqrt(n))


def keys_as_values(maker: Maker) -> None:
    """Arrays of keys: split, indexed, mapped over."""
    count = maker.size()
    key = maker.fresh((), "key") if maker.chance(0.5) else maker.fresh((count,), "key")
    if key.rank:
        shape = maker.shape(0, 2)
        maker.add(f"jax.vmap(lambda k: jax.random.uniform(k, {shape}))({{0}})", key, bound=1)
    else:
        maker.add(f"jax.vmap(jax.random.normal)(jax.random.split({{0}}, {count}))", key, bound=3)


def as_bytes(maker: Maker) -> None:
    """The same bits as another type."""
    value = maker.pick(("float32", *INTEGERS))
    other = "int32" if value.dtype in ("float32", "uint32") else "uint8"
    if value.dtype == "int32":
        other = "uint32"
    maker.add(f"lax.bitcast_convert_type({{0}}, jnp.{other}) & 15", value, bound=15)


PLACES = (
    (12, reshape),
    (7, transpose),
    (6, ones),
    (8, slices),
    (6, joins),
    (9, gather),
    (9, scatter),
    (4, made_of_nothing),
    (7, random_numbers),
    (9, hint),
    (5, call),
    (1, keys_as_values),
    (1, as_bytes),
)
