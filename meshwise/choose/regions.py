"""The cost graph: regions and single equations as nodes, values between them as edges.

Equations that preserve dims (element-wise chains, residual streams, an optimiser's update) take
one sharding together: they form a *region*, one node whose factor rule is composed of theirs.
A reduction joins the region of its operand, as it follows whatever that does; its result leaves
the region (and enters it again, where a norm or a softmax goes on with it), because it may have to
be reduced between devices. So does what completion has lie otherwise than another array that it
meets, as one of them moves, and short floats and masks before they are made long again, as they
take fewer bytes to send, what meets larger values on both sides, which would bind one to the
other, and a transpose that meets what it is of. Every other equation is a node of its own.

A linear equation that a sum passes through belongs to the node that makes the sum, so that both
move together, unless it meets what is of sums as well, or another array as large; additions of
sums from several nodes are nodes apart, and their terms are added before one reduction.

What a loop carries along is one value before, in and after the loop: its marks are one node.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from meshwise._jax import Literal, Var, carry_p
from meshwise.choose.carries import Carries
from meshwise.choose.joining import joined_groups
from meshwise.choose.parts import TOGETHER, Apart, Groups, Part, parts_of
from meshwise.ir.factors import Dims, FactorRule, Strategy
from meshwise.ir.mesh import Axes
from meshwise.ir.program import Program
from meshwise.ir.sharding import DimAxes, Reduction
from meshwise.rules.registry import OpRule


@dataclass(frozen=True, slots=True)
class Member:
    """One equation's part in a node: which node factor each of its factors is (-1: none).

    `summed` are the node's factors over which the sum that passes through it was made.
    """

    equation: int
    factors: tuple[int, ...]
    summed: tuple[int, ...] = ()

    def strategy(self, axes: DimAxes) -> Strategy:
        """The equation's part in what its node's factors are sharded over."""
        return Strategy(tuple([axes[f] if f >= 0 else () for f in self.factors]))


@dataclass(frozen=True, eq=False)
class Node:
    """One decision: a composed factor rule over the values that enter and leave.

    `reduced` lists, for each result, the factors over which it is a reduction and by what; it is
    unreduced over their axes. `carries` are the operands that may be unreduced together; the
    results are unreduced then too. What a sum in a loop starts from, `adopts`, becomes a term of
    whatever is added to it. `together` are, for each factor, those that stand in an equation with
    it: they share no axis. Rows of two streams that meet in a vector of columns alone may. Factors
    that a hint with open dims says lie over the axes with which they are `bound`.
    `flops` are those of all members, `serial_flops` those done one after the other, `own_flops`
    all without what is computed of a sum on its way; `calls` are functions of single numbers.
    """

    index: int
    rule: FactorRule
    operands: tuple[Var, ...]
    results: tuple[Var, ...]
    reduced: tuple[tuple[tuple[int, Reduction], ...], ...]
    members: tuple[Member, ...]
    flops: float
    own_flops: float
    serial_flops: float
    calls: float
    carries: frozenset[int] = frozenset()
    adopts: frozenset[int] = frozenset()
    together: tuple[frozenset[int], ...] = ()
    is_region: bool = False
    bound: tuple[tuple[int, Axes], ...] = ()

    def axes_where(self, lies: Callable[[int, int], Axes]) -> DimAxes:
        """What its factors are sharded over, where that is said of factors of equations."""
        axes: list[Axes] = [()] * len(self.rule.sizes)
        for member in self.members:
            for factor, own in enumerate(member.factors):
                if own >= 0:
                    axes[own] = lies(member.equation, factor)
        return tuple(axes)


def build_nodes(
    program: Program,
    rules: Sequence[OpRule],
    carried: Carries,
    lying: Mapping[Var, DimAxes],
    remade: Collection[int],
    apart: Apart = TOGETHER,
) -> list[Node]:
    """The nodes of a program's cost graph, in the order of their first equations.

    `lying` says how completion has values lie; equations `remade` are nodes of their own, and so is
    what is decided `apart`.
    """
    parts = [
        part
        for index, rule in enumerate(rules)
        for part in parts_of(program, index, rule, carried[index], index not in remade)
    ]
    groups = joined_groups(program, rules, parts, carried, lying, apart)
    members: dict[int, list[int]] = defaultdict(list)
    for k in range(len(parts)):
        members[groups.find(k)].append(k)
    leaving = _leaving(program, parts, groups)
    return [
        _node(index, program, rules, [parts[k] for k in ks], groups, leaving[root], carried)
        for index, (root, ks) in enumerate(members.items())
    ]


def _leaving(program: Program, parts: Sequence[Part], groups: Groups) -> list[set[Var]]:
    """Per group (by its root), the values made there and used elsewhere or returned."""
    users: dict[Var, set[int]] = defaultdict(set)
    for k, part in enumerate(parts):
        for operand in part.operands:
            atom = program.equations[part.equation].invars[operand]
            if not isinstance(atom, Literal):
                users[atom].add(groups.find(k))
    for atom in program.outputs:
        if not isinstance(atom, Literal):
            users[atom].add(-1)
    leaving: list[set[Var]] = [set() for _ in parts]
    for k, part in enumerate(parts):
        root = groups.find(k)
        made = [program.equations[part.equation].outvars[r] for r in part.results]
        leaving[root].update(v for v in made if users[v] - {root})
    return leaving


def _node(
    index: int,
    program: Program,
    rules: Sequence[OpRule],
    parts: Sequence[Part],
    groups: Groups,
    leaving: set[Var],
    carried: Carries,
) -> Node:
    roots: dict[tuple[int, int], int] = {}
    sizes: list[int] = []
    members = []
    for part in parts:
        rule = rules[part.equation].factors
        mapping = [-1] * len(rule.sizes)
        for factor in part.factors:
            root = groups.factor((part.equation, factor))
            if root not in roots:
                roots[root] = len(sizes)
                sizes.append(rule.sizes[factor])
            mapping[factor] = roots[root]
        members.append(Member(part.equation, tuple(mapping)))
    reduced, members = _follow_sums(program, rules, parts, members, carried)
    operands, carries, results = _boundary(
        program, rules, parts, members, leaving, carried, reduced.keys()
    )
    sums = [program.equations[p.equation] for p in parts if carried[p.equation]]
    starts = [eqn.invars[0] for eqn in sums if eqn.primitive is carry_p]
    adopted = {atom for atom in starts if not isinstance(atom, Literal)}
    whole, permuted = _kinds(rules, parts, members)
    composed = FactorRule(
        operands=tuple(dims for _, dims in operands),
        results=tuple(results.values()),
        sizes=tuple(sizes),
        whole=whole,
        permuted=permuted,
    )
    return Node(
        index=index,
        rule=composed,
        operands=tuple(var for var, _ in operands),
        results=tuple(results),
        reduced=tuple(reduced.get(var, ()) for var in results),
        members=tuple(members),
        flops=_flops(program, rules, members),
        own_flops=_flops(program, rules, [m for m in members if not m.summed]),
        serial_flops=_flops(program, rules, [m for m in members if rules[m.equation].serial]),
        calls=sum(rules[m.equation].calls * program.runs[m.equation] for m in members),
        carries=carries,
        adopts=frozenset(k for k in carries if operands[k][0] in adopted),
        together=_together(members, len(sizes)),
        is_region=parts[0].joins,
        bound=_bound(program, members[0]),
    )


def _bound(program: Program, member: Member) -> tuple[tuple[int, Axes], ...]:
    """The factors of a hint that it does not leave open, and their axes."""
    hint = program.hints.get(member.equation)
    if hint is None or hint.derived or hint.closed is not None:
        return ()
    said = zip(member.factors, hint.dims, strict=True)
    return tuple([(factor, axes) for factor, axes in said if axes is not None])


def _flops(program: Program, rules: Sequence[OpRule], members: Sequence[Member]) -> float:
    return sum(rules[m.equation].flops * program.runs[m.equation] for m in members)


def _boundary(
    program: Program,
    rules: Sequence[OpRule],
    parts: Sequence[Part],
    members: Sequence[Member],
    leaving: set[Var],
    carried: Carries,
    sums: Set[Var],
) -> tuple[list[tuple[Var, Dims]], frozenset[int], dict[Var, Dims]]:
    """Values that enter a node, which of them may be unreduced, and values that leave it.

    A value made in the node but read in it by other dims (`x + x.T`) both leaves and enters; so
    does one of `sums`, where it is read by what does not carry it, and one that is made of what
    may enter unreduced, where it is read beside another that is.
    """
    made: dict[Var, Dims] = {}
    unreduced = set(sums)
    for part, member in zip(parts, members, strict=True):
        eqn, rule = program.equations[part.equation], rules[part.equation].factors
        for r in part.results:
            made[eqn.outvars[r]] = _mapped(rule.results[r], member)
        if carried[part.equation]:
            unreduced.update({eqn.outvars[r] for r in part.results} - carried.adopting)
    entering: dict[tuple[Var, Dims], bool] = {}
    for part, member in zip(parts, members, strict=True):
        eqn, rule = program.equations[part.equation], rules[part.equation].factors
        for operand in part.operands:
            atom = eqn.invars[operand]
            if isinstance(atom, Literal):
                continue
            dims = _mapped(rule.operands[operand], member)
            carries = operand in carried[part.equation]
            whole = unreduced if carried[part.equation] else sums
            if made.get(atom) != dims or (atom in whole and not carries):
                entering[atom, dims] = entering.get((atom, dims), False) or carries
    read_again = {var for var, _ in entering if var in made}
    results = {v: dims for v, dims in made.items() if v in leaving or v in read_again}
    carries = frozenset(k for k, carry in enumerate(entering.values()) if carry)
    return list(entering), carries, results


def _together(members: Sequence[Member], count: int) -> tuple[frozenset[int], ...]:
    """For each factor those of the same equations, with those that a sum there was made over."""
    found: list[set[int]] = [set() for _ in range(count)]
    for member in members:
        own = {f for f in (*member.factors, *member.summed) if f >= 0}
        for factor in own:
            found[factor] |= own
    return tuple(frozenset(own) for own in found)


def _mapped(dims: Dims, member: Member) -> Dims:
    return tuple(tuple(member.factors[f] for f in dim) for dim in dims)


def _follow_sums(
    program: Program,
    rules: Sequence[OpRule],
    parts: Sequence[Part],
    members: Sequence[Member],
    carried: Carries,
) -> tuple[dict[Var, tuple[tuple[int, Reduction], ...]], list[Member]]:
    """What each value made in a node is a sum (or maximum, ...) over, and what passes members."""
    reduced: dict[Any, tuple[tuple[int, Reduction], ...]] = {}
    followed = []
    for part, member in zip(parts, members, strict=True):
        eqn, rule = program.equations[part.equation], rules[part.equation].factors
        passing: tuple[tuple[int, Reduction], ...] = ()
        for operand in carried[part.equation]:
            atom = eqn.invars[operand]
            if not isinstance(atom, Literal):
                passing = passing or reduced.get(atom, ())
        over = passing + tuple(
            (member.factors[f], r) for f, r in rule.reductions if f in part.factors
        )
        if over:
            reduced.update({eqn.outvars[r]: over for r in part.results})
        followed.append(replace(member, summed=tuple(f for f, _ in passing)))
    return reduced, followed


def _kinds(
    rules: Sequence[OpRule], parts: Sequence[Part], members: Sequence[Member]
) -> tuple[frozenset[int], frozenset[int]]:
    """Need-replication and permutation factors of a node, by its own numbering."""
    whole: set[int] = set()
    permuted: set[int] = set()
    for part, member in zip(parts, members, strict=True):
        rule = rules[part.equation].factors
        whole.update(member.factors[f] for f in rule.whole & part.factors)
        permuted.update(member.factors[f] for f in rule.permuted & part.factors)
    return frozenset(whole), frozenset(permuted)
