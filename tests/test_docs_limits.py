"""The pages of limits say what the code says; and how long pages of docs may be."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "reference-limits.md", DOCS / "reference-limits-gateway.md")
MOST_WORDS = 2500
"""Of a page, but for the command reference: what a reader takes in at one sitting. Cut, or split it."""
_ROW = re.compile(r"^\| [^|]+ \| ([^|]+) \| `([\w.]+)` \|$", re.MULTILINE)
_NUMBER = re.compile(r"([0-9][0-9 ]*)(?: (B|KiB|MiB|s|days))?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "s": 1, "days": 86400}


def value_of(name: str) -> Any:
    """Return what the code has under a dotted name; of a record, a field's default."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(import_module(module), last)
    except ModuleNotFoundError:
        kind = value_of(module)
        if issubclass(kind, tuple):
            return kind._field_defaults[last]
        return getattr(attrs.fields(kind), last).default


def meaning_of(text: str) -> Any:
    """Return the number that the page writes, in bytes, seconds or pieces; other text as it is."""
    found = _NUMBER.fullmatch(text)
    return text if found is None else int(found[1].replace(" ", "")) * _UNITS[found[2]]


class LimitsTests(SynchronousTestCase):
    """Every row of every table."""

    def test_numbers(self) -> None:
        """What the pages say is what the name beside it holds."""
        text = "".join(page.read_text("utf-8") for page in PAGES)
        rows = _ROW.findall(text)
        for written, name in rows:
            value = value_of(name)
            if isinstance(value, type):
                default = value()
                value = f"{default.required_shares} of {default.total_shares}"
            self.assertEqual(meaning_of(written.strip()), value, name)
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        heads = sum(line.startswith("| what | limit | ") for line in lines)
        self.assertEqual(len(rows), len(lines) - heads)

    def test_pages_are_short(self) -> None:
        """As ``wc -w`` counts; the changes are one page, too."""
        words = {page.name: len(page.read_text("utf-8").split()) for page in DOCS.glob("*.md")}
        words.pop("reference-cli.md")
        self.assertEqual({page: count for page, count in words.items() if count > MOST_WORDS}, {})

    def test_what_is_written(self) -> None:
        """Units are read as people mean them."""
        for text, meant in (("55 B", 55), ("1 MiB", 1 << 20), ("1 000 000", 10**6), ("x", "x")):
            self.assertEqual(meaning_of(text), meant)
