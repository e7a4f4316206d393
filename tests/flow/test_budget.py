"""Lending a bounded amount."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.flow.concurrency_limits import Budget

TOTAL = 10


class BudgetTests(SynchronousTestCase):
    """What is lent never exceeds what there is, and everybody's turn comes."""

    def test_there_is_enough(self) -> None:
        """Then it is lent at once."""
        budget = Budget(TOTAL)
        self.assertEqual(self.successResultOf(budget.borrow(4)), 4)
        self.assertEqual(budget.free, 6)

    def test_without_waiting(self) -> None:
        """What is free is lent without a Deferred, unless another waits for it."""
        budget = Budget(TOTAL)
        self.assertEqual(budget.lend(4), 4)
        self.assertIsNone(budget.lend(7))
        waiting = budget.borrow(7)
        self.assertIsNone(budget.lend(1))
        budget.give_back(4)
        self.assertEqual(self.successResultOf(waiting), 7)
        self.assertEqual(budget.lend(3), 3)
        self.assertIsNone(budget.lend(1000))

    def test_the_order_of_asking(self) -> None:
        """A small one behind a large one waits, so that the large one's turn comes."""
        budget = Budget(TOTAL)
        self.successResultOf(budget.borrow(6))
        large, small = budget.borrow(8), budget.borrow(1)
        self.assertNoResult(large)
        self.assertNoResult(small)
        budget.give_back(6)
        self.assertEqual(self.successResultOf(large), 8)
        self.assertEqual(self.successResultOf(small), 1)

    def test_more_than_all(self) -> None:
        """Whoever asks for more than there is gets all of it, and returns that."""
        budget = Budget(TOTAL)
        self.assertEqual(self.successResultOf(budget.borrow(1000)), TOTAL)
        budget.give_back(TOTAL)
        self.assertEqual(budget.free, TOTAL)

    def test_nothing(self) -> None:
        """Nothing can be had even when all is lent, in its turn."""
        budget = Budget(TOTAL)
        self.successResultOf(budget.borrow(TOTAL))
        self.assertEqual(self.successResultOf(budget.borrow(0)), 0)

    def test_cancelling(self) -> None:
        """Who gives up gets nothing, and those behind do not wait for them."""
        budget = Budget(TOTAL)
        self.successResultOf(budget.borrow(6))
        large, small = budget.borrow(8), budget.borrow(4)
        large.cancel()
        self.failureResultOf(large, CancelledError)
        self.assertEqual(self.successResultOf(small), 4)
        self.assertEqual(budget.free, 0)

    def test_more_comes_back_than_went(self) -> None:
        """That is a mistake in the program."""
        self.assertRaises(AssertionError, Budget(TOTAL).give_back, 1)

    def test_lending_from_within_a_loan(self) -> None:
        """A borrower that gives back at once may set off the next, however many there are."""
        budget = Budget(TOTAL)
        self.successResultOf(budget.borrow(TOTAL))
        served: list[int] = []

        def give_back(units: int) -> None:
            served.append(units)
            budget.give_back(units)

        for _ in range(5000):
            budget.borrow(TOTAL).addCallback(give_back)
        budget.give_back(TOTAL)
        self.assertEqual(served, [TOTAL] * 5000)
        self.assertEqual(budget.free, TOTAL)

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("borrow"), st.integers(0, 2 * TOTAL)),
                st.tuples(st.sampled_from(["give back", "cancel"]), st.integers(0, 20)),
            )
        )
    )
    def test_whatever_happens(self, steps: list[tuple[str, int]]) -> None:
        """Loans plus rest are the total, waiting ones are in order, and in the end all is back."""
        budget = Budget(TOTAL)
        lent: list[int] = []
        waiting: list[Deferred[None]] = []
        asked = 0

        def got(units: int, number: int) -> None:
            self.assertEqual(number, order.pop(0))
            lent.append(units)

        order: list[int] = []
        for what, number in steps:
            if what == "borrow":
                order.append(asked)
                waiting.append(budget.borrow(number).addCallback(got, asked))
                asked += 1
            elif what == "give back" and lent:
                budget.give_back(lent.pop(number % len(lent)))
            elif what == "cancel" and waiting:
                chosen = waiting[number % len(waiting)]
                if not chosen.called:
                    del order[[w for w in waiting if not w.called].index(chosen)]
                    chosen.addErrback(lambda failure: failure.trap(CancelledError) and None)
                    chosen.cancel()
            self.assertEqual(budget.free + sum(lent), TOTAL)
            self.assertGreaterEqual(budget.free, 0)
            if lent == []:
                self.assertEqual(order, [])
        while lent:
            budget.give_back(lent.pop())
        self.assertEqual((budget.free, order), (TOTAL, []))
