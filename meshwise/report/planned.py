"""What the planner found, as a table."""

from collections.abc import Sequence

from meshwise.ir.numbers import microseconds
from meshwise.planner.groups import Group
from meshwise.planner.search import Outcome
from meshwise.report.text import aligned, count, kib


def planned_figures(outcome: Outcome) -> str:
    """Time, bytes and memory in a line."""
    sizes = f"{kib(outcome.wire_bytes)} sent, {kib(outcome.peak_bytes)} held at most"
    return f"{microseconds(outcome.seconds)}, {sizes}"


def planned_text(
    name: str,
    paths: Sequence[str],
    groups: Sequence[Group],
    best: Outcome,
    unplanned: Outcome,
    tried: int,
) -> str:
    """The sharding of each group of arguments, and figures beside those without the planner."""
    rows = [
        ("on each device", "planned", "unplanned"),
        ("predicted time", microseconds(best.seconds), microseconds(unplanned.seconds)),
        ("sent", kib(best.wire_bytes), kib(unplanned.wire_bytes)),
        ("held at most", kib(best.peak_bytes), kib(unplanned.peak_bytes)),
    ]
    lie = [
        (_members(paths, group), str(list(group.shape)), _layout(layout))
        for group, layout in zip(groups, best.layouts, strict=True)
        if not group.follows
    ]
    more = sum(len(group.arguments) for group in groups if group.follows)
    rest = [f"  {count(more, 'small one')} that follow{'s' * (more == 1)}"] if more else []
    lines = [f"{name}, planned: the best of {count(tried, 'plan')}", *aligned(rows, "<>>")]
    if lie:
        lines += ["", "Arguments, by what lies alike", *aligned(lie, "<<<"), *rest]
    return "\n".join(lines)


def _members(paths: Sequence[str], group: Group) -> str:
    first, more = paths[group.arguments[0]], len(group.arguments) - 1
    return f"{first} and {more} more" if more else first


def _layout(layout: Sequence[Sequence[str]] | None) -> str:
    if layout is None:
        return "as completed"
    return f"[{', '.join('*'.join(axes) or '-' for axes in layout)}]"
