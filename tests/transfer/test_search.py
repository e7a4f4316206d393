"""Whom to ask for what."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.get.share_search_policy import (
    FIRST_QUESTIONS,
    MAX_QUESTIONS,
    QueryBatches,
    ShareSearch,
)


class WavesTests(SynchronousTestCase):
    """How many are asked at a time."""

    def test_waves_grow(self) -> None:
        """By four, as long as all answer; what is on its way is bounded."""
        waves = QueryBatches(list(range(5000)))
        sizes = []
        while not waves.exhausted:
            wave = waves.next()
            sizes.append(len(wave))
            for server in wave:
                waves.asked(server)
            self.assertEqual(waves.next(), [])
            for server in wave:
                waves.ended(server)
        self.assertEqual(sizes[:6], [20, 80, 320, 512, 512, 512])
        self.assertEqual(sum(sizes), 5000)

    def test_a_silent_server_holds_up_nobody(self) -> None:
        """Whoever answers lets four others be asked."""
        waves = QueryBatches(list(range(100)), few=4)
        self.assertEqual(waves.next(), [0, 1, 2, 3])
        for server in waves.next():
            waves.asked(server)
        waves.ended(1)
        self.assertEqual(waves.next(), list(range(4, 24)))
        for server in waves.next():
            waves.asked(server)
        waves.ended(1)
        self.assertEqual(waves.next(), [], "an answer counts once")
        waves.ended(2)
        self.assertEqual(waves.next(), [24, 25, 26, 27])

    def test_who_has_what_was_expected(self) -> None:
        """As long as all do who have answered nobody else is asked, unless somebody takes too long."""
        for hurried in (False, True):
            waves = QueryBatches(list(range(100)), few=4)
            self.assertFalse(waves.holding)
            for server in waves.next():
                waves.asked(server)
            self.assertFalse(waves.holding, "nobody has answered, so nobody is slow")
            for server in range(3):
                waves.ended(server, without_effect=False)
                self.assertTrue(waves.holding)
                self.assertEqual(waves.next(), [])
            if hurried:
                waves.hurry()
            else:
                waves.ended(3)
            self.assertFalse(waves.holding)
            self.assertEqual(len(waves.next()), 28 if hurried else 32)

    def test_when_all_had_what_was_expected(self) -> None:
        """Whoever wants more nevertheless asks the others: what was there may be damaged."""
        waves = QueryBatches(list(range(100)), few=4)
        for server in waves.next():
            waves.asked(server)
        for server in range(4):
            waves.ended(server, without_effect=False)
        self.assertEqual(waves.next(), list(range(4, 36)))


class SearchTests(SynchronousTestCase):
    """The search for one file's shares."""

    def test_servers_are_asked_in_order_and_a_few_at_a_time(self) -> None:
        """A ring of a thousand is not asked all at once."""
        search = ShareSearch(list(range(1000)))
        asked: list[int] = []
        unanswered: list[int] = []
        answers = 0
        while not search.batches.exhausted:
            for server in search.batches.next():
                search.batches.asked(server)
                asked.append(server)
                unanswered.append(server)
            self.assertEqual(search.batches.next() if len(asked) < 1000 else [], [])
            self.assertFalse(search.batches.exhausted)
            self.assertLessEqual(len(unanswered), FIRST_QUESTIONS + 3 * answers)
            self.assertLessEqual(len(unanswered), MAX_QUESTIONS)
            search.answered(unanswered.pop(0), [])
            answers += 1
        self.assertEqual(asked, list(range(1000)))

    def test_what_was_asked_is_not_asked_again(self) -> None:
        """Also if it was asked out of order, or has failed."""
        search = ShareSearch("ABCD")
        search.batches.asked("C")
        search.failed("C")
        self.assertEqual(search.batches.next(), ["A", "B", "D"])

    def test_holders(self) -> None:
        """Those who have it, in the order of their answers, without the useless ones."""
        search = ShareSearch("ABCD")
        for server in "BDCA":
            search.batches.asked(server)
            search.answered(server, [3, 1])
        search.answered("B", [3])
        self.assertEqual(search.holders(3), ["B", "D", "C", "A"])
        search.exclude(3, "D")
        search.failed("A")
        self.assertEqual(search.holders(3), ["B", "C"])
        self.assertEqual(search.holders(1), ["B", "D", "C"])
        self.assertEqual(search.holders(7), [])
        self.assertEqual(search.available(), {1: ["B", "D", "C"], 3: ["B", "C"]})

    def test_a_share_without_usable_holders_is_not_available(self) -> None:
        """Whoever had it is gone."""
        search = ShareSearch("AB")
        search.batches.asked("A")
        search.answered("A", [0])
        search.exclude(0, "A")
        self.assertEqual(search.available(), {})
        self.assertIsNone(search.best((), ()))

    def test_the_best_copy(self) -> None:
        """Low numbers first, on servers that do nothing else if there are such."""
        search = ShareSearch("ABC")
        for server, numbers in (("A", [0, 1]), ("B", [1, 2]), ("C", [2])):
            search.batches.asked(server)
            search.answered(server, numbers)
        self.assertEqual(search.best((), ()), (0, "A"))
        self.assertEqual(search.best({0}, {"A"}), (1, "B"))
        self.assertEqual(search.best({0, 1}, {"A", "B"}), (2, "C"))
        self.assertEqual(search.best({0}, {"A", "B", "C"}), (1, "A"))
        self.assertIsNone(search.best({0, 1, 2}, ()))

    def test_an_empty_ring(self) -> None:
        """There is nobody to ask."""
        search: ShareSearch[str] = ShareSearch([])
        self.assertTrue(search.batches.exhausted)
        self.assertEqual(search.batches.next(), [])
