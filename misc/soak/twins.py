"""
Do several puts of one file at the same time all end well?

Some processes, each with a ``Grid`` of its own, are told to store the same file at nearly the same moment: on
the embedded grid of one directory, or over HTTPS on ten servers, as one user twice or as several users with
one convergence secret. What must hold of every round:

* every put ends well, with the same cap;
* all shares are there, on as many servers as the wanted happiness, and every byte of them is right;
* nothing is left unfinished.

The seed decides sizes and moments; who comes first to which server is the machine's business.

    python -m misc.soak.twins [--rounds N] [--seed S] [--over embedded|https|users] [--writers N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, TextIO

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from misc import ending
from pipegrid import Grid
from pipegrid.core import base32
from pipegrid.errors import PipegridError
from pipegrid.grid.client_config import SECRET_BYTES
from pipegrid.grid.client_creation import create_local
from pipegrid.speedtest.child_processes import Servers, first_line, running

EMBEDDED, HTTPS, USERS = "embedded", "https", "users"
OVER = (EMBEDDED, HTTPS, USERS)
SIZES = (200, 3000, 30_000, 300_000, 1_500_000, 5_000_000)
SPREADS_S = (0.0, 0.003, 0.02, 0.1, 0.3)
"""How far the beginnings of a round's puts are apart at most."""

HEAD_START_S = 0.05
"""Until all processes have been told of a round."""

READY = "ready"


class Violation(Exception):
    """A promise was broken."""


class Writers:
    """
    Processes that store the same files.

    Args:
        directories: of the clients, one for each process.
    """

    def __init__(self, directories: Sequence[Path], stack: ExitStack) -> None:
        program = [sys.executable, "-m", "misc.soak.twins", "--worker"]
        self._processes: list[Popen[str]] = [
            stack.enter_context(running([*program, str(directory)])) for directory in directories
        ]
        for process in self._processes:
            assert first_line(process) == READY

    def put(self, path: Path, moments_s: Sequence[float], fresh: Sequence[bool]) -> list[Any]:
        """
        Have each store a file; returns what each says of it.

        Args:
            moments_s: when each begins, from now.
            fresh: whether it opens its grid anew for that.
        """
        begin_s = time.time() + HEAD_START_S
        for process, moment_s, anew in zip(self._processes, moments_s, fresh, strict=True):
            job = {"path": str(path), "at_s": begin_s + moment_s, "fresh": anew}
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        return [json.loads(first_line(process)) for process in self._processes]


async def work(reactor: Any, directory: str) -> None:
    """Be one of the processes: store what standard input names, until it ends."""
    # The end of standard input is sign enough.
    reactor.callWhenRunning(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    grid = await Grid.open(reactor, directory)
    print(READY, flush=True)
    while line := await deferToThread(sys.stdin.readline):
        job = json.loads(line)
        if job["fresh"]:
            await grid.close()
            grid = await Grid.open(reactor, directory)
        await deferLater(reactor, max(0.0, job["at_s"] - time.time()))
        try:
            stored = await grid.put(job["path"])
            said: dict[str, object] = {
                "cap": str(stored.cap),
                "placed": len(stored.shares_placed),
                "found": len(stored.shares_found),
            }
        except PipegridError as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
    await grid.close()


@contextmanager
def clients(over: str, writers: int) -> Iterator[tuple[list[Path], list[Path]]]:
    """Run servers; yield the directories of the clients, and those where shares are."""
    with tempfile.TemporaryDirectory(prefix="pipegrid-twins-") as scratch, ExitStack() as stack:
        if over == EMBEDDED:
            directory = Path(scratch) / "client"
            create_local(directory)
            yield [directory] * writers, [directory / "storage"]
            return
        servers = stack.enter_context(Servers(10))
        directories = [servers.client] * writers
        if over == USERS:
            directories = [Path(scratch) / f"client-{number}" for number in range(writers)]
            for each in directories:
                shutil.copytree(servers.client, each)
                secret = base32.encode(os.urandom(SECRET_BYTES))
                (each / "private/secret").write_text(secret + "\n")
        yield directories, servers.directories


async def check(reactor: Any, directory: Path, cap: str, stores: Sequence[Path]) -> None:
    """Raise Violation unless a file is whole, and nothing else is there."""
    grid = await Grid.open(reactor, directory)
    try:
        health = await grid.check(cap, verify=True)
    finally:
        await grid.close()
    if not health.healthy or health.happiness < grid.config.happy:
        raise Violation(f"the file is not healthy: {health}")
    left = [
        str(path)
        for store in stores
        for path in store.rglob("*")
        if path.is_file() and "incoming" in path.parts
    ]
    if left:
        raise Violation(f"{len(left)} unfinished shares are left, such as {left[0]}")


async def run(
    reactor: Any, rounds: int, seed: int, over: str, writers: int, out: TextIO, verbose: bool
) -> int:
    """Play so many rounds; returns how many broke a promise."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    broken = 0
    print(f"twins: {rounds} rounds of {writers}, {over}, seed {seed}", file=out, flush=True)
    with clients(over, writers) as (directories, stores), ExitStack() as stack:
        processes = Writers(directories, stack)
        path = directories[0].parent / "file"
        for number in range(rounds):
            path.write_bytes(rng.randbytes(rng.choice(SIZES)))
            spread_s = rng.choice(SPREADS_S)
            moments_s = [rng.uniform(0, spread_s) for _ in directories]
            fresh = [rng.random() < 0.3 for _ in directories]
            began_s = time.monotonic()
            said = await deferToThread(processes.put, path, moments_s, fresh)
            took_s = time.monotonic() - began_s
            case = f"round {number}: {path.stat().st_size} bytes, {spread_s:g} s apart"
            if verbose:
                print(f"{case}, {took_s:.2f} s: {said}", file=out, flush=True)
            try:
                caps = {one.get("cap") for one in said}
                if len(caps) != 1 or None in caps:
                    raise Violation(f"not every put ended well: {said}")
                await check(reactor, directories[0], caps.pop(), stores)
            except Violation as violation:
                broken += 1
                print(f"{case}\n  {violation}", file=out, flush=True)
            counts["puts"] += len(said)
            counts["puts that found some shares"] += sum(bool(one.get("found")) for one in said)
            counts["puts that placed some"] += sum(bool(one.get("placed")) for one in said)
    for name, count in sorted(counts.items()):
        print(f"{count:6d} {name}", file=out)
    print(f"{broken:6d} promises broken", file=out, flush=True)
    return broken


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rounds", type=int, default=34, help="of each kind [34]")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--over", action="append", choices=OVER, default=None, help="[all]")
    parser.add_argument("--writers", type=int, default=2, help="at the same time [2]")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each round")
    parser.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        ending.run(lambda reactor: work(reactor, options.worker))
        return 0

    async def all_kinds(reactor: Any) -> int:
        broken = 0
        for over in options.over or OVER:
            kind = (options.rounds, options.seed, over, options.writers)
            broken += await run(reactor, *kind, out, options.verbose)
        return int(broken > 0)

    return ending.run(all_kinds)


if __name__ == "__main__":
    sys.exit(main())
