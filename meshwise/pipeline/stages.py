"""A loss function's jaxpr cut into stages at its marks.

An equation belongs to the stage in whose part of the program it was traced. What a stage makes and
a later one needs is sent from stage to stage until there (a value that skips stages is carried
along). Two sorts of equations make an exception, because sending what they make would be waste:
those that read parameters but nothing of the microbatch, such as a cast of a weight, and those that
read the microbatch but no parameter, such as a mask or a label. Each stage that needs one computes
it by itself, from parameters and inputs, which are at hand in every stage.

Calls that are cut inside (`jax.jit`, `jax.checkpoint`) are inlined; no other equation is touched,
so custom derivatives keep theirs.

A model without marks is cut where `balance.py` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise._jax.jaxprs import bodies_of, opened
from meshwise._jax.pipelines import stage_boundary_p
from meshwise.cost.hardware import GENERIC
from meshwise.errors import PipelineError, message
from meshwise.pipeline.balance import (
    beginnings,
    by_first_reader,
    crossing_bytes,
    seconds_of,
)

# One operator that cannot be cut takes at most so many even shares where stages are balanced.
MOST_SHARES = 1.5

Place = tuple[int, ...]

_INLINED = ("jit", "pjit", "remat2", "checkpoint", "closed_call", "core_call")


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage: a jaxpr of what it reads, and of what arrives from the stage before.

    Its inputs are the leaves it reads of the loss function's, by number: of the parameters, of the
    values the function closes over (`held`), of the microbatch (`fed`); then what arrives. Its
    results are what leaves, or those of the function.
    """

    jaxpr: ClosedJaxpr
    params: tuple[int, ...]
    held: tuple[int, ...]
    fed: tuple[int, ...]

    @property
    def arriving(self) -> list[Any]:
        """Types of what arrives."""
        return list(self.jaxpr.in_avals[len(self.params) + len(self.held) + len(self.fed) :])

    @property
    def leaving(self) -> list[Any]:
        """Types of what leaves."""
        return list(self.jaxpr.out_avals)


@dataclass(frozen=True, eq=False)
class Cut:
    """A loss function in stages.

    `lines` says for each stage but the first where its mark stands. `chain` is the whole function:
    of `params` parameters, `held` values it closes over, and a microbatch, to its results and then
    everything that leaves the first stage, the second, and so on.
    """

    stages: tuple[Stage, ...]
    lines: tuple[str, ...]
    chain: ClosedJaxpr
    params: int
    held: int


