"""Plans that cost a little more than the cheapest, taken for what they spare.

Seconds alone would have every device hold or compute far more to save a few bytes. What that comes
to, as the peak of all that is alive together, is no sum of parts with a price, so it cannot be
searched for as seconds are. Where the cheapest plan has far more of something than completion's,
one more descent begins there, and has to pay for it or may add none; where it pays, another begins
at the cheapest. What they find is weighed against that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwise.choose.found import Found, descended
from meshwise.choose.limits import Limits, with_work_of
from meshwise.choose.search import Search

# Less than so many times less is worth nothing.
MUCH = 1.2
# And a part of the seconds that is smaller is none.
HARDLY = 3e-4
# The power to which what a plan costs counts: a tenth more is worth a third less of something.
POWER = 4
# The power to which seconds of a machine count; others are bytes, which weigh less.
OF_A_MACHINE = 4


@dataclass(frozen=True)
class Burden:
    """Something that a plan has too much of if it has `far` times what completion's plan has.

    A plan that has `MUCH` times less of it may be so many times as dear as the cheapest, but for
    `power`: of 4, a tenth more for a third less. It is that for all, where seconds are those of a
    machine. To find such a plan, a descent pays for what it holds `holding` times what the cheapest
    costs; where that is nothing, it may give no node more work than completion does.
    """

    of: Callable[[Found], float]
    far: float
    power: float
    holding: float = 0.0

    def is_too_much(self, best: Found, completed: Found) -> bool:
        """Whether the cheapest plan has too much of it; work that takes hardly any time is none."""
        if not self.holding and best.work_seconds < HARDLY * best.seconds:
            return False
        return self.of(best) > self.far * self.of(completed)

    def spared(self, best: Found, completed: Found, limits: Limits) -> list[Found]:
        """What is found where this costs more, or is not to be had.

        From completion on; and from the plan itself, if what is held has a price.
        """
        graph = best.search.graph
        starts = [one.search.axes for one in (completed, best)]
        if not self.holding:
            return [descended(Search(graph, starts[0]), with_work_of(limits, graph, starts[0]))]
        held = sum(best.search.held_bytes(value) for value in graph.values.values())
        price = self.holding * best.seconds / max(held, 1)
        return [descended(Search(graph, start, seconds_per_byte=price), limits) for start in starts]

    def is_worth(self, one: Found, other: Found) -> bool:
        """Whether a plan has so much less of it than another one that it may be dearer."""
        is_less = MUCH * self.of(one) <= self.of(other)
        return is_less and self.weight(one) <= self.weight(other)

    def weight(self, one: Found) -> float:
        """What is least of the plan to take."""
        in_bytes = one.search.graph.hardware.least_bytes
        return one.seconds ** (self.power if in_bytes else OF_A_MACHINE) * self.of(one)


# What is held beside arguments and results; what is made, results included: a whole mask or table
# on every device; and element-wise work, which is cheap each time, and in a loop may be most of
# what is computed.
BURDENS = (
    Burden(lambda one: one.temporary_bytes, far=MUCH, power=POWER, holding=0.3),
    Burden(lambda one: one.made_bytes, far=2.0, power=1.8, holding=1.0),
    Burden(lambda one: one.work_seconds, far=MUCH, power=POWER),
)


def weighed(
    best: Found, found: Sequence[Found], completed: Found, limits: Limits, bound: float
) -> Found:
    """The plan to take of those found, completion's among them; at most so dear."""
    for burden in BURDENS:
        if not burden.is_too_much(best, completed):
            continue
        others = [*burden.spared(best, completed, limits), *found]
        worth = [one for one in others if one.seconds <= bound and burden.is_worth(one, best)]
        best = min(worth, key=lambda one: (burden.weight(one), one.seconds), default=best)
    return best


def has_too_much(one: Found, other: Found) -> bool:
    """Whether a plan has far more of something than another one, for what it costs less."""
    return any(burden.is_worth(other, one) for burden in BURDENS)
