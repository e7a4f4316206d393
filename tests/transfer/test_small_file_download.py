"""Small files among many others: whole shares, and what happens when some are not there."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.segment_decoding import SMALL_FILE_BYTES
from pipegrid.disk.atomic_write import part_path
from pipegrid.errors import NotEnoughSharesError
from pipegrid.transfer.get import small_file_download
from pipegrid.transfer.get.get_history import MANY
from pipegrid.transfer.results import GetResult
from pipegrid.transfer.settings import DownloadSettings
from tests.core.simple_encoder import Encoded
from tests.transfer.world import RTT, Line, Told, World, content

FILES = 30
SIZE = 900


class SmallFilesTestCase(SynchronousTestCase):
    """A client that has fetched enough files to expect shares where they should be."""

    def make(self, world: World | None = None, size: int = SIZE) -> None:
        self.world = world or World()
        self.size = size
        self.files = [self.world.encoded(content(size, seed)) for seed in range(FILES)]
        for file in self.files:
            self.world.plant(file)
        self.get_all()
        for line in self.world.lines:
            line.calls.clear()

    def get_all(self) -> tuple[list[GetResult], float]:
        """Fetch all at once; returns the results, and how long it took."""
        sinks = [BytesIO() for _ in self.files]
        gets = [
            self.world.grid.get(file.cap, sink)
            for file, sink in zip(self.files, sinks, strict=True)
        ]
        results, took_s = self.world.timed(gatherResults(gets))
        for seed, sink in enumerate(sinks):
            self.assertEqual(sink.getvalue(), content(self.size, seed))
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        self.assertEqual(self.world.grid._earlier.guesses._running, 0)
        return results, took_s

    def count(self, operation: str) -> int:
        return sum(line.count(operation) for line in self.world.lines)

    def home(self, file: Encoded, number: int) -> Line:
        return self.world.ring(file)[number]

    def spoil(self, file: Encoded, number: int, offset: int) -> None:
        """Flip a bit of a share."""
        key = file.cap.storage_index, number
        shares = self.home(file, number).storage.shares
        damaged = bytearray(shares[key])
        damaged[offset] ^= 1
        shares[key] = bytes(damaged)


class DirectTests(SmallFilesTestCase):
    """Everything is where it should be."""

    def test_requests(self) -> None:
        """One round trip; k + 1 requests for a file, and lists for the first few files only."""
        self.make()
        results, took_s = self.get_all()
        self.assertEqual(took_s, RTT)
        self.assertEqual(self.count("list_shares"), 4 * MANY)
        self.assertEqual(self.count("read"), 4 * FILES)
        for result in results[MANY:]:
            self.assertEqual(len(result.shares_used), 3)
            self.assertEqual((result.size, result.elapsed_s), (SIZE, RTT))

    def test_largest(self) -> None:
        """Files as large as this path takes, and one byte larger."""
        for size in (SMALL_FILE_BYTES, SMALL_FILE_BYTES + 1):
            self.make(size=size)
            self.assertEqual(self.get_all()[1], RTT)

    def test_sinks(self) -> None:
        """Files with a name, over an unfinished one, and progress."""
        self.make()
        directory = Path(self.mktemp())
        directory.mkdir()
        paths = [directory / str(number) for number in range(FILES)]
        told = [Told() for _ in paths]
        Path(part_path(str(paths[-1]))).write_bytes(b"?" * 5000)
        gets = [
            self.world.grid.get(file.cap, path, progress=each)
            for file, path, each in zip(self.files, paths, told, strict=True)
        ]
        self.world.run(gatherResults(gets))
        for seed, path in enumerate(paths):
            self.assertEqual(path.read_bytes(), content(SIZE, seed))
            self.assertEqual(told[seed][-1], (SIZE, SIZE))
        self.assertEqual(len(list(directory.iterdir())), FILES)

    def test_segments_that_are_too_large(self) -> None:
        """The limit of the settings holds here too."""
        self.make(World(download=DownloadSettings(max_segment_bytes=SIZE)))
        self.assertEqual(self.get_all()[1], RTT)

    def test_cancelled(self) -> None:
        """Nothing is left."""
        self.make()
        gets = [self.world.grid.read(file.cap) for file in self.files]
        self.world.step()
        for each in gets:
            each.cancel()
            self.failureResultOf(each, CancelledError)
        self.world.settle()
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        self.assertEqual(self.world.grid._earlier.guesses._running, 0)

    def test_a_mistake(self) -> None:
        """An exception that is no server's error ends the get, and nothing else."""
        self.make()
        gets = [self.world.grid.read(file.cap) for file in self.files[:MANY]]
        line = self.home(self.files[-1], 0)

        def read(*_: object) -> Deferred[bytes]:
            failed: Deferred[bytes] = Deferred()
            failed.errback(ZeroDivisionError())
            return failed

        self.patch(line, "read", read)
        broken = self.world.grid.read(self.files[-1].cap)
        del line.__dict__["read"]
        self.failureResultOf(broken, ZeroDivisionError)
        self.world.run(gatherResults(gets))


