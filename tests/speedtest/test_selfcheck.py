"""The self-check's judgement; what it measures is in ``test_raw_tcp_baseline`` and ``test_proxy``."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.speedtest.selfcheck import check


class CheckTests(SynchronousTestCase):
    """``check``."""

    def test_near_enough(self) -> None:
        """The median counts, both ways, and the sentence shows the spread."""
        for samples, passed in (
            ([97.0, 97.0, 50.0], True),
            ([103.0, 103.0, 180.0], True),
            ([96.9, 96.9, 100.0], False),
            ([103.1], False),
        ):
            self.assertIs(check("pipe", samples, 100, 3, "%").passed, passed, samples)
        text = str(check("pipe", [90.0, 91.0, 99.5], 100, 3, "%"))
        self.assertEqual(text, "WRONG  pipe: 91.00 % (90.00 .. 99.50); 100 ± 3 expected")

    def test_the_least_of_round_trips(self) -> None:
        """A busy machine makes them longer, never shorter."""
        self.assertTrue(check("link", [109.0, 104.0, 100.6], 100, 1, "ms", min).passed)
        self.assertFalse(check("link", [98.0, 104.0, 100.6], 100, 1, "ms", min).passed)
