"""Connections to addresses, without what Twisted needs for names."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.error import ConnectionRefusedError, NoProtocol, UserError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactor
from twisted.protocols.policies import WrappingFactory
from twisted.protocols.wire import Echo
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from pipegrid.reactor.tcp_socks5_endpoints import AddressEndpoint, endpoint_for

reactor: Any = installed_reactor
LOOPBACK = "127.0.0.1"


class Talker(Protocol):
    """Says a word when connected, and notes the answer and the end."""

    def __init__(self) -> None:
        self.heard: Deferred[bytes] = Deferred()
        self.lost: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b"word")

    def dataReceived(self, data: bytes) -> None:
        self.heard.callback(data)

    def connectionLost(self, reason: object = None) -> None:
        self.lost.callback(None)


class ChoiceTests(SynchronousTestCase):
    """``endpoint_for``."""

    def test_names_and_addresses(self) -> None:
        """Names are looked up by Twisted; addresses, also of IPv6, need nobody."""
        for host, kind in (
            (LOOPBACK, AddressEndpoint),
            ("::1", AddressEndpoint),
            ("localhost", HostnameEndpoint),
            ("1.2.3", HostnameEndpoint),
            ("example.org", HostnameEndpoint),
        ):
            endpoint = endpoint_for(reactor, host, 1)
            self.assertIsInstance(endpoint, kind, host)
            verifyObject(IStreamClientEndpoint, endpoint)

    def test_cancelling(self) -> None:
        """Whoever has waited long enough gives up, and nothing is left of the attempt."""
        memory: Any = MemoryReactor()
        attempt = AddressEndpoint(memory, LOOPBACK, 1).connect(Factory.forProtocol(Talker))
        ((host, port, factory, _, _),) = memory.tcpClients
        self.assertEqual((host, port), (LOOPBACK, 1))
        attempt.cancel()
        self.failureResultOf(attempt, CancelledError)
        self.assertTrue(memory.connectors[0].stoppedConnecting)
        factory.clientConnectionFailed(None, UserError())  # as a real one does then


class LoopbackTests(TestCase):
    """``AddressEndpoint``, for real."""

    timeout = 30

    async def listen(self) -> int:
        """Have an echo listen; returns the port."""
        port = reactor.listenTCP(0, Factory.forProtocol(Echo), interface=LOOPBACK)
        self.addCleanup(port.stopListening)
        return int(port.getHost().port)

    async def test_a_connection(self) -> None:
        """The protocol has its transport when it is handed over, and gets all that comes."""
        endpoint = AddressEndpoint(reactor, LOOPBACK, await self.listen())
        talker: Any = await endpoint.connect(Factory.forProtocol(Talker))
        self.assertIs(talker.transport.protocol, talker)
        self.assertEqual(await talker.heard, b"word")
        talker.transport.loseConnection()
        await talker.lost

    async def test_a_wrapper_between(self) -> None:
        """Who wraps the connection of a reactor, to count what passes, still has the protocol told."""

        class Wrapping:
            def connectTCP(self, host: str, port: int, factory: Any, *more: Any) -> Any:
                return reactor.connectTCP(host, port, WrappingFactory(factory), *more)

        wrapping: Any = Wrapping()
        endpoint = AddressEndpoint(wrapping, LOOPBACK, await self.listen())
        talker: Any = await endpoint.connect(Factory.forProtocol(Talker))
        self.assertEqual(await talker.heard, b"word")
        talker.transport.loseConnection()
        await talker.lost

    async def test_nobody_listens(self) -> None:
        """It fails, as with Twisted's own."""
        port = reactor.listenTCP(0, Factory(), interface=LOOPBACK)
        number = port.getHost().port
        await port.stopListening()
        with self.assertRaises(ConnectionRefusedError):
            await AddressEndpoint(reactor, LOOPBACK, number).connect(Factory.forProtocol(Talker))

    async def test_nobody_wants_it(self) -> None:
        """A factory may have no protocol for it."""
        factory = Factory()
        factory.buildProtocol = lambda _: None  # type: ignore[method-assign,assignment]
        with self.assertRaises(NoProtocol):
            await AddressEndpoint(reactor, LOOPBACK, await self.listen()).connect(factory)