class HedgeTests(SmallFilesTestCase):
    """Servers that are late."""

    def silence(self, file: Encoded, numbers: tuple[int, ...]) -> None:
        """The servers that should have these shares answer nothing any more."""
        for number in numbers:
            self.home(file, number).silent = {"*"}

    def get_one(self, file: Encoded) -> tuple[bytes, float]:
        """Fetch a file of a tree."""
        with self.world.grid.reading_a_tree():
            data, took_s = self.world.timed(self.world.grid.read(file.cap))
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        return data, took_s

    def reads(self, file: Encoded) -> list[int]:
        """Return how many reads came to the server of each share and were noticed there."""
        return [self.home(file, number).count("read") for number in range(10)]

    def test_one_late_server(self) -> None:
        """The next two shares are asked for, without lists: one is missing, and one more is for safety."""
        self.make()
        self.silence(self.files[0], (1,))
        data, took_s = self.get_one(self.files[0])
        self.assertEqual(data, content(SIZE, 0))
        self.assertAlmostEqual(took_s, 1.0 + RTT, places=2)
        self.assertEqual(self.count("list_shares"), 0)
        self.assertEqual(self.reads(self.files[0]), [1, 0, 1, 1, 1, 0, 0, 0, 0, 0])
        self.assertTrue(all(self.world.grid._earlier.guesses._right))

    def test_a_tree(self) -> None:
        """Its files are read without a share too many."""
        self.make()
        self.assertEqual(self.get_one(self.files[0]), (content(SIZE, 0), RTT))
        self.assertEqual(self.reads(self.files[0]), [1] * 3 + [0] * 7)

    def test_a_slow_server(self) -> None:
        """In a tree it is skipped when it has not answered several reads and the next server has."""
        self.patch(small_file_download, "BUSY_READS", 4)
        self.make()
        slow = self.home(self.files[0], 1)
        slow.late["read"] = 50.0
        took_s: list[float] = []
        clock = self.world.clock
        with self.world.grid.reading_a_tree():
            for number in range(8):
                began_s = clock.seconds()

                def note(data: bytes, began_s: float = began_s) -> None:
                    self.assertEqual(data, content(SIZE, 0))
                    took_s.append(clock.seconds() - began_s)

                reading = self.world.grid.read(self.files[0].cap).addCallback(note)
                while clock.seconds() < began_s + RTT:
                    self.world.step()
                self.assertEqual(bool(took_s), number >= 5)
            self.assertEqual(took_s, [RTT] * 3)
            self.assertEqual(slow.count("read"), 5)
            while len(took_s) < 8:
                self.world.step()
        self.successResultOf(reading)
        self.assertLessEqual(max(took_s), 1.0 + 2 * RTT)
        self.assertEqual(self.count("list_shares"), 0)

    def test_servers_that_cannot_be_reached(self) -> None:
        """For each of them the next one is asked, without lists and within a round trip."""
        self.make()
        for number in (0, 2, 3):
            self.home(self.files[0], number).down = True
        data, took_s = self.get_one(self.files[0])
        self.assertEqual(data, content(SIZE, 0))
        self.assertLessEqual(took_s, 3 * RTT)
        self.assertEqual(self.count("list_shares"), 0)
        self.assertEqual(
            [self.reads(self.files[0])[number] for number in (1, 4, 5, 6)], [1, 1, 1, 0]
        )

    def test_too_few_servers(self) -> None:
        """If all have been asked, a ``Download`` says what is wrong."""
        self.make()
        for number in range(8):
            self.home(self.files[0], number).down = True
        with self.world.grid.reading_a_tree():
            reading = self.world.grid.read(self.files[0].cap)
            with self.assertRaises(NotEnoughSharesError):
                self.world.run(reading)
        self.assertEqual(self.world.grid._earlier.guesses._running, 0)

    def test_late_hedges(self) -> None:
        """If those are late, too, a ``Download`` asks all servers: hedges are asked for once."""
        self.make()
        self.silence(self.files[0], (0, 1, 2, 4, 5, 6))
        data, took_s = self.get_one(self.files[0])
        self.assertEqual(data, content(SIZE, 0))
        self.assertLessEqual(took_s, 5.0 + 5 * RTT)
        self.assertGreater(self.count("list_shares"), 0)

    def test_late_and_lying(self) -> None:
        """Two servers are late, and a hedge brings a wrong share: the right bytes come, the liar is named."""
        self.make()
        self.silence(self.files[0], (0, 2))
        for number in (3, 4):
            self.spoil(self.files[0], number, 100)
        sink = BytesIO()
        with self.world.grid.reading_a_tree():
            result = self.world.run(self.world.grid.get(self.files[0].cap, sink))
        self.assertEqual(sink.getvalue(), content(SIZE, 0))
        self.assertTrue({error.share_number for error in result.corrupt} <= {3, 4})
        self.assertTrue(result.corrupt)

    def test_cancelled_while_hedging(self) -> None:
        """Nothing is left, and nothing more is asked."""
        self.make()
        self.silence(self.files[0], (0, 1, 3, 5, 6))
        with self.world.grid.reading_a_tree():
            getting = self.world.grid.read(self.files[0].cap)
            while self.count("read") < 2:
                self.world.step()
        getting.cancel()
        self.failureResultOf(getting, CancelledError)
        self.world.settle()
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        self.assertEqual(self.world.grid._earlier.guesses._running, 0)
        self.assertEqual(self.count("read"), 2)


