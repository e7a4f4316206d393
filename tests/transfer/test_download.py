"""What a download does when servers, shares and readers do not do what they should."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from io import BytesIO, RawIOBase
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IConsumer, IPushProducer
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.server import Request
from twisted.web.test.requesthelper import DummyChannel
from zope.interface import implementer

import tests.transfer.world
from pipegrid.core import decoder
from pipegrid.core.caps import LitCap
from pipegrid.core.decoder import Decoder
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.mutable_share import MutableShare
from pipegrid.errors import NotEnoughSharesError, ServerProtocolError, ServerRefused, SinkError
from pipegrid.transfer.get import hedge_policy, share_downloads
from pipegrid.transfer.get.sink import CONSUMER_BYTES
from pipegrid.transfer.results import GetResult
from pipegrid.transfer.settings import DownloadSettings
from tests.transfer.world import CHUNK_BYTES, RTT, Line, Told, World, content

SMALL = 1000
SEGMENT = 30_000
MANY_SEGMENTS = Params(3, 10, SEGMENT)


class DownloadTestCase(SynchronousTestCase):
    """One world with one file in it."""

    def make(self, size: int = SMALL, world: World | None = None, shares: int = 10) -> None:
        self.world = world or World()
        self.data = content(size)
        self.file = self.world.encoded(self.data)
        self.ring = self.world.ring(self.file)
        order = self.ring
        self.world.plant(self.file, {n: order[n % len(order)] for n in range(shares)})

    def get(self, start: int = 0, length: int | None = None) -> GetResult:
        into = BytesIO()
        result, self.took = self.world.timed(
            self.world.grid.get(self.file.cap, into, start=start, length=length)
        )
        end = len(self.data) if length is None else start + length
        self.assertEqual(into.getvalue(), self.data[start:end])
        self.assertEqual(result.size, len(into.getvalue()))
        self.assert_nothing_left()
        return result

    def assert_nothing_left(self) -> None:
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def spoil(self, line: Line, number: int, offset: int) -> None:
        """Flip a bit of a share."""
        key = self.file.cap.storage_index, number
        share = bytearray(line.storage.shares[key])
        share[offset] ^= 1
        line.storage.shares[key] = bytes(share)

    def section(self, name: str) -> int:
        return next(s.start for s in self.file.sections if s.name == name)


class MissingTests(DownloadTestCase):
    """Servers and shares that are not there."""

    def test_dead_servers(self) -> None:
        """Others have enough shares."""
        for size in (SMALL, 2_000_000):
            self.make(size)
            for line in (self.ring[0], self.ring[2], self.ring[3]):
                line.down = True
            self.get()
            self.assertLessEqual(self.took, 4 * RTT)

    def test_one_dead_server_costs_nothing(self) -> None:
        """One more share than needed is asked for at first."""
        self.make()
        self.ring[1].down = True
        self.get()
        self.assertEqual(self.took, RTT)

    def test_silent_servers(self) -> None:
        """Whoever does not answer is replaced after the hedging time, without a word of failure."""
        self.make()
        for line in self.ring[:2]:
            line.silent = {"*"}
        self.get()
        self.assertEqual(self.took, RTT + 1.0 + 2 * RTT - RTT)

    def test_servers_that_list_and_do_not_read(self) -> None:
        """A list without bytes behind it is worth nothing."""
        self.make()
        for line in self.ring[:2]:
            line.silent = {"read", "stream"}
        self.get()
        self.assertLessEqual(self.took, 1.0 + 3 * RTT)

    def test_a_server_that_lies_about_its_list(self) -> None:
        """What it claims and cannot give is looked for elsewhere."""
        self.make(shares=4)
        for line in self.ring[4:7]:
            line.lies = {0, 1, 5, 9, 200}
        self.ring[0].down = self.ring[1].down = True
        self.world.plant(self.file, {7: self.ring[9]})
        result = self.get()
        self.assertEqual(set(result.shares_used), {2, 3, 7})

    def test_many_shares_on_one_server(self) -> None:
        """If nobody else is there, one server gives all."""
        self.make(shares=0)
        self.world.plant(self.file, dict.fromkeys((1, 4, 8), self.ring[6]))
        result = self.get()
        self.assertEqual(set(result.shares_used.values()), {self.ring[6].name})

    def test_no_servers(self) -> None:
        """A grid without servers says so."""
        world = World(0)
        cap = World().encoded(content(SMALL)).cap
        with self.assertRaises(NotEnoughSharesError) as caught:
            world.run(world.grid.read(cap))
        self.assertEqual((caught.exception.found, caught.exception.needed), (0, 3))

    def test_too_few_shares(self) -> None:
        """All servers were asked; the error says how many shares there were, and were needed."""
        self.make(shares=2)
        with self.assertRaises(NotEnoughSharesError) as caught:
            self.get()
        self.assertEqual((caught.exception.found, caught.exception.needed), (2, 3))
        self.assertEqual([line.count("list_shares") for line in self.ring], [1] * 10)
        self.assert_nothing_left()

    def test_too_few_servers(self) -> None:
        """Dead servers are named as the reason."""
        self.make()
        for line in self.ring[1:9]:
            line.down = True
        with self.assertRaises(NotEnoughSharesError) as caught:
            self.get()
        self.assertEqual((caught.exception.found, caught.exception.needed), (2, 3))
        self.assertIn("is down", str(caught.exception))

    def test_all_silent(self) -> None:
        """Even then a get ends."""
        self.make(world=World(download=DownloadSettings(silence_s=16.0)))
        for line in self.ring:
            line.silent = {"*"}
        self.assertRaises(NotEnoughSharesError, self.get)
        self.assertLessEqual(self.world.clock.seconds(), 32.0)
        self.assert_nothing_left()

    def test_servers_that_answer_everybody_else(self) -> None:
        """They are not waited for without end, be it for lists or for bytes."""
        for silent in ("*", "read"):
            self.make(world=World(download=DownloadSettings(silence_s=16.0)))
            for line in self.ring:
                line.silent, line.for_others = {silent}, True
            self.assertRaises(NotEnoughSharesError, self.get)
            self.assertLessEqual(self.world.clock.seconds(), 20 * 16.0)
            self.assert_nothing_left()

    def test_a_server_that_dies_after_its_part(self) -> None:
        """What has come from it is used, even if no other server has anything."""
        self.make(world=World(3), shares=3)
        self.ring[0].answers_lost = {"list_shares"}
        self.ring[0].late = {"list_shares": RTT}
        self.ring[1].rtt_s = 4 * RTT
        self.get()
        self.assertEqual(self.took, 4 * RTT)

    def test_a_server_that_refuses_to_read(self) -> None:
        """Refusals and nonsense are failures of that server alone."""
        for error in (ServerRefused("not today"), ServerProtocolError("nonsense")):
            self.make()
            self.ring[0].breaks = {"read": error}
            self.ring[2].breaks = {"read": error}
            self.get()

    def test_a_server_that_fails_just_before_all_are_given_up(self) -> None:
        """Whoever is asked in its place gets as much time as it had."""
        settings = DownloadSettings(silence_s=16.0)
        self.make(SMALL, World(happy=1, params=Params(2, 2), download=settings), 2)
        self.world.plant(self.file, {0: self.ring[1]})
        self.ring[0].answers_lost = {"read"}
        self.ring[0].late = {"read": 16.0 - RTT / 2}
        result = self.get()
        self.assertEqual(result.shares_used[0], self.ring[1].name)
        self.assertEqual(self.took, 16.0 + 1.5 * RTT)

    def test_a_bug_in_a_transport_ends_the_get(self) -> None:
        """An error that is no server's is passed on, at once."""
        for operation in ("read", "list_shares"):
            self.make()
            self.ring[1].breaks[operation] = RuntimeError("a bug")
            self.assertRaises(RuntimeError, self.get)
            self.assertEqual(self.world.clock.seconds(), RTT)
            self.assert_nothing_left()
        self.make(3_000_000)
        self.ring[1].breaks["stream"] = RuntimeError("a bug")
        self.assertRaises(RuntimeError, self.get)


