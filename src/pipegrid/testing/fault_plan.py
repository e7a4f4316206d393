"""Plans of faults for the simulated network: printable, replayable from one seed, and easy to shrink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import attrs

from pipegrid.testing.network import SimulatedNetwork


@attrs.frozen
class Cut:
    """
    Breaks connection number ``connection`` from client to server after some bytes; see
    ``SimulatedNetwork.cut``.
    """

    client: str
    server: str
    connection: int
    towards: str
    after_bytes: int
    silently: bool = False

    def apply(self, network: SimulatedNetwork) -> None:
        """Make the network break the connection after that many bytes."""
        network.cut(*attrs.astuple(self))


@attrs.frozen
class Stall:
    """For a time, nothing enters the path from one host to another."""

    at_s: float
    from_host: str
    to_host: str
    for_s: float

    def apply(self, network: SimulatedNetwork) -> None:
        """Schedule the start of the stall."""
        network.later(self.at_s, network.stall, self.from_host, self.to_host, self.for_s)


@attrs.frozen
class Partition:
    """For a time, nothing enters the paths between two hosts, or between one host and all others."""

    at_s: float
    one: str
    other: str | None
    for_s: float

    def apply(self, network: SimulatedNetwork) -> None:
        """Schedule the start of the partition."""
        network.later(self.at_s, network.partition, self.one, self.other, self.for_s)


@attrs.frozen
class Crash:
    """A host stops, and restarts after a time (None: never); ``silently``: it stops as in a power cut."""

    at_s: float
    host: str
    down_s: float | None
    silently: bool = False

    def apply(self, network: SimulatedNetwork) -> None:
        """Schedule the crash, and the restart if there is one."""
        network.later(self.at_s, network.host(self.host).crash, self.down_s, self.silently)


@attrs.frozen
class Slow:
    """For a time, everything between two hosts takes ``factor`` times as long."""

    at_s: float
    one: str
    other: str
    factor: int
    for_s: float

    def apply(self, network: SimulatedNetwork) -> None:
        """Schedule the start of the slowdown."""
        network.later(self.at_s, network.slow_down, self.one, self.other, self.factor, self.for_s)


@attrs.frozen
class Refuse:
    """For a time, a host refuses new connections."""

    at_s: float
    host: str
    for_s: float

    def apply(self, network: SimulatedNetwork) -> None:
        """Schedule the start of the refusals."""
        network.later(self.at_s, network.host(self.host).refuse, self.for_s)


Fault = Cut | Stall | Partition | Crash | Slow | Refuse

ALL_KINDS: tuple[type, ...] = (Cut, Stall, Partition, Crash, Slow, Refuse)


@attrs.frozen
class FaultPlan:
    """
    Some faults (``events``), and the seed that produced them, for information.

        plan = FaultPlan.random(seed=7, clients=["client"], servers=["s0", "s1"], duration_s=10)
        plan.apply(network)

    ``print(plan)`` prints Python code that makes the same plan, one fault a line: delete lines as long as the
    test still fails, or let ``shrink`` do so.
    """

    events: tuple[Fault, ...]
    seed: int | None = None

    def __str__(self) -> str:
        lines = "".join(f"    {event!r},\n" for event in self.events)
        return f"FaultPlan(seed={self.seed}, events=(\n{lines}))"

    @classmethod
    def random(
        cls,
        seed: int,
        clients: Sequence[str],
        servers: Sequence[str],
        duration_s: float,
        lasting_s: float | None = None,
        faults: int = 3,
        bytes_scale: int = 100_000,
        kinds: Sequence[type] = ALL_KINDS,
    ) -> FaultPlan:
        """
        Return a random plan; equal arguments give equal plans.

        Args:
            duration_s: faults begin within this time.
            lasting_s: the longest duration of a fault; ``duration_s`` if None.
            faults: the largest number of faults, at least one.
            bytes_scale: cuts come within this number of bytes; each order of magnitude is equally likely.
        """
        random = Random(seed)

        def moment(limit_s: float) -> float:
            return random.randint(0, round(limit_s * 1000)) / 1000

        def one() -> Fault:
            client, server = random.choice(clients), random.choice(servers)
            ends = [client, server] if random.random() < 0.5 else [server, client]
            at_s, for_s = moment(duration_s), moment(duration_s if lasting_s is None else lasting_s)
            silently = random.random() < 0.25
            kind = random.choice(kinds)
            if kind is Cut:
                # Cuts in handshakes and headers are as interesting as cuts after megabytes, so the number of
                # bytes is uniform on a logarithmic scale.
                after_bytes = round(bytes_scale ** random.random()) - 1
                return Cut(
                    client, server, random.choice((0, 0, 1, 2)), ends[1], after_bytes, silently
                )
            if kind is Stall:
                return Stall(at_s, ends[0], ends[1], for_s)
            if kind is Partition:
                return Partition(at_s, server, random.choice((client, None)), for_s)
            if kind is Crash:
                return Crash(at_s, server, for_s, silently)
            if kind is Slow:
                return Slow(at_s, client, server, random.choice((2, 10, 100)), for_s)
            return Refuse(at_s, server, for_s)

        return cls(tuple(one() for _ in range(random.randint(1, faults))), seed)

    def apply(self, network: SimulatedNetwork) -> None:
        """Schedule the faults in a network; their times count from now."""
        for event in self.events:
            event.apply(network)

    def without(self, index: int) -> FaultPlan:
        """Return the plan without one fault."""
        return FaultPlan(self.events[:index] + self.events[index + 1 :], self.seed)


def shrink(plan: FaultPlan, fails: Callable[[FaultPlan], bool]) -> FaultPlan:
    """Remove faults as long as the plan still fails; ``fails`` runs a plan in a new simulation."""
    index = 0
    while index < len(plan.events):
        smaller = plan.without(index)
        if fails(smaller):
            plan, index = smaller, 0
        else:
            index += 1
    return plan
