"""What the simulator finds: padding that is seen, devices that differ; and what it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise.errors import MeshwiseError, ReplicationError
from meshwise.ir.mesh import refine_mesh
from meshwise.run.simulate import simulate
from tests.run.simulated import CUBE, MESH, numbers, sharding, trace

MODEL = ("model.0", "model.1")


@pytest.mark.parametrize("compiled", [True, False])
def test_disagreement_on_a_predicate(compiled):
    def function(x):
        both = ("x", "y")
        return [lax.cond(lax.axis_index("x") < 1, lambda v: lax.psum(v, both), lambda v: v, x)]

    places = sharding("x y z")
    with pytest.raises(ReplicationError) as caught:
        jaxpr = trace(function, CUBE, (1,))
        simulate(jaxpr, CUBE, [places], [places], [(8,)], [numbers(8)], compiled=compiled)
    lines = str(caught.value).splitlines()
    assert re.fullmatch(
        r"Devices disagree on the predicate of cond at .*test_simulate_differing\.py:\d+:", lines[0]
    )
    assert lines[1:] == [
        "  - (x=0): 1",
        "  - (x=1): 0",
        "Its body holds collectives along axes over which it differs, or permutes (for which all"
        " devices meet), which devices must run in the same order; on real devices this program"
        " would hang or give wrong numbers.",
        "Compute the predicate from values that are replicated, or reduce it with psum or pmax"
        " first.",
    ]


def test_all_devices_meet_for_a_permute():
    """Those in other branches too, whatever axes it is over."""

    def function(x):
        def sent(v):
            return lax.ppermute(v, "y", [(0, 1), (1, 0)])

        return [lax.cond(lax.axis_index("x") < 1, sent, lambda v: v, x)]

    places = sharding("x y z")
    with pytest.raises(ReplicationError, match="on the predicate of cond"):
        jaxpr = trace(function, CUBE, (1,))
        simulate(jaxpr, CUBE, [places], [places], [(8,)], [numbers(8)])


def test_disagreement_on_a_trip():
    def function(x):
        return [lax.fori_loop(0, lax.axis_index("y") + 2, lambda i, v: lax.psum(v, both), x)]

    both, places = ("x", "y"), sharding("x y z")
    with pytest.raises(ReplicationError, match="on the predicate of while") as caught:
        jaxpr = trace(function, CUBE, (1,))
        simulate(jaxpr, CUBE, [places], [places], [(8,)], [numbers(8)])
    assert str(caught.value).splitlines()[1:3] == ["  - (y=0): False", "  - (y=1): True"]


def test_padding_is_garbage():
    def function(*values):
        return [jnp.concatenate([v, v]) for v in values]

    dtypes = [np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_, np.complex64]
    places = [sharding("x")] * len(dtypes)
    args = [np.zeros(3, d) for d in dtypes]
    jaxpr = trace(function, CUBE, *(jax.ShapeDtypeStruct((2,), d) for d in dtypes))
    got = simulate(jaxpr, CUBE, places, places, [(8,)] * len(dtypes), args)
    pads = [np.nan, np.nan, 2**31 - 1, 255, True, np.nan]
    for g, d, pad in zip(got, dtypes, pads, strict=True):
        wanted = np.zeros(8, d)
        wanted[[5, 7]] = pad
        wide = np.complex64 if d is np.complex64 else np.float32
        np.testing.assert_array_equal(np.asarray(g).astype(wide), wanted.astype(wide))


def test_padding_of_keys_and_of_zero_rows():
    keys = jax.random.split(jax.random.key(0), 3)
    jaxpr = trace(lambda k: [k], CUBE, jax.eval_shape(lambda: keys[:2]))
    places = [sharding("x")]
    (got,) = simulate(jaxpr, CUBE, places, places, [(4,)], [keys])
    assert (got[:3] == keys).all()
    assert (np.asarray(jax.random.key_data(got))[3] == 2**32 - 1).all()
    jaxpr = trace(lambda x: [x.sum(1), x], CUBE, (0, 2))
    ins, outs = [sharding("x", "y")], [sharding("x"), sharding("x", "y")]
    got = simulate(jaxpr, CUBE, ins, outs, [(0,), (0, 3)], [np.zeros((0, 3), np.float32)])
    assert [g.shape for g in got] == [(0,), (0, 3)]


def test_padding_of_copies_is_not_compared():
    def function(x):
        return [jnp.where(jnp.arange(2) + 2 * lax.axis_index("x") < 3, x, lax.axis_index("y"))]

    jaxpr = trace(function, CUBE, jax.ShapeDtypeStruct((2,), jnp.int32))
    places = [sharding("x")]
    (got,) = simulate(jaxpr, CUBE, places, places, [(3,)], [np.arange(3, dtype=np.int32)])
    np.testing.assert_array_equal(got, [0, 1, 2])


def differing(function, out, shape, mesh=MESH):
    places = sharding("data")
    with pytest.raises(ReplicationError) as caught:
        x = np.arange(2, dtype=np.float32)
        simulate(trace(function, mesh, (1,)), mesh, [places], [out], [shape], [x])
    return str(caught.value)


def test_error_names_result_axes_devices_and_size():
    assert differing(lambda x: [x * 3], sharding(""), (1,)) == (
        "Results that should be replicated differ between devices: result 0 (1,), sharded [-],"
        " differs along data: devices (data=1) differ from (data=0); first at [0]: 0.0 and 3.0;"
        " largest difference 3\n"
        "A result must be the same, bit for bit, on all devices that differ only along axes its"
        " sharding does not name. JAX would show one device's copy and the others would go on with"
        " theirs.\n"
        "A reduction over these axes is missing, or the value was computed from something that is"
        " each device's own (its index, its shard, its padding)."
    )


def test_error_shows_the_axes_that_matter():
    text = differing(lambda x: [x * 0 + lax.axis_index("model.1")], sharding("data"), (2,))
    assert "sharded [data], differs along model.1: devices (model.1=1) differ from" in text
    text = differing(lambda x: [x * 0 + lax.axis_index(MODEL)], sharding("data"), (2,))
    assert "differs along model: devices (model=1), (model=2), (model=3) differ from" in text
    big = refine_mesh(("a", "b"), (2, 32))
    subs = big.sub_axes["b"]
    out, shape = sharding("a"), (2,)
    with pytest.raises(ReplicationError, match=r"\(b=8\) and 23 more differ from \(b=0\)"):
        jaxpr = trace(lambda x: [x + lax.axis_index(subs)], big, (1,))
        simulate(jaxpr, big, [out], [out], [shape], [np.zeros(2, np.float32)])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.0, -0.0), "0.0 and -0.0; largest difference 0"),
        ((np.nan, 1.0), "nan and 1.0; one of them is not a number"),
        ((1, 2), "1 and 2; largest difference 1"),
        ((True, False), "True and False; 1 elements differ"),
        ((1 + 0j, 1 + 2j), r"\(1\+0j\) and \(1\+2j\); largest difference 2"),
    ],
)
def test_bits_matter(values, words):
    def function(x):
        return [jnp.where(lax.axis_index("x") == 0, *map(jnp.asarray, values)) + x]

    if isinstance(values[0], bool):
        x = np.zeros((), bool)
        jaxpr = trace(lambda x: [(lax.axis_index("x") == 0) ^ x], CUBE, x)
    elif values[1] == 0:
        x = np.ones((), np.float32)
        jaxpr = trace(lambda x: [x * jnp.where(lax.axis_index("x") == 0, 0.0, -0.0)], CUBE, x)
    else:
        x = np.zeros((), np.asarray(values[0]).dtype.name.replace("64", "32").replace("128", "64"))
        x = x.astype(np.complex64) if isinstance(values[0], complex) else x
        jaxpr = trace(function, CUBE, x)
    with pytest.raises(ReplicationError, match=words):
        simulate(jaxpr, CUBE, [sharding()], [sharding()], [()], [x])


def test_every_nan_is_the_same():
    def function(x):
        return [jnp.where(lax.axis_index("x") == 0, jnp.nan, -jnp.nan) + x]

    jaxpr = trace(function, CUBE, ())
    (got,) = simulate(jaxpr, CUBE, [sharding()], [sharding()], [()], [np.float32(0)])
    assert np.isnan(got)


def test_two_results_are_named_at_once():
    places = sharding("data")
    jaxpr = trace(lambda x: [x, x + 1, lax.psum(x, "data")], MESH, (1,))
    whole = sharding("")
    with pytest.raises(ReplicationError) as caught:
        simulate(
            jaxpr,
            MESH,
            [places],
            [whole] * 3,
            [(1,)] * 3,
            [np.arange(2, dtype=np.float32)],
            out_names=["loss", "grads['w']", "fine"],
        )
    assert "\n  - loss (1,)," in str(caught.value)
    assert "\n  - grads['w'] (1,)," in str(caught.value)
    assert "fine" not in str(caught.value)


def test_index_groups_and_unknown_collectives_are_refused():
    places = sharding("x")
    jaxpr = trace(lambda x: [lax.pbroadcast(x, "x", 0)], CUBE, (1,))
    with pytest.raises(MeshwiseError, match="does not know the collective pbroadcast"):
        simulate(jaxpr, CUBE, [places], [places], [(2,)], [numbers(2)])
    jaxpr = trace(lambda x: [lax.psum(x, "x", axis_index_groups=[[0], [1]])], CUBE, (1,))
    with pytest.raises(MeshwiseError, match="takes no axis_index_groups, as psum has"):
        simulate(jaxpr, CUBE, [places], [places], [(2,)], [numbers(2)])
    jaxpr = trace(lambda x: [lax.psum(x, "data")], MESH, (1,))
    with pytest.raises(MeshwiseError, match=r"psum is over \['data'\], the mesh has \['x', 'y'"):
        simulate(jaxpr, CUBE, [places], [places], [(2,)], [numbers(2)])
