"""A jaxpr without calls in it: the form in which everything else reads a program.

Calls (jit, custom_jvp, custom_vjp, closed calls, nested `mw.jit`) are inlined. A call that is to
be recomputed in the backward pass (`jax.checkpoint`, once differentiated) is inlined behind an
`optimization_barrier` on its inputs, which is what JAX itself lowers it to: the recomputation
stays a computation of its own. Every hint, whichever way it was written
(`mw.shard`, `lax.with_sharding_constraint`, `jax.sharding.reshard`, shardings of a nested call),
becomes one `hint` equation. Positions that count along a batch are said to be one (`pairing.py`),
and moves of rows in several steps are written as one (`borders/`). Dead equations are dropped.

Loops and conditionals may stay equations of one piece, or be *entered*: their bodies then stand in
the flat program too, once each, told by marks (`_jax/control.py`). A body reads values around it
like any equation, and what is computed of nothing that depends on the step is moved out of a loop.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, Control, JaxprEqn, Literal, Primitive, Var
from meshwise.borders.merge import merge_moves
from meshwise.ir.bodies import OUTERMOST, Scope, is_visible, scopes
from meshwise.ir.program import application_key, itemsize_of, shape_of
from meshwise.pairing import pair_batches

# Operators that put the elements of an array in another order or shape.
_RELAYING = frozenset(
    {
        lax.transpose_p,
        lax.reshape_p,
        lax.squeeze_p,
        lax.broadcast_in_dim_p,
        lax.rev_p,
        lax.bitcast_convert_type_p,
        lax.copy_p,
    }
)

Enters = Callable[[JaxprEqn], bool]


def enters_nothing(eqn: JaxprEqn) -> bool:
    """For a program whose loops and conditionals are to stay equations of one piece."""
    return False


@dataclass
class _Flat:
    """The equations of a program while it is being flattened."""

    enters: Enters
    eqns: list[JaxprEqn] = field(default_factory=list)
    constvars: list[Var] = field(default_factory=list)
    consts: list[Any] = field(default_factory=list)

    def emit(self, eqn: JaxprEqn) -> None:
        """Append one equation."""
        self.eqns.append(eqn)

    def mark(
        self, primitive: Primitive, control: Control, operands: Sequence[Any] = (), **params: Any
    ) -> None:
        """Append a mark that makes no value."""
        self.eqns.append(_jax.new_mark(primitive, operands, (), control, **params))

    def mark_one(
        self, primitive: Primitive, control: Control, operands: Sequence[Any], result: Var
    ) -> Var:
        """Append a mark that makes one value, and return that."""
        self.eqns.append(_jax.new_mark(primitive, operands, [result], control))
        return result


def flatten(closed: ClosedJaxpr, enters: Enters = enters_nothing) -> ClosedJaxpr:
    """Inline every call of a jaxpr, turn constraints into hint equations, drop dead ones."""
    flat = _Flat(enters)
    inputs = [_jax.new_var(v.aval) for v in closed.jaxpr.invars]
    outputs = _inline(closed.jaxpr, closed.consts, inputs, flat, None)
    eqns, outputs = _share_equal(move_out_of_loops(flat.eqns), outputs)
    constants = dict(zip(flat.constvars, flat.consts, strict=True))
    eqns = merge_moves(pair_batches(eqns, constants), constants)
    eqns = _live(eqns, outputs)
    return _jax.close_jaxpr(flat.constvars, inputs, outputs, eqns, flat.consts)


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program of local arrays without calls in it, every equation else as it is written.

    Hints say nothing there, and are dropped.
    """
    closed = _jax.without_hints_in(closed)
    flat = _Flat(enters_nothing)
    inputs = [_jax.new_var(v.aval) for v in closed.jaxpr.invars]
    outputs = _inline(closed.jaxpr, closed.consts, inputs, flat, None)
    eqns = _live(flat.eqns, outputs)
    return _jax.close_jaxpr(flat.constvars, inputs, outputs, eqns, flat.consts)


