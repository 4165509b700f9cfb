"""What a person is told by `mw.reshard` and `mw.reshard_plan`: every word of it.

What was asked, each offender with its path, the rule, the way out; and nothing of JAX's.
"""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.api.resharding import ORDER, lay, mesh, numbers, on
from tests.messages.exactly import check

SPECS = (
    "A sharding has at most one entry per dim and names only axes of its mesh, each once.\n"
    "Give a NamedSharding on a mesh with devices, or a PartitionSpec for an array that lies on one."
)
KINDS = (
    "A sharding is a NamedSharding, or a PartitionSpec on the mesh where the array lies.\n"
    "Give one of these; jax.device_put puts an array on one device."
)
OPEN = (
    "Dims are left open inside of programs alone, where completion fills them.\n"
    "Name the axes of every dim; None keeps one whole on each device."
)
MEMORIES = (
    "Collectives go from one memory of devices' own to another.\n"
    "Leave memory_kind out; jax.device_put brings an array to another memory."
)
TREES = (
    "A tree of shardings has the structure of what it describes, or is a prefix of it: one entry"
    " may stand for a whole subtree.\n"
    "Give one entry for each subtree, in containers of the same classes, and no other;"
    " None leaves one where it lies."
)
VALUES = (
    "Only arrays have parts to send.\n"
    "Leave others out of the tree; mw.reshard_plan takes a shape and a dtype."
)
GONE = (
    "A call that donates an argument (donate_argnums, donate_argnames) gives its buffers to the"
    " results.\n"
    "Go on with the results of that call, or do not donate what is needed again."
)
LIMITS = (
    "max_bytes is a positive whole number of bytes a device, hardware is of the class in"
    " meshwise.cost.hardware.\n"
    "Leave out what is not to be limited."
)
MEMORY = (
    "The largest array that a device holds on the way, its shards before and after included, must"
    " fit.\n"
    "Raise max_bytes, or use shardings over more axes."
)
ARRAYS = (
    "A shape is whole numbers, none below zero; a dtype is one of NumPy's or JAX's.\n"
    "Give those of an array: x.shape, x.dtype. Of PRNG keys give those of their data."
)
MESHES = (
    "A PartitionSpec is on a mesh, a NamedSharding names its own.\n"
    "Give a jax.sharding.Mesh or AbstractMesh, or NamedShardings."
)
ROWS = on((2, 4), "x")
ABSTRACT = AbstractMesh((2, 4), ("x", "y"))
UNREDUCED = P(unreduced={"x"})  # versions of JAX show it, and types of axes, otherwise


def x():
    """An array of (8, 2) on the mesh x=2, y=4, its rows over x."""
    return lay(numbers((8, 2)), ROWS())


WRONG = {  # what is given for x, and what is said of it
    "too many entries": (
        lambda: P(None, None, "x"),
        "P(None, None, 'x') has 3 entries, the shape (8, 2) has 2 dims",
    ),
    "an axis twice": (lambda: P("x", "x"), "P('x', 'x') uses axis 'x' 2 times"),
    "another axis": (
        lambda: P(("x", "z")),
        "P(('x', 'z'),) names axis 'z', the mesh has 'x', 'y'",
    ),
    "a number for an axis": (lambda: P(3), "P(3,) names axis 3, the mesh has 'x', 'y'"),
    "an unreduced spec": (
        lambda: P(unreduced={"x"}),
        f"{UNREDUCED} is unreduced at the boundary of a program",
    ),
    "a name": (lambda: "x", "'x' is neither a PartitionSpec nor a NamedSharding"),
    "a device": (
        lambda: jax.devices()[1],
        "CpuDevice(id=1) is neither a PartitionSpec nor a NamedSharding",
    ),
    "a sharding on no mesh": (
        lambda: SingleDeviceSharding(jax.devices()[1]),
        "SingleDeviceSharding(device=CpuDevice(id=1), memory_kind=device) is neither a"
        " PartitionSpec nor a NamedSharding",
    ),
    "entries that are too many for the array": (
        on((8,), None, None, "x"),
        "P(None, None, 'x') has 3 entries, the shape (8, 2) has 2 dims",
    ),
    "another memory": (
        lambda: NamedSharding(mesh((8,)), P("x"), memory_kind="pinned_host"),
        "NamedSharding(mesh=Mesh('x': 8, axis_types=(Auto,)), spec=P('x',),"
        " memory_kind=pinned_host) is not in the memory of the devices, where arrays are moved",
    ),
}
OUTSIDE = {  # these are right in a function
    "an open dim": (
        lambda: P(P.UNCONSTRAINED),
        "P(UNCONSTRAINED,) leaves a dim open; here is nothing to complete it from",
    ),
    "a mesh without devices": (
        lambda: NamedSharding(ABSTRACT, P("x")),
        f"{NamedSharding(ABSTRACT, P('x'))} is on a mesh without devices",
    ),
}


