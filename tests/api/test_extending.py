"""Primitives with a rule of the user's, kernels of mw.like, functions under custom_partitioning.

Values are compared with one device, and what is sent is compared exactly. That the derived rules
are true is tested in `tests/rules` by brute force.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.rules.registry import REGISTRY, OpRule, opaque_rule
from tests.rules.cases_like import attention, norm


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Rules that a test registers are gone after it."""
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))


@pytest.fixture(params=["mesh8", "mesh2x4"])
def a_mesh(request):
    """A mesh of one axis, and one of two; both have an axis x."""
    return request.getfixturevalue(request.param)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def primitive(name, function):
    """A primitive that computes a function of arrays and keyword parameters.

    The simulator maps equations over devices, so it can be mapped over first dims.
    """
    made = Primitive(name)
    made.def_impl(function)

    def types(*avals, **params):
        out = jax.eval_shape(functools.partial(function, **params), *avals)
        return jax.core.ShapedArray(out.shape, out.dtype)

    made.def_abstract_eval(types)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))

    def mapped(args, dims, **params):
        return jax.vmap(functools.partial(function, **params), dims)(*args), 0

    batching.primitive_batchers[made] = mapped
    return made


def check(function, expected, args, mesh, specs, sent=None):
    """The program's values, on devices and simulated, and the collectives it runs."""
    jitted = mw.jit(function, mesh=mesh, in_shardings=specs)
    program = jitted.partition(*args)
    assert not program.per_device.whole
    opaque = any(e.primitive.name == "custom_partitioning" for e in program.jaxpr.eqns)
    simulated = [] if opaque else [program.simulate(*args)]  # JAX cannot map such a function
    for found in (jitted(*args), *simulated):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected(*args)), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=2e-4)
    if sent is not None:
        assert [(c.kind.value, c.axes) for c in program.collectives] == sent
    return program


def product(x, w):
    return jnp.einsum("...i,io->...o", x, w)


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("inner", [12, 10])
def test_a_registered_product(a_mesh, rows, inner):
    product_p = primitive("my_product", product)
    mw.register_rule(product_p, "... i, i o -> ... o | sum=i", linear=((0,), (1,)))
    x, w = normal(2, rows, inner), normal(inner, 5, seed=1)
    specs = (P(None, None, "x"), P("x"))

    def function(x, w):
        return lax.with_sharding_constraint(2 * product_p.bind(x, w), P())

    check(function, lambda x, w: 2 * product(x, w), (x, w), a_mesh, specs,
          [("all_reduce", ("x",))])  # fmt: skip
    rows_only = [] if len(a_mesh.axis_names) == 1 else None
    check(product_p.bind, product, (x, w), a_mesh, (P(None, "x"), None), rows_only)


def test_a_local_function_knows_where_it_is(mesh2x4):
    def numbered(x, *, size):
        return x + jnp.arange(size, dtype=x.dtype)[:, None]

    numbered_p = primitive("my_numbered", numbered)

    def local(context, x):
        rows = context.rule.operands[0][0][0]
        return [numbered(x, size=context.local_size(rows)) + context.offset(rows)]

    mw.register_rule("my_numbered", "i j -> i j", local=local, flops=lambda a: 3.0)
    for rows in (8, 7):
        x = normal(rows, 4)
        function = functools.partial(numbered_p.bind, size=rows)
        program = check(function, functools.partial(numbered, size=rows), (x,), mesh2x4,
                        (P(("x", "y")),), [])  # fmt: skip
        assert program.plan.rules[0].flops == 3.0


@pytest.mark.parametrize("several", [list, tuple, iter])
def test_a_local_function_returns_its_results_one_after_another(mesh2x4, several):
    name = f"my_doubled_{several.__name__}"
    doubled_p = primitive(name, lambda x: 2 * x)
    mw.register_rule(name, "i -> i", local=lambda context, x: several([2 * x]))
    check(doubled_p.bind, lambda x: 2 * x, (normal(7),), mesh2x4, (P("x"),), [])


def test_a_rule_that_is_a_function(mesh2x4):
    reduce_p = primitive("my_sum", lambda x, *, axis: x.sum(axis))

    def rule(application):
        (operand,), axis = application.operands, application.params["axis"]
        names = [f"d{i}" for i in range(len(operand.shape))]
        kept = " ".join(n for i, n in enumerate(names) if i != axis)
        return f"{' '.join(names)} -> {kept} | sum=d{axis}"

    mw.register_rule(reduce_p, rule, linear=((0,),), flops=7)
    for axis, sent in ((0, [("all_reduce", ("x",))]), (1, [])):
        check(lambda x, axis=axis: reduce_p.bind(x, axis=axis), lambda x, axis=axis: x.sum(axis),
              (normal(6, 5),), mesh2x4, (P("x"),), sent)  # fmt: skip


def test_a_function_may_make_the_whole_rule(mesh8):
    twice_p = primitive("my_twice", lambda x: 2 * x)
    mw.register_rule(twice_p, lambda application: OpRule(opaque_rule(application).factors))
    check(twice_p.bind, lambda x: 2 * x, (normal(8, 2),), mesh8, (P("x"),))


