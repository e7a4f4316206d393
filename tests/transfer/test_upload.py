"""What an upload does when servers do not do what they should."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from io import BytesIO
from typing import Any, BinaryIO
from unittest import mock

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.error_report import sentence
from pipegrid.core.encoder import Encoder
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import NoSpace, SourceError, UnhappyError
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transfer.put import write_batches
from pipegrid.transfer.put.share_tracker import FORGET_S
from pipegrid.transfer.put.share_upload import ShareUpload
from pipegrid.transfer.put.source import FileSource
from pipegrid.transfer.put.upload_loop import Upload
from pipegrid.transfer.settings import UploadSettings
from pipegrid.wire.storage_messages import Allocation, LeaseSecrets, UploadSecrets
from tests.core.simple_encoder import Encoded
from tests.transfer.world import RTT, Line, Told, World, content

SMALL = 1000
SEGMENT = 30_000
MANY_SEGMENTS = Params(3, 10, SEGMENT)


class UploadTestCase(SynchronousTestCase):
    """One world, and one file to be put there."""

    def small_batches(self) -> None:
        """Let small files show what large ones do."""
        self.patch(write_batches, "BATCH_BYTES", 8192)

    def make(self, size: int = SMALL, world: World | None = None) -> None:
        self.world = world or World()
        self.data = content(size)
        self.file = self.world.encoded(self.data)
        self.ring = self.world.ring(self.file)

    def put(self, **options: object) -> None:
        self.result, self.took = self.world.timed(
            self.world.grid.put(self.data, **options)  # type: ignore[arg-type]
        )
        self.assertEqual(self.result.cap, self.file.cap)
        self.assert_nothing_left()
        self.assert_true()

    def assert_nothing_left(self) -> None:
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def assert_true(self) -> None:
        """What the result says is what the servers hold, byte for byte."""
        index = self.file.cap.storage_index
        stored = self.world.stored(index)
        claimed: dict[int, set[str]] = {n: {name} for n, name in self.result.shares_placed.items()}
        for number, names in self.result.shares_found.items():
            claimed.setdefault(number, set()).update(names)
        for number, names_claimed in claimed.items():
            self.assertLessEqual(names_claimed, stored.get(number, set()))
        self.assertLessEqual(self.result.happiness, self.world.happiness(index))
        self.assertGreaterEqual(self.result.happiness, self.world.happy)
        self.assert_bytes_right(self.file)

    def assert_bytes_right(self, file: Encoded) -> None:
        for line in self.world.lines:
            for number, data in line.shares(file.cap.storage_index).items():
                self.assertEqual(data, file.shares[number], f"share {number} on {line.name}")

    def secrets_of_a_stranger(self) -> UploadSecrets:
        return UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"u" * 32)


class PlacementTests(UploadTestCase):
    """Every share finds a server, if there is one that takes it."""

    def test_shares_go_where_readers_look_first(self) -> None:
        """Share i is on the i-th server of the ring."""
        self.make()
        self.put()
        expected = {n: self.ring[n].name for n in range(10)}
        self.assertEqual(self.result.shares_placed, expected)
        self.assertEqual(self.result.happiness, 10)

    def test_dead_servers(self) -> None:
        """Their shares go to others, one round trip later."""
        self.make(world=World(12))
        self.ring[3].down = self.ring[5].down = True
        self.put()
        self.assertEqual(self.took, 2 * RTT)
        self.assertEqual(len(self.result.shares_placed), 10)
        self.assertEqual(self.result.happiness, 10)

    def test_dead_servers_without_spares(self) -> None:
        """Others take two shares each: all are stored though fewer servers hold them."""
        self.make()
        self.ring[3].down = self.ring[5].down = True
        self.put()
        self.assertEqual(self.took, 2 * RTT)
        self.assertEqual(len(self.result.shares_placed), 10)
        self.assertEqual(self.result.happiness, 8)

    def test_full_servers(self) -> None:
        """A server without room is passed over, at the cost of one round trip."""
        self.make(world=World(12))
        self.ring[0].storage.capacity_bytes = 0
        self.put()
        self.assertEqual(self.took, 2 * RTT)
        self.assertEqual(self.result.happiness, 10)
        self.assertNotIn(self.ring[0].name, self.result.shares_placed.values())

    def test_fewer_servers_than_shares(self) -> None:
        """They take several each, in one question for room."""
        self.make(world=World(4, happy=4))
        self.put()
        self.assertEqual(self.took, RTT)
        self.assertEqual(self.result.happiness, 4)
        self.assertEqual(len(self.result.shares_placed), 10)
        self.assertEqual([line.count("allocate") for line in self.world.lines], [1] * 4)

    def test_what_a_server_has_is_not_reported_as_found_if_it_was_just_sent(self) -> None:
        """A second question to a server lists the share that the first one brought there."""
        self.make(world=World(4, happy=3))
        self.ring[0].down = True
        self.put()
        self.assertEqual(self.result.shares_found, {})
        self.assertEqual(len(self.result.shares_placed), 10)

    def test_too_few_servers(self) -> None:
        """What cannot succeed is not begun."""
        self.make(world=World(6))
        with self.assertRaises(UnhappyError) as caught:
            self.put()
        self.assertEqual((caught.exception.reached, caught.exception.wanted), (6, 7))
        self.assertEqual([line.calls for line in self.world.lines], [[]] * 6)
        self.assertIn("add servers", str(caught.exception))

    def test_too_few_servers_for_a_large_file(self) -> None:
        """It is said before the file is read."""
        read: list[int] = []
        self.make(3 * SEGMENT, World(6, params=MANY_SEGMENTS))
        putting = self.world.grid.put(self.data, hashing=lambda done, total: read.append(done))
        self.assertRaises(UnhappyError, self.world.run, putting)
        self.assertEqual(read, [])

    def test_servers_that_are_gone_when_the_key_is_made(self) -> None:
        """Nothing is coded for nobody."""
        self.make(3 * SEGMENT, World(params=MANY_SEGMENTS))
        peers: Any = self.world.grid._means.peers
        self.patch(Encoder, "code", None)
        putting = self.world.grid.put(self.data, hashing=lambda *_: peers.clear())
        error = self.assertRaises(UnhappyError, self.world.run, putting)
        self.assertIn("reached only 0 of the 7 servers", str(error))

    def test_too_few_working_servers(self) -> None:
        """The error names what was reached, and why not more."""
        self.make()
        for line in self.ring[:4]:
            line.down = True
        with self.assertRaises(UnhappyError) as caught:
            self.put()
        self.assertEqual((caught.exception.reached, caught.exception.wanted), (6, 7))
        self.assertIn("is down", str(caught.exception))
        self.assert_nothing_left()

    def test_a_large_file_is_not_sent_in_vain(self) -> None:
        """As soon as happiness is out of reach, sending ends and unfinished shares are taken back."""
        world = World(window_bytes=1 << 20, bytes_per_s=float(1 << 20))
        self.make(15_000_000, world)
        for line in self.ring[:4]:
            line.down = True
        with self.assertRaises(UnhappyError):
            self.put()
        # Whoever is told may close everything at once.
        self.assertEqual([line.storage.uploads for line in world.lines], [{}] * 10)
        world.settle()
        self.assertLess(max(line.sent_bytes for line in world.lines), 3_500_000)

    def test_servers_that_do_not_answer_an_abort(self) -> None:
        """They are not waited for long."""
        elapsed_s = []
        for silent in (set(), {"abort"}):
            world = World(window_bytes=1 << 20, bytes_per_s=float(1 << 20))
            self.make(15_000_000, world)
            for line in self.ring[:4]:
                line.down = True
            for line in self.ring:
                line.silent = silent
            began_s = world.clock.seconds()
            with self.assertRaises(UnhappyError):
                self.put()
            elapsed_s.append(world.clock.seconds() - began_s)
        self.assertLess(elapsed_s[1], elapsed_s[0] + FORGET_S)

    def test_nothing_is_left_to_the_collector(self) -> None:
        """When a put has ended, its memory is free at once: what refers to each other is taken apart."""
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        self.make()
        self.put()
        left = [each for each in gc.get_objects() if type(each) in (Upload, ShareUpload)]
        self.assertEqual(left, [])

    def test_every_server_refuses(self) -> None:
        """Each is asked a bounded number of times."""
        self.make()
        for line in self.ring:
            line.storage.capacity_bytes = 0
        with self.assertRaises(UnhappyError) as caught:
            self.put()
        self.assertEqual(caught.exception.reached, 0)
        self.assertLessEqual(max(line.count("allocate") for line in self.ring), 3)

    def test_another_writer_is_at_it(self) -> None:
        """A share that another client is just uploading to a server goes elsewhere."""
        self.make(world=World(11))
        line = self.ring[2]
        line.memory.allocate(
            self.file.cap.storage_index,
            {2},
            len(self.file.shares[2]),
            self.secrets_of_a_stranger(),
        )
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertNotIn(2, line.shares(self.file.cap.storage_index))
        self.assertEqual(len(line.storage.uploads), 1, "the other one's upload is not harmed")

    def test_a_twin_is_waited_for(self) -> None:
        """Where another client is just uploading all of the file, its shares are found in the end."""
        self.make()
        stranger = self.secrets_of_a_stranger()
        index = self.file.cap.storage_index
        for number, line in enumerate(self.ring):
            line.memory.allocate(index, {number}, len(self.file.shares[number]), stranger)

        def finish() -> None:
            for number, line in enumerate(self.ring):
                line.memory.write(index, number, 0, [self.file.shares[number]], stranger.upload)

        self.world.clock.callLater(2.0, finish)
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual(self.result.shares_placed, {})

    def test_a_twin_that_ends_in_between(self) -> None:
        """
        Shares that were being uploaded when room was asked for, and are there when the bytes come, are found.

        Then servers say of the writes what a full one says: that they know no such upload.
        """
        self.make()
        index = self.file.cap.storage_index

        def end_in_between(number: int, line: Line) -> None:
            def allocate(*_: object) -> Deferred[Allocation]:
                line.storage.shares[index, number] = self.file.shares[number]
                return succeed(Allocation(frozenset(), frozenset()))

            self.patch(line.memory, "allocate", allocate)

        for number, line in enumerate(self.ring):
            end_in_between(number, line)
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual(self.took, 3 * RTT)  # lists come after leases

    def test_a_twin_that_breaks_off(self) -> None:
        """Uploads that somebody with the same secrets ends, again and again, are taken up once more."""
        self.make()
        for line in self.ring:
            line.forget = 2
        self.put()
        self.assertEqual(self.result.happiness, 10)

    def test_full_servers_are_named(self) -> None:
        """Who has how much room, and how much is needed; nobody else is blamed."""
        self.make(world=World(10, happy=8))
        share_bytes = len(self.file.shares[0])
        for line in self.ring[:4]:
            line.storage.capacity_bytes = 100
        self.ring[4].storage.capacity_bytes = 0
        with self.assertRaises(UnhappyError) as caught:
            self.put()
        said = str(caught.exception)
        names = sorted(line.name for line in self.ring[:4])
        needed = f"{names[0]} has space for 100 bytes, but a share takes {share_bytes}"
        self.assertIn(f"{needed} ({', '.join(names[1:])} too)", said)
        self.assertIn(f"{self.ring[4].name} has no space for a share", said)
        self.assertTrue(said.endswith("free space there, add servers or ask for less with happy"))
        self.assertTrue(sentence(caught.exception).endswith("ask for less with --happy"))
        for line in self.ring[5:]:
            self.assertNotIn(line.name, said)
        self.assert_nothing_left()

    def test_disks_that_fill_up_are_named(self) -> None:
        """A disk that has turned out to be full is named with the room that it has; nobody waits for more."""
        self.make()
        for line in self.ring[:4]:
            line.breaks["write"] = NoSpace(f"{line.name} has no more space; use another server")
            line.storage.capacity_bytes = 500
        with self.assertRaises(UnhappyError) as caught:
            self.world.timed(self.world.grid.put(self.data))
        self.assertIn("has space for", str(caught.exception))
        self.assertLess(self.world.clock.seconds(), 1.0)

    def test_full_servers_that_do_not_answer(self) -> None:
        """They are waited for only so long before the put fails."""
        self.make()
        for line in self.ring:
            line.storage.capacity_bytes = 0
            line.silent = {"version", "list_shares"}
        with self.assertRaises(UnhappyError) as caught:
            self.world.timed(self.world.grid.put(self.data))
        self.assertIn("does not say why", str(caught.exception))
        self.assertLess(self.world.clock.seconds(), 10.0)

    def test_a_bug_in_a_transport_ends_the_put_and_nothing_else(self) -> None:
        """An error that is no server's is passed on; windows that others share stay usable."""
        for operation in ("allocate", "write"):
            self.make()
            self.ring[1].breaks[operation] = RuntimeError("a bug")
            self.assertRaises(RuntimeError, self.put)
            self.assert_nothing_left()
            self.ring[1].breaks.clear()
            self.world.settle()
            self.put()
            self.assertEqual(self.took, RTT)


