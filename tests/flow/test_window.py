"""
The windows of pipegrid.flow.window and pipegrid.flow.window, on links that exist only as arithmetic.

A link is one bottleneck: a message arrives when all before it and it itself have been transmitted,
and its acknowledgement is back one round trip later.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.flow.window import (
    FIRST_MESSAGE_BYTES,
    INITIAL_BYTES,
    LONG_PATH_MESSAGE_BYTES,
    MAXIMUM_BYTES,
    MINIMUM_BYTES,
    AutoWindow,
    FixedWindow,
    Sent,
    Window,
)

KIB = 1 << 10
MIB = 1 << 20
UNBOUNDED = 1 << 40
MBIT = 125_000.0  # bytes per second


@attrs.define
class Link:
    """A bottleneck of so many bytes per second before a path of so long a round trip."""

    rate: float
    rtt_s: float

    @property
    def pipe_bytes(self) -> float:
        """The bandwidth-delay product."""
        return self.rate * self.rtt_s


@attrs.frozen
class Moment:
    """What is known right after an acknowledgement was answered with new messages."""

    time: float
    in_flight_bytes: int
    acknowledged_bytes: int


class Simulation:
    """A sender that always has something to send, a window, and a link that may change."""

    def __init__(self, window: Window, link: Link, sizes: Iterator[int]) -> None:
        self.window, self.link, self.sizes = window, link, sizes
        self.now = 0.0
        self.link_free = 0.0
        self.in_flight_bytes = 0
        self.acknowledged_bytes = 0
        self.underway: deque[tuple[float, Sent]] = deque()
        self.largest = 0
        self.bunch_s = 0.0  # acknowledgements come at multiples of this only

    def send(self, size: int) -> None:
        """Put one message on the link."""
        token = self.window.sent(self.now, size)
        self.link_free = max(self.link_free, self.now) + size / self.link.rate
        back = self.link_free + self.link.rtt_s
        if self.bunch_s:
            back = math.ceil(back / self.bunch_s) * self.bunch_s
        if self.underway:
            back = max(back, self.underway[-1][0])
        self.underway.append((back, token))
        self.in_flight_bytes += size
        self.largest = max(self.largest, size)

    def acknowledge(self) -> None:
        """Go to the next acknowledgement."""
        self.now, token = self.underway.popleft()
        self.in_flight_bytes -= token.size
        self.acknowledged_bytes += token.size
        self.window.acknowledged(self.now, token)

    def run(self, until: Callable[[Simulation], bool]) -> list[Moment]:
        """Transfer as fast as the window allows, until told to stop."""
        moments = []
        while True:
            while self.in_flight_bytes < self.window.limit_bytes:
                self.send(next(self.sizes))
            moments.append(Moment(self.now, self.in_flight_bytes, self.acknowledged_bytes))
            if until(self):
                return moments
            self.acknowledge()

    def run_for(self, seconds: float) -> list[Moment]:
        """Transfer for so long."""
        end = self.now + seconds
        return self.run(lambda self: self.now >= end)

    def run_messages(self, count: int) -> list[Moment]:
        """Transfer until so many acknowledgements have come."""
        left = iter(range(count))
        return self.run(lambda self: next(left, None) is None)


def throughput(moments: list[Moment]) -> float:
    """Bytes per second between the first moment and the last."""
    first, last = moments[0], moments[-1]
    return (last.acknowledged_bytes - first.acknowledged_bytes) / (last.time - first.time)


def constant(size: int) -> Iterator[int]:
    """Messages of one size."""
    while True:
        yield size


def liked(window: Window) -> Iterator[int]:
    """Messages as large as the window likes them."""
    while True:
        yield max(64 * KIB, window.message_bytes)


def mixed(seed: int = 1) -> Iterator[int]:
    """Messages from hash chains to whole segments, in any order."""
    choose = random.Random(seed)
    while True:
        yield choose.choice((200, 4 * KIB, 64 * KIB, MIB))


class KneeTests(SynchronousTestCase):
    """Wherever the link's knee is, the window finds it and stays there."""

    def check(self, link: Link, sizes: Iterator[int], average: float) -> None:
        where = f"{link}, messages of about {average:.0f} bytes"
        # Ninety round trips: the last sixty hold two probes at most, where those are costly.
        count = int(max(300, 90 * link.pipe_bytes / average))
        simulation = Simulation(AutoWindow(maximum_bytes=UNBOUNDED), link, sizes)
        moments = simulation.run_messages(count)
        steady = moments[len(moments) // 3 :]
        pipe, largest = link.pipe_bytes, simulation.largest

        # No window, however large, beats the link itself.
        self.assertGreater(throughput(steady), 0.95 * link.rate, where)
        self.assertLessEqual(
            max(moment.in_flight_bytes for moment in steady), 1.5 * pipe + 2.6 * largest, where
        )
        self.assertLessEqual(
            max(moment.in_flight_bytes for moment in moments),
            max(2 * pipe + 3.1 * largest, INITIAL_BYTES + largest),
            where,
        )

    def test_finds_the_knee_of_any_link(self) -> None:
        """1 Mbit/s to 10 Gbit/s, 0.1 to 300 ms: 95 % of the link, one pipe and a half in flight."""
        for megabits in (1, 10, 100, 1000, 10_000):
            for rtt_s in (0.0001, 0.001, 0.01, 0.1, 0.3):
                link = Link(megabits * MBIT, rtt_s)
                if link.pipe_bytes < 20 * MIB:
                    self.check(link, constant(64 * KIB), 64 * KIB)
                self.check(link, constant(MIB), MIB)
                self.check(link, mixed(), 278 * KIB)

    def test_measuring_anew_costs_little(self) -> None:
        """A minute's transfer over a long path, with all its probes, still fills 95 % of it."""
        for size in (64 * KIB, MIB):
            for rtt_s in (0.02, 0.3):
                link = Link(100 * MBIT, rtt_s)
                simulation = Simulation(AutoWindow(maximum_bytes=UNBOUNDED), link, constant(size))
                simulation.run_for(20 * rtt_s)
                moments = simulation.run_for(60)
                self.assertGreater(throughput(moments), 0.95 * link.rate, f"{link}, {size}")

    def test_late_acknowledgements_do_not_starve_the_link(self) -> None:
        """Answers that come up to half a round trip late, in bunches, cost less than 5 %."""
        link = Link(100 * MBIT, 0.1)
        simulation = Simulation(AutoWindow(maximum_bytes=UNBOUNDED), link, constant(64 * KIB))
        simulation.bunch_s = 0.05
        simulation.run_for(5)
        moments = simulation.run_for(30)
        self.assertGreater(throughput(moments), 0.95 * link.rate)
        self.assertLess(
            max(moment.in_flight_bytes for moment in moments),
            1.5 * link.rate * (link.rtt_s + 0.05) + 20 * 64 * KIB,
        )

    def test_a_window_much_smaller_is_slower(self) -> None:
        """The knee is real: a third of the window that was found loses much of the throughput."""
        link = Link(100 * MBIT, 0.1)
        window = AutoWindow(maximum_bytes=UNBOUNDED)
        Simulation(window, link, constant(64 * KIB)).run_for(5)
        third = Simulation(FixedWindow(window.limit_bytes // 3), link, constant(64 * KIB))
        self.assertLess(throughput(third.run_for(5)), 0.75 * link.rate)

    def test_starts_fast(self) -> None:
        """From the first flight to a pipe 36 times as large in about eight round trips."""
        link = Link(1000 * MBIT, 0.3)
        simulation = Simulation(AutoWindow(maximum_bytes=UNBOUNDED), link, constant(64 * KIB))
        simulation.run(lambda s: s.in_flight_bytes >= link.pipe_bytes)
        self.assertLess(simulation.now, 8 * link.rtt_s)

    def test_the_first_flight_takes_a_share_of_one_segment_whole(self) -> None:
        """A small file needs no window to open: all its writes may leave at once."""
        simulation = Simulation(AutoWindow(), Link(10 * MBIT, 0.1), constant(MIB // 4))
        (start,) = simulation.run_messages(0)
        self.assertEqual(start.in_flight_bytes, MIB)

    def test_the_first_flight_follows_a_long_round_trip(self) -> None:
        """After a light message over 200 ms, 3.2 MB leave at once; over 50 ms no more than ever."""
        for rtt_s, expected in ((0.2, 3_200_000), (0.05, INITIAL_BYTES), (9.0, MAXIMUM_BYTES)):
            window = AutoWindow()
            window.acknowledged(rtt_s, window.sent(0.0, 300))
            self.assertEqual(window.limit_bytes, INITIAL_BYTES)
            window.sent(rtt_s, 64 * KIB)
            self.assertAlmostEqual(window.limit_bytes, expected, delta=1)

    def test_a_large_message_says_nothing_of_the_path(self) -> None:
        """Eight seconds for a MiB may be a slow line as well as a long one."""
        window = AutoWindow()
        window.acknowledged(8.0, window.sent(0.0, MIB))
        window.sent(8.0, 64 * KIB)
        self.assertLess(window.limit_bytes, 3 * MIB)

    def test_a_first_flight_too_large_for_the_link_is_soon_corrected(self) -> None:
        """On a slow line the queue that the first flight made is let drain after a round or two."""
        simulation = Simulation(AutoWindow(), Link(10 * MBIT, 0.05), constant(64 * KIB))
        simulation.run_for(2.5)
        self.assertLess(simulation.in_flight_bytes, INITIAL_BYTES / 3)

    def test_messages_are_smaller_where_the_path_takes_most_of_the_memory(self) -> None:
        """Half of the window as a rule; 384 KiB at first over a long path, and 1 MiB where it fills that."""
        for rtt_s, first, later in (
            (0.0005, MIB, MIB),
            (0.02, MIB // 2, MIB // 2),
            (0.1, FIRST_MESSAGE_BYTES, 800_000),
            (0.2, FIRST_MESSAGE_BYTES, LONG_PATH_MESSAGE_BYTES),
        ):
            window = AutoWindow(maximum_bytes=4_000_000)
            window.acknowledged(rtt_s, window.sent(0.0, 300))
            self.assertAlmostEqual(window.message_bytes, first, delta=1)
            window.sent(rtt_s, 64 * KIB)
            self.assertAlmostEqual(window.message_bytes, later, delta=1)

    def test_what_the_transport_has_seen_counts_too(self) -> None:
        """A first message that waited for its connection, or for the disk, does not hide a shorter path."""
        for seen_s, expected in ((None, MAXIMUM_BYTES), (0.2, 3_200_000), (0.1, 1_600_000)):
            window = AutoWindow(transport_rtt_s=partial(float, seen_s) if seen_s else lambda: None)
            window.acknowledged(0.8, window.sent(0.0, 300))
            window.sent(0.8, 64 * KIB)
            self.assertAlmostEqual(window.limit_bytes, expected, delta=1)
        window = AutoWindow(transport_rtt_s=lambda: 0.002)
        self.assertEqual(window.message_bytes, MIB)
        window.acknowledged(0.04, window.sent(0.0, MIB))
        self.assertEqual(window.message_bytes, window.limit_bytes)

    def test_messages_stay_small_where_the_measured_path_takes_most_of_the_memory(self) -> None:
        """Also when the start is long over."""
        for mbit, small in ((1600, True), (400, False)):
            window = AutoWindow(maximum_bytes=16_000_000)
            simulation = Simulation(window, Link(mbit * MBIT, 0.06), constant(64 * KIB))
            simulation.run_for(5)
            self.assertEqual(window.state, "steady")
            self.assertEqual(window.message_bytes == LONG_PATH_MESSAGE_BYTES, small, window)

    def test_a_slow_line_behind_a_near_relay(self) -> None:
        """Messages stay small, so that answers come; however long the put takes."""
        window = AutoWindow(transport_rtt_s=lambda: 0.0005)
        simulation = Simulation(window, Link(40_000, 0.01), liked(window))
        moments = simulation.run_for(600)
        late = [moment for moment in moments if moment.time > 60]
        gaps_s = [after.time - before.time for before, after in pairwise(late)]
        self.assertLess(max(gaps_s), 2)
        self.assertLess(max(moment.in_flight_bytes for moment in late), 2.5 * MIB)
        self.assertLess(moments[-1].in_flight_bytes, 200 * KIB)
        self.assertGreater(throughput(late), 0.95 * 40_000)

    def test_small_messages_say_nothing_of_the_rate(self) -> None:
        """After some files of a few bytes a large one's messages are as large as ever."""
        window = AutoWindow(transport_rtt_s=lambda: 0.0005)
        window.acknowledged(0.1, window.sent(0.0, 1000))
        self.assertEqual(window.message_bytes, MIB)
        window.acknowledged(0.6, window.sent(0.1, 70_000))
        self.assertAlmostEqual(window.message_bytes, 140_000, delta=1)

    def test_a_bunch_of_acknowledgements_is_not_a_fast_link(self) -> None:
        """A message sent amid a bunch of late answers does not count the others as its own time's."""
        window = AutoWindow()
        tokens = [window.sent(number / 100, 1000) for number in range(10)]
        window.acknowledged(1.0, tokens[0])
        amid = window.sent(1.0, 1000)
        for token in tokens[1:]:
            window.acknowledged(1.0, token)
        window.acknowledged(1.1, amid)
        self.assertAlmostEqual(window.rate, 10_000)


class BoundsTests(SynchronousTestCase):
    """The window stays within what the caller allows."""

    def test_never_above_the_maximum(self) -> None:
        """On a pipe larger than the memory budget, the budget wins."""
        window = AutoWindow(maximum_bytes=4 * MIB)
        simulation = Simulation(window, Link(10_000 * MBIT, 0.1), constant(64 * KIB))
        moments = simulation.run_for(5)
        self.assertLess(max(moment.in_flight_bytes for moment in moments), 4 * MIB + 64 * KIB)
        self.assertEqual(window.limit_bytes, 4 * MIB)

    def test_never_below_the_minimum_but_to_measure(self) -> None:
        """Tiny messages over a short path need less than the minimum, and get it all the same."""
        window = AutoWindow()
        simulation = Simulation(window, Link(100 * MBIT, 0.0001), constant(200))
        simulation.run_messages(30_000)
        self.assertEqual((window.state, window.limit_bytes), ("steady", MINIMUM_BYTES))

    def test_the_first_flight_obeys_the_bounds(self) -> None:
        """A small budget is kept from the start."""
        self.assertEqual(AutoWindow(maximum_bytes=100_000).limit_bytes, 100_000)
        self.assertEqual(AutoWindow(2 * MIB, 4 * MIB).limit_bytes, 2 * MIB)

    def test_impossible_bounds_are_refused(self) -> None:
        """The caller hears at once."""
        for minimum, maximum in ((0, 10), (20, 10)):
            with self.assertRaises(UsageError):
                AutoWindow(minimum, maximum)

    def test_acknowledgements_in_no_time_do_no_harm(self) -> None:
        """Where the clock stands still there is nothing to measure, and the window stays."""
        window = AutoWindow()
        for _ in range(100):
            window.acknowledged(5.0, window.sent(5.0, 1000))
        self.assertEqual(window.limit_bytes, INITIAL_BYTES)
        self.assertIn("round trip unknown", repr(window))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 1 << 32))
    def test_any_course_of_events_keeps_the_bounds(self, seed: int) -> None:
        """Random times, sizes, order of acknowledgements and losses: bounded, and books balance."""
        choose = random.Random(seed)
        window = AutoWindow(1000, 100_000)
        now, underway = 0.0, list[Sent]()
        for _ in range(400):
            now += choose.choice((0.0, 0.0001, 0.1, 20.0)) * choose.random()
            if underway and choose.random() < 0.5:
                token = underway.pop(choose.randrange(len(underway)))
                if choose.random() < 0.1:
                    window.abandoned(token)
                else:
                    window.acknowledged(now, token)
            elif window.in_flight_bytes < window.limit_bytes:
                underway.append(window.sent(now, choose.randrange(1, 20_000)))
            self.assertEqual(window.in_flight_bytes, sum(token.size for token in underway))
            self.assertLessEqual(window.limit_bytes, 100_000)
            self.assertGreaterEqual(window.limit_bytes, 1 if window.state == "probe" else 1000)


class ChangeTests(SynchronousTestCase):
    """Links change under a transfer."""

    def follow(self, before: Link, after: Link, seconds: float, phase: float = 3.0) -> None:
        """Transfer over one link, then for ``seconds`` over the other, and see it settled there."""
        simulation = Simulation(AutoWindow(maximum_bytes=UNBOUNDED), before, constant(64 * KIB))
        simulation.run_for(phase)
        simulation.link = after
        simulation.run_for(seconds)
        moments = simulation.run_for(3)
        where = f"from {before} to {after} after {phase} s"
        self.assertGreater(throughput(moments), 0.9 * after.rate, where)
        self.assertLess(
            max(moment.in_flight_bytes for moment in moments),
            2 * after.pipe_bytes + 3.1 * 64 * KIB,
            where,
        )

    def test_follows_the_rate_up(self) -> None:
        """Ten times the bandwidth is used within two seconds."""
        self.follow(Link(10 * MBIT, 0.05), Link(100 * MBIT, 0.05), 2)

    def test_follows_the_rate_down(self) -> None:
        """The queue that the old window makes is gone soon, whenever a probe happens to fall."""
        for phase in (3.0, 9.8, 10.0, 10.2, 10.5, 11.9):
            self.follow(Link(100 * MBIT, 0.05), Link(10 * MBIT, 0.05), 10, phase)
            self.follow(Link(1000 * MBIT, 0.05), Link(100 * MBIT, 0.05), 10, phase)

    def test_follows_a_longer_path(self) -> None:
        """A window for 10 ms does not starve a path of 100 ms."""
        self.follow(Link(100 * MBIT, 0.01), Link(100 * MBIT, 0.1), 5)

    def test_follows_a_shorter_path(self) -> None:
        """Every probe at least halves what is too much."""
        self.follow(Link(100 * MBIT, 0.1), Link(100 * MBIT, 0.01), 25)


class PoorSenderTests(SynchronousTestCase):
    """A sender with little to send learns nothing wrong."""

    def test_thin_traffic_does_not_lower_the_estimate(self) -> None:
        """After a minute of one small message each 100 ms, the next burst finds the window open."""
        link = Link(100 * MBIT, 0.05)
        window = AutoWindow(maximum_bytes=UNBOUNDED)
        simulation = Simulation(window, link, constant(64 * KIB))
        simulation.run_for(3)
        while simulation.underway:
            simulation.acknowledge()
        rate = window.rate
        for _ in range(600):
            simulation.now += 0.1
            simulation.send(1000)
            simulation.acknowledge()
        self.assertEqual(window.rate, rate)
        moments = simulation.run_for(1)
        self.assertGreater(throughput(moments[1:]), 0.8 * link.rate)

    def test_a_slow_sender_is_not_taken_for_a_slow_link(self) -> None:
        """Messages of a tenth of the link's rate leave the window as wide as the start found it."""
        link = Link(100 * MBIT, 0.05)
        window = AutoWindow(maximum_bytes=UNBOUNDED)
        simulation = Simulation(window, link, constant(64 * KIB))
        simulation.run_for(3)
        while simulation.underway:
            simulation.acknowledge()
        rate = window.rate
        for _ in range(1000):
            simulation.send(64 * KIB)
            next_time = simulation.now + 64 * KIB / (link.rate / 10)
            while simulation.underway and simulation.underway[0][0] <= next_time:
                simulation.acknowledge()
            simulation.now = next_time
        self.assertAlmostEqual(window.rate / rate, 1, places=6)
