"""The named clients of a server: their file, their secrets, and a running server that they change under."""

from __future__ import annotations

import json
import os
import re
import stat
import unittest
from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.client import Agent, readBody

from pipegrid.core import base32
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import PipegridError, UnhappyError, UsageError
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.grid.servers_and_introducers_yaml import servers_of
from pipegrid.server import storage_clients
from pipegrid.server.foolscap.remote_objects import FoolscapStorage
from pipegrid.server.gbs.request_check import KnownSecrets, Request
from pipegrid.server.serve import ServeSettings, StorageNode
from pipegrid.server.storage_clients import (
    CLIENTS_NAME,
    ClientWatch,
    NamedClient,
    keep_client,
    read_clients,
    remove_client,
)
from pipegrid.storage.client_space import FIRST_NUMBER, MAX_CLIENTS
from pipegrid.wire import gbs_paths_headers

reactor: Any = installed_reactor


class FileTests(SynchronousTestCase):
    """``private/clients.json``."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def test_kept(self) -> None:
        """A client keeps its number and its secret; the file is for its owner alone."""
        self.assertEqual(read_clients(self.directory), ())
        first = keep_client(self.directory, "alice", 1000)
        self.assertEqual(keep_client(self.directory, "alice", None), first)
        changed = keep_client(self.directory, "alice", 2000)
        self.assertEqual(changed, attrs.evolve(first, quota_bytes=2000))
        other = keep_client(self.directory, "bob", None)
        self.assertEqual(other.quota_bytes, 0)
        self.assertEqual(read_clients(self.directory), (changed, other))
        self.assertNotEqual(first.swissnum, other.swissnum)
        self.assertNotIn(first.swissnum, repr(first))
        for name in (CLIENTS_NAME, CLIENTS_NAME + ".lock"):
            mode = (self.directory / name).stat().st_mode
            self.assertEqual(stat.S_IMODE(mode), 0o600, name)
        remove_client(self.directory, "alice")
        self.assertEqual(read_clients(self.directory), (other,))
        again = keep_client(self.directory, "alice", None)
        self.assertNotEqual((again.number, again.swissnum), (first.number, first.swissnum))

    def test_changed_by_root(self) -> None:
        """The server's user can still read the file, or the server would not start again."""
        if os.geteuid() != 0:
            raise unittest.SkipTest("only root may give files away")
        keep_client(self.directory, "alice", None)
        os.chown(self.directory / "private", 12345, 23456)
        watch = ClientWatch(self.directory)
        keep_client(self.directory, "alice", 1000)
        for name in (CLIENTS_NAME, CLIENTS_NAME + ".lock"):
            found = (self.directory / name).stat()
            self.assertEqual((found.st_uid, found.st_gid), (12345, 23456), name)
        self.assertIsNotNone(watch.look())
        os.chown(self.directory / CLIENTS_NAME, 0, 0)
        self.assertIsNotNone(watch.look())

    def test_names(self) -> None:
        """A name is harmless in metrics, logs and tables."""
        for name in ("", ".", "../x", "a b", "-a", 'a"', "a\n", "ä", "a" * 64):
            with self.assertRaisesRegex(UsageError, "cannot be the name of a client; use up to 63"):
                keep_client(self.directory, name, None)
        with self.assertRaisesRegex(UsageError, "has no client 'alice'; 'pipegrid serve --usage'"):
            remove_client(self.directory, "alice")
        self.assertFalse((self.directory / CLIENTS_NAME).exists())

    def test_not_too_many(self) -> None:
        """Each request's secret is compared with those of all."""
        for number in range(MAX_CLIENTS):
            keep_client(self.directory, f"c{number}", None)
        with self.assertRaisesRegex(UsageError, "at most 64 named clients; remove one"):
            keep_client(self.directory, "more", None)
        self.assertEqual(len(read_clients(self.directory)), MAX_CLIENTS)

    def test_damage(self) -> None:
        """What is impossible in the file stops a start, in one sentence."""
        good = {"number": FIRST_NUMBER, "swissnum": "s" * 32, "quota": 5}
        bad: list[object] = [
            *([], {"a b": good}, {"a": []}, {"a": good, "b": good}),
            *({"a": {**good, "number": each}} for each in (1, True, "7", 1 << 32, None)),
            *({"a": {**good, "swissnum": each}} for each in (7, "", "a/b", "ä")),
            *({"a": {**good, "quota": each}} for each in (-1, 1.5, 1 << 63, "5")),
            {f"c{n}": {**good, "number": FIRST_NUMBER + n} for n in range(MAX_CLIENTS + 1)},
        ]
        texts = [json.dumps(each) for each in bad] + ["{", "[" * 60_000, " " * 70_000]
        (self.directory / "private").mkdir(parents=True)
        for text in texts:
            (self.directory / CLIENTS_NAME).write_text(text)
            with self.assertRaisesRegex(UsageError, r"cannot understand .*clients\.json"):
                read_clients(self.directory)
            with self.assertRaises(UsageError):
                keep_client(self.directory, "more", None)
            self.assertEqual((self.directory / CLIENTS_NAME).read_text(), text)

    def test_watched(self) -> None:
        """A change is seen once, also of the same length in the same moment."""
        watch = ClientWatch(self.directory)
        self.assertIsNone(watch.look())
        client = keep_client(self.directory, "alice", 1000)
        self.assertEqual(watch.look(), (client,))
        self.assertIsNone(watch.look())
        path = self.directory / CLIENTS_NAME
        before = path.stat()
        client = keep_client(self.directory, "alice", 2000)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.assertEqual(watch.look(), (client,))
        path.unlink()
        self.assertEqual(watch.look(), ())


