"""Whom an agent trusts, where it connects from, and what may stand between: wrappers and HTTP proxies."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from misc.speedtest.mirror.authority import make_certificate
from OpenSSL import SSL
from OpenSSL.crypto import FILETYPE_PEM, load_certificate
from service_identity.exceptions import VerificationError
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.ssl import (
    Certificate,
    DefaultOpenSSLContextFactory,
    optionsForClientTLS,
    trustRootFromCertificates,
)
from twisted.internet.task import Clock, deferLater
from twisted.internet.tcp import Connection
from twisted.protocols.policies import ThrottlingFactory, WrappingFactory
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.client import URI, BrowserLikePolicyForHTTPS, readBody
from twisted.web.iweb import IAgentEndpointFactory
from twisted.web.resource import Resource
from twisted.web.server import Site
from zope.interface import implementer

from pipegrid.errors import UsageError
from pipegrid.http11 import (
    Limits,
    PinnedEndpoints,
    PipelinedAgent,
    ProxyEndpoints,
    RequestNotSent,
    StandardEndpoints,
    TunnelRefused,
    UntrustedCertificate,
    proxy_for,
    public_key_pin,
)
from tests.cli.test_mirror_proxy import ProxyProtocol

reactor: Any = installed_reactor


class Where(Resource):
    """Answers with the address that asks; POST with the body."""

    isLeaf = True

    def render_GET(self, request: Any) -> bytes:
        host: str = request.getClientAddress().host
        return host.encode()

    def render_POST(self, request: Any) -> bytes:
        body: bytes = request.content.read()
        return body


class ServerCase(TestCase):
    """A web server on this machine, with TLS or without."""

    def setUp(self) -> None:
        made = self.made = make_certificate(Path(self.mktemp()))
        context = self.context = DefaultOpenSSLContextFactory(str(made.key), str(made.certificate))
        plain = reactor.listenTCP(0, Site(Where()), interface="127.0.0.1")
        secure = reactor.listenSSL(0, Site(Where()), context, interface="127.0.0.1")
        for port in (plain, secure):
            self.addCleanup(port.stopListening)
        self.port, self.tls_port = plain.getHost().port, secure.getHost().port
        authority = Certificate.loadPEM(made.authority.read_bytes())
        self.roots = trustRootFromCertificates([authority])

    def agent(self, *arguments: Any, **options: Any) -> PipelinedAgent:
        """Return one, which is closed in the end."""
        agent = PipelinedAgent(reactor, *arguments, **options)
        self.addCleanup(agent.close)
        return agent

    async def get(self, agent: PipelinedAgent, url: str) -> bytes:
        """Return the body of the answer."""
        response = await agent.request(b"GET", url.encode())
        body: bytes = await readBody(response)
        return body


class CertificateTests(ServerCase):
    """Trust that is missing is told from hosts that are."""

    async def test_an_unknown_authority(self) -> None:
        """The error has OpenSSL's; of a host that is not there, it is another one."""
        agent = self.agent()
        with self.assertRaises(UntrustedCertificate) as caught:
            await self.get(agent, f"https://localhost:{self.tls_port}/")
        error = caught.exception
        self.assertIsInstance(error.error, SSL.Error)
        self.assertIs(error.__cause__, error.error)
        self.assertIn("certificate verify failed", str(error))
        self.assertIn(f"localhost:{self.tls_port}", str(error))
        self.assertFalse(error.may_have_happened)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"https://localhost:{unused.getsockname()[1]}/"
            with self.assertRaises(RequestNotSent) as other:
                await self.get(agent, url)
        self.assertNotIsInstance(other.exception, UntrustedCertificate)

    async def test_another_name(self) -> None:
        """A certificate of an authority that is trusted, for another host."""
        agent = self.agent(contextFactory=BrowserLikePolicyForHTTPS(self.roots))
        self.assertEqual(await self.get(agent, f"https://localhost:{self.tls_port}/"), b"127.0.0.1")
        other = reactor.listenSSL(0, Site(Where()), self.context, interface="127.0.0.2")
        self.addCleanup(other.stopListening)
        with self.assertRaises(UntrustedCertificate) as caught:
            await self.get(agent, f"https://127.0.0.2:{other.getHost().port}/")
        self.assertIsInstance(caught.exception.error, VerificationError)
        self.assertIn("it is not for 127.0.0.2", str(caught.exception))
        self.flushLoggedErrors()

    async def test_no_tls_at_all(self) -> None:
        """Is no matter of trust."""
        with self.assertRaises(RequestNotSent) as caught:
            await self.get(self.agent(connectTimeout=1), f"https://localhost:{self.port}/")
        self.assertNotIsInstance(caught.exception, UntrustedCertificate)

    def test_a_policy_that_is_none(self) -> None:
        """It is said at once."""
        wrong: Any = object()
        self.assertRaises(UsageError, PipelinedAgent, reactor, contextFactory=wrong)
        self.assertRaises(
            UsageError,
            PipelinedAgent,
            reactor,
            StandardEndpoints(reactor),
            bindAddress="127.0.0.2",
        )


