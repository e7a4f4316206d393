"""Foolscap connection: connect, supervise, throttle."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from foolscap import eventual
from foolscap.api import DeadReferenceError, Referenceable, Violation
from foolscap.call import CopiedFailure
from foolscap.connections import tcp
from foolscap.ipb import IConnectionHintHandler, IRemoteReference
from foolscap.tokens import BananaError
from OpenSSL.crypto import FILETYPE_ASN1, dump_certificate
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, fail, succeed
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IReactorTime, ISSLTransport
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import alsoProvides, implementer

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    ServerError,
    ServerProtocolError,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    UsageError,
    WrongSecret,
)
from pipegrid.http11.pinned_key import problem_of
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.reactor.server_tls import upgrade_started_tls
from pipegrid.reactor.sockets import be_prompt, set_bulk_buffers
from pipegrid.transport.interface import disconnected, excerpt, nonsense, wrong_swissnum
from pipegrid.transport.throttle import Throttle, Throttled
from pipegrid.wire.banana_receiver import Bounds, LimitExceeded
from pipegrid.wire.foolscap_broker import KEEPALIVE_S, call_remote, make_tub
from pipegrid.wire.foolscap_interfaces import ALLOCATED, RIStorageServer, answer_cost
from pipegrid.wire.server_address import Furl

if TYPE_CHECKING:
    from pipegrid.transport.throttle import Throttle


# The connection to one Foolscap server: made when it is needed, watched while answers are owed, and given up.
#
# Foolscap's errors end here: what comes out of ``call`` is an answer, or an error of the contract.

MAX_SHARE_NUMBER = 255

READ_PIECE_BYTES = 16 << 20
"""Longer reads are several calls: a message is in memory as a whole, at both ends."""

SLOWEST_BYTES_PER_S = 2000
"""
Of a line that is still waited for, as over HTTPS: the answer to a message of megabytes comes when all of it
has arrived, or comes as a whole itself; until then nothing is heard.
"""

_excerpt = partial(excerpt, characters=160)

# By the last part of an exception's name: that of our own servers, and those of Tahoe-LAFS 1.20.0.
_MEANINGS: dict[str, type[ServerRefused]] = {
    "NoSuchShare": NoSuchShare,
    "ConflictingWrite": ConflictingWrite,
    "ConflictingWriteError": ConflictingWrite,
    "NoSpace": NoSpace,
    "WrongSecret": WrongSecret,
    "BadWriteEnablerError": WrongSecret,
}


class Connector(Protocol):
    """Makes connections to one server; ``link.TubConnector`` is the real one."""

    def connect(self) -> Deferred[Any]:
        """Fire with a remote reference to the storage server, over a connection that may be new."""

    def close(self) -> Deferred[Any]:
        """Cut the connection, and give up connecting; fires when all is gone."""


class FoolscapLink:
    """
    One server's connection, over all its lives.

    Args:
        server: what a person calls it.
        on_lost: called whenever a connection is lost: what referred to the server is worthless then.

    Attributes:
        canary: what shows the server that we are still there.
        heard_s: when it last answered, or began to owe, by the clock.
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
        self._owed = self._owed_bytes = 0
        self.heard_s = -math.inf
        self._timer = Timer(clock, self._look)
        self._closed = False
        self._reason: ServerError | None = None  # for which we ended the last connection, if we did

    def __repr__(self) -> str:
        state = "closed" if self._closed else "up" if self._storage is not None else "down"
        return f"<FoolscapLink to {self._server!r} {state}, {self._owed} unanswered>"

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self._storage is not None

    def storage(self) -> Deferred[Any]:
        """Fire with the remote reference to the server; connects if need be, for all who ask at once."""
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
        Call a method of something at the server; fails with ``ServerError``s only.

        Args:
            share_bytes: of share data in it, or in its answer, if these may be many: it may take longer by
                what they need.
        """
        self._owe(share_bytes)
        answer = call_remote(reference, method, *arguments)
        answer.addBoth(self._answered, share_bytes)
        return answer.addErrback(self._explained, method)

    def close(self) -> Deferred[Any]:
        """Give up the connection for good; fires when it is gone. What is unanswered fails."""
        self._closed = True
        self._drop(ServerUnreachable(f"{self._server} was disconnected here", self._server, True))
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
        return self._connector.close()

    # Connecting.

    def _connected(self, storage: Any) -> None:
        self._connecting = None
        # Foolscap holds answers to what is declared only where the other end names the interface itself.
        tracker = getattr(storage, "tracker", None)  # what was asked for may be a number, or a list
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
        if failure.check(TimeoutError):  # which says how it came about, to nobody's use
            why = f"it was not usable after {self._connect_timeout_s:g} s"
        elif failure.check(BananaError) and not failure.check(LimitExceeded):
            why = "what answers there does not speak Foolscap"  # Python's words have its classes
        return ServerUnreachable(
            f"cannot connect to {server} over Foolscap: {why}; is it running, and is this its fURL?",
            server,
        )

    def _lost(self, storage: Any) -> None:
        if self._storage is storage:
            self._storage = None
            self._on_lost()

    def _drop(self, error: ServerError) -> None:
        """End this connection: all that is unanswered fails with the error."""
        storage = self._storage
        if storage is not None:
            self._reason = error
            self._lost(storage)
            _end_connection(storage)

    # Patience.

    def _owe(self, share_bytes: int) -> None:
        self._owed += 1
        self._owed_bytes += share_bytes
        if self._owed == 1:
            self.heard_s = self._clock.seconds()
            self._timer.set(self._timeout_s)

    def _answered(self, result: Any, share_bytes: int) -> Any:
        self._owed -= 1
        self._owed_bytes -= share_bytes
        self.heard_s = self._clock.seconds()
        if not self._owed:
            self._timer.stop()
        return result

    def _look(self) -> None:
        patience_s = self._timeout_s + self._owed_bytes / SLOWEST_BYTES_PER_S
        left_s = self.heard_s + patience_s - self._clock.seconds()
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

    def _explained(self, failure: Failure, method: str) -> Failure:
        return Failure(self._explain(failure, method))

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
    # A tub has no way to let go of one connection; its broker has. The reason that it is given also goes to
    # calls of Foolscap's own, which know no other kind.
    storage.tracker.broker.shutdown(Failure(ConnectionDone()))


def check_numbers(server: str, question: str, numbers: Any) -> None:
    """Raise ServerProtocolError unless all are numbers of shares."""
    if not all(0 <= number <= MAX_SHARE_NUMBER for number in numbers):
        raise nonsense(server, question, "numbers that no share can have")


def in_pieces(offset: int, length: int) -> list[tuple[int, int]]:
    """Return what is to be read as the pieces that are asked for, (offset, length); at least one."""
    ends = range(offset, offset + max(1, length), READ_PIECE_BYTES)
    return [(at, min(READ_PIECE_BYTES, offset + length - at)) for at in ends]


# Connections to Foolscap servers over TCP: a tub for each, which lives as long as it does.

MAX_HINTS = 16
"""Addresses of one server. Foolscap connects to all at once, and anybody may announce hundreds."""

RECEIVE_BYTES = 256 * 1024
"""Asked of the socket at a time."""

LONGEST_WORD_BYTES = 1024
"""No word that is abbreviated is nearly as long."""

BOUNDS = Bounds(answer_cost=answer_cost, allocated=ALLOCATED)
"""
An answer is as large as its question wants it at most; a server calls nothing of ours but the tub itself.
"""

LOST_AFTER_S = 2 * KEEPALIVE_S
"""Silence after which a server is taken to be gone."""


class TubConnector:
    """
    Implements ``Connector``.

    Args:
        throttle: bounds the rate of the connection, with those of all others.
        pin: of the key that the server's certificate has to be for, besides being the fURL's, as NURLs have
            it; None: the fURL is enough.

    Raises:
        UsageError: the fURL leads nowhere over TCP.
    """

    def __init__(
        self, furl: Furl, throttle: Throttle | None = None, pin: bytes | None = None
    ) -> None:
        hints = furl.tcp_hints[:MAX_HINTS]
        if not hints:
            raise UsageError("the fURL has no TCP address, and only those are supported")
        self._furl = str(Furl(furl.tub_id, hints, furl.swissnum))
        self._throttle = throttle
        self._pin = pin
        self._tub: Any = None
        self._closed = False

    def connect(self) -> Deferred[Any]:
        """Connect, unless there is a connection, and ask for the storage server."""
        if self._closed:
            return fail(UsageError("this connector was closed; make another"))
        if self._tub is None:
            self._tub = make_tub(LOST_AFTER_S, BOUNDS)
            if self._throttle is not None:
                limit(self._tub, self._throttle)
            self._tub.startService()
        found: Deferred[Any] = self._tub.getReference(self._furl)
        return found.addCallback(self._found)

    def _found(self, storage: Any) -> Any:
        if not IRemoteReference.providedBy(storage):
            return storage  # by the name of an object it gave something else, which the link says
        self._check(storage.tracker.broker)
        return _hurry(storage)

    def _check(self, broker: Any) -> None:
        """Let nobody else stand for the owner of a key: what is stored here would be looked for there."""
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
    What Foolscap abbreviates.

    It looks up every string that it sends, and Python hashes all of it for that: a tenth of a put, since
    share data are strings, too.
    """

    def __contains__(self, word: object) -> bool:
        return len(cast(bytes, word)) <= LONGEST_WORD_BYTES and super().__contains__(word)