class ExistingSharesTests(UploadTestCase):
    """What is stored already is used."""

    def test_shares_elsewhere_count(self) -> None:
        """Whatever servers say that they have is reported, with the servers."""
        self.make()
        self.world.plant(self.file, {0: self.ring[4], 1: self.ring[1]})
        self.put()
        self.assertEqual(self.result.shares_found[1], [self.ring[1].name])
        self.assertEqual(self.result.shares_found[0], [self.ring[4].name])
        self.assertEqual(self.result.happiness, 10)

    def test_large_shares_that_are_elsewhere_are_not_sent(self) -> None:
        """When the ring has changed, ways whose shares exist are taken back after a window."""
        world = World(window_bytes=1 << 20, bytes_per_s=float(1 << 20))
        self.make(9_000_000, world)
        self.world.plant(self.file, {n: self.ring[(n + 1) % 10] for n in range(10)})
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual(self.result.shares_placed, {})
        world.settle()
        self.assertLess(max(line.sent_bytes for line in world.lines), 2_500_000)
        self.assertEqual([line.storage.uploads for line in world.lines], [{}] * 10)

    def test_shares_crowded_on_one_server_are_spread(self) -> None:
        """Existing shares that make nobody happy are placed once more."""
        self.make()
        self.world.plant(self.file, dict.fromkeys(range(10), self.ring[0]))
        self.put()
        self.assertGreaterEqual(self.result.happiness, 7)

    def test_a_server_that_has_its_share_is_no_reason(self) -> None:
        """It knows of no unfinished upload of that, and why others are missing is no matter of its."""
        for size in (SMALL, 300_000):
            self.make(size)
            self.world.plant(self.file, {n: self.ring[n] for n in range(6)})
            for line in self.ring[6:]:
                line.down = True
            with self.assertRaises(UnhappyError) as caught:
                self.world.run(self.world.grid.put(self.data))
            self.assertIn("reached only 6 of the 7 servers", str(caught.exception))
            self.assertNotIn("unfinished upload", str(caught.exception))

    def test_share_numbers_that_cannot_be_are_ignored(self) -> None:
        """A server that claims shares beyond the last one makes nobody happier."""
        self.make(world=World(params=Params(3, 9)))
        self.ring[0].storage.shares[self.file.cap.storage_index, 77] = b""
        result = self.world.run(self.world.grid.put(self.data))
        self.assertEqual(result.shares_found, {})


