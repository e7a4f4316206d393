"""Repairing files: what comes back is what was there, where it belongs, or an error says why not."""

from __future__ import annotations

import gc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import LitCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CapError, NoSpace, NotEnoughSharesError
from pipegrid.transfer.results import RepairResult
from pipegrid.transfer.settings import DownloadSettings
from tests.transfer.world import RTT, Line, Told, World, content

SEGMENTS = Params(3, 10, 30_000)


class RepairTestCase(SynchronousTestCase):
    """One world with one file in it, some of whose shares are gone."""

    def make(
        self,
        size: int = 1000,
        world: World | None = None,
        missing: tuple[int, ...] = (),
        params: Params | None = None,
    ) -> None:
        self.world = world or World(params=params, download=DownloadSettings(silence_s=16.0))
        self.file = self.world.encoded(content(size))
        self.ring = self.world.ring(self.file)
        order = self.ring
        n = self.world.params.total_shares
        self.world.plant(
            self.file, {i: order[i % len(order)] for i in range(n) if i not in missing}
        )

    @property
    def index(self) -> bytes:
        index = self.file.cap.storage_index
        assert index is not None
        return index

    def repair(self, cap: Any = None, **options: Any) -> RepairResult:
        result, self.took = self.world.timed(
            self.world.grid.repair(self.file.cap if cap is None else cap, **options)
        )
        self.assert_clean()
        return result

    def assert_clean(self) -> None:
        """No timer is left, no unfinished share, and no byte of any share is wrong."""
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        self.world.settle()
        for line in self.world.lines:
            self.assertEqual(line.storage.uploads, {})

    def spoil(self, line: Line, number: int, offset: int = 100) -> None:
        share = bytearray(line.storage.shares[self.index, number])
        share[offset] ^= 1
        line.storage.shares[self.index, number] = bytes(share)

    def assert_identical(self, *but: tuple[int, str]) -> None:
        """Every copy on every server is the share that the uploader made."""
        for line in self.world.lines:
            for number, data in line.shares(self.index).items():
                if (number, line.name) not in but:
                    self.assertEqual(data, self.file.shares[number], (number, line.name))


