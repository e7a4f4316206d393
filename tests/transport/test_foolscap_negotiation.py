"""What answers a client's first words over Foolscap, and is something else."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import inlineCallbacks
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from pipegrid.errors import ServerUnreachable
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.transport.foolscap.client import FoolscapServer
from pipegrid.transport.foolscap.link import TubConnector
from pipegrid.wire import server_address
from pipegrid.wire.foolscap_broker import make_tub
from pipegrid.wire.introducer_protocol import reason_of
from tests.transport.contract import IDENTITY

WORDS = (
    (b"\r\n\r\n", "what it said first makes no sense"),
    (b"HTTP/1.1 500 \xff\xfe\r\n\r\n", "what it said first makes no sense"),
    (b"HTTP/1.1 404 \x1b[2J\r\n\r\n", "what answers there does not speak Foolscap"),
    (b"x" * 100_000, "what answers there does not speak Foolscap"),
)


class Saying(Protocol):
    """Says one thing to whoever comes."""

    words = b""

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self.words)


class NegotiationTests(TestCase):
    """Over real connections, as Foolscap makes them."""

    @inlineCallbacks
    def test_other_words(self) -> Any:
        """A sentence says so, at once, and has nothing of Python's in it."""
        clock: Any = reactor
        factory = Factory.forProtocol(Saying)
        factory.noisy = False
        port = clock.listenTCP(0, factory, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        place = f"pb://{'a' * 32}@tcp:127.0.0.1:{port.getHost().port}/name"
        for words, why in WORDS:
            self.patch(Saying, "words", words)
            server = FoolscapServer(
                IDENTITY, TubConnector(server_address.parse_furl(place), DIRECT_CONNECTIONS), clock
            )
            error = yield self.assertFailure(server.version(), ServerUnreachable)
            self.assertIn(f"over Foolscap: {why}; is it", str(error))
            yield server.disconnect()
            tub = make_tub(100, DIRECT_CONNECTIONS)
            tub.startService()
            error = yield self.assertFailure(tub.getReference(place), Exception)
            self.assertIn("does not speak Foolscap", reason_of(error))
            yield tub.stopService()
