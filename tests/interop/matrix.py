"""
One file, stored and fetched by PipeGrid and by a Tahoe-LAFS gateway on the same servers: what must be equal.

A gateway encodes as its node was told to, so there is one pair for each encoding; PipeGrid uses the node's
very directory. Tahoe-LAFS's gateway makes every key from its convergence secret; to a PipeGrid with another
secret such a file is as one with a random key.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest import TestCase, mock

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from pipegrid.core import base32
from pipegrid.core.caps import ChkCap, parse_cap
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import ClientPreferences, create_client
from pipegrid.grid.client_paths import INTRODUCERS_NAME
from pipegrid.transfer.results import CheckResult, PutResult
from pipegrid.transport.foolscap.client import FoolscapServer
from tests.interop.processes import Gateway, Process, TahoeGrid, storage_directory

T = TypeVar("T")

SIZES = (0, 1, 55, 56, 1000, *(131072 + more for more in (-1, 0, 1)))
LARGE_SIZES = (*((1 << 20) + more for more in (-1, 0, 1)), (3 << 20) + 7, 50_000_000)

_HEADER = struct.Struct(">LLL")  # version, length (informative), number of leases
_LEASE_BYTES = 72
_ATTEMPTS = 10


@attrs.frozen
class Health:
    """What is said of a file, by either side."""

    healthy: bool
    recoverable: bool
    good_shares: int
    corrupt_shares: int
    happiness: int

    @classmethod
    def by_pipegrid(cls, found: CheckResult) -> Health:
        """Read PipeGrid's answer."""
        good, corrupt = len(found.good_shares), len(found.corrupt)
        return cls(found.healthy, found.recoverable, good, corrupt, found.happiness)

    @classmethod
    def by_tahoe(cls, results: dict[str, Any]) -> Health:
        """Read the gateway's answer."""
        return cls(
            results["healthy"],
            results["recoverable"],
            results["count-shares-good"],
            results["count-corrupt-shares"],
            results["count-happiness"],
        )


def share_data(path: Path) -> bytes:
    """Return what a container holds: the share alone, without header and leases."""
    container = path.read_bytes()
    leases = _HEADER.unpack_from(container)[2]
    return container[_HEADER.size : len(container) - leases * _LEASE_BYTES]


class Shares:
    """The shares of one file, as they lie in the servers' directories."""

    def __init__(self, servers: Sequence[Process], cap: ChkCap) -> None:
        index = base32.encode(cap.storage_index)
        self._directories = [storage_directory(each) / index[:2] / index for each in servers]

    def paths(self) -> dict[int, list[Path]]:
        """Return where each share is."""
        found: dict[int, list[Path]] = {}
        for directory in self._directories:
            for path in directory.glob("*"):
                found.setdefault(int(path.name), []).append(path)
        return found

    def digests(self) -> dict[int, list[str]]:
        """Return what is in each share; equal ones count once."""
        return {
            number: sorted({hashlib.sha256(share_data(path)).hexdigest() for path in paths})
            for number, paths in sorted(self.paths().items())
        }

    def remove(self) -> None:
        """Let there be none."""
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)


