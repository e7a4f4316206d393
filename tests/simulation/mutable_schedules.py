"""
Schedules of faults for mutable files: writers that know nothing of each other, and what goes wrong meanwhile.

``perform(schedule)`` lets it happen, with real clients and servers on a simulated network, and returns what
became of it, or raises ``Broken``.

**What is done**: one of the kinds of ``mutable_work``: words are added, contents overwritten, ranges
updated, children of a directory linked, unlinked and renamed, several changes at a time. Writers are programs
that go on, or commands that begin anew for each change and remember what stands in files. Some changes are
cancelled. Meanwhile somebody reads, somebody repairs, and somebody stores files of their own.

**What goes wrong**: ``FaultPlan``'s faults (connections that break, so that answers are lost; servers that
die, stall, are cut off, slow or refuse), a client that can reach only a few servers, disks that are full for
a time, and servers that come back with the shares that they had before.

**Promised**, whatever goes wrong:

* Every change ends, within its patience: it is acknowledged, or fails with an error of PipeGrid's.
* When all servers are back, what was acknowledged is in the file, whoever else wrote, and nothing that was
  never asked for. "There is none of this name" is said only where that is so.
* Nobody reads what was never written, nor first a newer version and then an older one.
* A repair then makes the file healthy: one version, all shares.
* When all is over nothing is left: no connection, no timer, no open file, no failure that only the log knows.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import attrs
from twisted.internet.defer import CancelledError, Deferred, succeed

from pipegrid.core.hashes import ClientSecrets
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import PipegridError
from pipegrid.flow.pipeline import Pipeline
from pipegrid.testing.fault_plan import FaultPlan, Partition
from pipegrid.testing.grid import InlineWorkers
from pipegrid.testing.network import leaks
from pipegrid.transfer.mutable.mutable_files import MutableFiles
from pipegrid.transfer.mutable.version_cache import VersionCache
from pipegrid.transfer.peers import Peer, TransferContext
from pipegrid.transfer.settings import MutableSettings
from pipegrid.transport.gbs.requests import GbsSettings
from tests.core.mutable.support import key
from tests.descriptors import left_open, open_files
from tests.scratch import scratch_directory
from tests.simulation.mutable_work import KINDS, Broken, Work
from tests.simulation.strictness import watched
from tests.transport.gbs_world import PORT, GbsWorld

LIMIT_S = 1500.0
PATIENCE_S = 200.0
SILENCE_S = 20.0
DURATION_S = 7.0
BACK_S = 60.0
"""When all that was wrong is over, for those who write no more."""

KEYS = 6
"""So many are used, one behind the other."""

SHAPES = (
    (10, (3, 7, 10)),
    (10, (3, 8, 10)),
    (6, (2, 4, 6)),
    (6, (2, 5, 6)),
    (4, (2, 3, 4)),
    (3, (1, 2, 3)),
    (5, (2, 4, 10)),
)


@attrs.frozen
class Outcome:
    """
    What became of a schedule.

    Attributes:
        acknowledged, failed: changes.
        virtual_s: how long they took.
        reads, repairs: that ended well, in the middle of it.
        returned: acknowledged removals that were undone by others' links at the same time.
    """

    acknowledged: int
    failed: int
    virtual_s: float
    reads: int = 0
    repairs: int = 0
    returned: int = 0


@attrs.frozen
class Schedule:
    """
    One run.

    Attributes:
        shares: k, happy and n; two writes that are acknowledged have k servers in common.
        work: of ``mutable_work.KINDS``.
        filler: bytes of content that nobody changes.
        changes: of each writer, when its changes begin, and after how long each is cancelled, or None.
        anew: whether writers begin anew for each change.
        reads, repairs, creations: when somebody does these.
        full: servers whose disks are full, from when on, and for how long.
        returns: servers that come back with old shares: of which moment, and when; so few of them that what
            was acknowledged is still on k, and two acknowledged writes have k in common.
    """

    seed: int
    servers: int
    shares: tuple[int, int, int]
    format: Format
    work: str
    filler: int
    changes: tuple[tuple[tuple[float, float | None], ...], ...]
    anew: bool
    reads: tuple[float, ...]
    repairs: tuple[float, ...]
    creations: tuple[float, ...]
    full: tuple[tuple[int, float, float], ...]
    returns: tuple[tuple[int, float, float], ...]
    plan: FaultPlan

    @classmethod
    def random(cls, seed: int) -> Schedule:
        """Return the schedule of a seed."""
        random = Random(seed)
        servers, shares = random.choice(SHAPES)
        writers = random.choice((1, 2, 2, 3, 4))

        def moments(counts: tuple[int, ...]) -> tuple[float, ...]:
            return tuple(sorted(random.random() * 6 for _ in range(random.choice(counts))))

        def change(at_s: float) -> tuple[float, float | None]:
            return at_s, random.random() * 2 if random.random() < 0.08 else None

        def few(most: int) -> tuple[tuple[int, float, float], ...]:
            chosen = random.sample(range(servers), random.randint(0, most))
            return tuple((n, random.random() * 4, random.random() * 6) for n in chosen)

        work = random.choice(("words", "names", "names", "ranges", "contents"))
        formats = (Format.MDMF,) if work == "ranges" else (Format.SDMF, Format.SDMF, Format.MDMF)
        most_returns = max(0, 2 * shares[1] - servers - -(-shares[0] * servers // shares[2]))
        return cls(
            seed,
            servers,
            shares,
            random.choice(formats),
            work,
            random.choice((0, 0, 500, 20_000, 300_000)),
            tuple(tuple(map(change, moments((1, 2, 3, 4)))) for _ in range(writers)),
            random.random() < 0.3,
            moments((0, 1, 3)),
            moments((0, 0, 1, 2)),
            moments((0, 0, 0, 1)),
            few(servers // 3) if random.random() < 0.25 else (),
            few(most_returns) if random.random() < 0.5 else (),
            _plan(seed, random, writers, servers),
        )


def _plan(seed: int, random: Random, writers: int, servers: int) -> FaultPlan:
    clients = [*(f"writer{n}" for n in range(writers)), "fixer", "reader"]
    names = [f"s{n}" for n in range(servers)]
    plan = FaultPlan.random(
        seed,
        clients=clients,
        servers=names,
        duration_s=DURATION_S,
        lasting_s=12,
        faults=random.choice((4, 4, 12)),
        bytes_scale=50_000,
    )
    if random.random() < 0.2:  # one that can reach only a few
        lost = random.sample(names, random.randint(servers // 2, servers - 1))
        client, at_s, for_s = random.choice(clients), random.random() * 5, random.random() * 10
        cut = tuple(Partition(at_s, name, client, for_s) for name in lost)
        plan = attrs.evolve(plan, events=plan.events + cut)
    return plan


def perform(schedule: Schedule) -> Outcome:
    """
    Let it happen.

    Raises:
        Broken: a promise was.
    """
    files = open_files()
    root = scratch_directory()
    salts = Random(schedule.seed)  # which decide the order of versions with one number
    try:
        with watched() as logged, mock.patch("os.urandom", salts.randbytes):
            outcome = _Performance(schedule, root).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if logged:
        raise Broken("logged: " + "\n".join(logged[:5]))
    if left := left_open(files):
        raise Broken(f"open still: {left[:5]}")
    return outcome


class _RecordedKeys:
    """Stands in for ``SigningKeys``: the keys are those that vectors have, so that a seed is one history."""

    def __init__(self, first: int) -> None:
        self._next = first

    def prepare(self) -> None:
        """Nothing to do."""

    def take(self) -> Deferred[Any]:
        """Give the next."""
        self._next += 1
        return succeed(key(self._next % KEYS))


class _Performance:
    def __init__(self, schedule: Schedule, root: Path) -> None:
        self.schedule = schedule
        self.root = root
        self.world = GbsWorld(
            root,
            schedule.servers,
            latency_s=0.02,
            settings=GbsSettings(timeout_s=15, time_limit_s=8),
        )
        self.random = Random(schedule.seed + 1)
        self.keys: Any = _RecordedKeys(schedule.seed)
        self.peers: dict[str, list[Peer]] = {}
        self.work: Work = KINDS[schedule.work](self.random, len(schedule.changes), schedule.filler)
        self.left = 0
        self.done: Deferred[None] = Deferred()
        self.bug: BaseException | None = None
        self.counts = {"change": 0, "failed": 0, "read": 0, "repair": 0, "create": 0}
        self.seen = 0
        self.waiting: dict[int, list[Any]] = {}
        self.created: list[Any] = []

    def client(self, host: str, keeps: bool = False) -> MutableFiles:
        """
        Return a client on a host; its connections are those of the host.

        Args:
            keeps: whether it remembers what others on the host have seen.
        """
        world = self.world
        if host not in self.peers:
            world.network.host(host)
            self.peers[host] = [
                Peer(
                    world.connect(n, partial(world.network.endpoint, host, f"s{n}", PORT)),
                    Pipeline(1 << 20, world.clock),
                )
                for n in range(self.schedule.servers)
            ]
        k, happy, n = self.schedule.shares
        workers: Any = InlineWorkers()
        secrets = ClientSecrets(bytes([sorted(self.peers).index(host)]) * 32)
        files = MutableFiles(
            TransferContext(world.clock, workers, self.peers[host], secrets),
            usual=(k, n),
            settings=MutableSettings(happy=happy, silence_s=SILENCE_S, time_limit_s=PATIENCE_S),
            known=VersionCache(self.root / f"known-{host}" if keeps else None),
            random=self.random.random,
        )
        files.keys = self.keys
        return files

    def run(self) -> Outcome:
        """Let it happen, and look."""
        schedule, world = self.schedule, self.world
        try:
            maker = self.client("maker")
            cap = self.wait(maker.create(self.work.first, schedule.format)).cap
            self.wait(self.work.prepare(maker, cap))
            began_s = world.clock.seconds()
            schedule.plan.apply(world.network)
            self.plan_disks()
            self.plan_work(cap)
            world.run(self.done, LIMIT_S)
            if self.bug is not None:
                raise self.bug
            took_s = world.clock.seconds() - began_s
            if took_s > PATIENCE_S + 6 * SILENCE_S:
                raise Broken(f"it took {took_s:.0f} s")
            world.clock.advance(BACK_S)
            self.look(cap)
            for peers in self.peers.values():
                for peer in peers:
                    world.run(peer.server.disconnect())
            world.clock.advance(1000)
            if left := leaks(world.clock, world.network):
                raise Broken(f"left behind: {left}")
            counts, returned = self.counts, self.work.returned
            return Outcome(
                counts["change"],
                counts["failed"],
                took_s,
                counts["read"],
                counts["repair"],
                returned,
            )
        finally:
            world.close()

    # What goes wrong beside the plan.

    def plan_disks(self) -> None:
        """Fill disks, and let servers come back with old shares."""
        later = self.world.network.later
        for number, at_s, for_s in self.schedule.full:
            server = self.world.servers[number]
            later(at_s, setattr, server, "free_bytes", 0)
            later(at_s + for_s, setattr, server, "free_bytes", 1 << 40)
        for number, saved_s, after_s in self.schedule.returns:
            server = self.world.servers[number]
            old = self.root / f"old-{number}"
            later(saved_s, shutil.copytree, server.root, old)
            later(saved_s + after_s, self.bring_back, server, old)

    def bring_back(self, server: Any, old: Path) -> None:
        """Crash a server, and start it again with what its disk once held."""
        server.host.crash()
        shutil.rmtree(server.root)
        shutil.copytree(old, server.root)
        server.host.restart()

    # What is done.

    def plan_work(self, cap: Any) -> None:
        """Let everybody begin when it is time."""
        schedule, later = self.schedule, self.world.clock.callLater
        for writer, moments in enumerate(schedule.changes):
            host = f"writer{writer}"
            files = self.client(host, schedule.anew)
            for number, (at_s, cancelled_s) in enumerate(moments):
                self.left += 1
                later(
                    at_s,
                    self.change,
                    cap,
                    None if schedule.anew else files,
                    writer,
                    number,
                    cancelled_s,
                )
        others = (
            *((at_s, self.read) for at_s in schedule.reads),
            *((at_s, self.repair) for at_s in schedule.repairs),
            *((at_s, self.create) for at_s in schedule.creations),
        )
        for at_s, begin in others:
            self.left += 1
            later(at_s, begin, cap)

    def change(
        self,
        cap: Any,
        files: MutableFiles | None,
        writer: int,
        number: int,
        cancelled_s: float | None,
    ) -> None:
        """Begin a change; of commands, when the one before has ended."""
        clock = self.world.clock
        if files is None:
            if writer in self.waiting:
                self.waiting[writer].append(
                    partial(self.change, cap, None, writer, number, cancelled_s)
                )
                return
            self.waiting[writer] = []
        anew = files or self.client(f"writer{writer}", keeps=True)
        waiting, told = self.work.ask(anew, cap, writer, number, clock.seconds())

        def ended(result: Any) -> Any:
            try:  # a promise that is broken here is not to be taken for a change that hangs
                told(getattr(result, "value", None), clock.seconds())
            finally:
                for begin in self.waiting.pop(writer, []):
                    begin()
            return result

        if cancelled_s is not None:
            timer = clock.callLater(cancelled_s, waiting.cancel)

            def stop(result: Any) -> Any:
                if timer.active():
                    timer.cancel()
                return result

            waiting = waiting.addBoth(stop)
        self.follow("change", waiting.addBoth(ended))

    def read(self, cap: Any) -> None:
        """Begin to read, by the read cap, as a command that remembers."""
        pieces: list[Any] = []
        seen = self.seen
        files = self.client("reader", keeps=True)

        def ended(result: Any) -> None:
            if result.version.sequence_number < seen:
                raise Broken(f"first version {seen} was read, then {result.version.name}")
            self.seen = max(self.seen, result.version.sequence_number)
            self.work.look(b"".join(pieces), final=False)

        reading = Deferred.fromCoroutine(files.read(cap.readonly(), pieces.extend))
        self.follow("read", reading.addCallback(ended))

    def repair(self, cap: Any) -> None:
        """Begin to repair, without force."""
        self.follow("repair", Deferred.fromCoroutine(self.client("fixer").repair(cap)))

    def create(self, cap: Any) -> None:
        """Begin to store a file of one's own."""
        content = b"new" + bytes(self.schedule.filler)
        making = self.client("writer0").create(content, self.schedule.format)
        keep: Any = lambda result: self.created.append((result.cap, content))  # noqa: E731
        self.follow("create", Deferred.fromCoroutine(making).addCallback(keep))

    def follow(self, what: str, waiting: Deferred[Any]) -> None:
        """Count how it ends."""

        def ended(result: Any) -> None:
            error = getattr(result, "value", None)
            if not isinstance(error, BaseException):
                self.counts[what] += 1
            elif isinstance(error, PipegridError | CancelledError):
                self.counts["failed"] += what == "change"
            else:
                self.bug = self.bug or error
            self.left -= 1
            if not self.left:
                self.done.callback(None)

        waiting.addBoth(ended)

    # What is there then.

    def look(self, cap: Any) -> None:
        """Compare what is there with what was said, before and after a repair."""
        self.work.look(self.content(cap), final=True)
        fixer = self.client("last")
        self.wait(fixer.repair(cap, force=True))
        found = self.wait(fixer.check(cap, verify=True))
        if not found.healthy:
            raise Broken(f"not healthy after its repair: {found}")
        # A change that failed, and reached k servers that the first reader did not ask, may be there now.
        self.work.look(self.content(cap), final=True)
        for made, content in self.created:
            if self.content(made) != content:
                raise Broken("what was stored meanwhile is something else")

    def content(self, cap: Any) -> bytes:
        """Read as somebody who knows nothing."""
        pieces: list[Any] = []
        self.wait(self.client("last").read(cap.readonly(), pieces.extend))
        return b"".join(pieces)

    def wait(self, work: Any) -> Any:
        """Let time pass until it is done."""
        return self.world.run(Deferred.fromCoroutine(work), LIMIT_S)
