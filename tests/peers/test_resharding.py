"""The cases of the reshard benchmark, and what is read of programs that reshard."""

import random

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.peers import hlo
from benchmarks.peers.resharding import (
    Case,
    even_case,
    is_same,
    large_case,
    marked_reshard,
    numbers,
    read_program,
    shardings,
    some_pairs,
    uneven_case,
    xla_reshard,
)

PAIRS = [
    (P("x", "y"), P("y", "x")),
    (P("x", None), P(None, "y")),
    (P(("x", "y"), None), P(None, ("y", "x"))),
    (P(None, "y"), P(None, None)),
    (P(None, None), P("y", "x")),
]


@pytest.mark.parametrize("which", hlo.PARTITIONERS)
@pytest.mark.parametrize("ends", PAIRS, ids=str)
def test_between_barriers_stands_what_the_boundary_of_a_program_would_do(ends, which):
    case = even_case("2x4", 2, ends)
    source, target = case.ends
    step = jax.jit(lambda x: x, in_shardings=source, out_shardings=target)
    with hlo.partitioner(which):
        lowered = step.lower(jax.ShapeDtypeStruct(case.shape, case.dtype))
        wanted = read_program(hlo.partitioned_text(lowered))
    assert xla_reshard(case, which) == wanted


def test_what_is_sent_to_show_the_result_does_not_count():
    found = xla_reshard(Case("2x4", (13, 7), P("x", None), P("x", "y")), "shardy")
    assert (found.wire_bytes, found.kinds) == (0, "nothing")
    assert found.largest == 7 * 8 * 4  # a shard of seven rows, its columns padded to be cut


def test_an_uneven_reshard_gives_the_value():
    case = Case("2x4", (13, 7), P("x", "y"), P("y", "x"))
    value = np.arange(13 * 7, dtype=np.float32).reshape(13, 7)
    np.testing.assert_array_equal(marked_reshard(case).compile()(value), value)


def program(line: str) -> str:
    """Text of a program of eight devices with one collective."""
    return (
        "HloModule m, num_partitions=8\nENTRY %main (p: f32[8,16]) -> f32[8,16] {\n"
        f"  %p = f32[8,16] parameter(0)\n  %i = s32[99,99] iota()\n  ROOT %r = {line}\n}}\n"
    )


def test_a_device_receives_what_others_send_it():
    found = read_program(
        program("f32[8,16] collective-permute(%p), source_target_pairs={{0,0},{1,2},{2,1},{3,4}}")
    )
    assert found.received == (0, 512, 512, 0, 512, 0, 0, 0)
    assert (found.busiest, found.wire_bytes, found.largest) == (512, 512, 512)
    found = read_program(program("f32[32,16] all-gather(%p), replica_groups=[2,4]<=[8]"))
    assert found.received == (1536,) * 8
    assert (found.kinds, found.largest) == ("1 all_gather", 2048)


def test_bound_and_larger_end_of_a_case():
    case = Case("2x4", (12, 10), P("x", None), P(None, "y"))
    assert case.padded == ((12, 10), (12, 12))
    assert not case.is_even
    assert case.larger_end == 6 * 10 * 4
    assert case.bound == 6 * 3 * 4  # the rows that a device lacks of its three columns


def test_cases_are_of_the_kind_asked_for():
    draw = random.Random(0)
    assert len(some_pairs("2x4", 2, 1000, draw)) == 11 * 10 == len(set(shardings("2x4", 2))) * 10
    for rank in (1, 2, 3, 4):
        ends = some_pairs("2x2x2", rank, 1, draw)[0]
        assert even_case("2x2x2", rank, ends).is_even
        assert not uneven_case("2x2x2", rank, ends, draw).is_even
        large = large_case("2x4", rank, "bfloat16", draw)
        assert large.is_even
        assert 10 < np.prod(large.shape) * 2 / 2**20 < 400


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_numbers_differ_and_are_compared_by_bits(dtype):
    case = Case("2x4", (16, 8), P("x", None), P(None, "y"), dtype)
    array = numbers(case)
    assert array.sharding == case.ends[0]
    assert len(np.unique(np.asarray(array).view(f"uint{8 * case.itemsize}"))) == 128
    assert is_same(array, array)
    assert not is_same(array, array.at[3, 3].set(0))