class ResumptionTests(UploadTestCase):
    """Lost answers and lost uploads are recovered from, without asking for ever."""

    def test_an_interrupted_put_is_resumed(self) -> None:
        """What was cut off goes on where it was: same secrets, no refusal."""
        self.small_batches()
        world = World(bytes_per_s=float(1 << 17), params=MANY_SEGMENTS, window_bytes=20_000)
        self.make(300_000, world)
        first = world.grid.put(self.data)
        while world.clock.seconds() < 0.5:
            world.step()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        world.settle()
        self.assertEqual([len(line.storage.uploads) for line in world.lines], [1] * 10)
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual([len(line.storage.uploads) for line in world.lines], [0] * 10)

    def test_the_answer_to_the_last_write_is_lost(self) -> None:
        """The share is given to another server: happiness is what matters."""
        self.make(world=World(11))
        self.ring[2].answers_lost = {"write"}
        self.put()
        self.assertEqual(self.result.happiness, 10)

    def test_a_share_that_was_completed_unknown_to_us_is_found(self) -> None:
        """A write fails with NoSuchShare because the share is complete: the list tells."""
        self.make()
        line = self.ring[2]
        write = line.memory.write

        def twice(*arguments: object) -> object:
            # As a transport does that lost the answer and repeated the request.
            write(*arguments)  # type: ignore[arg-type]
            return write(*arguments)  # type: ignore[arg-type]

        with mock.patch.object(line.memory, "write", twice):
            self.put()
        self.assertEqual(self.took, 2 * RTT)
        self.assertEqual(self.result.shares_placed[2], line.name)
        self.assertEqual(line.count("allocate"), 1)

    def test_doubts_are_resolved_side_by_side(self) -> None:
        """Ten servers that lost ten uploads are asked at the same time, not one by one."""
        self.make()
        for line in self.ring:
            line.forget = 1
        self.put()
        self.assertEqual(self.took, 3 * RTT)
        self.assertEqual(self.result.happiness, 10)

    def test_a_silent_server_does_not_hold_up_doubts(self) -> None:
        """A server that forgets, and then does not say what it has, costs the grace and no more."""
        self.make()
        self.ring[2].forget = 1
        self.ring[2].silent = {"list_shares"}
        self.put()
        self.assertEqual(self.took, RTT + 2.0)
        self.assertEqual(self.result.dropped, [self.ring[2].name])

    def test_a_server_forgets_once(self) -> None:
        """The share is sent to it again."""
        for size, params in ((SMALL, Params()), (100_000, MANY_SEGMENTS)):
            self.make(size, World(params=params))
            self.ring[2].forget = 1
            self.put()
            self.assertEqual(self.result.happiness, 10)
            self.assertEqual(self.result.shares_placed[2], self.ring[2].name)
            self.assertEqual(self.ring[2].count("allocate"), 2)

    def test_a_server_forgets_always(self) -> None:
        """After a second try the share goes elsewhere."""
        self.make(world=World(11))
        self.ring[2].forget = 1000
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertNotIn(self.ring[2].name, self.result.shares_placed.values())
        self.assertEqual(self.ring[2].count("allocate"), 2)

    def test_all_servers_forget_always(self) -> None:
        """Tries are bounded: the put ends."""
        self.make()
        for line in self.ring:
            line.forget = 10_000
        self.assertRaises(UnhappyError, self.put)
        self.assertLessEqual(max(line.count("allocate") for line in self.ring), 12)


