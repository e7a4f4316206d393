"""Checking files, with and without reading their shares."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import ClientSecrets
from pipegrid.core.share_verifier import ShareVerifier
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transfer.check import Check
from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.results import CheckResult
from pipegrid.transfer.settings import DownloadSettings
from tests.transfer.world import RTT, Line, Told, World, content


class CheckTests(SynchronousTestCase):
    """What a check finds."""

    def make(self, size: int = 1000, world: World | None = None, shares: int = 10) -> None:
        self.world = world or World(download=DownloadSettings(silence_s=16.0))
        self.file = self.world.encoded(content(size))
        self.ring = self.world.ring(self.file)
        self.world.plant(self.file, {n: self.ring[n] for n in range(shares)})

    def check(self, verify: bool = False, **options: Any) -> CheckResult:
        result, self.took = self.world.timed(
            self.world.grid.check(self.file.cap, verify=verify, **options)
        )
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        return result

    def test_a_healthy_file(self) -> None:
        """One round trip; with a read cap or a verify cap."""
        for cap in (0, 1):
            self.make()
            given = (self.file.cap, self.file.cap.verifier())[cap]
            result, took = self.world.timed(self.world.grid.check(given))
            self.assertEqual(took, RTT)
            self.assertTrue(result.healthy and result.recoverable)
            self.assertEqual(result.cap, given)
            self.assertEqual(result.good_shares, {n: [self.ring[n].name] for n in range(10)})
            self.assertEqual((result.happiness, result.unreachable, result.corrupt), (10, [], []))
            self.assertEqual((result.required_shares, result.total_shares), (3, 10))

    def test_missing_shares(self) -> None:
        """Not healthy, but recoverable down to k."""
        for shares, recoverable in ((9, True), (3, True), (2, False), (0, False)):
            self.make(shares=shares)
            result = self.check()
            self.assertFalse(result.healthy)
            self.assertEqual(result.recoverable, recoverable)
            self.assertEqual(result.happiness, shares)

    def test_servers_that_cannot_be_asked(self) -> None:
        """Dead and silent ones are named; a silent one costs its time, not more."""
        self.make()
        self.ring[1].down = True
        self.ring[2].silent = {"*"}
        result = self.check()
        self.assertEqual(self.took, 16.0)
        self.assertEqual(result.unreachable, sorted([self.ring[1].name, self.ring[2].name]))
        self.assertEqual(set(result.good_shares), {0, *range(3, 10)})

    def test_several_copies(self) -> None:
        """All holders are named; happiness counts servers once."""
        self.make()
        self.world.plant(self.file, dict.fromkeys((1, 2), self.ring[0]))
        result = self.check()
        self.assertEqual(result.good_shares[1], sorted([self.ring[0].name, self.ring[1].name]))
        self.assertEqual(result.happiness, 10)
        self.assertTrue(result.healthy)

    def test_impossible_shares_are_ignored(self) -> None:
        """A share number beyond the last is none."""
        self.make()
        self.ring[0].lies = {200}
        self.assertEqual(set(self.check().good_shares), set(range(10)))

    def test_a_healthy_file_on_a_large_grid(self) -> None:
        """One round trip, and nobody is asked who need not be; verified, it takes another."""
        for verify in (False, True):
            self.make(world=World(1000))
            self.assertTrue(self.check(verify).healthy)
            self.assertEqual(self.took, (2 if verify else 1) * RTT)
            self.assertEqual(sum(line.count("list_shares") for line in self.world.lines), 10)

    def test_an_unhealthy_file_on_a_large_grid(self) -> None:
        """All are asked, in waves: 10, 170, 512, 308."""
        self.make(world=World(1000), shares=9)
        self.world.plant(self.file, {3: self.ring[999]})
        result = self.check()
        self.assertEqual(result.good_shares[3], sorted([self.ring[3].name, self.ring[999].name]))
        self.assertEqual(self.took, 4 * RTT)

    def test_a_healthy_file_in_unusual_places(self) -> None:
        """Found as soon as each share has a server of its own; a silent server is not waited for then."""
        self.make(world=World(1000), shares=0)
        self.world.plant(self.file, {n: self.ring[20 - n] for n in range(10)})
        self.ring[5].silent = {"*"}
        self.assertTrue(self.check().healthy)
        self.assertLessEqual(self.took, 4 * RTT)
        self.assertLessEqual(sum(line.count("list_shares") for line in self.world.lines), 180)

    def test_one_is_silent(self) -> None:
        """If all others had shares it has as long again, and a quarter of a second; then all are asked."""
        self.make(world=World(1000))
        self.ring[5].silent = {"*"}
        self.world.plant(self.file, {5: self.ring[15]})
        self.assertTrue(self.check().healthy)
        self.assertEqual(self.took, RTT + 0.25 + RTT)
        self.assertLessEqual(sum(line.count("list_shares") for line in self.world.lines), 180)

    def test_verifying_a_healthy_file(self) -> None:
        """Every share is read to its end, and nothing is wrong with any."""
        for size, params in ((1000, Params()), (300_000, Params(3, 10, 30_000))):
            self.make(size, World(params=params))
            seen = Told()
            result = self.check(True, progress=seen)
            self.assertTrue(result.healthy)
            self.assertEqual(seen, [(n, 10) for n in range(1, 11)])
            read = sum(line.delivered_bytes for line in self.world.lines)
            samples = 2 * 1000  # two UEBs
            self.assertLess(read, sum(map(len, self.file.shares)) + samples)

    def test_damage(self) -> None:
        """Any flipped bit is found, with server, share and place; the others are still good."""
        self.make(300_000, World(params=Params(3, 10, 30_000)))
        for number, section in enumerate(
            ("data", "crypttext_hash_tree", "block_hashes", "share_hashes", "uri_extension")
        ):
            key = self.file.cap.storage_index, number
            share = bytearray(self.file.shares[number])
            share[next(s.start for s in self.file.sections if s.name == section) + 40] ^= 1
            self.ring[number].storage.shares[key] = bytes(share)
        self.assertTrue(self.check().healthy, "without reading nothing can be found")
        result = self.check(True)
        self.assertFalse(result.healthy)
        self.assertTrue(result.recoverable)
        self.assertEqual(
            {(e.share_number, e.server) for e in result.corrupt},
            {(n, self.ring[n].name) for n in range(5)},
        )
        self.assertEqual(set(result.good_shares), set(range(5, 10)))
        self.assertEqual(result.happiness, 5)

    def test_a_truncated_share(self) -> None:
        """Its end is missing: it is corrupt."""
        self.make()
        key = self.file.cap.storage_index, 4
        self.ring[4].storage.shares[key] = self.file.shares[4][:-10]
        self.assertEqual([e.share_number for e in self.check(True).corrupt], [4])

    def test_a_share_that_is_only_claimed(self) -> None:
        """A server that lists what it has not is reachable, and has it not."""
        self.make(shares=9)
        self.ring[3].lies = {9}
        seen = Told()
        result = self.check(True, progress=seen)
        self.assertEqual((set(result.good_shares), result.unreachable), (set(range(9)), []))
        self.assertEqual(seen[-1], (10, 10))

    def test_servers_that_fail_while_they_are_read(self) -> None:
        """Dying or falling silent, they are unreachable, and the check goes on without them."""
        self.make()
        self.ring[3].stream_limit = 100
        self.ring[4].silent = {"stream"}
        result = self.check(True)
        self.assertEqual(result.unreachable, sorted([self.ring[3].name, self.ring[4].name]))
        self.assertEqual(set(result.good_shares), {0, 1, 2, 5, 6, 7, 8, 9})

    def test_servers_that_are_lost_for_a_moment(self) -> None:
        """On a line full of what is verified connections fail: they are tried once more at the end."""
        self.make()
        line = self.ring[3]
        line.stream_limit = 100
        lost = line.lost

        def lose() -> Any:
            line.stream_limit = None
            return lost()

        self.patch(line, "lost", lose)
        result = self.check(True)
        self.assertIsNone(line.stream_limit)
        self.assertEqual((result.unreachable, result.reasons), ([], {}))
        self.assertEqual(
            {n: len(homes) for n, homes in result.good_shares.items()}, dict.fromkeys(range(10), 1)
        )

    def test_servers_that_answer_everybody_else(self) -> None:
        """They are not waited for without end."""
        self.make()
        self.ring[3].silent, self.ring[3].for_others = {"*"}, True
        self.assertEqual(self.check(True).unreachable, [self.ring[3].name])
        self.assertLessEqual(self.took, 10 * 16.0 + 1)

    def test_a_slow_stream_is_not_silence(self) -> None:
        """As long as something comes now and then."""
        self.make(3_000_000)
        self.ring[0].bytes_per_s = 8192.0  # a chunk in 8 s, all in two minutes
        self.assertTrue(self.check(True).healthy)
        self.assertGreater(self.took, 100.0)

    def test_a_stream_that_brings_next_to_nothing(self) -> None:
        """A byte now and then is no silence, and would take hours: it is given up while others get on."""
        self.make()
        self.drip(self.ring[3])
        result = self.check(True)
        self.assertEqual(result.unreachable, [self.ring[3].name])
        self.assertEqual(set(result.good_shares), {0, 1, 2, *range(4, 10)})
        self.assertLessEqual(self.took, 2 * 16.0 + 1)
        self.assertRegex(result.reasons[self.ring[3].name], r" sent no more than 3 bytes in 16 s$")

    def test_a_slow_line_is_no_servers_fault(self) -> None:
        """All streams share it: as long as none is much faster, all are waited for."""
        self.make(300_000)
        for line in self.ring:
            line.bytes_per_s, line.chunk_bytes = 500.0, 1000
        self.assertTrue(self.check(True).healthy)
        self.assertGreater(self.took, 200.0)

    def drip(self, line: Line) -> None:
        """Have a server send a byte of a stream every eight seconds."""
        line.bytes_per_s, line.chunk_bytes = 0.125, 1

    def test_bugs(self) -> None:
        """An error that is no server's ends the check as it is."""
        self.make()
        self.ring[0].breaks["list_shares"] = RuntimeError("a bug")
        self.assertRaises(RuntimeError, self.check)
        self.make()

        def feed(_verifier: ShareVerifier, _data: bytes) -> None:
            raise ValueError("a bug")

        self.patch(ShareVerifier, "feed", feed)
        self.assertRaises(ValueError, self.check, True)

    def test_cancelling(self) -> None:
        """At any moment nothing is left behind, in particular no coroutine that never ran."""
        steps = 0
        while True:
            self.make(300_000, World(30, params=Params(3, 10, 30_000), bytes_per_s=float(1 << 20)))
            started = self.world.grid.check(self.file.cap, verify=True)
            for _ in range(3 * steps):
                self.world.step()
            if started.called:
                break
            started.cancel()
            self.failureResultOf(started, CancelledError)
            self.assertEqual(self.world.clock.getDelayedCalls(), [])
            self.world.settle()
            steps += 1
        self.assertGreater(steps, 3)
        gc.collect()
        self.assertEqual(self.flushWarnings(), [])
        self.assertEqual(self.flushLoggedErrors(), [])


