"""What is written of grids with rows beside them, counted: where it is too much they are left."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from meshwise._jax import JaxprEqn
from meshwise.ir.program import Program, bytes_of

# At most so many equations stand in place of one, on an average: as of two rows on either side.
# What is planned and compiled is bounded by that.
MOST = 5


@dataclass
class Grids:
    """Of each equation in parts, by index: those that laid the rows, and what is cut for it.

    That are arrays from outside, which lie otherwise: all their rows are shifted.
    """

    region_of: dict[int, Set[int]] = field(default_factory=dict)
    cut_bytes: Counter[int] = field(default_factory=Counter)

    def dear(
        self, program: Program, instead: Mapping[int, Sequence[JaxprEqn]], shifted: float
    ) -> set[int]:
        """Those that laid rows of which too much is made, or for which more is shifted than that.

        `instead` is what is written in place of each.
        """
        found: set[int] = set()
        for region in self._together():
            own = self._of(region)
            made = sum(len(instead[index]) for index in own)
            if made > MOST * len(own) or self._shifted(program, region) > shifted:
                found |= region
        return found

    def shifted(self, program: Program) -> float:
        """What is shifted at most for what is computed of the same grids, as a part of these."""
        return max((self._shifted(program, region) for region in self._together()), default=0.0)

    def _shifted(self, program: Program, region: Set[int]) -> float:
        laid = sum(bytes_of(program.equations[index].outvars[0]) for index in region)
        return sum(self.cut_bytes[index] for index in self._of(region)) / max(laid, 1)

    def _of(self, region: Set[int]) -> list[int]:
        return [index for index, part in self.region_of.items() if part <= region]

    def _together(self) -> list[Set[int]]:
        """Regions that have something in common as one."""
        found: list[Set[int]] = []
        for one in self.region_of.values():
            apart = [other for other in found if not other & one]
            found = [*apart, frozenset(one).union(*(other for other in found if other & one))]
        return found
