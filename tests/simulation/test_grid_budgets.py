"""
What transfers may cost, on a whole grid in virtual time: round trips, bytes on the line, memory, patience.

``tests/transport/test_gbs_round_trips.py`` counts round trips where bytes take no time, and requests. Here
lines are narrow, servers are slow, connections are cold and files are large. ``misc/soak/budgets.py``
does the same with a gigabyte, and with links of all kinds.
"""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.console import Console
from pipegrid.cli.put_files import Uploads
from pipegrid.core.caps import ChkCap
from pipegrid.grid.server_opening import Windows
from pipegrid.testing.link_model import Bottleneck
from pipegrid.transfer.peers import ring
from pipegrid.transfer.put import uploader
from pipegrid.transfer.results import PutResult
from tests.core.simple_encoder import encode
from tests.simulation.grid_budgets import (
    Discarded,
    best_fixed_window,
    put_seconds,
    warm_up,
)
from tests.simulation.grid_world import CLIENT, CONVERGENCE, GridWorld

RTT_S = 0.1
MBIT = 125_000
MB = 1_000_000
GRACE_S = 2.0


class BudgetTestCase(SynchronousTestCase):
    """Ten servers, 100 ms away."""

    def make_world(self, **options: object) -> GridWorld:
        """Return a grid of ten servers, which is looked at for leftovers at the end."""
        world = GridWorld(latency_s=RTT_S / 2, **options)  # type: ignore[arg-type]
        self.addCleanup(world.close)
        self.addCleanup(lambda: self.assertEqual(world.leaks(), []))
        return world

    def assertNear(self, seconds: float, expected_s: float, within_s: float) -> None:
        """The two differ by so much at most."""
        self.assertLess(abs(seconds - expected_s), within_s, f"{seconds} s, not {expected_s} s")

    def sent_bytes(self, world: GridWorld, since: int, to_clients: bool) -> int:
        """Return how many bytes passed in one direction since an entry of the log."""
        return sum(
            sent.size_bytes
            for sent in list(world.network.log)[since:]
            if (sent.to_host == CLIENT) == to_clients
        )


class TlsTests(BudgetTestCase):
    """With TLS, and nothing else that takes time."""

    def test_round_trips(self) -> None:
        """One for a put and a get of up to a segment, and for a hundred puts; two for shares elsewhere."""
        world = self.make_world(tls=True)
        client = world.client()
        other = world.client("other", seed="other ")
        warm_up(world, client)
        random = Random(1)
        for size in (200, 100_000, MB):
            data = random.randbytes(size)
            result, put_s = world.timed(lambda data=data: client.grid.put(data))  # type: ignore[misc]
            found, get_s = world.timed(lambda cap=result.cap: client.grid.read(cap))  # type: ignore[misc]
            self.assertEqual(found, data)
            self.assertEqual((self.trips(put_s), self.trips(get_s)), (1.0, 1.0), size)
            elsewhere = world.run(other.grid.put(random.randbytes(size))).cap
            _, get_s = world.timed(lambda cap=elsewhere: client.grid.read(cap))  # type: ignore[misc]
            self.assertEqual(self.trips(get_s), 2.0, size)
        files = [random.randbytes(200) for _ in range(100)]
        _, many_s = world.timed(lambda: gatherResults([client.grid.put(data) for data in files]))
        self.assertEqual(self.trips(many_s), 1.0)

    def test_cold_start(self) -> None:
        """A first put and a first get cost two round trips more, TCP's and TLS 1.3's, and no third."""
        world = self.make_world(tls=True)
        data = Random(2).randbytes(100_000)
        result, put_s = world.timed(lambda: world.client().grid.put(data))
        self.assertEqual(self.trips(put_s), 3.0)
        found, get_s = world.timed(lambda: world.client("other").grid.read(result.cap))
        self.assertEqual((self.trips(get_s), found), (3.0, data))

    def test_a_small_first_put(self) -> None:
        """It needs nothing of what uploads of larger files need, whatever its servers take in one message."""
        world = self.make_world(tls=True)

        def needed(*_: object) -> None:
            raise AssertionError("a small file became an upload")

        self.patch(uploader, "Upload", needed)
        data = Random(3).randbytes(100_000)
        result, put_s = world.timed(lambda: world.client().grid.put(data))
        self.assertEqual((self.trips(put_s), result.happiness), (3.0, 10))

    def trips(self, seconds: float) -> float:
        return round(seconds / RTT_S, 6)


