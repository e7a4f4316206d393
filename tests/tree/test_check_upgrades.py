"""Looking after trees in which a link that only reads an object comes before the one that writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, DirectoryCap, LitCap, MutableCap
from pipegrid.core.mutable.directory_content_edits import Edit, Link, encrypt_write_cap
from pipegrid.errors import CapError
from pipegrid.transfer.results import CheckResult, RepairResult
from pipegrid.transfer.upkeep import UpkeepOutcome, UpkeepRequest
from pipegrid.tree import tree_check
from pipegrid.tree.directory import Directory, create_directory
from pipegrid.tree.tree_check import CheckReports, FirstMet, TreeSummary, check_trees
from pipegrid.tree.walk import TreeStats, walk
from pipegrid.tree.walk_order import Found
from tests.grid.test_mutables import GridTestCase
from tests.transfer.world import content
from tests.tree.support import entry_bytes
from tests.tree.test_directory import _started


class UpgradeTests(GridTestCase):
    """Ten servers, 50 ms away; ``reads`` are those that the grid was asked for."""

    def directory(self, **children: Cap | None) -> DirectoryCap:
        """Store a directory that can change; returns its write cap."""
        made: Directory = self.world.run(_started(create_directory(self.grid)))
        self.link(made.cap, **children)
        return made.cap

    def link(self, cap: DirectoryCap, **children: Cap | None) -> None:
        """Link caps as they are given, also those that only read."""
        edits: list[Edit] = [Link(name, child) for name, child in children.items() if child]
        if edits:
            self.world.run(Directory(self.grid, cap).change(edits))

    def writekey(self, cap: DirectoryCap) -> bytes:
        """Return what encrypts the write caps in a directory."""
        assert isinstance(cap.file, MutableCap)
        return cap.file.secret

    def file(self, size: int = 200) -> Any:
        """Store a file that can change; returns its write cap."""
        return self.world.run(self.grid.create_mutable(content(size))).cap

    def paths(self, cap: Any) -> list[Path]:
        """Return where the shares of an object are."""
        index = cap.storage_index
        return [
            Path(server.store.slots._directory_of(index)) / str(number)
            for server in self.world.servers
            for number in server.store.slots.list_shares(index)
        ]

    def damage(self, *caps: Any) -> None:
        """Remove three shares of each."""
        for cap in caps:
            for path in self.paths(cap)[:3]:
                path.unlink()

    def check(self, *caps: Cap, **todo: bool) -> TreeSummary:
        """Look after trees as somebody who knows nothing of them; fills ``ended`` and ``reads``."""
        self.ended: dict[str, UpkeepOutcome] = {}
        grid = self.open()
        self.reads = 0
        read = grid.read

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.reads += 1
            return read(*args, **kwargs)

        grid.read = counting

        def ended(number: int, place: FirstMet, outcome: UpkeepOutcome) -> None:
            path = "/".join((str(number), *place.path))
            self.assertNotIn(path, self.ended)
            self.ended[path] = outcome

        return self.world.run(
            check_trees(grid, caps, UpkeepRequest(**todo), reports=CheckReports(ended))
        )

    def assertWhole(self, *caps: Any) -> None:
        """Each has all of its shares, as its writer sees them."""
        for cap in caps:
            self.assertTrue(self.world.run(self.open().check(cap, verify=True)).healthy, str(cap))

    def test_a_file_read_before_it_is_written(self) -> None:
        """Both links in one directory, or the first one a verifier cap: repaired, and counted once."""
        for weaker in ("readonly", "verifier"):
            file = self.file()
            root = self.directory()
            stored = entry_bytes("a", str(getattr(file, weaker)()))
            rw_data = encrypt_write_cap(str(file), self.writekey(root))
            stored += entry_bytes("b", str(file.readonly()), rw_data)
            self.world.run(self.grid.overwrite(root.file, stored))
            for todo in ({}, {"verify": True}):
                self.damage(file)
                summary = self.check(root, repair=True, **todo)
                self.assertEqual((summary.objects, summary.healthy, summary.repaired), (2, 1, 1))
                self.assertEqual(list(self.ended), ["0", "0/a"])
                self.assertIsInstance(self.ended["0/a"], RepairResult)
                self.assertWhole(file)

    def test_a_directory_read_before_it_is_written(self) -> None:
        """All that is below it with write caps is repaired, at any depth, and each once."""
        files = [self.file() for _ in range(3)]
        inner = self.directory(x=files[0], lit=LitCap(b"x"))
        outer = self.directory(inner=inner, y=files[1])
        late = self.directory(z=outer, f=files[2])
        root = self.directory(a=outer.readonly(), b=files[2].readonly(), c=late)
        self.damage(*files, inner, outer)
        summary = self.check(root, repair=True, add_lease=True)
        self.assertEqual((summary.objects, summary.healthy, summary.repaired), (8, 3, 5))
        self.assertEqual((summary.failed, summary.literal), (0, 1))
        self.assertWhole(*files, inner, outer)
        summary = self.check(root, verify=True, repair=True)
        self.assertEqual((summary.objects, summary.healthy), (8, 8))

    def test_trees_one_behind_the_other(self) -> None:
        """The tree that is given by its read cap is repaired by the write cap that is given behind it."""
        file = self.file()
        root = self.directory(f=file)
        self.damage(file, root)
        summary = self.check(root.readonly(), root, repair=True)
        self.assertEqual((summary.objects, summary.repaired), (2, 2))
        self.damage(file)
        summary = self.check(file.readonly(), file, repair=True)
        self.assertEqual((summary.objects, summary.repaired), (1, 1))
        self.assertWhole(file, root)

    def test_without_a_write_cap(self) -> None:
        """What no link writes fails as before, in one walk; what has one beside it is repaired."""
        foreign, own = self.file(), self.file()
        root = self.directory(a=foreign.readonly(), b=self.directory(c=own))
        self.damage(foreign)
        summary = self.check(root, repair=True)
        self.assertEqual((summary.objects, summary.healthy, summary.failed), (4, 3, 1))
        failure = self.ended["0/a"]
        assert isinstance(failure, Failure)
        self.assertTrue(failure.check(CapError))
        self.assertEqual(self.reads, 2, "no other walk where no write cap was passed over")
        self.link(root, c=own.readonly(), d=own)
        self.damage(own)
        summary = self.check(root, repair=True)
        self.assertEqual((summary.objects, summary.repaired, summary.failed), (4, 1, 1))

    def test_a_healthy_tree_is_walked_once(self) -> None:
        """Nor is anything held back where no repair is wanted."""
        file = self.file()
        root = self.directory(a=file.readonly(), b=self.directory(c=file))
        for todo in ({"repair": True}, {}, {"renew": True}, {"add_lease": True}):
            summary = self.check(root, **todo)
            self.assertEqual((summary.objects, summary.healthy, self.reads), (3, 3, 2))

    def test_private_keys(self) -> None:
        """A damaged private key, which only writers see, is found also where a reader comes first."""
        file = self.file()
        root = self.directory(a=file.readonly(), b=file)
        path = self.paths(file)[0]
        data = bytearray(path.read_bytes())
        data[-400] ^= 1
        path.write_bytes(data)
        summary = self.check(root, verify=True)
        self.assertEqual((summary.objects, summary.healthy, summary.damaged), (2, 1, 1))
        summary = self.check(root, verify=True, repair=True)
        self.assertEqual((summary.objects, summary.healthy, summary.repaired), (2, 1, 1))
        self.assertWhole(file)

    def test_what_is_held_is_bounded(self) -> None:
        """Few at a time: all are repaired nevertheless, those without a write cap are told of, each once."""
        self.patch(tree_check, "MAX_HELD", 2)
        files = [self.file() for _ in range(5)]
        foreign = [self.file() for _ in range(3)]
        below = self.directory(**{f"f{n}": file for n, file in enumerate(files)})
        readers = {f"g{n}": file.readonly() for n, file in enumerate(foreign)}
        root = self.directory(a=below.readonly(), **readers, z=below)
        self.damage(*files, *foreign)
        summary = self.check(root, repair=True)
        self.assertEqual((summary.objects, summary.repaired, summary.failed), (10, 5, 3))
        self.assertEqual(len(self.ended), 10)
        self.assertWhole(*files)

    def test_loops(self) -> None:
        """Directories that hold each other, by both kinds of caps, are repaired and end."""
        first, second = self.directory(), self.directory()
        self.link(first, a=second.readonly(), b=second, c=first.readonly(), d=first)
        self.link(second, a=first.readonly(), b=first, c=second.readonly())
        self.damage(first, second)
        summary = self.check(first.readonly(), first, repair=True)
        self.assertEqual((summary.objects, summary.repaired), (2, 2))
        self.assertWhole(first, second)

    def test_an_unreadable_directory_has_its_write_cap(self) -> None:
        """What is no directory, though it is linked as one, is looked after by the cap that writes it."""
        nonsense = DirectoryCap(self.file())
        root = self.directory(a=nonsense)
        self.damage(nonsense)
        summary = self.check(root, repair=True)
        self.assertEqual((summary.objects, summary.unreadable, summary.repaired), (2, 1, 1))

    def test_leases(self) -> None:
        """Leases take no write cap: every share gets one, whichever link comes first."""
        file = self.file()
        inner = self.directory(x=file)
        root = self.directory(a=inner.readonly(), b=inner)
        for todo in ({"add_lease": True}, {"add_lease": True, "repair": True}, {"renew": True}):
            summary = self.check(root, **todo)
            self.assertEqual((summary.objects, summary.healthy), (3, 3))
            for outcome in self.ended.values():
                if isinstance(outcome, CheckResult):
                    self.assertEqual(len(outcome.renewed), 10)
                else:
                    assert not isinstance(outcome, (Failure, RepairResult))
                    self.assertEqual(len(outcome.leases), 10)

    def test_counting(self) -> None:
        """Statistics and manifests are the same, whichever link comes first."""
        file = self.file()
        inner = self.directory(x=file, lit=LitCap(b"x"))
        fields = []
        for links in ({"a": inner.readonly(), "b": inner}, {"a": inner, "b": inner.readonly()}):
            stats = TreeStats()
            caps: list[str] = []

            async def count(root: DirectoryCap, stats: TreeStats, caps: list[str]) -> None:
                with walk(self.grid, root) as tree:
                    async for met in tree:
                        stats.count(met)
                        assert isinstance(met, Found)
                        if met.path and not met.again:
                            caps.append(str(met.cap))

            self.world.run(_started(count(self.directory(**links), stats, caps)))
            counts = {k: v for k, v in stats.fields().items() if k.startswith("count-")}
            fields.append((counts, caps))  # sizes have times of linking in them
        self.assertEqual(fields[0], fields[1])
        self.assertEqual(fields[0][0]["count-directories"], 2)
