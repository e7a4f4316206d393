"""
Reading shares of a Foolscap server: references to them, found, kept and renewed.

A share is read through a reference, which ``get_buckets`` brings: one round trip more, the first
time. References are kept while the connection lasts, for the storage indexes used last. What asks for them at
the same time (a list, and the reads right behind it) asks once. A share may go away, and come back, while its
reference is kept: when the server refuses a read, references are asked for anew, once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer

from pipegrid.errors import ServerError, ServerRefused
from pipegrid.reactor.deferreds import Waiters, all_ended
from pipegrid.transport.foolscap.link import FoolscapLink, check_numbers, in_pieces
from pipegrid.transport.interface import PausableStream, no_share, nonsense, streaming


class FoolscapReaders:
    """
    References to all shares of one connection, and what is read through them.

    Args:
        server: what a person calls it.
        max_indexes: of how many storage indexes the references are kept.
        piece_bytes, pieces: a stream begins with pieces of this size, so many at a time; as it goes on they
            get larger, and fewer.
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
        """The connection is gone, and with it all references."""
        self._readers.clear()
        self._questions.clear()

    # References.

    async def find(self, storage_index: bytes, share_number: int, instead_of: Any = None) -> Any:
        """
        Return a reference to a share.

        Args:
            instead_of: one that is not to be used any more.
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
        Return references to all shares of an index.

        Args:
            again: ask even if the question is out already: the answer must not be older than now.
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
            storage = await self._link.storage()
            readers = await self._link.call(storage, "get_buckets", storage_index)
            check_numbers(self._server, "a question for shares", readers)
        except Exception as error:  # whatever it is: somebody waits
            question.fail(error)
            return
        finally:
            current = self._questions.get(storage_index) is question
            if current:
                del self._questions[storage_index]
        if current and readers:  # else a change came in between, and made it worthless
            self._readers[storage_index] = readers
            self._readers.move_to_end(storage_index)
            while len(self._readers) > self._max_indexes:
                self._readers.popitem(last=False)
        question.fire(readers)

    def forget(self, storage_index: bytes) -> None:
        """What is known of an index may be true no more."""
        self._readers.pop(storage_index, None)
        self._questions.pop(storage_index, None)

    # Reads.

    async def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> bytes:
        """Return bytes of a share; a reference that the server refuses is asked for once more."""
        reader = await self.find(storage_index, share_number)
        try:
            return await self._read_all(reader, offset, length)
        except ServerRefused:
            reader = await self.find(storage_index, share_number, instead_of=reader)
        return await self._read_all(reader, offset, length)

    async def _checked_read(self, reader: Any, offset: int, length: int) -> bytes:
        data = await self._link.call(reader, "read", offset, length)
        if type(data) is not bytes:  # a reader that names no interface gives what it likes
            raise nonsense(self._server, "a read", "something that is not bytes")
        if len(data) > length:
            raise nonsense(
                self._server, "a read", f"more than the {length} bytes that were asked for"
            )
        return data

    def _read(self, reader: Any, offset: int, length: int) -> Deferred[bytes]:
        return Deferred.fromCoroutine(self._checked_read(reader, offset, length))

    async def _read_all(self, reader: Any, offset: int, length: int) -> bytes:
        found = await all_ended([self._read(reader, *each) for each in in_pieces(offset, length)])
        return found[0] if len(found) == 1 else b"".join(found)

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
        Read a share into a consumer.

        Args:
            opening: fires with a reference to the share.
            renew: finds another, as ``find`` does.
        """
        reader = await opening
        with streaming(self._streams, consumer) as stream:
            return await self._pump(reader, renew, stream, offset, length, consumer)

    def give_up_streams(self, reason: Callable[[], ServerError]) -> None:
        """End all streams, each for a reason of its own."""
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
        Return how large a piece to ask for next.

        Every piece costs both ends some 0.6 ms besides its bytes; so none is smaller than what was delivered,
        until two of them are all that may be asked for. The first ones are small: the consumer waits for the
        first, may have enough soon, and then what was asked for comes in vain.
        """
        return min(max(self._piece_bytes, delivered), self._asked_bytes // 2)


def _give_up(reads: deque[tuple[Deferred[bytes], int]]) -> None:
    """Let go of reads; whatever comes of them, nobody is there to hear it."""
    while reads:
        read, _ = reads.popleft()
        read.addErrback(lambda _: None)
        read.cancel()
