"""Factor rules: one operator described by the factors of its dims.

`"i k, k j -> i j | sum=k"` says that a matrix product has factors `i`, `j` and `k`; that each dim
of each operand and result is a list of factors (here one each); and that `k` is a reduction: when
it is sharded every device computes a term of a sum. A dim made of several factors is written in
parentheses, major to minor: splitting heads off a dim is `"t (h d) -> t h d"`. A dim of size one
that is stretched, or has nothing to shard, is written `1`.

Kinds of factors (Shardy's names, arXiv 2105.04663 section 3 for what they serve):

- pass-through: each shard computes its own part;
- reduction (`sum=k`, `max=k`, ...): sharding it leaves the result unreduced;
- need-replication (`whole=k`): must not be split;
- permutation (`permute=k`): can be split with an exchange that the operator's local rule does. The
  dims that have it may differ in size: of a window that moves over 64 rows and makes 62.

A factor is *compound* where it shares a dim with others; a compound factor is sharded only by
axes whose size divides it, so that shards stay contiguous. A permutation factor that leads its dims
may be sharded by any axes, as long as the factors after it are not: its local rule moves the rows
that change shards.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from meshwise.errors import RuleError
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import DimAxes, Reduction, Sharding, unreduced

Dims = tuple[tuple[int, ...], ...]  # factors of each dim, major to minor


@dataclass(frozen=True)
class FactorRule:
    """Factors of every dim of every operand and result, their sizes and their kinds.

    The size of a permutation factor is that of the first dim that has it. It may be a reduction
    factor too: the rows that a kernel's gradient sums over, of which one operand lends its border.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reductions: tuple[tuple[int, Reduction], ...] = ()
    whole: frozenset[int] = frozenset()
    permuted: frozenset[int] = frozenset()

    @cached_property
    def reduction_of(self) -> dict[int, Reduction]:
        """The operator of each reduction factor."""
        return dict(self.reductions)

    @cached_property
    def compound(self) -> frozenset[int]:
        """Factors that share a dim with another one somewhere."""
        return frozenset(f for dim in self.compound_dims for f in dim)

    @cached_property
    def compound_dims(self) -> frozenset[tuple[int, ...]]:
        """Dims made of several factors, of any tensor."""
        tensors = (*self.operands, *self.results)
        return frozenset(dim for tensor in tensors for dim in tensor if len(dim) > 1)

    def __str__(self) -> str:
        """The rule as text, as `bind_rule` reads it."""
        operands = ", ".join(_show_dims(t) for t in self.operands)
        results = ", ".join(_show_dims(t) for t in self.results)
        kinds: dict[str, list[int]] = {}
        for factor, reduction in self.reductions:
            kinds.setdefault(reduction.value, []).append(factor)
        kinds["whole"] = sorted(self.whole)
        kinds["permute"] = sorted(self.permuted)
        shown = [f"{k}={' '.join(_name(f) for f in fs)}" for k, fs in kinds.items() if fs]
        return f"{operands} -> {results}" + (f" | {' '.join(shown)}" if shown else "")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one operator is split: the axes of each factor, and the axes carried unreduced."""

    axes: DimAxes
    carried: Axes = ()


def dims_sharding(dims: Dims, axes: DimAxes) -> DimAxes:
    """Axes of each dim of a tensor, given the axes of each factor."""
    return tuple([axes[d[0]] if len(d) == 1 else sum([axes[f] for f in d], ()) for d in dims])


def operand_sharding(
    rule: FactorRule, strategy: Strategy, operand: int, carries: bool = False
) -> Sharding:
    """The sharding a strategy wants of an operand (unreduced where it carries a sum)."""
    dims = dims_sharding(rule.operands[operand], strategy.axes)
    return unreduced(dims, strategy.carried if carries else (), Reduction.SUM)


def result_sharding(rule: FactorRule, strategy: Strategy, result: int) -> Sharding:
    """The sharding a strategy produces: unreduced over the axes of reduction factors."""
    return made_sharding(rule.results[result], rule.reductions, strategy)


def made_sharding(
    dims: Dims,
    reductions: Sequence[tuple[int, Reduction]],
    strategy: Strategy,
    turned: Sequence[str] = (),
) -> Sharding:
    """The sharding of dims: unreduced over what is carried and the axes that are reduced over."""
    axes = list(strategy.carried)
    operator = Reduction.SUM
    for factor, reduction in reductions:
        if strategy.axes[factor]:
            axes += strategy.axes[factor]
            operator = reduction
    return unreduced(dims_sharding(dims, strategy.axes), axes, operator, turned)


def factor_axes(
    dims: Dims, rule: FactorRule, sharding: DimAxes, mesh: Mesh, dividing: bool = False
) -> dict[int, Axes]:
    """Project a tensor's sharding onto its factors; what does not fit a factor is left out.

    In a compound dim a factor takes axes while their sizes divide it, and the next, more minor
    one gets axes only when this one is split completely. Where that leaves axes over, a leading
    permutation factor takes all, unless only `dividing` axes are asked for.
    """
    found: dict[int, Axes] = {}
    for factors, axes in zip(dims, sharding, strict=True):
        if not axes or not factors:
            continue
        if len(factors) == 1 and factors[0] not in rule.compound:
            found[factors[0]] = axes
            continue
        found.update(_split_axes(factors, axes, rule, mesh, dividing))
    return {f: a for f, a in found.items() if f not in rule.whole}


def _split_axes(
    factors: tuple[int, ...], axes: Axes, rule: FactorRule, mesh: Mesh, dividing: bool
) -> dict[int, Axes]:
    found: dict[int, Axes] = {}
    position = 0
    for factor in factors:
        size = rule.sizes[factor]
        taken: list[str] = []
        while position < len(axes) and size % mesh.axis_size[axes[position]] == 0:
            taken.append(axes[position])
            size //= mesh.axis_size[axes[position]]
            position += 1
        if taken:
            found[factor] = tuple(taken)
        if size > 1:
            break
    if position < len(axes) and factors[0] in rule.permuted and not dividing:
        return {factors[0]: axes}
    return found


def fits(
    rule: FactorRule,
    strategy: Strategy,
    mesh: Mesh,
    together: Sequence[frozenset[int]] | None = None,
) -> bool:
    """Whether a strategy is allowed: axes disjoint, kinds respected, compound dims contiguous.

    `together` are, for each factor, those that axes must not be shared with; by default all.
    """
    if not _disjoint(strategy, together):
        return False
    for factor, axes in enumerate(strategy.axes):
        if not axes:
            continue
        if factor in rule.whole:
            return False
        if factor in rule.compound - rule.permuted and rule.sizes[factor] % mesh.size(axes):
            return False
    operators = {rule.reduction_of[f] for f in rule.reduction_of if strategy.axes[f]}
    if len(operators | ({Reduction.SUM} if strategy.carried else set())) > 1:
        return False
    return all(_contiguous(dim, rule, strategy, mesh) for dim in rule.compound_dims)


def _disjoint(strategy: Strategy, together: Sequence[frozenset[int]] | None) -> bool:
    used = [a for axes in strategy.axes for a in axes] + list(strategy.carried)
    if len(used) == len(set(used)):
        return True
    taken = {a for axes in strategy.axes for a in axes}
    if together is None or not taken.isdisjoint(strategy.carried):
        return False
    sharded = [f for f, axes in enumerate(strategy.axes) if axes]
    return not any(
        f in together[g] and set(strategy.axes[f]) & set(strategy.axes[g])
        for k, f in enumerate(sharded)
        for g in sharded[:k]
    ) and all(len(axes) == len(set(axes)) for axes in strategy.axes)


def _contiguous(dim: tuple[int, ...], rule: FactorRule, strategy: Strategy, mesh: Mesh) -> bool:
    """A minor factor may be sharded only where every factor more major is split completely."""
    complete = True
    for factor in dim:
        if strategy.axes[factor] and not complete:
            return False
        complete = complete and mesh.size(strategy.axes[factor]) == rule.sizes[factor]
    return True


def bind_rule(
    text: str,
    operands: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]],
    sizes: dict[str, int] | None = None,
) -> FactorRule:
    """Read a rule's text and find its factors' sizes from the shapes.

    `sizes` gives factors that the shapes leave open (all but one of a compound dim's must be
    known from elsewhere). Raises `RuleError` where the text does not fit the shapes.
    """
    parsed = _parse(text)
    known: dict[str, int] = dict(sizes or {})
    tensors = list(zip((*parsed.operands, *parsed.results), (*operands, *results), strict=False))
    if (len(parsed.operands), len(parsed.results)) != (len(operands), len(results)):
        raise RuleError(
            f"rule {text!r} is for {len(parsed.operands)} operands and "
            f"{len(parsed.results)} results, not {len(operands)} and {len(results)}"
        )
    for dims, shape in tensors:
        _learn_sizes(text, dims, shape, known, parsed.permuted)
    for dims, shape in tensors:
        _learn_compound_sizes(text, dims, shape, known, parsed.permuted)
    names = list(dict.fromkeys(f for dims, _ in tensors for dim in dims for f in dim))
    index = {name: i for i, name in enumerate(names)}
    bound = [tuple(tuple(index[f] for f in dim) for dim in dims) for dims, _ in tensors]
    kinds = {kind: [index[f] for f in fs] for kind, fs in parsed.kinds}
    return FactorRule(
        operands=tuple(bound[: len(operands)]),
        results=tuple(bound[len(operands) :]),
        sizes=tuple(known[name] for name in names),
        reductions=tuple((f, r) for r in Reduction for f in kinds.get(r.value, ())),
        whole=frozenset(kinds.get("whole", ())),
        permuted=frozenset(kinds.get("permute", ())),
    )


def _learn_sizes(
    text: str,
    dims: tuple[tuple[str, ...], ...],
    shape: Sequence[int],
    known: dict[str, int],
    permuted: frozenset[str],
) -> None:
    if len(dims) != len(shape):
        raise RuleError(f"rule {text!r} has a tensor of rank {len(dims)}; the shape is {shape}")
    for dim, size in zip(dims, shape, strict=True):
        if len(dim) != 1 or (dim[0] in permuted and dim[0] in known):
            continue
        if known.setdefault(dim[0], size) != size:
            raise RuleError(f"rule {text!r}: factor {dim[0]} has sizes {known[dim[0]]} and {size}")


def _learn_compound_sizes(
    text: str,
    dims: tuple[tuple[str, ...], ...],
    shape: Sequence[int],
    known: dict[str, int],
    permuted: frozenset[str],
) -> None:
    for dim, size in zip(dims, shape, strict=True):
        if len(dim) == 1 and dim[0] in permuted:
            continue
        unknown = [f for f in dim if f not in known]
        product = math.prod(known[f] for f in dim if f in known)
        if len(unknown) == 1 and product and size % product == 0:
            known[unknown[0]] = size // product
        elif unknown or (dim and product != size):
            raise RuleError(f"rule {text!r}: dim ({' '.join(dim)}) does not fit size {size}")


@dataclass(frozen=True)
class _ParsedRule:
    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    kinds: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def permuted(self) -> frozenset[str]:
        """The permutation factors, whose dims may differ in size."""
        return frozenset(dict(self.kinds).get("permute", ()))


_KINDS = frozenset({r.value for r in Reduction} | {"whole", "permute"})


@lru_cache(maxsize=4096)
def _parse(text: str) -> _ParsedRule:
    head, _, tail = text.partition("|")
    left, arrow, right = head.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->' between operands and results")
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, factors in re.findall(r"(\w+)=([^=]*?)(?=\s+\w+=|\s*$)", tail):
        if kind not in _KINDS:
            raise RuleError(f"rule {text!r}: {kind!r} is none of {', '.join(sorted(_KINDS))}")
        kinds[kind] = (*kinds.get(kind, ()), *factors.split())
    operands = tuple(_parse_dims(part) for part in left.split(","))
    results = tuple(_parse_dims(part) for part in right.split(","))
    known = {f for tensor in (*operands, *results) for dim in tensor for f in dim}
    unknown = [f for fs in kinds.values() for f in fs if f not in known]
    if unknown:
        raise RuleError(f"rule {text!r}: {', '.join(unknown)} is a factor of no dim")
    return _ParsedRule(operands, results, tuple(kinds.items()))


def _parse_dims(part: str) -> tuple[tuple[str, ...], ...]:
    dims = []
    for compound, single in re.findall(r"\(([^)]*)\)|(\S+)", part):
        factors = compound.split() if not single else [] if single == "1" else [single]
        dims.append(tuple(factors))
    return tuple(dims)


def _name(factor: int) -> str:
    return "ijklmnopqrstuvwxyzabcdefgh"[factor] if factor < 26 else f"f{factor}"


def _show_dims(dims: Dims) -> str:
    shown = [
        _name(d[0]) if len(d) == 1 else f"({' '.join(map(_name, d))})" if d else "1" for d in dims
    ]
    return " ".join(shown)
