"""
Gets whose readers pause, whose servers are slow and whose work in threads takes time: each of them ends.

``Case(seed)`` is a grid on which nothing fails, a few files, and gets of them side by side by one client.
Nothing that would cure a standstill is left to it: no server is given up as silent, and in half of the cases
none is thought to lag. So a stream that is never resumed, a request that is never written or a wake-up that
is lost is found as what hangs for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from random import Random
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IPushProducer
from twisted.internet.task import deferLater
from zope.interface import implementer

from pipegrid.core.decoder import Decoder
from pipegrid.core.encoding_parameters import Params
from pipegrid.disk.atomic_write import part_path
from pipegrid.testing.fault_plan import Slow
from pipegrid.testing.grid import InlineWorkers
from pipegrid.testing.simulated_tcp import TcpOptions
from pipegrid.transfer.settings import DownloadSettings
from pipegrid.transport.gbs.requests import GbsSettings
from tests.simulation.fault_schedules import SMALL
from tests.simulation.grid_world import Client, GridWorld

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_S = 20_000.0
"""Of virtual time: more than all pauses, and all bytes at the least rate, one behind the other."""

NEVER_S = 1e6


class SlowCpu(InlineWorkers):
    """Computes what is asked at once, and says so after a time, as a thread on a busy machine does."""

    def __init__(self, clock: Any, chance: Random, most_s: float) -> None:
        self._clock = clock
        self._chance = chance
        self._most_s = most_s

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call it after a time."""
        wait_s = self._most_s * self._chance.random()
        return deferLater(self._clock, wait_s, function, *args, **kwargs)


@implementer(IConsumer)
class PausingConsumer:
    """
    Takes bytes, and pauses now and then: within ``write`` or between, and it may resume at once.

    Attributes:
        taken: what has come.
        paused: whether it wants nothing now; nothing may come then.
    """

    def __init__(self, clock: Any, chance: Random, longest_s: float, size: int) -> None:
        self.taken = bytearray()
        self.paused = False
        self._clock = clock
        self._chance = chance
        self._longest_s = longest_s
        self._pauses = chance.randint(1, 12)
        self._every = max(1, size // self._pauses)
        self._next = chance.randrange(self._every)
        self._producer: IPushProducer | None = None

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert streaming
        self._producer = producer

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: bytes) -> None:
        assert not self.paused, "written to although it has paused"
        self.taken += data
        if len(self.taken) < self._next or not self._pauses:
            return
        self._next += self._chance.randint(1, self._every)
        self._pauses -= 1
        if self._chance.random() < 0.3:
            self._clock.callLater(self._longest_s * self._chance.random() / 10, self._pause)
        else:
            self._pause()

    def _pause(self) -> None:
        if self._producer is None or self.paused:
            return
        self.paused = True
        self._producer.pauseProducing()
        if self._chance.random() < 0.1:
            self._resume()
        else:
            self._clock.callLater(self._longest_s * self._chance.random() ** 2, self._resume)

    def _resume(self) -> None:
        self.paused = False
        if self._producer is not None:
            self._producer.resumeProducing()


