"""Events on resources, drawn: as text, and as a trace that Perfetto and Chrome show."""

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 100
_LISTED = 20  # how many events have a letter, and a line in the list
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@dataclass(frozen=True)
class Event:
    """Something that keeps one resource busy from `start_s` to `end_s`.

    `equation` is where what runs stands in the jaxpr.
    """

    name: str
    resource: str
    start_s: float
    end_s: float
    equation: int

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


def show_seconds(seconds: float) -> str:
    """A time with three digits and a unit, such as `1.25 ms`."""
    for unit, name in _UNITS:
        if abs(seconds) >= unit * 0.9995:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def draw(events: Sequence[Event], resources: Sequence[str], seconds: float) -> str:
    """A row for each resource, time from left to right, and the longest events by letter.

    Each column shows what fills half of it or more: a letter, `#` for events that are not listed;
    `-` where less than half is filled, `.` where the resource is idle.
    """
    longest = sorted(range(len(events)), key=lambda i: (-events[i].seconds, i))[:_LISTED]
    listed = sorted(longest, key=lambda i: (events[i].start_s, i))
    letters = {index: _LETTERS[k] for k, index in enumerate(listed)}
    label = max(map(len, resources), default=0)
    columns = WIDTH - label - 3
    lines = [
        f"{resource:<{label}} |{_row(events, letters, resource, columns, seconds)}|"
        for resource in resources
    ]
    for index in listed:
        event = events[index]
        name = event.name if len(event.name) <= 40 else event.name[:37] + "..."
        lines.append(
            f"  {letters[index]} {name:<40} {event.resource[:24]:<24} "
            f"{show_seconds(event.start_s):>8} + {show_seconds(event.seconds):>8}"
        )
    if len(events) > len(listed):
        lines.append(f"  and {len(events) - len(listed)} shorter events")
    return "\n".join(line.rstrip() for line in lines)


def _row(
    events: Sequence[Event],
    letters: dict[int, str],
    resource: str,
    columns: int,
    seconds: float,
) -> str:
    """What fills each column."""
    if not seconds:
        return "." * columns
    width = seconds / columns
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    for index, event in enumerate(events):
        if event.resource != resource:
            continue
        letter = letters.get(index, "#")
        first = min(int(event.start_s / width), columns - 1)
        last = min(int(event.end_s / width), columns - 1)
        for column in range(first, last + 1):
            start, end = max(event.start_s, column * width), min(event.end_s, (column + 1) * width)
            filled[column][letter] = filled[column].get(letter, 0.0) + max(0.0, end - start)
    return "".join(_symbol(column, width) for column in filled)


def _symbol(column: dict[str, float], width: float) -> str:
    """A letter for what fills half of a column, else how much of it is filled at all."""
    letter, most = max(column.items(), key=lambda item: item[1], default=("", 0.0))
    busy = sum(column.values())
    if most >= width / 2:
        return letter
    return "#" if busy >= width / 2 else "-" if busy > 0.05 * width else "."


def chrome_trace(events: Sequence[Event], resources: Sequence[str], title: str) -> str:
    """The events in the JSON format of Chrome's tracing, in microseconds, a track a resource."""
    tracks = {resource: number for number, resource in enumerate(resources)}
    named: dict[str, object] = {"name": title}
    found: list[dict[str, object]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": named}]
    for resource, number in tracks.items():
        args: dict[str, object] = {"name": resource}
        found.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": args})
    for event in events:
        found.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[event.resource],
                "name": event.name,
                "ts": event.start_s * 1e6,
                "dur": event.seconds * 1e6,
                "args": {"equation": event.equation},
            }
        )
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ns"})
