"""One equation computed on tiles: each device of a group its own part of a value.

Along axes over which its operands are replicated, a per-device program is itself a program for one
device, and an equation of it is split there as any equation is: by its factor rule. So what can be
reordered with a gather, and how it is computed then, is read where partitioning reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from meshwise import _jax
from meshwise._jax import JaxprEqn, named_axes
from meshwise.ir.factors import (
    FactorRule,
    Strategy,
    factor_axes,
    fits,
    operand_sharding,
    result_sharding,
)
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding, replicated
from meshwise.partition.padding import mask_operands
from meshwise.reshard.emit import all_reduce
from meshwise.rules.registry import REGISTRY, LocalContext, OpRule, shard_index
from meshwise.schedule.slices import PADDING


class NotTileableError(Exception):
    """An equation cannot be computed on the tiles that it is given; the argument says why."""


@dataclass(frozen=True)
class Tiling:
    """How one equation is computed on tiles: its split, and how operands and results lie.

    Results that a reduction leaves as terms are reduced at once: `results` say what is there
    afterwards, `terms` what each is before.
    """

    rule: OpRule
    strategy: Strategy
    operands: tuple[Sharding, ...]
    terms: tuple[Sharding, ...]

    @property
    def results(self) -> tuple[Sharding, ...]:
        """The results' tiles, after reduction."""
        return tuple([s.reduced for s in self.terms])


def tile_forward(
    eqn: JaxprEqn, operands: Sequence[Sharding | None], mesh: Mesh, axes: Axes
) -> Tiling:
    """How an equation is computed where some operands are tiles (None: whole, cut if need be).

    Raises `NotTileableError`.
    """
    rule = rule_of(eqn, mesh, axes)
    found: dict[int, Axes] = {}
    for position, tile in enumerate(operands):
        if tile is None:
            continue
        dims = rule.factors.operands[position]
        if len(dims) != len(tile.dims):
            raise NotTileableError(f"{eqn.primitive.name} has no rule for its parts")
        for factor, split in factor_axes(dims, rule.factors, tile.dims, mesh).items():
            if found.setdefault(factor, split) != split:
                raise NotTileableError(f"{_named(eqn)} is given tiles that do not match")
    tiling = _tiling(eqn, rule, found, mesh)
    for tile, wanted in zip(operands, tiling.operands, strict=True):
        if tile is not None and tile != wanted:
            raise NotTileableError(_mixes(eqn, rule, tile))
    return tiling


def tile_backward(eqn: JaxprEqn, result: int, tile: Sharding, mesh: Mesh, axes: Axes) -> Tiling:
    """How an equation makes only this device's tile of a result. Raises `NotTileableError`."""
    rule = rule_of(eqn, mesh, axes)
    dims = rule.factors.results[result]
    if len(dims) != len(tile.dims):
        raise NotTileableError(f"{eqn.primitive.name} has no rule for its parts")
    tiling = _tiling(eqn, rule, factor_axes(dims, rule.factors, tile.dims, mesh), mesh)
    if tiling.terms[result] != tile:
        raise NotTileableError(_mixes(eqn, rule, tile))
    return tiling


def _tiling(eqn: JaxprEqn, rule: OpRule, found: Mapping[int, Axes], mesh: Mesh) -> Tiling:
    factors = rule.factors
    strategy = Strategy(tuple([found.get(f, ()) for f in range(len(factors.sizes))]))
    if not fits(factors, strategy, mesh) or sends(eqn, rule, strategy, mesh):
        raise NotTileableError(
            f"{_named(eqn)} ({factors}) needs more than this device's part of its operands"
        )
    operands = [operand_sharding(factors, strategy, i) for i in range(len(eqn.invars))]
    results = [result_sharding(factors, strategy, i) for i in range(len(eqn.outvars))]
    return Tiling(rule, strategy, tuple(operands), tuple(results))


