"""Notes of puts with random keys."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from misc.command import environment
from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UnhappyError
from pipegrid.transfer.put import file_key, write_batches
from pipegrid.transfer.put.file_key import MAX_AGE_S, MAX_NOTES, KeyNote, KeyNotes
from tests.locks import failing_locks
from tests.transfer.test_upload import UploadTestCase
from tests.transfer.world import Told, World, content

GEOMETRY = Params(3, 10, 30_000).geometry(100_000)
PATH = "/home/u/file"
WHO = (1, 2, 3, 4)
NOW = 1.7e9


class NotesTestCase(SynchronousTestCase):
    """One directory of notes."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()) / "private" / "unfinished"
        self.said: list[str] = []
        self.now = NOW
        self.notes = KeyNotes(self.directory, self.said.append, lambda: self.now)

    def take(self, path: str = PATH, who: tuple[int, ...] = WHO, **params: int) -> KeyNote:
        geometry = Params(**{"required_shares": 3, "total_shares": 10, **params}).geometry(10**6)
        note = self.notes.take(path, who, geometry)
        assert note is not None
        self.addCleanup(note.keep)
        return note

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.directory.iterdir())

    def only(self) -> Path:
        [found] = self.directory.iterdir()
        return found


class TakingTests(NotesTestCase):
    """Which put takes up which note."""

    def test_a_rerun_takes_it_up(self) -> None:
        """The same secret again and again, until the put is done; then another."""
        first = self.take()
        self.assertFalse(first.resumed)
        first.keep()
        again = self.take()
        self.assertEqual((again.secret, again.resumed), (first.secret, True))
        again.remove()
        self.assertEqual(self.names(), [])
        fresh = self.take()
        self.assertFalse(fresh.resumed)
        self.assertNotEqual(fresh.secret, first.secret)

    def test_whatever_differs(self) -> None:
        """Another path, inode, size, time of change or encoding: another note."""
        secrets = {self.take().secret, self.take("/home/u/file2").secret}
        for place in range(len(WHO)):
            who = tuple(n + (i == place) for i, n in enumerate(WHO))
            secrets.add(self.take(who=who).secret)
        secrets.add(self.take(required_shares=4).secret)
        secrets.add(self.take(total_shares=11).secret)
        secrets.add(self.take(max_segment_bytes=1 << 19).secret)
        self.assertEqual(len(secrets), 9)

    def test_two_at_the_same_time(self) -> None:
        """The second has no note; when the first has gone, it can be taken up."""
        first = self.take()
        self.assertIsNone(self.notes.take(PATH, WHO, Params().geometry(10**6)))
        self.assertEqual(self.said, [])
        first.keep()
        self.assertEqual(self.take().secret, first.secret)

    def test_a_file_system_without_locks(self) -> None:
        """A sentence says what that costs, and nothing is left, which nobody could tidy away."""
        self.take().keep()
        with failing_locks(errno.ENOLCK):
            for path in (PATH, "/another"):
                self.assertIsNone(self.notes.take(path, WHO, Params().geometry(10**6)))
        self.assertEqual(["No locks available" in each for each in self.said], [True, True])
        self.assertTrue(self.only().read_bytes())

    def test_another_process_has_it(self) -> None:
        """The same; and when that is killed, it is free."""
        self.take().keep()
        code = (
            "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, 2); "
            "print(1, flush=True); input()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(self.only())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        assert holder.stdout is not None
        assert holder.stdin is not None
        try:
            holder.stdout.readline()
            self.assertIsNone(self.notes.take(PATH, WHO, Params().geometry(10**6)))
        finally:
            holder.kill()
            holder.wait()
            holder.stdout.close()
            holder.stdin.close()
        self.assertTrue(self.take().resumed)

    def test_removed_while_it_is_opened(self) -> None:
        """The put that had it ends in that moment: there is a new one, which is a file of its own."""
        first = self.take()
        flock = fcntl.flock

        def late(*args: int) -> None:
            self.patch(fcntl, "flock", flock)
            first.remove()
            flock(*args)

        self.patch(fcntl, "flock", late)
        second = self.take()
        self.assertFalse(second.resumed)
        self.assertNotEqual(second.secret, first.secret)
        self.assertTrue(self.only().read_bytes())


class SafetyTests(NotesTestCase):
    """Who can read it, and what is done about damage."""

    def test_only_the_owner_can_read_it(self) -> None:
        """File and directory, whatever the umask; and one that became readable is closed again."""
        before = os.umask(0)
        try:
            self.take().keep()
        finally:
            os.umask(before)
        self.assertEqual(stat.S_IMODE(self.only().stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(self.directory.stat().st_mode), 0o700)
        self.only().chmod(0o644)
        self.take()
        self.assertEqual(stat.S_IMODE(self.only().stat().st_mode), 0o600)

    def test_it_names_nothing(self) -> None:
        """Neither the file nor its key is in it, nor is the path in its name."""
        self.take()
        text = self.only().read_text() + self.only().name
        self.assertNotIn("file", text)
        self.assertNotIn("home", text)

    def test_damaged(self) -> None:
        """It is set aside, with a sentence; the put begins anew."""
        first = self.take()
        first.keep()
        whole = self.only().read_bytes()
        for damaged in (
            whole[:40],
            whole.replace(b"1\n", b"2\n"),
            whole[:-5],
            b"\xff\x00",
            b"x" * 5000,
        ):
            self.said.clear()
            self.only().write_bytes(damaged)
            second = self.take()
            self.assertFalse(second.resumed)
            self.assertNotEqual(second.secret, first.secret)
            second.keep()
            [said] = self.said
            self.assertIn("is damaged, and is set aside as", said)
            note, aside = self.names()
            self.assertEqual((self.directory / aside).read_bytes(), damaged)
            (self.directory / aside).unlink()
            self.assertTrue((self.directory / note).exists())

    def test_an_empty_one(self) -> None:
        """The process died before it wrote: nothing was sent with it."""
        self.take().keep()
        self.only().write_bytes(b"")
        self.assertFalse(self.take().resumed)
        self.assertEqual(self.said, [])

    def test_no_directory_can_be_made(self) -> None:
        """The put goes on without, and a sentence tells."""
        self.directory.parent.parent.mkdir()
        self.directory.parent.write_text("a file is in the way")
        self.assertIsNone(self.notes.take(PATH, WHO, GEOMETRY))
        [said] = self.said
        self.assertIn(f"cannot note the key of {PATH} in {self.directory}", said)
        self.assertIn("will send all of it again", said)

    def test_a_link_is_not_followed(self) -> None:
        """Whoever could put one there shall not have us write elsewhere."""
        self.take().remove()
        target = Path(self.mktemp())
        target.write_bytes(b"precious")
        name = file_key._name(PATH, WHO, GEOMETRY)
        (self.directory / name).symlink_to(target.resolve())
        self.assertIsNone(self.notes.take(PATH, WHO, GEOMETRY))
        self.assertEqual(target.read_bytes(), b"precious")
        self.assertEqual(len(self.said), 1)


class BoundsTests(NotesTestCase):
    """There are not many, and they do not get old."""

    def put_off(self, path: str) -> Path:
        """Leave a note for a file, made now; return where it is."""
        note = self.take(path)
        note.keep()
        where = self.directory / file_key._name(path, WHO, Params().geometry(10**6))
        os.utime(where, (self.now, self.now))
        return where

    def test_too_old(self) -> None:
        """After a week a note goes when the next put comes, unless its put still runs."""
        old = self.put_off("/old")
        in_use = self.put_off("/in-use")
        self.take("/in-use")
        self.now += MAX_AGE_S / 2
        young = self.put_off("/young")
        self.now += MAX_AGE_S / 2 + 1
        os.utime(in_use, (NOW, NOW))
        self.put_off("/new")
        self.assertFalse(old.exists())
        self.assertTrue(young.exists())
        self.assertTrue(in_use.exists())

    def test_taking_up_makes_young(self) -> None:
        """A put that is run again each day is not forgotten."""
        self.put_off(PATH)
        for _ in range(3):
            self.now += 0.6 * MAX_AGE_S
            self.take("/other").remove()
            again = self.take()
            self.assertTrue(again.resumed)
            again.keep()

    def test_too_many(self) -> None:
        """The oldest go."""
        for number in range(MAX_NOTES + 20):
            self.now += 1
            self.put_off(f"/{number}")
        self.assertEqual(len(self.names()), MAX_NOTES)
        self.assertTrue(self.take(f"/{MAX_NOTES + 19}").resumed)
        self.assertFalse(self.take("/0").resumed)


class PutTests(UploadTestCase):
    """Puts with random keys, of a file that is cut off."""

    SIZE = 600_000

    def setUp(self) -> None:
        self.patch(write_batches, "BATCH_BYTES", 8192)
        self.caches = Path(self.mktemp())
        self.not_ours = Path(self.mktemp())
        self.world = World(
            params=Params(3, 10, 30_000),
            window_bytes=20_000,
            held_bytes=20_000,
            bytes_per_s=200_000.0,
            caches=(self.caches, self.not_ours),
        )
        self.path = Path(self.mktemp()).resolve()
        self.path.write_bytes(content(self.SIZE))

    def notes(self) -> list[Path]:
        self.assertFalse(
            self.not_ours.exists(), "nothing is ever written in a Tahoe-LAFS node's directory"
        )
        return sorted(self.caches.glob("unfinished/*"))

    def cut(self, source: object) -> None:
        """Put it with a random key until half of it is acknowledged."""
        told = Told()
        started = self.world.grid.put(source, random_key=True, progress=told)  # type: ignore[arg-type]
        while not told or told[-1][0] < 0.54 * told[-1][1]:
            self.assertTrue(self.world.step())
        self.assertEqual(
            [path.stat().st_mode & 0o777 for path in self.notes()], [0o600] * len(self.notes())
        )
        started.cancel()
        self.failureResultOf(started, CancelledError)
        self.world.settle()
        self.forget_counts()

    def forget_counts(self) -> None:
        self.world.grid = self.world.client()
        for line in self.world.lines:
            line.sent_bytes = 0

    def rerun(self, source: object) -> tuple[ChkCap, int]:
        """Put it again; return its cap, and how many bytes were sent."""
        result = self.world.run(self.world.grid.put(source, random_key=True))  # type: ignore[arg-type]
        assert isinstance(result.cap, ChkCap)
        self.assertEqual(self.world.fetch(result.cap), self.path.read_bytes())
        return result.cap, sum(line.sent_bytes for line in self.world.lines)

    def test_it_goes_on(self) -> None:
        """A rerun sends what is missing; when it is done the note is gone, and the next key another."""
        self.cut(self.path)
        [_] = self.notes()
        cap, sent = self.rerun(str(self.path))
        whole = 10 * self.SIZE // 3
        self.assertLess(sent, 0.46 * whole + 10 * 45_000)
        self.assertEqual(self.notes(), [])
        other, _ = self.rerun(self.path)
        self.assertNotEqual(cap.key, other.key)
        self.assertEqual(self.notes(), [])

    def test_content_that_changed_without_a_trace(self) -> None:
        """Size, inode and time are the same, the content is not: nothing is enciphered with the same key."""
        before = self.path.stat()
        self.cut(self.path)
        first = {index for line in self.world.lines for index, _ in line.storage.uploads}
        data = bytearray(self.path.read_bytes())
        data[-1] ^= 1
        with open(self.path, "r+b") as file:
            file.write(data)
        os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        cap, sent = self.rerun(self.path)
        self.assertNotIn(cap.storage_index, first)
        self.assertGreater(sent, 10 * self.SIZE // 3)

    def test_two_at_the_same_time(self) -> None:
        """They are two files on the grid, and both are stored."""
        puts = [self.world.grid.put(self.path, random_key=True) for _ in range(2)]
        one, other = (self.world.run(each).cap for each in puts)
        assert isinstance(one, ChkCap)
        assert isinstance(other, ChkCap)
        self.assertNotEqual(one.key, other.key)
        self.assertEqual(self.notes(), [])

    def test_servers_fail(self) -> None:
        """The note stays for the next try, which finds what was stored."""
        for line in self.world.lines[:4]:
            line.down = True
        with self.assertRaises(UnhappyError):
            self.world.run(self.world.grid.put(self.path, random_key=True))
        [_note] = self.notes()
        for line in self.world.lines:
            line.down = False
        self.forget_counts()
        self.rerun(self.path)
        self.assertEqual(self.notes(), [])

    def test_what_has_no_note(self) -> None:
        """Bytes, open files, files of one segment; and nobody notes convergent keys, which need it not."""
        self.cut(self.path.read_bytes())
        self.assertEqual(self.notes(), [])
        with open(self.path, "rb") as file:
            self.cut(file)
        self.assertEqual(self.notes(), [])
        small = Path(self.mktemp())
        small.write_bytes(content(20_000))
        started = self.world.grid.put(small, random_key=True)
        self.assertEqual(self.notes(), [])
        self.world.run(started)
        started = self.world.grid.put(self.path)
        self.assertEqual(self.notes(), [])
        self.world.run(started)

    def test_old_ones_go_with_any_put(self) -> None:
        """A week later the first put of a process removes them, whatever its key."""
        self.cut(self.path)
        [note] = self.notes()
        self.world.run(self.world.client().put(content(1000)))
        self.assertEqual(self.notes(), [note])
        week_ago = time.time() - MAX_AGE_S - 10
        os.utime(note, (week_ago, week_ago))
        self.world.run(self.world.client().put(content(1000)))
        self.assertEqual(self.notes(), [])

    def test_a_sentence_reaches_the_user(self) -> None:
        """What is wrong with a note is among the grid's warnings, and the put is done."""
        self.cut(self.path)
        [note] = self.notes()
        note.write_text("torn")
        self.rerun(self.path)
        [warning] = self.world.grid.warnings
        self.assertIn("is damaged, and is set aside as", warning)
