"""``pipegrid repair``: what it shows, what its statuses mean, and that it repairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.core.caps import LitCap, parse_cap
from pipegrid.errors import NotEnoughSharesError
from pipegrid.transfer.results import RepairResult
from tests.cli.support import FakeGrid, Run
from tests.cli.test_check_status import CAP, DAMAGE, HEALTHY

BEFORE = attrs.evolve(
    HEALTHY,
    healthy=False,
    good_shares={n: [f"server-{n}"] for n in range(8)},
    happiness=8,
)
REPAIRED = RepairResult(
    cap=CAP,
    before=BEFORE,
    after=HEALTHY,
    uploaded={8: "server-8", 9: "server-9"},
    renewed=["server-0"],
    reasons=[],
    elapsed_s=0.5,
)


def repair(result: RepairResult, *arguments: str, cap: Any = CAP, **options: Any) -> Run:
    """Run it on a grid that gives that result."""
    return Run("repair", str(cap), *arguments, grid=FakeGrid(repair_result=result, **options))


class RepairTests(SynchronousTestCase):
    """One line, one object, one status."""

    def test_statuses(self) -> None:
        """It tells whether every share is there now."""
        some = attrs.evolve(BEFORE, good_shares={n: ["a"] for n in range(9)}, happiness=1)
        for result, status, text in (
            (REPAIRED, 0, "repaired: 2 shares made again; 10 of 10 shares good, happiness 10"),
            (
                attrs.evolve(REPAIRED, before=HEALTHY, uploaded={}),
                0,
                "healthy: nothing to repair; 10 of 10 shares good, happiness 10",
            ),
            (
                attrs.evolve(
                    REPAIRED,
                    after=some,
                    uploaded={8: "a"},
                    reasons=["bob is full"],
                ),
                3,
                "not repaired: 1 share made again, but more servers must take shares; "
                "9 of 10 shares good, happiness 1",
            ),
        ):
            run = repair(result)
            self.assertEqual(self.successResultOf(run.finished), status)
            self.assertEqual(run.stdout, text + "\n")
            self.assertEqual("bob is full" in run.stderr, status == 3)

    def test_damage_is_named(self) -> None:
        """What was found wrong is told, though it is made good."""
        run = repair(attrs.evolve(REPAIRED, before=attrs.evolve(BEFORE, corrupt=[DAMAGE])))
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertIn("share 7 is damaged at byte 36", run.stderr)

    def test_json(self) -> None:
        """Before and after as ``check`` shows them."""
        run = repair(REPAIRED, "--json")
        self.assertEqual(self.successResultOf(run.finished), 0)
        (fields,) = run.objects
        self.assertEqual(
            sorted(fields),
            ["after", "before", "cap", "elapsed_s", "reasons", "renewed", "uploaded"],
        )
        self.assertEqual(fields["uploaded"], {"8": "server-8", "9": "server-9"})
        self.assertFalse(fields["before"]["healthy"])
        self.assertTrue(fields["after"]["healthy"])

    def test_a_literal_cap(self) -> None:
        """There is nothing to repair."""
        nothing = attrs.evolve(HEALTHY, good_shares={}, total_shares=0, required_shares=0)
        result = attrs.evolve(REPAIRED, before=nothing, after=nothing, uploaded={})
        run = repair(result, cap=LitCap(b"x"))
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(run.stdout, "healthy: the cap contains the file\n")

    def test_too_few_left(self) -> None:
        """That is status 4."""
        run = repair(REPAIRED, error=NotEnoughSharesError("found 2, but 3 are needed", 2, 3))
        self.assertEqual(self.successResultOf(run.finished), 4)

    def test_other_caps_are_usage(self) -> None:
        """A cap of no known kind has nothing to repair."""
        self.assertEqual(self.successResultOf(repair(REPAIRED, cap="URI:NEW:x").finished), 2)


class LocalGridTests(TestCase):
    """On a grid of directories."""

    async def run_command(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command line; return its status, stdout and stderr."""
        import io

        stdout, stderr = io.BytesIO(), io.StringIO()
        console = Console(io.BytesIO(), stdout, stderr)
        status = await start(["-d", str(self.grid), *arguments], console, reactor)
        return status, stdout.getvalue().decode(), stderr.getvalue()

    def test_lost_and_damaged_shares(self) -> Deferred[None]:
        """They come back byte for byte, with a verifier cap, and the file is healthy again."""
        return Deferred.fromCoroutine(self._repair_what_was_lost())

    async def _repair_what_was_lost(self) -> None:
        self.grid = Path(self.mktemp())
        source = Path(self.mktemp())
        source.write_bytes(bytes(range(256)) * 10_000)
        self.assertEqual((await self.run_command("init"))[0], 0)
        status, stdout, stderr = await self.run_command("put", str(source))
        self.assertEqual(status, 0, stderr)
        cap: Any = parse_cap(stdout.strip())
        shares = {
            int(path.name): path
            for path in self.grid.glob("storage/*/shares/*/*/*")
            if path.name.isdigit()
        }
        self.assertEqual(sorted(shares), list(range(10)))
        # Behind the blocks come leases, which have times.
        blocks = {number: path.read_bytes()[:850_000] for number, path in shares.items()}
        for number in (1, 4, 7):
            shares[number].unlink()
        verifier = str(cap.verifier())
        self.assertEqual((await self.run_command("check", verifier))[0], 1)
        status, stdout, stderr = await self.run_command("repair", verifier)
        self.assertEqual(
            (status, stdout.split(";")[0]), (0, "repaired: 3 shares made again"), stderr
        )
        for number, path in shares.items():
            self.assertEqual(path.read_bytes()[:850_000], blocks[number])
        status, stdout, stderr = await self.run_command("check", "--verify", verifier)
        self.assertEqual((status, stdout.split(":")[0]), (0, "healthy"), stderr)
        status, stdout, _ = await self.run_command("repair", str(cap))
        self.assertEqual((status, stdout.split(";")[0]), (0, "healthy: nothing to repair"))
