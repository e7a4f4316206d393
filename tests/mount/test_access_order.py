"""What is fetched in advance: as much as the order of earlier accesses promises."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mount.mounted_tree import MOST_AHEAD, AccessOrder


class AccessOrderTests(SynchronousTestCase):
    """Children that are opened in order, and others."""

    def test_in_order(self) -> None:
        """The window doubles up to its limit; nothing is fetched twice, and nothing left out."""
        order = AccessOrder()
        fetched: list[int] = []
        for position in range(200):
            ahead = order.opened("place", position)
            fetched += ahead
            self.assertLessEqual(ahead.stop, position + 1 + MOST_AHEAD)
            self.assertGreater(len(fetched), 0)
        self.assertEqual(fetched, list(range(1, 200 + MOST_AHEAD)))

    def test_at_random(self) -> None:
        """Nothing is fetched in advance, except two after the first child."""
        order = AccessOrder()
        self.assertEqual([list(order.opened("place", n)) for n in (50, 7, 90, 12)], [[]] * 4)
        self.assertEqual(list(order.opened("other", 0)), [1, 2])

    def test_some_are_left_out(self) -> None:
        """A sequence goes on, as for a program that skips links; the same child again changes nothing."""
        order = AccessOrder()
        order.opened("place", 0)
        self.assertEqual(list(order.opened("place", 0)), [])
        self.assertEqual(list(order.opened("place", 3)), [4, 5, 6, 7])

    def test_places(self) -> None:
        """Each has its own sequence, and the number of remembered ones is bounded."""
        order = AccessOrder()
        for place in range(10_000):
            self.assertEqual(list(order.opened(place, 0)), [1, 2])
        self.assertLess(len(order._sequences), 1000)
