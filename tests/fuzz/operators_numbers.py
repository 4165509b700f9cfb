"""Operators that compute: element-wise, products, reductions, running sums, convolutions."""

from tests.fuzz.making import FLOATS, INTEGERS, Maker, Value
from tests.fuzz.programs import size_of

# Text, and the bound of the result for operands within a bound.
UNARY = (
    ("jnp.tanh({0})", lambda b: 1.0),
    ("jnp.sin({0})", lambda b: 1.0),
    ("jnp.exp(-jnp.abs({0}))", lambda b: 1.0),
    ("jnp.exp({0} * 0.25)", lambda b: 8.0),
    ("jax.nn.sigmoid({0})", lambda b: 1.0),
    ("jnp.sqrt(jnp.abs({0}) + 0.5)", lambda b: b),
    ("jnp.log1p(jnp.abs({0}))", lambda b: b),
    ("jax.lax.rsqrt({0} * {0} + 0.5)", lambda b: 2.0),
    ("1.0 / (1.5 + jnp.abs({0}))", lambda b: 1.0),
    ("-{0}", lambda b: b),
    ("{0} * 0.75", lambda b: b),
    ("3 - {0}", lambda b: b + 3),
    ("{0} + 1.5", lambda b: b + 1.5),
    ("{0} / 2", lambda b: b),
    ("{0} ** 2", lambda b: b * b),
    ("jnp.abs({0})", lambda b: b),
    ("jnp.sign({0})", lambda b: 1.0),
    ("jnp.floor({0} * 1.37)", lambda b: 1.4 * b),
    ("jax.nn.relu({0})", lambda b: b),
    ("jax.nn.gelu({0})", lambda b: b),
    ("jax.nn.silu({0})", lambda b: b),
    ("jax.nn.softplus({0})", lambda b: b + 1),
    ("jnp.clip({0}, -0.7, 0.9)", lambda b: 1.0),
    ("jax.lax.erf({0})", lambda b: 1.0),
    ("bent({0})", lambda b: 1.5),
    ("scaled({0})", lambda b: 1.0),
    ("lax.stop_gradient({0})", lambda b: b),
    ("lax.reduce_precision({0}, 8, 10)", lambda b: b),
    ("jnp.nan_to_num({0})", lambda b: b),
)
BINARY = (
    ("{0} + {1}", lambda a, b: a + b),
    ("{0} - {1}", lambda a, b: a + b),
    ("{0} * {1}", lambda a, b: a * b),
    ("{0} / (jnp.abs({1}) + 0.6)", lambda a, b: a * 1.7),
    ("jnp.maximum({0}, {1})", max),
    ("jnp.minimum({0}, {1})", max),
    ("jnp.where({0} > {1}, {0}, {1} * 0.5)", max),
    ("jnp.where({0} > 0.2, {1}, 0)", max),
    ("jnp.where({0} > 0.2, 0, {1})", max),
    ("jnp.arctan2({0}, {1} + 3)", lambda a, b: 3.2),
    ("{0} + {1} * {0}", lambda a, b: a + a * b),
    ("jnp.logaddexp({0}, {1})", lambda a, b: max(a, b) + 1),
    ("jnp.hypot({0}, {1})", lambda a, b: a + b),
)
INTEGER_BINARY = (
    "{0} + {1}",
    "{0} - {1}",
    "{0} * {1}",
    "{0} & {1}",
    "{0} | {1}",
    "{0} ^ {1}",
    "jnp.maximum({0}, {1})",
    "{0} // (jnp.abs({1}) + 1)",
    "{0} % (jnp.abs({1}) + 2)",
    "{0} << 1",
    "{0} >> 1",
    "jnp.where({0} > {1}, {0}, {1})",
)


def stretched_operand(maker: Maker, value: Value) -> Value:
    """A value that broadcasts against another: the same shape, fewer dims, dims of one, scalar."""
    shape = list(value.shape)
    if maker.chance(0.5):
        return maker.like(shape, value.dtype)
    shape = [1 if maker.chance(0.4) else n for n in shape]
    shape = shape[maker.draw.randint(0, len(shape)) if maker.chance(0.5) else 0 :]
    return maker.like(shape, value.dtype)


