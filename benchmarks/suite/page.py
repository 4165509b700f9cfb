"""One page that loads nothing from outside: the summary, plots, and a table to sort."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("page.html")


def page(record: dict[str, Any]) -> str:
    """The page's HTML for a record of `records.record`."""
    # A script's text ends at "</script", unless a "<!--<script" stands before it.
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text().replace("/*DATA*/", data)
