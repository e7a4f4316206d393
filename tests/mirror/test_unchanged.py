"""A mirror's directory in which nothing is changed, and what it needs elsewhere."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.file_system_calls import disk_error
from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.destination import ReadOnlyDestination


class ScratchTests(SynchronousTestCase):
    """What a dry run has to read lies in a directory for temporary files, as long as it lasts."""

    def setUp(self) -> None:
        self.temporary = Path(self.mktemp())
        self.temporary.mkdir()
        self.patch(tempfile, "tempdir", str(self.temporary))
        self.dest = self.mktemp()

    def made(self, name: str, age_s: float = 1e6) -> Path:
        """Make a directory with a file in it, which nobody has changed for so long."""
        path = self.temporary / name
        (path / "staged").mkdir(parents=True)
        (path / "staged/Packages").write_bytes(b"index")
        then = time.time() - age_s
        os.utime(path, (then, then))
        return path

    def look(self, dest: str) -> None:
        """Have a dry run write something, and end."""
        with closing(ReadOnlyDestination(dest)) as destination:
            destination.stage({"index": b"data"})

    def test_what_was_left(self) -> None:
        """By a run that was killed goes with the next one; what may be somebody's stays."""
        left = self.made("pipegrid-mirror-left")
        stays = [
            self.made("pipegrid-mirror-young", 10),
            self.made("pipegrid-mirrored"),
            self.made("somebodys"),
        ]
        outside = self.made("outside")
        link = self.temporary / "pipegrid-mirror-link"
        link.symlink_to("outside")
        self.look(self.dest)
        self.assertFalse(left.exists())
        for path in (*stays, outside):
            self.assertEqual((path / "staged/Packages").read_bytes(), b"index", path)
        self.assertTrue(link.is_symlink())
        self.assertEqual(len(os.listdir(self.temporary)), 5)

    def test_one_that_lasts_long(self) -> None:
        """Keeps what it has, however old that is."""
        with closing(ReadOnlyDestination(self.dest)) as destination:
            destination.stage({"index": b"data"})
            (scratch,) = self.temporary.iterdir()
            os.utime(scratch, (1, 1))
            self.look(self.mktemp())
            self.assertEqual(destination.read(".pipegrid-mirror/staged/index", 10), b"data")
        self.assertEqual(os.listdir(self.temporary), [])

    def test_no_room(self) -> None:
        """It is that directory which is full, whoever finds it out, and not the mirror's."""
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with closing(ReadOnlyDestination(self.dest)) as destination:
            destination.stage({"index": b"data"})
            (scratch,) = self.temporary.iterdir()
            said = [str(destination.error(each, "do it")) for each in (full, disk_error(full, "x"))]
            with patch.object(os, "mkdir", side_effect=full):
                found = self.assertRaises(MirrorError, destination.stage, {"a/b": b"more"})
            for each in (*said, str(found)):
                self.assertIn(f"{scratch} cannot", each)
                self.assertIn("TMPDIR", each)
                self.assertNotIn(self.dest, each)
