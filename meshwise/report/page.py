"""A program on one page of HTML that loads nothing: its figures, a timeline, the code, tables.

The same facts as `program.explain()`. The timeline is drawn in SVG; the code is that of the lines
which send something, read from the files as they are now.
"""

import linecache
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from meshwise import _jax
from meshwise.cost.gantt import Event, show_seconds
from meshwise.cost.timeline import COMPUTE, Timeline, timeline
from meshwise.ir.source import place, whose
from meshwise.report.explain import WAY_OUT
from meshwise.report.facts import Facts, Row
from meshwise.report.memory import HEADS, HELD, held_rows
from meshwise.report.text import count, kib, percent

CODE_AROUND = 2  # lines shown around one that sends
MOST_FILES = 8
# What all code of `exec` and `python -c` is said to come from; Python 3.13 has the lines of `-c`.
NO_FILE = "<string>"
CHART, LABEL, BAR = 1000, 110, 26  # width of the drawing, of its names, and height of a row
LEAST = 0.6  # narrower events are drawn as one with their neighbours
BY_TURNS = "A loop is drawn as one, on all that it uses, and may use that by turns."

STYLE = """
:root {
  --ink: #1c2430; --dim: #667085; --line: #dfe3ea; --paper: #fff; --soft: #f5f7fa;
  --work: #7c8aa5; --sent: #0b7a75; --warn: #b4232c; --warn-soft: #fdecec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ef; --dim: #98a2b3; --line: #333c4a; --paper: #151a21; --soft: #1d242e;
    --work: #64718a; --sent: #4fc3bc; --warn: #ff7a80; --warn-soft: #3a1d22;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1100px; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.4rem; margin: 0 0 .2rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { color: var(--dim); margin: .2rem 0 .7rem; max-width: 80ch; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; font-size: .87rem;
}
th { color: var(--dim); font-weight: 600; }
td.n, th.n { text-align: right; white-space: nowrap; }
.note { color: var(--dim); display: block; font-size: .82rem; }
.figures td { border: 0; padding: .05rem 1rem .05rem 0; }
.figures td:first-child { color: var(--dim); width: 9rem; }
.warning {
  background: var(--warn-soft); border-left: 4px solid var(--warn); padding: .5rem .8rem;
  margin: 1rem 0;
}
.warning p { color: inherit; }
.scroll { overflow-x: auto; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
rect.row { fill: var(--soft); }
rect.work { fill: var(--work); }
rect.sent { fill: var(--sent); }
rect.work:hover, rect.sent:hover { opacity: .7; }
pre { margin: 0; font: 13px/1.45 ui-monospace, monospace; }
.code { background: var(--soft); padding: .5rem 0; }
.code td { border: 0; padding: 0 .6rem; font: 13px/1.45 ui-monospace, monospace; white-space: pre; }
.code td.n { color: var(--dim); width: 1%; }
.code tr.sends td.bytes { color: var(--sent); font-weight: 600; }
.code td.share { width: 90px; }
.bar { display: block; background: var(--sent); height: .5rem; margin-top: .35rem; min-width: 1px; }
summary { cursor: pointer; color: var(--dim); }
"""


def page(facts: Facts) -> str:
    """The page's HTML."""
    took = timeline(
        facts.program.jaxpr, facts.program.mesh.axis_size, facts.hardware, overlaps=True
    )
    sections = [
        f"<h1>{escape(facts.title)}</h1>",
        _figures(facts.figures),
        _warning(facts),
        _timeline(facts, took),
        _code(facts),
        _sent(facts),
        _held(facts),
        _values("Arguments", facts.arguments),
        _values("Results", facts.results),
        _loops(facts.program.loop_reads),
        _decisions(facts),
        f"<h2>The program of each device</h2><details><summary>{_equations(facts)}</summary>"
        f'<div class="scroll"><pre>{escape(str(facts.program.jaxpr))}</pre></div></details>',
    ]
    title = escape(facts.title.partition(",")[0])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body></html>\n"
    )


