"""What a local directory cannot hold is named, and paths lead where they say."""

from __future__ import annotations

import os
import unicodedata
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap, parse_cap
from pipegrid.errors import (
    CapError,
    DirectoryError,
    NoSuchChild,
    NotEnoughSharesError,
    SinkError,
    UsageError,
)
from pipegrid.tree import grid_paths as module
from pipegrid.tree.directory_reading import Listing, unpack
from pipegrid.tree.grid_paths import PathFinder, has_path, parse, resolve
from pipegrid.tree.local_files import NameCollisions, local_name
from tests import vectors
from tests.tree.support import FakeGrid, changing_cap, entry_bytes

TREES = vectors.load("trees")
CAP = "URI:DIR2-CHK:" + "a" * 26 + ":" + "a" * 52 + ":3:10:99"


class LocalNameTests(SynchronousTestCase):
    """Names of others on our disk."""

    def test_names_that_lead_elsewhere(self) -> None:
        """None of these becomes the name of a file; each is told of, and without its escape sequences."""
        for name in (
            "",
            ".",
            "..",
            "/",
            "a/b",
            "../x",
            "a\0b",
            "n" * 256,
            "\ud800",
            ".f.pipegrid-part",
        ):
            with self.assertRaises(SinkError, msg=name) as caught:
                local_name(name)
            said = str(caught.exception).replace("\ud800", "")  # which whoever prints it deals with
            self.assertTrue(said.isprintable(), said)
        with self.assertRaises(SinkError) as caught:
            local_name("x/\x1b[2J")
        self.assertIn("\\x1b", str(caught.exception))
        for exact in (b"", b"..", b"a/b", b"a\0", b"n" * 256):
            self.assertRaises(SinkError, local_name, "harmless", exact)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.text(max_size=6) | st.sampled_from(["..", ".", "../..", "a/..", "\\..", "~", "-rf"]))
    @example("\u2024\u2024")
    def test_any_name_stays_in_its_directory(self, name: str) -> None:
        """Whatever is taken is one component below the directory."""
        try:
            taken = local_name(name)
        except SinkError:
            return
        self.assertEqual(os.path.split(os.path.normpath(f"/target/{taken}")), ("/target", taken))

    def test_exact_bytes(self) -> None:
        """What is no UTF-8, or not composed, comes back as it was."""
        self.assertEqual(os.fsencode(local_name("caf\ufffd", b"caf\xe9")), b"caf\xe9")
        decomposed = unicodedata.normalize("NFD", "\xe9")
        self.assertEqual(local_name("\xe9", decomposed.encode()), decomposed)

    def test_collisions(self) -> None:
        """The same name twice is told of; names that differ in case, where the file system folds them."""
        exact = NameCollisions(folds=False)
        for name in ("a", "A", "\xe9", "e\u0301"):
            exact.take(name)
        self.assertRaises(SinkError, exact.take, "a")
        folding = NameCollisions(folds=True)
        folding.take("README")
        folding.take("\xe9")
        self.assertRaises(SinkError, folding.take, "Readme")
        self.assertRaises(SinkError, folding.take, "e\u0301")


