"""Which mirror is too slow, and who takes over."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.connection_scheduler import (
    MirrorRating,
    ReceiveRate,
    choose_steal,
    has_stalled,
)

MB = 1_000_000


class StallTests(SynchronousTestCase):
    """Silence."""

    def test_a_second_if_there_are_others(self) -> None:
        """And longer if there is nobody else to ask."""
        self.assertFalse(has_stalled(0.9, others=True))
        self.assertTrue(has_stalled(1.1, others=True))
        self.assertFalse(has_stalled(14, others=False))
        self.assertTrue(has_stalled(16, others=False))


class PaceTests(SynchronousTestCase):
    """Rates."""

    def test_recent_ones_count(self) -> None:
        """A mirror that slows down is slow within a few seconds; idle time says nothing."""
        pace = ReceiveRate()
        received = 0
        for tick in range(20):
            pace.note(tick / 4, received, is_outstanding=True)
            received += MB // 4
        self.assertAlmostEqual(pace.bytes_per_s, MB, delta=MB / 10)
        for tick in range(20, 60):
            pace.note(tick / 4, received, is_outstanding=False)
        self.assertAlmostEqual(pace.bytes_per_s, MB, delta=MB / 2)
        for tick in range(60, 90):
            pace.note(tick / 4, received, is_outstanding=True)
        self.assertLess(pace.bytes_per_s, MB / 20)


class TheftTests(SynchronousTestCase):
    """The tail."""

    def test_times_are_evened_out(self) -> None:
        """An idle mirror takes as much as lets both finish at about the same time."""
        move = choose_steal([MirrorRating(0, 0, 9 * MB, True), MirrorRating(1, 10 * MB, MB, True)])
        self.assertEqual(move, (0, 1, 9 * MB))

    def test_nobody_is_idle(self) -> None:
        """Then everybody goes on."""
        self.assertIsNone(
            choose_steal([MirrorRating(0, 1, MB, True), MirrorRating(1, 10 * MB, MB, True)])
        )

    def test_it_will_come_anyway(self) -> None:
        """What is about to come is left where it is."""
        self.assertIsNone(
            choose_steal([MirrorRating(0, 0, MB, True), MirrorRating(1, MB // 4, MB, True)])
        )

    def test_who_rests_takes_nothing_but_loses(self) -> None:
        """A mirror that gives nothing is relieved by one that can work."""
        self.assertIsNone(
            choose_steal([MirrorRating(0, 0, MB, False), MirrorRating(1, 10 * MB, MB, True)])
        )
        move = choose_steal([MirrorRating(0, 0, 0.0, True), MirrorRating(1, 10 * MB, 0.0, False)])
        self.assertEqual(move, (0, 1, 5 * MB))

    def test_the_fastest_thief_and_the_latest_victim(self) -> None:
        """Of several."""
        move = choose_steal(
            [
                MirrorRating(0, 0, MB, True),
                MirrorRating(1, 0, 3 * MB, True),
                MirrorRating(2, 8 * MB, MB, True),
                MirrorRating(3, 8 * MB, 2 * MB, True),
            ]
        )
        self.assertEqual(move, (1, 2, 6 * MB))
        self.assertIsNone(choose_steal([]))
