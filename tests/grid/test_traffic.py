"""What puts and gets report of their traffic: the bytes that passed, of each server, and when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap
from pipegrid.core.decoder import Decoder
from pipegrid.errors import UsageError
from pipegrid.transfer.get import download, share_downloads
from pipegrid.transfer.results import Traffic
from pipegrid.wire.storage_messages import ServerIdentity
from tests.transport.gbs_world import GbsWorld, make_grid

LATENCY_S = 0.01
SMALL, MIDDLE, LARGE = 1000, 300_000, 6_000_000


def content(size: int) -> bytes:
    """Return bytes that are the same each time."""
    return random.Random(size).randbytes(size)


class TrafficTests(SynchronousTestCase):
    """Ten servers in virtual time."""

    def setUp(self) -> None:
        self.world = GbsWorld(Path(self.mktemp()), 10, latency_s=LATENCY_S)
        self.addCleanup(self.world.close)
        self.grid = make_grid(self.world)
        self.addCleanup(lambda: self.world.run(self.grid.close()))
        self.noted: list[tuple[str, float, float, int]] = []

    def note(self, server: ServerIdentity, began_s: float, ended_s: float, size: int) -> None:
        """Note a burst."""
        self.noted.append((server.nickname, began_s, ended_s, size))

    def sizes(self) -> Counter[str]:
        """Return how many bytes of each server were reported."""
        found: Counter[str] = Counter()
        for name, _, _, size in self.noted:
            found[name] += size
        return found

    def check_times(self, since_s: float) -> None:
        """Fail unless all bursts lie between then and now, and end in order."""
        now_s = self.world.clock.seconds()
        for _, began_s, ended_s, size in self.noted:
            self.assertTrue(since_s <= began_s <= ended_s <= now_s, (began_s, ended_s))
            self.assertGreater(size, 0)
        ends = [ended_s for _, _, ended_s, _ in self.noted]
        self.assertEqual(ends, sorted(ends))

    def test_a_put(self) -> None:
        """The bytes of each server add up to its shares: small files, and those in many messages."""
        for size in (SMALL, MIDDLE, LARGE):
            self.noted.clear()
            since_s = self.world.clock.seconds()
            result = self.world.run(self.grid.put(content(size), traffic=self.note))
            placed = Counter(result.shares_placed.values())
            self.assertEqual(
                self.sizes(), {name: n * result.share_bytes for name, n in placed.items()}
            )
            self.check_times(since_s)
            first_s = min(ended_s - began_s for _, began_s, ended_s, _ in self.noted)
            self.assertGreaterEqual(first_s, 2 * LATENCY_S * 0.99)
        self.assertGreater(len(self.noted), 20)

    def test_while_it_runs(self) -> None:
        """Bursts are reported as they end, not with the put."""
        world = GbsWorld(Path(self.mktemp()), 10, latency_s=LATENCY_S, bytes_per_s=2_000_000)
        self.addCleanup(world.close)
        grid = make_grid(world)
        self.addCleanup(lambda: world.run(grid.close()))
        putting = grid.put(content(LARGE), traffic=self.note)
        putting.addErrback(lambda failure: failure.trap(CancelledError))
        for _ in range(1000):
            if len(self.noted) >= 12:
                break
            world.clock.advance(0.01)
        self.assertGreaterEqual(len(self.noted), 12)
        self.assertFalse(putting.called)
        putting.cancel()

    def test_a_put_that_is_handed_over(self) -> None:
        """A server that is gone costs another request: shares that were stored count once each."""
        for lost in ([3], [0, 9]):
            for number in lost:
                self.world.servers[number].host.crash()
            self.noted.clear()
            data = content(SMALL + len(lost))
            result = self.world.run(self.grid.put(data, traffic=self.note))
            self.assertGreaterEqual(len(result.shares_placed), 10 - len(lost))
            placed = Counter(result.shares_placed.values())
            self.assertEqual(
                self.sizes(), {name: n * result.share_bytes for name, n in placed.items()}
            )
            for number in lost:
                self.world.servers[number].host.restart()

    def test_a_put_of_what_is_there(self) -> None:
        """No server takes anything, though each gets a small file together with the question for it."""
        for size in (SMALL, LARGE):
            self.world.run(self.grid.put(content(size)))
            result = self.world.run(self.grid.put(content(size), traffic=self.note))
            self.assertEqual((result.shares_placed, self.sizes()), ({}, {}))

    def transfers(self, traffic: Traffic) -> list[Callable[[], Deferred[Any]]]:
        """Return what begins a transfer of each kind, all of which report to this function."""
        small, large = (self.world.run(self.grid.put(content(size))).cap for size in (SMALL, LARGE))
        self.read_directly(small)
        return [
            partial(self.grid.read, small, traffic=traffic),
            partial(self.grid.read, large, traffic=traffic),
            partial(self.grid.put, content(SMALL), random_key=True, traffic=traffic),
            partial(self.grid.put, content(LARGE), random_key=True, traffic=traffic),
        ]

    def failure_of(self, running: Deferred[Any]) -> Failure:
        """Return how a transfer fails."""
        failures: list[Failure] = []
        self.world.run(running.addErrback(failures.append))
        [failure] = failures
        return failure

    def test_giving_up_in_a_report(self) -> None:
        """Whoever is told may cancel then and there, at any burst, and is told nothing more."""
        running: list[Deferred[Any]] = []

        def stop(*told: Any) -> None:
            self.note(*told)
            if len(self.noted) == which:
                running[-1].cancel()

        for begin in self.transfers(stop):
            for which in range(1, 9):
                self.noted.clear()
                failures: list[Failure] = []
                with self.grid.reading_a_tree():
                    running.append(begin())
                    self.world.run(running[-1].addErrback(failures.append))
                self.world.clock.advance(10)
                self.assertLessEqual(len(self.noted), which)
                expected = [CancelledError] if len(self.noted) == which else []
                self.assertEqual([each.type for each in failures], expected)

    def test_a_report_that_fails(self) -> None:
        """So does the transfer, at once, with that error."""

        class Wrong(Exception):
            pass

        def fail(*_: object) -> None:
            raise Wrong

        for begin in self.transfers(fail):
            since_s = self.world.clock.seconds()
            with self.grid.reading_a_tree():
                self.failure_of(begin()).trap(Wrong)
            self.assertLess(self.world.clock.seconds() - since_s, 1)

    def count_decoded(self) -> Counter[int]:
        """Return what counts the bytes that decoders get from now on, by share."""
        received, counts = Decoder.received, Counter[int]()

        def count(decoder: Decoder, number: int, offset: int, data: bytes) -> None:
            counts[number] += len(data)
            received(decoder, number, offset, data)

        self.patch(Decoder, "received", count)
        return counts

    def test_a_get(self) -> None:
        """The bytes are those that the decoder got: spans, streams, and ranges of a file."""
        counts = self.count_decoded()
        for size, start in ((MIDDLE, 0), (LARGE, 0), (LARGE, 2_500_000)):
            result = self.world.run(self.grid.put(content(size)))
            homes = result.shares_placed or {n: p[0] for n, p in result.shares_found.items()}
            self.noted.clear()
            counts.clear()
            since_s, into = self.world.clock.seconds(), BytesIO()
            self.world.run(self.grid.get(result.cap, into, start=start, traffic=self.note))
            self.assertEqual(into.getvalue(), content(size)[start:])
            self.assertEqual(self.sizes(), {homes[number]: n for number, n in counts.items()})
            self.assertGreaterEqual(sum(counts.values()), size - start)
            self.check_times(since_s)

    def read_directly(self, cap: Cap) -> None:
        """Read a small file as one of a tree, of which others were found before."""
        with self.grid.reading_a_tree():
            reading = self.grid.read(cap, traffic=self.note)
            self.assertEqual(self.world.run(reading), content(SMALL))

    def test_a_get_of_a_small_file(self) -> None:
        """On the direct path, a burst for each share that came before the file was complete."""
        result = self.world.run(self.grid.put(content(SMALL)))
        self.read_directly(result.cap)
        self.noted.clear()
        since_s = self.world.clock.seconds()
        self.patch(download, "ShareReaders", None)
        self.read_directly(result.cap)
        self.assertEqual([size for *_, size in self.noted], [result.share_bytes] * 3)
        self.assertEqual(len(self.sizes()), 3)
        self.check_times(since_s)

    def test_a_get_that_takes_the_long_path(self) -> None:
        """If a share is missing, what came before that was known counts as well."""
        result = self.world.run(self.grid.put(content(SMALL)))
        self.read_directly(result.cap)
        self.noted.clear()
        for server in self.world.servers:
            if server.name == result.shares_placed[1]:
                [share] = server.root.glob("shares/*/*/1")
                share.unlink()
        counts = self.count_decoded()
        self.read_directly(result.cap)
        self.assertGreaterEqual(sum(counts.values()), SMALL)
        self.assertGreater(sum(self.sizes().values()), sum(counts.values()))
        self.assertNotIn(result.shares_placed[1], self.sizes())

    def test_it_is_a_function(self) -> None:
        """Anything else is refused at once."""
        wrong: Callable[..., None] = "print"  # type: ignore[assignment]
        failed = self.failureResultOf(self.grid.put(content(SMALL), traffic=wrong))
        failed.trap(UsageError)
        cap = self.world.run(self.grid.put(content(SMALL))).cap
        self.failureResultOf(self.grid.read(cap, traffic=wrong)).trap(UsageError)

    def test_no_listener_costs_nothing(self) -> None:
        """Without one, no piece of a stream is looked at, and no time is asked for."""

        def fail(*_: object) -> None:
            raise AssertionError("a transfer without a listener reported its traffic")

        self.patch(share_downloads, "report_arrivals", fail)
        self.patch(share_downloads, "_WatchedConsumer", fail)
        for size in (SMALL, LARGE):
            cap = self.world.run(self.grid.put(content(size))).cap
            self.world.run(self.grid.get(cap, BytesIO()))
