"""What may not stand in the stages of a pipeline."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwise import _jax
from meshwise.api.meshes import check_effects
from meshwise.errors import HintError, PipelineError, message


def check_stages(name: str, closed: Any, mesh: Any) -> None:
    """An error for what a loss function, in its jaxpr, does that stages over a mesh cannot do."""
    check_effects(name, mesh, closed)
    _refuse(
        f"{name} does something on the host in its stages",
        _jax.not_to_repeat(closed),
        "The backward of a stage computes its forward again: what the host does would be done "
        "twice, and might be answered otherwise.",
        "Ask the host outside of the loss function, and pass what it answers with the batch. "
        "jax.debug.print may stand inside, and prints both times.",
    )
    _refuse(
        f"{name} has a jax.shard_map in its stages",
        _jax.regions_in(closed),
        "Devices of one stage take a branch that others do not, and a region by hand may be over "
        "all of them.",
        "Write the function for whole arrays, and say how they lie with mw.shard or in_shardings: "
        "what is sent over the other axes comes of it.",
    )


def refuse_references(name: str, held: Sequence[Any]) -> None:
    """An error for references among the values that a loss function closes over."""
    types = map(_jax.array_type, held)
    _refuse(
        f"{name} closes over a reference",
        [f"{t}" for t in types if t is not None and not isinstance(t, _jax.ShapedArray)],
        "The stages lie on several devices, and each forward is computed again: none sees what "
        "another writes.",
        "Close over what it holds, as ref[...], and return with has_aux what is to be written.",
    )


def check_hints(name: str, axis: str, hints: Iterable[tuple[str, Any]]) -> None:
    """An error that names every hint along the axis of the stages, by its value's path."""
    offenders = [f"{path}: {spec}" for path, spec in hints if axis in axes_named(spec)]
    if offenders:
        raise HintError(
            message(
                f"{name} has hints along {axis!r}, the axis of its stages",
                offenders,
                f"Stages lie along {axis!r}, each on its own device; hints are over the other axes "
                "of the mesh.",
                "Leave it out. For each device to have only its stage's parameters, pass what the "
                "step's `pack` makes of them.",
            )
        )


def axes_named(spec: Any) -> set[str]:
    """The axes that a hint names."""
    entries = getattr(spec, "spec", spec)
    if not isinstance(entries, PartitionSpec):
        return set()
    parts = [e if isinstance(e, tuple) else (e,) for e in entries]
    return {a for part in parts for a in part if isinstance(a, str)}


def _refuse(what: str, offenders: list[str], rule: str, way_out: str) -> None:
    if offenders:
        raise PipelineError(message(what, offenders, rule, way_out))
