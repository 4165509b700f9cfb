"""The state of an emission: which copies of each value exist, and how another one is made.

A copy is made where it is first needed, and belongs to the body (of a loop, of a branch) that it is
made in: what is around a body can be read in it, but not the other way round. Small reductions that
are ready at that moment and go over the same axes travel together, in one collective.
"""

import math
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.choose.plan import Plan
from meshwise.choose.tree import Edge
from meshwise.ir.factors import FactorRule, Strategy, operand_sharding
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import itemsize_of, shape_of, type_of
from meshwise.ir.sharding import Sharding, local_bytes, replicated
from meshwise.partition.hoist import LoopRead
from meshwise.partition.one_term import sum_of_bits
from meshwise.partition.padding import mask_operands
from meshwise.partition.reshards import plan_of_edge
from meshwise.reshard.emit import all_reduce, apply_steps
from meshwise.reshard.plan import StepKind
from meshwise.rules.registry import LocalContext, OpRule

# Reductions up to this size (local bytes) share a collective. Larger ones are left to the compiler,
# which joins all_reduces without the copies that laying them end to end takes: on the GPT of the
# examples, laying those up to 4 KiB end to end made XLA's compile 1.3 times longer.
SMALL_BYTES = 256


Waiting = dict[tuple[Any, ...], list[tuple[Var, Edge]]]


@dataclass
class Walk:
    """The state of one emission: copies of values that exist, and reductions that may be shared.

    `added` are the values whose terms add up, while of others one counts at each place. `waiting`
    holds, by (axes, operator, dtype), the reductions of values that exist already and will be
    wanted later; `loop_reads` what each loop (by where it is opened) reads in another sharding, of
    which it may hold `most_hoisted_bytes`; `parts` the stacks, by mark, of which a device keeps its
    own steps; `padded` the copies that are kept with the padding that comes of gathering them.
    """

    plan: Plan
    added: frozenset[Var]
    copies: ChainMap[tuple[Var, Sharding], Any] = field(default_factory=ChainMap[Any, Any])
    sources: dict[tuple[Var, Sharding], Sharding] = field(default_factory=dict)
    makers: dict[Var, int] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=lambda: defaultdict(list))
    reasons: list[Reason] = field(default_factory=list)
    most_hoisted_bytes: int | None = None
    loop_reads: dict[int, list[LoopRead]] = field(default_factory=dict)
    parts: dict[int, Sharding] = field(default_factory=dict)
    padded: Set[tuple[Var, Sharding]] = frozenset()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Inside a body: what is made here is not seen outside."""
        around = self.copies, self.waiting
        self.copies, self.waiting = self.copies.new_child(), defaultdict(list)
        try:
            yield
        finally:
            self.copies, self.waiting = around


def compute(
    eqn: JaxprEqn,
    rule: OpRule,
    strategy: Strategy,
    plan: Plan,
    operands: Sequence[Any],
    leaves_turned: bool = False,
) -> Sequence[Any]:
    """One equation on local operands: padding masked, then the operator's local rule."""
    with _jax.as_wide_as_equation(eqn):
        if rule.opaque:
            return _jax.bind(_jax.without_hints(eqn), operands)
        context = LocalContext(
            eqn, rule.factors, strategy, plan.program.mesh, leaves_turned=leaves_turned
        )
        operands = mask_operands(rule, context, operands)
        if rule.local is not None:
            return rule.local(context, *operands)
        return _jax.bind(eqn, operands)


def store(walk: Walk, var: Var, sharding: Sharding, array: Any) -> None:
    """Keep a value as it is produced; note the reductions that will be wanted of it."""
    walk.copies[var, sharding] = array
    if not sharding.unreduced:
        return
    for edge in walk.plan.copies.get(var, ()):
        if edge[0] == sharding and _is_small_reduction(walk, var, edge):
            walk.waiting[_reduction_key(walk, var, edge)].append((var, edge))


def _is_small_reduction(walk: Walk, var: Var, edge: Edge) -> bool:
    source, target = edge
    small = local_bytes(shape_of(var), itemsize_of(var), source, walk.plan.program.mesh)
    return small <= SMALL_BYTES and target.dims == source.dims and not target.unreduced


def _reduction_key(walk: Walk, var: Var, edge: Edge) -> tuple[Any, ...]:
    source, _ = edge
    return source.unreduced, source.reduction, type_of(var).dtype, var in walk.added


def copy_of(walk: Walk, atom: Any, sharding: Sharding, user: JaxprEqn | None) -> Any:
    """A value in a sharding: the copy that exists, or one made now."""
    if isinstance(atom, Literal):
        return _jax.literal_value(atom)
    found = walk.copies.get((atom, sharding))
    if found is not None:
        return found
    if _is_remade(walk, atom, sharding):
        _remake(walk, atom, sharding)
        return walk.copies[atom, sharding]
    is_remade = _is_remade(walk, atom, sharding.reduced)
    source = sharding.reduced if is_remade else _source(walk, atom, sharding)
    array = copy_of(walk, atom, source, user)
    edge = (source, sharding)
    together = walk.waiting.get(_reduction_key(walk, atom, edge), []) if source.unreduced else []
    if (atom, edge) in together and len(together) > 1:
        _reduce_together(walk, together, user)
    else:
        if (atom, edge) in together:
            together.remove((atom, edge))
        walk.copies[atom, sharding] = _reshard(walk, atom, edge, array, user)
    return walk.copies[atom, sharding]


