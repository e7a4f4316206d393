"""Endpoints for HTTP connections: TCP and TLS, direct or through a proxy."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.ssl import optionsForClientTLS
from twisted.python.failure import Failure
from twisted.web.client import URI
from twisted.web.error import SchemeNotSupported
from twisted.web.iweb import IAgentEndpointFactory, IPolicyForHTTPS
from zope.interface import implementer

from pipegrid.argument_checks import shown
from pipegrid.errors import UsageError
from pipegrid.http11.proxy_settings import Proxy, check_resolvable, proxy_for, read_proxy
from pipegrid.reactor.connection_policy import ProxyWay
from pipegrid.reactor.tcp_socks5_endpoints import SocksEndpoint

# A tunnel through a proxy: CONNECT (RFC 9110, 9.3.6), then the bytes of any protocol to the target.
#
# The size of the proxy's response is limited here; the caller limits the time. Any status but 2xx ends the
# connection before a byte for the target is sent.

MAX_HEAD_BYTES = 16 << 10

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?\r?\n")
_END = re.compile(rb"\r?\n\r?\n")


class TunnelRefused(ConnectionError):
    """A proxy has refused to connect to the target."""


class Tunnel(Protocol):
    """
    One connection to a proxy.

    Args:
        inner: the protocol that gets the connection when the proxy has connected to the target.
        opened: fires with ``inner`` when the proxy has connected to the target.
    """

    transport: Any

    def __init__(
        self, target: str, authorization: bytes, proxy: str, inner: IProtocol, opened: Deferred[Any]
    ) -> None:
        self._target = target
        self._authorization = authorization
        self._proxy = proxy
        self._inner: Any = inner
        self._opened: Deferred[Any] | None = opened
        self._head = b""
        self._is_through = False

    def connectionMade(self) -> None:
        target = self._target.encode("ascii")
        self.transport.write(
            b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (target, target, self._authorization)
        )

    def dataReceived(self, data: bytes) -> None:
        self._head += data
        end = _END.search(self._head)
        status = _STATUS.match(self._head)
        if status is None and (end is not None or len(self._head) > 64):
            self._refuse("answers with something other than HTTP")
        elif status is not None and not status[1].startswith(b"2"):
            self._refuse(f"answers {status[1].decode('ascii')} when asked to connect")
        elif len(self._head) > MAX_HEAD_BYTES and (end is None or end.end() > MAX_HEAD_BYTES):
            self._refuse(f"answers with a head of more than {MAX_HEAD_BYTES} bytes")
        elif end is not None:
            self._open(self._head[end.end() :])

    def _open(self, rest: bytes) -> None:
        opened, self._opened = self._opened, None
        self._head = b""
        inner = self._inner
        self._is_through = True
        self.dataReceived = inner.dataReceived  # type: ignore[method-assign]
        inner.makeConnection(self.transport)
        if rest:
            inner.dataReceived(rest)
        assert opened is not None
        opened.callback(inner)

    def _refuse(self, what: str) -> None:
        opened = self._opened
        self.give_up()
        if opened is not None:
            opened.errback(TunnelRefused(f"the proxy {self._proxy} {what} to {self._target}"))

    def give_up(self) -> None:
        """Abort the connection, if there is one, and report nothing."""
        self._opened = None
        self._head = b""
        self.dataReceived = lambda data: None  # type: ignore[method-assign]
        if self.transport is not None:
            self.transport.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._opened is None:
            if self._is_through:
                self._inner.connectionLost(reason)
        else:
            self._refuse("closes the connection when asked to connect")


@implementer(IStreamClientEndpoint)
class TunnelEndpoint:
    """
    An endpoint that connects to a target through a proxy.

    Args:
        endpoint: connects to the proxy.
        target: ``HOST:PORT``, to which the proxy connects.
        authorization: a header line for the proxy, with its line end, or b"".
        proxy: the proxy's name for errors.
    """

    def __init__(
        self, endpoint: IStreamClientEndpoint, target: str, authorization: bytes, proxy: str
    ) -> None:
        self._endpoint = endpoint
        self._target = target
        self._authorization = authorization
        self._proxy = proxy

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[Any]:
        """
        Connect; fires with the protocol when it is connected to the target. Cancelling aborts the connection.
        """
        made: list[Tunnel] = []
        connecting: Deferred[Any]

        def cancel(_: object) -> None:
            connecting.cancel()
            for tunnel in made:
                tunnel.give_up()

        opened: Deferred[Any] = Deferred(cancel)

        def build() -> Tunnel:
            inner: Any = protocolFactory.buildProtocol(None)  # type: ignore[arg-type]
            made.append(Tunnel(self._target, self._authorization, self._proxy, inner, opened))
            return made[-1]

        connecting = self._endpoint.connect(Factory.forProtocol(build))

        def failed(failure: Failure) -> None:
            if not opened.called:
                opened.errback(failure)

        connecting.addErrback(failed)
        return opened


# The endpoints of an agent: the standard ones, and those for proxies. ``pinned_endpoints`` has the endpoints
# for servers with a pinned key.
#
# Any ``IAgentEndpointFactory`` can be used instead, for a network in memory, another proxy or Tor.

_ALPN = [b"http/1.1"]  # otherwise a server might choose HTTP/2


@implementer(IAgentEndpointFactory)
class StandardEndpoints:
    """
    Endpoints for TCP (http) and TLS (https).

    Args:
        reactor: makes the connections.
        contextFactory: decides whose certificates are trusted; None: the platform's certificate authorities.
        connectTimeout: seconds for TCP alone; None: the limit for the whole connection applies.
        bindAddress: the local address, and port or 0, to connect from: ``(HOST, PORT)`` or ``HOST``.

    Raises:
        UsageError: ``contextFactory`` provides no ``IPolicyForHTTPS``.
    """

    def __init__(
        self,
        reactor: Any,
        contextFactory: IPolicyForHTTPS | None = None,
        connectTimeout: float | None = None,
        bindAddress: Any = None,
    ) -> None:
        if contextFactory is not None and not IPolicyForHTTPS.providedBy(contextFactory):
            raise UsageError(
                f"contextFactory is an IPolicyForHTTPS, not {shown(contextFactory)}; "
                "twisted.web.client.BrowserLikePolicyForHTTPS is one"
            )
        self._reactor = reactor
        self._policy = contextFactory
        self._options: dict[str, Any] = {"bindAddress": bindAddress}
        if connectTimeout is not None:
            self._options["timeout"] = connectTimeout

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        host = uri.host.decode("ascii")
        check_resolvable(host)
        endpoint: IStreamClientEndpoint = HostnameEndpoint(
            self._reactor, host, uri.port, **self._options
        )
        if uri.scheme == b"http":
            return endpoint
        if uri.scheme == b"https":
            return self.over_tls(endpoint, uri)
        raise SchemeNotSupported(f"{uri.scheme.decode('latin-1')} is neither http nor https")

    def through(self, proxy: ProxyWay, uri: URI) -> IStreamClientEndpoint:
        """Return an endpoint for the host of a URI through a SOCKS5 proxy, which looks up the host's name."""
        host = uri.host.decode("ascii")
        endpoint = SocksEndpoint(self._reactor, proxy, host, uri.port)
        return self.over_tls(endpoint, uri) if uri.scheme == b"https" else endpoint

    def over_tls(self, endpoint: IStreamClientEndpoint, uri: URI) -> IStreamClientEndpoint:
        """Wrap an endpoint in TLS to the host of a URI."""
        if self._policy is None:
            return _over_tls(endpoint, uri.host.decode("ascii"))
        wrapped: IStreamClientEndpoint = wrapClientTLS(
            self._policy.creatorForNetloc(uri.host, uri.port), endpoint
        )
        return wrapped


