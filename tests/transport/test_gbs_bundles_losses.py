"""Bundles with real clients and servers in virtual time: losses, restarts, replaced servers, whole grids."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.disk.durability import Policy
from pipegrid.errors import (
    GridError,
    PipegridError,
    ServerError,
    ServerUnreachable,
)
from pipegrid.http11.exchange import RawRequest
from pipegrid.server.gbs.body_receivers import Receiver
from pipegrid.server.gbs.http_connection import GbsSite
from pipegrid.server.gbs.request_check import Request
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.testing.fault_plan import FaultPlan
from pipegrid.testing.network import leaks
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.wire.gbs_bundles import (
    BundledUpload,
)
from pipegrid.wire.gbs_paths_headers import Resource
from pipegrid.wire.storage_messages import Allocation, UploadSecrets, WriteAnswer
from tests.scratch import scratch_path
from tests.transport.contract import OTHERS_SECRETS, SECRETS
from tests.transport.gbs_world import CLIENT, SWISSNUM, GbsWorld, make_grid
from tests.transport.test_gbs_bundles import (
    PARAMS,
    SHARE_BYTES,
    Parts,
    allocated,
    index,
    without_collector,
)


class OldService(GbsService):
    """A server that knows no bundles."""

    offer = b""

    def begin(self, request: Request) -> Receiver:
        """As if the path led nowhere."""
        if request.target is not None and request.target.resource is Resource.BUNDLE:
            request.target = None
        return super().begin(request)


class WorldTestCase(SynchronousTestCase):
    """Real servers and clients; which servers are old a test says, also between restarts."""

    def setUp(self) -> None:
        self.old: set[str] = set()
        self.random = Random(5)

    def make_world(
        self, servers: int = 1, policy: Policy = "batch", latency_s: float = 0.05
    ) -> GbsWorld:
        """Return a network with servers that have nothing."""
        root, factory = scratch_path(self), self._make_factory
        world = GbsWorld(root, servers, policy=policy, latency_s=latency_s, make_factory=factory)
        self.addCleanup(world.close)
        return world

    def _make_factory(self, service: GbsService, clock: Any) -> Factory:
        if Path(service.store.root).name in self.old:
            service = OldService(service.store, service._durability, SWISSNUM)
        return GbsSite(service, clock)

    def connect(self, world: GbsWorld) -> GbsServer:
        """Return a client that has learned what the server takes; no connection for uploads yet."""
        server = world.connect()
        world.run(server.version())
        return server

    def end(self, world: GbsWorld, server: GbsServer) -> None:
        """Disconnect, and look that nothing is left."""
        world.run(server.disconnect())
        world.clock.advance(700)
        self.assertEqual(leaks(world.clock, world.network), [])

    def upload(self, server: GbsServer, numbers: Iterable[int] = (1, 2, 3)) -> dict[int, Parts]:
        """Store share 0 of these indexes."""
        uploads = {}
        for number in numbers:
            data = self.random.randbytes(SHARE_BYTES)
            allocation = server.allocate(index(number), {0}, len(data), SECRETS)
            write = server.write(index(number), 0, 0, [data], SECRETS.upload)
            uploads[number] = Parts(allocation, {0: write}, {0: data})
        return uploads

    def check_stored(
        self, world: GbsWorld, uploads: dict[int, Parts], where: str = ""
    ) -> list[Allocation]:
        """All of it is said to be stored, and is there; returns the allocations."""
        allocations = []
        for parts in uploads.values():
            allocations.append(world.run(parts.allocation))
            for write in parts.writes.values():
                self.assertEqual(world.run(write), WriteAnswer(True), where)
        self.check_disk(world, uploads, where)
        return allocations

    def check_disk(self, world: GbsWorld, uploads: dict[int, Parts], where: str = "") -> None:
        """These shares are there, once, and beside them perhaps that of index 9."""
        host = world.servers[0]
        found = {}
        for number in range(10):
            for share_number in host.store.list_shares(index(number)):
                with host.store.open_share(index(number), share_number) as reader:
                    found[number] = {share_number: reader.read(0, 1 << 20)}
        found.pop(9, None)
        self.assertEqual(found, {number: parts.data for number, parts in uploads.items()}, where)
        self.assertEqual(list(host.root.glob("shares/incoming/*")), [], where)

    def bundles(self, world: GbsWorld, number: int = 0) -> int:
        """Return how many bundles a server has carried out since it started."""
        count: int = world.servers[number].factory.service.requests["bundle", 200]
        return count


class LossTests(WorldTestCase):
    """Connections and servers that are lost under a bundle."""

    def test_a_lost_connection(self) -> None:
        """Wherever the connection breaks, before the bundle arrived or behind it, it ends stored, once."""
        places = [("s0", n) for n in range(0, 1500, 23)] + [(CLIENT, n) for n in range(0, 200, 11)]
        sent_again = 0
        for towards, after_bytes in places:
            world = self.make_world()
            server = self.connect(world)
            world.network.cut(CLIENT, "s0", 1, towards, after_bytes)
            self.check_stored(world, self.upload(server), f"{after_bytes} bytes towards {towards}")
            self.assertIn(self.bundles(world), (1, 2))
            sent_again += self.bundles(world) == 2
            self.end(world, server)
        self.assertGreater(sent_again, 5)

    def test_a_lost_answer(self) -> None:
        """A bundle whose answer was lost after it was carried out is found in the server's list."""
        world = self.make_world()
        server = self.connect(world)
        world.network.cut(CLIENT, "s0", 1, CLIENT, 0)
        allocations = self.check_stored(world, self.upload(server))
        self.assertEqual([each.already_have for each in allocations], [{0}] * 3)
        self.assertEqual(self.bundles(world), 2)
        self.end(world, server)

    def test_a_share_that_is_not_listed_yet(self) -> None:
        """A repeated bundle whose shares are in no list yet is asked about until they are."""
        world = self.make_world()
        server = self.connect(world)
        world.network.cut(CLIENT, "s0", 1, CLIENT, 0)
        store = world.servers[0].store
        hidden_until_s = world.clock.seconds() + 0.8
        really_list, really_allocate = store.list_shares, store.allocate_in_steps

        def list_shares(storage_index: bytes) -> frozenset[int]:
            hidden = world.clock.seconds() < hidden_until_s
            return frozenset() if hidden else really_list(storage_index)

        def allocate(storage_index: bytes, *others: Any) -> Generator[None, None, Allocation]:
            if really_list(storage_index):
                return allocated()
            return (yield from really_allocate(storage_index, *others))

        self.patch(store, "allocate_in_steps", allocate)
        self.patch(store, "list_shares", list_shares)
        uploads = self.upload(server)
        for parts in uploads.values():
            self.assertEqual(world.run(parts.writes[0]), WriteAnswer(True))
        self.assertGreater(world.clock.seconds(), hidden_until_s)
        self.check_disk(world, uploads)
        self.end(world, server)

    MOMENTS_MS = (*range(0, 49, 12), *range(49, 58), *range(60, 100, 12))
    """A bundle arrives after 50 ms and is carried out until 53."""

    def restart(self, after_ms: int, replaced: bool) -> Counter[tuple[str, int]]:
        """
        Let the server restart so long after a bundle was sent to it: it all ends stored.

        Returns the requests to the server that came back.
        """
        self.old.clear()
        world = self.make_world()
        server = self.connect(world)
        world.run(self.upload(server, (9,))[9].writes[0])
        uploads = self.upload(server)
        world.clock.advance(after_ms / 1000)
        if replaced:
            self.old.add("s0")
        world.servers[0].host.crash(down_s=1.0)
        self.check_stored(world, uploads, f"restarted after {after_ms} ms")
        self.end(world, server)
        requests: Counter[tuple[str, int]] = world.servers[0].factory.service.requests
        return requests

    def test_a_restart(self) -> None:
        """A server that restarts before, while or after it carries out a bundle has it all in the end."""
        requests = [self.restart(each, False) for each in self.MOMENTS_MS]
        self.assertIn({("bundle", 200): 1}, requests)
        self.assertIn({}, requests)

    def test_a_replacement(self) -> None:
        """The same where the server that comes back knows no bundles."""
        requests = [self.restart(each, True) for each in self.MOMENTS_MS]
        expected = {("POST", 404): 1, ("allocate", 200): 3, ("write", 201): 3}
        self.assertIn(expected, requests)
        self.assertIn({}, requests)

    def test_a_replacement_after_a_lost_answer(self) -> None:
        """Shares that the first server stored, and the second is sent again in its own way, are stored."""
        world = self.make_world()
        server = self.connect(world)
        world.network.cut(CLIENT, "s0", 1, CLIENT, 0)
        uploads = self.upload(server)
        world.clock.advance(0.16)
        self.assertEqual(self.bundles(world), 1)
        self.old.add("s0")
        world.servers[0].host.crash(down_s=0.001)
        allocations = self.check_stored(world, uploads)
        self.assertEqual([each.already_have for each in allocations], [{0}] * 3)
        self.assertEqual(world.servers[0].factory.service.requests["POST", 404], 1)
        self.end(world, server)

    def test_losses_without_end(self) -> None:
        """Losses at the same place each time end in an error for every part, or stored."""
        for towards, after_bytes in (("s0", 100), ("s0", 900), (CLIENT, 0), (CLIENT, 100)):
            world = self.make_world()
            server = self.connect(world)
            for connection in range(1, 50):
                world.network.cut(CLIENT, "s0", connection, towards, after_bytes)
            ends: list[Any] = []
            for parts in self.upload(server).values():
                for part in parts.all:
                    part.addBoth(ends.append)
            world.clock.advance(200)
            self.assertEqual(len(ends), 6)
            for end in ends:
                if not isinstance(end, (Allocation, WriteAnswer)):
                    self.assertIsInstance(end.value, ServerError)
            self.end(world, server)

    def test_disconnect_at_any_moment(self) -> None:
        """Held, connecting, under way, waiting for a lost server: disconnect ends it all, without a trace."""
        for connected in (False, True):
            for after_s in (None, 0.0, 0.02, 0.05, 0.06, 0.1, 0.12, 0.16, 0.2, 0.4, 1.0):
                world = self.make_world()
                server = self.connect(world)
                if connected:
                    world.run(self.upload(server, (9,))[9].writes[0])
                ends: list[Any] = []
                for parts in self.upload(server).values():
                    for part in parts.all:
                        part.addBoth(ends.append)
                if after_s is not None:
                    world.clock.advance(min(after_s, 0.16))
                    if after_s > 0.16:
                        world.servers[0].host.crash(down_s=10)
                    world.clock.advance(max(0.0, after_s - 0.16))
                world.run(server.disconnect())
                self.assertEqual(len(ends), 6)
                for end in ends:
                    if isinstance(end, Failure):
                        self.assertIsInstance(end.value, ServerUnreachable)
                self.assertEqual(world.client.clock.getDelayedCalls(), [])
                self.end(world, server)

    def test_share_data_is_let_go_of(self) -> None:
        """Nothing that was sent stays in memory behind its answer, until a collector finds it."""
        without_collector(self)
        world = self.make_world()
        server = self.connect(world)
        kept: list[weakref.ref[Any]] = []
        real = server._requests.bundle

        def note(uploads: Sequence[BundledUpload]) -> RawRequest:
            request = real(uploads)
            kept.extend(map(weakref.ref, (request, *uploads)))
            return request

        self.patch(server._requests, "bundle", note)
        for parts in self.upload(server).values():
            world.run(parts.writes[0])
            self.successResultOf(parts.allocation)
        self.assertEqual(len(kept), 4)
        self.assertEqual([each() for each in kept], [None] * 4)
        self.end(world, server)


