"""``pipegrid mirror`` through proxies that the environment names: whole URLs, and ways through."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from misc.speedtest.mirror.authority import make_certificate
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import DefaultOpenSSLContextFactory
from twisted.internet.task import deferLater
from twisted.internet.tcp import Connection
from twisted.protocols.portforward import ProxyClient
from twisted.web.server import Site

from pipegrid.mirror import preconnect_mirrors
from tests.cli.test_mirror_debian import Files
from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.rpmarchive import REPOMD, RpmArchive
from tests.socks_proxy import OnlyProxies, SocksProxy

LOGIN = b"Proxy-Authorization: Basic bWU6c2VjcmV0"


class Behind(ProxyClient):
    """The proxy's connection to a mirror; what comes is passed on."""

    noisy = False

    def connectionMade(self) -> None:
        pass

    def connectionLost(self, reason: Any = None) -> None:
        peer: Any = self.peer
        peer.transport.loseConnection()


class ProxyProtocol(Protocol):
    """
    One connection to a proxy that passes on what it is asked, byte by byte.

    A class attribute is what it wants to be told, ``seen`` the first lines of what it was asked.
    """

    wants = LOGIN
    seen: list[bytes]
    _behind: Any = None
    _rest = b""
    _connecting = False

    def dataReceived(self, data: bytes) -> None:
        if self._behind is not None:
            self._behind.transport.write(self._passed(data))
            return
        self._rest += data
        if self._connecting or b"\r\n\r\n" not in self._rest:
            return
        line = self._rest.split(b"\r\n")[0]
        method, target, _ = line.split(b" ")
        self.seen.append(line)
        if self.wants not in self._rest.split(b"\r\n\r\n")[0]:
            self.transport.write(b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n")  # type: ignore[union-attr]
            return
        url = target.decode() if method == b"GET" else f"//{target.decode()}"
        parts = urlsplit(url)
        self._connecting = True
        self._tunnel = method == b"CONNECT"
        endpoint = TCP4ClientEndpoint(reactor, parts.hostname or "", parts.port or 80)
        made: Any = Behind()
        made.setPeer(self)
        connectProtocol(endpoint, made).addCallback(self._connected)

    def _connected(self, behind: Any) -> None:
        if not self.connected:  # who asked has gone meanwhile
            behind.transport.loseConnection()
            return
        self._behind = behind
        if self._tunnel:
            self._rest = self._rest.partition(b"\r\n\r\n")[2]
            self.transport.write(b"HTTP/1.1 200 OK\r\n\r\n")  # type: ignore[union-attr]
        behind.transport.write(self._passed(self._rest))

    def _passed(self, data: bytes) -> bytes:
        if self._tunnel:
            return data
        for line in data.split(b"\r\n"):
            if line.startswith(b"GET "):
                self.seen.append(line)
        # Requests of this size come whole.
        return data.replace(b"GET http://localhost:%d/" % self.port, b"GET /")

    port = 0

    def connectionLost(self, reason: Any = None) -> None:
        self.connected = 0
        if self._behind is not None:
            self._behind.transport.loseConnection()


class ProxyTests(RpmCase):
    """A proxy on this machine."""

    def proxy(self, port: int) -> str:
        """Start one; returns its URL."""
        self.seen: list[bytes] = []
        made = type("Made", (ProxyProtocol,), {"seen": self.seen, "port": port})
        factory: Any = Factory.forProtocol(made)
        listening: Any = reactor.listenTCP(0, factory, interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.connections_end()))
        return f"http://me:secret@127.0.0.1:{listening.getHost().port}"

    async def connections_end(self) -> None:
        """Wait for the end of all connections: TLS's last words pass two, and one may be just made."""
        loop: Any = reactor
        while any(
            isinstance(each, Connection) for each in (*loop.getReaders(), *loop.getWriters())
        ):
            await deferLater(loop, 0.001)

    async def mirror(self, url: str, *options: str, **environment: str) -> tuple[int, str]:
        """Mirror through it; returns status and stderr."""
        self.url = url
        kept = {name: each for name, each in os.environ.items() if "proxy" not in name.lower()}
        with patch.dict(os.environ, {**kept, **environment}, clear=True):
            status, _, err = await self.run_command(*self.arguments("--connections", "2", *options))
        return status, err

    async def _test_whole_urls(self) -> None:
        port = urlsplit(self.serve(RpmArchive(self.signer))).port or 0
        proxy = self.proxy(port)
        status, err = await self.mirror(f"http://localhost:{port}/", http_proxy=proxy)
        self.assertEqual((status, self.found()), (0, self.archive.files), err)
        # Below the first line of each connection stands what was passed on.
        first = f"GET http://localhost:{port}/{REPOMD} HTTP/1.1".encode()
        self.assertIn(first, self.seen)
        self.assertTrue({line.split(b" ")[1][:17] for line in self.seen} <= {b"http://localhost:"})
        self.seen.clear()
        status, err = await self.mirror(
            f"http://localhost:{port}/", http_proxy=proxy, no_proxy="localhost"
        )
        self.assertEqual((status, self.seen), (0, []), err)

    def test_whole_urls(self) -> Deferred[None]:
        """A proxy is asked for whole URLs of http, and told who asks; hosts of no_proxy are not."""
        return Deferred.fromCoroutine(self._test_whole_urls())

    def serve_tls(self) -> tuple[int, str]:
        """Serve over TLS; returns the port, and where the authority's certificate is."""
        self.archive = RpmArchive(self.signer)
        made = make_certificate(Path(self.mktemp()))
        context = DefaultOpenSSLContextFactory(str(made.key), str(made.certificate))
        site: Any = Site(Files(self.archive))
        port: Any = reactor.listenSSL(0, site, context, interface="127.0.0.1")  # type: ignore[attr-defined]
        self.addCleanup(port.stopListening)
        return port.getHost().port, str(made.authority.absolute())

    async def _test_a_way(self) -> None:
        port, authority = self.serve_tls()
        proxy = self.proxy(port)
        url = f"https://localhost:{port}/"
        status, err = await self.mirror(url, https_proxy=proxy, SSL_CERT_FILE=authority)
        self.assertEqual((status, self.found()), (0, self.archive.files), err)
        self.assertEqual(set(self.seen), {b"CONNECT localhost:%d HTTP/1.1" % port})
        shutil.rmtree(self.dest)
        status, err = await self.mirror(url, "--ca", authority, https_proxy=proxy)
        self.assertEqual((status, self.found()), (0, self.archive.files), err)

    def test_a_way(self) -> Deferred[None]:
        """A proxy makes a way to https, and sees the host's name alone."""
        return Deferred.fromCoroutine(self._test_a_way())

    async def _test_certificates(self) -> None:
        port, _ = self.serve_tls()
        other = make_certificate(Path(self.mktemp())).authority.absolute()
        status, err = await self.mirror(
            f"https://localhost:{port}/", https_proxy=self.proxy(port), SSL_CERT_FILE=str(other)
        )
        self.assertEqual((status, self.found()), (1, {}))
        self.assertIn("certificate", err)

    def test_certificates(self) -> Deferred[None]:
        """Behind a proxy, too, a host must have a certificate that an authority signed."""
        return Deferred.fromCoroutine(self._test_certificates())

    async def _test_socks(self) -> None:
        port, authority = self.serve_tls()
        plain = urlsplit(self.serve(self.archive)).port or 0  # signed at the same second
        names = dict.fromkeys(("mirror.example", "localhost"), "127.0.0.1")
        socks = SocksProxy(reactor, names, wants=(b"me", b"secret"))
        loop: Any = reactor
        listening = loop.listenTCP(0, socks, interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.connections_end()))
        place = f"127.0.0.1:{listening.getHost().port}"
        only = OnlyProxies(self, reactor, [listening.getHost().port, port, plain])
        self.patch(preconnect_mirrors, "place_of", only.place_of)
        proxy = {"all_proxy": f"socks5h://me:secret@{place}", "SSL_CERT_FILE": authority}
        for url in (f"http://mirror.example:{plain}/", f"https://localhost:{port}/"):
            shutil.rmtree(self.dest, ignore_errors=True)
            status, err = await self.mirror(url, **proxy)
            self.assertEqual((status, self.found()), (0, self.archive.files), err)
        self.assertEqual(set(socks.asked), {("mirror.example", plain), ("localhost", port)})
        for url, environment, words in (
            (
                "http://mirror.example:1/",
                {"all_proxy": f"socks5h://me:no@{place}"},
                "does not accept",
            ),
            ("http://a.onion:1/", {}, "only Tor or I2P know a.onion"),
            ("http://a.onion:1/", {"http_proxy": "http://127.0.0.1:1"}, "only Tor or I2P know"),
            ("http://a.b:1/", {"http_proxy": "socks5h://proxy.example:1"}, "must be an address"),
        ):
            shutil.rmtree(self.dest, ignore_errors=True)
            status, err = await self.mirror(url, **environment)
            self.assertIn(status, (1, 2), err)
            self.assertIn(words, err)
            self.assertNotIn("secret", err)
        self.assertEqual(only.violations, [])

    def test_socks(self) -> Deferred[None]:
        """A SOCKS5 proxy gets names as they are; none is looked up, and nothing is sent past it."""
        return Deferred.fromCoroutine(self._test_socks())

    async def _test_refused(self) -> None:
        port, authority = self.serve_tls()
        proxy = self.proxy(port).replace("secret", "wrong")
        status, err = await self.mirror(
            f"https://localhost:{port}/", https_proxy=proxy, SSL_CERT_FILE=authority
        )
        self.assertEqual((status, err.count("\n")), (1, 1), err)
        self.assertIn("answers 407 when asked to connect", err)
        self.assertNotIn("wrong", err)
        status, err = await self.mirror("http://localhost:1/", http_proxy="socks5://me:wrong@p:1")
        self.assertEqual((status, err.count("\n")), (2, 1), err)
        self.assertIn("http_proxy is not the URL of a proxy that can be used", err)
        self.assertNotIn("wrong", err)

    def test_refused(self) -> Deferred[None]:
        """A proxy that refuses, and one that cannot be used: one sentence, without the password."""
        return Deferred.fromCoroutine(self._test_refused())
