"""Orders along a dim, Fourier transforms, linear algebra, groups of rows, more random numbers."""

from tests.fuzz.making import INTEGERS, Maker
from tests.fuzz.operators_places import positions
from tests.fuzz.programs import size_of

SPLITS = ((24, (2, 12)), (24, (3, 8)), (24, (12, 2)), (24, (6, 4)), (12, (3, 4)), (12, (4, 3)))


def running(maker: Maker) -> None:
    """Running sums, products, extremes, both ways."""
    value = maker.pick(("float32", "float32", "float32", "int32", "bfloat16"), least=1)
    d = maker.draw.randrange(value.rank)
    back = maker.draw.choice(("True", "False"))
    count = max(value.shape[d], 1)
    name = maker.draw.choice(("cumsum", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))
    operand, bound = "{0}", value.bound * count**0.5 + 3
    if name == "cumprod":
        operand, bound = ("1 + 0.02 * jnp.sin({0})", 2.0)
        if value.dtype == "int32":
            operand = "({0} % 3)"
    if name == "cumlogsumexp" and value.dtype == "int32":
        name = "cumsum"
    maker.add(f"lax.{name}({operand}, axis={d}, reverse={back})", value, bound=bound)


def ordered(maker: Maker) -> None:
    """Sorts of several arrays, by several keys; positions; the largest k."""
    value = maker.pick(("float32", "int32", "uint8", "int32"), least=1)
    d = maker.draw.randrange(value.rank)
    n = value.shape[d]
    kind = maker.draw.randrange(6)
    if kind == 0:
        other = maker.like(value.shape, "float32")
        keys, taken = maker.draw.randint(1, 2), maker.draw.randrange(2)
        text = f"lax.sort(({{0}}, {{1}}), dimension={d}, num_keys={keys})[{taken}]"
        maker.add(text, value, other, bound=max(value.bound, 2))
    elif kind == 1:
        other = maker.like(value.shape, "int32")
        text = f"lax.sort(({{1}}, {{0}}, {{0}}), dimension={d}, num_keys=1, is_stable=True)[1]"
        maker.add(text, value, other, bound=value.bound)
    elif kind == 2:
        down = maker.draw.choice(("True", "False"))
        maker.add(f"jnp.argsort({{0}}, axis={d}, stable=True, descending={down})", value, bound=n)
    elif kind == 3 and n:
        text = f"lax.top_k({{0}}, {maker.draw.randint(1, n)}, axis={d})[{maker.draw.randrange(2)}]"
        maker.add(text, value, bound=max(value.bound, n))
    elif kind == 4 and n:
        name = maker.draw.choice(("argmax", "argmin"))
        maker.add(f"lax.{name}({{0}}, {d}, jnp.int32)", value, bound=n)
    else:
        maker.add(f"jnp.sort({{0}}, axis={d}, descending=True)", value, bound=value.bound)


def fourier(maker: Maker) -> None:
    """Transforms of one to three dims, real and complex, back and forth."""
    value = maker.pick(("complex64", "float32"), lambda v: 0 not in v.shape, least=1)
    count = maker.draw.randint(1, min(3, value.rank))
    axes = tuple(range(value.rank - count, value.rank))
    if maker.chance(0.3):
        axes = tuple(maker.draw.sample(range(value.rank), count))
    n = size_of([value.shape[d] for d in axes])
    if value.dtype == "float32":
        name = maker.draw.choice(("rfftn", "rfftn", "fftn"))
        maker.add(f"jnp.fft.{name}({{0}}, axes={axes})", value, bound=1 + value.bound * n**0.5)
        return
    name = maker.draw.choice(("fftn", "ifftn", "irfftn"))
    if name == "irfftn" and value.shape[axes[-1]] < 2:
        name = "fftn"
    bound = value.bound if name != "fftn" else 1 + value.bound * n**0.5
    maker.add(f"jnp.fft.{name}({{0}}, axes={axes})", value, bound=bound)


