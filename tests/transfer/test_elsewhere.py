"""Storing what is stored already, elsewhere than a put would place it."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UsageError
from pipegrid.transfer.put import ask_first_policy, write_batches
from pipegrid.transfer.put.ask_first_policy import (
    REMEMBERED,
    FinalByteHold,
    PlacementHistory,
    ask_first,
)
from tests.core.simple_encoder import Encoded
from tests.transfer.world import RTT, World, content

SMALL = 1000
LARGE = 3_000_000
MANY_SEGMENTS = Params(3, 10, 100_000)


class ElsewhereTests(SynchronousTestCase):
    """What puts have found, and what the next one does."""

    def test_puts_ask_for_as_long_as_they_find(self) -> None:
        """One that finds a share elsewhere has the next ones ask, until so many have found nothing."""
        noted: list[int] = []
        puts = PlacementHistory(changed=noted.append)
        self.assertFalse(puts.must_ask)
        puts.ended(False)
        puts.ended(True)
        self.assertTrue(puts.asks_first(SMALL))
        for _ in range(REMEMBERED):
            self.assertTrue(puts.must_ask)
            puts.ended(False)
        self.assertFalse(puts.must_ask)
        puts.ended(False)
        self.assertEqual(
            noted, [*range(REMEMBERED, -1, -1)], "told of each change, and of nothing else"
        )

    def test_policies(self) -> None:
        """``never`` neither asks nor waits, ``always`` asks for all; by default it is learned."""
        for policy, asks, holds in (("never", False, False), ("always", True, True)):
            puts = PlacementHistory(ask_first(policy), left=3)
            for size in (1, LARGE):
                self.assertEqual(puts.asks_first(size), asks)
            self.assertEqual(puts.holds_back(LARGE, True), holds)
        learned = PlacementHistory("auto", left=3)
        self.assertEqual([learned.asks_first(size) for size in (SMALL, LARGE)], [True, False])
        self.assertTrue(learned.holds_back(LARGE, False))
        fresh = PlacementHistory("auto")
        holds_back = [fresh.holds_back(LARGE, exceeds) for exceeds in (False, True)]
        self.assertEqual(holds_back, [False, True])
        self.assertFalse(fresh.holds_back(SMALL, True))

    def test_what_is_no_policy(self) -> None:
        """The choices are named."""
        with self.assertRaises(UsageError) as caught:
            ask_first("perhaps")
        self.assertIn("auto, always, never", str(caught.exception))

    def test_what_an_earlier_process_left_is_bounded(self) -> None:
        """Nonsense in a file does not make puts ask for ever."""
        for left in (-5, 10**9):
            puts = PlacementHistory(left=left)
            for _ in range(REMEMBERED):
                puts.ended(False)
            self.assertFalse(puts.must_ask)


class LastBytesTests(SynchronousTestCase):
    """How long last bytes wait."""

    def test_slow_servers_are_not_waited_for(self) -> None:
        """When most have answered, the others get as long again."""
        wait = FinalByteHold(10, 100.0, 2.0, must_know=False)
        self.assertEqual(wait.left_s(100.5), 1.5)
        for _ in range(5):
            wait.answered(100.25)
        self.assertEqual(wait.left_s(100.25), 1.75, "half are not most")
        wait.answered(100.25)
        self.assertEqual(wait.left_s(100.25), 0.25)
        wait.answered(100.3)
        self.assertEqual(wait.left_s(100.5), 0.0)

    def test_patience(self) -> None:
        """A put that has to know waits for all of them, but no longer than the grace."""
        wait = FinalByteHold(10, 100.0, 2.0, must_know=True)
        for _ in range(9):
            wait.answered(100.25)
        self.assertEqual(wait.left_s(100.25), 1.75)

    def test_all_are_slow(self) -> None:
        """While most have not answered, a put that has to know waits longer; then as long again."""
        wait = FinalByteHold(10, 100.0, 2.0, must_know=True)
        wait.answered(101.0, 5)
        self.assertEqual(wait.left_s(103.0), 7.0, "half are not most")
        wait.answered(103.0)
        self.assertEqual(wait.left_s(103.0), 3.0)
        wait = FinalByteHold(10, 100.0, 2.0, must_know=True)
        wait.answered(109.0, 6)
        self.assertEqual(wait.left_s(109.0), 1.0, "not for ever")


class StoredElsewhereTests(SynchronousTestCase):
    """Files whose shares are where another program has put them."""

    def make(self, **options: Any) -> World:
        options.setdefault("params", MANY_SEGMENTS)
        return World(**options)

    def elsewhere(self, world: World, size: int, seed: object) -> Encoded:
        """Store a file, share i on the server behind the one where a put would place it."""
        file = world.encoded(content(size, seed))
        ring = world.ring(file)
        count = len(file.shares)
        return world.plant(file, {n: ring[(n + 1) % count] for n in range(count)})

    def put(self, world: World, size: int, seed: object) -> tuple[int, float]:
        """Put it; returns how many share files there are then, and how long it took."""
        data = content(size, seed)
        file = world.encoded(data)
        result, took = world.timed(world.grid.put(data))
        self.assertEqual(result.cap, file.cap)
        self.assertEqual(world.clock.getDelayedCalls(), [])
        world.settle()
        unfinished = [line.name for line in world.lines if line.storage.uploads]
        self.assertEqual(unfinished, [], "nothing is left unfinished")
        stored = world.stored(file.cap.storage_index)
        self.assertGreaterEqual(result.happiness, world.happy)
        self.assertEqual(len(stored), 10)
        return sum(map(len, stored.values())), took

    def test_small_files(self) -> None:
        """The first one teaches: from the second on there is no share more, for a round trip more."""
        world = self.make()
        for seed in range(20):
            self.elsewhere(world, SMALL, seed)
        self.assertEqual(self.put(world, SMALL, 0), (20, RTT), "docs: the first one")
        for seed in range(1, 20):
            self.assertEqual(self.put(world, SMALL, seed), (10, RTT))

    def test_what_is_new_costs_a_round_trip_for_a_while(self) -> None:
        """Asked first, then sent; after so many that found nothing it is as before."""
        world = self.make()
        self.elsewhere(world, SMALL, "old")
        self.put(world, SMALL, "old")
        for seed in range(REMEMBERED):
            self.assertEqual(self.put(world, SMALL, seed), (10, 2 * RTT))
        self.assertEqual(self.put(world, SMALL, "new"), (10, RTT))

    def test_large_files(self) -> None:
        """Where sending takes longer than answers the first one gets no share more either, at no cost."""
        for window_bytes in (1 << 16, 1 << 18):
            took = []
            for policy in ("auto", "never"):
                world = self.make(
                    window_bytes=window_bytes, bytes_per_s=float(1 << 20), ask_first=policy
                )
                if policy == "auto":
                    self.elsewhere(world, LARGE, 1)
                    self.assertEqual(self.put(world, LARGE, 1)[0], 10)
                    world = self.make(window_bytes=window_bytes, bytes_per_s=float(1 << 20))
                took.append(self.put(world, LARGE, 2)[1])
            self.assertEqual(took[0], took[1], "a fresh put takes as long as it would anyhow")

    def test_files_of_all_sizes_once_it_is_known(self) -> None:
        """From the second file on no size gets a share more, whatever window and line."""
        for bytes_per_s in (None, float(1 << 22)):
            world = self.make(bytes_per_s=bytes_per_s)
            self.elsewhere(world, SMALL, "first")
            self.put(world, SMALL, "first")
            for size in (500, 20_000, 180_000, 250_000, 900_000, LARGE):
                self.elsewhere(world, size, size)
                copies, took = self.put(world, size, size)
                self.assertEqual(copies, 10, f"{size} bytes")
                if bytes_per_s is None:
                    # What was sent for nothing is aborted, and that is waited for.
                    self.assertEqual(took, RTT if size < 190_000 else 2 * RTT)
                    self.assertEqual(self.put(world, size, -size), (10, 2 * RTT))

    def test_a_grid_that_has_doubled(self) -> None:
        """Shares on servers that are behind the first n of the ring now are found as well."""
        world = self.make(servers=20)
        world.ask_first = "always"
        world.grid = world.client()
        for size in (SMALL, LARGE):
            file = world.encoded(content(size, "grown"))
            ring = world.ring(file)
            world.plant(file, {n: ring[2 * n + 1] for n in range(10)})
            self.assertEqual(self.put(world, size, "grown")[0], 10)

    def test_always(self) -> None:
        """The first file is asked for as well, of any size, and nothing is sent in vain."""
        world = self.make(ask_first="always")
        for size in (SMALL, LARGE):
            self.elsewhere(world, size, size)
            self.assertEqual(self.put(world, size, size), (10, RTT))
        self.assertEqual([line.sent_bytes for line in world.lines], [0] * 10)
        self.assertEqual(self.put(world, SMALL, "new"), (10, 2 * RTT))

    def test_never(self) -> None:
        """Every file is stored twice, and none waits."""
        world = self.make(ask_first="never")
        for seed in range(3):
            self.elsewhere(world, SMALL, seed)
            self.assertEqual(self.put(world, SMALL, seed), (20, RTT))

    def test_what_is_where_it_should_be_teaches_nothing(self) -> None:
        """Files of one's own, stored again, cost one round trip and make nobody ask first."""
        world = self.make()
        for seed in range(3):
            self.put(world, SMALL, seed)
            self.assertEqual(self.put(world, SMALL, seed), (10, RTT))
        self.assertEqual(self.put(world, SMALL, "new"), (10, RTT))

    def test_some_are_missing(self) -> None:
        """Only what is missing is sent, where it is asked first."""
        world = self.make(ask_first="always")
        file = self.elsewhere(world, SMALL, 1)
        index = file.cap.storage_index
        for number in (3, 7):
            for line in world.lines:
                line.storage.shares.pop((index, number), None)
        self.assertEqual(self.put(world, SMALL, 1), (10, 2 * RTT))
        self.assertEqual(sum(line.count("write") for line in world.lines), 2)

    def test_a_silent_server(self) -> None:
        """It costs a put that asks first the grace, and one that does not nothing."""
        for policy, size, most_s in (("always", SMALL, 5.0), ("auto", LARGE, 6.0)):
            world = self.make(ask_first=policy, window_bytes=1 << 16)
            file = world.encoded(content(size, 9))
            world.ring(file)[4].silent = {"*"}
            result, took = world.timed(world.grid.put(content(size, 9)))
            self.assertEqual(result.happiness, 9)
            self.assertLess(took, most_s)
            self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_all_servers_are_busy(self) -> None:
        """Where most take longer than the grace, a put that has to know waits, and copies nothing."""
        for size in (SMALL, LARGE):
            world = self.make(ask_first="always")
            self.elsewhere(world, size, 9)
            for line in world.lines:
                line.late = {"allocate": 3.0}
            copies, took = self.put(world, size, 9)
            self.assertEqual(copies, 10)
            self.assertLess(took, 4.0)

    def test_a_server_that_is_down(self) -> None:
        """Nothing is sent to it where it was asked first: its share goes elsewhere at once."""
        world = self.make(ask_first="always", servers=12)
        file = world.encoded(content(SMALL, 9))
        down = world.ring(file)[4]
        down.down = True
        self.assertEqual(self.put(world, SMALL, 9), (10, 2 * RTT))
        self.assertEqual(down.count("write"), 0)

    def test_a_slow_answer_does_not_hold_up_a_large_file_for_long(self) -> None:
        """Nobody waits for a server that takes more than twice as long as most."""
        world = self.make(window_bytes=1 << 18)
        file = world.encoded(content(1_000_000, 9))
        world.ring(file)[4].late = {"allocate": 60.0}
        _, took = self.put(world, 1_000_000, 9)
        self.assertLess(took, 8 * RTT)

    def test_what_is_lost_while_the_last_byte_waits(self) -> None:
        """A connection breaks: what went with it is coded again, and the last byte still waits its turn."""
        self.patch(write_batches, "UNKEPT_BATCH_BYTES", 1000)
        self.patch(ask_first_policy, "SMALL_BYTES", 1000)
        for at_s in (0.5, 0.75, 1.0, 1.25, 2.0):
            world = self.make(window_bytes=1 << 20, bytes_per_s=float(1 << 17))
            file = world.encoded(content(900_000, 9))
            ring = world.ring(file)
            ring[4].late = {"allocate": 3.0}
            for line in ring[:4]:
                line.lets_go = True
                world.network.callLater(at_s * RTT, line.lose)
            world.grid._open_putter()._means.history.ended(True)
            self.assertEqual(self.put(world, 900_000, 9)[0], 10)
            for line in world.lines:
                for number, share in line.shares(file.cap.storage_index).items():
                    self.assertEqual(share, file.shares[number])