class OrderTests(WorldTestCase):
    """Who calls notices nothing of bundles: everything ends as it does without them."""

    def test_behind_shares_that_become_durable(self) -> None:
        """An allocation in a bundle sees the shares that were written before it, as any other does."""
        world = self.make_world()
        server = self.connect(world)
        first = self.upload(server, (1,))[1]
        world.clock.advance(0.001)
        allocation = server.allocate(index(1), {0, 2}, 10, OTHERS_SECRETS)
        write = server.write(index(1), 2, 0, [bytes(10)], OTHERS_SECRETS.upload)
        self.assertEqual(world.run(first.writes[0]), WriteAnswer(True))
        expected = Allocation(frozenset({0}), frozenset({2}))
        self.assertEqual(world.run(allocation), expected)
        self.assertEqual(world.run(write), WriteAnswer(True))
        self.end(world, server)

    def test_another_length_than_before(self) -> None:
        """A share that is shorter than its upload completes nothing, and does not harm its neighbours."""
        world = self.make_world()
        server = self.connect(world)
        data = self.random.randbytes(60)
        world.run(server.allocate(index(4), {0}, 60, SECRETS))
        before = self.upload(server, (1,))
        allocation = server.allocate(index(4), {0}, 50, SECRETS)
        write = server.write(index(4), 0, 0, [data[:50]], SECRETS.upload)
        behind = self.upload(server, (2,))
        self.assertEqual(world.run(allocation), allocated())
        with self.assertRaises(ServerError):
            world.run(write)
        self.assertGreater(self.bundles(world), 0)
        result = server.write(index(4), 0, 0, [data], SECRETS.upload)
        self.assertEqual(world.run(result), WriteAnswer(True))
        self.check_stored(world, before | behind | {4: Parts(allocation, {}, {0: data})})
        self.end(world, server)

    def try_seed(self, seed: int) -> list[str]:
        """Return how random operations end, many of them called in the same turn, and what is stored."""
        random = Random(seed)
        world = self.make_world(latency_s=0.01)
        server = self.connect(world)
        ends: dict[str, str] = {}

        def note(result: Any, name: str) -> None:
            if isinstance(result, Failure):
                error = result.value
                assert isinstance(error, PipegridError), result
                result = f"{type(error).__name__}: {error}"
            ends[name] = f"{name}: {result}"

        def begin(name: str, storage_index: bytes, number: int, secrets: UploadSecrets) -> None:
            size = 50 if secrets is SECRETS else 60
            made: list[Deferred[Any]] = []
            if name in ("allocate", "upload"):
                numbers = {number, random.randrange(3)}
                made.append(server.allocate(storage_index, numbers, size, secrets))
            if name in ("write", "upload"):
                data = [bytes([number]) * size]
                made.append(server.write(storage_index, number, 0, data, secrets.upload))
            if name == "abort":
                made.append(server.abort(storage_index, number, secrets.upload))
            if name == "list":
                made.append(server.list_shares(storage_index))
            for each in made:
                what = f"{len(names):3} {name} {storage_index[0]}/{number}, {size} bytes"
                names.append(what)
                each.addBoth(note, what)

        names: list[str] = []
        for _ in range(random.randrange(2, 9)):
            for _ in range(random.randrange(1, 9)):
                begin(
                    random.choice(("allocate", "write", "upload", "upload", "abort")),
                    index(random.randrange(1, 4)),
                    random.randrange(3),
                    random.choice((SECRETS, SECRETS, OTHERS_SECRETS)),
                )
            if random.random() < 0.2:
                # A change that waits for a question may be overtaken by an allocation, so here none does.
                begin("list", index(1), 0, SECRETS)
                world.clock.advance(0.3)
            world.clock.advance(random.choice((0.0, 0.0001, 0.001, 0.004, 0.05, 0.3)))
        world.clock.advance(100)
        self.bundled += self.bundles(world)
        store, stored = world.servers[0].store, []
        for number in range(1, 4):
            for share_number in sorted(store.list_shares(index(number))):
                with store.open_share(index(number), share_number) as reader:
                    stored.append(f"{number}/{share_number}: {reader.read(0, 99).hex()}")
        self.end(world, server)
        return [ends[name] for name in names] + stored

    def test_random_operations(self) -> None:
        """A server that takes bundles gives the same answers as one that does not, and stores the same."""
        for seed in range(60):
            self.old, self.bundled = {"s0"}, 0
            expected = self.try_seed(seed)
            self.assertEqual(self.bundled, 0)
            self.old = set()
            self.assertEqual(self.try_seed(seed), expected, f"seed {seed}")
        self.assertGreater(self.bundled, 0)


