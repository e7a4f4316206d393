"""Changes of slots whose connection is lost: made at most once, and the answer shows whose change it was."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ServerError, ServerUnreachable
from pipegrid.testing.network import leaks
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.requests import GbsSettings
from pipegrid.wire.storage_messages import SlotResult
from tests.scratch import scratch_path
from tests.transport.foolscap_world import FoolscapWorld
from tests.transport.gbs_world import CLIENT, GbsWorld
from tests.transport.slot_contract import SLOT, SLOT_SECRETS, made, replaced

OLD, NEW = b"old checkstring", b"new checkstring"


class GbsLossTests(SynchronousTestCase):
    """Over HTTPS a change is sent again by the transport."""

    def make(self) -> tuple[GbsWorld, GbsServer]:
        """Return a network with one server that has one share."""
        world = GbsWorld(scratch_path(self), settings=GbsSettings(timeout_s=10))
        self.addCleanup(world.close)
        writer = world.connect()
        world.run(writer.read_test_write(SLOT, SLOT_SECRETS, {0: made(OLD)}))
        world.run(writer.disconnect())
        return world, world.connect()

    def test_cut_anywhere(self) -> None:
        """Wherever the connection breaks, the share is changed, and the answer shows the old or the new."""
        seen = set()
        for towards, places in (("s0", range(0, 800, 23)), (CLIENT, range(0, 260, 13))):
            for after_bytes in places:
                world, server = self.make()
                where = f"cut behind byte {after_bytes} towards {towards}"
                # The first connection was the writer's.
                world.network.cut(CLIENT, "s0", 1, towards, after_bytes, False)
                changing = server.read_test_write(
                    SLOT, SLOT_SECRETS, {0: replaced(OLD, NEW)}, [(0, 99)]
                )
                reading = server.read_slot_share(SLOT, 0, 0, 99)
                result = world.run(changing)
                self.assertIn(
                    result,
                    (SlotResult(True, {0: (OLD,)}), SlotResult(False, {0: (NEW,)})),
                    where,
                )
                self.assertEqual(world.run(reading), NEW, where)
                # Who is refused must know that the first time it may have been written.
                self.assertTrue(result.success or result.repeated, where)
                seen.add(result.success)
                world.run(server.disconnect())
                world.clock.advance(700)
                self.assertEqual(leaks(world.clock, world.network), [], where)
        self.assertEqual(seen, {True, False}, "both a lost request and a lost answer were tried")


class FoolscapLossTests(SynchronousTestCase):
    """Over Foolscap it fails, and says that it may have happened; its caller may repeat it."""

    def test_cut(self) -> None:
        """A cut fails the change; repeated on a new connection it shows whether it was made."""
        for delay_s, was_made in ((0.02, False), (0.08, True)):
            world = FoolscapWorld(self, scratch_path(self), 0.05)
            server = world.connect()
            server.read_test_write(SLOT, SLOT_SECRETS, {0: made(OLD)})
            world.settle()
            failures: list[Any] = []
            server.read_test_write(SLOT, SLOT_SECRETS, {0: replaced(OLD, NEW)}).addErrback(
                failures.append
            )
            world.clock.advance(delay_s)
            wire = world.connector.wires[0]
            wire.cut = wire.other.cut = True
            for end in (wire, wire.other):
                end._lost()
            world.settle()
            error = failures[0].value
            self.assertIsInstance(error, ServerUnreachable)
            self.assertTrue(error.may_have_happened)
            results: list[Any] = []
            server.read_test_write(SLOT, SLOT_SECRETS, {0: replaced(OLD, NEW)}, [(0, 99)]).addBoth(
                results.append
            )
            world.settle()
            expected = SlotResult(False, {0: (NEW,)}) if was_made else SlotResult(True, {0: (OLD,)})
            self.assertEqual(results, [expected])
            self.assertNotIsInstance(results[0], ServerError)
            server.disconnect()
            world.settle()


class FoolscapRoundTripTests(SynchronousTestCase):
    """What slots cost over Foolscap, with the connection up."""

    def test_every_slot_operation_is_one_round_trip(self) -> None:
        """Changes, lists, reads of all shares, leases and complaints: none needs a question first."""
        world = FoolscapWorld(self, scratch_path(self), 0.05)
        server = world.connect()
        server.version()
        world.settle()
        operations: list[Any] = [
            lambda: server.read_test_write(SLOT, SLOT_SECRETS, {0: made(OLD)}, [(0, 1)]),
            lambda: server.list_slot(SLOT),
            lambda: server.read_slot(SLOT, [(0, 5), (7, 9)]),
            lambda: server.read_slot_share(SLOT, 0, 1, 2),
            lambda: server.add_slot_lease(SLOT, SLOT_SECRETS.lease),
            lambda: server.advise_corrupt_slot_share(SLOT, 0, "bad"),
        ]
        for operation in operations:
            self.assertAlmostEqual(world.time_of(operation), 0.1, places=2)
        server.disconnect()
        world.settle()
