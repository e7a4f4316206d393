"""The contract of a storage server: operations, errors, streams, and the pieces that all protocols share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredList, succeed
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
from pipegrid.flow.concurrency_limits import SmallFileCapacity
from pipegrid.wire.storage_messages import (
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

# The contract of a storage server, for every protocol.
#
# **Order.** Operations on one server object that concern the same storage index are carried out in the order
# of the calls, and none has to wait for the response to an earlier one: ``allocate`` followed at once by
# ``write`` is one round trip. If an allocation turns out to be refused, its writes fail with ``NoSuchShare``
# or ``WrongSecret`` and have no effect.
#
# **Completion.** A share is complete, and becomes visible to ``list_shares`` and ``read``, when every byte of
# ``[0, share_bytes)`` has been written; there is no close. The Deferred of the completing write fires only
# after the server has made the share durable, as its durability policy requires.
#
# **Resumption.** An unfinished upload outlives the connection. A write with the same upload secret continues
# it, even if ``allocate`` listed the share in neither of its sets.
#
# **Errors** are ``ServerError`` and its subclasses; ``server`` names the server. After ``ServerUnreachable``
# and ``ServerTimeout`` the operation may be retried, on another connection or later; ``may_have_happened``
# says whether the failed request may nevertheless have been carried out. Every operation, except for some
# changes of slots (see below), can be repeated without harm. (A repeated write that has completed its share
# fails with ``NoSuchShare``: list the shares to find out whether it succeeded.) ``ServerRefused`` is final
# for this server and share; ``ServerProtocolError`` means that the server should not be trusted further.
#
# **Cancellation.** A Deferred that is cancelled fails with ``CancelledError``. The server may or may not have
# carried out the request; requests that were pipelined before or after it are not affected. Buffers of a
# cancelled ``write`` may be reused at once: their later content never becomes share data.
#
# **Memory.** Buffers given to ``write`` belong to the transport until its Deferred fires, and must not change
# until then. A transport holds only buffers of unacknowledged writes; the caller must bound these
# (``flow.pipeline``).
#
# A caller that can produce its bytes again passes ``release``. A transport may then drop the buffers as soon
# as the network has accepted the bytes, which on a long path is long before the acknowledgement, and calls
# ``release`` once when it does. If the connection is then lost, the transport cannot repeat the write, which
# fails with ``WriteLost``; the caller writes the bytes again, with ``again``.
#
# **Slots** hold mutable shares, all under one write enabler. Operations on the slots of the same storage
# index keep the order of the calls, and none has to wait for another. The following may be repeated after a
# lost connection:
#
# * Reads, leases and advisories: always, even by the transport itself.
# * ``read_test_write``, by the transport or by its caller, if it tests each share that it writes for a
#   checkstring that the write replaces (or for absence). If the lost request was carried out, the test of
#   the repetition fails and nothing is written twice. The response then shows the caller's own new
#   checkstring as the previous state, which distinguishes the caller's write from another client's. If
#   other clients have written in between, the response shows their checkstring, and it is not known
#   whether the lost request was carried out before. A checkstring never recurs (it contains a sequence
#   number and a hash over random salts), so a test cannot pass by accident. A change without such tests
#   cannot be repeated safely, and no transport repeats one by itself.


class StorageServer(Protocol):
    """One storage server. Storage indexes are 16 bytes, share numbers 0 to 255, offsets are in bytes."""

    @property
    def identity(self) -> ServerIdentity:
        """The server's identity, which does not depend on a connection."""

    def version(self) -> Deferred[ServerVersion]:
        """Ask the server for its version and limits."""

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """
        Request space for shares of exactly ``share_bytes`` bytes, and add or renew leases on all existing
        shares of the storage index. Without share numbers, only the leases are added or renewed.

        Depending on the server, an unfinished upload with the same secret is allocated again, or is in
        neither set; a write with that secret continues the upload in both cases.
        """

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        *,
        release: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        """
        Write the pieces of ``data``, one after another, at ``offset`` of an unfinished share.

        Writes may come in any order, be repeated, and overlap if the overlapping content is equal.

        Args:
            release: called, at most once and not within ``write``, when the buffers are not needed any more
                although the write is unanswered. None: the buffers are kept, so that the write can be sent
                again.
            again: whether an earlier write to this share was lost, and may have completed the share.

        Raises:
            WriteLost: the connection was lost after ``release`` was called.
            NoSuchShare: there is no such unfinished upload (never allocated, finished, timed out).
            WrongSecret: the upload belongs to another client.
            ConflictingWrite: the share already has other bytes in this range; the upload stays open.
            ServerRefused: the range does not lie within the allocated share.
            NoSpace: the disk is full.
        """

    @property
    def whole_bytes(self) -> int:
        """The largest share to store with ``store_whole``; 0 if ``store_whole`` has no advantage."""

    @property
    def small_file_capacity(self) -> SmallFileCapacity:
        """
        How many of the shares for ``store_whole`` the server can take at the same time, as far as is known.
        """

    def expect(self, objects: int) -> None:
        """
        Prepare for this number of small objects, which will be stored on this server and on others.

        Returns at once, and sends nothing to the server.
        """

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """
        Request space for shares and write each of them whole: ``allocate`` and ``write`` in one call.

        The call fails if the allocation fails. The result has the outcome of each share, including errors of
        its write; a share that the server already has is not an error.

        Args:
            shares: by number, at least one, each of ``share_bytes`` bytes.
        """

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """
        Abort an unfinished upload. Raises ``NoSuchShare`` if there is none, or if the share is complete.
        """

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """
        Ask for the numbers of all complete shares of a storage index; the set is empty if there are none.
        """

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """
        Read ``length`` bytes of a complete share: fewer, or none, if the share ends earlier.

        Raises:
            NoSuchShare: the server has no such complete share.
        """

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """
        Read as ``read`` does, and pass the bytes to ``consumer`` as they arrive.

        A push producer is registered with the consumer before the first byte and unregistered after the last.
        Pausing the producer stops the flow within a bounded number of bytes. The Deferred fires with the
        number of bytes delivered. Cancelling the Deferred, or calling the producer's ``stopProducing``, stops
        the flow; the Deferred then fails. If there is no such share, no producer is registered.
        """

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """
        Add or renew a lease on every share of the storage index; raises ``NoSuchShare`` if there are none.
        """

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """
        Report a corrupt share to the server's operator; raises ``NoSuchShare`` if the share does not exist.
        """

    # Slots of mutable shares.

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> Deferred[SlotResult]:
        """
        Test, read and write the shares of a slot atomically.

        Either all tests of all shares pass and everything is written, or nothing is written. Without changes,
        this lists and reads all existing shares.

        Args:
            changes: by share number. The data of writes belong to the transport until the Deferred fires.
            reads: ``(offset, length)`` of ranges to read from every existing share, before the changes; at
                most 30.

        Raises:
            WrongSecret: there are shares under another write enabler.
            NoSpace: there is no space; nothing was written.
            ServerRefused: the server refuses, perhaps because the request is too large.
        """

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares of a slot; the set is empty if there are none."""

    def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> Deferred[SlotData]:
        """
        Read ranges ``(offset, length)`` from every share of a slot; a share that ends earlier gives fewer
        bytes. {} if there are no shares.

        Args:
            expected: shares that probably exist. If the protocol cannot read shares without their numbers,
                these shares are requested together with the list of shares. Other listed shares are read
                afterwards, which takes one more round trip.
        """

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """
        Read ``length`` bytes of one mutable share: fewer, or none, if the share ends earlier.

        Many reads may be pending at the same time; each is carried out separately, and other clients may
        write in between.

        Raises:
            NoSuchShare: there is no share of this number.
        """

    def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of a slot; raises ``NoSuchShare`` if there are none."""

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """
        Report a corrupt mutable share to the server's operator; raises ``NoSuchShare`` if it does not exist.
        """

    def disconnect(self) -> Deferred[None]:
        """
        Close all connections and fail unanswered requests; fires when the connections are closed.

        Requests fail with ``ServerUnreachable``, so that a transfer treats the server as lost. If they failed
        with ``CancelledError``, the transfer would treat itself as cancelled.

        Unfinished uploads stay on the server; this or another server object can resume them.
        """


