"""Whether a function of local arrays is its part of the same function of global ones.

A program that is split without any exchange is run by each device on its own arrays: every
equation at local sizes. The same function, traced at these local shapes, may be another program:
one that divides by the number of rows, or asks how many there are, finds other numbers in it. Only
where both are the same program, equation by equation, does a call at local shapes compute a part.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.flatten import flatten
from meshwise.ir.factors import Dims, Strategy
from meshwise.ir.mesh import Mesh
from meshwise.ir.operators import RESHAPES, SPREADS, is_among
from meshwise.ir.program import type_of
from meshwise.rules.composition import Composition, Word, compose
from meshwise.rules.registry import LocalContext, OpRule, describe_all

Function = Callable[..., Sequence[Any]]
Types = tuple[jax.ShapeDtypeStruct, ...]
LocalSizes = tuple[tuple[int, int, int], ...]  # factors that are split: local size, shards of each


@dataclass(frozen=True)
class _SizedContext(LocalContext):
    """A context in which local sizes are given, whatever the mesh would make of them."""

    local_sizes: tuple[int, ...] = ()

    def local_size(self, factor: int) -> int:
        """The size that was given."""
        return self.local_sizes[factor]

    def local_shape(self, operand: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        return self._sized(self.rule.operands[operand], self.eqn.invars[operand])

    def local_result_shape(self, result: int) -> tuple[int, ...]:
        """Local shape of a result."""
        return self._sized(self.rule.results[result], self.eqn.outvars[result])

    def _sized(self, dims: Dims, atom: Any) -> tuple[int, ...]:
        split = {f for f, axes in enumerate(self.strategy.axes) if axes}
        return tuple(
            int(np.prod([self.local_sizes[f] for f in dim])) if split.intersection(dim) else size
            for dim, size in zip(dims, atom.aval.shape, strict=True)
        )


@_jax.kept_with_function
def composition_of(function: Function, types: Types, settings: Any) -> Composition:
    """The factors of a function at some types, of which those that can be split really can.

    A trace depends on `settings`, and so do the rules of what is traced. Each split is tried over
    as few devices as divide it, and what then is another program is left whole.
    """
    del settings
    traced = _traced(function, types)
    found = compose(traced, describe_all(traced.jaxpr.eqns))
    if any(size == 0 for size in found.sizes):
        return _limited(found, ())
    if _is_part_split(function, found, found.splits):
        return found
    found = _limited(found, [f for f in found.splits if _is_part_split(function, found, [f])])
    return found if _is_part_split(function, found, found.splits) else _limited(found, ())


@_jax.kept_with_function
def is_own_part(function: Function, types: Types, local: LocalSizes, settings: Any) -> bool:
    """Whether the function at local shapes is each device's part of it at some global types."""
    return _is_part(function, composition_of(function, types, settings), local)


def types_of(avals: Sequence[Any]) -> Types:
    """Types that say nothing of placement."""
    return tuple([_type(a, a.shape) for a in avals])


def _limited(composition: Composition, factors: Sequence[int]) -> Composition:
    """The composition with only some of its splits."""
    kept = {f: s for f, s in composition.splits.items() if f in set(factors)}
    return replace(composition, splits=kept)


