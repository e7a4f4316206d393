"""
Schedules of faults for a whole grid: what is stored, what goes wrong meanwhile, and what must hold.

``Schedule.random(seed)`` says it all and prints as Python; ``perform(schedule)`` lets it happen and
returns what became of it, or raises ``Broken``. A schedule is a put, perhaps cut short and done again,
then a get.

**Promised**, whatever goes wrong:

* A put ends, within its patience, with its cap or ``UnhappyError``; a get with the right bytes or
  ``NotEnoughSharesError``. Not even a wrong byte before the error reaches the sink.
* "Stored" is true: every share that the result names on an honest server is on its disk, whole and right, and
  those with the word of liars for theirs reach the happiness that the result claims. So with no liar
  the file is as safe as wanted, and there are k shares at least. A liar's word is as good as any until
  somebody reads: what only liars vouch for may be lost, and that is all.
* No honest server ever has a wrong byte in a complete share.
* Servers that nothing happens to are enough: if there are as many as the wanted happiness the put succeeds,
  and if they have k shares the get does.
* A put that was cancelled, or whose process died, does not stand in the way of the next.
* When all is over nothing is left: no connection, no timer, no open file, nothing in flight, and no
  error in the log that nobody took. Servers that nothing happened to hold no unfinished upload of a put that
  was not broken off, and did not fail because others were lost under it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred

from pipegrid.core import decoder
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.placement import servers_of_happiness
from pipegrid.errors import NotEnoughSharesError, UnhappyError
from pipegrid.http11 import request_sender
from pipegrid.server.gbs import body_receivers as http_bodies
from pipegrid.server.gbs import storage_operations as http_service
from pipegrid.testing.fault_plan import Crash, Cut, FaultPlan, Partition, Refuse, Slow, Stall
from pipegrid.testing.network import Hung, timeline
from pipegrid.transfer.get import hedge_policy, share_downloads
from pipegrid.transfer.put import ask_first_policy, write_batches
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import DownloadSettings, UploadSettings
from tests.core.simple_encoder import Encoded, encode
from tests.descriptors import left_open, open_files
from tests.simulation.grid_world import (
    CONVERGENCE,
    LIES,
    Client,
    GridWorld,
    StorageHost,
)
from tests.simulation.strictness import watched

LIMIT_S = 4000.0
"""Within this a put or a get must have ended: several times all patience one behind the other."""

SMALL: tuple[tuple[Any, str, int], ...] = (
    (write_batches, "BATCH_BYTES", 4096),
    (write_batches, "UNKEPT_BATCH_BYTES", 1000),
    (ask_first_policy, "SMALL_BYTES", 500),
    (request_sender, "PIECE_BYTES", 900),
    (request_sender, "LARGEST_PIECE_BYTES", 1000),
    (share_downloads, "STREAM_BYTES", 1500),
    (decoder, "_APART_BYTES", 1500),
    (hedge_policy, "PROBE_BYTES", 300),
    (http_service, "INLINE_READ_BYTES", 1000),
    (http_bodies, "STREAM_PIECE_BYTES", 700),
    (http_bodies, "GATHER_BYTES", 500),
)
"""What makes small files be sent and read as large ones are: in many writes, and in streams."""


class Broken(AssertionError):
    """A promise was broken; the text says which."""


# Faults of servers, beside those of the network.


@attrs.frozen
class DiskFull:
    """The disk takes so many more bytes of shares, and then no more for a time (None: for ever)."""

    server: str
    after_bytes: int
    for_s: float | None

    def apply(self, world: GridWorld) -> None:
        """Let it be so from now on."""
        host = world[self.server]
        host.space_bytes = self.after_bytes
        if self.for_s is not None:
            world.network.later(self.for_s, setattr, host, "space_bytes", None)


@attrs.frozen
class NoRoom:
    """The server believes its disk to be full, and allocates nothing."""

    server: str

    def apply(self, world: GridWorld) -> None:
        """Let it be so from now on."""
        world[self.server].free_bytes = 0


@attrs.frozen
class FailingSyncs:
    """The next syncs of the disk fail."""

    server: str
    count: int

    def apply(self, world: GridWorld) -> None:
        """Let it be so from now on."""
        world[self.server].failing_syncs = self.count


@attrs.frozen
class Lies:
    """The server lies; see ``LyingStore``."""

    server: str
    how: tuple[str, ...]
    claimed: tuple[int, ...]

    def apply(self, world: GridWorld) -> None:
        """Let it be so from now on."""
        host = world[self.server]
        host.lies, host.claimed = frozenset(self.how), frozenset(self.claimed)


@attrs.frozen
class WrongKey:
    """Clients have the wrong key of this server."""

    server: str

    def apply(self, world: GridWorld) -> None:
        """Clients are told when they start."""


@attrs.frozen
class Rot:
    """Every share on a server's disk changes: a bit flips, its end goes, or the whole of it."""

    server: str
    how: str
    where: float

    def apply(self, world: GridWorld) -> None:
        """Do it now."""
        for path in sorted((world.root / self.server / "shares").glob("??/*/*")):
            size = path.stat().st_size
            if self.how == "vanish":
                path.unlink()
            elif self.how == "shorten":
                os.truncate(path, int(self.where * size))
            else:
                with open(path, "r+b") as file:
                    at = 12 + int(self.where * (size - 12 - 72))
                    file.seek(at)
                    (byte,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << at % 8]))


