"""
Coding segments ahead of the sender, on all workers at once.

A segment is read and enciphered strictly in order, since cipher and flat hash run on through the
file; its erasure coding and hashing, five sixths of the work, run beside those of its neighbours.
So a chain of cipher jobs starts a coding job for each segment, and the sender takes finished
segments in order. At most ``depth`` segments exist between the two ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.encoder import CodedSegment, Encoder, Segment
from pipegrid.flow.workers import CpuWorkers
from pipegrid.transfer.source import Source

T = TypeVar("T")

_CODING_WEIGHT = 8
"""Coding passes over some eight times as many bytes as a segment has."""

DEPTH = 3
"""Segments between reader and sender: one being ciphered while two are coded on two cores."""


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
        self._ciphering = False
        self._jobs: set[Deferred[Any]] = set()
        self._coded: deque[Deferred[CodedSegment]] = deque()
        self._stopped = False

    async def take(self) -> CodedSegment:
        """Return the next segment; call it ``num_segments`` times, one at a time."""
        self._advance()
        coded = await self._coded[0]
        self._coded.popleft()
        self._advance()
        return coded

    def stop(self) -> None:
        """Let go of everything; running jobs end by themselves and are not looked at."""
        self._stopped = True
        jobs: list[Deferred[Any]] = [*self._coded, *self._jobs]
        self._coded.clear()
        for job in jobs:
            job.addErrback(lambda _failure: None)
            job.cancel()

    def _advance(self) -> None:
        """Start as many segments as may be, one cipher job at a time."""
        geometry = self._encoder.geometry
        while (
            not self._stopped
            and not self._ciphering
            and len(self._coded) < self._depth
            and self._started < geometry.num_segments
        ):
            index = self._started
            self._started += 1
            result: Deferred[CodedSegment] = Deferred()
            self._coded.append(result)
            self._ciphering = True
            size = geometry.segment_length(index)
            ciphering = self._run(size, self._cipher, index)
            ciphering.addCallbacks(
                self._ciphered, self._failed, callbackArgs=(result, size), errbackArgs=(result,)
            )

    def _ciphered(self, segment: Segment, result: Deferred[CodedSegment], size: int) -> None:
        self._ciphering = False
        coding = self._run(_CODING_WEIGHT * size, self._encoder.code, segment)
        coding.addCallbacks(self._done, self._failed, callbackArgs=(result,), errbackArgs=(result,))
        self._advance()

    def _done(self, coded: CodedSegment, result: Deferred[CodedSegment]) -> None:
        if not result.called:
            result.callback(coded)

    def _failed(self, failure: Failure, result: Deferred[CodedSegment]) -> None:
        self._stopped = True  # what comes behind would be ciphered at the wrong place
        if not result.called:
            result.errback(failure)

    def _run(self, weight: int, function: Callable[..., T], argument: object) -> Deferred[T]:
        job = self._workers.run_if_large(weight, function, argument)
        self._jobs.add(job)

        def ended(outcome: Any) -> Any:
            self._jobs.discard(job)
            return outcome

        return job.addBoth(ended)

    def _cipher(self, index: int) -> Segment:
        geometry = self._encoder.geometry
        offset = index * geometry.segment_bytes
        plaintext = self._source.read_at(offset, geometry.segment_length(index))
        return self._encoder.encrypt(plaintext)
