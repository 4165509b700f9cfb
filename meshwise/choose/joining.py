"""Which parts of equations are decided together: those that one sharding serves.

A part joins those that make what it reads, in the order of the program. Which may be joined, and
why, is told in `regions.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwise._jax import Literal, Var, close_p, open_p, stack_p
from meshwise.choose.carries import Carries
from meshwise.choose.parts import FAR, Apart, Factor, Groups, Part
from meshwise.ir.factors import Dims
from meshwise.ir.program import Program, bytes_of
from meshwise.ir.sharding import DimAxes
from meshwise.rules.registry import OpRule


def joined_groups(
    program: Program,
    rules: Sequence[OpRule],
    parts: Sequence[Part],
    carried: Carries,
    lying: Mapping[Var, DimAxes],
    apart: Apart,
) -> Groups:
    """All parts, and what a loop carries, in groups; `lying` says how completion has values lie."""
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
    largest = [_largest(program, part) for part in parts]
    groups = Groups(
        parts,
        rules,
        carried,
        frozenset(program.carried.values()),
        sources,
        largest,
        _begins(program) if apart.steps else [0] * len(program.equations),
    )
    joining = _Joining(program, parts, groups, producer, readers, carried, lying)
    first = {p.equation: k for k, p in reversed(list(enumerate(parts)))}
    for end, begin in program.carried.items():
        groups.join(first[end], first[begin], _same_factors(rules[end], end, begin))
    alone = {begin for begin in program.carried.values() if carried[begin]}
    alone.update(i for i, eqn in enumerate(program.equations) if eqn.primitive is stack_p)
    for pairs in (True, False):
        for k, part in enumerate(parts):
            if part.equation in alone:  # what a sum starts from, and a stack, need not follow it
                continue
            if part.equation in apart.equations and not carried[part.equation]:
                continue
            if groups.is_of_pairs(part.equation) is not pairs:
                continue
            if part.joins or (carried[part.equation] and not part.factors):
                joining.join_producers(k)
    return groups


@dataclass(frozen=True, eq=False)
class _Joining:
    """Parts, their groups so far, and what tells which of them may be joined.

    `producer` has the part that makes a value, and which of its results that is; `readers` the
    parts that read it, and as which operand.
    """

    program: Program
    parts: Sequence[Part]
    groups: Groups
    producer: Mapping[Var, tuple[int, int]]
    readers: Mapping[Var, Sequence[tuple[int, int]]]
    carried: Carries
    lying: Mapping[Var, DimAxes]

    def join_producers(self, k: int) -> None:
        """Join a part with those that produce its operands, where one sharding serves both.

        Not with what makes a value that is read in the part's group by other dims too, as one of
        which all pairs of elements are taken is: no sharding of it serves both.
        """
        carries, groups = self.carried[self.parts[k].equation], self.groups
        made = self._made(k)
        met = {operand: self._pairs(k, operand, atom) for operand, atom in made.items()}
        in_two_orders = self._read_in_two_orders(made, met)
        for operand, atom in made.items():
            other, _ = self.producer[atom]
            if groups.find(other) in in_two_orders or not self._serves_both(k, operand, other):
                continue
            if not carries and self._meets_turned(k, operand, atom):
                continue
            if not carries and groups.binds_larger(k, other, bytes_of(atom)):
                continue
            if not carries and (self._lies_otherwise(k) or self._is_few(k, atom)):
                continue
            dims, source = self._ends(k, operand, atom)
            pairs = met[operand]
            if not pairs and (any(dims) or not carries):
                continue
            # A sum that enters its own node again, by other dims, would not be known for one.
            if carries and not all(
                len(d) == len(s) <= 1 for d, s in zip(dims, source, strict=True)
            ):
                continue
            readers = self.readers[atom]
            if groups.may_be_one(pairs) and not groups.reads_otherwise(k, operand, readers):
                groups.join(k, other, pairs)

    def _made(self, k: int) -> dict[int, Var]:
        """The operands of a part that another one makes."""
        atoms = self.program.equations[self.parts[k].equation].invars
        return {
            o: atom
            for o in self.parts[k].operands
            if not isinstance(atom := atoms[o], Literal) and atom in self.producer
        }

    def _ends(self, k: int, operand: int, atom: Var) -> tuple[Dims, Dims]:
        """A value's dims as a part reads it, and as another one makes it."""
        other, result = self.producer[atom]
        rules = self.groups.rules
        return (
            rules[self.parts[k].equation].factors.operands[operand],
            rules[self.parts[other].equation].factors.results[result],
        )

    def _pairs(self, k: int, operand: int, atom: Var) -> list[tuple[Factor, Factor]]:
        """The factors that meet in a value."""
        own, other = self.parts[k].equation, self.parts[self.producer[atom][0]].equation
        ends = zip(*self._ends(k, operand, atom), strict=True)
        return [((own, d[0]), (other, s[0])) for d, s in ends if len(d) == len(s) == 1]

    def _read_in_two_orders(
        self, made: Mapping[int, Var], met: Mapping[int, Sequence[tuple[Factor, Factor]]]
    ) -> set[int]:
        """Groups of which a part reads two values whose dims it takes for each other's: `x + x.T`.

        It goes with neither, as the other one moves, whichever that is.
        """
        taken: dict[tuple[int, Factor], set[Factor]] = defaultdict(set)
        for operand, atom in made.items():
            group = self.groups.find(self.producer[atom][0])
            for own, factor in met[operand]:
                taken[group, own].add(self.groups.factor(factor))
        return {group for (group, _), found in taken.items() if len(found) > 1}

    def _meets_turned(self, k: int, operand: int, atom: Var) -> bool:
        """Whether what a part makes of a value meets the value itself, in other dims: `x + x.T`.

        Gathered once, the value is turned for nothing; turned in shards, it is gathered twice.
        """
        rules, equations = self.groups.rules, self.program.equations
        rule, made = (
            rules[self.parts[k].equation].factors,
            equations[self.parts[k].equation].outvars,
        )
        for r in self.parts[k].results:
            for reader, position in self.readers.get(made[r], ()):
                part = self.parts[reader]
                atoms, read = equations[part.equation].invars, rules[part.equation].factors.operands
                places = dict(zip(rule.results[r], read[position], strict=True))
                straight = (read[o] for o in part.operands if atoms[o] is atom)
                pairs = (
                    p for dims in straight for p in zip(rule.operands[operand], dims, strict=True)
                )
                if part.joins and any(places.get(own, his) != his for own, his in pairs):
                    return True
        return False

    def _serves_both(self, k: int, operand: int, other: int) -> bool:
        """Whether a part may take the sharding of the node that makes one of its operands.

        A sum that passes through alone follows its maker, whatever that is; additions of sums go
        with additions of sums; and what carries nothing goes with what is neither a sum nor carries
        one, nor goes round a loop with fewer dims, nor is short and made long.
        """
        part, source, groups = self.parts[k], self.parts[other], self.groups
        carry = self.carried[part.equation]
        if carry:
            if operand not in carry:
                return False
            meets = groups.meets_sums(k, operand) or groups.meets_another(k, operand)
            alone = len(carry) == 1 and source.follows and not meets
            return alone or groups.only_carries[groups.find(other)]
        if groups.widens(k, operand, other) or source.lengthens < 0 < part.lengthens:
            return False
        return source.joins and not source.reduces and not self.carried[source.equation]

    def _is_few(self, k: int, atom: Var) -> bool:
        """Whether a part makes far more of a value than it has, which was made of a wider one.

        A mask of rows, before it is spread over columns, is sent for less than what it is made of.
        """
        size = bytes_of(atom)
        if FAR * size > _largest(self.program, self.parts[k]):
            return False
        read = {atom}
        while len(read) == 1 and bytes_of(*read) == size:  # laid otherwise
            made = self.producer.get(read.pop())
            part = None if made is None else self.parts[made[0]]
            if part is None or not part.joins or part.reduces:
                return False
            operands = self.program.equations[part.equation].invars
            read = {a for a in operands if not isinstance(a, Literal)}
        return any(bytes_of(a) > size for a in read)

    def _lies_otherwise(self, k: int) -> bool:
        """Whether completion has values that meet in a part lie otherwise than what is made there.

        Then one of them moves, and that may be each: what was made, not all that it is made of.
        """
        part, eqn = self.parts[k], self.program.equations[self.parts[k].equation]
        rule = self.groups.rules[part.equation].factors
        read = {
            atom: rule.operands[o]
            for o in part.operands
            if not isinstance(atom := eqn.invars[o], Literal)
        }
        times = Counter(d for dims in read.values() for d in set(dims))
        made = {
            d: axes
            for r in part.results
            for d, axes in zip(rule.results[r], self.lying[eqn.outvars[r]], strict=True)
        }
        return any(
            len(d) == 1 and times[d] > 1 and axes and axes != made.get(d, axes)
            for atom, dims in read.items()
            for d, axes in zip(dims, self.lying[atom], strict=True)
        )


def _begins(program: Program) -> list[int]:
    """For each equation where the innermost loop or choice around it begins, or the program."""
    begins, opened = list[int](), [0]
    for index, eqn in enumerate(program.equations):
        begins.append(opened[-1])
        if eqn.primitive is open_p:
            opened.append(index)
        elif eqn.primitive is close_p:
            opened.pop()
    return begins


def _same_factors(rule: OpRule, end: int, begin: int) -> list[tuple[Factor, Factor]]:
    """The factors of what is carried at the end of a step, and of the same at its beginning."""
    return [((end, f), (begin, f)) for f in range(len(rule.factors.sizes))]


def _largest(program: Program, part: Part) -> int:
    """Bytes of the largest that a part makes."""
    results = program.equations[part.equation].outvars
    return max((bytes_of(results[r]) for r in part.results), default=0)


def _readers(program: Program, parts: Sequence[Part]) -> dict[Var, list[tuple[int, int]]]:
    """For each value the parts that read it, and as which operand."""
    found: dict[Var, list[tuple[int, int]]] = defaultdict(list)
    for k, part in enumerate(parts):
        for operand in part.operands:
            atom = program.equations[part.equation].invars[operand]
            if not isinstance(atom, Literal):
                found[atom].append((k, operand))
    return found
