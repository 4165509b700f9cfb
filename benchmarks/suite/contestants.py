"""One program as each partitioner takes it: operands, the function to call, and where they lie.

JAX refuses at the boundary what does not divide. There a program for XLA takes padded operands,
cuts them inside, and pads its results again: what people write by hand. The parts a device holds
are the same as ours, so nothing moves for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from benchmarks.suite.devices import make_mesh
from benchmarks.suite.program import Array, Program
from meshwise.cost.hardware import GENERIC, Hardware


@dataclass(frozen=True)
class Contestant:
    """What `jax.jit` or `mw.jit` made of a program, and its operands in place."""

    function: Any
    args: tuple[Any, ...]


def operands(program: Program) -> tuple[Any, ...]:
    """Random operands on the host, the same in every run."""
    draw = np.random.default_rng(0)

    def one(array: Array) -> Any:
        if array.bound:
            return draw.integers(0, array.bound, array.shape).astype(array.dtype)
        if array.dtype == "complex64":
            parts = draw.normal(size=(2, *array.shape)) * array.scale
            return (parts[0] + 1j * parts[1]).astype(array.dtype)
        found = draw.normal(size=array.shape) * array.scale
        return np.asarray(jnp.asarray(found, array.dtype))

    return jax.tree.map(one, program.arguments, is_leaf=_is_array)


def shapes(program: Program) -> tuple[Any, ...]:
    """The types of the operands, of which none is made."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype)),
        program.arguments,
        is_leaf=_is_array,
    )


def one_device(program: Program) -> Callable[..., Any]:
    """The function without its annotations."""
    return _function(program, lambda x, spec: x)


def xla(program: Program, args: tuple[Any, ...]) -> Contestant:
    """The program for `jax.jit`; which partitioner takes it is the configuration's matter."""
    mesh = make_mesh(program.mesh)
    jitted, padding = jax_program(program, args, mesh)
    return Contestant(jitted, _placed(args, specs_of(program), mesh, padding))


def jax_program(program: Program, args: tuple[Any, ...], mesh: Mesh) -> tuple[Any, Any]:
    """The program under `jax.jit` on a mesh, and the shapes it takes for these operands."""
    function = _function(
        program, lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    )
    specs = specs_of(program)
    results = jax.eval_shape(one_device(program), *args)
    out_specs = broadcast(program.results, results)
    in_padding = jax.tree.map(lambda x, s: _padded(x.shape, s, mesh), args, specs)
    out_padding = jax.tree.map(lambda x, s: _padded(x.shape, s, mesh), results, out_specs)

    def padded(*given: Any) -> Any:
        cut = jax.tree.map(
            lambda x, like, spec: _cut(x, like.shape, NamedSharding(mesh, spec)),
            given,
            args,
            specs,
        )
        return jax.tree.map(
            lambda x, shape, spec: _pad(x, shape, NamedSharding(mesh, spec)),
            function(*cut),
            out_padding,
            out_specs,
        )

    even = jax.tree.leaves((in_padding, out_padding)) == _shapes((args, results))
    jitted = jax.jit(
        function if even else padded,
        in_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs),
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs),
    )
    return jitted, in_padding


def ours(
    program: Program, args: tuple[Any, ...], hardware: Hardware = GENERIC
) -> Contestant:  # fmt: skip
    """The program for `mw.jit`; what does not divide comes as an `mw.UnevenArray`."""
    mesh = make_mesh(program.mesh)
    specs = specs_of(program)
    padding = jax.tree.map(lambda x, s: _padded(x.shape, s, mesh), args, specs)
    placed = jax.tree.map(
        lambda held, x: held if held.shape == x.shape else mw.UnevenArray(held, x.shape),
        _placed(args, specs, mesh, padding),
        args,
    )
    return Contestant(our_program(program, mesh, hardware), placed)


def our_program(program: Program, mesh: Mesh, hardware: Hardware = GENERIC) -> Any:
    """The program under `mw.jit` on a mesh; it takes operands as they are on one device."""
    return mw.jit(
        _function(program, mw.shard),
        mesh=mesh,
        in_shardings=specs_of(program),
        out_shardings=program.results,
        hardware=hardware,
    )


def _function(program: Program, shard: Callable[[Any, P], Any]) -> Callable[..., Any]:
    """A new function every time, so that nothing that was traced before is found again."""

    def function(*args: Any) -> Any:
        return program.function(shard, *args) if program.hinted else program.function(*args)

    return function


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Array)


def specs_of(program: Program) -> Any:
    """How the operands lie, as a tree of theirs."""
    return jax.tree.map(lambda array: array.spec, program.arguments, is_leaf=_is_array)


def broadcast(prefix: Any, tree: Any) -> Any:
    """A spec for every leaf, from a tree of specs that may end earlier."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part),
        prefix,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )


class _Shape(tuple[int, ...]):
    """A shape that is a leaf of a tree, which a plain tuple is not."""


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(tree)]


def _padded(shape: tuple[int, ...], spec: P, mesh: Mesh) -> Any:
    """The shape with each dim rounded up to a multiple of its shards, as a leaf."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    axes = [(e,) if isinstance(e, str) else e or () for e in entries]
    shards = [prod(mesh.shape[a] for a in names) for names in axes]
    return _Shape(-(-n // k) * k for n, k in zip(shape, shards, strict=True))


def _placed(args: Any, specs: Any, mesh: Mesh, padding: Any) -> Any:
    """Operands on the mesh, padded with what no program may look at."""

    def place(x: Any, spec: P, shape: Any) -> Any:
        ends = [(0, int(more) - n) for n, more in zip(x.shape, shape, strict=True)]
        fill = np.iinfo(x.dtype).max if x.dtype.kind in "iu" else np.nan
        held = np.pad(x, ends, constant_values=fill) if any(e for _, e in ends) else x
        return jax.device_put(held, NamedSharding(mesh, spec))

    return jax.tree.map(place, args, specs, padding)


def _cut(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    if x.shape == shape:
        return x
    return lax.with_sharding_constraint(x[tuple(slice(n) for n in shape)], sharding)


def _pad(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    if x.shape == tuple(shape):
        return x
    x = lax.with_sharding_constraint(x, sharding)
    return jnp.pad(x, [(0, int(more) - n) for n, more in zip(x.shape, shape, strict=True)])
