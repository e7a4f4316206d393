"""How far the kernel reads ahead, if this process may say so."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mount.mount_point_checks import READ_AHEAD_KIB, set_read_ahead
from tests.scratch import scratch_path


class ReadAheadTests(SynchronousTestCase):
    """A setting of each file system, of which ``/proc`` is one."""

    def setUp(self) -> None:
        self.settings = scratch_path(self)
        device = os.stat("/proc").st_dev
        self.setting = self.settings / f"{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        self.setting.parent.mkdir(parents=True)

    def set(self, path: str = "/proc", settings: Path | None = None) -> bool:
        return set_read_ahead(path, str(settings or self.settings))

    def test_it_only_grows(self) -> None:
        """A value that is larger already stays."""
        for before, after in ((128, READ_AHEAD_KIB), (8 * READ_AHEAD_KIB, 8 * READ_AHEAD_KIB)):
            self.setting.write_text(f"{before}\n", "ascii")
            self.assertTrue(self.set())
            self.assertEqual(int(self.setting.read_text("ascii")), after)

    def test_not_permitted(self) -> None:
        """Nothing changes without the setting, with a strange one, or where nothing is mounted."""
        self.assertFalse(self.set())
        self.setting.write_text("strange", "ascii")
        self.assertFalse(self.set())
        self.assertFalse(self.set("/proc/self"))
        self.assertFalse(self.set("/does/not/exist"))
        self.assertEqual(self.setting.read_text("ascii"), "strange")
