"""A grid that is full says so soon, and takes files again soon after it has room."""

from __future__ import annotations

from random import Random

from twisted.internet.defer import gatherResults
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UnhappyError
from pipegrid.storage.share_store import ShareStore
from pipegrid.transfer.put.client_put_state import FULL_S
from tests.simulation.grid_budgets import warm_up
from tests.simulation.grid_world import CLIENT, GridWorld

RTT_S = 0.1


class FullServersTests(SynchronousTestCase):
    """Ten servers, happiness seven."""

    def setUp(self) -> None:
        self.world = GridWorld(latency_s=RTT_S / 2)
        self.addCleanup(self.world.close)
        self.client = self.world.client()
        warm_up(self.world, self.client)
        self.random = Random(1)

    def room(self, free_bytes: int, servers: int = 10) -> None:
        """So much room is on so many servers."""
        for server in self.world.servers[:servers]:
            server.free_bytes = free_bytes

    def put(self, size: int = 20_000) -> tuple[UnhappyError | None, float, int]:
        """Store a new file; returns the error, how long that took, and the bytes that were sent."""
        since = len(self.world.network.log)
        began_s = self.world.clock.seconds()
        error = None
        try:
            self.world.run(self.client.grid.put(self.random.randbytes(size)))
        except UnhappyError as raised:
            error = raised
        sent = sum(
            each.size_bytes
            for each in list(self.world.network.log)[since:]
            if each.to_host != CLIENT
        )
        return error, self.world.clock.seconds() - began_s, sent

    def test_the_second_file(self) -> None:
        """It is refused after one round trip of small questions, with the same sentence."""
        self.room(0, 4)
        first, _, sent_before = self.put()
        assert first is not None
        again, took_s, sent = self.put()
        assert again is not None
        self.assertEqual(str(again), str(first).replace("reached only 6", "reached only 0"))
        self.assertIn("has no space", str(again))
        self.assertLessEqual(took_s, 1.1 * RTT_S)
        self.assertLess(sent, 4000)
        self.assertLess(sent * 10, sent_before)

    def test_a_quota(self) -> None:
        """The servers say why they refuse, in bundles and alone; others take the shares if they suffice."""
        self.patch(ShareStore, "quota_refuses", lambda store, *_: store.available_bytes() == 0)
        for size in (20_000, 3_000_000):
            self.room(0, 2)
            self.assertIsNone(self.put(size)[0])
            self.world.clock.advance(30)  # servers look at their disks from time to time
            self.room(0, 4)
            error = self.put(size)[0]
            self.assertIn("s0 has no space: its quota is used up (s1, s2, s3 too)", str(error))
            self.room(1 << 40)
            self.world.clock.advance(30)

    def test_two_hundred_files(self) -> None:
        """All are refused at once, but for some that find out."""
        self.room(0)
        self.put()
        began_s = self.world.clock.seconds()
        found = self.world.run(
            self.client.grid.put_many([self.random.randbytes(5000 + 90 * n) for n in range(200)])
        )
        errors = [each.type for each in found if isinstance(each, Failure)]
        self.assertEqual(errors, [UnhappyError] * 200)
        self.assertLess(self.world.clock.seconds() - began_s, 2)

    def test_room_comes_back(self) -> None:
        """After a few seconds one file finds out, and all that follow are stored."""
        self.room(0)
        self.assertIsNotNone(self.put()[0])
        self.room(1 << 30)
        self.assertIsNotNone(self.put()[0])
        self.world.clock.advance(FULL_S)
        for _ in range(3):
            self.assertIsNone(self.put()[0])

    def test_room_for_less(self) -> None:
        """What is too large for servers says nothing of what is smaller."""
        self.room(3000)
        self.assertIsNotNone(self.put()[0])
        self.assertIsNone(self.put(3000)[0])
        self.assertIsNotNone(self.put()[0])

    def test_what_is_there(self) -> None:
        """A file that full servers have is stored."""
        data = self.random.randbytes(20_000)
        self.world.run(self.client.grid.put(data))
        self.room(0)
        self.world.clock.advance(30)  # servers look at their disks from time to time
        self.assertIsNotNone(self.put()[0])
        result = self.world.run(self.client.grid.put(data))
        self.assertEqual((result.happiness, len(result.shares_found)), (10, 10))

    def test_a_server_that_does_not_answer(self) -> None:
        """Then nothing is taken for known: the file is given to those that are there."""
        self.room(0, 4)
        self.assertIsNotNone(self.put()[0])
        self.room(1 << 30)
        self.world.servers[0].host.crash()
        found = self.world.run(gatherResults([self.client.grid.put(self.random.randbytes(20_000))]))
        self.assertEqual(found[0].happiness, 9)
