"""
Storage nodes change hands, in full: from Tahoe-LAFS to PipeGrid and back, and the reverse; over both
protocols.

Run it with ``make interop``. A version of seconds is in ``test_gateway_replace``.
"""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.interop.gateway_takeover import Takeover, make_world
from tests.interop.gateway_world import Kind, Protocol

SERVERS, NEEDED = 4, 2


class ReplaceTests(SynchronousTestCase):
    """Four servers, each of which is replaced twice."""

    def replace(self, protocol: Protocol, first: Kind, then: Kind) -> None:
        """Hand them over and back."""
        world = make_world(Path(self.mktemp()).absolute(), first, SERVERS, NEEDED)
        self.addCleanup(world.stop)
        Takeover(world, protocol, f"{protocol} {first}").run(then, first)

    def test_tahoe_over_https(self) -> None:
        """Tahoe-LAFS's servers become PipeGrid's and Tahoe-LAFS's again; clients speak HTTPS."""
        self.replace("gbs", "tahoe", "pipegrid")

    def test_tahoe_over_foolscap(self) -> None:
        """Tahoe-LAFS's servers become PipeGrid's and Tahoe-LAFS's again; clients speak Foolscap."""
        self.replace("foolscap", "tahoe", "pipegrid")

    def test_pipegrid_over_https(self) -> None:
        """PipeGrid's servers become Tahoe-LAFS's and PipeGrid's again; clients speak HTTPS."""
        self.replace("gbs", "pipegrid", "tahoe")

    def test_pipegrid_over_foolscap(self) -> None:
        """PipeGrid's servers become Tahoe-LAFS's and PipeGrid's again; clients speak Foolscap."""
        self.replace("foolscap", "pipegrid", "tahoe")
