"""Parts of sums of pads: sums of what the parts are of.

The gradient of a stencil of a padded field adds up one pad for each neighbour, and cuts the border
off the sum: rows of one field more or less, which lie in other blocks than its own. Cut before they
are added, the pads are shifts of the field, and a device sends the rows that cross its borders.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import Makers, any_maker, equations_of
from meshwise.simplify.borders.slices import cut_padding, is_read_again, part_read
from meshwise.simplify.counts import Counts

# Where a result begins and ends along each dim of what it is cut of.
_Window = tuple[tuple[int, int], ...]
# Of the operands of all terms, one after the other, and a window: the window of the sum.
_Cut = Callable[[Iterator[Any], _Window], Any]

# Additions in one another, as deep as they are looked into.
MOST_DEEP = 100


def merge_cut(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A part of a sum that nothing else reads, of which all terms, or all but one, are pads."""
    window = _window_of(eqn)
    if window is None or not _reads_alone(eqn, makers):
        return None
    terms = _Terms(makers, shape_of(eqn.invars[0]))
    total = terms.sum_of(eqn.invars[0])
    if not terms.pads or terms.others > 1 or terms.are_spread:
        return None
    return equations_of(eqn, terms.operands, lambda *given: total(iter(given), window))


class _Terms:
    """The terms of a sum of some shape, as they are found.

    Some `are_spread`, if they have one row, or are one number, where the sum has several.
    """

    def __init__(self, makers: Makers, shape: tuple[int, ...]):
        self.operands: list[Any] = []
        self.pads = self.others = 0
        self.are_spread = False
        self._makers, self._shape = makers, shape

    def sum_of(self, atom: Any, depth: int = 0) -> _Cut:
        """What cuts a value, and with it all that it is the sum of."""
        self.are_spread |= shape_of(atom) != self._shape
        maker = self._read_here_alone(atom)
        if maker is not None and _is_pad(maker):
            self.pads += 1
            self.operands += maker.invars
            pad = partial(_part_of_pad, maker.params["padding_config"], self._shape)
            return lambda given, window: pad(window, next(given), next(given))
        if maker is not None and maker.primitive.name in ("add", "add_any") and depth < MOST_DEEP:
            add = partial(maker.primitive.bind, **maker.params)
            first, second = (self.sum_of(term, depth + 1) for term in maker.invars)
            return lambda given, window: add(first(given, window), second(given, window))
        self.others += 1
        self.operands.append(atom)
        return lambda given, window: lax.slice(next(given), *zip(*window, strict=True))

    def _read_here_alone(self, atom: Any) -> JaxprEqn | None:
        """What makes a value in this body that is read no more than once over."""
        maker = any_maker(atom, self._makers)
        if maker is None or not self._makers.is_made_here(atom):
            return None
        return None if is_read_again(maker, self._makers) else maker


def _is_pad(eqn: JaxprEqn) -> bool:
    """Whether an equation adds to the ends of dims."""
    return eqn.primitive is lax.pad_p and not any(c[2] for c in eqn.params["padding_config"])


def _reads_alone(eqn: JaxprEqn, makers: Makers) -> bool:
    """Whether nothing else reads what an equation cuts; of a slice its part counts as read."""
    cut: Any = eqn.invars[0]
    return makers.times_read.get(cut, 0) <= part_read(eqn) * (1 + 1e-9)


def _window_of(eqn: JaxprEqn) -> _Window | None:
    """The window of its operand that an equation cuts, if it does nothing else."""
    shape = shape_of(eqn.invars[0])
    if _jax.is_plain_slice(eqn):
        return tuple(zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True))
    if eqn.primitive is not lax.pad_p:
        return None
    config = eqn.params["padding_config"]
    if any(low > 0 or high > 0 or interior for low, high, interior in config):
        return None
    return tuple((-low, n + high) for n, (low, high, _) in zip(shape, config, strict=True))


def _part_of_pad(config: Any, shape: tuple[int, ...], window: _Window, x: Any, fill: Any) -> Any:
    """A window of a pad of some shape, as the pad that makes it."""
    ends = cut_padding(config, shape, window)
    assert ends is not None, "a pad with rows between its own is no pad here"
    return lax.pad(x, fill, ends)