class PendingWorkers(InlineWorkers):
    """Jobs that a test ends."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Deferred[Any]] = []

    def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Deferred[Any]:
        """Take a job; ends it at once, in failure, where workers have been stopped."""
        if self._stopped:
            return super().run(function)
        self.jobs.append(Deferred())
        return self.jobs[-1]


class GivenUpTests(SynchronousTestCase):
    """A check that is given up while a share is verified."""

    def test_workers_that_stop(self) -> None:
        """What a worker was at ends, and nothing follows, though more of the share had come."""
        workers = PendingWorkers()
        clock = Clock()
        cap = ChkCap(b"k" * 16, b"h" * 32, 3, 10, 1 << 24)
        check = Check(TransferContext(clock, workers, [], ClientSecrets(b"s" * 32)), cap, True)
        feeders: list[Any] = []

        def stream(
            index: bytes, number: int, start: int, length: int, feeder: Any
        ) -> Deferred[Any]:
            feeders.append(feeder)
            return Deferred()

        peer: Any = SimpleNamespace(server=SimpleNamespace(stream=stream), name="a")
        verifying = Deferred.fromCoroutine(check._verify_share(0, peer))
        for _ in range(2):
            feeders[0].write(bytes(1 << 22))
        verifying.cancel()
        self.failureResultOf(verifying, CancelledError)
        workers.stop()
        workers.jobs.pop().errback(CancelledError())
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])
        self.assertEqual((workers.jobs, clock.getDelayedCalls()), ([], []))