def rule_of(said):
    """The rule and the way out for what is said of one sharding."""
    rules = {"neither": KINDS, "leaves a dim open": OPEN, "not in the memory": MEMORIES}
    return next((rule for words, rule in rules.items() if words in said), SPECS)


def shown(path, said):
    """The text for one sharding that does not fit."""
    asked = "mw.reshard was given shardings that do not fit"
    return f"{asked}: {path}: {said}\n{rule_of(said)}"


@pytest.mark.parametrize("case", [*WRONG, *OUTSIDE])
def test_shardings_that_do_not_fit(case):
    sharding, said = (WRONG | OUTSIDE)[case]
    value = x()
    check(mw.HintError, shown("x", said), lambda: mw.reshard(value, sharding()))
    with_others = {"a": [value, value]}, {"a": [P("y"), sharding()]}
    check(mw.HintError, shown("x['a'][1]", said), lambda: mw.reshard(*with_others, donate=True))
    assert not value.is_deleted()


TRANSFORMS = {
    "jax.jit": jax.jit,
    "mw.jit": lambda fn: mw.jit(fn, mesh=mesh((2, 4))),
    "grad": lambda fn: jax.grad(lambda x: fn(x).sum()),
    "jvp": lambda fn: lambda x: jax.jvp(fn, (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", WRONG)
def test_shardings_that_do_not_fit_while_tracing(case, transform):
    sharding, said = WRONG[case]
    value = x()
    with jax.set_mesh(mesh((2, 4))):
        fn = TRANSFORMS[transform](lambda x: mw.reshard({"w": x * 2}, {"w": sharding()})["w"])
        check(mw.HintError, shown("x['w']", said), lambda: fn(value))


def test_each_offender_is_listed_by_its_path():
    tree = {"a": x(), "b": [x(), np.zeros(3), {"c": x()}]}
    specs = {"a": P("z", "y"), "b": [P("x", "x"), P("x"), {"c": P(None, None, "y")}]}
    check(
        mw.HintError,
        "mw.reshard was given shardings that do not fit:\n"
        "  - x['a']: P('z', 'y') names axis 'z', the mesh has 'x', 'y'\n"
        "  - x['b'][0]: P('x', 'x') uses axis 'x' 2 times\n"
        "  - x['b'][1] lies on no mesh, so P('x',) says nothing of it\n"
        "  - x['b'][2]['c']: P(None, None, 'y') has 3 entries, the shape (8, 2) has 2 dims\n"
        + SPECS,
        lambda: mw.reshard(tree, specs),
    )


def test_of_several_kinds_each_rule_is_said():
    tree = [x(), x(), x()]
    (specs, specs_out), (dims, dims_out) = SPECS.split("\n"), OPEN.split("\n")
    check(
        mw.HintError,
        "mw.reshard was given shardings that do not fit:\n"
        "  - x[0]: P(UNCONSTRAINED,) leaves a dim open; here is nothing to complete it from\n"
        "  - x[1]: P('z',) names axis 'z', the mesh has 'x', 'y'\n"
        f"{specs} {dims}\n{specs_out} {dims_out}",
        lambda: mw.reshard(tree, [P(P.UNCONSTRAINED), P("z"), P("x")]),
    )


def test_a_mesh_with_manual_axes():
    manual = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Manual,) * 2)
    rule = (
        " was given a mesh with manual axes:\n  - axis 'x'\n  - axis 'y'\n"
        "Axes are manual inside of jax.shard_map alone, where arrays are parts of others.\n"
        "Make the mesh with AxisType.Auto or AxisType.Explicit."
    )
    target = NamedSharding(manual, P("x"))
    for value in (x(), [x()], np.zeros((8, 2))):
        check(mw.MeshError, "mw.reshard" + rule, lambda value=value: mw.reshard(value, target))
    plan = lambda: mw.reshard_plan((8,), "int8", manual, P("x"), P("y"))  # noqa: E731
    check(mw.MeshError, "mw.reshard_plan" + rule, plan)


def test_bytes_may_be_written_as_floats():
    assert mw.reshard(x(), P(), max_bytes=80e9).sharding.spec == P()
    assert mw.reshard_plan((8,), "int8", ABSTRACT, P("x"), P(), max_bytes=8e0).peak_bytes == 8


@pytest.mark.parametrize("where", ["host", "device", "jax.jit"])
def test_a_spec_where_there_is_no_mesh(where):
    value = jax.device_put(np.zeros(8), jax.devices()[2]) if where == "device" else np.zeros(8)
    jit = jax.jit if where == "jax.jit" else lambda fn: fn
    check(
        mw.HintError,
        "mw.reshard was given shardings that do not fit: x[0] lies on no mesh, so P('x',) says"
        " nothing of it\n" + SPECS,
        lambda: jit(lambda v: mw.reshard([v], P("x")))(value),
    )


@pytest.mark.parametrize("where", ["host", "device", "jax.jit"])
@pytest.mark.parametrize("kind", ["a sharding of one device", "a device", "a text"])
def test_what_is_no_sharding_over_a_mesh(kind, where):
    device = jax.devices()[1]
    sharding = {
        "a sharding of one device": jax.sharding.SingleDeviceSharding(device),
        "a device": device,
        "a text": "x",
    }[kind]
    value = jax.device_put(np.zeros(8), jax.devices()[2]) if where == "device" else np.zeros(8)
    jit = jax.jit if where == "jax.jit" else lambda fn: fn
    check(
        mw.HintError,
        f"mw.reshard was given shardings that do not fit: x: {sharding!r} is neither a "
        "PartitionSpec nor a NamedSharding\n" + KINDS,
        lambda: jit(lambda v: mw.reshard(v, sharding))(value),
    )


TREES_THAT_DO_NOT_MATCH = {
    "too few": (2, lambda: [P()], "sharding has no entry for x[1]"),
    "too many": (1, lambda: [P(), P()], "sharding[1] describes nothing: x is a list of 1"),
    "another kind": (2, lambda: (P(), P()), "sharding is a tuple of 2, x is a list of 2"),
    "a tree for an array": (
        1,
        lambda: [{"w": P()}],
        "sharding[0] is a dict with 'w', x[0] is one array",
    ),
}


@pytest.mark.parametrize("case", TREES_THAT_DO_NOT_MATCH)
def test_trees_that_do_not_match(case):
    count, sharding, said = TREES_THAT_DO_NOT_MATCH[case]
    text = f"sharding of mw.reshard does not match the tree it describes: {said}\n{TREES}"
    check(mw.TreeError, text, lambda: mw.reshard([x()] * count, sharding()))


STRANGE = ", a type that JAX does not have"
STRANGERS = {
    "a text": ("text", "a str: 'text'"),
    "an object": (object(), "an object"),
    "texts of NumPy": (np.array(["a"]), f"a NumPy array of <U1{STRANGE}"),
    "objects of NumPy": (np.array([None]), f"a NumPy array of object{STRANGE}"),
    "a function": (len, "a builtin_function_or_method: <built-in function len>"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_is_no_array(case):
    stranger, said = STRANGERS[case]
    for path, tree in [("x", stranger), ("x['a'][1]", {"a": [x(), stranger]})]:
        text = f"mw.reshard was given values that are no arrays: {path} is {said}\n{VALUES}"
        check(mw.ArgumentError, text, lambda tree=tree: mw.reshard(tree, ROWS()))
    check(
        mw.ArgumentError,
        f"mw.reshard was given values that are no arrays:\n  - x[0] is {said}\n  - x[1] is {said}\n"
        + VALUES,
        lambda: mw.reshard([stranger, stranger, x()], None),
    )


def test_the_type_of_an_array_is_no_array():
    with pytest.raises(mw.ArgumentError):
        mw.reshard(jax.ShapeDtypeStruct((8,), np.float32), ROWS())


def test_arrays_that_are_gone():
    first, second, whole = x(), x(), lay(numbers((7, 2)), ROWS())
    mw.reshard(first, P(None, "x"), donate=True)
    whole.delete()
    check(
        mw.DeletedArrayError,
        "mw.reshard was called with arrays whose buffers are gone: x: Array has been deleted with"
        " shape=float32[8,2].\n" + GONE,
        lambda: mw.reshard(first, P()),
    )
    check(
        mw.DeletedArrayError,
        "mw.reshard was called with arrays whose buffers are gone:\n"
        "  - x['a']: Array has been deleted with shape=float32[8,2].\n"
        "  - x['b'][1]: Array has been deleted with shape=float32[7,2].\n" + GONE,
        lambda: mw.reshard({"a": first, "b": [second, whole]}, P(), donate=True),
    )
    assert not second.is_deleted()


BAD_LIMITS = {
    "zero": ({"max_bytes": 0}, " max_bytes=0"),
    "below zero": ({"max_bytes": -3}, " max_bytes=-3"),
    "a fraction": ({"max_bytes": 2.5}, " max_bytes=2.5"),
    "a text": ({"max_bytes": "1 MB"}, " max_bytes='1 MB'"),
    "a truth": ({"max_bytes": True}, " max_bytes=True"),
    "a name": ({"hardware": "H100"}, " hardware='H100'"),
    "both": ({"max_bytes": 0, "hardware": 3}, "\n  - max_bytes=0\n  - hardware=3"),
}


@pytest.mark.parametrize("case", BAD_LIMITS)
def test_limits_that_are_none(case):
    limits, said = BAD_LIMITS[case]
    calls = {
        "mw.reshard": lambda: mw.reshard(x(), P(), **limits),
        "mw.reshard_plan": lambda: mw.reshard_plan((8,), "int8", ABSTRACT, P(), P(), **limits),
    }
    for name, call in calls.items():
        text = f"{name} was given limits that are none:{said}\n{LIMITS}"
        check(mw.ArgumentError, text, call)
        check(mw.ArgumentError, text, jax.jit(call))


def test_too_little_memory():
    asked = "reshard of shape [8, 2] from {} to [-, -] in at most 3 bytes a device: the least"
    text = asked + " possible is 64\n" + MEMORY
    within, between = text.format("[x, -]"), text.format("tiles of [4, 2]")
    few = on((4,), order=[4, 5, 6, 7])()
    check(mw.MemoryLimitError, within, lambda: mw.reshard(x(), P(), max_bytes=3))
    check(mw.MemoryLimitError, between, lambda: mw.reshard([x()], few, max_bytes=3))
    program = mw.jit(lambda x: mw.reshard(x + 1, P(), max_bytes=3), mesh=mesh((2, 4)))
    check(mw.MemoryLimitError, within, lambda: program(x()))
    plan = (8, 2), "float32", ABSTRACT, P("x"), P()
    check(mw.MemoryLimitError, within, lambda: mw.reshard_plan(*plan, max_bytes=3))


def test_a_limit_under_jax_jit():
    check(
        mw.MemoryLimitError,
        "mw.reshard to NamedSharding(mesh=Mesh('x': 2, 'y': 4, axis_types=(Auto, Auto)), spec=P(),"
        " memory_kind=device) in at most 3,000 bytes a device: it is in a function under jax.jit,"
        " where XLA moves the value\n"
        "A bound on memory holds under mw.jit, and for arrays outside of functions.\n"
        "Use mw.jit, or leave max_bytes out.",
        lambda: jax.jit(lambda x: mw.reshard(x + 1, on((2, 4))(), max_bytes=3000))(x()),
    )


DEVICES = {
    "another mesh": (
        on((4,)),
        r"P\(\) is for a mesh {'x': 4}, the program's is {'x': 2, 'y': 4}\n",
    ),
    "another order": (
        on((2, 4), order=ORDER),
        "is for cpu devices 3, 1, 7, 0, 2, 6, 5, 4\n",
    ),
}


@pytest.mark.parametrize("case", DEVICES)
def test_other_devices_under_mw_jit(case):
    """As any hint for them."""
    target, said = DEVICES[case]
    program = mw.jit(lambda x: mw.reshard(x + 1, target()), mesh=mesh((2, 4)))
    with pytest.raises(mw.MeshError, match=said):
        program(x())


def test_what_has_no_hash_is_no_sharding():
    with pytest.raises(mw.HintError, match="neither a PartitionSpec nor a NamedSharding"):
        mw.reshard(x(), np.arange(3))


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_a_mesh_without_devices_in_eager_transforms(transform):
    abstract = NamedSharding(ABSTRACT, P("x"))
    fn = TRANSFORMS[transform](lambda x: mw.reshard(x * 2, abstract))
    said = r"is on a mesh without devices\n"
    with pytest.raises(mw.MeshwiseError, match=said):
        fn(x())


def test_what_does_not_divide_over_explicit_axes():
    mesh = jax.make_mesh((8,), ("x",))
    x = jax.device_put(np.ones((13, 8), np.float32), NamedSharding(mesh, P(None, "x")))
    check(
        mw.HintError,
        "mw.reshard was given shardings that do not fit: x: P('x',) does not divide (13, 8)\n"
        "Over Explicit axes shardings are part of types, and a type's shards are equal.\n"
        "Pad the array, give another sharding, or make the mesh of Auto axes.",
        lambda: mw.jit(lambda x: mw.reshard(x, P("x")))(x),
    )
