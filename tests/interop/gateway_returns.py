"""
Tahoe-LAFS's gateway refuses its own overwrite when a server comes back between its look and its write.

It looks for shares on the servers that it is connected to, and places those that it has not found on servers
that it is connected to by then: a share that nobody showed it goes to the server that has it, which must have
none, and refuses. Nothing of PipeGrid's takes part. ``make interop`` runs it.
"""

from __future__ import annotations

from pathlib import Path

from twisted.internet import reactor
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.interop.gateway_world import World, share_files
from tests.interop.processes import until

SHARES = (2, 3, 4)
LOOKING_S = 1.0
"""The gateway has asked all servers by then, and waits for the one that stands still."""


class ReturningTests(TestCase):
    """Four of Tahoe-LAFS's servers, over Foolscap, where a server that stands still is not lost by itself."""

    timeout = 900

    async def test_foolscap(self) -> None:
        """The write fails, most of its shares are there all the same, and the next write is done."""
        root = Path(self.mktemp()).absolute()
        world = World(root, ("tahoe",) * 4, SHARES)
        self.addCleanup(world.stop)
        gateway = world.start_gateway("foolscap")
        world.until_found(gateway)
        cap = gateway.put(b"first", "?format=SDMF")
        index = gateway.check(cap)["storage-index"]
        self.assertEqual(len(share_files(world.servers, index)), 4)
        gone, slow = world.servers[:2]
        gone.stop()
        until(lambda: not gone.is_reached_by(gateway), "the loss of a server", gateway)
        slow.pause()
        try:
            writing = deferToThread(gateway.request, "PUT", f"uri/{cap}", b"second")
            await deferLater(reactor, LOOKING_S)
            gone.start("tahoe")
            await deferToThread(
                until, lambda: gone.is_reached_by(gateway), "its coming back", gateway
            )
        finally:
            slow.resume()
        error = await self.assertFailure(writing, AssertionError)
        self.assertIn("UncoordinatedWriteError", str(error))
        self.assertEqual(gateway.get(cap), b"second")
        world.until_found(gateway)
        gateway.request("PUT", f"uri/{cap}", b"third")
        self.assertEqual(gateway.get(cap), b"third")
        self.assertTrue(gateway.check(cap)["results"]["healthy"])
