"""Sets of ranges, compared with plain sets of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.storage.ranges import Ranges

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=25)


class RangesTests(SynchronousTestCase):
    """``Ranges`` is a set of whole numbers."""

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(SPANS, st.integers(0, 45), st.integers(0, 20))
    def test_it_is_a_set_of_numbers(
        self, spans: list[tuple[int, int]], begin: int, length: int
    ) -> None:
        """Members, total, and what is missing in any window, agree with a real set."""
        ranges = Ranges()
        model: set[int] = set()
        for start, size in spans:
            ranges.add(start, start + size)
            model |= set(range(start, start + size))
            self.assertEqual(ranges.total, len(model))
        pairs = list(ranges)
        self.assertEqual({n for b, e in pairs for n in range(b, e)}, model)
        self.assertTrue(all(e < b for (_, e), (b, _) in pairwise(pairs)))
        window = set(range(begin, begin + length))
        within = list(ranges.within(begin, begin + length))
        missing = list(ranges.missing(begin, begin + length))
        self.assertEqual({n for b, e in within for n in range(b, e)}, model & window)
        self.assertEqual({n for b, e in missing for n in range(b, e)}, window - model)
        self.assertTrue(all(b < e for b, e in within + missing))

    def test_adjacent_ranges_join(self) -> None:
        """Ranges that touch become one, so that writing in order needs one range."""
        ranges = Ranges([(0, 5), (10, 15), (5, 10)])
        self.assertEqual(list(ranges), [(0, 15)])
        self.assertEqual(len(ranges), 1)