class Pair:
    """
    A gateway, PipeGrid as the gateway's twin, and PipeGrid with a secret of its own.

    Args:
        test: asserts.
        gateway: of Tahoe-LAFS.
        twin: a grid opened on the gateway's own directory.
        stranger: a grid on the same servers, with other secrets.
    """

    def __init__(
        self,
        test: TestCase,
        servers: Sequence[Process],
        gateway: Gateway,
        twin: Grid,
        stranger: Grid,
    ) -> None:
        self._test = test
        self._servers = servers
        self._gateway = gateway
        self._twin = twin
        self._stranger = stranger

    async def assert_alike(self, size: int, random: Random) -> None:
        """Store and fetch files of one size in all ways."""
        await self._convergent(random.randbytes(size))
        await self._unrelated(random.randbytes(size))

    async def _convergent(self, data: bytes) -> None:
        """The same file from both sides: the same cap, the same shares, the same health."""
        put = await self._twin.put(data)
        cap = str(put.cap)
        await self._tahoe_gets(cap, data)
        by_pipegrid = await self._look(put.cap)
        self._assert_equal(await _threaded(self._tahoe_puts, data), cap, "the cap")
        await self._pipegrid_gets(self._twin, cap, data)
        by_tahoe = await self._look(put.cap)
        self._assert_equal(by_pipegrid, by_tahoe, "the shares")

    async def _unrelated(self, data: bytes) -> None:
        """A random key on PipeGrid's side, and on Tahoe's one that PipeGrid's secret does not lead to."""
        put = await self._twin.put(data, random_key=True)
        await self._tahoe_gets(str(put.cap), data)
        cap = await _threaded(self._tahoe_puts, data)
        await self._pipegrid_gets(self._stranger, cap, data)
        for each in (put.cap, parse_cap(cap)):
            if isinstance(each, ChkCap):
                self._test.assertNotEqual(
                    str(put.cap), cap, "a random key is not that of the secret"
                )
                Shares(self._servers, each).remove()

    async def _tahoe_gets(self, cap: str, data: bytes) -> None:
        got = await _threaded(self._patiently, lambda: self._gateway.get(cap))
        self._test.assertTrue(got == data, f"{len(data)} bytes, put by PipeGrid, got by Tahoe-LAFS")

    async def _pipegrid_gets(self, grid: Grid, cap: str, data: bytes) -> None:
        got = await grid.read(cap)
        self._test.assertTrue(got == data, f"{len(data)} bytes, put by Tahoe-LAFS, got by PipeGrid")

    async def _look(self, cap: object) -> dict[int, list[str]]:
        """Return what is in a file's shares, which are in order, and remove them."""
        if not isinstance(cap, ChkCap):
            return {}
        shares = Shares(self._servers, cap)
        digests = await _threaded(shares.digests)
        self._assert_equal(list(digests), list(range(cap.total_shares)), "the numbers of shares")
        health = await self.assert_same_health(str(cap))
        perfect = Health(True, True, cap.total_shares, 0, cap.total_shares)
        self._assert_equal(health, perfect, "the health")
        await _threaded(shares.remove)
        return digests

    async def assert_damage_is_seen(self, random: Random) -> None:
        """Shares are damaged and lost, one after the other: both sides count the same."""
        size = 10_000
        put = await self._twin.put(random.randbytes(size))
        cap = put.cap
        assert isinstance(cap, ChkCap)
        paths = [path for paths in Shares(self._servers, cap).paths().values() for path in paths]
        good = total = len(paths)
        if total > 1:
            with open(paths[0], "r+b") as container:
                container.seek(_HEADER.size + 36)  # the first byte of its only block
                byte = container.read(1)[0]
                container.seek(-1, 1)
                container.write(bytes([byte ^ 1]))
            good -= 1
            health = await self.assert_same_health(str(cap))
            expected = Health(False, good >= cap.required_shares, good, 1, good)
            self._assert_equal(health, expected, "the health with a corrupt share")
            paths[0].unlink()
        for path in paths[1:] or paths:
            path.unlink()
            good -= 1
            health = await self.assert_same_health(str(cap))
            expected = Health(False, good >= cap.required_shares, good, 0, good)
            self._assert_equal(health, expected, f"the health with {good} shares")

    async def assert_repaired(self, random: Random) -> None:
        """A file of Tahoe-LAFS's loses what it can spare; PipeGrid makes the very same shares again."""
        data = random.randbytes(10_000)
        cap = parse_cap(await _threaded(self._tahoe_puts, data))
        assert isinstance(cap, ChkCap)
        shares = Shares(self._servers, cap)
        digests = await _threaded(shares.digests)
        lost = list(range(cap.required_shares, cap.total_shares))
        for number in lost:
            for path in shares.paths()[number]:
                path.unlink()
        repaired = await self._twin.repair(cap)
        self._assert_equal(sorted(repaired.uploaded), lost, "the shares that were made again")
        self._assert_equal(await _threaded(shares.digests), digests, "the shares")
        health = await self.assert_same_health(str(cap))
        perfect = Health(True, True, cap.total_shares, 0, cap.total_shares)
        self._assert_equal(health, perfect, "the health after the repair")
        await self._tahoe_gets(str(cap), data)
        await _threaded(shares.remove)

    async def assert_a_crowd_is_leased(self, random: Random, files: int = 300) -> int:
        """
        Someone else leases many small files, so that each share has two leases.

        Returns:
            how many calls of Foolscap's that took.
        """
        stored = await self._twin.put_many([random.randbytes(60) for _ in range(files)])
        caps = [each.cap for each in stored if isinstance(each, PutResult)]
        lease, calls = FoolscapServer.lease_listed, 0

        def lease_listed(server: FoolscapServer, *arguments: Any) -> Deferred[None]:
            nonlocal calls
            calls += 1
            return lease(server, *arguments)

        with mock.patch.object(FoolscapServer, "lease_listed", lease_listed):
            checked = await self._stranger.check_many(caps, add_lease=True)
        self._assert_equal(len(checked), files, "the files that were checked")
        for cap, result in zip(caps, checked, strict=True):
            assert isinstance(result, CheckResult)
            assert isinstance(cap, ChkCap)
            self._assert_equal(len(result.renewed), len(self._servers), "the servers that leased")
            for (path,) in Shares(self._servers, cap).paths().values():
                leases = _HEADER.unpack(path.read_bytes()[: _HEADER.size])[2]
                self._assert_equal(leases, 2, "the leases of a share")
        return calls

    async def assert_same_health(self, cap: str) -> Health:
        """Let both sides verify a file; returns what they agree on."""
        ours = Health.by_pipegrid(await self._twin.check(cap, verify=True))
        results = await _threaded(self._patiently, lambda: self._tahoe_checks(cap))
        self._assert_equal(ours, Health.by_tahoe(results), "the health")
        return ours

    # The gateway, in a thread.

    def _tahoe_puts(self, data: bytes) -> str:
        return self._patiently(lambda: self._gateway.put(data))

    def _tahoe_checks(self, cap: str) -> dict[str, Any]:
        """Return what the gateway says when it has asked all servers."""
        results: dict[str, Any] = self._gateway.check(cap)["results"]
        answered = len(results["servers-responding"])
        assert answered == len(self._servers), f"the gateway has asked {answered} servers"
        return results

    def _patiently(self, call: Callable[[], T]) -> T:
        """
        Do what needs all servers; again if it fails, when the gateway is connected to all.

        On a busy machine it takes a server that did not answer for five seconds for lost, until that does.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return call()
            except AssertionError:  # noqa: PERF203  it is rare, and slow anyway
                self._gateway.wait(len(self._servers))
        return call()

    def _assert_equal(self, first: object, second: object, what: str) -> None:
        self._test.assertEqual(first, second, what)


def make_stranger(
    directory: Path, introducer: str, shares: tuple[int, int, int], force_foolscap: bool
) -> None:
    """Make a client's directory with secrets of its own."""
    needed, happy, total = shares
    create_client(
        directory,
        params=Params(needed, total),
        happy=happy,
        files={INTRODUCERS_NAME: f'introducers: {{default: {{furl: "{introducer}"}}}}\n'},
        preferences=ClientPreferences(force_foolscap=force_foolscap),
    )


