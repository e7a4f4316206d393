"""Which of a directory's contents are stored."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.tree.file_selection import MAX_PATTERNS, VCS, TreeSelection, paths_below, patterns_of


class SelectionTests(SynchronousTestCase):
    """Patterns, and lists."""

    def takes(self, exclude: list[str], path: str, is_directory: bool = False) -> bool:
        """Whether something is stored with these patterns."""
        return TreeSelection(exclude).takes(path, is_directory)

    def test_names(self) -> None:
        """A pattern without a slash is that of a name, wherever it is; case counts."""
        self.assertFalse(self.takes(["*.tmp"], "a.tmp"))
        self.assertFalse(self.takes(["*.tmp"], "a/b/c.tmp"))
        self.assertTrue(self.takes(["*.tmp"], "a/b/c.TMP"))
        self.assertTrue(self.takes(["b"], "a/b/c"))
        self.assertFalse(self.takes(["b?"], "a/bc", True))

    def test_paths(self) -> None:
        """One with a slash is that of a path from the directory down."""
        self.assertFalse(self.takes(["d/b*"], "d/bar"))
        self.assertTrue(self.takes(["d/b*"], "x/d/bar"))
        self.assertTrue(self.takes(["d/b*"], "d/b/c"))
        self.assertFalse(self.takes(["**/b/c"], "x/y/b/c"))
        self.assertFalse(self.takes(["a/**/c"], "a/c"))
        self.assertFalse(self.takes(["/a"], "a"))
        self.assertFalse(self.takes(["./a"], "a"))  # as shells and find have it
        self.assertFalse(self.takes(["./a/b/"], "a/b", True))
        self.assertTrue(self.takes(["./a"], "x/a"))

    def test_directories(self) -> None:
        """One that ends in a slash is that of a directory."""
        self.assertFalse(self.takes(["cache/"], "x/cache", True))
        self.assertTrue(self.takes(["cache/"], "x/cache", False))

    def test_some_characters(self) -> None:
        """Brackets, and what shells make of wrong ones."""
        self.assertFalse(self.takes(["[a-c]x"], "bx"))
        self.assertTrue(self.takes(["[!a-c]x"], "bx"))
        self.assertFalse(self.takes(["[!a-c]x"], "dx"))
        self.assertFalse(self.takes(["[]]"], "]"))
        self.assertFalse(self.takes(["[x"], "[x"))
        self.assertFalse(self.takes(["a[-]"], "a-"))
        self.assertTrue(self.takes(["[z-a]"], "b"))
        self.assertFalse(self.takes(["\\*"], "*"))
        self.assertTrue(self.takes(["\\*"], "x"))

    def test_no_text(self) -> None:
        """Names that are no text match as others do."""
        self.assertFalse(self.takes(["caf?"], "caf\udce9"))

    def test_lists(self) -> None:
        """What is listed, all below it, and the directories on the way; what is not there is known."""
        selection = TreeSelection(["*.o"], ["a/b", "c", "gone", "./a/x/"])
        for path, is_directory, taken in (
            ("a", True, True),
            ("a/b", True, True),
            ("a/b/deep/file", False, True),
            ("a/b/deep/file.o", False, False),
            ("a/other", False, False),
            ("a", False, False),
            ("c", False, True),
            ("cc", False, False),
            ("a/x", False, True),
        ):
            self.assertEqual(selection.takes(path, is_directory), taken, path)
        self.assertEqual(selection.unmet, ["gone"])

    def test_version_control(self) -> None:
        """What others can fetch again."""
        self.assertFalse(self.takes(list(VCS), "src/.git", True))
        self.assertTrue(self.takes(list(VCS), "src/.gitignore"))

    def test_files(self) -> None:
        """Of patterns, and of paths below a directory."""
        self.assertEqual(patterns_of("# x\n\n *.o \n#y\nb\n"), [(3, "*.o"), (5, "b")])
        self.assertEqual(
            paths_below("/home/u", ["a/b", "", "/home/u/c", "/home/u"]), ["a/b", "c", ""]
        )
        self.assertRaises(UsageError, paths_below, "/home/u", ["/home/uu/c"])

    def test_nonsense(self) -> None:
        """Is refused, and so is too much."""
        for exclude in ([""], ["/"], ["x" * 5000], ["x"] * (MAX_PATTERNS + 1)):
            self.assertRaises(UsageError, TreeSelection, exclude)
        for exclude in (
            ["!keep"],
            ["*.log", "!/a/keep.log"],
        ):  # what it is to save would be left out
            with self.assertRaises(UsageError) as caught:
                TreeSelection(exclude)
            self.assertIn(exclude[-1], str(caught.exception))
        self.assertFalse(self.takes(["\\!keep"], "!keep"))
        for only in ("../x", "a/../../b", "/etc"):
            self.assertRaises(UsageError, TreeSelection, [], [only])
