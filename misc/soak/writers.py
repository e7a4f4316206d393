"""
Do thirty writers of one directory lose a link that they were told is there?

Ten servers of ours run as processes of their own, and in some more processes thirty clients, each with
connections of its own. In each round all of them link two children each into one directory, at the same
moment: sixty children, into a directory that was empty, or had some. With ``--gateways`` two gateways of
Tahoe-LAFS's (``$TAHOE`` is the command) link as many each as one of ours, into the same directory. What must
hold:

* every link that one of ours was told is done is there, when all have ended, for one who did not write; but
  for what a gateway writes over (below);
* what fails does so with an error of PipeGrid's; and what was there before is still there.

What a gateway was told is counted as well, but not promised. And in a directory that is empty it puts what it
makes from the empty version in the place of whatever is there by then, as it does with other gateways' links:
no writer can notice that before it says "done", since it comes after. That is counted, too.

    python -m misc.soak.writers [--rounds N] [--seed S] [--writers N] [--gateways]
"""

from __future__ import annotations

import argparse
import json
import os
import random
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

from tests.interop.processes import Gateway, start_gateway
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.threads import deferToThread

from misc import ending
from misc.speedtest.peers.nodes import HTTPS, Address, servers_file
from pipegrid import Grid
from pipegrid.core.caps import LitCap
from pipegrid.errors import PipegridError
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.speedtest.child_processes import Servers, first_line, running
from pipegrid.tree.directory import Directory

SERVERS = 10
SHARES = (3, 7, 10)
PROCESSES = 3
EACH = 2
"""Children that a writer links in a round, one behind the other."""

BEFORE = 20
"""Children that every other round's directory has from the start."""

GATEWAYS = 2
READY = "ready"


class Violation(Exception):
    """A promise was broken."""


