"""Opaque kernels that are partitioned as a plain function is: `mw.like`.

The rule of such a call is composed of the rules of the reference's equations. Every factor that
can be split without an exchange inside is split; a result that is summed over one is left
unreduced, where all results are, and else summed by the local rule. On each device the kernel is
called with local arrays. A strategy is followed only where the reference, at the local shapes it
makes, is the device's part of the reference, and where what is summed divides: padding inside a
kernel cannot be masked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax

from meshwise import _jax
from meshwise.errors import RuleError, message
from meshwise.ir.factors import FactorRule
from meshwise.ir.mesh import Axes
from meshwise.ir.program import itemsize_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.composition import Composition, Split
from meshwise.rules.given import result_problems, types_text
from meshwise.rules.own_part import LocalSizes, composition_of, is_own_part, types_of
from meshwise.rules.registry import (
    Application,
    Exchange,
    LocalContext,
    OpRule,
    all_reduce_of,
    register,
    settings_key,
)


@dataclass(frozen=True, eq=False)
class ComposedRule:
    """The rule of a function's call, from its composition.

    `numbers` are the composition's factors in the order of the rule's.
    """

    composition: Composition

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The composition's factors that stand in an operand or result, in order."""
        tensors = (*self.composition.operands, *self.composition.results)
        return tuple(dict.fromkeys(f for dims in tensors for word in dims for f in word))

    @cached_property
    def splits(self) -> dict[int, Split]:
        """What becomes of the rule's factors that can be split."""
        found = self.composition.splits
        return {i: found[f] for i, f in enumerate(self.numbers) if f in found}

    @cached_property
    def factors(self) -> FactorRule:
        """The factor rule."""
        index = {f: i for i, f in enumerate(self.numbers)}
        found = self.composition
        reductions = {i: s.reduction for i, s in self.splits.items() if s.reduction}
        exchanged = [i for i, s in self.splits.items() if not s.passes and not s.reduction]
        return FactorRule(
            operands=tuple(tuple(tuple(index[f] for f in w) for w in t) for t in found.operands),
            results=tuple(tuple(tuple(index[f] for f in w) for w in t) for t in found.results),
            sizes=tuple(found.sizes[f] for f in self.numbers),
            reductions=tuple((i, r) for r in Reduction for i in reductions if reductions[i] is r),
            whole=frozenset(range(len(self.numbers))) - frozenset(self.splits),
            permuted=frozenset(exchanged),
        )

    def local_sizes(self, context: LocalContext) -> LocalSizes:
        """The composition's factors that a strategy splits: local sizes, and shards."""
        split = [i for i in self.splits if context.axes(i)]
        return tuple((self.numbers[i], context.local_size(i), context.shards(i)) for i in split)

    def divides(self, context: LocalContext) -> bool:
        """Whether nothing has padding that equations inside would mask or exchange."""
        return not any(
            split.evenly and context.rule.sizes[i] % context.shards(i)
            for i, split in self.splits.items()
        )

    def summed_axes(self, context: LocalContext, result: int) -> Axes:
        """Axes over which the local rule itself sums a result."""
        exchanged = self.factors.permuted
        joined = [i for i, s in self.splits.items() if i in exchanged and s.joined[result]]
        return tuple(a for i in joined for a in context.axes(i))

    def exchanges(self, context: LocalContext) -> list[Exchange]:
        """The sums that the local rule takes."""
        found = []
        for result, var in enumerate(context.eqn.outvars):
            axes = self.summed_axes(context, result)
            if axes:
                size = math.prod(context.local_result_shape(result)) * itemsize_of(var)
                found.append(all_reduce_of(size, context.mesh.size(axes)))
        return found


@register("mw_like")
def _like_rule(application: Application) -> OpRule:
    twin = application.params["twin"]
    types, settings = types_of(application.operands), settings_key()
    composed = ComposedRule(composition_of(twin.reference, types, settings))

    def follows(context: LocalContext) -> bool:
        sizes = composed.local_sizes(context)
        if not sizes:
            return True
        return composed.divides(context) and is_own_part(twin.reference, types, sizes, settings)

    def exchanges(context: LocalContext) -> list[Exchange] | None:
        return composed.exchanges(context) if follows(context) else None

    def local(context: LocalContext, *operands: Any) -> list[Any]:
        if not follows(context):
            raise _not_followed(context, twin, operands)
        results = call_local(context, twin.kernel, twin.name, operands)
        summed = [composed.summed_axes(context, i) for i in range(len(results))]
        return [lax.psum(r, axes) if axes else r for r, axes in zip(results, summed, strict=True)]

    factors = composed.factors
    return OpRule(
        factors,
        linear=composed.composition.linear,
        local=local,
        exchanges=exchanges,
        masked=(),
        flops=sum(rule.flops for rule in composed.composition.rules),
        opaque=bool(factors.sizes) and not composed.splits,
    )


def call_local(context: LocalContext, kernel: Any, name: str, operands: Sequence[Any]) -> list[Any]:
    """A kernel on local operands; an error where it does not give what the rule says."""
    try:
        results = list(kernel(*operands))
    except Exception as error:
        raise _kernel_error(
            context, name, operands, [f"{type(error).__name__}: {error}"]
        ) from error
    problems = result_problems(context, results)
    if problems:
        raise _kernel_error(context, name, operands, problems)
    return results


def _kernel_error(
    context: LocalContext, name: str, operands: Sequence[Any], problems: Sequence[str]
) -> RuleError:
    return RuleError(
        message(
            f"{name} cannot be called at {_jax.source_summary(context.eqn)} with each device's "
            f"{types_text([jax.typeof(x) for x in operands])}",
            problems,
            "A kernel of mw.like is called with the shapes of one device's part.",
            "Let it take any size, or keep the dim whole with mw.shard on operands and results.",
        )
    )


def _not_followed(context: LocalContext, twin: Any, operands: Sequence[Any]) -> RuleError:
    return RuleError(
        message(
            f"{twin.name} at {_jax.source_summary(context.eqn)} was given a part that its "
            "reference does not compute by itself",
            [types_text([jax.typeof(x) for x in operands])],
            "The reference at local shapes has to be the same program as at global ones.",
            "Write the reference so that no number in it depends on a size.",
        )
    )
