"""
Do transfers survive that Tahoe-LAFS's servers are stopped, killed and started again under them?

Five storage servers of Tahoe-LAFS run as processes of their own (``$TAHOE`` is the command); a file's five
shares, of which two restore it, must be on four of them. Again and again a ``put`` or a ``get`` is begun,
over HTTPS or Foolscap, with clients that live through it all; in the middle of it one or more servers get
SIGTERM or SIGKILL, and start again at once, after a while, or when the transfer has ended. What must hold:

* a transfer ends, one way or the other, within minutes;
* a ``get`` that ends well brought the right bytes, and it ends well if two servers were left alone;
* a ``put`` ends well if four servers were left alone;
* whatever fails does so with an error of PipeGrid's, one sentence, and nothing fails unseen behind it;
* when all servers run again, the same ``put`` completes and puts a share on each of the five: no server
  believes that somebody is still uploading; ``check --verify`` finds every share good; ``get`` brings the
  file back; and no server holds anything unfinished.

The seed decides files, victims and moments; how far a transfer comes until then is the machine's business.

    python -m misc.soak.restarts [--rounds N] [--seed S] [--protocol https|foolscap]
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as TooLong
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from twisted.python.failure import Failure
from zope.interface import implementer

from misc import ending
from misc.speedtest.peers.nodes import (
    FOOLSCAP,
    HTTPS,
    PROTOCOLS,
    StorageNode,
    StorageNodes,
    servers_file,
)
from pipegrid import Grid
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CorruptionError, GridError, PipegridError
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.speedtest.benchmark_clients import Comparing

SERVERS = 5
PARAMS = Params(2, SERVERS)
HAPPY = 4
PUT = "put"
GET = "get"
SIZES = (200, 100_000, 3_000_000, 20_000_000)
VICTIMS = (1, 1, 1, 2, 2, 3, 4)
SIGNALS = {"stopped": signal.SIGTERM, "killed": signal.SIGKILL}
MEAN_DELAY_S = 0.03
DOWN_S = (0.0, 1.0, 5.0, None)
PATIENCE_S = 240.0
"""Longer than anything that waits for a server, on a machine that does other things as well."""
TIDY_S = 20.0
CHECKS = 3
MAX_SENTENCE = 1000

T = TypeVar("T")


class Violation(Exception):
    """A promise was broken."""


@attrs.frozen
class Case:
    """
    What one round does.

    Attributes:
        fraction: of the transfer that is acknowledged, or delivered, when the signal is sent; None: it
            is sent ``delay_s`` after the beginning.
        victims: numbers of servers, each with how it ends.
        down_s: how long they are down; None: until the transfer has ended.
        fresh: whether the client begins anew, without connections.
    """

    protocol: str
    operation: str
    size: int
    fraction: float | None
    delay_s: float
    victims: dict[int, str]
    down_s: float | None
    fresh: bool

    @property
    def must_succeed(self) -> bool:
        """Whether enough servers are left alone."""
        alone = SERVERS - len(self.victims)
        return alone >= (HAPPY if self.operation == PUT else PARAMS.required_shares)


def random_case(rng: random.Random, protocols: Sequence[str]) -> Case:
    """Return one of the cases."""
    victims = rng.sample(range(SERVERS), rng.choice(VICTIMS))
    return Case(
        protocol=rng.choice(protocols),
        operation=rng.choice((PUT, GET)),
        size=rng.choice(SIZES),
        fraction=rng.choice((None, 0.0, 0.1, 0.5, 0.9)),
        delay_s=rng.expovariate(1 / MEAN_DELAY_S),
        victims={number: rng.choice(sorted(SIGNALS)) for number in victims},
        down_s=rng.choice(DOWN_S),
        fresh=rng.random() < 0.2,
    )


def judge(case: Case, result: object) -> str:
    """
    Return what became of a transfer, in a word or two.

    Args:
        result: what it fired with, or a Failure.

    Raises:
        Violation: that must not have become of it.
    """
    if not isinstance(result, Failure):
        return "completed"
    error = result.value
    if isinstance(error, TooLong):
        raise Violation(f"the {case.operation} did not end within {PATIENCE_S:g} s")
    said = check_sentence(error, case.operation)
    if case.must_succeed or not isinstance(error, GridError):
        raise Violation(f"enough servers were left alone, but the {case.operation} failed: {said}")
    return f"failed: {type(error).__name__}"


class Transfer:
    """A put or a get that runs, and the moment at which servers go away under it."""

    def __init__(self, reactor: Any, case: Case) -> None:
        self._fraction = case.fraction
        self.moment: Deferred[None] = Deferred()
        self.ended = False
        if case.fraction is None:
            reactor.callLater(case.delay_s, self._now)

    def progress(self, done: int, total: int) -> None:
        """Called by the transfer."""
        if self._fraction is not None and total and done >= self._fraction * total:
            self._now()

    def end(self, result: T) -> T:
        """It has ended, somehow; who waits for the moment waits no longer."""
        self.ended = True
        self._now()
        return result

    def _now(self) -> None:
        if not self.moment.called:
            self.moment.callback(None)


@implementer(ILogObserver)
class Unseen:
    """Notes failures that nobody was told of, as they appear in the log."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __call__(self, event: LogEvent) -> None:
        """Look at one event of the log."""
        failure = event.get("log_failure")
        if failure is not None:
            self.failures.append(f"{failure.type.__name__}: {failure.value}")


