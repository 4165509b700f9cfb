"""Equations of a flat program that need not be: equal ones, dead ones, those of every step alike.

What compilers call common subexpressions, dead code, and code that is invariant in a loop. Bodies
of loops and branches stand in the program between marks (`_jax/control.py`).
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import Control, JaxprEqn, Literal, Var
from meshwise.ir.bodies import OUTERMOST, Scope, is_visible, scopes
from meshwise.ir.operators import COPIES, DRAWING, RECASTS, RESHAPES, SPREADS, TURNS, is_among
from meshwise.ir.program import application_key, atom_key, bytes_of

# Marks that may be shared, as one row or stack is like the other.
_OF_STACKS = frozenset({_jax.step_p, _jax.stack_p})

# Operators that put the elements of an array in another order or shape.
_RELAYING = TURNS | RESHAPES | SPREADS | RECASTS | COPIES


def eliminate_common_subexpressions(
    eqns: list[JaxprEqn], outputs: list[Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """Compute equal things once: equations with the same primitive, parameters and operands.

    What is recomputed on purpose stands behind a barrier, so its operands differ. A body shares
    what is made in it or around it; a loop's not what is only laid otherwise.
    """
    same: dict[Var, Any] = {}
    repeats = _repeated_bodies(eqns)
    first: dict[Any, list[tuple[Scope, JaxprEqn]]] = {}
    kept = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for original, scope in zip(eqns, scopes(eqns), strict=True):
        eqn = original.replace(invars=[read(a) for a in original.invars])
        key = _equation_key(eqn)
        equal = first.setdefault(key, []) if key is not None else []
        seen = [(made, e) for made, e in equal if is_visible(made, scope)]
        if _is_relaid(eqn):
            seen = [(made, e) for made, e in seen if not repeats.intersection(scope[len(made) :])]
        if seen:
            same.update(zip(eqn.outvars, seen[0][1].outvars, strict=True))
        else:
            kept.append(eqn)
            equal.append((scope, eqn))
    return kept, [read(a) for a in outputs]


def _equation_key(eqn: JaxprEqn) -> Any:
    """Equal for equations that compute the same; None for those that must stay.

    Of the marks of a loop those of the rows of one stack are, and those that stack the same rows.
    """
    if _stays(eqn) and eqn.primitive not in _OF_STACKS:
        return None
    return application_key(eqn, tuple(atom_key(a) for a in eqn.invars))


def _stays(eqn: JaxprEqn) -> bool:
    """Whether an equation is run where it stands, as often as it stands there."""
    is_held = eqn.primitive is lax.optimization_barrier_p
    return bool(eqn.effects) or is_held or is_among(eqn, DRAWING)


def eliminate_dead_code(eqns: list[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations whose results are used or that have effects.

    A loop or choice is there for what is used of its results, and for effects in it. What is
    carried is used where a step reads it, or its last value is read.
    """
    needed = {x for x in outputs if not isinstance(x, Literal)}
    entered: set[Control] = set()
    while True:
        known = len(needed), len(entered)
        kept = _needed_so_far(eqns, needed, entered)
        if known == (len(needed), len(entered)):
            return [_without_unread(eqn, needed) for eqn in kept]


def _without_unread(eqn: JaxprEqn, needed: set[Var]) -> JaxprEqn:
    """An equation of several results that says which of them nothing reads.

    Of a sort what is only laid in the order of its keys is left out with them.
    """
    if len(eqn.outvars) < 2 or needed.issuperset(eqn.outvars):
        return eqn
    if eqn.primitive is lax.sort_p:
        places = _sorted_places(eqn, needed)
        outvars = [eqn.outvars[k] for k in places]
        eqn = eqn.replace(invars=[eqn.invars[k] for k in places], outvars=outvars)
    kept = [v if v in needed else _jax.DropVar(v.aval) for v in eqn.outvars]
    return eqn.replace(outvars=kept)


def _sorted_places(eqn: JaxprEqn, needed: set[Var]) -> list[int]:
    """Which operands of a sort are keys, or are read when they are sorted."""
    keys = eqn.params["num_keys"]
    return [k for k, v in enumerate(eqn.outvars) if k < keys or v in needed]


def _needed_so_far(eqns: list[JaxprEqn], needed: set[Var], entered: set[Control]) -> list[JaxprEqn]:
    """The equations that make what is needed; they add what they need, and what they stand in."""
    kept = []
    around: list[Control] = []
    for eqn in reversed(eqns):
        mark = _jax.is_mark(eqn)
        if eqn.primitive is _jax.close_p:
            around.append(eqn.params["control"])
        elif eqn.primitive is _jax.open_p:
            around.pop()
        if mark and not eqn.outvars:
            stays = eqn.params["control"] in entered
        else:
            made = eqn.invars[:1] if eqn.primitive is _jax.next_p else []
            used = any(v in needed for v in (*eqn.outvars, *made))
            stays = used or (bool(eqn.effects) and not mark)
            if stays:
                entered.update(around)
        if stays:
            kept.append(eqn)
            read = eqn.invars
            if eqn.primitive is lax.sort_p:
                read = [read[k] for k in _sorted_places(eqn, needed)]
            needed.update(x for x in read if not isinstance(x, Literal))
    return kept[::-1]


