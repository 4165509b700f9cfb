"""Functions under `jax.experimental.custom_partitioning`, by the sharding rule that they bring.

Their `partition` callback makes the function of local arrays, and does itself what exchange it
takes: what it returns are complete results, in the shardings that it was asked for. So factors
that are no dim of every result are permutation factors here. A strategy is followed where the
callback agrees with it and no such factor has padding. (Without a sharding rule a function is a
call like any other, which tracing replaces by its body.)
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import ShardyRule
from meshwise.errors import RuleError, message
from meshwise.flatten import flatten
from meshwise.ir.collectives import collectives_of
from meshwise.ir.factors import Dims, FactorRule, Strategy, dims_sharding
from meshwise.ir.mesh import Axes, Mesh
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes
from meshwise.rules.given import result_problems, types_text
from meshwise.rules.own_part import evaluated
from meshwise.rules.registry import (
    Application,
    Exchange,
    LocalContext,
    OpRule,
    describe_all,
    register,
)


@register("custom_partitioning")
def _custom_partitioning_rule(application: Application) -> OpRule:
    eqn = application.eqn
    factors = _bound(_jax.sharding_rule_of(eqn), application)
    body = flatten(eqn.params["call"])

    @cache
    def agreed(strategy: Strategy, mesh: Mesh) -> Any:
        """The callback's answer, None where it does not agree, or would be asked for sub-axes."""
        operands = _user_axes(factors.operands, strategy, mesh)
        results = _user_axes(factors.results, strategy, mesh)
        if operands is None or results is None:
            return None
        answer = _jax.partitioned(eqn, _axes(mesh), operands, results)
        found = [_jax.axes_of(s, len(d)) for s, d in zip(answer.operands, operands, strict=True)]
        made = [_jax.axes_of(s, len(d)) for s, d in zip(answer.results, results, strict=True)]
        return answer.function if (found, made) == (operands, results) else None

    @cache
    def sent(strategy: Strategy, mesh: Mesh) -> list[Exchange]:
        """What the callback's function sends."""
        context = LocalContext(eqn, factors, strategy, mesh)
        types = [
            jax.ShapeDtypeStruct(context.local_shape(i), aval.dtype)
            for i, aval in enumerate(application.operands)
        ]
        closed = _jax.make_jaxpr_over_axes(agreed(strategy, mesh), list(_axes(mesh).items()), types)
        found = collectives_of(closed, _axes(mesh))
        return [Exchange(c.kind, c.wire_bytes, c.count) for c in found]

    def exchanges(context: LocalContext) -> list[Exchange] | None:
        if not any(context.strategy.axes):
            return []
        own = Strategy(context.strategy.axes), context.mesh
        divides = all(factors.sizes[f] % context.shards(f) == 0 for f in factors.permuted)
        return sent(*own) if divides and agreed(*own) is not None else None

    def local(context: LocalContext, *operands: Any) -> Sequence[Any]:
        if not any(context.strategy.axes):
            return evaluated(body, operands)
        if exchanges(context) is None:
            raise _refused(context, ["its partition callback wants other shardings"])
        function = agreed(Strategy(context.strategy.axes), context.mesh)
        axes = list(_axes(context.mesh).items())
        closed = _jax.make_jaxpr_over_axes(function, axes, operands)
        names = _jax.Names(context.mesh.sub_axes, context.mesh.names)
        results = _jax.run_local(closed.jaxpr, closed.consts, operands, names)
        problems = result_problems(context, results)
        if problems:
            raise _refused(context, problems)
        return results

    flops = sum(rule.flops for rule in describe_all(body.jaxpr.eqns))
    return OpRule(factors, local=local, exchanges=exchanges, masked=(), flops=flops)


def _axes(mesh: Mesh) -> dict[str, int]:
    """The user's axes, which is what a callback knows, with their sizes."""
    return {name: mesh.size(subs) for name, subs in mesh.user_axes}


