"""A directory as an archive: whole or visibly not, bounded, harmless to the machine that extracts it."""

from __future__ import annotations

import io
import os
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.logger import ILogObserver, LogEvent, formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.core import base32
from pipegrid.core.caps import Cap, DirectoryCap, LitCap, UnknownCap
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.errors import AccessProhibited, DirectoryError, NotEnoughSharesError
from pipegrid.gateway.body_spool import BodyRefused, BodySpool, SpoolSpace
from pipegrid.gateway.http_response import ResponseStream
from pipegrid.gateway.web_api.check_json import storage_index_text
from pipegrid.gateway.web_api.download_turns import SMALL_BYTES
from pipegrid.gateway.web_ui import directory_archive
from pipegrid.gateway.web_ui.directory_archive import (
    LOGGED_INDEXES,
    DirectoryArchive,
    MissingMembers,
)
from pipegrid.gateway.web_ui.zip_stream import (
    MAX_NAME_BYTES,
    MemberNames,
    ZipMember,
    ZipStream,
    changed_at,
    harmless_name,
)
from tests.gateway.gateway_world import CHK_DATA, GatewayTestCase
from tests.gateway.web_ui.interface_world import InterfaceTestCase

LARGE = bytes(range(256)) * 4096  # a mebibyte: streamed, and not fetched ahead
CHANGED_S = 1_700_000_000


