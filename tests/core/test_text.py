"""Text that a terminal would obey."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.text import harmless, printable


class TextTests(SynchronousTestCase):
    """``printable`` and ``harmless``."""

    def test_plain(self) -> None:
        """Letters of all languages are as they were."""
        for text in ("", "plain", "größer", "日本語", "a b", "\udcff"):
            self.assertEqual((printable(text), harmless(text)), (text, text))

    def test_what_terminals_obey(self) -> None:
        """Escape sequences, in 7 bits and 8, carriage returns, and what reverses the order of letters."""
        for char, shown in (
            ("\x1b", r"\x1b"),
            ("\x9b", r"\x9b"),
            ("\r", r"\r"),
            ("\x07", r"\x07"),
            ("\x7f", r"\x7f"),
            ("\u202e", r"\u202e"),
        ):
            self.assertEqual(printable(f"a{char}[2Jb"), f"a{shown}[2Jb")
            self.assertEqual(harmless(f"a{char}[2Jb"), f"a{shown}[2Jb")

    def test_lines(self) -> None:
        """One is one line, the other may be several."""
        self.assertEqual(printable("a\nb\tc"), r"a\nb\tc")
        self.assertEqual(harmless("a\nb\tc"), "a\nb\tc")
