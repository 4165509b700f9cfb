"""What a `PartitionSpec` says of each dim."""

from typing import Any

from jax.sharding import PartitionSpec


def axes_of(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    """The axes of each dim of a spec, as tuples; UNCONSTRAINED where it leaves a dim open."""
    entries = [*spec.partitions, *[None] * (rank - len(spec))]
    return tuple([_axes(e) for e in entries])


def _axes(entry: Any) -> Any:
    if isinstance(entry, tuple | list):
        return tuple(entry)
    return entry if entry is PartitionSpec.UNCONSTRAINED else (entry,) if entry else ()
