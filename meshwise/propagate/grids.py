"""What is written of grids with rows beside them, counted: where it is too much they are left."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from meshwise._jax import JaxprEqn
from meshwise.ir.program import Program, bytes_of

# At most so many equations stand in place of one, on an average: as of two rows on either side.
# What is planned and compiled is bounded by that.
MOST = 5


@dataclass(frozen=True)
class Together:
    """What is computed of the same grids: the equations that `laid` their rows.

    `made` equations stand in place of one, on an average; `shifted` for it is that part of what
    was laid.
    """

    laid: Set[int]
    made: float
    shifted: float

    def is_dear(self, shifted: float) -> bool:
        """Whether too much is made, or more is shifted than that."""
        return self.made > MOST or self.shifted > shifted


@dataclass
class Grids:
    """Of each equation in parts, by index: those that laid the rows, and what is cut for it.

    That are arrays from outside, which lie otherwise: all their rows are shifted.
    """

    region_of: dict[int, Set[int]] = field(default_factory=dict)
    cut_bytes: Counter[int] = field(default_factory=Counter)

    def together(
        self, program: Program, instead: Mapping[int, Sequence[JaxprEqn]]
    ) -> list[Together]:
        """All of that, counted; `instead` is what is written in place of each equation."""
        found: list[Together] = []
        for laid in self._regions():
            own = [index for index, part in self.region_of.items() if part <= laid]
            made = sum(len(instead[index]) for index in own) / len(own)
            cut = sum(self.cut_bytes[index] for index in own)
            rows = sum(bytes_of(program.equations[index].outvars[0]) for index in laid)
            found.append(Together(laid, made, cut / max(rows, 1)))
        return found

    def _regions(self) -> list[Set[int]]:
        """Those that laid rows, of which something in common is computed as one."""
        found: list[Set[int]] = []
        for one in self.region_of.values():
            apart = [other for other in found if not other & one]
            found = [*apart, frozenset(one).union(*(other for other in found if other & one))]
        return found
