"""A file that appears when it is whole, and what may be in the way of its part."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import part_file
from pipegrid.disk.atomic_write import part_path
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError


class PartFileTests(SynchronousTestCase):
    """In a directory of their own."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "file"
        self.part = Path(part_path(os.path.realpath(self.path)))

    def open(self, replace: bool = False, resume: bool = True) -> PartFile:
        file = PartFile(str(self.path), replace, resume)
        self.addCleanup(file.close)
        return file

    def refused(self, words: str, replace: bool = False) -> None:
        with self.assertRaises(SinkError) as caught:
            self.open(replace)
        self.assertIn(words, str(caught.exception))

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))

    def test_a_pipe_behind_a_descriptor(self) -> None:
        """``/dev/stdout``, and what a shell makes of ``>(...)``, lead to pipes without another name."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.addCleanup(os.close, writing)
        file = PartFile(f"/dev/fd/{writing}")
        self.addCleanup(file.close)
        self.assertIsNone(file.part)
        file.write(b"through")
        file.publish()
        self.assertEqual(os.read(reading, 100), b"through")

    def test_a_file_behind_a_descriptor(self) -> None:
        """As ``>> log`` of a shell opens it: it is written where it stands, and nothing in it is lost."""
        link = self.directory / "link"
        for flags, before in ((os.O_APPEND, b"before, "), (0, b"")):
            self.path.write_bytes(before)
            fd = os.open(self.path, os.O_WRONLY | flags)
            self.addCleanup(os.close, fd)
            link.symlink_to(f"/proc/self/fd/{fd}")
            for path in (f"/dev/fd/{fd}", f"/proc/{os.getpid()}/fd/{fd}", str(link)):
                for replace in (False, True):
                    with PartFile(path, replace) as file:
                        self.assertIsNone(file.part)
                        file.write(b"now, ")
            os.write(fd, b"after")
            link.unlink()
            self.assertEqual(self.path.read_bytes(), before + b"now, " * 6 + b"after")
        self.assertEqual(self.names(), ["file"])

    def test_it_appears_whole(self) -> None:
        """Until then it has the documented hidden name, and is as readable as any file."""
        mask = os.umask(0o027)
        self.addCleanup(os.umask, mask)
        file = self.open()
        file.write_pieces([b"one ", bytearray(b"two "), memoryview(b""), memoryview(b"three")])
        self.assertEqual(self.names(), [".file.pipegrid-part"])
        self.assertEqual(stat.S_IMODE(self.part.stat().st_mode), 0o640)
        file.publish()
        self.assertEqual(self.names(), ["file"])
        self.assertEqual(self.path.read_bytes(), b"one two three")
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o640)
        self.assertTrue(file.closed)
        file.publish()
        self.assertIsNone(file.leave())

    def test_the_permissions_of_what_is_replaced(self) -> None:
        """Stay: who could not read the old file reads neither the new one nor its part."""
        for mode in (0o600, 0o400, 0o755, 0o444):
            self.path.write_bytes(b"old")
            self.path.chmod(mode)
            file = self.open(replace=True)
            file.write(b"new")
            self.assertEqual(stat.S_IMODE(self.part.stat().st_mode), mode | 0o600)
            file.publish()
            self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), mode)
            self.assertEqual(self.path.read_bytes(), b"new")
            self.path.unlink()

    def test_many_small_pieces(self) -> None:
        """More than the system takes at a time, and a system that takes less than it is given."""
        pwritev = os.pwritev
        self.patch(os, "pwritev", lambda fd, pieces, at: pwritev(fd, [pieces[0][:5]], at))
        data = [bytes([i % 256]) * (i % 13) for i in range(3000)]
        with self.open() as file:
            file.write_pieces(data)
        self.assertEqual(self.path.read_bytes(), b"".join(data))

    def test_what_was_left_is_found(self) -> None:
        """And written over, in place; what is too long is cut."""
        file = self.open()
        file.write(b"0123456789")
        file.__exit__(RuntimeError, RuntimeError(), None)
        again = self.open()
        self.assertEqual(again.found_bytes, 10)
        self.assertEqual(again.begin(8), 8)
        self.assertEqual(again.read(2, 3), b"234")
        again.skip(4)
        again.write(b"XX")
        again.skip(2)
        again.publish()
        self.assertEqual(self.path.read_bytes(), b"0123XX67")

    def test_without_resuming(self) -> None:
        """What was left is cleared away, and nothing is left."""
        self.part.write_bytes(b"left")
        file = self.open(resume=False)
        self.assertEqual(file.found_bytes, 0)
        file.write(b"x")
        self.assertIsNone(file.leave())
        self.assertEqual(self.names(), [])

    def test_leaving(self) -> None:
        """A part with something in it stays, and is named; an empty one goes."""
        self.assertIsNone(self.open().leave())
        self.assertEqual(self.names(), [])
        file = self.open()
        file.write(b"x")
        self.assertEqual(file.leave(), str(self.part))
        self.assertEqual(self.open().leave(), str(self.part), "found, and not touched")
        self.assertEqual(self.part.read_bytes(), b"x")

    def test_half_a_write_is_nothing_to_keep(self) -> None:
        """A full disk in the middle of the first segment leaves nothing; later it does."""
        pwritev = os.pwritev

        def full(fd: int, pieces: list[memoryview], at: int) -> int:
            if at >= 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwritev(fd, [pieces[0][:3]], at)

        for first, names in ((b"", []), (b"x", [self.part.name])):
            file = self.open()
            file.write(first)
            self.patch(os, "pwritev", full)
            self.assertRaises(OSError, file.write, b"abcdef")
            file.leave()
            self.assertEqual(self.names(), names)
            self.patch(os, "pwritev", pwritev)

    def test_two_at_once(self) -> None:
        """The second is told; when the first has ended it may begin, and finds no part."""
        first = self.open()
        first.write(b"first")
        self.refused("another process is writing to")
        first.publish()
        second = self.open(replace=True)
        self.assertEqual(second.found_bytes, 0)
        second.write(b"2")
        second.publish()
        self.assertEqual(self.path.read_bytes(), b"2")

    def test_the_name_moves_while_it_is_being_locked(self) -> None:
        """Whoever opened the part just before it got its name does not write to the finished file."""
        first = self.open()
        first.write(b"first")
        flock = fcntl.flock

        def late(fd: int, how: int) -> None:
            self.patch(fcntl, "flock", flock)
            first.publish()
            flock(fd, how)

        self.patch(fcntl, "flock", late)
        second = self.open(replace=True)
        second.write(b"2")
        self.assertEqual(self.path.read_bytes(), b"first")

    def test_a_kill_between_both_names(self) -> None:
        """The hidden name leads to the finished file: it stays as it is, and a new part is begun."""
        self.path.write_bytes(b"finished")
        os.link(self.path, self.part)
        file = self.open(replace=True)
        self.assertEqual(file.found_bytes, 0)
        file.write(b"n")
        self.assertEqual(self.path.read_bytes(), b"finished")
        file.publish()
        self.assertEqual(self.path.read_bytes(), b"n")
        self.assertEqual(self.names(), ["file"])

    def test_a_link_at_the_hidden_name(self) -> None:
        """It is never followed, wherever it leads."""
        victim = self.directory / "victim"
        victim.write_bytes(b"precious")
        for target in ("victim", "missing", "."):
            self.part.symlink_to(target)
            with self.open(replace=True) as file:
                self.assertEqual(file.found_bytes, 0)
                file.write(b"x")
            self.assertEqual(victim.read_bytes(), b"precious")
            self.assertFalse(self.path.is_symlink())
        self.assertEqual(self.names(), ["file", "victim"])

    def test_other_things_at_the_hidden_name(self) -> None:
        """A directory or a pipe is nothing to write to, nor to wait for."""
        self.part.mkdir()
        self.refused("remove it")
        self.part.rmdir()
        os.mkfifo(self.part)
        self.refused("remove it")

    def test_a_part_of_somebody_else(self) -> None:
        """Who made it could read and change it: it is replaced by our own."""
        self.part.write_bytes(b"trap")
        inode = self.part.stat().st_ino
        self.patch(os, "geteuid", lambda: os.getuid() + 1)
        with self.assertRaises(SinkError):  # ours are not theirs, either, here
            self.open()
        self.patch(os, "geteuid", os.getuid)
        if self.part.exists():
            self.assertNotEqual(self.part.stat().st_ino, inode)

    def test_a_part_under_a_stricter_umask(self) -> None:
        """It gets no more readable than the file would be now."""
        self.part.write_bytes(b"x")
        self.part.chmod(0o664)
        mask = os.umask(0o077)
        self.addCleanup(os.umask, mask)
        self.open()
        self.assertEqual(stat.S_IMODE(self.part.stat().st_mode), 0o600)

    def test_long_names(self) -> None:
        """A name as long as a name can be has a part, and another one that begins alike has its own."""
        longest = os.pathconf(self.directory, "PC_NAME_MAX")
        paths = [
            str(self.directory / name)
            for name in ("a" * longest, "a" * (longest - 1) + "b", "ä" * (longest // 2))
        ]
        parts = {part_path(os.path.realpath(path)) for path in paths}
        self.assertEqual(len(parts), 3)
        for path in paths:
            with PartFile(path) as file:
                file.write(b"x")
                assert file.part is not None
                self.assertIn(file.part, parts)
                self.assertLessEqual(len(os.fsencode(os.path.basename(file.part))), longest)
            self.assertEqual(Path(path).read_bytes(), b"x")

    def test_names_that_can_never_be(self) -> None:
        """Are refused before anything is fetched, though a part of a shorter name could be made."""
        self.path = self.directory / ("x" * 300)
        self.refused("File name too long")
        self.path = self.directory / "loop"
        self.path.symlink_to("loop")
        self.refused("exists already")
        self.open(replace=True).publish()
        self.assertEqual(self.names(), ["loop"])
        self.assertFalse(self.path.is_symlink())

    def test_a_file_system_without_locks(self) -> None:
        """Each writer has a name of its own then, and leaves nothing."""

        def unsupported(fd: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        self.patch(fcntl, "flock", unsupported)
        one, two = self.open(), self.open(replace=True)
        one.write(b"one")
        two.write(b"two")
        one.publish()
        two.publish()
        self.assertEqual(self.path.read_bytes(), b"two")
        left = self.open(replace=True)
        left.write(b"x")
        self.assertIsNone(left.leave())
        self.assertEqual(self.names(), [self.path.name])

    def test_a_long_path_without_locks(self) -> None:
        """The part is beside its target, whatever the lengths, and nowhere above it."""

        def unsupported(fd: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        self.patch(fcntl, "flock", unsupported)
        deep = self.directory.absolute() / ("d" * 200) / "e"
        deep.mkdir(parents=True)
        for name in ("x", "n" * 250, "\N{SNOWMAN}" * 80):
            self.path = deep / name
            file = self.open()
            assert file.part is not None
            self.assertEqual(Path(file.part).parent, deep.resolve())
            file.write(b"here")
            file.publish()
            self.assertEqual(self.path.read_bytes(), b"here")

    def test_a_file_system_without_hard_links(self) -> None:
        """The name is given all the same, unless somebody has it."""

        def unsupported(*_args: str) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        self.patch(os, "link", unsupported)
        with self.open() as file:
            file.write(b"x")
        self.assertEqual(self.path.read_bytes(), b"x")
        self.path.unlink()
        file = self.open()
        file.write(b"y")
        self.path.write_bytes(b"theirs")
        self.assertRaises(SinkError, file.publish)
        self.assertEqual(self.path.read_bytes(), b"theirs")

    def test_a_name_that_was_taken_meanwhile(self) -> None:
        """The file of that name stays, and so does the part, since --force may be meant."""
        file = self.open()
        file.write(b"ours")
        self.path.write_bytes(b"theirs")
        with self.assertRaises(SinkError) as caught:
            file.publish()
        self.assertIn("exists already", str(caught.exception))
        self.assertEqual(file.leave(), str(self.part))
        self.assertEqual(self.path.read_bytes(), b"theirs")

    def test_the_order_of_syncs(self) -> None:
        """The bytes before the name, the name before it is said to be done; no sync is no failure."""
        events: list[str] = []
        directory = os.stat(self.directory).st_ino

        def fsync(fd: int) -> None:
            events.append("directory" if os.fstat(fd).st_ino == directory else "bytes")
            raise OSError(errno.EINVAL, "Invalid argument")

        link = os.link

        def named(*args: str) -> None:
            events.append("name")
            link(*args)

        self.patch(os, "fsync", fsync)
        self.patch(os, "link", named)
        with self.open() as file:
            file.write(b"x")
        self.assertEqual(events, ["bytes", "name", "directory"])

    def test_a_disk_that_fails_to_sync(self) -> None:
        """
        That is an error, and nothing stays: what the kernel could not write reads well until it has to come
        from the disk, and the next sync succeeds.
        """

        def fsync(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        self.patch(os, "fsync", fsync)
        file = self.open()
        file.write(b"x")
        self.assertRaises(SinkError, file.publish)
        self.assertIsNone(file.leave())
        self.assertEqual(self.names(), [])

    def test_a_hidden_name_that_does_not_go(self) -> None:
        """As in a directory that names can only be added to: the file has its own by then."""

        def unlink(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        with self.open() as file:
            file.write(b"x")
            self.patch(os, "unlink", unlink)
        self.assertEqual(self.path.read_bytes(), b"x")

    def test_leaving_while_it_is_published(self) -> None:
        """The thread that publishes finishes, and lets go."""
        started, go_on = threading.Event(), threading.Event()
        fsync = os.fsync

        def slow(fd: int) -> None:
            started.set()
            go_on.wait(10)
            fsync(fd)

        self.patch(part_file.os, "fsync", slow)  # type: ignore[attr-defined]
        file = self.open()
        file.write(b"x")
        thread = threading.Thread(target=file.publish)
        thread.start()
        started.wait(10)
        self.assertIsNone(file.leave())
        go_on.set()
        thread.join()
        self.assertEqual(self.names(), ["file"])
        self.assertTrue(file.closed)

    def test_a_device(self) -> None:
        """It is written to, and has no part."""
        with PartFile(os.devnull) as file:
            self.assertIsNone(file.part)
            self.assertEqual(file.begin(100), 0)
            file.write(b"x")
        self.assertFalse(os.path.isfile(os.devnull))

    def test_a_link_as_the_target(self) -> None:
        """The link stays, and the part is beside what it points to."""
        (self.directory / "elsewhere").mkdir()
        self.path.symlink_to("elsewhere/real")
        file = self.open()
        self.assertEqual(os.listdir(self.directory / "elsewhere"), [".real.pipegrid-part"])
        file.write(b"x")
        file.publish()
        self.assertTrue(self.path.is_symlink())
        self.assertEqual(self.path.read_bytes(), b"x")
