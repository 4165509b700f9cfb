"""Which devices take a branch, or another trip of a loop, and whether they must do so together.

`part` says of every device whether it takes part at all; None is all of them. What others would say
is not asked: their values are those of a branch that they do not take.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshwise import _jax
from meshwise.errors import ReplicationError, message
from meshwise.ir.mesh import Axes, Mesh
from meshwise.run.stacked import Stacked, expand, join_axes


def taking_part(
    value: Stacked, part: Stacked | None, mesh: Mesh, wanted: int = 1
) -> Stacked | None:
    """Which devices have this value of a concrete scalar; None where all do."""
    axes = join_axes([value] if part is None else [value, part], mesh)
    takes = np.asarray(expand(value, axes, mesh).array) == wanted
    if part is not None:
        takes = takes & np.asarray(expand(part, axes, mesh).array)
    return None if takes.all() else Stacked(takes, axes)


def varies(value: Stacked, part: Stacked | None, mesh: Mesh) -> Axes | None:
    """The axes along which neighbours differ in a concrete scalar; None where all agree."""
    axes, grid, takes = _told(value, part, mesh)
    grid = grid.astype(np.int64)
    if len(np.unique(grid[takes])) < 2:
        return None
    most, least = np.where(takes, grid, grid.min()), np.where(takes, grid, grid.max())
    return tuple(a for i, a in enumerate(axes) if (most.max(i) > least.min(i)).any())


def agreed(value: Stacked, part: Stacked | None, eqn: _jax.JaxprEqn, mesh: Mesh) -> Any:
    """The one value of a concrete scalar that all devices that take part must agree on."""
    axes, grid, takes = _told(value, part, mesh)
    places = list(zip(*np.nonzero(takes), strict=True)) if axes else [()]
    values = [grid[place] for place in places] if takes.any() else [grid.min()]
    if len(set(values)) == 1:
        return values[0]
    raise ReplicationError(
        message(
            f"Devices disagree on the predicate of {eqn.primitive.name}"
            f" at {_jax.source_summary(eqn)}",
            [
                f"({', '.join(f'{a}={i}' for a, i in zip(axes, place, strict=True))}): {v}"
                for place, v in zip(places, values, strict=True)
            ],
            "Its body holds collectives along axes over which it differs, or permutes (for which"
            " all devices meet), which devices must run in the same order; on real devices this"
            " program would hang or give wrong numbers.",
            "Compute the predicate from values that are replicated, or reduce it with"
            " psum or pmax first.",
        )
    )


def own_branch(index: Stacked, results: Sequence[Stacked], mesh: Mesh) -> Stacked:
    """For each device the result of the branch that its index says; as `lax.switch` clamps it."""
    axes = join_axes([index, *results], mesh)
    chosen = jnp.clip(expand(index, axes, mesh).array.astype(jnp.int32), 0, len(results) - 1)
    first, *others = [expand(result, axes, mesh).array for result in results]
    chosen = jnp.reshape(chosen, (-1,) + (1,) * (first.ndim - 1))
    for number, other in enumerate(others, 1):
        first = jnp.where(chosen == number, other, first)
    return Stacked(first, axes)


def _told(value: Stacked, part: Stacked | None, mesh: Mesh) -> tuple[Axes, np.ndarray, np.ndarray]:
    """A concrete scalar of all devices, and whether each takes part: grids over axes."""
    taking = Stacked(np.ones((), bool)) if part is None else part
    axes = join_axes([value, taking], mesh)
    sizes = [mesh.axis_size[a] for a in axes]
    grids = [np.asarray(expand(v, axes, mesh).array).reshape(sizes) for v in (value, taking)]
    return axes, grids[0], grids[1]
