"""What a person is told by `mw.reshard_plan` of what does not fit: every word of it."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import CPU
from tests.messages.exactly import check
from tests.messages.test_reshard import ABSTRACT, ARRAYS, MESHES, rule_of

NO_ARRAYS = {
    "below zero": ((-1,), "int8", " shape=(-1,)"),
    "a number": (8, "int8", " shape=8"),
    "a fraction": ((8.5,), "int8", " shape=(8.5,)"),
    "a text": ("ab", "int8", " shape='ab'"),
    "no type": ((8,), "floatx", " dtype='floatx'"),
    "a kind of types": ((8,), jax.dtypes.prng_key, " dtype=<class 'jax.dtypes.prng_key'>"),
    "both": ((None,), 3, "\n  - shape=(None,)\n  - dtype=3"),
}


@pytest.mark.parametrize("case", NO_ARRAYS)
def test_what_is_no_array(case):
    shape, dtype, said = NO_ARRAYS[case]
    text = f"mw.reshard_plan was asked about no array:{said}\n{ARRAYS}"
    check(mw.ArgumentError, text, lambda: mw.reshard_plan(shape, dtype, ABSTRACT, P(), P()))


def test_keys_have_no_type_of_numbers():
    dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype
    text = f"mw.reshard_plan was asked about no array: dtype=key<fry>\n{ARRAYS}"
    check(mw.ArgumentError, text, lambda: mw.reshard_plan((8,), dtype, ABSTRACT, P(), P()))


@pytest.mark.parametrize("dtype", [None, object, "U3"], ids=str)
def test_types_that_no_array_has(dtype):
    with pytest.raises(mw.ArgumentError):
        mw.reshard_plan((8,), dtype, ABSTRACT, P(), P())


@pytest.mark.parametrize("given", [None, "mesh", 8], ids=["none", "text", "number"])
def test_specs_on_no_mesh(given):
    text = f"src = P('x',) and dst = P() have no mesh: mesh={given!r}\n{MESHES}"
    check(mw.MeshError, text, lambda: mw.reshard_plan((8,), "int8", given, P("x"), P()))
    text = f"dst = P() has no mesh: mesh={given!r}\n{MESHES}"
    source = NamedSharding(ABSTRACT, P("x"))
    check(mw.MeshError, text, lambda: mw.reshard_plan((8,), "int8", given, source, P()))


@pytest.mark.parametrize("mesh", [np.arange(3), {"x": 8}], ids=["array", "dict"])
def test_what_has_no_hash_is_no_mesh(mesh):
    text = f"src = P('x',) and dst = P() have no mesh: mesh={mesh!r}\n{MESHES}"
    check(mw.MeshError, text, lambda: mw.reshard_plan((8,), "int8", mesh, P("x"), P()))


ENDS = {
    "both": (
        P("x", "y", "x"),
        P("z"),
        "\n"
        "  - src: P('x', 'y', 'x') has 3 entries, the shape (8, 4) has 2 dims\n"
        "  - src: P('x', 'y', 'x') uses axis 'x' 2 times\n"
        "  - dst: P('z',) names axis 'z', the mesh has 'x', 'y'",
    ),
    "nothing": (None, P(), " src: None is neither a PartitionSpec nor a NamedSharding"),
    "a name": (P(), "x", " dst: 'x' is neither a PartitionSpec nor a NamedSharding"),
    "a list": (["x"], P(), " src: ['x'] is neither a PartitionSpec nor a NamedSharding"),
    "open": (
        P(P.UNCONSTRAINED),
        P(),
        " src: P(UNCONSTRAINED,) leaves a dim open; here is nothing to complete it from",
    ),
    "unreduced": (
        P(),
        P(unreduced={"x"}),
        f" dst: {P(unreduced={'x'})} is unreduced at the boundary of a program",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_shardings_that_do_not_fit(case):
    source, target, said = ENDS[case]
    text = f"mw.reshard_plan was given shardings that do not fit:{said}\n{rule_of(said)}"
    check(mw.HintError, text, lambda: mw.reshard_plan((8, 4), "int8", ABSTRACT, source, target))


def test_too_many_rounds():
    many, one = (
        NamedSharding(AbstractMesh((n,), ("x",)), P("x" if n > 1 else None)) for n in (200, 1)
    )
    check(
        mw.MeshError,
        f"mw.reshard_plan was asked for [200] from {many} to {one}: it would take more rounds of"
        " pieces than a program may have\n"
        "Between meshes each device gets the pieces of its shard from those who hold them.\n"
        "Go by way of a sharding over more axes on either mesh.",
        lambda: mw.reshard_plan((200,), "int8", None, many, one),
    )


def test_a_long_time_is_written_in_digits():
    plan = mw.reshard_plan((4096, 8192), "float32", ABSTRACT, P("x"), P(None, "x"), hardware=CPU)
    assert " in 2 collectives, 34,755 us, peak " in str(plan)
