"""Many small shares over the other protocol of a server that takes no bundles; HTTPS has the last word."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NoSpace, NoSuchShare, ServerError, ServerRefused, ServerUnreachable
from pipegrid.flow.concurrency_limits import MANY, SmallFileCapacity
from pipegrid.transport.gbs import foolscap_offload
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.foolscap_offload import AGAIN_S, CROWD, SOON_S, FoolscapOffload
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.storage_messages import Allocation, Stored
from tests.scratch import scratch_path
from tests.transport.contract import OTHER_SI, OTHERS_SECRETS, SECRETS, SI
from tests.transport.gbs_world import GbsWorld
from tests.transport.test_gbs import GbsContractTests

SHARES = {3: b"whole"}


def without_bundles(server: GbsServer) -> GbsServer:
    """Have a client not hear that its server takes bundles, as one of Tahoe-LAFS's does not."""
    server._uploads.bundles.heard = lambda answer: None  # type: ignore[method-assign]
    return server


class Other:
    """
    Reaches the same server on connections of its own; what it is told to do is noted.

    Attributes:
        breaks: fails instead of storing.
        offline: fails to connect.
        is_connected: nothing has cut the connection since.
        last_activity_s: when it answered anything, by the clock.
        stores: calls of ``store_whole``.
    """

    whole_bytes = 1000
    last_activity_s = -math.inf

    def __init__(self, server: GbsServer) -> None:
        self.server = without_bundles(server)
        self.breaks: Callable[[], Deferred[Stored]] | None = None
        self.offline = self.is_connected = False
        self.connects = 0
        self.stores: list[bytes] = []

    def version(self) -> Deferred[Any]:
        self.connects += 1
        if self.offline:
            return fail(ServerUnreachable("it is not there", "s0"))
        self.is_connected = True
        return self.server.version()

    def store_whole(self, storage_index: bytes, *call: Any) -> Deferred[Stored]:
        self.stores.append(storage_index)
        if self.breaks is not None:
            return self.breaks()
        return self.server.store_whole(storage_index, *call)

    def disconnect(self) -> Deferred[None]:
        return self.server.disconnect()


class BesideContractTests(GbsContractTests):
    """The contract, where every whole share goes the other way."""

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        server = super().make_server(capacity_bytes)
        assert isinstance(server, GbsServer)
        self.patch(foolscap_offload, "CROWD", 0)
        self.patch(foolscap_offload, "MANY", 0)
        self.other = Other(self.world.connect())
        server._beside = FoolscapOffload(self.world.client.clock, lambda: self.other)  # type: ignore[arg-type,return-value]
        without_bundles(server)
        server._beside.offer()
        self.world.clock.advance(1)
        return server

    def test_shares_are_stored_whole(self) -> None:
        """They are, and went the other way."""
        super().test_shares_are_stored_whole()
        self.assertEqual(self.other.stores, [SI, SI])


