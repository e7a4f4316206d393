"""The test of failing disks runs, and would notice what it is there to notice."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.soak.support import soak


class DisksTests(SynchronousTestCase):
    """``misc/soak/disks.py``."""

    def test_both_troubles(self) -> None:
        """Nothing that was stored is lost; without the right to mount, one sentence says so."""
        done = soak("disks")
        if done.returncode == 2:
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertRegex(done.stderr, r"run it as root|No such file or directory|Permission")
            return
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^full: 507, .* then stored$")
        self.assertRegex(done.stdout, r"(?m)^read-only: 50[07], .* then stored$")