def _norm_block(x, gain, out):
    out[...] = norm(x[...], gain[...])


def norm_kernel(x, gain):
    return pl.pallas_call(_norm_block, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        x, gain
    )


def norm_callback(x, gain):
    def on_host(x, gain):
        x, gain = np.asarray(x), np.asarray(gain)
        return (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)

    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(on_host, struct, x, gain, vmap_method="sequential")


@custom_partitioning
def norm_custom(x, gain):
    return norm(x, gain)


def _norm_partition(mesh, operands, result):
    return mesh, norm, result.sharding, tuple(x.sharding for x in operands)


norm_custom.def_partition(
    _norm_partition, sharding_rule="... i, i -> ... i", need_replication_factors=("i",)
)


KERNELS = {"pallas": norm_kernel, "callback": norm_callback, "custom": norm_custom}


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_get_their_part_of_the_rows(a_mesh, kernel, rows):
    called_with = []

    def spied(x, gain):
        called_with.append(x.shape)
        return kernel(x, gain)

    x, gain = normal(rows, 6, 10), normal(10, seed=1)
    check(mw.like(spied, norm), norm, (x, gain), a_mesh, (P("x"), None), [])
    size = -(-rows // a_mesh.shape["x"])
    assert (size, 6, 10) in called_with
    np.testing.assert_allclose(mw.like(spied, norm)(x, gain), norm(x, gain), rtol=1e-5, atol=1e-5)


def test_kernels_on_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Explicit,) * 2)
    x, gain = normal(5, 6, 8), normal(8, seed=1)
    check(mw.like(norm_kernel, norm), norm, (x, gain), mesh, (P("x"), None), [])


def test_rows_that_a_kernel_needs_whole_are_gathered(mesh2x4):
    x, gain = normal(4, 6, 8), normal(8, seed=1)
    specs = (P("x", None, "y"), None)
    function = mw.like(norm_kernel, norm)
    program = check(function, norm, (x, gain), mesh2x4, specs)
    assert {c.kind.value for c in program.collectives} <= {"all_gather", "all_to_all"}


@pytest.mark.parametrize("heads", [4, 3])
def test_attention_is_split_over_batch_and_heads(mesh2x4, heads):
    q, k, v = (normal(2, 6, heads, 8, seed=s) for s in range(3))
    kernel = mw.like(jax.jit(attention), attention)
    check(kernel, attention, (q, k, v), mesh2x4, (P("x", None, "y"), None, None), [])


@pytest.mark.parametrize("inner", [8, 10, 7])
@pytest.mark.parametrize("completion", ["improved", "gspmd"])
def test_a_contraction_is_split_where_it_divides(mesh2x4, inner, completion):
    x, w = normal(4, inner), normal(inner, 3, seed=1)
    kernel = mw.like(jax.jit(jnp.matmul), jnp.matmul)
    jitted = mw.jit(
        kernel, mesh=mesh2x4, in_shardings=(P(None, "y"), P("y")), completion=completion
    )
    np.testing.assert_allclose(np.asarray(jitted(x, w)), x @ w, rtol=1e-4, atol=1e-4)
    sent = [(c.kind.value, c.axes) for c in jitted.partition(x, w).collectives]
    assert (sent == [("all_reduce", ("y",))]) == (inner == 8)


def test_a_sum_beside_what_is_summed_is_added_inside(mesh8):
    def both(x):
        return jnp.tanh(x), jnp.tanh(x).sum(0)

    program = check(mw.like(jax.jit(both), both), both, (normal(16, 3),), mesh8, (P("x"),),
                    [("all_reduce", ("x",))])  # fmt: skip
    assert program.collectives[0].reason.startswith("exchange of mw_like of both itself")


@pytest.mark.parametrize("rows", [8, 6])
def test_gradients_are_those_of_the_reference(a_mesh, rows):
    x, gain = normal(rows, 6), normal(6, seed=1)
    kernel = mw.like(norm_callback, norm)

    def loss(function, x, gain):
        return (function(x, gain) ** 3).sum()

    for wrapped in (kernel, jax.checkpoint(kernel)):
        check(jax.grad(functools.partial(loss, wrapped), (0, 1)),
              jax.grad(functools.partial(loss, norm), (0, 1)),
              (x, gain), a_mesh, (P("x"), None))  # fmt: skip
    check(lambda x, gain: jax.jvp(kernel, (x, gain), (x, gain)),
          lambda x, gain: jax.jvp(norm, (x, gain), (x, gain)),
          (x, gain), a_mesh, (P("x"), None), [])  # fmt: skip


def scaled_square(x, scale, power):
    return x * x * scale


marked_square = jax.custom_vjp(scaled_square)
marked_square.defvjp(
    lambda x, scale, power: (marked_square(x, scale, power), (x, scale)),
    # Three instead of two, so that one can see whose gradient it is.
    lambda kept, ct: (3 * kept[0] * kept[1] * ct, (kept[0] ** 2 * ct).sum(0), None),
)


