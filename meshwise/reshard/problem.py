"""One reshard as the search sees it: axes are integers, costs are in bytes of the plain link."""

from dataclasses import dataclass

from meshwise.reshard.places import DimIds, Ids

# Problems with more axes than this are searched with fewer moves: only towards the target.
MAX_FREE_SEARCH = 5

# Rounds over more devices than this take long to find, for each of the thousands of reshards that
# a plan weighs.
MOST_DEVICES = 16


@dataclass(frozen=True, slots=True)
class Prices:
    """What a launch and a byte of each kind cost, in bytes of the plain link.

    A launch costs `launch`, of kinds that are listed so many times more (`launch_factors`).
    A path that costs at most `close` times the lower bound and `slack` is as good as the best.
    """

    launch: float
    round_launch: float
    all_gather: float = 1.0
    all_to_all: float = 1.0
    permute: float = 1.0
    reduce_scatter: float = 1.0
    all_reduce: float = 1.0
    round: float = 1.0
    minor_all_gather: float = 1.0
    slice: float = 0.0
    close: float = 1.0
    slack: float = 0.0
    launch_factors: tuple[tuple[str, float], ...] = ()

    def launch_of(self, kind: str) -> float:
        """What a launch of a kind costs."""
        return self.launch * dict(self.launch_factors).get(kind, 1.0)

    @property
    def least_launch(self) -> float:
        """The least that anything that is sent takes to start."""
        factors = [1.0, *dict(self.launch_factors).values()]
        return min(self.round_launch, self.launch * min(factors))

    @property
    def least(self) -> float:
        """The least that a byte costs in any collective."""
        return min(self.least_moved, self.reduce_scatter, self.all_reduce)

    @property
    def least_moved(self) -> float:
        """The least that a byte costs where nothing is reduced."""
        gathers = (self.all_gather, self.minor_all_gather)
        return min(*gathers, self.all_to_all, self.permute, self.round)


@dataclass(frozen=True, slots=True)
class Problem:
    """One reshard in canonical form: axes are integers, shapes are global.

    `gathers_terms` says that no collective reduces by the wanted operator (a product): an
    all_reduce then gathers all terms. `idle` is the product of the axes that are left out of the
    search; the bound holds for it too. `before` is, for each dim, the size of the dims left out
    that stand between it and the dim before. `is_narrow` says that only moves towards the target
    are looked at.
    """

    sizes: Ids
    shape: tuple[int, ...]
    itemsize: int
    source: DimIds
    target: DimIds
    terms: Ids
    gathers_terms: bool
    idle: int
    prices: Prices
    before: Ids
    is_narrow: bool = False
