"""Lines that are slow, but not silent: a large mutable file takes its time, and no server is given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable.versions import Format
from pipegrid.errors import NotEnoughSharesError, ServerTimeout
from pipegrid.testing.clock import HeapClock
from pipegrid.transfer.time_limits import CallTimeout
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.wire.server_address import Nurl
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotResult, SlotSecrets
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import RTT, Line, content

SILENCE_S = 60.0
SIZE = 3_000_000


class SlowLineTests(SynchronousTestCase):
    """Ten servers behind 8 kB/s each; a server that is silent for a minute is given up."""

    def test_create_and_read(self) -> None:
        """A share takes two minutes in either direction."""
        world = MutableWorld(bytes_per_s=8000.0, silence_s=SILENCE_S)
        data = content(SIZE)
        began_s = world.clock.seconds()
        cap = world.create(data, Format.MDMF)
        made_s = world.clock.seconds()
        self.assertGreater(made_s - began_s, 1.5 * SILENCE_S)
        self.assertEqual(world.read(cap), data)
        self.assertGreater(world.clock.seconds() - made_s, 1.5 * SILENCE_S)
        self.assertEqual(world.leftovers(), [])

    def test_a_silent_server(self) -> None:
        """Who does not answer a small question is given up after a minute, as before."""
        world = MutableWorld(silence_s=SILENCE_S)
        cap = world.create(b"small")
        for line in world.lines[:8]:
            line.silent = {"*"}
        began_s = world.clock.seconds()
        failing = world.begin(world.client().read(cap, lambda pieces: None))
        world.run_until(lambda: bool(failing))
        self.assertIsInstance(failing[0].value, NotEnoughSharesError)
        self.assertLess(world.clock.seconds() - began_s, 2.5 * SILENCE_S)

    def test_a_silent_server_and_another_writer(self) -> None:
        """Who was refused knows that it has to try again, and does not wait for a silent server first."""
        world = MutableWorld(silence_s=SILENCE_S)
        cap = world.create()
        ours, theirs = world.client(), world.client()
        world.run(ours.overwrite(cap, b"ours"))
        world.run(theirs.modify(cap, lambda old: old + b", theirs"))
        world.lines[7].silent = {"*"}
        began_s = world.clock.seconds()
        world.run(ours.modify(cap, lambda old: old + b", ours again"))
        self.assertLess(world.clock.seconds() - began_s, SILENCE_S / 4)
        world.lines[7].silent = set()
        self.assertEqual(world.read(cap), b"ours, theirs, ours again")
        self.assertEqual(world.leftovers(), [])


class Queueing(Line):
    """A line to a server that carries out writes late, whether anybody still waits or not."""

    late_s = 30.0

    def read_test_write(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        changes: Mapping[int, ShareChange],
        reads: Sequence[tuple[int, int]] = (),
    ) -> Deferred[SlotResult]:
        """Answer looks at once."""
        ask = super().read_test_write
        if not changes:
            return ask(storage_index, secrets, changes, reads)
        answer: Deferred[SlotResult] = Deferred()

        def tell(result: Any) -> None:
            if not answer.called:
                answer.callback(result)

        done: Deferred[Any] = deferLater(self.clock, self.late_s, lambda: None)
        done.addCallback(lambda _: ask(storage_index, secrets, changes, reads))
        done.addBoth(tell)
        return answer


class StragglerTests(SynchronousTestCase):
    """A server with which a request is when a write is done takes its share after that."""

    def setUp(self) -> None:
        self.world = MutableWorld()
        self.cap = self.world.create()
        self.lines = list(self.world.lines)
        self.lines[4] = self.world.special_line(Queueing, 4)
        began_s = self.world.clock.seconds()
        ours = self.world.client(lines=self.lines)
        written = self.world.run(ours.overwrite(self.cap, b"ours"))
        self.assertEqual(len(written.placed), 9)
        self.assertIn("much slower", written.reasons[self.lines[4].name])
        self.arrives_s = began_s + 1.5 * RTT + Queueing.late_s  # it was looked for first

    def test_what_comes_is_what_was_written(self) -> None:
        """Then all of them have it; nothing else is under way, and nothing is left."""
        self.assertEqual(
            {n: len(held) for n, held in self.world.versions(self.cap).items()}, {1: 1, 2: 9}
        )
        self.world.clock.advance(Queueing.late_s + 10)
        self.assertEqual(len(self.world.versions(self.cap)[2]), 10)
        self.assertEqual(self.world.leftovers(), [])

    def test_between_the_look_and_the_write_of_another_one(self) -> None:
        """The other one is refused there, and writes again; nobody is told of an uncoordinated write."""
        clock = self.world.clock
        clock.advance(self.arrives_s - RTT - clock.seconds())
        theirs = self.world.run(self.world.client().overwrite(self.cap, b"theirs"))
        self.assertEqual(theirs.attempts, 2)
        self.assertEqual(self.world.read(self.cap), b"theirs")
        self.assertEqual([len(held) for held in self.world.versions(self.cap).values()], [10])
        self.assertEqual(self.world.leftovers(), [])


class BoundTests(SynchronousTestCase):
    """What is allowed."""

    def test_a_watch_asks_how_much_longer(self) -> None:
        """It ends when neither the silence nor what is under way explains it any more."""
        clock, more = HeapClock(), [30.0]
        watch = CallTimeout(clock, 10.0, lambda: more[0])
        call: Deferred[None] = Deferred()
        alice: Any = SimpleNamespace(name="alice", last_activity=0.0)
        waiting = Deferred.fromCoroutine(watch.answer(call, alice))
        clock.advance(39)
        self.assertNoResult(waiting)
        more[0] = 0.0
        clock.advance(2)
        self.failureResultOf(waiting, ServerTimeout)
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_a_long_body_has_longer(self) -> None:
        """A request that carries a megabyte may be on its way for minutes; an empty one may not."""
        requests = GbsRequests(Nurl(b"\0" * 32, "host", 1, "swissnum"), SILENCE_S)
        lease = LeaseSecrets(b"r" * 32, b"c" * 32)
        secrets = SlotSecrets(lease, b"w" * 32)
        change = ShareChange((), ((0, bytes(10**6)),), 10**6)
        empty = requests.read_test_write(bytes(16), secrets, {}, [(0, 57)])
        full = requests.read_test_write(bytes(16), secrets, {0: change}, [(0, 57)])
        self.assertLess(empty.timeout_s or 0, SILENCE_S + 1)
        self.assertGreater(full.timeout_s or 0, SILENCE_S + 300)
