"""A get to a path goes on where an interrupted one stopped, and believes nothing that it finds there."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.disk.atomic_write import part_path
from pipegrid.errors import NotEnoughSharesError, SinkError
from pipegrid.transfer.get import resume_decoder
from pipegrid.transfer.get.resume_decoder import PresentSegments
from pipegrid.transfer.results import GetResult
from pipegrid.transfer.settings import DownloadSettings
from tests.transfer.world import RTT, Told, World, content

SEGMENT = 3 * (1 << 16)
SEGMENTS = 50
SIZE = SEGMENTS * SEGMENT - 1000
PARAMS = Params(3, 10, SEGMENT)
USUAL_SEGMENT = 3 * -(-(1 << 20) // 3)
CUT = 27 * SEGMENT + 5000
"""54 % of it, in the middle of a segment."""

TREES = 300_000
"""More than all hashes, chains and headers that are read with it, with what is read between them."""


class ResumeTestCase(SynchronousTestCase):
    """A file on a grid in virtual time, and a directory to get it to."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "file"
        self.part = Path(part_path(os.path.realpath(self.path)))
        self.make(SIZE)

    def make(self, size: int, params: Params = PARAMS, world: World | None = None) -> None:
        self.data = content(size)
        self.world = world or World(params=params)
        self.file = self.world.plant(self.world.encoded(self.data))

    def get(self, start: int = 0, length: int | None = None, replace: bool = False) -> GetResult:
        """Get it; the file must be there and right, and nothing beside it."""
        before = sum(line.delivered_bytes for line in self.world.lines)
        self.told = Told()
        started: Deferred[GetResult] = self.world.grid.get(
            self.file.cap,
            self.path,
            start=start,
            length=length,
            progress=self.told,
            replace=replace,
        )
        result, self.took = self.world.timed(started)
        self.fetched = sum(line.delivered_bytes for line in self.world.lines) - before
        wanted = self.data[start:] if length is None else self.data[start : start + length]
        self.assertEqual(self.path.read_bytes(), wanted)
        self.assertEqual(os.listdir(self.directory), ["file"])
        self.assertEqual(result.size, len(wanted))
        return result


