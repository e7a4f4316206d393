"""
Do many small files at once survive that Tahoe-LAFS's servers go away, or fill up, under them?

Five storage servers of Tahoe-LAFS run as processes of their own. A crowd of small files is put, so many that
most go over Foolscap beside HTTPS; some way into it servers get SIGTERM or SIGKILL, and come back at once,
after a while, or in the end, some of them without room. What must hold:

* the crowd ends within minutes, each file with a result or an error of PipeGrid's, one sentence;
* every file is stored if four servers (on which a file must be) were left alone;
* of every file that was said to be stored the right bytes come back from the servers that are there then;
* when all servers run again, and have room, the same puts complete and put a share of each file on each of
  the five; ``check --verify`` finds every share good; and no server holds anything unfinished;
* no failure is seen by nobody.

The seed decides files, victims and moments; how far a crowd comes until then is the machine's business.

    python -m misc.soak.crowds [--rounds N] [--seed S] [-v]
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as TooLong
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from misc import ending
from misc.soak.restarts import (
    DOWN_S,
    HAPPY,
    PARAMS,
    PATIENCE_S,
    SERVERS,
    SIGNALS,
    Unseen,
    Violation,
    check_sentence,
    nothing_left,
    start,
    wait_stopped,
)
from misc.speedtest.peers.nodes import HTTPS, StorageNode, StorageNodes, servers_file
from pipegrid import Grid
from pipegrid.errors import PipegridError
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.reactor.deferreds import all_ended

FILES = 300
LARGEST = 40_000
MEAN_DELAY_S = 1.5
VICTIMS = (0, 1, 1, 1, 2, 3)
FULL = "full"
ENDS = (*SIGNALS, *SIGNALS, FULL)
CHECKED = 20
"""Files of each round that are checked share by share; all are fetched, or put again."""
AT_ONCE = 25
"""Files that are fetched side by side."""
_FREE, _FULL = "reserved_space = 0", "reserved_space = 1000000000GB"


@attrs.frozen
class Crowd:
    """
    What one round does.

    Attributes:
        delay_s: from the crowd's beginning to the signals.
        victims: numbers of servers, each with how it ends; ``FULL``: it comes back without room.
        down_s: how long they are down; None: until the crowd has ended.
        fresh: whether the client begins anew, without connections.
    """

    delay_s: float
    victims: dict[int, str]
    down_s: float | None
    fresh: bool

    @property
    def must_succeed(self) -> bool:
        """Whether enough servers are left alone."""
        return SERVERS - len(self.victims) >= HAPPY


def random_crowd(rng: random.Random) -> Crowd:
    """Return one of the cases."""
    victims = rng.sample(range(SERVERS), rng.choice(VICTIMS))
    return Crowd(
        delay_s=rng.expovariate(1 / MEAN_DELAY_S),
        victims={number: rng.choice(ENDS) for number in victims},
        down_s=rng.choice(DOWN_S),
        fresh=rng.random() < 0.5,
    )


def judge(case: Crowd, outcomes: Sequence[object]) -> int:
    """
    Return how many files were stored.

    Args:
        outcomes: of each file, a result or a Failure.

    Raises:
        Violation: something must not have become of one.
    """
    failures = [each for each in outcomes if isinstance(each, Failure)]
    for failure in failures:
        said = check_sentence(failure.value, "put")
        if case.must_succeed:
            raise Violation(f"enough servers were left alone, but a put failed: {said}")
    return len(outcomes) - len(failures)


class Soak:
    """The servers, and their client."""

    def __init__(self, reactor: Any, servers: StorageNodes, scratch: Path) -> None:
        self._reactor = reactor
        self._nodes = servers.nodes
        self._directory = scratch / "client"
        self._grid: Grid | None = None
        create_client(
            self._directory,
            params=PARAMS,
            happy=HAPPY,
            files={SERVERS_NAME: servers_file(servers.addresses(), HTTPS)},
        )
        self.unseen = Unseen()
        self.counts: Counter[str] = Counter()

    async def close(self) -> None:
        """Close the client."""
        grid, self._grid = self._grid, None
        if grid is not None:
            await grid.close()

    async def round(self, case: Crowd, rng: random.Random) -> None:
        """Play one case; all servers run, and have room, before it and after it."""
        if case.fresh:
            await self.close()
        files = [rng.randbytes(56 + int(LARGEST * rng.random() ** 3)) for _ in range(FILES)]
        victims = [self._nodes[number] for number in case.victims]
        try:
            outcomes = await self._disturbed(case, files, victims)
            stored = judge(case, outcomes)
            self.counts["rounds"] += 1
            self.counts["files stored at once"] += stored
            self.counts["files that failed"] += FILES - stored
            if case.down_s is not None:
                await self._fetch(files, outcomes)
        finally:
            await deferToThread(make_space, victims)
        await self._rerun(files, rng)

    async def _disturbed(
        self, case: Crowd, files: list[bytes], victims: list[StorageNode]
    ) -> list[Any]:
        """Put the crowd, and let servers go meanwhile."""
        grid = await self._open()
        outcomes: list[Any] = []
        putting = grid.put_many(files).addTimeout(PATIENCE_S, self._reactor)
        ended = putting.addBoth(outcomes.append)
        await deferLater(self._reactor, case.delay_s)
        if not outcomes:
            self.counts["disturbed in the middle"] += 1
        for number, how in case.victims.items():
            self._nodes[number].signal(SIGNALS.get(how, SIGNALS["stopped"]))
        await deferToThread(wait_stopped, victims)
        for number, how in case.victims.items():
            if how == FULL:
                set_room(self._nodes[number], _FULL)
        if case.down_s is not None:
            await deferLater(self._reactor, case.down_s)
            await deferToThread(start, victims)
        await ended
        result = outcomes[0]
        if isinstance(result, Failure):
            if result.check(TooLong):
                raise Violation(f"the crowd did not end within {PATIENCE_S:g} s")
            raise Violation(f"the crowd failed: {type(result.value).__name__}: {result.value}")
        found: list[Any] = result
        return found

    async def _fetch(self, files: list[bytes], outcomes: list[Any]) -> None:
        """Get what was stored; every server is there, perhaps without room."""
        grid = await self._open()

        async def fetch(data: bytes, cap: str) -> None:
            sink = io.BytesIO()
            try:
                await grid.get(cap, sink).addTimeout(PATIENCE_S, self._reactor)
            except (PipegridError, TooLong) as error:
                raise Violation(f"a stored file does not come back: {error}") from error
            if sink.getvalue() != data:
                raise Violation("other bytes come back than were stored")

        stored = [
            (data, str(outcome.cap))
            for data, outcome in zip(files, outcomes, strict=True)
            if not isinstance(outcome, Failure)
        ]
        for at in range(0, len(stored), AT_ONCE):
            some = [Deferred.fromCoroutine(fetch(*each)) for each in stored[at : at + AT_ONCE]]
            await all_ended(some)

    async def _rerun(self, files: list[bytes], rng: random.Random) -> None:
        """Check that all can be completed, and that nothing is left of the beginning."""
        grid = await self._open()
        again = grid.put_many(files, happy=SERVERS).addTimeout(PATIENCE_S, self._reactor)
        outcomes: list[Any] = await again
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise Violation(f"a put, again, failed: {outcome.value}")
        for outcome in rng.sample(outcomes, CHECKED):
            checked = await grid.check(str(outcome.cap), verify=True)
            if not checked.healthy or checked.happiness < SERVERS:
                raise Violation(f"after the rerun a file is not healthy: {checked}")
        await nothing_left(self._reactor, self._nodes, self.unseen)

    async def _open(self) -> Grid:
        if self._grid is None:
            self._grid = await Grid.open(self._reactor, self._directory)
        return self._grid


def set_room(node: StorageNode, room: str) -> None:
    """Say in a server's configuration how much it takes."""
    path = node.directory / "tahoe.cfg"
    other = _FREE if room == _FULL else _FULL
    path.write_text(path.read_text().replace(other, room))


