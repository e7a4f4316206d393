"""Leases of many files over the other protocol of a server without bundles; see ``gbs.foolscapbeside``."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ServerError, ServerRefused, ServerTimeout, ServerUnreachable
from pipegrid.flow.concurrency_limits import MANY
from pipegrid.storage import share_file
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.foolscap_offload import AGAIN_S, CROWD, SOON_S, FoolscapOffload
from pipegrid.transport.surveys import Question, Surveyed, survey
from pipegrid.wire.storage_messages import LeaseSecrets
from tests.scratch import scratch_path
from tests.transport.contract import OTHERS_SECRETS, SECRETS
from tests.transport.gbs_world import GbsWorld
from tests.transport.test_gbs_foolscapbeside import without_bundles

LEASE = OTHERS_SECRETS.lease
HERE = b"i" * 16
"""The only index that has a share."""


class Other:
    """
    Reaches the same server on connections of its own, and notes what it leases.

    Attributes:
        is_slow: it is never connected, nor fails to be.
        offline: it fails to connect.
        breaks: what it fails with, instead of leasing.
        leased: the indexes that it was asked about.
    """

    last_activity_s = float("-inf")

    def __init__(self, server: GbsServer) -> None:
        self.server = without_bundles(server)
        self.is_slow = self.offline = self.is_connected = False
        self.breaks: ServerError | None = None
        self.connects = 0
        self.leased: list[bytes] = []

    def version(self) -> Deferred[Any]:
        self.connects += 1
        if self.is_slow:
            return Deferred()
        if self.offline:
            return fail(ServerUnreachable("it is not there", "s0"))
        self.is_connected = True
        return self.server.version()

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        self.leased.append(storage_index)
        if self.breaks is not None:
            return fail(self.breaks)
        # As Foolscap has it: that there is nothing to lease is no error.
        leased = self.server.add_lease(storage_index, lease)
        return leased.addErrback(lambda failure: failure.trap(ServerRefused) and None)

    def disconnect(self) -> Deferred[None]:
        return self.server.disconnect()


class LeasesTests(SynchronousTestCase):
    """When they go which way, and what becomes of them."""

    def setUp(self) -> None:
        self.root = scratch_path(self)
        self.world = GbsWorld(self.root)
        self.addCleanup(self.world.close)
        self.other = Other(self.world.connect())
        self.server = self.connect()
        self.https = self.count_requests()
        self.world.run(self.server.store_whole(HERE, {3: b"whole", 4: b"other"}, 5, SECRETS))

    def tearDown(self) -> None:
        self.world.run(self.server.disconnect())
        self.world.run(self.other.disconnect())

    def connect(self) -> GbsServer:
        """Return a client that has another way."""
        server = without_bundles(self.world.connect())
        server._beside = FoolscapOffload(self.world.client.clock, lambda: self.other)  # type: ignore[arg-type,return-value]
        return server

    def count_requests(self) -> list[bytes]:
        """Return a list to which the indexes are added whose leases are asked for over HTTPS."""
        asked: list[bytes] = []
        request = self.server._requests.add_lease

        def add_lease(storage_index: bytes, lease: LeaseSecrets) -> Any:
            asked.append(storage_index)
            return request(storage_index, lease)

        self.patch(self.server._requests, "add_lease", add_lease)
        return asked

    def ask(self, count: int, first: int = 0) -> dict[int, Surveyed | ServerError]:
        """Ask about so many indexes, the last of which has shares, each with a lease; not waited for."""
        answers: dict[int, Surveyed | ServerError] = {}
        indexes = [*((first + number).to_bytes(16, "big") for number in range(1, count)), HERE]
        survey(self.server, [Question(each, LEASE) for each in indexes], answers.__setitem__)
        return answers

    def leases(self) -> list[int]:
        """Return how many leases the server has of each share that there is."""
        found = []
        for path in self.root.rglob("*"):
            if path.is_file() and path.name in ("3", "4"):
                data = path.read_bytes()
                offset = share_file.leases_offset(share_file.parse_header(data), len(data))
                found.append(len(share_file.parse_leases(data[offset:])))
        return found

    def check(self, answers: dict[int, Surveyed | ServerError], count: int) -> None:
        """All were answered, and only what is there has a lease."""
        self.assertEqual(len(answers), count)
        self.assertEqual(answers.pop(count - 1), Surveyed(frozenset({3, 4}), leased=True))
        for answer in answers.values():
            self.assertEqual(answer, Surveyed(frozenset()))
        self.assertEqual(self.leases(), [2, 2])

    def test_few(self) -> None:
        """They go over HTTPS, and nothing is connected that nobody needs."""
        for _ in range(3):
            answers = self.ask(MANY - 1)
            self.world.clock.advance(5)
            self.check(answers, MANY - 1)
        self.assertEqual((self.other.connects, self.other.leased), (0, []))
        self.assertEqual(len(self.https), 3 * (MANY - 1))

    def test_a_crowd(self) -> None:
        """Those behind the first wait until it is connected, their lists do not; HTTPS has none then."""
        answers = self.ask(3 * MANY)
        self.assertEqual((len(self.https), self.other.leased), (MANY - 1, []))
        self.world.clock.advance(5)
        self.check(answers, 3 * MANY)
        self.assertEqual((len(self.https), self.other.connects), (MANY - 1, 1))
        self.assertEqual(len(self.other.leased), 2 * MANY + 1)
        # The next crowd finds it there from its first one on, as soon as they are many at once.
        again = self.ask(MANY, 5000)
        self.world.clock.advance(5)
        self.check(again, MANY)
        self.assertEqual(len(self.https), MANY - 1 + CROWD - 1)

    def test_it_cannot_be_connected(self) -> None:
        """All goes over HTTPS at once, and it is not tried again for a minute."""
        self.other.offline = True
        for number in range(2):
            answers = self.ask(2 * MANY, 1000 * number)
            self.assertEqual(len(self.https), 2 * MANY * (number + 1))
            self.world.clock.advance(5)
            self.check(answers, 2 * MANY)
        self.assertEqual(self.other.connects, 1)
        self.world.clock.advance(AGAIN_S)
        self.ask(2 * MANY, 5000)
        self.world.clock.advance(5)
        self.assertEqual(self.other.connects, 2)

    def test_it_takes_long(self) -> None:
        """It is not waited for any longer then, neither by those that waited nor by what comes later."""
        self.other.is_slow = True
        answers = self.ask(2 * MANY)
        self.world.clock.advance(SOON_S - 0.1)
        self.assertEqual(len(self.https), MANY - 1)
        self.world.clock.advance(0.2)
        self.assertEqual(len(self.https), 2 * MANY)
        self.world.clock.advance(5)
        self.check(answers, 2 * MANY)
        later = self.ask(2 * MANY, 1000)
        self.assertEqual(len(self.https), 4 * MANY)
        self.world.clock.advance(5)
        self.check(later, 2 * MANY)

    def test_lost(self) -> None:
        """What has no answer is asked for over HTTPS, and so is all else for a minute."""
        for error in (ServerUnreachable("gone", "s0", True), ServerTimeout("silent", "s0", True)):
            self.ask(2 * MANY)
            self.world.clock.advance(5)
            self.other.breaks = error
            del self.https[:], self.other.leased[:]
            answers = self.ask(2 * MANY, 1000)
            self.world.clock.advance(5)
            self.check(answers, 2 * MANY)
            self.assertEqual((len(self.https), len(set(self.https))), (2 * MANY, 2 * MANY))
            answers = self.ask(2 * MANY, 2000)
            self.world.clock.advance(5)
            self.check(answers, 2 * MANY)
            self.assertLessEqual(len(self.other.leased), 2 * MANY)
            self.other.breaks = None
            self.world.clock.advance(AGAIN_S)

    def test_refused(self) -> None:
        """HTTPS has the last word, for each that is refused."""
        self.other.breaks = ServerRefused("the disk is full", "s0")
        answers = self.ask(2 * MANY)
        self.world.clock.advance(5)
        self.check(answers, 2 * MANY)
        self.assertEqual((len(self.https), len(self.other.leased)), (2 * MANY, MANY + 1))

    def test_a_server_that_takes_bundles(self) -> None:
        """It is asked for leases over HTTPS only, should it take no surveys."""
        server = self.world.connect()
        server._beside = FoolscapOffload(self.world.client.clock, lambda: self.other)  # type: ignore[arg-type,return-value]
        self.world.run(server.version())
        self.assertTrue(server.takes_bundles)
        leased = [server.lease_listed(HERE, LEASE) for _ in range(2 * MANY)]
        self.world.clock.advance(5)
        for each in leased:
            self.assertIsNone(self.successResultOf(each))
        self.assertEqual((self.other.connects, self.other.leased), (0, []))
        self.world.run(server.disconnect())

    def test_disconnected(self) -> None:
        """Whoever waits is told, for a connection that is being made as well, and nothing is left."""
        self.other.is_slow = True
        answers = self.ask(2 * MANY)
        self.world.run(self.server.disconnect())
        self.world.clock.advance(0)
        self.assertEqual(len(answers), 2 * MANY)
        for answer in answers.values():
            self.assertIsInstance(answer, ServerUnreachable)
        self.assertEqual(len(self.server._asked), 0)
        self.world.clock.advance(SOON_S / 2)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_cancelled(self) -> None:
        """Who gives up leaves nothing behind, whether it waits for a connection or for an answer."""
        for advance_s in (0.0, 0.35, 0.5):
            asked = [self.server.lease_listed(HERE, LEASE) for _ in range(2 * MANY)]
            self.world.clock.advance(advance_s)
            for each in asked:
                each.addErrback(lambda _: None)
                each.cancel()
            self.assertEqual((len(self.server._asked), self.server._beside._pending), (0, 0))  # type: ignore[union-attr]
            self.world.clock.advance(5)
