"""What a program does beside its results is done as often under `simulate` as in a call."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.run.simulate import simulate
from tests.meshes import mesh_of
from tests.run.simulated import CUBE, sharding, trace

X = np.arange(16, dtype=np.float32).reshape(8, 2)
SCALAR = jax.ShapeDtypeStruct((), np.float32)


def asked(log, **options):
    def host(total):
        log.append(float(total))
        return np.float32(len(log))

    return lambda x: x * io_callback(host, SCALAR, x.sum(), **options)


def noted(log):
    def note(total):
        log.append(float(total))

    return lambda x: (jax.debug.callback(note, x.sum()), x + 1)[1]


FUNCTIONS = {
    "io": asked,
    "io in order": lambda log: asked(log, ordered=True),
    "io in a scan": lambda log: lambda x: lax.scan(lambda c, r: (asked(log)(c + r), r), x[0], x)[0],
    "a print": noted,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "stepped"])
def test_the_host_is_called_as_often_as_by_one_device(name, compiled):
    called, log = [], []
    wanted = FUNCTIONS[name](called)(X)
    fn = mw.jit(FUNCTIONS[name](log), mesh=mesh_of(x=8), in_shardings=P("x"))
    p = fn.partition(X).per_device
    (got,) = simulate(
        p.jaxpr, p.mesh, p.in_shardings, p.out_shardings, [wanted.shape], [X], compiled=compiled
    )
    jax.effects_barrier()
    np.testing.assert_array_equal(got, wanted)
    assert log == called


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "stepped"])
def test_a_device_does_what_its_branch_says(compiled):
    """Beside a collective over axes along which all take the same branch."""
    log = []

    def function(x):
        def told(v):
            v = lax.psum(v, "y")
            return asked(log)(v) * 0 + v

        return [lax.cond(lax.axis_index("x") < 1, told, lambda v: v, x)]

    places = sharding("x y z")
    args = [np.arange(8, dtype=np.float32)]
    jaxpr = trace(function, CUBE, (1,))
    simulate(jaxpr, CUBE, [places], [places], [(8,)], args, compiled=compiled)
    jax.effects_barrier()
    assert sorted(log) == [2, 2, 4, 4]
