"""Windows over an array with borders of its own rows around it: halos that say what lies outside.

A halo of rows that are wrapped goes round the mesh, and what is mirrored or repeated at an end is
copied by the shard that has the end.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwise import _jax
from meshwise.rules.registry import (
    REGISTRY,
    Application,
    Exchange,
    LocalContext,
    OpRule,
    register,
)


@register(*(primitive.name for primitive in _jax.BORDERED.values()))
def _bordered_rule(application: Application) -> OpRule:
    """The rule of the window itself, whose padding is the border."""
    window, borders = _jax.without_borders(application.eqn), application.params["borders"]
    rule = REGISTRY.describe(window)
    assert rule.local is not None and rule.exchanges is not None, "windows have local rules"
    local_of, exchanges_of = rule.local, rule.exchanges

    def local(context: LocalContext, *operands: Any) -> Sequence[Any]:
        return local_of(replace(context, eqn=window, borders=borders), *operands)

    def exchanges(context: LocalContext) -> Sequence[Exchange] | None:
        return exchanges_of(replace(context, eqn=window, borders=borders))

    return replace(rule, local=local, exchanges=exchanges)
