"""Which of a directory's contents are stored."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.tree.file_selection import (
    CACHES,
    MAX_HEADER,
    VCS,
    DirectoryTag,
    TreeSelection,
    directory_tag,
    paths_below,
    paths_below_each,
)
from pipegrid.tree.ignore_patterns import MAX_PATTERNS


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

    def test_patterns_with_a_slash(self) -> None:
        """One with a slash is that of a path from the directory down."""
        self.assertFalse(self.takes(["d/b*"], "d/bar"))
        self.assertTrue(self.takes(["d/b*"], "x/d/bar"))
        self.assertTrue(self.takes(["d/b*"], "d/b/c"))
        self.assertFalse(self.takes(["**/b/c"], "x/y/b/c"))
        self.assertFalse(self.takes(["a/**/c"], "a/c"))
        self.assertFalse(self.takes(["/a"], "a"))
        self.assertFalse(self.takes(["/a/b/"], "a/b", True))
        self.assertTrue(self.takes(["/a"], "x/a"))
        self.assertTrue(self.takes(["./a"], "a"))  # as for git, which knows no such path

    def test_directories(self) -> None:
        """One that ends in a slash is that of a directory."""
        self.assertFalse(self.takes(["cache/"], "x/cache", True))
        self.assertTrue(self.takes(["cache/"], "x/cache", False))

    def test_some_characters(self) -> None:
        """Brackets; wrong ones match nothing, as in git."""
        self.assertFalse(self.takes(["[a-c]x"], "bx"))
        self.assertTrue(self.takes(["[!a-c]x"], "bx"))
        self.assertFalse(self.takes(["[!a-c]x"], "dx"))
        self.assertFalse(self.takes(["[]]"], "]"))
        self.assertTrue(self.takes(["[x"], "[x"))
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

    def test_included_again(self) -> None:
        """By a later pattern, unless the directory is left out."""
        patterns = ["*.log", "!keep.log", "/out", "!/out/keep.log"]
        self.assertFalse(self.takes(patterns, "a/x.log"))
        self.assertTrue(self.takes(patterns, "a/keep.log"))
        self.assertFalse(self.takes(patterns, "out", True))
        self.assertTrue(self.takes([*VCS, "!.git"], "src/.git", True))

    def test_counts(self) -> None:
        """What is left out is counted, unless no list has it; patterns that matched nothing are known."""
        selection = TreeSelection(["*.o", "!b.o", "none", "!none"], max_file_bytes=10)
        for path, taken in (("a.o", False), ("b.o", True), ("c", True)):
            self.assertEqual(selection.may_take(path) and selection.takes(path, False), taken)
        self.assertTrue(selection.takes_size(10))
        self.assertFalse(selection.takes_size(11))
        selection.leave_out("d/in a cache")
        self.assertEqual(selection.excluded, 3)
        self.assertEqual(selection.unmatched, ["none", "!none"])
        listed = TreeSelection(["*.o"], ["a", "b/c", "gone"])
        for path in ("x.o", "a.o", "b.o"):
            self.assertFalse(listed.takes(path, False))
        self.assertEqual(listed.excluded, 0)
        self.assertFalse(listed.takes("a/y.o", False))
        self.assertEqual(listed.excluded, 1)

    def test_listed_below_what_is_left_out(self) -> None:
        """Is not reported as missing: it is left out."""
        selection = TreeSelection(["b"], ["b/c/d", "a/b/c", "gone/x"])
        self.assertFalse(selection.may_take("b"))
        self.assertFalse(selection.takes("a/b", True))
        self.assertEqual(selection.unmet, ["gone/x"])

    def test_tags(self) -> None:
        """A name, or a name and what the file begins with."""
        self.assertEqual(directory_tag(".nobackup"), DirectoryTag(".nobackup"))
        self.assertEqual(directory_tag("T:a:b"), DirectoryTag("T", b"a:b"))
        self.assertEqual(len(CACHES.header), 43)
        for text in ("", ":x", "a/b", "..", "T:" + "x" * (MAX_HEADER + 1)):
            self.assertRaises(UsageError, directory_tag, text)

    def test_paths(self) -> None:
        """Of a list, below a directory or several."""
        self.assertEqual(
            paths_below("/home/u", ["a/b", "", "/home/u/c", "/home/u"]), ["a/b", "c", ""]
        )
        self.assertRaises(UsageError, paths_below, "/home/u", ["/home/uu/c"])
        self.assertEqual(paths_below_each(["/a"], ["b", "/a/c"]), {"/a": ["b", "c"]})
        self.assertEqual(
            paths_below_each(["/a", "/ab"], ["/ab/c", "", "/a/c"]), {"/a": ["c"], "/ab": ["c"]}
        )
        for wrong in ("c", "/abc/x"):
            self.assertRaises(UsageError, paths_below_each, ["/a", "/ab"], [wrong])

    def test_nonsense(self) -> None:
        """Is refused, and so is too much; what git ignores matches nothing."""
        for exclude in ([""], ["x" * 5000], ["x"] * (MAX_PATTERNS + 1)):
            self.assertRaises(UsageError, TreeSelection, exclude)
        selection = TreeSelection(["/", "!", "a\\"])
        self.assertTrue(selection.takes("a", True))
        self.assertEqual(len(selection.unmatched), 3)
        self.assertFalse(self.takes(["\\!keep"], "!keep"))
        for only in ("../x", "a/../../b", "/etc"):
            self.assertRaises(UsageError, TreeSelection, [], [only])
