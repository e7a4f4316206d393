"""Leases of many clients on one share: how many are kept, and what finding one costs."""

from __future__ import annotations

import errno
import itertools
import os
from unittest import mock

from pipegrid.core import layout
from pipegrid.core.encoding_parameters import Params
from pipegrid.disk import file_system_calls as disk
from pipegrid.errors import NoSpace, ServerRefused
from pipegrid.storage import share_file
from pipegrid.storage.mutable import slot_file as mutable_containers
from pipegrid.storage.share_file import LEASE_DURATION_S, stored_secret
from pipegrid.wire import gbs_paths_headers
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotSecrets, UploadSecrets
from tests.server.gbs import support as http
from tests.storage.support import NOW, SECRETS, SI, StoreTestCase
from tests.storage.test_mutable_containers import all_leases

MAX = share_file.MAX_LEASES


def lease(number: int) -> LeaseSecrets:
    """Return the secrets of one of many clients."""
    return LeaseSecrets(b"%032d" % number, b"%032d" % (number + 1_000_000))


class ManyLeasesTests(StoreTestCase):
    """An immutable share 0 and a mutable share 1 of the same index, leased by one client."""

    def setUp(self) -> None:
        super().setUp()
        self.put(0, b"immutable")
        secrets = SlotSecrets(SECRETS.lease, b"w" * 32)
        change = {1: ShareChange((), ((0, b"mutable"),))}
        self.store.slots.testv_and_readv_and_writev(SI, secrets, change, ())

    def renewers(self) -> tuple[list[bytes], list[bytes]]:
        """Return the stored renew secrets of both shares."""
        file = self.final(0).read_bytes()
        header = share_file.parse_header(file)
        records = share_file.parse_leases(file[share_file.leases_offset(header, len(file)) :])
        self.assertEqual(len(records), header.lease_count)
        return [each.renew for each in records], self.renewers_of_mutable()

    def expected(self, *numbers: int) -> list[bytes]:
        """Return the stored form of the secrets of clients."""
        return [stored_secret(2, lease(number).renew) for number in numbers]

    def fill(self) -> None:
        """Have as many leases as there may be, each a second younger than the one before."""
        for number in range(1, MAX):
            self.now += 1
            self.store.add_lease(SI, lease(number))

    def test_a_number_that_is_damaged(self) -> None:
        """Of a share of a gigabyte most would count as leases, and be read at once. It stays as it is."""
        path = self.final(0)
        os.truncate(path, 1 << 30)
        with path.open("r+b") as file:
            file.seek(share_file.LEASE_COUNT_OFFSET)
            file.write((10**7).to_bytes(4, "big"))
        read = os.pread

        def read_little(fd: int, length: int, offset: int) -> bytes:
            self.assertLess(length, 1 << 20)
            return read(fd, length, offset)

        self.patch(os, "pread", read_little)
        with self.assertRaisesRegex(ServerRefused, "claims 10000000 leases"):
            self.store.add_lease(SI, lease(5))
        self.assertFalse(share_file.remove_if_expired(str(path), NOW + 10 * LEASE_DURATION_S))
        self.assertEqual(path.stat().st_size, 1 << 30)
        self.assertEqual(len(self.renewers_of_mutable()), 2)

    def renewers_of_mutable(self) -> list[bytes]:
        """Return the stored renew secrets of the mutable share alone."""
        return [each.renew for each in all_leases(self.final(1).read_bytes()) if each.owner]

    def test_as_many_as_there_may_be(self) -> None:
        """256 clients have theirs on shares of either kind, and all of them can renew it."""
        self.fill()
        first = stored_secret(2, SECRETS.lease.renew)
        for found in self.renewers():
            self.assertEqual(found, [first, *self.expected(*range(1, MAX))])
        self.now += 1000
        for number in range(1, MAX):
            self.store.add_lease(SI, lease(number))
        self.now = NOW + LEASE_DURATION_S + 1000
        self.assertEqual(self.store.collect_garbage(), 0)

    def test_one_more_is_refused(self) -> None:
        """Nobody loses a lease that has not run out to somebody else's; data and files stay as they are."""
        self.fill()
        before = self.final(0).read_bytes(), self.final(1).read_bytes()
        self.assertRaises(NoSpace, self.store.add_lease, SI, lease(MAX))
        self.assertEqual((self.final(0).read_bytes(), self.final(1).read_bytes()), before)
        # An allocation says that the share is there, and a write is carried out, all the same.
        secrets = UploadSecrets(lease(MAX), b"u")
        self.assertEqual(self.store.allocate(SI, {0}, 9, secrets).already_have, {0})
        writer = SlotSecrets(lease(MAX), b"w" * 32)
        change = {1: ShareChange((), ((0, b"written"),))}
        self.store.slots.testv_and_readv_and_writev(SI, writer, change, ())
        with self.store.slots.open_share(SI, 1) as reader:
            self.assertEqual(reader.read(0, 10), b"written")
        for found in self.renewers():
            self.assertEqual(len(found), MAX)
            self.assertNotIn(self.expected(MAX)[0], found)

    def test_what_has_run_out_makes_room(self) -> None:
        """The one that ran out longest ago goes first, and the files do not grow."""
        self.fill()
        lengths = [self.final(number).stat().st_size for number in (0, 1)]
        self.now = NOW + LEASE_DURATION_S + 3  # of the first, and of clients 1 and 2
        for number in (MAX, MAX + 1, MAX + 2):
            self.store.add_lease(SI, lease(number))
        self.assertRaises(NoSpace, self.store.add_lease, SI, lease(MAX + 3))
        for found in self.renewers():
            self.assertEqual(found, self.expected(MAX, MAX + 1, MAX + 2, *range(3, MAX)))
        self.assertEqual([self.final(number).stat().st_size for number in (0, 1)], lengths)

    def test_shares_that_came_with_more_keep_them(self) -> None:
        """What another server let grow is kept whole, and each of those clients can renew."""
        with (
            mock.patch.object(share_file, "MAX_LEASES", 10_000),
            mock.patch.object(mutable_containers, "MAX_LEASES", 10_000),
        ):
            for number in range(MAX + 50):
                self.store.add_lease(SI, lease(number))
        before = self.renewers()
        self.now += 5
        self.store.add_lease(SI, lease(MAX + 49))
        self.assertRaises(NoSpace, self.store.add_lease, SI, lease(MAX + 50))
        self.assertEqual(self.renewers(), before)

    def test_leases_count_against_the_reserve(self) -> None:
        """Where there is no room beyond the reserve, leases are renewed and none is added."""
        for number in range(1, 5):
            self.store.add_lease(SI, lease(number))  # the mutable share's four slots are taken
        self.store = self.make_store(reserved_bytes=1000)
        self.free = 1000 + share_file.LEASE_BYTES - 1
        before = self.renewers()
        self.now += 5
        self.store.add_lease(SI, lease(1))
        self.assertRaises(NoSpace, self.store.add_lease, SI, lease(5))
        self.assertEqual(self.renewers(), before)
        self.now += 1  # how much is free is asked for once a second
        self.free = 2000
        self.store.add_lease(SI, lease(5))
        for found in self.renewers():
            self.assertEqual(found[-1:], self.expected(5))

    def test_secrets_out_of_place_are_not_found(self) -> None:
        """A record that has somebody's renew secret in the place of another field is not his."""
        victim = lease(7)
        self.store.add_lease(SI, LeaseSecrets(b"x" * 32, victim.renew))
        self.store.add_lease(SI, victim)
        for found in self.renewers():
            self.assertEqual(found[-1:], self.expected(7))

    def test_old_containers(self) -> None:
        """Clear secrets, as version 1 has them, are found and replaced as well."""
        file = bytearray(self.final(0).read_bytes())
        file[:4] = (1).to_bytes(4, "big")
        self.final(0).write_bytes(file)
        self.store.add_lease(SI, lease(1))
        self.now += 10
        self.store.add_lease(SI, lease(1))
        found = share_file.parse_leases(self.final(0).read_bytes()[-72:])[0]
        self.assertEqual(
            (found.renew, found.expires), (lease(1).renew, NOW + 10 + LEASE_DURATION_S)
        )

    def test_finding_one_makes_few_calls(self) -> None:
        """However many there are, nothing is unpacked, and the disk is asked for as little as for one."""
        self.fill()
        calls: list[str] = []
        with (
            mock.patch.object(share_file.LeaseRecord, "__init__", side_effect=AssertionError),
            mock.patch.object(os, "pread", side_effect=os.pread) as pread,
            mock.patch.object(disk, "write_all", side_effect=disk.write_all) as write_all,
        ):
            self.now += 1
            # Making the fresh one is one record; those that are there are none.
            with mock.patch.object(share_file, "make_lease", return_value=_Fresh(self.now)):
                self.store.allocate(SI, {0}, 9, UploadSecrets(lease(9), b"u"))
        calls += [str(pread.call_count), str(write_all.call_count)]
        self.assertEqual(write_all.call_count, 1)
        self.assertLessEqual(pread.call_count, 6, calls)


