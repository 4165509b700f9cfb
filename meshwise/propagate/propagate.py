"""The fixed point: shardings move along factors, forward and backward, until nothing changes.

GSPMD's completion (arXiv 2105.04663 section 3.5) by factor rules: every equation is a table of
tensors by factors; an axis list found on a factor in one tensor is offered to the same factor in
the others. Lists only grow, so the loop ends. A value that the user hinted never changes, except
in the dims the hint leaves open.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from meshwise._jax import Literal, Var, stack_p, step_p
from meshwise.ir.factors import Dims, FactorRule, factor_axes
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.program import Hint, Program, bytes_of, shape_of
from meshwise.ir.sharding import DimAxes
from meshwise.propagate.completion import Cause, Completion
from meshwise.propagate.conflicts import Claim, is_prefix, settle
from meshwise.propagate.priorities import LEVELS, levels
from meshwise.rules.registry import OpRule


@dataclass(slots=True)
class _Tensor:
    """One operand or result of an equation, as propagation sees it."""

    var: Var
    dims: Dims
    is_result: bool
    size: int


class Wins(Enum):
    """Which of two dims of a result has an axis that both claim.

    The one whose claim keeps more bytes in place, or of equal ones that of the first operand, or of
    the last; or the more leading one. A claim of both operands goes before that of one, but for
    `LARGEST`: there bytes alone decide.
    """

    LARGER = 0
    LARGER_OR_LAST = 1
    LEADING = 2
    LARGEST = 3


@dataclass(slots=True)
class _State:
    """Shardings found so far.

    Of two dims that claim an axis one has it by `wins`; `is_contested` tells whether any did, and
    `is_tied` whether as much speaks for two of them.
    """

    mesh: Mesh
    wins: Wins = Wins.LARGER
    is_contested: bool = False
    is_tied: bool = False
    dims: dict[Var, DimAxes] = field(default_factory=dict)
    pinned: dict[Var, tuple[bool, ...]] = field(default_factory=dict)
    causes: dict[tuple[Var, int], Cause] = field(default_factory=dict)

    def seed(self, var: Var, hint: Hint, pin: bool) -> None:
        """Start a value from a hint; where `pin`, its given dims never change."""
        self.dims[var] = tuple(axes or () for axes in hint.dims)
        if pin:
            self.pinned[var] = tuple(axes is not None for axes in hint.dims)
        for dim, axes in enumerate(hint.dims):
            if axes is not None:
                self.causes[var, dim] = Cause(None, hint=f"{hint.given_as} at {hint.source}")


def propagate(program: Program, rules: Sequence[OpRule]) -> Completion:
    """Complete the hints of a program: a sharding for every variable, each with its cause."""
    tables = [_table(program, i, rule) for i, rule in enumerate(rules)]
    state, rows_whole = _fixed_point(program, rules, tables, Wins.LARGER)
    dims = _every_value(program, state.dims)
    others: list[dict[Var, DimAxes]] = []
    for wins, is_worth in (
        (Wins.LEADING, state.is_contested),
        (Wins.LARGER_OR_LAST, state.is_tied),
        (Wins.LARGEST, state.is_contested),
    ):
        if is_worth:
            other, _ = _fixed_point(program, rules, tables, wins)
            others.append(_every_value(program, other.dims))
    others = [one for k, one in enumerate(others) if one not in (dims, *others[:k])]
    return Completion(dims, state.causes, rows_whole, tuple(others))


def propagate_from(
    program: Program, rules: Sequence[OpRule], var: Var, dims: DimAxes, moved: Set[str]
) -> dict[Var, DimAxes]:
    """The dims' axes of every value where one of them lies as told.

    What is said of arguments and results that lie over `moved` axes does not count.
    """
    tables = [_table(program, i, rule) for i, rule in enumerate(rules)]
    state = _start(program, Wins.LARGER, moved)
    state.dims[var], state.pinned[var] = dims, (True,) * len(dims)
    _settle(rules, tables, state)
    return _every_value(program, state.dims)


def _fixed_point(
    program: Program, rules: Sequence[OpRule], tables: Sequence[list[_Tensor]], wins: Wins
) -> tuple[_State, dict[Var, DimAxes] | None]:
    """What is found, and what was before rows of sharded steps were sharded."""
    state = _start(program, wins)
    _settle(rules, tables, state)
    before, rows_whole = dict(state.dims), None
    if _shard_rows_of_steps(program, state):
        rows_whole = _every_value(program, before)
        _settle(rules, tables, state)
    return state, rows_whole


def _settle(rules: Sequence[OpRule], tables: Sequence[list[_Tensor]], state: _State) -> None:
    """The fixed point, most certain steps first.

    An equation is visited in a direction only when one of its values has changed since.
    """
    directions = [levels(rule.factors) for rule in rules]
    touching: dict[Var, set[int]] = defaultdict(set)
    for i, table in enumerate(tables):
        for tensor in table:
            touching[tensor.var].add(i)
    stale = bytearray(len(rules)), bytearray(len(rules))

    def mark(changed: Iterable[Var]) -> None:
        for var in changed:
            for i in touching[var]:
                stale[False][i] = stale[True][i] = True

    mark(state.dims)
    for level in LEVELS:
        changed = True
        while changed:
            changed = False
            for backward in (False, True):
                order = range(len(rules))
                for i in reversed(order) if backward else order:
                    if not stale[backward][i] or directions[i][backward] > level:
                        continue
                    grown = _visit(i, rules[i].factors, tables[i], backward, state)
                    mark(grown)
                    stale[backward][i] = False
                    changed |= bool(grown)


def _shard_rows_of_steps(program: Program, state: _State) -> bool:
    """Where a loop goes through a dim that is sharded, its rows are sharded along another.

    A device that holds some of the steps takes part in all of them: the first dim of the row that
    is not sharded and divides takes the axes. Whether any row has changed.
    """
    changed = False
    for index, eqn in enumerate(program.equations):
        if eqn.primitive is step_p:
            stack, row, tensor = eqn.invars[0], eqn.outvars[0], 0
        elif eqn.primitive is stack_p:
            stack, row, tensor = eqn.outvars[0], eqn.invars[0], 1
        else:
            continue
        dims = state.dims.get(stack)  # type: ignore[arg-type]
        if not isinstance(row, Literal) and dims and dims[0]:
            changed |= _shard_row(index, row, tensor, dims, state)
    return changed


def _shard_row(index: int, row: Var, tensor: int, stack: DimAxes, state: _State) -> bool:
    current = state.dims.get(row) or ((),) * (len(stack) - 1)
    used = {a for axes in (*current, *stack[1:]) for a in axes}
    count = state.mesh.size(stack[0])
    for dim, size in enumerate(shape_of(row)):
        free = not current[dim] and not state.pinned.get(row) and used.isdisjoint(stack[0])
        if free and size % count == 0:
            state.dims[row] = (*current[:dim], stack[0], *current[dim + 1 :])
            state.causes[row, dim] = Cause(index, tensor)
            return True
    return False


def _start(program: Program, wins: Wins, without: Set[str] = frozenset()) -> _State:
    """All hints as they stand; but for those of arguments and results that lie over some axes."""
    state = _State(program.mesh, wins)
    for var, hint in zip(program.outputs, program.out_hints, strict=True):
        if hint is not None and not isinstance(var, Literal) and not _lies_over(hint, without):
            state.seed(var, hint, pin=False)
    for var, hint in zip(program.inputs, program.in_hints, strict=True):
        if hint is not None and not _lies_over(hint, without):
            state.seed(var, hint, pin=True)
    for index, hint in program.hints.items():
        state.seed(program.equations[index].outvars[0], hint, pin=True)
    return state


def _lies_over(hint: Hint, axes: Set[str]) -> bool:
    return any(not axes.isdisjoint(own or ()) for own in hint.dims)


def _table(program: Program, index: int, rule: OpRule) -> list[_Tensor]:
    eqn = program.equations[index]
    tensors = [
        _Tensor(atom, dims, False, bytes_of(atom))
        for atom, dims in zip(eqn.invars, rule.factors.operands, strict=True)
        if dims and not isinstance(atom, Literal)
    ]
    tensors += [
        _Tensor(var, dims, True, bytes_of(var))
        for var, dims in zip(eqn.outvars, rule.factors.results, strict=True)
        if dims
    ]
    return tensors


def _visit(
    index: int, rule: FactorRule, table: list[_Tensor], backward: bool, state: _State
) -> list[Var]:
    """Offer the axes found on each factor to the tensors of one side; what grew."""
    claims: dict[int, list[Claim]] = {}
    for position, tensor in enumerate(table):
        if tensor.var not in state.dims or not (backward or not tensor.is_result):
            continue
        found = factor_axes(tensor.dims, rule, state.dims[tensor.var], state.mesh)
        for factor, axes in found.items():
            rank = _rank(factor, table)
            claims.setdefault(factor, []).append(Claim(axes, rank, tensor.size, position))
    if not claims:
        return []
    settled = {factor: settle(found) for factor, found in claims.items()}
    order = sorted(settled, key=lambda f: settled[f][0].strength, reverse=True)
    strongest = [settled[f][0] for f in order]
    state.is_tied |= any(one.is_tied_with(other) for one, other in pairwise(strongest))
    if state.wins is Wins.LARGER_OR_LAST:
        order.sort(key=lambda f: settled[f][0].strength_or_last, reverse=True)
    elif state.wins is Wins.LARGEST:
        order.sort(key=lambda f: (settled[f][0].size, settled[f][0].rank), reverse=True)
    elif state.wins is Wins.LEADING:
        places = _result_factors(table)
        order.sort(key=lambda f: places.get(f, len(places)))
    return [
        tensor.var
        for position, tensor in enumerate(table)
        if tensor.is_result != backward
        and _offer(index, rule, position, tensor, order, settled, state)
    ]


def _rank(factor: int, table: list[_Tensor]) -> int:
    """1 for a batch-like factor: in several operands and in a result."""
    holders = sum(any(factor in dim for dim in t.dims) for t in table if not t.is_result)
    return 1 if holders > 1 and factor in _result_factors(table) else 0


def _result_factors(table: list[_Tensor]) -> dict[int, int]:
    """The factors of an equation's results, numbered in the order of their dims."""
    found = dict.fromkeys(f for t in table if t.is_result for dim in t.dims for f in dim)
    return {factor: number for number, factor in enumerate(found)}


