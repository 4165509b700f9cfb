"""What a person is told about hints and values inside a function: every word of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.messages.exactly import check, lines_of

line_of = lines_of(__file__)

X = np.zeros((4, 8), np.float32)


def test_hints_that_fit_no_value(mesh2x4):
    def fn(x):
        a = mw.shard(x, P("z"))  # unknown axis
        b = mw.shard(x.sum(), P("x"))  # rank
        mw.shard(jnp.sin(x), P("q"))  # nothing reads it
        c = jax.vmap(lambda row: mw.shard(row, P("x", "y")))(x)  # a row
        return a + b + jax.jit(lambda c: c[0])({0: a, 1: c})

    check(
        mw.HintError,
        "fn has hints that do not fit its values on the mesh (x=2, y=4):\n"
        f"  - value float32[4,8] at {line_of('unknown axis')}: P('z',) names axis 'z',"
        " the mesh has 'x', 'y'\n"
        f"  - value float32[] at {line_of('rank')}: P('x',) has 1 entry, the shape () has"
        " 0 dims\n"
        f"  - value float32[4,8] at {line_of('nothing reads it')}: P('q',) names axis 'q',"
        " the mesh has 'x', 'y'\n"
        f"  - value float32[4,8] at {line_of('a row')}, under vmap: P('x', 'y') has 2 entries,"
        " the shape (8,) has 1 dim\n"
        "A hint is a PartitionSpec or NamedSharding: at most one entry per dim,"
        " of axes of the mesh, each once, none of them unreduced.\n"
        "Correct the PartitionSpec; None or a missing entry leaves a dim unsharded,"
        " PartitionSpec.UNCONSTRAINED leaves it to completion.",
        lambda: mw.jit(fn, mesh=mesh2x4)(X),
    )


def test_hints_that_contradict_each_other(mesh2x4):
    def fn(x):
        y = mw.shard(x * 2, P("x"))  # first
        y = mw.shard(y, P("y"))  # second
        z = x + 1
        a = mw.shard(z, P("x"))  # third
        b = mw.shard(z, P(None, "y"))  # fourth
        return y + a + b

    check(
        mw.HintError,
        "fn says of values that they lie in two ways:\n"
        f"  - value float32[4,8] is P('x',) at {line_of('first')} and P('y',) at"
        f" {line_of('second')}\n"
        f"  - value float32[4,8] is P('x',) at {line_of('third')} and P(None, 'y') at"
        f" {line_of('fourth')}\n"
        "mw.shard says how a value lies, and gives the same value on, as a loop does with what it"
        " leaves unchanged.\n"
        "Say one of them, or move it from one to the other with mw.reshard or"
        " lax.with_sharding_constraint.",
        lambda: mw.jit(fn, mesh=mesh2x4)(X),
    )


def test_a_mapped_dim_over_an_axis_that_the_mesh_has_not(mesh2x4):
    def fn(x):
        return x * 2

    check(
        mw.HintError,
        "fn is mapped over an axis that its mesh has not: spmd_axis_name='batch'\n"
        "Over spmd_axis_name of jax.vmap the mapped dim of hinted values is sharded; the mesh has"
        " 'x', 'y'.\n"
        "Name one of its axes, or leave spmd_axis_name out.",
        lambda: jax.vmap(mw.jit(fn, mesh=mesh2x4), spmd_axis_name=("x", "batch"))(X),
    )


RULE = (
    "A hint is a PartitionSpec or NamedSharding: at most one entry per dim,"
    " of axes of the mesh, each once, none of them unreduced.\n"
    "Correct the PartitionSpec; None or a missing entry leaves a dim unsharded,"
    " PartitionSpec.UNCONSTRAINED leaves it to completion."
)
MISTAKES = {
    "axis": (P("z"), "P('z',) names axis 'z', the mesh has 'x', 'y'"),
    "rank": (P(None, None, "x"), "P(None, None, 'x') has 3 entries, the shape (4, 8) has 2 dims"),
    "twice": (P("x", ("x", "y")), "P('x', ('x', 'y')) uses axis 'x' 2 times"),
    "text": ("x", "'x' is neither a PartitionSpec nor a NamedSharding"),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_hint_is_not_left_to_jax(mistake, kind):
    """Also where arrays or in_shardings name the mesh, as for `jax.jit`, which would drop it."""
    spec, said = MISTAKES[mistake]
    lies = NamedSharding(jax.make_mesh((2, 4), ("x", "y"), (kind, kind)), P("x"))

    def fn(x):
        return mw.shard(mw.shard(x * 2, P(None, "y")) + 1, spec)  # wrong

    text = (
        "fn has hints that do not fit its values on the mesh (x=2, y=4): "
        f"value float32[4,8] at {line_of('wrong')}: {said}\n{RULE}"
    )
    check(mw.HintError, text, lambda: mw.jit(fn)(jax.device_put(X, lies)))
    check(mw.HintError, text, lambda: mw.jit(fn, in_shardings=lies)(X))
    check(mw.HintError, text, lambda: mw.jit(fn, in_shardings=lies).lower(X))


def test_two_ways_are_not_left_to_jax(mesh2x4):
    x = jax.device_put(X, NamedSharding(mesh2x4, P()))
    with pytest.raises(mw.HintError, match="lie in two ways"):
        mw.jit(lambda x: mw.shard(mw.shard(x * 2, P("x")), P("y")))(x)


def test_shard_of_what_is_no_array():
    check(
        mw.ArgumentError,
        "mw.shard was given values that are no arrays:\n"
        "  - x['a'] is a str: 'text'\n"
        "  - x['b'][0] is an object\n"
        "A hint is on an array, or on a tree of them.\n"
        "Give others None for a hint, or leave them out of the tree.",
        lambda: mw.shard({"a": "text", "b": [object()], "c": X}, P("x")),
    )


def test_shard_of_another_tree():
    check(
        mw.TreeError,
        "spec of mw.shard does not match the tree it describes:\n"
        "  - spec['b'] describes nothing: x is a dict with 'a'\n"
        "  - spec has no entry for x['a']\n"
        "A tree of shardings has the structure of what it describes, or is a prefix of it: one"
        " entry may stand for a whole subtree.\n"
        "Give one entry for each subtree, in containers of the same classes, and no other;"
        " of hints, None leaves one to completion.",
        lambda: mw.shard({"a": X}, {"b": P()}),
    )


MESHES = (
    "All hints of one program are for the same devices in the same order, over axes that are made"
    " of the prime factors of its own.\n"
    "Write hints as PartitionSpecs, or make the NamedShardings with the program's mesh."
)


def test_hints_for_another_mesh(mesh2x4):
    four = jax.sharding.Mesh(mesh2x4.devices[0], ("x",))
    wrong = mw.jit(lambda x: x * 2, mesh=mesh2x4, in_shardings=NamedSharding(four, P("x")))
    check(
        mw.MeshError,
        "<lambda> has hints for other meshes than its own:"
        " args[0]: P('x',) is for a mesh {'x': 4}, the program's is {'x': 2, 'y': 4}\n" + MESHES,
        lambda: wrong(X),
    )


def test_a_nested_call_on_a_mesh_of_fewer_devices(mesh2x4):
    def outer(x):
        return inner(x) + 1  # nested

    four = jax.sharding.Mesh(mesh2x4.devices[0], ("x",))
    inner = mw.jit(lambda x: x * 2, mesh=four, in_shardings=P(None, "x"))
    check(
        mw.MeshError,
        "outer has hints for other meshes than its own:"
        f" value float32[4,8] at {line_of('nested')}: P(None, 'x') is for a mesh {{'x': 4}},"
        " the program's is {'x': 2, 'y': 4}\n" + MESHES,
        lambda: mw.jit(outer, mesh=mesh2x4)(X),
    )


def test_a_hint_for_other_devices(mesh2x4):
    turned = jax.sharding.Mesh(mesh2x4.devices[::-1], mesh2x4.axis_names)

    def fn(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(turned, P("x")))  # turned

    check(
        mw.MeshError,
        "fn has hints for other devices than those of its mesh"
        " (cpu devices 0, 1, 2, 3, 4, 5, 6, 7):"
        f" the hint at {line_of('turned')}, P('x',), is for cpu devices 4, 5, 6, 7, 0, 1, 2, 3\n"
        "All hints of one program are for the same devices in the same order.\n"
        "Write hints as PartitionSpecs, or make the NamedShardings with the mesh that mw.jit is"
        " given.",
        lambda: mw.jit(fn, mesh=mesh2x4)(X),
    )


def primitive(name):
    made = Primitive(name)
    made.def_abstract_eval(lambda x: x)
    return made


def test_operators_without_a_rule(mesh2x4):
    riddle, mystery = primitive("riddle"), primitive("mystery")

    def fn(x):
        a = riddle.bind(x)  # riddle
        b = jnp.sin(a)
        return mystery.bind(b)  # mystery

    check(
        mw.MissingRuleError,
        "fn (strict) has operators without a rule:\n"
        f"  - riddle at {line_of('riddle')}\n"
        f"  - mystery at {line_of('mystery')}\n"
        "Without a rule an operator is computed whole on every device.\n"
        "Say how they are partitioned, with mw.register_rule or, for kernels, mw.like"
        " (docs/extending.md). Or leave out strict=True; program.explain() then lists them.",
        lambda: mw.jit(fn, mesh=mesh2x4, strict=True)(X),
    )
    assert issubclass(mw.MissingRuleError, NotImplementedError)


LEAK = """{name} uses traced values that an earlier trace left behind: {what}
A value computed while a function is traced exists in that trace alone.
Return it from the function that makes it and pass it on as an argument; \
jax.checking_leaks() shows where it was stored."""


def test_leaked_tracers(mesh2x4):
    kept = []

    def leak(x):  # leak
        kept.append(x * 2)  # kept
        return x.sum()

    def check_both(what):
        def use(x):
            return x + kept[-1]

        fn = mw.jit(use, mesh=mesh2x4)
        text = LEAK.format(name="use", what=what)
        check(mw.TracerLeakError, text, lambda: fn(X))
        check(mw.TracerLeakError, text, lambda: fn(kept[-1]))

    mw.jit(leak, mesh=mesh2x4)(X)
    where = f"made at {line_of('kept')}, of leak at {line_of('leak')}"
    check_both(f"a traced float32[4,8], {where}")
    jax.grad(leak)(X)
    check_both("a traced float32[4,8]")
    jax.vmap(leak)(X)
    check_both("a traced float32[8]")
    assert issubclass(mw.TracerLeakError, jax.errors.UnexpectedTracerError)


def test_a_constraint_that_names_no_axis_of_the_mesh(mesh2x4):
    step = mw.jit(lambda x: jax.lax.with_sharding_constraint(x, P("z")), mesh=mesh2x4)
    with pytest.raises(
        ValueError, match=r"axis: z of P\('z',\) is not found in mesh: \('x', 'y'\)"
    ):
        step(X)


def test_checks_that_nobody_collects(mesh2x4):
    def fn(x):
        checkify.check(x.sum() < 1e9, "too much")
        return x

    with pytest.raises(mw.MeshwiseError) as caught:
        mw.jit(fn, mesh=mesh2x4)(X)
    assert isinstance(caught.value, ValueError)  # as JAX's is
    assert str(caught.value) == (
        "fn checks what nobody would be told: "
        "checkify.check, without checkify.checkify inside of mw.jit\n"
        "checkify.checkify makes a result of a check, and a check is that alone.\n"
        "Partition mw.jit(checkify.checkify(fn)), and throw the error it returns."
    )
    error, result = mw.jit(checkify.checkify(fn), mesh=mesh2x4)(X)
    error.throw()
    np.testing.assert_array_equal(result, X)


def test_an_array_that_is_closed_over_and_gone(mesh2x4):
    gone = jnp.ones((4, 8)) * 2
    gone.delete()
    with pytest.raises(mw.DeletedArrayError, match=r"closed-over array 0: .* shape=float32\[4,8\]"):
        mw.jit(lambda x: x + gone, mesh=mesh2x4)(X)


def test_a_region_on_fewer_devices(mesh2x4):
    three = jax.sharding.Mesh(mesh2x4.devices.flat[:3], ("z",))

    def fn(x):
        return jax.shard_map(jnp.sin, mesh=three, in_specs=P("z"), out_specs=P("z"))(x)  # region

    check(
        mw.MeshError,
        "fn has a jax.shard_map for other devices than its 8:"
        f" that at {line_of('region')} is over {{'z': 3}}, 3 devices\n"
        "All of a program runs on the same devices.\n"
        "Give the shard_map the program's mesh, or call it outside of the function.",
        lambda: mw.jit(fn, mesh=mesh2x4)(np.zeros((6, 8), np.float32)),
    )
