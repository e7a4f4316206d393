"""Reports to a monitor: which requests, on which way, and how long they may take."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import URI

from pipegrid.reactor.connection_policy import (
    DIRECT_CONNECTIONS,
    NO_CONNECTIONS,
    ConnectionPolicy,
    ProxyAddress,
    ProxyWay,
)
from pipegrid.reactor.tcp_socks5_endpoints import SocksEndpoint
from pipegrid.transport.status_ping import (
    ATTEMPTS,
    PermittedEndpoints,
    check_ping_url,
    ping,
    url_of,
)
from tests.http11.network import Network

URL = "https://hc-ping.com/5c1b-secret"


class UrlTests(SynchronousTestCase):
    """What is accepted, and what is asked."""

    def test_events(self) -> None:
        """They are added to the path; a query stays where it was."""
        self.assertEqual(url_of(URL, "start"), f"{URL}/start")
        self.assertEqual(url_of(URL, ""), URL)
        self.assertEqual(url_of(f"{URL}/?create=1", "fail"), f"{URL}/fail?create=1")
        self.assertEqual(url_of("http://m:8000", "fail"), "http://m:8000/fail")
        self.assertEqual(url_of("http://m", ""), "http://m/")

    def test_refused(self) -> None:
        """Files, user names, other schemes, and what is no URL."""
        for text in (
            "file:///etc/passwd",
            "hc-ping.com/x",
            "ftp://a/",
            "https://",
            "https://me:secret@a/",
            "https://a/\r\nX: y",
            "https://a:x/",
            "https://a:0/",
            "https://[::1/",
            "https://a\\b/secret",
            "https://ü/",
            "https://a/" + "x" * 2000,
        ):
            with self.assertRaisesRegex(ValueError, "must be a URL"):
                check_ping_url(text)
        self.assertEqual(check_ping_url(URL), URL)


class PingTests(SynchronousTestCase):
    """Against a monitor in memory."""

    def ping(self, event: str = "") -> tuple[Network, Deferred[str | None]]:
        """Start a report."""
        network = Network()
        done = Deferred.fromCoroutine(ping(network.clock, DIRECT_CONNECTIONS, URL, event, network))
        network.clock.advance(0)
        return network, done

    def test_success(self) -> None:
        """One GET, whose body is not waited for."""
        network, done = self.ping("fail")
        [connection] = network.connections
        self.assertEqual(connection.take_requests(), [b"GET /5c1b-secret/fail"])
        connection.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\nOK")
        self.assertIsNone(self.successResultOf(done))

    def test_a_redirect(self) -> None:
        """Is not followed, wherever it leads, and not tried again."""
        network, done = self.ping()
        [connection] = network.connections
        connection.take_requests()
        connection.answer(
            b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"
        )
        problem = self.successResultOf(done)
        assert problem is not None
        self.assertIn("cannot ping hc-ping.com: it answers 302, a redirect", problem)
        self.assertNotIn("secret", problem)
        self.assertEqual(len(network.connections), 1)

    def test_silence(self) -> None:
        """Ends after three attempts of ten seconds, and says so without the path."""
        network, done = self.ping()
        for _ in range(400):
            network.clock.advance(0.1)
        problem = self.successResultOf(done)
        assert problem is not None
        self.assertIn("cannot ping hc-ping.com: ", problem)
        self.assertNotIn("secret", problem)
        self.assertLess(network.clock.seconds(), 41)
        self.assertEqual(network.clock.getDelayedCalls(), [])

    def test_errors_of_the_server(self) -> None:
        """Are tried again; those of the request are not."""
        network, done = self.ping()
        for number in range(ATTEMPTS):
            connection = network.connections[number]
            connection.take_requests()
            connection.answer(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
            network.clock.pump([1.0] * 3)
        self.assertEqual(self.successResultOf(done), "cannot ping hc-ping.com: it answers 503")
        network, done = self.ping()
        network.connections[0].take_requests()
        network.connections[0].answer(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
        self.assertEqual(self.successResultOf(done), "cannot ping hc-ping.com: it answers 404")

    def test_nothing_listens(self) -> None:
        """Is a sentence, too."""
        network = Network()
        network.refuse = ConnectionRefusedError()
        done = Deferred.fromCoroutine(ping(network.clock, DIRECT_CONNECTIONS, URL, "", network))
        network.clock.pump([1.0] * 60)
        problem = self.successResultOf(done)
        assert problem is not None
        self.assertIn("refused", problem)


class WayTests(SynchronousTestCase):
    """Connections are made as the settings say, and no other way."""

    def endpoint(self, policy: ConnectionPolicy) -> Any:
        """Return the endpoint for the monitor."""
        endpoints = PermittedEndpoints(MemoryReactorClock(), policy)
        return endpoints.endpointForURI(URI.fromBytes(URL.encode()))

    def test_tor(self) -> None:
        """With ``tcp = tor``, through Tor, and TLS to the host inside."""
        tor = ProxyWay("Tor", (ProxyAddress("127.0.0.1", 9050),), True)
        endpoint = self.endpoint(ConnectionPolicy(tor, tor, True))
        self.assertIsInstance(endpoint._wrappedEndpoint, SocksEndpoint)

    def test_no_way(self) -> None:
        """Without a way nothing is sent, and the reason is given."""
        done = Deferred.fromCoroutine(ping(Clock(), NO_CONNECTIONS, URL))
        problem = self.successResultOf(done)
        assert problem is not None
        self.assertIn("no connection to hc-ping.com:443 is made: no connections are made", problem)