@pytest.mark.parametrize("kernel", [marked_square, functools.partial(marked_square)])
def test_a_kernel_with_a_gradient_keeps_it(mesh2x4, kernel):
    def loss(x, scale):
        return mw.like(kernel, scaled_square)(x, scale, 2).sum()

    def expected(x, scale):
        return 3 * x * scale, (x**2).sum(0)

    x, scale = normal(8, 4), normal(4, seed=1)
    check(jax.grad(loss, (0, 1)), expected, (x, scale), mesh2x4, (P("x"), None),
          [("all_reduce", ("x",))])  # fmt: skip


def test_mapped_nested_and_jitted(mesh2x4):
    kernel = mw.like(norm_callback, norm)
    x, gain = normal(6, 8, 5), normal(5, seed=1)
    for function in (
        jax.vmap(kernel, (1, None), 1),
        jax.jit(kernel),
        lambda x, gain: kernel(x=x, gain=gain),
        mw.jit(kernel, mesh=mesh2x4),
    ):
        check(function, norm, (x, gain), mesh2x4, (P("x"), None), [])
    inside = jax.jit(mw.jit(kernel, mesh=mesh2x4, in_shardings=(P("x"), None)))
    np.testing.assert_allclose(inside(x, gain), norm(x, gain), rtol=1e-4, atol=1e-4)


def test_integers_have_no_gradient(mesh8):
    def pick(x, rows):
        return x[rows] * 2

    kernel = mw.like(jax.jit(pick), pick)
    x, rows = normal(5, 16), jnp.array([3, 1, 3])
    check(jax.grad(lambda x, rows: kernel(x, rows).sum()),
          jax.grad(lambda x, rows: pick(x, rows).sum()),
          (x, rows), mesh8, (P(None, "x"), None), [])  # fmt: skip


def test_the_size_of_a_program_does_not_depend_on_devices():
    kernel = mw.like(norm_kernel, norm)
    x, gain = jax.ShapeDtypeStruct((4096, 64), jnp.float32), normal(64)
    counts = []
    for size in (8, 4096):
        mesh = AbstractMesh((size,), ("x",))
        program = mw.jit(kernel, mesh=mesh, in_shardings=(P("x"), None)).partition(x, gain)
        counts.append(len(program.jaxpr.eqns))
    assert counts[0] == counts[1]


def test_what_cannot_be_split_is_shown(mesh8):
    kernel = mw.like(jnp.cumsum, lambda x: jnp.cumsum(x + 0))
    jitted = mw.jit(lambda x: kernel(2 * x), mesh=mesh8, in_shardings=P("x"))
    program = jitted.partition(normal(16))
    assert [name.split(" at ")[0] for name in program.per_device.whole] == ["mw_like of cumsum"]
    np.testing.assert_allclose(jitted(normal(16)), jnp.cumsum(2 * normal(16)), rtol=1e-5, atol=1e-5)


def custom_product(rule, **kinds):
    @custom_partitioning
    def found(x, y):
        return x @ y

    def partition(mesh, operands, result):
        axes = operands[0].sharding.spec[1]

        def local(x, y):
            return lax.psum(x @ y, axes) if axes else x @ y

        return mesh, local, result.sharding, tuple(x.sharding for x in operands)

    found.def_partition(partition, sharding_rule=rule, **kinds)
    return found


def rule_of_types(mesh, operands, results):
    rank = len(operands[0].shape)
    assert rank == operands[0].rank
    return f"i{rank} j, j k -> i{rank} k", {"reduction_factors": ("j",)}


REDUCED = {"reduction_factors": ("j",)}
CUSTOM = {
    "text": custom_product("i j, j k -> i k", **REDUCED),
    "function": custom_product(rule_of_types),
    "compound": custom_product("(p q) j, j k -> (p q) k", p=2, q=4, **REDUCED),
    "no rule": custom_product(None),
}


@pytest.mark.parametrize("inner", [8, 7])
@pytest.mark.parametrize("function", CUSTOM.values(), ids=CUSTOM)
def test_custom_partitioning(mesh2x4, function, inner):
    x, y = normal(8, inner), normal(inner, 3, seed=1)
    program = check(function, jnp.matmul, (x, y), mesh2x4, (P(None, "y"), P("y")))
    if inner == 8:
        assert "all_gather" not in {c.kind.value for c in program.collectives}


def test_a_callback_that_wants_other_shardings_is_not_split_so(mesh2x4):
    @custom_partitioning
    def doubled(x):
        return 2 * x

    def partition(mesh, operands, result):
        whole = jax.sharding.NamedSharding(mesh, P())
        return mesh, lambda x: 2 * x, whole, (whole,)

    doubled.def_partition(partition, sharding_rule="i j -> i j")
    jitted = mw.jit(doubled, mesh=mesh2x4, in_shardings=P("x"))
    x = normal(8, 4)
    np.testing.assert_allclose(np.asarray(jitted(x)), 2 * x)
    assert [c.kind.value for c in jitted.partition(x).collectives] == ["all_gather"]
