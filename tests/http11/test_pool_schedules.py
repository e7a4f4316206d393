"""Dials, handshakes and connections that fail in any order, and a process that sleeps: nothing hangs."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost, ConnectionRefusedError
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.host_pool import HostPool
from pipegrid.http11.upload_connection import UploadConnection
from tests.http11.network import ServerSide
from tests.http11.test_dialer import Place
from tests.http11.wire import get, ok, post

SEEDS = range(120)
MOST_REQUESTS = 60
# Of virtual time, once all is well: no patience is longer, and a few of them may follow each other.
WELL_S = 300.0
PAUSES_S = (0.0, 0.0, 0.05, 0.5, 3.0, 4.0, 10.0, 25.0)
# The process is suspended so long: everything that was to happen meanwhile happens at once.
SLEEPS_S = (120.0, 1000.0)


class Schedule:
    """
    One history, of one owner of connections.

    Args:
        kind: ``pool`` or ``uploads``.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random = Random(seed)
        self.network = Place()
        limits = Limits(
            max_connections=random.choice((1, 2, 4)),
            max_requests_in_flight=random.choice((2, 5, 50)),
            response_budget_bytes=random.choice((500, 3000)),
            connect_timeout_s=16.0,
            timeout_s=random.choice((20.0, 60.0)),
            max_attempts=random.choice((2, 4)),
        )
        clock: Any = self.network.clock
        endpoints: Any = lambda: self.network  # noqa: E731
        self.owner: HostPool | UploadConnection = (
            HostPool(clock, endpoints, "h", limits)
            if kind == "pool"
            else UploadConnection(
                clock, endpoints, "h", limits, time_limit_s=random.choice((20.0, 60.0))
            )
        )
        self.asked: list[Deferred[Any]] = []
        self.ended = 0
        self.shaking: list[ServerSide] = []  # hands
        self.silent: set[ServerSide] = set()

    def play(self) -> None:
        """Let things go wrong for a while, and then nothing more."""
        random, clock = self.random, self.network.clock
        for _ in range(random.choice((10, 40, 100))):
            if random.random() < 0.4:
                self.ask()
            if random.random() < 0.05 and self.asked:
                random.choice(self.asked).cancel()
            self.step(random.choice((0.1, 0.4, 0.8)))
            clock.advance(random.choice(SLEEPS_S if random.random() < 0.02 else PAUSES_S))
        until_s = clock.seconds() + WELL_S
        while self.ended < len(self.asked):
            assert clock.seconds() < until_s, f"{len(self.asked) - self.ended} wait: {self.owner}"
            self.step(0.0)
            clock.advance(random.choice((0.0, 0.01, 0.2, 1.0)))

    def ask(self) -> None:
        """Make a request; now and then its end makes another one."""
        if len(self.asked) >= MOST_REQUESTS:
            return
        make = post if self.random.random() < 0.3 else get
        expected = self.random.choice((None, 100, 2000))
        request: Deferred[Any] = self.owner.request(
            make(f"/{len(self.asked)}", expected_response_bytes=expected)
        )
        self.asked.append(request)
        request.addBoth(self._has_ended)

    def _has_ended(self, _: object) -> None:
        self.ended += 1
        if self.random.random() < 0.1:
            self.ask()

    def step(self, fault: float) -> None:
        """Have each attempt and each connection do something, or not."""
        random, network = self.random, self.network
        network.attempts = [
            each for each in network.attempts if not each[1].called
        ]  # others were given up
        for _ in range(min(2, len(network.attempts))):
            number, fate = random.randrange(len(network.attempts)), random.random()
            if fate < fault / 2:
                network.attempts.pop(number)[1].errback(
                    random.choice((ConnectionRefusedError(), ConnectionLost()))
                )
            elif fate >= fault:
                self.shaking.append(network.connected(number))
            network.attempts = [each for each in network.attempts if not each[1].called]
            if not network.attempts:
                break
        for side in list(self.shaking):
            fate = random.random()
            if side.is_lost or fate < fault / 3:
                self.shaking.remove(side)
                side.lose(ConnectionLost())
            elif fate > 0.5:
                self.shaking.remove(side)
                side.protocol.handshakeCompleted()
        for side in network.live():
            if side in self.shaking or side in self.silent:
                continue
            if random.random() < fault / 10:
                side.lose(ConnectionLost())
            elif random.random() < 0.7:
                self.answer(side, fault)
        network.turn()

    def answer(self, side: ServerSide, fault: float) -> None:
        """Answer what was asked, until something goes wrong."""
        random = self.random
        for request in side.take_requests():
            whole = ok(request)
            if random.random() >= fault:
                side.answer(whole)
                continue
            kind = random.randrange(6)
            if kind in (0, 1):  # says nothing more
                self.silent.add(side)
            part = (
                b"",
                whole[: random.randrange(len(whole))],
                ok(request, b"Connection: close"),
                b"garbage",
            )
            side.answer(part[kind % 4])
            if kind > 2:
                side.lose(random.choice((None, ConnectionLost())))
            return


class ScheduleTests(SynchronousTestCase):
    """Whatever happens before, all is answered or refused once hosts can be reached again."""

    def test_pool(self) -> None:
        """Requests over as many connections as there may be."""
        self.play("pool")

    def test_uploads(self) -> None:
        """Requests over one connection, which is made again."""
        self.play("uploads")

    def play(self, kind: str) -> None:
        """Play all schedules; closed, nothing is left of any."""
        for seed in SEEDS:
            schedule = Schedule(seed, kind)
            try:
                schedule.play()
                self.close(schedule)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error

    def close(self, schedule: Schedule) -> None:
        """Close it; nothing is left."""
        closing = schedule.owner.close()
        for _ in range(3):
            schedule.network.turn()
            schedule.network.clock.advance(30.0)
        self.successResultOf(closing)
        self.assertEqual(schedule.network.clock.getDelayedCalls(), [])
        self.assertEqual(schedule.network.live(), [])
