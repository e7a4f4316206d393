"""``pipegrid check`` and ``pipegrid status``: what they show, and what their statuses mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.cmd_upkeep import sum_up
from pipegrid.core.caps import ChkCap, DirectoryCap
from pipegrid.errors import CorruptionError, UsageError
from pipegrid.grid.introducer_client import IntroducerStatus
from pipegrid.transfer.results import CheckResult, ServerStatus
from pipegrid.transfer.upkeep import UpkeepSummary
from pipegrid.tree.tree_check import TreeSummary
from tests.cli.support import FakeConfig, FakeGrid, Run

CAP = ChkCap(bytes(16), bytes(32), 3, 10, 1000)
HEALTHY = CheckResult(
    cap=CAP,
    healthy=True,
    recoverable=True,
    good_shares={number: [f"server-{number}"] for number in range(10)},
    corrupt=[],
    happiness=10,
    required_shares=3,
    total_shares=10,
    unreachable=[],
    possible_happiness=10,
    servers=10,
)
DAMAGE = CorruptionError("share 7 is damaged at byte 36", 7, 36, "carol")


def check(result: CheckResult, *arguments: str, cap: Any = CAP) -> Run:
    return Run("check", str(cap), *arguments, grid=FakeGrid(check_result=result))


class CheckTests(SynchronousTestCase):
    """Is the file still there?"""

    def test_statuses(self) -> None:
        """The gravest finding decides."""
        few = {0: ["alice"], 1: ["bob"]}
        cases: tuple[tuple[dict[str, Any], int, str], ...] = (
            ({}, 0, "healthy"),
            ({"healthy": False, "good_shares": few | {2: ["carol"]}}, 1, "damaged"),
            ({"healthy": False, "corrupt": [DAMAGE]}, 5, "damaged"),
            ({"corrupt": [DAMAGE]}, 0, "healthy"),
            (
                {"healthy": False, "recoverable": False, "good_shares": few, "corrupt": [DAMAGE]},
                4,
                "lost",
            ),
            ({"healthy": False, "recoverable": False, "unreachable": ["d"]}, 4, "unavailable"),
        )
        for changes, status, word in cases:
            run = check(attrs.evolve(HEALTHY, **changes))
            self.assertEqual(self.successResultOf(run.finished), status)
            self.assertTrue(run.stdout.startswith(word + ":"), run.stdout)
            self.assertEqual(run.stdout.count("\n"), 1)

    def test_one_line_for_an_outage(self) -> None:
        """A file that lacks nothing but servers that are down is not called damaged."""
        down = attrs.evolve(
            HEALTHY,
            healthy=False,
            good_shares={number: [f"server-{number}"] for number in range(8)},
            happiness=8,
            possible_happiness=8,
            unreachable=["one", "two"],
        )
        one = "one"
        text = "reachable: 8 of 10 shares; servers one, two are down"
        few = attrs.evolve(HEALTHY, happiness=9, possible_happiness=9, unreachable=[one])
        many = attrs.evolve(down, unreachable=[str(number) for number in range(7)])
        crowded = attrs.evolve(HEALTHY, healthy=False, happiness=7)
        for result, status, line in (
            (down, 1, text),
            (
                attrs.evolve(down, unreachable=[one]),
                1,
                "damaged: 8 of 10 shares good, any 3 restore ",
            ),
            (many, 1, "reachable: 8 of 10 shares; servers 0, 1, 2, 3, 4 and 2 more are down"),
            (
                few,
                0,
                "healthy on the reachable servers: 10 of 10 shares good, any 3 restore the file; ",
            ),
            (
                crowded,
                1,
                "on too few servers: 10 of 10 shares good, any 3 restore the file; happiness 7, ",
            ),
        ):
            run = check(result)
            self.assertEqual(self.successResultOf(run.finished), status)
            self.assertTrue(run.stdout.startswith(line), run.stdout)
            self.assertEqual((run.stdout.count("\n"), run.stderr), (1, ""))

    def test_what_nobody_could_tell(self) -> None:
        """In the sum of many, too, nothing is called lost that servers out of reach may have."""
        todo: Any = SimpleNamespace(renew=False)
        summary = UpkeepSummary(2, healthy=1, lost=1)
        self.assertEqual(sum_up(summary, todo)[0], "2 objects: 1 healthy, 1 lost")
        summary.unreachable["dave"] = 1
        text = "2 objects: 1 healthy, 1 lost or unavailable; server down: dave"
        self.assertEqual(sum_up(summary, todo)[0], text)
        again = TreeSummary(2, repaired=2, second_tries=1)
        text = "2 objects: 0 healthy, 2 repaired, 1 at the second attempt, after servers came back"
        self.assertEqual(sum_up(again, todo)[0], text)

    def test_damage_is_named_on_stderr(self) -> None:
        """Which share, where."""
        run = check(attrs.evolve(HEALTHY, healthy=False, corrupt=[DAMAGE], unreachable=["dave"]))
        self.assertIn("share 7 is damaged at byte 36", run.stderr)
        self.assertIn("server dave is down", run.stdout)
        self.assertIn("a good copy exists", run.stderr)

    def test_nothing_at_all_may_be_a_wrong_cap(self) -> None:
        """A wrong character in the key leads to where nothing is."""
        nothing = attrs.evolve(HEALTHY, healthy=False, recoverable=False, good_shares={})
        self.assertIn("check that the cap was copied right", check(nothing).stderr)
        self.assertNotIn("copied", check(attrs.evolve(nothing, unreachable=["dave"])).stderr)

    def test_json(self) -> None:
        """All that was found."""
        run = check(attrs.evolve(HEALTHY, healthy=False, corrupt=[DAMAGE]), "--json")
        self.assertEqual(self.successResultOf(run.finished), 5)
        (fields,) = run.objects
        self.assertEqual(
            sorted(fields),
            [
                "cap",
                "corrupt",
                "good_shares",
                "happiness",
                "healthy",
                "possible_happiness",
                "recoverable",
                "remarks",
                "required_shares",
                "state",
                "total_shares",
                "unreachable",
            ],
        )
        self.assertEqual((fields["state"], fields["possible_happiness"]), ("damaged", 10))
        self.assertEqual(fields["good_shares"]["3"], ["server-3"])
        self.assertEqual(fields["corrupt"][0]["offset"], 36)

    def test_caps_that_can_be_checked(self) -> None:
        """Verifier caps suffice, and a directory's file can be checked like any other."""
        for cap in (CAP, CAP.verifier(), DirectoryCap(CAP), DirectoryCap(CAP.verifier())):
            run = check(HEALTHY, "--verify", cap=cap)
            self.assertEqual(self.successResultOf(run.finished), 0)
            self.assertTrue(run.grid.seen[0][1]["verify"])

    def test_other_caps_are_usage(self) -> None:
        """A cap of no known kind has nothing to check."""
        self.assertEqual(self.successResultOf(check(HEALTHY, cap="URI:NEW:x").finished), 2)


