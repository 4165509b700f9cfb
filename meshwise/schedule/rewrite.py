"""Equations of a per-device jaxpr replaced by others: the mechanism under every move.

Equations that a move leaves alone stay the same objects with the same variables, so what is known
of a value by its variable stays true. New equations come as *pieces*, traced from plain functions
of local arrays. Order is found anew: as before, as far as values are made before they are read.
"""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.ir.mesh import Mesh


@dataclass(frozen=True)
class Piece:
    """New equations, the atoms they result in, and constants they read.

    `position` is the index of the old equation in whose place they stand.
    """

    eqns: tuple[JaxprEqn, ...]
    results: tuple[Any, ...]
    position: int
    consts: tuple[tuple[Var, Any], ...] = ()


class CycleError(Exception):
    """What is to be computed before itself; the argument lists variables in the circle."""


def trace_piece(
    function: Callable[..., Sequence[Any]], operands: Sequence[Any], mesh: Mesh, position: int
) -> Piece:
    """The equations of a function of local arrays, applied to atoms of a program."""
    closed = jaxpr_of(function, operands, mesh)
    env: dict[Var, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    return _inlined(closed, env, position)


def jaxpr_of(
    function: Callable[..., Sequence[Any]], operands: Sequence[Any], mesh: Mesh
) -> ClosedJaxpr:
    """The jaxpr of a function of local arrays that have the types of some atoms."""
    return _jax.make_jaxpr_over_axes(function, mesh.named_sizes, [_type(a) for a in operands])


def _type(atom: Any) -> jax.ShapeDtypeStruct:
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _inlined(closed: ClosedJaxpr, env: dict[Var, Any], position: int) -> Piece:
    """The equations of a jaxpr with variables of their own, its inputs given by `env`."""
    jaxpr = closed.jaxpr
    consts = []
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        env[var] = _jax.new_var(var.aval)
        consts.append((env[var], const))

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [v if isinstance(v, _jax.DropVar) else _jax.new_var(v.aval) for v in eqn.outvars]
        eqns.append(_jax.rename(eqn, [read(a) for a in eqn.invars], outvars))
        env.update(zip(eqn.outvars, outvars, strict=True))
    return Piece(tuple(eqns), tuple([read(a) for a in jaxpr.outvars]), position, tuple(consts))


def replace(
    closed: ClosedJaxpr,
    removed: Collection[int],
    pieces: Sequence[Piece],
    renamed: Mapping[Var, Any],
    inputs: Sequence[Var] | None = None,
    outputs: Sequence[Any] | None = None,
) -> ClosedJaxpr:
    """A jaxpr without some equations, with pieces, its values renamed wherever they are read.

    What nothing reads any more is dropped. `inputs` and `outputs` are the new ones where they
    change. Raises `CycleError` where a value would be needed to compute itself.
    """
    jaxpr = closed.jaxpr

    def read(atom: Any) -> Any:
        seen = 0
        while not isinstance(atom, Literal) and atom in renamed:
            atom, seen = renamed[atom], seen + 1
            assert seen <= len(renamed), "values renamed in a circle"
        return atom

    gone = frozenset(removed)
    placed = [(i, eqn) for i, eqn in enumerate(jaxpr.eqns) if i not in gone]
    placed += [(piece.position, eqn) for piece in pieces for eqn in piece.eqns]
    placed.sort(key=lambda item: item[0])
    eqns = []
    for _, eqn in placed:
        operands = [read(a) for a in eqn.invars]
        same = all(new is old for new, old in zip(operands, eqn.invars, strict=True))
        eqns.append(eqn if same else eqn.replace(invars=operands))
    outputs = [read(a) for a in (jaxpr.outvars if outputs is None else outputs)]
    eqns = in_order(live(eqns, outputs))
    known = [*zip(jaxpr.constvars, closed.consts, strict=True)]
    known += [pair for piece in pieces for pair in piece.consts]
    used = {a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)}
    used.update(a for a in outputs if not isinstance(a, Literal))
    known = [(var, const) for var, const in known if var in used]
    return _jax.close_jaxpr(
        [var for var, _ in known],
        jaxpr.invars if inputs is None else inputs,
        outputs,
        eqns,
        [const for _, const in known],
    )


def live(eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that results or effects need (in any order)."""
    maker = {var: eqn for eqn in eqns for var in eqn.outvars}
    needed: set[int] = set()
    todo = [maker[a] for a in outputs if not isinstance(a, Literal) and a in maker]
    todo += [eqn for eqn in eqns if _jax.has_effects(eqn)]
    while todo:
        eqn = todo.pop()
        if id(eqn) in needed:
            continue
        needed.add(id(eqn))
        todo += [maker[a] for a in eqn.invars if not isinstance(a, Literal) and a in maker]
    return [eqn for eqn in eqns if id(eqn) in needed]


def in_order(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Equations with every value made before it is read, otherwise in the order given.

    Raises `CycleError` where there is no such order.
    """
    maker = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    waits: list[set[int]] = [
        {maker[a] for a in eqn.invars if not isinstance(a, Literal) and a in maker} for eqn in eqns
    ]
    with_effects = [i for i, eqn in enumerate(eqns) if _jax.has_effects(eqn)]
    for before, after in pairwise(with_effects):
        waits[after].add(before)
    readers: list[list[int]] = [[] for _ in eqns]
    for i, wanted in enumerate(waits):
        for j in wanted:
            readers[j].append(i)
    left = [len(wanted) for wanted in waits]
    ready = [i for i, count in enumerate(left) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in readers[i]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, j)
    if len(order) < len(eqns):
        stuck = [eqns[i] for i, count in enumerate(left) if count]
        raise CycleError([v for eqn in stuck for v in eqn.outvars])
    return [eqns[i] for i in order]
