"""Bytes that were let go of before they were acknowledged, and what an upload does when they are lost."""

from __future__ import annotations

from random import Random

from twisted.internet.defer import Deferred

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import SourceError, UnhappyError
from pipegrid.transfer.put import write_batches
from pipegrid.transfer.results import PutResult
from tests.transfer.test_upload import UploadTestCase
from tests.transfer.world import RTT, Told, World

SEGMENT = 30_000
SIZE = 400_000
MANY_SEGMENTS = Params(3, 10, SEGMENT)


class LostWritesTestCase(UploadTestCase):
    """A file of fourteen segments, in messages of a segment's block each, over lines that let go of them."""

    def setUp(self) -> None:
        self.small_batches()
        self.patch(write_batches, "UNKEPT_BATCH_BYTES", 100)

    def make(
        self, size: int = SIZE, world: World | None = None, *, servers: int = 10, happy: int = 7
    ) -> None:
        world = world or World(
            servers,
            params=MANY_SEGMENTS,
            window_bytes=60_000,
            held_bytes=20_000,
            bytes_per_s=200_000.0,
            happy=happy,
        )
        super().make(size, world)
        for line in world.lines:
            line.lets_go = True

    def start(self) -> Deferred[PutResult]:
        return self.world.grid.put(self.data)

    def until(self, at_s: float) -> None:
        while self.world.clock.seconds() < at_s and self.world.step():
            pass

    def end(self, started: Deferred[PutResult]) -> None:
        self.result = self.world.run(started)
        self.assertEqual(self.result.cap, self.file.cap)
        self.assert_nothing_left()
        self.assert_true()
        for peer in self.world.clients_peers:
            peer.pipeline._check_invariants()
            self.assertEqual((peer.pipeline.bytes_in_flight, peer.pipeline.bytes_held), (0, 0))

    def took_s(self) -> float:
        """Return how long a put takes with nothing lost."""
        self.make()
        began_s = self.world.clock.seconds()
        self.end(self.start())
        return self.world.clock.seconds() - began_s


