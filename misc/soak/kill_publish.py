"""
Servers are killed in the middle of a publish, and half of those come back with what they held before.

Ten servers of ours run as processes of their own. In each round a mutable file is overwritten, and at some
moment of that one to five servers get SIGKILL. When the write has ended, one way or the other, they start
again; half of them with the directory of shares that they had before the round. What must hold:

* a write ends, and if it fails it does so with an error of PipeGrid's, but never with one that tells of
  another writer: there is none at the same time;
* a client that knows nothing then reads the version that was acknowledged last, or a newer one that somebody
  asked for; or the error says why not, if more servers went back than the encoding bears;
* a repair makes the file healthy: one version, every share, every byte of them.

The seed decides contents, victims and moments; how far the write comes until then is the machine's business.

    python -m misc.soak.kill_publish [--rounds N] [--seed S] [-v]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from misc import ending
from misc.speedtest.peers.nodes import free_port
from pipegrid import Grid
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import GridError, PipegridError, UncoordinatedWriteError
from pipegrid.speedtest.child_processes import LOOPBACK, environment, first_line, make_client
from pipegrid.wire import server_address

SERVERS = 10
PARAMS = Params(3, 10)
HAPPY = 7
SIZES = (10, 3000, 100_000, 600_000)
VICTIMS = (1, 2, 3, 3, 4, 5)
PATIENCE_S = 240.0


class Violation(Exception):
    """A promise was broken."""


class Server:
    """``pipegrid serve`` on a port that stays."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._port = free_port()
        self._process: subprocess.Popen[str] | None = None

    @property
    def shares(self) -> Path:
        """Where they are."""
        return self.directory / "storage" / "shares"

    def start(self) -> str:
        """Start it; returns its NURL when it listens."""
        place = f"tcp:{self._port}:interface={LOOPBACK}"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pipegrid.speedtest.end_with_parent", "pipegrid.cli"),
                *("-q", "-d", str(self.directory), "serve", "--port", place),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        return first_line(self._process)

    def kill(self) -> None:
        """Send it SIGKILL; ``wait`` for its end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Return when it has ended."""
        assert self._process is not None
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Soak:
    """The servers, a writer that lives through it all, and its file."""

    def __init__(self, reactor: Any, scratch: Path, rng: random.Random) -> None:
        self.reactor = reactor
        self.rng = rng
        self.scratch = scratch
        self.servers = [Server(scratch / f"server{number:02}") for number in range(SERVERS)]
        self.counts: Counter[str] = Counter()
        self.writer: Any = None
        self.cap: Any = None
        self.content = b""
        self.tried: list[bytes] = []

    async def open(self) -> None:
        """Start everything."""
        addresses = [
            server_address.parse_nurl(text)
            for text in await deferToThread(lambda: [each.start() for each in self.servers])
        ]
        make_client(self.scratch / "client", addresses, PARAMS, HAPPY)
        self.writer = await Grid.open(self.reactor, self.scratch / "client")

    async def close(self) -> None:
        """End everything."""
        if self.writer is not None:
            await self.writer.close()
        for server in self.servers:
            server.kill()
            server.wait()

    async def round(self, number: int) -> None:
        """Play one round."""
        rng = self.rng
        if number % 10 == 0:  # a file of its own, of the one format and the other
            self.content = b"first" + rng.randbytes(rng.choice(SIZES))
            kind = rng.choice(("sdmf", "mdmf"))
            made = await self.writer.create_mutable(self.content, format=kind)
            self.cap, self.tried = made.cap, []
        victims = rng.sample(self.servers, rng.choice(VICTIMS))
        going_back = victims[: (len(victims) + 1) // 2]
        old = self.scratch / "old"
        for server in going_back:
            shutil.copytree(server.shares, old / server.directory.name)
        new = b"%d " % number + rng.randbytes(rng.choice(SIZES))
        self.tried.append(new)
        writing = self.writer.overwrite(self.cap, new).addTimeout(PATIENCE_S, self.reactor)
        results: list[Any] = []
        ended = writing.addBoth(results.append)
        await deferLater(self.reactor, rng.choice((0.0, rng.expovariate(1 / 0.03))))
        in_the_middle = not results
        for server in victims:
            server.kill()
        await ended
        for server in victims:
            server.wait()
        for server in going_back:
            shutil.rmtree(server.shares)
            shutil.copytree(old / server.directory.name, server.shares)
        shutil.rmtree(old)
        await deferToThread(lambda: [server.start() for server in victims])
        self.judge(results[0], new, in_the_middle)
        await self.look(f"round {number}, {len(victims)} killed, {len(going_back)} went back")

    def judge(self, result: Any, new: bytes, in_the_middle: bool) -> None:
        """Note how the write ended."""
        self.counts["in the middle" if in_the_middle else "before or after"] += 1
        if not isinstance(result, Failure):
            self.counts["acknowledged"] += 1
            self.content, self.tried = new, []
        elif isinstance(result.value, UncoordinatedWriteError):
            raise Violation(f"a lone writer was told of another one: {result.value}")
        elif isinstance(result.value, PipegridError):
            self.counts[f"failed: {type(result.value).__name__}"] += 1
        else:
            raise Violation(f"the write ended with {result.value!r}")

    async def look(self, about: str) -> None:
        """Read as somebody who knows nothing, repair, and verify."""
        directory = self.scratch / "other"
        shutil.copytree(self.scratch / "client", directory)
        os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
        grid = await Grid.open(self.reactor, directory)
        try:
            while not all(server.reachable for server in await grid.status()):
                await deferLater(self.reactor, 0.2)
            try:
                found = await grid.read(self.cap.readonly())
            except GridError as error:
                self.counts[f"not readable: {type(error).__name__}"] += 1
                raise Violation(f"{about}: {error}") from None
            if found != self.content:
                if found not in self.tried:
                    raise Violation(f"{about}: {found[:10]!r} is there, not {self.content[:10]!r}")
                self.counts["a newer one was there, that was not acknowledged"] += 1
            await grid.repair(self.cap, force=True)
            health = await grid.check(self.cap, verify=True)
            if not health.healthy:
                raise Violation(f"{about}: not healthy after its repair: {health}")
            self.content, self.tried = await grid.read(self.cap), []
            if self.content != found:
                self.counts["the repair brought another one"] += 1
        finally:
            await grid.close()
            shutil.rmtree(directory)


async def run(reactor: Any, rounds: int, seed: int, out: TextIO, verbose: bool) -> int:
    """Play so many rounds; returns how many broke a promise."""
    print(f"kill_publish: {rounds} rounds, seed {seed}", file=out, flush=True)
    broken = 0
    with tempfile.TemporaryDirectory(prefix="pipegrid-kill-publish-") as scratch:
        soak = Soak(reactor, Path(scratch), random.Random(seed))
        began_s = time.monotonic()
        try:
            await soak.open()
            for number in range(rounds):
                try:
                    await soak.round(number)
                except Violation as violation:
                    broken += 1
                    print(f"{violation}", file=out, flush=True)
                if verbose:
                    took_s = time.monotonic() - began_s
                    print(f"{number} {took_s:.0f} s {dict(soak.counts)}", file=out, flush=True)
        finally:
            await soak.close()
    for name, count in sorted(soak.counts.items()):
        print(f"{count:6d} {name}", file=out)
    print(f"{broken:6d} promises broken", file=out, flush=True)
    return broken


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("-v", "--verbose", action="store_true", help="print each round")
    options = parser.parse_args(arguments)

    async def all_of_it(reactor: Any) -> int:
        return int(await run(reactor, options.rounds, options.seed, out, options.verbose) > 0)

    return ending.run(all_of_it)


if __name__ == "__main__":
    sys.exit(main())
