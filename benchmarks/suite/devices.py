"""Eight CPU devices. Import this module before JAX is used: both read the environment once."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
from jax.sharding import AxisType, Mesh

AXES = ("x", "y", "z")


def make_mesh(shape: tuple[int, ...]) -> Mesh:
    """A mesh of eight devices with axes x, y, z."""
    return jax.make_mesh(shape, AXES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))
