"""What equations do beside making values."""

from typing import Any

from jax._src import core as _core
from jax._src import effects as _effects
from jax._src.debugging import DebugEffect, OrderedDebugEffect

from meshwise._jax.jaxprs import JaxprEqn, bodies_of, opened, source_summary


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does something beside making values; to use a named axis is nothing."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def has_checks(jaxpr: Any) -> bool:
    """Whether a jaxpr has a `checkify.check` that is compiled by no one."""
    return any(type(e).__name__ == "ErrorEffect" for e in jaxpr.effects)


def not_to_repeat(jaxpr: Any) -> list[str]:
    """The equations of a jaxpr, bodies included, that may do another thing when done again."""
    found: list[str] = []
    for eqn in opened(jaxpr).eqns:
        harmless = (_core.NamedAxisEffect, DebugEffect, OrderedDebugEffect)
        if not all(isinstance(effect, harmless) for effect in eqn.effects):
            inside = [each for body in bodies_of(eqn) for each in not_to_repeat(body)]
            found += inside or [f"{eqn.primitive.name} at {source_summary(eqn)}"]
    return found


def kept_in_order(jaxpr: Any) -> list[str]:
    """The names of what a jaxpr does that JAX keeps in order on one device alone."""
    known, of_many = _effects.ordered_effects, _effects.shardable_ordered_effects
    return sorted({str(e) for e in jaxpr.effects if known.contains(e) and not of_many.contains(e)})
