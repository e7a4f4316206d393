"""Writes the tables of ``docs/reference-tahoe-settings.md`` from the table that the program uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pipegrid.grid.tahoe_settings_check import FILE_SETTINGS, SETTINGS, Setting

PAGE = Path(__file__).parent.parent / "docs" / "reference-tahoe-settings.md"
BEGIN, END = "<!-- tables: python -m misc.settings_page -->", "<!-- end of tables -->"


def _table(settings: Sequence[Setting], section: str) -> str:
    """Return a table in which each row names its sections or files, as ``section`` formats them."""
    lines = ["| setting | commands | `serve` | what it is |", "|---|---|---|---|"]
    alike = groupby(settings, lambda each: (each.client, each.server, each.note))
    for (client, server, note), rows in alike:
        names = []
        for where, same in groupby(rows, lambda each: each.section):
            listed = ", ".join(f"`{each.name}`" for each in same)
            names.append(f"{section.format(where)} {listed}")
        lines.append(f"| {'; '.join(names)} | {client} | {server} | {note} |")
    return "\n".join(lines)


def tables() -> str:
    """Return the tables of ``tahoe.cfg`` and of the other files."""
    return f"{_table(SETTINGS, '`[{}]`')}\n\n## Other files\n\n{_table(FILE_SETTINGS, '`{}`:')}"


def page_with_tables(text: str) -> str:
    """Return the page's text with the tables as they are now."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text("utf-8")), "utf-8")
