"""The stages of `mw.jit`, traced, lowered and compiled, beside those of `jax.jit`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import replicas
from tests.drop_in.same import X, assert_same_outcome, mesh_of, named, put

ROWS, COLUMNS, WHOLE = named("x"), named(None, "x"), named()


def layer(x, w, *, shift=0.0):
    return {"sum": x @ w, "rest": (x + shift, None)}


def of_layer(jit, **options):
    return jit(layer, in_shardings=(ROWS, WHOLE), out_shardings=ROWS, **options)


def lowered(jit, **options):
    return of_layer(jit, **options).lower(X, X)


def compiled(jit, **options):
    return lowered(jit, **options).compile()


def struct(*spec, mesh=None):
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=named(*spec, mesh=mesh))


def what_a_stage_says(stage):
    """What all stages can be asked."""
    return [
        str(what)
        for what in (stage.in_tree, stage.out_tree, stage.in_avals, stage.args_info, stage.out_info)
    ] + [stage.donate_argnums]


def places(tree):
    return [(s.spec, s.mesh) for s in jax.tree.leaves(tree)]


STAGES = {
    "traced": lambda jit: what_a_stage_says(of_layer(jit).trace(X, X)),
    "traced, on one device": lambda jit: what_a_stage_says(jit(layer).trace(X, X)),
    "traced with keywords": lambda jit: what_a_stage_says(
        jit(layer, donate_argnums=0).trace(put("x"), X, shift=X)
    ),
    "traced with static arguments": lambda jit: what_a_stage_says(
        jit(lambda n, x: x * n, static_argnums=0, in_shardings=ROWS).trace(3, X)
    ),
    "its jaxpr": lambda jit: str(of_layer(jit).trace(X, X).jaxpr),
    "its name": lambda jit: of_layer(jit).trace(X, X).fun_name,
    "a traced function called": lambda jit: of_layer(jit).trace(X, X)(X, X),
    "eval_shape": lambda jit: str(of_layer(jit).eval_shape(X, X)),
    "eval_shape of weak types": lambda jit: str(jit(lambda x, y: x * y).eval_shape(3, put("x"))),
    "jax.eval_shape": lambda jit: str(jax.eval_shape(jit(layer), X, X)),
    "jax.make_jaxpr": lambda jit: str(jax.make_jaxpr(jit(lambda x: x + 1))(X)),
    "inlined": lambda jit: str(jax.make_jaxpr(jit(lambda x: x + 1, inline=True))(X)),
    "lowered": lambda jit: what_a_stage_says(lowered(jit)),
    "lowered, of arrays that lie": lambda jit: what_a_stage_says(jit(layer).lower(put("x"), X)),
    "lowered, donating": lambda jit: what_a_stage_says(lowered(jit, donate_argnums=0)),
    "lowered as text": lambda jit: [
        type(lowered(jit).as_text(dialect)) for dialect in (None, "stablehlo", "hlo")
    ],
    "lowered as compilers know it": lambda jit: [
        type(lowered(jit).compiler_ir(dialect)) for dialect in (None, "stablehlo", "hlo")
    ],
    "the module's name and partitions": lambda jit: [
        name in lowered(jit).as_text() for name in ("@jit_layer", "num_partitions = 8")
    ],
    "another dialect": lambda jit: lowered(jit).as_text("english"),
    "for another platform": lambda jit: isinstance(
        of_layer(jit).trace(X, X).lower(lowering_platforms=("tpu",)), jax.stages.Lowered
    ),
    "costs before compiling": lambda jit: type(lowered(jit).cost_analysis()),
    "compiled": lambda jit: what_a_stage_says(compiled(jit)),
    "shardings": lambda jit: [
        places(compiled(jit).input_shardings),
        places(compiled(jit).output_shardings),
    ],
    "shardings, one argument unused": lambda jit: places(
        jit(lambda x, y: x, in_shardings=(ROWS, WHOLE)).lower(X, X).compile().input_shardings
    ),
    "shardings, unused arguments kept": lambda jit: places(
        jit(lambda x, y: x, in_shardings=(ROWS, WHOLE), keep_unused=True)
        .lower(X, X)
        .compile()
        .input_shardings
    ),
    "formats": lambda jit: len(
        jax.tree.leaves(compiled(jit).input_formats, is_leaf=lambda f: hasattr(f, "layout"))
    ),
    "analyses": lambda jit: [
        type(what)
        for what in (
            compiled(jit).cost_analysis(),
            compiled(jit).memory_analysis(),
            compiled(jit).as_text(),
            compiled(jit).runtime_executable(),
        )
    ],
}

CALLED = {
    "with arrays of NumPy": lambda jit: compiled(jit)(X, X),
    "with arrays in their place": lambda jit: compiled(jit)(put("x"), put()),
    "with options": lambda jit: lowered(jit).compile({"xla_embed_ir_in_executable": True})(X, X),
    "with options that are none": lambda jit: lowered(jit).compile({"nothing": 1}),
    "of structs": lambda jit: jit(lambda x: x + 1).lower(struct("x", "y")).compile()(put("x", "y")),
    "of structs without a place": lambda jit: (
        jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()(X)
    ),
    "of keywords": lambda jit: (
        jit(lambda x, *, y: x * y).lower(put("x"), y=put("x")).compile()(put("x"), y=put("x"))
    ),
    "of static arguments": lambda jit: (
        jit(lambda n, x: x * n, static_argnums=0, in_shardings=ROWS).lower(3, X).compile()(X)
    ),
    "with a closed-over array": lambda jit: (
        _holding(jit, put("x")).lower(put("x")).compile()(put("x"))
    ),
    "donating": lambda jit: _deleted(
        jit(jnp.add, donate_argnums=0, in_shardings=ROWS, out_shardings=ROWS).lower(X, X).compile()
    ),
    "twice from one trace": lambda jit: [
        traced.lower().compile()(X, X) for traced in [of_layer(jit).trace(X, X)] * 2
    ],
    "for devices named later": lambda jit: (
        jit(lambda x: x + 1)
        .trace(struct("x", mesh=mesh_of(2, 2).abstract_mesh))
        .lower(lowering_platforms=("cpu",))
        .compile(device_assignment=tuple(mesh_of(2, 2).devices.flat))(put("x", mesh=mesh_of(2, 2)))
    ),
    "for no devices": lambda jit: (
        jit(lambda x: x + 1)
        .trace(struct("x", mesh=mesh_of(2, 2).abstract_mesh))
        .lower(lowering_platforms=("cpu",))
        .compile()
    ),
    "placed otherwise": lambda jit: compiled(jit)(put("y"), put()),
    "on other devices": lambda jit: compiled(jit)(put("x", mesh=mesh_of(2, 2)), put()),
    "on one device": lambda jit: compiled(jit)(jax.device_put(X, jax.devices()[1]), X),
    "of another shape": lambda jit: compiled(jit)(X[:4], X),
    "of another type": lambda jit: compiled(jit)(X.astype(np.int32), X),
    "too few": lambda jit: compiled(jit)(X),
    "by another name": lambda jit: compiled(jit)(X, X, shift=X),
    "under jit": lambda jit: jax.jit(compiled(jit))(X, X),
    "under grad": lambda jit: jax.grad(
        jit(lambda x: x.sum(), in_shardings=ROWS).lower(X).compile()
    )(X),
    "under vmap": lambda jit: jax.vmap(compiled(jit), (0, None))(np.stack([X, X]), X),
}


def _holding(jit, held):
    return jit(lambda x: x + held)


def _deleted(program):
    x, y = put("x"), put("x")
    return program(x, y), x.is_deleted(), y.is_deleted()


@pytest.mark.parametrize("code", STAGES.values(), ids=STAGES)
def test_stages_say_the_same(code):
    assert_same_outcome(code)


@pytest.mark.parametrize("code", CALLED.values(), ids=CALLED)
def test_compiled_programs_are_called_alike(code):
    assert_same_outcome(code)


def exported(jit):
    matmul = jit(jnp.matmul, in_shardings=(ROWS, WHOLE), out_shardings=ROWS)
    return export.export(matmul)(X, X)


EXPORTED = {
    "what it says": lambda jit: [
        str(what)
        for what in (
            *(exported(jit).fun_name, exported(jit).nr_devices, exported(jit).platforms),
            *(exported(jit).in_avals, exported(jit).out_avals, exported(jit).in_tree),
        )
    ],
    "called": lambda jit: exported(jit).call(put("x"), put()),
    "written and read": lambda jit: export.deserialize(exported(jit).serialize()).call(
        put("x"), put()
    ),
    "under jit": lambda jit: jax.jit(export.deserialize(exported(jit).serialize()).call)(
        put("x"), put()
    ),
    "on another number of devices": lambda jit: exported(jit).call(X, X),
    "with a closed-over array": lambda jit: export.export(_holding(jit, put("x")))(put("x")).call(
        put("x")
    ),
    "on one device": lambda jit: export.export(jit(jnp.matmul))(X, X).call(X, X),
    "of a transform": lambda jit: export.export(
        jit(lambda x: jnp.fft.fft(x).real, in_shardings=ROWS, out_shardings=ROWS)
    )(X).call(put("x")),
    "for two platforms": lambda jit: (
        export.export(jit(jnp.sin, in_shardings=ROWS), platforms=("tpu", "cpu"))(X).platforms
    ),
}


@pytest.mark.parametrize("code", EXPORTED.values(), ids=EXPORTED)
def test_exported_programs(code):
    assert_same_outcome(code)


@pytest.mark.parametrize("rows", [(13, 16), (16, 13), (13, 13)], ids=str)
def test_exported_programs_of_uneven_dims_are_of_logical_arrays(rows):
    taken, given = rows

    def function(x):
        x = jnp.cumsum(x, 0) + 1
        return x[:given] if given < taken else jnp.pad(x, ((0, given - taken), (0, 0)))

    x = np.random.default_rng(0).normal(size=(taken, 3)).astype(np.float32)
    mesh = ROWS.mesh
    program = mw.jit(function, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    saved = export.export(program)(x)
    assert [a.shape for a in (*saved.in_avals, *saved.out_avals)] == [(taken, 3), (given, 3)]
    placed = jax.device_put(x, NamedSharding(mesh, P("x" if taken % 8 == 0 else None)))
    np.testing.assert_allclose(saved.call(placed), function(x), rtol=1e-5, atol=1e-6)


def test_exported_programs_inside_of_others():
    """What `jax.jit` made is a part like any other; of what `mw.jit` made `jax.jit` takes all."""
    twice = {jit: exported(jit).call for jit in (jax.jit, mw.jit)}
    given = put("x"), put()

    def inside(call):
        return mw.jit(lambda x, y: jnp.sin(call(x, y)) * 2)

    expected = jnp.sin(X @ X) * 2
    np.testing.assert_allclose(inside(twice[jax.jit])(*given), expected, rtol=1e-5)

    def manual_computation(x, y):
        return x @ y

    named = export.export(jax.jit(manual_computation))(*given).call
    np.testing.assert_allclose(inside(named)(*given), expected, rtol=1e-5)
    with pytest.warns(mw.FallbackWarning, match="saved for several devices"):
        np.testing.assert_allclose(inside(twice[mw.jit])(*given), expected, rtol=1e-5)


def test_executables_written_and_read():
    program = compiled(mw.jit)
    read = serialize_executable.deserialize_and_load(*serialize_executable.serialize(program))
    np.testing.assert_array_equal(read(put("x"), put())["sum"], X @ X)


SET = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "bits": lambda: jax.threefry_partitionable(False),
}


def noisy(x):
    return x @ x + jax.random.normal(jax.random.key(7), x.shape)


@pytest.mark.parametrize("setting", SET.values(), ids=SET)
def test_what_is_set_counts_where_a_function_is_traced(setting):
    """And not where it is lowered, before or after."""
    step = mw.jit(noisy, in_shardings=named("x"))
    with setting():
        inside, wanted = step.trace(X), step.lower(X).as_text()
    assert inside.lower().as_text() == wanted
    outside, wanted = step.trace(X), step.lower(X).as_text()
    with setting():
        assert outside.lower().as_text() == wanted != inside.lower().as_text()


def test_lowering_partitions():
    """What is handed to XLA has the collectives in it, and nothing for its partitioner to do."""
    program = mw.jit(jnp.matmul, in_shardings=(COLUMNS, ROWS), out_shardings=WHOLE).lower(X, X)
    assert "all_reduce" in program.as_text()
    assert (
        "all_reduce"
        not in jax.jit(jnp.matmul, in_shardings=(COLUMNS, ROWS), out_shardings=WHOLE)
        .lower(X, X)
        .as_text()
    )


def test_uneven_programs_ahead_of_time():
    """JAX refuses these; here the stages speak of the logical arrays, and are called with them."""
    x = X[:7]
    jitted = mw.jit(lambda x: x * 2, in_shardings=ROWS, out_shardings=ROWS)
    traced = jitted.trace(x)
    assert traced.out_info.shape == (7, 8)
    program = traced.lower().compile()
    assert [a.shape for a in jax.tree.leaves(program.in_avals)] == [(7, 8)]
    result = program(x)
    assert isinstance(result, mw.UnevenArray)
    np.testing.assert_array_equal(result, x * 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_our_own(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), (kind,) * 2)
    jitted = mw.jit(lambda x, w: x @ w, mesh=mesh, in_shardings=(P("x"), None))
    assert jitted.eval_shape(X, X).shape == X.shape
    program = jitted.lower(X, X).compile()
    assert program.input_shardings[0][0] == NamedSharding(mesh, P("x"))
    np.testing.assert_array_equal(program(X, X), X @ X)


@pytest.mark.skipif(
    not replicas.KEEPS_WHAT_REPLICAS_RETURN, reason="counts compiles as replicas, until JAX 0.11"
)
@pytest.mark.parametrize("rows", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("is_called_first", [True, False])
def test_compiled_once_for_calls_and_ahead_of_time(rows, is_called_first, monkeypatch):
    compiles = []
    inner = replicas._compiled
    monkeypatch.setattr(
        replicas, "_compiled", lambda *args: compiles.append(args[1]) or inner(*args)
    )
    jitted = mw.jit(lambda x: x @ X, in_shardings=ROWS, out_shardings=ROWS)
    first = jitted(X[:rows]) if is_called_first else None
    program = jitted.lower(X[:rows]).compile()
    for result in (program(X[:rows]), jitted(X[:rows]), first):
        if result is not None:
            np.testing.assert_allclose(result, X[:rows] @ X, rtol=1e-5)
    assert len(compiles) == 1


def test_arguments_that_lie_elsewhere_are_named():
    program = (
        mw.jit(lambda tree: tree["a"] + tree["b"], in_shardings=ROWS, out_shardings=ROWS)
        .lower({"a": X, "b": X})
        .compile()
    )
    # What is not compiled as replicas has its arguments in a row.
    name = "args[0]['b']" if replicas.KEEPS_WHAT_REPLICAS_RETURN else "args[1]"
    with pytest.raises(ValueError, match=re.escape(name)):
        program({"a": put("x"), "b": put(None, "x")})
