"""What Foolscap servers may answer in place of what they should: an error of the server, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foolscap.api import Referenceable
from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ServerError, ServerProtocolError
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.transport.foolscap.client import FoolscapServer
from pipegrid.transport.foolscap.link import TubConnector
from pipegrid.wire import server_address
from pipegrid.wire.foolscap_interfaces import RIStorageServer
from pipegrid.wire.storage_messages import ShareChange, SlotSecrets
from tests.scratch import scratch_path
from tests.transport.contract import SECRETS, SI, Consumer
from tests.transport.foolscap_world import SWISSNUM, FoolscapWorld

NONSENSE: tuple[Any, ...] = (
    *(None, True, 5, -1, b"x", "text", 1.5, [], [1], (), (1, 2), (set(),), {1, 2}, {}),
    *({0: 5}, {0: b"x"}, {0: [5]}, {0: {0: b"x"}}, {b"a": b"b"}, {300: 1}, (set(), {0: 5})),
    *(({b"x"}, {}), (set(), [0]), (5, {}), (True,), (True, [1]), (True, {0: [5]})),
)
"""Among them what would be the right answer to another question."""


class Answering(Referenceable):  # type: ignore[misc]
    """Answers everything with one value; none of its calls is held to an interface at its own end."""

    def __init__(self, value: Any, interface: str | None = None) -> None:
        self._value = value
        self._claims = interface

    def getInterfaceName(self) -> str | None:
        return self._claims

    def doRemoteCall(self, methodname: str, args: Any, kwargs: Any) -> Any:
        """Answer any method with the same value."""
        return self._value


def _questions(server: FoolscapServer) -> dict[str, Callable[[], Deferred[Any]]]:
    slot = SlotSecrets(write_enabler=b"w" * 32, lease=SECRETS.lease)
    change = {0: ShareChange(writes=((0, b"x"),))}
    return {
        "version": server.version,
        "allocate": lambda: server.allocate(SI, {0}, 6, SECRETS),
        "store_whole": lambda: server.store_whole(SI, {1: b"abcdef"}, 6, SECRETS),
        "list_shares": lambda: server.list_shares(SI),
        "read": lambda: server.read(SI, 0, 0, 10),
        "stream": lambda: server.stream(SI, 0, 0, 10, Consumer()),
        "add_lease": lambda: server.add_lease(SI, SECRETS.lease),
        "advise": lambda: server.advise_corrupt_share(SI, 0, "wrong"),
        "read_test_write": lambda: server.read_test_write(SI, slot, change, [(0, 10)]),
        "list_slot": lambda: server.list_slot(SI),
        "read_slot": lambda: server.read_slot(SI, [(0, 10)]),
        "add_slot_lease": lambda: server.add_slot_lease(SI, SECRETS.lease),
    }


class HostileFoolscapTests(SynchronousTestCase):
    """A client of servers that answer what they like."""

    def setUp(self) -> None:
        self.world = FoolscapWorld(self, scratch_path(self))
        self.world.tub.unregisterReference(self.world.storage)

    def outcomes(self, value: Any, interface: str | None) -> dict[str, Any]:
        """Ask everything of a new server; returns results or failures, all of which are there in time."""
        host = Answering(value, interface)
        self.world.tub.registerReference(host, name=SWISSNUM)
        server = self.world.connect()
        outcomes: dict[str, Any] = {}
        for name, ask in _questions(server).items():
            ended: list[Any] = []
            ask().addBoth(ended.append)
            self.world.settle()
            self.assertTrue(ended, f"{name} waits for ever for {value!r}")
            outcomes[name] = ended[0]
        server.disconnect()
        self.world.settle()
        self.world.tub.unregisterReference(host)
        return outcomes

    def test_no_interface(self) -> None:
        """A server that does not say what it is is not asked: nothing would hold its answers to any shape."""
        for value in (None, (1, 2), {0: Answering(b"x" * 10)}):
            for name, outcome in self.outcomes(value, None).items():
                self.assertIsInstance(outcome, Failure, name)
                outcome.trap(ServerProtocolError)
                self.assertIn("does not say that it stores shares", str(outcome.value))

    def test_no_reference(self) -> None:
        """By a name a server gives what it likes, and need not give an object."""
        values: tuple[Any, ...] = (None, 5, b"x", "x", [1], {}, (1,))
        for value in values:
            server = self.world.connect()
            self.world.connector.results.append(succeed(value))
            self.assertIn("does not say that", str(self.failureResultOf(server.version()).value))
            server.disconnect()

    def test_no_reference_over_tcp(self) -> None:
        """The connector leaves it as it is, for the link to say so."""
        connector = TubConnector(
            server_address.parse_furl(self.world.furl), DIRECT_CONNECTIONS, pin=b"p" * 32
        )
        connector._tub = self.world.tub
        self.patch(self.world.tub, "getReference", lambda _: succeed(5))
        self.assertEqual(self.successResultOf(connector.connect()), 5)

    def test_nonsense(self) -> None:
        """Whatever a server answers is an error of that server, or has the shape of an answer."""
        for value in NONSENSE:
            for name, outcome in self.outcomes(value, RIStorageServer.__remote_name__).items():
                if isinstance(outcome, Failure) and not outcome.check(ServerError):
                    self.fail(f"{name}, answered with {value!r}: {outcome.value!r}")

    def test_readers_that_name_no_interface(self) -> None:
        """What a share's reader gives is bytes, and no more than were asked for."""
        for value in (None, 5, [1], b"x" * 11, {0: 1}, b"x" * 3):
            readers = {0: Answering(value)}
            outcomes = self.outcomes(readers, RIStorageServer.__remote_name__)
            for name in ("read", "stream"):
                if value == b"xxx":
                    self.assertIn(outcomes[name], (value, len(value)))
                else:
                    outcomes[name].trap(ServerError)
