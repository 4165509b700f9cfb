"""Seconds of a collective are a launch and its bytes over the link."""

import inspect
from dataclasses import replace

import pytest

import meshwise as mw
from meshwise.cost.communication import wire_seconds
from meshwise.cost.hardware import CPU, GENERIC, H100, TPU_V5E, Hardware
from meshwise.cost.links import Links
from meshwise.ir.collectives import CollectiveKind, wire_bytes

MACHINE = Hardware("test", 1e9, 1e-6, 1e12, 1e11, "made up", (("all_to_all", 5.0),))

# kind, operand, result, group -> wire bytes
WIRE_BYTES = [
    ("all_gather", 100, 400, 4, 300),
    ("reduce_scatter", 400, 100, 4, 300),
    ("all_reduce", 400, 400, 4, 600),
    ("all_to_all", 400, 400, 4, 300),
    ("ppermute", 400, 400, 4, 400),
    ("all_reduce", 400, 400, 1, 0),
    ("ppermute", 400, 400, 1, 0),
]


@pytest.mark.parametrize(("kind", "operand", "result", "group", "sent"), WIRE_BYTES)
def test_wire_bytes_follow_the_ring(kind, operand, result, group, sent):
    assert wire_bytes(CollectiveKind(kind), operand, result, group) == sent


def test_seconds_are_a_launch_and_the_bytes():
    kind = CollectiveKind.ALL_GATHER
    assert wire_seconds(kind, 3000, MACHINE) == pytest.approx(1e-6 + 3e-6)
    assert wire_seconds(kind, 0, MACHINE, launches=3) == pytest.approx(3e-6)


def test_a_kind_may_be_slower_than_the_link():
    kind = CollectiveKind.ALL_TO_ALL
    assert wire_seconds(kind, 3000, MACHINE) == pytest.approx(1e-6 + 15e-6)


def test_of_equal_bytes_fewer_launches_win_and_nothing_else_hides_bytes():
    launch_bytes = GENERIC.launch_s * GENERIC.link_bytes_per_s
    assert 16 <= launch_bytes <= 256


def test_flops_one_after_the_other_take_longer():
    slow = replace(MACHINE, serial_flops_per_s=1e8)
    assert MACHINE.compute_s(3e12, 1e12) == 3.0
    assert slow.compute_s(3e12, 1e8) == pytest.approx(4.0, rel=1e-3)


def test_functions_of_single_numbers_take_their_time_where_there_is_no_unit_for_them():
    slow = replace(MACHINE, call_s=1e-9)
    assert MACHINE.compute_s(3e12, calls=1e9) == 3.0
    assert slow.compute_s(3e12, calls=1e9) == 4.0


@pytest.mark.parametrize("hardware", [GENERIC, TPU_V5E, H100], ids=lambda h: h.name)
def test_figures_are_positive_and_have_a_source(hardware):
    assert min(hardware.link_bytes_per_s, hardware.launch_s, hardware.flops_per_s) > 0
    assert hardware.memory_bytes_per_s > hardware.link_bytes_per_s
    assert hardware.source


def test_figures_are_shown_by_name_and_printed_with_their_figures():
    assert repr(Links(CPU, (("x", H100),))).startswith(
        "Links(device=<Hardware CPU>, axes=(('x', <Hardware H100 SXM>),)"
    )
    assert str(H100).splitlines()[:2] == ["H100 SXM", "  link_bytes_per_s   4.5e+11"]
    assert "all_gather 1.5, minor all_gather 4.5" in str(CPU)
    assert "at 0x" not in str(inspect.signature(mw.jit))