Trouble = DiskFull | NoRoom | FailingSyncs | Lies | WrongKey | Rot


@attrs.frozen
class Interruption:
    """The put is cut short after a time: ``cancel``, or ``kill`` for the end of its process."""

    how: str
    after_s: float


@attrs.frozen(kw_only=True)
class Schedule:
    """
    One file on one grid, and what goes wrong.

    Attributes:
        window_bytes: towards each server; None for windows that measure.
        trouble: from the beginning; ``put`` begins with the put.
        damage: between put and get; ``get`` begins with the get.
        settled: whether the faults of the put are over when the get begins.
        same_client: whether the get is done by the process that put.
        start, length: the range to get.
        small: whether batches and answers are so small that the file counts as large.
        ask_first: the client's setting; or ``learned``, by a put that found shares elsewhere.
    """

    seed: int
    servers: int
    required: int
    total: int
    happy: int
    segment_bytes: int
    size: int
    latency_s: float
    bytes_per_s: int | None
    window_bytes: int | None
    memory_bytes: int
    policy: str
    tls: bool
    start: int
    length: int
    settled: bool
    same_client: bool
    interruption: Interruption | None
    trouble: tuple[Trouble, ...]
    put: FaultPlan
    damage: tuple[Trouble, ...]
    get: FaultPlan
    small: bool
    ask_first: str = "auto"

    def __str__(self) -> str:
        lines = []
        for field in attrs.fields(Schedule):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and value:
                items = "".join(f"        {item!r},\n" for item in value)
                lines.append(f"    {field.name}=(\n{items}    ),\n")
            elif isinstance(value, FaultPlan):
                lines.append(f"    {field.name}={str(value).replace(chr(10), chr(10) + '    ')},\n")
            else:
                lines.append(f"    {field.name}={value!r},\n")
        return f"Schedule(\n{''.join(lines)})"

    @classmethod
    def random(cls, seed: int, tls: bool | None = None) -> Schedule:
        """Return the schedule of a seed; ``tls`` None for TLS in a few."""
        chance = Random(seed)
        servers = chance.choice((1, 3, 5, 7, 10, 10, 13))
        total = chance.choice((1, 2, 4, 5, 10, 10))
        size = chance.choice((60, 200, 1000, 5000, 20_000, chance.randint(56, 60_000)))
        start = chance.choice((0, 0, chance.randrange(size)))
        names = [f"s{n}" for n in range(servers)]
        calm = chance.random() < 0.1
        return cls(
            seed=seed,
            servers=servers,
            required=chance.randint(1, total),
            total=total,
            happy=chance.randint(1, min(servers, total)),
            segment_bytes=chance.choice((700, 3000, 10_000, 1 << 20)),
            size=size,
            latency_s=chance.choice((0.001, 0.05, 0.05, 0.3)),
            bytes_per_s=chance.choice((None, None, 1_000_000, 50_000)),
            window_bytes=chance.choice((None, None, 1000, 20_000)),
            memory_bytes=chance.choice((5000, 24 << 20)),
            policy=chance.choice(("none", "batch", "strict")),
            tls=chance.random() < 0.02 if tls is None else tls,
            start=start,
            length=size - start if chance.random() < 0.5 else chance.randint(1, size - start),
            settled=chance.random() < 0.5,
            same_client=chance.random() < 0.5,
            interruption=_interruption(chance),
            trouble=() if calm else _trouble(chance, names, total),
            put=FaultPlan(()) if calm else _plan(chance, names),
            damage=() if calm else _damage(chance, names, total),
            get=FaultPlan(()) if calm else _plan(chance, names),
            small=chance.random() < 0.6,
            # Of its own, so that older seeds still mean what they meant.
            ask_first=Random(f"ask {seed}").choice(("auto", "auto", "learned", "always", "never")),
        )

    def shorter(self) -> Iterator[Schedule]:
        """Yield schedules with one thing less."""
        if self.interruption is not None:
            yield attrs.evolve(self, interruption=None)
        for name in ("trouble", "damage"):
            items = getattr(self, name)
            for index in range(len(items)):
                changes: Any = {name: items[:index] + items[index + 1 :]}
                yield attrs.evolve(self, **changes)
        for index in range(len(self.put.events)):
            yield attrs.evolve(self, put=self.put.without(index))
        for index in range(len(self.get.events)):
            yield attrs.evolve(self, get=self.get.without(index))


