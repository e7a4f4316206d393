"""When a download hedges, and when it gives up."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.get.hedge_policy import ReadTimeouts


class PatienceTests(SynchronousTestCase):
    """Arithmetic over given times."""

    def test_a_hedge_is_due_when_no_segment_was_finished(self) -> None:
        """Bytes that come do not put it off, finished segments do."""
        patience = ReadTimeouts(2.0, 60.0, 100.0)
        self.assertEqual(patience.wait_s(100.0), 2.0)
        patience.something_came(101.0)
        self.assertFalse(patience.is_hedge_due(101.5))
        patience.segment_finished(101.5)
        self.assertFalse(patience.is_hedge_due(103.0))
        self.assertTrue(patience.is_hedge_due(103.5))
        self.assertFalse(patience.is_hedge_due(103.5), "the next is a period later")
        self.assertTrue(patience.is_hedge_due(105.5))

    def test_each_hedge_doubles_the_period(self) -> None:
        """A slow line is not loaded more and more."""
        patience = ReadTimeouts(2.0, 60.0, 0.0)
        patience.hedged()
        self.assertFalse(patience.is_hedge_due(3.9))
        self.assertTrue(patience.is_hedge_due(4.0))

    def test_silence(self) -> None:
        """Any byte breaks it."""
        patience = ReadTimeouts(1000.0, 60.0, 0.0)
        patience.something_came(50.0)
        self.assertFalse(patience.is_silence_over(109.0))
        self.assertTrue(patience.is_silence_over(110.0))
        self.assertEqual(patience.wait_s(110.0), 60.0)

    def test_own_fault(self) -> None:
        """While the reader holds us back nobody else is to blame."""
        patience = ReadTimeouts(2.0, 60.0, 0.0)
        patience.reader_paused(100.0)
        self.assertEqual(patience.wait_s(100.0), 2.0)
        self.assertFalse(patience.is_silence_over(159.0))

    def test_waiting_reaches_what_it_waits_for(self) -> None:
        """Whatever the clock's rounding: after the wait something is due, or the wait gets shorter."""
        for start in (0.1, 1e9 + 1 / 3):
            patience = ReadTimeouts(0.1, 60.0, start)
            now = start
            for _ in range(3):
                now += patience.wait_s(now)
            self.assertTrue(patience.is_hedge_due(now))
