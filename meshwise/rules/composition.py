"""The factors of a whole program: what the rules of its equations say together.

Every dim of every value is a *word*: its factors, major to minor. Each equation brings factors of
its own, and what it says of a value's dim is matched with the word that the dim has. Two words for
one dim are the same factors in the end: `(24)` and `(6 4)` become `(6 4)`, `(4 6)` and `(8 3)`
become `(4 2 3)`. A factor then is split everywhere, or nowhere, and needs no exchange where

- each equation lets it pass, or sums over it, or has nothing to exchange at the sizes at hand,
  which is for the caller to find out;
- what is summed passes on only through operators that are linear in it;
- it stands once in a value.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import Any

from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.picked import keeps_picked
from meshwise.rules.registry import OpRule

Word = tuple[int, ...]  # factors of one dim, major to minor

MOST_IN_PAIRS = 8  # operands: with more, sums are not followed through each two of them


@dataclass
class Words:
    """Factors while they are matched: sizes, what each consists of, and which are special.

    `whole` must not be split; `exchanged` are those along which an equation may exchange something.
    """

    sizes: list[int] = field(default_factory=list)
    parts: dict[int, Word] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    exchanged: set[int] = field(default_factory=set)

    def new(self, size: int) -> Word:
        """A word of one fresh factor; size one has nothing to split and gets none."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def spelled(self, word: Word) -> Word:
        """A word in the factors that are left."""
        found: Word = ()
        for factor in word:
            found += self.spelled(self.parts[factor]) if factor in self.parts else (factor,)
        return found

    def match(self, one: Word, other: Word) -> None:
        """Make two words of one dim the same; what cannot be the same is whole."""
        while True:
            one, other = self.spelled(one), self.spelled(other)
            pairs = zip_longest(one, other)
            pair = next(((a, b) for a, b in pairs if a != b), None)
            if pair is None:
                return
            if None in pair or not self._match_factors(*pair):
                self.whole.update(one, other)
                return

    def _match_factors(self, a: int, b: int) -> bool:
        """Make the common part of two factors one factor; False where they share none."""
        common = math.gcd(self.sizes[a], self.sizes[b])
        if common == 1:
            return False
        if self.sizes[a] == self.sizes[b]:
            self.parts[b] = (a,)
        elif common == self.sizes[a]:
            self.parts[b] = (a, *self.new(self.sizes[b] // common))
        elif common == self.sizes[b]:
            self.parts[a] = (b, *self.new(self.sizes[a] // common))
        else:
            shared = self.new(common)
            for factor in (a, b):
                self.parts[factor] = (*shared, *self.new(self.sizes[factor] // common))
        return True


@dataclass(frozen=True)
class Split:
    """What becomes of a factor when it is split.

    `joined` holds, for each result, the reduction of its terms, None where it has none. `evenly`:
    only where it divides, because equations inside would mask padding, or exchange it.
    """

    joined: tuple[Reduction | None, ...]
    evenly: bool

    @property
    def passes(self) -> bool:
        """Whether no result has to be joined."""
        return not any(self.joined)

    @property
    def reduction(self) -> Reduction | None:
        """The one reduction by which every result is joined, if it is so."""
        kinds = set(self.joined)
        return self.joined[0] if len(kinds) == 1 else None


@dataclass(frozen=True)
class Composition:
    """The factors of a program: words of its values and of its equations' factors, and splits.

    `splits` are the factors that can be split; all others are whole. `linear` are sets of operands
    through which a sum may pass to every result.
    """

    closed: ClosedJaxpr
    rules: tuple[OpRule, ...]
    sizes: tuple[int, ...]
    operands: tuple[tuple[Word, ...], ...]
    results: tuple[tuple[Word, ...], ...]
    factors: tuple[tuple[Word, ...], ...]
    splits: dict[int, Split]
    linear: tuple[tuple[int, ...], ...]


def compose(closed: ClosedJaxpr, rules: Sequence[OpRule]) -> Composition:
    """Match the factors of all equations, and find those that can be split."""
    words = Words()
    values: dict[Var, tuple[Word, ...]] = {}
    jaxpr = closed.jaxpr
    for var in (*jaxpr.constvars, *jaxpr.invars):
        values[var] = tuple([words.new(n) for n in shape_of(var)])
    factors = [
        _match_equation(eqn, rule, words, values)
        for eqn, rule in zip(jaxpr.eqns, rules, strict=True)
    ]
    spelled = {v: tuple(map(words.spelled, dims)) for v, dims in values.items()}
    each = tuple([tuple(map(words.spelled, own)) for own in factors])
    results = tuple([_words_of(a, spelled) for a in jaxpr.outvars])
    whole = set(words.spelled(tuple(words.whole)))
    whole.update(_unsplittable(closed, spelled, results))
    candidates = {f for v in jaxpr.invars for word in spelled[v] for f in word} - whole
    exchanged = frozenset(words.spelled(tuple(words.exchanged)))
    sums = _Sums(closed, rules, each, spelled, exchanged)
    found = {f: split for f in sorted(candidates) if (split := sums.split(f))}
    return Composition(
        closed=closed,
        rules=tuple(rules),
        sizes=tuple(words.sizes),
        operands=tuple([spelled[v] for v in jaxpr.invars]),
        results=results,
        factors=each,
        splits=found,
        linear=tuple(filter(sums.carries, _some_operands(len(jaxpr.invars)))),
    )


def _some_operands(count: int) -> list[tuple[int, ...]]:
    """Sets of operands that a sum may well pass through: each, each two, and all."""
    each = range(count)
    pairs = combinations(each, 2) if count <= MOST_IN_PAIRS else ()
    return list(dict.fromkeys([*((i,) for i in each), *pairs, tuple(each)])) if count else []


def _words_of(atom: Any, values: dict[Var, tuple[Word, ...]]) -> tuple[Word, ...]:
    return ((),) * len(shape_of(atom)) if isinstance(atom, Literal) else values[atom]


def _match_equation(
    eqn: JaxprEqn, rule: OpRule, words: Words, values: dict[Var, tuple[Word, ...]]
) -> list[Word]:
    """Match an equation's factors with the words of its operands; give words to its results."""
    factors = [words.new(size) for size in rule.factors.sizes]
    for factor in rule.factors.whole:
        words.whole.update(factors[factor])
    for factor in rule.factors.permuted - rule.factors.whole:
        words.exchanged.update(factors[factor])

    def told(dim: tuple[int, ...], size: int) -> Word:
        """What the equation says of a dim."""
        word = sum([factors[f] for f in dim], ())
        if math.prod(words.sizes[f] for f in words.spelled(word)) == size:
            return word
        fresh = words.new(size)  # a window's dim, or one that is stretched
        words.whole.update(fresh)
        return fresh

    for atom, dims in zip(eqn.invars, rule.factors.operands, strict=True):
        if isinstance(atom, Literal):
            continue
        for dim, size, word in zip(dims, shape_of(atom), values[atom], strict=True):
            words.match(word, told(dim, size))
    for var, dims in zip(eqn.outvars, rule.factors.results, strict=True):
        values[var] = tuple([told(d, n) for d, n in zip(dims, shape_of(var), strict=True)])
    return factors


def _unsplittable(
    closed: ClosedJaxpr, values: dict[Var, tuple[Word, ...]], results: Sequence[tuple[Word, ...]]
) -> Iterator[int]:
    """Factors of constants, and those that stand twice in a value."""
    for var in closed.jaxpr.constvars:
        yield from (f for word in values[var] for f in word)
    for dims in (*values.values(), *results):
        seen: set[int] = set()
        for word in dims:
            yield from seen.intersection(word)
            seen.update(word)


class _Sums:
    """Follows sums that are not added up yet to the results."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        rules: Sequence[OpRule],
        factors: Sequence[Sequence[Word]],
        values: dict[Var, tuple[Word, ...]],
        exchanged: frozenset[int],
    ):
        self.jaxpr = closed.jaxpr
        self.rules = rules
        self.factors = factors
        self.values = values
        self.exchanged = exchanged

    def split(self, factor: int) -> Split | None:
        """What becomes of a factor that is split; None where it cannot be."""
        terms = self._followed({}, factor)
        if terms is None:
            return None
        outs = self.jaxpr.outvars
        joined = tuple([_get(terms, a) for a in outs])
        stands = [any(factor in word for word in _words_of(a, self.values)) for a in outs]
        if any(r and s for r, s in zip(joined, stands, strict=True)):
            return None
        split = Split(joined, factor in self.exchanged or any(joined))
        return split if split.passes or split.reduction or set(joined) <= _ADDED else None

    def carries(self, operands: Sequence[int]) -> bool:
        """Whether sums in some operands, and in no other, pass to every result."""
        start = {self.jaxpr.invars[i]: Reduction.SUM for i in operands}
        terms = self._followed(start, None)
        return terms is not None and all(_get(terms, a) for a in self.jaxpr.outvars)

    def _followed(self, terms: dict[Var, Reduction], factor: int | None) -> Any:
        """The values that are terms of a sum, given those that are and a factor that is split."""
        eqns = zip(self.jaxpr.eqns, self.rules, self.factors, strict=True)
        picked: set[Any] = set()
        for eqn, rule, words in eqns:
            reductions = {r for f, r in rule.factors.reductions if factor in words[f]}
            carried = tuple(i for i, a in enumerate(eqn.invars) if _get(terms, a))
            if carried:
                summed = all(_get(terms, eqn.invars[i]) is Reduction.SUM for i in carried)
                mixed = reductions or any(factor in word for word in words)
                passing = {tuple(sorted(group)) for group in rule.linear_as_is}
                if not summed or mixed or carried not in passing:
                    return None
                is_picked = any(eqn.invars[i] in picked for i in carried)
                if is_picked and not keeps_picked(eqn, rule, carried, is_summed=False):
                    return None
                reductions = {Reduction.SUM}
                picked.update(eqn.outvars if is_picked else ())
            elif rule.moves and reductions:
                picked.update(eqn.outvars)
            if len(reductions) > 1:
                return None
            for reduction in reductions:
                terms.update(dict.fromkeys(eqn.outvars, reduction))
        return terms


_ADDED = {Reduction.SUM, None}  # results that a local rule can join by itself


def _get(terms: dict[Var, Reduction], atom: Any) -> Reduction | None:
    return None if isinstance(atom, Literal) else terms.get(atom)
