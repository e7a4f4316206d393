"""Reads of shares on a Foolscap server, and the references to these shares, which are cached and renewed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer

from pipegrid.errors import ServerError, ServerRefused
from pipegrid.reactor.deferreds import Waiters, all_ended, as_deferred
from pipegrid.transport.foolscap.link import FoolscapLink, check_numbers, in_pieces
from pipegrid.transport.interface import PausableStream, no_share, nonsense, streaming


class FoolscapReaders:
    """
    References to the shares of one server over one connection, and reads through these references.

    A share is read through a reference from ``get_buckets``, which takes one more round trip the first time.
    References are kept while the connection lasts, for the most recently used storage indexes. Requests for
    the references of an index at the same time (a list, and the reads directly after it) are combined. A
    share may be deleted and stored again while its reference is kept. So when the server refuses a read, the
    references are requested again, once.

    Args:
        server: the server's name for messages.
        max_indexes: number of storage indexes whose references are kept.
        piece_bytes, pieces: size and number of a stream's pending pieces at the beginning; later pieces are
            larger, and fewer are pending.
    """

    def __init__(
        self, link: FoolscapLink, server: str, max_indexes: int, piece_bytes: int, pieces: int
    ) -> None:
        self._link = link
        self._server = server
        self._max_indexes = max_indexes
        self._piece_bytes = piece_bytes
        self._asked_bytes = piece_bytes * pieces
        self._readers: OrderedDict[bytes, dict[int, Any]] = OrderedDict()
        self._questions: dict[bytes, Waiters[dict[int, Any]]] = {}
        self._streams: set[PausableStream] = set()

    def lost(self) -> None:
        """Drop all references, since the connection is lost."""
        self._readers.clear()
        self._questions.clear()

    # References.

    async def find(self, storage_index: bytes, share_number: int, instead_of: Any = None) -> Any:
        """
        Return a reference to a share.

        Args:
            instead_of: a reference that the server has refused; if this reference is still kept, a new one is
                requested.
        """
        readers = self._readers.get(storage_index)
        if readers is not None and readers.get(share_number) is instead_of is not None:
            self.forget(storage_index)
            readers = None
        if readers is None or share_number not in readers:
            readers = await self.ask(storage_index)
        else:
            self._readers.move_to_end(storage_index)
        if share_number not in readers:
            raise no_share(self._server, share_number)
        return readers[share_number]

    async def ask(self, storage_index: bytes, again: bool = False) -> dict[int, Any]:
        """
        Return references to all shares of a storage index.

        Args:
            again: whether to send a request even if one is pending, since the pending response might be out
                of date.
        """
        question = self._questions.get(storage_index)
        if question is not None and not again:
            return await question.wait()
        question = self._questions[storage_index] = Waiters()
        answer = question.wait()
        Deferred.fromCoroutine(self._answer(storage_index, question))
        return await answer

    async def _answer(self, storage_index: bytes, question: Waiters[dict[int, Any]]) -> None:
        try:
            readers = await self._link.call_storage("get_buckets", storage_index)
            check_numbers(self._server, "a question for shares", readers)
        except Exception as error:  # any error, since callers wait for the outcome
            question.fail(error)
            return
        finally:
            current = self._questions.get(storage_index) is question
            if current:
                del self._questions[storage_index]
        # If ``forget`` was called meanwhile, or a newer question has replaced this one, the response may be
        # out of date.
        if current and readers:
            self._readers[storage_index] = readers
            self._readers.move_to_end(storage_index)
            while len(self._readers) > self._max_indexes:
                self._readers.popitem(last=False)
        question.fire(readers)

    def forget(self, storage_index: bytes) -> None:
        """Drop the references of a storage index, since they may be out of date."""
        self._readers.pop(storage_index, None)
        self._questions.pop(storage_index, None)

    # Reads.

    async def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> bytes:
        """Return bytes of a share; if the server refuses, request a new reference and read again, once."""
        reader = await self.find(storage_index, share_number)
        try:
            return await self._read_all(reader, offset, length)
        except ServerRefused:
            reader = await self.find(storage_index, share_number, instead_of=reader)
        return await self._read_all(reader, offset, length)

    @as_deferred
    async def _read(self, reader: Any, offset: int, length: int) -> bytes:
        data = await self._link.call(reader, "read", offset, length)
        if type(data) is not bytes:  # a reader that declares no interface can return anything
            raise nonsense(self._server, "a read", "something that is not bytes")
        if len(data) > length:
            raise nonsense(
                self._server, "a read", f"more than the {length} bytes that were asked for"
            )
        return data

    async def _read_all(self, reader: Any, offset: int, length: int) -> bytes:
        found = await all_ended([self._read(reader, *each) for each in in_pieces(offset, length)])
        return b"".join(found)

    # Streams.

    async def stream(
        self,
        opening: Deferred[Any],
        renew: Callable[..., Coroutine[Any, Any, Any]],
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> int:
        """
        Read a share into a consumer; returns the number of bytes delivered.

        Args:
            opening: fires with a reference to the share.
            renew: returns a new reference to the share, like ``find``.
        """
        reader = await opening
        with streaming(self._streams, consumer) as stream:
            return await self._pump(reader, renew, stream, offset, length, consumer)

    def give_up_streams(self, reason: Callable[[], ServerError]) -> None:
        """End all streams, each with an error that ``reason`` returns."""
        for stream in list(self._streams):
            stream.give_up(reason())

    async def _pump(
        self,
        reader: Any,
        renew: Callable[..., Coroutine[Any, Any, Any]],
        stream: PausableStream,
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> int:
        reads: deque[tuple[Deferred[bytes], int]] = deque()
        asked = delivered = 0
        may_renew = True
        try:
            while delivered < length:
                await stream.flowing()
                while asked < length:
                    size = min(self._next_bytes(delivered), length - asked)
                    if reads and asked + size - delivered > self._asked_bytes:
                        break
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
                for start in range(0, len(piece), self._piece_bytes):
                    await stream.flowing()
                    consumer.write(piece[start : start + self._piece_bytes])
                delivered += len(piece)
                if len(piece) < size:
                    break
        finally:
            _give_up(reads)
        return delivered

    def _next_bytes(self, delivered: int) -> int:
        """
        Return the size of the next piece to request.

        Every piece costs both ends about 0.6 ms in addition to its bytes. So a piece is at least as large as
        all bytes delivered so far, up to half of the limit for pending bytes. The first pieces are small: the
        consumer waits for the first one, and may stop soon, which would waste pending bytes.
        """
        return min(max(self._piece_bytes, delivered), self._asked_bytes // 2)


def _give_up(reads: deque[tuple[Deferred[bytes], int]]) -> None:
    """Cancel reads and ignore their outcomes."""
    while reads:
        read, _ = reads.popleft()
        read.addErrback(lambda _: None)
        read.cancel()
