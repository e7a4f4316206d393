"""What past downloads tell of the client's own line."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.get.get_history import LinkEstimate


class ClientLineTests(SynchronousTestCase):
    """When an extra share would cost more than a round trip."""

    def test_nothing_is_known_at_first(self) -> None:
        """Then no line is narrow, nor while only one of rate and round trip is known."""
        line = LinkEstimate()
        self.assertFalse(line.is_narrow_for(10**9))
        line.note_response(0.01)
        self.assertFalse(line.is_narrow_for(10**9))
        line = LinkEstimate()
        line.note_bytes(10**6, 1.0)
        self.assertFalse(line.is_narrow_for(10**9))

    def test_bytes_against_a_round_trip(self) -> None:
        """What takes longer than a round trip at the known rate is too much."""
        line = LinkEstimate()
        line.note_response(0.1)
        line.note_bytes(10**6, 1.0)
        self.assertFalse(line.is_narrow_for(100_000))
        self.assertTrue(line.is_narrow_for(100_001))

    def test_the_best_counts(self) -> None:
        """Slow answers and slow downloads are servers' doing; a few bytes tell nothing."""
        line = LinkEstimate()
        for elapsed_s in (0.5, 0.1, 2.0):
            line.note_response(elapsed_s)
            line.note_bytes(10**5, elapsed_s)
        line.note_bytes(1000, 0.0001)
        line.note_bytes(10**6, 0.0)
        self.assertEqual((line.rtt_s, line.bytes_per_s), (0.1, 10**6))

    def test_old_news_are_forgotten(self) -> None:
        """A line that has become narrow is found to be so."""
        line = LinkEstimate()
        line.note_response(0.1)
        line.note_bytes(10**8, 1.0)
        for _ in range(8):
            line.note_bytes(10**5, 1.0)
        self.assertTrue(line.is_narrow_for(10**5))
