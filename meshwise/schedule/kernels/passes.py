"""A computation on tiles as passes over their rows, with small sums between them.

A reduction over the rows of a tile is known only after a pass over all blocks, and a norm over all
devices only after an exchange. So every value has a *level*:

- level 0: whole values of whole operands alone, computed before the kernel;
- level p of a whole value: known before pass p (after exchanges, from reductions of passes before);
- level p of a blocked value: computed in pass p at the earliest, and again in each later pass that
  needs it: blocks are read again rather than kept.

The last pass writes the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.flatten import flatten
from meshwise.ir.program import shape_of, type_of
from meshwise.schedule.kernels import blocks as on_blocks
from meshwise.schedule.kernels.blocks import Blocks, Value
from meshwise.schedule.kernels.ring import Axis

# Collectives of small arrays, and how the terms of the devices join.
SUMS: Mapping[str, Callable[[Any, Any], Any]] = {
    "psum": jnp.add,
    "psum_invariant": jnp.add,
    "pmax": jnp.maximum,
    "pmin": jnp.minimum,
}

Env = dict[Var, Value]
# Joins some small arrays over the devices: (arrays, how each joins) -> arrays.
Exchange = Callable[[Sequence[Any], Sequence[Callable[[Any, Any], Any]]], Sequence[Any]]


@dataclass(frozen=True)
class Place:
    """Whether a value is cut in rows, and the pass (or the time before it) that knows it."""

    is_blocked: bool
    level: int


@dataclass(frozen=True)
class Passes:
    """A computation on tiles, ready to be run block by block.

    `tiles` and `wholes` are its inputs (tiles first), `results` the atoms it results in, `last` is
    the number of its last pass.
    """

    closed: ClosedJaxpr
    tiles: tuple[Var, ...]
    wholes: tuple[Var, ...]
    results: tuple[Any, ...]
    blocks: Blocks
    places: Mapping[Var, Place]
    last: int

    def reductions(self, number: int) -> list[JaxprEqn]:
        """The reductions over rows that pass `number` adds up."""
        return [e for e in self.closed.jaxpr.eqns if self._is_reduction(e, number)]

    def _is_reduction(self, eqn: JaxprEqn, number: int) -> bool:
        if self.places[eqn.outvars[0]] != Place(False, number + 1):
            return False
        return on_blocks.reduces_rows(eqn, self._blocked(eqn))

    def _blocked(self, eqn: JaxprEqn) -> list[bool]:
        return [not isinstance(a, Literal) and self.places[a].is_blocked for a in eqn.invars]

    def is_tile(self, number: int) -> bool:
        """Whether result `number` has the rows of the tiles as its first dim."""
        atom = self.results[number]
        return not isinstance(atom, Literal) and self.places[atom].is_blocked

    def is_known_before(self, atom: Any) -> bool:
        """Whether a value is made of whole operands alone, so that no kernel is needed for it."""
        return isinstance(atom, Literal) or self.places[atom] == Place(False, 0)

    def tiles_read(self, number: int) -> list[int]:
        """The tiles that pass `number` reads, as positions in `tiles`."""
        needed = self._needed(number)
        return [i for i, var in enumerate(self.tiles) if var in needed]

    def _needed(self, number: int) -> set[Var]:
        """The blocked values that a pass needs, read or computed."""
        wanted = [a for e in self.reductions(number) for a in e.invars]
        if number == self.last:
            wanted += [a for i, a in enumerate(self.results) if self.is_tile(i)]
        needed = {a for a in wanted if not isinstance(a, Literal) and self.places[a].is_blocked}
        for eqn in reversed(self.closed.jaxpr.eqns):
            if needed.intersection(eqn.outvars):
                needed |= {
                    a
                    for a in eqn.invars
                    if not isinstance(a, Literal) and self.places[a].is_blocked
                }
        return needed

    def before(self, wholes: Sequence[Any]) -> Env:
        """The whole values of level 0, with XLA: wholes come as arrays of their own shapes."""
        jaxpr = self.closed.jaxpr
        given = [*zip(jaxpr.constvars, self.closed.consts, strict=True)]
        given += zip(self.wholes, wholes, strict=True)
        env = {var: on_blocks.whole(jnp.asarray(array)) for var, array in given}
        for eqn in jaxpr.eqns:
            if self.places[eqn.outvars[0]] == Place(False, 0):
                found = on_blocks.apply_to_wholes(eqn, _read(env, eqn), self.blocks)
                env.update(zip(eqn.outvars, found, strict=True))
        return env

    def kept(self) -> list[Var]:
        """The values of level 0 that the kernel reads."""
        inside = [e for e in self.closed.jaxpr.eqns if self.places[e.outvars[0]] != Place(False, 0)]
        read = (a for e in inside for a in e.invars if not isinstance(a, Literal))
        return [a for a in dict.fromkeys(read) if self.is_known_before(a)]

    def between(self, number: int, env: Env, exchange: Exchange) -> None:
        """Add to `env` the whole values that are known before pass `number`.

        Sums over the devices that do not wait for each other go in one exchange.
        """
        made_in_pass = {v for e in self.reductions(number - 1) for v in e.outvars}
        waiting = [
            e
            for e in self.closed.jaxpr.eqns
            if self.places[e.outvars[0]] == Place(False, number)
            and not made_in_pass.intersection(e.outvars)
        ]
        while waiting:
            waiting = self._compute_ready(waiting, env)
            sums = [e for e in waiting if _is_ready(e, env)]
            self._exchange(sums, env, exchange)
            waiting = [e for e in waiting if not any(e is s for s in sums)]

    def _compute_ready(self, eqns: list[JaxprEqn], env: Env) -> list[JaxprEqn]:
        """Compute what can be without an exchange; the equations that wait for one."""
        left = []
        for eqn in eqns:
            if eqn.primitive.name in SUMS or not _is_ready(eqn, env):
                left.append(eqn)
                continue
            found = on_blocks.apply(eqn, _read(env, eqn), self.blocks)
            env.update(zip(eqn.outvars, found, strict=True))
        return left

    def _exchange(self, eqns: Sequence[JaxprEqn], env: Env, exchange: Exchange) -> None:
        terms = [(v, SUMS[e.primitive.name]) for e in eqns for v in _read(env, e)]
        if not terms:
            return
        found = exchange([v.array for v, _ in terms], [join for _, join in terms])
        outvars = [v for e in eqns for v in e.outvars]
        for var, (term, _), array in zip(outvars, terms, found, strict=True):
            env[var] = Value(array, term.shape, False)

    def has_exchange(self, number: int) -> bool:
        """Whether an exchange comes before pass `number`."""
        sums = [e for e in self.closed.jaxpr.eqns if e.primitive.name in SUMS]
        return any(self.places[e.outvars[0]].level == number for e in sums)

    def in_block(
        self, number: int, env: Env, tiles: Mapping[int, Any]
    ) -> tuple[list[Any], dict[int, Value]]:
        """One block of pass `number`: what it adds to each reduction, and its part of the results.

        `tiles` holds the blocks of `tiles_read`; results come only in the last pass.
        """
        env = dict(env)
        for position, array in tiles.items():
            var = self.tiles[position]
            env[var] = Value(array, shape_of(var), True)
        needed = self._needed(number)
        for eqn in self.closed.jaxpr.eqns:
            if needed.intersection(eqn.outvars):
                found = on_blocks.apply(eqn, _read(env, eqn), self.blocks)
                env.update(zip(eqn.outvars, found, strict=True))
        partials = [
            on_blocks.partial(e, _read(env, e), self.blocks) for e in self.reductions(number)
        ]
        if number < self.last:
            return partials, {}
        results = {i: env[a] for i, a in enumerate(self.results) if self.is_tile(i)}
        return partials, results


def _is_ready(eqn: JaxprEqn, env: Env) -> bool:
    return all(isinstance(a, Literal) or a in env for a in eqn.invars)


def _read(env: Env, eqn: JaxprEqn) -> list[Value]:
    return [on_blocks.literal(a) if isinstance(a, Literal) else env[a] for a in eqn.invars]


def passes_of(closed: ClosedJaxpr, tile_count: int, axis: Axis) -> Passes:
    """Read a computation whose first `tile_count` inputs are tiles.

    Raises `ValueError`, with the way out, where it cannot be done in passes.
    """
    flat = flatten(closed)
    jaxpr = flat.jaxpr
    tiles, wholes = tuple(jaxpr.invars[:tile_count]), tuple(jaxpr.invars[tile_count:])
    shapes = [shape_of(v) for v in tiles]
    if len({s[:1] for s in shapes}) != 1 or not all(shapes):
        raise ValueError(
            f"the tiles of a kernel have the same rows (first dim); these are {shapes}"
        )
    rows = shapes[0][0]
    in_lanes = all(len(s) == 1 for s in shapes) and rows % on_blocks.LANES == 0
    blocks = Blocks(rows, in_lanes)
    places = {v: Place(True, 1) for v in tiles} | {
        v: Place(False, 0) for v in (*wholes, *jaxpr.constvars)
    }
    for eqn in jaxpr.eqns:
        place = _place(eqn, places, axis)
        places.update(dict.fromkeys(eqn.outvars, place))
    levels = [p.level for p in places.values() if p.is_blocked]
    return Passes(flat, tiles, wholes, tuple(jaxpr.outvars), blocks, places, max(levels))


def _place(eqn: JaxprEqn, places: Mapping[Var, Place], axis: Axis) -> Place:
    operands = [places[a] for a in eqn.invars if not isinstance(a, Literal)]
    level = max((p.level for p in operands), default=0)
    is_blocked = [not isinstance(a, Literal) and places[a].is_blocked for a in eqn.invars]
    name = eqn.primitive.name
    if name in SUMS:
        _check_sum(eqn, any(is_blocked), axis)
        return Place(False, max(level, 1))
    if eqn.effects and name != "axis_index":
        raise on_blocks.unable(eqn, "it has an effect, or communicates")
    if on_blocks.reduces_rows(eqn, is_blocked):
        return Place(False, level + 1)
    if any(is_blocked):
        return Place(True, max(level, 1))
    return Place(False, level)


def _check_sum(eqn: JaxprEqn, is_blocked: bool, axis: Axis) -> None:
    axes = eqn.params["axes"]
    if set(axes) != set((axis,) if isinstance(axis, str) else axis):
        raise on_blocks.unable(eqn, f"it goes over {axes}, and the kernel's ring over {axis}")
    if eqn.params.get("axis_index_groups") is not None:
        raise on_blocks.unable(eqn, "it has groups")
    if is_blocked:
        raise on_blocks.unable(eqn, "only small arrays, such as norms, can be summed inside")


def dry_run(
    passes: Passes,
    wholes: Sequence[Any],
    block_shape: Callable[[int, int], tuple[int, ...]],
    block_rows: int,
) -> list[Any]:
    """What every exchange joins: a list of shapes and dtypes for each.

    `block_shape` says how a block of so many rows of a tile is held.

    Raises `ValueError` where an equation cannot be done on blocks.
    """
    exchanges: list[Any] = []

    def record(arrays: Sequence[Any], joins: Sequence[Any]) -> Sequence[Any]:
        exchanges.append([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])
        return arrays

    def run(wholes: Sequence[Any]) -> Any:
        env = passes.before(wholes)
        for number in range(1, passes.last + 2):
            passes.between(number, env, record)
            if number > passes.last:
                continue
            blocks = {
                i: jnp.zeros(block_shape(i, block_rows), type_of(passes.tiles[i]).dtype)
                for i in passes.tiles_read(number)
            }
            partials, _ = passes.in_block(number, env, blocks)
            for eqn, array in zip(passes.reductions(number), partials, strict=True):
                env[eqn.outvars[0]] = Value(array, shape_of(eqn.outvars[0]), False)

    jax.eval_shape(run, list(wholes))
    return exchanges
