"""Seconds of a collective: a launch, and its wire bytes over the link (latency and bandwidth)."""

from meshwise.cost.hardware import Hardware
from meshwise.ir.collectives import CollectiveKind


def wire_seconds(
    kind: CollectiveKind, sent_bytes: float, hardware: Hardware, launches: int = 1
) -> float:
    """Seconds of collectives of one kind that together send so many wire bytes a device."""
    byte_s = hardware.byte_factor(kind) / hardware.link_bytes_per_s
    return launches * hardware.start_s(kind) + sent_bytes * byte_s
