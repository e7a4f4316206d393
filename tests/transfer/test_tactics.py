"""The decisions of a get: what is asked of whom, and when others are called."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.transfer.get.get_history import MANY, GetHistory
from pipegrid.transfer.get.hedge_policy import (
    EVERYTHING,
    HEDGES,
    NARROW_PROBE_BYTES,
    PROBE_BYTES,
    RACE_BYTES,
    Ask,
    ReadPolicy,
)
from pipegrid.transfer.settings import DownloadSettings

SETTINGS = DownloadSettings(hedge_s=1.0, silence_s=60.0)
START_S = 50.0
SEGMENT = 131072


@attrs.define
class Share:
    """A share that is read."""

    share_number: int
    received_bytes: int = 0
    period_bytes: int = 0
    waiting: bool = True
    paused: bool = False


class TacticsTests(SynchronousTestCase):
    """Of ten shares three are needed."""

    def make(
        self, size: int, earlier: GetHistory | None = None, found_bytes: int = 0, **settings: int
    ) -> ReadPolicy:
        """Begin to get a whole file."""
        self.geometry = Params(3, 10, SEGMENT).geometry(size)
        return ReadPolicy(
            SETTINGS._replace(**settings),
            earlier or GetHistory(),
            self.geometry,
            size,
            found_bytes,
            START_S,
        )

    def asks(self, tactics: ReadPolicy, shares: list[Share], now: float = START_S) -> list[Ask]:
        """Say what is asked now."""
        return list(tactics.asks(now, shares, self.geometry, (0, self.geometry.num_segments)))

    def test_a_small_file_is_raced_for_with_whole_shares(self) -> None:
        """One share more than needed, and what it is asked for is a block."""
        tactics = self.make(1000)
        self.assertEqual(tactics.wanted_extra, 1)
        asks = self.asks(tactics, [Share(number) for number in range(4)])
        self.assertEqual(
            asks,
            [Ask(number, EVERYTHING) for number in range(3)]
            + [Ask(3, 0, self.geometry.block_bytes)],
        )

    def test_a_large_one_with_probes(self) -> None:
        """Two servers divide the probe, which grows with the range."""
        tactics = self.make(100 * SEGMENT)
        self.assertEqual(tactics.wanted_extra, 2)
        probe = max(PROBE_BYTES, 100 * SEGMENT // 64) // HEDGES
        asks = self.asks(tactics, [Share(number) for number in range(5)])
        self.assertEqual(asks[3:], [Ask(3, 0, probe), Ask(4, 0, probe)])

    def test_a_narrow_line(self) -> None:
        """Known to take longer for a share than a round trip: even one segment gets probes, small ones."""
        earlier = GetHistory()
        earlier.line.note_response(0.1)
        earlier.line.note_bytes(1 << 20, 100.0)
        tactics = self.make(SEGMENT, earlier)
        asks = self.asks(tactics, [Share(number) for number in range(5)])
        self.assertEqual(asks[4], Ask(4, 0, NARROW_PROBE_BYTES // HEDGES))

    def test_after_the_race(self) -> None:
        """Who is in the first segment goes on, and no more are wanted."""
        tactics = self.make(100 * SEGMENT)
        self.assertEqual(tactics.race.end([0, 1, 4]), {0, 1, 4})
        self.assertEqual(tactics.wanted_extra, 0)
        asks = self.asks(tactics, [Share(number) for number in (0, 1, 4)])
        self.assertEqual({ask.ahead_bytes for ask in asks}, {EVERYTHING})

    def test_one_that_falters(self) -> None:
        """Another joins, and is asked for a little ahead; on a line that creeps evenly nobody does."""
        tactics = self.make(100 * SEGMENT)
        tactics.race.end([0, 1, 2])
        shares = [Share(number, period_bytes=1000) for number in range(3)]
        self.assertFalse(tactics.looks_for_laggards(START_S + 0.9, shares))
        self.assertTrue(tactics.looks_for_laggards(START_S + 1.0, shares))
        self.assertEqual(tactics.wanted_extra, 0)
        shares[1].period_bytes = 500
        self.assertTrue(tactics.looks_for_laggards(START_S + 2.0, shares))
        self.assertEqual(tactics.wanted_extra, 1)
        asks = self.asks(tactics, [*shares, Share(7)])
        self.assertEqual(asks[3], Ask(7, RACE_BYTES))
        # The next look is not before twice as long.
        self.assertFalse(tactics.looks_for_laggards(START_S + 3.9, shares))

    def test_waiting(self) -> None:
        """For the sooner of both clocks; our own fault does not count."""
        tactics = self.make(1000)
        self.assertEqual(tactics.wait_s(START_S), 1.0)
        tactics.timeouts.reader_paused(START_S + 30)
        self.assertEqual(tactics.wait_s(START_S + 30), 1.0)
        self.assertFalse(tactics.timeouts.is_silence_over(START_S + 89.9))
        self.assertTrue(tactics.timeouts.is_silence_over(START_S + 90))

    def test_something_came(self) -> None:
        """Whatever comes begins the silence anew, and teaches how fast the line is."""
        earlier = GetHistory()
        tactics = self.make(100 * SEGMENT, earlier)
        tactics.seen(START_S + 10, 1000)
        tactics.seen(START_S + 11, 1000 + 2 * SEGMENT)
        self.assertEqual(earlier.line.bytes_per_s, 2 * SEGMENT)
        self.assertFalse(tactics.timeouts.is_silence_over(START_S + 70.9))
        tactics.answered(START_S + 70, 0.25)
        self.assertEqual(earlier.line.rtt_s, 0.25)
        self.assertFalse(tactics.timeouts.is_silence_over(START_S + 129))

    def test_lists(self) -> None:
        """One of many does without while guesses come true; one that does not brings them back."""
        earlier = GetHistory()
        running = [self.make(1000, earlier) for _ in range(MANY)]
        self.assertTrue(all(tactics.began() for tactics in running))
        running.pop().succeeded()
        another = self.make(1000, earlier)
        self.assertFalse(another.began())
        another.misplaced()
        another.misplaced()
        self.assertTrue(self.make(1000, earlier).began())

    def test_a_rerun_probes_little(self) -> None:
        """Where much is there already the probe is no fraction of the range."""
        size = 1000 * SEGMENT
        tactics = self.make(size, found_bytes=size // 2)
        asks = self.asks(tactics, [Share(number) for number in range(5)])
        self.assertEqual(asks[4], Ask(4, 0, PROBE_BYTES // HEDGES))