def make_space(nodes: Sequence[StorageNode]) -> None:
    """Have servers run, and take whatever comes."""
    for node in nodes:
        node.signal(SIGNALS["stopped"])
    wait_stopped(nodes)
    for node in nodes:
        set_room(node, _FREE)
    start(nodes)


async def run(reactor: Any, rounds: int, seed: int, verbose: bool, out: TextIO) -> int:
    """Play so many rounds; returns 0 if all promises held."""
    rng = random.Random(seed)
    print(f"crowds: {rounds} rounds of {FILES} files, seed {seed}", file=out, flush=True)
    violations = 0
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="pipegrid-crowds-") as scratch,
        StorageNodes(Path(scratch), SERVERS) as servers,
    ):
        soak = Soak(reactor, servers, Path(scratch))
        globalLogPublisher.addObserver(soak.unseen)
        try:
            for number in range(rounds):
                case = random_crowd(rng)
                round_s = time.monotonic()
                try:
                    await soak.round(case, rng)
                except Violation as violation:
                    violations += 1
                    print(f"round {number}: {case}\n  {violation}", file=out, flush=True)
                    if violations >= 10:
                        break
                if verbose:
                    round_s = time.monotonic() - round_s
                    print(f"round {number}: {round_s:.1f} s, {case}", file=out, flush=True)
        finally:
            globalLogPublisher.removeObserver(soak.unseen)
            await soak.close()
    for name, count in sorted(soak.counts.items()):
        print(f"{count:6d} {name}", file=out)
    print(f"{time.monotonic() - began_s:6.0f} s in all", file=out)
    print(f"{violations:6d} promises broken", file=out)
    return 1 if violations else 0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50, help="[50]")
    parser.add_argument("--seed", type=int, default=None, help="[a new one]")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each round")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    return ending.run(lambda reactor: run(reactor, options.rounds, seed, options.verbose, out))


if __name__ == "__main__":
    sys.exit(main())