class PathTests(SynchronousTestCase):
    """A cap and names."""

    def test_spellings(self) -> None:
        """Both ways to write a path, spaces around it, a slash at its end, prefixes, and names with dots."""
        for text, names in (
            (CAP, ()),
            (CAP + "/", ()),
            (f"  {CAP}/a/b ", ("a", "b")),
            (CAP + ":./a/b", ("a", "b")),
            (CAP + "/a:./b", ("a:.", "b")),
            (CAP + "/./..", (".", "..")),
            (CAP + "/e\u0301/", ("\xe9",)),
            (CAP + "/50%2F", ("50%2F",)),
        ):
            self.assertEqual(parse(text), (CAP, names), text)
        self.assertEqual(parse("imm." + CAP + "/x"), ("imm." + CAP, ("x",)))
        self.assertEqual(parse("home:a/b", {"home": CAP}), (CAP, ("a", "b")))
        self.assertTrue(has_path(CAP + "/a"))
        self.assertFalse(has_path(CAP))

    def test_mistakes(self) -> None:
        """Empty names, unknown aliases and what is no cap at all are a sentence, without a cap in it."""
        for text in (CAP + "//a", CAP + "/a//b", "home:a", "a/b", "", "/etc/passwd", "rubbish"):
            self.assertRaises(UsageError, parse, text)
        with self.assertRaises(UsageError) as caught:
            parse("x" + CAP + "/a")
        self.assertNotIn("a" * 20, str(caught.exception))
        for text, said in (
            ("home", "did you mean 'home:'?"),
            ("home/a", "did you mean 'home:'?"),
            ("hom/a", "written ALIAS:some/path"),
            (" ", "the path is empty; perhaps a variable is not set"),
        ):
            with self.assertRaises(UsageError) as caught:
                parse(text, {"home": CAP})
            self.assertIn(said, str(caught.exception))

    def test_resolving(self) -> None:
        """A listing for each name; what is missing, or below a file, is named."""
        grid = FakeGrid()
        big = b"x" * 100
        cap = grid.directory({"a": {"b": {"f": (big, {"mtime": 2.5}), "g": big}}, "file": b"x"})
        found: Any = self.done(resolve(grid, cap, ("a", "b", "f")))
        self.assertEqual((found.kind, found.names), ("file", ("a", "b", "f")))
        self.assertEqual(found.metadata_json, b'{"mtime": 2.5}')
        self.assertEqual(grid.reads, 3)
        self.assertEqual(self.done(resolve(grid, str(cap), ())).cap, cap)
        for names, said in (
            (("nix",), "'nix'"),
            (("a", "nix", "x"), "in 'a'"),
            (("file", "x"), "'file' is not a directory"),
            (("a\x1b",), "a\\x1b"),
        ):
            failure = self.failureResultOf(Deferred.fromCoroutine(resolve(grid, cap, names)))
            self.assertTrue(failure.check(NoSuchChild))
            self.assertIn(said, failure.getErrorMessage())
        failure = self.failureResultOf(Deferred.fromCoroutine(resolve(grid, "URI:CHK:x", ("a",))))
        self.assertTrue(failure.check(CapError))

    def test_many_paths(self) -> None:
        """A directory that many lead through is read once, also where they are followed at one time."""
        grid = FakeGrid()
        big = b"x" * 100
        cap = grid.directory({"a": {str(n): big + b"%d" % n for n in range(50)}, "b": {"f": big}})
        paths = PathFinder(grid)
        for n in range(50):
            self.assertEqual(self.done(paths.resolve(cap, ("a", str(n)))).names, ("a", str(n)))
        self.assertEqual(grid.reads, 2)
        grid.held = True
        waiting = [Deferred.fromCoroutine(paths.resolve(cap, ("b", name))) for name in "ffx"]
        self.assertEqual(grid.reads, 3)
        grid.release()
        for each in waiting[:2]:
            self.assertEqual(self.successResultOf(each).kind, "file")
        self.failureResultOf(waiting[2], NoSuchChild)

    def test_many_paths_through_what_is_broken(self) -> None:
        """All who wait are told; who comes later has it read again, as it may be there by then."""
        grid = FakeGrid()
        cap = grid.directory({"a": b"x" * 100})
        grid.broken.add(cap.file)
        grid.held = True
        paths = PathFinder(grid)
        waiting = [Deferred.fromCoroutine(paths.resolve(cap, ("a",))) for _ in range(2)]
        grid.release()
        for each in waiting:
            self.failureResultOf(each, NotEnoughSharesError)
        grid.broken.clear()
        grid.held = False
        self.assertEqual(self.done(paths.resolve(cap, ("a",))).kind, "file")

    def test_directories_beyond_what_is_kept(self) -> None:
        """Memory is bounded: what does not fit is read for each path."""
        self.patch(module, "KEPT_BYTES", 3000)
        grid = FakeGrid()
        cap = grid.directory({"a": b"x" * 100, "b": b"y" * 100})
        other = grid.directory({"a": b"x" * 100})
        paths = PathFinder(grid)
        for root, reads in ((cap, 1), (cap, 1), (other, 2), (other, 3)):
            self.done(paths.resolve(root, ("a",)))
            self.assertEqual(grid.reads, reads)

    def done(self, work: Any) -> Any:
        """Return the result of a coroutine that does not wait."""
        return self.successResultOf(Deferred.fromCoroutine(work))


class RecordedTests(SynchronousTestCase):
    """Directories that Tahoe-LAFS made."""

    def test_immutable_directories(self) -> None:
        """Names, kinds, caps and metadata are those that its own listing has."""
        for case in TREES["immutable_directories"]:
            cap = parse_cap(case["dircap"])
            assert isinstance(cap, DirectoryCap)
            listing = unpack(cap, bytes.fromhex(case["packed_hex"]))
            self.assertTrue(case["listing"])
            self.assertEqual(self.listed(listing), self.recorded(case["listing"]), case["name"])

    def test_backups(self) -> None:
        """So are those of a backup, whose entries say when files were changed."""
        directories = [each for each in TREES["backup"]["tree"] if each["type"] == "dirnode"]
        self.assertTrue(directories)
        for case in directories:
            cap = parse_cap(case["cap"])
            assert isinstance(cap, DirectoryCap)
            data = bytes.fromhex(case["packed_hex"])
            for entry in unpack(cap, data).entries:
                [child] = [
                    e for e in TREES["backup"]["tree"] if e["path"] == [*case["path"], entry.name]
                ]
                self.assertEqual(str(entry.cap), child["cap"])
                self.assertIn("st_mode", entry.metadata)

    def test_directories_that_can_change(self) -> None:
        """A read cap shows the names and read caps that Tahoe-LAFS shows to a read cap."""
        for case in TREES["mutable_directories"]:
            cap = parse_cap(case["ro_cap"])
            assert isinstance(cap, DirectoryCap)
            for version in case["versions"]:
                listing = unpack(cap, bytes.fromhex(version["packed_hex"]))
                recorded = [
                    (each["name"], each.get("ro_uri"), each["metadata"])
                    for each in version["listing_readonly"]
                ]
                found = [
                    (e.name, None if e.cap is None else str(e.cap), e.metadata)
                    for e in listing.entries
                ]
                self.assertEqual(found, recorded, case["name"])

    def listed(self, listing: Listing) -> list[tuple[str, str, str, Any]]:
        """Return what we read."""
        kinds = {"file": "filenode", "directory": "dirnode", "unknown": "unknown"}
        return [
            (e.name, kinds[e.kind], "" if e.cap is None else str(e.cap), e.metadata)
            for e in listing.entries
        ]

    def recorded(self, listing: list[dict[str, Any]]) -> list[tuple[str, str, str, Any]]:
        """Return what was recorded; there are entries without a cap."""
        return [(e["name"], e["type"], e.get("ro_uri", ""), e["metadata"]) for e in listing]


class DamagedListingTests(SynchronousTestCase):
    """Directories that are none."""

    def test_rubbish(self) -> None:
        """Bytes that are no directory are a sentence."""
        for data in (b"rubbish" * 20, b"5:abc", entry_bytes("a", "URI:LIT:")[:-3], b"\xff" * 100):
            self.assertRaises(DirectoryError, unpack, changing_cap(1), data)
