"""The kill test runs, and would notice what it is there to notice."""

from __future__ import annotations

import io
import random
import shutil
from pathlib import Path

from misc.soak import kill_put
from misc.soak.kill_put import Case, Grid, Violation
from twisted.trial.unittest import SynchronousTestCase


class KillPutTests(SynchronousTestCase):
    """``misc/soak/kill_put.py``."""

    def test_a_few_kills(self) -> None:
        """No promise is broken; the 200 of ``make soak`` in small."""
        out = io.StringIO()
        self.assertEqual(kill_put.main(["--rounds", "3", "--seed", "3"], out), 0, out.getvalue())
        self.assertIn("seed 3", out.getvalue())
        self.assertIn("     0 promises broken", out.getvalue())

    def test_what_is_not_whole_is_noticed(self) -> None:
        """A visible share that is torn, of another number, or of nothing known is a violation."""
        grid, share = self.make_grid()
        grid.check_visible()
        right = share.read_bytes()
        torn = (right[:-72], right[:500], b"", right[:100] + b"\0" * 50 + right[150:])
        for content in torn:
            share.write_bytes(content)
            self.assertRaises(Violation, grid.check_visible)
        share.write_bytes(right)
        self.assertEqual(grid.check_visible()[grid.files[0].cap], {3: {0}})
        for name in ("4", "10", "3.part"):
            moved = share.rename(share.with_name(name))
            self.assertRaises(Violation, grid.check_visible)
            moved.rename(share)

    def test_what_is_missing_is_noticed(self) -> None:
        """A file that was acknowledged and is on one server only is a violation; so are leftovers."""
        grid, share = self.make_grid()
        self.assertRaises(Violation, grid.check_whole)
        self.assertRaises(Violation, grid.check_stored, grid.files)
        grid.check_stored([])
        grid.check_tidy()
        incoming = share.parents[2] / "incoming" / "aa"
        incoming.mkdir(parents=True)
        (incoming / "3").touch()
        grid.check_visible()
        self.assertRaises(Violation, grid.check_tidy)

    def make_grid(self) -> tuple[Grid, Path]:
        """Return a grid that holds one right share, number 3, of one file on its first server."""
        scratch = Path(self.mktemp())
        scratch.mkdir()
        grid = Grid(scratch, Case("batch", (200,), False, (), False), random.Random(7))
        put = kill_put.Put(grid, False, scratch)
        self.assertEqual(put.finish(), (0, ""))
        [found] = (path for _, path in grid.entries(incoming=False) if path.name == "3")
        right, name = found.read_bytes(), found.parent.name
        storage = scratch / "grid" / "storage"
        shutil.rmtree(storage)
        share = storage / "00" / "shares" / name[:2] / name / "3"
        share.parent.mkdir(parents=True)
        share.write_bytes(right)
        return grid, share
