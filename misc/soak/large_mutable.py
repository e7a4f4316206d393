"""
An MDMF file of a gigabyte, of which a kilobyte in the middle is changed: what travels?

The file is made of random bytes, by a first piece and by others that are added at its end, on storage
servers that are processes of their own, PipeGrid's or Tahoe-LAFS's (``$TAHOE`` is the command). Then a client
that has never seen it changes a kilobyte in the middle, and one at the quarter, now that it knows the
version; it reaches the servers through a relay that counts every byte. What must hold:

* what is sent is the segment that was touched, to every server, and some kilobytes a server of hashes and
  heads;
* what is received is the old segment, and some kilobytes a server;
* all of the file is as it should be, and the client's memory stays within a bound.

    python -m misc.soak.large_mutable [--kind pipegrid|tahoe] [--megabytes 1000] [--scratch DIR] [--seed S]

``--scratch`` needs room for 3.4 times the file. Prints one JSON line; the exit status is 1 if something is
not as it must be.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
from twisted.protocols.portforward import ProxyClient, ProxyClientFactory, ProxyFactory, ProxyServer

from misc import ending
from misc.scratch import scratch_directory
from misc.soak.resume import KINDS, PIPEGRID, PipegridNode
from misc.speedtest.peers.nodes import HTTPS, StorageNode, servers_file, stop
from misc.speedtest.processes import LOOPBACK
from pipegrid import Grid
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.mutable.versions import MDMF_SEGMENT_BYTES, SALT_BYTES
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME

SERVERS = 10
PARAMS = Params(3, SERVERS)
PIECE_BYTES = 16 << 20
CHANGED_BYTES = 1000
SHARE_BYTES = 10_000
"""Beside the block: header, keys, signature, chains, heads of requests, TLS."""
LOOK_BYTES = 4000
"""Of each share, by who knows nothing of the file."""
MAX_RSS_BYTES = 500 << 20


@attrs.define
class Traffic:
    """Bytes that have passed."""

    up: int = 0
    down: int = 0

    def take(self) -> tuple[int, int]:
        """Return what has passed since the last time."""
        found = self.up, self.down
        self.up = self.down = 0
        return found

    def listen(self, reactor: Any, port: int) -> Any:
        """Relay to a port of this machine, and count."""
        traffic = self

        class Answers(ProxyClient):
            def dataReceived(self, data: bytes) -> None:
                traffic.down += len(data)
                super().dataReceived(data)

        class AnswersFactory(ProxyClientFactory):
            protocol = Answers
            noisy = False

        class Questions(ProxyServer):
            clientProtocolFactory = AnswersFactory

            def dataReceived(self, data: bytes) -> None:
                traffic.up += len(data)
                super().dataReceived(data)

        factory = ProxyFactory(LOOPBACK, port)
        factory.protocol = Questions
        factory.noisy = False
        return reactor.listenTCP(0, factory, interface=LOOPBACK)


class Pieces:
    """
    What the file shall hold, without holding it: each piece comes from its number.

    Args:
        size: at least; of whole pieces.
    """

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self.count = -(-size // PIECE_BYTES)
        self.size = self.count * PIECE_BYTES
        self._changes: dict[int, bytes] = {}

    def change(self, offset: int, data: bytes) -> None:
        """Some bytes, within a piece, are others now."""
        self._changes[offset] = data

    def piece(self, number: int) -> bytes:
        """Return one."""
        piece = bytearray(random.Random(f"{self._seed} {number}").randbytes(PIECE_BYTES))
        for offset, data in self._changes.items():
            if offset // PIECE_BYTES == number:
                at = offset % PIECE_BYTES
                piece[at : at + len(data)] = data
        return bytes(piece)


def start_nodes(root: Path, kind: str) -> list[StorageNode]:
    """Start the servers, and wait for them."""
    make = PipegridNode if kind == PIPEGRID else StorageNode
    nodes: list[StorageNode] = [make(root / f"server{number}") for number in range(SERVERS)]
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait()
    except BaseException:
        stop(nodes)
        raise
    return nodes


def bounds(known: bool) -> tuple[int, int]:
    """Return how many bytes may be sent, and received, for a change within one segment."""
    segment = MDMF_SEGMENT_BYTES + PARAMS.required_shares
    block = segment // PARAMS.required_shares + 1 + SALT_BYTES
    up = SERVERS * (block + SHARE_BYTES)
    look = 0 if known else LOOK_BYTES
    return up, PARAMS.required_shares * block + SERVERS * (look + SHARE_BYTES)


async def measure(reactor: Any, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make the file, change it, look at it; returns what was found."""
    pieces = Pieces(options.seed, options.megabytes * 10**6)
    with ExitStack() as stack:
        nodes = start_nodes(root, options.kind)
        stack.callback(stop, nodes)
        direct, traffic = [node.address() for node in nodes], Traffic()
        listening = [traffic.listen(reactor, node.port) for node in nodes]
        relayed = [
            each.at(port.getHost().port) for each, port in zip(direct, listening, strict=True)
        ]
        grids: list[Grid] = []
        try:
            for name, addresses in (("maker", direct), ("client", relayed)):
                files = {SERVERS_NAME: servers_file(addresses, HTTPS)}
                create_client(root / name, params=PARAMS, happy=7, files=files)
                grids.append(await Grid.open(reactor, root / name))
            return await _measure(grids[0], grids[1], traffic, pieces, options)
        finally:
            for grid in grids:
                await grid.close()
            for port in listening:
                await port.stopListening()


