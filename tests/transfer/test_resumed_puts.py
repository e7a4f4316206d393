"""A put that was cut off, and is run again: what it sends, and what it does not believe."""

from __future__ import annotations

from random import Random

from twisted.internet.defer import CancelledError, Deferred

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UnhappyError
from pipegrid.transfer.put import write_batches
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import UploadSettings
from tests.transfer.test_upload import UploadTestCase
from tests.transfer.world import RTT, Line, Told, World

SEGMENT = 30_000
BLOCK = SEGMENT // 3
SIZE = 900_000
WINDOW = 20_000
MESSAGE = BLOCK + 100
"""In this little world each block is a message; the first has the header, too."""


class ResumedTestCase(UploadTestCase):
    """A file of thirty segments, over lines on which a put of it takes some two seconds."""

    def setUp(self) -> None:
        self.patch(write_batches, "BATCH_BYTES", 8192)
        self.patch(write_batches, "UNKEPT_BATCH_BYTES", 100)

    def make_world(self, servers: int = 10, happy: int = 7, grace_s: float = 2.0) -> None:
        world = World(
            servers,
            params=Params(3, 10, SEGMENT),
            window_bytes=WINDOW,
            held_bytes=WINDOW,
            bytes_per_s=200_000.0,
            happy=happy,
            upload=UploadSettings(grace_s=grace_s),
        )
        self.make(SIZE, world)
        self.share_bytes = len(self.file.shares[0])

    def cut(self, part: float) -> None:
        """Put the file until so much of it is acknowledged; what is under way then arrives."""
        told = Told()
        started = self.world.grid.put(self.data, progress=told)
        while not told or told[-1][0] < part * told[-1][1]:
            self.assertTrue(self.world.step())
        started.cancel()
        self.failureResultOf(started, CancelledError)
        self.world.settle()
        self.world.grid = self.world.client()
        for line in self.world.lines:
            line.sent_bytes = 0
            line.calls.clear()

    def missing(self) -> dict[Line, int]:
        """Return what each server of the first ten of the ring lacks of its share."""
        index = self.file.cap.storage_index
        lacks = {}
        for number, line in enumerate(self.ring[:10]):
            upload = line.storage.uploads.get((index, number))
            there = upload.received.total if upload else len(line.shares(index).get(number, b""))
            lacks[line] = self.share_bytes - there
        return lacks

    def assert_only(self, missing: dict[Line, int]) -> None:
        """Every server was sent what was missing, and at most a window and a message beside it."""
        for line, lacked in missing.items():
            self.assertLessEqual(line.sent_bytes, lacked + WINDOW + 2 * MESSAGE, line)

    def rerun(self) -> None:
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual([len(line.storage.uploads) for line in self.world.lines], [0] * 10)


