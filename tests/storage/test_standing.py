"""Who keeps an unfinished upload when there is no room for another, and for how long they are kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import file_system_calls as disk
from pipegrid.errors import ConflictingWrite, NoSpace, NoSuchShare
from pipegrid.storage.share_store import KEEP_UNFINISHED_S
from pipegrid.storage.uploads import eviction
from pipegrid.storage.uploads.eviction import (
    NOBODY,
    Client,
    EvictionOrder,
    UploadDemand,
    address_of,
)
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.testing.grid import abandon_store
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotSecrets, UploadSecrets
from tests.storage.support import NOW, OTHERS_SECRETS, SECRETS, SI, StoreTestCase

HOARDER = Client("10.0.0.1", 1)
HONEST = Client("10.0.0.2", 2)
NEIGHBOUR = Client("10.0.0.1", 3)
DAY_S = 86400


@attrs.define(eq=False)
class Fake:
    """An unfinished upload as ``standing`` sees it."""

    client: Client = HOARDER
    share_bytes: int = 1
    began: float = 0.0
    last_write: float = 0.0
    came_bytes: int = 0
    complete: bool = False

    @property
    def remaining_bytes(self) -> int:
        """What has not come."""
        return self.share_bytes - self.came_bytes


def one(missing_uploads: int = 1, missing_bytes: int = 0, share_bytes: int = 1) -> UploadDemand:
    """Return what somebody asks for who wants one upload."""
    return UploadDemand(1, share_bytes, missing_uploads, missing_bytes)


def choose(uploads: Iterable[Fake], client: Client, asked: UploadDemand, now: float) -> list[Fake]:
    """Return which uploads are given up, of those that there are."""
    return EvictionOrder(uploads, asked.missing_bytes > 0, now).choose(client, asked, now)


class ChoiceTests(SynchronousTestCase):
    """What is given up, and what never is."""

    def test_the_longest_idle_of_who_has_most(self) -> None:
        """Of many that are merely allocated the oldest goes, and no more than is needed."""
        uploads = [Fake(last_write=at) for at in (3.0, 1.0, 2.0)]
        self.assertEqual(choose(uploads, HONEST, one(), 5.0), [uploads[1]])
        self.assertEqual(choose(uploads, HONEST, one(2), 5.0), [uploads[1], uploads[2]])
        self.assertEqual(
            choose(uploads, HONEST, one(3), 5.0), []
        )  # it has no more than is asked for
        # Of three as many as can be had.
        asked = UploadDemand(3, 1, 3, 0)
        five = [*uploads, Fake(last_write=8.0), Fake(last_write=9.0)]
        self.assertEqual(choose(five, HONEST, asked, 9.0), [uploads[1], uploads[2]])
        others = [Fake(Client("10.0.0.3", 3)), Fake(Client("10.0.0.3", 3))]
        self.assertEqual(choose(others + uploads, HONEST, one(), 5.0), [uploads[1]])

    def test_who_has_as_much_takes_nothing(self) -> None:
        """A hoarder gets nothing of those who have less, however idle they are, for half an hour."""
        mine = [Fake(HOARDER) for _ in range(100)]
        others = [Fake(HONEST) for _ in range(99)]
        self.assertEqual(choose(mine + others, HOARDER, one(), 1799.0), [])
        self.assertEqual(choose(mine + others, HONEST, one(), 1799.0), [])
        self.assertEqual(choose(mine + others, Client("10.0.0.3", 9), one(), 1799.0), mine[:1])

    def test_stale_ones_go_for_anybody(self) -> None:
        """After 30 minutes without a write room is made for anybody, also for who has most."""
        stale = Fake(HONEST, came_bytes=500, share_bytes=1000)
        uploads = [stale, *(Fake(HOARDER, last_write=1000.0) for _ in range(9))]
        self.assertEqual(choose(uploads, HOARDER, one(), 1799.0), [])
        self.assertEqual(choose(uploads, HOARDER, one(), 1800.0), [stale])

    def test_what_is_being_written_stays(self) -> None:
        """Bytes that come at the pace of a modem keep an upload, however much its client has."""
        written = [Fake(share_bytes=10**6, came_bytes=102_400, last_write=100.0) for _ in range(9)]
        self.assertEqual(choose(written, HONEST, one(), 100.0), [])
        self.assertEqual(choose(written, HONEST, one(), 399.0), written[:1])  # less than 1 KiB/s
        complete = [Fake(complete=True, came_bytes=1) for _ in range(9)]
        self.assertEqual(choose(complete, HONEST, one(), 1e9), [])

    def test_a_byte_now_and_then_is_not_writing(self) -> None:
        """Neither one byte, nor what would take more than a day, keeps what is wanted by others."""
        one_byte = [Fake(share_bytes=2, came_bytes=1, last_write=60.0) for _ in range(9)]
        self.assertEqual(choose(one_byte, HONEST, one(), 61.0), one_byte[:1])
        huge = Fake(share_bytes=10**12, came_bytes=1 << 20, last_write=60.0)
        asked = one(0, 10**6, 10**6)
        self.assertEqual(choose([huge], HONEST, asked, 60.0), [huge])
        quick = Fake(share_bytes=10**12, came_bytes=10**9, last_write=60.0)
        self.assertEqual(choose([quick], HONEST, asked, 60.0), [])

    def test_room_is_counted_in_bytes(self) -> None:
        """Where room is short, who has promised most gives, though another has more uploads."""
        many = [Fake(NEIGHBOUR, 10) for _ in range(50)]
        huge = Fake(Client("10.0.0.9", 4), 10**12, last_write=5.0)
        asked = one(0, 700, 1000)
        self.assertEqual(choose([*many, huge], HONEST, asked, 6.0), [huge])
        self.assertEqual(choose(many, HONEST, asked, 6.0), [])

    def test_behind_one_address(self) -> None:
        """Of one address's connections the same holds; and ten seconds of silence yield in any case."""
        uploads = [Fake(HOARDER, last_write=5.0) for _ in range(9)]
        self.assertEqual(choose(uploads, NEIGHBOUR, one(), 6.0), uploads[:1])
        single = [Fake(Client("10.0.0.1", at), last_write=5.0) for at in range(50, 60)]
        self.assertEqual(choose(single, NEIGHBOUR, one(), 14.0), [])
        self.assertEqual(choose(single, NEIGHBOUR, one(), 15.0), single[:1])

    def test_not_its_own(self) -> None:
        """A connection that has filled everything is refused, and does not lose what it began."""
        uploads = [Fake(HOARDER) for _ in range(9)]
        self.assertEqual(choose(uploads, HOARDER, one(), 1000.0), [])

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.builds(
                Fake,
                st.sampled_from([HOARDER, HONEST, NEIGHBOUR, Client("10.0.0.4", 7)]),
                st.integers(1, 1000),
                st.just(0.0),
                st.integers(0, 2000).map(float),
                st.just(0),
            ),
            max_size=30,
        ),
        st.integers(0, 3),
        st.integers(0, 2000),
    )
    def test_enough_or_nothing(self, uploads: list[Fake], places: int, room: int) -> None:
        """What is given up is enough, each of it needed in its turn, and nobody's who has less."""
        asked = UploadDemand(1, 1, places, room)
        chosen = choose(uploads, HONEST, asked, 2000.0)
        self.assertEqual(len(set(map(id, chosen))), len(chosen))
        if chosen:
            self.assertGreaterEqual(len(chosen), places)
            self.assertGreaterEqual(sum(each.share_bytes for each in chosen), room)
            before = chosen[:-1]
            enough = len(before) >= places and sum(each.share_bytes for each in before) >= room
            self.assertFalse(enough)
        for each in chosen:
            if not eviction.is_stale(each, 2000.0):
                self.assertNotEqual(each.client, HONEST)

    def test_addresses(self) -> None:
        """An IPv6 network counts as one address, scope or not; whatever else there is, as it is."""
        self.assertEqual(address_of("10.0.0.1"), "10.0.0.1")
        self.assertEqual(address_of("2001:db8:0:1::5"), address_of("2001:db8:0:1:ffff::1"))
        self.assertNotEqual(address_of("2001:db8:0:1::5"), address_of("2001:db8:0:2::5"))
        self.assertEqual(address_of("fe80::1%eth0"), address_of("fe80::2"))
        self.assertEqual(address_of("::ffff:192.0.2.7"), "192.0.2.7")
        self.assertEqual(address_of("a:strange:name"), "a:strange:name")
        self.assertEqual(address_of(""), "")


