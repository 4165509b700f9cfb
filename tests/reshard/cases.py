"""Meshes, shardings and values to reshard, and what every device must hold."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.ir.mesh import Mesh, refine_mesh
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.reshard.emit import apply_steps
from meshwise.reshard.plan import Reshard, ReshardPlan
from meshwise.reshard.search import plan_reshard

Pair = tuple[Sharding, Sharding]

MESHES = {
    "2x4": refine_mesh(("x", "y"), (2, 4)),
    "4x2": refine_mesh(("x", "y"), (4, 2)),
    "2x2x2": refine_mesh(("x", "y", "z"), (2, 2, 2)),
    "2x3": refine_mesh(("x", "y"), (2, 3)),
    "8": refine_mesh(("x",), (8,)),
}


def all_shardings(mesh: Mesh, rank: int) -> Iterator[Sharding]:
    """Every sharding of a rank over the prime axes of a mesh, in every order."""
    for count in range(len(mesh.names) + 1):
        for axes in itertools.permutations(mesh.names, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                ends = (0, *cuts, count)
                yield Sharding(tuple(axes[a:b] for a, b in itertools.pairwise(ends)))


def user_shardings(mesh: Mesh, rank: int) -> Iterator[Sharding]:
    """Every sharding of a rank over whole axes of the user's mesh."""
    for sharding in all_shardings(mesh, rank):
        if all(mesh.restore(axes) is not None for axes in sharding.dims):
            yield sharding


def device_indices(mesh: Mesh) -> Iterator[dict[str, int]]:
    """The index of each device along each axis, in the mesh's order."""
    for place in itertools.product(*map(range, mesh.sizes)):
        yield dict(zip(mesh.names, place, strict=True))


def rows(
    n: int, axes: Sequence[str], mesh: Mesh, index: dict[str, int], turned: Sequence[str] = ()
) -> slice:
    """Rows of a dim that a device holds; no padding."""
    block = -(-n // mesh.size(axes))
    shard = 0
    for axis in axes:
        last = mesh.axis_size[axis] - 1
        shard = shard * (last + 1) + (last - index[axis] if axis in turned else index[axis])
    return slice(min(shard * block, n), min((shard + 1) * block, n))


def shards(value: np.ndarray, sharding: Sharding, mesh: Mesh, fill: float = 99) -> np.ndarray:
    """What each device holds of a value, padding filled: [devices, *local]."""
    local = local_shape(value.shape, sharding, mesh)
    out = np.full((mesh.device_count, *local), fill, value.dtype)
    for device, index in enumerate(device_indices(mesh)):
        held = [
            rows(n, axes, mesh, index, sharding.turned)
            for n, axes in zip(value.shape, sharding.dims, strict=True)
        ]
        piece = value[tuple(held)]
        out[(device, *(slice(n) for n in piece.shape))] = piece
    return out


def program_of(plans: Sequence[ReshardPlan], mesh: Mesh) -> Any:
    """Plans on real devices, all in one program, jitted: [devices, *local] in and out."""
    devices = np.array(jax.devices()[: mesh.device_count]).reshape(mesh.sizes)
    jax_mesh = jax.sharding.Mesh(devices, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))

    def body(*xs: jax.Array) -> tuple[jax.Array, ...]:
        pairs = zip(xs, plans, strict=True)
        return tuple(apply_steps(x[0], plan, mesh)[None] for x, plan in pairs)

    spec = P(mesh.names)
    f = jax.shard_map(body, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(f)


def run_plans(
    values: Sequence[np.ndarray], plans: Sequence[ReshardPlan], mesh: Mesh
) -> list[np.ndarray]:
    """Each plan on real devices, all in one program: [devices, *local] in and out."""
    outs = program_of(plans, mesh)(*values)
    is_key = [jax.numpy.issubdtype(y.dtype, jax.dtypes.prng_key) for y in outs]
    return [
        np.asarray(jax.random.key_data(y) if key else y)
        for y, key in zip(outs, is_key, strict=True)
    ]


def check_values(
    shape: Sequence[int], pairs: Sequence[Pair], mesh: Mesh, hardware: Hardware = GENERIC
) -> None:
    """Reshard a value between each pair on real devices and compare what each device holds."""
    shape = tuple(shape)
    value = np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)
    plans = [plan_reshard(Reshard(shape, 4, mesh, s, t, hardware)) for s, t in pairs]
    outs = run_plans([shards(value, s, mesh) for s, _ in pairs], plans, mesh)
    for plan, out in zip(plans, outs, strict=True):
        wanted = shards(value, plan.target, mesh, fill=0)
        assert out.shape == wanted.shape, plan
        np.testing.assert_array_equal(np.where(wanted == 0, 0, out), wanted, err_msg=str(plan))
