"""`fused_all_reduce` and `matmul_reduce_scatter`: sums over devices and what is made of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, Literal
from meshwise._jax import pallas as pl
from meshwise._jax import pallas_tpu as pltpu
from meshwise.schedule.kernels import blocks as on_blocks
from meshwise.schedule.kernels.calling import VMEM_LIMIT_BYTES, Interpret, interpreter
from meshwise.schedule.kernels.fused import Fused, Product
from meshwise.schedule.kernels.passes import Env, Passes, passes_of
from meshwise.schedule.kernels.planning import MatmulSummand, chunk_of, plan
from meshwise.schedule.kernels.ring import Axis, barrier_of, ring_along
from meshwise.schedule.kernels.tiles import Tile

Computation = Callable[..., Any] | ClosedJaxpr


def fused_all_reduce(
    computation: Computation,
    summands: Sequence[Any],
    tiles: Sequence[Any] = (),
    wholes: Sequence[Any] = (),
    *,
    axis: Axis,
    gathered: Sequence[int | None],
    dim: int = 0,
    mesh_axes: Sequence[str] | None = None,
    pieces: int = 4,
    interpret: Interpret = None,
) -> list[Any]:
    """Sum over devices, compute on the chunk that this device holds, gather results: one kernel.

    To be called inside `jax.shard_map`, on local arrays, by all devices along `axis`. The same as

        chunks = [lax.psum_scatter(s, axis, scatter_dimension=dim, tiled=True) for s in summands]
        results = computation(*chunks, *tiles, *wholes)
        results = [r if g is None else lax.all_gather(r, axis, axis=g, tiled=True)
                   for r, g in zip(results, gathered)]

    Args:
        computation: a function, or a jaxpr, of this device's chunks of the sums, then `tiles`, then
            `wholes`. It may hold whatever can be done on blocks of rows (`kernels.ELEMENTWISE`
            and the rules of `kernels/blocks.py`), reductions over rows and other dims, and
            `psum`, `pmax`, `pmin` over `axis` of what such reductions result in.
        summands: arrays of the same shape but for their dtype, or `MatmulSummand`s (`dim` 0).
        tiles: arrays whose first dim goes with the first dim of the chunks; read in blocks.
        wholes: any other operands: scalars, biases. All of each is kept in fast memory.
        axis: one mesh axis, or several that make one ring, major to minor.
        gathered: for each result the dim along which it is gathered, or None to keep it as it is.
        dim: the dim along which the sums are scattered; -1 is the last, as in JAX.
        mesh_axes: the names of all mesh axes, where the caller traces outside of a mesh.
        pieces: into how many parts a chunk is cut so that some travel while others are computed.
        interpret: None is the kernel on a TPU and its interpreter elsewhere; False compiles the
            kernel whatever the machine; or `pltpu.InterpretParams`, to look for races.

    Returns:
        The results, in the computation's order.

    Raises:
        ValueError: where a kernel cannot do this; the message names the equation and the way out.
    """
    ring = ring_along(axis)
    summands = [s if isinstance(s, MatmulSummand) else jnp.asarray(s) for s in summands]
    tiles, wholes = [jnp.asarray(t) for t in tiles], [jnp.asarray(w) for w in wholes]
    chunks = [chunk_of(s, ring, dim) for s in summands]
    closed = _traced(computation, [*chunks, *tiles, *wholes])
    if ring.size == 1:
        sums = [_as_array(s) for s in summands]
        return _jax.jaxpr_as_fun(closed)(*sums, *tiles, *wholes)
    passes = passes_of(closed, len(summands) + len(tiles), ring.axis)
    env = passes.before(wholes)
    atoms = list(zip(passes.results, gathered, strict=True))
    inside = [(a, g) for a, g in atoms if g is not None or not passes.is_known_before(a)]
    passes = replace(passes, results=tuple(a for a, _ in inside))
    fused = plan(ring, passes, summands, wholes, dim, [g for _, g in inside], pieces)
    made = iter(_call(fused, summands, tiles, env, barrier_of(ring.axis, mesh_axes), interpret))
    return [next(made) if (a, g) in inside else _before(passes, a, env) for a, g in atoms]


def matmul_reduce_scatter(
    left: Any,
    right: Any,
    computation: Computation | None = None,
    tiles: Sequence[Any] = (),
    wholes: Sequence[Any] = (),
    *,
    axis: Axis,
    gathered: Sequence[int | None] | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    mesh_axes: Sequence[str] | None = None,
    pieces: int = 2,
    interpret: Interpret = None,
) -> Any:
    """`psum_scatter(left @ right, axis)` along dim 0, products and sums overlapped, in one kernel.

    Each device computes the chunk that the ring needs next while sums travel. With a `computation`
    of the chunk (and `tiles` and `wholes`) the same kernel goes on with it, and gathers what
    `gathered` says: then the list of its results is returned. Everything else as in
    `fused_all_reduce`.

    Args:
        left: (n * rows, inner), whose rows are all chunks.
        right: (inner, columns).
    """
    summand = MatmulSummand(left, right, precision, preferred_element_type)
    results = fused_all_reduce(
        computation or (lambda chunk: [chunk]),
        [summand],
        tiles,
        wholes,
        axis=axis,
        gathered=[None] if gathered is None else gathered,
        mesh_axes=mesh_axes,
        pieces=pieces,
        interpret=interpret,
    )
    return results if computation else results[0]


def _as_array(summand: Any) -> Any:
    if not isinstance(summand, MatmulSummand):
        return summand
    return jnp.dot(
        summand.left,
        summand.right,
        precision=summand.precision,
        preferred_element_type=summand.dtype,
    )


def _before(passes: Passes, atom: Any, env: Env) -> Any:
    """A result that needs no kernel."""
    value = on_blocks.literal(atom) if isinstance(atom, Literal) else env[atom]
    return on_blocks.spread(value, passes.blocks)


def _traced(computation: Computation, operands: Sequence[Any]) -> ClosedJaxpr:
    """The computation as a jaxpr, whose results are a list."""
    if isinstance(computation, ClosedJaxpr):
        return computation
    return jax.make_jaxpr(lambda *args: jax.tree.leaves(computation(*args)))(*operands)


def _call(
    fused: Fused,
    summands: Sequence[Any],
    tiles: Sequence[Any],
    env: Env,
    barrier: int,
    interpret: Interpret,
) -> list[Any]:
    """Store the operands as the kernel wants them, call it, restore the results."""
    given: list[list[Any]] = []
    for summand, known in zip(summands, fused.summands, strict=True):
        if isinstance(known, Product):
            given.append([known.left.store(summand.left), summand.right])
        else:
            given.append([known.store(summand)])
    own = [t.store(a) for t, a in zip(fused.tiles[len(summands) :], tiles, strict=True)]
    arrays = [env[v].array for v in fused.passes.kept()]
    kept = [a.astype(jnp.int32) if a.dtype == jnp.bool_ else a for a in arrays]
    results, _ = pl.pallas_call(
        fused.kernel,
        out_shape=fused.out_shape(),
        in_specs=fused.in_specs(),
        out_specs=fused.out_specs(),
        scratch_shapes=fused.scratch_shapes(),
        compiler_params=pltpu.CompilerParams(
            collective_id=barrier, vmem_limit_bytes=VMEM_LIMIT_BYTES, has_side_effects=True
        ),
        cost_estimate=fused.cost(),
        interpret=interpreter(interpret),
        name="fused_all_reduce",
    )(given, own, kept)
    return [_restored(fused, i, r) for i, r in enumerate(results)]


def _restored(fused: Fused, number: int, array: Any) -> Any:
    result = fused.gathered[number] or fused.results[number]
    if isinstance(result, Tile):
        return result.restore(array)
    aval = fused.passes.results[number].aval
    return array.reshape(aval.shape).astype(aval.dtype)