def _interruption(chance: Random) -> Interruption | None:
    if chance.random() < 0.7:
        return None
    return Interruption(
        chance.choice(("cancel", "cancel", "kill")),
        chance.choice((0.1, 0.5, 3.0)) * chance.random(),
    )


def _plan(chance: Random, names: list[str]) -> FaultPlan:
    if chance.random() < 0.2:
        return FaultPlan(())
    duration_s = chance.choice((0.2, 1.0, 20.0))
    # Connections are where bytes are lost: they break as often as all else happens.
    kinds = (Cut, Cut, Cut, Cut, Stall, Partition, Crash, Slow, Refuse)
    return FaultPlan.random(
        chance.randrange(1 << 32),
        ["client"],
        names,
        duration_s,
        lasting_s=chance.choice((0.2, 3.0, 30.0, 150.0)),
        faults=chance.choice((1, 3, 6, 12)),
        bytes_scale=chance.choice((3000, 100_000)),
        kinds=kinds,
    )


def _lies(chance: Random, name: str, total: int) -> Lies:
    how = tuple(chance.sample(LIES, chance.choice((1, 1, 2, 3))))
    claimed = tuple(sorted(chance.sample(range(total), chance.randint(1, total))))
    return Lies(name, how, claimed + ((200,) if chance.random() < 0.2 else ()))


def _trouble(chance: Random, names: list[str], total: int) -> tuple[Trouble, ...]:
    found: list[Trouble] = []
    chosen = [name for name in names if chance.random() < chance.choice((0.0, 0.1, 0.5))]
    for name in chosen:
        what = chance.choice((DiskFull, DiskFull, NoRoom, FailingSyncs, Lies, Lies, WrongKey))
        if what is DiskFull:
            for_s = chance.choice((None, 0.3, 10.0))
            found.append(DiskFull(name, round(30_000 ** chance.random()) - 1, for_s))
        elif what is NoRoom:
            found.append(NoRoom(name))
        elif what is FailingSyncs:
            found.append(FailingSyncs(name, chance.choice((1, 2, 100))))
        elif what is Lies:
            found.append(_lies(chance, name, total))
        else:
            found.append(WrongKey(name))
    return tuple(found)


def _damage(chance: Random, names: list[str], total: int) -> tuple[Trouble, ...]:
    found: list[Trouble] = []
    share = chance.choice((0.0, 0.2, 0.6))
    for name in names:
        if chance.random() < share:
            if chance.random() < 0.3:
                found.append(_lies(chance, name, total))
            else:
                how = chance.choice(("flip", "flip", "shorten", "vanish"))
                found.append(Rot(name, how, chance.random()))
    return tuple(found)


# Making it happen.


@attrs.frozen
class Outcome:
    """
    What became of a schedule.

    Attributes:
        put: ``stored`` or ``unhappy``, or ``stored again`` where it was cut short before.
        get: ``got`` or ``lost``.
        virtual_s: how long it took.
    """

    put: str
    get: str
    virtual_s: float