def disconnected(server: str) -> ServerUnreachable:
    """Return the error of requests that ``disconnect`` ended, and of requests after ``disconnect``."""
    return ServerUnreachable(f"{server} was disconnected here; open it again", server)


def nothing_to_write() -> UsageError:
    """Return the error of a ``write`` without any bytes; such a write fails before anything is sent."""
    return UsageError("a write must have at least one byte; write what there is")


def fits_reads(data: Mapping[int, Sequence[bytes]], reads: Reads) -> bool:
    """
    Return whether the data match the reads: each share has one piece for each read, and none is longer than
    its read.
    """
    return all(
        len(pieces) == len(reads)
        and all(len(piece) <= length for piece, (_, length) in zip(pieces, reads, strict=True))
        for pieces in data.values()
    )


# Error messages about a server, which all protocols use. Each message contains the server's name.


def nonsense(server: str, question: str, what: str) -> ServerProtocolError:
    """Return the error for a response that no storage server sends."""
    return ServerProtocolError(
        f"{server} answered {question} with {what}; is it a storage server?", server, True
    )


def no_share(server: str, share_number: int) -> NoSuchShare:
    """Return the error for a missing share."""
    return NoSuchShare(f"{server} has no share {share_number}", server)


def nothing_to_lease(server: str, first: str = "upload") -> NoSuchShare:
    """
    Return the error for a lease on a file without shares; ``first`` is the command that stores the file, such
    as "upload".
    """
    return NoSuchShare(f"{server} has no share of this file; {first} it first", server)


