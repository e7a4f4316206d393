"""Directories on file systems that cannot sync them."""

from __future__ import annotations

import errno
import os
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.commit import Disk


class SyncDirectoryTests(SynchronousTestCase):
    """One rule for all."""

    def test_a_file_system_that_cannot(self) -> None:
        """Is no error; a disk that fails is one."""
        directory = self.mktemp()
        os.mkdir(directory)
        for number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            with patch.object(os, "fsync", side_effect=OSError(number, os.strerror(number))):
                Disk().sync_directories([directory])
        with patch.object(os, "fsync", side_effect=OSError(errno.EIO, "Input/output error")):
            self.assertRaises(OSError, Disk().sync_directories, [directory])
