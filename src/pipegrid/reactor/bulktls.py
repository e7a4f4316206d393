"""
Which TLS carries bulk data, for servers and for Foolscap: ours (``tls``), or Twisted's own if ours cannot.

Ours calls OpenSSL by names that pyOpenSSL keeps private, and overrides methods that Twisted does. Another
release of either may rename them, or give them another meaning. So they are looked at once, before the first
use: whether each is there, and of the type that it is called with. If not, everything works as it does in any
Twisted program, for more of the processor's time, and the log has a line that says so.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from twisted.logger import Logger

if TYPE_CHECKING:
    from OpenSSL import SSL

log = Logger()

FUNCTIONS = {
    "SSL_read": "int(*)(SSL *, void *, int)",
    "SSL_write": "int(*)(SSL *, void *, int)",
    "SSL_get_error": "int(*)(SSL *, int)",
    "BIO_read": "int(*)(BIO *, void *, int)",
    "BIO_write": "int(*)(BIO *, void *, int)",
}
"""OpenSSL's, as pyOpenSSL passes them on."""
FIELDS = {"_ssl": "SSL *", "_into_ssl": "BIO *", "_from_ssl": "BIO *"}
"""Of pyOpenSSL's connections."""
CALLED = ("_raise_ssl_error",)
"""Of the same: called."""
TWISTED = {
    "_bufferedWrite": 1,
    "_flushReceiveBIO": 0,
    "_flushSendBIO": 0,
    "_shutdownTLS": 0,
    "_tlsShutdownFinished": 1,
    "_unbufferPendingWrites": 0,
    "_write": 1,
}
"""Methods of Twisted's TLS that ours overrides or calls, and with how many arguments they are called."""
STATE = {
    "_aborted": "bool",
    "_aggregator": "_AggregateSmallWrites",
    "_appSendBuffer": "list",
    "_handshakeDone": "bool",
    "_lostTLSConnection": "bool",
    "_tlsConnection": "Connection",
}
"""What one that has begun its handshake keeps, and the names of the types."""


def what_is_missing() -> str | None:
    """Return the first name that is not there, or not what ours takes it for; None: all are."""
    from OpenSSL import SSL
    from twisted.protocols import tls

    ffi, lib = getattr(SSL, "_ffi", None), getattr(SSL, "_lib", None)
    if ffi is None or lib is None:
        return "OpenSSL.SSL._ffi and _lib"
    for name, kind in FUNCTIONS.items():
        if _kind(ffi, getattr(lib, name, None)) != kind:
            return f"OpenSSL.SSL._lib.{name}"
    if not isinstance(getattr(lib, "SSL_ERROR_WANT_READ", None), int):
        return "OpenSSL.SSL._lib.SSL_ERROR_WANT_READ"
    connection: Any = SSL.Connection(SSL.Context(SSL.TLS_METHOD), None)
    for name, kind in FIELDS.items():
        if _kind(ffi, getattr(connection, name, None)) != kind:
            return f"OpenSSL.SSL.Connection.{name}"
    for name in CALLED:
        if not callable(getattr(connection, name, None)):
            return f"OpenSSL.SSL.Connection.{name}"
    transport = getattr(tls, "BufferingTLSTransport", None)
    for name, arguments in TWISTED.items():
        if not _takes(getattr(transport, name, None), arguments):
            return f"twisted.protocols.tls.BufferingTLSTransport.{name}"
    begun = _begun()
    for name, kind in STATE.items():
        if type(getattr(begun, name, None)).__name__ != kind:
            return f"twisted.protocols.tls.BufferingTLSTransport.{name}"
    return None


def _takes(method: Any, arguments: int) -> bool:
    """Whether a function takes itself and so many arguments."""
    try:
        inspect.signature(method).bind(None, *[None] * arguments)
    except (TypeError, ValueError):
        return False
    return True


def _begun() -> object:
    """Return Twisted's TLS for a client, on nothing, with its handshake begun; None: that fails by now."""
    from OpenSSL import SSL
    from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
    from twisted.internet.protocol import Factory, Protocol
    from twisted.internet.task import Clock
    from twisted.protocols import tls
    from zope.interface import implementer

    @implementer(IOpenSSLClientConnectionCreator)
    class Creator:
        def clientConnectionForTLS(self, _: object) -> Any:
            return SSL.Connection(SSL.Context(SSL.TLS_METHOD), None)

    class Nowhere:
        disconnecting = False

        def write(self, _: bytes) -> None:
            pass

        def loseConnection(self) -> None:
            pass

    anywhere: Any = Creator()
    nowhere: Any = Nowhere()
    try:
        factory = tls.TLSMemoryBIOFactory(anywhere, True, Factory(), Clock())
        factory.noisy = False
        begun = tls.BufferingTLSTransport(factory, Protocol())
        begun.makeConnection(nowhere)
    except Exception as error:
        log.debug("Twisted's TLS does not begin as it did: {error!r}", error=error)
        return None
    return begun


def _kind(ffi: Any, value: object) -> str | None:
    try:
        kind: str = ffi.typeof(value).cname
    except (AttributeError, TypeError):
        return None
    return kind


@lru_cache(maxsize=1)
def is_ours() -> bool:
    """Return whether TLS is ours; looked at once, and said in the log if it is not."""
    missing = what_is_missing()
    if missing is None:
        return True
    log.warn(
        "{name} is not what it was: TLS is Twisted's own, and takes more of the processor's time;"
        " tell PipeGrid's authors which releases of pyOpenSSL and Twisted these are",
        name=missing,
    )
    return False


def tls_factory(contexts: Any, is_client: bool, wrapped: Any, clock: Any) -> Any:
    """Return what adds TLS to connections; called as Twisted's ``TLSMemoryBIOFactory`` is, and one."""
    if is_ours():
        from pipegrid.reactor import tls

        return tls.BatchingTLSFactory(contexts, is_client, wrapped, clock)
    from twisted.protocols.tls import TLSMemoryBIOFactory

    class Quiet(TLSMemoryBIOFactory):
        noisy = False

    return Quiet(contexts, is_client, wrapped, clock)


def write_whole(context: SSL.Context) -> None:
    """Have connections of a context encrypt all of a write in one call, not a record, if TLS is ours."""
    if is_ours() and hasattr(context, "clear_mode"):
        from pipegrid.reactor import tls

        tls.clear_partial_writes(context)


def upgrade_started_tls(transport: Any) -> None:
    """
    Have TLS that was started on a TCP connection (``startTLS``, as Foolscap does) be ours from now on.

    Nothing happens where Twisted has other layers than it has today, or TLS cannot be ours.
    """
    from twisted.protocols.tls import BufferingTLSTransport

    layer = getattr(transport, "protocol", None)
    if type(layer) is BufferingTLSTransport and is_ours():
        from pipegrid.reactor import tls

        tls.take_over(layer)