def no_upload(server: str, share_number: int) -> NoSuchShare:
    """Return the error for an unfinished upload that does not exist."""
    return NoSuchShare(
        f"{server} knows no unfinished upload of share {share_number}; allocate it again", server
    )


def wrong_swissnum(server: str, address: str) -> WrongSwissnum:
    """Return the error for a wrong secret in the server's address, a NURL or a fURL."""
    return WrongSwissnum(
        f"{server} does not know the secret in its address; copy its {address} again", server
    )


def excerpt(text: str, characters: int) -> str:
    """
    Return the beginning of an untrusted text in one line, without control characters, so that it can be
    shown.
    """
    text = "".join(c if c.isprintable() else " " for c in text[: 4 * characters])
    text = " ".join(text.split())
    return text if len(text) <= characters else text[:characters] + "…"


# The producer for the consumer of a stream, for servers that read shares piece by piece.

T = TypeVar("T")


@implementer(IPushProducer)
class PausableStream:
    """The producer that the consumer of a stream can pause, resume and stop."""

    def __init__(self) -> None:
        self._paused = False
        self._stopped = False
        self._reason: Exception | None = None
        self._resumed: Deferred[None] = Deferred()
        self._awaited: Deferred[Any] | None = None

    def pauseProducing(self) -> None:
        """Pass on no bytes until ``resumeProducing``."""
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        if self._awaited is self._resumed and not self._resumed.called:
            self._resumed.callback(None)

    def stopProducing(self) -> None:
        """Pass on no more bytes; the stream fails as if it had been cancelled."""
        self._stopped = True
        if self._awaited is not None:
            self._awaited.cancel()

    def give_up(self, reason: Exception) -> None:
        """Fail the stream with this error."""
        self._reason = reason
        self.stopProducing()

    async def flowing(self) -> None:
        """
        Wait while the stream is paused; if it is stopped, raise CancelledError, or the error of ``give_up``.
        """
        while self._paused and not self._stopped:
            self._resumed = Deferred()
            await self.unless_stopped(self._resumed)
        if self._stopped:
            raise self._reason or CancelledError()

    async def unless_stopped(self, awaited: Deferred[T]) -> T:
        """Await a Deferred, and cancel it if ``stopProducing`` is called meanwhile."""
        self._awaited = awaited
        try:
            return await awaited
        except CancelledError:
            raise self._reason or CancelledError() from None
        finally:
            self._awaited = None