class AgentArgumentTests(ServerCase):
    """As Twisted's ``Agent`` takes them."""

    async def test_where_it_connects_from(self) -> None:
        """A host, or a host and a port."""
        for address in (("127.0.0.2", 0), b"127.0.0.2"):
            agent = self.agent(bindAddress=address)
            self.assertEqual(await self.get(agent, f"http://127.0.0.1:{self.port}/"), b"127.0.0.2")


class ConnectTimeoutTests(SynchronousTestCase):
    """In virtual time."""

    def test_the_time(self) -> None:
        """A host that does not answer fails when it is over, in place of the limits'."""

        @implementer(IStreamClientEndpoint)
        class Nowhere:
            def connect(self, protocolFactory: Any) -> Deferred[Any]:
                return Deferred()

        @implementer(IAgentEndpointFactory)
        class ToNowhere:
            def endpointForURI(self, uri: URI) -> Any:
                return Nowhere()

        clock = Clock()
        agent = PipelinedAgent(clock, ToNowhere(), Limits(connect_timeout_s=60), connectTimeout=2.0)
        asked = agent.request(b"GET", b"http://host/")
        clock.pump([0.1] * 19)
        self.assertNoResult(asked)
        clock.pump([0.1] * 2)
        failure = self.failureResultOf(asked, RequestNotSent)
        self.assertIn("it was not usable after 2 s", str(failure.value))
        self.assertRaises(UsageError, PipelinedAgent, clock, connectTimeout=0)


@implementer(IStreamClientEndpoint)
class WrappedEndpoint:
    """An endpoint whose connections have a wrapper of Twisted's around them."""

    def __init__(self, inner: Any, wrap: Any) -> None:
        self.inner, self.wrap = inner, wrap

    def connect(self, protocolFactory: Any) -> Deferred[Any]:
        """Connect; fires with the wrapper."""
        factory = self.wrap(protocolFactory)
        self.wrapped = factory
        connecting: Deferred[Any] = self.inner.connect(factory)
        return connecting


def throttled(factory: Any) -> Any:
    """Return a ``ThrottlingFactory`` that bounds nothing here, and leaves no timers."""
    made = ThrottlingFactory(factory)
    made.noisy = False
    return made


class WrapperTests(ServerCase):
    """A ``ProtocolWrapper`` between a connection and TCP, between it and TLS, and between TLS and TCP."""

    async def ask(self, make: Any, port: int, scheme: str) -> None:
        """Ask several times, through endpoints that ``make`` makes."""

        @implementer(IAgentEndpointFactory)
        class Endpoints:
            def endpointForURI(self, uri: URI) -> Any:
                return make(HostnameEndpoint(reactor, "127.0.0.1", uri.port))

        agent = self.agent(Endpoints(), Limits(connect_timeout_s=5))
        url = f"{scheme}://localhost:{port}/"
        bodies = await gatherResults(
            [Deferred.fromCoroutine(self.get(agent, url)) for _ in range(5)]
        )
        self.assertEqual(bodies, [b"127.0.0.1"] * 5)
        await agent.close()

    def over_tls(self, endpoint: Any) -> Any:
        """Return TLS over it."""
        return wrapClientTLS(optionsForClientTLS("localhost", self.roots), endpoint)

    async def test_over_tcp(self) -> None:
        """As Twisted's throttling."""
        for wrap in (throttled, WrappingFactory):  # both were "not usable" for ever
            await self.ask(lambda inner, wrap=wrap: WrappedEndpoint(inner, wrap), self.port, "http")

    async def test_over_tls(self) -> None:
        """It provides what TLS does, and does not say when the handshake is over."""
        await self.ask(
            lambda inner: WrappedEndpoint(self.over_tls(inner), throttled), self.tls_port, "https"
        )

    async def test_below_tls(self) -> None:
        """TLS says so itself."""
        await self.ask(
            lambda inner: self.over_tls(WrappedEndpoint(inner, throttled)), self.tls_port, "https"
        )

    async def test_below_a_pinned_key(self) -> None:
        """So does ours, for pinned keys."""

        @implementer(IAgentEndpointFactory)
        class Inner:
            def endpointForURI(self, uri: URI) -> Any:
                return WrappedEndpoint(HostnameEndpoint(reactor, "127.0.0.1", uri.port), throttled)

        loaded = load_certificate(FILETYPE_PEM, self.made.certificate.read_bytes())
        pin = public_key_pin(loaded.to_cryptography())
        agent = self.agent(PinnedEndpoints(reactor, pin, Inner()))
        with self.assertRaises(RequestNotSent) as caught:  # it is not signed by its own key
            await self.get(agent, f"https://localhost:{self.tls_port}/")
        self.assertNotIn("not usable", str(caught.exception))


