"""The connection to a Foolscap server: connecting, timeouts, and the rate limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from foolscap import eventual
from foolscap.api import DeadReferenceError, Referenceable, Violation
from foolscap.call import CopiedFailure
from foolscap.ipb import IRemoteReference
from foolscap.tokens import BananaError
from OpenSSL.crypto import FILETYPE_ASN1, dump_certificate
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, fail, succeed
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IReactorTime, ISSLTransport
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import alsoProvides

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    QuotaReached,
    ServerError,
    ServerProtocolError,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    UsageError,
    WrongSecret,
)
from pipegrid.http11.pinned_key import problem_of
from pipegrid.reactor.bulk_tls import upgrade_started_tls
from pipegrid.reactor.connection_policy import ConnectionPolicy
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.reactor.tcp_transport import be_prompt, set_bulk_buffers
from pipegrid.transport.interface import disconnected, excerpt, nonsense, wrong_swissnum
from pipegrid.transport.throttle import Throttle, Throttled
from pipegrid.wire.banana_receiver import Bounds, LimitExceeded
from pipegrid.wire.foolscap_broker import KEEPALIVE_S, call_remote, make_tub
from pipegrid.wire.foolscap_interfaces import ALLOCATED, RIStorageServer, answer_cost
from pipegrid.wire.server_address import Furl

# The connection to one Foolscap server: established when needed, watched while responses are outstanding,
# and closed.
#
# Foolscap's errors end here: ``call`` returns a response, or raises an error of the contract.

MAX_SHARE_NUMBER = 255

READ_PIECE_BYTES = 16 << 20
"""Maximum size of a read in one call. Longer reads take several: both ends hold whole messages in memory."""

SLOWEST_BYTES_PER_S = 2000
"""
The lowest rate at which calls with share data do not time out; the same as over HTTPS. While a message of
megabytes is transferred, the server shows no activity: it responds only when the whole call has arrived, and
a response is one message, too.
"""

_excerpt = partial(excerpt, characters=160)

# The error class for an exception on the server, by the last part of the exception's name. PipeGrid's servers
# and Tahoe-LAFS 1.20.0 use these names.
_MEANINGS: dict[str, type[ServerRefused]] = {
    "NoSuchShare": NoSuchShare,
    "ConflictingWrite": ConflictingWrite,
    "ConflictingWriteError": ConflictingWrite,
    "NoSpace": NoSpace,
    "QuotaReached": QuotaReached,
    "WrongSecret": WrongSecret,
    "BadWriteEnablerError": WrongSecret,
}


class Connector(Protocol):
    """Establishes connections to one server; in production ``link.TubConnector``."""

    def connect(self) -> Deferred[Any]:
        """Fire with a remote reference to the storage server, over a new or an existing connection."""

    def close(self) -> Deferred[Any]:
        """Close the connection, and stop connecting; fires when the connection is closed."""


class FoolscapLink:
    """
    The connection to one server, including reconnections.

    Args:
        server: the server's name for messages.
        on_lost: called whenever a connection is lost: all references to objects on the server are then
            invalid.

    Attributes:
        canary: an object of this client, sent with each allocation, so that the server notices when the
            connection is lost.
        heard_s: the time of the server's last response, or when a call was sent while no response was
            outstanding, by the clock; minus infinity: never.
    """

    def __init__(
        self,
        connector: Connector,
        server: str,
        clock: IReactorTime,
        connect_timeout_s: float,
        timeout_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        self.canary = Referenceable()
        self._connector = connector
        self._server = server
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._storage: Any = None
        self._connecting: Deferred[Any] | None = None
        self._waiting: Waiters[Any] = Waiters()
        self._outstanding = self._outstanding_bytes = 0
        self.heard_s = -math.inf
        self._timer = Timer(clock, self._look)
        self._closed = False
        self._reason: ServerError | None = (
            None  # why this object closed the last connection; None: it did not
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "up" if self._storage is not None else "down"
        return f"<FoolscapLink to {self._server!r} {state}, {self._outstanding} unanswered>"

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self._storage is not None

    def storage(self) -> Deferred[Any]:
        """Fire with the remote reference to the server; connects if needed, once for all callers."""
        if self._closed:
            return fail(disconnected(self._server))
        if self._storage is not None:
            return succeed(self._storage)
        waiting = self._waiting.wait()
        if self._connecting is None:
            self._connecting = self._connector.connect()
            self._connecting.addTimeout(self._connect_timeout_s, self._clock)
            self._connecting.addCallbacks(self._connected, self._failed)
        return waiting

    def call(
        self, reference: Any, method: str, *arguments: Any, share_bytes: int = 0
    ) -> Deferred[Any]:
        """
        Call a method of an object on the server; fails with ``ServerError``s only.

        Args:
            share_bytes: how many bytes of share data the call or its response contains; 0 if they are few.
                The timeout grows with this number.
        """
        self._outstanding += 1
        self._outstanding_bytes += share_bytes
        if self._outstanding == 1:
            self.heard_s = self._clock.seconds()
            self._timer.set(self._timeout_s)
        answer = call_remote(reference, method, *arguments)
        answer.addBoth(self._answered, share_bytes)
        return answer.addErrback(lambda failure: Failure(self._explain(failure, method)))

    async def call_storage(self, method: str, *arguments: Any, share_bytes: int = 0) -> Any:
        """Call a method of the storage server itself, as ``call`` does; connects if needed."""
        return await self.call(await self.storage(), method, *arguments, share_bytes=share_bytes)

    def close(self) -> Deferred[Any]:
        """Close the connection permanently, and fail unanswered calls; fires when it is closed."""
        self._closed = True
        self._drop(ServerUnreachable(f"{self._server} was disconnected here", self._server, True))
        if self._connecting is not None:
            self._connecting.cancel()
        return self._connector.close()

    # Connecting.

    def _connected(self, storage: Any) -> None:
        self._connecting = None
        # Foolscap checks responses against the declared interface only if the other end names that
        # interface.
        tracker = getattr(storage, "tracker", None)  # a server can send a number or a list instead
        if tracker is None or tracker.interface is not RIStorageServer:
            self._waiting.fail(_no_storage(self._server))
            if tracker is not None:
                _end_connection(storage)
            return
        self._storage = storage
        self._reason = None
        storage.notifyOnDisconnect(self._lost, storage)
        self._waiting.fire(storage)

    def _failed(self, failure: Failure) -> None:
        self._connecting = None
        self._waiting.fail(self._connection_error(failure))

    def _connection_error(self, failure: Failure) -> ServerError:
        server = self._server
        if isinstance(failure, CopiedFailure):
            return wrong_swissnum(server, "fURL")
        if failure.check(CancelledError):
            return ServerUnreachable(f"{server} was disconnected here", server)
        if "unknown TubID" in str(failure.value):
            return ServerUnreachable(
                f"another server, with another key, answers at the address of {server}; find out its new "
                "address, and copy its fURL again",
                server,
            )
        why = _excerpt(str(failure.value)).removesuffix(".") or type(failure.value).__name__
        if failure.check(
            TimeoutError
        ):  # Twisted's text names the timer, which does not help the user
            why = f"it was not usable after {self._connect_timeout_s:g} s"
        elif failure.check(BananaError) and not failure.check(LimitExceeded):
            why = "what answers there does not speak Foolscap"  # Foolscap's text has class names
        return ServerUnreachable(
            f"cannot connect to {server} over Foolscap: {why}; is it running, and is this its fURL?",
            server,
        )

    def _lost(self, storage: Any) -> None:
        if self._storage is storage:
            self._storage = None
            self._on_lost()

    def _drop(self, error: ServerError) -> None:
        """Close this connection, and fail all unanswered calls with the error."""
        storage = self._storage
        if storage is not None:
            self._reason = error
            self._lost(storage)
            _end_connection(storage)

    # Time limits.

    def _answered(self, result: Any, share_bytes: int) -> Any:
        self._outstanding -= 1
        self._outstanding_bytes -= share_bytes
        self.heard_s = self._clock.seconds()
        if not self._outstanding:
            self._timer.stop()
        return result

    def _look(self) -> None:
        limit_s = self._timeout_s + self._outstanding_bytes / SLOWEST_BYTES_PER_S
        left_s = self.heard_s + limit_s - self._clock.seconds()
        if left_s > 0:
            self._timer.set(left_s)
            return
        self._drop(
            ServerTimeout(
                f"{self._server} has not answered for {self._timeout_s:g} s; try again later",
                self._server,
                may_have_happened=True,
            )
        )

    # Errors.

    def _explain(self, failure: Failure, method: str) -> Exception:
        server = self._server
        error: Any = failure.value
        if isinstance(failure, CopiedFailure):
            names = [name.rpartition(".")[2] for name in failure.parents]
            text = _excerpt(str(error))
            for name in names:
                if name in _MEANINGS:
                    return _MEANINGS[name](f"{server} refused {method}: {text}", server)
            return ServerRefused(
                f"{server} failed at {method}: {text}; its operator can see why", server, True
            )
        if isinstance(error, (ServerError, CancelledError)):
            return error
        if failure.check(Violation):
            return ServerProtocolError(
                f"{server} and this client do not agree about {method}: {_excerpt(str(error))}",
                server,
                True,
            )
        if failure.check(BananaError):
            return ServerProtocolError(
                f"{server} was disconnected here: {_excerpt(str(error))}; is it a storage server?",
                server,
                True,
            )
        if failure.check(DeadReferenceError, ConnectionDone, ConnectionLost):
            return self._reason or ServerUnreachable(
                f"the connection to {server} was lost; try again", server, may_have_happened=True
            )
        return ServerUnreachable(
            f"{server} did not answer {method}: {_excerpt(str(error)) or type(error).__name__}",
            server,
            may_have_happened=True,
        )


def _no_storage(server: str) -> ServerProtocolError:
    return ServerProtocolError(
        f"the server at the address of {server} does not say that it stores shares; copy the fURL of a"
        " storage server",
        server,
    )


def _end_connection(storage: Any) -> None:
    # A tub cannot close one connection, but the connection's broker can. Foolscap's own calls get the reason,
    # too, and expect this exception.
    storage.tracker.broker.shutdown(Failure(ConnectionDone()))


def check_numbers(server: str, question: str, numbers: Any) -> None:
    """Raise ServerProtocolError unless all numbers are valid share numbers."""
    if not all(0 <= number <= MAX_SHARE_NUMBER for number in numbers):
        raise nonsense(server, question, "numbers that no share can have")


def in_pieces(offset: int, length: int) -> list[tuple[int, int]]:
    """Split a range into pieces for one call each; returns (offset, length) of each piece, at least one."""
    ends = range(offset, offset + max(1, length), READ_PIECE_BYTES)
    return [(at, min(READ_PIECE_BYTES, offset + length - at)) for at in ends]


# Connections to Foolscap servers over TCP. Each connector has a tub for its server, and stops the tub when it
# is closed.

MAX_HINTS = 16
"""Maximum number of a server's addresses to try. Foolscap tries all at once, and there may be hundreds."""

