"""
Windows: how many bytes may be in flight to one server, a fixed or a measured number. They depend only on the
times and sizes that callers pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs

from pipegrid.argument_checks import check_whole
from pipegrid.errors import UsageError

# Times are seconds of one monotonic clock; sizes are bytes.

_EIGHTHS = 9
"""
A message may be sent while less than the limit is in use, and may exceed the limit by one eighth. So every
message may have at least an eighth of the limit, and at most nine eighths of the limit are in memory.
"""


def left_for_message(limit_bytes: int, taken_bytes: int) -> int:
    """
    Return the largest size of the next message when ``taken_bytes`` of a limit are in use; it may be 0 or
    less.
    """
    return limit_bytes * _EIGHTHS // 8 - taken_bytes


@attrs.define(eq=False, repr=False)
class Sent:
    """One message in flight: what the window needs to know when the message is acknowledged."""

    size: int
    time: float
    # The state of the connection when the message left, as in a TCP rate sample.
    delivered_bytes: int = 0
    delivered_time: float = 0.0
    first_sent_time: float = 0.0
    app_limited: bool = False
    probe: int = 0
    # Whether the sender still has the message's bytes in memory; windows do not use this.
    held: bool = True


class Window(Protocol):
    """
    Decides how many bytes may be unacknowledged.

    A sender may send while less than ``limit_bytes`` are in flight, so that at most one message more than the
    limit is in flight.

    Attributes:
        gathers: whether a sender should prepare the next message while the window is full.
    """

    gathers: bool

    @property
    def limit_bytes(self) -> int:
        """The limit now; only calls of this object's methods change it."""

    @property
    def message_bytes(self) -> int:
        """
        The recommended largest size of a message, usually small enough that a full window does not wait for
        one message alone.
        """

    def sent(self, now: float, size: int) -> Sent:
        """Record that a message of ``size`` bytes is sent. Return the token with which to acknowledge it."""

    def acknowledged(self, now: float, token: Sent) -> None:
        """Record the acknowledgement of a message."""

    def abandoned(self, token: Sent) -> None:
        """Record that a message is no longer in flight, without measuring it."""


class FixedWindow:
    """A constant limit; 1 byte means one message at a time, without preparing the next one."""

    gathers = False

    def __init__(self, limit_bytes: int) -> None:
        """
        Raises:
            UsageError: the limit is less than 1.
        """
        if check_whole(limit_bytes, "a window") < 1:
            raise UsageError(f"a window of {limit_bytes} bytes sends nothing; give at least 1")
        self.limit_bytes = limit_bytes

    def __repr__(self) -> str:
        return f"FixedWindow({self.limit_bytes})"

    @property
    def message_bytes(self) -> int:
        return self.limit_bytes // 2

    def sent(self, now: float, size: int) -> Sent:
        return Sent(size, now)

    def acknowledged(self, now: float, token: Sent) -> None:
        """Do nothing, since the limit is constant."""

    def abandoned(self, token: Sent) -> None:
        """Do nothing, since the limit is constant."""


class SlidingMax:
    """
    The largest value of the last ``rounds`` rounds, without keeping every value; values expire only when a
    new value is noted.
    """

    def __init__(self, rounds: int) -> None:
        assert rounds > 0
        self._rounds = rounds
        self._entries: deque[tuple[int, float]] = deque()  # with falling values and rising rounds

    def note(self, round_number: int, value: float) -> None:
        """Note a value of a round; the round must not be earlier than that of the previous value."""
        entries = self._entries
        while entries and entries[-1][1] <= value:
            entries.pop()
        # One entry per round is enough, so there are at most as many entries as rounds.
        if not entries or entries[-1][0] < round_number:
            entries.append((round_number, value))
        while entries[0][0] <= round_number - self._rounds:
            entries.popleft()

    @property
    def value(self) -> float:
        """The largest value; 0.0 if there is none."""
        return self._entries[0][1] if self._entries else 0.0

    def clear(self) -> None:
        """Forget all values, as if nothing had been noted yet."""
        self._entries.clear()


