"""A mirror in a grid: stored once, brought back whole, and nothing of it believed without its hash."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, is_literal_size
from pipegrid.core.packed_directory import (
    PackedChild,
    directory_cap,
    pack_immutable,
    unpack_immutable,
)
from pipegrid.errors import CapError, NotEnoughSharesError, PipegridError, UnhappyError
from pipegrid.mirror import NEW_MANIFEST
from pipegrid.mirror.archive_file import HIDDEN, ArchiveFile, BadEntry, MirrorError, wanted
from pipegrid.mirror.archive_from_grid import GridFetch
from pipegrid.mirror.archive_to_grid import GRID_CAP, NOTES, GridStore
from pipegrid.mirror.file_list_format import list_line
from pipegrid.mirror.mirror_api import Mirror
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transfer.results import CheckResult
from tests.mirror.archive import sha
from tests.mirror.folded import fold_cases

FILES = {
    "pool/a/a 1.deb": b"a" * 100,
    "pool/a/same.deb": b"a" * 100,
    "pool/b/é.deb": b"",
    "top": b"x",
    "dists/sid/main/Packages": b"index" * 50,
    "dists/sid/Release": b"release",
}


@attrs.define
class Stored:
    """What a put gives."""

    cap: ChkCap | LitCap


class MemoryGrid:
    """Keeps files by the hash of their bytes; ``lost`` cannot be read, ``full`` takes no more."""

    def __init__(self) -> None:
        self.files: dict[ChkCap, bytes] = {}
        self.lost: set[Any] = set()
        self.puts: list[bytes] = []
        self.reads = 0
        self.room: int | None = None

    def add(self, data: bytes) -> ChkCap | LitCap:
        """Store a file; short ones live in their caps."""
        if is_literal_size(len(data)):
            return LitCap(data)
        digest = bytes.fromhex(sha(data))
        cap = ChkCap(digest[:16], digest, 3, 10, len(data))
        self.files[cap] = data
        return cap

    def _put(self, source: Any) -> Stored | Failure:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if self.room is not None:
            self.room -= 1
            if self.room < 0:
                return Failure(UnhappyError("no room", 1, 7))
        self.puts.append(data)
        return Stored(self.add(data))

    def put_many(self, sources: Sequence[Any]) -> Deferred[list[Any]]:
        """See ``Grid``."""
        return succeed([self._put(source) for source in sources])

    def check(self, cap: Any) -> Deferred[CheckResult]:
        """See ``Grid``; of what is found only whether it can be read."""
        there = cap.file in self.files and cap not in self.lost
        return succeed(CheckResult(cap, there, there, {}, [], 0, 3, 10, []))

    def read(self, cap: Any) -> Deferred[bytes]:
        """See ``Grid``."""
        self.reads += 1
        if cap in self.lost:
            return fail(NotEnoughSharesError("too few shares", 1, 3))
        return succeed(cap.data if isinstance(cap, LitCap) else self.files[cap])

    def get(self, cap: Any, sink: Any) -> Deferred[Any]:
        """See ``Grid``."""
        return self.read(cap).addCallback(sink.write)


class GridCase(SynchronousTestCase):
    """A directory that was mirrored, and a grid."""

    def setUp(self) -> None:
        self.grid = MemoryGrid()
        self.source = Path(self.mktemp())
        self.write(FILES)

    def write(self, files: dict[str, bytes]) -> None:
        """Make the directory as a complete run leaves it."""
        entries = []
        for path, data in files.items():
            (self.source / path).parent.mkdir(parents=True, exist_ok=True)
            (self.source / path).write_bytes(data)
            entries.append(wanted(path, len(data), {"sha256": sha(data)}))
        mirror = self.mirror(self.source)
        self.successResultOf(mirror.complete(entries))
        self.successResultOf(mirror.close())

    def mirror(self, path: Path, **options: Any) -> Mirror:
        """Open a directory."""
        return Mirror(Clock(), (), str(path), workers=InlineWorkers(), **options)

    def store(self, again: bool = False, name: str = "grid") -> DirectoryCap:
        """Store it."""
        mirror = self.mirror(self.source)
        self.storing = GridStore(mirror, self.grid, name, again)
        try:
            return self.successResultOf(Deferred.fromCoroutine(self.storing.store()))
        finally:
            self.successResultOf(mirror.close())

    def fetch(self, cap: object, path: Path, **options: Any) -> tuple[GridFetch, list[str]]:
        """Bring it back."""
        mirror = self.mirror(path)
        try:
            fetch = GridFetch(mirror, self.grid, str(cap))
            outcome = Deferred.fromCoroutine(fetch.fetch(**options))
            failure: Any = outcome.result if isinstance(outcome.result, Failure) else None
            if failure is not None:
                outcome.addErrback(lambda _: None)
                failure.raiseException()
            return fetch, self.successResultOf(outcome)
        finally:
            self.successResultOf(mirror.close())

    def found(self, path: Path) -> dict[str, bytes]:
        """What is in a directory, our own things apart."""
        return {
            str(each.relative_to(path)): each.read_bytes()
            for each in path.rglob("*")
            if each.is_file() and HIDDEN not in each.parts
        }

    def refused(self, words: str, error: type[Exception], cap: object, path: Path) -> None:
        """Look that it ends in one sentence."""
        found = self.assertRaises(error, self.fetch, cap, path)
        self.assertIn(words, str(found))
        self.assertNotIn("\n", str(found))


class StoreTests(GridCase):
    """``GridStore``."""

    def test_there_and_back(self) -> None:
        """All of it comes back, also the list for ``verify``; each content is stored once."""
        cap = self.store()
        self.assertEqual(self.grid.puts.count(b"a" * 100), 1)
        self.assertEqual((self.source / GRID_CAP).read_text(), f"{cap}\n")
        self.assertEqual((self.source / GRID_CAP).stat().st_mode & 0o777, 0o600)
        self.assertEqual((self.source / NOTES).stat().st_mode & 0o777, 0o600)
        back = Path(self.mktemp())
        fetch, _ = self.fetch(cap, back)
        self.assertEqual(self.found(back), FILES)
        self.assertEqual((fetch.report.fetched_files, fetch.report.failed_files), (6, 0))
        mirror = self.mirror(back, paranoid=True)
        self.assertEqual(self.successResultOf(mirror.verify()).present_files, 6)
        self.successResultOf(mirror.close())
        reads = self.grid.reads
        fetch, _ = self.fetch(cap, back)
        self.assertEqual((fetch.report.fetched_files, self.grid.reads - reads), (0, 2))

    def test_is_a_tree(self) -> None:
        """Directories are what any client of the grid can walk."""
        at: Any = self.store()
        for name in ("pool", "a", "a 1.deb"):
            children = unpack_immutable(self.grid.files[at.file])
            at = next(child.cap for child in children if child.name == name)
        self.assertEqual(self.grid.files[at], b"a" * 100)

    def test_only_what_is_new(self) -> None:
        """A second run stores nothing; a changed file and the directories above it are stored alone."""
        first = self.store()
        self.grid.puts.clear()
        # The list is stored each time: its hash is not noted.
        self.assertEqual((self.store(), self.storing.stored_files), (first, 0))
        self.assertEqual(len(self.grid.puts), 1)
        self.grid.puts.clear()
        self.write({**FILES, "pool/b/é.deb": b"new"})
        self.assertNotEqual(self.store(), first)
        self.assertEqual((self.storing.stored_files, len(self.grid.puts)), (1, 5))
        self.grid.puts.clear()
        self.store(again=True)
        self.assertEqual(self.storing.stored_files, 5)
        self.store(name="another grid")
        self.assertEqual(self.storing.stored_files, 5)

    def test_a_grid_that_has_lost_it(self) -> None:
        """Or another one, to which the same client was led: what is noted is not believed."""
        first = self.store()
        self.grid.files.clear()
        self.assertEqual((self.store(), self.storing.stored_files), (first, 5))
        back = Path(self.mktemp())
        self.fetch(first, back)
        self.assertEqual(self.found(back), FILES)
        for text in (b"no cap", b"\xff"):
            (self.source / GRID_CAP).write_bytes(text)
            self.store()
            self.assertEqual(self.storing.stored_files, 0)

    def test_cut_off(self) -> None:
        """What was stored before a failure is noted; half a line of a note, or a foreign one, is not read."""
        self.grid.room = 5
        error = self.failureResultOf
        mirror = self.mirror(self.source)
        storing = GridStore(mirror, self.grid, "grid")
        failure = error(Deferred.fromCoroutine(storing.store()), MirrorError)
        self.assertIn("could not be stored in the grid", str(failure.value))
        self.assertNotIn("\n", str(failure.value))
        self.successResultOf(mirror.close())
        self.assertFalse((self.source / GRID_CAP).exists())
        self.grid.room = None
        with open(self.source / NOTES, "ab") as file:
            file.write(b"%s URI:CHK:half\n%s URI" % (sha(b"x").encode(), sha(b"x").encode()))
        cap = self.store()
        self.assertEqual(self.storing.stored_files, 1)
        back = Path(self.mktemp())
        self.fetch(cap, back)
        self.assertEqual(self.found(back), FILES)
        self.store()
        self.assertEqual(self.storing.stored_files, 0)

    def test_not_complete(self) -> None:
        """A mirror that was never complete is not stored."""
        self.source = Path(self.mktemp())
        mirror = self.mirror(self.source)
        storing = GridStore(mirror, self.grid, "grid")
        self.failureResultOf(Deferred.fromCoroutine(storing.store()), MirrorError)
        self.successResultOf(mirror.close())


class FetchTests(GridCase):
    """``GridFetch``."""

    def setUp(self) -> None:
        super().setUp()
        self.back = Path(self.mktemp())

    def tree(self, entries: list[ArchiveFile], **children: Any) -> DirectoryCap:
        """Return the cap of a mirror with such a list."""
        listed = self.grid.add(b"".join(map(list_line, entries)))
        made = [
            PackedChild(HIDDEN, listed),
            *(PackedChild(name, cap) for name, cap in children.items()),
        ]
        return directory_cap(self.grid.add(pack_immutable(made)))

    def test_lost(self) -> None:
        """A file that cannot be had is named; indexes stay; the next run fetches only what is missing."""
        cap = self.store()
        lost = self.grid.add(b"a" * 100)
        self.grid.lost.add(lost)
        fetch, _ = self.fetch(cap, self.back, delete=True)
        self.assertEqual(
            [path for path, _ in fetch.report.failed], ["pool/a/a 1.deb", "pool/a/same.deb"]
        )
        self.assertEqual(set(self.found(self.back)), {"top", "pool/b/é.deb"})
        self.assertTrue((self.back / HIDDEN / NEW_MANIFEST).exists())  # so --delete may go on there
        self.grid.lost.clear()
        fetch, _ = self.fetch(cap, self.back)
        self.assertEqual((fetch.report.present_files, fetch.report.fetched_files), (2, 4))
        self.assertEqual(self.found(self.back), FILES)
        self.assertEqual(os.listdir(self.back / HIDDEN / "incoming"), [])

    def test_delete_and_dry_run(self) -> None:
        """What does not belong to it goes if asked; a dry run changes nothing."""
        cap = self.store()
        self.back.mkdir()
        (self.back / "other").write_bytes(b"o")
        fetch, removed = self.fetch(cap, self.back, delete=True, dry_run=True)
        self.assertEqual((fetch.report.fetched_files, removed), (6, ["other"]))
        self.assertEqual(self.found(self.back), {"other": b"o"})
        self.fetch(cap, self.back, delete=True)
        self.assertEqual(self.found(self.back), FILES)

    def test_long_lists(self) -> None:
        """A dry run reads a list by the piece: its memory does not grow with it."""
        entries = [
            wanted(
                f"pool/main/p/package{n}/package{n}_1.0_amd64.deb", n, {"sha256": sha(b"%d" % n)}
            )
            for n in range(30_000)
        ]
        cap = self.tree(entries)
        twice = self.tree([*entries, entries[0]])
        size = 120 * len(entries)
        del entries
        tracemalloc.start()
        try:
            fetch, _ = self.fetch(cap, self.back, dry_run=True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.assertEqual(fetch.report.fetched_files, 30_000)
        self.assertLess(peak, size)
        with self.assertRaises(BadEntry) as caught:
            self.fetch(twice, self.back, dry_run=True)
        self.assertIn("package0_1.0_amd64.deb' twice", str(caught.exception))

    def test_wrong_files(self) -> None:
        """A file with another hash or size than the list says never gets a name."""
        good, other = wanted("a", 3, {"sha256": sha(b"abc")}), self.grid.add(b"abd")
        for cap in (other, self.grid.add(b"abcd"), directory_cap(other)):
            fetch, _ = self.fetch(self.tree([good], a=cap), self.back)
            self.assertEqual(fetch.report.failed_files, 1)
            self.assertEqual(self.found(self.back), {})
        fetch, _ = self.fetch(self.tree([good]), self.back)
        self.assertIn("no directory in the grid has it", fetch.report.failed[0][1])

    def test_names_that_are_one_here(self) -> None:
        """The second file of two that would be one is named, and does not get the first one's place."""
        files = {"a/x": b"first" * 20, "a/X": b"other" * 20, "b": b"b" * 100}
        self.write(files)
        cap = self.store()
        fold_cases(self, os.path.abspath(self.back) + "/")
        for _ in range(2):
            fetch, _ = self.fetch(cap, self.back, delete=True)
            ((path, why),) = fetch.report.failed
            self.assertEqual(path, "a/X")
            self.assertIn("it would be the same file as 'a/x'", why)
            self.assertEqual(self.found(self.back), {path: files[path] for path in ("a/x", "b")})

    def test_hostile_trees(self) -> None:
        """Caps that are none, lists that lead out or name twice: one sentence, and nothing is written."""
        data = self.grid.add(b"data")
        self.refused("is not a mirror", MirrorError, directory_cap(self.grid.add(b"")), self.back)
        self.assertRaises(CapError, self.fetch, data, self.back)
        self.refused("not a directory", PipegridError, directory_cap(data), self.back)
        huge = ChkCap(b"1" * 16, b"2" * 32, 3, 10, 1 << 40)
        self.refused("no mirror's has", MirrorError, directory_cap(huge), self.back)
        for text, words in (
            (b"%s 4 ../x\n" % sha(b"data").encode(), "leads out of the mirror"),
            (b"%s 4 a\n" % sha(b"data").encode() * 2, "names 'a' twice"),
            (b"hello\n", "is not SHA-256, size and path"),
            (b"%s 4 a\n%s 4 a/b\n" % (sha(b"data").encode(), sha(b"data").encode()), "files below"),
        ):
            root = pack_immutable(
                [PackedChild(HIDDEN, self.grid.add(text)), PackedChild("..", data)]
            )
            self.refused(words, BadEntry, directory_cap(self.grid.add(root)), self.back)
        self.assertEqual(self.found(self.back), {})
        self.assertFalse((self.back.parent / "x").exists())

    def test_one_directory_under_many_names(self) -> None:
        """It is read once, and of it is kept what is wanted."""
        data = b"x" * 100
        file = self.grid.add(data)
        inner = pack_immutable([PackedChild(f"{number}", file) for number in range(500)])
        one = directory_cap(self.grid.add(inner))
        entries = [
            ArchiveFile(f"d{number}/7", 100, "sha256", bytes.fromhex(sha(data)))
            for number in range(300)
        ]
        listed = self.grid.add(b"".join(map(list_line, entries)))
        names = [PackedChild(each.path.split("/")[0], one) for each in entries]
        root = self.grid.add(pack_immutable([PackedChild(HIDDEN, listed), *names]))
        path = Path(self.mktemp())
        self.fetch(directory_cap(root), path)
        self.assertEqual(self.found(path), {each.path: data for each in entries})
        self.assertEqual(self.grid.reads, 3 + len(entries))  # root, list, the directory, and files

    def test_links(self) -> None:
        """A symbolic link in DEST is not followed."""
        cap = self.store()
        outside = Path(self.mktemp())
        outside.mkdir()
        self.back.mkdir()
        (self.back / "pool").symlink_to(outside.absolute())
        self.refused("a symbolic link", BadEntry, cap, self.back)
        self.assertEqual(list(outside.iterdir()), [])
        shutil.rmtree(self.back)