def sends(eqn: JaxprEqn, rule: OpRule, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether an operator, split so, exchanges elements with other devices, or may."""
    if not any(strategy.axes[f] for f in rule.factors.permuted):
        return False
    context = LocalContext(eqn, rule.factors, strategy, mesh)
    sent = rule.exchanges(context) if rule.exchanges else None
    return sent is None or any(exchange.wire_bytes for exchange in sent)


def _mixes(eqn: JaxprEqn, rule: OpRule, tile: Sharding) -> str:
    return f"{_named(eqn)} ({rule.factors}) mixes elements along the dim that tiles cut, {tile}"


def _named(eqn: JaxprEqn) -> str:
    return f"{_jax.operator_name(eqn)} at {_jax.source_summary(eqn)}"


def rule_of(eqn: JaxprEqn, mesh: Mesh, axes: Axes) -> OpRule:
    """What an equation of a per-device program does to dims; collectives are over other axes.

    Raises `NotTileableError` for a collective over these axes, and for what has no rule.
    """
    name = eqn.primitive.name
    gathered = _MOVED_DIMS.get(name)
    if gathered is not None:
        if {*named_axes(eqn)} & {*axes}:
            over = mesh.show(named_axes(eqn))
            raise NotTileableError(f"{_named(eqn)} goes over {over} itself")
        return OpRule(_of_collective(eqn, {eqn.params[p] for p in gathered}))
    rule = REGISTRY.describe(eqn)
    if rule.opaque:
        raise NotTileableError(f"{_named(eqn)} has no rule by which to split it")
    return rule


# Collectives over other axes act on each element by itself, but for the dims they cut or join.
_MOVED_DIMS: Mapping[str, tuple[str, ...]] = {
    "psum": (),
    "psum_invariant": (),
    "pmax": (),
    "pmin": (),
    "ppermute": (),
    "pvary": (),
    "all_gather": ("all_gather_dimension",),
    "all_gather_invariant": ("all_gather_dimension",),
    "reduce_scatter": ("scatter_dimension",),
    "all_to_all": ("split_axis", "concat_axis"),
}


def _of_collective(eqn: JaxprEqn, whole: set[int]) -> FactorRule:
    if not eqn.params.get("tiled", True):
        raise NotTileableError(f"{eqn.primitive.name} adds or takes away a dim")
    operands, sizes = [], []
    for atom in eqn.invars:
        first = len(sizes)
        sizes += shape_of(atom)
        operands.append(tuple([(first + d,) for d in range(len(shape_of(atom)))]))
    kept = {operand[d][0] for operand in operands for d in whole}
    same = tuple(operands)
    return FactorRule(same, same, tuple(sizes), whole=frozenset(kept))


def compute_tile(
    eqn: JaxprEqn, tiling: Tiling, operands: Sequence[Any], mesh: Mesh
) -> list[jax.Array]:
    """The results of one equation on the tiles of its operands, reductions completed."""
    with _jax.at_source(eqn):
        if not any(tiling.strategy.axes):
            return _jax.bind(eqn, operands)
        context = LocalContext(eqn, tiling.rule.factors, tiling.strategy, mesh)
        operands = mask_operands(tiling.rule, context, operands)
        local = tiling.rule.local
        results = local(context, *operands) if local else _jax.bind(eqn, operands)
        return [
            all_reduce(r, term.unreduced, term.reduction) if term.unreduced else r
            for r, term in zip(results, tiling.terms, strict=True)
        ]


@dataclass
class Cutter:
    """Cuts whole values to tiles inside a traced function, each once, at an equation's line."""

    mesh: Mesh
    like: JaxprEqn
    made: dict[tuple[int, Sharding], Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def cut(self, array: Any, tile: Sharding) -> Any:
        """This device's tile of an array that is whole."""
        key = id(array), tile
        if key not in self.made:
            self.kept.append(array)  # so that its id stays its own
            with _jax.at_source(self.like):
                self.made[key] = cut(array, tile, self.mesh)
        return self.made[key]


def cut(array: Any, tile: Sharding, mesh: Mesh) -> jax.Array:
    """This device's tile of an array that is replicated; the last is padded where uneven."""
    for dim, axes in enumerate(tile.dims):
        if axes:
            array = _cut_dim(jnp.asarray(array), dim, axes, mesh)
    return array


def _cut_dim(array: jax.Array, dim: int, axes: Axes, mesh: Mesh) -> jax.Array:
    count = mesh.size(axes)
    part = -(-array.shape[dim] // count)
    if part * count > np.iinfo(np.int32).max:
        raise NotTileableError(
            f"a dim of {array.shape[dim]:,} elements has positions beyond 32 bits"
        )
    array = pad_dim(array, dim, part * count)
    starts: list[Any] = [np.int32(0)] * array.ndim
    starts[dim] = lax.mul(shard_index(axes, mesh), np.int32(part))
    sizes = [part if d == dim else n for d, n in enumerate(array.shape)]
    return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)


def pad_dim(array: jax.Array, dim: int, size: int) -> jax.Array:
    """An array with zeros at the end of a dim up to a size."""
    if array.shape[dim] == size:
        return array
    config = [(0, size - n if d == dim else 0, 0) for d, n in enumerate(array.shape)]
    with jax.named_scope(PADDING):
        return lax.pad(array, jnp.zeros((), array.dtype), config)


def pads_behind(eqn: JaxprEqn, dim: int) -> bool:
    """Whether an equation pads, and only behind the rows of one dim."""
    return eqn.primitive.name == "pad" and all(
        low == between == 0 and (high == 0 or d == dim)
        for d, (low, high, between) in enumerate(eqn.params["padding_config"])
    )


def gather(tile: jax.Array, shape: Sequence[int], sharding: Sharding) -> jax.Array:
    """The whole array of a shape from the tiles that devices hold."""
    for dim, axes in enumerate(sharding.dims):
        if axes:
            tile = lax.all_gather(tile, axes, axis=dim, tiled=True)
            if tile.shape[dim] != shape[dim]:
                tile = lax.slice_in_dim(tile, 0, shape[dim], axis=dim)
    return tile


def one_dim(rank: int, dim: int, axes: Axes) -> Sharding:
    """The sharding of a value cut along one dim."""
    dims = list(replicated(rank).dims)
    dims[dim] = axes
    return Sharding(tuple(dims))