class MissingTests(ResumedTestCase):
    """Only what is missing is sent."""

    def test_cut_anywhere(self) -> None:
        """Whenever it was cut: what is missing, and a window a server."""
        for percent in (1, 10, 54, 90, 97):
            self.make_world()
            self.cut(percent / 100)
            missing = self.missing()
            self.assertLess(sum(missing.values()), 10 * self.share_bytes)
            self.rerun()
            self.assert_only(missing)

    def test_no_round_trip_more(self) -> None:
        """It takes as long as a fresh put of what is missing and a window would, and asks nobody anything."""
        for percent in (10, 30, 54, 80):
            self.make_world()
            self.cut(percent / 100)
            missing = max(self.missing().values())
            self.rerun()
            took_s = self.took
            for line in self.world.lines:
                self.assertEqual({name for _, name in line.calls}, {"allocate", "write"})
                self.assertEqual(line.count("allocate"), 1)
            self.make_world()
            fresh = 3 * (missing + WINDOW + MESSAGE)
            _, fresh_s = self.world.timed(self.world.grid.put(b"\1" * fresh))
            self.assertLessEqual(took_s, fresh_s, f"cut at {percent} %")

    def test_what_was_there_is_told(self) -> None:
        """The caller hears how much of the file servers had, as soon as they say so."""
        for percent in (10, 54, 90):
            self.make_world()
            self.cut(percent / 100)
            there = 10 * self.share_bytes - sum(self.missing().values())
            found = Told()
            self.world.run(self.world.grid.put(self.data, found=found))
            self.assertLessEqual(found[-1][0], there)
            self.assertGreaterEqual(found[-1][0], there - 10 * (WINDOW + 2 * MESSAGE), percent)

    def test_cut_again_and_again(self) -> None:
        """Each run goes on where the one before it was."""
        self.make_world()
        for percent in (20, 40, 60, 80):
            before = self.missing()
            self.cut(percent / 100)
            after = self.missing()
            for line in self.ring:
                self.assertLess(after[line], before[line])
        missing = self.missing()
        self.rerun()
        self.assert_only(missing)

    def test_the_window_is_free_for_what_is_missing(self) -> None:
        """What is not sent takes no room: bytes in flight end where they began."""
        self.make_world()
        self.cut(0.54)
        self.rerun()
        for peer in self.world.clients_peers:
            self.assertEqual((peer.pipeline.bytes_in_flight, peer.pipeline.bytes_held), (0, 0))
            peer.pipeline._check_invariants()

    def test_servers_with_holes(self) -> None:
        """Whatever an earlier run left: each server gets what it lacks, to the block."""
        random = Random(16)
        for seed in range(10):
            self.make_world()
            self.cut(0.01)
            index = self.file.cap.storage_index
            for number, line in enumerate(self.ring):
                upload = line.storage.uploads[index, number]
                for _ in range(random.randrange(5)):
                    begin = random.randrange(self.share_bytes)
                    end = min(self.share_bytes - 1, begin + random.randrange(200_000))
                    upload.data[begin:end] = self.file.shares[number][begin:end]
                    upload.received.add(begin, end)
            missing, holes = (
                self.missing(),
                {
                    line: len(line.storage.uploads[index, number].received)
                    for number, line in enumerate(self.ring)
                },
            )
            self.rerun()
            for line, lacked in missing.items():
                most = lacked + WINDOW + 2 * MESSAGE + 2 * BLOCK * holes[line]
                self.assertLessEqual(line.sent_bytes, most, f"seed {seed}, {line}")

    def test_only_the_last_byte_is_missing(self) -> None:
        """A window, and the trailer."""
        self.make_world()
        self.cut(0.01)
        for number, line in enumerate(self.ring):
            upload = line.storage.uploads[self.file.cap.storage_index, number]
            upload.data[:-1] = self.file.shares[number][:-1]
            upload.received.add(0, self.share_bytes - 1)
        self.rerun()
        trailer = self.share_bytes - 30 * BLOCK
        for line in self.world.lines:
            self.assertLessEqual(line.sent_bytes, WINDOW + 2 * MESSAGE + trailer)

    def test_servers_that_know_nothing(self) -> None:
        """Where nothing is left of it, that share is sent whole; the others are not."""
        self.make_world()
        self.cut(0.54)
        for line in self.ring[:3]:
            line.storage.uploads.clear()
        missing = self.missing()
        self.assertEqual(missing[self.ring[0]], self.share_bytes)
        self.rerun()
        self.assert_only(missing)

    def test_shares_that_an_earlier_run_put_elsewhere(self) -> None:
        """A server took part late in the cut run, in place of another; that has come back."""
        self.make_world(servers=11)
        self.ring[4].down = True
        self.cut(0.54)
        self.ring[4].down = False
        missing = self.missing()
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assert_only(missing)

    def test_a_share_with_a_late_home(self) -> None:
        """One that has to be coded again for its new server is not sent again either, where it is there."""
        self.make_world(servers=11)
        self.ring[4].storage.capacity_bytes = 0
        self.cut(0.54)
        eleventh = self.ring[10]
        [upload] = eleventh.storage.uploads.values()
        lacked = self.share_bytes - upload.received.total
        self.assertLess(lacked, self.share_bytes)
        self.put()
        self.assertLessEqual(eleventh.sent_bytes, lacked + WINDOW + 2 * MESSAGE)

    def test_connections_that_are_lost_meanwhile(self) -> None:
        """What was let go of and lost is sent again, and no more than that beside what was missing."""
        for seed in range(10):
            random = Random(seed)
            self.make_world()
            for line in self.world.lines:
                line.lets_go = True
            self.cut(0.3)
            missing = self.missing()
            started = self.world.grid.put(self.data)
            losses = 0
            at_s = self.world.clock.seconds()
            for _ in range(8):
                at_s += random.expovariate(8)
                while self.world.clock.seconds() < at_s and self.world.step():
                    pass
                losses += 1
                random.choice(self.ring).lose()
            self.result = self.world.run(started)
            self.assert_true()
            sent = sum(line.sent_bytes for line in self.world.lines)
            most = sum(missing.values()) + (10 + 2 * losses) * (WINDOW + 2 * MESSAGE)
            self.assertLessEqual(sent, most, f"seed {seed}")


