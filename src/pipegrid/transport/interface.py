"""Server contract: operations, errors, streams, `store_whole`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.interfaces import IConsumer, IProducer, IPushProducer
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.errors import (
    NoSuchShare,
    ServerError,
    ServerProtocolError,
    ServerUnreachable,
    UsageError,
    WrongSwissnum,
)
from pipegrid.flow.concurrency import SmallFileCapacity
from pipegrid.wire.messages import (
    Allocation,
    Changes,
    LeaseSecrets,
    Numbers,
    Pieces,
    Reads,
    ServerIdentity,
    ServerVersion,
    Shares,
    SlotData,
    SlotResult,
    SlotSecrets,
    Stored,
    UploadSecrets,
    WriteAnswer,
)

# The contract of a storage server, whatever wire lies between.
#
# **Order.** Operations on one server object are carried out in the order in which they were
# called, as far as they touch the same storage index, and none has to wait for the answer to
# the one before: ``allocate`` followed at once by ``write`` is one round trip. A write whose
# allocation turns out to be refused fails with ``NoSuchShare`` or ``WrongSecret`` and harms nothing.
#
# **Completion.** A share is complete, and becomes visible to ``list_shares`` and ``read``, when
# every byte of ``[0, share_bytes)`` has been written; there is no close. The Deferred of the write
# that completes it fires only after the server has made the share durable, as far as its policy goes.
#
# **Resumption.** An unfinished upload outlives the connection. A write with the same upload secret
# continues it, also where ``allocate`` mentioned the share in neither of its sets.
#
# **Errors** are ``ServerError`` and its subclasses; ``server`` names the server. ``ServerUnreachable`` and
# ``ServerTimeout`` may be retried, on another connection or later; ``may_have_happened`` says whether the
# request may have been carried out all the same. Every operation here can be repeated without harm (the
# completing write then fails with ``NoSuchShare``: list the shares to find out). ``ServerRefused`` is
# final for this server and share; ``ServerProtocolError`` means that the server is not to be trusted
# further.
#
# **Cancellation.** Cancelling a Deferred gives up waiting, and it fails with ``CancelledError``. The
# server may or may not have carried the request out; other requests, pipelined before or behind, are not
# harmed. Buffers of a cancelled ``write`` may be reused at once: what they hold later never becomes share
# data.
#
# **Memory.** Buffers given to ``write`` belong to the transport until its Deferred fires, and must not
# change until then. A transport holds no more than what it was given and was not yet acknowledged:
# bounding that is the caller's business (``flow.pipeline``).
#
# A caller that can make its bytes again says so by ``let_go``. A transport may then drop the buffers as
# soon as the network has them, long before the acknowledgement on a long path, and calls it once, when it
# does. If the connection is lost under such a write it cannot be repeated here, and fails with
# ``WriteLost``; the caller writes those bytes ``again``.
#
# **Slots** hold mutable shares, all under one write enabler. Their operations keep the order of their
# calls, as far as they touch the same storage index, and none has to wait for another. What may be
# repeated after a lost connection:
#
# * what only reads, leases and complaints: always, and the transport may do so itself;
# * ``read_test_write``: it may be repeated, by the transport or by its caller, if each share that it
# writes is
#   tested for a checkstring that the write replaces (or for absence). If the lost one was carried out,
# the test
#   now fails, nothing is written twice, and the answer shows the caller's own new checkstring as what was
# there
#   before: this is how one's own write is told from somebody else's. Between the lost one and its repetition
#   others may have written; then the answer shows theirs, and whether one's own came before is not known. A
#   checkstring never comes back (it holds a sequence number and a hash over random salts), so a test cannot
#   pass by accident. A change without such tests is not safe, and nothing here ever sends one unasked.


class StorageServer(Protocol):
    """One storage server. Storage indexes are 16 bytes, share numbers 0 to 255, offsets bytes."""

    @property
    def identity(self) -> ServerIdentity:
        """Who this is, before and apart from any connection."""

    def version(self) -> Deferred[ServerVersion]:
        """Ask what the server says of itself."""

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """
        Ask for room for shares of exactly ``share_bytes`` bytes; adds or renews the leases of all
        shares of the index that are there. No share numbers: only that.

        Whether an unfinished upload of one's own is allocated again, or is in neither set, depends on
        the server; a write with its secret continues it in both cases.
        """

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        *,
        let_go: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        """
        Write the pieces of ``data``, one behind the other, at ``offset`` of an unfinished share.

        Any order, overlap with equal content and repetition are fine.

        Args:
            let_go: called, at most once and not from within ``write``, if the buffers are not needed any
                more though the write was not answered. None: they are kept, to be sent again if need be.
            again: a write to this share was lost, and may have been carried out and have completed it.

        Raises:
            WriteLost: the connection was lost after ``let_go`` was called.
            NoSuchShare: there is no such unfinished upload (never allocated, finished, timed out).
            WrongSecret: it is somebody else's.
            ConflictingWrite: other bytes are there already; the upload stays open.
            ServerRefused: the range does not lie within the allocated share.
            NoSpace: the disk is full.
        """

    @property
    def whole_bytes(self) -> int:
        """How long a share may be to go with ``store_whole``; 0: nothing is gained by it."""

    @property
    def appetite(self) -> SmallFileCapacity:
        """How many such shares it bears at once, as far as is known."""

    def expect(self, objects: int) -> None:
        """
        So many small objects are about to be stored, on this server and others: prepare for them.

        Nothing is waited for, and nothing is sent before something is stored.
        """

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """
        Ask for room for shares and write each of them whole: ``allocate`` and ``write`` in one call.

        It fails as the allocation would. What becomes of a share, and any failure of its write, is in the
        result; what the server has already does not fail.

        Args:
            shares: by number, at least one, each of ``share_bytes`` bytes.
        """

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Forget an unfinished upload. ``NoSuchShare`` if there is none, or it is complete."""

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all complete shares; the empty set if there are none."""

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """
        Read at most ``length`` bytes of a complete share: fewer, or none, past its end.

        Raises:
            NoSuchShare: the server has no such complete share.
        """

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """
        Read as ``read`` does, handing the bytes to ``consumer`` as they come.

        A push producer is registered with the consumer before the first byte and unregistered
        after the last; pausing it stops the flow within a bounded number of bytes. The Deferred fires
        with the number of bytes delivered. Cancelling it stops the flow, and so does the consumer's
        ``stopProducing``; the Deferred then fails. If there is no such share no producer is registered.
        """

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index; ``NoSuchShare`` if there are none."""

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a share looked corrupt; ``NoSuchShare`` if there is none."""

    # Slots of mutable shares.

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> Deferred[SlotResult]:
        """
        Test, read and write the shares of a slot in one step, as if nobody else were there.

        Either all tests of all shares pass and everything is written, or nothing is. Without changes it
        lists and reads all shares there are.

        Args:
            changes: by share number. The data of writes belongs to the transport until this has fired.
            reads: ``(offset, length)`` of every share that is there, as it was before; at most 30.

        Raises:
            WrongSecret: there are shares, under another write enabler.
            NoSpace: there is no room; nothing was written.
            ServerRefused: the server will not do it, perhaps since it is asked for too much at once.
        """

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares; the empty set if there are none."""

    def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> Deferred[SlotData]:
        """
        Read ``(offset, length)`` of every share of a slot, cut at its end; {} if there are none.

        Args:
            expected: which shares are probably there. Where the protocol cannot read shares without naming
                them, these are asked for beside the list, and others, if there are any, behind it: one
                round trip more.
        """

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """
        Read at most ``length`` bytes of one mutable share; fewer, or none, past its end.

        Many may be on their way at once; each is read at a time of its own, and others may write in between.

        Raises:
            NoSuchShare: there is none of this number.
        """

    def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of a slot; ``NoSuchShare`` if there are none."""

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a mutable share looked corrupt; ``NoSuchShare`` if there is none."""

    def disconnect(self) -> Deferred[None]:
        """
        Give up connections and unanswered requests; fires when all are gone.

        The requests' Deferreds fail with ``ServerUnreachable``, which a transfer takes as this server's
        end, and not with ``CancelledError``, which it would take as its own.

        Unfinished uploads stay with the server, for this or another server object to resume.
        """