class PatienceTests(UploadTestCase):
    """Nothing waits for the slowest server without need."""

    def test_a_silent_server_costs_the_grace(self) -> None:
        """It is left behind if happiness holds without it, and named."""
        self.make()
        self.ring[3].silent = {"*"}
        self.put()
        self.assertEqual(self.took, RTT + 2.0)
        self.assertEqual(self.result.dropped, [self.ring[3].name])
        self.assertEqual(self.result.happiness, 9)

    def test_a_silent_server_that_is_needed_is_given_up(self) -> None:
        """After the silence, exactly, its share goes elsewhere."""
        self.make(world=World(happy=10, servers=11, upload=UploadSettings(silence_s=16.0)))
        self.ring[3].silent = {"*"}
        self.put()
        self.assertEqual(self.took, 16.0 + RTT)
        self.assertEqual(self.result.happiness, 10)

    def test_silence_is_counted_for_each_server(self) -> None:
        """Other servers' answers do not prolong the patience with a silent one."""
        self.make(world=World(happy=10, servers=12, upload=UploadSettings(silence_s=16.0)))
        self.ring[3].silent = {"*"}
        self.ring[4].rtt_s = 15.0
        self.put()
        self.assertEqual(self.took, 16.0 + RTT)

    def test_all_are_silent(self) -> None:
        """The put fails after the silence, and says why."""
        self.make(world=World(upload=UploadSettings(silence_s=16.0)))
        for line in self.ring:
            line.silent = {"*"}
        with self.assertRaises(UnhappyError) as caught:
            self.put()
        self.assertEqual(self.world.clock.seconds(), 16.0)
        self.assertIn("silent for 16 s", str(caught.exception))
        self.assert_nothing_left()

    def test_servers_that_answer_everybody_else(self) -> None:
        """They are not waited for without end, in one move or with all that an upload can do."""
        for size in (1000, 1_000_000):
            self.make(size, World(upload=UploadSettings(silence_s=16.0)))
            for line in self.ring:
                line.silent, line.for_others = {"*"}, True
            with self.assertRaises(UnhappyError):
                self.put()
            self.assertLessEqual(self.world.clock.seconds(), 20 * 16.0)
            self.assert_nothing_left()

    def test_answers_that_never_come(self) -> None:
        """A server that did it all and never said so is the same as a silent one."""
        self.make()
        self.ring[3].answers_silent = {"*"}
        self.put()
        self.assertEqual(self.took, RTT + 2.0)

    def test_a_slow_server_costs_at_most_the_grace(self) -> None:
        """At a fiftieth of the others' rate it is dropped in the middle of a large file."""
        rate = float(1 << 20)
        world = World(bytes_per_s=rate, window_bytes=1 << 20)
        self.make(9_000_000, world)
        self.ring[3].bytes_per_s = rate / 50
        self.put()
        share_s = len(self.file.shares[0]) / rate
        self.assertEqual(self.result.dropped, [self.ring[3].name])
        self.assertLess(self.took, share_s + 2.0 + 4 * RTT)
        self.assertEqual(self.result.happiness, 9)
        world.settle()
        self.assertEqual(self.ring[3].storage.uploads, {}, "it was told to forget the share")

    def test_a_server_that_is_hardly_slower_is_waited_for(self) -> None:
        """
        Its answers take half as long again as the others', and it holds them up for longer than the grace.

        On a line that all share this happens to every server in turn.
        """
        self.small_batches()
        rate = float(1 << 16)
        world = World(bytes_per_s=rate, window_bytes=1 << 16)
        self.make(1_500_000, world)
        self.ring[3].bytes_per_s = rate / 1.5
        self.put()
        share_s = len(self.file.shares[0]) / rate
        self.assertGreater(self.took, share_s + 2.0 + RTT)
        self.assertEqual(self.result.dropped, [])
        self.assertEqual(self.result.happiness, 10)

    def test_a_slow_server_that_is_needed_is_waited_for(self) -> None:
        """Without polling: the upload wakes when something happens, not a hundred times a second."""
        rate = float(1 << 20)
        world = World(bytes_per_s=rate, window_bytes=1 << 20, happy=10)
        self.make(6_000_000, world)
        self.ring[3].bytes_per_s = rate / 16
        waits: list[float] = []
        later = world.clock.callLater

        def noting(delay: float, *arguments: object) -> object:
            waits.append(delay)
            return later(delay, *arguments)  # type: ignore[arg-type]

        with mock.patch.object(world.clock, "callLater", noting):
            self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertLess(len(waits), 200)

    def test_what_restores_the_file_is_waited_for(self) -> None:
        """One happy server may have fewer than k shares: the grace begins when k are stored."""
        rate = float(1 << 20)
        world = World(
            servers=2, bytes_per_s=rate, window_bytes=1 << 20, happy=1, params=Params(7, 10)
        )
        self.make(6_000_000, world)
        self.ring[1].bytes_per_s = rate / 50
        self.put()
        self.assertGreaterEqual(len(self.result.shares_placed), 7)
        got = world.run(world.grid.get(self.result.cap, BytesIO()))
        self.assertEqual(got.size, len(self.data))

    def test_fewer_shares_than_restore_the_file_are_not_a_stored_file(self) -> None:
        """However few servers were to be happy; and the message says what is missing."""
        self.make(SMALL, World(servers=2, happy=1, params=Params(7, 10)))
        self.ring[0].storage.capacity_bytes = 5 * len(self.file.shares[0])
        self.ring[1].down = True
        with self.assertRaises(UnhappyError) as caught:
            self.put()
        self.assertEqual((caught.exception.reached, caught.exception.wanted), (5, 7))
        self.assertIn("only 5 of its shares could be stored, and it takes 7", str(caught.exception))
        self.assert_nothing_left()

    def test_a_server_is_not_silent_while_it_owes_nothing(self) -> None:
        """A slow disk here is not the fault of those who have answered everything."""
        world = World(upload=UploadSettings(silence_s=16.0))
        self.make(SMALL, world)

        class SlowWorkers(InlineWorkers):
            def run_if_large(self, *arguments: Any, **options: Any) -> Deferred[Any]:
                done = super().run_if_large(*arguments, **options)
                return deferLater(world.clock, 100.0, lambda: done)

        self.patch(world.grid._means, "workers", SlowWorkers())
        self.put()
        self.assertGreater(self.took, 400.0)
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual(self.result.shares_placed[0], self.ring[0].name)

    def test_high_latency_is_not_slowness(self) -> None:
        """A far server that answers within the grace is kept."""
        self.make()
        self.ring[3].rtt_s = 1.0
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual(self.took, 1.0)


