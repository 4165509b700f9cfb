"""Loops (scans) of a program, and the sums over devices that they only add up."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, named_axes
from meshwise.errors import IllegalMove
from meshwise.ir.collectives import is_collective
from meshwise.ir.factors import FactorRule
from meshwise.ir.operators import ADDITIONS, ELEMENTWISE, adds_to, is_among
from meshwise.ir.program import shape_of
from meshwise.rules.registry import REGISTRY
from meshwise.schedule.layouts import Layout, in_scan
from meshwise.schedule.moves.refusal import refuse
from meshwise.schedule.rewrite import jaxpr_of, live
from meshwise.schedule.view import SUMS, View

MOVE = "hoist"
SCATTER = "reduce_scatter"


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan of a program, and its body."""

    view: View
    index: int

    @property
    def eqn(self) -> JaxprEqn:
        """The scan."""
        return self.view.eqns[self.index]

    @property
    def body(self) -> Any:
        """Its body, open."""
        return _jax.opened(self.eqn.params["jaxpr"])

    @property
    def constants(self) -> Sequence[Any]:
        """Values of the body's constants."""
        return getattr(self.eqn.params["jaxpr"], "consts", ())

    @cached_property
    def counts(self) -> tuple[int, int]:
        """How many operands are the same in all steps, and how many after them are carried."""
        return _jax.scan_counts(self.eqn)

    @cached_property
    def eqns(self) -> list[JaxprEqn]:
        """The equations of the body that results need: what is dead reads nothing."""
        return live(self.body.eqns, self.body.outvars)

    @cached_property
    def maker(self) -> dict[Var, JaxprEqn]:
        """The equation of the body that makes each value."""
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    @cached_property
    def readers(self) -> Mapping[Any, list[JaxprEqn]]:
        """The equations of the body that read each value."""
        found: defaultdict[Any, list[JaxprEqn]] = defaultdict(list)
        for eqn in self.eqns:
            for var in {a for a in eqn.invars if not isinstance(a, Literal)}:
                found[var].append(eqn)
        return found

    @cached_property
    def collectives(self) -> list[Var]:
        """The results of the collectives of the body, in order."""
        return [e.outvars[0] for e in self.eqns if is_collective(e)]

    @cached_property
    def made(self) -> set[Any]:
        """The results of the collectives of the body, and what a step makes of them."""
        return _made_of(self, self.collectives)

    @cached_property
    def same(self) -> frozenset[Var]:
        """Values that are the same in all steps."""
        found = {*self.body.constvars, *self.body.invars[: self.counts[0]]}
        for eqn in self.eqns:
            reads = [a for a in eqn.invars if not isinstance(a, Literal)]
            if {*reads} <= found and not _jax.has_effects(eqn):
                found.update(eqn.outvars)
        return frozenset(found)

    @cached_property
    def layouts(self) -> dict[Var, Layout]:
        """How the values of the body lie, in all steps."""
        found: dict[Var, Layout] = {}
        operands = [self.view.layout(a) for a in self.eqn.invars]
        in_scan(self.eqn, operands, self.view.mesh.axis_size, found)
        return found

    def varying(self, atom: Any) -> frozenset[str]:
        """Axes along which devices may differ in a value of the body, in some step."""
        return frozenset() if isinstance(atom, Literal) else self.layouts[atom].varying

    def text(self, var: Any) -> str:
        """A value of the body in words."""
        short = var.aval.str_short(short_dtypes=True)
        eqn = self.maker.get(var) if isinstance(var, Var) else None
        if eqn is not None:
            return f"{short} of {eqn.primitive.name} at {_jax.source_summary(eqn)}"
        carried = self._carried(var)
        return f"{short}, carried value {carried}" if carried is not None else short

    def _carried(self, var: Any) -> int | None:
        first, carried = self.counts
        return next((k for k in range(carried) if self.body.invars[first + k] is var), None)


@dataclass(frozen=True)
class LoopSum:
    """A carried value that is only added to: the collectives whose results are, by equation."""

    carried: int
    collectives: tuple[JaxprEqn, ...]

    @property
    def kind(self) -> JaxprEqn:
        """One of them; all are of one kind, over the same axes."""
        return self.collectives[0]


def sum_of(loop: Loop, collective: JaxprEqn) -> LoopSum:
    """The carried value to which a collective's result is only added."""
    name = collective.primitive.name
    plain = collective.params.get("axis_index_groups") is None and len(collective.invars) == 1
    if (name not in SUMS and name != SCATTER) or not plain:
        raise _no_sum(loop, collective, "it is of what each step makes anew, and is no sum")
    why = f"{loop.text(collective.outvars[0])} is not added to a carried value"
    after = _made_of(loop, collective.outvars)
    for carried, last in enumerate(loop.body.outvars[: loop.counts[1]]):
        if isinstance(last, Literal) or last not in after:
            continue
        terms = _terms(loop, carried)
        if isinstance(terms, str):
            why = terms
            continue
        found = [_collective_of(loop, t, collective) for t in terms]
        eqns = [f for f in found if not isinstance(f, str)]
        wrong = [f for f in found if isinstance(f, str)]
        if not any(e is collective for e in eqns):
            why = next(iter(wrong), why)
            continue
        if wrong:
            raise _no_sum(loop, collective, wrong[0])
        return LoopSum(carried, tuple(eqns))
    raise _no_sum(loop, collective, why)