class Case:
    """Everything that follows from one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = Random(seed)
        self.required = chance.choice((1, 2, 3, 3, 7))
        self.total = self.required + chance.choice((0, 1, 3, 7))
        self.servers = chance.choice((1, 1, 2, 3, 5, 10))
        self.segment_bytes = chance.choice((700, 3000, 10_000))
        self.sizes = [
            chance.randint(1, chance.choice((20, 60))) * self.segment_bytes
            + chance.choice((1, 60, 600))
            for _ in range(chance.choice((1, 1, 2, 4)))
        ]
        self.small = chance.random() < 0.9
        self.guessed = chance.random() < 0.9
        self.options = TcpOptions(
            window_bytes=chance.choice((4000, 4000, 64_000)), send_buffer_bytes=4000
        )
        self.latency_s = chance.choice((0.001, 0.05))
        self.bytes_per_s = chance.choice((None, 1_000_000, 30_000))
        self.cpu_s = chance.choice((0.0, 0.01, 0.5))
        self.longest_s = chance.choice((0.2, 5.0, 50.0))
        self.gbs = GbsSettings(
            timeout_s=NEVER_S,
            max_streams=chance.choice((1, 2, 6)),
            max_read_connections=chance.choice((1, 4)),
        )
        self.download = DownloadSettings(
            hedge_s=chance.choice((NEVER_S, 1.0)),
            silence_s=NEVER_S,
            memory_bytes=chance.choice((1000, 5000, 40_000)),
            extra_shares=chance.choice((0, 1, 2)),
        )

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "chance"}
        return f"<Case {shown}>"

    def play(self) -> float:
        """
        Let it happen; returns the seconds that it took.

        Raises:
            Hung: a get did not end.
            AssertionError: one delivered wrong bytes, or too many.
        """
        # The first guess is the right one, as with the large segments of large files; or else a share that
        # is thought to have one block is asked for as a whole, and cannot be held back.
        defaults: Any = Decoder.__init__.__kwdefaults__
        guess_bytes = defaults["guess_segment_bytes"]
        if self.guessed:
            defaults["guess_segment_bytes"] = self.segment_bytes
        usual = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
        for module, name, value in SMALL if self.small else ():
            setattr(module, name, value)
        world = GridWorld(
            self.servers,
            latency_s=self.latency_s,
            bytes_per_s=self.bytes_per_s,
            options=self.options,
        )
        try:
            return self._play(world)
        finally:
            world.close()
            defaults["guess_segment_bytes"] = guess_bytes
            for module, name, value in usual:
                setattr(module, name, value)

    def _play(self, world: GridWorld) -> float:
        chance = self.chance
        client = world.client(
            params=Params(self.required, self.total, self.segment_bytes),
            happy=1,
            gbs=self.gbs,
            download=self.download,
        )
        files = [chance.randbytes(size) for size in self.sizes]
        caps = [world.run(client.grid.put(data)).cap for data in files]
        workers: Any = SlowCpu(client.host.clock, chance, self.cpu_s)
        client.grid._workers = workers
        for number in range(self.servers):
            if chance.random() < 0.3:
                factor = chance.choice((3, 20))
                Slow(chance.random(), client.name, f"s{number}", factor, 1000.0).apply(
                    world.network
                )
        began_s = world.clock.seconds()
        gets = [self._get(world, client, cap, data) for cap, data in zip(caps, files, strict=True)]
        for running, check in gets:
            world.run(running, LIMIT_S)
            check()
        took_s = world.clock.seconds() - began_s
        assert not world.leaks(), world.leaks()
        return took_s

    def _get(
        self, world: GridWorld, client: Client, cap: Any, data: bytes
    ) -> tuple[Deferred[Any], Callable[[], None]]:
        """Begin a get into one thing or another; returns it, and what looks at what it has delivered."""
        chance, grid = self.chance, client.grid
        start = chance.choice((0, chance.randrange(len(data))))
        wanted = data[start:]
        what = chance.choice(("consumer", "consumer", "consumer", "part", "buffer"))
        if what == "part":
            target = str(world.root / f"got-{len(os.listdir(world.root))}")
            there = bytearray(wanted[: chance.randrange(len(wanted) + 1)])
            if there and chance.random() < 0.5:
                there[chance.randrange(len(there))] ^= 1
            with open(part_path(target), "wb") as part:
                part.write(there)

            def look() -> None:
                with open(target, "rb") as file:
                    assert file.read() == wanted

            return grid.get(cap, target, start=start), look
        if what == "buffer":
            buffer = BytesIO()

            def check_buffer() -> None:
                assert buffer.getvalue() == wanted

            return grid.get(cap, buffer, start=start), check_buffer
        consumer = PausingConsumer(client.host.clock, chance, self.longest_s, len(wanted))

        def check() -> None:
            assert consumer.taken == wanted

        return grid.get(cap, consumer, start=start), check