@dataclass
class _Flat:
    """The equations of a program while it is being flattened, each with its stage and its place.

    A place has a number for each call around an equation, and one in the innermost. Stages begin at
    marks, and at the places of `begin`; with `opens_all` calls are inlined that are not cut.
    """

    name: str
    begin: frozenset[Place] = frozenset()
    opens_all: bool = False
    eqns: list[JaxprEqn] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    constants: dict[Var, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def opens(self, eqn: JaxprEqn, place: Place) -> bool:
        """Whether an equation at a place is a call that is inlined."""
        is_cut = any(len(b) > len(place) and b[: len(place)] == place for b in self.begin)
        return is_cut or _has_marks(eqn) or (self.opens_all and _body(eqn) is not None)


def cut(closed: ClosedJaxpr, params: int, held: int, name: str, stages: int | None = None) -> Cut:
    """Cut a jaxpr whose first result is the loss, at its marks; or, without any, into `stages`.

    Its inputs are `params` leaves of parameters, `held` values that the function closes over, and
    the leaves of a microbatch. `name` is the function's, for messages.
    """
    begin = frozenset[Place]()
    if stages is not None:
        begin = _beginnings(closed, params + held, name, stages)
    flat = _Flat(name, begin)
    inputs = [_jax.new_var(v.aval) for v in closed.jaxpr.invars]
    results = _inline(closed.jaxpr, closed.consts, inputs, flat)
    makers = {var: i for i, eqn in enumerate(flat.eqns) for var in eqn.outvars}
    known = params + held
    remade = _remade(flat.eqns, set(inputs[:known]), set(inputs[known:]))
    parts = inputs[:params], inputs[params:known], inputs[known:]
    leaving: list[Any] = results
    found: list[Stage] = []
    sent: list[list[Var]] = []  # what arrives at each stage, from the last to the first
    for number in range(len(flat.lines), -1, -1):
        own = [r or s == number for r, s in zip(remade, flat.stages, strict=True)]
        eqns, needed = _slice(flat.eqns, own, leaving)
        arriving = sorted((v for v in needed if v in makers), key=makers.__getitem__)
        found.append(_stage(flat, eqns, needed, arriving, leaving, parts))
        leaving = arriving
        sent.append(arriving)
    found.reverse()
    sent.reverse()
    made = [*results, *(v for values in sent for v in values)]
    constants = list(flat.constants)
    chain = _jax.close_jaxpr(
        constants, inputs, made, flat.eqns, [flat.constants[v] for v in constants]
    )
    return Cut(tuple(found), tuple(flat.lines), chain, params, held)


def _beginnings(closed: ClosedJaxpr, known: int, name: str, stages: int) -> frozenset[Place]:
    """Where the later of so many stages begin, which take alike long."""
    if any(map(_is_mark_or_has, closed.jaxpr.eqns)):
        raise PipelineError(
            message(
                f"{name} is cut in two ways",
                [f"stages={stages}, and it has stage boundaries"],
                "A model is cut at its marks, or into stages that take alike long.",
                "Leave out stages=, or mw.stage_boundary.",
            )
        )
    flat = _Flat(name, opens_all=True)
    inputs = [_jax.new_var(v.aval) for v in closed.jaxpr.invars]
    results = _inline(closed.jaxpr, closed.consts, inputs, flat)
    remade = _remade(flat.eqns, set(inputs[:known]), set(inputs[known:]))
    groups = by_first_reader(flat.eqns, remade, results)
    order = [i for group in groups.values() for i in group]
    eqns = [flat.eqns[i] for i in order]
    seconds = seconds_of(eqns, [*flat.constants, *inputs], results, GENERIC)
    crossing = crossing_bytes(eqns, [not remade[i] for i in order], results)
    bounds = [0, *accumulate(map(len, groups.values()))]
    begin = beginnings(
        [sum(seconds[start:end]) for start, end in pairwise(bounds)],
        [crossing[start] for start in bounds[:-1]],
        stages,
        1 / GENERIC.link_bytes_per_s,
    )
    most = MOST_SHARES * sum(seconds) / stages
    is_one = [t > most and _jax.has_jaxpr(e) for t, e in zip(seconds, eqns, strict=True)]
    if begin is None or any(is_one):
        raise _cannot_balance(name, stages, eqns, seconds)
    own = list(groups)
    return frozenset(_outermost(flat.places[own[i]], flat.places[own[i - 1]]) for i in begin)


def _outermost(place: Place, before: Place) -> Place:
    """Where the outermost call begins that is around a place, and not around one `before` it."""
    shared = next(n for n, number in enumerate(place) if before[n : n + 1] != (number,))
    return place[: shared + 1]


def _cannot_balance(
    name: str, stages: int, eqns: Sequence[JaxprEqn], seconds: Sequence[float]
) -> PipelineError:
    total = sum(seconds) or 1
    long = [i for i, taken in enumerate(seconds) if taken > total / stages]
    return PipelineError(
        message(
            f"{name} cannot be cut into {stages} stages that take alike long",
            [
                f"{seconds[i] / total:.0%} is {_jax.operator_name(eqns[i])} "
                f"at {_jax.source_summary(eqns[i])}"
                for i in long
            ]
            or ["nothing in it takes long"],
            "A model is cut between operators, and a loop or a function with derivatives of its "
            "own is one operator.",
            "Write the loop over layers as a Python loop, or use mw.pipeline where they are alike.",
        )
    )


def _stage(
    flat: _Flat,
    eqns: Sequence[JaxprEqn],
    needed: Sequence[Var],
    arriving: Sequence[Var],
    leaving: Sequence[Any],
    inputs: tuple[Sequence[Var], ...],
) -> Stage:
    """The stage of some equations; its parameters are in the order in which it reads them."""
    read = [[part.index(v) for v in needed if v in part] for part in inputs]
    params, held, fed = read[0], sorted(read[1]), sorted(read[2])
    numbered = zip(inputs, (params, held, fed), strict=True)
    constants = [v for v in needed if v in flat.constants]
    jaxpr = _jax.close_jaxpr(
        constants,
        [*(part[i] for part, numbers in numbered for i in numbers), *arriving],
        leaving,
        eqns,
        [flat.constants[v] for v in constants],
    )
    return Stage(jaxpr, tuple(params), tuple(held), tuple(fed))


def _slice(
    eqns: Sequence[JaxprEqn], own: Sequence[bool], wanted: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Var]]:
    """The equations that make what is wanted, of those allowed; and what these need of others."""
    missing = {v for v in wanted if not isinstance(v, Literal)}
    kept = []
    for eqn, is_own in zip(reversed(eqns), reversed(own), strict=True):
        if is_own and (eqn.effects or any(v in missing for v in eqn.outvars)):
            kept.append(eqn)
            missing.difference_update(eqn.outvars)
            missing.update(a for a in eqn.invars if not isinstance(a, Literal))
    kept.reverse()
    reads = [a for eqn in kept for a in eqn.invars] + list(wanted)
    order = dict.fromkeys(a for a in reads if not isinstance(a, Literal) and a in missing)
    return kept, list(order)


