"""Operators with windows: convolutions of every kind, pools and their gradients, pads, strides."""

from tests.fuzz.making import Maker, Value
from tests.fuzz.programs import size_of

LAYOUTS = {
    1: (("NCH", "OIH", "NCH"), ("NHC", "HIO", "NHC"), ("CNH", "IOH", "HNC")),
    2: (("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("HNWC", "IHWO", "NCHW")),
    3: (("NCHWD", "OIHWD", "NCHWD"), ("NHWDC", "HWDIO", "NHWDC")),
}
SPATIAL = "HWD"


def _extent(n: int, stretch: int) -> int:
    """The size of a dim, or a window, that is dilated."""
    return (n - 1) * stretch + 1 if n else 0


def _padding(maker: Maker, n: int, reach: int) -> tuple[int, int] | None:
    """Low and high, perhaps negative; None where they would leave no window."""
    low, high = maker.draw.choice(((0, 0), (1, 1), (reach // 2, reach // 2), (2, 0), (0, 3)))
    if maker.chance(0.2):
        low, high = maker.draw.choice(((-1, 0), (0, -1), (2, -1), (-1, 2), (reach, reach)))
    return (low, high) if n + low + high >= reach else None


def convolution(maker: Maker) -> None:
    """One to three dims; strides, dilations of both sides, groups, paddings of both signs."""
    rank = maker.draw.choice((1, 1, 2, 2, 3))
    layout = maker.draw.choice(LAYOUTS[rank])
    letters = layout[0]
    value = maker.pick(("float32",), lambda v: v.rank == rank + 2, rank + 2, rank + 2)
    sizes = dict(zip(letters, value.shape, strict=True))
    spatial = [sizes[c] for c in SPATIAL[:rank]]
    taps = [maker.draw.randint(1, min(4, max(n, 1))) for n in spatial]
    plain = maker.chance(0.3)
    strides, left, right = (
        [1 if plain else maker.draw.choice(choices) for _ in spatial]
        for choices in ((1, 1, 2, 3), (1, 1, 1, 2), (1, 1, 2))
    )
    reaches = [_extent(k, r) for k, r in zip(taps, right, strict=True)]
    padding = [
        _padding(maker, _extent(n, b), reach)
        for n, b, reach in zip(spatial, left, reaches, strict=True)
    ]
    if None in padding:
        return
    features, batch = sizes["C"], sizes["N"]
    groups = maker.draw.choice([k for k in (1, 1, 1, 2, 3, features) if k and features % k == 0])
    batches = 1
    if groups == 1 and maker.chance(0.2):
        batches = maker.draw.choice([k for k in (1, 2, 4, 3) if batch % k == 0])
    out = maker.draw.choice((1, 2, 3, 4)) * groups * batches
    sizes = {"O": out, "I": features // groups, **dict(zip(SPATIAL, taps, strict=False))}
    kernel = maker.like([sizes[c] for c in layout[1]])
    summed = size_of(taps) * sizes["I"]
    shown = "'SAME'" if plain and maker.chance(0.5) else f"{tuple(padding)}"
    maker.add(
        f"lax.conv_general_dilated({{0}}, {{1}}, {tuple(strides)}, {shown}, "
        f"lhs_dilation={tuple(left)}, rhs_dilation={tuple(right)}, dimension_numbers={layout}, "
        f"feature_group_count={groups}, batch_group_count={batches})",
        value,
        kernel,
        bound=1 + value.bound * 2 * summed**0.5,
    )


def _pool_text(maker: Maker, value: Value) -> tuple[str, float]:
    """A pool as a function of `x`, and how many elements a window has."""
    sizes, strides, padding = [], [], []
    for n in value.shape:
        open_ = maker.chance(0.6) and n > 1
        size = maker.draw.randint(1, min(4, n)) if open_ else 1
        pads = maker.draw.choice(((0, 0), (1, 1), (0, 2), (1, 0))) if size > 1 else (0, 0)
        sizes.append(size)
        strides.append(maker.draw.choice((1, 1, 2, 3, size)) if open_ else 1)
        padding.append(tuple(min(p, size - 1) for p in pads))
    low, op = maker.draw.choice(
        (("-jnp.inf", "lax.max"), ("jnp.inf", "lax.min"), ("0.0", "lax.add"), ("0.0", "lax.add"))
    )
    ends = f"{tuple(sizes)}, {tuple(strides)}, {tuple(padding)}"
    ends = maker.draw.choice((ends, ends, f"{tuple(sizes)}, {tuple(strides)}, 'SAME'"))
    text = f"lax.reduce_window(x, {low}, {op}, {ends}"
    if maker.chance(0.25):
        gaps = [2 if k > 1 and n > 4 else 1 for k, n in zip(sizes, value.shape, strict=True)]
        text += f", window_dilation={tuple(gaps)}"
        if op == "lax.add" and maker.chance(0.5):
            text += f", base_dilation={tuple(maker.draw.choice((1, 2)) for _ in sizes)}"
        elif op != "lax.add":
            return f"lax.stop_gradient({text}))", 1.0
    return text + ")", size_of(sizes) if op == "lax.add" else 1.0


def pool(maker: Maker) -> None:
    """The largest, least or sum of each window; what is pooled again in its gradient."""
    value = maker.pick(("float32",), lambda v: 0 not in v.shape, least=1)
    text, count = _pool_text(maker, value)
    bound = 1 + value.bound * count**0.5
    if maker.chance(0.25) and "stop_gradient" not in text:
        inner = f"lambda x: {text}"
        maker.add(
            f"jax.vjp({inner}, {{0}})[1](jnp.sin(({inner})({{0}})))[0]", value, bound=count + 2
        )
        return
    finite = "jnp.nan_to_num({0}, posinf=0, neginf=0)"
    result = maker.add(f"(lambda x: {text})({{0}})", value, bound=bound)
    if result is not None and "inf" in text:
        maker.add(finite, result, bound=bound)


def moving_mean(maker: Maker) -> None:
    """Shifted copies of a value added up: a stencil written by hand."""
    value = maker.pick(("float32",), least=1)
    d = maker.draw.randrange(value.rank)
    k = maker.draw.choice((1, 1, 2, 3))
    n = value.shape[d]
    options = [
        f"jnp.roll({{0}}, {k}, {d}) + jnp.roll({{0}}, -1, {d}) - 2 * {{0}}",
        f"({{0}} + jnp.roll({{0}}, {-k}, {d})) * 0.5",
    ]
    if n > k:
        before = ":, " * d
        options += [
            f"{{0}}[{before}{k}:] - {{0}}[{before}:-{k}]",
            f"jnp.concatenate([{{0}}[{before}{k}:], {{0}}[{before}:{k}]], {d})",
            f"{{0}}.at[{before}{k}:].add({{0}}[{before}:-{k}])",
        ]
    maker.add(maker.draw.choice(options), value, bound=4 * value.bound)


def pad(maker: Maker) -> None:
    """Any padding that lax has: negative, between elements, both."""
    value = maker.pick(("float32", "float32", "int32", "bfloat16", "complex64"), least=1)
    config = []
    for n in value.shape:
        low, high, inner = 0, 0, 0
        if maker.chance(0.5):
            inner = maker.draw.choice((0, 0, 1, 2))
            low, high = maker.draw.randint(-3, 3), maker.draw.randint(-3, 5)
        wide = n + max(n - 1, 0) * inner
        if wide + low + high < 1 or -low > wide or -high > wide:
            low = high = 0
        config.append((low, high, inner))
    number = "jnp.ones((), {0}.dtype)" if maker.chance(0.5) else "jnp.zeros((), {0}.dtype)"
    maker.add(f"lax.pad({{0}}, {number}, {tuple(config)})", value, bound=value.bound + 1)


def strided_slice(maker: Maker) -> None:
    """A slice of every dim, with steps of both signs."""
    value = maker.pick(("float32", "int32", "bool", "complex64"), least=1)
    parts = []
    for n in value.shape:
        step = maker.draw.choice((1, 1, 2, 3, -1, -2))
        start = maker.draw.randrange(n) if n else 0
        stop = maker.draw.randint(start + 1, n) if n else 0
        if maker.chance(0.3):
            parts.append("::" if step > 0 else "::-1")
        elif step > 0:
            parts.append(f"{start}:{stop}:{step}")
        else:
            parts.append(f"{stop - 1}:{start - 1 if start else ''}:{step}")
    maker.add(f"{{0}}[{', '.join(parts)}]", value, bound=value.bound)


def walls(maker: Maker) -> None:
    """Few rows of a dim or two, at a known place, set to what is made of rows at known places."""
    value = maker.pick(("float32", "int32", "bfloat16"), least=1)
    if 0 in value.shape:
        return
    dims = {maker.draw.randrange(value.rank) for _ in range(maker.draw.choice((1, 1, 2)))}
    rows = {d: min(value.shape[d], maker.draw.choice((1, 1, 2, 3))) for d in dims}
    other = maker.like(value.shape, value.dtype) if maker.chance(0.3) else value

    def place() -> str:
        parts = []
        for d, n in enumerate(value.shape):
            start = maker.draw.randint(0, n - rows.get(d, n))
            end = f":{start + rows[d]}" if rows.get(d, 1) > 1 else ""
            parts.append(f"{start}{end}" if d in rows else ":")
        return ", ".join(parts)

    one, two = (f"{{{maker.draw.randint(0, 1)}}}[{place()}]" for _ in range(2))
    turned = f"jnp.flip({one})" if len(dims) == 1 and value.rank == 1 else f"-{one}"
    made = maker.draw.choice(
        (one, turned, f"2 * {one} - {two}", f"jnp.where({one} > 0, {two}, 1)", f"{one} * {two}")
    )
    how = maker.draw.choice(("set", "set", "add", "subtract"))
    twice = f".at[{place()}].set(-{two})" if maker.chance(0.3) else ""
    bound = 3 * value.bound + max(value.bound, other.bound) ** 2 + 3
    maker.add(f"{{0}}.at[{place()}].{how}({made}){twice}", value, other, bound=bound)


WINDOWS = (
    (4, walls),
    (8, convolution),
    (7, pool),
    (4, moving_mean),
    (5, pad),
    (5, strided_slice),
)
