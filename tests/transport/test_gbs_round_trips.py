"""
The budgets with nothing left out but TLS: ten real servers, a real client, transfers and windows, in virtual
time, exactly. Half a round trip is 50 ms; connections are up.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid.file_grid import Grid
from pipegrid.http11.request_sender import RequestWriter
from pipegrid.testing.link_model import Bottleneck
from pipegrid.testing.network import leaks
from pipegrid.transfer.get.download import Download
from pipegrid.wire.storage_messages import ShareChange, SlotSecrets
from tests.scratch import scratch_path
from tests.transport.contract import OTHER_SI, SECRETS, SI
from tests.transport.gbs_world import CLIENT, GbsWorld, make_grid
from tests.transport.test_gbs_foolscapbeside import without_bundles

T = TypeVar("T")

SIZES = (200, 100_000, 1_000_000)
RTT_S = 0.1


class RoundTripTests(SynchronousTestCase):
    """Bytes take no time: what is left is round trips."""

    def setUp(self) -> None:
        self.world = GbsWorld(scratch_path(self), servers=10)
        self.addCleanup(self.world.close)
        self.random = Random(7)
        self.grid = self.open_grid()

    def open_grid(self, seed: str = "") -> Grid:
        """Return a grid with every connection open that a transfer needs."""
        grid = make_grid(self.world, seed)
        self.world.run(grid.put(self.random.randbytes(300)))
        self.world.run(grid.status())
        self.world.clock.advance(1)
        return grid

    def tearDown(self) -> None:
        self.world.run(self.grid.close())
        self.world.clock.advance(70)
        self.assertEqual(leaks(self.world.clock, self.world.network), [])

    def timed(self, start: Callable[[], Deferred[T]]) -> tuple[T, float]:
        """Return a result and the round trips that it took."""
        began_s = self.world.clock.seconds()
        result = self.world.run(start())
        trips = self.world.round_trips(began_s)
        self.world.clock.advance(1)
        return result, trips

    def test_a_put_is_one_round_trip(self) -> None:
        """Allocation and writes leave together, and the last answer is the end."""
        for size in SIZES:
            data = self.random.randbytes(size)
            result, trips = self.timed(partial(self.grid.put, data))
            self.assertEqual((trips, result.happiness), (1.0, 10), f"{size} bytes")

    def test_a_get_is_one_round_trip(self) -> None:
        """The first burst asks for the right bytes where shares are as predicted."""
        for size in SIZES:
            data = self.random.randbytes(size)
            cap = self.world.run(self.grid.put(data)).cap
            found, trips = self.timed(partial(self.grid.read, cap))
            self.assertEqual((trips, found), (1.0, data), f"{size} bytes")

    def test_nothing_is_left_to_the_collector(self) -> None:
        """When a get has ended, also with a question that was cancelled, its memory is free at once."""
        cap = self.world.run(self.grid.put(self.random.randbytes(200))).cap
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        for (
            host
        ) in self.world.servers:  # some of them are asked, and not waited for when they are slow
            self.world.network.slow_down(CLIENT, host.name, 50, 0.5)
            self.world.run(self.grid.read(cap))
            self.world.clock.advance(1)
        self.assertEqual([each for each in gc.get_objects() if type(each) is Download], [])

    def test_questions_need_no_further_connection(self) -> None:
        """
        After a put its connections serve for short questions, too, while others are made for the next ones;
        not if they have changes to do.
        """
        grid = make_grid(self.world)
        data = self.random.randbytes(200)
        cap = self.world.run(grid.put(data)).cap
        before = sum(host.factory.accepted for host in self.world.servers)
        for _ in range(2):
            found, trips = self.timed(partial(grid.read, cap))
            self.assertEqual((trips, found), (1.0, data))
        after = sum(host.factory.accepted for host in self.world.servers)
        self.assertLess(0, after - before)
        self.assertLess(after - before, 10)
        self.world.run(grid.close())
        server = self.world.connect()
        self.world.run(server.allocate(SI, {0}, 10, SECRETS))
        writing = server.write(SI, 0, 0, [bytes(10)], SECRETS.upload)
        _, trips = self.timed(partial(server.list_shares, OTHER_SI))
        self.assertEqual((trips, writing.called), (2.0, True))
        self.world.run(server.disconnect())

    def test_changes_leave_at_once(self) -> None:
        """The share of the first server does not wait for those of the others."""
        server = without_bundles(self.world.connect())
        self.world.run(server.allocate(SI, {1}, 10, SECRETS))
        written: list[int] = []
        write = RequestWriter._write

        def note(writer: RequestWriter, pieces: list[Any]) -> None:
            written.append(sum(map(len, pieces)))
            write(writer, pieces)

        self.patch(RequestWriter, "_write", note)
        stored = server.store_whole(SI, {0: bytes(1000)}, 1000, SECRETS)
        self.assertEqual(len(written), 1)
        self.assertGreater(written[0], 1000)
        self.world.run(stored)
        changes = {0: ShareChange(writes=((0, bytes(1000)),))}
        changed = server.read_test_write(OTHER_SI, SlotSecrets(SECRETS.lease, bytes(32)), changes)
        self.assertEqual(len(written), 2)
        self.world.run(changed)
        self.world.run(server.disconnect())

    def test_a_get_from_elsewhere_is_two(self) -> None:
        """Where they are not, the lists have come with the refusals."""
        other = self.open_grid("elsewhere ")
        for size in SIZES:
            data = self.random.randbytes(size)
            cap = self.world.run(other.put(data)).cap
            found, trips = self.timed(partial(self.grid.read, cap))
            self.assertEqual((trips, found), (2.0, data), f"{size} bytes")
        self.world.run(other.close())

    def test_a_hundred_puts_are_one_round_trip(self) -> None:
        """Small files that are put side by side share every connection."""
        files = [self.random.randbytes(200) for _ in range(100)]
        results, trips = self.timed(lambda: gatherResults([self.grid.put(data) for data in files]))
        self.assertEqual(trips, 1.0)
        self.assertEqual(self.world.run(self.grid.read(results[42].cap)), files[42])

    def test_a_put_sends_no_request_too_many(self) -> None:
        """One allocation and one write to each server; a bundle of both to a server that takes such."""
        for size, requests in ((300_000, 2), (100_000, 1), (200, 1)):
            before = [host.factory.service.requests.total() for host in self.world.servers]
            self.world.run(self.grid.put(self.random.randbytes(size)))
            after = [host.factory.service.requests.total() for host in self.world.servers]
            self.assertEqual([b - a for a, b in zip(before, after, strict=True)], [requests] * 10)

    def test_a_hundred_puts_are_a_few_requests(self) -> None:
        """Small shares sent side by side go in bundles, once a server has said that it takes them."""
        counts = [host.factory.service.requests for host in self.world.servers]
        for requests in counts:
            requests.clear()
        files = [self.random.randbytes(200) for _ in range(100)]
        self.world.run(gatherResults([self.grid.put(data) for data in files]))
        for requests in counts:
            self.assertEqual(set(requests), {("bundle", 200)})
            self.assertLess(requests.total(), 20)

    def test_cold_start(self) -> None:
        """The first put costs one round trip more (TCP; with TLS another one), to all at the same time."""
        grid = make_grid(self.world)
        _, trips = self.timed(lambda: grid.put(self.random.randbytes(200)))
        self.assertEqual(trips, 2.0)
        self.world.run(grid.close())


class NarrowLineTests(SynchronousTestCase):
    """All servers behind one line of 10 MB/s: a round trip, and the bytes."""

    BYTES_PER_S = 10_000_000

    def setUp(self) -> None:
        self.world = GbsWorld(scratch_path(self), servers=10)
        self.addCleanup(self.world.close)
        there, back = Bottleneck(self.BYTES_PER_S), Bottleneck(self.BYTES_PER_S)
        for host in self.world.servers:
            self.world.network.join(CLIENT, host.name, RTT_S / 2, there, back)
        self.random = Random(8)
        self.grid = make_grid(self.world)
        self.world.run(self.grid.read(self.world.run(self.grid.put(bytes(300))).cap))
        self.world.clock.advance(1)

    def tearDown(self) -> None:
        self.world.run(self.grid.close())

    def check_put(self, files: list[bytes], overhead_bytes: int) -> None:
        """A put of these takes a round trip and its bytes, but for so many bytes at most."""
        began_s = self.world.clock.seconds()
        results = self.world.run(gatherResults([self.grid.put(data) for data in files]))
        took_s = self.world.clock.seconds() - began_s
        payload = sum(10 * result.share_bytes for result in results)
        least_s = RTT_S + payload / self.BYTES_PER_S
        self.assertGreaterEqual(took_s, least_s)
        self.assertLessEqual(took_s, least_s + overhead_bytes / self.BYTES_PER_S)

    def test_put(self) -> None:
        """What requests add to a share is less than 1.2 kB."""
        for size in SIZES:
            self.check_put([self.random.randbytes(size)], 10 * 1200 + 2000)

    def test_a_hundred_puts(self) -> None:
        """For many small files, in bundles, it is less than 170 bytes a share."""
        self.check_put([self.random.randbytes(200) for _ in range(100)], 100 * 10 * 170)