def hoist_loop_invariants(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Equations of a loop's body that read nothing made in it stand before the loop instead.

    Only where they, or all that is made of them, take no more memory than what is read, and not out
    of branches, which may never run. A loop may take no trip: then what has left it is computed all
    the same, also what makes more than it reads. It has no effects, and takes the memory and time
    of one step. What a barrier holds back stays, and what is only laid otherwise (a transpose) for
    equations that stay: held throughout it would save no work worth its memory.
    """
    around = scopes(eqns)
    homes = _Homes(eqns, around).settled()
    before: dict[int, list[JaxprEqn]] = {}
    kept: list[tuple[int, JaxprEqn]] = []
    for index, (eqn, scope, home) in enumerate(zip(eqns, around, homes, strict=True)):
        if home == scope:
            kept.append((index, eqn))
        else:
            before.setdefault(scope[len(home)], []).append(eqn)
    return [e for index, eqn in kept for e in (*before.get(index, ()), eqn)]


class _Homes:
    """For each equation the scope that it is to stand in: as far out as what it reads lets it.

    But what makes more than it reads leaves a loop only along with all that reads it, and what is
    only laid otherwise with some of that. Where one has to stay, its readers fall back, and what
    they read has to be looked at again; nothing else, or chains would take the square of their
    length.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], around: Sequence[Scope]) -> None:
        self._eqns, self._around = eqns, around
        self._bodies = _repeated_bodies(eqns)
        self._made_by = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self._read = [[a for a in eqn.invars if not isinstance(a, Literal)] for eqn in eqns]
        self._readers: list[list[int]] = [[] for _ in eqns]
        for index in range(len(eqns)):
            for maker in self._makers(index):
                self._readers[maker].append(index)
        self._of_nothing = {
            v
            for e, s in zip(eqns, around, strict=True)
            if s and _is_of_nothing(e)
            for v in e.outvars
        }
        self._held: set[int] = set()
        self._free = list(around)  # as far out as what is read lets them stand
        self._bytes: list[float] = [math.inf] * len(eqns)  # read by those that may stand elsewhere
        self._homes = list(around)

    def settled(self) -> list[Scope]:
        """The scopes when none falls back any more."""
        onward, back = list(range(len(self._eqns))), []  # readers come later: they are heaps
        while onward:
            while onward:
                index = _popped(onward)
                if self._is_freed_otherwise(index):
                    heappush(back, -index)
                    for reader in self._readers[index]:
                        if self._free[reader] != self._around[reader]:
                            heappush(onward, reader)
            while back:
                index = -_popped(back)
                if self._stands_otherwise(index):
                    for maker in self._makers(index):
                        if self._has_left(maker):
                            heappush(back, -maker)
                if index in self._held and self._free[index] != self._around[index]:
                    heappush(onward, index)
        return [self._with_readers(i) for i in range(len(self._eqns))]

    def _is_freed_otherwise(self, index: int) -> bool:
        """Find how far out an equation may stand by what it reads; whether that is news.

        What a body makes of nothing keeps none of its readers there that read something else.
        """
        eqn, home, read_bytes = self._eqns[index], self._around[index], math.inf
        read = [a for a in self._read[index] if a not in self._of_nothing] or self._read[index]
        if read and index not in self._held and not _stays(eqn):
            places = [
                self._free[self._made_by[a]] if a in self._made_by else OUTERMOST for a in read
            ]
            while home and home[-1] in self._bodies and _are_visible(places, home[:-2]):
                home = home[:-2]
            if home != self._around[index]:
                read_bytes = sum(map(self._least_bytes, read))
        known = self._free[index], self._bytes[index]
        self._free[index], self._bytes[index] = home, read_bytes
        return known != (home, read_bytes)

    def _stands_otherwise(self, index: int) -> bool:
        """Find where an equation stands among its readers, or must; whether that is news."""
        eqn, home, around = self._eqns[index], self._free[index], self._around[index]
        if _is_relaid(eqn) and not any(self._has_left(r) for r in self._readers[index]):
            home = around
        if home != around and bytes_of(*eqn.outvars) > self._bytes[index]:
            if any(self._homes[r] != home for r in self._readers[index]):
                home = around
                self._held.add(index)
        known, self._homes[index] = self._homes[index], home
        return known != home

    def _with_readers(self, index: int) -> Scope:
        """Where an equation stands; of what is made of nothing the outermost that reads it says."""
        home, readers = self._homes[index], self._readers[index]
        if self._of_nothing.isdisjoint(self._eqns[index].outvars):
            return home
        return min([home, *(self._homes[r] for r in readers if self._has_left(r))], key=len)

    def _makers(self, index: int) -> set[int]:
        """Which equations make what one reads."""
        return {self._made_by[a] for a in self._read[index] if a in self._made_by}

    def _has_left(self, index: int) -> bool:
        return self._homes[index] != self._around[index]

    def _least_bytes(self, array: Var) -> float:
        """Of an array, or what it was made of before the loop, the less."""
        made_of = self._bytes[self._made_by[array]] if array in self._made_by else math.inf
        return min(bytes_of(array), made_of)


def _are_visible(made: Sequence[Scope], reader: Scope) -> bool:
    """Whether all that is made in some scopes can be read in another."""
    return all(is_visible(scope, reader) for scope in made)


def _popped(heap: list[int]) -> int:
    """The least of a heap, taken out as often as it is there."""
    least = heappop(heap)
    while heap and heap[0] == least:
        heappop(heap)
    return least


def _repeated_bodies(eqns: Sequence[JaxprEqn]) -> set[int]:
    """Where the bodies of loops begin."""
    return {
        i
        for i, e in enumerate(eqns)
        if e.primitive is _jax.body_p and not e.params["control"].is_choice
    }


def _is_relaid(eqn: JaxprEqn) -> bool:
    """Whether an equation only lays an array otherwise, all of it."""
    return is_among(eqn, _RELAYING) and bytes_of(*eqn.outvars) == bytes_of(*eqn.invars[:1])


def _is_of_nothing(eqn: JaxprEqn) -> bool:
    """Whether an equation reads no value: zeros, or numbers in order."""
    return not _stays(eqn) and all(isinstance(a, Literal) for a in eqn.invars)
