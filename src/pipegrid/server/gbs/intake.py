"""
What was read and not parsed yet, and how much is read, and parsed, at a time.

httptools cannot be stopped in the middle of what it was fed. So it is fed 16 KiB at most, or as much of a
body as is sure to come; what it was not fed waits here, at most what the transport had read already.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pipegrid.reactor.sockets import move_much
from pipegrid.server.gbs.order import RequestOrder

FEED_BYTES = 16384
STRANGER_FEED_BYTES = 1024
"""
The same before the secret was shown: a request of 18 bytes becomes a kilobyte of memory, and few are
answered.
"""
STRANGER_RECEIVE_BYTES = 4 * 1024
RECEIVE_BYTES = 64 * 1024
"""Read from the socket at a time; a thousand clients that take no answers may each have as much waiting."""
BULK_RECEIVE_BYTES = 128 * 1024
"""
The same in the middle of a long body, which goes to the disk as it comes. With 512 KiB, which leaves the
processor's cache between two steps, a megabyte cost half as much time again.
"""


class Intake:
    """
    Of one connection.

    Attributes:
        waiting: what was read and not parsed.
        least_bytes: that may be parsed at once, whatever it is.
        paused: nothing is read for now.
    """

    __slots__ = ("_bulk", "_order", "_transport", "least_bytes", "paused", "waiting")

    def __init__(self, order: RequestOrder) -> None:
        self._order = order
        self._transport: Any = None
        self._bulk = False
        self.waiting: deque[bytes] = deque()
        self.least_bytes = STRANGER_FEED_BYTES
        self.paused = False

    def attach(self, transport: Any) -> None:
        """Read from it, which is a stranger's."""
        self._transport = transport
        move_much(transport, STRANGER_RECEIVE_BYTES)

    def become_known(self) -> bool:
        """The secret was shown; returns whether that is news."""
        if self.least_bytes == FEED_BYTES:
            return False
        self.least_bytes = FEED_BYTES
        move_much(self._transport, RECEIVE_BYTES)
        return True

    def body_begins(self) -> None:
        """Read as much at a time as is good for it."""
        if (self._order.body_left > RECEIVE_BYTES) != self._bulk:
            self._bulk = not self._bulk
            move_much(self._transport, BULK_RECEIVE_BYTES if self._bulk else RECEIVE_BYTES)

    def next_piece(self) -> bytes:
        """Return what the parser may have next: a body, however long, is one event."""
        data, limit = self.waiting.popleft(), self.least_bytes
        if self._order.receiver is not None:
            limit = max(limit, self._order.body_left)
        if len(data) > limit:
            self.waiting.appendleft(data[limit:])
            data = data[:limit]
        return data

    def read_on(self, wanted: bool) -> None:
        """Read, or read nothing until it is said again."""
        if wanted == self.paused:
            self.paused = not wanted
            if wanted:
                self._transport.resumeProducing()
            else:
                self._transport.pauseProducing()
