"""What a person is told by `mw.plan` of what does not fit: every word of it."""

import jax
import jax.numpy as jnp
import pytest

import meshwise as mw
from tests.meshes import mesh_of
from tests.messages.exactly import check

X = jax.ShapeDtypeStruct((64, 8), jnp.float32)
LIMITS = """
They are whole numbers from one on, of bytes on a device and of plans compared; and seconds.
Leave max_bytes and budget_s out for no limit, most_tried for the default."""
CASES = {
    "no bytes": ({"max_bytes": 0}, " max_bytes=0"),
    "a text": ({"max_bytes": "16GB"}, " max_bytes='16GB'"),
    "a fraction of a plan": ({"most_tried": 0.5}, " most_tried=0.5"),
    "no number of plans": ({"most_tried": None}, " most_tried=None"),
    "no time": ({"budget_s": 0}, " budget_s=0"),
    "no number of seconds": ({"budget_s": "1 min"}, " budget_s='1 min'"),
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
  - mesh=AbstractMesh('data': 2, 'model': 4, 'stage': 2, axis_types=(Auto, Auto, Auto))
  - double is under mw.jit
A function under mw.jit has the mesh that is given there.
Leave it out here, or give the function itself."""
    mesh = mesh_of(data=2, model=4, stage=2)
    hinted = mw.jit(double, mesh=mesh)
    check(mw.ArgumentError, text, lambda: mw.plan(hinted, X, mesh=mesh))


def test_nothing_fits():
    text = """double has no plan that fits:
  - max_bytes=1,000
  - the least found is 1,024
A device may hold so much at once, arguments included; 4 plans compared.
Use more devices, recompute (jax.checkpoint), donate what is replaced, or allow more."""
    check(mw.MemoryLimitError, text, lambda: mw.plan(double, X, mesh=mesh_of(x=4), max_bytes=1000))


def test_nothing_fits_of_what_was_compared():
    text = """double has no plan that fits:
  - max_bytes=1,000
  - the least found is 4,096
A device may hold so much at once, arguments included; 1 plan compared.
Compare more plans (most_tried, budget_s), use more devices, recompute (jax.checkpoint), donate \
what is replaced, or allow more."""
    given = {"mesh": mesh_of(x=4), "max_bytes": 1000, "most_tried": 1}
    check(mw.MemoryLimitError, text, lambda: mw.plan(double, X, **given))


def test_no_mesh():
    with pytest.raises(mw.NoMeshError):
        mw.plan(double, X)


def test_a_schedule():
    text = """\
mw.plan was given a function with a schedule: double is under mw.jit(..., schedule=...)
Programs are compared as they are partitioned, before any is scheduled.
Plan it without, and give the schedule to mw.jit with the shardings found."""
    scheduled = mw.jit(double, mesh=mesh_of(x=4), schedule="auto")
    check(mw.ArgumentError, text, lambda: mw.plan(scheduled, X))


def test_inside_of_a_trace():
    text = """mw.plan was called while a function is traced: to plan double
It compares programs for arguments of known types; nothing of a trace is one.
Call it before, with jax.ShapeDtypeStruct for what is not there yet."""
    call = jax.jit(lambda x: mw.plan(double, x, mesh=mesh_of(x=4)).tried)
    check(mw.ArgumentError, text, lambda: call(jnp.ones((64, 8))))


@jax.tree_util.register_pytree_node_class
class OfArrays:
    def __init__(self, x):
        if not hasattr(x, "shape"):
            raise TypeError("x is no array")
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_classes_of_arrays_alone():
    text = """\
mw.plan cannot give the shardings of twice as trees: arguments: TypeError: x is no array
Shardings come in trees of the classes of arguments and results; a class whose constructor takes \
nothing but arrays refuses them.
Plan a function of the arrays themselves, or let the class take other leaves."""

    def twice(box):
        return box.x * 2

    check(mw.ArgumentError, text, lambda: mw.plan(twice, OfArrays(X), mesh=mesh_of(x=4)))
