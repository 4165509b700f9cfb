"""Which of two shardings that meet in an operator holds: no number tells, only what is moved."""

import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.propagate.conflicts import Claim, settle

XY = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def claim(axes: str, rank: int = 0, size: int = 8, position: int = 0) -> Claim:
    return Claim(tuple(axes), rank, size, position)


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (claim("x", rank=1, size=1, position=1), claim("y", rank=0, size=99)),
        (claim("x", size=9, position=1), claim("y", size=8)),
        (claim("x", position=0), claim("y", position=1)),
    ],
    ids=["a batch", "the larger tensor", "the first"],
)
def test_the_stronger_claim_holds(winner: Claim, loser: Claim):
    for order in ((winner, loser), (loser, winner)):
        assert settle(order) == (winner, (loser,))


def test_of_two_that_agree_the_longer_holds():
    short, long = claim("x", size=9), claim("xy", size=1)
    assert settle((short, long)) == (long, ())


def test_the_larger_operand_stays_where_it_is():
    """A broadcast row that says y meets rows that say x: the sum takes x."""
    step = mw.jit(
        lambda x, y: x[:, None, :] * 2 + y[None] * 3,
        mesh=XY,
        in_shardings=(P(None, "x"), P("y", None)),
        completion="gspmd",
    )
    large, small = np.zeros((4, 64), np.float32), np.zeros((2, 64), np.float32)
    (out,) = step.partition(large, small).plan.out_shardings
    assert out.dims[2] == ("x",)