async def work(reactor: Any, directory: str, count: int) -> None:
    """Be a process with so many writers: link what standard input names, until it ends."""
    # The end of standard input is sign enough.
    reactor.callWhenRunning(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    grids = [await Grid.open(reactor, directory) for _ in range(count)]
    for grid in grids:
        await grid.status()
    print(READY, flush=True)
    while line := await deferToThread(sys.stdin.readline):
        job = json.loads(line)
        said: list[list[str]] = []
        waiting = [
            Deferred.fromCoroutine(link_all(Directory(grid, job["cap"]), names, said))
            for grid, names in zip(grids, job["names"], strict=True)
        ]
        await DeferredList(waiting, fireOnOneErrback=True, consumeErrors=True)
        print(json.dumps(said), flush=True)
    for grid in grids:
        await grid.close()


async def link_all(directory: Directory, names: Sequence[str], said: list[list[str]]) -> None:
    """Link children; notes of each what came of it, "" if it is done."""
    said.extend([[name, await link(directory, name)] for name in names])


async def link(directory: Directory, name: str) -> str:
    """Link a child; returns the error, or "" if it is done."""
    try:
        await directory.link(name, LitCap(name.encode()))
    except PipegridError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Writers:
    """Processes with writers in them."""

    def __init__(self, directory: Path, count: int, stack: ExitStack) -> None:
        self._counts = [count // PROCESSES + (n < count % PROCESSES) for n in range(PROCESSES)]
        program = [sys.executable, "-m", "misc.soak.writers", "--worker", str(directory)]
        self._processes: list[Popen[str]] = [
            stack.enter_context(running([*program, "--writers", str(each)]))
            for each in self._counts
        ]
        for process in self._processes:
            assert first_line(process) == READY

    def begin(self, cap: str, names: Sequence[Sequence[str]]) -> None:
        """Tell all of them at once."""
        at = 0
        for process, count in zip(self._processes, self._counts, strict=True):
            assert process.stdin is not None
            job = {"cap": cap, "names": names[at : at + count]}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            at += count

    def end(self) -> dict[str, str]:
        """Return what became of each child."""
        return {n: e for process in self._processes for n, e in json.loads(first_line(process))}


@contextmanager
def world(gateways: int) -> Iterator[tuple[Path, list[Gateway]]]:
    """Run servers and gateways; yields a client's directory."""
    with ExitStack() as stack:
        servers = stack.enter_context(Servers(SERVERS))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipegrid-writers-")))
        addresses = [
            Address(f"server{number:02}", nurl, furl)
            for number, (nurl, furl) in enumerate(
                zip(servers.addresses, servers.furls, strict=True)
            )
        ]
        files = {SERVERS_NAME: servers_file(addresses, HTTPS)}
        create_client(scratch / "client", happy=SHARES[1], files=files)
        started = []
        for number in range(gateways):
            furls = {each.nickname: str(each.furl) for each in addresses}
            gateway = start_gateway(scratch / f"gateway{number}", furls, SHARES)
            stack.callback(gateway.stop)
            started.append(gateway)
        yield scratch / "client", started


def link_through(gateway: Gateway, cap: str, names: Sequence[str]) -> dict[str, str]:
    """Have a gateway link children."""
    return {name: ask(gateway, cap, name) for name in names}


def ask(gateway: Gateway, cap: str, name: str) -> str:
    """Have a gateway link a child; returns what it complains of, or "" if it calls it done."""
    try:
        gateway.request("PUT", f"uri/{cap}/{name}?t=uri", str(LitCap(name.encode())).encode())
    except (AssertionError, OSError) as error:
        return str(error)[:300]
    return ""


async def play(
    grid: Grid,
    writers: Writers,
    count: int,
    gateways: Sequence[Gateway],
    number: int,
    counts: Counter[str],
) -> None:
    """
    Play one round.

    Raises:
        Violation: a link that was acknowledged is not there.
    """
    directory = await grid.create_directory()
    before = {f"before{n}" for n in range(BEFORE if number % 2 else 0)}
    for each in [directory.link(name, LitCap(name.encode())) for name in sorted(before)]:
        await each
    cap = str(directory.cap)
    names = [[f"w{writer}n{n}" for n in range(EACH)] for writer in range(count)]
    theirs = [
        deferToThread(link_through, gateway, cap, [f"g{n}n{m}" for m in range(EACH)])
        for n, gateway in enumerate(gateways)
    ]
    writers.begin(cap, names)
    said = await deferToThread(writers.end)
    told = [await each for each in theirs]
    found = set(await directory.list())
    counts["links"] += len(said)
    counts["links that failed"] += sum(bool(error) for error in said.values())
    lost = {name for name, error in said.items() if not error} - found
    for answers in told:
        counts["links of gateways"] += len(answers)
        counts["links of gateways that failed"] += sum(bool(error) for error in answers.values())
        done = {name for name, error in answers.items() if not error}
        counts["links of gateways that they called done, and are gone"] += len(done - found)
    if lost and gateways and not before:
        counts["links of ours in an empty directory that a gateway wrote over"] += len(lost)
        lost.clear()
    if lost or before - found:
        raise Violation(f"acknowledged, and lost: {sorted(lost | (before - found))}")
    errors = sorted({error for error in said.values() if error})
    if errors:
        print(f"  round {number}: {errors[0]}", flush=True)


async def run(reactor: Any, rounds: int, seed: int, count: int, gateways: int, out: TextIO) -> int:
    """Play so many rounds; returns how many broke a promise."""
    random.seed(seed)
    counts: Counter[str] = Counter()
    broken = 0
    print(f"writers: {rounds} rounds, {count} writers, {gateways} gateways", file=out, flush=True)
    with world(gateways) as (directory, started), ExitStack() as stack:
        writers = Writers(directory, count, stack)
        grid = await Grid.open(reactor, directory)
        began_s = time.monotonic()
        for number in range(rounds):
            try:
                await play(grid, writers, count, started, number, counts)
            except Violation as violation:
                broken += 1
                print(f"round {number}: {violation}", file=out, flush=True)
            took_s = time.monotonic() - began_s
            print(
                f"round {number} ended after {took_s:.0f} s: {dict(counts)}", file=out, flush=True
            )
        await grid.close()
    for name, value in sorted(counts.items()):
        print(f"{value:6d} {name}", file=out)
    print(f"{broken:6d} promises broken", file=out, flush=True)
    return broken


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--writers", type=int, default=30)
    parser.add_argument("--gateways", action="store_true", help="two of Tahoe-LAFS's among them")
    parser.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    async def all_of_it(reactor: Any) -> int:
        if options.worker is not None:
            await work(reactor, options.worker, options.writers)
            return 0
        gateways = GATEWAYS if options.gateways else 0
        broken = await run(reactor, options.rounds, options.seed, options.writers, gateways, out)
        return int(broken > 0)

    return ending.run(all_of_it)


if __name__ == "__main__":
    sys.exit(main())
