"""
Reading ranges of a file on the grid, for a client that reads in sequence or at random.

Sequential reads share one download, which runs ahead of the client by a limited number of bytes, and pauses
when the client does. Other ranges are fetched one by one. Threads can take bytes that a download has in
memory without waiting for the reactor's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.interfaces import IProducer, IPushProducer
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.caps import Cap, LitCap
from pipegrid.core.erasure import cut
from pipegrid.core.hashes import Buffer
from pipegrid.errors import GridError
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.transfer.get.sink import IBufferConsumer
from pipegrid.tree.tree_grid import Grid

AHEAD_BYTES = 4 << 20
"""The maximum number of bytes by which a download may be ahead of its reader."""

_FIRST_AHEAD_BYTES = 256 << 10
"""The lower maximum when a download begins, since many programs read only the start of a file."""

KEPT_BEHIND_BYTES = 512 << 10
"""How many bytes each download keeps in memory after a client has read them."""

WHOLE_BYTES = 256 << 10
"""Files up to this size are fetched as a whole."""

READING_BYTES = 32 << 20
"""Maximum downloaded bytes in memory, in all downloads together; see ``ReadSpace.ahead_bytes``."""

MOST_WHOLE_BYTES = 16 << 20
"""Maximum memory for files that were fetched as a whole; further files are fetched again for each request."""

PROGRESS_BYTES = 1 << 20
"""After threads took this many bytes, the reactor's thread checks whether a paused download must resume."""

MOST_STREAMS = 6
"""Maximum number of simultaneous downloads, of about 20 MB each; further readers fetch ranges one by one."""

MOST_FETCHES = 6
"""The maximum number of ranges and small files that are fetched at the same time; others wait."""

UNUSED_S = 2.0
"""After this time without a request, a download ends if another reader needs its place."""

IDLE_S = 30.0
"""After this time without a request, a download ends in any case."""

_REMEMBERED_ENDS = 16


class ReadSpace:
    """
    Divides memory among all files that are being read.

    Args:
        ahead_bytes: the maximum number of bytes by which a download may be ahead of its reader.
        reading_bytes: the maximum number of downloaded bytes in memory, in all downloads together.
        behind_bytes: how many bytes each download keeps in memory after a client has read them, for requests
            that arrive out of order.

    Attributes:
        whole_bytes: the memory used by files that were fetched as a whole.
        running: the downloads of all readers.
    """

    def __init__(
        self,
        ahead_bytes: int = AHEAD_BYTES,
        reading_bytes: int = READING_BYTES,
        behind_bytes: int = KEPT_BEHIND_BYTES,
    ) -> None:
        self.whole_bytes = 0
        self.behind_bytes = behind_bytes
        self._ahead_bytes = ahead_bytes
        self._reading_bytes = reading_bytes
        self.running: dict[_ReadAhead, None] = {}
        self._turns = DeferredSemaphore(MOST_FETCHES)

    @property
    def streams(self) -> int:
        """The number of running downloads of all readers."""
        return len(self.running)

    def make_way(self, now: float) -> bool:
        """Return whether a download may begin; if necessary, end an unused one first."""
        if self.streams >= MOST_STREAMS:
            unused = [
                each
                for each in self.running
                if not each.is_waited_for and now - each.used_at >= UNUSED_S
            ]
            if unused:
                min(unused, key=lambda each: each.used_at).drop()
        return self.streams < MOST_STREAMS

    @property
    def ahead_bytes(self) -> int:
        """The number of bytes by which each download may be ahead of its reader now."""
        share = self._reading_bytes // max(1, self.streams) - self.behind_bytes
        return min(self._ahead_bytes, max(_FIRST_AHEAD_BYTES, share))

    async def fetch(self, grid: Grid, cap: Cap, start: int, length: int) -> bytes:
        """
        Fetch a range when fewer than ``MOST_FETCHES`` are running; raises the same errors as ``Grid.read``.
        """
        return await self._turns.run(grid.read, cap, start, length)


