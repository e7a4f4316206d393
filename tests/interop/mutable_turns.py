"""
PipeGrid and Tahoe-LAFS's gateway in turns on a mutable file or directory: what must be true after each turn.

While the one works on a file, the other works on another, so that both are busy. A gateway's writes are
tried once: where it refuses one, that is what the matrix is there to find. Its checks are repeated while it
is not connected to every server, which on a busy machine it takes for lost after five seconds.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from functools import partial
from random import Random
from typing import Any, TypeVar, cast
from unittest import TestCase
from urllib.parse import quote

import attrs
from twisted.internet.defer import Deferred, FirstError, gatherResults
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from pipegrid.core import base32
from pipegrid.core.caps import Cap, MutableCap, parse_cap
from pipegrid.grid import Grid
from pipegrid.tree.directory import Directory, create_directory
from tests.interop.gateway_world import World, patiently
from tests.interop.processes import Gateway

T = TypeVar("T")

CHECKS = 5
"""How often PipeGrid looks at a file of which some server has not answered in time."""

RANGE_BYTES = 60_000
RANGES = (300_000, 131_000, 700_000, 690_000, 760_000)
"""Where PipeGrid writes into 700 kB: within, over bounds of segments, behind the end, and over the end."""


@attrs.frozen
class Both:
    """
    PipeGrid, and a gateway that encodes as it does, over one protocol.

    Args:
        test: asserts.
        shares: needed, happy, total.
    """

    test: TestCase
    world: World
    grid: Grid
    gateway: Gateway
    shares: tuple[int, int, int]
    random: Random

    async def take_turns(self, format: str, size: int, growing: bool) -> None:
        """
        Each makes a file, overwrites the other's, and then its own; both read and verify it after each turn.

        Args:
            growing: it becomes longer first, and then shorter; otherwise the reverse.
        """
        data = self.random.randbytes(size)
        ours, theirs = await together(
            self._pipegrid_makes(data, format), self._tahoe_makes(data, format)
        )
        await together(
            self._assert_is(ours, data, "made by PipeGrid"),
            self._assert_is(theirs, data, "made by Tahoe-LAFS"),
        )
        lengths = (size + 10, size // 2) if growing else (size // 2, size + 10)
        for length, written, other in zip(lengths, (theirs, ours), (ours, theirs), strict=True):
            data = self.random.randbytes(length)
            await together(self._pipegrid_writes(written, data), self._tahoe_writes(other, data))
            await together(
                self._assert_is(written, data, f"overwritten by PipeGrid, {length} bytes"),
                self._assert_is(other, data, f"overwritten by Tahoe-LAFS, {length} bytes"),
            )

    async def take_long_turns(self, format: str, size: int, begins: bool) -> None:
        """
        One makes a large file, the other overwrites it, and then who made it; the other reads it after each.

        In the end both verify every byte of every share. What a writer itself would read is in the shares,
        too, which smaller files show.

        Args:
            begins: whether PipeGrid makes it.
        """
        data = self.random.randbytes(size)
        if begins:
            cap = await self._pipegrid_makes(data, format)
            await self._tahoe_reads(cap, data, "made by PipeGrid")
        else:
            cap = await self._tahoe_makes(data, format)
            await self._pipegrid_reads(cap, data, "made by Tahoe-LAFS")
        for pipegrid in (not begins, begins):
            data = self.random.randbytes(size + 1)
            if pipegrid:
                await self._pipegrid_writes(cap, data)
                await self._tahoe_reads(cap, data, "overwritten by PipeGrid")
            else:
                await self._tahoe_writes(cap, data)
                await self._pipegrid_reads(cap, data, "overwritten by Tahoe-LAFS")
        await together(self._pipegrid_checks(cap), self._tahoe_checks(cap))

    async def change_ranges(self) -> None:
        """Ranges of an MDMF file are changed in turns; both read it after each, and verify it in the end."""
        expected = bytearray(self.random.randbytes(700_000))
        cap = await self._pipegrid_makes(bytes(expected), "mdmf")
        for offset in RANGES:
            data = self.random.randbytes(RANGE_BYTES)
            result = await self.grid.update(cap, offset, data)
            self.test.assertEqual(result.attempts, 1)
            expected[offset : offset + len(data)] = data
            await self._both_read(cap, bytes(expected), f"updated by PipeGrid at {offset}")
            at = offset // 2
            data = self.random.randbytes(1000)
            await self._ask("PUT", f"uri/{cap}?offset={at}", data)
            expected[at : at + len(data)] = data
            await self._both_read(cap, bytes(expected), f"updated by Tahoe-LAFS at {at}")
        await together(self._pipegrid_checks(cap), self._tahoe_checks(cap))

    async def repair(self, format: str) -> None:
        """Of what either has made all shares are lost but the needed ones, and either repairs that."""
        data = self.random.randbytes(200_000)
        ours, theirs = await together(
            self._pipegrid_makes(data, format), self._tahoe_makes(data, format)
        )
        await together(self._repair(ours, data), self._repair(theirs, data))

    async def _repair(self, cap: MutableCap, data: bytes) -> None:
        """Either says how many are left, and makes all of them again, as the next version."""
        await self._lose(cap)
        repaired = await self.grid.repair(cap)
        self.test.assertTrue(repaired.whole)
        await self._assert_is(cap, data, "repaired by PipeGrid")
        await self._lose(cap)
        await self._ask("POST", f"uri/{cap}?t=check&verify=true&repair=true&output=JSON", b"")
        await self._assert_is(cap, data, "repaired by Tahoe-LAFS")

    async def _lose(self, cap: MutableCap) -> None:
        """Remove all shares but the needed ones; neither calls that healthy, or lost."""
        needed, _, total = self.shares
        index = base32.encode(cap.storage_index)
        paths = [path for each in self.world.servers for path in each.shares(index).values()]
        for path in sorted(paths)[: total - needed]:
            path.unlink()
        await together(
            self._pipegrid_checks(cap, good=needed), self._tahoe_checks(cap, good=needed)
        )

    # Directories.

    async def link(self, format: str) -> None:
        """Either makes a directory; in turns they link, rename and unlink there, and list the same."""
        made = await create_directory(self.grid, format)
        text = await self._ask("POST", f"uri?t=mkdir&format={format.upper()}", b"")
        await together(
            self._change_directory(str(made.cap)), self._change_directory(text.decode().strip())
        )

    async def _change_directory(self, cap: str) -> None:
        directory = Directory(self.grid, cap)
        expected: dict[str, bytes] = {}
        await self._both_list(directory, expected)
        for name, size in (("ours, literal", 20), ("ours", 5000)):
            expected[name] = self.random.randbytes(size)
            await directory.put(name, expected[name])
        await self._both_list(directory, expected)
        for name, size, kind in (("theirs", 5000, "CHK"), ("theirs-e\u0301", 900, "SDMF")):
            expected[name] = self.random.randbytes(size)
            await self._ask("PUT", f"uri/{cap}/{_quoted(name)}?format={kind}", expected[name])
        expected["theirs-\u00e9"] = expected.pop("theirs-e\u0301")  # names are normalised
        await self._both_list(directory, expected)
        await directory.rename("theirs", "renamed by us")
        expected["renamed by us"] = expected.pop("theirs")
        await directory.unlink("ours, literal")
        del expected["ours, literal"]
        await self._both_list(directory, expected)
        query = f"t=rename&from_name={_quoted('ours')}&to_name=renamed"
        await self._ask("POST", f"uri/{cap}?{query}", b"")
        expected["renamed"] = expected.pop("ours")
        await self._ask("DELETE", f"uri/{cap}/{_quoted('renamed by us')}")
        del expected["renamed by us"]
        await self._both_list(directory, expected)
        await together(
            self._read_children(directory, expected),
            self._pipegrid_checks(directory.cap),
            self._tahoe_checks(directory.cap),
        )

    async def _both_list(self, directory: Directory, expected: Mapping[str, bytes]) -> None:
        """By the write cap both find the same caps under the same names, which the read cap shows, too."""
        readonly = Directory(self.grid, directory.cap.readonly())
        listed: Deferred[bytes] = Deferred.fromCoroutine(
            self._ask("GET", f"uri/{directory.cap}?t=json")
        )
        found, visible = await gatherResults([directory.list(), readonly.list()])
        told = json.loads(await listed)[1]["children"]
        for names in (found, told, visible):
            self.test.assertEqual(set(names), set(expected))
        for name, child in found.items():
            facts = told[name][1]
            self.test.assertEqual(str(child.read_cap), facts["ro_uri"], name)
            self.test.assertEqual(visible[name].cap, child.read_cap, name)
            writing = None if child.write_cap is None else str(child.write_cap)
            self.test.assertEqual(writing, facts.get("rw_uri"), name)

    async def _read_children(self, directory: Directory, expected: Mapping[str, bytes]) -> None:
        """What is behind them both read, by the read cap."""
        readonly = directory.cap.readonly()
        found = await Directory(self.grid, readonly).list()
        for name, data in expected.items():
            cap = found[name].read_cap
            assert cap is not None
            self._assert_same(await self.grid.read(cap), data, f"{name}, by PipeGrid")
            got = await self._get(f"{readonly}/{_quoted(name)}")
            self._assert_same(got, data, f"{name}, by Tahoe-LAFS")

    # What each of them does, and says.

    async def _assert_is(self, cap: MutableCap, data: bytes, what: str) -> None:
        """Both read that, by the read cap, and find every share of it good."""

        async def by_pipegrid() -> None:
            await self._pipegrid_reads(cap, data, what)
            await self._pipegrid_checks(cap)

        async def by_tahoe() -> None:
            await self._tahoe_reads(cap, data, what)
            await self._tahoe_checks(cap)

        await together(by_pipegrid(), by_tahoe())

    async def _both_read(self, cap: MutableCap, data: bytes, what: str) -> None:
        await together(self._pipegrid_reads(cap, data, what), self._tahoe_reads(cap, data, what))

    async def _pipegrid_makes(self, data: bytes, format: str) -> MutableCap:
        cap: MutableCap = (await self.grid.create_mutable(data, format=format)).cap
        return cap

    async def _tahoe_makes(self, data: bytes, format: str) -> MutableCap:
        await self._until_connected()
        cap = parse_cap(await deferToThread(self.gateway.put, data, f"?format={format.upper()}"))
        assert isinstance(cap, MutableCap)
        return cap

    async def _pipegrid_writes(self, cap: MutableCap, data: bytes) -> None:
        await self.grid.overwrite(cap, data)

    async def _tahoe_writes(self, cap: MutableCap, data: bytes) -> None:
        await self._ask("PUT", f"uri/{cap}", data)

    async def _pipegrid_reads(self, cap: MutableCap, data: bytes, what: str) -> None:
        self._assert_same(await self.grid.read(cap.readonly()), data, f"{what}, read by PipeGrid")

    async def _tahoe_reads(self, cap: MutableCap, data: bytes, what: str) -> None:
        self._assert_same(await self._get(str(cap.readonly())), data, f"{what}, read by Tahoe-LAFS")

    async def _pipegrid_checks(self, cap: Cap, good: int | None = None) -> None:
        """PipeGrid finds so many shares good, by default all."""
        for _ in range(CHECKS):
            health = await self.grid.check(cap, verify=True)
            if not health.unreachable:
                break
        found = (health.healthy, health.recoverable, len(health.good_shares))
        self.test.assertEqual(found, self._expected(good), f"PipeGrid's check: {health}")

    async def _tahoe_checks(self, cap: Cap, good: int | None = None) -> None:
        """Tahoe-LAFS's gateway finds so many shares good, by default all, once it reaches all servers."""

        def check() -> None:
            self.world.until_connected(self.gateway)
            results = self.gateway.check(str(cap))["results"]
            found = (results["healthy"], results["recoverable"], results["count-shares-good"])
            assert found == self._expected(good), f"Tahoe-LAFS's check: {results}"

        await deferToThread(patiently, self.gateway, check)

    def _expected(self, good: int | None) -> tuple[bool, bool, int]:
        return (good is None, True, self.shares[2] if good is None else good)

    async def _get(self, path: str) -> bytes:
        get = partial(self.gateway.request, "GET", f"uri/{path}")
        found: bytes = await deferToThread(patiently, self.gateway, get)
        return found

    async def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        await self._until_connected()
        said: bytes = await deferToThread(self.gateway.request, method, path, data)
        return said

    async def _until_connected(self) -> None:
        await deferToThread(self.world.until_connected, self.gateway)

    def _assert_same(self, found: bytes, data: bytes, what: str) -> None:
        """They may be large, and are not printed."""
        self.test.assertTrue(found == data, f"{len(data)} bytes, {what}: {len(found)} others came")


def _quoted(name: str) -> str:
    return quote(name, safe="")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Do several things side by side; the first failure ends the others, and is raised."""
    running = [Deferred.fromCoroutine(each) for each in work]
    try:
        return list(await gatherResults(running, consumeErrors=True))
    except FirstError as first:
        for each in running:
            each.cancel()
        failure: Failure = first.subFailure
        raise cast(Exception, failure.value) from None
