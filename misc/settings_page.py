"""Writes the tables of ``docs/reference-tahoe-settings.md`` from the table that the program uses."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from pipegrid.grid.tahoe_settings_check import FILE_SETTINGS, SETTINGS, Setting

PAGE = Path(__file__).parent.parent / "docs" / "reference-tahoe-settings.md"
BEGIN, END = "<!-- tables: python -m misc.settings_page -->", "<!-- end of tables -->"


def _table(settings: list[Setting]) -> str:
    lines = ["| setting | commands | `serve` | what it is |", "|---|---|---|---|"]
    alike = groupby(settings, lambda each: (each.client, each.server, each.note))
    for (client, server, note), rows in alike:
        names = ", ".join(f"`{each.name}`" for each in rows)
        lines.append(f"| {names} | {client} | {server} | {note} |")
    return "\n".join(lines)


def tables() -> str:
    """Return all tables, each below the name of its section or file."""
    parts = []
    for rows, title in ((SETTINGS, "[{}]"), (FILE_SETTINGS, "{}")):
        for section in dict.fromkeys(each.section for each in rows):
            shown = title.format(section)
            parts.append(f"### `{shown}`\n\n" + _table([x for x in rows if x.section == section]))
    return "\n\n".join(parts)


def page_with_tables(text: str) -> str:
    """Return the page's text with the tables as they are now."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text("utf-8")), "utf-8")
