"""The page of public names is current, and speaks of all of them."""

from __future__ import annotations

from pathlib import Path

from misc.api_reference import SECTIONS, page
from twisted.trial.unittest import SynchronousTestCase

import pipegrid
from pipegrid import Grid

PAGE = Path(__file__).parent.parent / "docs" / "reference-api.md"


class ApiReferenceTests(SynchronousTestCase):
    """``docs/reference-api.md``."""

    def test_it_is_current(self) -> None:
        """Else: python -m misc.api_reference > docs/reference-api.md"""
        self.assertTrue(
            PAGE.read_text("utf-8") == page(),
            "run: python -m misc.api_reference > docs/reference-api.md",
        )

    def test_every_name_has_its_entry(self) -> None:
        """And every class and function in it says something of itself."""
        text = PAGE.read_text("utf-8")
        for _, _, names in SECTIONS:
            for name in names:
                self.assertIn(f"\n### {name}\n", text)
        self.assertIn("\n### SpeedTest\n", text)
        self.assertEqual(set(SECTIONS[0][2]), set(pipegrid.__all__))

    def test_what_a_grid_exposes(self) -> None:
        """What applications need, and no more."""
        for name in ("appetite", "expect", "look_after", "put_options"):
            self.assertFalse(hasattr(Grid, name), name)
