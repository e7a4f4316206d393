"""One storage node changes hands, from Tahoe-LAFS to PipeGrid and back; in full: ``gateway_replace``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.interop.gateway_takeover import Takeover, make_world
from tests.interop.gateway_world import Server


class SlowProcess:
    """A server that prints a line at a time, and a line of its log in between."""

    LINES = (
        "pb://key@127.0.0.1:1/secret#v=1\n",
        "a line of the log\n",
        "pb://tub@tcp:127.0.0.1:1/secret\n",
    )

    def __init__(self) -> None:
        self._looks = 0

    def log(self) -> str:
        """Return a little more each time."""
        self._looks += 1
        return "".join(self.LINES)[: 11 * self._looks]

    def assert_running(self) -> None:
        """It does."""


class AddressesTests(SynchronousTestCase):
    """What a server prints is read when all of it is there."""

    def test_a_line_at_a_time(self) -> None:
        """The NURL may be there some time before the fURL is."""
        process: Any = SlowProcess()
        server = Server(Path(self.mktemp()), 1, "pipegrid", process)
        nurl, furl = server.addresses()
        self.assertEqual((f"{nurl}\n", f"{furl}\n"), (SlowProcess.LINES[0], SlowProcess.LINES[2]))


class ReplaceTests(SynchronousTestCase):
    """An introducer, a server and a gateway."""

    def test_there_and_back(self) -> None:
        """Nothing is lost, the server stays the same to its clients, and leases are renewed, not added."""
        world = make_world(Path(self.mktemp()).absolute(), "tahoe", 1, 1)
        self.addCleanup(world.stop)
        Takeover(world, "gbs", "there and back").run("pipegrid", "tahoe")
