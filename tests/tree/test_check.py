"""Looking after everything in a tree, on a whole grid in virtual time."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, UnknownCap
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.transfer.results import CheckResult, RenewResult, RepairResult
from pipegrid.transfer.upkeep import SampledUpkeep, UpkeepOutcome, UpkeepRequest
from pipegrid.transfer.verification_rotation import CIRCLE, VerifiedPart, width_of
from pipegrid.tree.tree_check import FirstMet, TreeSummary, check_tree, check_trees
from tests.simulation.grid_budgets import warm_up
from tests.simulation.grid_world import Client, GridWorld
from tests.simulation.test_grid_budgets import RTT_S, BudgetTestCase


class CheckTreeTests(BudgetTestCase):
    """Trees on ten servers, 100 ms away."""

    world: GridWorld
    client: Client
    root: DirectoryCap

    def store(self, directories: int, files: int) -> None:
        """Store a tree: so many directories below the root, each with so many small files."""
        self.world = self.make_world()
        self.client = self.world.client()
        warm_up(self.world, self.client)
        random = Random(1)
        data = [random.randbytes(random.randrange(60, 300)) for _ in range(directories * files)]
        caps = self.put(*data)
        packed = [
            pack_immutable(
                [PackedChild(f"file {n}", caps[d * files + n], {}) for n in range(files)]
            )
            for d in range(directories)
        ]
        self.directories = [DirectoryCap(cap) for cap in self.put(*packed)]  # type: ignore[arg-type]
        self.files = caps
        self.root = self.pack({f"dir {n:03}": cap for n, cap in enumerate(self.directories)})
        self.world.run(self.client.grid.check_many(self.files))
        self.world.clock.advance(1)

    def put(self, *data: bytes) -> list[Cap]:
        """Store files; returns their caps."""
        stored = self.world.run(self.client.grid.put_many(data))
        return [one.cap for one in stored if not isinstance(one, Failure)]

    def pack(self, children: dict[str, Cap]) -> DirectoryCap:
        """Store a directory; returns its cap."""
        [cap] = self.put(
            pack_immutable([PackedChild(name, cap, {}) for name, cap in children.items()])
        )
        return DirectoryCap(cap)  # type: ignore[arg-type]

    def check(
        self, cap: Cap | None = None, part: VerifiedPart | None = None, **todo: bool
    ) -> tuple[TreeSummary, float]:
        """Look after a tree; returns the sum, and the round trips. Fills ``ended`` and ``unread``."""
        self.ended: dict[str, UpkeepOutcome] = {}
        self.unread: dict[str, Exception] = {}

        def ended(place: FirstMet, outcome: UpkeepOutcome) -> None:
            path = "/".join(place.path)
            self.assertNotIn(path, self.ended)
            self.ended[path] = outcome

        def unreadable(place: FirstMet, error: Exception) -> None:
            self.unread["/".join(place.path)] = error

        summary, took_s = self.world.timed(
            lambda: check_tree(
                self.client.grid,
                self.root if cap is None else cap,
                UpkeepRequest(**todo) if part is None else SampledUpkeep(**todo, part=part),
                ended=ended,
                unreadable=unreadable,
            )
        )
        return summary, round(took_s / RTT_S, 3)

    def remove(self, cap: Any, servers: int = 10) -> None:
        """Have so many servers lose the shares of an object."""
        file: Any = cap.file if isinstance(cap, DirectoryCap) else cap
        for server in self.world.servers[:servers]:
            for number in server.shares(file.storage_index):
                Path(server.share_path(file.storage_index, number)).unlink()

    def test_given_up_in_a_callback(self) -> None:
        """Whoever is told of a directory that cannot be read may give up then."""
        self.store(1, 1)
        lost = DirectoryCap(ChkCap(b"k" * 16, b"h" * 32, 3, 10, 3000))
        running: list[Any] = []
        checking = check_tree(
            self.client.grid,
            lost,
            UpkeepRequest(),
            unreadable=lambda place, error: running[0].cancel(),
        )
        running.append(checking)
        with self.assertRaises(CancelledError):
            self.world.run(checking)

    def test_renewing_alone(self) -> None:
        """Nothing is verified where leases alone are to be renewed, whatever else is asked for."""
        self.store(1, 2)
        summary, _ = self.check(renew=True, verify=True)
        self.assertEqual({type(each) for each in self.ended.values()}, {RenewResult})
        self.assertEqual(summary.leaseless, 0)

    def test_hundreds_of_files_in_a_hundred_directories(self) -> None:
        """Reading and checking overlap: root, directories, files, where one by one takes 401 and more."""
        self.store(100, 3)
        summary, trips = self.check(add_lease=True)
        self.assertEqual((summary.objects, summary.healthy), (401, 401))
        self.assertEqual(len(self.ended), 401)
        self.assertLessEqual(trips, 6.0)
        self.remove_server(3)
        summary, trips = self.check()
        self.assertEqual((summary.objects, summary.damaged), (401, 401))
        self.assertLessEqual(trips, 6.0)
        summary, trips = self.check(repair=True, add_lease=True)
        self.assertEqual((summary.objects, summary.repaired), (401, 401))
        self.assertLessEqual(trips, 9.0)
        self.assertEqual(self.check()[0].healthy, 401)

    def test_another_part_each_time(self) -> None:
        """All objects are checked each time, a part of them byte by byte; ten runs verify all of them."""
        self.store(10, 3)
        for file in [*self.files, *self.directories, self.root]:
            cap: Any = file.file if isinstance(file, DirectoryCap) else file
            server = next(each for each in self.world.servers if each.shares(cap.storage_index))
            [number] = server.shares(cap.storage_index)
            path = Path(server.share_path(cap.storage_index, number))
            data = bytearray(path.read_bytes())
            data[-100] ^= 1  # before the leases
            path.write_bytes(data)
        found_damaged: set[str] = set()
        width, position, verified = width_of(Fraction(10)), CIRCLE - 7, 0
        for _ in range(10):
            part = VerifiedPart(position % CIRCLE, width)
            summary, _ = self.check(verify=True, part=part)
            self.assertEqual(summary.objects, 41)
            damaged = {
                path
                for path, outcome in self.ended.items()
                if isinstance(outcome, CheckResult) and outcome.corrupt
            }
            self.assertEqual(len(damaged), part.verified)
            self.assertEqual(summary.healthy, 41 - len(damaged))
            found_damaged |= damaged
            verified += part.verified
            position += width
        self.assertEqual((len(found_damaged), verified), (41, 41))

    def test_every_byte_of_many_small_objects(self) -> None:
        """All their shares together are more than may wait for a thread, so they are verified without."""
        self.store(10, 3)
        jobs: list[str] = []
        workers = self.client.grid.workers
        run = workers.run

        def noting(function: Any, *args: Any, **kwargs: Any) -> Any:
            jobs.append(getattr(function, "__qualname__", ""))
            return run(function, *args, **kwargs)

        self.patch(workers, "run", noting)
        self.remove_server(3)
        summary, _ = self.check(verify=True, repair=True)
        self.assertEqual((summary.objects, summary.repaired), (41, 41))
        self.assertTrue(jobs)
        self.assertEqual([job for job in jobs if "Verifier" in job or "Feeder" in job], [])
        self.assertEqual(self.check(verify=True)[0].healthy, 41)

    def remove_server(self, number: int) -> None:
        """Empty one server."""
        for path in (self.world.servers[number].root / "shares").rglob("*"):
            if path.is_file() and "incoming" not in path.parts and path.name.isdigit():
                path.unlink()

    def test_each_object_once(self) -> None:
        """Also if it is in several places, and in several trees; literal ones count where they are met."""
        self.store(2, 2)
        twice = self.pack(
            {
                "a": self.directories[0],
                "b": self.directories[0],
                "c": self.files[0],
                "d": LitCap(b"x"),
                "e": LitCap(b"x"),
            }
        )
        summary, _ = self.check(twice)
        self.assertEqual((summary.objects, summary.healthy, summary.literal), (6, 6, 2))
        both = self.world.run(check_trees(self.client.grid, [twice, self.root], UpkeepRequest()))
        self.assertEqual(both.objects, 6 + 1 + 3)
        one, _ = self.check(self.files[0])
        self.assertEqual((one.objects, one.healthy), (1, 1))

    def test_what_cannot_be_read(self) -> None:
        """A lost directory is named and told of as lost; the rest goes on, and unknown caps are failures."""
        self.store(3, 2)
        self.remove(self.directories[1])
        self.remove(self.files[0], 8)
        root = self.pack({"tree": self.root, "new": UnknownCap("imm.FUTURE:1")})
        summary, _ = self.check(root, repair=True)
        self.assertEqual(list(self.unread), ["tree/dir 001"])
        self.assertEqual(summary.unreadable, 1)
        self.assertEqual((summary.lost, summary.failed), (2, 1))
        self.assertEqual(summary.objects, 2 + 1 + 3 + 4)
        lost = self.ended["tree/dir 001"]
        assert isinstance(lost, CheckResult)
        self.assertFalse(lost.recoverable)
        self.assertIsInstance(self.ended["new"], Failure)

    def test_hostile_directories(self) -> None:
        """Bytes that are no directory, and one that has a wrong cap for a good file: each by itself."""
        self.store(2, 2)
        [nonsense] = self.put(b"no directory at all" * 20)
        good: Any = self.files[0]
        liar = type(good)(good.key, b"\1" * 32, 3, 10, good.size)
        root = self.pack({"a": DirectoryCap(nonsense), "b": liar, "c": good})  # type: ignore[arg-type]
        summary, _ = self.check(root)
        self.assertEqual(list(self.unread), ["a"])
        self.assertIsInstance(self.ended["b"], Failure)
        found = self.ended["c"]
        assert isinstance(found, CheckResult)
        self.assertTrue(found.healthy, "a wrong cap does not stand in for a right one")
        self.assertEqual(summary.failed, 1)

    def test_cancelling(self) -> None:
        """At any moment; nothing is left behind."""
        self.store(5, 4)
        self.remove_server(2)
        for moment_s in (0.0, 0.06, 0.13, 0.2, 0.27, 0.35):
            running = check_tree(
                self.client.grid, self.root, UpkeepRequest(repair=True, add_lease=True)
            )
            self.world.clock.advance(moment_s)
            running.addErrback(lambda failure: failure.trap(CancelledError))
            running.cancel()
            self.world.clock.advance(1)
            self.assertTrue(running.called)
        summary, _ = self.check(repair=True)
        self.assertEqual(summary.healthy + summary.repaired, 26)
        self.assertTrue(all(isinstance(o, CheckResult | RepairResult) for o in self.ended.values()))
