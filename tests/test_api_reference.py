"""The page of public names is current, and speaks of all of them."""

from __future__ import annotations

from pathlib import Path

from misc.api_reference import PAGES, pages
from twisted.trial.unittest import SynchronousTestCase

import pipegrid
import pipegrid.http11
from pipegrid import Grid

DOCS = Path(__file__).parent.parent / "docs"


class ApiReferenceTests(SynchronousTestCase):
    """``docs/reference-api*.md``, as they are generated."""

    def test_they_are_current(self) -> None:
        """Else: python -m misc.api_reference --write"""
        for name, text in pages().items():
            self.assertTrue(
                (DOCS / name).read_text("utf-8") == text,
                f"{name}: run python -m misc.api_reference --write",
            )

    def test_every_name_has_its_entry(self) -> None:
        """On one page; and every class and function in it says something of itself."""
        for page, (_, sections) in PAGES.items():
            text = (DOCS / page).read_text("utf-8")
            for _, _, names in sections:
                for name in names:
                    self.assertRegex(text, rf"\n### {name}\n\n.*\w")
        self.assertIn("\n### SpeedTest\n", (DOCS / "reference-api-pipeline.md").read_text("utf-8"))
        documented = {
            name for _, sections in PAGES.values() for _, _, names in sections for name in names
        }
        self.assertLessEqual({*pipegrid.__all__, *pipegrid.http11.__all__}, documented)

    def test_errors_and_units_are_listed(self) -> None:
        """Of each method: its arguments without types, its first sentence, and all lists of its docstring."""
        text = pages()["reference-api-grid.md"]
        self.assertIn(
            "`get(cap, sink, *, start=0, length=None, progress=None, replace=False, range_of=None,",
            text,
        )
        entry = text[text.index("`get(cap, sink") :].partition("\n`introducers`")[0]
        for each in (
            "*Args:* `cap`: ",
            " `replace`: ",
            "*Fails with:* ",
            " `NotEnoughSharesError`: ",
        ):
            self.assertIn(each, entry)

    def test_what_a_grid_exposes(self) -> None:
        """What applications need, and no more."""
        for name in ("small_file_capacity", "expect", "maintain", "put_options"):
            self.assertFalse(hasattr(Grid, name), name)