def _user_axes(
    tensors: Sequence[Dims], strategy: Strategy, mesh: Mesh
) -> list[tuple[Axes, ...]] | None:
    """The user's axes of each dim; None where one of them is taken apart."""
    found: list[tuple[Axes, ...]] = []
    for dims in tensors:
        whole = [mesh.restore(axes) for axes in dims_sharding(dims, strategy.axes)]
        if None in whole:
            return None
        found.append(tuple([axes or () for axes in whole]))
    return found


def _bound(given: ShardyRule, application: Application) -> FactorRule:
    """The rule in factors of the sizes at hand."""
    tensors = [*shapes(application.operands), *shapes(application.results)]
    mappings = [*given.operands, *given.results]
    if [len(m) for m in mappings] != [len(s) for s in tensors]:
        raise _does_not_fit(application, mappings, tensors)
    sizes: dict[str, set[int]] = {name: {size} for name, size in given.sizes.items()}
    for mapping, shape in zip(mappings, tensors, strict=True):
        for names, size in zip(mapping, shape, strict=True):
            if len(names) == 1 and size != 1:
                sizes.setdefault(names[0], set()).add(size)
    factoring = Factoring()
    dims: dict[str, Dim] = {}
    for name, found in sizes.items():
        if len(found) == 1:  # of several sizes it is whole, below
            dims[name] = factoring.new(found.pop(), _kind(name, given))
    bound: list[list[Dim]] = []
    for mapping, shape in zip(mappings, tensors, strict=True):
        found_dims = zip(mapping, shape, strict=True)
        bound.append([_dim(names, size, dims, factoring) for names, size in found_dims])
    count = len(given.operands)
    return factoring.rule(bound[:count], bound[count:])


def _kind(name: str, given: ShardyRule) -> Kind:
    if name in given.whole:
        return "whole"
    passes = all(any(name in dim for dim in result) for result in given.results)
    read = any(name in dim for operand in given.operands for dim in operand)
    return (
        None if passes and read and name not in (*given.reduction, *given.permuted) else "permute"
    )


def _dim(names: Sequence[str], size: int, dims: dict[str, Dim], factoring: Factoring) -> Dim:
    """The factors of a dim; whole where a name has several sizes, as Shardy allows."""
    if size == 1:
        return ()
    if all(name in dims for name in names):
        return tuple(f for name in names for f in dims[name])
    return factoring.new(size, "whole")


def _does_not_fit(
    application: Application, mappings: Sequence[Any], tensors: Sequence[tuple[int, ...]]
) -> RuleError:
    name = _jax.custom_name_of(application.eqn)
    pairs = list(zip(mappings, tensors, strict=False))
    offenders = [f"{_show(m)} for {s}" for m, s in pairs if len(m) != len(s)]
    if len(mappings) != len(tensors):
        offenders = [f"it is for {len(mappings)} operands and results, there are {len(tensors)}"]
    types = f"{types_text(application.operands)} -> {types_text(application.results)}"
    return RuleError(
        message(
            f"the sharding rule of {name} does not fit what it is applied to at "
            f"{_jax.source_summary(application.eqn)}",
            offenders,
            f"The types are {types}.",
            "Correct the sharding_rule that is given to def_partition.",
        )
    )


def _show(mapping: Sequence[Sequence[str]]) -> str:
    return repr(" ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in mapping))


def _refused(context: LocalContext, problems: Sequence[str]) -> RuleError:
    operands = [context.rule.operands, context.rule.results]
    asked = [
        str(_jax.spec_of(dims_sharding(dims, context.strategy.axes)))
        for tensors in operands
        for dims in tensors
    ]
    return RuleError(
        message(
            f"the partition callback of {_jax.custom_name_of(context.eqn)} at "
            f"{_jax.source_summary(context.eqn)} was asked for {', '.join(asked)}",
            problems,
            "Its sharding rule says that it can be split so.",
            "Make the callback and the sharding_rule that are given to def_partition agree.",
        )
    )
