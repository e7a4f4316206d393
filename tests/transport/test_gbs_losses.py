"""Lost connections, lost answers, servers that come back without their memory, and servers that do not."""

from __future__ import annotations

import gc
import weakref
from random import Random
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import (
    NoSuchShare,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
    WriteLost,
)
from pipegrid.testing.network import leaks
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.requests import GbsSettings
from pipegrid.wire.storage_messages import Allocation, WriteAnswer
from tests.scratch import scratch_path
from tests.transport.contract import SECRETS, SI, Consumer
from tests.transport.gbs_world import CLIENT, GbsWorld

DATA = bytes(range(256)) * 4


class LossTestCase(SynchronousTestCase):
    """One server, 50 ms away."""

    policy: Any = "batch"

    def setUp(self) -> None:
        self.world = self.make_world()
        self.server = self.world.connect()

    def make_world(self, **options: Any) -> GbsWorld:
        """Return a network with one server that has nothing."""
        world = GbsWorld(scratch_path(self), policy=self.policy, **options)
        self.addCleanup(world.close)
        return world

    def tearDown(self) -> None:
        self.end(self.world, self.server)

    def end(self, world: GbsWorld, server: GbsServer) -> None:
        """Disconnect, and look that nothing is left."""
        world.run(server.disconnect())
        world.clock.advance(700)
        self.assertEqual(leaks(world.clock, world.network), [])

    def held(self, world: GbsWorld) -> bytes | None:
        """Return the share that the server really has, or None."""
        store = world.servers[0].store
        if 0 not in store.list_shares(SI):
            return None
        reader = store.open_share(SI, 0)
        try:
            return reader.read(0, 1 << 20)
        finally:
            reader.close()


