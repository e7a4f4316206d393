"""
Schedules of faults for mutable files: writers that know nothing of each other, and what goes wrong meanwhile.

``perform(schedule)`` lets it happen, with real clients and servers on a simulated network, and returns what
became of it, or raises ``Broken``.

**Promised**, whatever goes wrong:

* Every change ends, within its patience: it is acknowledged, or fails with an error of PipeGrid's.
* When all servers are back, what was acknowledged is in the file, whoever else wrote, and nothing that was
  never asked for.
* A repair then makes the file healthy: one version, all shares.
* When all is over nothing is left: no connection, no timer, no open file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.leases import ClientSecrets
from pipegrid.core.mutable.geometry import Format
from pipegrid.errors import PipegridError
from pipegrid.flow.pipeline import Pipeline
from pipegrid.simulation.driver import leaks
from pipegrid.simulation.faults import FaultPlan
from pipegrid.transfer.mutable.files import MutableFiles
from pipegrid.transfer.mutable.known import KnownFiles
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.settings import MutableSettings
from pipegrid.transport.gbs.client import GbsSettings
from tests.simulation.grid_world import InlineCpu, scratch_directory
from tests.transfer.mutable_world import KeysAtOnce
from tests.transport.gbs_world import PORT, GbsWorld

LIMIT_S = 4000.0


class Broken(AssertionError):
    """A promise was broken; the text says which."""


@attrs.frozen
class Outcome:
    """
    What became of a schedule.

    Attributes:
        acknowledged, failed: changes.
        virtual_s: how long it took.
    """

    acknowledged: int
    failed: int
    virtual_s: float


@attrs.frozen
class Schedule:
    """
    One run.

    Attributes:
        shares: k, happy and n; two writes that are acknowledged have k servers in common.
        changes: of each writer, when its changes begin.
        filler: bytes of content that nobody changes.
    """

    seed: int
    servers: int
    shares: tuple[int, int, int]
    format: Format
    filler: int
    changes: tuple[tuple[float, ...], ...]
    plan: FaultPlan

    @classmethod
    def random(cls, seed: int) -> Schedule:
        """Return the schedule of a seed."""
        random = Random(seed)
        servers, shares = random.choice(
            [(10, (3, 7, 10)), (6, (2, 4, 6)), (4, (2, 3, 4)), (3, (1, 2, 3)), (5, (2, 4, 10))]
        )
        writers = random.choice((1, 2, 2, 3, 4))
        changes = tuple(
            tuple(sorted(random.random() * 6 for _ in range(random.randint(1, 4))))
            for _ in range(writers)
        )
        plan = FaultPlan.random(
            seed,
            clients=[f"writer{n}" for n in range(writers)],
            servers=[f"s{n}" for n in range(servers)],
            duration_s=7,
            lasting_s=12,
            faults=4,
            bytes_scale=50_000,
        )
        return cls(
            seed,
            servers,
            shares,
            random.choice((Format.SDMF, Format.SDMF, Format.MDMF)),
            random.choice((0, 0, 500, 20_000, 300_000)),
            changes,
            plan,
        )


def add(word: str) -> Any:
    """Return an edit that puts a word among the others, once."""

    def edit(old: bytes) -> bytes:
        head, _, tail = old.partition(b"\n")
        words = {*head.decode("ascii").split(), word}
        return " ".join(sorted(words)).encode("ascii") + b"\n" + tail

    return edit


def perform(schedule: Schedule) -> Outcome:
    """Let it happen."""
    root = scratch_directory()
    try:
        return _Performance(schedule, root).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Performance:
    def __init__(self, schedule: Schedule, root: Path) -> None:
        self.schedule = schedule
        self.world = GbsWorld(
            root, schedule.servers, latency_s=0.02, settings=GbsSettings(timeout_s=15, patience_s=8)
        )
        self.random = Random(schedule.seed + 1)
        self.keys: Any = KeysAtOnce()
        self.connections: list[Any] = []
        self.acknowledged: list[str] = []
        self.asked: set[str] = set()
        self.failed: list[Any] = []

    def client(self, host: str) -> MutableFiles:
        """Return a client on a host of its own."""
        world = self.world
        world.network.host(host)
        peers = []
        for number in range(self.schedule.servers):
            name = f"s{number}"
            server = world.connect(
                number,
                lambda name=name: world.network.endpoint(host, name, PORT),  # type: ignore[misc]
            )
            self.connections.append(server)
            peers.append(Peer(server, Pipeline(1 << 20, world.clock)))
        k, happy, n = self.schedule.shares
        workers: Any = InlineCpu()
        files = MutableFiles(
            clock=world.clock,
            workers=workers,
            peers=peers,
            client_secrets=ClientSecrets(bytes([len(self.connections) % 251]) * 32),
            usual=(k, n),
            settings=MutableSettings(happy=happy, silence_s=20, patience_s=200),
            known=KnownFiles(),
            random=self.random.random,
        )
        files.keys = self.keys
        return files

    def run(self) -> Outcome:
        """Let it happen, and look."""
        schedule, world = self.schedule, self.world
        try:
            filler = b"\n" + bytes(schedule.filler)
            maker = self.client("maker")
            cap = world.run(
                Deferred.fromCoroutine(maker.create(filler, schedule.format)), LIMIT_S
            ).cap
            schedule.plan.apply(world.network)
            began_s = world.clock.seconds()
            total = sum(map(len, schedule.changes))
            done: Deferred[None] = Deferred()

            def ended(result: Any, word: str) -> None:
                if hasattr(result, "value"):
                    self.failed.append(result.value)
                else:
                    self.acknowledged.append(word)
                if len(self.acknowledged) + len(self.failed) == total:
                    done.callback(None)

            def change(files: MutableFiles, word: str) -> None:
                self.asked.add(word)
                files.modify(cap, add(word)).addBoth(ended, word)

            for writer, moments in enumerate(schedule.changes):
                files = self.client(f"writer{writer}")
                for number, at_s in enumerate(moments):
                    world.clock.callLater(at_s, change, files, f"w{writer}c{number}")
            world.run(done, LIMIT_S)
            took_s = world.clock.seconds() - began_s
            for error in self.failed:
                if not isinstance(error, PipegridError):
                    raise Broken(f"a change failed with {error!r}") from error
            world.clock.advance(60)  # all servers are back
            self.look(cap, filler)
            for connection in self.connections:
                world.run(connection.disconnect())
            world.clock.advance(1000)
            if left := leaks(world.clock, world.network):
                raise Broken(f"left behind: {left}")
            return Outcome(len(self.acknowledged), len(self.failed), took_s)
        finally:
            world.close()

    def look(self, cap: Any, filler: bytes) -> None:
        """Compare what is there with what was said, before and after a repair."""
        self.look_at_content(cap, filler)
        fixer = self.client("fixer")
        self.wait(fixer.repair(cap, force=True))
        found = self.wait(fixer.check(cap, verify=True))
        if not found.healthy:
            raise Broken(f"not healthy after its repair: {found}")
        # A change that failed, and reached k servers that the first reader did not ask, may be there now.
        self.look_at_content(cap, filler)

    def look_at_content(self, cap: Any, filler: bytes) -> None:
        """Read as somebody who knows nothing."""
        pieces: list[Any] = []
        self.wait(self.client("reader").read(cap.readonly(), pieces.extend))
        head, _, tail = b"".join(pieces).partition(b"\n")
        words = set(head.decode("ascii").split())
        if lost := set(self.acknowledged) - words:
            raise Broken(f"acknowledged, and lost: {sorted(lost)}; there are {sorted(words)}")
        if invented := words - self.asked:
            raise Broken(f"nobody asked for {sorted(invented)}")
        if tail != filler[1:]:
            raise Broken("what nobody changed has changed")

    def wait(self, work: Any) -> Any:
        """Let time pass until it is done."""
        return self.world.run(Deferred.fromCoroutine(work), LIMIT_S)
