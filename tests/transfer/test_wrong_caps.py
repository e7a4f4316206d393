"""A character of a cap was copied wrongly: that is said, and no server is accused."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.error_report import ExitStatus, status_of
from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.ueb import CapCheck, pack
from pipegrid.errors import CapMismatch, NotEnoughSharesError
from pipegrid.transfer.failure_messages import SearchOutcome, too_few_shares
from tests.transfer.world import RTT, World, content

SIZE = 200_000
OPERATIONS = ("get", "check", "verify", "repair")


class WrongCapTests(SynchronousTestCase):
    """What each operation says of a cap that is nearly right."""

    def make(self, params: Params | None = None) -> None:
        self.world = World(params=params or Params(3, 10, 30_000))
        self.file = self.world.plant(self.world.encoded(content(SIZE)))
        self.ring = self.world.ring(self.file)

    def start(self, operation: str, cap: ChkCap) -> Deferred[Any]:
        grid = self.world.grid
        if operation == "get":
            return grid.get(cap, BytesIO())
        if operation == "repair":
            return grid.repair(cap)
        return grid.check(cap, verify=operation == "verify")

    def accused(self) -> int:
        self.world.settle()
        return sum(line.count("advise_corrupt_share") for line in self.world.lines)

    def refused(self, cap: ChkCap, words: str) -> None:
        for operation in OPERATIONS:
            with self.assertRaises(CapMismatch, msg=operation) as caught:
                self.world.run(self.start(operation, cap))
            self.assertIn("does not fit the file that is stored", str(caught.exception))
            self.assertIn(words, str(caught.exception))
            self.assertIn("copy it again", str(caught.exception))
            self.assertEqual(status_of(caught.exception), ExitStatus.USAGE)
            self.assertEqual(self.accused(), 0, operation)
            self.assertEqual(sum(line.count("allocate") for line in self.world.lines), 0)
            self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_a_wrong_number(self) -> None:
        """In the size, k or n: the UEB that the cap names contradicts it. With either segment size."""
        for params in (Params(3, 10, 30_000), Params()):
            self.make(params)
            wrong: tuple[dict[str, Any], ...] = (
                {"size": SIZE + 1},
                {"size": SIZE - 7},
                {"size": 10 * SIZE},
                {"size": 57},
                {"required_shares": 8},
                {"required_shares": 2},
                {"required_shares": 1},
                {"total_shares": 11},
                {"total_shares": 70},
                {"total_shares": 3},
                {"required_shares": 1, "total_shares": 1},
            )
            for changes in wrong:
                cap = attrs.evolve(self.file.cap, **changes)
                self.refused(cap, f"{SIZE} bytes in 3 of 10 shares")

    def test_a_wrong_k_and_few_servers(self) -> None:
        """Also if there are fewer shares than the wrong k asks for."""
        self.make()
        for line in self.ring[4:]:
            line.storage.shares.clear()
        self.refused(attrs.evolve(self.file.cap, required_shares=8), "3 of 10 shares")

    def test_a_wrong_hash(self) -> None:
        """All servers agree on another one."""
        self.make()
        cap = attrs.evolve(self.file.cap, ueb_hash=b"\1" + self.file.cap.ueb_hash[1:])
        self.refused(cap, "servers agree on a file of 200000 bytes in 3 of 10 shares")

    def test_a_wrong_hash_and_damage(self) -> None:
        """Two that agree are enough, whatever has happened to the others."""
        self.make()
        where = next(s.start for s in self.file.sections if s.name == "uri_extension")
        for number in range(8):
            key = self.file.cap.storage_index, number
            share = bytearray(self.file.shares[number])
            share[where + 20 + number] ^= 1
            self.ring[number].storage.shares[key] = bytes(share)
        cap = attrs.evolve(self.file.cap, ueb_hash=bytes(32))
        self.refused(cap, "servers agree")

    def test_a_wrong_key(self) -> None:
        """It leads to nowhere: that is another sentence."""
        self.make()
        cap = attrs.evolve(self.file.cap, key=bytes(16))
        for operation in ("get", "repair"):
            with self.assertRaises(NotEnoughSharesError) as caught:
                self.world.run(self.start(operation, cap))
            self.assertIn("no share of the file is on any of 10 servers", str(caught.exception))
        self.assertFalse(self.world.run(self.start("check", cap)).recoverable)

    def test_one_server_with_another_ueb_is_damaged(self) -> None:
        """The others have the right one: it is named, and told."""
        self.make()
        key = self.file.cap.storage_index, 0
        share = bytearray(self.file.shares[0])
        share[next(s.start for s in self.file.sections if s.name == "uri_extension") + 30] ^= 1
        self.ring[0].storage.shares[key] = bytes(share)
        got = self.world.run(self.start("get", self.file.cap))
        self.assertEqual([e.server for e in got.corrupt], [self.ring[0].name])
        self.assertEqual(self.accused(), 1)
        verified = self.world.run(self.start("verify", self.file.cap))
        self.assertEqual([e.server for e in verified.corrupt], [self.ring[0].name])
        self.assertTrue(self.world.run(self.start("repair", self.file.cap)).whole)

    def test_servers_that_agree_on_a_lie(self) -> None:
        """Most have another file's shares in its place; those that have the right ones are believed."""
        self.make()
        other = self.world.encoded(content(SIZE, "other"))
        index = self.file.cap.storage_index
        for number in range(7):
            self.ring[number].storage.shares[index, number] = other.shares[number]
        into = BytesIO()
        got = self.world.run(self.world.grid.get(self.file.cap, into))
        self.assertEqual(into.getvalue(), content(SIZE))
        self.assertGreaterEqual(len(got.corrupt), 3)
        self.assertGreaterEqual(self.accused(), 3)
        verified = self.world.run(self.start("verify", self.file.cap))
        self.assertEqual({e.share_number for e in verified.corrupt}, set(range(7)))
        self.assertTrue(verified.recoverable)

    def test_one_server_alone_proves_nothing(self) -> None:
        """With a single share left its damage is what it is."""
        self.make()
        for line in self.ring[1:]:
            line.storage.shares.clear()
        cap = attrs.evolve(self.file.cap, ueb_hash=bytes(32))
        with self.assertRaises(NotEnoughSharesError):
            self.world.run(self.start("get", cap))
        self.assertEqual(self.accused(), 1)
        self.assertEqual(len(self.world.run(self.start("verify", cap)).corrupt), 1)

    def test_it_costs_a_healthy_check_nothing(self) -> None:
        """The usual place of the UEB is asked with the lists; an unusual one costs two round trips."""
        for params, trips in ((Params(), 1), (Params(3, 10, 30_000), 3)):
            self.make(params)
            _, took = self.world.timed(self.start("check", self.file.cap))
            self.assertEqual(took, trips * RTT)


