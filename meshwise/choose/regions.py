"""The cost graph: regions and single equations as nodes, values between them as edges.

Equations that preserve dims (element-wise chains, residual streams, an optimiser's update) take
one sharding together: they form a *region*, one node whose factor rule is composed of theirs.
A reduction joins the region of its operand, as it follows whatever that does; its result leaves
the region (and enters it again, where a norm or a softmax goes on with it), because it may have to
be reduced between devices. So does what completion has lie otherwise than another array that it
meets, as one of them moves, and short floats and masks before they are made long again, as they
take fewer bytes to send. Every other equation is a node of its own.

A linear equation that a sum passes through belongs to the node that makes the sum, so that both
move together, unless it meets what is of sums as well, or another array as large; additions of
sums from several nodes are nodes apart, and their terms are added before one reduction.

What a loop carries along is one value before, in and after the loop: its marks are one node.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from meshwise._jax import JaxprEqn, Literal, Var, carry_p, stack_p
from meshwise.choose.carries import Carries
from meshwise.choose.parts import Factor, Groups, Part, parts_of
from meshwise.ir.factors import Dims, FactorRule
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


@dataclass(frozen=True, eq=False)
class Node:
    """One decision: a composed factor rule over the values that enter and leave.

    `reduced` lists, for each result, the factors over which it is a reduction and by what; it is
    unreduced over their axes. `carries` are the operands that may be unreduced together; the
    results are unreduced then too. What a sum in a loop starts from, `adopts`, becomes a term of
    whatever is added to it. `together` are, for each factor, those that stand in an equation with
    it: they share no axis. Rows of two streams that meet in a vector of columns alone may.
    `flops` are those of all members, `own_flops` without what is computed of a sum on its way.
    """

    index: int
    rule: FactorRule
    operands: tuple[Var, ...]
    results: tuple[Var, ...]
    reduced: tuple[tuple[tuple[int, Reduction], ...], ...]
    members: tuple[Member, ...]
    flops: float
    own_flops: float
    carries: frozenset[int] = frozenset()
    adopts: frozenset[int] = frozenset()
    together: tuple[frozenset[int], ...] = ()
    is_region: bool = False


def build_nodes(
    program: Program, rules: Sequence[OpRule], carried: Carries, lying: Mapping[Var, DimAxes]
) -> list[Node]:
    """The nodes of a program's cost graph, in the order of their first equations."""
    parts = [p for i, rule in enumerate(rules) for p in parts_of(program, i, rule, carried[i])]
    producer = {
        program.equations[p.equation].outvars[r]: (k, r)
        for k, p in enumerate(parts)
        for r in p.results
    }
    readers = _readers(program, parts)
    sources = {
        reading: producer[atom][0]
        for atom, each in readers.items()
        if atom in producer
        for reading in each
    }
    groups = Groups(parts, rules, carried, frozenset(program.carried.values()), sources)
    first = {p.equation: k for k, p in reversed(list(enumerate(parts)))}
    for end, begin in program.carried.items():
        groups.join(first[end], first[begin], _same_factors(rules[end], end, begin))
    apart = {begin for begin in program.carried.values() if carried[begin]}
    apart.update(i for i, eqn in enumerate(program.equations) if eqn.primitive is stack_p)
    for pairs in (True, False):
        for k, part in enumerate(parts):
            if part.equation in apart:  # what a sum starts from, and a stack, need not follow it
                continue
            if groups.is_of_pairs(part.equation) is not pairs:
                continue
            if part.joins or (carried[part.equation] and not part.factors):
                _join_producers(program, k, part, parts, groups, producer, carried, readers, lying)
    members: dict[int, list[int]] = defaultdict(list)
    for k in range(len(parts)):
        members[groups.find(k)].append(k)
    leaving = _leaving(program, parts, groups)
    return [
        _node(index, program, rules, [parts[k] for k in ks], groups, leaving[root], carried)
        for index, (root, ks) in enumerate(members.items())
    ]


def _same_factors(rule: OpRule, end: int, begin: int) -> list[tuple[Factor, Factor]]:
    """The factors of what is carried at the end of a step, and of the same at its beginning."""
    return [((end, f), (begin, f)) for f in range(len(rule.factors.sizes))]


