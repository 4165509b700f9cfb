"""What a device holds where it holds most, by our own count: sizes, operators, lines."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from meshwise import _jax
from meshwise.cost.memory import Held, Memory
from meshwise.ir.source import place
from meshwise.report.text import aligned, array_text, kib, percent
from meshwise.schedule.handles import kind_of

MOST_ROWS = 8


HELD = "Held beside arguments where memory is most"
HEADS = ("KiB", "share", "times", "value", "made by", "line")


def held_listing(memory: Memory) -> list[str]:
    """The values that are alive at the peak, as text."""
    rows = held_rows(memory)
    return [HELD, *aligned([HEADS, *rows], ">>><<<")] if rows else []


def held_rows(memory: Memory) -> list[tuple[str, ...]]:
    """The values that are alive at the peak, arguments apart; alike ones in one row."""
    return _rows(memory.held, memory) if memory.held else []


def _rows(held: Sequence[Held], memory: Memory, indent: str = "") -> list[tuple[str, ...]]:
    alike: dict[tuple[str, str, str], list[Held]] = defaultdict(list)
    for one in held:
        line = place(_jax.source_summary(one.made_by))
        alike[indent + _text(one), _maker(one), line].append(one)
    ordered = sorted(alike.items(), key=lambda item: -_bytes(item[1]))
    rows = list[tuple[str, ...]]()
    for texts, found in ordered[:MOST_ROWS]:
        rows.append((*_figures(found, memory), *texts))
        rows += _rows(found[0].inside, memory, indent + "  ")
    left = [one for _, found in ordered[MOST_ROWS:] for one in found]
    return [*rows, (*_figures(left, memory), f"{indent}smaller ones", "", "")] if left else rows


def _figures(found: Sequence[Held], memory: Memory) -> tuple[str, str, str]:
    size = _bytes(found)
    share = percent(size, memory.peak_bytes)
    return kib(size).removesuffix(" KiB"), share, str(len(found))


def _maker(one: Held) -> str:
    """The operator, after the loop that hands it out."""
    kinds = dict.fromkeys((kind_of(one.equation), kind_of(one.made_by)))
    return " of ".join(kinds)


def _text(one: Held) -> str:
    if one.value is None:
        return "inside"
    aval: Any = one.value.aval
    return array_text(aval.shape, aval.dtype)


def _bytes(found: Sequence[Held]) -> int:
    return sum(one.bytes for one in found)