RECEIVE_BYTES = 256 * 1024
"""The maximum number of bytes in one read from the socket."""

LONGEST_WORD_BYTES = 1024
"""Longer strings are not looked up among the words that Foolscap abbreviates: those are shorter."""

BOUNDS = Bounds(answer_cost=answer_cost, allocated=ALLOCATED)
"""
Limits for a client's connection: a response may be as large as its call permits; a call by the server has the
default allowance.
"""

LOST_AFTER_S = 2 * KEEPALIVE_S
"""A server that is silent for this long counts as lost."""


class TubConnector:
    """
    Implements ``Connector``.

    Args:
        policy: decides how each of the fURL's addresses is connected to.
        throttle: limits the total rate of this connection and all others; None: no limit.
        pin: SHA-256 of the public key that the server's certificate must have, as in NURLs; the certificate
            must also be the one that the fURL names. None: only the fURL is checked.

    Raises:
        UsageError: the policy permits no connection to any address of the fURL.
    """

    def __init__(
        self,
        furl: Furl,
        policy: ConnectionPolicy,
        throttle: Throttle | None = None,
        pin: bytes | None = None,
    ) -> None:
        try:
            usable = furl.reachable(policy)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._furl = str(Furl(furl.tub_id, usable.hints[:MAX_HINTS], furl.swissnum))
        self._policy = policy
        self._throttle = throttle
        self._pin = pin
        self._tub: Any = None
        self._closed = False

    def connect(self) -> Deferred[Any]:
        """Connect if there is no connection, and ask for a remote reference to the storage server."""
        if self._closed:
            return fail(UsageError("this connector was closed; make another"))
        if self._tub is None:
            wrap = None
            if self._throttle is not None:
                wrap = partial(self._throttle.endpoint, kind=_StartsTls)
            self._tub = make_tub(LOST_AFTER_S, self._policy, BOUNDS, wrap)
            self._tub.startService()
        found: Deferred[Any] = self._tub.getReference(self._furl)
        return found.addCallback(self._found)

    def _found(self, storage: Any) -> Any:
        if not IRemoteReference.providedBy(storage):
            return storage  # not a remote reference; the link reports the error
        self._check(storage.tracker.broker)
        return _hurry(storage)

    def _check(self, broker: Any) -> None:
        """
        Check that the server owns the pinned key, if there is one. HTTPS requires this key, so it would not
        reach shares that were stored over Foolscap on a server with another key.
        """
        if self._pin is not None:
            der = dump_certificate(FILETYPE_ASN1, broker.transport.getPeerCertificate())
            problem = problem_of(der, self._pin, "the server")
            if problem is not None:
                broker.shutdown(Failure(ConnectionDone()))
                raise problem

    def close(self) -> Deferred[Any]:
        self._closed = True
        tub, self._tub = self._tub, None
        closed: Deferred[Any] = succeed(None) if tub is None else tub.stopService()
        return closed


