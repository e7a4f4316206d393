"""One storage node changes hands, from Tahoe-LAFS to PipeGrid and back; in full: ``gateway_replace``."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.interop.gateway_takeover import Takeover, make_world


class ReplaceTests(SynchronousTestCase):
    """An introducer, a server and a gateway."""

    def test_there_and_back(self) -> None:
        """Nothing is lost, the server stays the same to its clients, and leases are renewed, not added."""
        world = make_world(Path(self.mktemp()).absolute(), "tahoe", 1, 1)
        self.addCleanup(world.stop)
        Takeover(world, "gbs", "there and back").run("pipegrid", "tahoe")
