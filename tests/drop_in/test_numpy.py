"""The array API through `mw.jit` with inputs sharded at random, beside one device.

The tables draw arguments, the sweep draws meshes and shardings; a failure names the row and the
seed that repeat it: `python -m tests.drop_in.sweep --only ROW --seeds SEED:SEED+1`.
"""

import importlib
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.sweep import check
from tests.drop_in.tables import ROWS

# What has no row, with the reason.
NO_ROW = {
    "no function of arrays": (
        "array_repr array_str broadcast_shapes can_cast einsum_path isdtype issubdtype iterable"
        " get_printoptions printoptions set_printoptions promote_types result_type dtype"
        " ConvGeneralDilatedDimensionNumbers DotDimensionNumbers PrecisionLike shape_as_value"
        " conv_dimension_numbers conv_general_permutations conv_general_shape_tuple"
        " conv_shape_tuple conv_transpose_shape_tuple padtype_to_pads reduce_window_shape_tuple"
        " get_scaled_dot_general_config key_dtype key_impl"
    ),
    "reads or writes files and buffers": (
        "from_dlpack frombuffer fromfile fromiter fromstring load save savez"
    ),
    "its numbers are undefined": "empty empty_like",
    "a collective, or of a manual region": (
        "all_gather all_to_all axis_index axis_size pbroadcast pcast pmax pmean pmin ppermute precv"
        " psend pshuffle psum psum_scatter pswapaxes ragged_all_to_all"
    ),
    "of tokens and effects": "after_all create_token dce_sink stage",
    "jnp's function of this name has one": "full broadcast_like",
    "says where arrays lie": "with_sharding_constraint",
    "has no lowering for the CPU": "scaled_dot scaled_dot_general scaled_matmul",
}
MODULES = {
    "jnp": "jax.numpy", "linalg": "jax.numpy.linalg", "fft": "jax.numpy.fft", "lax": "jax.lax",
    "lax.linalg": "jax.lax.linalg", "nn": "jax.nn", "nn.initializers": "jax.nn.initializers",
    "special": "jax.scipy.special", "scipy.linalg": "jax.scipy.linalg",
    "signal": "jax.scipy.signal", "ndimage": "jax.scipy.ndimage", "scipy.fft": "jax.scipy.fft",
    "random": "jax.random", "image": "jax.image", "ops": "jax.ops",
}  # fmt: skip
SAMPLE = list(ROWS)[3::40]
# Calls that were wrong once.
FOUND = [
    ("jnp.transpose", 0),  # XLA refused an all_to_all of a piece that is padding
    ("jnp.sin", 0),  # a result without elements, sharded
    ("lax.rev", 1),
    ("jnp.swapaxes", 0),
    ("scipy.linalg.solve", 1),  # functions of a linear solve are a named tuple
]


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="the tables list the functions of JAX 0.10"
)
@pytest.mark.parametrize("prefix", MODULES)
def test_every_public_function_has_a_row(prefix):
    module = importlib.import_module(MODULES[prefix])
    left_out = " ".join(NO_ROW.values()).split()
    heads = {name.split(" ")[0] for name in ROWS}
    missing = [
        name
        for name, found in vars(module).items()
        if callable(found) and not isinstance(found, type | types.ModuleType)
        if not name.startswith("_") and name not in left_out
        if not {f"{prefix}.{name}", f"jnp.{prefix}.{name}"} & heads
    ]
    assert not missing


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name):
    assert check(name, 0) is None


@pytest.mark.parametrize(("name", "seed"), FOUND)
def test_what_was_wrong_once(name, seed):
    assert check(name, seed) is None


def test_what_was_wrong_once_in_64_bits():
    with jax.enable_x64(True):
        assert check("jnp.vsplit", 2) is None  # places of rows counted in 64 bits


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_row(name):
    for seed in range(2):
        assert check(name, seed) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_row_in_64_bits(name):
    with jax.enable_x64(True):
        assert check(name, 2) is None


def test_a_piece_that_is_padding_is_exchanged():
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("x", "y"))
    step = mw.jit(
        lambda x: x.transpose(2, 1, 0), mesh=mesh, in_shardings=P("x", None, "y"),
        out_shardings=P("x"))  # fmt: skip
    x = np.random.default_rng(0).normal(size=(3, 2, 1)).astype(np.float32)
    np.testing.assert_array_equal(step(x), x.transpose(2, 1, 0))
