"""A grid behind a SOCKS5 proxy: both protocols, introducers; nothing is looked up or sent past the proxy."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
from foolscap.api import flushEventualQueue
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import PipegridError
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import CONFIG_NAME, INTRODUCERS_NAME, SERVERS_NAME
from pipegrid.server.serve import ServeSettings, StorageNode
from tests.interop.round_trips import RoundTrips
from tests.socks_proxy import OnlyProxies, SocksProxy

reactor: Any = installed_reactor

NAMES = ("aaaa.onion", "bbbb.onion", "storage.example")


class ProxyGridTests(TestCase):
    """Three servers, of which the client knows names that only the proxy can look up."""

    timeout = 60

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._set_up())

    async def _set_up(self) -> None:
        self.directory = Path(self.mktemp())
        self.nodes = [
            StorageNode(
                reactor,
                ServeSettings(
                    directory=self.directory / f"node{number}",
                    port="tcp:0:interface=127.0.0.1",
                    durability="none",
                ),
            )
            for number in range(3)
        ]
        await gatherResults([node.start() for node in self.nodes])
        self.ports = [node._ports[0].getHost().port for node in self.nodes]
        self.proxy = SocksProxy(reactor, dict.fromkeys(NAMES, "127.0.0.1"))
        listening = reactor.listenTCP(0, self.proxy, interface="127.0.0.1")
        self.proxy_port = listening.getHost().port
        self.addCleanup(listening.stopListening)
        self.grids: list[Grid] = []

    def tearDown(self) -> Deferred[Any]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._tear_down())

    async def _tear_down(self) -> None:
        await gatherResults([grid.close() for grid in self.grids])
        await gatherResults([node.stop() for node in self.nodes])
        await flushEventualQueue()
        await deferLater(reactor, 0.1)  # a server's pauses between Foolscap calls end

    def entry(self, number: int, foolscap: bool, **more: Any) -> dict[str, Any]:
        """Return what ``servers.yaml`` says of a server: its address, with the name instead of 127.0.0.1."""
        node, name = self.nodes[number], NAMES[number]
        how = "tor" if name.endswith(".onion") else "tcp"
        if foolscap:
            before, _, rest = node.furl.partition("@")
            ann = {"anonymous-storage-FURL": f"{before}@{how}:{name}:{rest.split(':')[-1]}"}
        else:
            nurl = node.nurl.replace("127.0.0.1", name)
            nurl = nurl.replace("pb:", "pb+tor:") if how == "tor" else nurl
            ann = {"anonymous-storage-NURLs": [nurl]}  # type: ignore[dict-item]
        return {"ann": ann, **more}

    def client(self, settings: str, foolscap: bool = False, **more: Any) -> Path:
        """Make a client's directory with these settings of connections."""
        place = Path(self.mktemp())
        entries = {f"s{number}": self.entry(number, foolscap, **more) for number in range(3)}
        create_client(
            place,
            params=Params(2, 3),
            happy=3,
            files={SERVERS_NAME: json.dumps({"storage": entries})},
        )
        text = (place / CONFIG_NAME).read_text()
        (place / CONFIG_NAME).write_text(text + settings.replace("PORT", str(self.proxy_port)))
        return place

    async def use(self, place: Path, size: int = 200) -> None:
        """Put a file, and get it."""
        grid = await Grid.open(reactor, place)
        self.grids.append(grid)
        self.assertEqual(grid.warnings, ())
        data = bytes(range(200)) * (size // 200)
        result = await grid.put(data)
        self.assertEqual(len(result.shares_placed), 3)
        into = BytesIO()
        await grid.get(result.cap, into)
        self.assertEqual(into.getvalue(), data)
        await self.grids.pop().close()

    def only_the_proxy(self) -> OnlyProxies:
        """Permit the client's connections to the proxy, and the proxy's to the servers."""
        return OnlyProxies(self, reactor, [self.proxy_port, *self.ports])

    def test_through(self) -> Deferred[None]:
        """Small and large files, over both protocols; all connections were asked of the proxy."""
        return Deferred.fromCoroutine(self._test_through())

    async def _test_through(self) -> None:
        only = self.only_the_proxy()
        tor = "\n[connections]\ntcp = tor\n[tor]\nsocks.port = tcp:127.0.0.1:PORT\n"
        socks = "\n[connections]\ntcp = socks\n[socks]\nport = 127.0.0.1:PORT\n[tor]\nsocks.port = PORT\n"
        hidden = tor.replace("\n[conn", "\n[node]\nreveal-IP-address = false\n[conn", 1)
        for settings, foolscap, size in (
            (hidden, False, 10_000_000),
            (hidden, True, 1_000_000),
            (tor, False, 200),
            (socks, False, 200),
            (socks, True, 200),
        ):
            before = len(self.proxy.asked)
            await self.use(self.client(settings, foolscap), size)
            asked = self.proxy.asked[before:]
            self.assertEqual({host for host, _ in asked}, set(NAMES))
            self.assertEqual(only.violations, [])
        logins = {host: set() for host, _ in self.proxy.asked}  # type: ignore[var-annotated]
        for (host, _), login in zip(self.proxy.asked, self.proxy.logins, strict=True):
            logins[host].add(login)
        self.assertEqual(
            {len(seen) for seen in logins.values()}, {1, 2}
        )  # None for the other proxy
        self.assertEqual(len(set.union(*logins.values())), 4)

    def test_round_trips(self) -> Deferred[None]:
        """A put and a get cost as many through the proxy as over TCP, from the first connection on."""
        return Deferred.fromCoroutine(self._test_round_trips())

    async def _test_round_trips(self) -> None:
        counted = await self.on_both_ways(self.count)
        self.assertEqual(counted[False, False], counted[False, True])
        self.assertEqual(counted[True, False], counted[True, True])
        self.assertEqual(counted[False, True][1:], [1, 1])

    def test_round_trips_of_ten_megabytes(self) -> Deferred[None]:
        """They are as many through the proxy, too, with the same window."""
        return Deferred.fromCoroutine(self._test_ten_megabytes())

    async def _test_ten_megabytes(self) -> None:
        counted = await self.on_both_ways(self.count_large)
        self.assertEqual(counted[False, False], counted[False, True])
        self.assertEqual(counted[True, False], counted[True, True])
        self.assertEqual(counted[False, True][1], 1)

    async def on_both_ways(
        self, count: Callable[[RoundTrips, Path], Awaitable[list[int]]]
    ) -> dict[tuple[bool, bool], list[int]]:
        """Return what was counted, by whether over Foolscap, and whether through the proxy."""
        trips = RoundTrips(reactor)
        self.proxy.port_of = {port: trips.listen("127.0.0.1", port) for port in self.ports}
        tor = "\n[connections]\ntcp = tor\n[tor]\nsocks.port = PORT\n"
        counted = {}
        for foolscap in (False, True):
            for settings in ("", tor):
                place = self.client(settings, foolscap)
                if not settings:
                    path = place / SERVERS_NAME
                    text = path.read_text().replace("pb+tor:", "pb:").replace("tor:", "tcp:")
                    for name in NAMES:
                        text = text.replace(name, "127.0.0.1")
                    for port, behind in self.proxy.port_of.items():
                        text = text.replace(f":{port}/", f":{behind}/")
                    path.write_text(text)
                counted[foolscap, bool(settings)] = await count(trips, place)
        await trips.close()
        return counted

    async def count(self, trips: RoundTrips, place: Path) -> list[int]:
        """Return the round trips of a first put, a second one, and a get."""
        grid = await Grid.open(reactor, place)
        self.grids.append(grid)
        first, cold = await trips.count(lambda: grid.put(b"c" * 200, happy=3))
        await grid.read(first.cap)  # over connections of their own
        stored, put = await trips.count(lambda: grid.put(os.urandom(200), happy=3))
        _, get = await trips.count(lambda: grid.read(stored.cap))
        await self.grids.pop().close()
        return [cold, put, get]

    async def count_large(self, trips: RoundTrips, place: Path) -> list[int]:
        """Return the round trips of a put and a get of ten megabytes, over connections that are open."""
        grid = await Grid.open(reactor, place, window_bytes=1 << 20)
        self.grids.append(grid)
        first = await grid.put(b"c" * 200, happy=3)
        await grid.read(first.cap)
        stored, put = await trips.count(lambda: grid.put(os.urandom(10_000_000), happy=3))
        _, get = await trips.count(lambda: grid.read(stored.cap))
        await self.grids.pop().close()
        return [put, get]

    def test_one_server(self) -> Deferred[None]:
        """``connections: {tcp: tor}`` of a server is followed, in place of the setting for all."""
        return Deferred.fromCoroutine(self._test_one_server())

    async def _test_one_server(self) -> None:
        only = self.only_the_proxy()
        for default in ("tcp", "disabled"):
            settings = f"\n[connections]\ntcp = {default}\n[tor]\nsocks.port = PORT\n"
            for foolscap in (False, True):
                await self.use(self.client(settings, foolscap, connections={"tcp": "tor"}))
        self.assertEqual(only.violations, [])

    def test_an_introducer_at_one_server(self) -> Deferred[None]:
        """It is reached as this server is: else the server would learn the address by its introducer."""
        return Deferred.fromCoroutine(self._test_an_introducer())

    async def _test_an_introducer(self) -> None:
        await self.nodes[2].stop()
        settings = attrs.evolve(
            self.nodes[2].settings,
            port=f"tcp:{self.ports[2]}:interface=127.0.0.1",
            location=f"{NAMES[2]}:{self.ports[2]}",
            introduces=True,
        )
        self.nodes[2] = StorageNode(reactor, settings)
        await self.nodes[2].start()
        furl = (settings.directory / "private/members.furl").read_text().strip()
        only = self.only_the_proxy()
        for default in ("tcp", "disabled"):
            place = self.client(
                f"\n[connections]\ntcp = {default}\n[tor]\nsocks.port = PORT\n",
                foolscap=True,
                connections={"tcp": "tor"},
            )
            text = json.dumps({"introducers": {"members": {"furl": furl}}})
            (place / INTRODUCERS_NAME).write_text(text)
            grid = await Grid.open(reactor, place)
            self.grids.append(grid)
            while not grid.introducers[0].connected:
                await deferLater(reactor, 0.02)
            await self.grids.pop().close()
        self.assertEqual(only.violations, [])

    def test_not_permitted(self) -> Deferred[None]:
        """What the settings do not permit is not attempted: no packet, no lookup; the reason is reported."""
        return Deferred.fromCoroutine(self._test_not_permitted())

    async def _test_not_permitted(self) -> None:
        only = self.only_the_proxy()
        off = "\n[connections]\ntcp = disabled\n[tor]\nenabled = false\n"
        for foolscap in (False, True):
            with self.assertRaises(PipegridError) as caught:
                await Grid.open(reactor, self.client(off, foolscap))
            self.assertIn("no connection to it is permitted: [", str(caught.exception))
            disabled = self.client(off.replace("false", "true"), foolscap)
            grid = await Grid.open(reactor, disabled)
            self.grids.append(grid)
            (warning,) = grid.warnings
            self.assertIn("s2 is skipped: no connection to it is permitted: [connections]", warning)
        self.assertEqual((self.proxy.asked, only.violations), ([], []))

    def test_the_guard(self) -> Deferred[None]:
        """Without a proxy these tests would notice: the guard reports lookups and connections."""
        return Deferred.fromCoroutine(self._test_the_guard())

    async def _test_the_guard(self) -> None:
        only = OnlyProxies(self, reactor, [1])
        place = self.client("")
        path = place / SERVERS_NAME
        path.write_text(
            path.read_text().replace("pb+tor:", "pb:").replace("bbbb.onion", "127.0.0.1")
        )
        grid = await Grid.open(reactor, place)
        self.grids.append(grid)
        self.assertEqual([each.reachable for each in await grid.status()], [False] * 3)
        seen = "\n".join(only.violations)
        for words in ("lookup storage.example", "connect ('127.0.0.1', ", "9050"):
            self.assertIn(words, seen)

    def test_no_proxy(self) -> Deferred[None]:
        """If it is down, nothing is tried without it."""
        return Deferred.fromCoroutine(self._test_no_proxy())

    async def _test_no_proxy(self) -> None:
        only = OnlyProxies(self, reactor, [1])
        settings = "\n[connections]\ntcp = tor\n[tor]\nsocks.port = tcp:127.0.0.1:1\n"
        for foolscap in (False, True):
            grid = await Grid.open(reactor, self.client(settings, foolscap))
            self.grids.append(grid)
            for status in await grid.status():
                self.assertFalse(status.reachable)
                self.assertIn("Tor cannot be reached at 127.0.0.1:1", status.reason or "")
        self.assertEqual(only.violations, [])
