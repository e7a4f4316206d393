"""Where an unanswered write is written down: in one place at a time, and nowhere when it has ended."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ServerUnreachable
from pipegrid.transport.gbs.client import GbsServer
from tests.scratch import scratch_path
from tests.storage.support import SECRETS, SI
from tests.transport.gbs_world import GbsWorld


def places(server: GbsServer) -> dict[str, int]:
    """Return how many writes stand where, below the caller's own book and the pipeline's."""
    uploads = server._uploads.connection
    uploads._check_invariants()
    connection = uploads._connection
    lane: Any = () if connection is None else (*connection.lane.written, *connection.lane.queued)
    held = {
        "not sent yet": server._order.held,
        "for the next bundle": sum(
            len(each.upload.shares) for each in server._uploads.bundles._held.values()
        ),
        "for a connection": len(uploads._waiting),
        "on a connection": sum(not each.abandoned for each in lane),
        "questions": len(server._asked),
    }
    return {name: count for name, count in held.items() if count}


class BookTests(SynchronousTestCase):
    """A client's books, wherever a write is on its way."""

    def setUp(self) -> None:
        self.world = GbsWorld(scratch_path(self))
        self.server = self.world.connect()
        self.ends: list[Any] = []

    def tearDown(self) -> None:
        self.world.run(self.server.disconnect())
        self.assertEqual(places(self.server), {})

    def write(self, offset: int, data: bytes = b"12345") -> Any:
        """Write to share 3, and note how that ends."""
        call = self.server.write(SI, 3, offset, [data], SECRETS.upload)
        return call.addBoth(self.ends.append)

    def test_one_place_at_a_time(self) -> None:
        """For a connection, then on it, then nowhere; not among the questions either."""
        allocated = self.server.allocate(SI, {3}, 10, SECRETS)
        first, second = self.write(0), self.write(5)
        self.assertEqual(places(self.server), {"for a connection": 3})
        self.world.clock.advance(0.1)
        self.assertEqual(places(self.server), {"on a connection": 3})
        self.assertEqual(len(self.server._order), 2)  # counted
        self.world.run(allocated)
        self.world.run(first)
        self.world.run(second)
        self.assertTrue(self.ends[-1].complete)
        self.assertEqual(places(self.server), {})
        self.assertEqual(len(self.server._order), 0)

    def test_back_from_a_lost_connection(self) -> None:
        """What a lost connection gives back waits for the next one, in its old order, and goes on that."""
        self.server.allocate(SI, {3}, 10, SECRETS)
        first, second = self.write(0), self.write(5)
        self.world.clock.advance(0.12)
        self.assertEqual(places(self.server), {"on a connection": 3})
        self.world.servers[0].host.crash(down_s=1)
        self.world.clock.advance(0.1)
        self.assertEqual(places(self.server), {"for a connection": 3})
        self.world.run(first)
        self.world.run(second)
        self.assertEqual([each.complete for each in self.ends], [False, True])

    def test_behind_a_question(self) -> None:
        """A write that a question might see has not been sent, and stands where that is known."""
        listed = self.server.list_shares(SI)
        self.server.allocate(SI, {3}, 10, SECRETS).addErrback(lambda _: None)
        self.write(0)
        self.assertEqual(
            places(self.server), {"not sent yet": 1, "for a connection": 1, "questions": 1}
        )
        self.world.run(listed)
        self.assertEqual(places(self.server), {"on a connection": 1})
        self.assertEqual(self.server._order.held, 0)

    def test_disconnected_wherever_it_stands(self) -> None:
        """It is found there, and its caller is told what happened."""
        for after_s in (None, 0.0, 0.1, 0.16):
            self.server = self.world.connect()
            self.ends.clear()
            listed = self.server.list_shares(SI) if after_s is None else None
            self.server.allocate(SI, {3}, 10, SECRETS).addErrback(lambda _: None)
            self.write(0)
            if listed is not None:
                listed.addErrback(lambda _: None)
            self.world.clock.advance(after_s or 0.0)
            self.world.run(self.server.disconnect())
            (end,) = self.ends
            self.assertTrue(end.check(ServerUnreachable))
            self.assertIn("disconnected here", str(end.value))
            self.assertEqual(places(self.server), {})
