"""The parts that equations consist of, and which of them are decided together so far."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshwise._jax import JaxprEqn, hint_p
from meshwise.choose.carries import Carries, Carry
from meshwise.ir.factors import FactorRule
from meshwise.ir.program import Program, itemsize_of, shape_of
from meshwise.rules.registry import OpRule


@dataclass(frozen=True)
class Apart:
    """What is decided by itself, though by its dims it could be with others.

    With `steps` what is computed before a loop binds nothing in it. Each of `equations` is, but for
    what goes with a sum, or round a loop.
    """

    steps: bool = False
    equations: frozenset[int] = frozenset()


TOGETHER = Apart()


@dataclass(frozen=True, slots=True)
class Part:
    """A connected component of one equation's rule: its factors and its tensors.

    `joins`: it may be one node with what makes its operands. `lengthens`: by how many bytes each
    number is longer after it.
    """

    equation: int
    factors: frozenset[int]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    joins: bool
    reduces: bool
    follows: bool
    lengthens: int


def _components(factors: FactorRule, carry: Carry) -> list[frozenset[int]]:
    """Factors that are decided together: all of them, unless the equation falls apart.

    It does where each operand has a result of its own that depends on it alone, as a barrier's do.
    """
    tensors = [*factors.operands, *factors.results]
    sets = [frozenset(f for dim in t for f in dim) for t in tensors]
    everything = frozenset(range(len(factors.sizes)))
    kinds = factors.reductions or factors.whole or factors.permuted or carry
    if kinds or len(factors.operands) != len(factors.results):
        return [everything]
    own = list(zip(sets[: len(factors.operands)], sets[len(factors.operands) :], strict=True))
    disjoint = sum(len(a) for a, _ in own) == len(everything)
    if len(own) < 2 or not disjoint or any(a != b for a, b in own):
        return [everything]
    return [a for a, _ in own if a] or [everything]


def parts_of(
    program: Program, index: int, rule: OpRule, carry: Carry, may_join: bool
) -> list[Part]:
    """An equation's parts; tensors without factors go with the first."""
    factors = rule.factors
    sets = [frozenset(f for dim in t for f in dim) for t in (*factors.operands, *factors.results)]
    components = _components(factors, carry)
    count = len(factors.operands)
    is_hint = program.equations[index].primitive is hint_p
    parts = []
    for k, component in enumerate(components):
        own = [t for t, s in enumerate(sets) if s <= component and (s or k == 0)]
        operands = tuple(t for t in own if t < count)
        results = tuple(t - count for t in own if t >= count)
        special = component & (factors.whole | factors.permuted | factors.compound)
        reduces = bool(component & factors.reduction_of.keys())
        placed = sum(bool(factors.operands[t]) for t in operands)
        alike = placed == 1 if reduces else placed > 0
        free = bool(results) and not is_hint and not rule.opaque
        joins = may_join and alike and free and not special
        longer = _lengthens(program.equations[index], operands, results) if joins else 0
        parts.append(Part(index, component, operands, results, joins, reduces, free, longer))
    return parts


def _lengthens(eqn: JaxprEqn, operands: Sequence[int], results: Sequence[int]) -> int:
    """How many bytes a number of what is made takes more than one of the only thing it is made of.

    0 where it is made of several.
    """
    read = [itemsize_of(eqn.invars[k]) for k in operands if shape_of(eqn.invars[k])]
    if len(read) != 1 or not results:
        return 0
    return max(itemsize_of(eqn.outvars[k]) for k in results) - read[0]


Factor = tuple[int, int]  # an equation, and one of its rule's factors

# A value of so many times fewer bytes than what is made on either side of it binds neither.
FAR = 16


