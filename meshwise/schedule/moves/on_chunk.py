"""One equation on one of k equal chunks of its operands, by its factor rule.

A chunk is to an equation what a tile is, but that its number is given, not that of a device. So it
is computed as a tile over an axis `CHUNK` of k, and where the rule asks for the device's number
along it, for offsets of random bits or of an iota, the chunk's number is put.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Sharding
from meshwise.schedule.tiling import NotTileableError, Tiling, compute_tile

CHUNK = "overlap.chunk"


def chunk_mesh(mesh: Mesh, count: int) -> Mesh:
    """A mesh with the axis of chunks."""
    names, sizes = (*mesh.names, CHUNK), (*mesh.sizes, count)
    return Mesh(names, sizes, (*mesh.user_axes, (CHUNK, (CHUNK,))))


def cut_dim(tile: Sharding | None) -> int | None:
    """The dim that chunks cut."""
    return next((d for d, axes in enumerate(tile.dims) if axes), None) if tile else None


def compute_chunk(
    eqn: JaxprEqn, tiling: Tiling, operands: Sequence[Any], mesh: Mesh, number: Any
) -> list[jax.Array]:
    """The results of an equation on the chunks of a number of its operands.

    Raises `NotTileableError` where its rule asks for the number within a loop.
    """
    if not any(tiling.strategy.axes) or tiling.rule.local is None:
        return compute_tile(eqn, tiling, operands, mesh)
    return _numbered(lambda *xs: compute_tile(eqn, tiling, xs, mesh), operands, mesh, number)


def _numbered(
    function: Callable[..., Sequence[Any]], operands: Sequence[Any], mesh: Mesh, number: Any
) -> list[Any]:
    """A function of arrays, in which this device's number along `CHUNK` is a given one."""
    traced = [i for i, x in enumerate(operands) if isinstance(x, jax.Array)]

    def of_traced(*arrays: Any) -> Sequence[Any]:
        all_ = list(operands)
        for i, array in zip(traced, arrays, strict=True):
            all_[i] = array
        return function(*all_)

    arrays = [operands[i] for i in traced]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in arrays]
    closed = _jax.make_jaxpr_over_axes(of_traced, mesh.named_sizes, types)
    env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, arrays, strict=True))

    read = partial(_jax.value_in, env)

    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "axis_index" and eqn.params["axis_name"] in (CHUNK, (CHUNK,)):
            env[eqn.outvars[0]] = number
            continue
        _check_no_number(eqn)
        with _jax.at_source(eqn):
            results = _jax.bind(eqn, [read(a) for a in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in closed.jaxpr.outvars]


def _check_no_number(eqn: JaxprEqn) -> None:
    """A loop's body is left as it is, and so must not ask."""
    if any(CHUNK in str(body) for body in _jax.bodies_of(eqn)):
        raise NotTileableError(f"{eqn.primitive.name} counts elements in a loop of its own")