class RepairTests(RepairTestCase):
    """What a repair does."""

    def test_missing_shares(self) -> None:
        """They come back as they were, to the servers where readers look first."""
        for size, params in ((1000, None), (100_000, SEGMENTS), (3_000_000, None)):
            for missing in ((0,), (9,), (1, 2, 5), tuple(range(7)), tuple(range(3, 10))):
                self.make(size, missing=missing, params=params)
                result = self.repair()
                self.assertEqual(result.uploaded, {n: self.ring[n].name for n in missing})
                self.assertFalse(result.before.healthy)
                self.assertEqual(len(result.before.good_shares), 10 - len(missing))
                self.assertTrue(result.after.healthy and result.whole)
                self.assertEqual(result.after.happiness, 10)
                self.assertEqual(
                    result.after.good_shares, {n: [self.ring[n].name] for n in range(10)}
                )
                self.assert_identical()
                self.assertEqual(self.world.fetch(self.file.cap), content(size))

    def test_a_verify_cap_is_enough(self) -> None:
        """No key is needed: the shares are made from ciphertext."""
        self.make(100_000, missing=(0, 4), params=SEGMENTS)
        result = self.repair(str(self.file.cap.verifier()))
        self.assertEqual(sorted(result.uploaded), [0, 4])
        self.assertEqual(result.cap, self.file.cap.verifier())
        self.assert_identical()

    def test_a_healthy_file(self) -> None:
        """Nothing is sent but leases."""
        self.make(100_000, params=SEGMENTS)
        told = Told()
        result = self.repair(progress=told)
        self.assertEqual((result.uploaded, result.before, told), ({}, result.after, []))
        self.assertTrue(result.whole)
        self.assertEqual(result.renewed, sorted(line.name for line in self.ring))
        for line in self.world.lines:
            self.assertEqual((line.count("allocate"), line.count("add_lease")), (0, 1))

    def test_leases(self) -> None:
        """They are renewed once on each server, by an allocation or by themselves."""
        self.make(missing=(3,))
        self.assertEqual(self.repair().renewed, sorted(line.name for line in self.ring))
        for line in self.world.lines:
            self.assertEqual(line.count("allocate") + line.count("add_lease"), 1)

    def test_a_literal_file(self) -> None:
        """There is nothing to do."""
        self.make()
        result = self.repair(LitCap(b"x"))
        self.assertTrue(result.whole and result.after.healthy)
        self.assertEqual((result.uploaded, self.took), ({}, 0))

    def test_other_caps(self) -> None:
        """What cannot be checked cannot be repaired."""
        self.make()
        with self.assertRaises(CapError):
            self.repair("URI:NEW:x")

    def test_progress(self) -> None:
        """Acknowledged bytes of what is made again, ending at all of them."""
        self.make(1_000_000, missing=(0, 1))
        told = Told()
        self.repair(progress=told)
        self.assertEqual(told[-1], (2 * len(self.file.shares[0]),) * 2)
        self.assertEqual(told, sorted(told))

    def test_memory(self) -> None:
        """Only what is on its way is held."""
        world = World(bytes_per_s=float(1 << 22), window_bytes=1 << 18)
        self.make(20_000_000, world=world, missing=(0, 9))
        started = world.grid.repair(self.file.cap)
        peers = world.grid._peers
        most = 0
        while not started.called:
            world.step()
            most = max(most, sum(peer.pipeline.bytes_in_flight for peer in peers))
        self.successResultOf(started)
        self.assertLessEqual(most, 2 * ((1 << 18) + (1 << 20)))
        self.assert_identical()

    def test_round_trips(self) -> None:
        """List, verify, find room and renew, fetch, send: one each; of small shares the third costs none."""
        for size, trips in ((100_000, 5), (1000, 4)):
            self.make(size, missing=(0,))
            self.repair()
            self.assertEqual(self.took, trips * RTT)