def disconnected(server: str) -> ServerUnreachable:
    """Return what requests fail with that ``disconnect`` ended, and those that come after it."""
    return ServerUnreachable(f"{server} was disconnected here; open it again", server)


def nothing_to_write() -> UsageError:
    """Return what a ``write`` without a byte fails with, before anything is sent."""
    return UsageError("a write must have at least one byte; write what there is")


def fits_reads(data: Mapping[int, Sequence[bytes]], reads: Reads) -> bool:
    """Return whether each share's data are what was asked for: a piece for each read, and none too long."""
    return all(
        len(pieces) == len(reads)
        and all(len(piece) <= length for piece, (_, length) in zip(pieces, reads, strict=True))
        for pieces in data.values()
    )


# What is said of a server, whichever protocol it speaks: sentences that stand in the errors of both.
#
# Each names the server as a person calls it.


def nonsense(server: str, question: str, what: str) -> ServerProtocolError:
    """It answered what no storage server answers."""
    return ServerProtocolError(
        f"{server} answered {question} with {what}; is it a storage server?", server, True
    )


def no_share(server: str, share_number: int) -> NoSuchShare:
    """It has no such complete share."""
    return NoSuchShare(f"{server} has no share {share_number}", server)


def nothing_to_lease(server: str, first: str = "upload") -> NoSuchShare:
    """It has no share at all; ``first`` says what must be done before."""
    return NoSuchShare(f"{server} has no share of this file; {first} it first", server)


