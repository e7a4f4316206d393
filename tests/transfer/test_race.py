"""The race of a get: who is called to help, for what."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.get.hedge_policy import HedgedRead


@attrs.define
class Share:
    """A share that has given so much."""

    share_number: int
    received_bytes: int = 0
    waiting: bool = True


class RaceTests(SynchronousTestCase):
    """Three favourites and two others; 1 s was the way to their first bytes."""

    def setUp(self) -> None:
        self.race = HedgedRead(10.0)
        self.favourites = [Share(number, 1000) for number in (0, 1, 2)]
        self.others = [Share(number, 1000, waiting=False) for number in (3, 4)]

    def look(self, now: float = 11.0, segments: tuple[int, int] = (0, 10), most: int = 100) -> None:
        """Look at all."""
        self.race.consider_hedging(now, self.favourites, self.others, segments, most)

    def helpers(self) -> list[int]:
        """Who is called."""
        return [number for number in range(5) if self.race.is_hedge(number)]

    def test_nobody_lags(self) -> None:
        """Then nobody is called, and nothing is due."""
        self.favourites[1].received_bytes = 500
        self.look()
        self.assertEqual((self.helpers(), self.race.due), ([], None))

    def test_one_lags(self) -> None:
        """It is waited for an eighth more; then two divide its work."""
        self.favourites[1].received_bytes = 499
        self.look()
        self.assertEqual(self.helpers(), [])
        assert self.race.due is not None
        self.assertEqual(self.race.due, 11.125)
        self.look(self.race.due)
        self.assertEqual((self.helpers(), self.race.due), ([3, 4], None))
        self.assertEqual(self.race.parts, {4: (0, 5), 3: (5, 10)})

    def test_one_was_only_late(self) -> None:
        """When it has come within its time, nobody is called."""
        self.favourites[1].received_bytes = 0
        self.look()
        self.favourites[1].received_bytes = 900
        self.look(12.0)
        self.assertEqual((self.helpers(), self.race.due), ([], None))

    def call(self, **options: int) -> None:
        """Have one that lags."""
        self.favourites[0].received_bytes = 0
        self.look(**options)  # type: ignore[arg-type]
        self.look(20.0, **options)  # type: ignore[arg-type]

    def test_memory(self) -> None:
        """What the second helper sends is held until the first has given its part: that is bounded."""
        self.call(most=2)
        self.assertEqual(self.race.parts, {4: (0, 2), 3: (2, 10)})

    def test_parts_are_of_what_is_left(self) -> None:
        """A range may begin anywhere; one segment cannot be divided."""
        self.favourites[0].received_bytes = 0
        self.look(11, (7, 9))
        self.look(12, (7, 9))
        self.assertEqual(self.race.parts, {4: (7, 8), 3: (8, 9)})
        self.race = HedgedRead(10.0)
        self.look(11, (7, 8))
        self.look(12, (7, 8))
        self.assertEqual((self.race.parts, self.helpers()), ({}, [3, 4]))

    def test_two_lag(self) -> None:
        """Each helper is called for everything, also if the second shows only later."""
        self.favourites[2].received_bytes = 0
        self.call()
        self.assertEqual((self.race.parts, self.helpers()), ({}, [3, 4]))
        self.setUp()
        self.call()
        self.assertEqual(len(self.race.parts), 2)
        self.others[0].received_bytes = 5000
        self.look(21.0)
        self.assertEqual((self.race.parts, self.helpers()), ({}, [3, 4]))

    def test_one_helper_is_slow_as_well(self) -> None:
        """Then the other has all the work."""
        self.others[1] = Share(4, 100)
        self.call()
        self.assertEqual((self.race.parts, self.helpers()), ({}, [3]))

    def test_a_helper_fails(self) -> None:
        """The other one has all the work."""
        self.call()
        self.race.closed(3)
        self.assertEqual((self.race.parts, self.helpers()), ({}, [4]))

    def test_the_end(self) -> None:
        """Both helpers go on when one has won; neither does when the favourites have."""
        self.call()
        self.assertEqual(self.race.end([1, 2, 4]), {1, 2, 3, 4})
        self.assertFalse(self.race.open)
        self.assertEqual(self.race.done(4), [])
        self.assertEqual(self.race.done(5), [4])
        self.assertEqual(self.race.end([0, 1, 2]), {0, 1, 2})

    def test_both_helpers_win(self) -> None:
        """Then two of the shares that go on are theirs, so each of them gives all of it."""
        self.call()
        self.assertEqual(self.race.end([2, 3, 4]), {2, 3, 4})
        self.assertEqual((self.race.parts, self.race.done(9)), ({}, []))

    def test_reopened(self) -> None:
        """Nobody has only a part any more."""
        self.call()
        self.race.reopen()
        self.assertTrue(self.race.open)
        self.assertEqual(self.race.parts, {})
