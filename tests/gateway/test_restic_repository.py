"""Repositories of restic on a grid in virtual time: what is stored where, when it counts, what it costs."""

from __future__ import annotations

import hashlib
import io
from typing import Any, ClassVar

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from pipegrid.core.caps import LitCap
from pipegrid.core.mutable import keys
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.errors import UnhappyError
from pipegrid.gateway.restic.object_directory import ListMemory, ObjectDirectory
from pipegrid.gateway.restic.repositories import ObjectExists, Repository, SmallObjects
from pipegrid.testing.grid import SimulatedGrid
from pipegrid.tree.directory import Directory
from tests.transfer.world import content


class SpareKeys:
    """Key pairs that several tests use, each of them once: to make one takes a tenth of a second."""

    made: ClassVar[list[SigningKey]] = []

    def __init__(self) -> None:
        self._generate = keys.generate
        self._taken = 0

    def generate(self) -> SigningKey:
        """Return one that this test has not had."""
        if self._taken == len(self.made):
            self.made.append(self._generate())
        self._taken += 1
        return self.made[self._taken - 1]


def object_of(data: bytes) -> str:
    """Return the id of an object."""
    return hashlib.sha256(data).hexdigest()


class RepositoryTestCase(TestCase):
    """Ten servers, 50 ms away, and a repository."""

    def setUp(self) -> None:
        self.patch(keys, "generate", SpareKeys().generate)
        self.world = SimulatedGrid(self.mktemp())
        self.addCleanup(self.world.close)
        self.grid = self.world.client()
        made = self.world.run(self.grid.create_directory())
        self.cap = made.cap
        self.repository = self.open(self.grid)
        self.do(self.repository.make_directories())

    def open(self, grid: Any) -> Repository:
        """Return the repository as a process sees it that knows nothing of it."""
        return Repository(grid, ObjectDirectory(grid, self.cap, ListMemory()), SmallObjects(grid))

    def do(self, work: Any) -> Any:
        """Run a coroutine to its end."""
        return self.world.run(Deferred.fromCoroutine(work))

    def trips(self, *work: Any) -> float:
        """Return how many round trips these coroutines take, all at once."""
        began = self.world.clock.seconds()
        running = [Deferred.fromCoroutine(each) for each in work]
        for each in running:
            self.world.run(each)
        return round((self.world.clock.seconds() - began) / 0.1, 1)

    def put(self, kind: str, data: bytes, repository: Repository | None = None) -> Any:
        """Store an object."""
        return (repository or self.repository).store(kind, object_of(data), io.BytesIO(data))

    def listed(self, kind: str, repository: Repository | None = None) -> dict[str, int]:
        """Return ids and sizes of a kind."""

        async def collect() -> dict[str, int]:
            found: dict[str, int] = {}
            async for some in (repository or self.repository).objects(kind):
                found.update(some)
            return found

        return dict(self.do(collect()))

    def read(self, kind: str, object_id: str, repository: Repository | None = None) -> bytes | None:
        """Return the content of an object."""
        cap = self.do((repository or self.repository).find(kind, object_id))
        return None if cap is None else bytes(self.world.run(self.grid.read(cap)))

    def crash(self, servers: int) -> None:
        """Take servers away."""
        for server in self.world.servers[:servers]:
            server.host.crash(1e9)


