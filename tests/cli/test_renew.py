"""``pipegrid renew`` and ``check --add-lease``: statuses, JSON, and each reason once."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import parse_cap
from pipegrid.transfer.results import CheckResult, RenewResult
from tests.cli.support import FakeGrid, Run

TEXT = f"URI:CHK:{'a' * 26}:{'b' * 51}a:2:3:1000"
CAP: Any = parse_cap(TEXT)
ALL = {0: ["ann"], 1: ["bob"], 2: ["eve"]}


def result(leases: dict[int, list[str]], **more: Any) -> RenewResult:
    return RenewResult(CAP, leases, 2, 3, more.get("unreachable", []), more.get("reasons", []))


class RenewTests(SynchronousTestCase):
    """One cap."""

    def test_statuses(self) -> None:
        """0 if all that was found has a lease, 1 if something was in the way, 4 if too few have one."""
        for found, status, words in (
            (result(ALL), 0, "renewed: 3 of 3 shares have a lease now, on 3 servers\n"),
            (result({0: ["ann", "bob"], 1: ["bob"]}), 0, "renewed: 2 of 3 shares"),
            (result(ALL, unreachable=["joe"]), 1, "renewed: 3 of 3"),
            (result(ALL, reasons=["joe gives none"]), 1, "renewed: 3 of 3"),
            (
                result({0: ["ann"]}),
                4,
                "lost: 1 of 3 shares have a lease now, on 1 server; any 2 restore the file\n",
            ),
            (result({0: ["ann"]}, unreachable=["joe"]), 4, "unavailable: 1 of 3 shares"),
            (
                RenewResult(CAP, {}, 0, 0, [], []),
                0,
                "nothing to renew: the cap contains the file\n",
            ),
        ):
            run = Run("renew", TEXT, grid=FakeGrid(renew_result=found))
            self.assertEqual(
                (self.successResultOf(run.finished), run.stderr.count("Trace")), (status, 0)
            )
            self.assertTrue(run.stdout.startswith(words), run.stdout)

    def test_reasons_once(self) -> None:
        """One line for what is the same of many servers."""
        reasons = [f"{name} has no room for leases" for name in ("ann", "bob", "eve")]
        grid = FakeGrid(renew_result=result({}, unreachable=["joe", "pat"], reasons=reasons))
        run = Run("renew", TEXT, grid=grid)
        self.assertEqual(
            run.stderr.splitlines(),
            [
                "pipegrid: servers joe, pat are down",
                "pipegrid: no lease: ann, bob, eve: has no room for leases",
            ],
        )

    def test_json(self) -> None:
        """As documented."""
        grid = FakeGrid(renew_result=result({0: ["ann"]}, unreachable=["joe"], reasons=["x"]))
        run = Run("--json", "renew", TEXT, grid=grid)
        self.assertEqual(
            run.objects,
            [
                {
                    "cap": TEXT,
                    "leases": {"0": ["ann"]},
                    "required_shares": 2,
                    "total_shares": 3,
                    "unreachable": ["joe"],
                    "reasons": ["x"],
                }
            ],
        )

    def test_check_adds_leases_if_told_to(self) -> None:
        """A healthy file whose leases were refused is status 1; without the option nothing is asked."""
        healthy = CheckResult(CAP, True, True, ALL, [], 3, 2, 3, [])
        run = Run("check", TEXT, grid=FakeGrid(check_result=healthy))
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertIs(run.grid.seen[0][1]["add_lease"], False)
        refused = attrs.evolve(healthy, renewed=["ann"], lease_problems=["bob gives none"])
        run = Run("--json", "check", TEXT, "--add-lease", grid=FakeGrid(check_result=refused))
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertTrue(run.grid.seen[0][1]["add_lease"])
        self.assertEqual(
            (run.objects[0]["renewed"], run.objects[0]["lease_problems"]),
            (["ann"], ["bob gives none"]),
        )
        self.assertEqual(run.stderr, "pipegrid: no lease: bob gives none\n")

    def test_storage_index_in_json(self) -> None:
        """As documented; of a cap that holds its file, null."""
        run = Run("--json", "storage-index", TEXT, "URI:LIT:nbswy3dp")
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertRegex(run.objects[0]["storage_index"], "^[a-z2-7]{26}$")
        chk = {"cap": TEXT, "size": 1000, "required_shares": 2, "total_shares": 3}
        literal = {"cap": "URI:LIT:nbswy3dp", "storage_index": None, "size": 5}
        literal |= {"required_shares": None, "total_shares": None}
        first = dict(run.objects[0])
        del first["storage_index"]
        self.assertEqual([first, run.objects[1]], [chk, literal])
