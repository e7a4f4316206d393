"""Large mutable files over slow lines: they take their time, and nobody is given up for that."""

from __future__ import annotations

from pathlib import Path

from tests.grid.test_mutables import GridTestCase
from tests.transfer.world import content
from tests.transport.gbs_world import GbsWorld

SIZE = 3_000_000
BYTES_PER_S = 8000


class SlowLineTests(GridTestCase):
    """Ten servers, 8 kB/s each; a share has a megabyte, and servers and clients patience for a minute."""

    def setUp(self) -> None:
        self.world = GbsWorld(Path(self.mktemp()), 10, latency_s=0.05, bytes_per_s=BYTES_PER_S)
        self.addCleanup(self.world.close)
        self.grids = []
        self.grid = self.open()

    def test_create_read_and_change(self) -> None:
        """Whole files go and come in two minutes each; a range is quicker."""
        clock = self.world.clock
        began_s = clock.seconds()
        cap = self.world.run(self.grid.create_mutable(content(SIZE), format="mdmf")).cap
        self.assertGreater(clock.seconds() - began_s, 120)
        began_s = clock.seconds()
        self.assertEqual(self.world.run(self.open().read(cap.readonly())), content(SIZE))
        self.assertGreater(clock.seconds() - began_s, 120)
        began_s = clock.seconds()
        self.world.run(self.grid.update(cap, SIZE // 2, b"x" * 100))
        self.assertLess(clock.seconds() - began_s, 30)
        self.assertTrue(self.world.run(self.open().check(cap)).healthy)
