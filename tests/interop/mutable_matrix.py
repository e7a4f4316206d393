"""
Mutable files between PipeGrid and Tahoe-LAFS's gateway, on ten servers of either kind, and on five of each:
what either writes the other reads, overwrites, checks and repairs. All formats, encodings and protocols;
``make interop`` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest import mock

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from pipegrid.core import base32
from pipegrid.core.caps import MutableCap, parse_cap
from pipegrid.grid import Grid
from tests.interop.gateway_world import Kind, Protocol, World
from tests.interop.matrix import make_stranger
from tests.interop.processes import Gateway

T = TypeVar("T")

SIZES = (0, 1, 1000, 131072, 131073, 1_000_000)
FEWER_SIZES = (0, 1000, 131073)
LARGE = 10_000_000


class TurnsTestCase(TestCase):
    """
    Servers of one kind or of both; over each protocol a gateway, and PipeGrid with other secrets.

    The same contents for both, whoever made, overwrote, updated, linked or repaired it last.
    """

    timeout = 1500
    sizes: tuple[int, ...] = SIZES
    large = LARGE
    kinds: Sequence[Kind] = ("tahoe",) * 10
    protocols: tuple[Protocol, ...] = ("gbs", "foolscap")

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        cache = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(self.root / "cache")})
        cache.start()
        self.addCleanup(cache.stop)
        self.world = World(self.root, self.kinds, (1, 1, 1))
        self.addCleanup(self.world.stop)

    async def take_turns(self, shares: tuple[int, int, int]) -> None:
        """Do it all with an encoding: needed, happy, total."""
        for protocol in self.protocols:
            began_s = time.monotonic()
            await self._with(protocol, shares)
            took_s = time.monotonic() - began_s
            print(
                f"\n  {shares[0]}-of-{shares[2]}, {protocol}: {took_s:.0f} s ", end="", flush=True
            )

    async def _with(self, protocol: Protocol, shares: tuple[int, int, int]) -> None:
        gateway = await _threaded(self.world.start_gateway, protocol, shares)
        await _threaded(self.world.until_found, gateway)
        client = self.root / f"stranger-{gateway.directory.name}"
        make_stranger(client, self.world.introducer_furl, shares, protocol == "foolscap")
        grid = await Grid.open(reactor, client, wait_for=len(self.kinds))
        try:
            spoken = {server.protocol for server in await grid.status()}
            self.assertEqual(spoken, {"foolscap" if protocol == "foolscap" else "https"})
            both = _Both(self, grid, gateway, Random(client.name), shares)
            for format in ("sdmf", "mdmf"):
                for size in (*self.sizes, self.large):
                    await both.take_turns(format, size)
                await both.repair(format)
            await both.update()
            await both.link()
        finally:
            await grid.close()
            await _threaded(gateway.stop)


class TahoeServersTests(TurnsTestCase):
    """Ten of Tahoe-LAFS's, all encodings."""

    def test_one_of_one(self) -> Deferred[None]:
        """The one share is all there is."""
        return Deferred.fromCoroutine(self.take_turns((1, 1, 1)))

    def test_three_of_ten(self) -> Deferred[None]:
        """As most grids have it."""
        return Deferred.fromCoroutine(self.take_turns((3, 10, 10)))

    def test_seven_of_ten(self) -> Deferred[None]:
        """With segments that are no multiple of seven."""
        return Deferred.fromCoroutine(self.take_turns((7, 10, 10)))


class PipegridServersTests(TahoeServersTests):
    """Ten of ours."""

    sizes = FEWER_SIZES
    kinds: Sequence[Kind] = ("pipegrid",) * 10


class MixedServersTests(TahoeServersTests):
    """Five of each, in turns."""

    sizes = FEWER_SIZES
    kinds: Sequence[Kind] = ("tahoe", "pipegrid") * 5


