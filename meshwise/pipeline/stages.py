"""A loss function's jaxpr cut into stages at its marks.

An equation belongs to the stage in whose part of the program it was traced. What a stage makes and
a later one needs is sent from stage to stage until there (a value that skips stages is carried
along). Two sorts of equations make an exception, because sending what they make would be waste:
those that read parameters but nothing of the microbatch, such as a cast of a weight, and those that
read the microbatch but no parameter, such as a mask or a label. Each stage that needs one computes
it by itself, from parameters and inputs, which are at hand in every stage.

Calls that have marks inside (`jax.jit`, `jax.checkpoint`) are inlined; no other equation is
touched, so custom derivatives keep theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise._jax.jaxprs import bodies_of, opened
from meshwise._jax.pipelines import stage_boundary_p
from meshwise.errors import PipelineError, message

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
    """The equations of a program while it is being flattened, each with its stage."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    constants: dict[Var, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def cut(closed: ClosedJaxpr, params: int, held: int, name: str) -> Cut:
    """Cut a jaxpr whose first result is the loss.

    Its inputs are `params` leaves of parameters, `held` values that the function closes over, and
    the leaves of a microbatch. `name` is the function's, for messages.
    """
    flat = _Flat()
    inputs = [_jax.new_var(v.aval) for v in closed.jaxpr.invars]
    results = _inline(closed.jaxpr, closed.consts, inputs, flat, None, name)
    makers = {var: i for i, eqn in enumerate(flat.eqns) for var in eqn.outvars}
    known = params + held
    remade = _remade(flat.eqns, set(inputs[:known]), set(inputs[known:]))
    parts = inputs[:params], inputs[params:known], inputs[known:]
    leaving: list[Any] = results
    stages: list[Stage] = []
    sent: list[list[Var]] = []  # what arrives at each stage, from the last to the first
    for number in range(len(flat.lines), -1, -1):
        own = [r or s == number for r, s in zip(remade, flat.stages, strict=True)]
        eqns, needed = _slice(flat.eqns, own, leaving)
        arriving = sorted((v for v in needed if v in makers), key=makers.__getitem__)
        stages.append(_stage(flat, eqns, needed, arriving, leaving, parts))
        leaving = arriving
        sent.append(arriving)
    stages.reverse()
    sent.reverse()
    made = [*results, *(v for values in sent for v in values)]
    constants = list(flat.constants)
    chain = _jax.close_jaxpr(
        constants, inputs, made, flat.eqns, [flat.constants[v] for v in constants]
    )
    return Cut(tuple(stages), tuple(flat.lines), chain, params, held)


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
    call: JaxprEqn | None,
    name: str,
) -> list[Any]:
    """Append the equations of a body applied to `args`; return the atoms it results in."""
    env: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _jax.new_var(var.aval)
        flat.constants[env[var]] = const

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive is stage_boundary_p:
            if eqn.params["leads"]:
                flat.lines.append(
                    _jax.source_summary(_jax.rename(eqn, operands, eqn.outvars, call))
                )
            results = operands
        elif _has_marks(eqn):
            body = _call(eqn, name)
            inner = _jax.rename(eqn, eqn.invars, eqn.outvars, call)
            results = _inline(body.jaxpr, body.consts, operands, flat, inner, name)
        else:
            results = [_jax.new_var(v.aval) for v in eqn.outvars]
            flat.eqns.append(_jax.rename(eqn, operands, results, call))
            flat.stages.append(len(flat.lines))
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _call(eqn: JaxprEqn, name: str) -> "_jax.CallBody":
    body = _jax.call_body(eqn) if eqn.primitive.name in _INLINED else None
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
    return any(
        inner.primitive is stage_boundary_p or _has_marks(inner)
        for body in bodies_of(eqn)
        for inner in opened(body).eqns
    )