class FailedTests(ResumedTestCase):
    """A put that failed because servers went away goes on when they are back."""

    def test_servers_that_go_away_in_the_middle(self) -> None:
        """Those that stayed keep what they have, and so do they."""
        self.make_world()
        told = Told()
        started = self.world.grid.put(self.data, progress=told)
        while not told or told[-1][0] < 0.5 * told[-1][1]:
            self.assertTrue(self.world.step())
        for line in self.ring[:4]:
            line.down = True
        with self.assertRaises(UnhappyError):
            self.world.run(started)
        self.world.settle()
        for line in self.world.lines:
            line.down = False
            line.sent_bytes = 0
        self.world.grid = self.world.client()
        missing = self.missing()
        self.assertLess(sum(missing.values()), 6 * self.share_bytes)
        self.rerun()
        self.assert_only(missing)

    def test_servers_that_were_never_there(self) -> None:
        """A rerun would fail as well: what the others have of it is given up."""
        self.make_world()
        for line in self.ring[:4]:
            line.down = True
        with self.assertRaises(UnhappyError):
            self.world.run(self.world.grid.put(self.data))
        self.assertEqual([line.storage.uploads for line in self.world.lines], [{}] * 10)


class ProgressTests(ResumedTestCase):
    """Progress begins with what is there."""

    def test_what_is_there_counts_at_once(self) -> None:
        """After a round trip it is where it was, and then it goes on to the end."""
        self.make_world()
        self.cut(0.54)
        there = 10 * self.share_bytes - sum(self.missing().values())
        began_s = self.world.clock.seconds()
        told: list[tuple[float, int, int]] = []
        started = self.world.grid.put(
            self.data,
            progress=lambda done, total: told.append((self.world.clock.seconds(), done, total)),
        )
        self.world.run(started)
        window_s = (WINDOW + 2 * MESSAGE) / 200_000
        in_time = [done for at, done, _ in told if at <= began_s + RTT + window_s]
        self.assertGreaterEqual(in_time[-1], there)
        self.assertEqual([done for _, done, _ in told], sorted({done for _, done, _ in told}))
        self.assertEqual(told[-1][1:], (10 * self.share_bytes,) * 2)

    def test_many_files(self) -> None:
        """``put_many`` goes on with each of them."""
        self.make_world()
        self.cut(0.54)
        missing = self.missing()
        small = b"another file, which was not cut off"
        outcomes = self.world.run(self.world.grid.put_many([self.data, small * 10]))
        first = outcomes[0]
        assert isinstance(first, PutResult)
        self.assertEqual(first.cap, self.file.cap)
        for line, lacked in missing.items():
            self.assertLessEqual(line.sent_bytes, lacked + WINDOW + 2 * MESSAGE + 1000)


class RepairTests(ResumedTestCase):
    """An interrupted repair goes on when it is run again."""

    def test_only_what_is_missing_is_sent(self) -> None:
        """It sends a header first, and hears what is there before anything else leaves."""
        self.make_world()
        whole = dict(enumerate(self.ring[:4]))
        self.world.plant(self.file, whole)
        told = Told()
        started = self.world.grid.repair(self.file.cap, progress=told)
        while not told or told[-1][0] < 0.54 * told[-1][1]:
            self.assertTrue(self.world.step())
        started.addErrback(lambda _: None)
        started.cancel()
        self.world.settle()
        self.world.grid = self.world.client()
        index = self.file.cap.storage_index
        missing = {}
        for number, line in enumerate(self.ring):
            if number not in whole:
                upload = line.storage.uploads[index, number]
                missing[line] = self.share_bytes - upload.received.total
                self.assertLess(missing[line], 0.6 * self.share_bytes)
            line.sent_bytes = 0
        again = Told()
        result = self.world.run(self.world.grid.repair(self.file.cap, progress=again))
        self.assertTrue(result.whole)
        self.assert_bytes_right(self.file)
        for line, lacked in missing.items():
            self.assertLessEqual(line.sent_bytes, lacked + MESSAGE + BLOCK)
        done, total = again[1]
        self.assertGreaterEqual(done, 0.3 * total, "what is there counts")
        self.assertEqual(again[-1], (total, total))


class FoolscapTests(ResumedTestCase):
    """Where it cannot be done, that is said."""

    def test_servers_that_forget(self) -> None:
        """Whoever interrupts a put hears which part of it is lost; whoever has only others hears nothing."""
        self.make_world()
        grid = self.world.grid
        self.cut(0.2)
        self.assertEqual(grid.warnings, ())
        for peer in self.world.clients_peers[:4]:
            peer.protocol = "foolscap"
        grid = self.world.grid
        self.cut(0.5)
        [warning] = grid.warnings
        self.assertIn("starts again on 4 of 10 servers: they use Foolscap", warning)