def unary(maker: Maker) -> None:
    """One operand."""
    value = maker.pick(FLOATS)
    text, bound = maker.draw.choice(UNARY)
    maker.add(text, value, bound=bound(value.bound))


def binary(maker: Maker) -> None:
    """Two operands, the second perhaps stretched, perhaps the other way round."""
    one = maker.pick(FLOATS)
    other = stretched_operand(maker, one)
    if maker.chance(0.5):
        one, other = other, one
    text, bound = maker.draw.choice(BINARY)
    maker.add(text, one, other, bound=bound(one.bound, other.bound))


def transposed_sum(maker: Maker) -> None:
    """A value and its own transpose, where it is square; else two uses of one."""
    value = maker.pick(FLOATS)
    square = value.rank >= 2 and value.shape[-1] == value.shape[-2]
    text = "{0} + jnp.swapaxes({0}, -1, -2)" if square else "{0} * {0} + {0}"
    maker.add(text, value, bound=value.bound**2 + value.bound)


def integer_arithmetic(maker: Maker) -> None:
    """Integers, exact."""
    value = maker.pick(INTEGERS)
    text = maker.draw.choice(INTEGER_BINARY)
    other = stretched_operand(maker, value)
    if value.dtype.startswith("u") and "abs" in text:
        text = "{0} + {1}"
    maker.add(text, value, other, bound=100)


def boolean_arithmetic(maker: Maker) -> None:
    """Comparisons and logic."""
    if maker.chance(0.5):
        value = maker.pick((*FLOATS, "int32"))
        other = stretched_operand(maker, value)
        maker.add(str(maker.some("{0} > {1}", "{0} <= {1}", "{0} != {1}")), value, other)
        return
    value = maker.pick(("bool",))
    other = stretched_operand(maker, value)
    maker.add(str(maker.some("{0} & {1}", "{0} | ~{1}", "{0} ^ {1}")), value, other)


def select(maker: Maker) -> None:
    """A condition, and two cases."""
    value = maker.pick(("float32", "int32", "bfloat16"))
    condition = maker.like([1 if maker.chance(0.2) else n for n in value.shape], "bool")
    other = stretched_operand(maker, value)
    maker.add("jnp.where({0}, {1}, {2})", condition, value, other, bound=value.bound)


def cast(maker: Maker) -> None:
    """Another type."""
    value = maker.pick(("float32", "bfloat16", "int32", "bool", "uint8"))
    to = maker.draw.choice(("float32", "float32", "bfloat16", "int32", "bool", "int8"))
    if to == "bfloat16":
        to = maker.draw.choice(("bfloat16", "float16")) if maker.narrow else "int32"
    if value.dtype in FLOATS and to == "int8":
        to = "int32"
    text = (
        "({0} * 3).astype('int32')"
        if value.dtype in FLOATS and to == "int32"
        else (f"{{0}}.astype('{to}')")
    )
    result = maker.add(text, value, bound=value.bound * 3)
    if result is not None and to in FLOATS and value.dtype not in FLOATS:
        maker.add("jnp.sin({0})", result, bound=1.0)


def product(maker: Maker) -> None:
    """An einsum: batch, contracted, free and summed-out dims at random."""
    left = maker.pick(FLOATS if maker.chance(0.9) else ("int32",), lambda v: v.rank < 6, least=1)
    letters = "abcdg"[: left.rank]
    sizes = dict(zip(letters, left.shape, strict=True))
    shared = [c for c in letters if maker.chance(0.6)]
    new = {c: maker.size() for c in "ef"[: maker.draw.randint(0, 2)]}
    right_letters = shared + list(new)
    maker.draw.shuffle(right_letters)
    sizes.update(new)
    kept = [c for c in sizes if c in new or c not in shared or maker.chance(0.35)]
    kept = [c for c in kept if not maker.chance(0.08)]
    maker.draw.shuffle(kept)
    right = maker.like([sizes[c] for c in right_letters], left.dtype)
    summed = size_of([n for c, n in sizes.items() if c not in kept])
    order = f"{letters},{''.join(right_letters)}->{''.join(kept)}"
    text = f"jnp.einsum('{order}', {{0}}, {{1}})"
    if left.dtype == "bfloat16" and maker.chance(0.5):
        text = text[:-1] + ", preferred_element_type='float32')"
    maker.add(text, left, right, bound=1 + left.bound * right.bound * summed**0.5)


