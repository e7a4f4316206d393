"""
A storage server across the network: the contract over Foolscap.

One connection carries everything, and a server begins calls in the order in which they were sent. So most
operations are sent at once; what has to wait, and for what, is ``_Sent.conflicts``:

* a write for the answer to its allocation, which brings the reference to write to. All held writes, and the
  ``close`` behind the last, then leave together: a put is two round trips (``foolscapuploads``);
* a question, or an allocation, behind writes to the same shares for their answers, since a server may
  take its time to make a share durable, and carry out what comes later meanwhile.

**Reading.** A share is read through a reference, which ``get_buckets`` brings: one round trip more, the first
time. References are kept while the connection lasts, for the storage indexes used last. What asks for them at
the same time (a list, and the reads right behind it) asks once. A share may go away, and come back, while its
reference is kept: when the server refuses a read, references are asked for anew, once.

**What Foolscap cannot do.** An unfinished upload ends with its connection, at the server: on a new one writes
fail with ``NoSuchShare``, and the upload has to begin anew.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList, fail
from twisted.internet.interfaces import IConsumer, IReactorTime

from pipegrid.core.hashes import Buffer
from pipegrid.errors import (
    NoSuchShare,
    ServerError,
    ServerProtocolError,
    ServerRefused,
    UsageError,
)
from pipegrid.transport.foolscaplink import Connector, FoolscapLink
from pipegrid.transport.foolscapuploads import FoolscapUploads
from pipegrid.transport.interface import disconnected
from pipegrid.transport.local import Stream
from pipegrid.transport.ordering import Operation, Ordering
from pipegrid.wire.foolscap import MAX_REASON_BYTES, unpack_version
from pipegrid.wire.messages import (
    Allocation,
    LeaseSecrets,
    ServerIdentity,
    ServerVersion,
    UploadSecrets,
    WriteResult,
)

T = TypeVar("T")

MAX_SHARE_NUMBER = 255
READ_PIECE_BYTES = 16 << 20
"""Longer reads are several calls: a message is in memory as a whole, at both ends."""


@attrs.frozen(kw_only=True)
class FoolscapSettings:
    """
    Bounds and patience towards one server.

    Attributes:
        connect_timeout_s: until the server is found, its negotiation included.
        timeout_s: silence of the server, while it owes an answer.
        max_indexes: of how many storage indexes the references to shares are kept.
        stream_piece_bytes, stream_pieces: a stream reads pieces of this size, so many at a time. At
            100 ms that carries 20 MB/s a share, and is 2 MiB of memory.
    """

    connect_timeout_s: float = 15.0
    timeout_s: float = 60.0
    max_indexes: int = 256
    stream_piece_bytes: int = 256 * 1024
    stream_pieces: int = 8


class _Sent(Operation):
    """
    An operation, and what it has to wait for.

    Args:
        kind: "allocate", "write" (or abort), or "ask".
        numbers: the shares that it touches; None: all.
    """

    def __init__(
        self, kind: str, numbers: AbstractSet[int] | None, call: Callable[[Operation], Any]
    ) -> None:
        super().__init__(None, kind != "ask", call)
        self.kind = kind
        self.numbers = numbers

    def conflicts(self, other: Operation) -> bool:
        """Whether this one has to wait for the end of the other, which came first."""
        assert isinstance(other, _Sent)
        apart = (
            self.numbers is not None
            and other.numbers is not None
            and self.numbers.isdisjoint(other.numbers)
        )
        if apart or (self.kind == other.kind and self.kind != "allocate"):
            return False
        if other.kind == "write" or (other.kind, self.kind) == ("allocate", "write"):
            return True
        # The server keeps the order of what was sent; only what is not sent yet can be overtaken.
        return not other.started


class FoolscapServer:
    """
    Implements ``transport.interface.StorageServer`` over Foolscap.

    Args:
        identity: who it is.
        connector: connects to it; ``foolscaptub.TubConnector`` is the real one.
        clock: for all patience.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        connector: Connector,
        clock: IReactorTime,
        settings: FoolscapSettings | None = None,
    ) -> None:
        settings = settings or FoolscapSettings()
        self._identity = identity
        self._name = identity.nickname
        self._settings = settings
        self._link = FoolscapLink(
            connector,
            self._name,
            clock,
            settings.connect_timeout_s,
            settings.timeout_s,
            self._lost,
        )
        self._ordering = Ordering()
        self._uploads = FoolscapUploads(self._link, self._name)
        self._readers: OrderedDict[bytes, dict[int, Any]] = OrderedDict()
        self._questions: dict[bytes, _Question] = {}
        self._streams: set[Stream] = set()
        self._disconnected = False

    def __repr__(self) -> str:
        return f"<FoolscapServer {self._name!r} {self._link!r}>"

    @property
    def identity(self) -> ServerIdentity:
        """Who this is."""
        return self._identity

    def version(self) -> Deferred[ServerVersion]:
        """Ask what the server says of itself."""

        async def ask() -> ServerVersion:
            answer = await self._link.call(await self._link.storage(), "get_version")
            try:
                return unpack_version(answer)
            except (ValueError, AttributeError) as error:
                raise self._nonsense("a question for its version", str(error)) from error

        return self._submit(b"", "ask", None, ask)

    # Uploads.

    def allocate(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Allocation]:
        """Ask for room; see the contract. One's own unfinished uploads are in neither set."""
        wanted = set(share_numbers)

        async def allocate() -> Allocation:
            storage = await self._link.storage()
            have, writers = await self._link.call(
                storage,
                "allocate_buckets",
                storage_index,
                secrets.lease.renew,
                secrets.lease.cancel,
                wanted,
                share_bytes,
                self._link.canary,
            )
            self._check_numbers("an allocation", have)
            if not wanted.issuperset(writers):
                raise self._nonsense("an allocation", "shares that were not asked for")
            self._uploads.began(storage_index, writers, share_bytes, secrets.upload)
            return Allocation(frozenset(have), frozenset(writers))

        return self._submit(storage_index, "allocate", wanted or None, allocate)

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Sequence[Buffer],
        upload_secret: bytes,
    ) -> Deferred[WriteResult]:
        """Write to an unfinished share; see the contract. At least one byte."""
        if not any(map(len, data)):
            return fail(UsageError("a write must have at least one byte; write what there is"))

        async def write() -> WriteResult:
            result = await self._uploads.write(
                storage_index, share_number, offset, data, upload_secret
            )
            if result.complete:
                self._forget_readers(storage_index)
            return result

        return self._submit(storage_index, "write", {share_number}, write)

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Forget an unfinished upload; see the contract."""
        return self._submit(
            storage_index,
            "write",
            {share_number},
            lambda: self._uploads.abort(storage_index, share_number, upload_secret),
        )

    # Questions.

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all complete shares."""

        async def ask() -> frozenset[int]:
            return frozenset(await self._ask_readers(storage_index, again=True))

        return self._submit(storage_index, "ask", None, ask)

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from a complete share; see the contract."""

        async def read() -> bytes:
            reader = await self._reader(storage_index, share_number)
            try:
                return await self._read_all(reader, offset, length)
            except ServerRefused:
                reader = await self._reader(storage_index, share_number, instead_of=reader)
            return await self._read_all(reader, offset, length)

        return self._submit(storage_index, "ask", {share_number}, read)

    def stream(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see the contract."""
        opening = self._submit(
            storage_index, "ask", {share_number}, lambda: self._reader(storage_index, share_number)
        )
        renew = partial(self._reader, storage_index, share_number)
        return Deferred.fromCoroutine(self._stream(opening, renew, offset, length, consumer))

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index; see the contract."""

        async def add() -> None:
            storage = await self._link.storage()
            added = self._link.call(storage, "add_lease", storage_index, lease.renew, lease.cancel)
            # Foolscap does not say whether there was anything to lease.
            shares = self._ask_readers(storage_index, again=True)
            _, readers = await _all([added, Deferred.fromCoroutine(shares)])
            if not readers:
                raise NoSuchShare(
                    f"{self._name} has no share of this file; upload it first", self._name
                )

        return self._submit(storage_index, "ask", None, add)

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a share looked corrupt; see the contract."""

        async def advise() -> None:
            reader = await self._reader(storage_index, share_number)
            text = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
            await self._link.call(reader, "advise_corrupt_share", text)

        return self._submit(storage_index, "ask", {share_number}, advise)

    # The end.

    def disconnect(self) -> Deferred[None]:
        """Give up the connection and unanswered requests; fires when all are gone."""
        self._disconnected = True
        reason = partial(disconnected, self._name)
        for stream in list(self._streams):
            stream.give_up(reason())
        gone = [self._ordering.give_up_all(reason), self._link.close()]
        return DeferredList(gone).addCallback(lambda _: None)

    def _lost(self) -> None:
        self._uploads.lost()
        self._readers.clear()
        self._questions.clear()

    # How operations are carried out.

    def _submit(
        self,
        storage_index: bytes,
        kind: str,
        numbers: AbstractSet[int] | None,
        start: Callable[[], Any],
    ) -> Deferred[Any]:
        if self._disconnected:
            return fail(disconnected(self._name))
        operation = _Sent(kind, numbers, lambda _: Deferred.fromCoroutine(start()))
        return self._ordering.carry_out(storage_index, operation)

    async def _reader(self, storage_index: bytes, share_number: int, instead_of: Any = None) -> Any:
        """
        Return a reference to a share.

        Args:
            instead_of: one that is not to be used any more.
        """
        readers = self._readers.get(storage_index)
        if readers is not None and readers.get(share_number) is instead_of is not None:
            self._forget_readers(storage_index)
            readers = None
        if readers is None or share_number not in readers:
            readers = await self._ask_readers(storage_index)
        else:
            self._readers.move_to_end(storage_index)
        if share_number not in readers:
            raise NoSuchShare(f"{self._name} has no share {share_number}", self._name)
        return readers[share_number]

    async def _ask_readers(self, storage_index: bytes, again: bool = False) -> dict[int, Any]:
        """
        Return references to all shares of an index.

        Args:
            again: ask even if the question is out already: the answer must not be older than now.
        """
        question = self._questions.get(storage_index)
        if question is not None and not again:
            return await question.answer()
        question = self._questions[storage_index] = _Question()
        answer = question.answer()
        Deferred.fromCoroutine(self._find_readers(storage_index, question))
        return await answer

    async def _find_readers(self, storage_index: bytes, question: _Question) -> None:
        try:
            storage = await self._link.storage()
            readers = await self._link.call(storage, "get_buckets", storage_index)
            self._check_numbers("a question for shares", readers)
        except ServerError as error:
            question.fail(error)
            return
        finally:
            current = self._questions.get(storage_index) is question
            if current:
                del self._questions[storage_index]
        if current and readers:  # else a change came in between, and made it worthless
            self._readers[storage_index] = readers
            self._readers.move_to_end(storage_index)
            while len(self._readers) > self._settings.max_indexes:
                self._readers.popitem(last=False)
        question.succeed(readers)

    def _forget_readers(self, storage_index: bytes) -> None:
        self._readers.pop(storage_index, None)
        self._questions.pop(storage_index, None)

    async def _checked_read(self, reader: Any, offset: int, length: int) -> bytes:
        data: bytes = await self._link.call(reader, "read", offset, length)
        if len(data) > length:
            raise self._nonsense("a read", f"more than the {length} bytes that were asked for")
        return data

    def _read(self, reader: Any, offset: int, length: int) -> Deferred[bytes]:
        return Deferred.fromCoroutine(self._checked_read(reader, offset, length))

    async def _read_all(self, reader: Any, offset: int, length: int) -> bytes:
        pieces = [
            self._read(reader, at, min(READ_PIECE_BYTES, offset + length - at))
            for at in range(offset, offset + max(1, length), READ_PIECE_BYTES)
        ]
        found = await _all(pieces)
        return found[0] if len(found) == 1 else b"".join(found)

    # Streams.

    async def _stream(
        self,
        opening: Deferred[Any],
        renew: Callable[..., Coroutine[Any, Any, Any]],
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> int:
        reader = await opening
        stream = Stream()
        self._streams.add(stream)
        try:
            consumer.registerProducer(stream, True)
            try:
                return await self._pump(reader, renew, stream, offset, length, consumer)
            finally:
                consumer.unregisterProducer()
        finally:
            self._streams.discard(stream)

    async def _pump(
        self,
        reader: Any,
        renew: Callable[..., Coroutine[Any, Any, Any]],
        stream: Stream,
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> int:
        piece_bytes = self._settings.stream_piece_bytes
        reads: deque[tuple[Deferred[bytes], int]] = deque()
        asked = delivered = 0
        may_renew = True
        try:
            while delivered < length:
                await stream.flowing()
                while asked < length and len(reads) < self._settings.stream_pieces:
                    size = min(piece_bytes, length - asked)
                    reads.append((self._read(reader, offset + asked, size), size))
                    asked += size
                read, size = reads.popleft()
                try:
                    piece = await stream.unless_stopped(read)
                except ServerRefused:
                    if not may_renew:
                        raise
                    may_renew, asked = False, 0
                    _give_up(reads)
                    asking = Deferred.fromCoroutine(renew(instead_of=reader))
                    reader = await stream.unless_stopped(asking)
                    continue
                may_renew = False
                await stream.flowing()
                if piece:
                    consumer.write(piece)
                    delivered += len(piece)
                if len(piece) < size:
                    break
        finally:
            _give_up(reads)
        return delivered

    # Errors.

    def _check_numbers(self, question: str, numbers: Any) -> None:
        if not all(0 <= number <= MAX_SHARE_NUMBER for number in numbers):
            raise self._nonsense(question, "numbers that no share can have")

    def _nonsense(self, question: str, what: str) -> ServerProtocolError:
        return ServerProtocolError(
            f"{self._name} answered {question} with {what}; is it a storage server?",
            self._name,
            may_have_happened=True,
        )


class _Question:
    """One question, and all who wait for its answer."""

    def __init__(self) -> None:
        self._waiting: list[Deferred[dict[int, Any]]] = []

    def answer(self) -> Deferred[dict[int, Any]]:
        """Fire when the answer is there."""
        waiting: Deferred[dict[int, Any]] = Deferred()
        self._waiting.append(waiting)
        return waiting

    def succeed(self, readers: dict[int, Any]) -> None:
        """The answer is there."""
        for waiting in self._waiting:
            waiting.callback(readers)

    def fail(self, error: ServerError) -> None:
        """There will be none."""
        for waiting in self._waiting:
            waiting.errback(error)


def _give_up(reads: deque[tuple[Deferred[bytes], int]]) -> None:
    """Let go of reads; whatever comes of them, nobody is there to hear it."""
    while reads:
        read, _ = reads.popleft()
        read.addErrback(lambda _: None)
        read.cancel()


async def _all(waiting: Sequence[Deferred[Any]]) -> list[Any]:
    """Wait for all, and raise the first failure when all have ended."""
    outcomes = await DeferredList(waiting, consumeErrors=True)
    for good, result in outcomes:
        if not good:
            result.raiseException()
    return [result for _, result in outcomes]
