"""
How an agent's connections are made: the usual way, or with a server's public key pinned (``pinned``).

Both are ``IAgentEndpointFactory``s, as is anything else with ``endpointForURI``; that is where a network in
memory, a proxy or Tor goes underneath the agent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.ssl import optionsForClientTLS
from twisted.web.client import URI
from twisted.web.error import SchemeNotSupported
from twisted.web.iweb import IAgentEndpointFactory, IPolicyForHTTPS
from zope.interface import implementer

from pipegrid.arguments import shown
from pipegrid.errors import UsageError
from pipegrid.http11.pinned import pin_endpoint
from pipegrid.http11.proxies import Proxy, proxy_for, read_proxy
from pipegrid.http11.tunnel import TunnelEndpoint

_ALPN = [b"http/1.1"]  # a server that knows HTTP/2 might choose it if we let it


@implementer(IAgentEndpointFactory)
class StandardEndpoints:
    """
    TCP for http, TLS for https.

    Args:
        reactor: makes the connections.
        contextFactory: decides whose certificates are trusted; None: the platform's certificate authorities.
        connectTimeout: seconds that TCP may take; None: as long as all of it may take.
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
        endpoint = HostnameEndpoint(self._reactor, host, uri.port, **self._options)
        if uri.scheme == b"http":
            return endpoint
        if uri.scheme == b"https":
            return self.over_tls(endpoint, uri)
        raise SchemeNotSupported(f"{uri.scheme.decode('latin-1')} is neither http nor https")

    def over_tls(self, endpoint: IStreamClientEndpoint, uri: URI) -> IStreamClientEndpoint:
        """Return an endpoint for TLS over another one, to the host of a URI."""
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
    Connections through an HTTP proxy: https by CONNECT, with TLS to the host; http as the proxy passes it on.

    Args:
        reactor: makes the connections.
        proxy: the URL of one proxy for all hosts, ``http://[USER:PASSWORD@]HOST:PORT/`` or ``https://``;
            None: the one that the environment names for each host, if it names any (``proxy_for``).
        inner: connects to the proxy, and to hosts without one, and trusts certificates.
        environment: in place of ``os.environ``.

    Raises:
        UsageError: ``proxy`` is no such URL; of the environment, when a host is asked.
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
        """Return the proxy through which the host of a URI is asked; None: it is asked directly."""
        if self._proxy is not None:
            return self._proxy
        scheme, host = uri.scheme.decode("latin-1"), uri.host.decode("ascii")
        return proxy_for(scheme, host, uri.port, self._environment)

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        proxy = self.proxy_of(uri)
        if proxy is None:
            return self._inner.endpointForURI(uri)
        to_proxy = self._inner.endpointForURI(URI.fromBytes(proxy.url.encode("ascii")))
        if uri.scheme != b"https":
            return to_proxy
        return self._inner.over_tls(_tunnel(to_proxy, uri, proxy), uri)


def tunnelled(endpoint: IStreamClientEndpoint, uri: URI, proxy: Proxy) -> IStreamClientEndpoint:
    """
    Return an endpoint for TLS through a proxy, to a host whose certificate the platform's authorities prove.

    Args:
        endpoint: to the proxy.
        uri: of the host.
    """
    return _over_tls(_tunnel(endpoint, uri, proxy), uri.host.decode("ascii"))


def _tunnel(endpoint: IStreamClientEndpoint, uri: URI, proxy: Proxy) -> IStreamClientEndpoint:
    host = uri.host.decode("ascii")
    name = f"[{host}]" if ":" in host else host
    return TunnelEndpoint(endpoint, f"{name}:{uri.port}", proxy.authorization, proxy.url)


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
