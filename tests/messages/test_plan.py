"""What a person is told by `mw.plan` of what does not fit: every word of it."""

import jax
import jax.numpy as jnp
import pytest

import meshwise as mw
from tests.meshes import mesh_of
from tests.messages.exactly import check

X = jax.ShapeDtypeStruct((64, 8), jnp.float32)
LIMITS = """
They are whole numbers from one on: of bytes on a device, and of plans compared.
Leave max_bytes out for no limit, most_tried for the default."""
CASES = {
    "no bytes": ({"max_bytes": 0}, " max_bytes=0"),
    "a text": ({"max_bytes": "16GB"}, " max_bytes='16GB'"),
    "a fraction of a plan": ({"most_tried": 0.5}, " most_tried=0.5"),
    "no number of plans": ({"most_tried": None}, " most_tried=None"),
    "both": ({"max_bytes": -1, "most_tried": 0}, "\n  - max_bytes=-1\n  - most_tried=0"),
}


def double(x):
    return 2 * x


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_limit(case):
    given, said = CASES[case]
    text = f"mw.plan was given limits that are none:{said}{LIMITS}"
    check(mw.ArgumentError, text, lambda: mw.plan(double, X, mesh=mesh_of(x=4), **given))


def test_a_mesh_twice():
    text = """mw.plan was given a mesh twice:
  - mesh=AbstractMesh('x': 4, axis_types=(Auto,))
  - double is under mw.jit
A function under mw.jit has the mesh that is given there.
Leave it out here, or give the function itself."""
    hinted = mw.jit(double, mesh=mesh_of(x=4))
    check(mw.ArgumentError, text, lambda: mw.plan(hinted, X, mesh=mesh_of(x=4)))


def test_nothing_fits():
    text = """double has no plan that fits:
  - max_bytes=1,000
  - the least found is 1,024
A device may hold so much at once, arguments included; 4 plans were compared.
Use more devices, recompute (jax.checkpoint), donate what is replaced, or allow more."""
    check(mw.MemoryLimitError, text, lambda: mw.plan(double, X, mesh=mesh_of(x=4), max_bytes=1000))


def test_no_mesh():
    with pytest.raises(mw.NoMeshError):
        mw.plan(double, X)