class LateWayTests(UploadTestCase):
    """Shares that change server in the middle of a file."""

    def setUp(self) -> None:
        self.small_batches()

    def test_what_a_late_way_has_missed_is_coded_again(self) -> None:
        """The share is the same, byte for byte, wherever it was completed from."""
        world = World(11, params=MANY_SEGMENTS, window_bytes=20_000)
        self.make(400_000, world)
        self.ring[2].forget = 0
        self.ring[2].storage.capacity_bytes = 0
        self.put()
        self.assertEqual(self.result.happiness, 10)
        home = next(line for line in self.ring if line.name == self.result.shares_placed[2])
        self.assertEqual(home.shares(self.file.cap.storage_index)[2], self.file.shares[2])

    def test_servers_that_die_one_after_the_other(self) -> None:
        """Each time only the difference is sent."""
        world = World(14, params=MANY_SEGMENTS, window_bytes=20_000, bytes_per_s=100_000.0)
        self.make(400_000, world)
        started = world.grid.put(self.data)
        for victim, at in ((1, 0.25), (4, 0.5), (7, 0.75)):
            while world.clock.seconds() < at:
                world.step()
            self.assertNoResult(started)
            self.ring[victim].down = True
        self.result = world.run(started)
        self.assertEqual(self.result.happiness, 10)
        self.assert_true()

    def test_shares_that_move_late_do_not_wait_for_another_event(self) -> None:
        """A way that is opened while others catch up is served in the same round."""
        world = World(12, params=MANY_SEGMENTS)
        self.make(100_000, world)
        self.ring[2].storage.capacity_bytes = 0
        self.put()
        self.assertEqual(self.took, 2 * RTT)


