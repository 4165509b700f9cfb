"""Functions under `jax.experimental.custom_partitioning`: the rule and the callbacks they bring."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import mesh as _mesh_lib
from jax._src.custom_partitioning_sharding_rule import (
    BATCHING,
    SdyShardingRule,
    str_to_sdy_sharding_rule,
)
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwise._jax.jaxprs import JaxprEqn

Names = tuple[tuple[str, ...], ...]  # names of the factors of each dim


class ShardyRule(NamedTuple):
    """A sharding rule in the words of Shardy: names of the factors of each dim, and kinds.

    `sizes` are those of factors that never stand alone in a dim.
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    reduction: tuple[str, ...]
    whole: tuple[str, ...]
    permuted: tuple[str, ...]
    sizes: dict[str, int]


class Partitioned(NamedTuple):
    """What a `partition` callback answers: the function of local arrays, and what it takes."""

    function: Callable[..., Sequence[Any]]
    operands: list[PartitionSpec]
    results: list[PartitionSpec]


def sharding_rule_of(eqn: JaxprEqn) -> ShardyRule:
    """The rule given to `def_partition`, which there is."""
    rule = eqn.params["sharding_rule"]
    operands, results = [_avals(atoms) for atoms in (eqn.invars, eqn.outvars)]
    if callable(rule):
        rule = _called(rule, eqn.params["static_args"], operands, results)
    return ShardyRule(
        _all_names(rule.operand_mappings, operands),
        _all_names(rule.result_mappings, results),
        tuple(rule.reduction_factors),
        tuple(rule.need_replication_factors),
        tuple(rule.permutation_factors),
        dict(rule.factor_sizes),
    )


def custom_name_of(eqn: JaxprEqn) -> str:
    """The name of the function under custom_partitioning."""
    info = eqn.params["call"].jaxpr.debug_info
    return getattr(info, "func_name", None) or "the function"


def _avals(atoms: Sequence[Any]) -> list[Any]:
    return [a.aval for a in atoms]


def _called(
    rule: Callable[..., Any], static: Sequence[Any], operands: list[Any], results: list[Any]
) -> SdyShardingRule:
    """The rule that a function makes of the types, as JAX calls it when it lowers."""
    mesh = _mesh_lib.thread_resources.env.physical_mesh
    with _mlir.make_ir_context(), _ir.Location.unknown():
        made: Any = rule(*static, mesh, _ir_types(operands), _ir_types(results))
    options: Any = {}
    if isinstance(made, list | tuple):
        made, options = made
    return str_to_sdy_sharding_rule(made, **options) if isinstance(made, str) else made


def _ir_types(avals: Sequence[Any]) -> list[Any]:
    return [_ir.RankedTensorType.get(a.shape, _mlir.dtype_to_ir_type(a.dtype)) for a in avals]


def _all_names(mappings: Sequence[Any], avals: Sequence[Any]) -> tuple[Names, ...]:
    """Names for each tensor that the rule speaks of, be there as many or not."""
    ranks = [len(a.shape) for a in avals] + [0] * len(mappings)
    return tuple(_names(m, rank) for m, rank in zip(mappings, ranks, strict=False))


def _names(mapping: Sequence[Any], rank: int) -> Names:
    """Names of the factors of each dim; `...` becomes one for each leading dim."""
    dims: list[tuple[str, ...]] = []
    for entry in mapping:
        if isinstance(entry, str) and entry.startswith(BATCHING):
            group = entry.removeprefix(BATCHING) or "0"
            leading = rank - (len(mapping) - 1)
            dims += [(f"{BATCHING}{group}_{d}",) for d in range(leading)]
        else:
            dims.append((entry,) if isinstance(entry, str) else tuple(entry))
    return tuple(dims)


def partitioned(
    eqn: JaxprEqn,
    axes: dict[str, int],
    operands: Sequence[Sequence[tuple[str, ...]]],
    results: Sequence[Sequence[tuple[str, ...]]],
) -> Partitioned:
    """Ask a function's `partition` callback for shardings over some axes.

    `operands` and `results` are the axes of each dim.
    """
    params = eqn.params
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    in_tree, out_tree = params["in_tree"], params["out_tree"]
    given = in_tree.unflatten(_placed(_avals(eqn.invars), operands, mesh))
    wanted = out_tree.unflatten(_placed(_avals(eqn.outvars), results, mesh))
    answer = params["partition"](*params["static_args"], mesh, given, wanted)
    _, function, result_shardings, operand_shardings = answer

    def flat(*arrays: Any) -> Sequence[Any]:
        return out_tree.flatten_up_to(function(*in_tree.unflatten(arrays)))

    return Partitioned(
        flat,
        [s.spec for s in in_tree.flatten_up_to(operand_shardings)],
        [s.spec for s in out_tree.flatten_up_to(result_shardings)],
    )


def _placed(
    avals: Sequence[Any], sharded: Sequence[Sequence[tuple[str, ...]]], mesh: AbstractMesh
) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec_of(dims)))
        for a, dims in zip(avals, sharded, strict=True)
    ]


def spec_of(dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Axes of each dim as JAX writes them: one by its name, none as None."""
    return PartitionSpec(*(d[0] if len(d) == 1 else d or None for d in dims))