class ResumeTests(ResumeTestCase):
    """What is there is not fetched, and what is not there is."""

    def test_nothing_there(self) -> None:
        """An ordinary get, in the round trips of one."""
        result = self.get()
        self.assertEqual((result.found_bytes, result.here_bytes), (0, 0))
        self.assertLess(self.fetched, SIZE + 2 * SEGMENT + TREES)

    def test_the_rest_is_fetched(self) -> None:
        """What is missing, and two segments at most; the round trips are those of a get."""
        self.get()
        fresh_took = self.took
        self.path.unlink()
        self.part.write_bytes(self.data[:CUT])
        result = self.get()
        self.assertEqual((result.found_bytes, result.here_bytes), (CUT, 27 * SEGMENT))
        self.assertLess(self.fetched, SIZE - CUT + 2 * SEGMENT + TREES)
        self.assertEqual(self.took, fresh_took)
        self.assertEqual(self.told[0], (27 * SEGMENT, SIZE), "progress starts at what is there")
        self.assertEqual(self.told[-1], (SIZE, SIZE))

    def test_with_the_usual_segments_it_takes_one_round_trip(self) -> None:
        """Where the shares are where they should be, like any get."""
        self.make(5_000_000, Params())
        self.part.write_bytes(self.data[:2_500_000])
        result = self.get()
        self.assertEqual(result.here_bytes, 2 * USUAL_SEGMENT)
        self.assertEqual(self.took, RTT)
        self.assertLess(self.fetched, 2_500_000 + (2 << 20) + TREES)

    def test_one_share_is_enough(self) -> None:
        """Where a block is a whole segment those that join the race taste little of it, also for damage."""
        params = Params(1, 5)
        segment = 1 << 20
        self.make(40 * segment, params, World(params=params, happy=5))
        spoilt = bytearray(self.data[: 20 * segment])
        spoilt[3 * segment] ^= 1
        self.part.write_bytes(spoilt)
        self.assertEqual(self.get().here_bytes, 19 * segment)
        self.assertLess(self.fetched, 21 * segment + 2 * segment)

    def test_a_damaged_byte(self) -> None:
        """Its segment is fetched again; nothing else is."""
        spoilt = bytearray(self.data[:CUT])
        spoilt[5 * SEGMENT + 17] ^= 1
        self.part.write_bytes(spoilt)
        result = self.get()
        self.assertEqual(result.here_bytes, 26 * SEGMENT)
        self.assertLess(self.fetched, SIZE - CUT + 3 * SEGMENT + TREES)

    def test_damage_at_the_beginning(self) -> None:
        """The first segments being bad does not make the others so."""
        self.part.write_bytes(bytes(2 * SEGMENT) + self.data[2 * SEGMENT : CUT])
        result = self.get()
        self.assertEqual(result.here_bytes, 25 * SEGMENT)
        self.assertLess(self.fetched, SIZE - CUT + 4 * SEGMENT + TREES)

    def test_a_part_with_holes(self) -> None:
        """Whatever is there is used, wherever it is."""
        self.part.write_bytes(bytes(SIZE))
        with open(self.part, "r+b") as file:
            for segment in (0, 7, 30, 31, 49):
                file.seek(segment * SEGMENT)
                file.write(self.data[segment * SEGMENT : (segment + 1) * SEGMENT])
        result = self.get()
        self.assertEqual(result.here_bytes, 5 * SEGMENT - 1000)

    def test_all_of_it_is_there(self) -> None:
        """Killed before it got its name: hashes are fetched, and nothing else."""
        self.part.write_bytes(self.data)
        result = self.get()
        self.assertEqual(result.here_bytes, SIZE)
        self.assertLess(self.fetched, TREES)
        self.assertEqual(self.told, [(SIZE, SIZE)])

    def test_a_part_that_is_too_long(self) -> None:
        """What is behind the end of the file goes."""
        self.part.write_bytes(self.data + b"more")
        self.assertEqual(self.get().here_bytes, SIZE)

    def test_a_part_of_another_file(self) -> None:
        """It is overwritten, and was not believed: at most one round trip is lost."""
        self.get()
        fresh_took = self.took
        self.path.unlink()
        self.part.write_bytes(content(CUT, "another"))
        result = self.get()
        self.assertEqual((result.found_bytes, result.here_bytes), (CUT, 0))
        self.assertLessEqual(self.took, fresh_took + 2 * RTT)
        self.assertLess(self.fetched, SIZE + 2 * SEGMENT + TREES)
        streams = sum(line.count("stream") for line in self.world.lines)
        self.assertLess(streams, 30, "it is not fetched segment by segment")

    def test_a_longer_part_of_another_file(self) -> None:
        """Also if nothing seems to be missing."""
        self.part.write_bytes(content(2 * SIZE, "another"))
        self.assertEqual(self.get().here_bytes, 0)

    def test_small_files(self) -> None:
        """Of one segment, half there or all there; and one that lives in its cap."""
        self.make(200, Params())
        for there in (b"", self.data[:100], self.data, bytes(500)):
            self.part.write_bytes(there)
            result = self.get(replace=True)
            self.assertEqual(result.here_bytes, 200 if there == self.data else 0)
            self.assertLessEqual(self.took, 2 * RTT)

    def test_a_range(self) -> None:
        """Segments that are wanted in part cannot be checked, and are fetched: two at most."""
        segment = USUAL_SEGMENT
        self.make(12 * segment, Params())
        start, length = segment + 77, 10 * segment
        self.part.write_bytes(self.data[start : start + 6 * segment])
        result = self.get(start, length)
        self.assertEqual(result.here_bytes, 5 * segment)
        self.assertLess(self.fetched, 4 * segment + 2 * segment + TREES)
        self.path.unlink()
        self.part.write_bytes(self.data[start : start + length])
        self.assertEqual(self.get(start, length).here_bytes, 9 * segment)
        self.path.unlink()
        self.assertEqual(self.get(5, 10).here_bytes, 0)
        self.path.unlink()
        self.assertEqual(self.get(0, 0).size, 0)

    def test_a_huge_tree(self) -> None:
        """Of more segments than hashes are read for at a time; damage at both ends is found and mended."""
        params = Params(3, 10, 30)
        self.make(30 * 3000, params)
        spoilt = bytearray(self.data[: 30 * 2500])
        spoilt[0] ^= 1
        spoilt[30 * 2400] ^= 1
        self.part.write_bytes(spoilt)
        result = self.get()
        self.assertEqual(result.here_bytes, 30 * 2498)

    def test_checking_far_ahead_of_what_is_missing(self) -> None:
        """No server is asked for what can only be used after much checking; and then all comes."""
        self.patch(resume_decoder, "CHECK_AHEAD_BYTES", 3 * SEGMENT)
        self.part.write_bytes(self.data[:CUT])
        result = self.get()
        self.assertEqual(result.here_bytes, 27 * SEGMENT)
        self.assertLess(self.fetched, SIZE - CUT + 2 * SEGMENT + TREES)

    def test_servers_fail_meanwhile(self) -> None:
        """A damaged share, a dead server and a slow one are what they are to any get."""
        world = World(params=PARAMS, bytes_per_s=float(1 << 22))
        self.make(SIZE, world=world)
        ring = world.ring(self.file)
        ring[0].down = True
        ring[1].stream_limit = 200_000
        key = self.file.cap.storage_index, 2
        share = bytearray(ring[2].storage.shares[key])
        share[36 + 40 * (SEGMENT // 3)] ^= 1
        ring[2].storage.shares[key] = bytes(share)
        self.part.write_bytes(self.data[:CUT])
        result = self.get()
        self.assertEqual(result.here_bytes, 27 * SEGMENT)

    def test_interrupted_anywhere_and_gone_on_with(self) -> None:
        """After every event: cancel, run again, and all is there; what had come is not fetched again."""
        gone_on = 0
        steps = 1
        while True:
            self.make(SIZE, world=World(params=PARAMS, bytes_per_s=float(1 << 22)))
            started = self.world.grid.get(self.file.cap, self.path)
            for _ in range(steps):
                self.world.step()
            if started.called:
                break
            started.cancel()
            self.failureResultOf(started, CancelledError)
            self.world.settle()
            left = self.part.stat().st_size if self.part.exists() else 0
            result = self.get()
            self.assertEqual(result.found_bytes, left)
            self.assertEqual(result.here_bytes, left // SEGMENT * SEGMENT)
            gone_on += left > 0
            self.path.unlink()
            steps += 5
        self.assertGreater(gone_on, 5)


class RandomTests(ResumeTestCase):
    """Whatever is there, and whatever servers do: the right file, and nothing beside it."""

    def test_random_parts_and_faults(self) -> None:
        """Each from a seed, which a failure names."""
        for seed in range(60):
            self.play(seed)

    def play(self, seed: int) -> None:
        chance = random.Random(seed)
        segment = chance.choice((30, 999, 30_000, 1 << 20))
        size = chance.randrange(60, 40 * min(segment, 60_000))
        params = Params(chance.choice((1, 3)), 10, segment)
        rate = chance.choice((None, float(1 << 21)))
        memory = DownloadSettings(memory_bytes=chance.choice((100_000, 24 << 20)))
        self.make(size, params, World(params=params, bytes_per_s=rate, download=memory))
        ring = self.world.ring(self.file)
        start = chance.choice((0, 0, chance.randrange(size)))
        length = chance.choice((None, chance.randrange(size - start + 1)))
        wanted = self.data[start:] if length is None else self.data[start : start + length]
        there = bytearray(wanted[: chance.randrange(len(wanted) + 1)])
        if chance.random() < 0.3:
            there += bytes(chance.randrange(50_000))
        for _ in range(chance.choice((0, 0, 1, 2, 30))):
            if there:
                there[chance.randrange(len(there))] ^= 1
        if chance.random() < 0.2:
            there = bytearray(content(len(there), "another"))
        self.part.write_bytes(there)
        ring[0].down = chance.random() < 0.2
        ring[1].stream_limit = chance.choice((None, None, 100_000))
        if chance.random() < 0.3:
            key = self.file.cap.storage_index, 2
            share = bytearray(ring[2].storage.shares[key])
            share[chance.randrange(len(share))] ^= 1
            ring[2].storage.shares[key] = bytes(share)
        try:
            result = self.get(start, length)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        self.assertLessEqual(result.here_bytes, len(there), f"seed {seed}")
        self.assertEqual(
            self.told[-1:], [(len(wanted), len(wanted))] if wanted else [], f"seed {seed}"
        )
        self.path.unlink()


class PathTests(ResumeTestCase):
    """What may be at the path, and beside it."""

    def refused(self, words: str) -> None:
        started = self.world.grid.get(self.file.cap, self.path)
        error = self.failureResultOf(started, SinkError).value
        self.assertIn(words, str(error))

    def test_a_file_that_is_there(self) -> None:
        """It stays, unless it is to be replaced."""
        self.path.write_bytes(b"precious")
        self.refused("exists already")
        self.assertEqual(self.path.read_bytes(), b"precious")
        self.get(replace=True)

    def test_a_directory(self) -> None:
        """A file is to be named."""
        self.path.mkdir()
        self.refused("is a directory")

    def test_somebody_else_writes_to_it(self) -> None:
        """The second one says so, and the first one's part is as it was."""
        self.part.write_bytes(self.data[:CUT])
        with open(self.part, "r+b") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            self.refused("another process is writing")
            self.assertEqual(self.part.read_bytes(), self.data[:CUT])
        self.get()

    def test_a_failure_keeps_what_is_there(self) -> None:
        """Also what an earlier get has left, if this one gets nothing at all."""
        self.part.write_bytes(self.data[:CUT])
        for line in self.world.lines:
            line.down = True
        self.assertRaises(
            NotEnoughSharesError, self.world.run, self.world.grid.get(self.file.cap, self.path)
        )
        self.assertEqual(self.part.read_bytes(), self.data[:CUT])

    def test_a_failure_with_nothing_to_keep(self) -> None:
        """An empty part is of no use."""
        for line in self.world.lines:
            line.down = True
        self.assertRaises(
            NotEnoughSharesError, self.world.run, self.world.grid.get(self.file.cap, self.path)
        )
        self.assertEqual(os.listdir(self.directory), [])

    def test_a_full_disk(self) -> None:
        """One sentence; what was written stays for the next time."""

        def full(fd: int, pieces: list[memoryview], offset: int) -> int:
            if offset > 10 * SEGMENT:
                raise OSError(28, "No space left on device")
            return write(fd, pieces, offset)

        write = os.pwritev
        self.patch(os, "pwritev", full)
        with self.assertRaises(SinkError) as caught:
            self.world.run(self.world.grid.get(self.file.cap, self.path))
        self.assertIn("No space left", str(caught.exception))
        self.patch(os, "pwritev", write)
        result = self.get()
        self.assertGreaterEqual(result.here_bytes, 10 * SEGMENT)


class SegmentsHereTests(SynchronousTestCase):
    """Which segments may be there."""

    def here(self, start: int, end: int, found: int) -> PresentSegments:
        return PresentSegments(Params(3, 10, 30).geometry(1000), start, end, found)

    def test_whole_segments_only(self) -> None:
        """The last one of the file is whole where the file ends."""
        self.assertEqual(self.here(0, 1000, 1000).missing(0, 34), [])
        self.assertEqual(self.here(0, 1000, 999).missing(0, 34), [(33, 34)])
        self.assertEqual(self.here(0, 1000, 60).missing(0, 34), [(2, 34)])
        self.assertEqual(self.here(1, 1000, 60).missing(0, 34), [(0, 1), (2, 34)])
        self.assertEqual(self.here(1, 1000, 58).missing(0, 34), [(0, 34)])
        self.assertEqual(self.here(0, 75, 1000).missing(0, 3), [(2, 3)])
        self.assertFalse(self.here(31, 59, 28))

    def test_all_bad(self) -> None:
        """A few others are tried, and then all is forgotten."""
        here = self.here(0, 1000, 900)
        self.assertEqual(here.to_check(0), [0])
        self.assertFalse(here.checked(0, False))
        tries = here.to_check(1)
        self.assertGreater(len(tries), 3)
        self.assertTrue(all(0 < each < 30 for each in tries))
        for each in list(tries)[:-1]:
            self.assertFalse(here.checked(each, False))
        self.assertTrue(here.checked(tries[-1], False))
        self.assertFalse(here)
        self.assertEqual(here.missing(0, 34), [(0, 34)])
        self.assertFalse(here.checked(20, False), "one that was on its way")

    def test_one_good_is_enough(self) -> None:
        """Then each is checked in its turn."""
        here = self.here(0, 1000, 900)
        here.checked(0, False)
        here.checked(here.to_check(1)[-1], True)
        self.assertEqual(here.to_check(1), [1])
        self.assertEqual(here.missing(0, 30), [(0, 1)])
        self.assertEqual((here.good, here.bad, here.good_bytes), (1, 1, 30))