class ShortWords(dict[bytes, int]):
    """
    The words that Foolscap abbreviates, without a lookup of long strings.

    Foolscap looks up every string that it sends, and a lookup computes a hash of the whole string. Foolscap
    sends share data as strings, so the hashes took a tenth of a put's time.
    """

    def __contains__(self, word: object) -> bool:
        return len(cast(bytes, word)) <= LONGEST_WORD_BYTES and super().__contains__(word)


def _hurry(storage: Any) -> Any:
    """
    Set up a connection to send each message at once, without waiting for acknowledgements of earlier ones,
    and to use large buffers.
    """
    broker = storage.tracker.broker
    transport = broker.transport
    if broker.stalls is None:
        broker.stalls = be_prompt(transport, eventual.reactor)
    set_bulk_buffers(transport, RECEIVE_BYTES)
    upgrade_started_tls(transport)
    if type(getattr(broker, "outgoingVocabulary", None)) is dict:
        broker.outgoingVocabulary = ShortWords(broker.outgoingVocabulary)
    return storage


# Foolscap connections that share the rate limit with all others: see ``transport.throttle``.
#
# Foolscap starts TLS on a connection that is in use already (``startTLS``). So Foolscap gets the limited
# connection, and TLS is inserted between Foolscap and the limited connection: every byte counts, as with
# HTTPS.