def outcomes(server: GbsServer, data: bytes = DATA, pieces: int = 3) -> list[Deferred[Any]]:
    """Allocate, and write in pieces right behind, as uploads do."""
    step = -(-len(data) // pieces)
    return [
        server.allocate(SI, {0}, len(data), SECRETS),
        *(
            server.write(SI, 0, offset, [data[offset : offset + step]], SECRETS.upload)
            for offset in range(0, len(data), step)
        ),
    ]


class CutTests(LossTestCase):
    """The uploads' connection breaks behind each byte in turn, in either direction."""

    def try_cut(self, towards: str, after_bytes: int, silently: bool, losses: int = 1) -> None:
        world = self.make_world(settings=GbsSettings(timeout_s=10))
        for connection in range(losses):
            world.network.cut(CLIENT, "s0", connection, towards, after_bytes, silently)
        server = world.connect()
        where = f"cut behind byte {after_bytes} towards {towards}, silently: {silently}"
        results: list[Any] = []
        waiting = outcomes(server)
        for each in waiting:
            each.addBoth(lambda result: results.append(result))
        world.clock.advance(200)
        self.assertEqual(len(results), len(waiting), f"{where}: {results} of {waiting}")
        said_stored = any(isinstance(r, WriteAnswer) and r.complete for r in results)
        for result in results:
            if not isinstance(result, (WriteAnswer, Allocation)):
                self.assertIsInstance(result.value, ServerError, where)
        if said_stored:
            self.assertEqual(self.held(world), DATA, where)
        if not silently and losses == 1:
            self.assertTrue(said_stored, f"{where}: {results}")
        self.end(world, server)

    def test_cut_at_every_byte(self) -> None:
        """One loss, wherever it comes (every few bytes are tried), is made good: it ends stored."""
        random = Random(3)
        request_bytes = 4 * 420 + len(DATA)
        places = [("s0", n) for n in range(0, request_bytes, 7)]
        places += [(CLIENT, n) for n in range(0, 4 * 230, 5)]
        for towards, after_bytes in places:
            self.try_cut(towards, after_bytes + random.randrange(5), silently=False)

    def test_silent_cut(self) -> None:
        """A loss that nobody is told of ends in an error when patience is over, or stored; never wrong."""
        for towards, after_bytes in (
            ("s0", 0),
            ("s0", 700),
            ("s0", 2500),
            (CLIENT, 0),
            (CLIENT, 300),
        ):
            self.try_cut(towards, after_bytes, silently=True)

    def test_many_losses(self) -> None:
        """Losses without end, at the same place each time, end in an error or stored."""
        for towards, after_bytes in (("s0", 100), ("s0", 1500), ("s0", 3700), (CLIENT, 100)):
            self.try_cut(towards, after_bytes, silently=False, losses=50)


class ReplayTests(LossTestCase):
    """What repeated requests are answered, and what that means."""

    def test_a_lost_last_answer(self) -> None:
        """A write whose answer was lost after it completed the share has completed it."""
        self.world.network.cut(CLIENT, "s0", 0, CLIENT, 0)
        results = [self.world.run(each) for each in outcomes(self.server, pieces=1)]
        self.assertEqual(results[0].already_have, {0})
        self.assertEqual(results[1], WriteAnswer(True))

    def test_a_completed_share_that_is_not_durable_yet(self) -> None:
        """While a share is becoming durable it is in no list; asking a few times finds it."""
        self.world.network.cut(CLIENT, "s0", 0, CLIENT, 0)
        store = self.world.servers[0].store
        real, shown_at_s = store.list_shares, 0.7
        self.patch(
            store,
            "list_shares",
            lambda si: real(si) if self.world.clock.seconds() > shown_at_s else frozenset(),
        )
        results = [self.world.run(each) for each in outcomes(self.server, pieces=1)]
        self.assertTrue(results[1].complete)

    def test_a_server_that_forgot(self) -> None:
        """A server that lost its unfinished uploads with a restart says so: no such share."""
        half = len(DATA) // 2
        self.world.run(self.server.allocate(SI, {0}, len(DATA), SECRETS))
        self.world.run(self.server.write(SI, 0, 0, [DATA[:half]], SECRETS.upload))
        host = self.world.servers[0]
        # The next write is on its way when the server stops, and repeated when it is back.
        write = self.server.write(SI, 0, half, [DATA[half:-1]], SECRETS.upload)
        host.host.crash(down_s=1.0)
        for path in host.root.glob("shares/incoming/*"):  # as Tahoe-LAFS does when it starts
            path.unlink()
        with self.assertRaises(NoSuchShare):
            self.world.run(write)
        self.assertIsNone(self.held(self.world))

    def test_a_restart_under_an_upload(self) -> None:
        """A server that restarts under an upload finishes it: nothing is lost, nothing is asked twice."""
        big = bytes(range(256)) * 4096
        waiting = outcomes(self.server, big, pieces=16)
        self.world.clock.advance(0.12)
        self.world.servers[0].host.crash(down_s=3.0)
        results = [self.world.run(each) for each in waiting]
        self.assertTrue(results[-1].complete)
        self.assertEqual(self.held(self.world), big)

    def test_an_abort_whose_answer_was_lost(self) -> None:
        """A repeated abort that finds nothing has done its work the first time."""
        self.world.run(self.server.allocate(SI, {0}, 10, SECRETS))
        self.world.run(self.server.disconnect())
        self.server = self.world.connect()
        self.world.network.cut(CLIENT, "s0", 1, CLIENT, 0)
        self.assertIsNone(self.world.run(self.server.abort(SI, 0, SECRETS.upload)))

    def test_idle_connections(self) -> None:
        """After minutes of silence everything works as before, though servers close what is idle."""
        for number in range(3):
            self.world.run(self.server.allocate(SI, {number}, 3, SECRETS))
            write = self.server.write(SI, number, 0, [b"abc"], SECRETS.upload)
            self.assertTrue(self.world.run(write).complete)
            self.assertEqual(self.world.run(self.server.read(SI, number, 0, 3)), b"abc")
            self.world.clock.advance(61 + number * 100)

    def test_cancelled_writes_are_not_repeated(self) -> None:
        """What was cancelled before a loss is not sent again after it; its neighbours are."""
        waiting = outcomes(self.server)
        self.world.clock.advance(0.12)
        self.world.servers[0].host.crash(down_s=1.0)
        waiting[1].cancel()
        self.failureResultOf(waiting[1], CancelledError)
        self.world.run(waiting[0])
        self.assertEqual([self.world.run(each).complete for each in waiting[2:]], [False] * 2)
        self.assertIsNone(self.held(self.world))


class LettingGoTests(LossTestCase):
    """Writes whose bytes the network has, and whose caller can make them again."""

    big = bytes(range(256)) * 4096

    class Buffer(bytearray):
        """One that can be seen to be gone."""

    def write(self, offset: int, length: int, again: bool = False) -> tuple[Deferred[Any], Any]:
        """Write from a buffer that nobody else holds; return the answer, and a weak reference."""
        buffer = self.Buffer(self.big[offset : offset + length])
        gone = weakref.ref(buffer)
        result = self.server.write(
            SI, 0, offset, [buffer], SECRETS.upload, release=self.release, again=again
        )
        return result, gone

    def setUp(self) -> None:
        super().setUp()
        self.times: list[float] = []

    def allocate(self) -> Deferred[Any]:
        return self.server.allocate(SI, {0}, len(self.big), SECRETS)

    def release(self) -> None:
        """The network has them."""
        self.times.append(self.world.clock.seconds())

    def test_buffers_are_gone_before_the_answer(self) -> None:
        """Nobody holds them once the network has them, and the caller is told."""
        self.allocate()
        gc.disable()
        self.addCleanup(gc.enable)
        write, gone = self.write(0, 500_000)
        self.assertEqual((self.times, gone() is None), ([], False))
        self.world.clock.advance(0.12)  # the connection, and on the way
        self.assertEqual(len(self.times), 1)
        self.assertIsNone(gone())
        self.assertNoResult(write)
        self.assertFalse(self.world.run(write).complete)
        self.assertEqual(len(self.times), 1)

    def test_small_ones_are_kept(self) -> None:
        """What leaves in one piece is repeated from here."""
        self.world.network.cut(CLIENT, "s0", 0, CLIENT, 0)
        self.allocate()
        write, _ = self.write(0, 1000)
        self.assertFalse(self.world.run(write).complete)
        self.assertEqual(self.times, [])

    def test_lost(self) -> None:
        """Those fail; what the caller did not allow, or was not sent yet, is repeated as ever."""
        self.world.network.cut(CLIENT, "s0", 0, "s0", 300_000)
        allocated = self.allocate()
        kept = self.server.write(SI, 0, 600_000, [self.big[600_000:700_000]], SECRETS.upload)
        write, _ = self.write(0, 500_000)
        with self.assertRaises(WriteLost) as caught:
            self.world.run(write)
        self.assertTrue(caught.exception.may_have_happened)
        self.assertIn("was lost during a write", str(caught.exception))
        self.world.run(allocated)
        self.assertFalse(self.world.run(kept).complete)
        again, _ = self.write(0, 500_000, again=True)
        self.assertEqual(self.world.run(again).required, ((500_000, 600_000), (700_000, 1 << 20)))

    def test_the_answer_of_the_completing_write_is_lost(self) -> None:
        """Made again it finds no such upload: because the share is complete, which is the answer."""
        self.world.network.cut(CLIENT, "s0", 0, CLIENT, 0)
        self.allocate()
        write, _ = self.write(0, 1 << 20)
        with self.assertRaises(WriteLost):
            self.world.run(write)
        again, _ = self.write(0, 1 << 20, again=True)
        self.assertTrue(self.world.run(again).complete)
        self.assertEqual(self.held(self.world), self.big)

    def test_a_server_that_comes_back_late(self) -> None:
        """What is written anew waits for it, as what was kept does; and not for ever."""
        for down_s, comes in ((3.0, True), (100.0, False)):
            self.world.run(self.allocate())
            write, _ = self.write(0, 500_000)
            self.world.clock.advance(0.01)
            self.assertEqual(len(self.times), 1)
            self.world.servers[0].host.crash(down_s=down_s)
            with self.assertRaises(WriteLost):
                self.world.run(write)
            again, _ = self.write(0, 500_000, again=True)
            if comes:
                self.assertFalse(self.world.run(again).complete)
                self.times.clear()
            else:
                with self.assertRaises(ServerUnreachable):
                    self.world.run(again)

    def test_a_server_that_takes_all_and_answers_nothing(self) -> None:
        """One that is lost each time is given up: not even writing anew goes on for ever."""
        self.world.run(self.allocate())
        for connection in range(20):
            self.world.network.cut(CLIENT, "s0", connection + 1, "s0", 600_000)
        self.world.network.host("s0").crash(down_s=0.01)
        tries = 0
        while tries < 20:
            tries += 1
            write, _ = self.write(0, 1 << 20, again=True)
            with self.assertRaises(ServerUnreachable) as caught:
                self.world.run(write)
            if not isinstance(caught.exception, WriteLost):
                break
        self.assertNotIsInstance(caught.exception, WriteLost)
        self.assertLess(tries, 8)

    def test_cancelled_after_it(self) -> None:
        """Nothing is made of it when the connection is lost."""
        allocated = self.allocate()
        write, gone = self.write(0, 500_000)
        self.world.clock.advance(0.12)
        self.assertIsNone(gone())
        write.cancel()
        self.failureResultOf(write, CancelledError)
        self.world.servers[0].host.crash(down_s=1.0)
        self.world.run(allocated)

    def test_disconnected_after_it(self) -> None:
        """It fails as all others do."""
        self.allocate().addErrback(lambda _: None)
        write, _ = self.write(0, 500_000)
        self.world.clock.advance(0.12)
        self.world.run(self.server.disconnect())
        failure = self.failureResultOf(write, ServerUnreachable)
        self.assertIsNone(failure.check(WriteLost))


class PatienceTests(LossTestCase):
    """Servers that are not there, or do not answer."""

    def test_nobody_there(self) -> None:
        """A server that cannot be reached fails at once, and nothing was done."""
        self.world.servers[0].host.refuse(1000.0)
        operations: tuple[Deferred[Any], ...] = (
            self.server.version(),
            self.server.allocate(SI, {0}, 10, SECRETS),
            self.server.stream(SI, 0, 0, 10, Consumer()),
        )
        for operation in operations:
            with self.assertRaises(ServerUnreachable) as caught:
                self.world.run(operation, 1.0)
            self.assertFalse(caught.exception.may_have_happened)
            self.assertEqual(caught.exception.server, "s0")

    def test_questions_on_the_connection_for_changes(self) -> None:
        """If it is lost, they do not wait as changes do: the other connections take them, or they fail."""
        for down_s in (None, 0.0):
            world = self.make_world()
            server = world.connect()
            world.run(server.allocate(SI, {0}, 10, SECRETS))
            listing = server.list_shares(b"o" * 16)
            world.clock.advance(0.01)
            changing = server.allocate(SI, {1}, 10, SECRETS)
            world.servers[0].host.crash(down_s=down_s)
            if down_s is None:
                with self.assertRaises(ServerUnreachable) as caught:
                    world.run(listing, 1.0)
                self.assertIn("check that it runs", str(caught.exception))
                self.assertNoResult(changing)
                changing.addErrback(lambda failure: failure.trap(ServerUnreachable))
            else:
                self.assertEqual(world.run(listing, 1.0), frozenset())
                self.assertEqual(world.run(changing).allocated, {1})
            self.end(world, server)

    def test_a_server_that_does_not_come_back(self) -> None:
        """Uploads wait for a server that was lost, but not longer than their patience."""
        waiting = outcomes(self.server)
        self.world.clock.advance(0.12)
        self.world.servers[0].host.crash()
        began_s = self.world.clock.seconds()
        for each in waiting:
            with self.assertRaises(ServerUnreachable) as caught:
                self.world.run(each)
            self.assertTrue(caught.exception.may_have_happened)
        self.assertLess(self.world.clock.seconds() - began_s, 21)

    def test_a_silent_server(self) -> None:
        """A server that takes requests and never answers is given up after the time-out."""
        self.world.run(self.server.allocate(SI, {1}, 10, SECRETS))
        self.world.run(self.server.version())
        self.world.network.stall("s0", CLIENT)
        waiting: list[Deferred[Any]] = [*outcomes(self.server), self.server.list_shares(b"o" * 16)]
        began_s = self.world.clock.seconds()
        for each in (waiting[0], waiting[-1]):
            with self.assertRaises(ServerTimeout) as caught:
                self.world.run(each)
            self.assertTrue(caught.exception.may_have_happened)
        for each in waiting[1:-1]:
            with self.assertRaises(ServerUnreachable):
                self.world.run(each)
        self.assertLess(self.world.clock.seconds() - began_s, 62)
        self.world.network.resume("s0", CLIENT)

    def test_a_slow_server_is_not_silent(self) -> None:
        """Progress is bytes: a transfer that takes minutes is fine as long as some keep going."""
        world = self.make_world(bytes_per_s=10_000)
        server = world.connect()
        big = bytes(range(256)) * 4096
        for each in outcomes(server, big, pieces=2):
            result = world.run(each)
        self.assertTrue(result.complete)
        self.assertGreater(world.clock.seconds(), 100)
        consumer = Consumer()
        self.assertEqual(world.run(server.stream(SI, 0, 0, 1 << 20, consumer)), 1 << 20)
        self.end(world, server)

    def test_disconnect_at_any_moment(self) -> None:
        """Connecting, sending, waiting for a second attempt: disconnect ends it all, without a trace."""
        for after_s in (0.0, 0.05, 0.1, 0.15, 0.2, 0.4, 2.0):
            world = self.make_world()
            server = world.connect()
            waiting = [*outcomes(server), server.list_shares(SI)]
            ends: list[Any] = []
            for each in waiting:
                each.addBoth(ends.append)
            if after_s >= 0.15:
                world.clock.advance(0.15)
                world.servers[0].host.crash(down_s=10)
            world.clock.advance(after_s)
            world.run(server.disconnect())
            self.assertEqual(len(ends), len(waiting))
            self.assertEqual(world.client.clock.getDelayedCalls(), [])
            with self.assertRaises(ServerUnreachable):
                world.run(server.version())
            self.end(world, server)

    def test_waiting_is_bounded(self) -> None:
        """More requests than may wait fail at once, and say why."""
        world = self.make_world(settings=GbsSettings(max_waiting=5))
        server = world.connect()
        waiting = [server.allocate(SI, {n}, 10, SECRETS) for n in range(6)]
        with self.assertRaises(ServerUnreachable) as caught:
            world.run(waiting[5])
        self.assertIn("wait", str(caught.exception))
        for each in waiting[:5]:
            world.run(each)
        self.end(world, server)
