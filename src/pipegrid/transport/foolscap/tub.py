"""
Connections to Foolscap servers over TCP: a tub for each, which lives as long as it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from foolscap import eventual
from foolscap.ipb import IRemoteReference
from OpenSSL.crypto import FILETYPE_ASN1, dump_certificate
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from pipegrid.errors import UsageError
from pipegrid.http11.pinned import problem_of
from pipegrid.reactor.bulktls import batch_from_now_on
from pipegrid.reactor.sockets import be_prompt, move_much
from pipegrid.wire.allowance import Bounds
from pipegrid.wire.foolscap import ALLOCATED, answer_cost
from pipegrid.wire.furl import Furl
from pipegrid.wire.tub import KEEPALIVE_S, make_tub

if TYPE_CHECKING:
    from pipegrid.transport.throttled import Throttle

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
    Implements ``link.Connector``.

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
            raise UsageError(
                "the fURL names no TCP port to connect to, which is all that works yet"
            )
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
                from pipegrid.transport.foolscap.rate import limit

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
    move_much(transport, RECEIVE_BYTES)
    batch_from_now_on(transport)
    if type(getattr(broker, "outgoingVocabulary", None)) is dict:
        broker.outgoingVocabulary = ShortWords(broker.outgoingVocabulary)
    return storage
