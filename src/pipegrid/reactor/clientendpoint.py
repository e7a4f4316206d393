"""Clients' own TLS around connections that are yet to be made."""

from __future__ import annotations

import ssl
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from zope.interface import implementer

from pipegrid.reactor.ahead import MadeAhead
from pipegrid.reactor.clienttls import CheckCertificate, ClientTLS


class ClientTLSFactory(Factory):
    """
    Adds TLS to the connections of another factory.

    Args:
        begun: the only connection, if it was made ahead.

    Attributes:
        built: the last protocol; None: the other factory wanted no connection.
    """

    noisy = False

    def __init__(
        self,
        context: ssl.SSLContext,
        check: CheckCertificate,
        wrapped: IProtocolFactory,
        begun: MadeAhead | None = None,
    ) -> None:
        self.built: ClientTLS | None = None
        self._context = context
        self._check = check
        self._wrapped = wrapped
        self._begun = begun

    def doStart(self) -> None:
        self._wrapped.doStart()

    def doStop(self) -> None:
        self._wrapped.doStop()

    def buildProtocol(self, addr: Any) -> ClientTLS | None:
        wrapped = self._wrapped.buildProtocol(addr)
        self.built = None
        if wrapped is not None:
            self.built = ClientTLS(self._context, self._check, wrapped, self._begun)
        return self.built


@implementer(IStreamClientEndpoint)
class ClientTLSEndpoint:
    """
    Such TLS around an endpoint, as ``twisted.internet.endpoints.wrapClientTLS`` does with Twisted's.

    Args:
        context: see ``clientcontext``.
        check: of each connection's certificate; what it returns reaches ``connectionLost``.
        endpoint: for the connection beneath.
    """

    def __init__(
        self, context: ssl.SSLContext, check: CheckCertificate, endpoint: IStreamClientEndpoint
    ) -> None:
        self._context = context
        self._check = check
        self._endpoint = endpoint

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol over TLS, whose handshake goes on."""
        factory: Any = ClientTLSFactory(self._context, self._check, protocolFactory)
        connecting: Deferred[Any] = self._endpoint.connect(factory)
        return connecting.addCallback(lambda tls: tls.wrappedProtocol)
