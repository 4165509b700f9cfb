"""Kernels run in the TPU interpreter on CPU devices, with a watch for races."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, PartitionSpec

WATCHED = pltpu.InterpretParams(detect_races=True)


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the first CPU devices."""
    count = int(np.prod(list(axes.values())))
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=jax.devices()[:count])


def run(
    function: Callable[..., Any],
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
    *args: Any,
) -> Any:
    """The results of a per-device function that calls kernels, as numpy arrays."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
    )
    pltpu.reset_tpu_interpret_mode_state()
    try:
        results = jax.jit(mapped)(*args)
        return jax.tree.map(np.asarray, results)
    finally:
        jax.effects_barrier()


def races_found() -> bool:
    """Whether the last run raced; it must have been with `WATCHED`."""
    assert interpreter.races is not None, "the last run did not look for races"
    return interpreter.races.races_found


def races(kernel: Callable[[], Any]) -> bool:
    """Whether a kernel that is interpreted with `WATCHED` races; since 0.12 JAX says so at once."""
    try:
        kernel()
    except (jax.errors.JaxRuntimeError, ExceptionGroup) as error:
        assert "RACE DETECTED" in "".join(traceback.format_exception(error))
        return True
    return races_found()


def run_without_races(*args: Any) -> Any:
    """As `run`, of kernels that are interpreted with `WATCHED`; fails where one raced."""
    results = run(*args)
    assert not races_found()
    return results
