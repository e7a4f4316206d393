"""What a server's answers to writes say about what it has already."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.put.write_batches import MAX_GAPS, ResumeRanges, joined

SHARE = 1000


def told(*required: tuple[int, int]) -> ResumeRanges:
    """Return what one answer says."""
    already = ResumeRanges()
    already.answered(required, SHARE)
    return already


class AnswerTests(SynchronousTestCase):
    """Which bytes need not be sent."""

    def test_nothing_is_known_at_first(self) -> None:
        """Everything is sent."""
        already = ResumeRanges()
        self.assertFalse(already.covers(0, 1))
        self.assertEqual((already.upto, already.total_bytes, already.has_skipped), (0, 0, False))

    def test_gaps_between_what_is_required(self) -> None:
        """They are what is there, to the byte."""
        already = told((100, 200), (500, 900))
        for begin, end in ((0, 100), (200, 500), (900, 1000), (99, 100), (300, 301)):
            self.assertTrue(already.covers(begin, end), (begin, end))
        for begin, end in ((0, 101), (199, 201), (99, 501), (899, 901), (500, 900)):
            self.assertFalse(already.covers(begin, end), (begin, end))
        self.assertEqual((already.upto, already.total_bytes), (1000, 500))

    def test_the_last_answer_counts(self) -> None:
        """More may have come, or something been lost."""
        already = told((100, 1000))
        already.answered([(900, 1000)], SHARE)
        self.assertTrue(already.covers(100, 900))
        already.answered([(0, 500)], SHARE)
        self.assertFalse(already.covers(100, 900))
        self.assertTrue(already.covers(500, 1000))

    def test_an_answer_that_says_nothing(self) -> None:
        """A share of which nothing is needed would be complete: what was known before stays."""
        already = told((100, 1000))
        already.answered((), SHARE)
        already.answered([(SHARE, SHARE + 10)], SHARE)
        self.assertTrue(already.covers(0, 100))
        self.assertFalse(already.covers(0, 101))

    def test_strange_ranges(self) -> None:
        """Out of order, overlapping, beyond the end: the union counts, within the share."""
        already = told((800, 1 << 63), (300, 500), (0, 100), (50, 400), (450, 460))
        self.assertTrue(already.covers(500, 800))
        self.assertEqual((already.upto, already.total_bytes), (800, 300))
        for wrong in ((-5, 10), (10, 10), (20, 10)):
            self.assertFalse(told(wrong).covers(0, 1), wrong)

    def test_too_many_gaps(self) -> None:
        """Nobody leaves so many; an answer with them is not kept."""
        many = tuple((at, at + 1) for at in range(0, 2 * MAX_GAPS + 2, 2))
        self.assertFalse(told(*many).covers(1, 2))
        self.assertTrue(told(*many[1:]).covers(1, 2))

    def test_taken_back(self) -> None:
        """What was passed over comes back, once; nothing is believed any more."""
        already = told((100, 200))
        already.mark_skipped(range(3, 5), False)
        already.mark_skipped(range(8, 9), True)
        self.assertTrue(already.has_skipped)
        already.has_trailer = True
        already.unskip()
        self.assertEqual((already.missed, already.has_trailer), (range(3, 9), False))
        self.assertFalse(already.has_skipped)
        already.answered([(100, 200)], SHARE)
        self.assertFalse(already.covers(0, 1))
        self.assertEqual((already.upto, already.total_bytes), (0, 0))

    @settings(
        deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )  # the machine may be busy
    @given(
        st.lists(st.tuples(st.integers(-50, 1100), st.integers(-50, 1100)), max_size=20),
        st.integers(0, 999),
        st.integers(1, 300),
    )
    def test_any_answer(self, required: list[tuple[int, int]], begin: int, length: int) -> None:
        """Nothing is passed over that a well-formed range of the answer names."""
        already = told(*required)
        end = min(SHARE, begin + length)
        named = {n for a, b in required if 0 <= a < b for n in range(a, min(b, SHARE))}
        if already.covers(begin, end):
            self.assertFalse(named & set(range(begin, end)))
        elif named:
            self.assertTrue(named & set(range(begin, end)))
        self.assertLessEqual(already.total_bytes, max(0, SHARE - len(named)))


class JoinedTests(SynchronousTestCase):
    """Segments are kept as one range."""

    def test_joined(self) -> None:
        """From the first to the last; nothing adds nothing."""
        self.assertEqual(joined(range(3, 4), range(7, 9)), range(3, 9))
        self.assertEqual(joined(range(0), range(7, 9)), range(7, 9))
        self.assertEqual(joined(range(7, 9), range(5, 5)), range(7, 9))
