"""Streams that bring next to nothing are told from slow lines, and from those that we hold back."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.time_limits import SlowStreamDetector, StreamRates

SILENCE_S = 60.0


class WorthTests(SynchronousTestCase):
    """Streams of one operation, on a clock of their own."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.streams = StreamRates(self.clock, SILENCE_S)

    def run_for(self, seconds: int, rates: dict[SlowStreamDetector, int]) -> None:
        """Have each stream bring so many bytes a second."""
        for _ in range(seconds):
            self.clock.advance(1)
            for stream, rate in rates.items():
                stream.came(rate)

    def test_next_to_nothing(self) -> None:
        """It has as long as silence may last, from its first byte on, if another is twenty times as fast."""
        fast, slow = SlowStreamDetector(self.streams), SlowStreamDetector(self.streams)
        self.run_for(100, {fast: 2000})
        self.assertTrue(slow.is_fast_enough(), "it may wait behind others")
        self.run_for(60, {fast: 2000, slow: 50})
        self.assertTrue(slow.is_fast_enough())
        self.run_for(1, {fast: 2000, slow: 50})
        self.assertTrue(fast.is_fast_enough())
        self.assertFalse(slow.is_fast_enough())

    def test_slow_lines(self) -> None:
        """What is no slower than a modem of old, or than a twentieth of the others, is waited for."""
        for others, rate in ((10**8, 1100), (800, 45)):
            self.setUp()
            fast, slow = SlowStreamDetector(self.streams), SlowStreamDetector(self.streams)
            self.run_for(599, {fast: others, slow: rate})
            self.assertTrue(slow.is_fast_enough(), (others, rate))

    def test_a_burst_first(self) -> None:
        """One that brings much at once, and then next to nothing, is compared with itself."""
        stream = SlowStreamDetector(self.streams)
        stream.came(50_000)  # 5000 bytes a second
        self.run_for(199, {stream: 1})
        self.assertTrue(stream.is_fast_enough())
        self.run_for(2, {stream: 1})
        self.assertFalse(stream.is_fast_enough())

    def test_nobody_to_compare_with(self) -> None:
        """It has ten times as long, and then a hundred bytes a second are enough."""
        for rate, enough in ((99, False), (101, True)):
            self.setUp()
            stream = SlowStreamDetector(self.streams)
            self.run_for(600, {stream: rate})
            self.assertTrue(stream.is_fast_enough(), rate)
            self.run_for(100, {stream: rate})
            self.assertEqual(stream.is_fast_enough(), enough, rate)

    def test_held_back(self) -> None:
        """Its time stands still while we want no more."""
        fast, slow = SlowStreamDetector(self.streams), SlowStreamDetector(self.streams)
        slow.came(30_000)
        self.run_for(10, {fast: 10**6})
        slow.hold()
        self.run_for(1000, {fast: 10**6})
        self.assertEqual(slow.took_s, 10)
        self.assertTrue(slow.is_fast_enough())
        slow.go_on()
        self.run_for(100, {fast: 10**6})
        self.assertEqual(slow.took_s, 110)
        self.assertFalse(slow.is_fast_enough())