def _offer(
    index: int,
    rule: FactorRule,
    position: int,
    tensor: _Tensor,
    order: list[int],
    settled: dict[int, tuple[Claim, tuple[Claim, ...]]],
    state: _State,
) -> bool:
    """Grow one tensor's dims by the settled axes, in order of strength; whether any grew."""
    current = state.dims.get(tensor.var) or ((),) * len(tensor.dims)
    pinned = state.pinned.get(tensor.var)
    used = {a for axes in current for a in axes}
    grown = list(current)
    for factor in order:
        claim, beaten = settled[factor]
        if claim.position == position:
            continue
        for dim, factors in enumerate(tensor.dims):
            if factor not in factors or (pinned and pinned[dim]):
                continue
            state.is_contested |= not used.isdisjoint({*claim.axes} - {*grown[dim]})
            axes = _grow(rule, factors, factor, claim.axes, grown[dim], used, settled, state.mesh)
            if axes != grown[dim]:
                used.update(axes)
                grown[dim] = axes
                lost = tuple(c.axes for c in beaten)
                state.causes[tensor.var, dim] = Cause(index, claim.position, beaten=lost)
    if tuple(grown) == current:
        return False
    state.dims[tensor.var] = tuple(grown)
    return True


def _grow(
    rule: FactorRule,
    factors: tuple[int, ...],
    factor: int,
    axes: Axes,
    current: Axes,
    used: set[str],
    settled: dict[int, tuple[Claim, tuple[Claim, ...]]],
    mesh: Mesh,
) -> Axes:
    """A dim's axes after one factor's are taken in: never fewer, never an axis used elsewhere."""
    if len(factors) == 1:
        wanted = axes
    else:
        wanted = _compound_axes(rule, factors, settled, mesh)
    wanted = _unused(wanted, current, used)
    if factors[0] in rule.compound and len(factors) == 1:
        wanted = _fitting(rule, factor, wanted, mesh)
    return wanted if is_prefix(current, wanted) else current


