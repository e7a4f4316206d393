"""
One file, asked of one mirror: what it answers is looked at before a byte of it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timezone
from time import time
from typing import TYPE_CHECKING, Protocol

from pipegrid.errors import PipegridError
from pipegrid.http11 import Exchange, Limits
from pipegrid.http11.parser import ResponseHead
from pipegrid.mirror.plan import Errand
from pipegrid.mirror.sink import ArchiveSink, FileReceiver
from pipegrid.mirror.sprint.heads import BUSY, judge
from pipegrid.mirror.wanted import most_bytes

if TYPE_CHECKING:
    from pipegrid.mirror.plan import Failure

MAX_RETRY_AFTER_S = 120.0
"""As long as a mirror is waited for that says when it wants to be asked again."""

MAX_DATE_BYTES = 64


class Asks(Protocol):
    """Who asks for files, and is told what comes of them; see ``Source``."""

    is_paused: bool
    sink: ArchiveSink

    def received(self, errand: Errand, receiver: FileReceiver) -> None:
        """All of it is here."""

    def refused(self, errand: Errand, reason: str, kind: Failure = "refused") -> bool:
        """It is lacking, or wrong, and all that it has was received; False: see ``Plan.failed_at``."""

    def refuse(self, exchange: FileExchange, reason: str, kind: Failure) -> None:
        """What comes is not what is wanted; the rest of it is not, either."""

    def put_off(self, exchange: FileExchange, reason: str, busy_s: float | None = None) -> None:
        """It is not given now; has the mirror too much to do, and for how long at least?"""

    def failed(self, errand: Errand, error: PipegridError) -> None:
        """The connection ended before all of it had come."""


class FileExchange(Exchange):
    """One file, asked of one mirror."""

    __slots__ = ("_receiver", "_source", "errand")

    def __init__(self, source: Asks, errand: Errand, head: bytes) -> None:
        size = errand.size_bytes
        Exchange.__init__(self, b"GET", head, idempotent=True, expected_response_bytes=size + 300)
        self._source = source
        self.errand = errand
        self._receiver: FileReceiver | None = None

    def head_received(self, head: ResponseHead) -> None:
        wanted = self.errand.wanted
        if head.status != 200:
            transient, reason = judge(head.status)
            if not transient:
                self._source.refuse(self, reason, "refused")
            else:
                busy = head.status in BUSY
                self._source.put_off(self, reason, retry_after_s(head.headers) if busy else None)
        elif wanted.size is not None and head.length not in (None, wanted.size):
            reason = f"it has {head.length} bytes, and {wanted.size} by the index"
            self._source.refuse(self, reason, "wrong")
        elif (head.length or 0) > most_bytes(wanted):
            reason = f"it has {head.length} bytes, more than any whose size is not told"
            self._source.refuse(self, reason, "wrong")
        else:
            self._receiver = self._source.sink.receiver(wanted)
            self.paused = self._source.is_paused

    def body_received(self, data: bytes) -> None:
        receiver = self._receiver
        assert receiver is not None
        receiver.write(data)
        most = most_bytes(self.errand.wanted)
        if receiver.size_bytes > most:
            self._source.refuse(self, f"it has more than the {most} bytes of the index", "wrong")

    def completed(self) -> None:
        receiver = self._receiver
        assert receiver is not None
        size = self.errand.wanted.size
        if size is not None and receiver.size_bytes != size:
            receiver.discard()
            reason = f"it has {receiver.size_bytes} bytes of {size}"
            self._source.refused(self.errand, reason, "wrong")
        else:
            self._source.received(self.errand, receiver)

    def failed(self, error: PipegridError) -> None:
        self.let_go()
        self._source.failed(self.errand, error)

    def let_go(self) -> None:
        """Nothing more is kept of what was received."""
        if self._receiver is not None:
            self._receiver.discard()


def retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float:
    """Return for how many seconds a server wants to be left alone, ``MAX_RETRY_AFTER_S`` at most."""
    for name, value in headers:
        if name == b"retry-after":
            if value.isdigit() and len(value) < 10:
                return min(float(value), MAX_RETRY_AFTER_S)
            then = _seconds_of(value)
            told = [_seconds_of(date) for key, date in headers if key == b"date"]
            now = next((each for each in told if each is not None), time())
            return 0.0 if then is None else min(max(0.0, then - now), MAX_RETRY_AFTER_S)
    return 0.0


def _seconds_of(date: bytes) -> float | None:
    """Return the seconds since 1970 of a date in any of the three forms that HTTP has; None: it is none."""
    from email.utils import parsedate_to_datetime

    if len(date) > MAX_DATE_BYTES:
        return None
    try:
        found = parsedate_to_datetime(date.decode("latin-1"))
        return found.replace(tzinfo=found.tzinfo or timezone.utc).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


LIMITS = Limits(
    max_requests_in_flight=4096,
    max_response_budget_bytes=16 << 20,
    max_attempts=1,
    timeout_s=60.0,
    idle_timeout_s=300.0,
    held_up_after_s=float("inf"),
)
"""
Bytes bound what is asked, not numbers. The watcher knows better than a time limit whether a mirror
stalls, and who pauses is our disk.
"""
