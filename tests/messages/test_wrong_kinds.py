"""What is of another kind than was asked for is named, with what would be right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.rules.registry import REGISTRY

MESH = AbstractMesh((8,), ("x",))
TYPE = jax.ShapeDtypeStruct((8,), jnp.float32)


ON_DEVICES = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))


def fn(x, y):
    return x if x.sum() > 0 else y


PROGRAM = mw.program(MESH)(fn)


def schedule():
    fn = mw.jit(lambda x: x.sum(0), mesh=MESH, in_shardings=P("x"))
    return mw.Schedule(fn, jax.ShapeDtypeStruct((64, 8), jnp.float32))


def fused(**said):
    s = schedule()
    return s.fuse([s.find("reduce_sum")[0], s.find("all_reduce")[0]], **said)


def registered(**said):
    return mw.register_rule(Primitive("mw_test_of_wrong_kinds"), "i -> i", **said)


CASES = {
    "split": (mw.ArgumentError, "handles: None", lambda: schedule().split(None)),
    "reorder": (mw.ArgumentError, "handles: 3", lambda: schedule().reorder(3)),
    "hoist": (mw.ArgumentError, "handles: 'x'", lambda: schedule().hoist("x")),
    "merge": (mw.ArgumentError, r"handles: \[\]", lambda: schedule().merge([])),
    "bucket": (mw.ArgumentError, "handles: 'sums'", lambda: schedule().bucket("sums")),
    "a result": (
        mw.ArgumentError, "slice_state was given numbers that are none: result=1.5",
        lambda: schedule().slice_state("x", result=1.5),
    ),
    "a state": (
        mw.ArgumentError, "slice_state was given names that are none: 2",
        lambda: schedule().slice_state(2),
    ),
    "no state": (
        mw.ArgumentError, r"names that are none: \[\]", lambda: schedule().slice_state([]),
    ),
    "a state without a name": (
        mw.ArgumentError, "names that are none: ''", lambda: schedule().slice_state(""),
    ),
    "no axes": (
        mw.ArgumentError, r"a schedule was given names that are none: \(\)",
        lambda: schedule().find(axes=()),
    ),
    "axes": (mw.ArgumentError, "names that are none: 3", lambda: schedule().find(axes=3)),
    "a source": (mw.ArgumentError, "no text: source=3", lambda: schedule().find(source=3)),
    "a name": (mw.ArgumentError, "no text: name=3", lambda: fused(name=3)),
    "a name of a collective": (
        mw.ArgumentError, "not be found: name='all_reduce'", lambda: fused(name="all_reduce"),
    ),
    "a name of a primitive": (
        mw.ArgumentError, "not be found: name='tanh'", lambda: fused(name="tanh"),
    ),
    "states to tune": (
        mw.ArgumentError, "mw.autotune was given names that are none: 3",
        lambda: mw.autotune(schedule().program, measure="cost", states=3),  # pyright: ignore
    ),
    "a state to tune": (
        mw.ArgumentError, "'mm' is no argument",
        lambda: mw.autotune(schedule().program, measure="cost", states="mm"),
    ),
    "axes of a verb": (mw.LayoutError, "axes=3", lambda: mw.all_gather(1.0, axes=3)),
    "axes of a program": (mw.LayoutError, "axes=3", lambda: mw.program(MESH, axes=3)),
    "an operator": (mw.LayoutError, r"op=\['sum'\]", lambda: mw.all_reduce(1.0, op=["sum"])),
    "a mesh of a program": (
        mw.ArgumentError, "mw.program was given a mesh that is none", lambda: mw.program("x"),
    ),
    "limits of tuning": (
        mw.ArgumentError,
        "(?s)budget_s=-1.*finalists='2'.*rounds=0.*hardware='cpu'",
        lambda: mw.autotune(
            None, budget_s=-1, finalists="2", rounds=0, hardware="cpu"  # pyright: ignore
        ),
    ),
    "limits of tuning that are no numbers": (
        mw.ArgumentError,
        "(?s)budget_s=True.*finalists=2.5.*rounds=None",
        lambda: mw.autotune(
            None, budget_s=True, finalists=2.5, rounds=None  # pyright: ignore
        ),
    ),
    "a type to reshard": (
        mw.ArgumentError, r"x\['w'\] is a ShapeDtypeStruct",
        lambda: mw.reshard({"w": TYPE}, P("x")),
    ),
    "a type to compute with": (
        mw.ArgumentError, r"(?s)args\[0\] is ShapeDtypeStruct.*partition, trace and lower",
        lambda: mw.jit(jnp.sin, mesh=jax.make_mesh((8,), ("x",)))(TYPE),
    ),
    "a type to simulate with": (
        mw.ArgumentError, r"args\[0\] is a ShapeDtypeStruct, wanted is float32\[8\]",
        lambda: mw.jit(jnp.sin, mesh=MESH).partition(TYPE).simulate(TYPE),
    ),
    "layouts": (
        mw.LayoutError, "no parameters: layouts=\\[3\\]", lambda: mw.program(MESH, layouts=[3]),
    ),
    "strict": (mw.ArgumentError, "strict='yes'", lambda: mw.jit(jnp.sin, strict="yes")),
    "linear": (mw.RuleError, "of a rule: linear=0", lambda: registered(linear=0)),
    "one set": (mw.RuleError, "of a rule: linear=\\(0,\\)", lambda: registered(linear=(0,))),
    "flops and local": (
        mw.RuleError, "(?s)flops='many'.*local=3", lambda: registered(flops="many", local=3),
    ),
    "a rate": (mw.LayoutError, "rate=1.5", lambda: mw.dropout(jax.random.key(0), 1.0, 1.5)),
    "a rate of NumPy": (
        mw.LayoutError, "rate=np.float32",
        lambda: mw.dropout(jax.random.key(0), 1.0, np.float32(2)),
    ),
    "a rate below": (mw.LayoutError, "rate=-1", lambda: mw.dropout(jax.random.key(0), 1.0, -1)),
    "a loss": (
        mw.PipelineError, "no function: 3",
        lambda: mw.pipeline_value_and_grad(3, axis="x", microbatches=2),
    ),
    "a number of passes": (
        mw.PipelineError, "repeat='2'",
        lambda: mw.pipeline(lambda w, x: w * x, jnp.ones(2), jnp.ones((3, 1)), repeat="2"),
    ),
    "a key": (mw.LayoutError, "drop: key=3", lambda: mw.dropout(3, jnp.ones(4), 0.5)),
    "text to drop": (
        mw.LayoutError, "drop: x='x'", lambda: mw.dropout(jax.random.key(0), "x", 0.1),
    ),
    "a rate of text": (
        mw.LayoutError, "drop: rate='a'", lambda: mw.dropout(jax.random.key(0), 1.0, "a"),
    ),
    "layers of text": (
        mw.PipelineError, r"(?s)layers\[0\] is 'a'.*layers\[1\] is 'b'",
        lambda: mw.stack_stages(["a", "b"], stages=2),
    ),
    "a shape of an uneven array": (
        mw.ArgumentError, "3 is no shape", lambda: mw.UnevenArray(jnp.ones(3), 3),
    ),
    "what is donated": (
        mw.ArgumentError, "neither so nor not: donate='yes'",
        lambda: mw.reshard(jnp.ones(4), P(), donate="yes"),
    ),
    "whether dims may be uneven": (
        mw.ArgumentError, "uneven='yes'", lambda: mw.plan(jnp.sin, TYPE, mesh=MESH, uneven="yes"),
    ),
    "what runs beside": (
        mw.ArgumentError, "overlaps='yes'",
        lambda: mw.autotune(schedule().program, measure="cost", overlaps="yes"),
    ),
    "a hint outside of functions": (
        mw.HintError, "no sharding: 'q'", lambda: mw.shard(jnp.ones(3), "q"),
    ),
    "a mesh of a function by hand": (
        mw.ArgumentError, "from_shard_map was given a mesh that is none: mesh=3",
        lambda: mw.SpmdProgram.from_shard_map(jnp.sin, 3, P(), P(), TYPE),
    ),
    "a function by hand": (
        mw.ArgumentError, "from_shard_map was given no function: 3 is int",
        lambda: mw.SpmdProgram.from_shard_map(3, MESH, P(), P(), TYPE),
    ),
    "specs of a function by hand": (
        mw.TreeError, "the call has 1 argument\n",
        lambda: mw.SpmdProgram.from_shard_map(jnp.sin, MESH, (P(), P()), P(), TYPE),
    ),
    "a function of a program": (
        mw.ArgumentError, "mw.program was given no function: 3", lambda: mw.program(MESH)(3),
    ),
    "arguments of a program": (
        mw.ArgumentError, r"(?s)fn was called with other .*: missing .*'x'\n.*are x, y\.",
        PROGRAM.partition,
    ),
    "a branch in a program": (
        jax.errors.TracerBoolConversionError, "(?s)the function fn .* argument x",
        lambda: PROGRAM.partition(TYPE, TYPE),
    ),
    "a verb to differentiate": (
        mw.LayoutError, "mw.all_reduce was to be differentiated",
        lambda: mw.program(MESH)(jax.grad(lambda x: mw.all_reduce(x).sum())).partition(TYPE),
    ),
    "a verb to map": (
        mw.LayoutError, "mw.all_gather was to be mapped",
        lambda: mw.program(MESH)(jax.vmap(mw.all_gather)).partition(TYPE),
    ),
    "devices twice": (
        mw.ArgumentError, "(?i)more than once.*cpu.*0",
        lambda: mw.calibrate([jax.devices()[0]] * 2),
    ),
    "a class in the place of a sharding": (
        mw.HintError, "<class .*NamedSharding'> is neither a PartitionSpec nor a NamedSharding",
        lambda: mw.jit(jnp.sin, mesh=ON_DEVICES, in_shardings=NamedSharding)(jnp.ones(8)),
    ),
    "shardings of keywords alone": (
        mw.TreeError, "(?s)describes nothing: the call has 0 .*; x came by keyword: pass it by",
        lambda: mw.jit(lambda x: x, mesh=MESH, in_shardings=P("x")).partition(x=TYPE),
    ),
    "both ends without a mesh": (
        mw.MeshError, r"src = P\('x',\) and dst = P\(\) have no mesh",
        lambda: mw.reshard_plan((8,), "int8", (2, 4), P("x"), P()),
    ),
    "another tree to reshard": (
        mw.TreeError, "None leaves one where it lies",
        lambda: mw.reshard({"a": jnp.ones(3)}, {"b": P()}),
    ),
    "a result that is none": (
        mw.ArgumentError, r"its position: 0 \(result\)",
        lambda: schedule().slice_state("args[0]", result=9),
    ),
    "a handle of another schedule": (
        mw.IllegalMove, "not in this schedule's program",
        lambda: schedule().split(schedule().find("all_reduce")),
    ),
    "a script of another program": (
        mw.IllegalMove, r"(?s)test_wrong_kinds.py:\d+: list .*s.find\('all_gather'\) finds none",
        lambda: schedule().run(lambda s: s.find("all_gather")[0]),
    ),
    "a script in text": (
        mw.IllegalMove, r"a = s.find\('all_reduce'\)\[1\]: list .*\n.* finds 1",
        lambda: schedule().run("def schedule(s):\n    a = s.find('all_reduce')[1]\n"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_was_given_is_named(name):
    kind, text, call = CASES[name]
    with pytest.raises(kind, match=text):
        call()


def test_what_no_platform_runs_is_jaxs_error():
    primitive = Primitive("mw_test_without_a_program")
    primitive.def_abstract_eval(lambda x: x)
    for jit in (jax.jit, lambda f: mw.jit(f, mesh=ON_DEVICES, in_shardings=P("x"))):
        with pytest.raises(NotImplementedError) as raised:
            jit(primitive.bind)(jnp.ones(8))
        assert not isinstance(raised.value, mw.MeshwiseError)


@pytest.mark.parametrize("linear", [(), ((0,),), [[0]], [(0,)], ({0},)])
def test_sets_may_be_of_any_kind(linear, monkeypatch):
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))
    registered(linear=linear)
