"""The mesh of small programs on real devices."""

import pytest
from jax.sharding import AxisType, Mesh

from tests.run.executables import make_mesh


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """Two by four devices, data and model, of either type of axes."""
    return make_mesh(request.param)
