"""TCP through a SOCKS5 proxy: over real sockets, and byte by byte; and the policy that decides on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.reactor.connection_policy import (
    DIRECT_CONNECTIONS,
    NO_CONNECTIONS,
    ConnectionPolicy,
    DirectWay,
    ProxyAddress,
    ProxyWay,
    RefusedConnection,
    RefusedWay,
    parse_proxy_address,
)
from pipegrid.reactor.tcp_socks5_endpoints import (
    AddressEndpoint,
    ProxyError,
    SocksEndpoint,
    SocksTunnel,
    endpoint_through,
)
from tests.socks_proxy import OnlyProxies, SocksProxy

reactor: Any = installed_reactor

PROXY = ProxyWay("Tor", (ProxyAddress("127.0.0.1", 9),), True)


class Echo(Protocol):
    """Returns what it receives."""

    def dataReceived(self, data: bytes) -> None:
        transport: Any = self.transport
        transport.write(data)


class Collecting(Protocol):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.data = b""
        self.wanted: Deferred[bytes] = Deferred()
        self.lost = False

    def dataReceived(self, data: bytes) -> None:
        self.data += data
        if not self.wanted.called:
            self.wanted.callback(self.data)

    def connectionLost(self, reason: Any = None) -> None:
        self.lost = True


def factory() -> Any:
    """Return a factory of ``Collecting``."""
    made: Any = Factory.forProtocol(Collecting)
    made.noisy = False
    return made


class PolicyTests(SynchronousTestCase):
    """Which way there is to each host."""

    def test_ways(self) -> None:
        """Onion services are reached through Tor, the rest as TCP is; I2P is not reached at all."""
        through = ConnectionPolicy(PROXY, PROXY)
        none = ConnectionPolicy(RefusedWay("no"), RefusedWay("no Tor"))
        for policy, host, tor, kind in (
            (DIRECT_CONNECTIONS, "example.org", False, DirectWay),
            (DIRECT_CONNECTIONS, "example.org", True, ProxyWay),
            (DIRECT_CONNECTIONS, "abc.ONION.", False, ProxyWay),
            (DIRECT_CONNECTIONS, "abc.i2p", True, RefusedWay),
            (through, "10.0.0.1", False, ProxyWay),
            (through, "abc.i2p.", False, RefusedWay),
            (none, "abc.onion", False, RefusedWay),
            (none, "10.0.0.1", False, RefusedWay),
            (ConnectionPolicy(DirectWay(), DirectWay()), "abc.onion", False, RefusedWay),
            (NO_CONNECTIONS, "127.0.0.1", False, RefusedWay),
        ):
            self.assertIs(type(policy.way_to(host, tor)), kind, (policy, host, tor))
            if kind is RefusedWay:
                self.assertRaises(
                    RefusedConnection, endpoint_through, policy, reactor, host, 1, tor
                )
        direct = endpoint_through(DIRECT_CONNECTIONS, reactor, "10.0.0.1", 1)
        self.assertIsInstance(direct, AddressEndpoint)
        self.assertIsInstance(endpoint_through(through, reactor, "a.b", 1), SocksEndpoint)

    def test_addresses(self) -> None:
        """Where a proxy listens, in the forms that Tahoe-LAFS and Tor use; never by a name."""
        for text, expected in (
            ("tcp:127.0.0.1:9050", "127.0.0.1:9050"),
            ("127.0.0.1:9050", "127.0.0.1:9050"),
            ("localhost:9050", "127.0.0.1:9050"),
            ("tcp:host=127.0.0.1:port=9050", "127.0.0.1:9050"),
            ("9050", "127.0.0.1:9050"),
            ("tcp:9050", "127.0.0.1:9050"),
            ("tcp:[::1]:9050", "[::1]:9050"),
            ("unix:/run/tor/socks", "/run/tor/socks"),
        ):
            self.assertEqual(str(parse_proxy_address(text)), expected)
        for text in ("", "proxy.example:9050", "tcp:1.2.3.4:0", "tcp:1.2.3:1", "unix:x", "[a]:1"):
            self.assertRaises(ValueError, parse_proxy_address, text)


class TunnelTests(SynchronousTestCase):
    """The handshake, with a proxy that sends what it likes."""

    def begin(
        self, host: str = "example.org", proxy: ProxyWay = PROXY
    ) -> tuple[SocksTunnel, StringTransport, list[Any]]:
        """Return a tunnel, its transport, and a list that gets its outcome."""
        tunnel, transport = SocksTunnel(factory(), host, 80, proxy), StringTransport()
        seen: list[Any] = []
        tunnel.opened.addBoth(seen.append)
        tunnel.makeConnection(transport)
        return tunnel, transport, seen

    def test_bytes(self) -> None:
        """As RFC 1928 and 1929 have them, in single bytes; what follows goes to the protocol."""
        anonymous = ProxyWay("it", ())
        for host, where in (
            ("example.org", b"\x03\x0bexample.org"),
            ("1.2.3.4", b"\x01\x01\x02\x03\x04"),
            ("::1", b"\x04" + bytes(15) + b"\x01"),
        ):
            tunnel, transport, seen = self.begin(host, anonymous)
            self.assertEqual(transport.value(), b"\x05\x01\x00")
            transport.clear()
            tunnel.dataReceived(b"\x05")
            tunnel.dataReceived(b"\x00")
            self.assertEqual(transport.value(), b"\x05\x01\x00" + where + b"\x00\x50")
            for byte in b"\x05\x00\x00\x03\x03abc\x00\x50":
                self.assertEqual(seen, [])
                tunnel.dataReceived(bytes([byte]))
            tunnel.dataReceived(b"hello")
            self.assertEqual(seen[0].data, b"hello")
            tunnel.connectionLost()
            self.assertTrue(seen[0].lost)

    def test_user_names(self) -> None:
        """Each target has its own for Tor, and always the same; configured ones are sent as they are."""
        logins = []
        for host, proxy in (
            ("a.org", PROXY),
            ("a.org", PROXY),
            ("b.org", PROXY),
            ("a.org", ProxyWay("it", (), False, "ann", "secret")),
        ):
            tunnel, transport, _ = self.begin(host, proxy)
            # One that isolates is offered nothing else, since it would put all targets together.
            methods = b"\x05\x01\x02" if proxy is PROXY else b"\x05\x02\x00\x02"
            self.assertEqual(transport.value(), methods)
            transport.clear()
            tunnel.dataReceived(b"\x05\x02")
            logins.append(transport.value())
            transport.clear()
            tunnel.dataReceived(b"\x01\x00")
            self.assertEqual(transport.value()[:5], b"\x05\x01\x00\x03\x05")
        self.assertEqual(logins[0], logins[1])
        self.assertNotEqual(logins[0], logins[2])
        self.assertEqual(logins[3], b"\x01\x03ann\x06secret")

    def test_refusals(self) -> None:
        """Each answer that is not a connection ends it with one sentence, and sends nothing more."""
        login = b"\x05\x02\x01\x00"
        for answer, words in (
            (b"HTTP/1.1 400 ", "does not speak SOCKS5"),
            (b"\x04\x00", "does not speak SOCKS5"),
            (b"\x05\xff", "takes no user names"),
            (b"\x05\x01", "takes no user names"),
            (b"\x05\x00", "takes no user names"),
            (b"\x05\x02\x01\x01", "does not accept the user name"),
            (login + b"\x05\x05\x00\x01", "finds no server at that port (example.org:80)"),
            (login + b"\x05\x02", "does not permit"),
            (login + b"\x05\xf2", "cannot reach that onion service"),
            (login + b"\x05\x63", "answers with error 99"),
            (login + b"\x05\x00\x00\x09\x00", "does not speak SOCKS5"),
            (login + b"\x04\x00", "does not speak SOCKS5"),
        ):
            tunnel, transport, seen = self.begin()
            tunnel.dataReceived(answer)
            self.assertTrue(transport.disconnecting or transport.disconnected, answer)
            self.assertIsInstance(seen[0].value, ProxyError)
            self.assertIn(words, str(seen[0].value))
            tunnel.dataReceived(b"more")
            tunnel.connectionLost()
            self.assertEqual(len(seen), 1)
        tunnel, transport, seen = self.begin(proxy=ProxyWay("it", ()))
        tunnel.dataReceived(b"\x05\xff")
        self.assertIn("wants another user name", str(seen[0].value))
        tunnel, transport, seen = self.begin()
        tunnel.connectionLost()
        self.assertIn("Tor closed the connection", str(seen[0].value))

    def test_long_names(self) -> None:
        """A name that SOCKS5 cannot express is refused, never cut."""
        self.assertRaises(RefusedConnection, SocksTunnel, factory(), "a" * 256, 1, PROXY)


class ProxyTests(TestCase):
    """Real sockets."""

    timeout = 30

    def listen(self, protocols: Any) -> int:
        """Return the port where a factory's protocols are."""
        port = reactor.listenTCP(0, protocols, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        number: int = port.getHost().port
        return number

    def test_through(self) -> Deferred[None]:
        """The proxy gets the name as it is; no name is looked up here; bytes go both ways."""
        return Deferred.fromCoroutine(self._test_through())

    async def _test_through(self) -> None:
        echo = self.listen(Factory.forProtocol(Echo))
        proxy = SocksProxy(reactor, {"far.example": "127.0.0.1"})
        port = self.listen(proxy)
        only = OnlyProxies(self, reactor, [1, port, echo])
        way = ProxyWay("Tor", (ProxyAddress("127.0.0.1", 1), ProxyAddress("127.0.0.1", port)), True)
        protocol: Any = await SocksEndpoint(reactor, way, "far.example", echo).connect(factory())
        protocol.transport.write(b"hello")
        self.assertEqual(await protocol.wanted, b"hello")
        self.assertIs(protocol.transport.protocol, protocol)
        self.assertEqual(proxy.asked, [("far.example", echo)])
        protocol.transport.loseConnection()
        for host, words in (("other.example", "cannot reach the host"),):
            with self.assertRaises(ProxyError) as caught:
                await SocksEndpoint(reactor, way, host, echo).connect(factory())
            self.assertIn(words, str(caught.exception))
        self.assertEqual(only.violations, [])

    def test_no_proxy(self) -> Deferred[None]:
        """Where none listens, the error says where it was looked for."""
        return Deferred.fromCoroutine(self._test_no_proxy())

    async def _test_no_proxy(self) -> None:
        way = ProxyWay("Tor", (ProxyAddress("127.0.0.1", 1), ProxyAddress("127.0.0.1", 2)))
        for proxy, words in (
            (way, "Tor cannot be reached at 127.0.0.1:1 or 127.0.0.1:2 ("),
            (ProxyWay("Tor", ()), "at any address (no address is known)"),
        ):
            with self.assertRaises(ProxyError) as caught:
                await SocksEndpoint(reactor, proxy, "a.b", 1).connect(factory())
            self.assertIn(words, str(caught.exception))

    def test_cancelled(self) -> Deferred[None]:
        """At any time; the connection to the proxy ends."""
        return Deferred.fromCoroutine(self._test_cancelled())

    async def _test_cancelled(self) -> None:
        gone: Deferred[None] = Deferred()

        class Silent(Protocol):
            def connectionLost(self, reason: Any = None) -> None:
                gone.callback(None)

        asked: Deferred[None] = Deferred()
        silent = Factory.forProtocol(Silent)
        heard: Callable[[Any, bytes], None] = lambda _, data: asked.callback(None)  # noqa: E731
        Silent.dataReceived = heard  # type: ignore[method-assign, assignment]
        way = ProxyWay("Tor", (ProxyAddress("127.0.0.1", self.listen(silent)),))
        connecting = SocksEndpoint(reactor, way, "a.b", 1).connect(factory())
        await asked
        connecting.cancel()
        with self.assertRaises(CancelledError):
            await connecting
        await gone
