"""The agent on real connections: treq, a real twisted.web server, TLS with a pinned key."""

from __future__ import annotations

import datetime
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import treq.client
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from OpenSSL import SSL, crypto
from service_identity.exceptions import CertificateError
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.interfaces import IOpenSSLContextFactory
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.client import readBody
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site
from twisted.web.static import NoRangeStaticProducer
from zope.interface import implementer

from pipegrid.errors import UsageError
from pipegrid.http11 import (
    Limits,
    PinnedEndpoints,
    PipelinedAgent,
    PipelinedConnection,
    RawRequest,
    RequestNotSent,
    WrongServerKey,
    pin_endpoint,
    public_key_pin,
)

reactor: Any = installed_reactor
ROOT = Path(__file__).parent.parent.parent


class Everything(Resource):
    """Echoes bodies; `/N` answers N bytes (`?streamed`: in pieces), `/redirect` elsewhere, `/never` never."""

    isLeaf = True

    def render_GET(self, request: Any) -> Any:
        if request.path == b"/redirect":
            return request.redirect(b"/3") or b""
        if request.path == b"/never":
            return NOT_DONE_YET
        request.setHeader(b"x-path", request.path)
        body = numbered(int(request.path[1:]))
        if b"streamed" in request.args:
            NoRangeStaticProducer(request, io.BytesIO(body)).start()
            return NOT_DONE_YET
        return body

    def render_POST(self, request: Any) -> bytes:
        body: bytes = request.content.read()
        return b"%s %d " % (request.method, len(body)) + body[:20]

    render_PUT = render_PATCH = render_POST


