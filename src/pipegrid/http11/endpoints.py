"""
How an agent's connections are made: the usual way, or with a server's public key pinned (``pinned``).

Both are ``IAgentEndpointFactory``s, as is anything else with ``endpointForURI``; that is where a network in
memory, a proxy or Tor goes underneath the agent.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.ssl import optionsForClientTLS
from twisted.web.client import URI
from twisted.web.error import SchemeNotSupported
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from pipegrid.http11.pinned import pin_endpoint
from pipegrid.http11.proxies import Proxy
from pipegrid.http11.tunnel import TunnelEndpoint

_ALPN = [b"http/1.1"]  # a server that knows HTTP/2 might choose it if we let it


@implementer(IAgentEndpointFactory)
class StandardEndpoints:
    """TCP for http, TLS with the platform's certificate authorities for https."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        host = uri.host.decode("ascii")
        endpoint = HostnameEndpoint(self._reactor, host, uri.port)
        if uri.scheme == b"http":
            return endpoint
        if uri.scheme == b"https":
            return _over_tls(endpoint, host)
        raise SchemeNotSupported(f"{uri.scheme.decode('latin-1')} is neither http nor https")


def _over_tls(endpoint: IStreamClientEndpoint, host: str) -> IStreamClientEndpoint:
    options: Any = optionsForClientTLS(host, acceptableProtocols=_ALPN)
    wrapped: IStreamClientEndpoint = wrapClientTLS(options, endpoint)
    return wrapped


def tunnelled(endpoint: IStreamClientEndpoint, uri: URI, proxy: Proxy) -> IStreamClientEndpoint:
    """
    Return an endpoint for TLS through a proxy, to a host whose certificate the platform's authorities prove.

    Args:
        endpoint: to the proxy.
        uri: of the host.
    """
    host = uri.host.decode("ascii")
    name = f"[{host}]" if ":" in host else host
    tunnel = TunnelEndpoint(endpoint, f"{name}:{uri.port}", proxy.authorization, proxy.url)
    return _over_tls(tunnel, host)


@implementer(IAgentEndpointFactory)
class PinnedEndpoints:
    """
    TLS for https, to servers that own the one pinned key; nothing else.

    Args:
        inner: makes the endpoint under the TLS (it is asked for http); None for TCP.
    """

    def __init__(
        self, reactor: Any, pin: bytes, inner: IAgentEndpointFactory | None = None
    ) -> None:
        self._inner: Any = inner or StandardEndpoints(reactor)
        self._pin = pin

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        if uri.scheme != b"https":
            raise SchemeNotSupported("A pinned key needs https")
        server = uri.netloc.decode("latin-1")
        plain = URI(b"http", uri.netloc, uri.host, uri.port, uri.path, b"", b"", b"")
        return pin_endpoint(self._inner.endpointForURI(plain), self._pin, server)