class ProgressTests(UploadTestCase):
    """Progress counts acknowledged bytes."""

    def check(self) -> None:
        seen = Told()
        self.put(progress=seen)
        self.assertEqual(seen, sorted(set(seen)), "it never falls, and is not repeated")
        total = 10 * len(self.file.shares[0])
        self.assertEqual({total for _, total in seen}, {total})
        self.assertEqual(seen[-1], (total, total))
        self.assertGreater(len(seen), 1)

    def test_it_ends_at_the_total(self) -> None:
        """All is acknowledged in the end."""
        self.make(5_000_000)
        self.check()

    def test_it_never_falls(self) -> None:
        """Servers that fail with much acknowledged make it wait, not go back."""
        self.small_batches()
        world = World(12, params=MANY_SEGMENTS, window_bytes=20_000)
        self.make(400_000, world)
        self.ring[2].forget = 1

        def die() -> None:
            self.ring[4].down = True

        world.network.callLater(5 * RTT, die)
        self.check()

    def test_dropped_shares(self) -> None:
        """What was not needed does not keep it from its end."""
        self.make()
        self.ring[3].silent = {"*"}
        self.check()


class SourceTests(UploadTestCase):
    """Sources that do not hold still."""

    def setUp(self) -> None:
        self.small_batches()

    def source(self, size: int) -> tuple[str, BinaryIO]:
        path = self.mktemp()
        with open(path, "wb") as file:
            file.write(content(size))
        return path, open(path, "r+b")

    def start(self, size: int) -> str:
        self.make(size, World(params=MANY_SEGMENTS, window_bytes=20_000))
        path, file = self.source(size)
        file.close()
        self.started = self.world.grid.put(path)
        for _ in range(6):
            self.world.step()
        self.assertNoResult(self.started)
        return path

    def assert_failed(self) -> None:
        self.assertRaises(SourceError, self.world.run, self.started)
        self.world.settle()
        self.assert_nothing_left()
        self.assertEqual(self.world.stored(self.file.cap.storage_index), {})
        self.assertEqual([line.storage.uploads for line in self.world.lines], [{}] * 10)

    def test_it_shrinks(self) -> None:
        """A file that is cut off in the middle stores nothing."""
        path = self.start(400_000)
        os.truncate(path, 100_000)
        self.assert_failed()

    def test_it_changes(self) -> None:
        """Nor does one that somebody writes to, even if all can be read."""
        path = self.start(400_000)
        with open(path, "r+b") as file:
            file.seek(200_000)
            file.write(b"other")
        self.assert_failed()

    def test_it_changes_without_a_trace(self) -> None:
        """Where time stamps cannot tell, the content is read once more and compared."""
        self.patch(FileSource, "check_unchanged", lambda source: False)
        path = self.start(400_000)
        with open(path, "r+b") as file:
            file.write(b"other")
        self.assert_failed()
        self.make(400_000, World(params=MANY_SEGMENTS))
        path, other = self.source(400_000)
        other.close()
        self.assertEqual(self.world.run(self.world.grid.put(path)).cap, self.file.cap)

    def test_it_cannot_be_read(self) -> None:
        """A disk that fails in the middle."""
        self.start(400_000)
        self.patch(os, "pread", mock.Mock(side_effect=OSError(5, "Input/output error")))
        self.assert_failed()

    def test_small_files_are_read_once(self) -> None:
        """What makes the key is what is stored, whatever happens to the file meanwhile."""
        self.make(SMALL)
        path, file = self.source(SMALL)
        started = self.world.grid.put(path)
        file.write(b"other")
        file.close()
        self.assertEqual(self.world.run(started).cap, self.file.cap)


