"""How XLA on CPU compiles small programs: by which maker of kernels, and how much LLVM does."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax

X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
OLDER = "xla_cpu_use_fusion_emitters"
LEVEL = "xla_backend_optimization_level"
COMPILER = importlib.import_module("jax._src.compiler")
HAS_OLDER = jax.__version_info__ < (0, 11)


def repeated(fn, times):
    def function(x):
        for _ in range(times):
            x = fn(x)
        return x

    return function


def looped(x):
    """Two equations outside of a body of forty, which exchanges once."""
    return lax.fori_loop(0, 3, lambda _, x: repeated(jnp.sin, 40)(x.T), x) * 2


def padded(x):
    return jnp.pad(x, ((0, 0), (1, 2)))


def layers(x, times):
    """Products, and a function in the buffer of each."""
    return lax.scan(lambda x, _: (jnp.tanh(x @ X * 2 + 1), None), x, length=times)[0]


def clamped_in_a_body(x):
    return lax.fori_loop(0, 3, lambda k, x: lax.clamp(x, ~x | (k > 1), ~x), x)


def added_up(x, times):
    """Rows that overlap, one after another: each time what was there is read twice."""
    for k in range(times):
        x = x.at[3 * k : 3 * k + 5].add(jnp.sin(X[:5]))
    return x


def summed(x):
    """Over what it lies on, too: every device adds up all of its part first."""
    return x / jnp.sqrt((x * x).sum())


PROGRAMS = {
    "element by element": (jnp.sin, X, True),
    "one exchange": (lambda x: x.T * 2, X, False),
    "one exchange among many equations": (lambda x: repeated(jnp.sin, 20)(x.T), X, True),
    "one exchange in a long body": (looped, X, True),
    "each device's part is very short": (jnp.sin, np.zeros((8, 2**14), np.float32), True),
    "each device's part is short": (jnp.sin, np.zeros((8, 2**16), np.float32), True),
    "each device's part is long": (jnp.sin, np.zeros((8, 2**16 + 1), np.float32), False),
    "few numbers scattered": (lambda x: jnp.sin(jnp.cos(x)).at[:, 3].add(1.0), X, True),
    "many numbers scattered": (
        lambda x: x.at[x[:, 0].astype(int)].add(x),
        np.ones((256, 2**10), np.float32),
        False,
    ),
    "functions of products": (lambda x: jnp.tanh(x @ X), X, False),
    "of few numbers": (lambda x: jnp.tanh(x @ X[:, :16]), X, True),
    "of few numbers, a few times": (partial(layers, times=1), X, True),
    "of few numbers, many times": (partial(layers, times=2), X, False),
    "functions of an argument": (lambda x: jnp.tanh(x * 2), X, True),
    "numbers put in order": (lambda x: jnp.swapaxes(x, 1, 2) * 2, np.ones((8, 16, 256)), False),
    "few numbers put in order": (lambda x: jnp.swapaxes(x, 1, 2) * 2, np.ones((8, 4, 64)), True),
    "long inside": (lambda x: (x[:, None] * x).sum(0), np.ones(2**12, np.float32), False),
    "rows added one after another": (partial(added_up, times=16), X, False),
    "a few rows added one after another": (partial(added_up, times=4), X, True),
    "added to their reversal many times": (repeated(lambda x: x + x[:, ::-1], 14), X, False),
    "added to its gathered rows many times": (
        repeated(lambda x: x + x[:, jnp.arange(64) ^ 3], 14),
        X,
        False,
    ),
    "added to its gathered rows a few times": (
        repeated(lambda x: x + x[:, jnp.arange(64) ^ 3], 4),
        X,
        True,
    ),
    "norms that LLVM writes out": (summed, np.ones((256, 32), np.float32), False),
    "norms that it does not": (summed, np.ones((256, 33), np.float32), True),
    "one such norm among many equations": (
        lambda x: repeated(jnp.sin, 150)(summed(x)),
        np.ones((256, 32), np.float32),
        True,
    ),
    "layers, some hundred": (repeated(lambda x: x @ X[:, ::2] @ X[:32], 300), X, True),
    "layers, many hundred": (repeated(lambda x: x @ X[:, ::2] @ X[:32], 600), X, False),
    "numbers that share a byte": (padded, (X > 0).astype(jnp.int2), False),
    "booleans clamped": (lambda x: lax.clamp(x, ~x, ~x), X > 0, False),
    "booleans clamped in a body": (clamped_in_a_body, X > 0, False),
    "booleans clipped": (lambda x: jnp.clip(x, False, True), X > 0, False),
    "the greater of booleans": (lambda x: jnp.maximum(x, ~x), X > 0, True),
    "booleans padded": (padded, X > 0, True),
}

NOT_VERY_SHORT = (
    "each device's part is short",
    "each device's part is long",
    "long inside",
    "many numbers scattered",
)


@pytest.fixture
def level(monkeypatch):
    """Says for all programs how much LLVM does, as XLA_FLAGS would: here they say 0."""
    make = COMPILER.get_compile_options

    def say(level):
        def options(*args, **kwargs):
            made = make(*args, **kwargs)
            made.executable_build_options.debug_options.xla_backend_optimization_level = level
            return made

        monkeypatch.setattr(COMPILER, "get_compile_options", options)

    return say


@pytest.mark.parametrize("name", PROGRAMS)
def test_older(name, mesh8, level):
    level(3)
    function, x, wanted = PROGRAMS[name]
    program = mw.jit(function, mesh=mesh8, in_shardings=P("x"), out_shardings=P("x")).partition(x)
    options = _jax.cpu_options(program.jaxpr, {"x": 8}, as_wanted=False)
    assert (OLDER in options) == (wanted and HAS_OLDER)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "one exchange" in name])
def test_pieces_of_exchanges_are_cut_alike_for_the_newer(name, mesh8, level):
    level(3)
    function, x, is_for_older = PROGRAMS[name]
    program = mw.jit(function, mesh=mesh8, in_shardings=P("x"), out_shardings=P("x")).partition(x)
    compiling = str(_jax.as_cpu_compiles(program.jaxpr, {"x": 8}))
    assert "all_to_all" in compiling
    assert ("cut_and_joined" in compiling) != (is_for_older and HAS_OLDER)


def options_of(function, x, mesh):
    program = mw.jit(function, mesh=mesh, in_shardings=P("x")).partition(x)
    return _jax.cpu_options(program.jaxpr, {"x": 8}, as_wanted=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_level(name, mesh8, level):
    level(3)
    function, x, _ = PROGRAMS[name]
    wanted = None if name in NOT_VERY_SHORT else 2
    assert options_of(function, x, mesh8).get(LEVEL) == wanted


@pytest.mark.parametrize(("steps", "wanted"), [(1, 2), (20, None)])
def test_not_this_level_for_many_random_numbers(steps, wanted, mesh8, level):
    level(3)

    def drawn(x):
        def step(x, key):
            return x + jax.random.uniform(key, x.shape), None

        return jax.lax.scan(step, x, jax.random.split(jax.random.key(0), steps))[0]

    found = options_of(drawn, X, mesh8)
    assert found.get(LEVEL) == wanted
    assert ("xla_cpu_use_fusion_emitters" in found) == (wanted is not None and HAS_OLDER)


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("bfloat16", None), ("float16", None), ("float32", 2), ("int8", 2)]
)
def test_not_this_level_for_short_floats(dtype, wanted, mesh8, level):
    level(3)
    x = jnp.ones((64, 8), dtype)
    assert options_of(lambda x: x * x + 1, x, mesh8).get(LEVEL) == wanted


@pytest.mark.parametrize("said", [0, 1, 2])
def test_never_more_than_said(said, mesh8, level):
    level(said)
    assert LEVEL not in options_of(jnp.sin, X, mesh8)


@pytest.mark.parametrize("said", [0, 1])
def test_not_by_the_older_where_llvm_does_nothing(said, mesh8, level):
    """It rounds what a kernel reads twice in two ways then, and no number is the least of two."""
    level(said)
    assert (OLDER in options_of(jnp.sin, X, mesh8)) == (said > 0 and HAS_OLDER)


def test_compiles_at_this_level(mesh8, level):
    level(3)
    step = mw.jit(lambda x: jnp.cumsum(x, 0) @ x.T, mesh=mesh8, in_shardings=P("x"))
    np.testing.assert_allclose(step(X), np.cumsum(X, 0) @ X.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("older", [False, True])
def test_users_word_counts(older, mesh8):
    said = {OLDER: older} if HAS_OLDER else {"xla_cpu_parallel_codegen_split_count": 1 + older}
    step = mw.jit(lambda x: x @ x.T, mesh=mesh8, in_shardings=P("x"), compiler_options=said)
    np.testing.assert_allclose(step(X), X @ X.T, rtol=1e-4, atol=1e-4)