def secrets(number: int) -> UploadSecrets:
    """Return the secrets of one of many attempts."""
    return UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"%d" % number)


class StoreTests(StoreTestCase):
    """A store that is full of what somebody hoards."""

    def hoard(self, count: int, share_bytes: int = 1, client: Client = HOARDER) -> None:
        """Have a client allocate so many."""
        for number in range(count):
            index = number.to_bytes(16, "big")
            answer = self.store.allocate(index, {0}, share_bytes, secrets(number), client)
            self.assertEqual(answer.allocated, {0})

    def test_an_honest_client_finds_a_place(self) -> None:
        """However many places are taken by who merely allocates: also from the hoarder's own address."""
        self.store = self.make_store(max_uploads=20)
        self.hoard(20)
        for number, client in enumerate((HONEST, NEIGHBOUR)):
            answer = self.store.allocate(SI, {number}, 4, SECRETS, client)
            self.assertEqual(answer.allocated, {number})
            upload = self.store.upload(SI, number, SECRETS.upload, client)
            upload.write(0, [b"data"])
            upload.publish()
            self.assertEqual(self.store.upload_count, 19)
            again = bytes([number]) * 16
            answer = self.store.allocate(again, {0}, 1, SECRETS, HOARDER)
            self.assertEqual(answer.allocated, {0})
        self.assertEqual(self.store.allocate(SI, {9}, 4, SECRETS, HONEST).allocated, {9})
        self.assertEqual(self.store.allocate(b"x" * 16, {0}, 1, SECRETS, HOARDER).allocated, set())
        self.assertEqual(len(os.listdir(self.root / "shares/incoming")), 20)

    def test_an_honest_client_finds_room(self) -> None:
        """However much of it is promised to who merely allocates, also for mutable shares and leases."""
        self.put(7, b"there already")
        self.free = 10**6
        self.now += 1  # how much is free is asked for once a second
        self.assertEqual(self.store.version().available_bytes, 10**6)
        self.hoard(1, 10**6)
        # What a hoarder has is announced as room, or nobody would ask.
        self.assertEqual(self.store.version().available_bytes, 10**6)
        self.assertEqual(self.store.allocate(SI, {0}, 1000, SECRETS, HONEST).allocated, {0})
        self.now += 1
        self.hoard(1, 10**6 - 1000)
        self.now += 1
        self.store.add_lease(SI, OTHERS_SECRETS.lease)
        self.assertEqual(self.store.upload_count, 1)
        self.hoard(1, 10**6 - 1000)
        self.now += 1
        change = {1: ShareChange((), ((0, b"mutable"),))}
        writer = SlotSecrets(SECRETS.lease, b"w" * 32)
        self.store.slots.testv_and_readv_and_writev(SI, writer, change, ())

    def test_what_is_being_written_is_not_given_up(self) -> None:
        """Who writes keeps the room, and others are refused; it is not announced as room either."""
        self.free = 10**6
        self.hoard(1, 10**6)
        self.now += 10
        self.store.upload(bytes(16), 0, secrets(0).upload).write(0, [bytes(500_000)])
        self.free = 500_000
        self.assertEqual(self.store.allocate(SI, {0}, 1000, SECRETS, HONEST).allocated, set())
        self.assertEqual(self.store.version().available_bytes, 0)
        self.assertEqual(self.store.upload_count, 1)

    def test_who_is_refused_is_not_looked_for_again(self) -> None:
        """Refusing a hoarder is cheap: within a second nobody's uploads are gone through again."""
        self.store = self.make_store(max_uploads=5)
        self.hoard(5)
        calls: list[Client] = []
        real = EvictionOrder.choose

        def count(
            order: EvictionOrder[IncomingShare], client: Client, asked: UploadDemand, now: float
        ) -> list[IncomingShare]:
            calls.append(client)
            return real(order, client, asked, now)

        self.patch(EvictionOrder, "choose", count)
        answer = self.store.allocate(SI, set(range(256)), 1, SECRETS, HOARDER)
        self.assertEqual((answer.allocated, calls), (set(), [HOARDER]))
        self.now += 1
        self.store.allocate(SI, set(range(256)), 1, SECRETS, HOARDER)
        self.assertEqual(len(calls), 2)
        self.assertEqual(self.store.allocate(SI, {0}, 1, SECRETS, HONEST).allocated, {0})
        self.assertEqual(len(calls), 3)

    def test_as_many_as_are_fair(self) -> None:
        """An honest request for many shares gets them one by one, until it has as many as who had all."""
        self.store = self.make_store(max_uploads=20)
        self.hoard(20)
        answer = self.store.allocate(SI, set(range(5)), 1, SECRETS, HONEST)
        self.assertEqual(len(answer.allocated), 5)
        answer = self.store.allocate(b"n" * 16, set(range(50)), 1, SECRETS, HONEST)
        self.assertEqual(len(answer.allocated), 5)
        self.assertEqual(self.store.upload_count, 20)

    def test_a_file_is_removed_for_each_that_is_made(self) -> None:
        """Giving hundreds up for one request takes as many steps, with others' turns between them."""
        self.store = self.make_store(max_uploads=20)
        self.hoard(20)
        steps = self.store.allocate_in_steps(SI, set(range(9)), 1, SECRETS, HONEST)
        left = self.hoarded()
        for _ in steps:
            self.assertLessEqual(left - self.hoarded(), 1)
            left = self.hoarded()
        self.assertEqual((left, self.hoarded()), (12, 11))

    def hoarded(self) -> int:
        """Return how many uploads the hoarder still has."""
        uploads = self.store._unfinished._uploads.values()
        return sum(upload.client == HOARDER for upload in uploads)

    def test_what_is_promised(self) -> None:
        """It is known without asking each upload, whatever becomes of them."""
        promised = self.store._unfinished.remaining_bytes
        self.hoard(3, 100_000)
        self.assertEqual(promised(), 300_000)
        upload = self.store.upload(bytes(16), 0, secrets(0).upload)
        upload.write(0, [bytes(60_000)])
        self.assertEqual(promised(), 240_000)
        upload.write(20_000, [bytes(50_000)])  # 10,000 of which are new
        self.assertEqual(promised(), 230_000)
        upload.checkpoint()
        self.assertTrue(upload.suspend())
        upload.write(90_000, [bytes(10_000)])
        self.assertEqual(promised(), 220_000)
        self.assertRaises(ConflictingWrite, upload.write, 0, [b"other"])
        upload.write(70_000, [bytes(20_000)])
        self.assertEqual(promised(), 200_000)
        upload.publish()
        self.assertEqual(promised(), 200_000)
        for number in (1, 2):
            self.store.abort(number.to_bytes(16, "big"), 0, secrets(number).upload)
        self.assertEqual(promised(), 0)

    def test_a_failed_write_counts_what_came(self) -> None:
        """What the disk took before it was full is not promised any more."""
        self.hoard(1, 100_000)
        upload = self.store.upload(bytes(16), 0, secrets(0).upload)
        really = disk.write_pieces

        def half(fd: int, pieces: list[memoryview], offset: int) -> int:
            if len(pieces[0]) <= 1000:
                raise OSError(errno.ENOSPC, "full")
            return really(fd, [pieces[0][:1000]], offset)

        self.patch(disk, "write_pieces", half)
        self.assertRaises(NoSpace, upload.write, 0, [bytes(2000)])
        self.assertEqual(self.store._unfinished.remaining_bytes(), 99_000)

    def test_this_process_keeps_its_own(self) -> None:
        """What was begun without a client, by an embedded server, is only given up when it is stale."""
        self.store = self.make_store(max_uploads=2)
        self.hoard(2, client=NOBODY)
        self.now += eviction.STALE_S - 1
        self.assertEqual(self.store.allocate(SI, {0}, 1, SECRETS, NOBODY).allocated, set())
        self.now += 1
        self.assertEqual(self.store.allocate(SI, {0}, 1, SECRETS, NOBODY).allocated, {0})


