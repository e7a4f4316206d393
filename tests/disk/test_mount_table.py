"""``disk.mount_table``: the file systems that are mounted."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.mount_table import MountedFileSystem, mounted_file_systems

TABLE = rb"""22 1 0:21 / /proc rw,nosuid shared:12 - proc proc rw
nonsense
23 1 x:y / /bad rw - ext4 /dev/sda rw
24 1 8:2 / /media/a\040disk rw - fuse.sshfs a@b: rw
"""


class MountTableTests(SynchronousTestCase):
    """Of a file, and of this machine."""

    def test_lines(self) -> None:
        """Escapes are undone, and lines that cannot be understood are left out."""
        path = Path(self.mktemp())
        path.write_bytes(TABLE)
        expected = [
            MountedFileSystem("/proc", os.makedev(0, 21), "proc"),
            MountedFileSystem("/media/a disk", os.makedev(8, 2), "fuse.sshfs"),
        ]
        self.assertEqual(list(mounted_file_systems(str(path))), expected)

    def test_this_machine(self) -> None:
        """It has a file system for processes."""
        kinds = {each.path: each.kind for each in mounted_file_systems()}
        self.assertEqual(kinds["/proc"], "proc")

    def test_no_table(self) -> None:
        """Without the list, as on other systems, there is nothing."""
        self.assertEqual(list(mounted_file_systems(self.mktemp())), [])
