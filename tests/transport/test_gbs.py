"""Real client, real server, simulated network: the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ServerUnreachable
from pipegrid.http11.pinned_key import pin_endpoint
from pipegrid.server import identity
from pipegrid.server.gbs.http_connection import GbsConnection, GbsSite
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.server.listener import PortListener
from pipegrid.testing.network import leaks
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.storage_messages import Allocation, WriteAnswer
from tests.scratch import scratch_path
from tests.transport.contract import SECRETS, SI, Consumer, StorageServerContract
from tests.transport.gbs_world import CLIENT, PORT, GbsWorld

T = TypeVar("T")


class GbsContractTests(StorageServerContract, SynchronousTestCase):
    """The contract, over HTTP and a network of 20 ms there and back."""

    def setUp(self) -> None:
        self.world = self.make_world()
        self.addCleanup(self.world.close)
        super().setUp()

    def make_world(self) -> GbsWorld:
        """Return a network with one server."""
        return GbsWorld(scratch_path(self), latency_s=0.01, policy="batch")

    def tearDown(self) -> None:
        super().tearDown()
        self.world.clock.advance(70)  # servers close what was cut off while it idled
        self.assertEqual(leaks(self.world.clock, self.world.network), [])

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        if capacity_bytes is not None:
            self.world.servers[0].free_bytes = capacity_bytes
        return self.world.connect()

    def resolve(self, waiting: Deferred[T]) -> T:
        return self.world.run(waiting)

    def settle(self) -> None:
        self.world.clock.advance(1.0)


class GbsBundlesContractTests(GbsContractTests):
    """The contract, from a client that knows before its first call that the server takes bundles."""

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        server = super().make_server(capacity_bytes)
        self.resolve(server.version())
        return server

    def test_bundles_are_used(self) -> None:
        """What is allocated and written at once is one bundle, and no other request for uploads."""
        requests = self.world.servers[0].factory.service.requests
        requests.clear()
        waiting = self.server.allocate(SI, {0, 5}, 3, SECRETS)
        writes = [self.server.write(SI, number, 0, [b"abc"], SECRETS.upload) for number in (0, 5)]
        self.assertEqual(self.resolve(waiting), Allocation(frozenset(), frozenset({0, 5})))
        self.assertEqual([self.resolve(write) for write in writes], [WriteAnswer(True)] * 2)
        self.assertEqual(requests, {("bundle", 200): 1})
        self.assertEqual(self.get(5), b"abc")


class TlsWorld(GbsWorld):
    """One server behind TLS. The key is made once: that is what takes long."""

    identity = identity.from_pem(identity.make_pem(), "unused", "a test's key")
    pin = identity.spki_hash

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, make_factory=self._make_factory, **options)

    def _make_factory(self, service: GbsService, clock: Any) -> Any:
        return PortListener(GbsSite(service, clock), self.identity.contexts(), clock)

    def connect(self, number: int = 0, *_: Any, pin: bytes | None = None, **__: Any) -> GbsServer:
        """Return a new client of the server."""

        def endpoint() -> Any:
            inner = self.network.endpoint(CLIENT, f"s{number}", PORT)
            return pin_endpoint(inner, self.pin if pin is None else pin, "s0")

        return super().connect(number, endpoint)


class GbsTlsContractTests(GbsContractTests):
    """The contract, with TLS."""

    def make_world(self) -> GbsWorld:
        return TlsWorld(scratch_path(self), latency_s=0.01, policy="batch")

    def test_cold_start(self) -> None:
        """The first put costs two round trips more, TCP and TLS, and no third; the next one none."""
        world = TlsWorld(scratch_path(self))
        self.addCleanup(world.close)
        server = world.connect()
        for number, expected in ((0, 3.0), (1, 1.0)):
            began_s = world.clock.seconds()
            server.allocate(SI, {number}, 3, SECRETS)
            world.run(server.write(SI, number, 0, [b"abc"], SECRETS.upload))
            self.assertEqual(world.round_trips(began_s), expected)
        world.run(server.disconnect())

    def test_goodbyes_are_not_waited_for(self) -> None:
        """From nothing to the end: three round trips, and the server sees it end in good order."""
        world = TlsWorld(scratch_path(self))
        self.addCleanup(world.close)
        ends: list[object] = []
        lost = GbsConnection.connectionLost

        def note(connection: GbsConnection, reason: Failure = connectionDone) -> None:
            ends.append(reason.type)
            lost(connection, reason)

        self.patch(GbsConnection, "connectionLost", note)
        began_s = world.clock.seconds()
        server = world.connect()
        server.allocate(SI, {0}, 3, SECRETS)
        world.run(server.write(SI, 0, 0, [b"abc"], SECRETS.upload))
        world.run(server.disconnect())
        self.assertEqual(world.round_trips(began_s), 3.0)
        self.assertEqual(ends, [])
        world.clock.advance(1.0)
        self.assertEqual(ends, [ConnectionDone])

    def test_a_wrong_key(self) -> None:
        """Who does not own the key is told no secret, and the error says what to do."""
        assert isinstance(self.world, TlsWorld)
        server = self.world.connect(pin=b"\1" * 32)
        waiting: list[Deferred[Any]] = [
            server.version(),
            server.allocate(SI, {0}, 3, SECRETS),
            server.stream(SI, 0, 0, 3, Consumer()),
        ]
        for each in waiting:
            with self.assertRaises(ServerUnreachable) as caught:
                self.resolve(each)
            self.assertIn("is not the server it should be", str(caught.exception))
            self.assertFalse(caught.exception.may_have_happened)
        self.assertEqual(self.world.servers[0].factory._server.service.requests.total(), 0)
        self.resolve(server.disconnect())