def _is_part_split(function: Function, found: Composition, factors: Iterable[int]) -> bool:
    """Whether it is a part where some factors are split over as few devices as divide them."""
    fewest = {f: next(k for k in count(2) if found.sizes[f] % k == 0) for f in factors}
    return _is_part(function, found, tuple((f, found.sizes[f] // k, k) for f, k in fewest.items()))


def _is_part(function: Function, found: Composition, local: LocalSizes) -> bool:
    sizes = {f: size for f, size, _ in local}

    def sized(words: Iterable[Word]) -> tuple[int, ...]:
        return tuple([_size(word, found, sizes) for word in words])

    inputs = zip(found.closed.jaxpr.invars, found.operands, strict=True)
    types = [_type(v.aval, sized(words)) for v, words in inputs]
    try:
        own = _traced(function, types)
        split = _evaluated(found.closed, found.rules, _split_contexts(found, local), types)
    except Exception:  # the function, or a size written down in it, says no in whatever way
        return False
    if [type_of(a).shape for a in own.jaxpr.outvars] != _sized_results(found, sized):
        return False
    rules = describe_all(own.jaxpr.eqns)
    return is_same_program(_evaluated(own, rules, _whole_contexts(own, rules), types), split)


def _sized_results(
    found: Composition, sized: Callable[[Iterable[Word]], tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Local shapes of the results; a literal keeps its own."""
    outs = zip(found.closed.jaxpr.outvars, found.results, strict=True)
    return [type_of(a).shape if isinstance(a, Literal) else sized(words) for a, words in outs]


def _traced(function: Function, types: Sequence[Any]) -> ClosedJaxpr:
    return flatten(_jax.make_jaxpr_over_axes(function, [], types))


def _type(aval: Any, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=weak)


def _size(word: Word, found: Composition, sizes: Mapping[int, int]) -> int:
    return int(np.prod([sizes.get(f, found.sizes[f]) for f in word], dtype=int))


def _split_contexts(found: Composition, local: LocalSizes) -> list[LocalContext]:
    """Each equation's context where some factors are split."""
    sizes = {f: size for f, size, _ in local}
    names = {f: f"factor{f}" for f in sizes}
    mesh = Mesh(
        tuple(names.values()),
        tuple(k for _, _, k in local),
        tuple((n, (n,)) for n in names.values()),
    )
    contexts: list[LocalContext] = []
    for eqn, rule, words in zip(found.closed.jaxpr.eqns, found.rules, found.factors, strict=True):
        axes = tuple([tuple([names[f] for f in word if f in names]) for word in words])
        own = tuple([_size(word, found, sizes) for word in words])
        contexts.append(_SizedContext(eqn, rule.factors, Strategy(axes), mesh, own))
    return contexts


def _whole_contexts(closed: ClosedJaxpr, rules: Sequence[OpRule]) -> list[LocalContext]:
    """Each equation's context where nothing is split."""
    mesh = Mesh((), (), ())
    return [
        LocalContext(eqn, rule.factors, Strategy(((),) * len(rule.factors.sizes)), mesh)
        for eqn, rule in zip(closed.jaxpr.eqns, rules, strict=True)
    ]


def _evaluated(
    closed: ClosedJaxpr,
    rules: Sequence[OpRule],
    contexts: Sequence[LocalContext],
    types: Sequence[Any],
) -> ClosedJaxpr:
    """The flat jaxpr that the local rules of the equations make, without masks."""

    def run(*arrays: Any) -> list[Any]:
        def compute(index: int, operands: Sequence[Any]) -> Sequence[Any]:
            return _compute(contexts[index], rules[index], operands)

        return _walk(closed, arrays, compute)

    axes = sorted({axis for c in contexts for axis in c.mesh.axis_size.items()})
    return flatten(_jax.make_jaxpr_over_axes(run, axes, types))


def evaluated(closed: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    """The results of a flat jaxpr; nothing of the mesh that it was traced in is left."""
    eqns = closed.jaxpr.eqns
    return _walk(closed, arrays, lambda i, xs: _jax.bind(_jax.without_hints(eqns[i]), xs))


def _walk(
    closed: ClosedJaxpr,
    arrays: Sequence[Any],
    compute: Callable[[int, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """The results of a flat jaxpr whose equations are computed by a function of their index."""
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arrays, strict=True))

    read = partial(_jax.value_in, values)

    for index, eqn in enumerate(jaxpr.eqns):
        results = compute(index, [read(a) for a in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _compute(context: LocalContext, rule: OpRule, operands: Sequence[Any]) -> Sequence[Any]:
    if rule.opaque:
        return _jax.bind(_jax.without_hints(context.eqn), operands)
    return (rule.local or LocalContext.bind)(context, *operands)


def is_same_program(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Whether two flat jaxprs compute the same from the same, equation by equation.

    Equations that change nothing at some sizes, as a broadcast to the shape that is there, are
    left out of account.
    """
    one, other = _plain(one), _plain(other)
    if len(one.consts) != len(other.consts):
        return False
    if not all(_is_same_array(a, b) for a, b in zip(one.consts, other.consts, strict=True)):
        return False
    keys = [_jax.structure_key(_jax.hoisted(j, [True] * len(j.consts))[0]) for j in (one, other)]
    return keys[0] == keys[1]


def _is_same_array(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if jax.numpy.issubdtype(a.dtype, jax.dtypes.extended) or a.dtype != b.dtype:
        return False
    return a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _plain(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr without equations that change nothing."""
    same: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    kept: list[JaxprEqn] = []
    for eqn in closed.jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        if _changes_nothing(eqn):
            same[eqn.outvars[0]] = operands[0]
        else:
            kept.append(eqn.replace(invars=operands))
    jaxpr = closed.jaxpr
    outputs = [read(a) for a in jaxpr.outvars]
    return _jax.close_jaxpr(jaxpr.constvars, jaxpr.invars, outputs, kept, closed.consts)


_MOVES = RESHAPES | SPREADS | {"slice", "hint"}


def _changes_nothing(eqn: JaxprEqn) -> bool:
    """An identity: a move of elements to where they are."""
    if not is_among(eqn, _MOVES) or len(eqn.invars) != 1:
        return False
    operand, result = type_of(eqn.invars[0]), type_of(eqn.outvars[0])
    return (operand.shape, operand.dtype) == (result.shape, result.dtype)