# docs/explanation-flow-control.md, "The window", explains the numbers.

INITIAL_BYTES = 1 << 20
"""
The initial window. It sends a share of a one-segment file (at most 1 MiB) in one round trip. Ten servers use
10 MiB of a budget of 64 MiB. With a round trip of 100 ms it gives 84 Mbit/s from the first round trip on; on
a link of 10 Mbit/s it makes a queue of less than a second.
"""

FIRST_BYTES_PER_S = 16e6
LIGHT_MESSAGE_BYTES = 16 << 10
"""
If a round trip is known from a message of at most ``LIGHT_MESSAGE_BYTES``, the initial window is large enough
for ``FIRST_BYTES_PER_S``: if the round trip takes more than 65 ms, that is more than ``INITIAL_BYTES``. Ten
servers then fill a link of 1 Gbit/s and 200 ms two round trips earlier.
"""

FIRST_MESSAGE_BYTES = 384 << 10
"""
The size of the first message on a long path: more than a share's block of a whole segment with k = 3, so that
a share of one segment is still one message.
"""

LONG_PATH_MESSAGE_BYTES = 1 << 20
"""Size of later messages on a path that fills most of the memory; with 700 KB, servers had 25 % more work."""

SHORT_PATH_S = 0.010
"""A path with a shorter round trip is short: CPUs need more time than that for a large message."""

MESSAGE_S = 1.0
"""
Once the rate is known, a message is at most what the link carries in this time, or ``MINIMUM_BYTES`` if that
is more. With a near relay (a tunnel: 0.5 ms, 40 kB/s), large windows made larger messages and these made
larger windows, until one message took two minutes.
"""

MINIMUM_BYTES = 64 << 10
"""The smallest window; on a link of 1 Mbit/s it is a queue of half a second."""

MAXIMUM_BYTES = 5 << 20
"""The largest window; with an eighth more for each, ten servers use 56 MiB."""

STARTUP_GAIN = 2.0
"""The gain at the start: it doubles the window every round trip as long as the rate grows with the window."""

STEADY_GAIN = 1.5
"""
The gain after the start. It is above 1, since a faster link would otherwise never be noticed: the measured
rate can grow by this factor in a round trip. The bytes above the path's need are queued, so that the link is
busy even if acknowledgements come half a round trip late, as when a server writes to its disk.
"""

PLATEAU_GROWTH = 1.25
PLATEAU_ROUNDS = 3
"""The start ends after three round trips during which the rate grew by less than a quarter in total."""

RATE_ROUNDS = 10
"""For how many round trips the best delivery rate is remembered."""

RTT_LIFETIME_S = 10.0
RTT_LIFETIME_ROUNDS = 40
"""
How long the shortest round trip is remembered: the longer of the two times. Measuring it again costs at most
one idle round trip, so at most 1/40 of the throughput.
"""


