"""
The ``tahoe`` command says the same on a PipeGrid gateway as on Tahoe-LAFS's own, with the same status.

Run it with ``make interop``; each command is a process that takes seconds to start.
"""

from __future__ import annotations

from tests.interop.test_tahoe_commands import TahoeCommandTestCase


class SameResultsTests(TahoeCommandTestCase):
    """check, deep-check, manifest and stats, with their options."""

    def test_same_results(self) -> None:
        """Of healthy and damaged trees both commands say the same, with the same status."""
        self.check_healthy_tree()
        self.check_damaged_tree()

    def check_healthy_tree(self) -> None:
        """Nothing has to be repaired."""
        root = self.make_tree()
        for options in (("--verify", "--add-lease"), ("--repair", "--add-lease"), ("-v",)):
            status, out, _ = self.both("deep-check", *options, root)
            self.assertEqual(status, 0)
            self.assertIn("done: 6 objects checked", out)
        self.both("deep-check", "--raw", root)
        for path in (root, f"{root}/lit", f"{root}/sub/mutable"):
            self.both("check", path)
        self.both("check", "--raw", "--verify", "--add-lease", f"{root}/chk")
        for gateway in (self.own, self.ours):
            status, _, err = self.tahoe(gateway, "check", f"{root}/none")
            self.assertEqual(status, 1)
            self.assertIn("No such child: none", err)
        for command in (["manifest"], ["manifest", "--repair-cap"], ["manifest", "--raw"]):
            self.both(*command, root)
        _, out, _ = self.both("stats", root)
        self.assertIn("count-files: 4", out)

    def check_damaged_tree(self) -> None:
        """Each gateway repairs what the other sees then."""
        root = self.make_tree()
        file = self.info(f"{root}/chk")
        for gateway in (self.own, self.ours):
            self.delete_shares(file, 1)
            self.both("deep-check", "-v", root)
            status, out, _ = self.tahoe(gateway, "deep-check", "--repair", "--add-lease", root)
            self.assertEqual(status, 0)
            self.assertIn("1 repairs attempted, 1 successful, 0 failed", out)
            self.both("deep-check", root)