class DamagedShareTests(StoreTestCase):
    """One share of an index that cannot be leased, and the others."""

    def setUp(self) -> None:
        super().setUp()
        self.secrets = SlotSecrets(lease(1), b"w" * 32)

    def test_the_other_immutable_shares_are_leased(self) -> None:
        """The client hears of the one, and the others are kept as long as they would have been."""
        for number in (0, 1, 2):
            self.put(number, b"immutable")
        self.now += LEASE_DURATION_S - 1
        for content in (b"", bytes(200)):
            self.final(0).write_bytes(content)
            error = self.assertRaises(ServerRefused, self.store.add_lease, SI, SECRETS.lease)
            self.assertIn(str(self.final(0)), str(error))
        self.now += 2
        self.assertEqual(self.store.collect_garbage(), 0)
        self.assertEqual(self.store.list_shares(SI), {0, 1, 2})

    def test_the_other_mutable_shares_are_leased(self) -> None:
        """The same."""
        for number in (0, 1):
            change = {number: ShareChange((), ((0, b"mutable"),))}
            self.store.slots.testv_and_readv_and_writev(SI, self.secrets, change, ())
        self.final(0).write_bytes(self.final(0).read_bytes()[:60])
        self.now += LEASE_DURATION_S - 1
        error = self.assertRaises(ServerRefused, self.store.add_lease, SI, self.secrets.lease)
        self.assertIn(str(self.final(0)), str(error))
        self.now += 2
        self.assertEqual(self.store.collect_garbage(), 0)
        self.assertTrue(self.final(1).exists())


