"""
Coding segments ahead of the sender, on all workers at once.

A segment is enciphered strictly in order, since cipher and flat hash run on through the file; its reading,
and its erasure coding and hashing, five sixths of the work, run beside those of its neighbours. One job does
all of it: jobs begin in order, and each waits in its thread for the moment when the one before has done with
the cipher. (Were the cipher a job of its own, the reactor would stand between the two, busy with ten servers'
megabytes, and a core would wait for it: a put of 100 MB to servers on the same machine took a sixth longer.)
The sender takes finished segments in order. At most ``depth`` segments exist between the two ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from twisted.internet.defer import CancelledError, Deferred

from pipegrid.core.encoder import CodedSegment, Encoder
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.put.source import Source

_CODING_WEIGHT = 8
"""Coding passes over some eight times as many bytes as a segment has."""

DEPTH = 3
"""Segments between reader and sender: two in work on two cores, and one that is ready, or next."""


class CodingLine:
    """
    Segments of one source, coded, in order.

    Args:
        depth: how many segments may be read and not yet taken, at least 1.
    """

    def __init__(
        self, encoder: Encoder, source: Source, workers: CpuWorkers, *, depth: int = DEPTH
    ) -> None:
        self._encoder = encoder
        self._source = source
        self._workers = workers
        self._depth = depth
        self._started = 0
        self._turns = _Turns()
        self._coded: deque[Deferred[CodedSegment]] = deque()
        # The last segment may be tiny, but must not overtake those that are in threads.
        self._weight_bytes = _CODING_WEIGHT * encoder.geometry.segment_length(0)

    async def take(self) -> CodedSegment:
        """Return the next segment; call it ``num_segments`` times, one at a time."""
        self._advance()
        coded = await self._coded[0]
        self._coded.popleft()
        self._advance()
        return coded

    def close(self) -> None:
        """Let go of everything; running jobs end by themselves and are not looked at."""
        self._turns.close()
        jobs = list(self._coded)
        self._coded.clear()
        for job in jobs:
            job.addErrback(lambda _failure: None)
            job.cancel()

    def _advance(self) -> None:
        """Start as many segments as may be."""
        while (
            len(self._coded) < self._depth
            and self._started < self._encoder.geometry.num_segments
            and not self._turns.is_closed_to(self._started)
        ):
            index = self._started
            self._started += 1
            self._coded.append(self._workers.run_if_large(self._weight_bytes, self._code, index))

    def _code(self, index: int) -> CodedSegment:
        """In a thread, or on the reactor where all is small."""
        geometry = self._encoder.geometry
        offset = index * geometry.segment_bytes
        try:
            plaintext = self._source.read_at(offset, geometry.segment_length(index))
            with self._turns.turn(index):
                segment = self._encoder.encrypt(plaintext)
        except BaseException:
            self._turns.close(index)  # what comes behind would be ciphered at the wrong place
            raise
        del plaintext
        return self._encoder.code(segment)


class _Turns:
    """Lets threads through one by one, in the order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._end: float = float("inf")

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """
        Wait for all lower numbers to have had their turns, and take this one.

        Raises:
            CancelledError: this number will have no turn.
        """
        with self._changed:
            while self._next != number and number < self._end:
                self._changed.wait()
            if number >= self._end:
                raise CancelledError
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def is_closed_to(self, number: int) -> bool:
        """Whether a number will have no turn."""
        return number >= self._end

    def close(self, number: int = 0) -> None:
        """Let nobody through from this number on."""
        with self._changed:
            self._end = min(self._end, number)
            self._changed.notify_all()
