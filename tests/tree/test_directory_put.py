"""A file is put into a directory that is looked at meanwhile; and looking ahead of other changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError

from pipegrid.core.caps import DirectoryCap, LitCap
from pipegrid.errors import CapError, ChildExists, NotEnoughSharesError, SourceError
from pipegrid.tree.directory import Directory, create_directory
from tests.grid.test_mutables import GridTestCase
from tests.transfer.world import content
from tests.tree.test_directory import _started

A, B = LitCap(b"a"), LitCap(b"b")


class PutTests(GridTestCase):
    """Ten servers, 50 ms away."""

    def setUp(self) -> None:
        super().setUp()
        made: Any = self.world.run(_started(create_directory(self.grid)))
        self.cap: DirectoryCap = made.cap
        self.world.run(made.link("before", A))

    def warm_directory(self) -> tuple[Any, Directory]:
        """Return a grid that knows nothing of the directory, all connections up."""
        grid = self.open()
        stored = self.world.run(grid.put(content(300)))
        self.world.run(grid.read(stored.cap))
        file = self.world.run(grid.create_mutable(b"warm")).cap
        self.world.run(grid.read(file.readonly()))
        return grid, Directory(grid, self.cap)

    def names(self) -> list[str]:
        """Return what is in the directory, as somebody sees it who knows nothing."""
        found: dict[str, Any] = self.world.run(Directory(self.open(), self.cap).list())
        return list(found)

    def lose_share(self) -> None:
        """Of the directory, on one server."""
        index = self.cap.file.storage_index
        assert index is not None
        for server in self.world.servers:
            for number in server.store.slots.list_shares(index):
                (Path(server.store.slots._directory_of(index)) / str(number)).unlink()
                return

    def test_put(self) -> None:
        """Two round trips, though nothing was known of the directory; what is linked can be read."""
        _, directory = self.warm_directory()
        trips, stored = self.trips(directory.put("new", content(300)))
        self.assertEqual((trips, self.names()), (2.0, ["before", "new"]))
        self.assertEqual(self.world.run(self.open().read(stored.cap)), content(300))
        trips, _ = self.trips(directory.put("newer", content(200)))
        self.assertEqual((trips, self.names()), (2.0, ["before", "new", "newer"]))

    def test_names(self) -> None:
        """A name that is there stays, unless it may be replaced; metadata go with the link."""
        _, directory = self.warm_directory()
        with self.assertRaises(ChildExists):
            self.world.run(directory.put("before", content(300)))
        self.world.run(
            directory.put("before", content(300), replace=True, metadata={"note": "new"})
        )
        child = self.world.run(directory.list())["before"]
        self.assertEqual(child.metadata["note"], "new")
        self.assertNotEqual(child.read_cap, A)

    def test_mutable(self) -> None:
        """A new mutable file is put in the same way; its cap is told before it is linked."""
        _, directory = self.warm_directory()
        told: list[Any] = []
        putting = directory.put_mutable("new", b"x", format="mdmf", stored=told.append)
        trips, made = self.trips(putting)
        self.assertEqual((trips, told), (2.0, [made.cap]))
        child = self.world.run(directory.list())["new"]
        self.assertEqual((child.write_cap, made.cap.kind), (made.cap, "MDMF"))
        with self.assertRaises(ChildExists):
            self.world.run(directory.put("new", content(300), stored=told.append))
        self.assertEqual(self.world.run(self.open().read(told[1])), content(300))

    def test_given_up_in_between(self) -> None:
        """Whoever is told the cap may give up then: nothing is linked."""
        _, directory = self.warm_directory()
        putting: list[Any] = []
        put = directory.put("new", content(300), stored=lambda cap: putting[0].cancel())
        putting.append(put)
        with self.assertRaises(CancelledError):
            self.world.run(put)
        self.assertEqual(self.names(), ["before"])

    def test_failures(self) -> None:
        """What cannot be stored is not linked; what cannot be changed is told before anything is stored."""
        _, directory = self.warm_directory()
        with self.assertRaises(SourceError):
            self.world.run(directory.put("new", str(Path(self.mktemp()))))
        self.assertEqual(self.names(), ["before"])
        stored = self.count()
        with self.assertRaises(CapError):
            self.world.run(Directory(self.grid, self.cap.readonly()).put("new", content(999)))
        self.assertEqual(self.count(), stored)

    def count(self) -> int:
        """Return how many files servers have."""
        return sum(len(list(server.root.rglob("*"))) for server in self.world.servers)

    def test_look_ahead(self) -> None:
        """After it any change takes one round trip, the first of this client's."""
        grid, directory = self.warm_directory()
        trips, _ = self.trips(grid.look_ahead(self.cap))
        self.assertEqual(trips, 1.0)
        trips, _ = self.trips(grid.look_ahead(self.cap))
        self.assertEqual(trips, 0.0)
        trips, _ = self.trips(directory.rename("before", "after"))
        self.assertEqual((trips, self.names()), (1.0, ["after"]))

    def test_others(self) -> None:
        """What somebody else has written since stays, and so does what is written then."""
        grid, directory = self.warm_directory()
        self.world.run(grid.look_ahead(self.cap))
        self.world.run(Directory(self.grid, self.cap).link("theirs", B))
        self.world.run(directory.link("ours", B))
        self.assertEqual(self.names(), ["before", "ours", "theirs"])

    def test_not_in_order(self) -> None:
        """Where a share is lost nothing is taken for known: the next change looks, and places it again."""
        self.lose_share()
        grid, directory = self.warm_directory()
        self.world.run(grid.look_ahead(self.cap))
        trips, _ = self.trips(directory.link("new", B))
        self.assertEqual((trips, self.names()), (2.0, ["before", "new"]))
        health = self.world.run(self.open().check(self.cap))
        self.assertTrue(health.healthy)

    def test_nothing_there(self) -> None:
        """Looking tells that there is nothing, and that a cap cannot write."""
        missing = self.world.run(self.grid.create_mutable(b"x")).cap
        for server in self.world.servers:
            for number in server.store.slots.list_shares(missing.storage_index):
                path = Path(server.store.slots._directory_of(missing.storage_index)) / str(number)
                path.unlink()
        with self.assertRaises(NotEnoughSharesError):
            self.world.run(self.open().look_ahead(missing))
        with self.assertRaises(CapError):
            self.world.run(self.open().look_ahead(missing.readonly()))
