"""Why the program is what it is, as text.

First the program in numbers, and a warning of what is computed whole. Then the arguments and
results: how each lies, and which hint says so or led to it. Then every collective, dearest first:
what it moves, for which line, why; and what is held where memory is most. At last the strategies
that matter most, and what they beat.
"""

from collections.abc import Sequence

from meshwise.report.facts import Facts, Row
from meshwise.report.memory import held_listing
from meshwise.report.text import WIDTH, aligned, count, kib, percent, wrapped


def explained(facts: Facts) -> str:
    """The decisions, each collective with its line and reason, what is held, what beat what."""
    sections = [
        [facts.title, "", *aligned(facts.figures, "<<")],
        _whole(facts),
        _boundary("Arguments", facts.arguments),
        _boundary("Results", facts.results),
        _collectives(facts),
        held_listing(facts.memory),
        _loops(facts),
        _decisions(facts),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _whole(facts: Facts) -> list[str]:
    """A warning of operators without a rule, and the way out."""
    if not facts.whole:
        return []
    lines = ["Warning: computed whole on every device, because there is no rule"]
    return [*lines, *(f"  {text}" for text in facts.whole), *wrapped(WAY_OUT)]


WAY_OUT = (
    "Operands are gathered first, and every device does all of the work. Write it with operators "
    "that have a rule, or say how it is partitioned, with mw.register_rule or, for a kernel, "
    "mw.like: docs/extending.md. strict=True makes it an error."
)


def _boundary(title: str, rows: Sequence[Row]) -> list[str]:
    """Rows whose last cell is a note: beside them where it fits, else below."""
    if not rows:
        return []
    lines = aligned([row[:-1] for row in rows], "<<<")
    start = max(map(len, lines)) + 2
    shown = [title]
    for line, row in zip(lines, rows, strict=True):
        if start + len(row[-1]) <= WIDTH:
            shown.append(f"{line:{start}}{row[-1]}".rstrip())
        else:
            shown += [line, *wrapped(row[-1], indent=6, hang=2)]
    return shown


def _collectives(facts: Facts) -> list[str]:
    sent = facts.sent
    if not sent:
        return ["Collectives", "  none: nothing is sent"]
    rows = [("KiB", "share", "times", "kind", "over", "local operand", "line")]
    for one in sent:
        size, share = kib(one.bytes).removesuffix(" KiB"), percent(one.share, 1)
        rows.append((size, share, one.times, one.kind, one.axes, one.operand, one.line))
    table = aligned(rows, ">>><<<<")
    lines = ["Collectives, by the bytes that each device sends", table[0]]
    for line, one in zip(table[1:], sent, strict=True):
        lines += [line, *wrapped(one.reason, indent=8, hang=2)]
    return lines


def _loops(facts: Facts) -> list[str]:
    """What loops read in another sharding, and where it is made."""
    if not facts.program.loop_reads:
        return []
    lines = ["What loops read from around them (hoist_bytes limits what is held)"]
    for read in facts.program.loop_reads:
        lines += wrapped(read, indent=2, hang=2)
    return lines


def _decisions(facts: Facts) -> list[str]:
    """The strategies of single equations whose next best costs most, and what they beat."""
    if not facts.decisions:
        return []
    lines = ["Decisions, by what the next best strategy would add to the modelled time"]
    for one in facts.decisions:
        times = f", {one.times} times" if one.times > 1 else ""
        lines.append(f"  {one.added:>8}  {one.operator} at {one.line}{times}: {one.rule}")
        lines += wrapped(f"taken   {one.taken}", indent=12, hang=8)
        lines += wrapped(f"beaten  {one.beaten}", indent=12, hang=8)
    if facts.others:
        lines.append(f"  and {count(facts.others, 'other equation')} with less at stake")
    return lines