class Groups:
    """Union-find over parts, and over the factors of their equations."""

    def __init__(
        self,
        parts: Sequence[Part],
        rules: Sequence[OpRule],
        carried: Carries,
        rounds: Collection[int],
        sources: Mapping[tuple[int, int], int],
        largest: Sequence[int],
        begins: Sequence[int],
    ):
        """Every part by itself; `rounds` are the equations that begin what a loop carries.

        `sources` says of a part and its operand which part makes that, `largest` how many bytes
        the largest has that a part makes. `begins` says for each equation since where what goes
        round or is of sums binds it: what is made before that is given there.
        """
        self.largest = list(largest)
        self.begins = begins
        self.rules = rules
        self.part_parent = list(range(len(parts)))
        # Not what sums as well: another term of an addition after it is no sum over that factor.
        self.only_carries = [bool(carried[p.equation]) and not p.reduces for p in parts]
        self.parts = parts
        self.has_pairs = [self.is_of_pairs(p.equation) for p in parts]
        self.goes_round = [p.equation in rounds for p in parts]
        self.sources = sources
        self.reads_sums = [False] * len(parts)
        for (part, _), source in sources.items():
            self.reads_sums[part] |= self._is_sum(source)
        self.factor_parent: dict[Factor, Factor] = {}
        self.beside: dict[Factor, set[Factor]] = {}
        for equation in dict.fromkeys(p.equation for p in parts):
            rule = rules[equation].factors
            for tensor in (*rule.operands, *rule.results):
                own = {(equation, f) for dim in tensor for f in dim}
                for factor in own:
                    self.beside.setdefault(factor, set()).update(own - {factor})

    def find(self, part: int) -> int:
        """The first part of a part's group."""
        while self.part_parent[part] != part:
            self.part_parent[part] = self.part_parent[self.part_parent[part]]
            part = self.part_parent[part]
        return part

    def factor(self, factor: Factor) -> Factor:
        """The factor that stands for all that are one with it."""
        found = factor
        while (parent := self.factor_parent.get(found, found)) != found:
            found = parent
        while factor != found:  # each on the way is one step from it the next time
            self.factor_parent[factor], factor = found, self.factor_parent[factor]
        return found

    def may_be_one(self, pairs: Sequence[tuple[Factor, Factor]]) -> bool:
        """Whether factors can be made one in pairs: not if a tensor has both in its dims."""
        for pair in pairs:
            x, y = (self.factor(f) for f in pair)
            if x != y and any(self.factor(f) == y for f in self.beside[x]):
                return False
        return True

    def join(self, a: int, b: int, pairs: Sequence[tuple[Factor, Factor]]) -> None:
        """Merge the groups of two parts, and the factors that meet in the value between them."""
        low, high = sorted((self.find(a), self.find(b)))
        self.part_parent[high] = low
        self.only_carries[low] = self.only_carries[low] and self.only_carries[high]
        self.has_pairs[low] = self.has_pairs[low] or self.has_pairs[high]
        self.goes_round[low] = self.goes_round[low] or self.goes_round[high]
        self.reads_sums[low] = self.reads_sums[low] or self.reads_sums[high]
        self.largest[low] = max(self.largest[low], self.largest[high])
        for pair in pairs:
            x, y = sorted(self.factor(f) for f in pair)
            if x != y:
                self.factor_parent[y] = x
                self.beside[x] = {self.factor(f) for f in self.beside[x] | self.beside[y]}

    def is_of_pairs(self, equation: int) -> bool:
        """Whether several operands of an equation have dims each that another one has not."""
        rule = self.rules[equation].factors
        sets = [frozenset(f for dim in dims for f in dim) for dims in rule.operands]
        whole = frozenset().union(*sets)
        return sum(bool(s) and s != whole for s in sets) > 1

    def widens(self, part: int, operand: int, other: int) -> bool:
        """Whether joining would tie what a loop carries, or a sum, to a dim that it does not have.

        In `s = (s[:, None] + moves).max(0) + seen` the rows of the matrix may have to be whole, but
        what is carried need not be, nor what `logsumexp` over rows makes of maxima and sums. Where
        a matrix is made of two such vectors, they go with it; where a batch of such vectors meets
        a matrix that is given, they need not.
        """
        equation = self.parts[part].equation
        if self.is_of_pairs(equation):
            if not self._is_of_rounds_or_sums(other):
                return False
        else:
            root = self.find(other)
            if not (self.goes_round[root] or self.reads_sums[root]):
                return False
        if self.has_pairs[self.find(part)] and not self._is_beside_given(part, operand):
            return False
        rule = self.rules[equation].factors
        own, *results = [
            {f for dim in dims for f in dim if rule.sizes[f] > 1}
            for dims in (rule.operands[operand], *rule.results)
        ]
        return bool(own) and any(own < result for result in results)

    def binds_larger(self, a: int, b: int, size: int) -> bool:
        """Whether parts of two groups that both make far more than a value would be one for it.

        Labels of rows, by which a matrix and its transpose are read, are sent for less than either.
        """
        a, b = self.find(a), self.find(b)
        return a != b and FAR * size <= min(self.largest[a], self.largest[b])

    def _is_beside_given(self, part: int, operand: int) -> bool:
        """Whether what an operand makes pairs with neither goes round a loop nor is of sums."""
        equation = self.parts[part].equation
        others = (
            self.sources.get((part, k))
            for k, dims in enumerate(self.rules[equation].factors.operands)
            if k != operand and any(dims)
        )
        since = self.begins[equation]
        return self.is_of_pairs(equation) and not any(
            other is not None and self._is_of_rounds_or_sums(other, since) for other in others
        )

    def _is_of_rounds_or_sums(self, part: int, since: int = 0) -> bool:
        """Whether what a part makes goes round a loop or is of sums, from some equation on.

        Or some of what it makes it of, element by element: pairs are joined first, when this is in
        no group yet.
        """
        waiting, seen = [part], {part}
        while waiting:
            source = waiting.pop()
            if self.parts[source].equation < since:
                continue
            root = self.find(source)
            if self.goes_round[root] or self.reads_sums[root]:
                return True
            own = self._sources(source) - seen
            seen |= own
            waiting += sorted(own)
        return False

    def _sources(self, part: int) -> set[int]:
        """Which parts make the operands that have dims of a part that keeps them."""
        its = self.parts[part]
        if not its.joins or its.reduces:
            return set()
        operands = self.rules[its.equation].factors.operands
        made = (self.sources.get((part, k)) for k in its.operands if any(operands[k]))
        return {source for source in made if source is not None}

    def meets_sums(self, part: int, operand: int) -> bool:
        """Whether a part reads along an operand's dims what is of sums or maxima, too."""
        rule = self.rules[self.parts[part].equation].factors
        own = {f for dim in rule.operands[operand] for f in dim if rule.sizes[f] > 1}
        others = (
            self.sources.get((part, k))
            for k, dims in enumerate(rule.operands)
            if k != operand and own.intersection(f for dim in dims for f in dim)
        )
        return any(
            self._is_sum(other) or self.reads_sums[self.find(other)]
            for other in others
            if other is not None
        )

    def meets_another(self, part: int, operand: int) -> bool:
        """Whether a part reads along an operand's dims another one, which may lie otherwise.

        A sum that goes on with all of it wants it whole; scattered before, it wants a part of it.
        What is made of nothing that lies anywhere is had in any way.
        """
        rule = self.rules[self.parts[part].equation].factors
        own = {f for dim in rule.operands[operand] for f in dim if rule.sizes[f] > 1}
        return any(
            own.intersection(f for dim in dims for f in dim) and self._lies(part, k)
            for k, dims in enumerate(rule.operands)
            if k != operand
        )

    def _lies(self, part: int, operand: int) -> bool:
        """Whether an operand is an argument, or made of something that has dims."""
        source = self.sources.get((part, operand))
        return source is None or any(self.rules[self.parts[source].equation].factors.operands)

    def _is_sum(self, part: int) -> bool:
        return self.parts[part].joins and self.parts[part].reduces

    def reads_otherwise(self, part: int, operand: int, readers: Sequence[tuple[int, int]]) -> bool:
        """Whether a group of pairs reads a part's operand by other dims, as one of `readers`."""
        root = self.find(part)
        if not self.has_pairs[root]:
            return False
        own = self._dims(part, operand)
        return any(self.find(k) == root and self._dims(k, o) != own for k, o in readers)

    def _dims(self, part: int, operand: int) -> list[list[Factor]]:
        """The factors that stand for those of an operand's dims."""
        equation = self.parts[part].equation
        dims = self.rules[equation].factors.operands[operand]
        return [[self.factor((equation, f)) for f in dim] for dim in dims]