class PowerCutTests(StoreTestCase):
    """Nothing is synced when a lease is added: a power cut may leave its place, and no record there."""

    def setUp(self) -> None:
        super().setUp()
        self.put(0, b"immutable")
        self.one = self.final(0).read_bytes()
        self.now += 1000
        self.store.add_lease(SI, lease(2))
        self.two = self.final(0).read_bytes()

    def test_zeros_are_no_lease_that_has_run_out(self) -> None:
        """The first lease still runs, and cannot be seen: the share stays, whatever time it is."""
        self.final(0).write_bytes(self.one + bytes(share_file.LEASE_BYTES))
        self.assertEqual(self.store.collect_garbage(), 0)
        self.now += 2 * LEASE_DURATION_S
        self.assertEqual(self.store.collect_garbage(), 0)

    def test_the_next_lease_decides(self) -> None:
        """With it the share is leased as others are, and runs out as they do."""
        self.final(0).write_bytes(self.one + bytes(share_file.LEASE_BYTES))
        self.store.add_lease(SI, lease(2))
        self.assertEqual(self.get(0)[:9], b"immutable")
        self.now += LEASE_DURATION_S - 1
        self.assertEqual(self.store.collect_garbage(), 0)
        self.now += 2
        self.assertEqual(self.store.collect_garbage(), 1)

    def test_zeros_behind_others(self) -> None:
        """Who had the lease that is lost was promised its time, however long the others have run out."""
        self.final(0).write_bytes(
            self.two[: -share_file.LEASE_BYTES] + bytes(share_file.LEASE_BYTES)
        )
        self.now += 2 * LEASE_DURATION_S
        self.assertEqual(self.store.collect_garbage(), 0)
        self.store.add_lease(SI, lease(3))
        self.now += LEASE_DURATION_S + 1
        self.assertEqual(self.store.collect_garbage(), 1)

    def test_lost_leases_of_mutable_shares(self) -> None:
        """The same of those that have no slot; a slot that is free says nothing."""
        secrets = SlotSecrets(lease(0), b"w" * 32)
        write = {1: ShareChange((), ((0, b"mutable"),))}
        self.final(0).unlink()
        lease_bytes = mutable_containers.LEASE_BYTES
        for last in (b"", bytes(30), bytes(lease_bytes)):
            self.store.slots.testv_and_readv_and_writev(SI, secrets, write, ())
            for number in range(1, 5):
                self.store.add_lease(SI, lease(number))
            file = self.final(1).read_bytes()
            self.final(1).write_bytes(file[:-lease_bytes] + last)
            self.now += 2 * LEASE_DURATION_S
            self.assertEqual(self.store.collect_garbage(), 0, last)
            self.store.add_lease(SI, lease(4))
            self.now += LEASE_DURATION_S + 1
            self.assertEqual(self.store.collect_garbage(), 1, last)

    def test_a_disk_that_is_full_in_the_middle(self) -> None:
        """A record of which the disk took a part is taken back."""

        def fill_up(fd: int, data: bytes, offset: int) -> None:
            os.pwrite(fd, data[:30], offset)
            raise OSError(errno.ENOSPC, "full")

        with mock.patch.object(disk, "write_all", fill_up):
            self.assertRaises(NoSpace, self.store.add_lease, SI, lease(3))
        self.assertEqual(self.final(0).read_bytes(), self.two)

    def test_a_record_that_is_not_counted(self) -> None:
        """Being killed between record and number adds no byte to the share, and costs no lease."""
        data = b"immutable"
        second, third, fourth = (stored_secret(2, lease(each).renew) for each in (2, 3, 4))
        for part in (1, 36, share_file.LEASE_BYTES):
            stray = share_file.pack_lease(2, 1, lease(3), self.now)[:part]
            self.final(0).write_bytes(self.two + stray)
            self.assertEqual(self.get(0), data, part)
            self.now += 2 * LEASE_DURATION_S
            if part < share_file.LEASE_BYTES:
                self.assertEqual(self.store.collect_garbage(), 0, part)
            self.now -= 2 * LEASE_DURATION_S
            self.store.add_lease(SI, lease(4))
            file = self.final(0).read_bytes()
            found = share_file.parse_leases(file[share_file.HEADER_BYTES + len(data) :])
            whole = [third] if part == share_file.LEASE_BYTES else []
            expected = [stored_secret(2, SECRETS.lease.renew), second, *whole, fourth]
            self.assertEqual([each.renew for each in found], expected, part)
            self.assertEqual(share_file.parse_header(file).lease_count, len(expected))
            self.assertEqual(self.get(0), data, part)

    def test_a_header_that_says_too_little(self) -> None:
        """Whoever wrote it does not keep that number: all is there."""
        file = bytearray(self.two)
        file[4:8] = bytes(4)
        file[share_file.HEADER_BYTES : share_file.HEADER_BYTES] = b"x" * share_file.LEASE_BYTES
        self.final(0).write_bytes(file)
        self.assertEqual(self.get(0), b"x" * share_file.LEASE_BYTES + b"immutable")

    def test_a_number_that_cannot_be_written(self) -> None:
        """Then the record goes again, and what there is of the share is as it was."""
        write = disk.write_all

        def fail(fd: int, data: bytes, offset: int) -> None:
            if offset == share_file.LEASE_COUNT_OFFSET:
                raise OSError(errno.EIO, "broken")
            write(fd, data, offset)

        with mock.patch.object(disk, "write_all", fail):
            self.assertRaises(ServerRefused, self.store.add_lease, SI, lease(3))
        self.assertEqual(self.final(0).read_bytes(), self.two)

    def test_mutable_shares_go_on(self) -> None:
        """One whose fifth lease was counted, and got lost, is written and leased as before."""
        secrets = SlotSecrets(lease(0), b"w" * 32)
        write = {1: ShareChange((), ((0, b"mutable"),))}
        self.store.slots.testv_and_readv_and_writev(SI, secrets, write, ())
        for number in range(1, 5):
            self.store.add_lease(SI, lease(number))
        file = self.final(1).read_bytes()
        for end in (b"", b"\0" * 50):
            self.final(1).write_bytes(file[: -mutable_containers.LEASE_BYTES] + end)
            change = {1: ShareChange((), ((7, b" share"),))}
            self.store.slots.testv_and_readv_and_writev(SI, secrets, change, ())
            self.store.add_lease(SI, lease(4))
            renewers = [each.renew for each in all_leases(self.final(1).read_bytes())]
            self.assertEqual(renewers, [stored_secret(2, lease(each).renew) for each in range(5)])
            with self.store.slots.open_share(SI, 1) as reader:
                self.assertEqual(reader.read(0, 100), b"mutable share")


