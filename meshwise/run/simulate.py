"""Run a per-device program for many pretended devices on one real device.

Inputs are cut as on real devices. Where a dim does not divide, the padding at its end is filled
with what should never be seen: NaN, the largest integer, True. A program that forgets a mask
gives wrong numbers here, not only on an unlucky day.

Law 3 is checked on every result: devices that differ only along axes that a result is replicated
over must hold the same bits (any NaN equals any other).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise import _jax
from meshwise.errors import ReplicationError, message
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import Sharding, padded_shape
from meshwise.run.interpret import Interpreter, PredicateVariesError
from meshwise.run.placement import off_mesh
from meshwise.run.stacked import Stacked, expand, join_axes

_LISTED_DEVICES = 8


def simulate(
    jaxpr: _jax.ClosedJaxpr,
    mesh: Mesh,
    in_shardings: Sequence[Sharding],
    out_shardings: Sequence[Sharding],
    out_shapes: Sequence[Sequence[int]],
    args: Sequence[Any],
    *,
    out_names: Sequence[str] | None = None,
    compiled: bool = True,
) -> list[jax.Array]:
    """Global results of a per-device jaxpr on global arguments; see `simulator`."""
    run = simulator(
        jaxpr, mesh, in_shardings, out_shardings, out_shapes, out_names=out_names, compiled=compiled
    )
    return run(args)


def simulator(
    jaxpr: _jax.ClosedJaxpr,
    mesh: Mesh,
    in_shardings: Sequence[Sharding],
    out_shardings: Sequence[Sharding],
    out_shapes: Sequence[Sequence[int]],
    *,
    out_names: Sequence[str] | None = None,
    compiled: bool = True,
) -> Callable[[Sequence[Any]], list[jax.Array]]:
    """A function from global arguments to global results, both without padding.

    `jaxpr` maps local arrays to local arrays, with collectives over axes of `mesh`; `out_shapes`
    are global. With `compiled`, the whole is one XLA program, made in the first call; without,
    each equation is dispatched by itself, so that a debugger can follow and errors name lines.
    """
    names = out_names or [f"result {i}" for i in range(len(out_shardings))]
    outputs = [
        _Output(name, sharding, tuple(shape))
        for name, sharding, shape in zip(names, out_shardings, out_shapes, strict=True)
    ]
    traced = Interpreter(mesh, is_stepped=False)
    stepped = Interpreter(mesh, is_stepped=True)
    jaxpr = _jax.at_wide_positions(off_mesh(jaxpr))
    whole = jax.jit(lambda values: traced.run(jaxpr, values))

    def run(args: Sequence[Any]) -> list[jax.Array]:
        with _jax.without_mesh():
            return simulated(args)

    def simulated(args: Sequence[Any]) -> list[jax.Array]:
        values = [
            cut(arg, sharding, mesh, aval.dtype)
            for arg, sharding, aval in zip(args, in_shardings, jaxpr.in_avals, strict=True)
        ]
        results = None
        if compiled:
            try:
                results = whole(values)
            except PredicateVariesError:  # it may still agree: look at the values
                results = None
        if results is None:
            results = stepped.run(jaxpr, values)
        return _checked(results, outputs, mesh)

    return run


def cut(array: Any, sharding: Sharding, mesh: Mesh, dtype: Any) -> Stacked:
    """Shards of a global array, padding filled with garbage: `[devices, *local]`."""
    kind = None
    if jnp.issubdtype(dtype, _jax.extended):
        keys = jnp.asarray(array)
        kind, array = jax.random.key_impl(keys), jax.random.key_data(keys)
    host = np.asarray(array) if kind else np.asarray(array, dtype)
    logical = host.shape[: len(sharding.dims)]
    inner = host.shape[len(logical) :]
    padded = padded_shape(logical, sharding, mesh)
    if padded != logical:
        widths = [(0, p - n) for p, n in zip(padded, logical, strict=True)] + [(0, 0)] * len(inner)
        host = np.pad(host, widths, constant_values=_garbage(host.dtype))
    axes = tuple(a for a in mesh.names if a in sharding.used_axes)
    grid = host.reshape([*_split_sizes(padded, sharding, mesh), *inner])
    split_axes = _split_axes(sharding)
    order = [split_axes.index(a) for a in axes]
    order += [i for i, a in enumerate(split_axes) if a is None]
    grid = grid.transpose([*order, *range(len(order), grid.ndim)])
    local = grid.shape[len(axes) :]
    stacked = grid.reshape([mesh.size(axes), *local] if axes else local)
    if dtype == jax.dtypes.float0:
        return Stacked(stacked, axes)
    on_device = jnp.asarray(stacked)
    return Stacked(jax.random.wrap_key_data(on_device, impl=kind) if kind else on_device, axes)


def _garbage(dtype: np.dtype) -> Any:
    if dtype in (jax.dtypes.float0, np.bool_):
        return np.ones((), dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).max, dtype)
    return np.asarray(np.nan, dtype)


def _split_axes(sharding: Sharding) -> list[str | None]:
    """For the dims of a global array, each split over its axes: the axis, None for local dims."""
    return [part for axes in sharding.dims for part in (*axes, None)]


def _split_sizes(padded: Sequence[int], sharding: Sharding, mesh: Mesh) -> list[int]:
    sizes: list[int] = []
    for size, axes in zip(padded, sharding.dims, strict=True):
        sizes += [mesh.axis_size[a] for a in axes]
        sizes.append(size // mesh.size(axes))
    return sizes


@dataclass(frozen=True)
class _Output:
    """One result: how it is called, how it lies, and its global shape."""

    name: str
    sharding: Sharding
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Copies:
    """A result as every group of devices that should hold all of it sees it."""

    array: np.ndarray  # [copies, *global shape, *parts of a key]
    axes: Axes  # the axes that tell the copies apart


def _checked(results: Sequence[Stacked], outputs: Sequence[_Output], mesh: Mesh) -> list[jax.Array]:
    """Global arrays, or an error that names every result whose copies differ."""
    arrays = []
    offenders: list[str] = []
    for result, output in zip(results, outputs, strict=True):
        kind = None
        raw = result
        if jnp.issubdtype(result.array.dtype, _jax.extended):
            kind = jax.random.key_impl(result.array)
            raw = Stacked(jax.random.key_data(result.array), result.axes)
        copies = _assemble(raw, output, mesh)
        offenders += _differences(copies, output, mesh)
        first = copies.array[0]
        if first.dtype != jax.dtypes.float0:
            first = jnp.asarray(first)
        arrays.append(jax.random.wrap_key_data(first, impl=kind) if kind else first)
    if offenders:
        raise ReplicationError(
            message(
                "Results that should be replicated differ between devices",
                offenders,
                "A result must be the same, bit for bit, on all devices that differ only along"
                " axes its sharding does not name. JAX would show one device's copy and the"
                " others would go on with theirs.",
                "A reduction over these axes is missing, or the value was computed from something"
                " that is each device's own (its index, its shard, its padding).",
            )
        )
    return arrays


def _assemble(result: Stacked, output: _Output, mesh: Mesh) -> _Copies:
    """From `[devices, *local]` to every copy of the global array, padding cut off."""
    sharding = output.sharding
    axes = join_axes([result], mesh, sharding.used_axes)
    copy_axes = tuple(a for a in axes if a not in sharding.used_axes)
    result = expand(result, axes, mesh)
    local = result.local_shape
    host = np.asarray(result.array).reshape([*(mesh.axis_size[a] for a in axes), *local])
    order = [axes.index(a) for a in copy_axes]
    dims: list[int] = []
    for i, dim_axes in enumerate(sharding.dims):
        order += [*(axes.index(a) for a in dim_axes), len(axes) + i]
        dims.append(mesh.size(dim_axes) * local[i])
    inner = local[len(dims) :]
    order += range(len(order), host.ndim)
    whole = host.transpose(order).reshape([mesh.size(copy_axes), *dims, *inner])
    return _Copies(whole[(slice(None), *(slice(n) for n in output.shape))], copy_axes)


def _differences(copies: _Copies, output: _Output, mesh: Mesh) -> list[str]:
    """A line of text where the copies are not all the same."""
    if len(copies.array) == 1 or not copies.array[0].size:
        return []
    unequal = ~_same_bits(copies.array, copies.array[:1])
    if not unequal.any():
        return []
    sizes = [mesh.axis_size[a] for a in copies.axes]
    differing = np.flatnonzero(unequal.reshape(len(unequal), -1).any(axis=1))
    along = _axes_of_difference(copies.array.reshape(*sizes, -1), copies.axes)
    places = [_place(int(i), copies.axes, mesh) for i in differing[:_LISTED_DEVICES]]
    more = len(differing) - len(places)
    element = tuple(int(i) for i in np.argwhere(unequal[differing[0]])[0])
    values = copies.array[0][element], copies.array[differing[0]][element]
    return [
        f"{output.name} {output.shape}, sharded {output.sharding}, differs along"
        f" {mesh.show(along)}: devices {', '.join(places)}{f' and {more} more' if more else ''}"
        f" differ from {_place(0, copies.axes, mesh)}; first at {list(element)}:"
        f" {values[0]} and {values[1]}; {_largest_difference(copies.array, unequal)}"
    ]


def _axes_of_difference(grid: np.ndarray, axes: Axes) -> Axes:
    """The axes along which some neighbours differ. `grid` is `[*axes, elements]`."""
    return tuple(
        axis
        for i, axis in enumerate(axes)
        if not _same_bits(grid, np.take(grid, [0], axis=i)).all()
    )


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Element by element: the same bits, or both NaN."""
    exact = a.dtype in (jax.dtypes.float0, np.bool_) or jnp.issubdtype(a.dtype, jnp.integer)
    if exact:
        return np.asarray(a == b)
    same = (a == b) & (np.signbit(np.real(a)) == np.signbit(np.real(b)))
    if np.iscomplexobj(a):
        same &= np.signbit(np.imag(a)) == np.signbit(np.imag(b))
    return same | (np.isnan(a) & np.isnan(b))


def _largest_difference(array: np.ndarray, unequal: np.ndarray) -> str:
    if array.dtype == np.bool_:
        return f"{int(unequal.any(axis=0).sum())} elements differ"
    wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(wide - wide[:1])[unequal]
    if np.isnan(distance).any():
        return "one of them is not a number"
    return f"largest difference {distance.max():.6g}"


def _place(copy: int, axes: Axes, mesh: Mesh) -> str:
    """Coordinates of a copy, by the user's axes where whole: `(data=1, model=3)`."""
    index = dict(zip(axes, np.unravel_index(copy, [mesh.axis_size[a] for a in axes]), strict=True))
    parts = []
    for user, subs in mesh.user_axes:
        present = [a for a in subs if a in index]
        if present and len(present) == len(subs):
            sizes = [mesh.axis_size[a] for a in subs]
            whole = np.ravel_multi_index([index[a] for a in subs], sizes)
            parts.append(f"{user}={whole}")
        else:
            parts += [f"{a}={index[a]}" for a in present]
    return f"({', '.join(parts)})"