def _compound_axes(
    rule: FactorRule,
    factors: tuple[int, ...],
    settled: dict[int, tuple[Claim, tuple[Claim, ...]]],
    mesh: Mesh,
) -> Axes:
    """Axes of a compound dim: the major factors' as long as each is split completely.

    Claims of two factors may come from two tensors and name one axis: the more major one has it.
    """
    axes: Axes = ()
    for factor in factors:
        own = settled[factor][0].axes if factor in settled else ()
        own = _fitting(rule, factor, _unused(own, (), set(axes)), mesh)
        axes += own
        if mesh.size(own) != rule.sizes[factor]:
            break
    return axes


def _fitting(rule: FactorRule, factor: int, axes: Axes, mesh: Mesh) -> Axes:
    """Axes that a factor of a compound dim may have: those that divide it, or that it can fill."""
    size = rule.sizes[factor]
    if factor in rule.permuted and size >= mesh.size(axes):
        return axes
    return mesh.dividing(axes, size)


def _unused(wanted: Axes, current: Axes, used: set[str]) -> Axes:
    """The longest prefix of axes that the tensor does not use in another dim."""
    for count, axis in enumerate(wanted):
        if axis in used and axis not in current:
            return wanted[:count]
    return wanted


def _every_value(program: Program, dims: Mapping[Var, DimAxes]) -> dict[Var, DimAxes]:
    """The dims of every variable, unsharded where nothing was found."""
    jaxpr = program.jaxpr.jaxpr
    values = [*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns for v in e.outvars)]
    return {v: dims.get(v) or ((),) * len(shape_of(v)) for v in values}