class _Both:
    """PipeGrid and a gateway."""

    def __init__(
        self,
        test: TurnsTestCase,
        grid: Grid,
        gateway: Gateway,
        random: Random,
        shares: tuple[int, int, int],
    ) -> None:
        self._test = test
        self._grid = grid
        self._gateway = gateway
        self._random = random
        self._shares = shares

    async def take_turns(self, format: str, size: int) -> None:
        """Either makes a file; then they overwrite it in turns, and both read it after each."""
        data = self._random.randbytes(size)
        ours = (await self._grid.create_mutable(data, format=format)).cap
        await self._assert_is(ours, data, f"{format}, {size} bytes, made by PipeGrid")
        text = await _threaded(self._gateway.put, data, f"?format={format.upper()}")
        theirs = parse_cap(text)
        assert isinstance(theirs, MutableCap)
        await self._assert_is(theirs, data, f"{format}, {size} bytes, made by Tahoe-LAFS")
        for cap in (ours, theirs):
            for length in (size // 2, size + 10):
                data = self._random.randbytes(length)
                await _threaded(self._gateway.request, "PUT", f"uri/{cap}", data)
                await self._assert_is(cap, data, f"{format}, overwritten by Tahoe-LAFS")
                data = self._random.randbytes(length)
                await self._grid.overwrite(cap, data)
                await self._assert_is(cap, data, f"{format}, overwritten by PipeGrid")

    async def _assert_is(self, cap: MutableCap, data: bytes, what: str) -> None:
        found = await self._grid.read(cap.readonly())
        self._test.assertTrue(found == data, f"{what}, read by PipeGrid")
        got = await _threaded(self._gateway.get, str(cap.readonly()))
        self._test.assertTrue(got == data, f"{what}, read by Tahoe-LAFS")
        total = self._shares[2]
        health = await self._grid.check(cap, verify=True)
        self._test.assertTrue(health.healthy, f"{what}: {health}")
        self._test.assertEqual(len(health.good_shares), total, what)
        results = (await _threaded(self._gateway.check, str(cap)))["results"]
        self._test.assertTrue(results["healthy"], f"{what}: {results}")
        self._test.assertEqual(results["count-shares-good"], total, what)

    async def update(self) -> None:
        """Ranges of an MDMF file are changed in turns, in the middle and at the end."""
        expected = bytearray(self._random.randbytes(700_000))
        cap = (await self._grid.create_mutable(bytes(expected), format="mdmf")).cap
        for offset in (300_000, 131_000, 700_000, 690_000, 760_000):
            data = self._random.randbytes(60_000)
            result = await self._grid.update(cap, offset, data)
            self._test.assertEqual(result.attempts, 1)
            expected[offset : offset + len(data)] = data
            await self._assert_is(cap, bytes(expected), f"updated by PipeGrid at {offset}")
            at = offset // 2
            data = self._random.randbytes(1000)
            await _threaded(self._gateway.request, "PUT", f"uri/{cap}?offset={at}", data)
            expected[at : at + len(data)] = data
            await self._assert_is(cap, bytes(expected), f"updated by Tahoe-LAFS at {at}")

    async def link(self) -> None:
        """A directory is an ordinary mutable file, and what PipeGrid writes back is a directory."""
        text = (await _threaded(self._gateway.request, "POST", "uri?t=mkdir", b"")).decode()
        for number in range(3):
            await _threaded(
                self._gateway.request, "PUT", f"uri/{text.strip()}/file{number}", b"x" * 1000
            )
        directory: Any = parse_cap(text.strip())
        packed = await self._grid.read(directory.file)
        await self._grid.modify(directory, lambda old: old + b"")
        result = await self._grid.overwrite(directory, packed)
        self._test.assertTrue(result.written)
        got = await _threaded(self._gateway.get, f"{text.strip()}/file2")
        self._test.assertEqual(got, b"x" * 1000)

    async def repair(self, format: str) -> None:
        """
        Shares are lost; either side says how many, and makes all of them again, as the next version.

        So with what PipeGrid has made, and with what Tahoe-LAFS has.
        """
        needed, _, total = self._shares
        if needed == total:
            return
        data = self._random.randbytes(200_000)
        ours = (await self._grid.create_mutable(data, format=format)).cap
        text = await _threaded(self._gateway.put, data, f"?format={format.upper()}")
        theirs = parse_cap(text)
        assert isinstance(theirs, MutableCap)
        for cap in (ours, theirs):
            await _threaded(self._lose, cap, total - needed)
            await self._assert_counts(cap, needed)
            repaired = await self._grid.repair(cap)
            self._test.assertTrue(repaired.whole)
            await self._assert_is(cap, data, f"{format}, repaired by PipeGrid")
            await _threaded(self._lose, cap, total - needed)
            await self._assert_counts(cap, needed)
            query = f"uri/{cap}?t=check&verify=true&repair=true&output=JSON"
            await _threaded(self._gateway.request, "POST", query, b"")
            await self._assert_is(cap, data, f"{format}, repaired by Tahoe-LAFS")

    async def _assert_counts(self, cap: MutableCap, good: int) -> None:
        """Both count as many good shares, and neither calls that healthy, or lost."""
        health = await self._grid.check(cap, verify=True)
        found = (health.healthy, health.recoverable, len(health.good_shares))
        self._test.assertEqual(found, (False, True, good))
        results = (await _threaded(self._gateway.check, str(cap)))["results"]
        told = (results["healthy"], results["recoverable"], results["count-shares-good"])
        self._test.assertEqual(told, found)

    def _lose(self, cap: MutableCap, count: int) -> None:
        index = base32.encode(cap.storage_index)
        paths = [path for each in self._test.world.servers for path in each.shares(index).values()]
        for path in sorted(paths)[:count]:
            path.unlink()


async def _threaded(call: Callable[..., T], *arguments: Any) -> T:
    result: T = await deferToThread(call, *arguments)
    return result
