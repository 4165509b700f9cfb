"""Pieces of readable text: tables, sizes, types, axes, paths.

Everything is plain text of at most `WIDTH` columns where that is in our hands.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import Sharding

WIDTH = 100
KIB = 1024


def aligned(rows: Sequence[Sequence[str]], align: str, indent: int = 2) -> list[str]:
    """Rows as lines with their columns aligned: `align` has `<` or `>` for each column.

    >>> aligned([("a", "1"), ("bc", "23")], "<>", indent=0)
    ['a    1', 'bc  23']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " " * indent
        + "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def wrapped(text: str, indent: int = 2, hang: int = 0) -> list[str]:
    """A sentence as lines; those after the first stand `hang` columns further in."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )


def kib(size: float) -> str:
    """Bytes as KiB, e.g. `1,024.5 KiB`; small ones with a digit that shows them."""
    return f"{size / KIB:,.1f} KiB" if size >= KIB / 2 or not size else f"{size / KIB:.3f} KiB"


def percent(part: float, whole: float) -> str:
    """A share, e.g. `12.5%`."""
    return f"{part / whole:.1%}" if whole else "-"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun, e.g. `1 device`, `8 devices`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(items: Sequence[str]) -> str:
    """Items in a sentence, e.g. `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def array_text(shape: Sequence[int], dtype: Any) -> str:
    """A type, e.g. `f32[16,128]`."""
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u")):
        name = name.replace(long, short)
    return f"{name.replace('int', 'i')}[{','.join(map(str, shape))}]"


def axes_text(axes: Axes, mesh: Mesh) -> str:
    """Axes of one dim, the user's where they are whole, e.g. `data*model`; `-` for none."""
    return "*".join(mesh.restore(axes) or axes) or "-"


def sharding_text(sharding: Sharding, mesh: Mesh) -> str:
    """A sharding in the user's axes, e.g. `[data, -] sum over model`."""
    dims = ", ".join(axes_text(axes, mesh) for axes in sharding.dims)
    if not sharding.unreduced:
        return f"[{dims}]"
    return f"[{dims}] {sharding.reduction.value} over {mesh.show(sharding.unreduced)}"


def short_spec(text: str) -> str:
    """A PartitionSpec as one writes it: `P('data')` for `PartitionSpec('data',)`."""
    return text.replace("PartitionSpec(", "P(").replace(",)", ")")


def hint_text(given_as: str) -> str:
    """What the user said of a value, e.g. `hint P('data')`."""
    return f"hint {short_spec(given_as)}"


def in_user_axes(text: str, mesh: Mesh) -> str:
    """A text with shardings over sub-axes in it, with the user's axes where they are whole."""

    def restore(axes: Sequence[str], joint: str) -> str:
        known = all(a in mesh.axis_size for a in axes)
        return joint.join((mesh.restore(tuple(axes)) if known else None) or axes)

    text = re.sub(
        r"(?<= over |along )[\w.]+(?:, [\w.]+)*", lambda m: restore(m[0].split(", "), ", "), text
    )
    return re.sub(r"[\w.]+(?:\*[\w.]+)+", lambda m: restore(m[0].split("*"), "*"), text)


def distinct(items: Iterable[str]) -> list[str]:
    """Items in order, each once."""
    return list(dict.fromkeys(items))