def _inline(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], flat: _Flat, call: JaxprEqn | None
) -> list[Any]:
    """Append the equations of a body applied to `args`; return the atoms it results in."""
    env: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _jax.new_var(var.aval)
        flat.constvars.append(env[var])
        flat.consts.append(const)

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results: list[Any]
        operands = [read(a) for a in eqn.invars]
        body = _jax.call_body(eqn)
        if flat.enters(eqn):
            control = Control(_jax.rename(eqn, operands, eqn.outvars, call), eqn)
            results = _enter(control, flat)
        elif _jax.hands_on(eqn):
            results = operands
        elif (literal := _jax.cast_literal(eqn, operands)) is not None:
            results = [literal]
        elif body is None:
            outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
            renamed = _jax.rename(eqn, operands, outvars, call)
            flat.emit(_as_hint(renamed) or renamed)
            results = list(outvars)
        else:
            results = _inline_call(eqn, body, operands, flat, call)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _enter(control: Control, flat: _Flat) -> list[Any]:
    """Append a loop or conditional with its bodies, each once, between marks.

    Names begin anew in a body, as JAX lets them.
    """
    enter = _enter_branches if control.name == "cond" else _enter_loop
    flat.mark(_jax.open_p, control)
    results = enter(control, flat, _jax.without_names(control.eqn))
    flat.mark(_jax.close_p, control)
    return results


def _enter_loop(control: Control, flat: _Flat, call: JaxprEqn) -> list[Any]:
    """What is handed on as it is needs no carrying, nor what is stacked again as it came."""
    parts = _jax.loop_parts(control.eqn, control.eqn.invars)
    body = parts.body.jaxpr
    count = len(parts.carried)
    own = body.invars[len(parts.body_consts) :]
    carries = [new is not old for new, old in zip(body.outvars[:count], own, strict=False)]
    inside = [
        flat.mark_one(_jax.carry_p, control, [init], _jax.new_var(var.aval)) if moves else init
        for init, var, moves in zip(parts.carried, own, carries, strict=False)
    ]
    rows = [
        flat.mark_one(_jax.step_p, control, [x], _jax.new_var(var.aval))
        for x, var in zip(parts.stepped, own[count:], strict=True)
    ]
    if parts.test is not None:
        flat.mark(_jax.body_p, control, number=0)
        args = [*parts.test_consts, *inside]
        (goes_on,) = _inline(parts.test.jaxpr, parts.test.consts, args, flat, call)
        flat.mark(_jax.test_p, control, [goes_on])
        flat.mark(_jax.end_p, control, number=0)
    flat.mark(_jax.body_p, control, number=1)
    args = [*parts.body_consts, *inside, *rows]
    made = _inline(body, parts.body.consts, args, flat, call)
    flat.mark(_jax.end_p, control, number=1)
    outvars = control.eqn.outvars
    each = zip(inside, made, outvars, parts.carried, carries, strict=False)
    results: list[Any] = [
        flat.mark_one(_jax.next_p, control, [c, new], _jax.new_var(out.aval)) if moves else init
        for c, new, out, init, moves in each
    ]
    stacked = dict(zip(rows, parts.stepped, strict=True))
    for row, out in zip(made[count:], outvars[count:], strict=True):
        if not isinstance(row, Literal) and row in stacked:
            results.append(stacked[row])
        else:
            results.append(flat.mark_one(_jax.stack_p, control, [row], _jax.new_var(out.aval)))
    return results


def _enter_branches(control: Control, flat: _Flat, call: JaxprEqn) -> list[Any]:
    index, *operands = control.eqn.invars
    flat.mark(_jax.branch_index_p, control, [index])
    made = []
    for number, branch in enumerate(control.eqn.params["branches"]):
        flat.mark(_jax.body_p, control, number=number)
        made.append(_inline(branch.jaxpr, branch.consts, operands, flat, call))
        flat.mark(_jax.end_p, control, number=number)
    return [
        flat.mark_one(_jax.join_p, control, each, _jax.new_var(out.aval))
        for *each, out in zip(*made, control.eqn.outvars, strict=True)
    ]


def _inline_call(
    eqn: JaxprEqn, body: "_jax.CallBody", operands: list[Any], flat: _Flat, call: JaxprEqn | None
) -> list[Any]:
    named = _jax.rename(eqn, eqn.invars, eqn.outvars, call)
    if body.recomputed:
        operands = _barrier(operands, flat, named)
    operands = [_hinted(x, s, flat, named) for x, s in zip(operands, body.in_specs, strict=True)]
    results = _inline(body.jaxpr, body.consts, operands, flat, named)
    return [_hinted(x, s, flat, named) for x, s in zip(results, body.out_specs, strict=True)]


