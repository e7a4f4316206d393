"""Time limits of calls and streams: how long a server may be silent, and how slow it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.errors import ServerTimeout
from pipegrid.transfer.peers import Peer

# How long a server may be silent to one transfer while it is busy with other transfers.
#
# On a slow link a transfer's request may wait for the requests of other transfers longer than the time limit
# for silence. So the server's activity for any transfer counts for all. But a server that responds to
# everything except one request must not delay the sender of this request forever: activity for other
# transfers counts only for a limited time.

MOST_TIMES = 10
"""Maximum silence of an active server to one transfer, as a multiple of the time limit for silence."""


def last_activity_s(
    own_s: float, server_s: float, silence_s: float, times: int = MOST_TIMES
) -> float:
    """
    Return the time of the server's last activity that counts for one transfer, in seconds of the caller's
    clock.

    Args:
        own_s: time of the last activity for this transfer, or when its request was sent.
        server_s: time of the last activity for any transfer.
        silence_s: time limit for silence.
        times: an active server may be silent to this transfer for this many times ``silence_s``.
    """
    return max(own_s, min(server_s, own_s + (times - 1) * silence_s))


# Detecting streams that transfer almost nothing while other streams make progress.
#
# A server that sends a byte now and then is never silent, but its stream would take years: one such server
# was enough to keep every verification, and every repair, from ending. So a stream must also have a minimum
# rate.
#
# A slow link is not the server's fault, and all streams share the link. So each stream is compared with the
# others: it is given up if it has lasted as long as the time limit for silence, and its average rate is less
# than 1000 bytes per second *and* less than a twentieth of the best rate of the fastest stream. Even if no
# other stream is faster, a stream of less than 100 bytes per second is given up after ten times the time
# limit for silence.
#
# The time of a stream begins with its first byte, since before that it may wait for other streams; the time
# during which the client pauses the stream does not count.

SLOWEST_BYTES_PER_S = 1000
"""Minimum rate of a stream when others are faster; the same as in ``server.gbs.http_connection``."""


SLOWER_TIMES = 20


SLOWEST_OF_ALL_BYTES_PER_S = 100


_LEAST_S = 10.0
"""Shortest time for which a rate is computed: on a slow link the first bytes of a stream say little."""


class StreamRates:
    """
    The best rate of the streams of one operation.

    Args:
        silence_s: a server without activity for this many seconds is given up.

    Attributes:
        best_bytes_per_s: the best rate of the fastest stream.
    """

    def __init__(self, clock: IReactorTime, silence_s: float) -> None:
        self.clock = clock
        self.silence_s = silence_s
        self.best_bytes_per_s = 0.0


class SlowStreamDetector:
    """
    Decides whether one stream is too slow.

    Attributes:
        came_bytes: bytes received.
    """

    def __init__(self, streams: StreamRates) -> None:
        self.came_bytes = 0
        self._streams = streams
        self._began_s: float | None = None
        self._held_since_s: float | None = None
        self._held_s = 0.0

    def came(self, size: int) -> None:
        """Record that this number of bytes has arrived."""
        if self._began_s is None:
            self._began_s = self._streams.clock.seconds()
        self.came_bytes += size
        self._streams.best_bytes_per_s = max(self._streams.best_bytes_per_s, self._bytes_per_s())

    def hold(self) -> None:
        """Stop counting the stream's time, while the client pauses the stream."""
        self._held_since_s = self._streams.clock.seconds()

    def go_on(self) -> None:
        if self._held_since_s is not None:
            self._held_s += self._streams.clock.seconds() - self._held_since_s
            self._held_since_s = None

    @property
    def took_s(self) -> float:
        """Seconds since the stream's first byte, without pauses."""
        if self._began_s is None:
            return 0.0
        now_s = self._streams.clock.seconds() if self._held_since_s is None else self._held_since_s
        return now_s - self._began_s - self._held_s

    def is_fast_enough(self) -> bool:
        """Return whether the stream is fast enough to wait for it."""
        rate, silence_s = self._bytes_per_s(), self._streams.silence_s
        if self.took_s >= MOST_TIMES * silence_s and rate < SLOWEST_OF_ALL_BYTES_PER_S:
            return False
        slow = rate < min(SLOWEST_BYTES_PER_S, self._streams.best_bytes_per_s / SLOWER_TIMES)
        return self.took_s < silence_s or not slow

    def _bytes_per_s(self) -> float:
        return self.came_bytes / max(_LEAST_S, self.took_s)


# Giving up a server that was silent for too long during one call.

T = TypeVar("T")


class CallTimeout:
    """
    Time limit for one call.

    Args:
        silence_s: maximum time without activity of the server, in seconds. Activity for other calls counts,
            too, but for at most ``MOST_TIMES`` times as long.
        more_s: called when ``silence_s`` is over; returns how many more seconds to wait, because of the
            amount of data.
        worth: detects whether the stream that the call transfers is too slow; None: the call is no stream.
    """

    def __init__(
        self,
        clock: IReactorTime,
        silence_s: float,
        more_s: Callable[[], float] = lambda: 0.0,
        worth: SlowStreamDetector | None = None,
    ) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._more_s = more_s
        self._worth = worth
        self._last_activity = clock.seconds()
        self._over = False
        self._timer: IDelayedCall | None = None

    def progress(self) -> None:
        """Restart the time limit, since the server has shown activity."""
        self._last_activity = self._clock.seconds()

    async def answer(self, call: Deferred[T], peer: Peer) -> T:
        """
        Return the call's result.

        Args:
            peer: the server that was called.

        Raises:
            ServerTimeout: the server was silent for too long, or its stream too slow; the call was cancelled.
        """
        self._timer = self._clock.callLater(self._silence_s, self._look, call, peer)
        try:
            return await call
        except CancelledError:
            if not self._over:
                raise
            raise ServerTimeout(f"{peer.name} {self._what_it_did()}", peer.name, True) from None
        finally:
            if self._timer is not None and self._timer.active():
                self._timer.cancel()

    def _look(self, call: Deferred[Any], peer: Peer) -> None:
        sign_s = last_activity_s(self._last_activity, peer.last_activity, self._silence_s)
        left_s = sign_s + self._silence_s + self._more_s() - self._clock.seconds()
        if left_s > 0 and (self._worth is None or self._worth.is_fast_enough()):
            self._timer = self._clock.callLater(left_s, self._look, call, peer)
        else:
            self._over = True
            call.cancel()

    def _what_it_did(self) -> str:
        worth = self._worth
        if worth is None or worth.is_fast_enough():
            return f"was silent for {self._silence_s:g} s"
        return f"sent no more than {worth.came_bytes} bytes in {worth.took_s:.0f} s"
