"""What a person is told about arguments, shardings and meshes that do not fit: every word of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.messages.exactly import check

X = np.zeros((4, 8), np.float32)
W = np.zeros((8, 4), np.float32)
ARGS = ({"w": W, "b": W[0]}, X)


def step(params, x):
    y = x @ params["w"] + params["b"]
    return {"loss": y.sum(), "y": y}


def devices(*numbers):
    return Mesh(np.array([jax.devices()[n] for n in numbers]), ("x",))


def on(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


SPECS = (
    "A hint is a PartitionSpec or NamedSharding: at most one entry per dim,"
    " of axes of the mesh, each once, none of them unreduced.\n"
    "Correct the PartitionSpec; None or a missing entry leaves a dim unsharded,"
    " PartitionSpec.UNCONSTRAINED leaves it to completion."
)
TREES = (
    "A tree of shardings has the structure of what it describes, or is a prefix of it: one entry"
    " may stand for a whole subtree.\n"
    "Give one entry for each subtree, in containers of the same classes, and no other;"
    " of hints, None leaves one to completion."
)


def test_specs_of_the_wrong_rank(mesh2x4):
    wrong = mw.jit(
        step,
        mesh=mesh2x4,
        in_shardings=({"w": P("x", None, "y"), "b": P("x", "y")}, P("x")),
        out_shardings={"loss": P("x", None), "y": P()},
    )
    check(
        mw.HintError,
        "step has hints that do not fit its values on the mesh (x=2, y=4):\n"
        "  - args[0]['b']: P('x', 'y') has 2 entries, the shape (4,) has 1 dim\n"
        "  - args[0]['w']: P('x', None, 'y') has 3 entries, the shape (8, 4) has 2 dims\n"
        "  - result['loss']: P('x', None) has 2 entries, the shape () has 0 dims\n" + SPECS,
        lambda: wrong(*ARGS),
    )


def test_unknown_and_repeated_axes(mesh2x4):
    wrong = mw.jit(
        step,
        mesh=mesh2x4,
        in_shardings=({"w": P("z"), "b": P("data")}, P("x", "x")),
        out_shardings={"loss": None, "y": P(("x", "y"), "x")},
    )
    text = (
        "step has hints that do not fit its values on the mesh (x=2, y=4):\n"
        "  - args[0]['b']: P('data',) names axis 'data', the mesh has 'x', 'y'\n"
        "  - args[0]['w']: P('z',) names axis 'z', the mesh has 'x', 'y'\n"
        "  - args[1]: P('x', 'x') uses axis 'x' 2 times\n"
        "  - result['y']: P(('x', 'y'), 'x') uses axis 'x' 2 times\n" + SPECS
    )
    check(mw.HintError, text, lambda: wrong(*ARGS))
    check(mw.HintError, text, lambda: wrong.partition(*ARGS))


def test_a_part_of_an_axis_beside_the_axis(mesh2x4):
    wrong = mw.jit(step, mesh=mesh2x4, in_shardings=(None, P("y", "y.0")))
    check(
        mw.HintError,
        "step has hints that do not fit its values on the mesh (x=2, y=4): args[1]: P('y', 'y.0')"
        " uses axis 'y.0' twice\n" + SPECS,
        lambda: wrong(*ARGS),
    )


def test_what_is_no_sharding(mesh2x4):
    wrong = mw.jit(step, mesh=mesh2x4, in_shardings=({"w": "x", "b": 3}, None))
    check(
        mw.HintError,
        "step has hints that do not fit its values on the mesh (x=2, y=4):\n"
        "  - args[0]['b']: 3 is neither a PartitionSpec nor a NamedSharding\n"
        "  - args[0]['w']: 'x' is neither a PartitionSpec nor a NamedSharding\n" + SPECS,
        lambda: wrong(*ARGS),
    )


TREES_THAT_DO_NOT_MATCH = {
    "a key too many and one missing": (
        {"in_shardings": ({"w": P(), "c": P()}, P("x"))},
        "in_shardings of step does not match the tree it describes:\n"
        "  - in_shardings[0]['c'] describes nothing: args[0] is a dict with 'b', 'w'\n"
        "  - in_shardings[0] has no entry for args[0]['b']\n",
    ),
    "too few": (
        {"in_shardings": (P(),)},
        "in_shardings of step does not match the tree it describes:"
        " in_shardings has no entry for args[1]\n",
    ),
    "too many, and another kind": (
        {"in_shardings": ([P()], None, P("x"))},
        "in_shardings of step does not match the tree it describes:\n"
        "  - in_shardings[2] describes nothing: the call has 2 positional arguments\n"
        "  - in_shardings[0] is a list of 1, args[0] is a dict with 'b', 'w'\n",
    ),
    "a tree for an array": (
        {"in_shardings": ({"w": {"kernel": P()}, "b": None}, (P("x"), P()))},
        "in_shardings of step does not match the tree it describes:\n"
        "  - in_shardings[0]['w'] is a dict with 'kernel', args[0]['w'] is one array\n"
        "  - in_shardings[1] is a tuple of 2, args[1] is one array\n",
    ),
    "another kind of result": (
        {"out_shardings": (P(), P())},
        "out_shardings of step does not match the tree it describes:"
        " out_shardings is a tuple of 2, result is a dict with 'loss', 'y'\n",
    ),
    "a part of the result": (
        {"out_shardings": {"loss": None}},
        "out_shardings of step does not match the tree it describes:"
        " out_shardings has no entry for result['y']\n",
    ),
}


@pytest.mark.parametrize("case", TREES_THAT_DO_NOT_MATCH.values(), ids=TREES_THAT_DO_NOT_MATCH)
def test_trees_that_do_not_match(mesh2x4, case):
    options, text = case
    wrong = mw.jit(step, mesh=mesh2x4, **options)
    check(mw.TreeError, text + TREES, lambda: wrong(*ARGS))
    if "in_shardings" in options:
        check(mw.TreeError, text + TREES, lambda: jax.jit(wrong)(*ARGS))


def test_trees_of_other_containers(mesh2x4):
    check(
        mw.TreeError,
        "in_shardings of <lambda> does not match the tree it describes:"
        " in_shardings[0] is a tuple of 2, args[0] is a list of 2\n" + TREES,
        lambda: mw.jit(lambda a: a[0], mesh=mesh2x4, in_shardings=((P(), P()),))([X, X]),
    )


def test_shardings_of_keyword_and_static_arguments(mesh2x4):
    wrong = mw.jit(
        lambda n, x, y: x, mesh=mesh2x4, static_argnums=0, in_shardings=(P(), {"a": P()})
    )
    check(
        mw.TreeError,
        "in_shardings of <lambda> does not match the tree it describes:"
        " in_shardings[1] is a dict with 'a', args[2] is one array\n" + TREES,
        lambda: wrong(1, X, X),
    )
    check(
        mw.TreeError,
        "in_shardings of <lambda> does not match the tree it describes:"
        " in_shardings[1] describes nothing: the call has 1 positional argument besides static"
        " ones, which have no entry; y came by keyword: pass it by position\n" + TREES,
        lambda: wrong(1, X, y=X),
    )


NO_MESH = (
    "step was called without a mesh: no mesh= was given, no sharding names one, and none is in"
    " context\n"
    "Every program is made for a mesh.\n"
    "Give a mesh= or NamedShardings, or call inside jax.set_mesh(mesh)."
)


def test_no_mesh():
    bare = mw.jit(step, in_shardings=P("x"))
    for call in (bare, bare.partition, jax.jit(bare)):
        check(mw.NoMeshError, NO_MESH, lambda call=call: call(*ARGS), also=ValueError)


def test_what_is_no_mesh():
    check(
        mw.ArgumentError,
        "mw.jit was given a mesh that is none: mesh=(2, 4)\n"
        "A mesh is a jax.sharding.Mesh or, to plan without devices, an AbstractMesh.\n"
        "Make one with jax.make_mesh(sizes, names).",
        lambda: mw.jit(step, mesh=(2, 4)),
    )


def test_a_mesh_with_manual_axes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Manual,))
    check(
        mw.MeshError,
        "mw.jit was given a mesh with manual axes: axis 'x'\n"
        "Axes are manual inside of jax.shard_map alone, where arrays are parts of others.\n"
        "Make the mesh with AxisType.Auto or AxisType.Explicit.",
        lambda: mw.jit(step, mesh=mesh),
    )


@pytest.mark.parametrize("make", [mw.jit, lambda fn, mesh: mw.program(mesh=mesh)(fn)])
def test_a_mesh_whose_axes_have_no_names(make):
    with pytest.raises(mw.MeshError) as caught:
        make(step, mesh=AbstractMesh((2, 2, 2), (0, "x", ("a", "b"))))
    first, *rest = str(caught.value).partition(" was given ")[2].splitlines()
    assert [first, *rest] == [
        "a mesh whose axes have no names:",
        "  - axis 0 is int",
        "  - axis ('a', 'b') is tuple",
        "Axes are named by text; XLA's shardings have no other names.",
        "Make the mesh with such: jax.make_mesh(sizes, ('data', 'model')).",
    ]


def test_a_completion_that_is_none():
    check(
        mw.ArgumentError,
        "mw.jit was given a completion that is none: completion='fast'\n"
        "It is one of 'improved', 'gspmd'.\n"
        "Leave it out to have the completed shardings improved.",
        lambda: mw.jit(step, completion="fast"),
    )


@pytest.mark.parametrize("most", [-3, 2.5, True])
def test_a_limit_that_is_no_number_of_bytes(most):
    check(
        mw.ArgumentError,
        f"mw.jit was given a limit that is no number of bytes: hoist_bytes={most}\n"
        "It is a whole number, 0 or more: what a device may hold of what loops read.\n"
        "Leave it out to have everything gathered before a loop; 0 gathers in each step.",
        lambda: mw.jit(step, hoist_bytes=most),
    )


def test_arguments_on_other_devices(mesh2x4):
    args = {"w": on(devices(4, 5, 6, 7), W, "x"), "b": on(devices(2), W[0])}, X
    check(
        mw.MeshError,
        "step was called with arguments on other devices than its mesh"
        " (cpu devices 0, 1, 2, 3, 4, 5, 6, 7):\n"
        "  - args[0]['b'] float32[4] is on cpu device 2\n"
        "  - args[0]['w'] float32[8,4] is on cpu devices 4, 5, 6, 7\n"
        "A committed argument must lie on exactly the mesh's devices.\n"
        "Move it with mw.reshard(x, NamedSharding(mesh, spec)), or pass a numpy array.",
        lambda: mw.jit(step, mesh=mesh2x4)(*args),
    )


def test_arguments_that_lie_otherwise_than_said(mesh2x4):
    wrong = mw.jit(step, mesh=mesh2x4, in_shardings=({"w": P("x"), "b": None}, P("x")))
    args = {"w": on(mesh2x4, W, "y"), "b": on(mesh2x4, W[0], "x")}, on(mesh2x4, X, None, "x")
    check(
        mw.HintError,
        "step was called with arguments that lie otherwise than in_shardings says:\n"
        "  - args[0]['w'] lies as P('y',), in_shardings says P('x',)\n"
        "  - args[1] lies as P(None, 'x'), in_shardings says P('x',)\n"
        "A committed argument's sharding is a hint as well, and hints are never changed.\n"
        "Move the argument with mw.reshard, or leave its entry in in_shardings None.",
        lambda: wrong(*args),
    )


def test_arguments_that_are_no_arrays(mesh2x4):
    rest = (
        "Arguments are arrays, numbers, or trees of them.\n"
        "Name others in static_argnums or static_argnames; they then select a program. Of a tree"
        " that has arrays as well, pass those alone, as equinox.partition and flax.nnx.split"
        " give them."
    )
    text = (
        "<lambda> was called with arguments that are no arrays:\n"
        "  - args[0]['f'] is a PjitFunction\n"
        "  - args[0]['s'][0] is a str: 'abc'\n"
        "  - args[1] is a NumPy array of <U1, a type that JAX does not have\n"
        "  - args[2] is a NumPy array with a mask: pass x.filled(), and x.mask where it is read\n"
        "  - kwargs['o'] is an object\n" + rest
    )
    masked = np.ma.masked_array(np.ones(2), mask=[True, False])
    args = ({"f": jnp.sin, "s": ["abc", 1.0]}, np.array(["a"]), masked)
    fn = mw.jit(lambda a, b, c, o: 0, mesh=mesh2x4)
    for call in (fn, fn.partition, lambda *a, o: jax.jit(lambda: fn(*a, o=o))()):
        check(mw.ArgumentError, text, lambda call=call: call(*args, o=object()))


def test_hints_for_other_devices(mesh2x4):
    turned = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("x", "y"))
    spec = NamedSharding(turned, P("x"))
    check(
        mw.MeshError,
        "step has hints for other devices than those of its mesh"
        " (cpu devices 0, 1, 2, 3, 4, 5, 6, 7):\n"
        "  - in_shardings of args[1], P('x',), is for cpu devices 7, 6, 5, 4, 3, 2, 1, 0\n"
        "  - out_shardings of result['y'], P('x',), is for cpu devices 7, 6, 5, 4, 3, 2, 1, 0\n"
        "All hints of one program are for the same devices in the same order.\n"
        "Write hints as PartitionSpecs, or make the NamedShardings with the mesh that mw.jit is"
        " given.",
        lambda: mw.jit(
            step,
            mesh=mesh2x4,
            in_shardings=(None, spec),
            out_shardings={"loss": None, "y": spec},
        )(*ARGS),
    )


@pytest.fixture(scope="module")
def planned():
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return mw.jit(step, mesh=mesh)


def test_running_without_devices(planned):
    program = planned.partition(*ARGS)
    for call in (
        lambda: program(*ARGS),
        program.compile,
        lambda: planned(*ARGS),
        lambda: jax.jit(planned)(*ARGS),
        lambda: jax.grad(lambda *args: planned(*args)["loss"])(*ARGS),
    ):
        check(
            mw.MeshError,
            "step is to run on a mesh without devices: it was partitioned for"
            " AbstractMesh('x': 2, 'y': 4, axis_types=(Auto, Auto))\n"
            "A program for an AbstractMesh can be read, priced and simulated.\n"
            "Partition it for a jax.sharding.Mesh to run or compile it; its StableHLO is had by "
            '.trace(...).lower(lowering_platforms=("tpu",)).',
            call,
        )


def test_calling_a_program_with_other_arguments(planned):
    program = planned.partition(*ARGS)
    rest = (
        "A program is made for one structure and for arrays of one shape and type.\n"
        "Call it with such arguments, or partition the function for these."
    )
    for call in (program, program.simulate):
        check(
            mw.ArgumentError,
            "step is called with other arguments than it was partitioned for:\n"
            "  - partitioned for ({'b': *, 'w': *}, *)\n"
            "  - called with ({'w': *}, x=*)\n" + rest,
            lambda call=call: call({"w": W}, x=X),
        )
        check(
            mw.ArgumentError,
            "step is called with other arrays than it was partitioned for:\n"
            "  - args[0]['b'] is int32[4], wanted is float32[4]\n"
            "  - args[0]['w'] is float32[4,8], wanted is float32[8,4]\n"
            "  - args[1] is a str, wanted is float32[4,8]\n" + rest,
            lambda call=call: call({"w": W.T, "b": W[0].astype(np.int32)}, "x"),
        )


def test_sizes_that_are_no_numbers(mesh2x4):
    step = mw.jit(lambda x: x * 2, mesh=mesh2x4, in_shardings=P("x"))
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 4"), np.float32)
    text = (
        "<lambda> was called with arrays whose sizes are no numbers: args[0] is float32[rows, 4]\n"
        "How a program is partitioned depends on its sizes, so they must be known.\n"
        "Export it for each shape that is wanted; or leave the mesh= to the shardings, and jax.jit"
        " partitions it."
    )
    check(mw.UnplannedError, text, lambda: step.partition(rows))
    with pytest.raises(mw.UnplannedError, match=r"sizes are no numbers"):
        export.export(jax.jit(step))(rows)


def test_a_reference_that_neither_takes(mesh8):
    """Where nothing of meshwise's is said JAX is asked, and says what is wrong with the call."""

    def add(ref, x):
        return x + ref[...]

    ref, x = (
        jax.new_ref(jnp.float32(2)),
        jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh8, P())),
    )
    refusal = (
        f"add was called with what is no array: args[0] is a Ref: {ref!r}\n"
        "Programs of meshwise take arrays.\n"
        "Pass what a Ref holds, as ref[...]. A Ref itself is left to jax.jit, where neither mesh="
        " nor another word of meshwise's own is given."
    )
    check(mw.UnplannedError, refusal, lambda: mw.jit(add, mesh=mesh8)(ref, x))
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        mw.jit(add)(ref, x)
    assert not isinstance(caught.value, mw.MeshwiseError)
    assert str(caught.value.__cause__) == refusal