def linear_algebra(maker: Maker) -> None:
    """Decompositions and solves of stacks of matrices."""
    value = maker.pick(("float32",), lambda v: 1 <= min(v.shape[-2:]) <= max(v.shape[-2:]) <= 8, 2)
    n = value.shape[-2]
    square = f"({{0}} @ jnp.swapaxes({{0}}, -1, -2) * 0.1 + 2 * jnp.eye({n}))"
    side = maker.draw.choice(("True", "False"))
    lower, flip, unit = (maker.draw.choice(("True", "False")) for _ in range(3))
    columns = maker.size()
    shape = (*value.shape[:-2], n, columns) if side == "True" else (*value.shape[:-2], columns, n)
    kind = maker.draw.randrange(6)
    if kind <= 2:
        other = maker.like(shape)
        text = (
            f"lax.linalg.triangular_solve({square}, {{1}}, left_side={side}, lower={lower}, "
            f"transpose_a={flip}, unit_diagonal={unit})"
        )
        maker.add(text, value, other, bound=8)
    elif kind == 3:
        maker.add(f"lax.linalg.cholesky({square})", value, bound=4)
    elif kind == 4:
        maker.add(f"jnp.linalg.inv({square})", value, bound=2)
    else:
        maker.add(f"jnp.linalg.slogdet({square})[1]", value, bound=8)


