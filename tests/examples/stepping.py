"""What the tests of the worked models share: what a case sends, its numbers, and XLA's bytes."""

from typing import Any

import jax
import numpy as np

from benchmarks.peers import hlo
from examples.beside import deviation
from examples.cases import Case, ours, peer, program_of, real_mesh

F32 = 4  # bytes
Sent = dict[str, tuple[int, int]]  # of each kind of collective: how many, and their wire bytes


def sent(case: Case) -> Sent:
    """What a device sends in a step."""
    found: Sent = {}
    program = program_of(case)
    assert not program.per_device.whole
    for c in program.collectives:
        count, total = found.get(str(c.kind), (0, 0))
        found[str(c.kind)] = (count + c.count, total + c.wire_bytes)
    return found


def check_sent(case: Case, wanted: Sent) -> None:
    """A case sends exactly so many bytes, in so many collectives; small sums may go as one."""
    found = sent(case)
    assert {k: total for k, (_, total) in found.items()} == {k: t for k, (_, t) in wanted.items()}
    counts = {k: count for k, (count, _) in found.items()}
    sums = counts.pop("all_reduce", 0)
    assert counts == {k: count for k, (count, _) in wanted.items() if k != "all_reduce"}
    assert 0 < sums <= wanted["all_reduce"][0]


def all_reduce(elements: int, devices: int) -> int:
    """Wire bytes of an all_reduce of float32."""
    return round(2 * (devices - 1) / devices * elements * F32)


def all_to_all(elements: int, devices: int) -> int:
    """Wire bytes of an all_to_all of so many local float32."""
    return round((devices - 1) / devices * elements * F32)


def host(tree: Any) -> Any:
    """A tree of arrays in NumPy, which no device holds."""
    return jax.tree.map(np.asarray, tree)


def check_numbers(case: Case, state: Any, steps: list[tuple[Any, ...]], tolerance: float) -> None:
    """Some training steps on the devices of the case beside as many on one device."""
    single, many = jax.jit(case.step), ours(case, real_mesh(case))
    wanted = found = state
    for data in steps:
        wanted, want = single(wanted, *data)
        found, loss = many(found, *data)
        np.testing.assert_allclose(loss, want, rtol=tolerance)
    assert deviation(wanted, state) > 100 * tolerance, "the steps change nothing"
    assert deviation(found, wanted) < tolerance


def check_peers(case: Case, which: hlo.Partitioner) -> None:
    """We send no more than one of XLA's partitioners for the same hints."""
    assert program_of(case).wire_bytes <= peer(case, which).wire_bytes
