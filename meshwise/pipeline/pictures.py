"""Schedules drawn: devices down, ticks across; as text for a terminal, and as SVG."""

from collections.abc import Iterator, Sequence

from meshwise.pipeline.schedules import Action, Direction, Schedule

IDLE = "."
_CHUNKS = "abcdefghijklmnopqrstuvwxyz"

# Fill and text by direction; the chunks of a device from light to dark.
_FILLS = {
    Direction.FORWARD: ("#dbeafe", "#93c5fd", "#60a5fa", "#3b82f6"),
    Direction.BACKWARD: ("#ffedd5", "#fdba74", "#fb923c", "#f97316"),
}
_CELL, _ROW, _LEFT, _TOP, _EDGE, _LEAST = 26, 28, 84, 46, 14, 460


def as_text(schedule: Schedule) -> str:
    """Forwards as `F0`, backwards as `B0`, of microbatch 0; `F0b` in a device's second chunk.

    >>> from meshwise.pipeline.schedules import gpipe
    >>> print(as_text(gpipe(2, 2)))
    device 0  F0 F1  .  . B0 B1
    device 1   . F0 F1 B0 B1  .
    """
    rows = [
        ["+".join(_label(schedule, a) for a in cells[device]) or IDLE for cells in schedule.ticks]
        for device in range(schedule.devices)
    ]
    width = max(len(cell) for row in rows for cell in row)
    digits = len(str(schedule.devices - 1))
    return "\n".join(
        f"device {device:{digits}}  " + " ".join(cell.rjust(width) for cell in row)
        for device, row in enumerate(rows)
    )


def _label(schedule: Schedule, action: Action) -> str:
    letter = "F" if action.direction is Direction.FORWARD else "B"
    chunk = action.stage // schedule.devices
    name = _CHUNKS[chunk] if chunk < len(_CHUNKS) else f".{chunk}"
    return f"{letter}{action.microbatch}" + (name if schedule.chunks > 1 else "")


def as_svg(schedule: Schedule) -> str:
    """A picture that needs nothing else: one box an action, with its microbatch's number."""
    ticks, devices, slots = len(schedule.ticks), schedule.devices, schedule.slots
    width = max(_LEFT + ticks * _CELL + _EDGE, _LEAST)
    bottom = _TOP + devices * _ROW * slots
    height = bottom + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{schedule}">',
        "<style>text{font-family:Helvetica,Arial,sans-serif;fill:#0f172a}"
        ".h{font-size:14px;font-weight:bold}.s{font-size:12px;fill:#64748b}"
        ".c{font-size:12px;text-anchor:middle}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{_EDGE}" y="28" class="h">{_title(schedule)}</text>',
    ]
    for device in range(devices):
        top = _TOP + device * _ROW * slots
        middle = top + _ROW * slots / 2 + 4
        parts.append(f'<text x="{_EDGE}" y="{middle:g}" class="s">device {device}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top + 1}" width="{ticks * _CELL}" '
            f'height="{_ROW * slots - 2}" fill="#f1f5f9"/>'
        )
    parts += _boxes(schedule)
    parts += _legend(schedule, bottom + 20)
    return "\n".join([*parts, "</svg>", ""])


def _title(schedule: Schedule) -> str:
    name = schedule.name[0].upper() + schedule.name[1:]
    return (
        f"{name}, {schedule.microbatches} microbatches: {len(schedule.ticks)} ticks, "
        f"{schedule.bubble_fraction:.0%} idle"
    )


def _boxes(schedule: Schedule) -> Iterator[str]:
    for tick, cells in enumerate(schedule.ticks):
        for device, cell in enumerate(cells):
            for action in cell:
                slot = 1 if schedule.slots > 1 and action.direction is Direction.BACKWARD else 0
                left = _LEFT + tick * _CELL
                top = _TOP + (device * schedule.slots + slot) * _ROW
                fill = _fill(schedule, action.direction, action.stage // schedule.devices)
                yield (
                    f'<rect x="{left + 1}" y="{top + 1}" width="{_CELL - 2}" height="{_ROW - 2}" '
                    f'rx="3" fill="{fill}"/>'
                )
                yield (
                    f'<text x="{left + _CELL / 2:g}" y="{top + _ROW / 2 + 4:g}" class="c">'
                    f"{action.microbatch}</text>"
                )


def _fill(schedule: Schedule, direction: Direction, chunk: int) -> str:
    shades = _FILLS[direction]
    return shades[chunk % len(shades)] if schedule.chunks > 1 else shades[1]


def _legend(schedule: Schedule, top: int) -> Iterator[str]:
    """Boxes of each kind with a word, and the meaning of the two directions of the picture."""
    left = _LEFT
    directions: Sequence[Direction] = list(Direction) if schedule.trains else [Direction.FORWARD]
    for direction in directions:
        for chunk in range(min(schedule.chunks, len(_FILLS[direction]))):
            what = str(direction) if schedule.chunks == 1 else f"{direction}, chunk {chunk}"
            yield (
                f'<rect x="{left}" y="{top - 11}" width="14" height="14" rx="3" '
                f'fill="{_fill(schedule, direction, chunk)}"/>'
            )
            yield f'<text x="{left + 20}" y="{top}" class="s">{what}</text>'
            left += 34 + 7 * len(what)
    yield (
        f'<text x="{_EDGE}" y="{top + 20}" class="s">time goes right, one tick a column; '
        "a box has its microbatch's number</text>"
    )
