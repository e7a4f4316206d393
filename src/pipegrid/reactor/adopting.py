"""Connections that were made ahead, given to the reactor."""

from __future__ import annotations

import ssl
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from zope.interface import implementer

from pipegrid.reactor.ahead import Ahead, HostPort, MadeAhead
from pipegrid.reactor.clientendpoint import ClientTLSEndpoint, ClientTLSFactory
from pipegrid.reactor.clienttls import CheckCertificate


@implementer(IStreamClientEndpoint)
class AdoptingEndpoint:
    """
    Such TLS as ``ClientTLSEndpoint`` makes, over the connection that was made ahead if there is one.

    Args:
        reactor: gets the connection.
        address: whose connection it is.
        context, check, endpoint: as ``ClientTLSEndpoint`` is given them.
    """

    def __init__(
        self,
        reactor: Any,
        ahead: Ahead,
        address: HostPort,
        context: ssl.SSLContext,
        check: CheckCertificate,
        endpoint: IStreamClientEndpoint,
    ) -> None:
        self.reactor = reactor
        self._ahead = ahead
        self._address = address
        self._context = context
        self._check = check
        self._otherwise = ClientTLSEndpoint(context, check, endpoint)

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol over TLS. Cancelling gives up."""
        attempt = _Attempt(self, protocolFactory)
        if not self._ahead.take(self._address, attempt.ready):
            return self._otherwise.connect(protocolFactory)
        return attempt.made

    def adopt(self, begun: MadeAhead, factory: IProtocolFactory) -> IProtocol:
        """
        Return the protocol over a connection that was made ahead.

        Raises:
            OSError: it is lost already, or nobody wants it.
            Exception: whatever those who got it thought of it. It has ended, in any case.
        """
        tls = ClientTLSFactory(self._context, self._check, factory, begun)
        with begun.socket as socket:  # the reactor has a descriptor of its own
            try:
                self.reactor.adoptStreamConnection(socket.fileno(), socket.family, tls)
            except Exception:
                if tls.built is not None:
                    tls.built.abortConnection()
                raise
        if tls.built is None:
            raise OSError("nobody wants it")
        wrapped: IProtocol = tls.built.wrappedProtocol
        return wrapped

    def dial(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect as if nothing had been made ahead."""
        return self._otherwise.connect(factory)


class _Attempt:
    """Waits for the connection that is on its way."""

    def __init__(self, endpoint: AdoptingEndpoint, factory: IProtocolFactory) -> None:
        self.made: Deferred[IProtocol] = Deferred(self._cancelled)
        self._endpoint = endpoint
        self._factory = factory
        self._dialling: Deferred[IProtocol] | None = None

    def ready(self, begun: MadeAhead | None) -> None:
        """Go on in the reactor's thread, from whichever."""
        self._endpoint.reactor.callFromThread(self._go_on, begun)

    def _go_on(self, begun: MadeAhead | None) -> None:
        if begun is not None:
            if self.made.called:  # it was cancelled
                begun.socket.close()
                return
            try:
                protocol = self._endpoint.adopt(begun, self._factory)
            except Exception:
                pass  # dialling will tell what is wrong, and nobody else would
            else:
                self.made.callback(protocol)
                return
        if not self.made.called:
            self._dialling = self._endpoint.dial(self._factory)
            self._dialling.chainDeferred(self.made)

    def _cancelled(self, made: Deferred[IProtocol]) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
        if not made.called:
            made.errback(CancelledError())
