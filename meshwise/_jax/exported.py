"""Programs that `jax.export` saved, called inside of others."""

from collections.abc import Iterator
from typing import Any

from meshwise._jax.jaxprs import bodies_of, opened, source_summary

# How the text of a saved program begins what devices do by themselves, for either partitioner.
_BY_THEMSELVES = ("= sdy.manual_computation(", "custom_call @SPMDFullToShardShape(")


def saved_with_regions(jaxpr: Any) -> Iterator[str]:
    """Where programs are called in which each device does its own part, saved as such."""
    for eqn in opened(jaxpr).eqns:
        exported = eqn.params.get("exported") if eqn.primitive.name == "call_exported" else None
        if exported is not None and exported.nr_devices > 1:
            text = exported.mlir_module()
            if any(word in text for word in _BY_THEMSELVES):
                yield f"{exported.fun_name} at {source_summary(eqn)}"
        for body in bodies_of(eqn):
            yield from saved_with_regions(body)