class _Http:
    """The response, and its client."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.producer: Any = None

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.producer = None

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


class ArchiveTestCase(GatewayTestCase):
    """Sends archives of a grid in virtual time."""

    def setUp(self) -> None:
        super().setUp()
        self.http = _Http()
        self.stream = ResponseStream(self.http)
        self.space = SpoolSpace(Path(self.mktemp()), 0)
        self.listing, self.missing = BodySpool(self.space), BodySpool(self.space)
        self.addCleanup(self.listing.close)
        self.addCleanup(self.missing.close)

    def start(self, cap: DirectoryCap, top: str = "photos") -> Deferred[None]:
        turns = DeferredSemaphore(4)
        archive = DirectoryArchive(self.grid, self.stream, self.listing, self.missing, turns)
        return Deferred.fromCoroutine(archive.send(cap, top))

    def archive(self, cap: DirectoryCap) -> zipfile.ZipFile:
        """Return the whole archive of a directory."""
        self.world.run(self.start(cap))
        return zipfile.ZipFile(io.BytesIO(self.http.data))

    def tree(self) -> DirectoryCap:
        sub = self.make_directory(large=self.put(LARGE), empty=LitCap(b""))
        mutable = self.world.run(self.grid.create_mutable(b"mutable")).cap
        grown = self.world.run(self.grid.create_mutable(LARGE, format="mdmf")).cap
        root = self.make_directory(
            chk=self.put(CHK_DATA), lit=LitCap(b"hello"), m=mutable, grown=grown, sub=sub
        )
        metadata = {"mtime": CHANGED_S, "st_mode": 0o104755}
        self.world.run(
            self.grid.directory(root).change([Link("run me", LitCap(b"#!"), metadata=metadata)])
        )
        return root


class WholeTests(ArchiveTestCase):
    def test_all_of_a_tree(self) -> None:
        """Files of every kind, directories, times; a program stays one and gets no other right."""
        with self.archive(self.tree()) as found:
            self.assertIsNone(found.testzip())
            content = {one.filename: found.read(one) for one in found.infolist()}
            program = found.getinfo("photos/run me")
        self.assertEqual(
            content,
            {
                "photos/": b"",
                "photos/chk": CHK_DATA,
                "photos/grown": LARGE,
                "photos/lit": b"hello",
                "photos/m": b"mutable",
                "photos/run me": b"#!",
                "photos/sub/": b"",
                "photos/sub/empty": b"",
                "photos/sub/large": LARGE,
            },
        )
        self.assertEqual(program.external_attr >> 16, 0o100755)
        self.assertEqual(program.date_time, (2023, 11, 14, 22, 13, 20))

    def test_unzip(self) -> None:
        """Another program extracts it, with its names and times."""
        path = Path(self.mktemp()).resolve()
        path.mkdir()
        with self.archive(self.make_directory(grün=LitCap(b"x"), big=self.put(LARGE))):
            (path / "a.zip").write_bytes(self.http.data)
        subprocess.run(["unzip", "-q", "a.zip"], cwd=path, check=True, env={"LANG": "C.UTF-8"})
        self.assertEqual((path / "photos/grün").read_bytes(), b"x")
        self.assertEqual((path / "photos/big").read_bytes(), LARGE)

    def test_one_file_at_two_paths(self) -> None:
        """It is there twice; so is a directory."""
        shared = self.make_directory(x=self.put(CHK_DATA))
        with self.archive(self.make_directory(a=shared, b=shared)) as found:
            self.assertEqual(found.read("photos/a/x"), found.read("photos/b/x"))

    def test_round_trips(self) -> None:
        """Small files are fetched at once, so that forty cost as much time as a few."""
        children = {f"f{n}": self.put(b"%d" % n + CHK_DATA) for n in range(40)}
        root = self.make_directory(**children)
        began_s = self.world.client.clock.seconds()
        with self.archive(root) as found:
            self.assertEqual(len(found.namelist()), 41)
        self.assertLess(self.world.round_trips(began_s), 8)


class MissingTests(ArchiveTestCase):
    """What cannot be read is named in the last member and in the log; the rest is there."""

    def check_missing(self, root: DirectoryCap, *expected: tuple[str, str]) -> None:
        """Check which paths the last member of an archive names, each with words of the reason."""
        log = self.capture_log()
        with self.archive(root) as found:
            self.assertIsNone(found.testzip())
            names = found.namelist()
            self.assertEqual(names.pop(), "MISSING FROM photos.txt")
            text = found.read("MISSING FROM photos.txt").decode()
            self.assertEqual(found.read("photos/a"), b"there")
            self.assertEqual(found.read("photos/z"), b"sent")
        head, *listed = text.split("\n\n")
        self.assertIn("This archive of 'photos' is not complete", head)
        for part, (path, words) in zip(listed, expected, strict=True):
            self.assertEqual(part.splitlines()[0], path)
            self.assertIn(words, part.splitlines()[1])
            self.assertNotIn(path, names)
        self.assertNotIn("URI:", text)
        [line] = [line for line in log if "an archive was sent without" in line]
        self.assertIn(f"without {len(expected)} of its files", line)

    def capture_log(self) -> list[str]:
        lines: list[str] = []

        @implementer(ILogObserver)
        def note(event: LogEvent) -> None:
            lines.append(formatEvent(event))

        globalLogPublisher.addObserver(note)
        self.addCleanup(globalLogPublisher.removeObserver, note)
        return lines

    def around(self, **children: Cap) -> DirectoryCap:
        return self.make_directory(a=LitCap(b"there"), z=LitCap(b"sent"), **children)

    def test_lost_files(self) -> None:
        """A small one, a large one and a mutable one, with their storage indexes in the log."""
        small, large = self.put(CHK_DATA), self.put(LARGE)
        mutable = self.world.run(self.grid.create_mutable(b"mutable")).cap
        sub = self.make_directory(small=small, good=self.put(CHK_DATA + b"!"))
        root = self.around(sub=sub, large=large, mutable=mutable)
        for lost in (small, large, mutable):
            self.delete_shares(lost, keep=2)
        log = self.capture_log()
        self.check_missing(
            root,
            ("photos/large", "shares"),
            ("photos/mutable", "shares"),
            ("photos/sub/small", "shares"),
        )
        [line] = [line for line in log if "an archive was sent without" in line]
        for lost in (small, large, mutable):
            self.assertIn(storage_index_text(lost), line)
        with zipfile.ZipFile(io.BytesIO(self.http.data)) as found:
            self.assertEqual(found.read("photos/sub/good"), CHK_DATA + b"!")

    def test_lost_in_the_middle(self) -> None:
        """A part of a large file is in the archive's bytes, and is no member of it."""
        lost = self.put(LARGE * 4)
        root = self.around(b=lost)
        index = base32.decode(storage_index_text(lost))
        for server in self.world.servers:
            for share in Path(server.store._paths.directory(index)).iterdir():
                with share.open("r+b") as file:
                    file.seek(len(LARGE))  # three quarters of its blocks are before that
                    file.write(b"damaged" * 1000)
        self.check_missing(root, ("photos/b", "1 good share"))
        self.assertIn(LARGE, self.http.data)
        self.assertLess(len(self.http.data), 4 * len(LARGE))
        path = Path(self.mktemp()).resolve()
        path.mkdir()
        (path / "a.zip").write_bytes(self.http.data)
        subprocess.run(["unzip", "-q", "a.zip"], cwd=path, check=True)
        self.assertEqual(sorted(os.listdir(path / "photos")), ["a", "z"])

    def test_lost_directory(self) -> None:
        dead = self.make_directory()
        root = self.around(b=dead)
        self.delete_shares(dead)
        self.check_missing(root, ("photos/b", "shares"))

    def test_a_directory_in_itself(self) -> None:
        root = self.around()
        self.world.run(self.grid.directory(root).link("again", root))
        self.check_missing(root, ("photos/again", "contains itself"))

    def test_unknown_object(self) -> None:
        root = self.around(b=UnknownCap("ro.URI:FUTURE:abc"))
        self.check_missing(root, ("photos/b", "of a kind"))

    def test_too_long_path(self) -> None:
        self.patch(directory_archive, "MAX_PATH_BYTES", 24)
        root = self.around(b=self.make_directory(**{"n" * 20: LitCap(b"x")}))
        self.check_missing(root, (f"photos/b/{'n' * 20}", "more than 24 bytes"))

    def test_blocked(self) -> None:
        """What ``access.blacklist`` blocks is not in an archive either."""
        blocked = self.put(CHK_DATA)

        def check_access(cap: object) -> None:
            if cap == blocked:
                raise AccessProhibited("it is blocked")

        self.patch(self.grid, "check_access", check_access)
        self.check_missing(self.around(b=blocked), ("photos/b", "It is blocked."))
        self.assertNotIn(CHK_DATA, self.http.data)

    def test_many(self) -> None:
        """Their list goes to a file, and the log names a few."""
        missing = MissingMembers(self.missing)
        cap = self.put(CHK_DATA)
        for number in range(3000):
            missing.add(f"photos/{'n' * 5000}{number}", cap, NotEnoughSharesError("lost", 3, 2))
        self.assertGreater(self.space.used_bytes, 3000 * 4000)
        log = self.capture_log()
        archive = ZipStream(self.stream.write, self.listing)
        self.run_now(missing.send(archive, self.stream, "photos"))
        missing.log()
        for piece in archive.finish():
            archive.write_listing(piece)
        archive.close()
        with zipfile.ZipFile(io.BytesIO(self.http.data)) as found:
            self.assertEqual(found.read("MISSING FROM photos.txt").count(b"Lost.\n"), 3000)
        self.assertEqual(log[-1].count(storage_index_text(cap)), LOGGED_INDEXES)
        self.assertIn("and 2980 more", log[-1])


