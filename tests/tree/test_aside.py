"""A symbolic link, or a directory, of a tree comes into the place of what is there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import SinkError
from pipegrid.tree.file_metadata import RestoredMetadata
from pipegrid.tree.local_directory_descriptor import DirectoryFd
from pipegrid.tree.local_files import make_directory, make_link


class LinkTests(SynchronousTestCase):
    """``make_link`` with ``force``."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "link"
        self.path.write_bytes(b"precious")

    def make(self) -> str:
        """Make a link in the place of the file."""
        return make_link(
            DirectoryFd(str(self.directory)), str(self.path), RestoredMetadata(link=b"to"), True
        )

    def test_the_file_goes(self) -> None:
        """Also after a process that was killed in between; nothing else stays."""
        for left in (False, True):
            self.path.unlink()
            self.path.write_bytes(b"precious")
            if left:
                (self.directory / ".link.pipegrid-part").symlink_to("to")
            self.assertEqual(self.make(), "")
            self.assertEqual(os.readlink(self.path), "to")
            self.assertEqual(os.listdir(self.directory), ["link"])

    def test_a_disk_that_fails(self) -> None:
        """Whatever it refuses, the file is there as it was."""
        for name in ("symlink", "replace"):

            def fails(*_: object, **__: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch = self.patch(os, name, fails)
            self.assertRaises(SinkError, self.make)
            patch.restore()
            self.assertEqual(self.path.read_bytes(), b"precious")
            self.assertEqual(os.listdir(self.directory), ["link"])


class DirectoryTests(SynchronousTestCase):
    """``make_directory`` with ``force``."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "sub"
        self.path.write_bytes(b"precious")
        self.hidden = self.directory / ".sub.pipegrid-part"

    def make(self) -> None:
        """Make a directory in the place of the file."""
        make_directory(DirectoryFd(str(self.directory)), str(self.path), RestoredMetadata(), True)

    def test_the_file_goes(self) -> None:
        """Or the link; nothing else stays, also where a part was beside it."""
        self.make()
        self.assertEqual((os.listdir(self.directory), os.listdir(self.path)), (["sub"], []))
        self.path.rmdir()
        self.path.symlink_to("elsewhere")
        self.hidden.write_bytes(b"part")
        self.make()
        self.assertEqual((os.listdir(self.directory), os.listdir(self.path)), (["sub"], []))

    def test_a_disk_that_fails(self) -> None:
        """Whatever it refuses, the file is there as it was."""
        made = os.mkdir

        def fails(*arguments: Any, **options: Any) -> None:
            if not os.path.lexists(self.path):
                raise OSError(errno.ENOSPC, "No space left on device")
            made(*arguments, **options)

        patch = self.patch(os, "mkdir", fails)
        self.assertIn("No space left", str(self.assertRaises(SinkError, self.make)))
        patch.restore()
        self.assertEqual(self.path.read_bytes(), b"precious")
        self.assertEqual(os.listdir(self.directory), ["sub"])
