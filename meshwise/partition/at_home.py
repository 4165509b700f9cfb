"""What a device could cut of what it holds is not sent.

A local rule fetches rows of its operand's shards from the devices that hold them. Where the operand
is whole on every device, as an argument may be, its shards were cut just before, and what a piece
of one holds can be cut by who wants it, as its sender would cut it. Then nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import ShapeDtypeStruct, lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.ir.collectives import is_collective
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.operators import (
    CUTS,
    JOINS,
    PLACES,
    RESHAPES,
    SPREADS,
    TURNS,
    is_among,
)
from meshwise.ir.program import shape_of, type_of
from meshwise.ir.sharding import Sharding
from meshwise.rules.halo import shard_entry

# What only moves elements, and what computes places of them.
_MOVES = (RESHAPES | SPREADS | TURNS | CUTS | JOINS | PLACES).union(
    """
    select_n gather optimization_barrier
    add sub mul div rem max min lt le gt ge eq ne and or not
    """.split()
)
# So many equations at most are written again for a piece.
_MOST = 64


def cut_at_home(closed: ClosedJaxpr, held: Sequence[Sharding], mesh: Mesh) -> ClosedJaxpr:
    """A per-device program less the exchanges of what every receiver has; `held` are arguments."""
    sharded = {v: s.used_axes for v, s in zip(closed.jaxpr.invars, held, strict=True)}
    walk = _Walk(mesh, dict(sharded))
    for eqn in closed.jaxpr.eqns:
        walk.enter(eqn)
    if not walk.found:
        return closed
    constants = [*closed.jaxpr.constvars, *walk.constants]
    jaxpr = closed.jaxpr.replace(constvars=constants, eqns=walk.eqns)
    return ClosedJaxpr(jaxpr, [*closed.consts, *walk.constants.values()])


@dataclass
class _Walk:
    """The equations so far, and which of them makes a value.

    `varies` are axes over which devices differ in a value.
    """

    mesh: Mesh
    varies: dict[Var, frozenset[str]]
    makers: dict[Var, int] = field(default_factory=dict)
    eqns: list[JaxprEqn] = field(default_factory=list)
    constants: dict[Var, Any] = field(default_factory=dict)
    found: bool = False

    def enter(self, eqn: JaxprEqn) -> None:
        """The next equation, or what stands in its place."""
        made = None
        if eqn.primitive is lax.ppermute_p and not isinstance(eqn.invars[0], Literal):
            made = self._at_home(eqn, eqn.invars[0])
        self.found = self.found or made is not None
        for new in [eqn] if made is None else made:
            over = self._over(new)
            self.varies.update((v, over) for v in new.outvars)
            self.makers.update((v, len(self.eqns)) for v in new.outvars)
            self.eqns.append(new)

    def _over(self, eqn: JaxprEqn) -> frozenset[str]:
        if _jax.has_jaxpr(eqn):
            return frozenset(self.mesh.names)
        read = [a for a in eqn.invars if not isinstance(a, Literal)]
        own = frozenset[str]().union(*(self.varies.get(a, frozenset()) for a in read))
        if eqn.primitive is lax.all_gather_p and not eqn.params["axis_index_groups"]:
            return own.difference(_jax.named_axes(eqn))
        moves = eqn.primitive is lax.axis_index_p or is_collective(eqn)
        return own.union(_jax.named_axes(eqn)) if moves else own

    def _at_home(self, eqn: JaxprEqn, piece: Var) -> list[JaxprEqn] | None:
        """What every receiver of a piece cuts in its place, and others fill with zeros.

        None where it cannot: where something else than moves made the piece of what devices share.
        """
        axes = _jax.named_axes(eqn)
        made_of = self._made_of(piece, frozenset(axes))
        if made_of is None:
            return None
        steps, leaves = made_of
        senders = list(range(self.mesh.size(axes)))
        receives = [0] * len(senders)
        for sender, receiver in eqn.params["perm"]:
            senders[receiver], receives[receiver] = sender, 1

        def cut(*values: Any) -> Any:
            env: dict[Var, Any] = dict(zip(leaves, values, strict=True))
            for step in steps:
                if step.primitive is lax.axis_index_p:
                    places = [self._place(axes, step.params["axis_name"], s) for s in senders]
                    made = [shard_entry(places, axes, self.mesh)]
                else:
                    made = _jax.bind(step, [_jax.value_in(env, a) for a in step.invars])
                env.update(zip(step.outvars, made, strict=True))
            if all(receives):
                return lax.optimization_barrier(env[piece]) if piece in leaves else env[piece]
            is_sent = lax.eq(shard_entry(receives, axes, self.mesh), np.int32(1))
            return lax.select(is_sent, env[piece], lax.full_like(env[piece], 0))

        types = [ShapeDtypeStruct(shape_of(v), type_of(v).dtype) for v in leaves]
        traced = _jax.make_jaxpr_over_axes(cut, self.mesh.named_sizes, types)
        constants = {
            _jax.new_var(v.aval): c
            for v, c in zip(traced.jaxpr.constvars, traced.consts, strict=True)
        }
        self.constants.update(constants)
        own = traced.jaxpr.replace(
            constvars=[], invars=[*traced.jaxpr.constvars, *traced.jaxpr.invars]
        )
        return _jax.in_place_of(eqn, ClosedJaxpr(own, []), [*constants, *leaves])

    def _made_of(
        self, piece: Var, axes: frozenset[str]
    ) -> tuple[list[JaxprEqn], dict[Var, None]] | None:
        """The moves, in order, that make a value of what devices share over some axes, and this.

        None where something else makes it, or too many.
        """
        steps: set[int] = set()
        leaves: dict[Var, None] = {}
        waiting = [piece]
        while waiting:
            value = waiting.pop()
            if axes.isdisjoint(self.varies.get(value, frozenset())):
                leaves[value] = None
                continue
            index = self.makers.get(value)
            if index is None or not is_among(self.eqns[index], _MOVES):
                return None
            if index not in steps:
                steps.add(index)
                waiting += [a for a in self.eqns[index].invars if not isinstance(a, Literal)]
            if len(steps) > _MOST:
                return None
        return [self.eqns[index] for index in sorted(steps)], leaves

    def _place(self, axes: Axes, axis: str, shard: int) -> int:
        """Where along one of some axes a shard over all of them lies."""
        behind = axes[axes.index(axis) + 1 :]
        return shard // self.mesh.size(behind) % self.mesh.axis_size[axis]