class PlacementTests(RepairTestCase):
    """Where shares go."""

    def test_damaged_shares_go_elsewhere(self) -> None:
        """Their server takes no other in their place, and is told; two of them change places."""
        self.make(missing=())
        self.spoil(self.ring[2], 2)
        self.spoil(self.ring[5], 5)
        result = self.repair()
        self.assertEqual(result.uploaded, {2: self.ring[5].name, 5: self.ring[2].name})
        self.assertTrue(result.whole)
        self.assertEqual(result.after.happiness, 10)
        self.assertEqual(len(result.after.corrupt), 2)
        self.assertEqual(self.ring[2].count("advise_corrupt_share"), 1)
        self.assertTrue(result.after.healthy)
        checked = self.world.run(self.world.grid.check(self.file.cap, verify=True))
        self.assertTrue(checked.healthy, "whatever damaged copies cannot be removed")
        self.assertEqual(
            {(e.share_number, e.server) for e in checked.corrupt},
            {(e.share_number, e.server) for e in result.before.corrupt},
        )
        self.assert_identical((2, self.ring[2].name), (5, self.ring[5].name))

    def test_one_damaged_share(self) -> None:
        """
        It goes to a server that has another, and the one whose copy is damaged gets another share; where
        there is room elsewhere it goes there.
        """
        self.make()
        self.spoil(self.ring[2], 2)
        result = self.repair()
        self.assertTrue(result.whole)
        self.assertNotEqual(result.uploaded[2], self.ring[2].name)
        self.assertEqual(result.after.happiness, 10)
        self.assertIn(self.ring[2].name, result.uploaded.values())
        self.make(world=World(12))
        self.spoil(self.ring[2], 2)
        self.assertEqual(self.repair().uploaded, {2: self.ring[10].name})

    def test_dead_servers(self) -> None:
        """What they had is made again on those that are left."""
        self.make(world=World(14), missing=(7,))
        for line in self.ring[:3]:
            line.down = True
        result = self.repair()
        self.assertEqual(sorted(result.uploaded), [0, 1, 2, 7])
        self.assertEqual(result.after.happiness, 10)
        self.assertEqual(result.after.unreachable, sorted(line.name for line in self.ring[:3]))
        self.assert_identical()

    def test_a_server_that_brings_next_to_nothing(self) -> None:
        """A byte now and then keeps no repair from ending: its share is made again, for another server."""
        self.make()
        self.ring[3].bytes_per_s, self.ring[3].chunk_bytes = 0.125, 1
        result = self.repair()
        self.assertEqual(list(result.uploaded), [3])
        self.assertNotEqual(result.uploaded[3], self.ring[3].name)
        self.assertLessEqual(self.took, 60.0)

    def test_full_servers(self) -> None:
        """Room is found before a byte is sent of a large share; a full server keeps what it has."""
        self.make(100_000, world=World(12), missing=(0, 1, 2))
        for line in self.ring[:3]:
            line.storage.capacity_bytes = 0
        result = self.repair()
        self.assertTrue(result.whole)
        self.assertEqual({*result.uploaded.values()} & {line.name for line in self.ring[:3]}, set())
        self.assertEqual([line.sent_bytes for line in self.ring[:3]], [36] * 3)
        names = sorted(line.name for line in self.ring[:3])
        once = f"{names[0]} takes no shares ({names[1]}, {names[2]} too)"
        self.assertEqual(result.reasons, [once])

    def test_nobody_takes_them(self) -> None:
        """The result says what is missing still, and why."""
        self.make(missing=(0, 1))
        for line in self.ring:
            line.storage.capacity_bytes = 0
        result = self.repair()
        self.assertEqual((result.uploaded, result.whole), ({}, False))
        self.assertEqual(result.after.good_shares, result.before.good_shares)
        (reason,) = result.reasons
        self.assertRegex(reason, r"server-0 takes no shares \(.* and 6 more too\)")
        self.assertEqual(len(result.reasons_by_server), 10)

    def test_crowded_shares_are_spread(self) -> None:
        """All are there, but too few servers have them: those that have none get one."""
        self.make(world=World(10), missing=tuple(range(10)))
        self.world.plant(self.file, {n: self.ring[n % 5] for n in range(10)})
        result = self.repair()
        self.assertEqual((result.before.happiness, result.after.happiness), (5, 10))
        self.assertEqual(len(result.uploaded), 5)