def _terms(loop: Loop, carried: int) -> list[Any] | str:
    """What a step adds to a carried value and does no more with it; else what else it does."""
    var, last = loop.body.invars[loop.counts[0] + carried], loop.body.outvars[carried]
    terms: list[Any] = []
    while var is not last:
        readers = loop.readers[var]
        if var in loop.body.outvars:
            return f"carried value {carried} is a result of every step"
        others = [e for e in readers if not is_among(e, ADDITIONS)]
        if others or len(readers) != 1:
            who = others[0] if others else readers[-1] if readers else None
            named = f"{who.primitive.name} at {_jax.source_summary(who)}" if who else "no one"
            return f"carried value {carried} is read by {named}"
        (eqn,) = readers
        if not adds_to(eqn, var):
            return f"carried value {carried} is subtracted at {_jax.source_summary(eqn)}"
        left, right = eqn.invars
        terms.append(right if left is var else left)
        var = eqn.outvars[0]
    if not terms:
        return f"carried value {carried} stays as it is"
    read_again = loop.readers[var] or sum(a is var for a in loop.body.outvars) > 1
    return f"carried value {carried} is read in the same step" if read_again else terms


def _collective_of(loop: Loop, term: Any, like: JaxprEqn) -> JaxprEqn | str:
    """The collective that a term is of, seen through what may as well be done before it."""
    while True:
        eqn = loop.maker.get(term) if isinstance(term, Var) else None
        if eqn is None:
            return f"{loop.text(term)} is added as well, and is no {like.primitive.name}"
        if len(loop.readers[term]) != 1 or any(a is term for a in loop.body.outvars):
            return f"{loop.text(term)} is read by others too"
        if is_collective(eqn):
            same = eqn.primitive.name == like.primitive.name
            return eqn if same and eqn.params == like.params else f"{loop.text(term)} is another"
        through = _passed(loop, eqn, like)
        if through is None:
            return f"{loop.text(term)} can not be computed from devices' own terms"
        term = through


def _passed(loop: Loop, eqn: JaxprEqn, like: JaxprEqn) -> Any:
    """The operand through which terms of a sum pass an equation; None where they do not."""
    axes = {*named_axes(like)}
    for place, operand in enumerate(eqn.invars):
        others = [a for i, a in enumerate(eqn.invars) if i != place]
        if isinstance(operand, Literal) or operand not in loop.made or operand in others:
            continue
        if any(axes & loop.varying(a) for a in others):
            continue
        moved = _moved(loop, eqn, place, like)
        if moved is None:
            continue
        rule = REGISTRY.describe(moved)
        if (place,) in rule.linear_as_is and _keeps_rows(rule.factors, place, like):
            return operand
    return None


def _moved(loop: Loop, eqn: JaxprEqn, place: int, like: JaxprEqn) -> JaxprEqn | None:
    """An equation of a sum as it is of a term: of all rows, where a device has some of the sum's.

    None where it cannot be: where it makes another shape, or reads other arrays, of which there are
    no more rows. Behind an untiled scatter, which takes a dim away, dims have other numbers.
    """
    if like.primitive.name != SCATTER or len(eqn.outvars) != 1:
        return eqn if len(eqn.outvars) == 1 else None
    part, whole = shape_of(like.outvars[0]), shape_of(like.invars[0])
    shapes = [shape_of(a) for a in eqn.invars]
    others = shapes[:place] + shapes[place + 1 :]
    is_alike = shapes[place] == shape_of(eqn.outvars[0]) == part and not any(others)
    if not is_alike or not (like.params["tiled"] or is_among(eqn, ELEMENTWISE)):
        return None
    operands = [*eqn.invars]
    operands[place] = _jax.var_like(operands[place], whole)
    given = [a for a in operands if not isinstance(a, Literal)]

    def computed(*arrays: Any) -> list[Any]:
        env = dict(zip(given, arrays, strict=True))
        return _jax.bind(eqn, [_jax.value_in(env, a) for a in operands])

    try:
        (made,) = jaxpr_of(computed, given, loop.view.mesh).out_avals
    except Exception:  # a shape written down in its parameters says no in whatever way
        return None
    if made.shape != whole:
        return None
    return eqn.replace(invars=operands, outvars=[_jax.new_var(made)])


def _keeps_rows(rule: FactorRule, operand: int, like: JaxprEqn) -> bool:
    """Whether an equation's rows along the dim that is scattered are made of the same rows each."""
    if like.primitive.name != SCATTER:
        return True
    dim = like.params["scatter_dimension"]
    read, made = rule.operands[operand][dim], rule.results[0][dim]
    return read == made and not {*read} & {*rule.permuted, *rule.whole}


def _made_of(loop: Loop, values: Sequence[Var]) -> set[Any]:
    """Some values of the body, and what a step makes of them."""
    found: set[Any] = {*values}
    for eqn in loop.eqns:
        if any(not isinstance(a, Literal) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return found


def _no_sum(loop: Loop, collective: JaxprEqn, why: str) -> IllegalMove:
    return refuse(
        MOVE,
        [loop.text(collective.outvars[0]), why],
        "A collective leaves a loop if it is of what is the same in all steps, or a sum that the "
        "loop only adds to a carried value, with nothing but such sums, over the same axes.",
        "Add it up in a carried value of its own, or leave it in the loop.",
    )
