"""Small files that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.atomic_write import create_file, replace_file


class DurabilityTests(SynchronousTestCase):
    """What is on the disk when, as the system is asked for it."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "aliases"
        self.steps: list[str] = []

        def noted(name: str) -> None:
            real = getattr(os, name)

            def call(*arguments: object, **options: object) -> object:
                what = (
                    "directory" if name == "fsync" and self.is_directory(arguments[0]) else "file"
                )
                self.steps.append(f"{name} {what}" if name == "fsync" else name)
                return real(*arguments, **options)

            patch = mock.patch.object(os, name, call)
            patch.start()
            self.addCleanup(patch.stop)

        for name in ("fsync", "replace", "link"):
            noted(name)

    def is_directory(self, fd: object) -> bool:
        assert isinstance(fd, int)
        return os.path.isdir(f"/proc/self/fd/{fd}")

    def test_replaced(self) -> None:
        """The bytes, the name, and the directory that has it: a power cut afterwards takes none of them."""
        replace_file(self.path, b"home: URI:DIR2:...")
        self.assertEqual(self.steps, ["fsync file", "replace", "fsync directory"])
        self.assertEqual(self.path.read_bytes(), b"home: URI:DIR2:...")

    def test_created(self) -> None:
        """The same of a file that is made only if there is none; whoever comes second may rely on it, too."""
        create_file(self.path, b"first")
        create_file(self.path, b"second")
        steps = ["fsync file", "link", "fsync directory"]
        self.assertEqual(self.steps, steps + steps)
        self.assertEqual(self.path.read_bytes(), b"first")

    def test_nothing_is_lost_with_it(self) -> None:
        """A cache is replaced at once."""
        replace_file(self.path, b"{}", durable=False)
        self.assertEqual(self.steps, ["replace"])

    def test_a_directory_that_cannot_be_synced(self) -> None:
        """The file is there all the same."""
        opened = os.open

        def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
            if Path(path) == self.directory:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opened(path, flags, mode)

        with mock.patch.object(os, "open", refusing):
            replace_file(self.path, b"x")
        self.assertEqual(self.steps, ["fsync file", "replace"])
        self.assertEqual(self.path.read_bytes(), b"x")


class HiddenNameTests(SynchronousTestCase):
    """Where the bytes are until the file has its name, and what a process that was killed has left there."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "aliases"
        self.hidden = self.directory / ".aliases.pipegrid-part"

    def names(self) -> list[str]:
        """Return what is in the directory."""
        return sorted(os.listdir(self.directory))

    def test_what_was_left_is_taken_up(self) -> None:
        """It is emptied, and gets the mode of the file."""
        for write in (replace_file, create_file):
            self.hidden.write_bytes(b"half of what should have been there")
            self.hidden.chmod(0o644)
            write(self.path, b"whole")
            self.assertEqual(self.names(), ["aliases"])
            self.assertEqual(self.path.read_bytes(), b"whole")
            self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)
            self.path.unlink()

    def test_a_kill_between_both_names(self) -> None:
        """The hidden name is that of the file: it is not written to."""
        self.path.write_bytes(b"old")
        os.link(self.path, self.hidden)
        with open(self.path, "rb") as old:
            replace_file(self.path, b"new")
            self.assertEqual(old.read(), b"old")
        self.assertEqual(self.path.read_bytes(), b"new")
        self.assertEqual(self.names(), ["aliases"])

    def test_somebody_is_writing(self) -> None:
        """Each has a file of its own, and takes nothing from the other."""
        with open(self.hidden, "wb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            replace_file(self.path, b"ours")
            self.assertEqual(self.names(), [self.hidden.name, "aliases"])
            os.replace(self.hidden, self.path)
        self.assertEqual(self.names(), ["aliases"])

    def test_what_is_no_file_of_ours(self) -> None:
        """A link is not followed, a pipe not waited for; they stay."""
        victim = self.directory / "victim"
        victim.write_bytes(b"precious")
        for make in (
            lambda: self.hidden.symlink_to(victim),
            lambda: os.mkfifo(self.hidden),
            self.hidden.mkdir,
        ):
            make()
            replace_file(self.path, b"ours")
            self.assertEqual(self.path.read_bytes(), b"ours")
            self.assertEqual(self.names(), [self.hidden.name, "aliases", "victim"])
            if self.hidden.is_dir() and not self.hidden.is_symlink():
                self.hidden.rmdir()
            else:
                self.hidden.unlink()
        self.assertEqual(victim.read_bytes(), b"precious")

    def test_without_locks(self) -> None:
        """Nobody could tell what is in use: each has a name of its own, and nothing stays."""

        def flock(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        self.patch(fcntl, "flock", flock)
        replace_file(self.path, b"ours")
        self.assertEqual(self.names(), ["aliases"])

    def test_a_full_disk(self) -> None:
        """What was there is as it was, and nothing else is."""
        self.path.write_bytes(b"old")

        def fchmod(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch(os, "fchmod", fchmod)
        self.assertRaises(OSError, replace_file, self.path, b"new")
        self.assertEqual(self.path.read_bytes(), b"old")
        self.assertEqual(self.names(), ["aliases"])

    def test_nothing_is_asked_of_a_name_that_is_gone(self) -> None:
        """A disk that became one to be read only says of such a name, too, that it cannot be removed."""

        def unlink(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        self.patch(os, "unlink", unlink)
        replace_file(self.path, b"new")
        self.assertEqual(self.names(), ["aliases"])