def _hurry(storage: Any) -> Any:
    """Let no message wait for the acknowledgement of the one before, and move much at a time."""
    broker = storage.tracker.broker
    transport = broker.transport
    if broker.stalls is None:
        broker.stalls = be_prompt(transport, eventual.reactor)
    set_bulk_buffers(transport, RECEIVE_BYTES)
    upgrade_started_tls(transport)
    if type(getattr(broker, "outgoingVocabulary", None)) is dict:
        broker.outgoingVocabulary = ShortWords(broker.outgoingVocabulary)
    return storage


# Foolscap connections that share the rate of all others: see ``transport.throttle``.
#
# Foolscap starts TLS on a connection that it has spoken on already (``startTLS``). So the connection that
# it is given is the bounded one, and TLS comes to lie between that and Foolscap: every byte counts, as
# with HTTPS.


def limit(tub: Any, throttle: Throttle) -> None:
    """Let all connections that a tub makes from now on share a rate."""
    tub.removeAllConnectionHintHandlers()
    tub.addConnectionHintHandler("tcp", _ThrottledTcp(throttle))


@implementer(IConnectionHintHandler)
class _ThrottledTcp:
    """Connects over TCP, as Foolscap's own does."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._inner = tcp.default()

    def hint_to_endpoint(self, hint: str, reactor: Any, update_status: Any) -> tuple[Any, str]:
        """Return the endpoint of an address, and its host."""
        endpoint, host = self._inner.hint_to_endpoint(hint, reactor, update_status)
        return self._throttle.endpoint(endpoint, _StartsTls), host

    def describe(self) -> str:
        """What it is, for Foolscap's reports."""
        return "tcp"


