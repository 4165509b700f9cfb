"""What completion found: a sharding for every value, and why."""

from dataclasses import dataclass

from meshwise._jax import Var
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a dim has its axes.

    `equation` is the index of the equation the axes came through (None for a hint, whose text is
    then `hint`), `tensor` the position of the tensor it came from (operands, then results), and
    `beaten` the axis lists that lost.
    """

    equation: int | None
    tensor: int = 0
    hint: str = ""
    beaten: tuple[Axes, ...] = ()


@dataclass(frozen=True, eq=False)
class Completion:
    """Dims' axes of every variable, and the cause of each sharded dim.

    Where a loop goes through a dim that is sharded, its rows are sharded along another;
    `rows_whole` is what was found without that, None where there is no such loop. Where two dims of
    a value claim an axis, the one whose claim keeps more bytes in place has it. `others` are what
    was found where the more leading dim has it, as of a batch, and where of claims to as many bytes
    the last one wins, as of all pairs of rows: none that are the same.
    """

    dims: dict[Var, DimAxes]
    causes: dict[tuple[Var, int], Cause]
    rows_whole: dict[Var, DimAxes] | None = None
    others: tuple[dict[Var, DimAxes], ...] = ()