async def _measure(
    maker: Grid, grid: Grid, traffic: Traffic, pieces: Pieces, options: argparse.Namespace
) -> dict[str, Any]:
    began_s = time.monotonic()
    cap = (await maker.create_mutable(pieces.piece(0), format="mdmf")).cap
    for number in range(1, pieces.count):
        await maker.update(cap, number * PIECE_BYTES, pieces.piece(number))
    found: dict[str, Any] = {
        "kind": options.kind,
        "seed": options.seed,
        "size": pieces.size,
        "made_s": round(time.monotonic() - began_s, 1),
    }
    warm = (await grid.create_mutable(b"warm" * 100)).cap
    assert await grid.read(warm.readonly()) == b"warm" * 100
    wrong: list[str] = []
    for known, offset in ((False, pieces.size // 2 + 5000), (True, pieces.size // 4 + 5000)):
        traffic.take()
        began_s = time.monotonic()
        data = random.Random(offset).randbytes(CHANGED_BYTES)
        await grid.update(cap, offset, data)
        pieces.change(offset, data)
        up, down = traffic.take()
        most_up, most_down = bounds(known)
        name = "known" if known else "new"
        found[name] = {
            "sent": up,
            "received": down,
            "most_sent": most_up,
            "most_received": most_down,
            "seconds": round(time.monotonic() - began_s, 3),
        }
        if up > most_up or down > most_down:
            wrong.append(f"too many bytes ({name})")
    began_s = time.monotonic()
    for number in range(pieces.count):
        data = await maker.read(cap.readonly(), number * PIECE_BYTES, PIECE_BYTES)
        if data != pieces.piece(number):
            wrong.append(f"piece {number} is not what was written")
    found["read_s"] = round(time.monotonic() - began_s, 1)
    health = await maker.check(cap)
    if not health.healthy:
        wrong.append("the file is not healthy")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found["peak_memory"] = rss
    if rss > MAX_RSS_BYTES:
        wrong.append("too much memory")
    return {**found, "wrong": wrong}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default=PIPEGRID)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--scratch", type=scratch_directory)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}

    async def run(reactor: Any) -> None:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            result.update(await measure(reactor, Path(scratch), options))
        print(json.dumps(result), flush=True)

    ending.run(lambda reactor: _checked(run(reactor), result))


async def _checked(work: Any, result: dict[str, Any]) -> None:
    await work
    if result["wrong"]:
        print("; ".join(result["wrong"]), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
