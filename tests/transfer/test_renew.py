"""Leases are renewed where shares are, in one round trip, and nothing is read."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, fail

from pipegrid.core.caps import LitCap
from pipegrid.errors import CapError, ServerRefused
from pipegrid.flow.concurrency_limits import MANY
from pipegrid.transfer.put.put_many import SMALL_BYTES
from pipegrid.transfer.results import RenewResult
from tests.transfer.test_repair import RepairTestCase
from tests.transfer.world import RTT, Told, World


class RenewTests(RepairTestCase):
    """``Grid.renew`` and ``Grid.check(add_lease=True)``."""

    def renew(self) -> RenewResult:
        result, self.took = self.world.timed(self.world.grid.renew(self.file.cap))
        self.assert_clean()
        return result

    def test_a_round_trip(self) -> None:
        """Every server is asked for shares and lease at once; nothing is read or written."""
        self.make(missing=(1, 7))
        result = self.renew()
        self.assertAlmostEqual(self.took, RTT, delta=RTT / 10)
        self.assertEqual(sorted(result.leases), [0, 2, 3, 4, 5, 6, 8, 9])
        self.assertEqual((result.unreachable, result.reasons, result.recoverable), ([], [], True))
        for number, line in enumerate(self.ring):
            self.assertEqual({name for _, name in line.calls}, {"list_shares", "add_lease"})
            leases = line.storage.leases.get(self.index, set())
            self.assertEqual(len(leases), 0 if number in (1, 7) else 1)

    def test_leases_are_those_of_uploads(self) -> None:
        """The same secret as a put's, so that it is renewed and not a second one added."""
        self.world = World()
        data = bytes(1000)
        cap = self.world.run(self.world.grid.put(data)).cap
        assert cap.storage_index is not None
        before = [set(line.storage.leases[cap.storage_index]) for line in self.world.lines]
        self.world.run(self.world.grid.renew(cap))
        self.world.run(self.world.grid.check(cap, add_lease=True))
        after = [set(line.storage.leases[cap.storage_index]) for line in self.world.lines]
        self.assertEqual((before, [len(each) for each in after]), (after, [1] * 10))

    def test_servers_that_fail(self) -> None:
        """Out of reach, or unwilling: told apart, and the others get theirs."""
        self.make()
        gone, unwilling = self.ring[2], self.ring[5]
        gone.down = True
        error = ServerRefused(f"{unwilling.name} gives no leases", unwilling.name)
        self.patch(unwilling.memory, "add_lease", lambda *_: fail(error))
        result = self.renew()
        self.assertEqual(sorted(result.leases), [0, 1, 3, 4, 6, 7, 8, 9])
        self.assertEqual(result.unreachable, [gone.name])
        self.assertEqual(result.reasons, [str(error)])

    def test_check_adds_leases_if_asked(self) -> None:
        """Where good shares were found, and nowhere else."""
        self.make(missing=(4,))
        self.spoil(self.ring[6], 6)
        for add_lease, verify, renewed in ((False, False, 0), (True, False, 9), (True, True, 8)):
            checking = self.world.grid.check(self.file.cap, add_lease=add_lease, verify=verify)
            self.assertEqual(len(self.world.run(checking).renewed), renewed)

    def test_what_has_no_leases(self) -> None:
        """A cap that holds its file, and one of another kind."""
        self.world = World()
        result = self.world.run(self.world.grid.renew(LitCap(b"small")))
        self.assertEqual((result.leases, result.total_shares), ({}, 0))
        self.failureResultOf(self.world.grid.renew("URI:DIR2-MDMF:x"), CapError)

    def test_cancelling(self) -> None:
        """Both questions to each server are given up."""
        self.make()
        running = self.world.grid.renew(self.file.cap)
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.assert_clean()


class PutManyTests(RepairTestCase):
    """``Grid.put_many`` tells how far each file is."""

    def test_progress(self) -> None:
        """Each under its number, from nothing to all; what its key is made from, before."""
        self.world = World()
        told: dict[int, Told] = {0: Told(), 1: Told()}
        hashed: list[tuple[int, int, int]] = []
        sources = [bytes(100_000), bytes(3_000_000)]
        results = self.world.run(
            self.world.grid.put_many(
                sources,
                progress=lambda number, done, total: told[number](done, total),
                hashing=lambda *each: hashed.append(each),
            )
        )
        for number, result in enumerate(results):
            total = 10 * result.share_bytes  # type: ignore[union-attr]
            self.assertEqual(told[number][0], (0, total))
            self.assertEqual(told[number][-1], (total, total))
        self.assertEqual(hashed, [(1, 0, 3_000_000)])

    def test_many_are_expected(self) -> None:
        """Servers are told before the first of many small files, and of fewer or of large ones nothing."""
        self.world = World()
        expected: list[tuple[int, int]] = []
        line = self.world.lines[0]
        self.patch(line, "expect", lambda objects: expected.append((objects, len(line.calls))))
        small = [bytes([number]) * 100 for number in range(MANY)]
        for sources in (small[1:], [*small[1:], bytes(SMALL_BYTES + 1), b"literal"], small):
            self.world.run(self.world.grid.put_many(sources))
            line.calls.clear()
        self.assertEqual(expected, [(MANY, 0)])

    def test_what_was_there(self) -> None:
        """Shares that servers have are told of as found, and are progress as well."""
        self.world = World()
        data = bytes(100_000)
        told, found = Told(), Told()
        result = self.world.run(self.world.grid.put(data, found=found))
        total = 10 * result.share_bytes
        self.assertEqual(found, [(0, total)])
        found.clear()
        self.world.run(self.world.grid.put(data, progress=told, found=found))
        self.assertEqual((told[-1], found[-1]), ((total, total), (total, total)))