def _over_tls(endpoint: IStreamClientEndpoint, host: str) -> IStreamClientEndpoint:
    options: Any = optionsForClientTLS(host, acceptableProtocols=_ALPN)
    wrapped: IStreamClientEndpoint = wrapClientTLS(options, endpoint)
    return wrapped


@implementer(IAgentEndpointFactory)
class ProxyEndpoints:
    """
    Connections through an HTTP proxy: for https by CONNECT and TLS to the host; for http the proxy forwards
    the requests. Or through a SOCKS5 proxy, such as Tor, which looks up names.

    Args:
        reactor: makes the connections.
        proxy: the URL of one proxy for all hosts, ``http://[USER:PASSWORD@]HOST:PORT/``, ``https://`` or
            ``socks5h://``; None: the proxy that the environment names for each host, if any (``proxy_for``).
        inner: connects to the proxy, and to hosts without a proxy, and decides whose certificates are
            trusted.
        environment: used instead of ``os.environ``.

    Raises:
        UsageError: ``proxy`` is not such a URL. A proxy in the environment is checked at the first request.
    """

    def __init__(
        self,
        reactor: Any,
        proxy: str | None = None,
        inner: StandardEndpoints | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._inner = inner or StandardEndpoints(reactor)
        self._proxy = None if proxy is None else read_proxy(proxy, "proxy")
        self._environment = os.environ if environment is None else environment

    def proxy_of(self, uri: URI) -> Proxy | None:
        """Return the proxy for the host of a URI; None for a direct connection."""
        if self._proxy is not None:
            return self._proxy
        scheme, host = uri.scheme.decode("latin-1"), uri.host.decode("ascii")
        return proxy_for(scheme, host, uri.port, self._environment)

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        proxy = self.proxy_of(uri)
        if proxy is None:
            return self._inner.endpointForURI(uri)
        if proxy.socks is not None:
            return self._inner.through(proxy.socks, uri)
        to_proxy = self._inner.endpointForURI(URI.fromBytes(proxy.url.encode("ascii")))
        if uri.scheme != b"https":
            return to_proxy
        return self._inner.over_tls(_tunnel(to_proxy, uri, proxy), uri)


def tunnelled(
    endpoint: IStreamClientEndpoint,
    uri: URI,
    proxy: Proxy,
    inner: StandardEndpoints | None = None,
) -> IStreamClientEndpoint:
    """
    Return an endpoint for TLS through a proxy, to a host whose certificate comes from an authority that the
    platform trusts.

    Args:
        endpoint: connects to the proxy.
        uri: its host is the target.
        inner: decides whose certificates are trusted, instead of the platform's authorities.
    """
    tunnel = _tunnel(endpoint, uri, proxy)
    if inner is not None:
        return inner.over_tls(tunnel, uri)
    return _over_tls(tunnel, uri.host.decode("ascii"))


def _tunnel(endpoint: IStreamClientEndpoint, uri: URI, proxy: Proxy) -> IStreamClientEndpoint:
    host = uri.host.decode("ascii")
    name = f"[{host}]" if ":" in host else host
    return TunnelEndpoint(endpoint, f"{name}:{uri.port}", proxy.authorization, proxy.url)