def groups_of_rows(maker: Maker) -> None:
    """Sums and extremes of segments; a matrix for each group of rows."""
    value = maker.pick(("float32", "float32", "int32"), least=1)
    n, count = value.shape[0], maker.draw.choice((1, 2, 3, 5, 8))
    if maker.chance(0.7) or value.rank != 2 or value.dtype != "float32":
        ids = positions(maker, (n,), count)
        name = maker.draw.choice(("sum", "sum", "max", "min"))
        text = f"jax.ops.segment_{name}({{0}}, {{1}}, num_segments={count})"
        if name != "sum":  # of an empty segment: the lowest number
            text = f"jnp.clip({text}, -9, 9)" if value.dtype == "float32" else text
        maker.add(text, value, ids, bound=max(9, value.bound * n**0.5))
        return
    weights = maker.like((count, value.shape[1], maker.size()))
    sizes = maker.fresh((count,), "int32", 0, max(n // count, 0))
    bound = 1 + value.bound * 2 * value.shape[1] ** 0.5
    maker.add("lax.ragged_dot({0}, {1}, {2})", value, weights, sizes, bound=bound)


def by_row(maker: Maker) -> None:
    """Reads and writes in each row apart: the rows are a batch of the gather or scatter."""
    value = maker.pick(("float32", "int32"), lambda v: v.shape[1] > 0, least=2)
    rows, n = value.shape[:2]
    kind = maker.draw.randrange(5)
    length = maker.draw.randint(1, 4)
    at = positions(maker, (rows, length) if kind < 3 else (rows,), n)
    if kind == 0:
        maker.add("jax.vmap(lambda x, i: x[i])({0}, {1})", value, at, bound=value.bound)
    elif kind in (1, 2):
        update = maker.like((rows, length, *value.shape[2:]), value.dtype)
        how = maker.draw.choice(("add", "max", "min", "add"))
        mode = maker.draw.choice(("drop", "clip"))
        text = f"jax.vmap(lambda x, i, u: x.at[i].{how}(u, mode='{mode}'))({{0}}, {{1}}, {{2}})"
        maker.add(text, value, at, update, bound=value.bound * 4 + 8)
    elif kind == 3:
        size = maker.draw.randint(1, n)
        text = f"jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, {size}))({{0}}, {{1}})"
        maker.add(text, value, at, bound=value.bound)
    else:
        update = maker.like((rows, maker.draw.randint(1, n), *value.shape[2:]), value.dtype)
        text = "lax.dynamic_update_slice_in_dim(x, u, i, 0)"
        maker.add(f"jax.vmap(lambda x, i, u: {text})({{0}}, {{1}}, {{2}})", value, at, update,
                  bound=max(value.bound, update.bound))  # fmt: skip


def window_at(maker: Maker) -> None:
    """A window read or written at starts that may be far outside, in every dim."""
    value = maker.pick(("float32", "int32", "bool"), lambda v: 0 not in v.shape, least=1)
    starts = [positions(maker, (), n) for n in value.shape]
    sizes = tuple(maker.draw.randint(1, n) for n in value.shape)
    given = ", ".join(f"{{{k + 1}}}.astype('int32') * 2" for k in range(len(starts)))
    if maker.chance(0.5):
        text = f"lax.dynamic_slice({{0}}, ({given},), {sizes})"
        maker.add(text, value, *starts, bound=value.bound)
        return
    update = maker.like(sizes, value.dtype)
    text = f"lax.dynamic_update_slice({{0}}, {{{len(starts) + 1}}}, ({given},))"
    maker.add(text, value, *starts, update, bound=max(value.bound, update.bound))


def overwritten(maker: Maker) -> None:
    """Writes that meet: numbers that are all the same, or all that a mask says."""
    value = maker.pick(("float32", "int32"), least=1)
    d = maker.draw.randrange(value.rank)
    before = ":, " * d
    at = positions(maker, (maker.draw.randint(1, 6),), value.shape[d])
    mode = maker.draw.choice(("", ", mode='drop'", ", mode='clip'"))
    maker.add(f"{{0}}.at[{before}{{1}}].set(3{mode})", value, at, bound=value.bound + 3)


def heads(maker: Maker) -> None:
    """A dim of 12 or 24 split into heads, which no mesh divides as it is, and joined again."""
    whole, parts = maker.draw.choice(SPLITS)
    rows = maker.size()
    fitting = [v for v in maker.values if v.dtype == "float32" and 0 < v.rank < 4]
    fitting = [v for v in fitting if v.shape[-1] == whole]
    value = maker.draw.choice(fitting) if fitting else maker.fresh((rows, whole))
    text = f"jnp.reshape({{0}}, {(*value.shape[:-1], *parts)})"
    made = maker.add(text, value, bound=value.bound)
    if made is not None and maker.chance(0.6):
        order = (*range(made.rank - 2), made.rank - 1, made.rank - 2)
        text = f"jnp.reshape(jnp.transpose({{0}}, {order}), {value.shape})"
        maker.add(text, made, bound=value.bound)


def more_random(maker: Maker) -> None:
    """Distributions that are made of bits."""
    keys = [v for v in maker.values if v.dtype == "key" and v.shape == ()]
    key = maker.draw.choice(keys) if keys and maker.chance(0.8) else maker.fresh((), "key")
    value = maker.pick(("float32",), lambda v: 0 not in v.shape, least=1)
    shape, d = value.shape, maker.draw.randrange(value.rank)
    kind = maker.draw.randrange(5)
    if kind == 0:
        maker.add(f"jax.random.categorical({{1}}, {{0}}, axis={d})", value, key, bound=20)
    elif kind == 1:
        maker.add(f"jax.random.gumbel({{0}}, {shape})", key, bound=8)
    elif kind == 2:
        maker.add(f"jax.random.truncated_normal({{0}}, -1, 1, {shape})", key, bound=1)
    elif kind == 3:
        maker.add(f"jax.random.exponential({{0}}, {shape})", key, bound=8)
    else:
        maker.add(f"jax.random.bits({{0}}, {shape}, 'uint32') >> 28", key, bound=16)


def narrow_number(maker: Maker) -> None:
    """Rounded to eight or sixteen bits, moved, and back."""
    value = maker.pick(("float32",), least=1)
    if not maker.narrow:
        return
    to = maker.draw.choice(("float16", "float8_e4m3fn", "float8_e5m2", "bfloat16"))
    moved = maker.draw.choice(
        ("x[::-1]", "jnp.swapaxes(x, 0, -1)", "jnp.roll(x, 1, 0)", "jnp.concatenate([x, x], 0)")
    )
    text = f"(lambda x: {moved}.astype('float32'))({{0}}.astype('{to}'))"
    maker.add(text, value, bound=value.bound)


def exact_order(maker: Maker) -> None:
    """Integers of every width, cast and compared."""
    value = maker.pick(INTEGERS)
    to = maker.draw.choice(("int16", "uint16", "int8", "int32", "uint8"))
    text = f"({{0}}.astype('{to}') * 3 - 1).astype('int32')"
    maker.add(text, value, bound=value.bound * 3 + 1)


MATRICES = (
    (6, running),
    (7, ordered),
    (4, fourier),
    (3, linear_algebra),
    (5, groups_of_rows),
    (5, by_row),
    (5, window_at),
    (2, overwritten),
    (4, heads),
    (4, more_random),
    (3, narrow_number),
    (2, exact_order),
)
