"""Shares whose leases have run out are removed where the clock can be believed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from unittest import mock

from pipegrid.server.serve import collect_expired
from pipegrid.storage.lease_check_log import HELD_S, NonDecreasingDate
from pipegrid.storage.share_file import LEASE_DURATION_S, Expiry
from tests.storage.support import NOW, SECRETS, SI, StoreTestCase

DAY_S = 86400


class CollectingTests(StoreTestCase):
    """One share, stored now; a lease lasts 31 days."""

    def setUp(self) -> None:
        super().setUp()
        self.passed_s = 0.0  # whatever the clock is set to
        self.start()

    def start(self) -> None:
        """Have what a server that starts has."""
        self.date = NonDecreasingDate(self.root, lambda: self.now, lambda: self.passed_s)
        self.store = self.make_store(date=self.date)

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.passed_s += seconds

    def collecting(self, expiry: Expiry | None = None) -> Callable[[], int]:
        """Return what a server that starts calls."""
        return partial(
            collect_expired,
            self.store,
            self.root,
            expiry or Expiry(),
            self.date,
            lambda: self.now,
        )

    def run_days(self, days: int) -> int:
        """Run a server so long; returns how many shares it removes."""
        collect = self.collecting()
        removed = collect()
        for _ in range(2 * days):
            self.passes(DAY_S / 2)
            removed += collect()
        return removed

    def test_a_server_that_runs(self) -> None:
        """It removes what has run out, and no sooner."""
        self.put(0, b"share")
        self.assertEqual(self.run_days(30), 0)
        self.assertEqual(self.run_days(2), 1)

    def test_a_clock_that_is_a_year_ahead(self) -> None:
        """Nothing is lost when it is set right again."""
        self.put(0, b"share")
        self.run_days(10)
        for before_s in (0, 365 * DAY_S):  # with the server running, or before it starts
            self.now = NOW + 11 * DAY_S + before_s
            self.assertEqual(self.run_days(3), 0)
        self.now = NOW + 14 * DAY_S
        self.assertEqual(self.run_days(10), 0)
        self.assertEqual(self.store.list_shares(SI), {0})

    def test_a_clock_that_is_set_back(self) -> None:
        """What is stored, or renewed, while it shows 1970 between two looks stays as long as it should."""
        self.put(0, b"share")
        self.run_days(20)
        for restarts in (False, True):
            right, self.now = self.now, 100.0
            if restarts:
                self.start()
            self.put(1 + restarts, b"share")
            self.store.add_lease(SI, SECRETS.lease)
            self.now = right
        self.passes(LEASE_DURATION_S - DAY_S)
        with mock.patch("pipegrid.storage.lease_check_log.MOST_APART_S", LEASE_DURATION_S):
            self.assertEqual(self.collecting()(), 0)
            self.passes(2 * DAY_S)
            self.assertEqual(self.collecting()(), 3)

    def test_a_clock_that_is_set_back_for_long(self) -> None:
        """Looks of that time do not make what was believed before forgotten."""
        self.put(0, b"share")
        self.run_days(10)
        right, self.now = self.now, 100.0
        self.run_days(1)
        self.start()
        self.put(1, b"share")
        self.now = right + DAY_S
        self.assertEqual(self.run_days(19), 0)
        self.assertEqual(self.store.list_shares(SI), {0, 1})

    def test_a_clock_that_leaps_while_it_is_looked(self) -> None:
        """What was believed is the reading that counts."""
        self.put(0, b"share")
        self.run_days(10)
        times = iter([self.now])
        self.now += 365 * DAY_S
        call = self.store, self.root, Expiry(), self.date
        self.assertEqual(collect_expired(*call, times.__next__), 0)

    def test_a_server_that_comes_back(self) -> None:
        """After two months clients have a week for renewing; then what has run out goes."""
        self.put(0, b"share")
        self.run_days(10)
        self.now = NOW + LEASE_DURATION_S + 30 * DAY_S
        self.assertEqual(self.run_days(6), 0)
        self.assertEqual(self.run_days(2), 1)

    def test_a_date_is_a_date(self) -> None:
        """If all leases end that were not renewed since a day, that is done at once."""
        self.put(0, b"share")
        self.assertEqual(self.collecting(Expiry(renewed_since=int(NOW) + 1))(), 1)
        self.assertEqual(os.listdir(self.root), ["shares"])

    def test_no_note_no_removal(self) -> None:
        """A directory that takes no note keeps its shares; one that is missing has none."""
        self.assertEqual(self.collecting()(), 0)
        self.put(0, b"share")
        self.now = NOW + LEASE_DURATION_S + HELD_S
        with mock.patch("tempfile.mkstemp", side_effect=PermissionError(13, "no")):
            self.assertEqual(self.collecting()(), 0)
        self.assertEqual(self.store.list_shares(SI), {0})
