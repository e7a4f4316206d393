"""Endpoints of an HTTP agent for servers with one pinned key."""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.web.client import URI
from twisted.web.error import SchemeNotSupported
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from pipegrid.http11.endpoints import StandardEndpoints
from pipegrid.http11.pinned_key import pin_endpoint


@implementer(IAgentEndpointFactory)
class PinnedEndpoints:
    """
    Endpoints for https only, with TLS to servers that own the one pinned key.

    Args:
        inner: makes the endpoint below TLS (called with a URI for http); None: TCP.
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