class BesideTests(SynchronousTestCase):
    """When what goes which way, and what becomes of it."""

    def setUp(self) -> None:
        self.world = GbsWorld(scratch_path(self))
        self.addCleanup(self.world.close)
        self.other = Other(self.world.connect())
        self.opened = 0
        self.server = without_bundles(self.connect())

    def tearDown(self) -> None:
        self.world.run(self.server.disconnect())
        self.world.run(self.other.disconnect())

    def connect(self) -> GbsServer:
        """Return a client that has another way."""

        def open_server() -> Any:
            self.opened += 1
            return self.other

        server = self.world.connect()
        server._beside = FoolscapOffload(self.world.client.clock, open_server)
        return server

    @property
    def offload_bytes(self) -> int:
        """How long a share may be to go the other way now."""
        assert self.server._beside is not None
        return self.server._beside.whole_bytes

    def allocate(self, count: int, first: int = 0) -> list[Deferred[Allocation]]:
        """Begin so many uploads."""
        indexes = [bytes([first + number]) * 16 for number in range(count)]
        calls = [self.server.allocate(each, {0}, 5, SECRETS) for each in indexes]
        for call in calls:
            call.addErrback(
                lambda failure: failure.trap(ServerUnreachable)
            )  # disconnected in the end
        return calls

    def crowd(self) -> list[Deferred[Allocation]]:
        """Have the other way connected, and so many uploads under way that it is taken."""
        self.allocate(MANY)
        self.world.clock.advance(5)
        return self.allocate(CROWD, 150)

    def store(self, storage_index: bytes = SI) -> Deferred[Stored]:
        """Store a whole share."""
        return self.server.store_whole(storage_index, SHARES, 5, SECRETS)

    def read(self) -> bytes:
        """Return what is stored."""
        return self.world.run(self.server.read(SI, 3, 0, 10))

    def test_few_uploads_go_over_https(self) -> None:
        """One round trip, and no connection that nobody needs."""
        for _ in range(3):
            self.allocate(MANY - 1)
            self.world.clock.advance(5)
        self.assertEqual((self.opened, self.offload_bytes), (0, 0))
        self.world.run(self.store())
        self.assertEqual((self.other.stores, self.read()), ([], b"whole"))

    def test_a_crowd_that_is_expected(self) -> None:
        """It is connected when the first answer shows that there are no bundles; until then few come."""
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)
        self.server.expect(MANY)
        self.assertEqual((self.opened, self.server.small_file_capacity), (0, SmallFileCapacity.FEW))
        self.allocate(1)
        self.assertEqual(self.opened, 0)
        self.world.clock.advance(5)
        self.assertEqual(
            (self.opened, self.server.small_file_capacity), (1, SmallFileCapacity.COUNTED)
        )
        self.allocate(CROWD, 150)
        self.assertEqual(self.offload_bytes, 1000)
        self.server.expect(MANY)  # when it is up there is nothing to prepare
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)

    def test_whole_shares_are_a_crowd(self) -> None:
        """What is stored whole over HTTPS is counted like other uploads, and has it connected."""
        stores = [self.store(bytes([number]) * 16) for number in range(MANY)]
        self.assertEqual(self.opened, 0)
        for stored in stores:
            self.world.run(stored)
        self.assertEqual((self.opened, self.other.stores), (1, []))

    def test_no_crowd_is_expected(self) -> None:
        """Of fewer objects it is not worth while."""
        self.server.expect(MANY - 1)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)
        self.allocate(CROWD)
        self.world.clock.advance(5)
        self.assertEqual(self.opened, 0)

    def test_an_expectation_is_forgotten(self) -> None:
        """Whoever expected a crowd and stored nothing has connected nothing, nor do others later."""
        self.server.expect(MANY)
        self.world.clock.advance(SOON_S)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)
        self.world.clock.advance(AGAIN_S)
        self.allocate(CROWD)
        self.world.clock.advance(5)
        self.assertEqual(self.opened, 0)

    def test_a_crowd_expected_where_bundles_are_taken(self) -> None:
        """The first answer says so, and all come."""
        self.server = self.connect()
        self.server.expect(MANY)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.FEW)
        self.allocate(1)
        self.world.clock.advance(5)
        self.assertEqual((self.opened, self.server.small_file_capacity), (0, SmallFileCapacity.ANY))
        self.server.expect(MANY)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.ANY)

    def test_a_crowd_expected_after_a_failure(self) -> None:
        """What could not be connected is not tried at once, and nobody waits for it."""
        self.other.offline = True
        for _ in range(2):
            self.server.expect(MANY)
            self.allocate(1)
            self.world.clock.advance(5)
            self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)
        self.assertEqual(self.other.connects, 1)
        self.world.clock.advance(AGAIN_S)
        self.server.expect(MANY)
        self.allocate(1)
        self.world.clock.advance(5)
        self.assertEqual(self.other.connects, 2)

    def test_its_answers_are_signs_of_life(self) -> None:
        """For all who wait for the server, whichever way they asked."""
        self.crowd()
        before = self.server.last_activity_s
        self.other.last_activity_s = before + 100.0
        self.assertEqual(self.server.last_activity_s, before + 100.0)

    def test_few_while_it_is_connected(self) -> None:
        """What goes over HTTPS meanwhile is in the way; but that is not minded for long."""
        answer: Deferred[None] = Deferred()
        self.other.version = lambda: answer  # type: ignore[method-assign]
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)
        self.allocate(MANY)
        self.world.clock.advance(0.5)
        self.assertEqual((self.opened, self.server.small_file_capacity), (1, SmallFileCapacity.FEW))
        self.world.clock.advance(SOON_S)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)
        answer.callback(None)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)

    def test_not_few_after_a_failure(self) -> None:
        """A connection that cannot be made is in nobody's way."""
        answer: Deferred[None] = Deferred()
        self.other.version = lambda: answer  # type: ignore[method-assign]
        self.allocate(MANY)
        self.world.clock.advance(0.5)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.FEW)
        answer.errback(ServerUnreachable("it is not there", "s0"))
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.COUNTED)

    def test_many_do_not(self) -> None:
        """Once the connection is up, as long as they are many."""
        self.crowd()
        self.assertEqual((self.opened, self.offload_bytes), (1, 1000))
        stored = self.store()
        self.assertEqual(self.other.stores, [SI])
        self.assertEqual(
            self.world.run(stored), Stored(Allocation(frozenset(), frozenset({3})), {})
        )
        self.assertEqual((self.offload_bytes, self.read()), (0, b"whole"))

    def test_longer_shares_go_over_https(self) -> None:
        """What is longer than the other way takes."""
        self.crowd()
        stored = self.server.store_whole(SI, {3: bytes(1001)}, 1001, SECRETS)
        self.world.run(stored)
        self.assertEqual(self.other.stores, [])

    def test_a_server_that_takes_bundles(self) -> None:
        """It gets them."""
        self.server = self.connect()
        self.crowd()
        self.assertEqual(self.opened, 0)
        self.assertTrue(self.server.takes_bundles)
        self.assertEqual(self.server.small_file_capacity, SmallFileCapacity.ANY)

    def test_not_reached(self) -> None:
        """All goes on over HTTPS, and it is tried again after a minute."""
        self.other.offline = True
        self.crowd()
        self.assertEqual((self.other.connects, self.offload_bytes), (1, 0))
        self.world.clock.advance(AGAIN_S)
        self.crowd()
        self.assertEqual(self.other.connects, 2)

    def test_lost(self) -> None:
        """What was under way is stored over HTTPS, and the next ones go there, too."""
        self.crowd()
        self.other.breaks = lambda: fail(ServerUnreachable("it is gone", "s0"))
        stored = self.world.run(self.store())
        self.assertEqual(stored, Stored(Allocation(frozenset(), frozenset({3})), {}))
        self.assertEqual(self.read(), b"whole")
        self.allocate(CROWD, 170)
        self.assertEqual(self.offload_bytes, 0)

    def test_lost_while_nobody_stored(self) -> None:
        """The next crowd goes over HTTPS, and waits for nothing, until the connection is made again."""
        self.crowd()
        self.world.clock.advance(AGAIN_S)
        self.other.is_connected = False
        self.allocate(CROWD, 170)
        self.assertEqual(self.offload_bytes, 0)
        self.world.run(self.store())
        self.assertEqual((self.other.stores, self.read()), ([], b"whole"))
        self.assertEqual(self.other.connects, 1)
        self.crowd()
        self.assertEqual((self.opened, self.other.connects), (1, 2))
        self.assertEqual(self.offload_bytes, 1000)

    def test_lost_before_its_turn(self) -> None:
        """What waited behind another call of its index is stored over HTTPS at once."""
        self.crowd()
        listed, stored = self.server.list_shares(SI), self.store()
        self.other.is_connected = False
        self.world.run(listed)
        self.world.run(stored)
        self.assertEqual((self.other.stores, self.read()), ([], b"whole"))

    def test_refused(self) -> None:
        """Whatever the other way does not store is asked for over HTTPS; its word counts."""
        error: ServerError
        for number, error in enumerate((ServerRefused("no", "s0"), NoSpace("full", "s0"))):
            index = bytes([200 + number]) * 16
            self.crowd()
            self.other.breaks = lambda error=error: fail(error)
            stored = self.world.run(self.store(index))
            self.assertEqual(stored.allocation.allocated, {3})
            self.other.breaks = None
            self.world.clock.advance(5)

    def test_partly(self) -> None:
        """What it has stored stays stored; only the rest is asked for again."""
        self.crowd()
        self.world.run(self.server.store_whole(SI, {7: b"there"}, 5, SECRETS))
        there = Allocation(frozenset({7}), frozenset({1, 2}))
        self.other.breaks = lambda: succeed(Stored(there, {2: NoSuchShare("gone", "s0")}))
        self.allocate(CROWD, 170)
        shares = dict.fromkeys((1, 2, 3, 7), b"bytes")
        stored = self.world.run(self.server.store_whole(SI, shares, 5, SECRETS))
        self.assertEqual(stored, Stored(Allocation(frozenset({7}), frozenset({1, 2, 3})), {}))
        # Share 1 was only said to be stored.
        self.assertEqual(self.world.run(self.server.list_shares(SI)), {2, 3, 7})

    def test_an_unfinished_upload_of_somebody_else(self) -> None:
        """It is refused as HTTPS refuses it."""
        self.world.run(self.server.allocate(SI, {3}, 5, OTHERS_SECRETS))
        self.crowd()
        stored = self.world.run(self.store())
        self.assertEqual(self.other.stores, [SI])
        self.assertEqual(stored.failed.keys(), {3})

    def test_what_was_called_before_is_done_before(self) -> None:
        """A write that completes the same share comes first: then the share is there already."""
        self.world.run(self.server.allocate(SI, {3}, 5, SECRETS))
        self.crowd()
        written = self.server.write(SI, 3, 0, [b"older"], SECRETS.upload)
        stored = self.store()
        self.assertEqual(self.other.stores, [])
        self.assertTrue(self.world.run(written).complete)
        self.assertEqual(self.world.run(stored).allocation.already_have, {3})
        self.assertEqual(self.read(), b"older")

    def test_what_was_asked_before_is_answered_before(self) -> None:
        """A list does not show what was stored behind it."""
        self.crowd()
        listed, stored = self.server.list_shares(SI), self.store()
        self.assertEqual(self.other.stores, [])
        self.assertEqual(self.world.run(listed), frozenset())
        self.world.run(stored)

    def test_what_comes_behind_it_finds_it(self) -> None:
        """Questions and changes of the same index wait for its end; those of others do not."""
        self.crowd()
        ends: dict[str, Any] = {}
        calls: dict[str, Deferred[Any]] = {
            "stored": self.store(),
            "listed": self.server.list_shares(SI),
            "read": self.server.read(SI, 3, 0, 10),
            "aborted": self.server.abort(SI, 3, SECRETS.upload),
            "elsewhere": self.server.list_shares(OTHER_SI),
        }
        for name, call in calls.items():
            call.addBoth(partial(ends.__setitem__, name))
        self.world.clock.advance(5)
        self.assertEqual(ends.keys(), calls.keys())
        order = [name for name in ends if name != "elsewhere"]
        self.assertEqual(order, ["stored", "listed", "read", "aborted"])
        self.assertLess(list(ends).index("elsewhere"), list(ends).index("listed"))
        self.assertEqual((ends["listed"], ends["read"]), ({3}, b"whole"))
        self.assertTrue(ends["aborted"].check(NoSuchShare))

    def test_disconnected(self) -> None:
        """Whoever waits is told, and nothing is left."""
        self.crowd()
        calls = [self.store(), self.store(), self.store(OTHER_SI)]
        ended = [call.addErrback(lambda failure: failure.value) for call in calls]
        self.world.run(self.server.disconnect())
        self.world.clock.advance(1)
        for call in ended:
            self.assertIsInstance(self.successResultOf(call), ServerUnreachable)
        self.assertIsInstance(self.failureResultOf(self.store()).value, ServerUnreachable)
        self.assertEqual((len(self.server._order), len(self.server._asked)), (0, 0))

    def test_cancelled(self) -> None:
        """Who gives up leaves nothing behind, and holds up nobody."""
        self.crowd()
        first, second = self.store(), self.store()
        for call in (first, second):
            call.addErrback(lambda _: None)
            call.cancel()
        self.world.clock.advance(5)
        self.assertEqual((len(self.server._order), len(self.server._asked)), (0, 0))
