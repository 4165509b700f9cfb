"""A jaxpr without calls in it: the form in which everything else reads a program.

Calls (jit, custom_jvp, custom_vjp, closed calls, nested `mw.jit`) are inlined. A call that is to
be recomputed in the backward pass (`jax.checkpoint`, once differentiated) is inlined behind an
`optimization_barrier` on its inputs, which is what JAX itself lowers it to: the recomputation
stays a computation of its own. Every hint, whichever way it was written
(`mw.shard`, `lax.with_sharding_constraint`, `jax.sharding.reshard`, shardings of a nested call),
becomes one `hint` equation. A reshape that transposes first is two equations. Of a conditional
whose index is known while tracing the branch that runs is inlined, and a `while` whose steps are
known is a `scan` of so many. Then the program is made simpler (`simplify/`).

Loops and conditionals may stay equations of one piece, or be *entered*: their bodies then stand in
the flat program too, once each, told by marks (`_jax/control.py`). A body reads values around it
like any equation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, Control, JaxprEqn, Literal, Primitive, Var
from meshwise.simplify.counted_loops import known_steps
from meshwise.simplify.numbers import Numbers
from meshwise.simplify.redundancy import eliminate_dead_code
from meshwise.simplify.simplify import simplify

Enters = Callable[[JaxprEqn], bool]


def enters_nothing(eqn: JaxprEqn) -> bool:
    """For a program whose loops and conditionals are to stay equations of one piece."""
    return False


@dataclass
class _Flat:
    """The equations of a program while it is being flattened; with branches known not to run."""

    enters: Enters
    keeps_branches: bool = True
    eqns: list[JaxprEqn] = field(default_factory=list)
    makers: dict[Var, JaxprEqn] = field(default_factory=dict)
    constvars: list[Var] = field(default_factory=list)
    consts: list[Any] = field(default_factory=list)

    def emit(self, eqn: JaxprEqn) -> None:
        """Append one equation."""
        self.eqns.append(eqn)
        self.makers.update(dict.fromkeys(eqn.outvars, eqn))

    def numbers(self) -> Numbers:
        """What is known of the numbers so far."""
        return Numbers(self.makers, dict(zip(self.constvars, self.consts, strict=True)))

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


def as_written(closed: ClosedJaxpr, enters: Enters = enters_nothing) -> ClosedJaxpr:
    """Inline every call of a jaxpr, turn constraints into hint equations, drop dead ones.

    But for branches and loops whose index or steps are known nothing else is simplified: of each
    value only what is written of it itself is a hint on it.
    """
    flat = _Flat(enters)
    inputs, outputs = _flattened(closed, flat)
    eqns = eliminate_dead_code(flat.eqns, outputs)
    return _jax.close_jaxpr(flat.constvars, inputs, outputs, eqns, flat.consts)


def _flattened(closed: ClosedJaxpr, flat: _Flat) -> tuple[list[Any], list[Any]]:
    inputs = [_jax.new_var(v.aval) for v in closed.jaxpr.invars]
    return inputs, _inline(closed.jaxpr, closed.consts, inputs, flat, None)


def flatten(closed: ClosedJaxpr, enters: Enters = enters_nothing) -> ClosedJaxpr:
    """Inline every call of a jaxpr, turn constraints into hint equations, simplify the program.

    Of a conditional whose index is known the one branch that runs is left.
    """
    flat = _Flat(enters, keeps_branches=False)
    inputs, outputs = _flattened(closed, flat)
    constants = dict(zip(flat.constvars, flat.consts, strict=True))
    eqns, outputs = simplify(flat.eqns, outputs, constants)
    return _jax.close_jaxpr(flat.constvars, inputs, outputs, eqns, flat.consts)


def with_counted_regions(jaxpr: Any) -> Any:
    """A jaxpr, bodies included, whose hand-written regions have no `while` that only counts."""

    def change(eqn: JaxprEqn) -> list[JaxprEqn]:
        return [_jax.with_bodies(eqn, _counted if _is_region(eqn) else with_counted_regions)]

    return _jax.with_each(jaxpr, change)


def _counted(jaxpr: Any) -> Any:
    """A jaxpr, bodies but those of kernels included, whose loops that count are scans."""
    inner = _jax.opened(jaxpr)
    flat = _Flat(enters_nothing)
    flat.makers.update((v, eqn) for eqn in inner.eqns for v in eqn.outvars)

    def change(eqn: JaxprEqn) -> list[JaxprEqn]:
        steps = _known_steps(eqn, lambda atom: atom, flat)
        eqn = eqn if steps is None else _jax.counted(eqn, steps)
        is_read = _is_region(eqn) or _jax.has_bodies(eqn) or _jax.call_body(eqn) is not None
        return [_jax.with_bodies(eqn, _counted) if is_read else eqn]

    return _jax.with_each(jaxpr, change)


def _is_region(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "shard_map"


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program of local arrays without calls in it; else `as_written`.

    Hints say nothing there, and are dropped.
    """
    return as_written(_jax.without_hints_in(closed))


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

    for original in jaxpr.eqns:
        results: list[Any]
        steps = _known_steps(original, read, flat)
        eqn = original if steps is None else _jax.counted(original, steps)
        operands = [read(a) for a in eqn.invars]
        body = _jax.call_body(eqn)
        if (branch := _branch_that_runs(eqn, operands, flat)) is not None:
            results = _inline(branch.jaxpr, branch.consts, operands[1:], flat, call)
        elif flat.enters(eqn):
            control = Control(_jax.rename(eqn, operands, eqn.outvars, call), eqn)
            results = _enter(control, flat)
        elif _jax.hands_on(eqn):
            results = operands
        elif (literal := _jax.cast_literal(eqn, operands)) is not None:
            results = [literal]
        elif body is None:
            outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
            renamed = _jax.rename(eqn, operands, outvars, call)
            for one in _transposed_first(_as_hint(renamed) or renamed):
                flat.emit(one)
            results = list(outvars)
        else:
            results = _inline_call(eqn, body, operands, flat, call)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _transposed_first(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A reshape that transposes first as two equations, so that every reshape keeps the order."""
    order = eqn.params["dimensions"] if eqn.primitive is lax.reshape_p else None
    if order is None:
        return [eqn]
    turned = _jax.applied(lax.transpose_p, eqn.invars, {"permutation": order}, eqn)
    params = eqn.params | {"dimensions": None}
    return [turned, eqn.replace(invars=list(turned.outvars), params=params)]


def _known_steps(eqn: JaxprEqn, read: Callable[[Any], Any], flat: _Flat) -> int | None:
    """How many steps a `while` takes that counts, and ends alike for all that is batched."""
    if eqn.primitive is not lax.while_p or _jax.has_effects(eqn):
        return None
    if eqn.params["cond_jaxpr"].out_avals[0].shape:
        return None
    parts = _jax.loop_parts(eqn, [read(a) for a in eqn.invars])
    return known_steps(parts, flat.numbers().of, as_written)


def _branch_that_runs(eqn: JaxprEqn, operands: Sequence[Any], flat: _Flat) -> Any | None:
    """The one branch of a conditional that ever runs; None where its index is not known."""
    if flat.keeps_branches or eqn.primitive is not lax.cond_p:
        return None
    index, branches = flat.numbers().of(operands[0]), eqn.params["branches"]
    return None if index is None else branches[min(max(int(index), 0), len(branches) - 1)]


def _enter(control: Control, flat: _Flat) -> list[Any]:
    """Append a loop or conditional with its bodies, each once, between marks.

    Names begin anew in a body, as JAX lets them.
    """
    enter = _enter_branches if control.is_choice else _enter_loop
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
