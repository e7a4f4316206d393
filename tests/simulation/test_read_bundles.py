"""Many small gets on a whole grid: reads in bundles, what they cost, and servers that take none or lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred, gatherResults

from pipegrid.errors import PipegridError
from pipegrid.server.gbs.bundles import ReadBundle
from pipegrid.wire import cbor
from pipegrid.wire.gbs_paths_headers import Resource
from tests.simulation.test_grid_budgets import RTT_S
from tests.simulation.test_upkeep import UpkeepTestCase, answer_with, forget

FILES = 200


class ReadBundleTests(UpkeepTestCase):
    """Ten servers, 100 ms away, with two hundred small files."""

    def get_all(self) -> tuple[list[bytes], float]:
        """Fetch all at once; returns them, and how many round trips that took."""
        read = self.client.grid.read
        found, took_s = self.world.timed(lambda: gatherResults([read(cap) for cap in self.caps]))
        self.assertEqual([len(data) for data in found], [cap.size for cap in self.caps])
        return found, took_s / RTT_S

    def test_one_round_trip(self) -> None:
        """Four reads of a file, and some ten requests for each server."""
        self.store(FILES)
        self.get_all()
        before = self.requests()
        _, trips = self.get_all()
        self.assertLessEqual(trips, 1.1)
        asked = self.requests() - before
        self.assertLessEqual(asked["read bundle"] + asked["read"], 10 * 15)
        self.assertGreaterEqual(asked["read bundle"], 10)

    def test_a_new_client(self) -> None:
        """One that expects reads has asked each server once, and sends bundles from the first read on."""
        self.store(FILES)
        self.client = self.world.client()
        before = self.requests()
        for _ in range(2):
            with self.client.grid.reading_a_tree():
                self.world.clock.advance(1)
        self.assertEqual((self.requests() - before)["version"], 10)
        self.get_all()
        before = self.requests()
        self.get_all()
        asked = self.requests() - before
        self.assertEqual((asked["version"], asked["read"] < FILES), (0, True))
        self.assertGreaterEqual(asked["read bundle"], 10)

    def test_servers_that_take_none(self) -> None:
        """They get ordinary requests, and no second bundle."""
        self.store(FILES)
        found, _ = self.get_all()
        for server in self.world.servers:
            forget(server, Resource.READ_BUNDLE)
        self.assertEqual(self.get_all()[0], found)
        before = self.requests()
        self.assertEqual(self.get_all()[0], found)
        asked = self.requests() - before
        self.assertEqual((asked["POST"], asked["read bundle"]), (0, 0))
        self.assertGreaterEqual(asked["read"], 3 * FILES)

    def test_servers_that_lie(self) -> None:
        """Nonsense, wrong bytes, refusals of all: the files come from other servers."""
        self.store(FILES)
        found, _ = self.get_all()
        for body in (b"", b"\x80", cbor.dumps([500] * 64), cbor.dumps([b""] * 20), bytes(1 << 20)):
            for number in (1, 4):
                answer_with(self.world.servers[number], ReadBundle, body)
            self.assertEqual(self.get_all()[0], found, body[:10])

    def test_cancelled(self) -> None:
        """At any moment: nothing is left, and other gets go on."""
        self.store(40)
        found, _ = self.get_all()
        for delay_s in (0.0, RTT_S / 4, RTT_S):
            gets: list[Deferred[bytes]] = [self.client.grid.read(cap) for cap in self.caps]
            kept = gets[::2]
            self.world.clock.advance(delay_s)
            for each in gets[1::2]:
                each.addErrback(lambda failure: failure.trap(CancelledError) and None)
                each.cancel()
            self.assertEqual(self.world.run(gatherResults(kept)), found[::2])

    def test_a_server_that_is_stuck(self) -> None:
        """The files come from other servers, and no read is kept that nothing waits for."""
        self.store(FILES)
        found, _ = self.get_all()
        stuck = self.world.servers[3]
        stuck.site.service.begin = lambda _: Stuck()  # type: ignore[assignment,method-assign]
        self.assertEqual(self.get_all()[0], found)
        for peer in self.client.grid._means.peers:
            self.assertEqual(cast(Any, peer.server)._read_bundles._held, {})

    def test_disconnected(self) -> None:
        """Reads that are held or unanswered fail when the client is closed."""
        self.store(40)
        self.get_all()
        failed: list[Any] = []
        for cap in self.caps:
            self.client.grid.read(cap).addErrback(failed.append)
        self.world.run(self.client.grid.close())
        self.assertEqual(len(failed), 40)
        for failure in failed:
            self.assertTrue(failure.check(PipegridError, CancelledError), failure)


class Stuck:
    """Takes a request, and never answers."""

    shares: Sequence[Any] = ()

    def write(self, data: bytes) -> None:
        """Take it."""

    def finish(self) -> Deferred[Any]:
        """Wait for ever."""
        return Deferred()

    def abandon(self) -> None:
        """Nothing is left of it."""