class SecretTests(SynchronousTestCase):
    """Which secrets open a server, and for whom."""

    def test_each_has_its_own(self) -> None:
        """A request is its client's; a secret that was removed opens nothing."""
        known = KnownSecrets("own")
        known.set_clients({"alice": 70000, "bob": 70001})
        for secret, owner in (("own", 0), ("alice", 70000), ("bob", 70001), ("", None)):
            self.assertEqual(known.owner_of(self.request(secret)), owner)
        known.set_clients({"bob": 70001})
        self.assertIsNone(known.owner_of(self.request("alice")))
        self.assertEqual(known.owner_of(self.request("bob")), 70001)

    def request(self, secret: str) -> Request:
        """Return a request with this secret."""
        request = Request()
        request.headers[b"authorization"] = gbs_paths_headers.authorization(secret)
        return request


class NodeTests(TestCase):
    """A running server, and clients over both protocols."""

    timeout = 60

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        self.directory = Path(self.mktemp())
        self.addCleanup(lambda: self.node.stop())
        return self.start_node()

    def start_node(self) -> Deferred[None]:
        """Start a server in the directory."""
        self.node = StorageNode(
            reactor,
            ServeSettings(
                directory=self.directory,
                port="tcp:0:interface=127.0.0.1",
                durability="none",
                metrics="0",
            ),
        )
        return self.node.start().addCallback(lambda _: None)

    async def put(self, address: str, data: bytes) -> Any:
        """Store a file with a client that knows this address; returns the result."""
        return await self.use(address, lambda grid: grid.put(data, happy=1))

    async def use(self, address: str, call: Any) -> Any:
        place = Path(self.mktemp())
        content = json.dumps(servers_of([("server", address)]))
        create_client(place, params=Params(1, 1), happy=1, files={SERVERS_NAME: content})
        grid = await Grid.open(reactor, place)
        try:
            return await call(grid)
        finally:
            await grid.close()

    def change(self, name: str, quota_bytes: int | None = None) -> NamedClient:
        """Add or change a client, as another process does, and let the server look."""
        client = keep_client(self.directory, name, quota_bytes)
        self.node._look_for_clients()
        return client

    def used(self) -> dict[str, int | None]:
        return {client.name: used for client, used, _ in self.node._store.clients.report()}

    async def counted(self) -> None:
        """Wait until the server has counted."""
        await self.node._collector.run(lambda: None)

    def test_both_protocols(self) -> Deferred[None]:
        """Each address counts for its client, refuses beyond the quota, and ends with the client."""
        return Deferred.fromCoroutine(self._test_both_protocols())

    async def _test_both_protocols(self) -> None:
        alice, bob = self.change("alice", 100_000), self.change("bob")
        await self.counted()
        ours = storage_clients.addresses(self.directory, alice)
        addresses = [ours[0][0], ours[1]]
        stored = {}
        for number, address in enumerate(addresses):
            stored[address] = await self.put(address, os.urandom(30_000))
            used = self.used()["alice"]
            assert used is not None
            self.assertGreater(used, 30_000 * (number + 1))
        self.assertEqual(self.used()["bob"], 0)
        for address, why in zip(addresses, ("quota is used up", "has space for"), strict=True):
            with self.assertRaisesRegex(PipegridError, why):
                await self.put(address, os.urandom(60_000))
        bobs = storage_clients.addresses(self.directory, bob)[0][0]
        for address in (self.node.nurl, self.node.furl, bobs):
            await self.put(address, os.urandom(200_000))
        self.change("alice", 200_000)
        await self.put(addresses[0], os.urandom(60_000))
        remove_client(self.directory, "alice")
        self.node._look_for_clients()
        for address in addresses:
            with self.assertRaises(PipegridError):
                await self.put(address, os.urandom(100))
        self.assertEqual(self.used().keys(), {"bob"})
        for result in stored.values():  # what it has stored stays, for all who know the cap
            data = await self.use(bobs, lambda grid, cap=result.cap: grid.read(cap))
            self.assertEqual(len(data), 30_000)

    def test_what_another_has_stored(self) -> Deferred[None]:
        """A share that a client has no lease on, since its quota is used up, is not its own in a put."""
        return Deferred.fromCoroutine(self._test_stored_by_another())

    async def _test_stored_by_another(self) -> None:
        alice, bob = self.change("alice", 10_000), self.change("bob")
        await self.counted()
        place = Path(self.mktemp())
        create_client(place, params=Params(1, 1), happy=1, files={})

        async def put(address: str) -> Any:
            (place / SERVERS_NAME).write_text(json.dumps(servers_of([("server", address)])))
            secret = os.urandom(32)  # its leases are of its own, and the caps the same
            (place / "private/secret").write_text(base32.encode(secret) + "\n")
            grid = await Grid.open(reactor, place)
            try:
                return await grid.put(b"x" * 30_000, happy=1)
            finally:
                await grid.close()

        await put(storage_clients.addresses(self.directory, bob)[0][0])
        nurls, furl = storage_clients.addresses(self.directory, alice)
        for address in (nurls[0], furl):
            with self.assertRaises(UnhappyError):
                await put(address)
        self.assertEqual(self.used()["alice"], 0)

    def test_metrics_after_a_restart(self) -> Deferred[None]:
        """They show each client's quota and usage, which a start counts before it listens."""
        return Deferred.fromCoroutine(self._test_metrics())

    async def _test_metrics(self) -> None:
        alice = self.change("alice", 100_000)
        await self.counted()
        await self.put(storage_clients.addresses(self.directory, alice)[0][0], b"x" * 30_000)
        used = self.used()["alice"]
        for _ in range(2):
            page = f"http://127.0.0.1:{self.node.metrics_port}/metrics".encode()
            text = (await readBody(await Agent(reactor).request(b"GET", page))).decode()
            for name, value in (("quota", 100_000), ("used", used), ("allocated", 0)):
                line = rf'pipegrid_client_{name}_bytes\{{client="alice"\}} (\S+)'
                self.assertEqual([float(each) for each in re.findall(line, text)], [value])
            await self.node.stop()
            await self.start_node()

    def test_a_client_that_is_connected(self) -> Deferred[None]:
        """When it is removed, its connections are of no use any more, over either protocol."""
        return Deferred.fromCoroutine(self._test_connected())

    async def _test_connected(self) -> None:
        for number in (0, 1):
            alice = self.change("alice")
            await self.counted()
            nurls, furl = storage_clients.addresses(self.directory, alice)

            async def removed(grid: Grid) -> None:
                stored = await grid.put(b"x" * 1000, happy=1)
                remove_client(self.directory, "alice")
                self.node._look_for_clients()
                with self.assertRaises(PipegridError):
                    await grid.put(b"y" * 1000, happy=1)
                with self.assertRaises(PipegridError):
                    await grid.read(stored.cap)

            await self.use((nurls[0], furl)[number], removed)

    def test_readers_of_a_client_that_is_removed(self) -> Deferred[None]:
        """References to shares, which its Foolscap connections have, are of no use any more either."""
        return Deferred.fromCoroutine(self._test_readers())

    async def _test_readers(self) -> None:
        alice = self.change("alice")
        await self.counted()
        await self.put(storage_clients.addresses(self.directory, alice)[1], b"x" * 1000)
        assert self.node._service is not None
        storage = FoolscapStorage(self.node._service, alice.number)
        (found,) = (self.node.storage / "shares").glob("*/*/0")
        (reader,) = storage.remote_get_buckets(base32.decode(found.parent.name)).values()
        self.assertEqual(len(reader.remote_read(0, 100)), 100)
        storage.close()
        with self.assertRaisesRegex(UsageError, "not valid any more"):
            reader.remote_read(0, 100)

    def test_a_file_that_is_damaged_meanwhile(self) -> Deferred[None]:
        """The server goes on with the clients it knows, and says so once."""
        return Deferred.fromCoroutine(self._test_damaged())

    async def _test_damaged(self) -> None:
        alice = self.change("alice")
        await self.counted()
        (self.directory / CLIENTS_NAME).write_text("{")
        self.node._look_for_clients()
        self.node._look_for_clients()
        await self.put(storage_clients.addresses(self.directory, alice)[0][0], b"x" * 1000)
        self.assertEqual(self.used().keys(), {"alice"})
