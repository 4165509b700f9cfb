"""`max_bytes`: what fits is found, by whatever figures plans are priced."""

import math
import random
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import GENERIC, LARGE_ARRAYS
from meshwise.errors import MemoryLimitError
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Sharding
from meshwise.reshard.canonical import levels
from meshwise.reshard.moves import moves_of
from meshwise.reshard.path import least_peak
from meshwise.reshard.plan import Reshard
from meshwise.reshard.search import plan_reshard
from meshwise.reshard.straight import straight_moves
from tests.reshard.cases import user_shardings

SIZES = [(4, 2), (2, 4), (2, 2, 2), (6, 2), (3, 5), (4, 4), (4, 2, 2)]
SHAPES = [(5, 7), (10, 12), (31, 6), (61, 67), (9, 16), (33,), (5, 7, 9)]


def drawn(sizes: tuple[int, ...], count: int) -> Iterator[Reshard]:
    draw = random.Random(f"{sizes}")
    mesh = refine_mesh(tuple("xyz"[: len(sizes)]), sizes)
    every = {rank: list(user_shardings(mesh, rank)) for rank in (1, 2, 3)}
    for shape in SHAPES:
        for _ in range(count):
            source, target = draw.sample(every[len(shape)], 2)
            yield Reshard(shape, 4, mesh, source, target, GENERIC)


def goes_straight(asked: Reshard) -> bool:
    """Whether rounds bring every device its shard of the target, and hold nothing else."""
    for level in levels(asked):
        moves = moves_of(level.whole[0])
        if not moves.start[2] and any(
            moves.is_end(one.end) and one.found() for one in straight_moves(moves, moves.start)
        ):
            return True
    return False


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_fits_is_found(sizes: tuple[int, ...]) -> None:
    """Where no search among all paths ends soon, too; and it costs no less than without a limit."""
    for asked in drawn(sizes, 8):
        free = plan_reshard(asked)
        for limit in {asked.end_bytes, (asked.end_bytes + free.peak_bytes) // 2}:
            for hardware in (GENERIC, LARGE_ARRAYS):
                one = asked._replace(hardware=hardware)
                try:
                    plan = plan_reshard(one, limit)
                except MemoryLimitError as error:
                    assert "no such plan was found, the least found takes" in str(error), one
                    assert not goes_straight(one), one
                else:
                    assert plan.peak_bytes <= limit, one
        with pytest.raises(MemoryLimitError, match=f"the least possible is {asked.end_bytes:,}\n"):
            plan_reshard(asked, asked.end_bytes - 1)


def test_the_least_peak_is_looked_for_among_so_many_moves() -> None:
    mesh = refine_mesh(("x", "y"), (4, 2))
    ends = Sharding((mesh.refine(("x",)), mesh.refine(("y",)))), Sharding(((), ()))
    moves = moves_of(next(levels(Reshard((5, 7), 4, mesh, *ends, GENERIC))).whole[0])
    assert [least_peak(moves), least_peak(moves, 1 << 20), least_peak(moves, 0)] == [
        160,
        160,
        math.inf,
    ]


def test_a_step_accepts_what_a_plan_does() -> None:
    """A step's figures put launches first: by them no search among all paths ends soon here."""
    mesh = AbstractMesh((4, 2), ("x", "y"))
    ends = P("x", "y"), P()
    shape, limit = (5, 7), 150
    assert mw.reshard_plan(shape, "float32", mesh, *ends, max_bytes=limit).peak_bytes <= limit
    step = mw.jit(
        lambda x: mw.reshard(x, ends[1], max_bytes=limit),
        mesh=mesh,
        in_shardings=ends[0],
        out_shardings=ends[1],
    )
    x = jnp.arange(35, dtype=jnp.float32).reshape(shape)
    found = step.partition(jax.ShapeDtypeStruct(shape, x.dtype))
    assert (found.simulate(x) == x).all()


WITHIN = [  # mesh, shape, before, after, limit: within it parts of an axis go ways of their own
    ((6, 2), (31, 6), P("y"), P(("y", "x")), 428),
    ((4, 2), (12,), P("y"), P(("x", "y")), 25),
    ((6, 2), (61, 67), P(None, ("y", "x")), P("x", "y"), 1580),
    ((6, 2), (9, 16), P("x", "y"), P(None, "x"), 115),
]


@pytest.mark.parametrize(("sizes", "shape", "source", "target", "limit"), WITHIN)
def test_a_step_sends_what_a_plan_within_the_limit_does(
    sizes: tuple[int, ...], shape: tuple[int, ...], source: P, target: P, limit: int
) -> None:
    """Its mesh has the axes that this plan takes apart, not those of one without a limit."""
    mesh = AbstractMesh(sizes, ("x", "y"))
    ends = source, target
    plan = mw.reshard_plan(shape, "float32", mesh, *ends, max_bytes=limit, hardware=GENERIC)
    step = mw.jit(
        lambda x: mw.reshard(x, target, max_bytes=limit),
        mesh=mesh,
        in_shardings=source,
        out_shardings=target,
    )
    assert step.partition(jax.ShapeDtypeStruct(shape, jnp.float32)).wire_bytes == plan.wire_bytes