@implementer(IBufferConsumer)
class _ReadAhead:
    """
    One download from a position of a file to its end, and the downloaded bytes in memory.

    Methods are called in the reactor's thread, except ``read_held``.

    Attributes:
        start, end: the range of the file that is in memory.
        used_at: when a request last used the download, in seconds of the clock.
    """

    def __init__(
        self,
        grid: Grid,
        cap: Cap,
        start: int,
        space: ReadSpace,
        dropped: Callable[[_ReadAhead], object],
    ) -> None:
        self._dropped = dropped
        self.start = self.end = start
        self.used_at = grid.clock.seconds()
        self._first = start
        self._space = space
        self._clock = grid.clock
        self._wanted_end = start
        self._progress_end = start
        self._lock = Lock()  # protects ``start``, ``end`` and the pieces
        self._pieces: deque[Buffer] = deque()
        self._waiting: list[tuple[int, int, Deferred[list[Buffer]]]] = []
        self._producer: IPushProducer | None = None
        self._paused = False
        self.failed = False
        self._ended = False
        self._complete = False
        space.running[self] = None
        self._running = grid.get(cap, self, start=start)
        self._running.addCallbacks(self._finish, self._fail)

    def covers(self, offset: int) -> bool:
        """Return whether the byte at an offset is in memory, or will be soon, without a new download."""
        return not self.failed and self.start <= offset <= self.end + self._ahead_bytes

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for bytes of this download."""
        return bool(self._waiting)

    @property
    def _ahead_bytes(self) -> int:
        grown = max(_FIRST_AHEAD_BYTES, 2 * (self._wanted_end - self._first))
        return min(grown, self._space.ahead_bytes)

    def read(self, offset: int, length: int) -> Deferred[list[Buffer]]:
        """
        Return the pieces of a range. The caller has checked that ``covers`` accepts its start, and that the
        range ends within the file.

        The pieces have fewer bytes if a mutable file has become shorter.
        """
        self.used_at = self._clock.seconds()
        waiting: Deferred[list[Buffer]] = Deferred(self._forget)
        self._waiting.append((offset, offset + length, waiting))
        self._wanted_end = max(self._wanted_end, offset + length)
        self._serve()
        return waiting

    def read_held(
        self, offset: int, length: int, in_reactor: Callable[[Callable[[], object]], object]
    ) -> bytes | None:
        """
        Return a range if all of it is in memory. May be called in any thread; for the arguments see
        ``FileReader``.
        """
        end = offset + length
        with self._lock:
            if not self.start <= offset <= end <= self.end:
                return None
            at, pieces = self.start, tuple(self._pieces)
            self.used_at = self._clock.seconds()
            self._wanted_end = max(self._wanted_end, end)
            is_due = self._wanted_end - self._progress_end >= PROGRESS_BYTES
            if is_due:
                self._progress_end = self._wanted_end
        if is_due:
            in_reactor(self._serve)
        return b"".join(cut(pieces, offset - at, end - at))

    def _forget(self, gone: Deferred[list[Buffer]]) -> None:
        self._waiting = [each for each in self._waiting if each[2] is not gone]

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        self._producer = IPushProducer(producer)

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: Buffer) -> None:
        with self._lock:
            self._pieces.append(data)
            self.end += len(data)
        self._serve()

    def _serve(self) -> None:
        if self._ended:
            return
        ready = [each for each in self._waiting if self._complete or each[1] <= self.end]
        if ready:
            self._waiting = [each for each in self._waiting if each not in ready]
            # Cut all ranges before the first one is delivered: the reader that gets it may read on, close the
            # file, or cancel other requests.
            found = [
                cut(self._pieces, start - self.start, end - self.start) for start, end, _ in ready
            ]
            for (*_, waiting), pieces in zip(ready, found, strict=True):
                if not waiting.called:
                    waiting.callback(pieces)
        least = min((each[0] for each in self._waiting), default=self._wanted_end)
        least -= self._space.behind_bytes
        with self._lock:
            while self._pieces and self.start + len(self._pieces[0]) <= least:
                self.start += len(self._pieces.popleft())
        enough = self.end - self._wanted_end >= self._ahead_bytes
        if self._producer is not None and enough != self._paused:
            self._paused = enough
            if enough:
                self._producer.pauseProducing()
            else:
                self._producer.resumeProducing()

    def _finish(self, _result: object) -> None:
        self._complete = True
        self._serve()

    def _fail(self, failure: Failure) -> None:
        self.failed = True  # storing the failure would keep all downloaded bytes alive
        waiting, self._waiting = self._waiting, []
        for *_, each in waiting:
            each.errback(failure)

    def stop(self) -> None:
        """End the download, and free its memory."""
        if not self._ended:
            self._ended = True
            self._space.running.pop(self, None)
            self._running.cancel()
            with self._lock:
                self._pieces.clear()
                self.start = self.end
            self._producer = None

    def drop(self) -> None:
        """End this download in favour of the download of another reader."""
        self._dropped(self)


class FileReader:
    """
    Reads ranges of one file.

    Args:
        cap: the cap of a file.
        size: the size of the file when it was opened, in bytes.
    """

    def __init__(self, grid: Grid, cap: Cap, size: int, space: ReadSpace) -> None:
        self.size = size
        self._grid = grid
        self._cap = cap
        self._space = space
        self._streams: list[_ReadAhead] = []
        self._whole: bytes | None = cap.data if isinstance(cap, LitCap) else None
        self._kept_bytes = 0
        self._closed = False
        self._fetching = False
        self._fetched: Waiters[bytes] = Waiters()
        self._ends: deque[int] = deque([0], _REMEMBERED_ENDS)
        self._idle = Timer(grid.clock, self._end_idle)

    async def read(self, offset: int, length: int) -> bytes:
        """
        Return a range; the result is shorter at the end of the file.

        Raises:
            PipegridError: the range could not be fetched from the grid.
        """
        return b"".join(await self.read_pieces(offset, length))

    async def read_pieces(self, offset: int, length: int) -> Sequence[Buffer]:
        """Like ``read``, but return pieces, which the caller can join in another thread."""
        length = min(length, self.size - offset)
        if length <= 0:
            return []
        if self._whole is not None:
            return [self._whole[offset : offset + length]]
        if self.size <= WHOLE_BYTES:
            return [(await self._fetch_whole())[offset : offset + length]]
        stream = self._stream_for(offset)
        if stream is None:
            self._ends.append(offset + length)
            return [await self._space.fetch(self._grid, self._cap, offset, length)]
        self._idle.set(IDLE_S)
        try:
            return await stream.read(offset, length)
        except GridError:
            # Fetch the range again: the cause of the failure may be over, and a new request uses other
            # servers.
            return [await self._space.fetch(self._grid, self._cap, offset, length)]

    def read_held(
        self, offset: int, length: int, in_reactor: Callable[[Callable[[], object]], object]
    ) -> bytes | None:
        """
        Return a range within the file if a download has all of it in memory; None: call ``read`` instead. May
        be called in any thread.

        Args:
            in_reactor: makes the reactor's thread call a function later.
        """
        for stream in tuple(self._streams):
            found = stream.read_held(offset, length, in_reactor)
            if found is not None:
                return found
        return None

    async def _fetch_whole(self) -> bytes:
        waiting = self._fetched.wait()
        if not self._fetching:
            self._fetching = True
            Deferred.fromCoroutine(self._fetch())
        return await waiting

    async def _fetch(self) -> None:
        try:
            data = await self._space.fetch(self._grid, self._cap, 0, self.size)
        except Exception as error:
            self._fetching = False
            self._fetched.fail(error)
            return
        self._fetching = False
        if not self._closed and self._space.whole_bytes + len(data) <= MOST_WHOLE_BYTES:
            self._space.whole_bytes += len(data)
            self._whole, self._kept_bytes = data, len(data)
        self._fetched.fire(data)

    def _stream_for(self, offset: int) -> _ReadAhead | None:
        for stream in self._streams:
            if stream.covers(offset):
                return stream
        if offset not in self._ends:
            return None
        for stream in list(self._streams):
            if not stream.is_waited_for:
                self._drop(stream)
        if self._streams or not self._space.make_way(self._grid.clock.seconds()):
            return None
        stream = _ReadAhead(self._grid, self._cap, offset, self._space, self._drop)
        self._streams.append(stream)
        return stream

    def _drop(self, stream: _ReadAhead) -> None:
        self._streams.remove(stream)
        self._ends.append(stream.end)
        stream.stop()

    def _end_idle(self) -> None:
        now = self._grid.clock.seconds()
        for stream in list(self._streams):
            if not stream.is_waited_for and now - stream.used_at >= IDLE_S:
                self._drop(stream)
        if self._streams:
            self._idle.set(IDLE_S)

    def close(self) -> None:
        """End running downloads, and free their memory."""
        self._closed = True
        self._idle.stop()
        self._space.whole_bytes -= self._kept_bytes
        self._kept_bytes, self._whole = 0, b""
        for stream in self._streams:
            with suppress(CancelledError):
                stream.stop()
        self._streams.clear()