class Soak:
    """The servers, and one client for each protocol."""

    def __init__(self, reactor: Any, servers: StorageNodes, scratch: Path) -> None:
        self._reactor = reactor
        self._nodes = servers.nodes
        self._directories: dict[str, Path] = {}
        self._grids: dict[str, Grid] = {}
        for protocol in PROTOCOLS:
            self._directories[protocol] = scratch / f"client-{protocol}"
            create_client(
                self._directories[protocol],
                params=PARAMS,
                happy=HAPPY,
                files={SERVERS_NAME: servers_file(servers.addresses(), protocol)},
            )
        self.unseen = Unseen()
        self.counts: Counter[str] = Counter()

    async def close(self) -> None:
        """Close the clients."""
        for grid in self._grids.values():
            await grid.close()

    async def round(self, case: Case, rng: random.Random) -> None:
        """Play one case; all servers run before it and after it."""
        grid = await self._grid(case)
        data = rng.randbytes(case.size)
        sink = Comparing(data)
        transfer = Transfer(self._reactor, case)
        if case.operation == PUT:
            running: Deferred[Any] = grid.put(data, progress=transfer.progress)
        else:
            stored = await self._bounded(grid.put(data, happy=SERVERS), "a put in peace")
            running = grid.get(str(stored.cap), cast(BinaryIO, sink), progress=transfer.progress)
        running.addTimeout(PATIENCE_S, self._reactor).addBoth(transfer.end)
        results: list[object] = []
        ended = running.addBoth(results.append)
        await transfer.moment
        self.counts["rounds"] += 1
        in_the_middle = not transfer.ended
        try:
            for number, how in case.victims.items():
                self._nodes[number].signal(SIGNALS[how])
                if in_the_middle:
                    self.counts[f"servers {how} in the middle"] += 1
            victims = [self._nodes[number] for number in case.victims]
            await deferToThread(wait_stopped, victims)
            if case.down_s is not None:
                await deferLater(self._reactor, case.down_s)
                await deferToThread(start, victims)
            await ended
        finally:
            await deferToThread(start, [node for node in self._nodes if not node.running])
        verdict = judge(case, results[0]) if in_the_middle else "over before"
        if verdict == "completed" and case.operation == GET:
            check_bytes(sink)
        self.counts[f"{case.protocol} {case.operation} {verdict}"] += 1
        await self._rerun(grid, data)

    async def _rerun(self, grid: Grid, data: bytes) -> None:
        """Check that what was begun can be completed, and that nothing is left of the beginning."""
        stored = await self._bounded(grid.put(data, happy=SERVERS), "the put, again,")
        cap = str(stored.cap)
        for _ in range(CHECKS):
            checked = await self._bounded(grid.check(cap, verify=True), "the check")
            if not checked.unreachable:
                break
            # On a busy machine a server that has just begun may take longer than clients are patient.
            self.counts["checks repeated, since a server did not answer in time"] += 1
        if not checked.healthy or checked.happiness < SERVERS:
            raise Violation(f"after the rerun the file is not healthy: {checked}")
        sink = Comparing(data)
        await self._bounded(grid.get(cap, cast(BinaryIO, sink)), "the get after it")
        check_bytes(sink)
        await nothing_left(self._reactor, self._nodes, self.unseen)

    async def _grid(self, case: Case) -> Grid:
        if case.fresh and case.protocol in self._grids:
            await self._grids.pop(case.protocol).close()
        if case.protocol not in self._grids:
            directory = self._directories[case.protocol]
            self._grids[case.protocol] = await Grid.open(self._reactor, directory)
        return self._grids[case.protocol]

    async def _bounded(self, running: Deferred[T], what: str) -> T:
        try:
            return await running.addTimeout(PATIENCE_S, self._reactor)
        except TooLong:
            raise Violation(f"{what} did not end within {PATIENCE_S:g} s") from None
        except PipegridError as error:
            raise Violation(f"{what} failed: {type(error).__name__}: {error}") from error