class LiarTests(ResumedTestCase):
    """A server's word decides what is sent to it, and never what counts as stored."""

    def lied(self, *required: tuple[int, int]) -> None:
        """Put a file on ten servers, three of which say that they still need only this."""
        self.make_world(grace_s=60)  # what was passed over comes when the others have all
        for line in self.ring[:3]:
            line.required = required
        started = self.world.grid.put(self.data)
        self.result = self.world.run(started)
        self.assert_nothing_left()
        self.assert_true()
        for line in self.ring[:3]:
            self.assertLessEqual(line.sent_bytes, 2 * (self.share_bytes + WINDOW + MESSAGE))

    def test_it_says_that_it_has_all_but_the_end(self) -> None:
        """Its share is not complete then: the list is asked, and all of it is sent."""
        self.lied((self.share_bytes_of() - 1, self.share_bytes_of()))
        self.assertEqual(self.result.happiness, 10)
        for line in self.ring[:3]:
            self.assertGreaterEqual(line.count("list_shares"), 1)
            self.assertLessEqual(line.sent_bytes, self.share_bytes + WINDOW + 2 * MESSAGE)
            self.assertEqual(line.count("allocate"), 1)

    def test_it_says_that_it_has_all_but_the_beginning(self) -> None:
        """The same, with blocks and trailer."""
        self.lied((0, 1))
        self.assertEqual(self.result.happiness, 10)

    def test_it_talks_nonsense(self) -> None:
        """All is sent, and all is well."""
        many = tuple((at, at + 1) for at in range(0, 8192, 2))
        for required in ((), ((1 << 60, 1 << 61),), ((0, 1 << 63), (5, 1 << 62)), many):
            self.lied(*required)
            self.assertEqual(self.result.happiness, 10)

    def test_it_lies_for_ever(self) -> None:
        """One that says it has everything, and takes nothing, is given up; happiness says the rest."""
        self.make_world(happy=8, grace_s=60)
        for line in self.ring[:3]:
            line.required = ((self.share_bytes - 1, self.share_bytes),)
            line.discards = True
        with self.assertRaises(UnhappyError):
            self.world.run(self.world.grid.put(self.data))
        for line in self.ring[:3]:
            self.assertLessEqual(line.sent_bytes, 3 * (self.share_bytes + WINDOW + 2 * MESSAGE))
            self.assertEqual(line.storage.uploads, {})

    def share_bytes_of(self) -> int:
        self.make_world()
        return self.share_bytes


class ConflictTests(ResumedTestCase):
    """What lies on the server is not what is sent."""

    def spoil(self, lines: list[Line], at: int = 5) -> None:
        for line in lines:
            for upload in line.storage.uploads.values():
                upload.data[at] ^= 1

    def test_damaged_remains(self) -> None:
        """The server forgets them, and gets the share anew; the others what they miss."""
        self.make_world()
        self.cut(0.54)
        self.spoil(self.ring[:2])
        missing = self.missing()
        self.rerun()
        for line in self.ring[:2]:
            self.assertEqual((line.count("abort"), line.count("allocate")), (1, 2))
            del missing[line]
        self.assert_only(missing)

    def test_a_server_that_always_says_so(self) -> None:
        """It is tried twice, and the share goes elsewhere."""
        self.make_world(servers=11)
        self.ring[3].conflicts = True
        self.put()
        self.assertEqual(self.result.happiness, 10)
        self.assertLessEqual(self.ring[3].count("allocate"), 2)
        self.assertEqual(self.ring[3].storage.uploads, {})

    def test_all_servers_have_damaged_remains(self) -> None:
        """Even then the put ends well."""
        self.make_world()
        self.cut(0.54)
        self.spoil(self.world.lines)
        self.rerun()


class TwinTests(ResumedTestCase):
    """Two of one client put the same file; the second begins when the first has half of it there."""

    def test_both_end_well(self) -> None:
        """What one has sent, the other need not."""
        self.make_world()
        told = Told()
        first: Deferred[PutResult] = self.world.grid.put(self.data, progress=told)
        while not told or told[-1][0] < 0.5 * told[-1][1]:
            self.world.step()
        second = self.world.client().put(self.data)
        for outcome in (self.world.run(first), self.world.run(second)):
            self.assertEqual(outcome.cap, self.file.cap)
            self.assertGreaterEqual(outcome.happiness, 7)
        self.assertEqual(self.world.happiness(self.file.cap.storage_index), 10)
        sent = sum(line.sent_bytes for line in self.world.lines)
        self.assertLess(sent, 17 * self.share_bytes)