def no_upload(server: str, share_number: int) -> NoSuchShare:
    """It has no such unfinished upload."""
    return NoSuchShare(
        f"{server} knows no unfinished upload of share {share_number}; allocate it again", server
    )


def wrong_swissnum(server: str, address: str) -> WrongSwissnum:
    """The secret in its address, a NURL or a fURL, is not its own."""
    return WrongSwissnum(
        f"{server} does not know the secret in its address; copy its {address} again", server
    )


def excerpt(text: str, characters: int) -> str:
    """The beginning of a text from a stranger, fit to be shown: one line, no control characters."""
    text = "".join(c if c.isprintable() else " " for c in text[: 4 * characters])
    text = " ".join(text.split())
    return text if len(text) <= characters else text[:characters] + "…"


# What the consumer of a stream holds, to pause it, to go on, to stop; for who reads shares piece by piece.

T = TypeVar("T")


@implementer(IPushProducer)
class PausableStream:
    """What the consumer of a stream holds to pause, resume and stop it."""

    def __init__(self) -> None:
        self._paused = False
        self._stopped = False
        self._reason: Exception | None = None
        self._resumed: Deferred[None] = Deferred()
        self._awaited: Deferred[Any] | None = None

    def pauseProducing(self) -> None:
        """Hand over nothing more for now."""
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        if self._awaited is self._resumed and not self._resumed.called:
            self._resumed.callback(None)

    def stopProducing(self) -> None:
        """Hand over nothing more at all: the stream fails as if it had been cancelled."""
        self._stopped = True
        if self._awaited is not None:
            self._awaited.cancel()

    def give_up(self, reason: Exception) -> None:
        """Let the stream fail with that error."""
        self._reason = reason
        self.stopProducing()

    async def flowing(self) -> None:
        """Wait while paused; CancelledError, or what it was given up for, once stopped."""
        while self._paused and not self._stopped:
            self._resumed = Deferred()
            await self.unless_stopped(self._resumed)
        if self._stopped:
            raise self._reason or CancelledError()

    async def unless_stopped(self, awaited: Deferred[T]) -> T:
        """Await something that ``stopProducing`` cancels."""
        self._awaited = awaited
        try:
            return await awaited
        except CancelledError:
            raise self._reason or CancelledError() from None
        finally:
            self._awaited = None