class VisiblyBrokenTests(ArchiveTestCase):
    """If the tree cannot be walked to its end, what has arrived is refused by who opens it."""

    def check_broken(self, root: DirectoryCap, error: type[Exception]) -> None:
        with self.assertRaises(error) as raised:
            self.world.run(self.start(root))
        self.assertNotIn("URI:", str(raised.exception))
        with self.assertRaises(zipfile.BadZipFile):
            zipfile.ZipFile(io.BytesIO(self.http.data))

    def test_lost_root(self) -> None:
        """Nothing has been written, so that the response is an error like any other."""
        root = self.make_directory()
        self.delete_shares(root)
        self.check_broken(root, NotEnoughSharesError)
        self.assertFalse(self.stream.has_begun)

    def test_too_many_objects(self) -> None:
        limits = directory_archive.LIMITS._replace(objects=3)
        self.patch(directory_archive, "LIMITS", limits)
        root = self.make_directory(**{f"f{n}": LitCap(b"there") for n in range(5)})
        self.check_broken(root, DirectoryError)
        self.assertIn(b"there", self.http.data)

    def test_no_space_for_the_list(self) -> None:
        """A disk that is full ends the archive, since what is missing could not be named."""
        lost = self.put(CHK_DATA)
        root = self.make_directory(a=LitCap(b"there"), b=lost)
        self.delete_shares(lost)
        self.missing.refuse(BodyRefused("full", 507))
        self.check_broken(root, BodyRefused)