async def with_pair(
    test: TestCase,
    reactor: Any,
    tahoe: TahoeGrid,
    root: Path,
    shares: tuple[int, int, int],
    force_foolscap: bool,
    work: Callable[[Pair], Any],
) -> None:
    """
    Do something with a gateway and grids that encode like it, and end them.

    Args:
        root: where their directories are made.
        shares: needed, happy, total.
        force_foolscap: of all three; otherwise they speak HTTPS.
        work: returns something to await.
    """
    root.mkdir(parents=True)
    gateway = await _threaded(
        lambda: tahoe.start_gateway(root / "gateway", shares, force_foolscap=force_foolscap)
    )
    grids: list[Grid] = []
    try:
        make_stranger(root / "stranger", tahoe.introducer_furl, shares, force_foolscap)
        for directory in (root / "gateway", root / "stranger"):
            grids.append(await Grid.open(reactor, directory, wait_for=len(tahoe.servers)))  # noqa: PERF401
        protocols = {server.protocol for server in await grids[0].status()}
        test.assertEqual(protocols, {"foolscap" if force_foolscap else "https"})
        await work(Pair(test, tahoe.servers, gateway, *grids))
    finally:
        for grid in grids:
            await grid.close()
        await _threaded(gateway.stop)


async def _threaded(call: Callable[..., T], *arguments: Any) -> T:
    """Wait for what would stop the reactor, and PipeGrid with it."""
    result: T = await deferToThread(call, *arguments)
    return result
