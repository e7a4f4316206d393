"""Patterns of gitignore, held against git itself."""

from __future__ import annotations

from random import Random

from misc.gitignore_world import compare
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.tree.ignore_patterns import (
    MAX_PATTERN,
    MAX_PATTERN_BYTES,
    MAX_PATTERNS,
    IgnorePatterns,
    patterns_of,
)

TREES = 150
"""``python -m misc.gitignore_world`` compares 2,000."""


class IgnorePatternsTests(SynchronousTestCase):
    """What decides about an entry."""

    def decided(self, path: str, *patterns: str, is_directory: bool = False) -> int | None:
        """Return the number of the pattern that decides."""
        made = IgnorePatterns([each.encode() for each in patterns])
        return made.deciding(path.encode(), is_directory)

    def test_as_git_decides(self) -> None:
        """Random trees and patterns: the same verdict about every entry, for the same pattern."""
        seed = Random().randrange(1 << 32)
        entries, decided, different = compare(TREES, seed)
        self.assertEqual(different, [], f"seed {seed}")
        self.assertGreater(entries, 10 * TREES)
        self.assertGreater(decided, TREES)

    def test_the_last_one_decides(self) -> None:
        """Whether it excludes or includes; one that is for directories does not count for files."""
        patterns = ("*.log", "!keep.log", "keep.log/", "sub/*")
        self.assertEqual(self.decided("a/b.log", *patterns), 0)
        self.assertEqual(self.decided("a/keep.log", *patterns), 1)
        self.assertEqual(self.decided("a/keep.log", *patterns, is_directory=True), 2)
        self.assertEqual(self.decided("sub/keep.log", *patterns), 3)
        self.assertIsNone(self.decided("a/sub/keep", *patterns))

    def test_what_git_does_not_document(self) -> None:
        """Up to its first wildcard a path is compared as it is, and the rest is an expression of its own."""
        for path, pattern, matches in (
            ("foo/x/bar", "foo**/bar", True),
            ("a/bc/d", "a/b**", True),
            ("x/a/bc/d", "**/a/b**", False),
            ("a/b", "a/**\\/b", False),
            ("a/x/b", "a/**\\/b", True),
            ("a", "./a", False),
            ("a\\", "a\\", False),
            ("caf\u00e9", "caf?", False),  # two bytes
            ("caf\u00e9", "caf??", True),
        ):
            self.assertEqual(self.decided(path, pattern) is not None, matches, pattern)

    def test_no_pattern_takes_long(self) -> None:
        """Each byte of a path is looked at once, whatever the patterns are."""
        patterns = ["*a*a*a*a*a*a*a*a*b", "**/*a*/**/*a*/**/*a*/**/b", "[a-z]*[a-z]*[a-z]*[0-9]"]
        made = IgnorePatterns([each.encode() for each in patterns])
        steps = 0
        move = made._moves

        class Counting(dict[int, int]):
            """Counts how often a byte is looked up."""

            def get(self, byte: int, default: object = None) -> int | None:  # type: ignore[override]
                nonlocal steps
                steps += 1
                return move.get(byte)

        made._moves = Counting()
        path = b"a" * 255 + b"/" + b"a/" * 1500 + b"a" * 255
        move.update({byte: made._move(byte) for byte in b"a/"})
        self.assertIsNone(made.deciding(path, False))
        self.assertLessEqual(steps, len(path))
        self.assertEqual(made.deciding(path + b"b", False), 0)

    def test_lines(self) -> None:
        """Comments, blanks at the end, and ends of lines as on Windows."""
        text = b"\xef\xbb\xbf# x\n\n *.o  \r\n#y\nb\\ \n\\#c\n  \nd\t\ne\\\\ \n"
        self.assertEqual(
            patterns_of(text),
            [(3, b" *.o"), (5, b"b\\ "), (6, b"\\#c"), (8, b"d\t"), (9, b"e\\\\")],
        )

    def test_what_was_met(self) -> None:
        """Each pattern that matches something is noted, also if another one decides."""
        made = IgnorePatterns([b"*.o", b"!a.o", b"b/", b"none", b"[", b"/a.*"])
        self.assertFalse(made.leaves_out(b"x/a.o", False))
        self.assertTrue(made.leaves_out(b"a.o", False))
        self.assertFalse(made.leaves_out(b"b", False))
        self.assertEqual(
            [made.has_met(n) for n in range(6)], [True, True, False, False, False, True]
        )
        self.assertFalse(made.leaves_out(b"b", None))
        self.assertTrue(made.leaves_out(b"c.o", None))
        self.assertTrue(made.leaves_out(b"b", True))
        self.assertTrue(made.has_met(2))

    def test_bounds(self) -> None:
        """Too many patterns, and too long ones, are refused."""
        for patterns in (
            [b"x"] * (MAX_PATTERNS + 1),
            [b"x" * (MAX_PATTERN + 1)],
            [b"x" * MAX_PATTERN] * (MAX_PATTERN_BYTES // MAX_PATTERN + 1),
        ):
            self.assertRaises(UsageError, IgnorePatterns, patterns)
        many = IgnorePatterns([b"x%d*y" % n for n in range(MAX_PATTERNS)])
        self.assertEqual(many.deciding(b"x77y", False), 77)