class LossTests(LostWritesTestCase):
    """Connections that are lost under an upload cost bytes, and neither the share nor its server."""

    def test_one_loss_at_any_moment(self) -> None:
        """Whatever was under way then, every share ends where it was to go."""
        took_s = self.took_s()
        for step in range(40):
            self.make()
            started = self.start()
            self.until(took_s * step / 39)
            self.ring[step % 10].lose()
            self.end(started)
            self.assertEqual(self.result.happiness, 10, f"step {step}")
            for number, line in enumerate(self.ring):
                self.assertEqual(set(line.shares(self.file.cap.storage_index)), {number})

    def test_many_losses(self) -> None:
        """Now here, now there, and some of them while what was lost is being sent again."""
        for seed in range(20):
            random = Random(seed)
            self.make()
            started = self.start()
            at_s = 0.0
            for _ in range(random.randrange(2, 30)):
                at_s += random.expovariate(8)
                self.until(at_s)
                random.choice(self.ring).lose()
            self.end(started)
            self.assertEqual(self.result.happiness, 10, f"seed {seed}")

    def test_all_are_lost_with_the_last_bytes(self) -> None:
        """Then all is sent and not answered: it is sent again."""
        took_s = self.took_s()
        self.make()
        started = self.start()
        self.until(took_s - RTT / 2 - 0.01)
        self.assertTrue(any(line.release for line in self.world.lines))
        for line in self.world.lines:
            line.lose()
        self.end(started)
        self.assertEqual(self.result.happiness, 10)

    def test_only_what_was_lost_is_sent_again(self) -> None:
        """What a server has acknowledged, and what was not sent yet, it gets once."""
        self.make()
        started = self.start()
        self.until(0.5)
        victim = self.ring[2]
        lost = len(victim.release)
        self.assertGreater(lost, 2)
        victim.lose()
        self.end(started)
        message_bytes = SEGMENT // 3
        extra = victim.sent_bytes - self.ring[3].sent_bytes
        self.assertLessEqual(extra, lost * message_bytes)

    def test_a_server_that_dies_after_it(self) -> None:
        """The share finds another home."""
        self.make(servers=11)
        started = self.start()
        self.until(0.5)
        self.ring[2].lose()
        self.ring[2].down = True
        self.end(started)
        self.assertEqual(self.result.happiness, 10)

    def test_a_server_that_forgets_with_it(self) -> None:
        """What it had before the loss is sent again, to it or to another."""
        for index in range(8):
            self.make(servers=11)
            started = self.start()
            self.until(0.3 + index * 0.1)
            self.ring[2].lose()
            self.ring[2].forget = 1
            self.end(started)
            self.assertEqual(self.result.happiness, 10)

    def test_lost_again_and_again(self) -> None:
        """While something gets through each time, it goes on; and when the server is given up, without it."""
        self.make(servers=11)
        started = self.start()
        while not started.called:
            at_s = self.world.clock.seconds() + 0.4
            self.until(at_s)
            self.ring[2].lose()
            if self.world.clock.seconds() > 60:
                self.ring[2].down = True
        self.end(started)

    def test_the_source_has_changed(self) -> None:
        """What cannot be made again is not stored: the put says so, and nothing wrong is left."""
        path = self.mktemp()
        self.make()
        with open(path, "wb") as file:
            file.write(self.data)
        started = self.world.grid.put(path)
        self.until(0.5)
        with open(path, "r+b") as file:
            file.write(b"other")
        self.ring[2].lose()
        with self.assertRaises(SourceError):
            self.world.run(started)
        self.assertEqual(self.world.stored(self.file.cap.storage_index), {})

    def test_cancelled_while_lost_bytes_are_sent(self) -> None:
        """Nothing is left in flight, and nobody is told any more."""
        self.make()
        started = self.start()
        self.until(0.5)
        for line in self.world.lines:
            line.lose()
        self.until(0.6)
        started.addErrback(lambda _: None)
        started.cancel()
        for line in self.world.lines:
            line.lose()
        while self.world.step():
            pass
        for peer in self.world.clients_peers:
            self.assertEqual((peer.pipeline.bytes_in_flight, peer.pipeline.bytes_held), (0, 0))

    def test_progress(self) -> None:
        """It never falls, nor goes beyond the total, whatever is lost and sent twice."""
        for seed in range(5):
            random = Random(seed)
            self.make(servers=11)
            self.ring[2].storage.capacity_bytes = 0  # so one way is late, too
            told = Told()
            started = self.world.grid.put(self.data, progress=told)
            at_s = 0.0
            for _ in range(20):
                at_s += 0.15
                self.until(at_s)
                random.choice(self.ring).lose()
            self.end(started)
            total = 10 * len(self.file.shares[0])
            self.assertEqual(told, sorted(set(told)))
            self.assertEqual(told[-1], (total, total))

    def test_small_files_are_kept(self) -> None:
        """What is sent again from memory faster than it is coded again is not let go of."""
        self.patch(write_batches, "UNKEPT_BATCH_BYTES", 256 << 10)
        self.make(10_000)
        started = self.start()
        self.until(RTT / 4)
        self.assertEqual([len(line.release) for line in self.world.lines], [0] * 10)
        self.end(started)


class HeldTests(LostWritesTestCase):
    """What is in flight need not be in memory."""

    def most(self, lets_go: bool) -> tuple[int, int]:
        """Return the most that was in flight to one server, and held for it."""
        self.make(world=World(params=MANY_SEGMENTS, window_bytes=60_000, held_bytes=20_000))
        for line in self.world.lines:
            line.lets_go = lets_go
        started = self.start()
        in_flight = held = 0
        while not started.called and self.world.step():
            for peer in self.world.clients_peers:
                in_flight = max(in_flight, peer.pipeline.bytes_in_flight)
                held = max(held, peer.pipeline.bytes_held)
        self.end(started)
        return in_flight, held

    def test_windows_are_larger_than_memory(self) -> None:
        """With lines that let go the window counts, with others the memory; at most a message beyond."""
        message_bytes = 10_100
        in_flight, held = self.most(lets_go=True)
        self.assertGreater(in_flight, 50_000)
        self.assertLess(in_flight, 60_000 + message_bytes)
        self.assertLess(held, 20_000 + message_bytes)
        in_flight, held = self.most(lets_go=False)
        self.assertEqual(in_flight, held)
        self.assertLess(held, 20_000 + message_bytes)


class UnhappyTests(LostWritesTestCase):
    """Losses do not hide that servers are gone."""

    def test_all_die(self) -> None:
        """The put says that too few were reached."""
        self.make()
        started = self.start()
        self.until(0.5)
        for line in self.world.lines:
            line.down = True
            line.lose()
        with self.assertRaises(UnhappyError) as caught:
            self.world.run(started)
        self.assertIn("is down", str(caught.exception))