class CapFitTests(SynchronousTestCase):
    """What UEBs prove."""

    def test_records_that_are_none(self) -> None:
        """Other bytes are no witnesses, however many servers have them."""
        fit = CapCheck(ChkCap(bytes(16), bytes(32), 3, 10, 1000))
        for server in range(5):
            fit.record(server, b"")
            fit.record(server, b"garbage")
            fit.record(server, b"size:3:abc,")
        self.assertFalse(fit.fits)
        self.assertIsNone(fit.mismatch)
        packed = pack(Params().geometry(1000), bytes(32), bytes(32), bytes(32))
        fit.record(1, packed)
        fit.record(1, packed)
        self.assertIsNone(fit.mismatch, "one server")
        fit.record(2, packed)
        self.assertIsNotNone(fit.mismatch)


class ReasonTests(SynchronousTestCase):
    """Why something could not be had."""

    def test_plurals(self) -> None:
        """One share is a share."""
        text = str(too_few_shares("get", SearchOutcome(1, 3, 10, 1, {}, True)))
        self.assertIn("found 1 good share on 1 server, but 3 are needed;", text)
        outcome = SearchOutcome(0, 1, 10, 2, {"a": "a is down"}, False)
        text = str(too_few_shares("get", outcome))
        self.assertIn("found 0 good shares on 2 servers, but 1 is needed (a is down);", text)