class LineTests(BudgetTestCase):
    """All servers behind one line of 100 Mbit/s."""

    RATE = 100 * MBIT

    def setUp(self) -> None:
        self.world = self.make_world(shared_bytes_per_s=self.RATE)
        self.client = self.world.client()
        warm_up(self.world, self.client)

    def test_a_put_is_a_round_trip_and_its_bytes(self) -> None:
        """The line is never idle: the time is that of every byte sent, and a round trip."""
        for size in (200, 100_000, MB, 10 * MB):
            since = len(self.world.network.log)
            data = Random(size).randbytes(size)
            result, took_s = self.world.timed(lambda data=data: self.client.grid.put(data))  # type: ignore[misc]
            sent = self.sent_bytes(self.world, since, to_clients=False)
            overhead = sent - 10 * result.share_bytes
            self.assertLess(overhead, 10 * 2000, "what requests add")
            # The answers have a size as well.
            self.assertNear(took_s, RTT_S + sent / self.RATE, 0.0005)

    def test_many_puts(self) -> None:
        """A hundred small files are one round trip and their bytes."""
        since = len(self.world.network.log)
        files = [Random(n).randbytes(200) for n in range(100)]
        _, took_s = self.world.timed(
            lambda: gatherResults([self.client.grid.put(data) for data in files])
        )
        sent = self.sent_bytes(self.world, since, to_clients=False)
        self.assertLess(sent, 100 * 10 * 1800)
        self.assertNear(took_s, RTT_S + sent / self.RATE, 0.005)

    def test_a_put_of_many_files(self) -> None:
        """`pipegrid put` of a hundred small files too, and with a large one among them."""
        directory = Path(self.mktemp())
        directory.mkdir()
        for large in (0, 10 * MB):
            paths = []
            for number in range(100):
                size = large if number == 70 and large else 200
                paths.append(str(directory / str(number)))
                Path(paths[-1]).write_bytes(Random(large + number).randbytes(size))
            since = len(self.world.network.log)
            stdout = BytesIO()
            options: dict[str, Any] = {"happy": 7}
            uploads = Uploads(self.client.grid, Console(None, stdout, StringIO()), paths, options)
            status, took_s = self.world.timed(lambda: Deferred.fromCoroutine(uploads.run()))  # noqa: B023
            sent = self.sent_bytes(self.world, since, to_clients=False)
            self.assertNear(took_s, RTT_S + sent / self.RATE, 0.005)
            caps = stdout.getvalue().decode().splitlines()
            self.assertEqual((status, len(caps)), (0, 100))
            for number in (0, 70, 99):
                found = self.world.run(self.client.grid.read(caps[number]))
                self.assertEqual(found, Path(paths[number]).read_bytes())

    def test_a_library_put_of_many_files(self) -> None:
        """``Grid.put_many`` is the same, and more than are under way at a time cost little more."""
        since = len(self.world.network.log)
        data = [Random(n).randbytes(200) for n in range(300)]
        results, took_s = self.world.timed(lambda: self.client.grid.put_many(data))
        sent = self.sent_bytes(self.world, since, to_clients=False)
        self.assertLess(took_s, 2.1 * RTT_S + sent / self.RATE)
        self.assertEqual([result.size for result in results], [200] * 300)  # type: ignore[union-attr]

    def test_a_get_is_a_round_trip_and_its_bytes(self) -> None:
        """The line is never idle, and little of what comes was asked in vain."""
        for size, extra in ((200, 0.34), (100_000, 0.34), (MB, 0.34), (10 * MB, 0.02)):
            data = Random(size).randbytes(size)
            cap = self.world.run(self.client.grid.put(data)).cap
            self.world.clock.advance(1)
            since = len(self.world.network.log)
            found, took_s = self.world.timed(lambda cap=cap: self.client.grid.read(cap))  # type: ignore[misc]
            self.assertEqual(found, data)
            sent = self.sent_bytes(self.world, since, to_clients=True)
            self.assertLess(sent, (1 + extra) * size + 8000)
            self.assertLess(took_s, RTT_S + sent / self.RATE + 0.0005)

    def test_ten_megabytes(self) -> None:
        """Within 3 % of a round trip and the bytes themselves, without anything that comes on top."""
        data = Random(3).randbytes(10 * MB)
        result, put_s = self.world.timed(lambda: self.client.grid.put(data))
        found, get_s = self.world.timed(lambda: self.client.grid.read(result.cap))
        self.assertEqual(found, data)
        self.assertLess(put_s, 1.03 * (RTT_S + len(data) * 10 / 3 / self.RATE))
        self.assertLess(get_s, 1.03 * (RTT_S + len(data) / self.RATE))

    def test_gets_in_a_row_need_no_new_connections(self) -> None:
        """Whoever lost a race keeps its connection: the next get finds all of them warm."""
        data = Random(4).randbytes(10 * MB)
        cap = self.world.run(self.client.grid.put(data)).cap
        self.world.run(self.client.grid.read(cap))
        self.world.clock.advance(1)
        since = len(self.world.network.log)
        self.world.run(self.client.grid.read(cap))
        kinds = {sent.kind for sent in list(self.world.network.log)[since:]}
        self.assertEqual(kinds, {"data"})