def matrix_product(maker: Maker) -> None:
    """The @ operator, dense layers, products with the operand itself."""
    left = maker.pick(("float32",), least=1)
    n = left.shape[-1]
    kind = maker.draw.randrange(5)
    bound = 1 + left.bound * 2 * n**0.5
    if kind == 0:
        maker.add("{0} @ {1}", left, maker.like((n, maker.size())), bound=bound)
    elif kind == 1:
        weights, bias = maker.like((n, m := maker.size())), maker.like((m,))
        maker.add("jnp.tanh({0} @ {1} + {2})", left, weights, bias, bound=1.0)
    elif kind == 2 and left.rank >= 2:
        maker.add("{0} @ jnp.swapaxes({0}, -1, -2)", left, bound=1 + left.bound**2 * n**0.5)
    elif kind == 3 and left.rank <= 2:
        maker.add("jnp.outer({0}, {1})", left, maker.like((maker.size(),)), bound=left.bound * 2)
    else:
        first, second = maker.like((n, m := maker.size())), maker.like((m, n))
        maker.add("jax.nn.relu({0} @ {1}) @ {2}", left, first, second, bound=bound * 2 * m**0.5)


def boolean_product(maker: Maker) -> None:
    """A product of booleans: whether any pair of them is true."""
    left = maker.pick(("bool",), least=1)
    n = left.shape[-1]
    maker.add("{0} @ {1}", left, maker.like((n, maker.size()), "bool"))


def axes_text(maker: Maker, value: Value, least: int = 1) -> tuple[str, int]:
    """An `axis=` argument, and how many elements are reduced."""
    chosen = maker.subset(value.rank, least)
    if maker.chance(0.2) or not value.rank:
        return "axis=None", size_of(value.shape)
    return f"axis={tuple(chosen)}", size_of([value.shape[d] for d in chosen])


def reduction(maker: Maker) -> None:
    """Sums, means, extremes, products, softmaxes."""
    value = maker.pick(FLOATS)
    axes, count = axes_text(maker, value)
    keep = ", keepdims=True" if maker.chance(0.3) else ""
    name, bound = maker.draw.choice(
        (
            ("jnp.sum", 1 + value.bound * count**0.5),
            ("jnp.mean", value.bound),
            ("jnp.max", value.bound),
            ("jnp.min", value.bound),
            ("jnp.var", value.bound**2),
            ("jax.nn.logsumexp", value.bound + 5),
            ("jnp.std", value.bound),
            ("jnp.sum", 1 + value.bound * count**0.5),
        )
    )
    if name == "jnp.std":
        maker.add(f"jnp.sqrt(jnp.var({{0}}, {axes}{keep}) + 0.1)", value, bound=bound)
        return
    maker.add(f"{name}({{0}}, {axes}{keep})", value, bound=bound)


def normalisation(maker: Maker) -> None:
    """Softmaxes and norms: a reduction and the value again."""
    value = maker.pick(FLOATS, least=1)
    d = maker.draw.randrange(value.rank)
    maker.add(
        str(
            maker.some(
                f"jax.nn.softmax({{0}}, axis={d})",
                f"jax.nn.log_softmax({{0}}, axis={d})",
                f"({{0}} - jnp.mean({{0}}, axis={d}, keepdims=True)) * "
                f"lax.rsqrt(jnp.var({{0}}, axis={d}, keepdims=True) + 0.1)",
                f"{{0}} / (1 + jnp.max(jnp.abs({{0}}), axis={d}, keepdims=True))",
                f"{{0}} - jnp.sum({{0}} * {{0}}, axis={d}, keepdims=True) * 0.01",
            )
        ),
        value,
        bound=8.0,
    )


def product_reduction(maker: Maker) -> None:
    """A product of numbers near one."""
    value = maker.pick(("float32",))
    axes, _ = axes_text(maker, value)
    maker.add(f"jnp.prod(1 + 0.02 * jnp.sin({{0}}), {axes})", value, bound=4.0)