async def nothing_left(reactor: Any, nodes: Sequence[StorageNode], unseen: Unseen) -> None:
    """Wait until nothing is unfinished at servers, have them forget all; nothing must have failed unseen."""
    end_s = time.monotonic() + TIDY_S
    while left := [path for node in nodes for path in unfinished(node)]:
        if time.monotonic() > end_s:
            raise Violation(f"after the rerun there is still {left[0]}")
        await deferLater(reactor, 0.1)
    for node in nodes:
        node.forget()
    gc.collect()
    if unseen.failures:
        failures, unseen.failures = unseen.failures, []
        raise Violation(f"behind it all, unseen: {'; '.join(failures[:3])}")


def check_sentence(error: object, what: str) -> str:
    """Return what an error says; raise Violation unless it is one of PipeGrid's, in one sentence."""
    said = str(error)
    if not isinstance(error, PipegridError):
        raise Violation(f"the {what} failed with {type(error).__name__}: {said}")
    if not said or "\n" in said or "Traceback" in said or len(said) > MAX_SENTENCE:
        raise Violation(f"{type(error).__name__} of the {what} is no sentence: {said!r}")
    return said


def start(nodes: Sequence[StorageNode]) -> None:
    """Start servers, and wait until they can be used."""
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait()


def wait_stopped(nodes: Sequence[StorageNode]) -> None:
    """Return when servers have ended."""
    for node in nodes:
        node.wait_stopped()


def check_bytes(sink: Comparing) -> None:
    """Raise Violation unless the right bytes came."""
    try:
        sink.check()
    except CorruptionError as error:
        raise Violation(str(error)) from None


def unfinished(node: StorageNode) -> list[Path]:
    """Return the shares that a server believes are being uploaded."""
    return [path for path in (node.shares / "incoming").rglob("*") if path.is_file()]


async def run(
    reactor: Any, rounds: int, seed: int, protocols: Sequence[str], verbose: bool, out: TextIO
) -> int:
    """Play so many rounds in the middle of which servers went away; returns 0 if all promises held."""
    rng = random.Random(seed)
    print(f"restarts: {rounds} rounds, seed {seed}, {', '.join(protocols)}", file=out, flush=True)
    violations = 0
    began_s = time.monotonic()
    longest_s = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="pipegrid-restarts-") as scratch,
        StorageNodes(Path(scratch), SERVERS) as servers,
    ):
        soak = Soak(reactor, servers, Path(scratch))
        globalLogPublisher.addObserver(soak.unseen)
        try:
            for number in range(rounds):
                case = random_case(rng, protocols)
                round_s = time.monotonic()
                try:
                    await soak.round(case, rng)
                except Violation as violation:
                    violations += 1
                    print(f"round {number}: {case}\n  {violation}", file=out, flush=True)
                    if violations >= 10:
                        break
                round_s = time.monotonic() - round_s
                longest_s = max(longest_s, round_s)
                if verbose:
                    print(f"round {number}: {round_s:.1f} s, {case}", file=out, flush=True)
        finally:
            globalLogPublisher.removeObserver(soak.unseen)
            await soak.close()
    for name, count in sorted(soak.counts.items()):
        print(f"{count:6d} {name}", file=out)
    elapsed_s = time.monotonic() - began_s
    print(f"{elapsed_s:6.0f} s in all, {longest_s:.0f} s the longest round", file=out)
    print(f"{violations:6d} promises broken", file=out)
    return 1 if violations else 0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="[100]")
    parser.add_argument("--seed", type=int, default=None, help="[a new one]")
    parser.add_argument("--protocol", action="append", choices=(HTTPS, FOOLSCAP), default=None)
    parser.add_argument("-v", "--verbose", action="store_true", help="print each round")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    protocols = options.protocol or PROTOCOLS
    return ending.run(
        lambda reactor: run(reactor, options.rounds, seed, protocols, options.verbose, out)
    )


if __name__ == "__main__":
    sys.exit(main())
