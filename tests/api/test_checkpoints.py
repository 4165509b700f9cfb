"""State whose dims do not divide, written and read by Orbax: on the same mesh and on others."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

W = np.arange(61 * 4, dtype=np.float32).reshape(61, 4)
SPECS = {"w": P("model"), "v": P("data"), "step": P()}


def state_on(mesh):
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return mw.reshard({"w": W, "v": W[:8] + 1, "step": jnp.int32(3)}, places)


def types_on(mesh):
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, x in {"w": W, "v": W[:8], "step": jnp.int32(3)}.items()
    }


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (8, 1)])
def test_what_is_written_is_read_on_any_mesh(tmp_path, sizes, mesh2x4):
    mesh2x4 = jax.sharding.Mesh(mesh2x4.devices, ("data", "model"))
    state = state_on(mesh2x4)
    types = types_on(jax.sharding.Mesh(mesh2x4.devices.reshape(sizes), ("data", "model")))
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "state", mw.padded(state))
        checkpoints.wait_until_finished()
        read = checkpoints.restore(tmp_path / "state", mw.padded(types), strict=False)
    read = mw.unpadded(read, types)
    jax.tree.map(np.testing.assert_array_equal, read, state)
    assert {n: x.sharding for n, x in read.items()} == {n: t.sharding for n, t in types.items()}
    assert isinstance(read["w"], mw.UnevenArray) == (sizes[1] > 1)


def test_on_the_same_mesh_the_state_says_what_is_read(tmp_path, mesh2x4):
    state = state_on(jax.sharding.Mesh(mesh2x4.devices, ("data", "model")))
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "state", mw.padded(state))
        checkpoints.wait_until_finished()
        read = mw.unpadded(checkpoints.restore(tmp_path / "state", mw.padded(state)), state)
    jax.tree.map(np.testing.assert_array_equal, read, state)
    assert read["w"].padded.sharding == state["w"].padded.sharding


def test_other_leaves_stay_as_they_are():
    whole = jax.ShapeDtypeStruct((17,), "float32")
    tree = {"number": 3, "host": W, "nothing": None, "whole": whole, "on one": jnp.ones(3)}
    assert all(mw.padded(tree)[name] is tree[name] for name in tree)
    assert mw.unpadded(tree, tree)["on one"] is tree["on one"]
    step = jnp.int32(3)
    assert mw.unpadded(step, 3) is step


def test_what_was_padded_for_another_mesh_is_refused(mesh8):
    like = jax.ShapeDtypeStruct((17,), "float32", sharding=NamedSharding(mesh_of(x=4), P("x")))
    held = jax.device_put(jnp.ones(24), NamedSharding(mesh8, P(mesh8.axis_names[0])))
    assert mw.padded(like).shape == (20,)
    assert mw.unpadded(held, like).shape == (17,)
    with pytest.raises(mw.ArgumentError, match="dim 0 of size 9 over 8 devices is padded to 16"):
        mw.unpadded(held, jnp.ones(9))


def test_what_is_not_padded_as_said_is_named():
    rows = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    held = jax.device_put(jnp.zeros((24, 2)), rows)
    like = [jax.ShapeDtypeStruct((n, 2), "float32") for n in (15, 17, 24, 17)]
    with pytest.raises(mw.ArgumentError) as raised:
        mw.unpadded({"a": [held, held, held, np.zeros((24, 2))]}, {"a": like})
    assert "tree['a'][0]: dim 0 of size 15" in str(raised.value)
    assert "tree['a'][3]: it is sharded by a NamedSharding, not by None" in str(raised.value)
    assert str(raised.value).count("\n  - ") == 2
    with pytest.raises(mw.TreeError, match="not alike"):
        mw.unpadded({"a": held}, {"b": held})
