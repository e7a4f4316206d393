"""
Storing again what Tahoe-LAFS has stored: on its servers, from its own node's directory.

Tahoe-LAFS places shares otherwise than at the first servers of the ring in order, so a put that sends before
it has asked makes second copies. From the second file on there are none. ``make interop`` does all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from unittest import mock

from misc.speedtest.peers.nodes import FOOLSCAP, HTTPS, Gateway, StorageNodes
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from pipegrid import Grid
from pipegrid.core import base32
from pipegrid.core.caps import readable
from pipegrid.core.encoding_parameters import Params


class StoringAgain(TestCase):
    """A grid of Tahoe-LAFS's servers, and its gateway, whose directory PipeGrid uses as it stands."""

    timeout = 3000

    async def check_all(
        self,
        servers: int,
        params: Params,
        happy: int,
        sizes: Sequence[int],
        files: int,
        protocol: str,
    ) -> None:
        """
        Store so many files of each size, first by the gateway and then again, and count.

        Each file is put by a client that begins anew, as the command does.
        """
        root = Path(self.mktemp()).absolute()
        root.mkdir(parents=True)
        with ExitStack() as stack:
            cache = {"XDG_CACHE_HOME": str(root / "cache")}
            stack.enter_context(mock.patch.dict("os.environ", cache))
            nodes = stack.enter_context(StorageNodes(root, servers))
            gateway = Gateway(root / "gateway", nodes.addresses(), protocol, params, happy)
            stack.enter_context(gateway)
            first = True
            for size in sizes:
                for number in range(files):
                    data = Random(f"{size} {number}").randbytes(size)
                    cap = await deferToThread(gateway.put, data)
                    before = self.copies(nodes, cap)
                    self.assertEqual(len(before), params.total_shares)
                    await self.put(gateway.directory, data, cap)
                    after = self.copies(nodes, cap)
                    what = f"{protocol}, file {number} of {size} bytes"
                    if first:
                        self.assertLessEqual(before, after, what)
                    else:
                        self.assertEqual(after, before, what)
                    # A file that Tahoe-LAFS happened to place as we do tells nobody that it does not.
                    first = first and after == before
                self.assertEqual(self.unfinished(nodes), [], "nothing is left unfinished")
                nodes.forget()
            self.assertFalse(first, "all files were placed as we place them")

    async def put(self, directory: Path, data: bytes, cap: str) -> None:
        """Store a file again."""
        from twisted.internet import reactor

        grid = await Grid.open(reactor, directory)
        try:
            stored = await grid.put(data)
        finally:
            await grid.close()
        self.assertEqual(str(stored.cap), cap)

    def copies(self, nodes: StorageNodes, cap: str) -> set[tuple[str, str]]:
        """Return which servers hold which shares of a file."""
        name = base32.encode(readable(cap).storage_index or b"")
        return {
            (node.directory.name, share.name)
            for node in nodes.nodes
            for share in (node.shares / name[:2] / name).glob("*")
        }

    def unfinished(self, nodes: StorageNodes) -> list[str]:
        """Return what servers believe to be on its way."""
        return [
            str(path)
            for node in nodes.nodes
            for path in (node.shares / "incoming").rglob("*")
            if path.is_file()
        ]


class WholeTests(StoringAgain):
    """Ten servers."""

    def test_https(self) -> Deferred[None]:
        """500 bytes to 20 MB, twenty files of each size."""
        sizes = (500, 20_000, 200_000, 3_000_000, 20_000_000)
        return Deferred.fromCoroutine(self.check_all(10, Params(), 7, sizes, 20, HTTPS))

    def test_foolscap(self) -> Deferred[None]:
        """The same in fewer."""
        sizes = (500, 200_000, 3_000_000)
        return Deferred.fromCoroutine(self.check_all(10, Params(), 7, sizes, 5, FOOLSCAP))

    def test_more_servers_than_shares(self) -> Deferred[None]:
        """Tahoe-LAFS chooses among twice as many servers as there are shares."""
        sizes = (500, 200_000, 3_000_000)
        return Deferred.fromCoroutine(self.check_all(12, Params(2, 6), 4, sizes, 10, HTTPS))