class KeepingTests(StoreTestCase):
    """How long an unfinished upload is kept."""

    def begin(self, number: int = 0, data: bytes = b"x" * 50) -> None:
        """Write half of a share."""
        self.store.allocate(SI, {number}, 100, SECRETS, HONEST)
        upload = self.store.upload(SI, number, SECRETS.upload, HONEST)
        upload.write(0, [data])
        upload.checkpoint()

    def leave_room(self, room: int) -> None:
        """Have so much room, and 50 bytes for each upload that is removed from now on."""

        def free() -> int:
            return room + 50 * (before - sum(self.incoming(n).exists() for n in range(9)))

        before = sum(self.incoming(number).exists() for number in range(9))
        self.patch(self.store._room, "_free", lambda path: free())

    def restart(self, **options: float) -> int:
        """Kill the store and start another, as a server does; returns how many uploads can go on."""
        abandon_store(self.store)
        self.store = self.make_store(**options)
        return self.store.adopt_leftovers()

    def test_seven_days(self) -> None:
        """An upload that was cut off goes on within seven days, whether the server was restarted or not."""
        self.assertEqual(KEEP_UNFINISHED_S, 7 * DAY_S)
        self.begin()
        os.utime(self.incoming(0), (NOW, NOW))
        self.now += 3 * DAY_S
        self.assertEqual(self.store.expire_uploads(), 0)
        self.assertEqual(self.restart(), 1)
        self.now += 4 * DAY_S - 1
        self.assertEqual(self.store.expire_uploads(), 0)
        upload = self.store.upload(SI, 0, SECRETS.upload, HONEST)
        self.assertEqual(upload.required(), ((50, 100),))
        upload.write(50, [b"y" * 50])
        upload.publish()
        self.assertEqual(self.get(0), b"x" * 50 + b"y" * 50)

    def test_no_longer(self) -> None:
        """Then it is given up, in memory or on the disk; nothing stays behind."""
        for restarted in (False, True):
            self.begin()
            os.utime(self.incoming(0), (self.now, self.now))
            if restarted:
                self.assertEqual(self.restart(), 1)
            self.now += 7 * DAY_S
            self.assertEqual(self.store.expire_uploads(), 1)
            self.assertRaises(NoSuchShare, self.store.upload, SI, 0, SECRETS.upload)
            self.assertEqual(os.listdir(self.root / "shares/incoming"), [])

    def test_as_long_as_one_says(self) -> None:
        """Half an hour, as Tahoe-LAFS has it, or a year."""
        for keep_s in (1800.0, 365.0 * DAY_S):
            self.store = self.make_store(keep_unfinished_s=keep_s)
            self.begin()
            self.now += keep_s - 1
            self.assertEqual(self.store.expire_uploads(), 0)
            self.now += 1
            self.assertEqual(self.store.expire_uploads(), 1)

    def test_leftovers_hold_their_room(self) -> None:
        """What earlier processes left counts as promised, until somebody who has less needs it."""
        self.begin()
        self.assertEqual(self.restart(), 1)
        self.assertEqual(
            (self.store.upload_count, self.store._unfinished.remaining_bytes()), (1, 50)
        )
        self.leave_room(40)
        answer = self.store.allocate(b"o" * 16, {0}, 41, OTHERS_SECRETS, HONEST)
        self.assertEqual(answer.allocated, {0})
        self.assertEqual(self.store.upload_count, 1)
        self.assertFalse(self.incoming(0).exists())
        self.assertFalse(self.incoming(0, ".upload").exists())

    def test_leftovers_block_nobody(self) -> None:
        """Another secret takes the place of what an earlier process left, and of what is stale."""
        self.begin()
        self.restart()
        self.assertEqual(self.store.allocate(SI, {0}, 70, OTHERS_SECRETS, HONEST).allocated, {0})
        upload = self.store.upload(SI, 0, OTHERS_SECRETS.upload)
        self.assertEqual(upload.required(), ((0, 70),))
        self.now += eviction.STALE_S - 1
        self.assertEqual(self.store.allocate(SI, {0}, 60, SECRETS, HONEST).allocated, set())
        self.now += 1
        self.assertEqual(self.store.allocate(SI, {0}, 60, SECRETS, HONEST).allocated, {0})
        self.assertRaises(NoSuchShare, upload.write, 0, [b"late"])

    def test_who_comes_back_is_no_leftover(self) -> None:
        """Once its client goes on with it, an upload is as safe as any other."""
        self.begin()
        self.restart()
        self.assertEqual(self.store.allocate(SI, {0}, 100, SECRETS, HONEST).allocated, {0})
        self.assertEqual(self.store.upload(SI, 0, SECRETS.upload).required(), ((50, 100),))
        self.assertEqual(self.store.allocate(SI, {0}, 70, OTHERS_SECRETS).allocated, set())

    def test_files_stay_closed(self) -> None:
        """However many there are, leftovers hold no file open, and another process may go on with one."""
        for number in range(9):
            self.begin(number)
        self.assertEqual(self.restart(), 9)
        uploads = self.store._unfinished._uploads.values()
        self.assertEqual([upload.is_open for upload in uploads], [False] * 9)
        other = self.make_store()
        self.assertEqual(other.upload(SI, 3, SECRETS.upload).required(), ((50, 100),))

    def test_what_is_not_believed_is_not_counted(self) -> None:
        """Torn notes, other starts of the machine, complete shares, strange names: left to housekeeping."""
        for number in range(4):
            self.begin(number)
        self.store.upload(SI, 1, SECRETS.upload).write(50, [b"y" * 50])
        self.store.upload(SI, 1, SECRETS.upload).checkpoint()
        self.incoming(2, ".upload").write_bytes(b"torn")
        (self.incoming(0).parent / "strange.upload").write_bytes(b"")
        self.assertEqual(self.restart(), 2)
        self.boot = b"B" * 16
        self.assertEqual(self.restart(), 0)

    def test_what_nobody_can_go_on_with(self) -> None:
        """Files without a note are removed after half an hour, as Tahoe-LAFS does when it starts."""
        self.begin(0)
        self.incoming(1).write_bytes(b"left by whoever")
        for number in (0, 1):
            os.utime(self.incoming(number), (NOW, NOW))
        abandon_store(self.store)
        self.store = self.make_store()
        self.now = NOW + 1799
        self.assertEqual(self.store.expire_uploads(), 0)
        self.now += 2
        self.assertEqual(self.store.expire_uploads(), 1)
        self.assertTrue(self.incoming(0).exists())
        self.assertFalse(self.incoming(1).exists())

    def test_a_full_disk_gives_up_the_oldest(self) -> None:
        """Uploads that were cut off long ago make room for one that comes now, the oldest first."""
        for number in range(4):
            self.begin(number)
            self.now += 3600
        self.leave_room(200)
        self.assertEqual(self.store.allocate(b"n" * 16, {0}, 90, OTHERS_SECRETS).allocated, {0})
        left = [number for number in range(4) if self.incoming(number).exists()]
        self.assertEqual(left, [1, 2, 3])
