"""Sets of ranges behave like sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.spans import Spans

ranges = st.tuples(st.integers(0, 40), st.integers(0, 40))
changes = st.lists(st.tuples(st.booleans(), ranges), max_size=20)


class SpansTests(SynchronousTestCase):
    """Compared with a plain set."""

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(changes, ranges)
    def test_behaves_like_a_set(
        self, steps: list[tuple[bool, tuple[int, int]]], probe: tuple[int, int]
    ) -> None:
        """Adding, removing, asking: all as with a set of integers, in as few ranges as possible."""
        spans, model = Spans(), set[int]()
        for adding, (a, b) in steps:
            if adding:
                spans.add(a, b)
                model |= set(range(a, b))
            else:
                spans.remove(a, b)
                model -= set(range(a, b))
        asked = set(range(*probe))
        self.assertEqual({i for a, b in spans for i in range(a, b)}, model)
        self.assertEqual(spans.total, len(model))
        self.assertEqual(spans.contains(*probe), asked <= model)
        self.assertEqual({i for a, b in spans.overlap(*probe) for i in range(a, b)}, asked & model)
        self.assertEqual({i for a, b in spans.gaps(*probe) for i in range(a, b)}, asked - model)
        listed = list(spans)
        self.assertTrue(all(x[1] < y[0] for x, y in pairwise(listed)))
        self.assertTrue(all(a < b for a, b in listed))

    def test_merging_bridges_small_gaps(self) -> None:
        """Ranges at most the gap apart become one."""
        spans = Spans([(0, 2), (5, 6), (10, 12)])
        self.assertEqual(spans.merged(3), [(0, 6), (10, 12)])
        self.assertEqual(spans.merged(4), [(0, 12)])
