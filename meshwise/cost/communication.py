"""Seconds of a collective: a launch, and its wire bytes over the link (latency and bandwidth)."""

from meshwise.cost.hardware import Hardware
from meshwise.ir.collectives import CollectiveKind, wire_bytes


def collective_seconds(
    kind: CollectiveKind,
    operand_bytes: float,
    result_bytes: float,
    group_size: int,
    hardware: Hardware,
) -> float:
    """Seconds of one collective, from the local operand's and result's bytes."""
    if group_size <= 1:
        return 0.0
    return wire_seconds(kind, wire_bytes(kind, operand_bytes, result_bytes, group_size), hardware)


def wire_seconds(
    kind: CollectiveKind, sent_bytes: float, hardware: Hardware, launches: int = 1
) -> float:
    """Seconds of collectives of one kind that together send so many wire bytes a device."""
    byte_s = hardware.byte_factor(kind) / hardware.link_bytes_per_s
    return launches * hardware.start_s(kind) + sent_bytes * byte_s
