"""`jax.experimental.shard_alike`: two values of one shape that are to have one sharding."""

from meshwise.rules.factoring import Factoring
from meshwise.rules.registry import Application, OpRule, register


@register("shard_alike")
def _shard_alike_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.operands[0].shape)
    return OpRule(factoring.rule([dims, dims], [dims, dims]), local=lambda context, *arrays: arrays)