class MemoryTests(BudgetTestCase):
    """What is held does not depend on how large a file is."""

    def test_memory_is_flat(self) -> None:
        """
        Thirty megabytes and sixty take the same, in put and get, what is on the line included.

        And they let go of it at once: the collector of garbage need not come for it.
        """
        put_peaks, get_peaks = zip(self.peaks(30 * MB), self.peaks(60 * MB), strict=True)
        for small, large in (put_peaks, get_peaks):
            self.assertLess(large, small + (2 << 20))
        self.assertLess(max(put_peaks), 64 << 20)
        self.assertLess(max(get_peaks), 32 << 20)

    def peaks(self, size: int) -> tuple[int, int]:
        world = self.make_world(shared_bytes_per_s=100 * MBIT)
        client = world.client()
        warm_up(world, client)
        data = Random(5).randbytes(size)
        sink = Discarded()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            result = world.run(client.grid.put(data))
            put_peak = tracemalloc.get_traced_memory()[1]
            world.clock.advance(1)
            tracemalloc.reset_peak()
            world.run(client.grid.get(result.cap, sink))
            get_peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            gc.enable()
        self.assertEqual(sink.digest(), Discarded.of(data))
        return put_peak, get_peak

    def test_writes_in_flight(self) -> None:
        """Never more is held, or in flight, than each server's share of it and an eighth."""
        world = self.make_world(shared_bytes_per_s=100 * MBIT)
        client = world.client()
        held = []
        data = Random(6).randbytes(10 * MB)
        world.run(
            client.grid.put(
                data,
                progress=lambda *_: held.append((client.held_bytes, client.in_flight_bytes)),
            )
        )
        windows, more = Windows.shared_by(10), 1 << 16
        self.assertLessEqual(max(held)[0], 10 * (windows.held_bytes * 9 // 8 + more))
        self.assertLessEqual(
            max(flying for _, flying in held), 10 * (windows.flight_bytes * 9 // 8 + more)
        )
        self.assertEqual(client.in_flight_bytes, 0)


class SlowServerTests(BudgetTestCase):
    """One of ten servers is fifty times slower, in round trip and bandwidth; each has a line of its own."""

    def measure(self, size: int, victim: int | None) -> tuple[float, float, PutResult]:
        """Put and get a file; the slow server has that place in the file's ring."""
        world = self.make_world(bytes_per_s=100 * MBIT)
        client = world.client()
        warm_up(world, client)
        data = Random(7).randbytes(size)
        if victim is not None:
            index = encode(data, 3, 10, 1 << 20, secret=CONVERGENCE).cap.storage_index
            slow = ring(index, client.peers)[victim].name
            world.network.slow_down(CLIENT, slow, 50, 10_000)
        result, put_s = world.timed(lambda: client.grid.put(data))
        world.clock.advance(30)
        into = BytesIO()
        _, get_s = world.timed(lambda: client.grid.get(result.cap, into))
        self.assertEqual(into.getvalue(), data)
        return put_s, get_s, result

    def test_a_segment(self) -> None:
        """A get does not feel it at all, wherever it is; a put waits for the grace and not longer."""
        for size in (200, MB):
            usual_put_s, usual_get_s, _ = self.measure(size, None)
            for victim in (0, 2, 3, 9):
                put_s, get_s, result = self.measure(size, victim)
                self.assertNear(get_s, usual_get_s, 0.0005)
                self.assertNear(put_s, usual_put_s + GRACE_S, 0.0005)
                self.assertEqual((len(result.dropped), result.happiness), (1, 9))

    def test_a_large_put(self) -> None:
        """It waits for the grace and not longer, and so do the bytes of a large file."""
        usual_put_s, usual_get_s, _ = self.measure(10 * MB, None)
        for victim in (0, 9):
            put_s, get_s, _ = self.measure(10 * MB, victim)
            self.assertNear(get_s, usual_get_s, 0.0005)
            # Less if its first flight, and what is gathered behind that, hold the whole share: the grace then
            # passes while others still send.
            self.assertLess(put_s, usual_put_s + GRACE_S + 0.005)
            self.assertGreater(put_s, usual_put_s + GRACE_S - 2 * RTT_S)

    def measure_get(
        self, size: int, shared: bool, victim: int | None, slow: str = ""
    ) -> tuple[float, int]:
        """Get a file of which one server is slow; return the time, and the bytes that came."""
        rate = 100 * MBIT
        world = self.make_world(
            bytes_per_s=None if shared else rate, shared_bytes_per_s=rate if shared else None
        )
        client = world.client()
        warm_up(world, client)
        data = Random(8).randbytes(size)
        cap = world.run(client.grid.put(data)).cap
        assert isinstance(cap, ChkCap)
        world.clock.advance(30)
        if victim is not None:
            name = ring(cap.storage_index, client.peers)[victim].name
            for path in (world.network.path(CLIENT, name), world.network.path(name, CLIENT)):
                if "latency" in slow:
                    path.latency_ns *= 50
                if "bandwidth" in slow:
                    path.line = Bottleneck(rate // 50)
                    for flow in path._flows:
                        flow.line = path.line
        since = len(world.network.log)
        into = BytesIO()
        _, took_s = world.timed(lambda: client.grid.get(cap, into))
        self.assertEqual(into.getvalue(), data)
        return took_s, self.sent_bytes(world, since, to_clients=True)

    def test_a_large_get(self) -> None:
        """
        A get of several segments does not feel it either, be it far away, on a thin line, or both.

        Two others divide its work, and so catch up with the round trip that calling them takes.
        """
        usual_s, usual_bytes = self.measure_get(10 * MB, False, None)
        self.assertNear(usual_s, RTT_S + 10 * MB / 3 / (100 * MBIT), 0.001)
        self.assertLess(usual_bytes, 1.02 * 10 * MB)
        for victim, slow in (
            (0, "latency"),
            (0, "bandwidth"),
            (0, "latency and bandwidth"),
            (2, "latency"),
            (2, "bandwidth"),
            (3, "bandwidth"),
            (9, "latency and bandwidth"),
        ):
            took_s, came = self.measure_get(10 * MB, False, victim, slow)
            self.assertNear(took_s, usual_s, 0.0005)
            self.assertLess(came, 1.02 * 10 * MB)

    def test_a_large_get_over_one_line(self) -> None:
        """What the client's own line carries stays as it is, for other servers fill it."""
        usual_s, _ = self.measure_get(10 * MB, True, None)
        for victim, slow in ((0, "latency"), (2, "bandwidth")):
            took_s, came = self.measure_get(10 * MB, True, victim, slow)
            self.assertLess(took_s, usual_s + 0.0005)
            self.assertLess(came, 1.02 * 10 * MB)

    def test_a_get_of_few_segments(self) -> None:
        """There is no time to catch up: it costs up to a round trip, and the eighth it is waited for."""
        usual_s, _ = self.measure_get(3 * MB, False, None)
        took_s, _ = self.measure_get(3 * MB, False, 0, "latency")
        self.assertLess(took_s, usual_s + 1.125 * RTT_S)

    def test_one_segment_over_a_narrow_line(self) -> None:
        """Once the line is known, 1 MB takes a round trip and its own bytes, not a third more."""
        rate = 520_000
        world = self.make_world(bytes_per_s=None, shared_bytes_per_s=rate)
        client = world.client()
        warm_up(world, client)
        times, sizes = [], []
        for seed in range(3):
            data = Random(seed).randbytes(MB)
            cap = world.run(client.grid.put(data)).cap
            world.clock.advance(30)
            since = len(world.network.log)
            into = BytesIO()
            _, took_s = world.timed(partial(client.grid.get, cap, into))
            self.assertEqual(into.getvalue(), data)
            times.append(took_s)
            sizes.append(self.sent_bytes(world, since, to_clients=True))
        self.assertGreater(sizes[0], 4 / 3 * MB)
        for took_s, size in zip(times[1:], sizes[1:], strict=True):
            self.assertLess(size, 1.05 * MB)
            self.assertLess(took_s, RTT_S + 1.05 * size / rate)


class WindowTests(SynchronousTestCase):
    """Windows that measure are as good as the best that is set by hand."""

    def test_windows(self) -> None:
        """On slow and fast, short and long lines, end to end, at most 5 % slower."""
        for rate, rtt_s, size in (
            (1 * MBIT, 0.3, 100_000),
            (100 * MBIT, 0.1, 10 * MB),
            (1000 * MBIT, 0.0001, 10 * MB),
            (10_000 * MBIT, 0.3, 10 * MB),
        ):
            auto_s = put_seconds(rate, rtt_s, size, None)
            best_s = best_fixed_window(rate, rtt_s, size)
            self.assertLess(auto_s, 1.05 * best_s, f"{rate} B/s, {rtt_s} s")