class ProxyEndpointTests(ServerCase):
    """Through a proxy that passes on what it is asked."""

    def proxy(self, port: int) -> str:
        """Start one for a server's port; returns its URL."""
        self.seen: list[bytes] = []
        made = type("MadeHere", (ProxyProtocol,), {"seen": self.seen, "port": port})
        listening = reactor.listenTCP(0, Factory.forProtocol(made), interface="127.0.0.1")
        self.addCleanup(self.connections_end)
        self.addCleanup(listening.stopListening)
        return f"http://me:secret@127.0.0.1:{listening.getHost().port}"

    async def connections_end(self) -> None:
        """Wait for the end of all connections."""
        while any(
            isinstance(each, Connection) for each in (*reactor.getReaders(), *reactor.getWriters())
        ):
            await deferLater(reactor, 0.001)

    async def test_http(self) -> None:
        """The proxy is asked for whole URIs, and told who asks; also where the caller gives a Host."""
        agent = self.agent(ProxyEndpoints(reactor, self.proxy(self.port)))
        url = f"http://localhost:{self.port}/a?b"
        self.assertEqual(await self.get(agent, url), b"127.0.0.1")
        self.assertEqual(self.seen[0], f"GET {url} HTTP/1.1".encode())
        await agent.close()

    async def test_https(self) -> None:
        """The proxy makes a way; certificates are those of the host, trusted as the caller says."""
        proxy = self.proxy(self.tls_port)
        trusting = StandardEndpoints(reactor, BrowserLikePolicyForHTTPS(self.roots))
        agent = self.agent(ProxyEndpoints(reactor, proxy, trusting))
        url = f"https://localhost:{self.tls_port}/"
        self.assertEqual(await self.get(agent, url), b"127.0.0.1")
        self.assertEqual(set(self.seen), {f"CONNECT localhost:{self.tls_port} HTTP/1.1".encode()})
        distrusting = self.agent(ProxyEndpoints(reactor, proxy))
        with self.assertRaises(UntrustedCertificate):
            await self.get(distrusting, url)
        await agent.close()

    async def test_a_proxy_that_refuses(self) -> None:
        """The cause says so."""
        proxy = self.proxy(self.tls_port).replace("secret", "wrong")
        with self.assertRaises(RequestNotSent) as caught:
            await self.get(
                self.agent(ProxyEndpoints(reactor, proxy)), f"https://localhost:{self.tls_port}/"
            )
        self.assertIsInstance(caught.exception.__cause__, TunnelRefused)
        self.assertIn("answers 407", str(caught.exception))

    async def test_the_environment(self) -> None:
        """Names a proxy for some hosts; it is read for each."""
        environment = {"http_proxy": self.proxy(self.port), "no_proxy": "127.0.0.1"}
        self.assertIsNotNone(proxy_for("http", "localhost", 80, environment))
        agent = self.agent(ProxyEndpoints(reactor, environment=environment))
        for host, asked in (("127.0.0.1", 0), ("localhost", 1)):
            self.assertEqual(await self.get(agent, f"http://{host}:{self.port}/"), b"127.0.0.1")
            self.assertEqual(len(set(self.seen)), asked)
        wrong = self.agent(ProxyEndpoints(reactor, environment={"http_proxy": "socks5://a:1"}))
        with self.assertRaises(UsageError):
            await self.get(wrong, f"http://localhost:{self.port}/")
        await agent.close()