class StatusTests(SynchronousTestCase):
    """Which servers are there?"""

    UP = ServerStatus("alice", "v0-a", "local", "servers/a", True, None, 0.0123, "pg/1", 5 * 10**9)
    DOWN = ServerStatus("bob", "v0-b", "https", "b:1", False, "refused", None, None, None)

    def run_status(self, *arguments: str, happy: int) -> Run:
        grid = FakeGrid(servers=[self.UP, self.DOWN], config=FakeConfig(happy=happy))
        return Run("status", *arguments, grid=grid)

    def test_one_line_for_each_server(self) -> None:
        """Its columns are aligned; -v adds versions."""
        run = self.run_status(happy=1)
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(
            run.stdout.splitlines(),
            [
                "alice  v0-a  local  12.3 ms  5 GB free  servers/a",
                "bob    v0-b  https  unreachable: refused (b:1)",
            ],
        )
        run = self.run_status("-v", happy=1)
        self.assertEqual(
            run.stdout.splitlines()[0], "alice  v0-a  local  12.3 ms  5 GB free  servers/a  pg/1"
        )

    def test_columns(self) -> None:
        """Numbers are aligned at the right, across servers that answer or not; local ids say nothing new."""
        far = self.UP._replace(nickname="far", server_id="far", rtt_s=1.234, available_bytes=None)
        near = self.UP._replace(nickname="nearby", server_id="nearby", address="nowhere/storage/1")
        grid = FakeGrid(servers=[far, near], config=FakeConfig(happy=1))
        self.assertEqual(
            Run("status", grid=grid).stdout.splitlines(),
            [
                "far     local  1234.0 ms  unknown free  servers/a",
                "nearby  local    12.3 ms     5 GB free  storage/1",
            ],
        )

    def test_versions_of_several_lines(self) -> None:
        """No server makes a line for another one."""
        self.UP = self.UP._replace(version="pg\n\tbob  v0-b  5 GB free\x1b[2J")
        self.DOWN = self.DOWN._replace(reason="it says\nalice")
        lines = self.run_status("-v", happy=1).stdout.splitlines()
        self.assertEqual(len(lines), 2)
        self.assertTrue(lines[0].endswith(r"  pg\n\tbob  v0-b  5 GB free\x1b[2J"), lines)

    def test_introducers(self) -> None:
        """One line, or object, for each: connected, or why not; a long id is cut for people."""
        server = self.UP._replace(server_id="v0-" + "a" * 52)
        introducers = [
            IntroducerStatus("one", "a:1", True, None, 12),
            IntroducerStatus("two", "b:2", False, "no server listens there", 0),
        ]
        for arguments in ((), ("--json",)):
            grid = FakeGrid(servers=[server], config=FakeConfig(happy=1), introducers=introducers)
            run = Run("status", "--wait-for", "3", *arguments, grid=grid)
            self.assertEqual(self.successResultOf(run.finished), 0)
            self.assertEqual(grid.wait_for, 3)
            self.assertIn("pipegrid: 1 of 1 server reachable, 1 of them with space", run.stderr)
            if arguments:
                self.assertEqual(run.objects[1]["introducer"], attrs.asdict(introducers[0]))
                self.assertEqual(run.objects[0]["server_id"], server.server_id)
                continue
            lines = run.stdout.splitlines()
            self.assertIn("  v0-aaaaaaaa…  ", lines[0])
            self.assertEqual(
                lines[1:],
                [
                    "introducer one  a:1  connected, 12 servers announced",
                    "introducer two  b:2  not connected: no server listens there",
                ],
            )

    def test_warnings_that_come_up_meanwhile(self) -> None:
        """What is found wrong while the command works is told once, at its end, even if it fails."""
        grid = FakeGrid(servers=[self.UP], config=FakeConfig(happy=1), warnings=("a",), hold=True)
        run = Run("status", grid=grid)
        self.assertEqual(run.stderr, "pipegrid: a\n")
        grid.warnings = ("a", "b")
        grid.held["status"].errback(UsageError("broken"))
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertEqual(run.stderr, "pipegrid: a\npipegrid: b\npipegrid: broken\n")

    def test_too_few_servers_is_3(self) -> None:
        """A script can ask whether uploads would work."""
        self.assertEqual(self.successResultOf(self.run_status(happy=2).finished), 3)

    def test_json(self) -> None:
        """One object for each server."""
        run = self.run_status("--json", happy=1)
        self.assertEqual(run.objects, [self.UP._asdict(), self.DOWN._asdict()])
