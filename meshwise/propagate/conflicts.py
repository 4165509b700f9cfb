"""The ladder that settles a conflict: user hint > priority > more bytes saved > stable order.

A hinted value never changes and earlier levels are never undone, so the first two need no code
here; what is left are claims of one level, that differ in the bytes they keep in place.
Two axis lists for one factor agree where one is a prefix of the other; then the longer one is
taken. Otherwise the claim that stands higher on the ladder wins.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwise.ir.mesh import Axes


@dataclass(frozen=True, slots=True)
class Claim:
    """One tensor's axes for one factor.

    rank: 1 where a batch-like factor stands in several operands, else 0; size: bytes of the
        tensor; position: of the tensor in the equation.
    """

    axes: Axes
    rank: int
    size: int
    position: int

    @property
    def strength(self) -> tuple[int, int, int]:
        """Larger wins."""
        return self.rank, self.size, -self.position

    @property
    def strength_or_last(self) -> tuple[int, int, int]:
        """The same, where of equal ones the last operand's wins."""
        return self.rank, self.size, self.position

    def is_tied_with(self, other: "Claim") -> bool:
        """Whether nothing but their order speaks for one of two claims to an axis."""
        alike = (self.rank, self.size) == (other.rank, other.size)
        return alike and not set(self.axes).isdisjoint(other.axes)


def settle(claims: Iterable[Claim]) -> tuple[Claim, tuple[Claim, ...]]:
    """The claim that holds for a factor, and those that it beat."""
    ordered = sorted(claims, key=lambda c: c.strength, reverse=True)
    winner = ordered[0]
    beaten = []
    for claim in ordered[1:]:
        if is_prefix(winner.axes, claim.axes):
            winner = claim if len(claim.axes) > len(winner.axes) else winner
        elif not is_prefix(claim.axes, winner.axes):
            beaten.append(claim)
    return winner, tuple(beaten)


def is_prefix(short: Axes, long: Axes) -> bool:
    """Whether one axis list begins another."""
    return long[: len(short)] == short
