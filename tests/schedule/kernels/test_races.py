"""The watch for races finds those that are planted: a kernel without one of its waits."""

from types import SimpleNamespace

import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from meshwise.schedule.kernels import all_gather_matmul, fused_all_reduce, matmul_reduce_scatter
from meshwise.schedule.kernels.scatter import Scatter
from tests.schedule.kernels.running import WATCHED, mesh_of, races, run


def draw(*shape):
    return np.random.default_rng([0, *shape]).normal(size=shape).astype(np.float32)


def without_handshake(monkeypatch, module):
    """Slots are written to whether they are free or not."""
    nothing = SimpleNamespace(**vars(pl))
    nothing.semaphore_signal = lambda *args, **options: None
    nothing.semaphore_wait = lambda *args, **options: None
    monkeypatch.setattr(f"meshwise.schedule.kernels.{module}.pl", nothing)


def sums(n=4):
    def step(term):
        return fused_all_reduce(
            lambda g: [g * 2], [term[0]], axis="x", gathered=[0], interpret=WATCHED
        )[0]

    run(step, mesh_of(x=n), (P("x"),), P(), draw(n, n * 1024))


def gathered(n=4):
    def step(left, right):
        return all_gather_matmul(left, right, axis="x", interpret=WATCHED)

    run(step, mesh_of(x=n), (P("x"), P()), P(), draw(n * 8, 128), draw(128, 128))


def scattered(n=4):
    def step(left, right):
        return matmul_reduce_scatter(left, right, axis="x", interpret=WATCHED)

    specs = (P(None, "x"), P("x"))
    run(step, mesh_of(x=n), specs, P("x"), draw(n * 8, n * 8), draw(n * 8, 128))


@pytest.mark.parametrize("kernel", [sums, gathered, scattered])
def test_kernels_do_not_race(kernel):
    assert not races(kernel)


@pytest.mark.parametrize(
    ("kernel", "module"),
    [(sums, "scatter"), (scattered, "scatter"), (gathered, "gather_matmul")],
)
def test_a_slot_that_is_not_waited_for_is_found(monkeypatch, kernel, module):
    without_handshake(monkeypatch, module)
    assert races(kernel)


def test_a_sum_that_is_read_before_it_arrives_is_found(monkeypatch):
    wait = Scatter.wait

    def read_early(self, piece):
        pltpu.sync_copy(self.slot(0, piece, 0), self.slot(0, piece, 1))
        wait(self, piece)

    monkeypatch.setattr(Scatter, "wait", read_early)
    assert races(lambda: sums(2))
