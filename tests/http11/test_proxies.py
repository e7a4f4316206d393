"""Proxies: which one, and the way through it."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactor, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import URI

from pipegrid.errors import UsageError
from pipegrid.http11 import endpoints
from pipegrid.http11.endpoints import (
    ProxyEndpoints,
    StandardEndpoints,
    Tunnel,
    TunnelEndpoint,
    TunnelRefused,
)
from pipegrid.http11.proxy_settings import is_exempt, proxy_for
from pipegrid.reactor.tcp_socks5_endpoints import SocksEndpoint


class ChoiceTests(SynchronousTestCase):
    """``proxy_for``."""

    def url(self, scheme: str, host: str = "a.example", **environment: str) -> str | None:
        """Return the URL of the proxy."""
        found = proxy_for(scheme, host, 80, environment)
        return None if found is None else found.url

    def test_names(self) -> None:
        """Each scheme has its variable; capitals count, but not for http."""
        self.assertEqual(self.url("http", http_proxy="http://p:3128"), "http://p:3128/")
        self.assertEqual(self.url("http", HTTP_PROXY="http://p:3128"), None)
        self.assertEqual(self.url("http", https_proxy="http://p:3128"), None)
        self.assertEqual(self.url("https", HTTPS_PROXY="p:1", all_proxy="q"), "http://p:1/")
        self.assertEqual(self.url("https", ALL_PROXY="https://q"), "https://q:443/")
        self.assertEqual(self.url("http", http_proxy="", all_proxy="[::1]:8"), "http://[::1]:8/")
        self.assertEqual(self.url("http", all_proxy="p", no_proxy="b, .example"), None)
        self.assertEqual(self.url("http", all_proxy="p", NO_PROXY="*"), None)
        self.assertEqual(self.url("http"), None)

    def test_exempt(self) -> None:
        """Names stand for what is below them; addresses for themselves, networks for all in them."""
        for host, exempt, expected in (
            ("a.example", "example", True),
            ("a.example", ".A.example", True),
            ("a.example.", "*.example", True),
            ("ba.example", "a.example", False),
            ("a.example", "a.example:80", True),
            ("a.example", "a.example:81", False),
            ("10.1.2.3", "10.0.0.0/8", True),
            ("10.1.2.3", "2.3", False),
            ("10.1.2.3", "10.1.2.3:80", True),
            ("::1", "[::1]", True),
            ("a.example", "", False),
            ("a.example", ". ,,", False),
        ):
            self.assertEqual(is_exempt(host, 80, exempt), expected, (host, exempt))

    def test_password(self) -> None:
        """Who asks is told in a header, and to nobody else."""
        proxy = proxy_for("http", "a", 80, {"http_proxy": "http://me%40x:se%3Acret@p:8/"})
        assert proxy is not None
        self.assertEqual(proxy.authorization, b"Proxy-Authorization: Basic bWVAeDpzZTpjcmV0\r\n")
        self.assertNotIn("cret", proxy.url + repr(proxy))
        evil = proxy_for("http", "a", 80, {"http_proxy": "http://a%0d%0aEvil:x@p:8/"})
        assert evil is not None
        self.assertEqual(evil.authorization.count(b"\r\n"), 1)

    def test_refused(self) -> None:
        """What is no proxy is said to be none, without what may be its password."""
        for url in (
            "socks5://p:1",
            "socks4a://p:1",
            "http://",
            "http://u:secret@p:x",
            "http://[",
            "ftp://p",
        ):
            error = self.assertRaises(UsageError, proxy_for, "http", "a", 80, {"http_proxy": url})
            self.assertIn("http_proxy is not the URL of a proxy", str(error))
            self.assertNotIn("secret", str(error))

    def test_socks(self) -> None:
        """``socks5h`` with an address, and the user's name; not a host's name, which would be looked up."""
        for url, place, login in (
            ("socks5h://127.0.0.1", "127.0.0.1:1080", ("", "")),
            ("socks5h://localhost:9050/", "127.0.0.1:9050", ("", "")),
            ("socks5h://me%40x:secret@[::1]:9050", "[::1]:9050", ("me@x", "secret")),
        ):
            proxy = proxy_for("https", "a.onion", 443, {"all_proxy": url})
            assert proxy is not None
            assert proxy.socks is not None
            self.assertEqual(str(proxy.socks.addresses[0]), place)
            self.assertEqual((proxy.socks.username, proxy.socks.password), login)
            self.assertNotIn("secret", proxy.url + repr(proxy))
        for url in ("socks5h://p.example:1", f"socks5h://u:{'s' * 256}@127.0.0.1"):
            error = self.assertRaises(UsageError, proxy_for, "http", "a", 80, {"http_proxy": url})
            self.assertNotIn("sss", str(error))

    def test_names_of_other_networks(self) -> None:
        """They are not looked up without a SOCKS5 proxy; with one it gets them."""
        uri = URI.fromBytes(b"http://abc.onion:80/")
        for inner in (StandardEndpoints(reactor), ProxyEndpoints(reactor, environment={})):
            self.assertRaises(UsageError, inner.endpointForURI, uri)
        socks = ProxyEndpoints(reactor, "socks5h://127.0.0.1:1")
        self.assertIsInstance(socks.endpointForURI(uri), SocksEndpoint)


class Inner(Protocol):
    """Whatever is spoken behind the proxy."""

    def __init__(self) -> None:
        self.received = b""
        self.lost = False

    def connectionMade(self) -> None:
        self.transport.write(b"hello")  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any = None) -> None:
        self.lost = True


class TunnelTests(SynchronousTestCase):
    """``Tunnel``."""

    def begin(self) -> tuple[Tunnel, Inner, StringTransport, Deferred[Any]]:
        """Connect to a proxy."""
        inner, opened = Inner(), Deferred[Any]()
        made = Tunnel("b.example:443", b"Proxy-Authorization: x\r\n", "http://p:8/", inner, opened)
        transport = StringTransport()
        made.makeConnection(transport)
        return made, inner, transport, opened

    def test_through(self) -> None:
        """Head by head, however it is cut; then all belongs to who is behind."""
        answer = b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n"
        for pieces in ([answer + b"rest"], [bytes([each]) for each in answer + b"rest"]):
            made, inner, transport, opened = self.begin()
            self.assertEqual(
                transport.value(),
                b"CONNECT b.example:443 HTTP/1.1\r\nHost: b.example:443\r\n"
                b"Proxy-Authorization: x\r\n\r\n",
            )
            for piece in pieces:
                made.dataReceived(piece)
            self.assertIs(self.successResultOf(opened), inner)
            self.assertEqual(inner.received, b"rest")
            self.assertTrue(transport.value().endswith(b"\r\n\r\nhello"))
            made.connectionLost(Failure(ConnectionDone()))
            self.assertTrue(inner.lost)

    def test_refusals(self) -> None:
        """Anything else is an end, in a sentence; nobody behind hears of it."""
        for answer, words in (
            (b"HTTP/1.1 407 Proxy Authentication Required\r\n", "answers 407"),
            (b"HTTP/1.0 301\r\nLocation: x\r\n\r\n", "answers 301"),
            (b"SSH-2.0\r\n\r\n", "something other than HTTP"),
            (b"x" * 65, "something other than HTTP"),
            (b"HTTP/1.1 200 OK\r\nA: " + b"x" * endpoints.MAX_HEAD_BYTES, "a head of more than"),
        ):
            made, inner, transport, opened = self.begin()
            made.dataReceived(answer)
            error = self.failureResultOf(opened, TunnelRefused).value
            self.assertIn(words, str(error))
            self.assertIn("http://p:8/", str(error))
            self.assertTrue(transport.disconnected)
            made.dataReceived(b"more")
            made.connectionLost(Failure(ConnectionDone()))
            self.assertEqual((inner.received, inner.lost, inner.transport), (b"", False, None))

    def test_hangs_up(self) -> None:
        """A proxy that hangs up is an error."""
        made, _, _, opened = self.begin()
        made.connectionLost(Failure(ConnectionDone()))
        self.assertIn(
            "closes the connection", str(self.failureResultOf(opened, TunnelRefused).value)
        )

    def test_cancelled(self) -> None:
        """Giving up ends the connection, made or not; of its end nobody is told once more."""
        for connected in (False, True):
            reactor = MemoryReactor()
            inner = TCP4ClientEndpoint(reactor, "127.0.0.1", 8)
            endpoint = TunnelEndpoint(inner, "b:443", b"", "http://p:8/")
            connecting = endpoint.connect(Factory.forProtocol(Inner))
            transport = StringTransport()
            if connected:
                made: Any = reactor.tcpClients[0][2].buildProtocol(None)
                made.makeConnection(transport)
            connecting.cancel()
            self.failureResultOf(connecting)
            self.assertEqual(transport.disconnected, connected)
            if connected:
                made.connectionLost(Failure(ConnectionDone()))