class StoreTests(RepositoryTestCase):
    """What is stored is where restic would have it, and other processes see it."""

    def test_layout(self) -> None:
        """Packs are in a directory by the first byte of their id; the rest by kind; the config at the top."""
        pack, index = content(300), content(200)
        self.do(self.put("data", pack))
        self.do(self.put("index", index))
        self.do(self.repository.store("config", "", io.BytesIO(b"config")))
        other = self.world.client("other")
        top: Any = self.world.run(Directory(other, self.cap).list())
        kinds = {"config", "data", "index", "keys", "locks", "snapshots"}
        self.assertEqual(set(top), kinds)
        name = object_of(pack)
        below: Any = self.world.run(Directory(other, top["data"].cap).list())
        self.assertEqual(set(below), {name[:2]})
        packs: Any = self.world.run(Directory(other, below[name[:2]].cap).list())
        self.assertEqual(set(packs), {name})
        self.assertEqual(self.world.run(other.read(packs[name].cap)), pack)

    def test_other_process(self) -> None:
        """Another process finds, lists and reads what was stored, and stores itself."""
        pack = content(300)
        self.do(self.put("data", pack))
        other = self.open(self.world.client("other"))
        self.assertEqual(self.listed("data", other), {object_of(pack): 300})
        self.assertEqual(self.read("data", object_of(pack), other), pack)
        new = content(400)
        self.do(self.put("data", new, other))
        self.assertEqual(self.read("data", object_of(new)), new)
        self.assertEqual(self.listed("data"), {object_of(pack): 300, object_of(new): 400})

    def test_remove(self) -> None:
        """What was removed is neither found nor listed, by whomever; removing it again does nothing."""
        data = content(300)
        name = object_of(data)
        self.do(self.put("index", data))
        other = self.open(self.world.client("other"))
        self.assertIsNotNone(self.do(other.find("index", name)))
        self.do(self.repository.remove("index", name))
        self.do(self.repository.remove("index", name))
        self.assertIsNone(self.do(self.repository.find("index", name)))
        self.assertEqual(self.listed("index", other), {})
        self.assertIsNone(self.do(other.find("index", name)))

    def test_config_stays(self) -> None:
        """A config is not replaced by another one; the same one again is no error."""
        self.do(self.repository.store("config", "", io.BytesIO(content(300))))
        self.do(self.repository.store("config", "", io.BytesIO(content(300))))
        with self.assertRaises(ObjectExists):
            self.do(self.repository.store("config", "", io.BytesIO(content(301))))
        self.assertEqual(self.read("config", ""), content(300))

    def test_again(self) -> None:
        """The same object again is stored, without a publish."""
        self.do(self.put("index", content(300)))
        before = self.world.clock.seconds()
        self.do(self.put("index", content(300)))
        self.assertLess(self.world.clock.seconds() - before, 0.25)
        self.assertEqual(len(self.listed("index")), 1)

    def test_foreign_entries(self) -> None:
        """What restic has not stored there is not listed."""
        directory = Directory(self.grid, self.cap)
        children: Any = self.world.run(directory.list())
        index = Directory(self.grid, children["index"].cap)
        self.world.run(index.link("notes.txt", LitCap(b"x")))
        self.world.run(index.link("a" * 64, children["keys"].cap))
        self.assertEqual(self.listed("index"), {})
        self.assertIsNone(self.do(self.repository.find("index", "a" * 64)))


class CostTests(RepositoryTestCase):
    """Round trips, and publishes."""

    def test_trips(self) -> None:
        """An object takes two round trips: its shares, and the link."""
        self.do(self.put("index", content(300)))
        self.assertEqual(self.trips(self.put("index", content(301))), 2.0)
        self.do(self.put("data", content(300)))
        self.assertLessEqual(self.trips(self.put("data", content(301))), 3.0)

    def test_small_trips(self) -> None:
        """Keys and snapshots take one round trip to store, and none to read."""
        for kind in ("keys", "snapshots"):
            self.do(self.put(kind, content(300)))
            small, large = content(301), content(2000)
            self.assertEqual(self.trips(self.put(kind, small)), 1.0)
            self.assertEqual(self.trips(self.put(kind, large)), 2.0)
            other = self.open(self.world.client(f"of {kind}"))
            for data in (small, large):
                self.assertEqual(self.read(kind, object_of(data), other), data)
            cap = self.do(self.repository.find(kind, object_of(small)))
            self.assertEqual(self.trips(self.repository.content(kind, cap)), 0.0)

    def test_unlock_trips(self) -> None:
        """To remove a lock takes one round trip, also after it was listed."""
        lock = content(200)
        self.do(self.put("locks", lock))
        self.listed("locks")
        self.assertEqual(self.trips(self.repository.remove("locks", object_of(lock))), 1.0)
        self.assertEqual(self.listed("locks"), {})

    def test_lists(self) -> None:
        """What is listed at the beginning of a backup: four lists, of which two were read ahead."""
        self.do(self.put("locks", content(300)))
        self.do(self.repository.remove("locks", object_of(content(300))))
        self.do(self.repository.store("config", "", io.BytesIO(content(155))))
        self.repository.look_ahead()
        self.world.clock.advance(0.5)
        began_s = self.world.clock.seconds()
        self.listed("locks")
        self.do(self.put("locks", content(301)))
        for kind in ("locks", "index", "snapshots"):
            self.listed(kind)
        self.assertEqual(round((self.world.clock.seconds() - began_s) / 0.1, 1), 4.0)

    def test_lists_after_a_lock(self) -> None:
        """
        A list that was read ahead is not used once a lock was stored or listed: what another client has
        changed before it removed its lock is seen.
        """
        other = self.open(self.world.client("other"))
        self.do(self.put("locks", content(300)))
        self.listed("snapshots")
        self.repository.look_ahead()
        self.listed("index")
        self.do(self.put("snapshots", content(400), other))
        self.do(self.put("locks", content(500), other))
        self.do(self.put("locks", content(301)))
        self.assertEqual(len(self.listed("locks")), 3)
        self.assertEqual(len(self.listed("snapshots")), 1)
        self.listed("index")
        self.do(self.put("snapshots", content(401), other))
        self.listed("locks")
        self.assertEqual(len(self.listed("snapshots")), 2)

    def test_joined(self) -> None:
        """Many at once take little longer than one; they are a few publishes."""
        self.do(self.put("index", content(300)))
        trips = self.trips(*(self.put("index", content(302 + n)) for n in range(100)))
        self.assertLessEqual(trips, 4.0)
        self.assertEqual(len(self.listed("index")), 101)

    def test_packs_at_once(self) -> None:
        """Packs that go to different directories do not wait for each other."""
        trips = self.trips(*(self.put("data", content(400 + n)) for n in range(12)))
        self.assertLessEqual(trips, 5.0)
        self.assertEqual(len(self.listed("data")), 12)

    def test_begin(self) -> None:
        """What each command reads first takes one round trip: config, list of keys, keys."""
        self.do(self.repository.store("config", "", io.BytesIO(content(155))))
        key = content(2000)
        self.do(self.put("keys", key))
        cold = self.open(self.world.client("other"))
        self.do(cold.find("config", ""))
        self.listed("keys", cold)
        self.world.clock.advance(30)

        async def begin() -> None:
            cold.look_ahead()
            found = await cold.find("config", "")
            assert found is not None
            await cold.content("config", found)
            async for objects in cold.objects("keys"):
                for name, _ in objects:
                    found = await cold.find("keys", name)
                    assert found is not None
                    self.assertEqual(await cold.content("keys", found), key)

        self.assertEqual(self.trips(begin()), 2.0)
        self.assertEqual(self.trips(begin()), 0.0)
        self.world.clock.advance(20)
        self.assertEqual(self.trips(begin()), 1.0)