class CancellationTests(UploadTestCase):
    """Cancelling lets go of everything, at any moment."""

    def setUp(self) -> None:
        self.small_batches()

    def check(self, make: Callable[[], None]) -> None:
        steps = 0
        while True:
            make()
            started = self.world.grid.put(self.data)
            for _ in range(steps):
                self.world.step()
            if started.called:
                break
            started.cancel()
            self.failureResultOf(started, CancelledError)
            self.assertEqual(self.world.clock.getDelayedCalls(), [], f"after {steps} steps")
            self.world.settle()
            self.assertEqual(self.world.clock.getDelayedCalls(), [])
            self.assertEqual(
                [peer.pipeline.bytes_in_flight for peer in self.world.grid._peers],
                [0] * len(self.world.lines),
            )
            # The same client can do it then.
            self.put()
            steps += 1
        started.addErrback(lambda _: None)
        self.assertGreater(steps, 1)
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_a_small_file(self) -> None:
        """Whatever has been answered so far."""
        self.check(lambda: self.make(SMALL))

    def test_a_file_with_every_trouble(self) -> None:
        """With servers down, full, silent and forgetful."""

        def make() -> None:
            self.make(200_000, World(12, params=MANY_SEGMENTS, window_bytes=20_000, happy=6))
            self.ring[0].down = True
            self.ring[1].storage.capacity_bytes = 0
            self.ring[2].silent = {"*"}
            self.ring[3].forget = 2

        self.check(make)


class LineTests(SynchronousTestCase):
    """The simulated line does what the tests above take for granted."""

    def test_bytes_take_their_time(self) -> None:
        """Half a round trip each way, and length by rate for each direction."""
        world = World(1, bytes_per_s=1024.0)
        line: Line = world.lines[0]
        line.storage.shares[b"i" * 16, 0] = bytes(2048)
        data, took = world.timed(line.read(b"i" * 16, 0, 0, 2048))
        self.assertEqual((len(data), took), (2048, 2.0 + RTT))
