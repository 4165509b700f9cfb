"""Equations of a flat program that need not be: equal ones, dead ones, those of every step alike.

What compilers call common subexpressions, dead code, and code that is invariant in a loop. Bodies
of loops and branches stand in the program between marks (`_jax/control.py`).
"""

from collections.abc import Sequence, Set
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
    of branches, which may never run. What a barrier holds back stays, and what is only laid
    otherwise (a transpose) for equations that stay: held throughout it would save no work worth its
    memory.
    """
    around = scopes(eqns)
    homes = _homes(eqns, around)
    before: dict[int, list[JaxprEqn]] = {}
    kept: list[tuple[int, JaxprEqn]] = []
    for index, (eqn, scope, home) in enumerate(zip(eqns, around, homes, strict=True)):
        if home == scope:
            kept.append((index, eqn))
        else:
            before.setdefault(scope[len(home)], []).append(eqn)
    return [e for index, eqn in kept for e in (*before.get(index, ()), eqn)]


def _homes(eqns: Sequence[JaxprEqn], around: Sequence[Scope]) -> list[Scope]:
    """For each equation the scope that it is to stand in.

    What makes more than it reads leaves a loop only along with all that reads it.
    """
    held: set[int] = set()
    while True:
        homes, larger = _free_homes(eqns, around, held)
        _go_along(eqns, around, homes)
        before = len(held)
        read_in: dict[Var, set[Scope]] = {}
        for index in reversed(range(len(eqns))):
            readers = {s for v in eqns[index].outvars for s in read_in.get(v, ())}
            if index in larger and not readers <= {homes[index]}:
                held.add(index)
                homes[index] = around[index]
            for atom in eqns[index].invars:
                if not isinstance(atom, Literal):
                    read_in.setdefault(atom, set()).add(homes[index])
        if len(held) == before:
            return homes


def _go_along(eqns: Sequence[JaxprEqn], around: Sequence[Scope], homes: list[Scope]) -> None:
    """What is made of nothing, or only laid otherwise, stands where the outermost that reads it.

    What a loop's body makes of nothing keeps none of its readers there that read something else.
    """
    readers: dict[Var, Scope] = {}  # of those that stand outside of their loops the outermost
    for index in reversed(range(len(eqns))):
        eqn, home = eqns[index], homes[index]
        if _is_of_nothing(eqn):
            homes[index] = _outermost([home, *(readers.get(v, home) for v in eqn.outvars)])
        elif _is_relaid(eqn) and not any(v in readers for v in eqn.outvars):
            homes[index] = around[index]
        elif home != around[index]:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    readers[atom] = _outermost([readers.get(atom, home), home])


def _free_homes(
    eqns: Sequence[JaxprEqn], around: Sequence[Scope], held: Set[int]
) -> tuple[list[Scope], set[int]]:
    """How far out each equation may stand, and which of those make more than they read.

    Those that are held stay.
    """
    bodies = _repeated_bodies(eqns)
    made: dict[Var, Scope] = {}
    free: set[Var] = set()
    sizes: dict[Var, int] = {}  # of what has moved, no more than what it was made of
    homes: list[Scope] = []
    larger: set[int] = set()
    for index, (eqn, scope) in enumerate(zip(eqns, around, strict=True)):
        home, read = scope, [a for a in eqn.invars if not isinstance(a, Literal)]
        read = [a for a in read if a not in free] or read
        if scope and _is_of_nothing(eqn):
            free.update(eqn.outvars)
        elif read and index not in held and not _stays(eqn):
            places = [made.get(a, OUTERMOST) for a in read]
            while home and home[-1] in bodies and all(is_visible(p, home[:-2]) for p in places):
                home = home[:-2]
            if home != scope:
                before = sum(sizes.get(a, bytes_of(a)) for a in read)
                if bytes_of(*eqn.outvars) > before:
                    larger.add(index)
                sizes.update((v, min(bytes_of(v), before)) for v in eqn.outvars)
        made.update(dict.fromkeys(eqn.outvars, home))
        homes.append(home)
    return homes, larger


def _outermost(around: Sequence[Scope]) -> Scope:
    """Of scopes around an equation the outermost."""
    return min(around, key=len)


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
