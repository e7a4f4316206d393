"""Lines that are slow, but not silent: a large mutable file takes its time, and no server is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable.geometry import Format
from pipegrid.errors import NotEnoughSharesError, ServerTimeout
from pipegrid.simulation.clock import HeapClock
from pipegrid.transfer.watch import Watch
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.wire.messages import LeaseSecrets, ShareChange, SlotSecrets
from pipegrid.wire.nurl import Nurl
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import content

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


class BoundTests(SynchronousTestCase):
    """What is allowed."""

    def test_a_watch_asks_how_much_longer(self) -> None:
        """It ends when neither the silence nor what is under way explains it any more."""
        from twisted.internet.defer import Deferred

        clock, more = HeapClock(), [30.0]
        watch = Watch(clock, 10.0, lambda: more[0])
        call: Deferred[None] = Deferred()
        alice: Any = SimpleNamespace(name="alice", last_sign=0.0)
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