class FallbackTests(SmallFilesTestCase):
    """What a ``Download`` must do."""

    def test_one_server_down(self) -> None:
        """One share too many was asked for, so nothing is lost."""
        self.make()
        self.world.lines[3].down = True
        self.assertEqual(self.get_all()[1], RTT)

    def test_servers_down(self) -> None:
        """Other shares are found."""
        self.make()
        for line in self.world.lines[:4]:
            line.down = True
        self.assertLessEqual(self.get_all()[1], 6 * RTT)

    def test_silent_servers(self) -> None:
        """After the time for hedging, others are asked."""
        self.make()
        for line in self.world.lines[:3]:
            line.silent = {"*"}
        self.assertLessEqual(self.get_all()[1], 2.0 + 5 * RTT)

    def test_a_server_that_answers_others(self) -> None:
        """It is not silent, but one request cannot wait forever."""
        self.make()
        for line in self.world.lines[:3]:
            line.silent = {"read"}
        self.assertLessEqual(self.get_all()[1], 20.0)

    def test_missing_shares(self) -> None:
        """They are found elsewhere; and later files ask for lists."""
        self.make()
        for file in self.files:
            ring = self.world.ring(file)
            for line in ring:
                line.storage.shares = {
                    key: share
                    for key, share in line.storage.shares.items()
                    if key[0] != file.cap.storage_index
                }
            self.world.plant(file, {n: ring[(n + 5) % 10] for n in range(10)})
        self.get_all()
        self.assertTrue(self.world.grid._earlier.guesses.needs_lists)

    def test_damage(self) -> None:
        """The file comes from other shares, and the damage is named and reported."""
        self.make()
        for number in (0, 1, 2):
            self.spoil(self.files[-1], number, 100)
        results, _ = self.get_all()
        damaged = {error.share_number for error in results[-1].corrupt}
        self.assertTrue(damaged)
        self.assertTrue(damaged <= {0, 1, 2})
        self.world.settle()
        self.assertGreater(self.count("advise_corrupt_share"), 0)

    def test_short_and_long_answers(self) -> None:
        """A share that was cut off, and one with bytes behind its end."""
        self.make()
        for file, change in (
            (self.files[-1], lambda x: x[:50]),
            (self.files[-2], lambda x: x + b"?" * 9),
        ):
            for number in range(3):
                shares = self.home(file, number).storage.shares
                key = file.cap.storage_index, number
                shares[key] = change(shares[key])
        self.get_all()