def _table(heads: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; `align` has `<` or `>` for each column."""
    sides = [' class="n"' if side == ">" else "" for side in align]
    lines = [
        "".join(f"<td{side}>{cell}</td>" for cell, side in zip(row, sides, strict=True))
        for row in rows
    ]
    head = "".join(f"<th{side}>{escape(h)}</th>" for h, side in zip(heads, sides, strict=True))
    head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table>{head}<tbody>\n{body}</tbody></table></div>'


def _figures(rows: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>\n" for a, b in rows)
    return f'<table class="figures"><tbody>\n{lines}</tbody></table>'


def _warning(facts: Facts) -> str:
    if not facts.whole:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in facts.whole)
    return (
        '<div class="warning"><b>Computed whole on every device, because there is no rule</b>'
        f"<ul>{items}</ul><p>{escape(WAY_OUT)}</p></div>"
    )


def _equations(facts: Facts) -> str:
    return count(_jax.equation_count(facts.program.jaxpr), "equation")


def _sent(facts: Facts) -> str:
    heads = "KiB", "share", "times", "kind", "over", "local operand", "line and reason"
    rows = [
        (
            kib(one.bytes).removesuffix(" KiB"),
            percent(one.share, 1),
            one.times,
            *map(escape, (one.kind, one.axes, one.operand)),
            f'{escape(one.line)}<span class="note">{escape(one.reason)}</span>',
        )
        for one in facts.sent
    ]
    table = _table(heads, ">>><<<<", rows) if rows else "<p>None: nothing is sent.</p>"
    return f"<h2>Collectives, by the bytes that each device sends</h2>{table}"


def _held(facts: Facts) -> str:
    rows = [[escape(cell).replace("  ", "&emsp;") for cell in r] for r in held_rows(facts.memory)]
    return f"<h2>{HELD}</h2>{_table(HEADS, '>>><<<', rows)}" if rows else ""


def _values(title: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    heads = "value", "type", "lies", "because"
    return f"<h2>{title}</h2>{_table(heads, '<<<<', [list(map(escape, row)) for row in rows])}"


def _loops(reads: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(read)}</li>" for read in reads)
    return f"<h2>What loops read from around them</h2><ul>{items}</ul>" if reads else ""


def _decisions(facts: Facts) -> str:
    if not facts.decisions:
        return ""
    rows = [
        (
            escape(one.added),
            f"{escape(one.operator)} at {escape(one.line)}"
            + (f", {one.times} times" if one.times > 1 else "")
            + f'<span class="note">{escape(one.rule)}</span>',
            escape(one.taken),
            escape(one.beaten),
        )
        for one in facts.decisions
    ]
    more = f"<p>And {count(facts.others, 'other equation')} with less at stake.</p>"
    return (
        "<h2>Decisions</h2><p>By what the next best strategy would add to the modelled time.</p>"
        + _table(("", "operator", "taken", "beaten"), "><<<", rows)
        + (more if facts.others else "")
    )


def _code(facts: Facts) -> str:
    """The code of lines that send, each with what it sends."""
    sent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for collective in facts.program.collectives:
        path, line = whose(collective.source)
        if line:
            sent[path][line] += collective.wire_bytes
    most = max((size for lines in sent.values() for size in lines.values()), default=0.0) or 1.0
    ordered = sorted(sent, key=lambda path: -sum(sent[path].values()))
    files = [(path, text) for path in ordered if (text := _file(path, sent[path], most))]
    if not files:
        return ""
    shown = "".join(
        f"<p>{escape(place(f'{path}:1').removesuffix(':1'))}</p>{text}"
        for path, text in files[:MOST_FILES]
    )
    left = len(files) - MOST_FILES
    more = f"<p>And {count(left, 'other file')} with less.</p>" if left > 0 else ""
    return f"<h2>The lines that send</h2>{shown}{more}"


def _file(path: str, sent: dict[int, float], most: float) -> str:
    """Lines of a file around those that send; nothing where it cannot be read."""
    linecache.checkcache(path)
    lines = [] if path == NO_FILE else linecache.getlines(path)
    near = {n for line in sent for n in range(line - CODE_AROUND, line + CODE_AROUND + 1)}
    rows, before = "", None
    for number in sorted(n for n in near if 1 <= n <= len(lines)):
        if before is not None and number != before + 1:
            rows += '<tr><td class="n">⋮</td><td></td><td></td><td></td></tr>\n'
        before = number
        size = sent.get(number)
        share = "" if size is None else f'<i class="bar" style="width:{size / most:.0%}"></i>'
        rows += (
            f'<tr{"" if size is None else " class=sends"}><td class="n">{number}</td>'
            f'<td class="n bytes">{"" if size is None else kib(size)}</td>'
            f'<td class="share">{share}</td><td>{escape(lines[number - 1].rstrip())}</td></tr>\n'
        )
    return f'<div class="scroll code"><table><tbody>\n{rows}</tbody></table></div>' if rows else ""


def _timeline(facts: Facts, took: Timeline) -> str:
    """What runs when, a row for each resource."""
    names = [name for name, _ in took.busy]
    if not took.seconds or not names:
        return ""
    height = BAR * len(names) + 22
    parts = [f'<svg viewBox="0 0 {CHART} {height}" role="img" aria-label="timeline">']
    scale = (CHART - LABEL) / took.seconds
    for row, name in enumerate(names):
        top = row * BAR
        parts.append(
            f'<text x="0" y="{top + 16}">{escape(name)}</text>'
            f'<rect class="row" x="{LABEL}" y="{top + 2}" width="{CHART - LABEL}" '
            f'height="{BAR - 4}"/>'
        )
        kind = "work" if name == COMPUTE else "sent"
        events = sorted((e for e in took.events if e.resource == name), key=lambda e: e.start_s)
        for group in _drawn(events, LEAST / scale):
            start, end = group[0].start_s, max(e.end_s for e in group)
            parts.append(
                f'<rect class="{kind}" x="{LABEL + start * scale:.2f}" y="{top + 3}" '
                f'width="{max((end - start) * scale, 0.3):.2f}" height="{BAR - 6}">'
                f"<title>{escape(_said(facts, group))}</title></rect>"
            )
    for tick in range(5):
        at = LABEL + (CHART - LABEL) * tick / 4
        anchor = "start" if tick == 0 else "end" if tick == 4 else "middle"
        parts.append(
            f'<text x="{at:.0f}" y="{height - 5}" text-anchor="{anchor}">'
            f"{show_seconds(took.seconds * tick / 4)}</text>"
        )
    figures = (
        f"Predicted by the figures of {took.machine}, communication beside computation: "
        f"{show_seconds(took.seconds)}; in {show_seconds(took.exposed_seconds)} of these nothing "
        "is computed."
    )
    drawn = sum(event.seconds for event in took.events)
    by_turns = [BY_TURNS] if drawn > sum(took.busy_seconds.values()) * (1 + 1e-9) else []
    notes = "".join(f"<p>{escape(note)}</p>" for note in (*by_turns, *took.notes))
    return f"<h2>Timeline</h2><p>{escape(figures)}</p>{notes}{''.join(parts)}</svg>"


def _drawn(events: Sequence[Event], least: float) -> list[list[Event]]:
    """Events to be drawn as one: those too short to be seen, with their neighbours."""
    groups: list[list[Event]] = []
    for event in events:
        last = groups[-1] if groups else None
        near = last is not None and event.start_s - last[-1].end_s < least
        if last and near and event.seconds < least and last[0].seconds < least:
            last.append(event)
        else:
            groups.append([event])
    return groups


def _said(facts: Facts, events: Sequence[Event]) -> str:
    """What one drawn event is."""
    seconds = sum(e.seconds for e in events)
    if len(events) > 1:
        return f"{len(events)} short ones: {show_seconds(seconds)}"
    event = events[0]
    line = place(_jax.source_summary(facts.program.jaxpr.jaxpr.eqns[event.equation]))
    return f"{event.name}: {show_seconds(seconds)}, from {show_seconds(event.start_s)}, {line}"
