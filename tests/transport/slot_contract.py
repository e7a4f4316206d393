"""The part of the contract that is about slots of mutable shares; ``contract`` has the rest, and this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.errors import NoSuchShare, ServerUnreachable, WrongSecret
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotResult, SlotSecrets

if TYPE_CHECKING:
    from twisted.trial.unittest import SynchronousTestCase

    class Mixin(SynchronousTestCase):
        """What a mixin may count on."""
else:
    Mixin = object

T = TypeVar("T")

SLOT = bytes(range(2, 18))
OTHER_SLOT = bytes(range(3, 19))
SLOT_SECRETS = SlotSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"w" * 32)
OTHERS_SLOT_SECRETS = SlotSecrets(LeaseSecrets(b"R" * 32, b"C" * 32), b"W" * 32)
ABSENT = ((0, 1, b""),)


def made(data: bytes) -> ShareChange:
    """Make a share that must not be there."""
    return ShareChange(ABSENT, ((0, data),))


def replaced(old: bytes, new: bytes) -> ShareChange:
    """Replace a share that begins like this."""
    return ShareChange(((0, len(old), old),), ((0, new),))


class SlotContract(Mixin):
    """To be mixed in with what ``StorageServerContract`` asks for."""

    server: StorageServer

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        """See ``StorageServerContract``."""
        raise NotImplementedError

    def resolve(self, waiting: Deferred[T]) -> T:
        """See ``StorageServerContract``."""
        raise NotImplementedError

    def settle(self) -> None:
        """See ``StorageServerContract``."""

    def fails(self, error: type[Exception], waiting: Deferred[Any]) -> Exception:
        """See ``StorageServerContract``."""
        raise NotImplementedError

    def change(
        self, changes: dict[int, ShareChange], reads: tuple[tuple[int, int], ...] = ()
    ) -> SlotResult:
        """Test, read, write."""
        return self.resolve(self.server.read_test_write(SLOT, SLOT_SECRETS, changes, reads))

    def content(self) -> dict[int, bytes]:
        """Return all shares, up to 100 bytes of each."""
        found = self.resolve(self.server.read_slot(SLOT, [(0, 100)], {0, 1, 2}))
        return {number: pieces[0] for number, pieces in found.items()}

    def test_the_largest_calls(self) -> None:
        """
        Of Tahoe-LAFS's client: see ``wire.storage_messages``; one of them for a part of an MDMF file of 1 GB.
        """
        tests = ((0, 1, b""),) * 30
        many = {
            number: ShareChange(tests, tuple((at, b"x") for at in range(30)))
            for number in range(255)
        }
        result = self.change(many, ((0, 57),))
        self.assertEqual((result.success, result.data), (True, {}))
        size = 531
        blocks = ShareChange((), tuple((at * size, bytes(size)) for at in range(8200)))
        self.assertTrue(self.change({255: blocks}).success)

    def test_shares_are_made_and_replaced(self) -> None:
        """Absent shares are made, several at once; then each is replaced if it is what was expected."""
        self.assertEqual(self.change({0: made(b"zero"), 7: made(b"seven")}), SlotResult(True, {}))
        self.assertEqual(self.content(), {0: b"zero", 7: b"seven"})
        result = self.change({7: replaced(b"seven", b"SEVEN")}, ((0, 2), (3, 9), (5, 1)))
        self.assertEqual(result, SlotResult(True, {0: (b"ze", b"o", b""), 7: (b"se", b"en", b"")}))
        self.assertEqual(self.content(), {0: b"zero", 7: b"SEVEN"})

    def test_a_failed_test_changes_nothing(self) -> None:
        """If one test of one share fails nothing is written, and the answer shows what is there."""
        self.change({0: made(b"zero"), 1: made(b"one")})
        result = self.change(
            {0: replaced(b"zero", b"new"), 1: replaced(b"two", b"new"), 2: made(b"new")}, ((0, 3),)
        )
        self.assertEqual(result, SlotResult(False, {0: (b"zer",), 1: (b"one",)}))
        self.assertEqual(self.content(), {0: b"zero", 1: b"one"})
        self.assertFalse(self.change({0: made(b"again")}).success)

    def test_writing_in_pieces(self) -> None:
        """Writes come in their order; what lies between is zero; a cut comes last, and zero deletes."""
        pieces = ((6, memoryview(b"xghix")[1:4]), (0, bytearray(b"abc")), (1, b"BC"))
        self.change({0: ShareChange(ABSENT, pieces)})
        self.assertEqual(self.content(), {0: b"aBC\0\0\0ghi"})
        self.change({0: ShareChange(((6, 3, b"ghi"),), ((8, b"IJKL"),), 10)})
        self.assertEqual(self.content(), {0: b"aBC\0\0\0ghIJ"})
        self.change({0: ShareChange(((0, 1, b"a"),), (), 0)})
        self.assertEqual(self.content(), {})
        self.assertEqual(self.resolve(self.server.list_slot(SLOT)), frozenset())

    def test_an_empty_change_lists_and_reads(self) -> None:
        """Without changes all shares are read, with what belongs to no share left out."""
        self.assertEqual(self.change({}, ((0, 10),)), SlotResult(True, {}))
        self.change({3: made(b"three"), 200: made(b"many")})
        self.assertEqual(self.change({}), SlotResult(True, {3: (), 200: ()}))
        self.assertEqual(
            self.change({}, ((1, 2), (4, 5))),
            SlotResult(True, {3: (b"hr", b"e"), 200: (b"an", b"")}),
        )

    def test_reading_a_slot(self) -> None:
        """All shares are read, whether or not they were expected; those that are not there are left out."""
        reads = [(0, 2), (2, 50)]
        self.assertEqual(self.resolve(self.server.read_slot(SLOT, reads, {0, 1})), {})
        self.change({0: made(b"zero"), 9: made(b"nine")})
        for expected in (frozenset[int](), {0}, {0, 9}, {1, 2, 9}):
            found = self.resolve(self.server.read_slot(SLOT, reads, expected))
            self.assertEqual(found, {0: (b"ze", b"ro"), 9: (b"ni", b"ne")})
        self.assertEqual(self.resolve(self.server.list_slot(SLOT)), {0, 9})
        self.assertEqual(self.resolve(self.server.read_slot(OTHER_SLOT, reads)), {})

    def test_many_reads_of_one_share(self) -> None:
        """A share may be read in a hundred reads at once, each cut at its end."""
        data = bytes(range(100))
        self.change({5: made(data)})
        waiting = [self.server.read_slot_share(SLOT, 5, at, 2) for at in range(101)]
        found = [self.resolve(each) for each in waiting]
        self.assertEqual(found, [data[at : at + 2] for at in range(101)])
        self.fails(NoSuchShare, self.server.read_slot_share(SLOT, 6, 0, 2))
        self.assertEqual(self.resolve(self.server.read_slot_share(SLOT, 5, 1000, 1)), b"")

    def test_a_large_share(self) -> None:
        """A megabyte in large pieces arrives as it was, and is read in one."""
        data = bytes(range(256)) * 4096
        view = memoryview(data)
        pieces = ((0, view[:300_000]), (300_001, view[300_001:]), (300_000, view[300_000:300_001]))
        self.assertTrue(self.change({0: ShareChange(ABSENT, pieces)}).success)
        read = self.server.read_slot_share(SLOT, 0, 0, len(data))
        self.assertEqual(self.resolve(read), data)
        self.assertEqual(self.change({}, ((100_000, 500_000),)).data[0], (data[100_000:600_000],))

    def test_no_slot_operation_waits_for_another(self) -> None:
        """Changes, reads and lists may be sent at once, and are carried out in order."""
        server = self.server
        waiting: list[Deferred[Any]] = [
            server.read_test_write(SLOT, SLOT_SECRETS, {0: made(b"first")}),
            server.list_slot(SLOT),
            server.read_test_write(SLOT, SLOT_SECRETS, {0: replaced(b"first", b"other")}, [(0, 5)]),
            server.read_slot_share(SLOT, 0, 0, 5),
            server.read_slot(SLOT, [(0, 9)], {0}),
            server.read_test_write(SLOT, SLOT_SECRETS, {0: replaced(b"first", b"lost")}, [(0, 5)]),
            server.read_test_write(SLOT, SLOT_SECRETS, {}, [(0, 5)]),
            server.read_test_write(SLOT, SLOT_SECRETS, {1: made(b"one"), 0: replaced(b"o", b"t")}),
            server.list_slot(SLOT),
        ]
        results = [self.resolve(each) for each in waiting]
        self.assertEqual(
            results,
            [
                SlotResult(True, {}),
                {0},
                SlotResult(True, {0: (b"first",)}),
                b"other",
                {0: (b"other",)},
                SlotResult(False, {0: (b"other",)}),
                SlotResult(True, {0: (b"other",)}),
                SlotResult(True, {0: ()}),
                {0, 1},
            ],
        )
        self.assertEqual(self.content(), {0: b"tther", 1: b"one"})

    def test_a_wrong_write_enabler(self) -> None:
        """Another write enabler neither changes nor reads by read-test-write; others may read."""
        self.change({0: made(b"zero")})
        for changes in ({}, {0: replaced(b"zero", b"x")}, {1: made(b"x")}):
            self.fails(
                WrongSecret,
                self.server.read_test_write(SLOT, OTHERS_SLOT_SECRETS, changes, [(0, 1)]),
            )
        self.assertEqual(self.content(), {0: b"zero"})
        other = self.server.read_test_write(OTHER_SLOT, OTHERS_SLOT_SECRETS, {0: made(b"x")})
        self.assertTrue(self.resolve(other).success)

    def test_a_repeated_change_shows_that_it_was_made(self) -> None:
        """Sent twice, a change fails its test the second time, and the answer shows the change itself."""
        self.change({0: made(b"old")})
        for changes, seen in (({0: replaced(b"old", b"new")}, b"old"), ({1: made(b"one")}, None)):
            first, second = self.change(changes, ((0, 3),)), self.change(changes, ((0, 3),))
            self.assertTrue(first.success)
            self.assertFalse(second.success)
            number = next(iter(changes))
            if seen is not None:
                self.assertEqual(first.data[number], (seen,))
            self.assertEqual(second.data[number], (bytes(changes[number].writes[0][1]),))

    def test_slot_leases_and_complaints(self) -> None:
        """Leases and complaints are taken where there is a share, and change nothing about it."""
        self.fails(NoSuchShare, self.server.add_slot_lease(SLOT, SLOT_SECRETS.lease))
        self.fails(NoSuchShare, self.server.advise_corrupt_slot_share(SLOT, 0, "bad"))
        self.change({0: made(b"zero")})
        for lease in (SLOT_SECRETS.lease, OTHERS_SLOT_SECRETS.lease, SLOT_SECRETS.lease):
            self.assertIsNone(self.resolve(self.server.add_slot_lease(SLOT, lease)))
        complaint = self.server.advise_corrupt_slot_share(SLOT, 0, "its signature is wrong: é")
        self.assertIsNone(self.resolve(complaint))
        self.fails(NoSuchShare, self.server.advise_corrupt_slot_share(SLOT, 1, "bad"))
        self.assertEqual(self.content(), {0: b"zero"})

    def test_cancelling_a_slot_operation_harms_no_other(self) -> None:
        """Of operations in flight each can be cancelled without harm to those before and behind."""
        for cancelled in range(5):
            index = bytes([100 + cancelled]) * 16
            server = self.server
            waiting: list[Deferred[Any]] = [
                server.read_test_write(index, SLOT_SECRETS, {0: made(b"zero")}),
                server.list_slot(index),
                server.read_test_write(index, SLOT_SECRETS, {1: made(b"one")}, [(0, 1)]),
                server.read_slot(index, [(0, 4)], {0, 1, 2}),
                server.read_slot_share(index, 1, 0, 3),
            ]
            waiting[cancelled].addErrback(lambda failure: failure.trap(CancelledError))
            waiting[cancelled].cancel()
            if cancelled == 2:  # it may not have happened
                waiting[4].addErrback(lambda failure: failure.trap(NoSuchShare))
            results = [self.resolve(each) for each in waiting]
            if cancelled in (0, 1, 3):
                self.assertEqual(results[4], b"one")
            again = server.read_test_write(index, SLOT_SECRETS, {1: made(b"one")}, [(0, 9)])
            there = self.resolve(again)
            self.assertTrue(there.success or there.data[1] == (b"one",))

    def test_disconnecting_ends_slot_operations(self) -> None:
        """After disconnect every unanswered operation has ended, and a new server object works."""
        self.change({0: made(b"zero")})
        waiting: list[Deferred[Any]] = [
            self.server.read_test_write(SLOT, SLOT_SECRETS, {0: replaced(b"zero", b"null")}),
            self.server.list_slot(SLOT),
            self.server.read_slot(SLOT, [(0, 1)], {0}),
            self.server.read_slot_share(SLOT, 0, 0, 3),
        ]
        ends: list[Any] = []
        for deferred in waiting:
            deferred.addBoth(ends.append)
        self.resolve(self.server.disconnect())
        self.assertEqual(len(ends), len(waiting))
        for end in ends:
            if isinstance(end, Failure):
                self.assertIsInstance(end.value, ServerUnreachable)
        self.server = self.make_server()
        self.assertIn(self.content()[0], (b"zero", b"null"))