def _barrier(operands: list[Any], flat: _Flat, call: JaxprEqn) -> list[Any]:
    held = [x for x in operands if not isinstance(x, Literal)]
    fresh = {x: _jax.new_var(x.aval) for x in held}
    held = list(fresh)
    flat.emit(_jax.new_eqn(lax.optimization_barrier_p, held, [fresh[x] for x in held], {}, call))
    return [x if isinstance(x, Literal) else fresh[x] for x in operands]


def _hinted(atom: Any, sharding: Any, flat: _Flat, call: JaxprEqn) -> Any:
    """The atom behind a hint equation, where a nested call gives it a sharding."""
    if sharding is None or isinstance(atom, Literal):
        return atom
    out = _jax.new_var(atom.aval)
    params = {"sharding": sharding, "reshards": True}
    flat.emit(_jax.new_eqn(_jax.hint_p, [atom], [out], params, call))
    return out


def _as_hint(eqn: JaxprEqn) -> JaxprEqn | None:
    """A constraint in JAX's own words as a hint equation; None for anything else."""
    sharding = _jax.constraint_of(eqn)
    if sharding is None:
        return None
    params = {"sharding": sharding, "reshards": True}
    return _jax.new_eqn(_jax.hint_p, eqn.invars, eqn.outvars, params, eqn)


def _share_equal(eqns: list[JaxprEqn], outputs: list[Any]) -> tuple[list[JaxprEqn], list[Any]]:
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
    """Equal for equations that compute the same; None for those that must stay."""
    if eqn.effects or eqn.primitive is lax.optimization_barrier_p:
        return None
    return application_key(eqn, tuple(_atom_key(a) for a in eqn.invars))


def _atom_key(atom: Any) -> Any:
    """A variable itself; a literal by its type and its bits."""
    if not isinstance(atom, Literal):
        return atom
    bits = atom.val.tobytes() if hasattr(atom.val, "tobytes") else (type(atom.val), atom.val)
    return atom.aval, bits


def _live(eqns: list[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
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
    """An equation of several results that says which of them nothing reads."""
    if len(eqn.outvars) < 2 or needed.issuperset(eqn.outvars):
        return eqn
    kept = [v if v in needed else _jax.DropVar(v.aval) for v in eqn.outvars]
    return eqn.replace(outvars=kept)


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
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return kept[::-1]


def move_out_of_loops(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Equations of a loop's body that read nothing made in it stand before the loop instead.

    Only where that takes no more memory than what they read, and not out of branches, which may
    never run. What a barrier holds back stays, and what is only laid otherwise (a transpose) for
    equations that stay: held throughout it would save no work worth its memory.
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
    """For each equation the scope that it is to stand in."""
    bodies = _repeated_bodies(eqns)
    made: dict[Var, Scope] = {}
    homes = []
    for eqn, scope in zip(eqns, around, strict=True):
        read = [made.get(a, OUTERMOST) for a in eqn.invars if not isinstance(a, Literal)]
        home = scope
        if _may_move(eqn):
            while home and home[-1] in bodies and all(is_visible(r, home[:-2]) for r in read):
                home = home[:-2]
        made.update(dict.fromkeys(eqn.outvars, home))
        homes.append(home)
    moved: set[Var] = set()  # what equations read that stand outside of their loops
    for index in reversed(range(len(eqns))):
        eqn = eqns[index]
        if homes[index] == around[index]:
            continue
        if _is_relaid(eqn) and moved.isdisjoint(eqn.outvars):
            homes[index] = around[index]
        else:
            moved.update(a for a in eqn.invars if not isinstance(a, Literal))
    return homes


def _repeated_bodies(eqns: Sequence[JaxprEqn]) -> set[int]:
    """Where the bodies of loops begin."""
    return {
        i
        for i, e in enumerate(eqns)
        if e.primitive is _jax.body_p and e.params["control"].name != "cond"
    }


def _is_relaid(eqn: JaxprEqn) -> bool:
    """Whether an equation only lays an array otherwise, all of it."""
    return eqn.primitive in _RELAYING and _bytes(eqn.outvars) == _bytes(eqn.invars[:1])


def _may_move(eqn: JaxprEqn) -> bool:
    """Whether an equation reads something, may run though the loop does not, and adds no memory."""
    held = [a for a in eqn.invars if not isinstance(a, Literal)]
    if not held or eqn.effects or eqn.primitive is lax.optimization_barrier_p:
        return False
    return _bytes(eqn.outvars) <= _bytes(held)


def _bytes(atoms: Sequence[Any]) -> int:
    return sum(math.prod(shape_of(a)) * itemsize_of(a) for a in atoms)