class LockTests(RepositoryTestCase):
    """A repository can be read though too few servers are left to store a lock."""

    def test_held(self) -> None:
        """The lock is held in memory: listed, read, removed; nothing else is changed."""
        pack = content(300)
        self.do(self.put("data", pack))
        self.crash(7)
        lock = content(150)
        self.do(self.put("locks", lock))
        self.assertEqual(self.listed("locks"), {object_of(lock): 150})
        self.assertEqual(self.read("locks", object_of(lock)), lock)
        self.assertEqual(self.read("data", object_of(pack)), pack)
        with self.assertRaises(UnhappyError):
            self.do(self.put("data", content(301)))
        with self.assertRaises(UnhappyError):
            self.do(self.repository.remove("data", object_of(pack)))
        self.do(self.repository.remove("locks", object_of(lock)))
        self.assertEqual(self.listed("locks"), {})

    def test_stored_later(self) -> None:
        """Before anything is changed, the lock is stored, so that other gateways see it."""
        for server in self.world.servers[:7]:
            server.host.crash(100)
        lock = content(150)
        self.do(self.put("locks", lock))
        self.world.clock.advance(200)
        self.do(self.put("data", content(300)))
        other = self.open(self.world.client("other"))
        self.assertEqual(self.listed("locks", other), {object_of(lock): 150})
        self.do(self.repository.remove("locks", object_of(lock)))
        self.assertEqual(self.listed("locks", other), {})


class WritersTests(RepositoryTestCase):
    """Two gateways write to one repository."""

    def test_two(self) -> None:
        """Nothing is lost, whichever directories both write to, and make."""
        other = self.open(self.world.client("other"))
        work = []
        for n in range(6):
            work += [self.put("data", content(300 + n)), self.put("data", content(400 + n), other)]
            work += [
                self.put("index", content(500 + n)),
                self.put("index", content(600 + n), other),
            ]
        self.trips(*work)
        third = self.open(self.world.client("third"))
        self.assertEqual(len(self.listed("data", third)), 12)
        self.assertEqual(len(self.listed("index", third)), 12)

    def test_given_up(self) -> None:
        """A client that gives up takes nothing away from others that wait for the same directory."""
        data = content(300)
        first = Deferred.fromCoroutine(self.put("data", data))
        second = Deferred.fromCoroutine(self.put("data", data))
        first.addErrback(lambda _: None)
        self.world.clock.advance(0.02)
        first.cancel()
        self.world.run(second)
        self.assertEqual(self.read("data", object_of(data)), data)


class MemoryTests(RepositoryTestCase):
    """Lists that are kept are bounded."""

    def test_bound(self) -> None:
        """The list that was used last stays; what was dropped is read again."""
        memory = ListMemory(15_000)
        made: list[ObjectDirectory] = []
        for n in range(3):
            directory = self.world.run(self.grid.create_directory())
            made.append(ObjectDirectory(self.grid, directory.cap, memory))
            self.world.run(made[-1].read())
            for name in range(6):
                self.do(made[-1].link(f"{n}{name}", LitCap(b"x")))
        self.assertLessEqual(memory.used_bytes, 15_000)
        self.assertIsNone(made[0].known("00"))
        self.assertIsNotNone(made[2].known("20"))
        self.assertEqual(self.do(made[0].find("00")), LitCap(b"x"))