def numbered(size: int) -> bytes:
    """A body that tells its bytes apart."""
    return b"".join(b"%07d " % n for n in range(size // 8 + 1))[:size]


class CountingSite(Site):
    """Knows how many connections there were."""

    def __init__(self) -> None:
        super().__init__(Everything())
        self.connections = 0

    def buildProtocol(self, addr: Any) -> Any:
        self.connections += 1
        return super().buildProtocol(addr)


class TreqTests(TestCase):
    """treq runs on it."""

    def setUp(self) -> None:
        self.site = CountingSite()
        port = reactor.listenTCP(0, self.site, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        self.url = f"http://127.0.0.1:{port.getHost().port}"
        self.agent = PipelinedAgent(reactor)
        self.addCleanup(self.agent.close)
        self.client = treq.client.HTTPClient(self.agent)

    async def test_get(self) -> None:
        """Many GETs at once come back right, on one connection."""
        responses = await gatherResults([self.client.get(f"{self.url}/{n}") for n in range(50)])
        for n, response in enumerate(responses):
            self.assertEqual(response.code, 200)
            self.assertEqual(await response.content(), numbered(n))
            self.assertEqual(response.headers.getRawHeaders("x-path"), [f"/{n}"])
        self.assertLessEqual(self.site.connections, 4)

    async def test_post(self) -> None:
        """Bodies of every kind treq knows arrive."""
        for data, expected in (
            (b"bytes", b"POST 5 bytes"),
            (io.BytesIO(b"file"), b"POST 4 file"),
            ({"a": "b"}, b"POST 3 a=b"),
        ):
            response = await self.client.post(f"{self.url}/", data=data)
            self.assertEqual(await response.content(), expected)
        response = await self.client.put(f"{self.url}/", json=[1])
        self.assertEqual(await response.content(), b"PUT 3 [1]")
        files: Any = {"f": io.BytesIO(b"x" * 10**6)}
        response = await self.client.post(f"{self.url}/", files=files)
        self.assertTrue((await response.content()).startswith(b"POST 1000"))

    async def test_large_bodies(self) -> None:
        """Megabytes go up and come down whole, in parallel with small requests."""
        size = 3_000_000
        large = self.client.get(f"{self.url}/{size}", unbuffered=True)
        small = [self.client.get(f"{self.url}/{n}") for n in range(20)]
        up = self.client.post(f"{self.url}/", data=numbered(size))
        for n, d in enumerate(small):
            self.assertEqual(await (await d).content(), numbered(n))
        pieces: list[bytes] = []
        await (await large).collect(pieces.append)
        self.assertEqual(b"".join(pieces), numbered(size))
        self.assertTrue((await (await up).content()).startswith(b"POST %d " % size))

    async def test_head_and_redirect(self) -> None:
        """HEAD has no body, and redirects are followed."""
        response = await self.client.head(f"{self.url}/500")
        self.assertEqual((response.code, await response.content()), (200, b""))
        response = await self.client.get(f"{self.url}/redirect")
        self.assertEqual(await response.content(), numbered(3))

    async def test_timeout(self) -> None:
        """treq's time-outs cancel; what waits behind is answered on another connection."""
        stuck = self.client.get(f"{self.url}/never", timeout=0.05)
        await self.assertFailure(stuck, CancelledError)

    async def test_the_trap(self) -> None:
        """
        A Twisted server breaks down when it comes to a streamed answer while its transport is full of
        the one before; it never does here. (With `expected_response_bytes=100` this fails.)
        """
        size = 3_000_000
        agent = PipelinedAgent(reactor, limits=Limits(max_connections=1, timeout_s=5))
        self.addCleanup(agent.close)
        asked = [
            agent.request(
                b"GET",
                f"{self.url}/{size}{path}".encode(),
                expected_response_bytes=size,
            ).addCallback(readBody)
            for path in ("", "?streamed=1") * 3
        ]
        for body in await gatherResults(asked):
            self.assertEqual(body, numbered(size))
        self.assertEqual(self.site.connections, 1)

    async def test_the_example(self) -> None:
        """The how-to's example fetches what it says."""
        fetch_all = runpy.run_path(str(ROOT / "docs/examples/pipelined_agent.py"))["fetch_all"]
        bodies = await fetch_all(reactor, [f"{self.url}/{n}" for n in (1, 2, 300)])
        self.assertEqual(bodies, [numbered(1), numbered(2), numbered(300)])


def make_certificate(
    key: EllipticCurvePrivateKey, signer: EllipticCurvePrivateKey | None = None
) -> x509.Certificate:
    """A certificate like a storage server's: self-signed (unless told otherwise), long expired."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "newpb_thingy")])
    start = datetime.datetime(2001, 1, 1)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=365))
        .sign(signer or key, SHA256())
    )


@implementer(IOpenSSLContextFactory)
class ServerTLS:
    """The server's side, with settings a test may want."""

    def __init__(
        self, key: EllipticCurvePrivateKey, certificate: x509.Certificate, protocols: list[bytes]
    ) -> None:
        self.offered: list[list[bytes]] = []
        context = self.context = SSL.Context(SSL.TLS_METHOD)
        context.use_privatekey(crypto.PKey.from_cryptography_key(key))
        context.use_certificate(crypto.X509.from_cryptography(certificate))
        if protocols:
            context.set_alpn_select_callback(self._select)

    def _select(self, connection: Any, offered: list[bytes]) -> bytes:
        self.offered.append(offered)
        return b"http/1.1"

    def getContext(self) -> SSL.Context:
        return self.context


class Spy(Protocol):
    """Keeps every byte that arrives decrypted."""

    def dataReceived(self, data: bytes) -> None:
        factory: Any = self.factory
        factory.received.append(data)
        assert self.transport is not None
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")


class PinnedTests(TestCase):
    """TLS to the owner of a key."""

    def setUp(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.pin = public_key_pin(make_certificate(self.key))

    def listen(
        self, certificate: x509.Certificate | None = None, version: int | None = None
    ) -> int:
        """Serve with the key, and return the port."""
        self.tls = ServerTLS(self.key, certificate or make_certificate(self.key), [b"http/1.1"])
        if version is not None:
            self.tls.context.set_max_proto_version(version)
            self.tls.context.set_cipher_list(b"ALL:@SECLEVEL=0")
        factory: Any = Factory.forProtocol(Spy)
        factory.received = []
        self.factory = factory
        port = reactor.listenSSL(0, self.factory, self.tls, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        number: int = port.getHost().port
        return number

    def get(self, port: int, pin: bytes) -> Deferred[bytes]:
        """One GET with a secret in it."""
        agent = PipelinedAgent(reactor, PinnedEndpoints(reactor, pin))
        self.addCleanup(agent.close)
        d: Any = agent.request(b"GET", f"https://127.0.0.1:{port}/secret".encode())
        return d.addCallback(readBody)  # type: ignore[no-any-return]

    async def test_expired_and_self_signed(self) -> None:
        """Neither dates nor names nor authorities matter; only HTTP/1.1 is offered."""
        for version in (SSL.TLS1_2_VERSION, SSL.TLS1_3_VERSION):
            self.assertEqual(await self.get(self.listen(version=version), self.pin), b"hi")
            self.assertEqual(self.tls.offered, [[b"http/1.1"]])

    async def test_wrong_key(self) -> None:
        """With another key the request fails with one clear sentence, and nothing was sent."""
        port = self.listen()
        error: Any = await self.assertFailure(self.get(port, b"\1" * 32), WrongServerKey)
        self.assertFalse(error.may_have_happened)
        self.assertEqual(self.factory.received, [])
        self.assertIn(f"127.0.0.1:{port} is not the server it should be", str(error))

    async def test_not_self_signed(self) -> None:
        """A certificate with the right key that somebody else signed is not the server's own."""
        other = ec.generate_private_key(ec.SECP256R1())
        port = self.listen(make_certificate(self.key, signer=other))
        error = await self.assertFailure(self.get(port, self.pin), WrongServerKey)
        self.assertIn("not signed by its own key", str(error))
        self.assertEqual(self.factory.received, [])

    async def test_old_tls(self) -> None:
        """TLS 1.1 is not spoken."""
        port = self.listen(version=SSL.TLS1_1_VERSION)
        await self.assertFailure(self.get(port, self.pin), RequestNotSent)
        self.assertEqual(self.factory.received, [])

    async def test_one_connection(self) -> None:
        """A connection used directly says the same: with the wrong key nothing is sent on it."""
        port = self.listen()
        for pin, outcome in ((self.pin, None), (b"\1" * 32, WrongServerKey)):
            endpoint = pin_endpoint(HostnameEndpoint(reactor, "127.0.0.1", port), pin, "it")
            factory = Factory.forProtocol(lambda: PipelinedConnection(reactor, server="it"))
            connection: Any = await endpoint.connect(factory)
            self.factory.received.clear()
            d = connection.request(RawRequest(b"GET /secret HTTP/1.1\r\nHost: it\r\n\r\n"))
            if outcome is None:
                self.assertEqual((await d).body, b"hi")
            else:
                await self.assertFailure(d, outcome)
                self.assertEqual(self.factory.received, [])
            await connection.close()

    def test_not_a_pin(self) -> None:
        """A pin of another size is refused before connecting."""
        self.failureResultOf(self.get(1, b"short"), UsageError)

    async def test_unpinned(self) -> None:
        """Without a pin, a certificate that no authority signed is refused, and nothing is sent."""
        agent = PipelinedAgent(reactor)
        self.addCleanup(agent.close)
        d = agent.request(b"GET", b"https://127.0.0.1:%d/secret" % self.listen())
        error: Any = await self.assertFailure(d, RequestNotSent)
        self.assertIn("certificate", str(error))
        self.assertEqual(self.factory.received, [])
        self.assertLessEqual(len(self.flushLoggedErrors(CertificateError)), 1)  # by newer Twisteds

    async def test_plain_http(self) -> None:
        """Pinned endpoints do not speak without TLS."""
        agent = PipelinedAgent(reactor, PinnedEndpoints(reactor, self.pin))
        d = agent.request(b"GET", b"http://127.0.0.1:1/")
        await self.assertFailure(d, RequestNotSent)


class SpeedtestTests(SynchronousTestCase):
    """The benchmark stays alive."""

    def test_tiny(self) -> None:
        """Its tiny mode measures every client once and prints JSON."""
        found = subprocess.run(
            [sys.executable, str(ROOT / "misc/speedtest/agent.py"), "--tiny"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        lines = [json.loads(line) for line in found.stdout.splitlines()]
        self.assertEqual(
            [line["client"] for line in lines],
            ["twisted", "pipelined", "raw", "ceiling", "twisted", "pipelined", "raw"],
        )
