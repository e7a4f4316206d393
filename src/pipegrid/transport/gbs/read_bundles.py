"""Reads of many small shares, gathered into few requests, if the server takes read bundles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.http11.exchange import RawRequest, RawResponse
from pipegrid.reactor.deferreds import Timer
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.transport.gbs.response_outcomes import GbsAnswers
from pipegrid.wire.gbs_bundles import MAX_READS, BundledRead

# Reads of one turn of the reactor are held until it is over, and leave together. If the server has
# ``BUSY_BYTES`` to send, another small request gains nothing, and a larger one saves work at both ends: then
# reads are held until a bundle is full, or until less is unanswered. There is no timer.

SEND_BYTES = 56 * 1024
"""
Reads for more bytes leave in another bundle: as many bytes may be outstanding on one connection, and their
files are decoded while the next bundle is in flight.
"""

BUSY_BYTES = SEND_BYTES
"""From this many unanswered bytes on, only full bundles are sent."""

MAX_SMALL_READ_BYTES = SEND_BYTES // 2
"""Longer shares gain nothing from a bundle."""

NOT_TAKEN = (404, 405)
"""Statuses of a server that does not take read bundles."""


class _HeldRead:
    """
    A read, and who waits for it; cancelled reads have no one.

    Attributes:
        alone: the ordinary request for it, if it has one of its own.
    """

    __slots__ = ("alone", "read", "result")

    def __init__(
        self,
        read: BundledRead,
        result: Deferred[bytes] | None = None,
        alone: Deferred[None] | None = None,
    ) -> None:
        self.read = read
        self.result = result
        self.alone = alone


class GbsReadBundles:
    """
    The read bundles of one server.

    Args:
        send: sends a request whose response may be awaited anywhere; fails with the contract's errors.
        read_alone: reads the beginning of a share by an ordinary request.

    Attributes:
        taken: whether the server has refused no bundle yet.
    """

    def __init__(
        self,
        clock: IReactorTime,
        requests: GbsRequests,
        answers: GbsAnswers,
        send: Callable[[RawRequest], Deferred[RawResponse]],
        read_alone: Callable[[bytes, int, int], Deferred[bytes]],
    ) -> None:
        self.taken = True
        self._requests = requests
        self._answers = answers
        self._send = send
        self._read_alone = read_alone
        self._held: dict[_HeldRead, None] = {}  # in order
        self._unanswered_bytes = 0
        self._turn = Timer(clock, self._turn_over)

    def read(self, storage_index: bytes, share_number: int, length: int) -> Deferred[bytes]:
        """
        Read the beginning of a share.

        Args:
            length: at most ``MAX_SMALL_READ_BYTES``.

        Returns:
            A Deferred with the same results and errors as that of the contract's ``read``.
        """
        held = _HeldRead(BundledRead(storage_index, share_number, length))

        def cancel(_: Deferred[bytes]) -> None:
            held.result = None
            self._held.pop(held, None)
            if held.alone is not None:
                held.alone.cancel()

        result = held.result = Deferred(cancel)
        self._turn.set(0)
        self._held[held] = None
        return result

    def give_up(self, reason: Callable[[], Exception]) -> None:
        """Fail the reads that are held."""
        held, self._held = self._held, {}
        self._turn.stop()
        for each in held:
            _tell(Failure(reason()), each)

    def _turn_over(self) -> None:
        held, self._held = list(self._held), {}
        start, size = 0, 0
        for end, each in enumerate(held):
            length = each.read.length
            if end > start and (size + length > SEND_BYTES or end - start == MAX_READS):
                self._send_bundle(held[start:end], size)
                start, size = end, 0
            size += length
        if held and self._unanswered_bytes < BUSY_BYTES:
            self._send_bundle(held[start:], size)
            start = len(held)
        rest = [each for each in held[start:] if each.result is not None]
        self._held = dict.fromkeys(rest) | self._held

    def _send_bundle(self, held: Sequence[_HeldRead], size: int) -> None:
        self._unanswered_bytes += size
        if len(held) == 1 or not self.taken:
            sent = self._send_alone(held)
        else:
            reads = [each.read for each in held]
            sent = self._send(self._requests.read_bundle(reads)).addCallbacks(
                self._answered, self._failed, callbackArgs=(held,), errbackArgs=(held,)
            )
        sent.addBoth(self._ended, size)

    def _ended(self, _: object, size: int) -> None:
        self._unanswered_bytes -= size
        if self._held and self._unanswered_bytes < BUSY_BYTES:
            self._turn.set(0)

    def _send_alone(self, held: Sequence[_HeldRead]) -> Deferred[None]:
        """Send ordinary requests; fires when all are answered."""
        return DeferredList([self._read(each) for each in held]).addCallback(lambda _: None)

    def _read(self, held: _HeldRead) -> Deferred[None]:
        read = held.read
        alone = self._read_alone(read.storage_index, read.share_number, read.length)
        held.alone = alone.addBoth(_tell, held)
        return held.alone

    def _answered(self, answer: RawResponse, held: Sequence[_HeldRead]) -> Deferred[None] | None:
        if answer.status in NOT_TAKEN:
            self.taken = False
            return self._send_alone([each for each in held if each.result is not None])
        try:
            results = self._answers.bundled_reads(answer, [each.read for each in held])
        except Exception:
            self._failed(Failure(), held)
            return None
        for each, result in zip(held, results, strict=True):
            _tell(result if isinstance(result, bytes) else Failure(result), each)
        return None

    def _failed(self, failure: Failure, held: Sequence[_HeldRead]) -> None:
        for each in held:
            _tell(failure, each)


def _tell(result: bytes | Failure, held: _HeldRead) -> None:
    waiting, held.result = held.result, None
    if waiting is not None:
        waiting.callback(result)
