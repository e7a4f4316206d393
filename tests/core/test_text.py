"""Text that a terminal would obey."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import text
from pipegrid.core.text import counted, decode_text, harmless, printable
from pipegrid.errors import UsageError


class TextTests(SynchronousTestCase):
    """``printable`` and ``harmless``."""

    def test_plain(self) -> None:
        """Letters of all languages are as they were."""
        for plain in ("", "plain", "größer", "日本語", "a b", "\udcff"):
            self.assertEqual((printable(plain), harmless(plain)), (plain, plain))

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

    def test_many_of_them(self) -> None:
        """Each is shown as it is among few, whatever else there is."""
        strange = "".join(map(chr, (*range(9), *range(14, 32), 0x7F, 0x9B, 0x202E)))
        shown = "".join(map(printable, strange))
        self.assertEqual(printable(strange), shown)
        self.assertEqual(harmless(f"{strange}\n" * 3), f"{shown}\n" * 3)
        self.assertNotIn("\x1b", shown)

    def test_no_character_is_judged_twice(self) -> None:
        """However long the text is: a stranger's may have 32 KiB."""
        judged: list[str] = []

        def judge(char: str) -> bool:
            judged.append(char)
            return char.isprintable()

        self.patch(text, "_is_safe", judge)
        self.assertEqual(harmless("\x1b[2J\n" * 8000), "\\x1b[2J\n" * 8000)
        self.assertEqual(sorted(judged), ["\x1b", "2", "J", "["])


class CountedTests(SynchronousTestCase):
    """``counted``."""

    def test_one_and_many(self) -> None:
        """Only one is singular; what is no noun with an s says how it is."""
        self.assertEqual(
            [counted(n, "share") for n in (0, 1, 2)], ["0 shares", "1 share", "2 shares"]
        )
        self.assertEqual(counted(1, "directory", "directories"), "1 directory")
        self.assertEqual(counted(3, "directory", "directories"), "3 directories")


class DecodeTests(SynchronousTestCase):
    """``decode_text``: all files that people write."""

    def test_text(self) -> None:
        """UTF-8, with or without a mark, with either end of lines."""
        for data in (b"a\nb\xc3\xbc\n", b"\xef\xbb\xbfa\nb\xc3\xbc\n", b"a\r\nb\xc3\xbc\r\n"):
            self.assertEqual(decode_text(data, "file"), "a\nbü\n")
        self.assertEqual(decode_text(b"a\r\nb", "file", keep_ends=True), "a\r\nb")
        self.assertEqual(decode_text(b"", "file"), "")

    def test_anything_else(self) -> None:
        """An error that names file and line."""
        text = "one\ntwo ü\n"
        for data, where in (
            (text.encode("utf-16"), "1: it is UTF-16"),
            (text.encode("utf-16-le"), "1: it holds a zero byte"),
            (text.encode("utf-16-be"), "1: it holds a zero byte"),
            (text.encode("utf-32"), "1: it is UTF-16"),
            (text.encode("latin-1"), "2: it is not UTF-8"),
            (b"one\ntwo\0\n", "2: it holds a zero byte"),
            (b"one\ntwo\rthree\r", "2: it holds a carriage return"),
        ):
            error = self.assertRaises(UsageError, decode_text, data, "file")
            self.assertTrue(str(error).startswith(f"file:{where}"), str(error))
