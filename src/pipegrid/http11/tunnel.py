"""
A way through a proxy: CONNECT (RFC 9110, 9.3.6), and then whatever is spoken to who is behind it.

What the proxy answers is bounded in bytes; in time whoever connects bounds it. Anything but 2xx ends the
connection before a byte of ours goes through.
"""

from __future__ import annotations

import re
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

MAX_HEAD_BYTES = 16 << 10

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?\r?\n")
_END = re.compile(rb"\r?\n\r?\n")


class TunnelRefused(ConnectionError):
    """A proxy does not connect to where it should."""


class Tunnel(Protocol):
    """
    One connection to a proxy.

    Args:
        inner: is given the connection when the proxy has made its own.
        opened: fires then, with ``inner``.
    """

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
        transport: Any = self.transport
        target = self._target.encode("ascii")
        transport.write(
            b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (target, target, self._authorization)
        )

    def dataReceived(self, data: bytes) -> None:
        self._head += data
        end = _END.search(self._head)
        status = _STATUS.match(self._head)
        if status is None and (end is not None or len(self._head) > 64):
            self._refuse("answers with something else than HTTP")
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
        self._fail(TunnelRefused(f"the proxy {self._proxy} {what} to {self._target}"))

    def _fail(self, error: Exception) -> None:
        opened = self._opened
        self.give_up()
        if opened is not None:
            opened.errback(error)

    def give_up(self) -> None:
        """Take in nothing more, abort the connection, if there is one yet, and tell nobody of its end."""
        transport: Any = self.transport
        self._opened = None
        self._head = b""
        self.dataReceived = lambda data: None  # type: ignore[method-assign]
        if transport is not None:
            transport.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._opened is None:
            if self._is_through:
                self._inner.connectionLost(reason)
        else:
            self._fail(
                TunnelRefused(
                    f"the proxy {self._proxy} hangs up when asked to connect to {self._target}"
                )
            )


@implementer(IStreamClientEndpoint)
class TunnelEndpoint:
    """
    Args:
        endpoint: to the proxy.
        target: ``HOST:PORT`` behind it.
        authorization: a header line for the proxy, with its end, or b"".
        proxy: what errors call it.
    """

    def __init__(
        self, endpoint: IStreamClientEndpoint, target: str, authorization: bytes, proxy: str
    ) -> None:
        self._endpoint = endpoint
        self._target = target
        self._authorization = authorization
        self._proxy = proxy

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[Any]:
        """Connect; fires with the protocol once it is connected to the target. Cancelling gives up."""
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
