"""hoist: a collective that a loop runs in every step, run once before or after it.

*Before*: of what is the same in all steps. *After*: of what a loop only adds up. A loop that sums
gradients of micro-batches and reduces each of them sends as many times as it has steps; the sum of
devices' own sums is the same, and is sent once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.errors import IllegalMove
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import bytes_of, shape_of
from meshwise.schedule.moves.loops import MOVE, SCATTER, Loop, LoopSum, sum_of
from meshwise.schedule.moves.refusal import refuse, replaced
from meshwise.schedule.rewrite import Piece, trace_piece
from meshwise.schedule.view import View


@dataclass(frozen=True)
class Hoisted:
    """The program after collectives left a loop, and their results outside of it.

    Before a loop: the collective's result. After it: the loop's result that it completes. `loop` is
    the loop that they left, as it is now, and `held_bytes` what it holds in addition.
    """

    view: View
    values: tuple[Var, ...]
    loop: JaxprEqn
    held_bytes: int


def hoist(
    view: View, value: Var, max_bytes: int | None = None, more_bytes: bool = False
) -> Hoisted:
    """A collective out of a scan, by its result in the body; by a result of the scan all that can.

    Before the loop go collectives of what is the same in all steps, with what computes it. After it
    goes a psum (or reduce_scatter) that is only added to a carried value, perhaps scaled, cast or
    transposed between: devices carry their own sums. `max_bytes` bounds what is held throughout the
    loop in addition: values made before it, and own sums where tiles were carried. Sums are taken
    in another order than before. What would send more bytes outside of the loop than in all its
    steps stays, unless `more_bytes`. Raises `IllegalMove`.
    """
    if value not in view.maker:
        found = [(loop, value) for loop in _loops(view) if value in loop.collectives]
        if not found:
            raise _no_collective(view.text(value))
        return _hoisted(*found[0], max_bytes, more_bytes)
    if view.eqns[view.maker[value]].primitive.name != "scan":
        raise _no_collective(view.text(value))
    return _all_of(Loop(view, view.maker[value]), max_bytes, more_bytes)


def _all_of(loop: Loop, max_bytes: int | None, more_bytes: bool) -> Hoisted:
    """All collectives that can leave a loop."""
    values: list[Var] = []
    refusals: list[IllegalMove] = []
    position, held = 0, 0
    while position < len(loop.collectives):
        try:
            left = None if max_bytes is None else max_bytes - held
            done = _hoisted(loop, loop.collectives[position], left, more_bytes)
        except IllegalMove as why:
            refusals.append(why)
            position += 1
            continue
        values += done.values
        loop = next(a for a in _loops(done.view) if a.eqn.outvars == done.loop.outvars)
        held += done.held_bytes
    if values:
        remaining = tuple([v for v in values if v in loop.view.maker])
        return Hoisted(loop.view, remaining, loop.eqn, held)
    raise refusals[0] if refusals else _no_collective(loop.view.text(loop.eqn.outvars[0]))


def _hoisted(loop: Loop, value: Var, max_bytes: int | None, more_bytes: bool) -> Hoisted:
    eqn = loop.maker[value]
    if all(isinstance(a, Literal) or a in loop.same for a in eqn.invars):
        done = _before(loop, eqn, max_bytes)
    else:
        done = _after(loop, sum_of(loop, eqn), max_bytes)
    before, after = loop.view.program.wire_bytes, done.view.program.wire_bytes
    if after > before and not more_bytes:
        raise refuse(
            MOVE,
            [f"{loop.text(value)}: {after:,} bytes are sent after it, {before:,} before"],
            "What is small in the loop may be large where it leaves it.",
            "Leave it in the loop, or ask for it with more_bytes=True.",
        )
    return done


def _before(loop: Loop, collective: JaxprEqn, max_bytes: int | None) -> Hoisted:
    """A collective of what is the same in all steps, before the loop."""
    view, body = loop.view, loop.body
    held = bytes_of(*collective.outvars)
    _check_bytes(loop, collective, held, max_bytes)
    scope = reason_scope(len(view.program.reasons))
    first = loop.counts[0]
    chain = _ancestors(loop, collective)

    def outside(*consts: Any) -> list[Any]:
        env = _environment(loop, body.invars[:first], consts)
        for eqn in chain:
            _run(eqn, env)
        with jax.named_scope(scope):
            _run(collective, env)
        return [env[v] for v in collective.outvars]

    made = trace_piece(outside, loop.eqn.invars[:first], view.mesh, loop.index)

    def inside(*operands: Any) -> list[Any]:
        known = dict(zip(collective.outvars, operands, strict=False))
        return _scan(loop, operands[len(known) :], known)

    piece = trace_piece(inside, [*made.results, *loop.eqn.invars], view.mesh, loop.index)
    renamed = dict(zip(loop.eqn.outvars, piece.results, strict=True))
    jaxpr = replaced(view, MOVE, [loop.index], [made, piece], renamed)
    done = view.with_jaxpr(jaxpr, [_reason(loop, collective, "before")])
    return Hoisted(done, made.results, _scan_of(piece), held)


def _after(loop: Loop, sum_: LoopSum, max_bytes: int | None) -> Hoisted:
    """Devices carry their own sums; these are summed over devices after the loop."""
    view, kind = loop.view, sum_.kind
    is_scattered = kind.primitive.name == SCATTER
    shape = shape_of(kind.invars[0]) if is_scattered else None
    held = bytes_of(kind.invars[0]) if is_scattered else 0
    _check_bytes(loop, kind, held, max_bytes)
    scope = reason_scope(len(view.program.reasons))
    place = loop.counts[0] + sum_.carried

    def summed(*operands: Any) -> list[Any]:
        given = list(operands)
        start = given[place]
        given[place] = lax.full(shape or start.shape, 0, start.dtype)
        results = _scan(loop, given, {}, sum_.collectives)
        with _jax.at_source(kind), jax.named_scope(scope):
            (total,) = _jax.bind(kind, [results[sum_.carried]])
        results[sum_.carried] = lax.add(start, total)
        return results

    piece = trace_piece(summed, loop.eqn.invars, view.mesh, loop.index)
    renamed = dict(zip(loop.eqn.outvars, piece.results, strict=True))
    jaxpr = replaced(view, MOVE, [loop.index], [piece], renamed)
    done = view.with_jaxpr(jaxpr, [_reason(loop, kind, "after")])
    return Hoisted(done, (piece.results[sum_.carried],), _scan_of(piece), held)


def _scan_of(piece: Piece) -> JaxprEqn:
    return next(eqn for eqn in piece.eqns if eqn.primitive.name == "scan")


def _scan(
    loop: Loop,
    operands: Sequence[Any],
    known: Mapping[Var, Any],
    identities: Sequence[JaxprEqn] = (),
) -> list[Any]:
    """The loop, traced anew: values of the body that are known, collectives that do nothing."""
    first, carried = loop.counts
    params, body = loop.eqn.params, loop.body
    consts, carry, rows = (
        operands[:first],
        operands[first : first + carried],
        operands[first + carried :],
    )

    def step(carry: Any, row: Any) -> Any:
        env = _environment(loop, body.invars, [*consts, *carry, *row])
        env.update(known)
        for eqn in loop.eqns:
            if any(eqn is e for e in identities):
                env[eqn.outvars[0]] = env[eqn.invars[0]]
            elif not all(v in known for v in eqn.outvars):
                _run(eqn, env)
        outs = [_jax.value_in(env, a) for a in body.outvars]
        return outs[:carried], outs[carried:]

    names = ("length", "reverse", "unroll")
    done, stacked = lax.scan(step, list(carry), list(rows), **{n: params[n] for n in names})
    return [*done, *stacked]


def _environment(loop: Loop, invars: Sequence[Var], values: Sequence[Any]) -> dict[Any, Any]:
    env = dict(zip(loop.body.constvars, loop.constants, strict=True))
    env.update(zip(invars, values, strict=True))
    return env


def _run(eqn: JaxprEqn, env: dict[Any, Any]) -> None:
    with _jax.at_source(eqn):
        results = _jax.bind(eqn, [_jax.value_in(env, a) for a in eqn.invars])
    env.update(zip(eqn.outvars, results, strict=True))


def _ancestors(loop: Loop, collective: JaxprEqn) -> list[JaxprEqn]:
    """What computes a collective's operands, in order."""
    needed = {a for a in collective.invars if not isinstance(a, Literal)}
    chain: list[JaxprEqn] = []
    for eqn in reversed(loop.eqns):
        if eqn is not collective and any(v in needed for v in eqn.outvars):
            chain.insert(0, eqn)
            needed.update(a for a in eqn.invars if not isinstance(a, Literal))
    return chain


def _loops(view: View) -> list[Loop]:
    return [Loop(view, i) for i, e in enumerate(view.eqns) if e.primitive.name == "scan"]


def _reason(loop: Loop, collective: JaxprEqn, where: str) -> Reason:
    text = f"hoist of {loop.text(collective.outvars[0])}, {where} the loop"
    return Reason(text, _jax.source_summary(collective))


def _check_bytes(loop: Loop, collective: JaxprEqn, held: int, max_bytes: int | None) -> None:
    if max_bytes is not None and held > max_bytes:
        raise refuse(
            MOVE,
            [f"{loop.text(collective.outvars[0])}: {held:,} bytes are held, {max_bytes:,} allowed"],
            "What leaves a loop is held while it runs.",
            "Allow more with max_bytes, or leave it in the loop.",
        )


def _no_collective(what: str) -> IllegalMove:
    return refuse(
        MOVE,
        [what],
        "This move is for collectives within a loop (scan).",
        "Name a result of a scan, or of a collective in its body.",
    )