class GridTests(WorldTestCase):
    """Whole puts."""

    def check_on_disk(self, world: GbsWorld, result: Any) -> None:
        """Every share is where the result says."""
        by_name = {host.name: host for host in world.servers}
        text = base32.encode(result.cap.storage_index)
        for number, name in result.shares_placed.items():
            path = by_name[name].root / "shares" / text[:2] / text / str(number)
            self.assertTrue(path.exists(), f"share {number} is not on {name}")

    def test_a_replaced_server(self) -> None:
        """A put succeeds on servers that were replaced by such as know no bundles, and so do later ones."""
        for after_s in (None, 0.0, 0.03, 0.051):
            self.old.clear()
            world = self.make_world(5)
            grid = make_grid(world, params=PARAMS)
            world.run(grid.put(self.random.randbytes(300)))
            world.run(grid.status())
            names = {host.name for host in world.servers}
            self.old |= names
            if after_s is None:
                for host in world.servers:
                    host.host.crash(down_s=0.5)
                world.clock.advance(1)
            files = [self.random.randbytes(300) for _ in range(3)]
            waiting = [grid.put(data) for data in files]
            if after_s is not None:
                world.clock.advance(after_s)
                for host in world.servers:
                    host.host.crash(down_s=0.5)
            results = [world.run(each) for each in waiting]
            refused = [host.factory.service.requests["POST", 404] for host in world.servers]
            self.assertTrue(any(refused), f"{after_s}")
            for result, data in zip(results, files, strict=True):
                self.assertEqual(result.happiness, 5)
                self.assertEqual(world.run(grid.read(result.cap)), data)
                self.check_on_disk(world, result)
            self.assertEqual(world.run(grid.put(self.random.randbytes(300))).happiness, 5)
            again = [host.factory.service.requests["POST", 404] for host in world.servers]
            self.assertEqual(again, refused)
            world.run(grid.close())
            world.clock.advance(700)
            self.assertEqual(leaks(world.clock, world.network), [])

    def test_the_same_put_again(self) -> None:
        """Shares that are there are found, and nothing is written twice."""
        world = self.make_world(5)
        grid = make_grid(world, params=PARAMS)
        world.run(grid.status())
        data = self.random.randbytes(200)
        first = world.run(grid.put(data))
        self.assertEqual(sorted(first.shares_placed), list(range(5)))
        services = [host.factory.service for host in world.servers]
        received = [service.received_bytes for service in services]
        self.assertTrue(all(received))
        again = world.run(grid.put(data))
        self.assertEqual((again.cap, again.happiness), (first.cap, 5))
        self.assertEqual(again.shares_placed, {})
        self.assertEqual(again.shares_found, {n: [name] for n, name in first.shares_placed.items()})
        self.assertEqual([service.received_bytes for service in services], received)
        for service in services:
            self.assertEqual(service.requests["bundle", 200], 2)
            self.assertEqual(service.requests["allocate", 200], 0)
        world.run(grid.close())

    def test_the_same_put_twice_at_once(self) -> None:
        """Two puts of the same file side by side both find it stored, once."""
        world = self.make_world(5)
        grid = make_grid(world, params=PARAMS)
        world.run(grid.status())
        data = self.random.randbytes(200)
        results = world.run(gatherResults([grid.put(data) for _ in range(3)]))
        self.assertEqual([result.happiness for result in results], [5] * 3)
        for host in world.servers:
            self.assertEqual(len(list(host.root.glob("shares/??/*/*"))), 1)
            self.assertGreater(host.factory.service.requests["bundle", 200], 0)
        self.assertEqual(world.run(grid.read(results[0].cap)), data)
        world.run(grid.close())

    def test_half_of_a_grid(self) -> None:
        """A hundred puts to servers of which half take bundles: each gets what it takes, and all of it."""
        self.old = {f"s{number}" for number in range(0, 10, 2)}
        world = self.make_world(10, "none")
        grid = make_grid(world)
        world.run(grid.status())
        files = [self.random.randbytes(200) for _ in range(100)]
        results = world.run(gatherResults([grid.put(data) for data in files]))
        for result in results:
            self.assertEqual((result.happiness, len(result.shares_placed)), (10, 10))
            self.check_on_disk(world, result)
        for host in world.servers:
            requests = host.factory.service.requests
            del requests["version", 200]
            if host.name in self.old:
                self.assertEqual(requests, {("allocate", 200): 100, ("write", 201): 100})
            else:
                self.assertEqual(set(requests), {("bundle", 200)})
                self.assertLess(requests.total(), 20)
        for number in (0, 42, 99):
            self.assertEqual(world.run(grid.read(results[number].cap)), files[number])
        world.run(grid.close())

    def try_faults(self, seed: int) -> tuple[int, int]:
        """Put small files while all kinds of things go wrong; returns how many are stored, and bundles."""
        random = Random(seed)
        world = GbsWorld(scratch_path(self), 5)
        grid = make_grid(world, params=PARAMS)
        world.run(grid.status())
        names = [host.name for host in world.servers]
        plan = FaultPlan.random(seed, [CLIENT], names, duration_s=2.0, lasting_s=20.0, faults=6)
        plan.apply(world.network)
        ends: list[tuple[bytes, Any]] = []

        def note(result: Any, data: bytes) -> None:
            if isinstance(result, Failure):
                result.trap(GridError)
            ends.append((data, result))

        for _ in range(10):
            for _ in range(random.choice((1, 1, 5))):
                data = random.randbytes(random.choice((200, 2000, 20_000)))
                grid.put(data, happy=3).addBoth(note, data)
            world.clock.advance(0.2)
        world.clock.advance(600)
        stored = [(data, end) for data, end in ends if not isinstance(end, Failure)]
        for _, result in stored:
            self.check_on_disk(world, result)
        bundles = sum(self.bundles(world, number) for number in range(5))
        if all(host.host.up for host in world.servers):
            fresh = make_grid(world, params=PARAMS)
            for data, result in stored:
                self.assertEqual(world.run(fresh.read(result.cap)), data, f"{plan}")
            world.run(fresh.close())
        world.run(grid.close())
        world.clock.advance(1000)
        self.assertEqual(leaks(world.clock, world.network), [], f"{plan}")
        world.close()
        self.assertGreaterEqual(len(ends), 10, f"{plan}")
        return len(stored), bundles

    def test_faults(self) -> None:
        """Every put ends; nothing is said to be stored that is not; most of it is, and in bundles."""
        stored, bundles = zip(*map(self.try_faults, range(6)), strict=True)
        self.assertGreater(min(bundles), 0)
        self.assertGreater(sum(stored), 90)