@contextmanager
def streaming(streams: set[PausableStream], consumer: IConsumer) -> Iterator[PausableStream]:
    """Give a consumer a stream as its producer, and let it be among the others, until it ends."""
    stream = PausableStream()
    streams.add(stream)
    try:
        consumer.registerProducer(stream, True)
        try:
            yield stream
        finally:
            consumer.unregisterProducer()
    finally:
        streams.discard(stream)


# ``store_whole`` by way of ``allocate`` and ``write``, for servers that know nothing better.

Allocate = Callable[[bytes, Numbers, int, UploadSecrets], Deferred[Allocation]]
WriteShare = Callable[[bytes, int, int, Pieces, bytes], Deferred[WriteAnswer]]


class StoresApart(ABC):
    """Half of a storage server: what it does not do together."""

    @property
    def whole_bytes(self) -> int:
        """Nothing is gained by it here."""
        return 0

    @property
    def appetite(self) -> SmallFileCapacity:
        """Each share is a request of its own, or more."""
        return SmallFileCapacity.COUNTED

    def expect(self, objects: int) -> None:  # noqa: B027  not all have something to prepare
        """Nothing is prepared for them."""

    @abstractmethod
    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """Ask for room; see the contract."""

    @abstractmethod
    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
    ) -> Deferred[WriteAnswer]:
        """Write to an unfinished share; see the contract."""

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see the contract."""
        return store_by_writes(
            self.allocate, self.write, storage_index, shares, share_bytes, secrets
        )


def store_by_writes(
    allocate: Allocate,
    write: WriteShare,
    storage_index: bytes,
    shares: Shares,
    share_bytes: int,
    secrets: UploadSecrets,
) -> Deferred[Stored]:
    """Make the calls at once, one behind the other; fires when all have ended. See the contract."""
    calls: list[Deferred[Any]] = [allocate(storage_index, shares.keys(), share_bytes, secrets)]
    for number, data in shares.items():
        calls.append(write(storage_index, number, 0, [data], secrets.upload))
    ended: Deferred[Any] = DeferredList(calls, consumeErrors=True)
    return ended.addCallback(_put_together, tuple(shares))


def _put_together(outcomes: Sequence[tuple[bool, Any]], numbers: Sequence[int]) -> Stored:
    (_, allocation), *written = outcomes
    if isinstance(allocation, Failure):
        allocation.raiseException()
    there = allocation.already_have
    by_number = zip(numbers, written, strict=True)
    return Stored(allocation, why_failed(each for each in by_number if each[0] not in there))


def why_failed(written: Iterable[tuple[int, tuple[bool, Any]]]) -> dict[int, ServerError]:
    """
    Return the errors of the writes that failed, by the share.

    Args:
        written: each share's number, and what came of its write as a ``DeferredList`` has it.
    """
    failed: dict[int, ServerError] = {}
    for number, (_, outcome) in written:
        if isinstance(outcome, Failure):
            if not isinstance(outcome.value, ServerError):
                outcome.raiseException()
            failed[number] = outcome.value
    return failed


# What all consumers of a server's, or a download's, stream have in common: its producer.


@implementer(IConsumer)
class StreamConsumer:
    """
    Keeps the producer of the stream that it consumes; what comes is for the ``write`` of each kind.

    Attributes:
        _producer: who can be paused; None before the stream has begun, and when it has ended.
    """

    _producer: IPushProducer | None = None

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        assert streaming, "streams come from push producers"
        self._producer = producer  # type: ignore[assignment]

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        raise NotImplementedError