class FaultTests(RepairTestCase):
    """Servers that fail while it goes on."""

    def test_too_few_are_left(self) -> None:
        """It says how many."""
        self.make(missing=tuple(range(8)))
        with self.assertRaises(NotEnoughSharesError) as caught:
            self.repair()
        self.assertEqual((caught.exception.found, caught.exception.needed), (2, 3))
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_a_server_fails_in_the_middle(self) -> None:
        """Its share is made again elsewhere."""
        for operation in ("down", "silent", "answers_lost", "forget"):
            self.make(
                9_000_000,
                world=World(
                    12, bytes_per_s=float(1 << 22), download=DownloadSettings(silence_s=16.0)
                ),
                missing=(0, 9),
            )
            started = self.world.grid.repair(self.file.cap)
            line = self.ring[0]
            while line.sent_bytes < 1_000_000:
                self.world.step()
            if operation == "down":
                line.down = True
            elif operation == "forget":
                line.forget = 1
            else:
                getattr(line, operation).add("*" if operation == "silent" else "write")
            result = self.world.run(started)
            self.assertTrue(result.whole, operation)
            self.assertEqual(result.uploaded[9], self.ring[9].name)
            self.assert_identical()
            self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_the_disk_is_full_in_the_middle(self) -> None:
        """Nothing of the share stays there."""
        self.make(9_000_000, world=World(12, bytes_per_s=float(1 << 22)), missing=(0,))
        started = self.world.grid.repair(self.file.cap)
        while self.ring[0].sent_bytes < 1_000_000:
            self.world.step()
        self.ring[0].breaks["write"] = NoSpace("the disk is full")
        result = self.world.run(started)
        self.assertEqual(result.uploaded, {0: self.ring[10].name})
        self.assertEqual(result.reasons, [f"{self.ring[0].name}: the disk is full"])
        self.assert_clean()

    def test_an_interrupted_repair_is_resumed(self) -> None:
        """Cancelling leaves no timer; a rerun goes on with what was sent."""
        self.make(9_000_000, world=World(bytes_per_s=float(1 << 22)), missing=(0,))
        started = self.world.grid.repair(self.file.cap)
        while self.ring[0].sent_bytes < 1_000_000:
            self.world.step()
        started.cancel()
        self.failureResultOf(started, CancelledError)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        self.world.settle()
        self.assertTrue(self.repair().whole)
        self.assert_identical()

    def test_cancelled_at_any_time(self) -> None:
        """Nothing is left, whenever it is."""
        for steps in range(0, 60, 3):
            self.make(100_000, missing=(0, 4), params=SEGMENTS)
            started = self.world.grid.repair(self.file.cap)
            for _ in range(steps):
                if not self.world.step():
                    break
            if started.called:
                break
            started.cancel()
            self.failureResultOf(started, CancelledError)
            self.assertEqual(self.world.clock.getDelayedCalls(), [])
        else:
            self.fail("it never ended")
        gc.collect()

    def test_somebody_else_repairs_too(self) -> None:
        """Both end well, and nothing is there twice."""
        self.make(100_000, missing=(0, 4), params=SEGMENTS)
        one = self.world.grid.repair(self.file.cap)
        other = self.world.client(b"t" * 32).repair(self.file.cap)
        first, second = self.world.run(one), self.world.run(other)
        self.assertTrue(first.whole or second.whole)
        self.assert_identical()

    def test_a_share_that_rots_between_check_and_use(self) -> None:
        """Another one is read instead."""
        self.make(9_000_000, world=World(bytes_per_s=float(1 << 22)), missing=(9,))
        started = self.world.grid.repair(self.file.cap)
        while not self.ring[9].count("allocate"):
            self.world.step()
        self.spoil(self.ring[1], 1, 2_000_000)
        self.assertTrue(self.world.run(started).whole)
        self.assert_identical((1, self.ring[1].name))


class PropertyTests(SynchronousTestCase):
    """Whatever is lost, as long as k shares are left."""

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.data())
    def test_repaired_shares_are_the_original_ones(self, data: st.DataObject) -> None:
        """Byte for byte, for any sizes and parameters."""
        n = data.draw(st.integers(1, 12))
        k = data.draw(st.integers(1, n))
        params = Params(k, n, data.draw(st.sampled_from([64, 300, 1 << 20])))
        world = World(data.draw(st.integers(1, 12)), params=params, happy=1)
        file = world.encoded(content(data.draw(st.integers(56, 2000))))
        ring = world.ring(file)
        left = data.draw(st.sets(st.integers(0, n - 1), min_size=k))
        world.plant(file, {i: ring[data.draw(st.integers(0, len(ring) - 1))] for i in sorted(left)})
        result = world.run(world.grid.repair(file.cap.verifier()))
        self.assertTrue(result.whole)
        self.assertEqual(set(result.uploaded) | left, set(range(n)))
        index = file.cap.storage_index
        assert index is not None
        for line in world.lines:
            for number, share in line.shares(index).items():
                self.assertEqual(share, file.shares[number])
        self.assertEqual(world.happiness(index), min(n, len(ring)))
        self.assertEqual(world.clock.getDelayedCalls(), [])
