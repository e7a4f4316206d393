"""
Many files on their way to the grid at once, as one pipeline.

Which, and how many: the large ones first, since they open the windows that the small ones then find
open; as many as hold a bounded number of unacknowledged bytes together, so that a hundred small files
share their round trips; and always two. What counts of a file is what has not been acknowledged of
it, so the next ones start while the last bytes of a large one are on the line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.caps import is_literal_size
from pipegrid.flow.concurrency import ConcurrencyLimit, SmallFileCapacity
from pipegrid.transfer.results import Progress

T = TypeVar("T")

MIN_FILES = 2
MAX_FILES = 256
"""Even a file of no bytes takes some 64 KiB while it is under way."""

MAX_BYTES = 8 << 20
"""
Plaintext that is under way and not acknowledged, beyond MIN_FILES: at 3-of-10 this fills a line of 2 Gbit/s
at 100 ms. Each file's own memory is bounded by the grid.
"""

SMALL_BYTES = 64 << 10
"""Files up to this tell by their time how long the servers' queues are."""


class PutOrder:
    """
    Decides which file starts next; pure.

    Args:
        sizes: plaintext bytes of each file; None where nobody knows yet, as of a pipe. These start
            first, since they may take their time, and count as nothing until they report progress.
        max_files: under way at once.
    """

    def __init__(self, sizes: Sequence[int | None], max_files: int = MAX_FILES) -> None:
        self._max_files = max_files
        self._sizes = [0 if size is None else size for size in sizes]
        unknown = [size is None for size in sizes]
        first = sorted(range(len(sizes)), key=lambda n: (not unknown[n], -self._sizes[n]))
        self._waiting = deque(first)
        self._left: dict[int, int] = {}
        self._left_bytes = 0

    @property
    def under_way(self) -> int:
        """How many have started and not ended."""
        return len(self._left)

    def is_small(self, number: int) -> bool:
        """Whether a file is known to be small."""
        return 0 < self._sizes[number] <= SMALL_BYTES

    def count_small(self) -> int:
        """Return how many files are small, and more than literals."""
        small = filter(self.is_small, range(len(self._sizes)))
        return sum(not is_literal_size(self._sizes[number]) for number in small)

    @property
    def next(self) -> int | None:
        """The number of the file that may start now, if any."""
        if not self._waiting or len(self._left) >= self._max_files:
            return None
        number = self._waiting[0]
        fits = self._left_bytes + self._sizes[number] <= MAX_BYTES
        return number if fits or len(self._left) < MIN_FILES else None

    def started(self, number: int) -> None:
        """The file that was next is under way."""
        assert self._waiting[0] == number, "another one is next"
        self._waiting.popleft()
        self._set(number, self._sizes[number])

    def progressed(self, number: int, done: int, total: int) -> None:
        """So much of a file's share bytes is acknowledged."""
        if number in self._left:
            size = self._sizes[number] or total
            self._set(number, size * (total - done) // max(1, total))

    def ended(self, number: int) -> None:
        """A file is stored, or has failed."""
        self._left_bytes -= self._left.pop(number)

    def _set(self, number: int, left: int) -> None:
        self._left_bytes += left - self._left.get(number, 0)
        self._left[number] = left


class ManyPuts(Generic[T]):
    """
    Stores many files.

    Args:
        sizes: as for ``PutOrder``.
        start: begins to store the file of that number, which is to report its progress.
        max_files: under way at once; None: as many as there may be.
        ended: told of each file's end, in the order of ending; what it raises ends all.
        seconds: tells the time.
        appetite: how many small files the servers bear.
        expect: told how many small ones are about to be stored.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        start: Callable[[int, Progress], Deferred[T]],
        ended: Callable[[int, T | Failure], None],
        max_files: int | None = None,
        seconds: Callable[[], float] = lambda: 0.0,
        appetite: Callable[[], SmallFileCapacity] = lambda: SmallFileCapacity.ANY,
        expect: Callable[[int], None] = lambda objects: None,
    ) -> None:
        most = min(max_files or MAX_FILES, MAX_FILES)
        self._order = PutOrder(sizes, most)
        self._depth = ConcurrencyLimit(most)
        self._seconds = seconds
        self._appetite = appetite
        self._expect = expect
        self._start = start
        self._tell = ended
        self._running: dict[int, Deferred[Any]] = {}
        self._outcomes: deque[tuple[int, T | Failure]] = deque()
        self._waiter: Deferred[None] | None = None

    async def run(self) -> None:
        """Return when all have ended; when cancelled, or when ``ended`` raises, cancel what runs."""
        self._expect(self._order.count_small())
        try:
            while True:
                while self._outcomes:
                    self._tell(*self._outcomes.popleft())
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
        """The file that may start now."""
        allowed = self._depth.has_slot(self._order.under_way, self._appetite())
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
            self._depth.ended(began_s, self._seconds(), self._order.under_way)
        self._order.ended(number)
        self._outcomes.append((number, outcome))
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.callback(None)