def exact_reduction(maker: Maker) -> None:
    """Reductions of integers and booleans; positions of extremes."""
    kind = maker.draw.randrange(4)
    if kind == 0:
        value = maker.pick(("bool",))
        axes, _ = axes_text(maker, value)
        name = maker.some("jnp.any", "jnp.all", "jnp.sum", "jnp.max")
    elif kind == 1:
        value = maker.pick(INTEGERS)
        axes, _ = axes_text(maker, value)
        name = maker.some("jnp.sum", "jnp.max", "jnp.min", "jnp.prod", "jnp.bitwise_and.reduce")
        if name == "jnp.bitwise_and.reduce":
            axes = f"axis={maker.draw.randrange(value.rank) if value.rank else None}"
    else:
        value = maker.pick((*FLOATS, "int32"), least=1)
        axes = f"axis={maker.draw.randrange(value.rank)}" if kind == 2 else ""
        name = maker.some("jnp.argmax", "jnp.argmin")
    maker.add(f"{name}({{0}}{', ' if axes else ''}{axes})", value, bound=20)


def along_a_dim(maker: Maker) -> None:
    """Running sums, sorts, the largest k."""
    value = maker.pick(("float32", "float32", "int32"), least=1)
    d = maker.draw.randrange(value.rank)
    n = value.shape[d]
    maker.add(
        str(
            maker.some(
                f"jnp.cumsum({{0}}, axis={d})",
                f"lax.cumsum({{0}}, axis={d}, reverse=True)",
                f"lax.cummax({{0}}, axis={d})",
                f"jnp.sort({{0}}, axis={d})",
                f"jnp.argsort({{0}}, axis={d})",
                f"-jnp.sort(-{{0}}, axis={d})",
                f"lax.top_k({{0}}, {min(3, value.shape[-1])})[0]",
                f"lax.top_k({{0}}, {min(2, value.shape[-1])})[1]",
                f"jnp.diff({{0}}, axis={d})" if n > 1 else f"jnp.sort({{0}}, axis={d})",
                f"jnp.median({{0}}, axis={d})" if value.dtype == "float32" else "{0} + 1",
            )
        ),
        value,
        bound=value.bound * n**0.5 + 17,
    )


def convolution(maker: Maker) -> None:
    """A convolution over one dim, or a pool."""
    value = maker.pick(("float32",), lambda v: v.rank == 3)
    _, features, n = value.shape
    if n > 3 and maker.chance(0.4):
        maker.add(
            "lax.reduce_window({0}, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), 'VALID')",
            value,
            bound=value.bound,
        )
        return
    kernel = maker.like((maker.size(), features, min(3, n)))
    maker.add(
        "lax.conv_general_dilated({0}, {1}, (1,), 'SAME')",
        value,
        kernel,
        bound=1 + value.bound * 2 * (3 * features) ** 0.5,
    )


def complex_numbers(maker: Maker) -> None:
    """Complex numbers, from floats and back."""
    kind = maker.draw.randrange(4)
    if kind == 0:
        value = maker.pick(("float32",))
        maker.add("lax.complex({0}, {1})", value, maker.like(value.shape), bound=value.bound + 2)
        return
    value = maker.pick(("complex64",))
    if kind == 1:
        text = maker.some("jnp.real({0})", "jnp.imag({0})", "jnp.sqrt(jnp.abs({0}) ** 2 + 0.1)")
        maker.add(str(text), value, bound=value.bound)
    elif kind == 2 and value.rank:
        axes, count = axes_text(maker, value)
        maker.add(f"jnp.sum({{0}}, {axes})", value, bound=1 + value.bound * count**0.5)
    elif value.rank and maker.chance(0.5):
        n = value.shape[-1]
        maker.add(
            "{0} @ {1}",
            value,
            maker.like((n, maker.size()), "complex64"),
            bound=1 + value.bound * 3 * n**0.5,
        )
    else:
        other = stretched_operand(maker, value)
        text = str(maker.some("{0} * {1}", "{0} + jnp.conj({1})", "{0} - {1} * 2j"))
        maker.add(text, value, other, bound=value.bound * (other.bound + 1))


NUMBERS = (
    (10, unary),
    (12, binary),
    (3, transposed_sum),
    (4, integer_arithmetic),
    (3, boolean_arithmetic),
    (4, select),
    (5, cast),
    (12, product),
    (8, matrix_product),
    (1, boolean_product),
    (9, reduction),
    (6, normalisation),
    (2, product_reduction),
    (6, exact_reduction),
    (6, along_a_dim),
    (2, convolution),
    (3, complex_numbers),
)
