"""The hidden name of a part whose file has its own name: a process was killed while it gave it that."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.atomic_write import remove_stale_link
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError


class SecondNameTests(SynchronousTestCase):
    """``take_away_second_name``."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "file"
        self.part = self.directory / ".file.pipegrid-part"
        self.path.write_bytes(b"whole")

    def take_away(self) -> list[str]:
        """Do it, by the path and by the directory's descriptor; return what is there then."""
        remove_stale_link(str(self.path))
        fd = os.open(self.directory, os.O_RDONLY)
        try:
            remove_stale_link("file", fd)
        finally:
            os.close(fd)
        return sorted(os.listdir(self.directory))

    def test_it_goes(self) -> None:
        """The file stays as it is."""
        for inside in (False, True):
            os.link(self.path, self.part)
            if inside:
                remove_stale_link(str(self.path))
            self.assertEqual(self.take_away(), ["file"])
            self.assertEqual(self.path.read_bytes(), b"whole")

    def test_what_is_not_the_same_file(self) -> None:
        """Another file, a link and nothing at all are left alone; so is a part that has no file yet."""
        self.assertEqual(self.take_away(), ["file"])
        self.part.write_bytes(b"who")
        self.assertEqual(self.take_away(), [self.part.name, "file"])
        self.part.unlink()
        self.part.symlink_to("file")
        self.assertEqual(self.take_away(), [self.part.name, "file"])
        self.path.unlink()
        self.part.unlink()
        self.part.write_bytes(b"who")
        self.assertEqual(self.take_away(), [self.part.name])

    def test_somebody_else_is_about_to_do_so(self) -> None:
        """Whoever has the lock does it."""
        os.link(self.path, self.part)
        with self.part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertEqual(self.take_away(), [self.part.name, "file"])

    def test_a_file_that_is_there(self) -> None:
        """What shall be written there is refused, and no hidden name is left."""
        os.link(self.path, self.part)
        self.assertRaises(SinkError, PartFile, str(self.path))
        self.assertEqual(os.listdir(self.directory), ["file"])
        self.assertEqual(self.path.read_bytes(), b"whole")

    def test_while_it_gets_its_name(self) -> None:
        """Somebody finds it to be done just then, and takes the hidden name away: no error."""
        self.path.unlink()
        link = os.link

        def linking(source: str, target: str) -> None:
            link(source, target)
            os.unlink(source)

        with PartFile(str(self.path)) as file:
            file.write(b"new")
            self.patch(os, "link", linking)
        self.assertEqual(os.listdir(self.directory), ["file"])
        self.assertEqual(self.path.read_bytes(), b"new")