def _source(walk: Walk, var: Var, sharding: Sharding) -> Sharding:
    """Of which copy of a value another one is made: for what is remade, of one that is whole."""
    source = walk.sources.get((var, sharding), replicated(len(sharding.dims)))
    assert source != sharding, f"nothing says how {var} is made in {sharding}"
    return source


def _is_remade(walk: Walk, atom: Any, sharding: Sharding) -> bool:
    """Whether each device computes its part of a value in this sharding."""
    maker = None if isinstance(atom, Literal) else walk.makers.get(atom)
    return maker is not None and walk.plan.equations[maker].remade and not sharding.unreduced


def _remake(walk: Walk, atom: Var, wanted: Sharding) -> None:
    """Compute this device's part of a value that depends on no placed operand.

    First what it is made of, without recursion: that may be a thousand equations.
    """
    plan = walk.plan
    waiting: list[tuple[Any, Sharding]] = [(atom, wanted)]
    while waiting:
        var, sharding = waiting[-1]
        maker = walk.makers[var]
        eqn, rule = plan.program.equations[maker], plan.rules[maker]
        result = eqn.outvars.index(var)
        strategy = _strategy_for(rule.factors, result, sharding)
        reads = [(a, operand_sharding(rule.factors, strategy, i)) for i, a in enumerate(eqn.invars)]
        missing = [r for r in reads if _is_remade(walk, *r) and r not in walk.copies]
        if missing:
            waiting.append(missing[0])
            continue
        waiting.pop()
        with _jax.at_source(eqn):
            operands = [copy_of(walk, *read, eqn) for read in reads]
            walk.copies[var, sharding] = compute(eqn, rule, strategy, plan, operands)[result]


def _strategy_for(rule: FactorRule, result: int, sharding: Sharding) -> Strategy:
    axes: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for factors, own in zip(rule.results[result], sharding.dims, strict=True):
        if factors:
            axes[factors[0]] = own
    return Strategy(tuple(axes))


def _reshard(walk: Walk, var: Var, edge: Edge, array: Any, user: JaxprEqn | None) -> Any:
    mesh = walk.plan.program.mesh
    source, target = edge
    steps = plan_of_edge(walk.plan, var, edge)
    if not any(step.kind is not StepKind.SLICE for step in steps.steps):
        with _at_maker(walk, var, user):
            return apply_steps(array, steps, mesh)
    padded = (var, target) in walk.padded
    with _at_maker(walk, var, user), _reason(walk, [(var, edge)], user):
        if not source.unreduced or var in walk.added:
            return apply_steps(array, steps, mesh, keeps_padding=padded)
        joined = mesh.size(set(source.unreduced).difference(target.unreduced))
        return sum_of_bits(lambda terms: apply_steps(terms, steps, mesh), array, joined)


def _maker(walk: Walk, var: Var) -> JaxprEqn | None:
    maker = walk.makers.get(var)
    return None if maker is None else walk.plan.program.equations[maker]


def _at_maker(walk: Walk, var: Var, user: JaxprEqn | None) -> Any:
    """What is made for a result, which no equation reads, has the line of what makes it."""
    maker = _maker(walk, var) if user is None else None
    return nullcontext() if maker is None else _jax.at_source(maker)


def _reason(walk: Walk, moved: Sequence[tuple[Var, Edge]], user: JaxprEqn | None) -> Any:
    """A name scope that ties the collectives inside to the reason recorded for them."""
    var, (source, target) = moved[0]
    values = var.aval.str_short(short_dtypes=True)
    if len(moved) > 1:
        values = f"{len(moved)} values, first {values}"
    wanted_by = "the result" if user is None else _jax.operator_name(user)
    origin = _maker(walk, var) if user is None else user
    line = _jax.source_summary(origin) if origin is not None else "out_shardings"
    return _because(walk, Reason(f"{values} {source} -> {target} for {wanted_by}", line))


def exchange_reason(walk: Walk, eqn: JaxprEqn, operands: Sequence[Sharding]) -> Any:
    """The same, for the collectives of an operator's local rule."""
    split = ", ".join(map(str, operands))
    text = f"exchange of {_jax.operator_name(eqn)} itself, with operands {split}"
    return _because(walk, Reason(text, _jax.source_summary(eqn)))


def _because(walk: Walk, reason: Reason) -> Any:
    walk.reasons.append(reason)
    return jax.named_scope(reason_scope(len(walk.reasons) - 1))


def _reduce_together(walk: Walk, together: list[tuple[Var, Edge]], user: JaxprEqn | None) -> None:
    """Several small reductions over the same axes in one collective, laid end to end."""
    with _at_maker(walk, together[0][0], user):
        _lay_and_reduce(walk, together, user)
    together.clear()


def _lay_and_reduce(walk: Walk, together: list[tuple[Var, Edge]], user: JaxprEqn | None) -> None:
    arrays = [walk.copies[var, edge[0]] for var, edge in together]
    flat = lax.concatenate([lax.reshape(a, (math.prod(a.shape),)) for a in arrays], 0)
    source = together[0][1][0]

    def reduce(terms: Any) -> Any:
        return all_reduce(terms, source.unreduced, source.reduction)

    with _reason(walk, together, user):
        joined = walk.plan.program.mesh.size(source.unreduced)
        is_added = together[0][0] in walk.added
        flat = reduce(flat) if is_added else sum_of_bits(reduce, flat, joined)
    start = 0
    for (var, edge), array in zip(together, arrays, strict=True):
        part = lax.slice(flat, (start,), (start + array.size,))
        walk.copies[var, edge[1]] = lax.reshape(part, array.shape)
        start += array.size
