"""Puts of many files at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.caps import is_literal_size
from pipegrid.flow.concurrency_limits import ConcurrencyLimit, SmallFileCapacity
from pipegrid.transfer.results import Progress

T = TypeVar("T")

MIN_FILES = 2
MAX_FILES = 256
"""Maximum number of running puts; even an empty file takes about 64 KiB while it is stored."""

MAX_BYTES = 12 << 20
"""
Maximum number of unacknowledged plaintext bytes of all running puts; ``MIN_FILES`` puts run in any case. At
3-of-10 this fills a link of 3 Gbit/s with a round-trip time of 100 ms. With small files, one bundle per
server can be in flight while another is stored and a third is filled. ``Uploader`` limits the memory for
encoding.
"""

SMALL_BYTES = 64 << 10
"""Files up to this size are small: the times that their puts take show how long the servers' queues are."""


class PutOrder:
    """
    Decides which file starts next; pure.

    Large files start first, since they open the windows that small files then use. The number of running
    files is limited by their unacknowledged bytes, so that a hundred small files share their round trips; at
    least two files run. Only unacknowledged bytes count, so the next files start while the last bytes of a
    large file are in flight.

    Args:
        sizes: plaintext bytes of each file; None if unknown, as for a pipe. Files of unknown size start
            first, since they may take long, and count as empty until they report progress.
        max_files: maximum number of running files.
    """

    def __init__(self, sizes: Sequence[int | None], max_files: int = MAX_FILES) -> None:
        self._max_files = max_files
        self._sizes = [0 if size is None else size for size in sizes]
        first = sorted(range(len(sizes)), key=lambda n: (sizes[n] is not None, -self._sizes[n]))
        self._waiting = deque(first)
        self._left: dict[int, int] = {}
        self._left_bytes = 0

    @property
    def in_flight(self) -> int:
        """Number of files that have started and not ended."""
        return len(self._left)

    def is_small(self, number: int) -> bool:
        """Return whether a file is small; an empty file or one of unknown size does not count as small."""
        return 0 < self._sizes[number] <= SMALL_BYTES

    def count_small(self) -> int:
        """Return how many files are small but not literal."""
        small = filter(self.is_small, range(len(self._sizes)))
        return sum(not is_literal_size(self._sizes[number]) for number in small)

    @property
    def next(self) -> int | None:
        """The number of the file that may start now; None: no file may."""
        if not self._waiting or len(self._left) >= self._max_files:
            return None
        number = self._waiting[0]
        fits = self._left_bytes + self._sizes[number] <= MAX_BYTES
        return number if fits or len(self._left) < MIN_FILES else None

    def started(self, number: int) -> None:
        """Record that the next file has started."""
        assert self._waiting[0] == number, "another one is next"
        self._waiting.popleft()
        self._set(number, self._sizes[number])

    def progressed(self, number: int, done: int, total: int) -> None:
        """Record how many of a file's share bytes are acknowledged."""
        if number in self._left:
            size = self._sizes[number] or total
            self._set(number, size * (total - done) // max(1, total))

    def ended(self, number: int) -> None:
        """Record that a file is stored, or has failed."""
        self._left_bytes -= self._left.pop(number)

    def _set(self, number: int, left: int) -> None:
        self._left_bytes += left - self._left.get(number, 0)
        self._left[number] = left


class ManyPuts(Generic[T]):
    """
    Stores many files.

    Args:
        sizes: see ``PutOrder``.
        start: gets a file's number and a callback for progress; starts to store the file.
        max_files: maximum number of running files; None: ``MAX_FILES``.
        ended: called when a file has ended, in the order of ending; if it raises, all puts are cancelled.
        seconds: returns the time in seconds.
        small_file_capacity: returns how many small files the servers accept at once.
        expect: called with the number of small files that will be stored.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        start: Callable[[int, Progress], Deferred[T]],
        ended: Callable[[int, T | Failure], None],
        max_files: int | None = None,
        seconds: Callable[[], float] = lambda: 0.0,
        small_file_capacity: Callable[[], SmallFileCapacity] = lambda: SmallFileCapacity.ANY,
        expect: Callable[[int], None] = lambda objects: None,
    ) -> None:
        most = min(max_files or MAX_FILES, MAX_FILES)
        self._order = PutOrder(sizes, most)
        self._depth = ConcurrencyLimit(most)
        self._seconds = seconds
        self._small_file_capacity = small_file_capacity
        self._expect = expect
        self._start = start
        self._report_end = ended
        self._running: dict[int, Deferred[Any]] = {}
        self._outcomes: deque[tuple[int, T | Failure]] = deque()
        self._waiter: Deferred[None] | None = None

    async def run(self) -> None:
        """
        Return when all files have ended; when cancelled, or when ``ended`` raises, cancel the running puts.
        """
        self._expect(self._order.count_small())
        try:
            while True:
                while self._outcomes:
                    self._report_end(*self._outcomes.popleft())
                number = self._next
                if number is not None:
                    self._begin(number)
                elif self._running:
                    self._waiter = Deferred()
                    await self._waiter
                elif not self._outcomes:
                    return
        except BaseException:
            running = list(self._running.values())
            for one in running:
                one.cancel()
            await DeferredList(running, consumeErrors=True)
            raise

    @property
    def _next(self) -> int | None:
        """The number of the file that may start now, within the concurrency limit; None: no file may."""
        allowed = self._depth.has_slot(self._order.in_flight, self._small_file_capacity())
        return self._order.next if allowed else None

    def _begin(self, number: int) -> None:
        self._order.started(number)

        def progress(done: int, total: int) -> None:
            self._order.progressed(number, done, total)
            if self._next is not None:
                self._wake()

        began_s = self._seconds()
        running = self._start(number, progress)
        self._running[number] = running
        running.addBoth(self._ended, number, began_s)

    def _ended(self, outcome: T | Failure, number: int, began_s: float) -> None:
        del self._running[number]
        if self._order.is_small(number):
            self._depth.ended(began_s, self._seconds(), self._order.in_flight)
        self._order.ended(number)
        self._outcomes.append((number, outcome))
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.callback(None)