class AutoWindow:
    """
    The smallest window that keeps the link busy, as far as that can be measured.

    The limit is gain × (delivery rate × round trip + one message). The rate is the best of the last ten round
    trips. The round trip is the shortest of the last ten seconds or more, less the time that the measured
    message took at the bottleneck.

    Attributes:
        state: ``startup`` (doubling), ``steady``, or ``probe`` (draining the queue for a round trip, to
            measure the path's own delay again).
    """

    gathers = True

    def __init__(
        self,
        minimum_bytes: int = MINIMUM_BYTES,
        maximum_bytes: int = MAXIMUM_BYTES,
        initial_bytes: int = INITIAL_BYTES,
        transport_rtt_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """
        Args:
            initial_bytes: the initial window; changed to the nearest bound if it is outside the bounds.
            transport_rtt_s: returns the shortest round trip that the transport has measured, or None. Such
                measurements exclude the time that messages wait for a connection or for the server's disk.

        Raises:
            UsageError: not 1 <= minimum_bytes <= maximum_bytes.
        """
        check_whole(minimum_bytes, "the least window")
        check_whole(maximum_bytes, "the largest window")
        check_whole(initial_bytes, "the first window")
        if not 1 <= minimum_bytes <= maximum_bytes:
            raise UsageError(
                f"a window between {minimum_bytes} and {maximum_bytes} bytes is impossible; "
                "give 1 <= minimum <= maximum"
            )
        self.minimum_bytes = minimum_bytes
        self.maximum_bytes = maximum_bytes
        self.initial_bytes = min(max(initial_bytes, minimum_bytes), maximum_bytes)
        self.limit_bytes = self.initial_bytes
        self.state = "startup"
        self.in_flight_bytes = 0
        self._transport_rtt_s = transport_rtt_s

        self._delivered_bytes = 0
        self._delivered_time = 0.0
        self._first_sent_time = 0.0
        self._space_since = float("-inf")
        self._app_limited_until: int | None = None

        self._round = 0
        self._round_ends_at_bytes = 0
        self._rates = SlidingMax(RATE_ROUNDS)
        self._rate_counts = False  # a large message has measured the rate
        self._sizes = SlidingMax(RATE_ROUNDS)

        self._plateau_rate = 0.0
        self._plateau_rounds = 0

        # The shortest round trip, without a queue; the size of the message that measured it, and when.
        self._rtt_s: float | None = None
        self._rtt_size = 0
        self._rtt_time = 0.0
        self._rtt_rate = 0.0  # the best rate since ``_rtt_time``
        # The number of the current probe, its limit in flight, and the previous probe's round trip.
        self._probe = 0
        self._probe_bytes = 0
        self._probe_rtt_s = float("inf")

    def __repr__(self) -> str:
        rtt_s = self.round_trip_s
        rtt = "unknown" if rtt_s is None else f"{rtt_s * 1000:.3g} ms"
        return (
            f"<AutoWindow {self.state}: limit {self.limit_bytes} B, rate {self.rate:.3g} B/s, "
            f"round trip {rtt}>"
        )

    @property
    def message_bytes(self) -> int:
        """
        Half of the limit; on a path so short that nothing is idle while a message is acknowledged, all of it.
        It is never more than the link carries in ``MESSAGE_S`` (or ``MINIMUM_BYTES``, if that is more), or
        than what remains of 9/8 of the maximum, which limits the memory of a sender.

        On a long path the first message is smaller, since the link is idle until a message for every server
        has been made. If the path alone fills most of the maximum, all messages are smaller, since a message
        is acknowledged only as a whole, and until then no new bytes can take the place of its bytes (with ten
        servers, 1 Gbit/s and 200 ms this gains 3 %).
        """
        rtt_s = self._light_rtt_s()
        short = rtt_s is not None and rtt_s < SHORT_PATH_S
        recommended = self.limit_bytes if short else self.limit_bytes // 2
        if self._rate_counts:
            recommended = min(recommended, max(MINIMUM_BYTES, int(MESSAGE_S * self.rate)))
        largest = min(recommended, left_for_message(self.maximum_bytes, self.in_flight_bytes))
        flight_bytes = self._known_flight_bytes(rtt_s)
        if self.in_flight_bytes == 0 and flight_bytes > INITIAL_BYTES:
            return min(largest, FIRST_MESSAGE_BYTES)
        if max(flight_bytes, self._path_bytes()) > self.maximum_bytes / 2:
            return min(largest, LONG_PATH_MESSAGE_BYTES)
        return largest

    @property
    def rate(self) -> float:
        """The delivery rate in bytes per second; 0.0 while unknown."""
        return self._rates.value

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip, without the time to transmit the message; None while unknown."""
        if self._rtt_s is None:
            return None
        return self._path_rtt_s(self._rtt_s, self._rtt_size)

    def sent(self, now: float, size: int) -> Sent:
        """Record a message; if it is sent late although the window was open, the sender is the bottleneck."""
        if self.in_flight_bytes == 0:
            self._delivered_time = self._first_sent_time = now
            # Only if nothing is in flight: acknowledgements of messages in flight say more than a guessed
            # rate.
            flight_bytes = min(self._known_flight_bytes(self._light_rtt_s()), self.maximum_bytes)
            self.limit_bytes = max(self.limit_bytes, flight_bytes)
        if self._sender_was_idle(now):
            # Samples do not count until everything that a slow sender has sent so far is acknowledged.
            self._app_limited_until = self._delivered_bytes + self.in_flight_bytes
        token = Sent(
            size,
            now,
            self._delivered_bytes,
            self._delivered_time,
            self._first_sent_time,
            self._app_limited_until is not None,
            self._probe if self.state == "probe" else 0,
        )
        self.in_flight_bytes += size
        self._sizes.note(self._round, size)
        self._space_since = now if self.in_flight_bytes < self.limit_bytes else float("inf")
        return token

    def joined(self, token: Sent, size: int) -> None:
        """
        Extend the last message by another message, which follows at once and is acknowledged together with
        it.
        """
        token.size += size
        self.in_flight_bytes += size
        self._sizes.note(self._round, token.size)
        if self.in_flight_bytes >= self.limit_bytes:
            self._space_since = float("inf")

    def acknowledged(self, now: float, token: Sent) -> None:
        """Measure an acknowledged message, and compute the window again."""
        self.in_flight_bytes -= token.size
        self._delivered_bytes += token.size
        self._delivered_time = now
        self._first_sent_time = token.time
        if self._app_limited_until is not None and self._delivered_bytes > self._app_limited_until:
            self._app_limited_until = None

        round_ended = self._count_round(token)
        self._sample_rate(now, token)
        self._rate_counts = self._rate_counts or token.size >= MINIMUM_BYTES
        self._sample_round_trip(now, token)
        if round_ended and self.state == "startup":
            self._look_for_plateau()
        self._resize(now)

    def abandoned(self, token: Sent) -> None:
        """Record that a message was given up."""
        self.in_flight_bytes -= token.size
        if self.state == "probe" and token.probe == self._probe:
            self.state = "steady"  # the next acknowledgement starts a probe again

    def _known_flight_bytes(self, light_rtt_s: float | None) -> int:
        """Return the best initial window if nothing but a round trip is known; else 0."""
        if light_rtt_s is None or self._plateau_rounds or self.state != "startup":
            return 0
        return int(FIRST_BYTES_PER_S * light_rtt_s)

    def _light_rtt_s(self) -> float | None:
        """
        Return the shortest round trip that a light message or the transport has measured; None if there is
        none.
        """
        seen = self._transport_rtt_s()
        if self._rtt_s is None or self._rtt_size > LIGHT_MESSAGE_BYTES:
            return seen
        return self._rtt_s if seen is None else min(seen, self._rtt_s)

    def _sender_was_idle(self, now: float) -> bool:
        # A sender counts as busy if it fills every gap within an eighth of a round trip.
        allowed_gap_s = (self._rtt_s or 0.0) / 8
        return self._delivered_bytes > 0 and now - self._space_since > allowed_gap_s

    def _count_round(self, token: Sent) -> bool:
        # Rounds in which the sender was idle are not counted, so no remembered values expire in them.
        if token.app_limited or token.delivered_bytes < self._round_ends_at_bytes:
            return False
        self._round += 1
        self._round_ends_at_bytes = self._delivered_bytes
        return True

    def _sample_rate(self, now: float, token: Sent) -> None:
        # The longer of the two spans counts, since acknowledgements that arrive together do not measure the
        # link.
        span_s = max(now - token.delivered_time, token.time - token.first_sent_time)
        if span_s <= 0:
            return
        rate = (self._delivered_bytes - token.delivered_bytes) / span_s
        if rate >= self.rate or not (token.app_limited or self.state == "probe" or token.probe):
            self._rates.note(self._round, rate)

    def _sample_round_trip(self, now: float, token: Sent) -> None:
        rtt_s = now - token.time
        if rtt_s <= 0:
            return
        if self._rtt_s is None or self._is_shorter((rtt_s, token.size)):
            self._set_round_trip(now, rtt_s, token.size)
        elif self.state == "probe" and token.probe == self._probe:
            self._judge_probe(now, token)
        elif self.state == "steady" and self._round_trip_is_outdated(now):
            self._start_probe(self._path_bytes() / 2)

    def _round_trip_is_outdated(self, now: float) -> bool:
        lifetime_s = max(RTT_LIFETIME_S, RTT_LIFETIME_ROUNDS * (self._rtt_s or 0.0))
        # If the path has become longer, a window for the previous, shorter path limits the rate.
        self._rtt_rate = max(self._rtt_rate, self.rate)
        return now - self._rtt_time > lifetime_s or self.rate < self._rtt_rate / 2

    def _set_round_trip(self, now: float, rtt_s: float, size: int) -> None:
        self._rtt_s, self._rtt_size, self._rtt_time = rtt_s, size, now
        self._rtt_rate = self.rate
        self._probe_rtt_s = float("inf")
        if self.state == "probe":
            self.state = "steady"

    def _is_shorter(self, sample: tuple[float, int]) -> bool:
        assert self._rtt_s is not None
        if self.state == "startup":
            # The rate is not known yet, so the time to transmit a message is not known, either.
            return sample[0] < self._rtt_s
        return self._path_rtt_s(*sample) < self._path_rtt_s(self._rtt_s, self._rtt_size)

    def _path_rtt_s(self, rtt_s: float, size: int) -> float:
        return max(0.0, rtt_s - size / self.rate) if self.rate else rtt_s

    def _path_bytes(self) -> float:
        """The link's bandwidth-delay product, as far as it is known."""
        return max(0.0, self.rate * (self._rtt_s or 0.0) - self._rtt_size)

    def _start_probe(self, limit_bytes: float) -> None:
        self.state = "probe"
        self._probe += 1
        # With a limit of one byte, the first message is sent when all others have been acknowledged.
        self._probe_bytes = max(1, int(limit_bytes))

    def _judge_probe(self, now: float, token: Sent) -> None:
        """
        Evaluate a message that was sent while little was in flight. Its round trip counts unless the message
        may have waited in a queue: on a link that has become slower, even half of the previous window makes a
        queue.
        """
        rtt_s = now - token.time
        longer = rtt_s * self.rate > 1.25 * (self._path_bytes() + token.size)
        if longer and rtt_s < 0.8 * self._probe_rtt_s:
            # With less in flight the round trip may be even shorter; once it no longer gets shorter, it is
            # that of the path.
            self._probe_rtt_s = rtt_s
            self._start_probe(self._probe_bytes / 2)
            return
        self._set_round_trip(now, rtt_s, token.size)
        if longer:
            # The known rate came from another link, or from a window that was too small for this link.
            self.state = "startup"
            self._plateau_rate = 0.0
            self._plateau_rounds = 0
            self._rates.clear()
            delivered_bytes = self._delivered_bytes - token.delivered_bytes
            self._rates.note(self._round, delivered_bytes / rtt_s)

    def _look_for_plateau(self) -> None:
        if self.rate >= self._plateau_rate * PLATEAU_GROWTH:
            self._plateau_rate = self.rate
            self._plateau_rounds = 0
            return
        self._plateau_rounds += 1
        if self._plateau_rounds >= PLATEAU_ROUNDS:
            self.state = "steady"

    def _resize(self, now: float) -> None:
        self.limit_bytes = self._choose_limit()
        if self.in_flight_bytes >= self.limit_bytes:
            self._space_since = float("inf")
        elif self._space_since == float("inf"):
            self._space_since = now

    def _choose_limit(self) -> int:
        if self._rtt_s is None or not self.rate:
            return self.limit_bytes
        if self.state == "probe":
            return self._probe_bytes
        gain = STARTUP_GAIN if self.state == "startup" else STEADY_GAIN
        limit = int(gain * (self._path_bytes() + self._sizes.value))
        if self.state == "startup" and not self._plateau_rounds:
            # While the rate still grows, the limit does not shrink.
            limit = max(limit, self.limit_bytes)
        return min(max(limit, self.minimum_bytes), self.maximum_bytes)
