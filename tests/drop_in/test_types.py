"""Types of arguments and results under `jax.jit` and under `mw.jit`: the same for both.

Each row is a function of `jit`, run once with each.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import assert_same

RNG = np.random.default_rng(1)
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
ROWS_X, ROWS_Y = NamedSharding(MESH, P("x")), NamedSharding(MESH, P("y"))
WHOLE = NamedSharding(MESH, P())
X = RNG.normal(size=(8, 4)).astype(np.float32)
INTEGERS = RNG.integers(-7, 7, (8, 4))


def ours(fn: Callable[..., Any], **kwargs: Any) -> Any:
    return mw.jit(fn, mesh=MESH, **kwargs)


SCALARS = {
    "int": 3, "float": 2.5, "bool": True, "complex": 1 + 2j, "np.float32": np.float32(2),
    "np.float64": np.float64(2), "np.int8": np.int8(-3), "np.uint32": np.uint32(7),
    "np.bool_": np.bool_(False), "np.complex64": np.complex64(1j), "bfloat16": jnp.bfloat16(1.5),
    "rank 0": np.array(3, np.int16), "weak": jnp.asarray(2.0), "strong": jnp.float32(2),
    "weak int": jnp.asarray(2), "weak 64": np.array(2.0), "a jax type": jnp.int8(2),
}  # fmt: skip


def mixed(a: Any, b: Any) -> Any:
    return a + b, a * 2, jnp.where(a > 1, a, b) if not jnp.iscomplexobj(a) else a, a, -b


@pytest.mark.parametrize("x64", [False, True])
def test_scalars_promote_as_in_jax(x64):
    with jax.enable_x64(x64):
        pairs = [(a, b) for i, a in enumerate(SCALARS.values()) for b in list(SCALARS.values())[i:]]
        step, plain = ours(lambda ps: [(a + b, a * b) for a, b in ps]), jax.jit(
            lambda ps: [(a + b, a * b) for a, b in ps])  # fmt: skip
        assert_same(step(pairs), plain(pairs))


NARROW = (
    "float8_e4m3fn float8_e5m2 float8_e4m3 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fnuz"
    " float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn int4 uint4 int2 uint2 int8 uint8 int16 uint16"
    " float16 bfloat16 bool"
).split()
QUICK = ("float8_e4m3fn", "int4", "int2", "bool")
# The emitters that tests/conftest.py chooses, as they are quicker, fail for these.
TWO_BITS = {"xla_cpu_use_fusion_emitters": True} if jaxlib.__version__.startswith("0.10.") else {}


def moved(x: Any) -> Any:
    """What every type can do."""
    return {
        "same": x, "turned": x.T, "rolled": jnp.roll(x, 3, 0), "cut": x[1:7, ::2],
        "joined": jnp.concatenate([x, x[:3]]), "reshaped": x.reshape(4, 8),
        "wide": x.astype(jnp.float32), "padded": jnp.pad(x, ((1, 2), (0, 0))),
        "places": x[jnp.array([0, 7, 3])], "set": x.at[2].set(x[0]),
        "compared": x == x[::-1], "chosen": jnp.where(x == x[0], x, x[::-1]),
    }  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [pytest.param(t, marks=() if t in QUICK else pytest.mark.slow) for t in NARROW]
)
@pytest.mark.parametrize("spec", [P("x", "y"), P(("y", "x"))], ids=str)
def test_narrow_types_move(dtype, spec):
    x = np.abs(INTEGERS) % 2 if dtype in ("int2", "uint2", "uint4") else INTEGERS
    x = jnp.asarray((np.abs(x) if dtype == "float8_e8m0fnu" else x).astype(jnp.dtype(dtype)))
    options = {"compiler_options": TWO_BITS if dtype in ("int2", "uint2") else {}}
    step = ours(moved, in_shardings=spec, **options)
    wanted = jax.jit(moved, **options)(x)
    assert_same(step(x), wanted)
    placed = jax.device_put(x, NamedSharding(MESH, spec))
    assert_same(ours(moved, **options)(placed), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_narrow_types_are_computed_with(dtype):
    def fn(x, y):
        wide = jnp.matmul(x, y, preferred_element_type=jnp.float32)
        total = x.astype(jnp.float32).sum(0)
        return wide, total, (x.astype(jnp.float32) * 2).astype(x.dtype), jnp.max(x, 0)

    x, y = (jnp.asarray(a).astype(dtype) for a in (INTEGERS % 4, INTEGERS.T % 3))
    for ins in ((P("x"), P()), (P(None, "y"), P("y")), (P("y", "x"), P("x", "y"))):
        assert_same(ours(fn, in_shardings=ins)(x, y), jax.jit(fn)(x, y))


IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def of_keys(key, keys):
    return {
        "split": jax.random.split(key, (4, 2)), "same": keys, "turned": keys[::-1],
        "folded": jax.random.fold_in(key, 3), "one": keys[2], "data": jax.random.key_data(keys),
        "bits": jax.random.bits(key, (8, 3)), "drawn": jax.random.normal(keys[1], (4, 4)),
        "mapped": jax.vmap(lambda k: jax.random.uniform(k, (3,)))(keys),
        "wrapped": jax.random.wrap_key_data(
            jax.random.key_data(key), impl=jax.random.key_impl(key)),
        "chosen": jnp.where(jnp.arange(4) > 1, keys, keys[::-1]),
        "joined": jnp.concatenate([keys, keys[:1]]), "stacked": jnp.stack([keys, keys]),
        "equal": keys == keys[::-1],
    }  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("how", ["in_shardings", "placed", "unsaid", "uneven"])
def test_keys(impl, how):
    key = jax.random.key(5, impl=impl)
    keys = jax.random.split(key, 4)
    ins: dict[str, Any] = {"in_shardings": {"in_shardings": (None, P("y"))}}.get(how, {})
    if how == "uneven":
        ins = {"in_shardings": (None, P(("x", "y")))}
    wanted = jax.jit(of_keys)(key, keys)
    given = jax.device_put(keys, ROWS_X) if how == "placed" else keys
    assert_same(ours(of_keys, **ins)(key, given), wanted)


def test_keys_of_a_default_implementation():
    with jax.default_prng_impl("rbg"):

        def fn(seed):
            return jax.random.key(seed), jax.random.normal(jax.random.key(seed), (4, 4))

        found = ours(fn, out_shardings=(None, P("y", "x")))(3)
        assert_same(found, jax.jit(fn)(3))
    assert_same(ours(fn)(3), jax.jit(fn)(3))


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_are_donated(impl):
    def fn(keys):
        return jax.random.split(keys[0], 8)

    keys = jax.device_put(jax.random.split(jax.random.key(0, impl=impl), 8), ROWS_X)
    wanted = jax.random.key_data(jax.jit(fn)(keys))
    found = ours(fn, donate_argnums=0, out_shardings=ROWS_X)(keys)
    np.testing.assert_array_equal(jax.random.key_data(found), wanted)
    assert keys.is_deleted()
    with pytest.raises((RuntimeError, ValueError)):
        ours(fn)(keys)


def test_legacy_keys_under_custom_settings():
    def fn(key):
        return jax.random.normal(key, (8, 4)), jax.random.split(key)

    for partitionable in (True, False):
        with jax.threefry_partitionable(partitionable):
            key = jax.random.PRNGKey(4)
            assert_same(ours(fn, out_shardings=(P("x", "y"), None))(key), jax.jit(fn)(key))


EMPTY = [(0,), (0, 4), (4, 0), (3, 0, 5), (1,), (1, 1), (), (2, 1, 3)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("axes", [("x",), ("y", "x"), (None, "y")], ids=str)
def test_empty_and_single_arrays(shape, axes):
    def fn(x):
        return x, x.sum(), x * 2, x.reshape(-1), jnp.stack([x, x]), x.T, x.astype(jnp.int32)

    x = RNG.normal(size=shape).astype(np.float32)
    spec = P(*axes[: len(shape)])
    wanted = jax.jit(fn)(x)
    found = ours(fn, in_shardings=spec)(x)
    assert_same(found, wanted)
    assert_same(ours(fn)(*found[:1]), wanted)


def test_empty_results_are_cut_as_they_say():
    step = ours(lambda x: x + 1, out_shardings=P(None, "y"))
    for _ in range(2):
        out = step(np.zeros((0, 8), np.float32))
        assert out.sharding.spec == P(None, "y")
        assert {s.data.shape for s in out.addressable_shards} == {(0, 2)}
        assert np.asarray(out).shape == (0, 8)
        assert step(out).shape == (0, 8)


class Boxed:
    """Any object that says how it becomes an array."""

    def __jax_array__(self):
        return jnp.asarray(X)


ARGUMENTS = {
    "numpy": lambda: X, "jax": lambda: jnp.asarray(X),
    "Fortran order": lambda: np.asfortranarray(X),
    "a view": lambda: X[::2, ::-1], "big endian": lambda: X.astype(">f4"),
    "float64": lambda: X.astype(np.float64), "int64": lambda: INTEGERS,
    "read only": lambda: np.broadcast_to(X[0], (8, 4)), "one device": lambda: jax.device_put(X),
    "bools": lambda: X > 0, "subclass": lambda: np.ma.masked_array(X).filled(0),
    "__jax_array__": Boxed, "sharded": lambda: jax.device_put(X, ROWS_X),

}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arrays_of_every_kind(name):
    def fn(x):
        return jnp.asarray(x) * 2

    value = ARGUMENTS[name]()
    try:
        wanted = jax.jit(fn)(value)
    except Exception as error:
        with pytest.raises(type(error)):
            ours(fn)(value)
        return
    assert_same(ours(fn)(value), wanted)


def test_results_that_are_no_arrays():
    def fn(x):
        return 3, 2.5, True, 1j, np.float32(2), np.arange(3), None, x, jnp.asarray(1.0), [x.shape]

    assert_same(ours(fn)(X), jax.jit(fn)(X))


def float0_of(x: Any) -> np.ndarray:
    return np.zeros(np.shape(x), jax.dtypes.float0)


FLOAT0 = {
    "argument": lambda jit: jit(lambda x, t: x * 2)(X, float0_of(INTEGERS)),
    "result": lambda jit: jit(lambda i: jax.jvp(
        lambda i: i + 1, (i,), (float0_of(i),)))(INTEGERS.astype(np.int32)),
    "passed on": lambda jit: jit(lambda t: t)(float0_of(X)),
    "jvp": lambda jit: jax.jvp(jit(lambda i, x: (i, x)), (np.int32(1), X), (float0_of(1), X)),
    "vjp": lambda jit: jax.vjp(jit(lambda i, x: x * i), np.int32(2), X)[1](X),
    "of bools": lambda jit: jax.grad(
        jit(lambda b, x: jnp.where(b, x, 0).sum()), (0, 1), allow_int=True)(X > 0, X),
    "of keys": lambda jit: jax.vjp(
        jit(lambda k, x: x * jax.random.normal(k, ())), jax.random.key(0), X)[1](X)[1],
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT0)
def test_tangents_of_integers(name):
    assert_same(FLOAT0[name](ours), FLOAT0[name](jax.jit))


def in_context(context: Any, fn: Callable[..., Any], *args: Any) -> Callable[[Any], Any]:
    def row(jit: Any) -> Any:
        with context():
            return jit(fn)(*args)

    return row


def outcome(row: Callable[[Any], Any], jit: Any) -> Any:
    try:
        return row(jit)
    except Exception as error:
        return error


SETTINGS = {
    "strict promotion refuses": in_context(
        lambda: jax.numpy_dtype_promotion("strict"), lambda x, i: x + i, X, INTEGERS),
    "strict promotion": in_context(
        lambda: jax.numpy_dtype_promotion("strict"), lambda x: x * 2 + x.sum(), X),
    "standard promotion": in_context(
        lambda: jax.numpy_dtype_promotion("standard"), lambda x, i: x + i, X, np.int8(1)),
    "rank promotion refuses": in_context(
        lambda: jax.numpy_rank_promotion("raise"), lambda x, y: x + y, X, X[0]),
    "rank promotion allows": in_context(
        lambda: jax.numpy_rank_promotion("allow"), lambda x, y: x + y, X, X[0]),
    "matmul precision": in_context(
        lambda: jax.default_matmul_precision("highest"), lambda x: x @ x.T, X),
    "matmul precision tensorfloat32": in_context(
        lambda: jax.default_matmul_precision("tensorfloat32"), lambda x: x @ x.T, X),
    "disable_jit": in_context(
        jax.disable_jit, lambda x: x * 2 if float(x.sum()) < 1e9 else x, X),
    "debug_nans finds none": in_context(lambda: jax.debug_nans(True), jnp.sin, X),
    "debug_nans": in_context(lambda: jax.debug_nans(True), jnp.log, -np.abs(X)),
    "debug_infs": in_context(
        lambda: jax.debug_infs(True), lambda x: jnp.asarray(x) / 0, X),
    "checking leaks": in_context(jax.checking_leaks, jnp.cumsum, X),
    "x64": in_context(lambda: jax.enable_x64(True), lambda x, i: (x / 3, i + 2**40), X, INTEGERS),
    "x32": in_context(lambda: jax.enable_x64(False), lambda x, i: (x / 3, i + 1), X, INTEGERS),
    "x64 inside": lambda jit: jit(lambda x: jnp.asarray(x).sum())(X.astype(np.float64)),
    "threefry": in_context(
        lambda: jax.threefry_partitionable(False),
        lambda: jax.random.normal(jax.random.key(1), (8, 4))),
    "legacy prng": in_context(
        lambda: jax.legacy_prng_key("allow"), lambda: jax.random.PRNGKey(3)),
    "log compiles": in_context(lambda: jax.log_compiles(False), jnp.cos, X),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_jax_are_heard(name):
    found, wanted = (outcome(SETTINGS[name], jit) for jit in (ours, jax.jit))
    if isinstance(wanted, Exception):
        assert isinstance(found, type(wanted)), f"{found!r}, not {wanted!r}"
    else:
        assert not isinstance(found, Exception), repr(found)
        assert_same(found, wanted)


OURS = {  # functions that break none of the rules that are set, in programs of operators of ours
    "a sort by splitters": (jnp.sort, [(1 << 17,)], (P("x"),)),
    "a pipeline": (
        mw.pipeline_value_and_grad(
            lambda w, x: (mw.stage_boundary(x @ w[0]) @ w[1]).mean(), axis="x", microbatches=4),
        [(2, 8, 8), (16, 8)], None),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("mode", ["raise", "warn", "strict"])
def test_mistakes_are_looked_for_in_users_functions_alone(name, mode):
    fn, shapes, places = OURS[name]
    setting = jax.numpy_dtype_promotion if mode == "strict" else jax.numpy_rank_promotion
    structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    with setting(mode), warnings.catch_warnings():
        warnings.simplefilter("error")
        mw.jit(fn, mesh=MESH, in_shardings=places).partition(*structs)


def test_a_setting_selects_another_program():
    """One function, called under one setting and another, and again."""

    def fn(x, i):
        return x + i, jnp.arange(3).sum(), x @ x.T

    step, plain = ours(fn), jax.jit(fn)
    for _ in range(2):
        for x64 in (False, True):
            with jax.enable_x64(x64):
                assert_same(step(X.astype(np.float64), 2), plain(X.astype(np.float64), 2))
        with jax.numpy_dtype_promotion("strict"), pytest.raises(jax.dtypes.TypePromotionError):
            step(X, np.int32(2))
        assert_same(step(X, np.int32(2)), plain(X, np.int32(2)))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of x * 2, under both
@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
@pytest.mark.parametrize("spec", [None, P(), P("x")], ids=str)
def test_arrays_of_64_bits_are_taken_for_32_where_these_are_set(dtype, spec):
    with jax.enable_x64(True):
        x = jnp.asarray(X.astype(dtype) * 3)
        x = x if spec is None else jax.device_put(x, NamedSharding(MESH, spec))
    step, plain = ours(lambda x: x * 2, out_shardings=P("y")), jax.jit(lambda x: x * 2)
    for _ in range(2):
        assert_same(step(x), plain(x))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_uneven_arrays_of_64_bits_are_taken_for_32():
    step = ours(lambda x: x * 2, in_shardings=P("y"), out_shardings=P("y"))
    with jax.enable_x64(True):
        x = jnp.asarray(X[:7].astype("float64"))
        uneven = step(x)
    assert uneven.dtype == "float64"
    for given, times in ((x, 2), (uneven, 4)):
        found = step(given)
        assert found.dtype == "float32"
        np.testing.assert_allclose(np.asarray(found), X[:7] * times, rtol=1e-6)


WEAK = {
    "passes": lambda x: x, "doubled": lambda x: x * 2, "floats": lambda x: x * 2.0,
    "summed": jnp.sum, "made": lambda x: 2.0, "cast": lambda x: jnp.float32(x) + 0,
    "where": lambda x: jnp.where(x > 0, x, 1), "stacked": lambda x: jnp.stack([x, x]),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c * 1, c), x, None, 3),
    "cond": lambda x: jax.lax.cond(x > 0, lambda x: x, lambda x: x * 1, x),
    "while": lambda x: jax.lax.while_loop(lambda c: c < 9, lambda c: c * 2, x),
    "clip": lambda x: jnp.clip(x, 0, 3), "power": lambda x: x**2, "grad": lambda x: x,
    "array": lambda x: jnp.array([x, 1.0]), "ones": lambda x: jnp.ones(8) * x,
}  # fmt: skip


@pytest.mark.parametrize("name", WEAK)
@pytest.mark.parametrize("value", [2, 2.5, True, np.float32(3)], ids=repr)
def test_weak_types(name, value):
    wanted = outcome(lambda jit: jit(WEAK[name])(value), jax.jit)
    found = outcome(lambda jit: jit(WEAK[name])(value), ours)
    if isinstance(wanted, Exception):
        assert isinstance(found, type(wanted)), f"{found!r}, not {wanted!r}"
    else:
        assert_same(found, wanted)
