"""What kernels on CPU are held to write to memory, beside what XLA's compiler says of them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.cpu.combined_where_it_fits import combined_where_it_fits
from meshwise.cost.cpu.held import Held, holding_of


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def product(left, right):
    """Of what is computed before, so that operands are made in the order that is wanted."""
    return lambda a, b: lax.dot_general(jnp.sin(a), jnp.cos(b), ((left, right), ((), ())))


def batched(left, right, batch):
    return lambda a, b: lax.dot_general(jnp.sin(a), jnp.cos(b), ((left, right), (batch, batch)))


def read_twice(a, b):
    """A cheap product in two orders, each of which is made anew: the first is gone by then."""
    mask = a[:, None] * b
    once = jnp.einsum("tec,td->ecd", mask, b[:, 0])
    return jnp.einsum("tec,ecd->td", mask, jnp.tanh(once))


def convolved(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(jnp.sin(x), w, (1, 1), "SAME", dimension_numbers=numbers)


def normalised(x):
    centred = x - x.mean(1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(1, keepdims=True))


def one_head(q, k):
    scores = jnp.where(jnp.tri(64, dtype=bool), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), k)


def shifted(x, m):
    return jnp.exp(x - m[:, None]).sum(1)


def summed_and_doubled(x, m):
    less = x - m[:, None]
    return jnp.exp(less).sum(1), less * 2


def pulled(x, m):
    """Sums of what sums are made of: all one kernel."""
    apart = x[None] - x[:16, None]
    near = ((apart**2).sum(2) + 0.1) ** -1.5
    return (m[None, :, None] * apart * near[..., None]).sum(1)


def sum_in_a_product(a, b):
    return jnp.exp(jnp.exp(a).sum(2)) @ b


def few_between(a):
    return jnp.exp(jnp.exp(a).sum(2) * 2).sum(1)


def chain_of(length):
    def tanhs(x):
        for _ in range(length):
            x = jnp.tanh(x)
        return x.sum(1)

    return tanhs


def loss(x, t):
    return -(jax.nn.log_softmax(x) * t).sum()


def neighbours(a, b):
    even, odd = lax.pad(a, 0.0, ((0, 1, 1), (0, 0, 0))), lax.pad(b, 0.0, ((1, 0, 1), (0, 0, 0)))
    both = even + odd
    return jnp.tanh(both[1:]), jnp.exp(both[:-1])


def sum_and_itself(a, b):
    both = a * b
    return both.sum(1), jnp.tanh(both)


def wanted_in_reverse(a, b):
    """What is computed last is wanted first, and so run first of what reads one value."""
    both = jnp.exp(a @ a)
    late, early = both @ b, b @ both
    return jnp.tanh(early @ both), late[:1]


def momentum(w, m, a):
    """A result is read where it lies, not made again of more than it is."""
    m = 0.9 * m + a @ a
    return m, jnp.tanh(w - 0.1 * m)[:1]


def cached(x, rows, q):
    """What rows are written into is not made again, nor put in order with them."""
    x = lax.dynamic_update_slice(x, rows, (0, 3, 0, 0))
    return x, jnp.einsum("bthd,bhd->bht", x, q)


def shown_as_matrices(a, b, w, v):
    """Of more dims than a matrix an operand is made for each product that reads it."""
    both = a * b
    return both @ w, jnp.einsum("bsd,bse->de", both, v)


def joined_for_two(a, b, w):
    """What is joined is written, and then put in order in two ways."""
    both = jnp.concatenate([jnp.sin(a), jnp.cos(b)], 1)
    scores = jnp.einsum("bhsd,bhtd->bhst", w, w)
    return jnp.einsum("bshd,bhtd->bhst", both, w), jnp.einsum("bshd,bhst->bhdt", both, scores)


def recurrence(a, b):
    def after(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(after, (a, b))[1].sum()


def loop(x, w):
    return lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x * 2, w)[0]


CASES = {
    "a matrix lies either way": (product((0,), (0,)), f32(32, 64), f32(32, 48)),
    "a matrix lies either way on the right": (product((1,), (1,)), f32(64, 32), f32(48, 32)),
    "heads behind positions": (batched((3,), (3,), (0, 2)), f32(2, 64, 4, 32), f32(2, 48, 4, 32)),
    "gradient of a weight": (product((0, 1), (0, 1)), f32(2, 64, 32), f32(2, 64, 48)),
    "argument in another order": (
        lambda a, b: jnp.einsum("bsd,bse->de", a, b), f32(2, 64, 32), f32(2, 64, 48),
    ),
    "gradient of a weight, transposed": (
        lambda a, b: jnp.einsum("bsd,bse->de", a, b).T, f32(2, 64, 32), f32(2, 64, 48),
    ),
    "transposed before a product": (
        lambda a, b: jnp.sin(a).T @ jnp.cos(b), f32(32, 64), f32(32, 48),
    ),
    "product of short floats": (lambda a, b: a @ b, bf16(64, 256), bf16(256, 64)),
    "outer product": (lambda a, b: jnp.tanh(a[:, None] * b), f32(512), f32(512)),
    "many reduced, what is read alone": (
        lambda a, b: jnp.exp(a * b).sum(0), f32(64, 256), f32(64, 256),
    ),
    "reduced product": (lambda a, b: jnp.tanh(a @ b + 1).sum(1), f32(128, 64), f32(64, 128)),
    "chosen of a product, and reduced": (
        lambda a, b: jnp.tril(a @ b).sum(1), f32(128, 64), f32(64, 128),
    ),
    "reduced product of a matrix that lies the other way": (
        lambda a, b: (a.T @ b).sum(1), f32(64, 128), f32(64, 128),
    ),
    "many reduced, what others read": (
        sum_and_itself, f32(256, 256), f32(256, 256),
    ),
    "few reduced by windows": (lambda a, b: jnp.tanh((a * b).sum(1)), f32(16, 64), f32(16, 64)),
    "softmax": (lambda a, b: jax.nn.softmax(a @ b, axis=1), f32(128, 64), f32(64, 128)),
    "attention": (
        lambda a, b: jax.nn.softmax(a @ b * 0.1, axis=1) @ b.T, f32(128, 64), f32(64, 128),
    ),
    "masked attention": (
        lambda a, b: jax.nn.softmax(jnp.tril(a @ b), axis=1) @ b.T, f32(128, 64), f32(64, 128),
    ),
    "normalised": (lambda x: normalised(jnp.sin(x)), f32(64, 256)),
    "gated": (lambda a, b: jax.nn.silu(a @ b) @ b.T, f32(128, 64), f32(64, 128)),
    "one row written": (
        lambda a, b: lax.dynamic_update_slice(jnp.sin(a), b, (3, 0)).sum(),
        f32(64, 256), f32(4, 256),
    ),
    "interleaved, and read by several": (
        neighbours, f32(64, 64), f32(64, 64),
    ),
    "associative scan": (
        lambda a: lax.associative_scan(jnp.add, a, axis=0), f32(128, 64),
    ),
    "attention of one head": (one_head, f32(8, 64, 1, 16), f32(8, 64, 1, 16)),
    "read by a reduction and by others": (
        summed_and_doubled, f32(64, 256), f32(64),
    ),
    "read by a reduction alone": (shifted, f32(64, 256), f32(64)),
    "chosen by a mask and summed": (
        lambda x, m: (jax.nn.one_hot(m.astype(int), 256) * x).sum(1), f32(64, 256), f32(64),
    ),
    "chosen by a mask of rows and summed": (
        lambda x, m: ((m[:, None] > 0) * x).sum(1), f32(64, 256), f32(64),
    ),
    "sines made twice": (
        lambda x: ((jnp.sin(x) * 2) @ x.T, (jnp.sin(x) * 3) @ x.T), f32(64, 256),
    ),
    "exponentials made once": (
        lambda x: ((jnp.exp(x) * 2) @ x.T, (jnp.exp(x) * 3) @ x.T), f32(64, 256),
    ),
    "sums of sums": (pulled, f32(512, 3), f32(512)),
    "a sum, and a product of it": (sum_in_a_product, f32(64, 64, 128), f32(64, 96)),
    "few elements between sums": (few_between, f32(64, 32, 64)),
    "sum of exponentials, less the greatest": (
        lambda x: jnp.exp(jnp.exp(x) - x.max(1, keepdims=True)).sum(1), f32(64, 256),
    ),
    "a hundred before a sum": (chain_of(100), f32(64, 256)),
    "reshaped, padded and summed": (
        lambda x: jnp.pad(jnp.exp(x).reshape(32, 512), ((1, 1), (0, 0))).sum(1), f32(64, 256),
    ),
    "padded between elements and summed": (
        lambda x: lax.pad(jnp.exp(x), 0.0, ((0, 0, 0), (0, 1, 1))).sum(1), f32(64, 128),
    ),
    "divided by a number that is spread": (
        lambda x: (jnp.exp(x) / jnp.full((64, 256), 3.0), jnp.exp(x) / 3.0), f32(64, 256),
    ),
    "cut and summed": (lambda x: jnp.exp(x)[1:].sum(1), f32(64, 256)),
    "too few for the library": (lambda x: jnp.exp(x).sum(1), f32(60, 64)),
    "a loss": (loss, f32(64, 256), f32(64, 256)),
    "gradient of a loss": (jax.grad(loss), f32(64, 256), f32(64, 256)),
    "wanted in reverse": (wanted_in_reverse, f32(64, 64), f32(64, 64)),
    "a result that another is made of": (momentum, f32(64, 64), f32(64, 64), f32(64, 64)),
    "rows written, and read": (cached, f32(2, 64, 4, 16), f32(2, 1, 4, 16), f32(2, 4, 16)),
    "read by products as matrices": (
        shown_as_matrices, f32(4, 32, 64), f32(4, 32, 64), f32(64, 32), f32(4, 32, 64),
    ),
    "joined, and put in two orders": (
        joined_for_two, f32(2, 16, 4, 32), f32(2, 16, 4, 32), f32(2, 4, 32, 32),
    ),
    "a loop": (loop, f32(64, 64), f32(8, 64, 64)),
    "put in one order for two products": (
        lambda a, b, c: (
            lax.dot_general(a, b, (((3,), (3,)), ((0, 2), (0, 2)))),
            lax.dot_general(c, a, (((1,), (1,)), ((0, 2), (0, 2)))),
        ), f32(2, 64, 4, 32), f32(2, 48, 4, 32), f32(2, 64, 4, 16),
    ),
    "gradient of a convolution": (
        jax.grad(lambda x, w: (convolved(x, w) ** 2).sum(), (0, 1)),
        f32(4, 16, 32, 8), f32(3, 3, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_what_xla_says(name):
    function, *args = CASES[name]
    held = holding_of(jax.make_jaxpr(function)(*args), {}).at_once
    compiled = jax.jit(function).lower(*args).compile()
    actual = compiled.memory_analysis().temp_size_in_bytes
    assert held == pytest.approx(actual, rel=0.02, abs=1024), (held, actual)


@pytest.mark.parametrize(
    "name",
    [
        "wanted in reverse",
        "a result that another is made of",
        "rows written, and read",
        "read by products as matrices",
        "joined, and put in two orders",
    ],
)
def test_what_is_held_in_the_order_that_holds_least(name):
    function, *args = CASES[name]
    held = holding_of(jax.make_jaxpr(function)(*args), {}).waiting
    least = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    compiled = jax.jit(function, compiler_options=least).lower(*args).compile()
    actual = compiled.memory_analysis().temp_size_in_bytes
    assert held == pytest.approx(actual, rel=0.02, abs=1024), (held, actual)


def test_nothing_is_written_that_nobody_reads():
    gradient = jax.make_jaxpr(jax.grad(recurrence, (0, 1)))(f32(64, 32), f32(64, 32))
    program = holding_of(gradient, {}).program
    read = {v for kernel in program.kernels for v in kernel.reads}
    assert read.union(program.steps.outputs).issuperset(
        v for kernel in program.kernels for v in kernel.writes
    )


ROWS, COLUMNS = P("x"), P(None, "x")
EXCHANGES = {
    "rows to columns": (lambda x: x, COLUMNS),
    "computed, and moved": (jnp.exp, COLUMNS),
    "transposed": (lambda x: x.T, ROWS),
    "there and back": (lambda x: jnp.sort(x, 0) + x, ROWS),
    "one after the other": (lambda x: jnp.fft.fft2(x).real, ROWS),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_are_held_in_pieces(name):
    """What is sent, what comes, and what is made of that: in the whole would be a third less."""
    function, out = EXCHANGES[name]
    mesh = jax.make_mesh((8,), ("x",))
    program = mw.jit(function, mesh=mesh, in_shardings=ROWS, out_shardings=out).partition(
        f32(256, 512)
    )
    assert program.collectives
    _, held = combined_where_it_fits(program.jaxpr, dict(mesh.shape))
    actual = program.compile().memory_analysis().temp_size_in_bytes
    counted = held.waiting if held.is_less_as_wanted else held.at_once
    assert counted == pytest.approx(actual, rel=0.02, abs=1024), (held, actual)


def test_a_long_chain_beside_what_began_it_is_decided():
    """Whether a value can be made by all readers depends on all ways to them, here a long one."""

    def chain(x, y):
        start = both = x + y
        for _ in range(3000):
            both = both * 2
        return both - start

    # What began it lies where the result comes to lie.
    assert holding_of(jax.make_jaxpr(chain)(f32(64, 64), f32(64, 64)), {}).at_once == 0


def test_an_order_is_better_where_it_holds_some_less():
    held = [Held(100, waiting).is_less_as_wanted for waiting in (101, 98, 97, 0)]
    assert held == [False, False, True, True]
    assert not Held(0, 0).is_less_as_wanted
