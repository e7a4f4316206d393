"""
What does a get cost that was cut off at 54 % and is run again, and is what it delivers right?

The real command fetches a file to a path, over HTTPS from storage servers in this process. What they send
goes through relays that count it, and that fall silent when the command has 54 % of the file. Then the
command is ended, by ``kill -9`` or by SIGINT; in some rounds a byte of what it has left is changed. The
same command is run again. What must hold:

* the second run ends well, its file is right, and nothing else is left beside it;
* on the wire it fetched at most what was missing and two segments (and the damaged one), TLS and hashes
  included;
* after SIGINT the status is 130, and the user is told what is kept.

    python -m misc.soak.kill_get [--megabytes N] [--servers N] [--seed S]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.protocols.portforward import ProxyClient, ProxyClientFactory, ProxyFactory, ProxyServer

from misc import ending
from misc.command import command, environment
from misc.soak.relayed import RelayedServers
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid import Grid

CUT = 0.54
PARAMS = Params(3, 10)
SEGMENT_BYTES = PARAMS.geometry(1 << 30).segment_bytes
AHEAD_BYTES = SEGMENT_BYTES
"""What may pass on each connection before the file grows: of 3 shares, three segments."""

PATIENCE_S = 2.0
STANDSTILL_S = 30.0
TIMEOUT_S = 300.0
_STILL_S = 0.4


class Violation(Exception):
    """A promise was broken."""


class Pace:
    """
    How much may pass: no faster than the command writes, so that it can be cut off in time.

    Each connection has its own allowance, which the growth of the file fills up: a k-th of it, and a little
    for hashes and TLS. With one for all, a share that ran ahead took what the others needed: the command then
    held what nobody waited for, the file crept, and that again had other servers be asked in vain.

    So a share that the next segment waits for can always pass its block, unless much was asked in vain. When
    nothing has been written for ``PATIENCE_S``, all allowances are full again.

    Args:
        written: how many bytes of the file there are.
        enough: when there are so many, nothing passes any more.

    Attributes:
        still_since: when the file was last seen to grow, on the clock of ``look``.
    """

    def __init__(self, written: Callable[[], int], enough: float, now: float) -> None:
        self._written = written
        self._enough = enough
        self._seen = 0
        self._began = self.still_since = now
        self._grown = 0.0
        self._renewals = 0

    def look(self, now: float) -> None:
        """See how far the file is."""
        written = self._written()
        if written != self._seen:
            self._grown += 1.01 * (written - self._seen) / PARAMS.required_shares
            self._seen, self.still_since, self._began = written, now, now
        elif now - self._began >= PATIENCE_S:
            self._began = now
            self._renewals += 1

    def fill(self, allowance: Allowance) -> float:
        """Let a connection have what has become its due; returns what it may pass now."""
        if self._seen >= self._enough:
            return 0
        allowed = allowance.bytes + self._grown - allowance.grown
        if allowance.renewals != self._renewals:
            allowed = AHEAD_BYTES
        allowance.grown, allowance.renewals = self._grown, self._renewals
        allowance.bytes = min(allowed, AHEAD_BYTES)
        return allowance.bytes


@attrs.define
class Allowance:
    """What one connection may pass, and up to where in a ``StragglerPolicy`` it has had its due."""

    bytes: float = 0.0
    grown: float = 0.0
    renewals: int = -1


class Counter:
    """
    Counts what servers send to clients, over all relays, and holds it back.

    Attributes:
        passed: so many bytes have.
        pace: says how many may; None: all.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.pace: Pace | None = None
        self.held_back: set[Callable[[], None]] = set()

    def begin(self, pace: Pace | None) -> None:
        """Count from 0 on."""
        self.passed, self.pace = 0, pace

    def takes(self, length: int, allowance: Allowance) -> bool:
        """Count it, unless it has to wait."""
        if self.pace is not None:
            if self.pace.fill(allowance) <= 0:
                return False
            allowance.bytes -= length
        self.passed += length
        return True

    def go_on(self, now: float) -> None:
        """Let pass what may by now."""
        if self.pace is not None:
            self.pace.look(now)
        for drain in list(self.held_back):
            drain()


