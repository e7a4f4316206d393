"""
Does the memory of ``put_tree`` grow with the tree? A hundred files of 300 MB, and servers that keep nothing.

    python -m misc.soak.large_tree [--files 100] [--megabytes 300] [--directory DIR]

The files are holes, which take no room on any disk; everything else is as ever: they are read, hashed,
encrypted, coded 3 of 10, and handed to ten servers in this process, which count bytes and forget them. One
JSON line whenever a file is stored, with the resident memory of that moment. It takes a processor some 100 s
for each 10 GB. The status is 1 if memory grew by more than 16 MiB after the first quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TextIO

from tests.transport.memory import MemoryServer
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from misc import ending
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import Buffer, tagged_hash
from pipegrid.core.placement import permutation_seed
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.server_opening import Windows
from pipegrid.reactor.workers import Workers
from pipegrid.transfer.peers import Peer
from pipegrid.tree.tree_grid import Grid
from pipegrid.tree.tree_upload import TreeCounts, TreeReports
from pipegrid.wire.storage_messages import Allocation, ServerIdentity, UploadSecrets, WriteAnswer

GROWTH_BYTES = 16 << 20
SERVERS = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Forgetful(MemoryServer):
    """
    Takes shares, and counts their bytes.

    Attributes:
        taken_bytes: so far.
    """

    def __init__(self, identity: ServerIdentity, reactor: Any) -> None:
        super().__init__(identity)
        self.taken_bytes = 0
        self._reactor = reactor
        self._missing: dict[tuple[bytes, int], int] = {}

    def _answer(self, operation: str, act: Callable[[], Any], *arguments: Any) -> Deferred[Any]:
        answer: Deferred[Any] = deferLater(self._reactor, 0.0, act)
        return answer

    def allocate(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Allocation]:
        """There is room."""
        numbers = frozenset(share_numbers)
        for number in numbers:
            self._missing[storage_index, number] = share_bytes
        return self._answer("allocate", lambda: Allocation(frozenset(), numbers))

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Sequence[Buffer],
        upload_secret: bytes,
        *,
        release: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        """Count it; all of it is new, since nothing is lost on the way."""
        size, key = sum(map(len, data)), (storage_index, share_number)
        self.taken_bytes += size

        def write() -> WriteAnswer:
            left = self._missing[key] = self._missing[key] - size
            if not left:
                del self._missing[key]
            return WriteAnswer(not left, () if not left else ((0, 1),))

        return self._answer("write", write)


def forgetful_grid(reactor: Any, directory: Path) -> tuple[Grid, list[Forgetful]]:
    """Return a grid of servers that keep nothing."""
    windows = Windows.shared_by(SERVERS)
    servers, peers = [], []
    for number in range(SERVERS):
        name = f"s{number}"
        seed = tagged_hash(b"test", name.encode())[:20]
        server = Forgetful(ServerIdentity(name, name, permutation_seed(name), seed), reactor)
        servers.append(server)
        peers.append(Peer(server, windows.pipeline(reactor, lambda: None), "memory"))
    config = GridConfig(directory, Params(), 7, b"c" * 32, b"l" * 32, None)
    return Grid(reactor, config, peers, Workers(reactor)), servers


def make_holes(root: Path, files: int, size: int) -> None:
    """Make files of zeros, ten to a directory, of slightly different sizes, since equal ones are one."""
    for number in range(files):
        path = root / f"d{number // 10}" / f"f{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(size + number)


def resident_bytes() -> int:
    """Return what this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


async def run(reactor: Any, root: Path, files: int, size: int, out: TextIO) -> int:
    """Store them; returns 0 if memory stayed flat."""
    grid, servers = forgetful_grid(reactor, root)
    make_holes(root / "source", files, size)
    began_s = time.monotonic()
    seen: list[int] = []
    left_out: list[str] = []

    def progress(counts: TreeCounts) -> None:
        if counts.sent_files > len(seen):
            seen.append(resident_bytes())
            told = {"files": counts.sent_files, "bytes": counts.sent_bytes}
            told["rss_mib"] = seen[-1] >> 20
            print(json.dumps(told | {"s": round(time.monotonic() - began_s)}), file=out, flush=True)

    reports = TreeReports(lambda path, why: left_out.append(f"{path}: {why}"), progress)
    try:
        result = await grid.tree.put_tree(root / "source", reports=reports)
    finally:
        await grid.close()
    settled = max(seen[: max(1, len(seen) // 4)])
    summary = {
        "files": result.counts.sent_files,
        "bytes": result.counts.sent_bytes,
        "share_bytes": sum(server.taken_bytes for server in servers),
        "seconds": round(result.elapsed_s, 1),
        "rss_mib_settled": settled >> 20,
        "rss_mib_most": max(seen) >> 20,
        "left_out": left_out,
    }
    print(json.dumps(summary), file=out, flush=True)
    return int(bool(left_out) or max(seen) - settled > GROWTH_BYTES)


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=300, help="of each")
    parser.add_argument("--directory", help="where files may have holes [the usual one]")
    options = parser.parse_args(arguments)

    async def play(reactor: Any) -> int:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            size = options.megabytes * 1_000_000
            return await run(reactor, Path(directory), options.files, size, out)

    return ending.run(play)


if __name__ == "__main__":
    sys.exit(main())