@contextmanager
def streaming(streams: set[PausableStream], consumer: IConsumer) -> Iterator[PausableStream]:
    """Register a new stream as the consumer's producer, and keep it in ``streams`` until it ends."""
    stream = PausableStream()
    with ExitStack() as at_its_end:
        streams.add(stream)
        at_its_end.callback(streams.discard, stream)
        consumer.registerProducer(stream, True)
        at_its_end.callback(consumer.unregisterProducer)
        yield stream


# ``store_whole`` by means of ``allocate`` and ``write``, for servers without a combined request.


class StoresApart:
    """Base class of servers that store whole shares with ``allocate`` and ``write``."""

    @property
    def whole_bytes(self) -> int:
        """0, which means that ``store_whole`` has no advantage."""
        return 0

    @property
    def small_file_capacity(self) -> SmallFileCapacity:
        """``COUNTED``, since each share takes one request or more."""
        return SmallFileCapacity.COUNTED

    def expect(self, objects: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def store_whole(
        self: StorageServer,
        storage_index: bytes,
        shares: Shares,
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Stored]:
        """Store whole shares; see ``StorageServer.store_whole``."""
        return store_by_writes(
            self.allocate, self.write, storage_index, shares, share_bytes, secrets
        )


def store_by_writes(
    allocate: Callable[[bytes, Numbers, int, UploadSecrets], Deferred[Allocation]],
    write: Callable[[bytes, int, int, Pieces, bytes], Deferred[WriteAnswer]],
    storage_index: bytes,
    shares: Shares,
    share_bytes: int,
    secrets: UploadSecrets,
) -> Deferred[Stored]:
    """
    Call ``allocate`` and each ``write`` at once; fires when all have ended. See
    ``StorageServer.store_whole``.
    """
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
    Return the errors of the writes that failed, by share number.

    Args:
        written: the number of each share, and the outcome of its write as in the result of a
            ``DeferredList``.
    """
    failed: dict[int, ServerError] = {}
    for number, (_, outcome) in written:
        if isinstance(outcome, Failure):
            if not isinstance(outcome.value, ServerError):
                outcome.raiseException()
            failed[number] = outcome.value
    return failed


# Reads of many small shares at the same time.


def read_small(
    server: StorageServer, storage_index: bytes, share_number: int, length: int
) -> Deferred[bytes]:
    """
    Read the beginning of a complete share that is small, as ``StorageServer.read`` does.

    If the server has a method ``read_small``, that method may combine several reads of one turn of the
    reactor in one request. These reads are not ordered with other operations: they are meant for files that
    do not change.
    """
    method: Callable[[bytes, int, int], Deferred[bytes]] | None = getattr(
        server, "read_small", None
    )
    if method is None:
        return server.read(storage_index, share_number, 0, length)
    return method(storage_index, share_number, length)


def expect_small_reads(server: StorageServer) -> Deferred[None]:
    """
    Prepare for many calls of ``read_small``; fires when that is done, or fails with the contract's errors.

    If the server has a method ``expect_small_reads``, that method may ask the server whether it accepts
    several reads in one request. Reads need not wait for the answer.
    """
    method: Callable[[], Deferred[None]] | None = getattr(server, "expect_small_reads", None)
    return succeed(None) if method is None else method()


# The base class of consumers of a stream, from a server or of a download.


@implementer(IConsumer)
class StreamConsumer:
    """
    Keeps the producer of the stream that it consumes; subclasses define ``write``.

    Attributes:
        _producer: the producer, which can be paused; None before the stream begins and after its end.
    """

    _producer: IPushProducer | None = None

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        assert streaming, "streams come from push producers"
        self._producer = producer  # type: ignore[assignment]

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: bytes) -> None:
        """Process the next bytes of the stream."""
        raise NotImplementedError