def relay_to(port: int, counter: Counter) -> ProxyFactory:
    """Return what relays connections to a port, and counts what comes back."""

    class Answers(ProxyClient):
        def connectionMade(self) -> None:
            self.held: deque[bytes] = deque()
            self.allowance = Allowance()
            super().connectionMade()

        def dataReceived(self, data: bytes) -> None:
            self.held.append(data)
            self.drain()

        def drain(self) -> None:
            while self.held and counter.takes(len(self.held[0]), self.allowance):
                super().dataReceived(self.held.popleft())
            transport: Any = self.transport
            if self.held:
                counter.held_back.add(self.drain)
                transport.pauseProducing()
            elif self.drain in counter.held_back:
                counter.held_back.discard(self.drain)
                transport.resumeProducing()

        def connectionLost(self, reason: Any = None) -> None:
            counter.held_back.discard(self.drain)
            super().connectionLost(reason)

    class AnswersFactory(ProxyClientFactory):
        protocol = Answers

    class Questions(ProxyServer):
        clientProtocolFactory = AnswersFactory

    factory = ProxyFactory("127.0.0.1", port)
    factory.protocol = Questions
    factory.noisy = False
    return factory


class World(RelayedServers):
    """
    Storage servers behind relays, a client's directory, and a file that is stored.

    Attributes:
        data, cap: of the file.
        target: where it is fetched to.
    """

    def __init__(self, reactor: Any, scratch: Path, servers: int) -> None:
        self.counter = Counter()
        super().__init__(
            reactor,
            scratch,
            servers,
            PARAMS,
            min(7, servers),
            lambda port: relay_to(port, self.counter),
        )
        self.target = scratch / "out" / "file"
        self.target.parent.mkdir()

    async def store(self, size: int, rng: random.Random) -> None:
        """Start all, and store a file of so many bytes."""
        await self.start()
        self.data = b"".join(rng.randbytes(1_000_000) for _ in range(size // 1_000_000))
        grid = await Grid.open(self.reactor, self.client)
        self.cap = str((await grid.put(self.data)).cap)
        await grid.close()

    def get(self) -> subprocess.Popen[bytes]:
        """Start the command."""
        return subprocess.Popen(
            command(self.client, "get", self.cap, "-o", str(self.target)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(),
        )

    @property
    def part(self) -> Path:
        """What an interrupted command leaves, by its documented name."""
        return self.target.with_name(f".{self.target.name}.pipegrid-part")

    @property
    def part_bytes(self) -> int:
        """How much it holds."""
        try:
            return self.part.stat().st_size
        except FileNotFoundError:
            return 0

    async def cut(self, how: signal.Signals) -> None:
        """Run the command until it has 54 %, and end it when it has made all of what it got."""
        enough = int(CUT * len(self.data))
        began = self.reactor.seconds()
        pace = Pace(lambda: self.part_bytes, enough, began)
        self.counter.begin(pace)
        running = self.get()
        while True:
            await deferLater(self.reactor, 0.01)
            now = self.reactor.seconds()
            self.counter.go_on(now)
            there, still_s = self.part_bytes, now - pace.still_since
            if there >= enough and still_s >= _STILL_S:
                break
            if running.poll() is not None:
                _, said = await self._end(running)
                raise Violation(
                    f"it ended before it was cut off, with {running.returncode}: {said}"
                )
            if still_s > STANDSTILL_S or now - began > TIMEOUT_S:
                running.kill()
                await self._end(running)
                raise Violation(
                    f"it had {there} of {enough} bytes after {now - began:.0f} s, and nothing new for"
                    f" {still_s:.0f} s; {self.counter.passed} had passed, and"
                    f" {len(self.counter.held_back)} connections were held back"
                )
        running.send_signal(how)
        status, said = await self._end(running)
        expected = 130 if how == signal.SIGINT else -how
        if status != expected:
            raise Violation(f"it ended with {status}: {said}")
        if how == signal.SIGINT and (
            str(self.part) not in said or "resumes from there" not in said
        ):
            raise Violation(f"it does not tell what is kept: {said}")

    async def rerun(self) -> int:
        """Run it again, to its end; returns the bytes that have passed."""
        self.counter.begin(None)
        status, said = await self._end(self.get())
        if status:
            raise Violation(f"the rerun ended with {status}: {said}")
        if "were present" not in said:
            raise Violation(f"the rerun does not tell what was there: {said}")
        if self.target.read_bytes() != self.data:
            raise Violation("the file is not what was stored")
        if os.listdir(self.target.parent) != [self.target.name]:
            raise Violation(f"left beside it: {os.listdir(self.target.parent)}")
        self.target.unlink()
        return self.counter.passed

    async def _end(self, running: subprocess.Popen[bytes]) -> tuple[int, str]:
        waiting: Deferred[Any] = deferToThread(running.communicate, None, TIMEOUT_S)
        try:
            _, said = await waiting
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            raise Violation(f"it had not ended after {TIMEOUT_S:g} s") from None
        return running.returncode, said.decode("utf-8", "replace")


async def play(world: World, how: signal.Signals, damage: bool, rng: random.Random) -> str:
    """
    Cut it off, run it again; returns the figures.

    Raises:
        Violation: a promise was broken.
    """
    size = len(world.data)
    await world.cut(how)
    there = world.part.stat().st_size
    if there < CUT * size:
        raise Violation(f"of {CUT:.0%} that it had only {there} of {size} bytes were kept")
    if damage:
        with open(world.part, "r+b") as file:
            at = rng.randrange(there // SEGMENT_BYTES * SEGMENT_BYTES)
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ 1]))
    fetched = await world.rerun()
    missing = size - there + (SEGMENT_BYTES if damage else 0)
    what = f"{how.name}{', a byte damaged' if damage else ''}"
    figures = (
        f"{what}: {there / size:.1%} of {size} bytes were there, {missing} missing, {fetched} "
        f"fetched ({(fetched - missing) / SEGMENT_BYTES:+.2f} segments)"
    )
    if fetched > missing + 2 * SEGMENT_BYTES:
        raise Violation(figures)
    return figures


async def judged(world: World, how: signal.Signals, damage: bool, rng: random.Random) -> str:
    """Play a round; returns its figures, or which promise was broken."""
    try:
        return await play(world, how, damage, rng)
    except Violation as violation:
        return f"BROKEN {how.name}: {violation}"


async def run(reactor: Any, size: int, servers: int, seed: int, out: TextIO) -> int:
    """Play all rounds; returns 0 if no promise was broken."""
    rng = random.Random(seed)
    print(f"kill_get: {size} bytes on {servers} servers, seed {seed}", file=out)
    with tempfile.TemporaryDirectory(prefix="pipegrid-kill-get-") as directory:
        world = World(reactor, Path(directory), servers)
        broken = 0
        try:
            await world.store(size, rng)
            for how, damage in (
                (signal.SIGKILL, False),
                (signal.SIGINT, False),
                (signal.SIGKILL, True),
            ):
                said = await judged(world, how, damage, rng)
                broken += "BROKEN" in said
                print(f"  {said}", file=out)
        finally:
            await world.stop()
    print(f"{broken:6d} promises broken", file=out)
    return 1 if broken else 0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--megabytes", type=int, default=300, help="of the file [300]")
    parser.add_argument("--servers", type=int, default=10, help="[10]")
    parser.add_argument("--seed", type=int, default=None, help="[a new one]")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    size = options.megabytes * 1_000_000
    return ending.run(lambda reactor: run(reactor, size, options.servers, seed, out))


if __name__ == "__main__":
    sys.exit(main())
