"""The budgets: exactly how many round trips puts and gets take in virtual time."""

from __future__ import annotations

from io import BytesIO

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from tests.transfer.world import RTT, World, content


class PutTests(SynchronousTestCase):
    """One round trip, where reality allows it."""

    def test_a_file_takes_one_round_trip(self) -> None:
        """Allocation and writes leave together, whatever the size, if windows and line are wide."""
        for size in (200, 100_000, 1_000_000, 5_000_000):
            world = World()
            _, took = world.timed(world.grid.put(content(size)))
            self.assertEqual(took, RTT, f"{size} bytes")

    def test_a_hundred_small_files_take_one_round_trip(self) -> None:
        """Files that are put side by side do not wait for each other."""
        world = World()
        puts = [world.grid.put(content(200, i)) for i in range(100)]
        results, took = world.timed(gatherResults(puts))
        self.assertEqual(took, RTT)
        self.assertEqual(len({result.cap for result in results}), 100)

    def test_a_small_file_costs_two_requests_a_server(self) -> None:
        """An allocation and one write: nothing is sent that is not needed."""
        world = World()
        world.run(world.grid.put(content(200)))
        world.settle()
        for line in world.lines:
            self.assertEqual([name for _, name in line.calls], ["allocate", "write"])

    def test_a_literal_file_costs_nothing(self) -> None:
        """What fits into its cap needs no server."""
        world = World()
        _, took = world.timed(world.grid.put(content(55)))
        self.assertEqual(took, 0)
        self.assertEqual([line.calls for line in world.lines], [[]] * 10)

    def test_putting_a_stored_file_again_takes_one_round_trip(self) -> None:
        """The servers say that they have it; nothing is placed, and all is reported found."""
        for size in (200, 1_000_000):
            world = World()
            data = content(size)
            first = world.run(world.grid.put(data))
            again, took = world.timed(world.grid.put(data))
            self.assertEqual(took, RTT)
            self.assertEqual(again.cap, first.cap)
            self.assertEqual(again.shares_placed, {})
            self.assertEqual(
                again.shares_found, {n: [name] for n, name in first.shares_placed.items()}
            )
            self.assertEqual(again.happiness, 10)

    def test_putting_a_large_stored_file_again_sends_at_most_a_window(self) -> None:
        """Optimism costs no more than what fits between two answers."""
        window = 1 << 20
        world = World(window_bytes=window, params=Params(2, 4), happy=4, servers=4)
        data = content(12_000_000)
        world.run(world.grid.put(data))
        world.settle()
        before = [line.sent_bytes for line in world.lines]
        self.assertTrue(all(sent > 6_000_000 for sent in before))
        world.run(world.grid.put(data))
        world.settle()
        for line, sent in zip(world.lines, before, strict=True):
            # A caller never has more than the window and one message (of a batch) in flight.
            self.assertLessEqual(line.sent_bytes - sent, window + (2 << 20))

    def test_a_put_lasts_as_long_as_its_bytes(self) -> None:
        """Where the line is narrow, the bytes pace the put, and one round trip is all that is added."""
        rate = float(1 << 20)
        world = World(bytes_per_s=rate)
        result, took = world.timed(world.grid.put(content(6_000_000)))
        self.assertAlmostEqual(took, RTT + result.share_bytes / rate, places=6)


class GetTests(SynchronousTestCase):
    """One round trip where the shares are where they should be, two where they are not."""

    def test_a_get_takes_one_round_trip(self) -> None:
        """Every offset follows from the cap, every place from the ring."""
        for size in (200, 100_000, 1_000_000):
            world = World()
            data = content(size)
            file = world.plant(world.encoded(data))
            into = BytesIO()
            _, took = world.timed(world.grid.get(file.cap, into))
            self.assertEqual(into.getvalue(), data)
            self.assertEqual(took, RTT, f"{size} bytes")

    def test_misplaced_shares_take_one_more(self) -> None:
        """The lists come with the refusals; then the place is known."""
        for size in (200, 100_000, 1_000_000):
            world = World()
            data = content(size)
            file = world.encoded(data)
            order = world.ring(file)
            world.plant(file, {n: order[(n + 1) % 10] for n in range(10)})
            into = BytesIO()
            _, took = world.timed(world.grid.get(file.cap, into))
            self.assertEqual(into.getvalue(), data)
            self.assertEqual(took, 2 * RTT)

    def test_a_range_takes_one_round_trip(self) -> None:
        """Also from the middle of a large file."""
        world = World()
        data = content(5_000_000)
        file = world.plant(world.encoded(data))
        into = BytesIO()
        _, took = world.timed(world.grid.get(file.cap, into, start=2_500_000, length=1000))
        self.assertEqual(into.getvalue(), data[2_500_000:2_501_000])
        self.assertEqual(took, RTT)

    def test_another_segment_size_takes_one_more(self) -> None:
        """The guess is wrong for files of writers that use another one; the header says so."""
        world = World(params=Params(3, 10, 1 << 17))
        data = content(1_000_000)
        file = world.plant(world.encoded(data))
        into = BytesIO()
        _, took = world.timed(world.grid.get(file.cap, into))
        self.assertEqual(into.getvalue(), data)
        self.assertEqual(took, 2 * RTT)

    def test_large_files_stream(self) -> None:
        """The whole rest is asked at once: there is no round trip between one piece and the next."""
        rate = float(1 << 20)
        world = World(bytes_per_s=rate)
        data = content(8_000_000)
        file = world.plant(world.encoded(data))
        into = BytesIO()
        _, took = world.timed(world.grid.get(file.cap, into))
        self.assertEqual(into.getvalue(), data)
        self.assertLess(took, 2 * RTT + 1.02 * len(file.shares[0]) / rate)

    def test_a_hundred_gets_take_one_round_trip(self) -> None:
        """Side by side, as puts do."""
        world = World()
        files = [world.plant(world.encoded(content(200, i))) for i in range(100)]
        results, took = world.timed(gatherResults([world.grid.read(f.cap) for f in files]))
        self.assertEqual(results, [content(200, i) for i in range(100)])
        self.assertEqual(took, RTT)