class PaceTests(ArchiveTestCase):
    """A reader that is slow, or leaves."""

    def test_slow_reader(self) -> None:
        """What is not read is not fetched, but for a bounded amount; then it goes on where it was."""
        self.patch(directory_archive, "AHEAD_BYTES", 3 * SMALL_BYTES)
        names = [f"f{n}" for n in range(12)]
        data = {name: name.encode() * (SMALL_BYTES // 4) for name in names}
        root = self.make_directory(**{name: self.put(each) for name, each in data.items()})
        self.stream.write(b"")
        self.stream.pauseProducing()
        reads: list[object] = []
        read = self.grid.read

        def note(cap: Any, *rest: int) -> Deferred[bytes]:
            reads.append(cap)
            return read(cap, *rest)

        self.patch(self.grid, "read", note)
        running = self.start(root)
        self.world.clock.advance(50)
        self.assertLess(len(reads), 9)
        self.assertLess(len(self.http.data), 1000)
        self.stream.resumeProducing()
        self.world.run(running)
        with zipfile.ZipFile(io.BytesIO(self.http.data)) as found:
            self.assertEqual({name: found.read(f"photos/{name}") for name in names}, data)

    def test_slow_reader_of_a_large_file(self) -> None:
        """The servers are slowed down, and not this process filled."""
        root = self.make_directory(a=self.put(LARGE * 4))
        running = self.start(root)
        write = self.http.write

        def write_and_pause(data: bytes) -> None:
            write(data)
            if len(self.http.data) > len(LARGE):
                self.stream.pauseProducing()

        self.http.write = write_and_pause  # type: ignore[method-assign]
        self.world.clock.advance(50)
        self.assertLess(len(self.http.data), 3 * len(LARGE))
        self.http.write = write  # type: ignore[method-assign]
        self.stream.resumeProducing()
        self.world.run(running)
        with zipfile.ZipFile(io.BytesIO(self.http.data)) as found:
            self.assertEqual(found.read("photos/a"), LARGE * 4)

    def test_a_client_that_leaves(self) -> None:
        """All that runs for it ends, whatever it waits for."""
        for wait_s in (0, 0.02, 0.05, 0.1, 0.2, 50):
            root = self.make_directory(
                **{f"f{n}": self.put(b"%d" % n + CHK_DATA) for n in range(5)}, z=self.put(LARGE)
            )
            running = self.start(root)
            if wait_s == 50:
                self.stream.pauseProducing()
            self.world.clock.advance(wait_s)
            running.cancel()
            if running.called:
                running.addErrback(lambda failure: failure.trap(CancelledError))
            self.world.clock.advance(1)
            self.stream.resumeProducing()
        self.flushLoggedErrors()


class ArchiveNumberTests(InterfaceTestCase):
    """How many archives are sent at a time."""

    def test_number(self) -> None:
        """More archives than may be are refused; one that ended makes space."""
        path = f"/uri/{quote(str(self.make_directory()), safe='')}/?t=archive"
        for number in range(self.site.limits.archives):
            self.assertEqual(self.get(path).status, 200)
            self.assertTrue(self.site.archives.acquire().called, number)
        refused = self.get(path)
        self.assertEqual((refused.status, refused.headers["retry-after"]), (503, "60"))
        self.assertIn(b"8 archives", refused.body)
        self.site.archives.release()
        self.assertEqual(self.get(path).status, 200)


class NameTests(SynchronousTestCase):
    """Names of every kind, made harmless."""

    def test_harmful_names(self) -> None:
        for name, expected in (
            ("plain name.txt", "plain name.txt"),
            ("grün.txt", "grün.txt"),
            ("..", "__"),
            (".", "_"),
            ("", "_"),
            ("../../etc/passwd", ".._.._etc_passwd"),
            ("/etc/passwd", "_etc_passwd"),
            ("C:\\Windows\\x", "C__Windows_x"),
            ("file:stream", "file_stream"),
            ("CON", "_CON"),
            ("nul.txt", "_nul.txt"),
            ("com1 .log", "_com1 .log"),
            ("LPT\u00b9", "_LPT\u00b9"),
            ("name. ", "name__"),
            ("a\0b\nc\x1b[2J", "a_b_c_[2J"),
            ("photo\u202egpj.exe", "photo_gpj.exe"),
            ("half \ud800", "half _"),
            (".bashrc", ".bashrc"),
        ):
            self.assertEqual(harmless_name(name), expected)

    @given(st.text(st.characters(codec=None), max_size=300))
    def test_any_name(self, name: str) -> None:
        """Whatever it is, it stays one component, short, encodable, and the same when made harmless again."""
        safe = harmless_name(name)
        self.assertNotIn(safe, ("", ".", ".."))
        self.assertFalse(set(safe) & set('/\\:*?"<>|\0'))
        self.assertTrue(safe.isprintable())
        self.assertLessEqual(len(safe.encode()), MAX_NAME_BYTES + 1)
        self.assertFalse(safe.endswith((".", " ")))

    def test_names_that_meet(self) -> None:
        """What one file system takes for the same gets a number, which is no other's name either."""
        names = MemberNames()
        given_names = ["a.txt", "A.TXT", "a (2).txt", "a:txt", "a?txt", "ﬁ", "fi", "é", "e\u0301"]
        taken = [names.take(name) for name in given_names]
        self.assertEqual(taken[:4], ["a.txt", "A (2).TXT", "a (2) (2).txt", "a_txt"])
        self.assertEqual(taken[4:6], ["a_txt (2)", "ﬁ"])
        self.assertEqual(len({each.casefold() for each in taken}), len(given_names))

    def test_many_names_that_meet(self) -> None:
        """Each costs about the same, however many there are."""
        names = MemberNames()
        taken = {names.take("x" * 300) for n in range(5000)}
        self.assertEqual(len(taken), 5000)

    def test_times_that_make_no_sense(self) -> None:
        for metadata in (
            {},
            {"mtime": "x"},
            {"mtime": -1},
            {"mtime": 1e300},
            {"mtime": float("nan")},
        ):
            self.assertIsNone(changed_at(metadata))
        self.assertEqual(changed_at({"tahoe": {"linkmotime": 5.5}}), 5)
        for changed_s in (0, 315_532_799, 2**31 - 1):
            written: list[bytes] = []
            listing = BodySpool(SpoolSpace(Path("unused"), 0))
            archive = ZipStream(written.append, listing)
            archive.add(ZipMember("a", 1, changed_s), b"x")
            for piece in archive.finish():
                archive.write_listing(piece)
            archive.close()
            with zipfile.ZipFile(io.BytesIO(b"".join(written))) as found:
                self.assertEqual(found.read("a"), b"x")


class LargeTests(SynchronousTestCase):
    """Sizes beyond 32 bits, and a list of members beyond memory."""

    def test_more_than_four_gibibytes(self) -> None:
        """Its sizes and the offsets after it are whole; ``zipfile`` reads it back from a sparse file."""
        without_sums = self.patch(zlib, "crc32", lambda data, before=0: 0)  # most of the time
        path = Path(self.mktemp())
        with path.open("wb") as file:
            skipped = 0

            def write(data: bytes) -> None:
                nonlocal skipped
                if data is hole:
                    file.seek(len(data), 1)
                else:
                    file.write(data)

            hole = bytes(64 << 20)
            size = 65 * len(hole)
            listing = BodySpool(SpoolSpace(Path(self.mktemp()), 0))
            self.addCleanup(listing.close)
            archive = ZipStream(write, listing)
            archive.begin(ZipMember("huge", size))
            for _ in range(65):
                archive.write(hole)
            archive.end()
            without_sums.restore()
            archive.add(ZipMember("after", 5), b"after")
            for piece in archive.finish():
                archive.write_listing(piece)
            archive.close()
        with zipfile.ZipFile(path) as found:
            self.assertEqual(found.getinfo("huge").file_size, size)
            self.assertEqual(found.read("after"), b"after")
            with found.open("huge") as member:
                self.assertEqual(member.read(1000), bytes(1000))

    def test_a_hundred_thousand_members(self) -> None:
        """Their list goes to a file, and ``zipfile`` counts them all."""
        space = SpoolSpace(Path(self.mktemp()), 0)
        listing = BodySpool(space)
        written: list[bytes] = []
        archive = ZipStream(written.append, listing)
        for number in range(70_000):
            archive.add(ZipMember(f"{number}"))
        self.assertGreater(space.used_bytes, 3_000_000)
        for piece in archive.finish():
            archive.write_listing(piece)
        archive.close()
        listing.close()
        with zipfile.ZipFile(io.BytesIO(b"".join(written))) as found:
            self.assertEqual(len(found.namelist()), 70_000)