def _remade(eqns: Sequence[JaxprEqn], params: set[Var], fed: set[Var]) -> list[bool]:
    """Whether each equation reads, through others too, no parameter or nothing of a microbatch."""
    of_params, of_fed = set(params), set(fed)
    found = []
    for eqn in eqns:
        reads = {a for a in eqn.invars if not isinstance(a, Literal)}
        for kind in (of_params, of_fed):
            if reads & kind:
                kind.update(eqn.outvars)
        both = bool(reads & of_params) and bool(reads & of_fed)
        found.append(not both and not eqn.effects)
    return found


def _inline(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    flat: _Flat,
    call: JaxprEqn | None = None,
    around: Place = (),
) -> list[Any]:
    """Append the equations of a body applied to `args`; return the atoms it results in."""
    env: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _jax.new_var(var.aval)
        flat.constants[env[var]] = const

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        operands, place = [read(a) for a in eqn.invars], (*around, number)
        is_mark = eqn.primitive is stage_boundary_p
        if place in flat.begin or (is_mark and eqn.params["leads"]):
            flat.lines.append(_jax.source_summary(_jax.rename(eqn, operands, eqn.outvars, call)))
        if is_mark:
            results = operands
        elif flat.opens(eqn, place):
            body = _call(eqn, flat.name)
            inner = _jax.rename(eqn, eqn.invars, eqn.outvars, call)
            results = _inline(body.jaxpr, body.consts, operands, flat, inner, place)
        else:
            results = [_jax.new_var(v.aval) for v in eqn.outvars]
            flat.eqns.append(_jax.rename(eqn, operands, results, call))
            flat.stages.append(len(flat.lines))
            flat.places.append(place)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _body(eqn: JaxprEqn) -> "_jax.CallBody | None":
    """The body of a call that may be inlined."""
    return _jax.call_body(eqn) if eqn.primitive.name in _INLINED else None


def _call(eqn: JaxprEqn, name: str) -> "_jax.CallBody":
    body = _body(eqn)
    if body is None:
        raise PipelineError(
            message(
                f"{name} has a stage boundary inside of an operator that cannot be cut",
                [f"{_jax.operator_name(eqn)} at {_jax.source_summary(eqn)}"],
                "A model is cut between operators, and a loop or a function with derivatives of "
                "its own is one operator.",
                "Write the loop over stages as a Python loop, with a scan over the layers of each "
                "stage where there are many, and mark between its steps.",
            )
        )
    return body


def _has_marks(eqn: JaxprEqn) -> bool:
    return any(_is_mark_or_has(inner) for body in bodies_of(eqn) for inner in opened(body).eqns)


def _is_mark_or_has(eqn: JaxprEqn) -> bool:
    return eqn.primitive is stage_boundary_p or _has_marks(eqn)