class DamageTests(DownloadTestCase):
    """Shares that are not what they were."""

    def check_damage(self, name: str, size: int = 200_000) -> None:
        self.make(size, World(params=MANY_SEGMENTS))
        self.spoil(self.ring[0], 0, self.section(name) + 40)  # not in a root: nobody reads that
        result = self.get()
        self.assertEqual(
            [(e.share_number, e.server) for e in result.corrupt], [(0, self.ring[0].name)]
        )
        self.world.settle()
        advisories = self.ring[0].storage.advisories
        self.assertEqual([number for _, number, _ in advisories], [0])

    def test_damaged_parts(self) -> None:
        """A flipped bit is found wherever it matters, worked around, reported and told to its server."""
        for name in ("data", "block_hashes", "share_hashes", "uri_extension"):
            self.check_damage(name)

    def test_a_damaged_header(self) -> None:
        """A share that cannot be understood is like one that is not there."""
        self.make()
        self.spoil(self.ring[0], 0, 3)
        result = self.get()
        self.assertEqual([e.share_number for e in result.corrupt], [0])

    def test_a_truncated_share(self) -> None:
        """A share that ends too early is damaged."""
        for length in (0, 10, 500, 50_000):
            self.make(200_000, World(params=MANY_SEGMENTS))
            key = self.file.cap.storage_index, 0
            self.ring[0].storage.shares[key] = self.file.shares[0][:length]
            result = self.get()
            self.assertEqual([e.share_number for e in result.corrupt], [0])

    def test_swapped_shares(self) -> None:
        """A share under another's number proves nothing, and is not used."""
        self.make()
        index = self.file.cap.storage_index
        self.ring[0].storage.shares[index, 0] = self.file.shares[1]
        self.ring[1].storage.shares[index, 1] = self.file.shares[0]
        result = self.get()
        self.assertEqual({e.share_number for e in result.corrupt}, {0, 1})
        self.assertTrue({0, 1}.isdisjoint(result.shares_used))

    def test_another_file(self) -> None:
        """Shares of another file are not mistaken for this one's."""
        self.make()
        other = self.world.encoded(content(SMALL, "other"))
        index = self.file.cap.storage_index
        for number in range(8):
            self.ring[number].storage.shares[index, number] = other.shares[number]
        with self.assertRaises(NotEnoughSharesError) as caught:
            self.get()
        self.assertEqual(caught.exception.found, 2)

    def test_all_shares_damaged_in_different_places(self) -> None:
        """As long as each segment has enough good blocks the file can be had."""
        self.make(10 * SEGMENT, World(4, params=Params(3, 4, SEGMENT), happy=4), shares=4)
        for number in range(4):
            self.spoil(self.ring[number], number, 36 + (2 * number + 1) * SEGMENT // 3)
        result = self.get()
        self.assertGreaterEqual(len({e.share_number for e in result.corrupt}), 2)

    def test_all_shares_damaged_in_one_place(self) -> None:
        """A segment that is lost is lost, and the get ends."""
        self.make(10 * SEGMENT, World(4, params=Params(3, 4, SEGMENT), happy=4), shares=4)
        for number in range(2):
            self.spoil(self.ring[number], number, 36 + 5 * SEGMENT // 3)
        self.assertRaises(NotEnoughSharesError, self.get)
        self.assert_nothing_left()

    def test_one_good_copy(self) -> None:
        """A damaged copy of a share on one server is replaced by a good one on another."""
        self.make(shares=3)
        self.world.plant(self.file, {1: self.ring[7]})
        self.spoil(self.ring[1], 1, self.section("data"))
        result = self.get()
        self.assertEqual(result.shares_used[1], self.ring[7].name)

    def test_another_copy_of_a_share_whose_hashes_are_wrong(self) -> None:
        """Its blocks may be good, but if nobody else has good hashes the other copy is read."""
        self.make(world=World(params=Params(1, 2), happy=1), shares=1)
        self.world.plant(self.file, {0: self.ring[5]})
        self.spoil(self.ring[0], 0, self.section("uri_extension") + 40)
        result = self.get()
        self.assertEqual(result.shares_used, {0: self.ring[5].name})

    def test_damage_that_is_found_after_the_race(self) -> None:
        """A block that proves bad when its reader was closed already is still blamed on its server."""
        self.make(200_000, World(params=MANY_SEGMENTS))
        for number in range(4):
            self.spoil(self.ring[number], number, self.section("data"))
        result = self.get()
        for error in result.corrupt:
            self.assertEqual(error.server, self.ring[error.share_number or 0].name)


class SpeedTests(DownloadTestCase):
    """No slow server slows a get."""

    def slow(self, slow_down: Callable[[Line], None], victims: tuple[int, ...]) -> float:
        rate = float(1 << 20)
        self.make(6_000_000, World(bytes_per_s=rate))
        for victim in victims:
            slow_down(self.ring[victim])
        self.get()
        return self.took

    def test_slow_servers(self) -> None:
        """Neither little bandwidth nor a long way of one server is felt."""

        def narrow(line: Line) -> None:
            line.bytes_per_s = float(1 << 20) / 50

        def far(line: Line) -> None:
            line.rtt_s = 50 * RTT

        usual = self.slow(narrow, ())
        for slow_down in (narrow, far):
            for victim in range(4):
                took = self.slow(slow_down, (victim,))
                self.assertLessEqual(took, 1.01 * usual, f"{slow_down}, {victim}")

    def test_the_race_costs_little(self) -> None:
        """Of a large file little is asked in vain, and every server is asked for blocks once."""
        self.make(10_000_000)
        self.get()
        delivered = sum(line.delivered_bytes for line in self.world.lines)
        self.assertLess(delivered, 1.03 * len(self.data))
        self.assertEqual([line.count("stream") for line in self.ring[:3]], [1, 1, 1])
        self.assertEqual(self.took, RTT)

    def test_two_slow_servers(self) -> None:
        """Two others take their places, which costs a round trip; of three the hedge replaces one."""

        def narrow(line: Line) -> None:
            line.bytes_per_s = float(1 << 20) / 50

        usual = self.slow(narrow, ())
        self.assertLessEqual(self.slow(narrow, (0, 1)), 1.01 * usual + 2 * RTT)
        self.assertLessEqual(self.slow(narrow, (0, 1, 2)), 1.01 * usual + 1.0 + 4 * RTT + 0.5)

    def test_helpers_that_both_win(self) -> None:
        """
        One favourite is very slow, and another not quite quick enough for the first segment.

        So both helpers are in that, and each is one of the k shares for all of the rest: the slow one's
        work, which they had divided, is not all there is to do.
        """
        self.patch(hedge_policy, "PROBE_SHARE", 1)
        rate = float(1 << 20)
        for slow in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            self.make(4_000_000, World(bytes_per_s=rate))
            self.ring[slow[0]].rtt_s = 50 * RTT
            self.ring[slow[1]].bytes_per_s = 0.52 * rate
            self.ring[slow[2]].bytes_per_s = 0.76 * rate
            self.get()
            self.assertLess(self.took, RTT + len(self.data) / 3 / (0.76 * rate) + 0.01)

    def test_helpers_that_fail(self) -> None:
        """Whoever is left of those who divided a slow server's work does all of it, or others do."""
        for limit in (40_000, 300_000, 900_000):
            for victims in ((3,), (4,), (3, 4), (1, 3), (1, 4)):
                self.make(9_000_000, World(bytes_per_s=float(1 << 20)))
                self.ring[0].rtt_s = 50 * RTT
                for victim in victims:
                    self.ring[victim].stream_limit = limit
                self.get()
                self.assertLess(self.took, 20.0)

    def test_helpers_whose_shares_are_damaged(self) -> None:
        """Theirs are replaced like any other's."""
        for victim in (3, 4):
            for block in (1, 7):
                self.make(9_000_000, World(bytes_per_s=float(1 << 20)))
                self.ring[0].rtt_s = 50 * RTT
                self.spoil(self.ring[victim], victim, 500 + block * 349_526)
                found = self.get().corrupt
                self.assertLessEqual({error.share_number for error in found}, {victim})

    def test_a_server_that_gets_slow_in_the_middle(self) -> None:
        """The hedge is for it as well."""
        rate = float(1 << 20)
        self.make(12_000_000, World(bytes_per_s=rate))
        usual = self.slow(lambda line: None, ())
        self.make(12_000_000, World(bytes_per_s=rate))
        started = self.world.grid.read(self.file.cap)
        while self.world.clock.seconds() < 2.0:
            self.world.step()
        self.ring[0].bytes_per_s = rate / 1000
        self.assertEqual(self.world.run(started), self.data)
        self.assertLess(self.world.clock.seconds(), 2 * usual + 4.0)

    def test_a_server_that_dies_in_the_middle_of_a_stream(self) -> None:
        """Another share goes on where it ended."""
        self.make(8_000_000, World(bytes_per_s=float(1 << 20)))
        self.ring[0].stream_limit = 700_000
        result = self.get()
        self.assertIn(0, result.shares_used)
        self.assertEqual(len(result.shares_used), 4)

    def test_streams_that_die_again_and_again(self) -> None:
        """As long as there are shares left."""
        self.make(8_000_000)
        for line in self.ring[:7]:
            line.stream_limit = 700_000
        self.get()

    def test_a_silent_server_does_not_condemn_those_that_wait_for_it(self) -> None:
        """Held-back servers are not silent: when the missing share returns, they are still there."""
        settings = DownloadSettings(silence_s=16.0, memory_bytes=1 << 20, hedge_s=1.0)
        self.make(9_000_000, World(3, happy=3, params=Params(2, 3), download=settings), 3)
        self.ring[2].storage.shares.clear()
        started = self.world.grid.read(self.file.cap)
        self.ring[1].bytes_per_s = float(1 << 20)
        while self.world.clock.seconds() < 1.5:
            self.world.step()
        self.ring[1].stream_limit = 0
        with self.assertRaises(NotEnoughSharesError) as caught:
            self.world.run(started)
        self.assertEqual(caught.exception.found, 1)


class MemoryTests(DownloadTestCase):
    """Whatever the size and the speed, little is held."""

    def watch(self) -> list[int]:
        held: list[int] = []
        received = Decoder.received

        def noting(decoder: Decoder, number: int, offset: int, data: bytes) -> None:
            received(decoder, number, offset, data)
            held.append(decoder.held_bytes)

        self.patch(Decoder, "received", noting)
        return held

    def test_a_large_file(self) -> None:
        """Fast servers are held back while a slow one keeps the others waiting."""
        settings = DownloadSettings(memory_bytes=8 << 20, hedge_s=1000.0)
        self.make(50_000_000, World(3, happy=3, params=Params(3, 3), download=settings), 3)
        self.ring[1].bytes_per_s = float(4 << 20)
        held = self.watch()
        self.get()
        self.assertLess(max(held), (8 << 20) + 3 * (1 << 20))

    def test_many_shares(self) -> None:
        """The race keeps to the bound too, when it has many runners."""
        settings = DownloadSettings(memory_bytes=4 << 20)
        params = Params(60, 64, 1 << 20)
        world = World(64, happy=1, params=params, download=settings)
        self.make(20_000_000, world, 64)
        held = self.watch()
        self.get()
        # A chunk on its way is a bounded number of bytes behind a pause.
        self.assertLess(max(held), (4 << 20) + 61 * CHUNK_BYTES)

    def test_a_wrong_guess_with_little_memory(self) -> None:
        """
        Segments are smaller than guessed, and shares are streamed that may hardly be held.

        What the guess asked for has hashes behind blocks, and bytes that nobody needs: neither may
        hold back what comes behind them, or it would never come.
        """
        self.patch(share_downloads, "STREAM_BYTES", 1500)
        self.patch(decoder, "_APART_BYTES", 1500)
        self.patch(tests.transfer.world, "CHUNK_BYTES", 500)
        for segment_bytes in (700, 3000, 10_000):
            for memory_bytes in (1000, 5000, 20_000):
                settings = DownloadSettings(memory_bytes=memory_bytes)
                params = Params(3, 10, segment_bytes)
                self.make(50_000, World(params=params, download=settings, bytes_per_s=1e5))
                for start, length in ((0, None), (0, 37_000), (31_000, 10_000)):
                    self.get(start, length)

    def test_hashes_of_a_late_share_with_little_memory(self) -> None:
        """A share that joins in the middle brings hashes, and blocks that have left already."""
        self.patch(share_downloads, "STREAM_BYTES", 1500)
        self.patch(decoder, "_APART_BYTES", 1500)
        self.patch(tests.transfer.world, "CHUNK_BYTES", 500)
        settings = DownloadSettings(memory_bytes=5000)
        for broken in (3000, 6000, 9000, 12_000):
            params = Params(3, 10, 3000)
            self.make(48_000, World(params=params, download=settings, bytes_per_s=1e5))
            self.spoil(self.ring[1], 1, self.section("data") + broken)
            self.ring[0].stream_limit = broken
            self.get()

    def little_memory(self, size: int, params: Params, memory_bytes: int, rate: float) -> None:
        """Pieces so small that a small file is streamed like a large one, and may hardly be held."""
        self.patch(share_downloads, "STREAM_BYTES", 1500)
        self.patch(decoder, "_APART_BYTES", 1500)
        self.patch(hedge_policy, "PROBE_BYTES", 300)
        self.patch(tests.transfer.world, "CHUNK_BYTES", 500)
        settings = DownloadSettings(memory_bytes=memory_bytes, silence_s=16.0, hedge_s=1.0)
        world = World(happy=1, params=params, download=settings, bytes_per_s=rate)
        self.make(size, world, params.total_shares)

    def test_early_blocks_of_a_share_that_holds_late_ones(self) -> None:
        """
        Who has given the second part in a slow server's place gives the first part as well, when its fellow
        fails: though the share holds more than it should, for nobody can do anything without it.
        """
        self.little_memory(37_785, Params(4, 10, 3000), 1000, 1e5)
        self.ring[0].rtt_s = 50 * RTT
        for number, limit in ((0, 5932), (4, 3460), (5, 2852), (8, 3308), (9, 2509)):
            self.ring[number].stream_limit = limit
        for number, rate in ((2, 1e4), (5, 1e3), (6, 1e4), (8, 1e3), (9, 1e3)):
            self.ring[number].bytes_per_s = rate
        self.ring[4].silent = {"read"}
        self.ring[7].silent = {"stream"}
        self.get(5223)

    def test_a_server_that_gives_blocks_and_no_hashes(self) -> None:
        """It is as silent as any other, though the blocks that it gives are held back."""
        self.little_memory(58_373, Params(6, 8, 10_000), 20_000, 1e4)
        for number, limit in ((2, 6596), (3, 3913), (6, 11_225), (8, 2513)):
            self.ring[number].stream_limit = limit
        for number in (2, 4, 8, 9):
            self.ring[number].rtt_s = (50 if number == 8 else 10) * RTT
        self.ring[7].silent = {"read"}
        with self.assertRaises(NotEnoughSharesError) as caught:
            self.get()
        self.assertEqual(caught.exception.found, 5)
        self.assertIn("was silent", str(caught.exception))

    def test_large_blocks(self) -> None:
        """A block that is larger than the bound can be had all the same."""
        settings = DownloadSettings(memory_bytes=1 << 20)
        world = World(params=Params(1, 10, 4_000_000), download=settings)
        self.make(9_000_000, world)
        self.get()

    def test_many_segments(self) -> None:
        """Hash trees that are themselves larger than the bound do not block what waits for them."""
        settings = DownloadSettings(memory_bytes=1 << 17)
        self.make(400_000, World(params=Params(2, 4, 64), happy=1, download=settings), 4)
        self.get()


class RangeTests(DownloadTestCase):
    """Parts of files."""

    def test_ranges(self) -> None:
        """Any range is right, and no more than its segments is read."""
        self.make(200_000, World(params=MANY_SEGMENTS))
        for start, length in (
            (0, 1),
            (199_999, 1),
            (SEGMENT - 1, 2),
            (SEGMENT, SEGMENT),
            (12_345, 100_000),
            (0, 200_000),
        ):
            self.get(start, length)

    def test_a_range_reads_little(self) -> None:
        """A byte of a large file costs about its segment."""
        self.make(20_000_000)
        self.get(10_000_000, 1)
        read = sum(line.delivered_bytes for line in self.world.lines)
        self.assertLess(read, 5 * ((1 << 20) // 3 + 30_000))


class SinkTests(DownloadTestCase):
    """Where the plaintext goes."""

    def test_a_full_disk(self) -> None:
        """The get ends with a sentence, and lets go."""

        class Full(BytesIO):
            def write(self, _data: object) -> int:
                raise OSError(28, "No space left on device")

        self.make(2_000_000)
        with self.assertRaises(SinkError) as caught:
            self.world.run(self.world.grid.get(self.file.cap, Full()))
        self.assertIn("No space left", str(caught.exception))
        self.assert_nothing_left()

    def test_a_closed_pipe(self) -> None:
        """Whoever reads our output may leave: a sentence says so."""

        class Closed(BytesIO):
            def write(self, _data: object) -> int:
                raise BrokenPipeError(32, "Broken pipe")

        self.make(2_000_000)
        with self.assertRaises(SinkError) as caught:
            self.world.run(self.world.grid.get(self.file.cap, Closed()))
        self.assertIn("its reader has gone", str(caught.exception))
        self.assertIsInstance(caught.exception.__cause__, BrokenPipeError)
        self.assert_nothing_left()

    def test_an_unbuffered_file(self) -> None:
        """One that takes less than it is given gets the rest as well."""

        class Thrifty(RawIOBase):
            def __init__(self) -> None:
                super().__init__()
                self.taken = b""

            def write(self, data: Any) -> int:
                self.taken += bytes(data[:1000])
                return min(1000, len(data))

        self.make(200_000)
        into = Thrifty()
        self.world.run(self.world.grid.get(self.file.cap, into))  # type: ignore[arg-type]
        self.assertEqual(into.taken, self.data)

    def test_a_consumer(self) -> None:
        """It is registered with, fed and let go of."""
        self.make(200_000)
        consumer = Consumer()
        self.world.run(self.world.grid.get(self.file.cap, consumer))
        self.assertEqual(consumer.taken, self.data)
        self.assertIsNone(consumer.producer)

    def test_a_consumer_that_pauses(self) -> None:
        """While it pauses little is held; afterwards all arrives."""
        settings = DownloadSettings(memory_bytes=4 << 20)
        self.make(20_000_000, World(download=settings))
        consumer = Consumer(pause_after=1_000_000)
        held: list[int] = []
        received = Decoder.received

        def noting(decoder: Decoder, number: int, offset: int, data: bytes) -> None:
            received(decoder, number, offset, data)
            held.append(decoder.held_bytes)

        self.patch(Decoder, "received", noting)
        started = self.world.grid.get(self.file.cap, consumer)
        self.world.network.callLater(500.0, lambda: None)
        while self.world.clock.seconds() < 500.0:
            self.world.step()
        self.assertNoResult(started)
        self.assertLess(max(held), 6 << 20)
        self.assertLess(len(consumer.taken), 1_000_000 + CONSUMER_BYTES)
        consumer.pause_after = None
        assert consumer.producer is not None
        consumer.producer.resumeProducing()
        self.world.run(started)
        self.assertEqual(consumer.taken, self.data)

    def test_a_consumer_that_pauses_for_the_rest(self) -> None:
        """The get is not done before all of it has been taken, whether it lives in its cap or in shares."""
        self.make(200_000)
        for cap in (LitCap(b"small"), self.file.cap):
            consumer = Consumer(pause_after=0)
            register = consumer.registerProducer

            def paused(producer: Any, streaming: bool, register: Any = register) -> None:
                register(producer, streaming)
                producer.pauseProducing()

            consumer.registerProducer = paused  # type: ignore[method-assign]
            started = self.world.grid.get(cap, consumer)
            while self.world.step():
                pass
            self.assertNoResult(started)
            self.assertEqual(consumer.taken, b"")
            consumer.pause_after = None
            assert consumer.producer is not None
            consumer.producer.resumeProducing()
            self.world.run(started)
            self.assertEqual(len(consumer.taken), cap.size)
            self.assertIsNone(consumer.producer)

    def test_a_consumer_that_stops(self) -> None:
        """The get ends at once, even if nothing comes any more."""
        self.make(20_000_000)
        for line in self.ring:
            line.stream_limit = None
            line.silent = {"stream"}
        consumer = Consumer()
        started = self.world.grid.get(self.file.cap, consumer)
        assert consumer.producer is not None
        consumer.producer.stopProducing()
        self.assertRaises(SinkError, self.world.run, started)
        self.assertEqual(self.world.clock.seconds(), 0)
        self.assertIsNone(consumer.producer)
        self.assert_nothing_left()

    def test_a_consumer_that_fails_when_it_resumes(self) -> None:
        """The get fails with its error, even at the last piece; it never fires without one."""
        self.make(200_000)
        for cap in (LitCap(b"small"), self.file.cap):
            consumer = Consumer()
            register = consumer.registerProducer

            def paused(producer: Any, streaming: bool, register: Any = register) -> None:
                register(producer, streaming)
                producer.pauseProducing()

            def fail(data: bytes) -> None:
                raise OSError(28, "No space left on device")

            consumer.registerProducer = paused  # type: ignore[method-assign]
            consumer.write = fail  # type: ignore[method-assign]
            started = self.world.grid.get(cap, consumer)
            while self.world.step():
                pass
            assert consumer.producer is not None
            consumer.producer.resumeProducing()
            self.assertRaises(OSError, self.world.run, started)
            self.assertIsNone(consumer.producer)

    def test_a_consumer_is_let_go_of_after_a_failure(self) -> None:
        """Whatever goes wrong: the consumer can be given to another producer."""
        self.make(shares=2)
        consumer = Consumer()
        with self.assertRaises(NotEnoughSharesError):
            self.world.run(self.world.grid.get(self.file.cap, consumer))
        self.assertIsNone(consumer.producer)

    def test_progress(self) -> None:
        """It grows with what is delivered, and ends with all."""
        self.make(200_000, World(params=MANY_SEGMENTS))
        seen = Told()
        self.world.run(self.world.grid.get(self.file.cap, BytesIO(), progress=seen))
        self.assertEqual(seen, sorted(set(seen)))
        self.assertEqual(seen[-1], (200_000, 200_000))


class CancellationTests(DownloadTestCase):
    """Cancelling lets go of everything, at any moment."""

    def check(self, make: Callable[[], None]) -> None:
        steps = 0
        while True:
            make()
            consumer = Consumer()
            started: Deferred[Any] = self.world.grid.get(self.file.cap, consumer)
            for _ in range(steps):
                self.world.step()
            if started.called:
                break
            started.cancel()
            self.failureResultOf(started, CancelledError)
            self.assert_nothing_left()
            self.assertIsNone(consumer.producer)
            self.world.settle()
            self.assert_nothing_left()
            steps += 1
        self.assertGreater(steps, 1)
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_a_small_file(self) -> None:
        """Whatever has come so far."""
        self.check(self.make)

    def test_a_browser_that_has_left(self) -> None:
        """Who cancels a get for a request of Twisted's web server, whose client is gone, is told of that."""
        self.make()
        request: Any = Request(DummyChannel(), False)
        started: Deferred[Any] = self.world.grid.get(self.file.cap, request)
        request.notifyFinish().addErrback(lambda _: started.cancel())
        request.connectionLost(Failure(ConnectionLost()))
        self.failureResultOf(started, CancelledError)
        self.assert_nothing_left()

    def test_what_has_arrived_is_released_at_once(self) -> None:
        """
        Without the collector: of many readers that stop reading, those whose gets were cancelled hold
        nothing.
        """
        collecting = gc.isenabled()
        gc.disable()
        self.addCleanup(gc.enable if collecting else gc.disable)
        self.make(8_000_000)
        consumer = Consumer(pause_after=1)
        decoders: dict[Decoder, None] = {}
        received = Decoder.received

        def noting(decoder: Decoder, number: int, offset: int, data: bytes) -> None:
            decoders[decoder] = None
            received(decoder, number, offset, data)

        self.patch(Decoder, "received", noting)
        started: Deferred[Any] = self.world.grid.get(self.file.cap, consumer)
        while self.world.step():
            pass
        self.assertNoResult(started)
        (decoder,) = decoders
        sink: Any = consumer.producer
        self.assertGreater(decoder.held_bytes + sink.pending_bytes, 3_000_000)
        started.cancel()
        self.failureResultOf(started, CancelledError)
        self.assertEqual(decoder.held_bytes, 0)
        self.assertEqual(sum(map(len, sink._waiting)), 0)

    def test_what_has_arrived_of_a_mutable_file_is_released_at_once(self) -> None:
        """In the same way."""
        self.make()
        data = content(4_000_000)
        cap = self.world.run(self.world.grid.create_mutable(data, format="mdmf")).cap
        shares: list[MutableShare] = []
        add_share = VersionReader.add_share

        def noting(reader: VersionReader, share: MutableShare) -> None:
            shares.append(share)
            add_share(reader, share)

        self.patch(VersionReader, "add_share", noting)
        consumer = Consumer(pause_after=1)
        started = self.world.client().get(cap, consumer)
        while self.world.step():
            pass
        self.assertNoResult(started)
        self.assertGreater(sum(share.store.held_bytes for share in shares), 3_000_000)
        started.cancel()
        self.failureResultOf(started, CancelledError)
        self.assertLess(sum(share.store.held_bytes for share in shares), 100_000)

    def test_what_a_cancelled_write_has_encoded_is_released_at_once(self) -> None:
        """Without the collector: the shares of a mutable file, which are three times as large."""
        collecting = gc.isenabled()
        gc.disable()
        self.addCleanup(gc.enable if collecting else gc.disable)
        self.make()
        data = content(1_000_000)
        for line in self.world.lines:
            line.silent = {"read_test_write"}
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        started = self.world.grid.create_mutable(data, format="mdmf")
        while tracemalloc.get_traced_memory()[0] < 3_000_000:
            self.assertTrue(self.world.step())
        self.assertNoResult(started)
        started.cancel()
        self.failureResultOf(started, CancelledError)
        self.assertLess(tracemalloc.get_traced_memory()[0], 1_500_000)

    def test_a_large_file_with_every_trouble(self) -> None:
        """With servers down, silent and lying, damage and lost streams."""

        def make() -> None:
            self.make(3_000_000, World(bytes_per_s=float(1 << 21)))
            self.ring[0].down = True
            self.ring[1].silent = {"*"}
            self.ring[2].stream_limit = 300_000
            self.ring[4].lies = {0, 1}
            self.spoil(self.ring[3], 3, 36)

        self.check(make)


@implementer(IConsumer)
class Consumer:
    """Takes bytes, and pauses once if told so."""

    def __init__(self, pause_after: int | None = None) -> None:
        self.taken = b""
        self.pause_after = pause_after
        self.producer: IPushProducer | None = None

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert streaming
        assert self.producer is None
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.producer = None

    def write(self, data: bytes) -> None:
        assert type(data) is bytes
        self.taken += data
        if self.pause_after is not None and len(self.taken) >= self.pause_after:
            assert self.producer is not None
            self.producer.pauseProducing()
