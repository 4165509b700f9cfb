"""Programs that `jax.export` saved, called inside of others."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwise._jax.jaxprs import (
    JaxprEqn,
    bodies_of,
    opened,
    source_summary,
    with_bodies,
    with_each,
)

# How the text of a saved program begins what devices do by themselves, for either partitioner.
_BY_THEMSELVES = ("= sdy.manual_computation(", "custom_call @SPMDFullToShardShape(")


def saved_with_regions(jaxpr: Any) -> Iterator[str]:
    """Where programs are called in which each device does its own part, saved as such."""
    for eqn in opened(jaxpr).eqns:
        exported = _saved(eqn)
        if exported is not None and exported.nr_devices > 1:
            text = exported.mlir_module()
            if any(word in text for word in _BY_THEMSELVES):
                yield f"{exported.fun_name} at {source_summary(eqn)}"
        for body in bodies_of(eqn):
            yield from saved_with_regions(body)


def without_saved_placements(jaxpr: Any) -> Any:
    """The same jaxpr, in which saved programs say of no operand and no result where it lies.

    Each device calls them with all of their operands; JAX from 0.12 on would place these over axes
    that are the device's own.
    """

    def change(eqn: JaxprEqn) -> list[JaxprEqn]:
        exported = _saved(eqn)
        if exported is None:
            return [with_bodies(eqn, without_saved_placements)]
        anywhere = replace(
            exported,
            _in_named_shardings=(None,) * len(exported._in_named_shardings),
            _out_named_shardings=(None,) * len(exported._out_named_shardings),
        )
        return [eqn.replace(params={**eqn.params, "exported": anywhere})]

    return with_each(jaxpr, change)


def _saved(eqn: JaxprEqn) -> Any:
    """The saved program that an equation calls, if it does."""
    return eqn.params["exported"] if eqn.primitive.name == "call_exported" else None