class _StartsTls(Throttled):
    """
    A bounded connection on which TLS can be started; what is written goes through it from then on.

    Attributes:
        TLS: whether it was.
    """

    TLS = False

    def startTLS(self, context: Any, normal: bool = True) -> None:
        """Begin, as the client unless ``normal`` is False."""
        nothing: Any = None  # there is no factory to wrap, only a protocol
        factory = TLSMemoryBIOFactory(context, normal, nothing)
        tls: Any = factory.protocol(factory, self.protocol, False)
        self.protocol = tls
        self.getHandle = tls.getHandle
        self.getPeerCertificate = tls.getPeerCertificate
        alsoProvides(self, ISSLTransport)
        self.TLS = True
        tls.makeConnection(_Beneath(self))

    def write(self, data: bytes) -> None:
        """Send it, encrypted if that has begun."""
        if self.TLS:
            self.protocol.write(data)
        else:
            super().write(data)

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def loseConnection(self, *arguments: Any) -> None:
        """Close it behind what waits, with a goodbye."""
        if self.TLS:
            self.protocol.loseConnection()
        else:
            super().loseConnection(*arguments)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Somebody writes, and may be asked to pause."""
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
    """The connection as its TLS sees it: what is written is sent as it is."""

    def __init__(self, connection: _StartsTls) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def write(self, data: bytes) -> None:
        """Send it when it may leave."""
        Throttled.write(self._connection, data)

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def loseConnection(self, *arguments: Any) -> None:
        """Close it behind what waits."""
        Throttled.loseConnection(self._connection, *arguments)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """TLS writes, and may be asked to pause."""
        Throttled.registerProducer(self._connection, producer, streaming)

    def unregisterProducer(self) -> None:
        Throttled.unregisterProducer(self._connection)
