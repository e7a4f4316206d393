"""Real Twisted programs in the simulation: TLS, twisted.web's server and client."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from OpenSSL import SSL
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.ssl import CertificateOptions, KeyPair, PrivateCertificate
from twisted.protocols.tls import TLSMemoryBIOFactory, TLSMemoryBIOProtocol
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import URI, Agent, HTTPConnectionPool, readBody
from twisted.web.http import Request
from twisted.web.iweb import IAgentEndpointFactory, IResponse
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site
from twisted.web.static import File
from zope.interface import implementer

from pipegrid.testing.clock import HeapClock, cooperator
from pipegrid.testing.network import SimulatedNetwork, leaks, run
from tests.simulation.programs import Echo, Keeping, Recorder

MB = 1_000_000


def certificate() -> CertificateOptions:
    """Return server options with a new self-signed certificate, TLS 1.3 only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "simulation")])
    day = datetime.datetime(2024, 1, 1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(day)
        .not_valid_after(day + datetime.timedelta(days=36500))
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    private = PrivateCertificate.loadPEM(key_pem + made.public_bytes(serialization.Encoding.PEM))
    assert isinstance(private.privateKey, KeyPair)
    options = private.options()
    assert isinstance(options, CertificateOptions)
    return options


@implementer(IOpenSSLClientConnectionCreator)
class Trusting:
    """A client that asks no questions: who the server is, is not this test's business."""

    def clientConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:
        context = SSL.Context(SSL.TLS_CLIENT_METHOD)
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
        return SSL.Connection(context, None)


class Plain(Recorder):
    """An end of a connection that may have TLS between it and the simulated transport."""

    clock: HeapClock

    def _now(self) -> float:
        return round(self.clock.seconds(), 9)


class PlainEcho(Plain, Echo):
    """Sends everything back."""


class TlsTests(SynchronousTestCase):
    """TLS as Twisted does it, over simulated transports."""

    def setUp(self) -> None:
        self.clock = HeapClock()
        Plain.clock = self.clock

    def connect(self, network: SimulatedNetwork) -> Plain:
        factory = Keeping(PlainEcho)
        server, client = network.host("server"), network.host("client")
        server.listen(443, TLSMemoryBIOFactory(certificate(), False, factory, clock=server.clock))
        near = Plain()
        wrapped = TLSMemoryBIOFactory(
            Trusting(), True, Factory.forProtocol(lambda: near), clock=client.clock
        )
        run(self.clock, network.endpoint("client", "server", 443).connect(wrapped))
        return near

    def test_a_cold_start_costs_two_round_trips(self) -> None:
        """One for TCP, one for TLS 1.3; the request behind them takes its one."""
        network = SimulatedNetwork(self.clock, latency_s=0.05)
        near = self.connect(network)
        near.transport.write(b"request")
        end_s = run(self.clock, near.when(7), network=network)
        self.assertEqual(network.round_trips(end_s, "client", "server"), 3)
        self.assertEqual(near.received, b"request")
        requests = [s for s in network.log if s.from_host == "client" and s.kind == "data"]
        self.assertEqual(round(requests[-1].start_ns / 1e9, 9), 0.2)

    def test_bulk_and_close(self) -> None:
        """A megabyte there and back survives TLS, and the close leaves nothing."""
        network = SimulatedNetwork(self.clock, latency_s=0.05, bytes_per_s=10 * MB)
        near = self.connect(network)
        payload = bytes(range(250)) * 4000
        near.transport.write(payload)
        run(self.clock, near.when(len(payload)), network=network)
        self.assertEqual(bytes(near.received), payload)
        near.transport.loseConnection()
        run(self.clock, near.over)
        self.clock.advance(1)
        self.assertEqual(leaks(self.clock, network), [])


class Hello(Resource):
    """Answers at once, or after a second of virtual time."""

    isLeaf = True

    def __init__(self, call_later: Callable[..., object]) -> None:
        super().__init__()
        self._call_later = call_later

    def render_GET(self, request: Request) -> bytes | int:
        if request.path == b"/slow":

            def finish() -> None:
                request.write(b"at last")
                request.finish()

            self._call_later(1, finish)
            return NOT_DONE_YET
        return b"hello"


@implementer(IAgentEndpointFactory)
class FromHost:
    """Finds the hosts of a simulated network by the names in URLs."""

    def __init__(self, network: SimulatedNetwork, host: str) -> None:
        self._network = network
        self._host = host

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        return self._network.endpoint(self._host, uri.host.decode("ascii"), uri.port)


class WebTests(SynchronousTestCase):
    """Site and Agent, unchanged."""

    def setUp(self) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, latency_s=0.05)
        self.server = self.network.host("server")
        reactor = self.network.host("client").clock
        self.pool = HTTPConnectionPool(reactor)
        self.agent = Agent.usingEndpointFactory(
            reactor, FromHost(self.network, "client"), self.pool
        )

    def serve(self, resource: Resource) -> None:
        """All that Site and its channels schedule goes through the reactor they are given."""
        self.site = Site(resource, reactor=self.server.clock)
        self.port = self.server.listen(80, self.site)

    def get(self, path: bytes) -> bytes:
        body: Deferred[bytes] = Deferred.fromCoroutine(self._get(path))
        return run(self.clock, body, network=self.network)

    async def _get(self, path: bytes) -> bytes:
        response: IResponse = await self.agent.request(b"GET", b"http://server" + path)
        return await readBody(response)

    def test_requests(self) -> None:
        """Cold, a request takes two round trips; warm, one; the server's own time is added."""
        self.serve(Hello(self.server.clock.callLater))
        times = []
        for path in (b"/", b"/", b"/slow"):
            begun_s = self.clock.seconds()
            self.assertIn(self.get(path), (b"hello", b"at last"))
            times.append(round(self.clock.seconds() - begun_s, 9))
        self.assertEqual(times, [0.2, 0.1, 1.1])

    def test_idle_connections_time_out(self) -> None:
        """The server closes after its 60 s, and then nothing is left but the site's log timer."""
        self.serve(Hello(self.server.clock.callLater))
        self.pool.cachedConnectionTimeout = 1000
        self.get(b"/")
        idle_s = self.clock.seconds()
        while self.network.transports:
            self.clock.step()
        # 60 s from the last byte of the request; then the end reaches the client.
        self.assertEqual(round(self.clock.seconds() - idle_s, 9), 60)
        self.port.stopListening()
        self.pool.closeCachedConnections()
        self.clock.advance(1)
        self.assertEqual(leaks(self.clock, self.network), [])

    def test_pull_producers(self) -> None:
        """File has a pull producer, which twisted.web gives to the global Cooperator: bring your own."""
        self.patch(task, "_theCooperator", cooperator(self.clock))
        path = self.mktemp()
        payload = bytes(range(250)) * 4000
        with open(path, "wb") as file:
            file.write(payload)
        root = Resource()
        root.putChild(b"file", File(path))
        self.serve(root)
        self.assertEqual(self.get(b"/file"), payload)
        self.assertEqual(round(self.clock.seconds(), 9), 0.2)