def _join_producers(
    program: Program,
    k: int,
    part: Part,
    parts: Sequence[Part],
    groups: Groups,
    producer: dict[Var, tuple[int, int]],
    carried: Carries,
    readers: Mapping[Var, Sequence[tuple[int, int]]],
    lying: Mapping[Var, DimAxes],
) -> None:
    """Join a part with those that produce its operands, where one sharding serves both.

    Not with what makes a value that is read in the part's group by other dims too, as one of which
    all pairs of elements are taken is: no sharding of it serves both.
    """
    eqn = program.equations[part.equation]
    for operand in part.operands:
        atom = eqn.invars[operand]
        if isinstance(atom, Literal) or atom not in producer:
            continue
        other, result = producer[atom]
        if not _serves_both(k, operand, other, parts, groups, carried):
            continue
        rule = groups.rules[part.equation].factors
        if not carried[part.equation] and _lies_otherwise(atom, eqn, part, rule, lying):
            continue
        dims = rule.operands[operand]
        source_dims = groups.rules[parts[other].equation].factors.results[result]
        pairs = [
            ((part.equation, d[0]), (parts[other].equation, s[0]))
            for d, s in zip(dims, source_dims, strict=True)
            if len(d) == 1 and len(s) == 1
        ]
        if not pairs and (any(dims) or not carried[part.equation]):
            continue
        # A sum that enters its own node again, by other dims, would not be known for one.
        alike = all(len(d) == len(s) <= 1 for d, s in zip(dims, source_dims, strict=True))
        if carried[part.equation] and not alike:
            continue
        if groups.may_be_one(pairs) and not groups.reads_otherwise(k, operand, readers[atom]):
            groups.join(k, other, pairs)


def _readers(program: Program, parts: Sequence[Part]) -> dict[Var, list[tuple[int, int]]]:
    """For each value the parts that read it, and as which operand."""
    found: dict[Var, list[tuple[int, int]]] = defaultdict(list)
    for k, part in enumerate(parts):
        for operand in part.operands:
            atom = program.equations[part.equation].invars[operand]
            if not isinstance(atom, Literal):
                found[atom].append((k, operand))
    return found


def _serves_both(
    k: int,
    operand: int,
    other: int,
    parts: Sequence[Part],
    groups: Groups,
    carried: Carries,
) -> bool:
    """Whether a part may take the sharding of the node that makes one of its operands.

    A sum that passes through alone follows its maker, whatever that is; additions of sums go with
    additions of sums; and what carries nothing goes with what is neither a sum nor carries one, nor
    goes round a loop with fewer dims, nor is short and made long.
    """
    source = parts[other]
    carry = carried[parts[k].equation]
    if carry:
        if operand not in carry:
            return False
        alone = len(carry) == 1 and source.follows
        alone = alone and not groups.meets_sums(k, operand) and not groups.meets_another(k, operand)
        return alone or groups.only_carries[groups.find(other)]
    if groups.widens(k, operand, other):
        return False
    if source.lengthens < 0 < parts[k].lengthens:
        return False
    return source.joins and not source.reduces and not carried[source.equation]


def _lies_otherwise(
    atom: Var, eqn: JaxprEqn, part: Part, rule: FactorRule, lying: Mapping[Var, DimAxes]
) -> bool:
    """Whether completion has an operand lie otherwise than what is made of it and of another one.

    Then one of the two moves, and that may be the operand rather than all that it is made of.
    """
    besides = [rule.operands[o] for o in part.operands if eqn.invars[o] is not atom]
    met = {d for dims in besides for d in dims if len(d) == 1}
    made = [
        (d, axes)
        for r in part.results
        for d, axes in zip(rule.results[r], lying[eqn.outvars[r]], strict=True)
    ]
    own = zip(rule.operands[eqn.invars.index(atom)], lying[atom], strict=True)
    return any(
        d in met and d == other and axes and axes != to for d, axes in own for other, to in made
    )


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
        carries=carries,
        adopts=frozenset(k for k in carries if operands[k][0] in adopted),
        together=_together(members, len(sizes)),
        is_region=parts[0].joins,
    )


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
    does one of `sums`, where it is read by what does not carry it.
    """
    made: dict[Var, Dims] = {}
    for part, member in zip(parts, members, strict=True):
        eqn, rule = program.equations[part.equation], rules[part.equation].factors
        for r in part.results:
            made[eqn.outvars[r]] = _mapped(rule.results[r], member)
    entering: dict[tuple[Var, Dims], bool] = {}
    for part, member in zip(parts, members, strict=True):
        eqn, rule = program.equations[part.equation], rules[part.equation].factors
        for operand in part.operands:
            atom = eqn.invars[operand]
            if isinstance(atom, Literal):
                continue
            dims = _mapped(rule.operands[operand], member)
            carries = operand in carried[part.equation]
            if made.get(atom) != dims or (atom in sums and not carries):
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