class _Fresh:
    """What stands for a packed lease."""

    def __init__(self, now: float) -> None:
        self.renew = stored_secret(2, lease(9).renew)
        self.expires = int(now) + LEASE_DURATION_S

    def pack(self) -> bytes:
        """Return the record."""
        return bytes(68) + self.expires.to_bytes(4, "big")


class AnswerTests(http.ServerTestCase):
    """What a client is told."""

    def test_a_lease_without_a_place(self) -> None:
        """No room for a lease is a 507, as no room for a share is."""
        self.put(0, b"immutable")
        self.free = 10
        self.now += 1
        headers = http.lease_headers(UploadSecrets(lease(1), b"u"))
        request = http.head("PUT", gbs_paths_headers.lease_path(SI), *headers)
        renewal = http.head("PUT", gbs_paths_headers.lease_path(SI), *http.lease_headers())
        self.assertEqual(self.statuses(request, renewal), [507, 204])


class LostLeaseTests(StoreTestCase):
    """A crash leaves leases that are counted and not there, or not in whole: they cost no byte of a share."""

    def share(self, version: int) -> bytes:
        """Return what has the layout of a share, with a last section, and its own lease only."""
        made = layout.for_geometry(Params(3, 10).geometry(100_000), version)
        whole = made.pack_header().ljust(made.uri_extension, b"d") + made.pack_ueb(b"u" * 300)
        self.now = NOW
        self.final(0).unlink(missing_ok=True)
        self.put(0, whole)
        return whole

    def lose(self, lost_bytes: int, leases: int = 3, space_bytes: int | None = None) -> None:
        """Have so many leases, and then so many bytes less."""
        for number in range(2, leases + 1):
            self.store.add_lease(SI, lease(number))
        file = self.final(0).read_bytes()
        file = file[: len(file) - lost_bytes]
        if space_bytes is not None:
            file = file[:4] + space_bytes.to_bytes(4, "big") + file[8:]
        self.final(0).write_bytes(file)

    def counted(self) -> tuple[int, list[bytes]]:
        """Return how many leases are counted, and the secrets of those behind the data."""
        file = self.final(0).read_bytes()
        header = share_file.parse_header(file)
        with self.store.open_share(SI, 0) as reader:
            begin = share_file.HEADER_BYTES + reader.share_bytes
        return header.lease_count, [each.renew for each in share_file.parse_leases(file[begin:])]

    def test_the_data_are_whole(self) -> None:
        """Of either version, whatever part of the leases is not there, and whatever room was asked for."""
        for version, lost_bytes, more_bytes in itertools.product(
            (1, 2), (1, 72, 100, 216), (0, 580)
        ):
            whole = self.share(version)
            self.lose(lost_bytes, space_bytes=len(whole) + more_bytes)
            self.assertEqual(self.get(0), whole, (version, lost_bytes, more_bytes))
        whole = self.share(2)
        self.lose(72, space_bytes=(1 << 32) - 1)
        self.assertEqual(self.get(0), whole)

    def test_more_room_than_data(self) -> None:
        """As clients before 1.18 asked for, of shares with many leases: nothing is taken for data."""
        whole = self.share(1)
        self.lose(0, leases=12, space_bytes=len(whole) + 580)
        self.assertEqual(self.get(0), whole)

    def test_data_that_are_not_there(self) -> None:
        """Nor is anything of a share that is shorter itself, or of what has no layout that is known."""
        whole = self.share(1)
        self.lose(3 * 72 + 10)
        self.assertEqual(self.get(0), whole[: -3 * 72 - 10])
        self.final(0).unlink()
        self.put(0, b"x" * 1000)
        self.lose(72)
        self.assertEqual(self.get(0), b"x" * 928)

    def test_the_next_lease(self) -> None:
        """Stands where it should, as do those that are there; what is lost is not counted any more."""
        for lost_bytes, left in ((72, 2), (100, 1), (1, 2), (216, 0)):
            whole = self.share(2)
            self.lose(lost_bytes)
            self.store.add_lease(SI, lease(9))
            count, renewers = self.counted()
            self.assertEqual((count, len(renewers)), (left + 1, left + 1))
            self.assertEqual(renewers[-1], stored_secret(2, lease(9).renew))
            self.assertEqual(self.get(0), whole)

    def test_what_is_lost_may_last(self) -> None:
        """As long as nobody knows what was in a lease, the share is not removed."""
        for lost_bytes in (72, 100):
            self.share(1)
            self.lose(lost_bytes)
            self.now += 2 * LEASE_DURATION_S
            self.assertEqual(self.store.collect_garbage(), 0)
            self.store.add_lease(SI, lease(9))
            self.now += 2 * LEASE_DURATION_S
            self.assertEqual(self.store.collect_garbage(), 1)