class _StartsTls(Throttled):
    """
    A limited connection on which TLS can be started; after that, written bytes go through TLS.

    Attributes:
        TLS: whether TLS was started.
    """

    TLS = False

    def startTLS(self, context: Any, normal: bool = True) -> None:
        """Start TLS, as the client if ``normal`` is True, else as the server."""
        nothing: Any = None  # the wrapped factory: none, since only a protocol is wrapped
        factory = TLSMemoryBIOFactory(context, normal, nothing)
        tls: Any = factory.protocol(factory, self.protocol, False)
        self.protocol = tls
        self.getHandle = tls.getHandle
        self.getPeerCertificate = tls.getPeerCertificate
        alsoProvides(self, ISSLTransport)
        self.TLS = True
        tls.makeConnection(_Beneath(self))

    def write(self, data: bytes) -> None:
        """Send the bytes, encrypted if TLS was started."""
        if self.TLS:
            self.protocol.write(data)
        else:
            super().write(data)

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def loseConnection(self, *arguments: Any) -> None:
        """Close the connection after the waiting bytes are sent, with close_notify under TLS."""
        if self.TLS:
            self.protocol.loseConnection()
        else:
            super().loseConnection(*arguments)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Register a producer, which is asked to pause while too many bytes wait."""
        if self.TLS:
            self.protocol.registerProducer(producer, streaming)
        else:
            super().registerProducer(producer, streaming)

    def unregisterProducer(self) -> None:
        if self.TLS:
            self.protocol.unregisterProducer()
        else:
            super().unregisterProducer()


class _Beneath:
    """The transport below TLS on a limited connection: written bytes are sent without further encryption."""

    def __init__(self, connection: _StartsTls) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def write(self, data: bytes) -> None:
        """Send the bytes when the rate permits it."""
        Throttled.write(self._connection, data)

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def loseConnection(self, *arguments: Any) -> None:
        """Close the connection after the waiting bytes are sent."""
        Throttled.loseConnection(self._connection, *arguments)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Register TLS as the producer, which is asked to pause while too many bytes wait."""
        Throttled.registerProducer(self._connection, producer, streaming)

    def unregisterProducer(self) -> None:
        Throttled.unregisterProducer(self._connection)