class Performance:
    """A schedule while it happens."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.world = GridWorld(
            schedule.servers,
            latency_s=schedule.latency_s,
            bytes_per_s=schedule.bytes_per_s,
            policy=schedule.policy,  # type: ignore[arg-type]
            tls=schedule.tls,
            seed=schedule.seed,
        )
        self.data = Random(schedule.seed).randbytes(schedule.size)
        self.file = expected(schedule, self.data)
        self.index = self.file.cap.storage_index
        self.touched = _touched(schedule.trouble) | _touched(schedule.put.events)
        self.broken_off = False
        self.phase = "put"

    # Who is to be counted on.

    @property
    def honest(self) -> list[StorageHost]:
        """Servers that do not lie."""
        return [server for server in self.world.servers if not server.lies]

    @property
    def untouched(self) -> list[StorageHost]:
        """Servers that nothing happens to."""
        return [server for server in self.world.servers if server.name not in self.touched]

    # What happens.

    def perform(self) -> Outcome:
        """Let it all happen."""
        schedule, world = self.schedule, self.world
        for trouble in schedule.trouble:
            trouble.apply(world)
        schedule.put.apply(world.network)
        client = self.start_client("client")
        put = self.put(client)
        if schedule.settled:
            world.clock.advance(400)
            for server in world.servers:
                if not server.host.up:
                    server.host.restart()
            self.check_unfinished()
            lying = {server.name for server in world.servers if server.lies}
            # Cuts are for connections that may not have been made yet.
            lasting = [each for each in schedule.trouble if isinstance(each, WrongKey)]
            cuts = [each for each in schedule.put.events if isinstance(each, Cut)]
            self.touched = lying | _touched(lasting) | _touched(cuts)
        self.phase = "get"
        for trouble in schedule.damage:
            trouble.apply(world)
        self.touched |= _touched(schedule.damage) | _touched(schedule.get.events)
        schedule.get.apply(world.network)
        last = world.clients[-1]
        if not (schedule.same_client and last.alive):
            last = self.start_client("client")
        get = self.get(last)
        self.check_end()
        return Outcome(put, get, world.clock.seconds())

    def start_client(self, name: str) -> Client:
        schedule = self.schedule
        if not self.world.network.host(name).up:
            self.world.network.host(name).restart()
        window = schedule.window_bytes
        policy = "auto" if schedule.ask_first == "learned" else schedule.ask_first
        client = self.world.client(
            name,
            params=Params(schedule.required, schedule.total, schedule.segment_bytes),
            happy=schedule.happy,
            window=None if window is None else lambda: window,
            upload=UploadSettings(),
            download=DownloadSettings(memory_bytes=schedule.memory_bytes),
            mistrusted=[each.server for each in schedule.trouble if isinstance(each, WrongKey)],
            ask_first=policy,  # type: ignore[arg-type]
        )
        if schedule.ask_first == "learned":
            client.grid._open_putter()._means.history.ended(True)
        return client

    def put(self, client: Client) -> str:
        interruption = self.schedule.interruption
        again = ""
        if interruption is not None:
            started = client.grid.put(self.data)
            results: list[Any] = []
            started.addBoth(results.append)
            self.world.clock.advance(interruption.after_s)
            if not results:
                again = " again"
                client = self.interrupt(client, started, interruption.how)
        try:
            result = self.world.run(client.grid.put(self.data), LIMIT_S)
        except UnhappyError as error:
            self.require(error.reached < error.wanted, f"happy, and still unhappy: {error}")
            enough = len(self.untouched) < self.schedule.happy
            self.require(enough, f"{len(self.untouched)} servers were at hand: {error}")
            # If servers were lost in the middle, what the others have is left for a rerun.
            self.broken_off = self.broken_off or bool(self.schedule.put.events)
            return "unhappy" + again
        self.check_stored(result)
        self.check_nothing_in_flight(client)
        return "stored" + again

    def interrupt(self, client: Client, started: Deferred[Any], how: str) -> Client:
        self.broken_off = True
        if how == "kill":
            client.host.crash()
            return self.start_client("client")
        started.cancel()
        self.check_nothing_in_flight(client)
        return client

    def get(self, client: Client) -> str:
        schedule = self.schedule
        into = BytesIO()
        start, length = schedule.start, schedule.length
        good = set[int]()
        for server in self.untouched:
            good |= set(server.shares(self.index))
        wanted = self.data[start : start + length]
        try:
            got = client.grid.get(self.file.cap, into, start=start, length=length)
            result = self.world.run(got, LIMIT_S)
        except NotEnoughSharesError as error:
            enough = len(good) < schedule.required
            self.require(enough, f"shares {sorted(good)} were at hand: {error}")
            self.require(wanted.startswith(into.getvalue()), "wrong bytes before the error")
            return "lost"
        self.require(into.getvalue() == wanted, "wrong bytes")
        self.require(result.size == length, f"{result.size} bytes said, {length} wanted")
        return "got"

    # What must hold.

    def require(self, holds: bool, what: str) -> None:
        """Complain unless it holds."""
        if not holds:
            raise Broken(f"{self.phase}: {what}")

    def check_stored(self, result: PutResult) -> None:
        """Stored means stored."""
        self.require(result.cap == self.file.cap, "another cap than this file's")
        self.require(result.happiness >= self.schedule.happy, "stored, and not happy")
        honest = {server.name: server.shares(self.index) for server in self.honest}
        there: dict[int, set[str]] = {}
        for name, shares in honest.items():
            for number in shares:
                there.setdefault(number, set()).add(name)
        named = [(number, name) for number, name in result.shares_placed.items()]
        named += [(n, name) for n, names in result.shares_found.items() for name in names]
        for number, name in named:
            if name in honest:
                self.require(number in honest[name], f"{name} does not have share {number}")
            else:
                there.setdefault(number, set()).add(name)
        reached = servers_of_happiness(there)
        said = result.happiness
        self.require(reached >= said, f"happiness {said} said, {reached} there: {there}")
        required = self.schedule.required
        self.require(len(there) >= required, f"{required} shares restore it: {there}")
        self.check_bytes()

    def check_bytes(self) -> None:
        """Honest servers have nothing but right bytes."""
        rotten = _touched(self.schedule.damage) if self.phase == "get" else set[str]()
        for server in self.honest:
            if server.name not in rotten:
                for number, share in server.shares(self.index).items():
                    right = share == self.file.shares[number]
                    self.require(right, f"share {number} on {server.name} is wrong")

    def check_nothing_in_flight(self, client: Client) -> None:
        """Nobody holds bytes for anybody."""
        held = client.in_flight_bytes
        self.require(held == 0, f"{held} bytes are in flight still")

    def check_unfinished(self) -> None:
        """Servers that nothing happened to are left with nothing unfinished."""
        if self.broken_off:
            return
        for server in self.untouched:
            left = server.unfinished()
            self.require(not left, f"{server.name} is left with {left}")

    def check_end(self) -> None:
        """Nothing is left."""
        self.phase = "end"
        for client in self.world.clients:
            if client.alive:
                client.close()
                self.check_nothing_in_flight(client)
        left = self.world.leaks()
        self.require(not left, "left behind: " + "; ".join(left[:5]))
        self.phase = "get"
        self.check_bytes()
        for server in self.world.servers:
            held = server.site.service.commits
            self.require(held == 0, f"{server.name} waits for {held} shares to become durable")


def expected(schedule: Schedule, data: bytes) -> Encoded:
    """Return what the file must look like, from an encoder that shares no code with ours."""
    return encode(
        data, schedule.required, schedule.total, schedule.segment_bytes, secret=CONVERGENCE
    )


def _touched(events: Any) -> set[str]:
    """Return the servers that something happens to."""
    touched = set()
    for event in events:
        for name in ("server", "host", "one", "other", "from_host", "to_host"):
            touched.add(getattr(event, name, None))
    return {name for name in touched if name is not None and name != "client"}


@contextmanager
def _strict(small: bool) -> Iterator[list[str]]:
    """Watch what is logged and left; make small files large."""
    usual = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
    for module, name, value in SMALL if small else ():
        setattr(module, name, value)
    try:
        with watched() as logged:
            yield logged
    finally:
        for module, name, value in usual:
            setattr(module, name, value)


def perform(schedule: Schedule, tell: Callable[[Performance], None] | None = None) -> Outcome:
    """
    Let a schedule happen.

    Args:
        tell: called at the end, also after a failure.

    Raises:
        Broken: a promise was.
        Exception: whatever no put or get may raise.
    """
    files = open_files()
    with _strict(schedule.small) as logged:
        outcome = _perform(schedule, tell)
    if logged:
        raise Broken("logged: " + "\n".join(logged[:5]))
    if left := left_open(files):
        raise Broken(f"open still: {left[:5]}")
    return outcome


def _perform(schedule: Schedule, tell: Callable[[Performance], None] | None) -> Outcome:
    """The same, without a look at what is left when all of it is forgotten."""
    performance = Performance(schedule)
    try:
        return performance.perform()
    except (Broken, Hung):
        raise
    except CancelledError as error:
        raise Broken("a CancelledError that nobody asked for") from error
    finally:
        performance.world.close()
        if tell is not None:
            tell(performance)


def history(performance: Performance, entries: int = 400) -> str:
    """Return the last things that the network carried, for people."""
    return timeline(list(performance.world.network.log)[-entries:])
