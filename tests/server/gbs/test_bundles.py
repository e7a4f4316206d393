"""Bundles at the GBS server: what they leave behind and answer is what their plain requests would."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import attrs

from pipegrid.core import base32
from pipegrid.disk.durability import Disk, Policy
from pipegrid.errors import ServerRefused
from pipegrid.server.connection_turns import FairTurns
from pipegrid.server.gbs.http_connection import GbsConnection
from pipegrid.server.gbs.storage_operations import MAX_COMMITS
from pipegrid.storage import share_file
from pipegrid.storage.uploads import incoming_files as sidecar
from pipegrid.storage.uploads import incoming_share
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.wire import gbs_bundles, gbs_cbor_bodies, gbs_paths_headers
from pipegrid.wire.gbs_bundles import BundledAnswer, BundledUpload
from pipegrid.wire.storage_messages import Allocation, UploadSecrets
from tests.descriptors import left_open, open_files
from tests.server.gbs.support import (
    AUTHORIZATION,
    VERSION,
    MemoryTransport,
    Reply,
    ServerTestCase,
    allocate,
    head,
    lease_headers,
    list_shares,
    parse_replies,
    read,
    upload_header,
    write,
)
from tests.server.gbs.test_site import SlowWorkers
from tests.storage.support import NOW, OTHERS_SECRETS, SECRETS
from tests.wire.test_cbor import BOMBS

NONE: frozenset[int] = frozenset()


def index(number: int) -> bytes:
    """Return the storage index of a test's file."""
    return Random(number).randbytes(16)


def make_upload(
    file: int,
    shares: Mapping[int, bytes],
    *more_numbers: int,
    secrets: UploadSecrets = SECRETS,
    share_bytes: int | None = None,
) -> BundledUpload:
    """Return an upload of some shares, for which further numbers are allocated."""
    if share_bytes is None:
        share_bytes = len(next(iter(shares.values()), b"abcd"))
    numbers = {*shares, *more_numbers}
    return BundledUpload(index(file), secrets, share_bytes, numbers, dict(shares))


def bundle(uploads: Sequence[BundledUpload]) -> bytes:
    """Return a request."""
    return bundle_of(gbs_bundles.pack_bundle(uploads))


def bundle_of(body: bytes, *lines: bytes) -> bytes:
    """Return a request with any body."""
    return head("POST", gbs_paths_headers.BUNDLE_PATH, *lines, body=body) + body


def chunked(request: bytes, body: bytes) -> bytes:
    """Return a request whose body comes in one chunk."""
    announced = b"Content-Length: %d" % len(body)
    assert announced in request
    start = request[: len(request) - len(body)].replace(announced, b"Transfer-Encoding: chunked")
    return start + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def stored(have: frozenset[int], *numbers: int) -> BundledAnswer:
    """Return the answer to an upload all of whose shares were stored."""
    return BundledAnswer(Allocation(have, frozenset(numbers)), dict.fromkeys(numbers, 201))


def _note_name(names: list[str], fd: int) -> None:
    names.append(os.readlink(f"/proc/self/fd/{fd}"))


def random_uploads(random: Random) -> list[BundledUpload]:
    """Return uploads of some of eight files, all shares of each of which have one size."""
    uploads = []
    for file in random.sample(range(8), 5):
        size = (3, 30, 5000)[file % 3]
        chosen = random.sample([*range(5), 255, 256, 1 << 20], random.randint(0, 4))
        shares = {number: bytes([number % 251]) * size for number in chosen}
        secrets = random.choice((SECRETS, OTHERS_SECRETS))
        more = random.randint(0, 5)
        uploads.append(make_upload(file, shares, more, secrets=secrets, share_bytes=size))
    return uploads


class BundleTestCase(ServerTestCase):
    """A test that sends bundles."""

    def slow(self) -> SlowWorkers:
        """Have a new server whose disk takes its time."""
        self.workers = workers = SlowWorkers()
        self.restart()
        return workers

    def send(self, uploads: Sequence[BundledUpload]) -> list[BundledAnswer]:
        """Send a bundle on a connection of its own; returns what became of its uploads."""
        (reply,) = self.ask(bundle(uploads))
        return self.understand(reply, uploads)

    def understand(self, reply: Reply, uploads: Sequence[BundledUpload]) -> list[BundledAnswer]:
        """Return what an answer says."""
        self.assertEqual(reply.status, 200, reply.body)
        self.assertEqual(reply.headers["content-type"], "application/cbor")
        return gbs_bundles.unpack_answers(reply.body, uploads)

    def share(self, file: int, number: int) -> Path:
        """Return where a complete share lies."""
        name = base32.encode(index(file))
        return self.root / "shares" / name[:2] / name / str(number)

    def data(self, file: int, number: int) -> bytes:
        """Read a whole share, as a process that has just started would."""
        with self.make_store().open_share(index(file), number) as reader:
            return reader.read(0, 1 << 30)

    def check_lease(self, file: int, number: int, secrets: UploadSecrets) -> None:
        """Check that somebody has a lease on a share."""
        version = share_file.WRITTEN_VERSION
        lease = share_file.make_lease(version, share_file.OWNER_ALLOCATE, secrets.lease, self.now)
        self.assertIn(lease.pack()[4:], self.share(file, number).read_bytes())

    def files(self) -> dict[str, bytes]:
        """Return all that is stored; of notes beside unfinished uploads, which hold inodes, only names."""
        return {
            str(path.relative_to(self.root)): b""
            if path.suffix == sidecar.SUFFIX
            else path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file()
        }


class AsPlainRequestsTests(BundleTestCase):
    """
    The same uploads, once as requests of their own and once as a bundle, in two empty directories.

    Attributes:
        received: the bytes that were counted, one way and the other.
    """

    def setUp(self) -> None:
        super().setUp()
        self.received: list[int] = []

    def compare(
        self,
        uploads: Sequence[BundledUpload],
        before: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> list[BundledAnswer]:
        """
        Check that answers and files are the same either way; returns the answers.

        Args:
            before: what happens before they are sent.
            options: of the store.
        """
        found = []
        for send in (self.send_apart, self.send):
            self.root = Path(self.mktemp())
            self.root.mkdir()
            self.store = self.make_store(**options)
            self.restart()
            self.now = NOW
            before()
            self.service.received_bytes = 0
            answers = send(uploads)
            self.assertEqual(self.service.commits, 0)
            self.received.append(self.service.received_bytes)
            found.append((answers, self.files(), self.store.upload_count))
        self.assertEqual(found[1], found[0])
        return found[0][0]

    def send_apart(self, uploads: Sequence[BundledUpload]) -> list[BundledAnswer]:
        """Do with requests of their own what ``send`` does with one."""
        requests: list[bytes] = []
        for upload in uploads:
            si, secrets = upload.storage_index, upload.secrets
            requests.append(allocate(upload.share_numbers, upload.share_bytes, secrets, si))
            requests += [
                write(number, 0, data, secrets, si) for number, data in upload.shares.items()
            ]
        connection, transport = self.connect()
        connection.dataReceived(b"".join(requests))
        for _ in range(1 + len(uploads)):  # one that waits for another takes twice as long
            self.settle()
        replies = iter(parse_replies(transport.written))
        transport.lose()
        answers = []
        for upload in uploads:
            reply = next(replies)
            statuses = {number: next(replies).status for number in upload.shares}
            if reply.status == 200:
                answers.append(
                    BundledAnswer(gbs_cbor_bodies.unpack_allocation(reply.body), statuses)
                )
            else:
                self.assertNotIn(201, statuses.values())
                answers.append(BundledAnswer(reply.status, {}))
        self.assertEqual(list(replies), [])
        return answers

    def test_new_shares(self) -> None:
        """Shares of all sizes are stored, with the leases of whoever sent them."""
        random = Random(1)
        uploads = [
            make_upload(
                file, {file: random.randbytes(size)}, secrets=(SECRETS, OTHERS_SECRETS)[file % 2]
            )
            for file, size in enumerate((1, 100, 4095, 4096, 4097, 16_384, 100_000))
        ]
        answers = self.compare(uploads)
        self.assertEqual(answers, [stored(NONE, file) for file in range(len(uploads))])
        for file, upload in enumerate(uploads):
            self.assertEqual(self.data(file, file), upload.shares[file])
            self.check_lease(file, file, upload.secrets)

    def test_several_shares_of_one_upload(self) -> None:
        """Each is stored; those that did not come can be written later."""
        shares = {number: bytes([number]) * 50 for number in (0, 7, 255)}
        answers = self.compare([make_upload(0, shares, 3, 4), make_upload(1, {1: b"x"})])
        allocation = Allocation(NONE, frozenset({0, 3, 4, 7, 255}))
        self.assertEqual(
            answers, [BundledAnswer(allocation, dict.fromkeys(shares, 201)), stored(NONE, 1)]
        )
        later = write(3, 0, b"l" * 50, si=index(0))
        self.assertEqual(self.statuses(later, list_shares(index(0))), [201, 200])
        self.assertEqual(self.data(0, 3), b"l" * 50)

    def test_random_bundles(self) -> None:
        """Whatever uploads of different files there are, and whatever was there before."""
        for seed in range(12):
            random = Random(seed)

            first, second = random_uploads(random), random_uploads(random)
            answers = self.compare(second, partial(self.send_apart, first))
            self.assertGreater(len({str(answer) for answer in answers}), 1)

    def test_shares_that_are_there(self) -> None:
        """They are said to be there, asked for or not; they get leases, and no byte of them changes."""

        def before() -> None:
            first = make_upload(0, {1: b"1111", 2: b"2222"})
            self.assertEqual(self.send([first]), [stored(NONE, 1, 2)])
            self.now += 1000

        uploads = [
            make_upload(0, {2: b"xxxx", 3: b"3333"}, secrets=OTHERS_SECRETS),
            make_upload(1, {2: b"abcd"}),
        ]
        answers = self.compare(uploads, before)
        allocation = Allocation(frozenset({1, 2}), frozenset({3}))
        self.assertEqual(answers, [BundledAnswer(allocation, {2: 404, 3: 201}), stored(NONE, 2)])
        self.assertEqual(self.data(0, 2), b"2222")
        for number in (1, 2):
            self.check_lease(0, number, OTHERS_SECRETS)

    def test_somebody_elses_upload(self) -> None:
        """It is not touched, and stays somebody else's."""
        uploads = [make_upload(file, {3: b"mine"}) for file in range(3)]
        answers = self.compare(
            uploads,
            lambda: self.statuses(allocate({3}, 4, OTHERS_SECRETS, index(1))),
        )
        refused = BundledAnswer(Allocation(NONE, NONE), {3: 401})
        self.assertEqual(answers, [stored(NONE, 3), refused, stored(NONE, 3)])
        theirs = write(3, 0, b"them", OTHERS_SECRETS, index(1))
        self.assertEqual(self.statuses(theirs), [201])
        self.assertEqual(self.data(1, 3), b"them")

    def test_an_upload_that_goes_on(self) -> None:
        """What was allocated before, by the same client, is written and complete."""
        answers = self.compare(
            [make_upload(0, {3: b"whole"})], lambda: self.statuses(allocate({3}, 5, si=index(0)))
        )
        self.assertEqual(answers, [stored(NONE, 3)])

    def begin_three(self) -> None:
        """Have the same part of three shares there."""
        for file in range(3):
            requests = (allocate({3}, 5, si=index(file)), write(3, 1, b"ho", si=index(file)))
            self.assertEqual(self.statuses(*requests), [200, 200])

    def test_an_upload_of_which_a_part_is_there(self) -> None:
        """The same bytes are taken once more; others are a conflict, and are not written."""
        shares = (b"whole", b"wrong", b"whore")
        uploads = [make_upload(file, {3: data}) for file, data in enumerate(shares)]
        answers = self.compare(uploads, self.begin_three)
        conflict = BundledAnswer(Allocation(NONE, frozenset({3})), {3: 409})
        self.assertEqual(answers, [stored(NONE, 3), conflict, stored(NONE, 3)])

    def test_bytes_are_counted_alike(self) -> None:
        """Share data is counted if it was written, and if writing it was refused."""
        uploads = [make_upload(file, {3: data}) for file, data in enumerate((b"whole", b"wrong"))]
        self.compare(uploads, self.begin_three)
        self.assertEqual(self.received, [10, 10])

    def test_out_of_space(self) -> None:
        """What does not fit is refused; what fits is stored, before and behind it."""
        self.free = 1000
        uploads = [
            make_upload(0, {}, 1, share_bytes=500),
            make_upload(1, {1: b"x" * 600}),
            make_upload(2, {1: b"y" * 400}),
        ]
        answers = self.compare(uploads)
        allocated = BundledAnswer(Allocation(NONE, frozenset({1})), {})
        refused = BundledAnswer(Allocation(NONE, NONE), {1: 404})
        self.assertEqual(answers, [allocated, refused, stored(NONE, 1)])

    def test_a_quota(self) -> None:
        """What it has no space for is refused with 507, as alone; shares that are there are told."""
        self.store = self.make_store(quota_bytes=1500)
        self.restart()
        assert self.store.usage is not None
        self.store.usage.counted = True
        uploads = [
            make_upload(0, {1: b"x" * 900}),
            make_upload(1, {1: b"y" * 600}),
            make_upload(2, {1: b"z" * 300}),
        ]
        answers = self.send(uploads)
        self.assertEqual(answers[0], stored(NONE, 1))
        self.assertEqual(answers[1].allocation, 507)
        self.assertEqual(answers[2], stored(NONE, 1))
        known_before = self.send([make_upload(0, {1: b"x" * 900})])[0].allocation
        self.assertEqual(known_before, Allocation(frozenset({1}), NONE))
        refused, empty, known = self.ask(
            allocate({1}, 600, si=index(1)),
            allocate(set(), 600, si=index(1)),
            allocate({1, 2}, 900, si=index(0)),
        )
        self.assertEqual(
            (refused.status, refused.body), (507, b"the quota of this server is used up")
        )
        self.assertEqual((empty.status, known.status), (200, 200))
        self.assertEqual(self.store.usage.granted_bytes(), 900 + 300 + 2 * 84)

    def test_a_disk_that_is_full_while_writing(self) -> None:
        """That is said of the share, whose upload stays; its neighbours are stored."""
        real = os.pwritev

        def full(fd: int, pieces: Sequence[bytes], offset: int) -> int:
            if any(bytes(piece).startswith(b"toomuch") for piece in pieces):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, pieces, offset)

        uploads = [
            make_upload(file, {1: data}) for file, data in enumerate((b"a", b"toomuch", b"c"))
        ]
        with mock.patch("os.pwritev", full):
            answers = self.compare(uploads)
        refused = BundledAnswer(Allocation(NONE, frozenset({1})), {1: 507})
        self.assertEqual(answers, [stored(NONE, 1), refused, stored(NONE, 1)])
        self.assertEqual(self.send(uploads[1:2]), [stored(NONE, 1)])

    def test_a_server_that_takes_no_shares(self) -> None:
        """It refuses all, but says what it has."""

        def before() -> None:
            store, self.store = self.store, self.make_store()
            self.restart()
            self.statuses(allocate({1}, 4, si=index(0)), write(1, 0, b"abcd", si=index(0)))
            self.store = store
            self.restart()

        uploads = [make_upload(0, {1: b"abcd", 2: b"abcd"}), make_upload(1, {1: b"abcd"})]
        answers = self.compare(uploads, before, read_only=True)
        there = BundledAnswer(Allocation(frozenset({1}), NONE), {1: 404, 2: 404})
        refused = BundledAnswer(Allocation(NONE, NONE), {1: 404})
        self.assertEqual(answers, [there, refused])

    def test_too_many_uploads(self) -> None:
        """Beyond a store's bound, allocations are refused."""
        uploads = [make_upload(file, {}, 1) for file in range(3)]
        answers = self.compare(uploads, max_uploads=2)
        allocated = BundledAnswer(Allocation(NONE, frozenset({1})), {})
        self.assertEqual(answers, [allocated, allocated, BundledAnswer(Allocation(NONE, NONE), {})])

    def test_numbers_that_no_share_has(self) -> None:
        """They are refused in silence, and their writes lead nowhere."""
        upload = make_upload(0, {255: b"last", 256: b"none", 999_999_999: b"none"}, 0, 300)
        answers = self.compare([upload, make_upload(1, {256: b"none"})])
        statuses = {255: 201, 256: 404, 999_999_999: 404}
        refused = BundledAnswer(Allocation(NONE, NONE), {256: 404})
        self.assertEqual(
            answers, [BundledAnswer(Allocation(NONE, frozenset({0, 255})), statuses), refused]
        )
        self.assertEqual(
            self.send([make_upload(2, {(1 << 64) - 1: b"none"})])[0].statuses, {(1 << 64) - 1: 404}
        )

    def test_longer_than_was_allocated_before(self) -> None:
        """A share that does not fit its upload is not written."""
        uploads = [make_upload(0, {1: b"too long"}), make_upload(1, {1: b"abcd"})]
        answers = self.compare(uploads, lambda: self.statuses(allocate({1}, 4, si=index(0))))
        refused = BundledAnswer(Allocation(NONE, NONE), {1: 416})
        self.assertEqual(answers, [refused, stored(NONE, 1)])
        self.assertEqual(self.statuses(write(1, 0, b"fits", si=index(0))), [201])

    def test_shorter_than_was_allocated_before(self) -> None:
        """A share that does not fill its upload is written, is not complete, and so is not shown."""
        uploads = [make_upload(file, {1: b"half"}) for file in range(3)]
        answers = self.compare(uploads, lambda: self.statuses(allocate({1}, 8, si=index(1))))
        written = BundledAnswer(Allocation(NONE, NONE), {1: 200})
        self.assertEqual(answers, [stored(NONE, 1), written, stored(NONE, 1)])
        self.assertFalse(self.share(1, 1).exists())
        self.assertEqual(self.statuses(write(1, 4, b"rest", si=index(1))), [201])
        self.assertEqual(self.data(1, 1), b"halfrest")

    def test_an_allocation_without_shares(self) -> None:
        """It is allocated, not written; also with no number, or for shares of no bytes."""
        uploads = [
            make_upload(0, {}, 1, 2),
            make_upload(1, {}),
            make_upload(2, {}, 1, share_bytes=0),
            make_upload(3, {}, 1, share_bytes=(1 << 64) - 1),
            make_upload(4, {1: b"abcd"}),
        ]
        answers = self.compare(uploads)
        allocated = [answer.allocation for answer in answers]
        numbers = [{1, 2}, set(), {1}, set(), {1}]
        self.assertEqual(allocated, [Allocation(NONE, frozenset(each)) for each in numbers])
        self.assertEqual([answer.statuses for answer in answers], [{}, {}, {}, {}, {1: 201}])
        self.assertEqual(self.statuses(write(1, 0, b"abcd", si=index(0))), [201])

    def test_an_empty_bundle(self) -> None:
        """It is answered, and nothing is done."""
        self.assertEqual(self.compare([]), [])
        self.assertEqual(self.files(), {})

    def test_a_refused_allocation(self) -> None:
        """A disk that fails for one of them makes that one's answer a status; its neighbours are stored."""

        def before() -> None:
            self.share(1, 1).parent.parent.mkdir(parents=True)
            self.share(1, 1).parent.write_bytes(b"no directory")

        uploads = [make_upload(file, {1: b"abcd", 2: b"efgh"}) for file in range(3)]
        answers = self.compare(uploads, before)
        good = stored(NONE, 1, 2)
        self.assertEqual(answers, [good, BundledAnswer(500, {}), good])

    def test_a_defect_of_ours(self) -> None:
        """What fails for other reasons is logged, and answered in the same way."""
        wrong, real = index(1), self.store.allocate_in_steps

        def allocate_or_fail(storage_index: bytes, *rest: Any) -> Generator[None, None, Allocation]:
            if storage_index == wrong:
                raise ZeroDivisionError
            return real(storage_index, *rest)

        self.patch(self.store, "allocate_in_steps", allocate_or_fail)
        answers = self.send([make_upload(file, {1: b"abcd"}, 2) for file in range(3)])
        good = BundledAnswer(Allocation(NONE, frozenset({1, 2})), {1: 201})
        self.assertEqual(answers, [good, BundledAnswer(500, {}), good])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_defect_in_one_move(self) -> None:
        """A share that could not be taken whole goes the long way."""
        wrong, real = index(1), self.store.take_whole

        def take_or_fail(storage_index: bytes, *rest: Any) -> IncomingShare | None:
            if storage_index == wrong:
                raise ZeroDivisionError
            return real(storage_index, *rest)

        self.patch(self.store, "take_whole", take_or_fail)
        answers = self.send([make_upload(file, {1: b"abcd", 2: b"efgh"}) for file in range(3)])
        self.assertEqual(answers, [stored(NONE, 1, 2)] * 3)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_some_in_one_move(self) -> None:
        """Where one share of an upload cannot be taken whole, it and the others go the long way."""
        self.send([make_upload(9, {1: b"abcd"})])  # the first of all, which always goes there
        real = self.store.take_whole
        for refused in (1, 2, 3):

            def take(
                index: bytes, number: int, *rest: Any, refused: int = refused
            ) -> IncomingShare | None:
                return None if number == refused else real(index, number, *rest)

            self.patch(self.store, "take_whole", take)
            shares = {number: b"%d" % number * 4 for number in (1, 2, 3)}
            uploads = [make_upload(refused, shares), make_upload(refused + 3, {1: b"abcd"})]
            self.assertEqual(self.send(uploads), [stored(NONE, 1, 2, 3), stored(NONE, 1)])
            for number, data in shares.items():
                self.assertEqual(self.data(refused, number), data)
            self.assertEqual((self.service.commits, self.store.upload_count), (0, 0))

    def test_every_policy(self) -> None:
        """However a server makes shares durable."""
        policies: tuple[Policy, ...] = ("strict", "batch", "none")
        for self.policy in policies:
            uploads = [make_upload(file, {1: b"abcd", 2: b"efgh"}, 3) for file in range(3)]
            allocation = Allocation(NONE, frozenset({1, 2, 3}))
            answers = self.compare([*uploads, make_upload(3, {300: b"none"})])
            self.assertEqual(answers[:3], [BundledAnswer(allocation, {1: 201, 2: 201})] * 3)


class WithNamesTests(AsPlainRequestsTests):
    """All of it where every file needs a name from its beginning."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(incoming_share, "can_name", lambda directory: False)


class DurabilityTests(BundleTestCase):
    """When a bundle is answered."""

    def test_durable_before_answered(self) -> None:
        """All of a bundle is made durable together, data and then names; the answer comes after that."""
        log: list[str] = []
        workers = self.slow()
        self.patch(Disk, "sync_data", lambda self, shares: log.append(f"data of {len(shares)}"))
        self.patch(Disk, "sync_names", lambda self, names: log.append("names"))
        connection, transport = self.connect()
        self.patch(transport, "write", lambda data: log.append("answer"))
        uploads = [make_upload(file, {1: b"abcd", 2: b"efgh"}) for file in range(10)]
        connection.dataReceived(bundle([*uploads, make_upload(10, {}, 1)]))
        self.settle()
        self.assertEqual(self.service.commits, 20)
        self.assertEqual(len(workers.waiting), 1)
        self.assertEqual(log, [])
        self.assertFalse(self.share(0, 1).exists())
        for expected in (["data of 20"], ["data of 20", "names", "answer"]):
            ((deferred, call),) = workers.waiting
            workers.waiting.clear()
            deferred.callback(call())
            self.settle()
            self.assertEqual(log, expected)
        self.assertEqual(self.service.commits, 0)

    def test_no_name_before_it_is_durable(self) -> None:
        """Of shares that come whole nothing is in ``incoming``: what is not durable is nowhere yet."""
        self.send([make_upload(0, {1: b"abcd"})])
        before = self.files()
        workers = self.slow()
        connection, _ = self.connect()
        connection.dataReceived(bundle([make_upload(file, {1: b"efgh"}) for file in (1, 2)]))
        self.settle()
        self.assertEqual((self.service.commits, self.files()), (2, before))
        workers.finish()
        self.settle()
        self.assertEqual((self.data(1, 1), self.data(2, 1)), (b"efgh", b"efgh"))

    def test_a_refusal_behind_some_in_one_move(self) -> None:
        """What was taken is stored, and the rest is said not to be."""
        self.send([make_upload(9, {1: b"abcd"})])
        real = self.store.take_whole

        def refuse(*_: object) -> Generator[None, None, Allocation]:
            raise ServerRefused("the disk failed")

        self.patch(self.store, "allocate_in_steps", refuse)
        self.patch(
            self.store,
            "take_whole",
            lambda index, number, *rest: real(index, number, *rest) if number == 1 else None,
        )
        (answer,) = self.send([make_upload(0, {1: b"abcd", 2: b"efgh"})])
        self.assertEqual(answer, BundledAnswer(Allocation(NONE, frozenset({1})), {1: 201, 2: 404}))
        self.assertEqual((self.service.commits, self.store.upload_count), (0, 0))

    def test_a_name_where_each_file_is_synced(self) -> None:
        """Of a file without one ``fsync`` would promise nothing on btrfs."""
        self.send([make_upload(0, {1: b"abcd"})])
        cases: list[tuple[Policy, bool, int]] = [
            ("none", False, 0),
            ("batch", True, 0),
            ("batch", False, 1),
            ("strict", True, 1),
        ]
        for file, (self.policy, one_call, named) in enumerate(cases, 1):
            self.restart()
            disk = self.durability._disk_calls()
            disk.__dict__["_syncfs"] = (lambda fd: None) if one_call else None
            synced: list[str] = []
            self.patch(os, "fsync", partial(_note_name, synced))
            self.assertEqual(self.send([make_upload(file, {1: b"abcd"})]), [stored(NONE, 1)])
            files = [os.path.basename(name) for name in synced if not os.path.isdir(name)]
            self.assertEqual(files, [f"{base32.encode(index(file))}.1"] * named)
            self.assertEqual(self.data(file, 1), b"abcd")

    def test_shares_of_several_groups(self) -> None:
        """A bundle whose shares become durable in turns is answered after the last."""
        workers = self.slow()
        connection, transport = self.connect()
        uploads = [make_upload(file, {1: b"abcd"}) for file in range(100)]
        connection.dataReceived(bundle(uploads))
        self.settle()
        self.assertEqual(self.service.commits, 100)
        workers.finish()
        self.settle()
        self.assertEqual(self.service.commits, 36)
        self.assertEqual(transport.written, b"")
        workers.finish()
        self.settle()
        (reply,) = parse_replies(transport.written)
        self.assertEqual(self.understand(reply, uploads), [stored(NONE, 1)] * 100)

    def test_bundles_and_writes_are_one_group(self) -> None:
        """Of several clients, too."""
        workers = self.slow()
        clients = [self.connect() for _ in range(3)]
        for file, (connection, _) in enumerate(clients):
            plain = allocate({1}, 4, si=index(10 + file)) + write(
                1, 0, b"abcd", si=index(10 + file)
            )
            connection.dataReceived(plain + bundle([make_upload(file, {1: b"abcd", 2: b"efgh"})]))
        self.settle()
        self.assertEqual(self.service.commits, 9)
        self.assertEqual(len(workers.waiting), 1)
        workers.finish()
        self.settle()
        for _, transport in clients:
            statuses = [reply.status for reply in parse_replies(transport.written)]
            self.assertEqual(statuses, [200, 201, 200])

    def test_what_cannot_be_made_durable(self) -> None:
        """It is not said to be stored, and is not there."""

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        uploads = [make_upload(0, {1: b"abcd"}), make_upload(1, {}, 1)]
        with mock.patch.object(Disk, "sync_data", broken):
            answers = self.send(uploads)
        allocation = Allocation(NONE, frozenset({1}))
        self.assertEqual(
            answers, [BundledAnswer(allocation, {1: 500}), BundledAnswer(allocation, {})]
        )
        self.assertFalse(self.share(0, 1).exists())
        self.assertEqual(self.send(uploads[:1]), [stored(NONE, 1)])

    def test_one_that_fails_at_the_end(self) -> None:
        """A share that is given up before it is durable is lost alone."""
        workers = self.slow()
        connection, transport = self.connect()
        uploads = [make_upload(file, {1: b"abcd"}) for file in range(3)]
        connection.dataReceived(bundle(uploads))
        self.store.upload(index(1), 1, SECRETS.upload).discard()
        self.settle()
        workers.finish()
        self.settle()
        (reply,) = parse_replies(transport.written)
        lost = BundledAnswer(Allocation(NONE, frozenset({1})), {1: 404})
        self.assertEqual(self.understand(reply, uploads), [stored(NONE, 1), lost, stored(NONE, 1)])

    def test_nothing_to_wait_for(self) -> None:
        """A bundle of which nothing was written is answered at once."""
        workers = self.slow()
        connection, transport = self.connect()
        uploads = [make_upload(0, {}, 1), make_upload(1, {300: b"none"})]
        connection.dataReceived(bundle(uploads) + bundle([]))
        self.assertEqual([reply.status for reply in parse_replies(transport.written)], [200, 200])
        self.assertEqual(workers.waiting, [])

    def test_the_same_share_comes_first_by_another_connection(self) -> None:
        """A bundle that took it, and had to wait for others in between, is told that it is stored, too."""
        self.policy = "none"
        self.restart()
        self.send([make_upload(9, {0: b"there"})])
        uploads = [make_upload(file, {1: b"abcd"}) for file in range(3)]
        over: list[bool] = []
        take_whole = self.store.take_whole

        def take_and_yield(*call: Any) -> IncomingShare | None:
            over.append(True)
            return take_whole(*call)

        self.patch(FairTurns, "over", property(lambda _: bool(over)))
        self.patch(self.store, "take_whole", take_and_yield)
        connection, transport = self.connect()
        connection.dataReceived(bundle(uploads))
        self.patch(self.store, "take_whole", take_whole)
        over.clear()
        self.assertEqual(self.store.upload_count, 1)
        other, others_transport = self.connect()
        other.dataReceived(bundle(uploads))
        self.settle()
        for each in (transport, others_transport):
            (reply,) = parse_replies(each.written)
            first, *rest = self.understand(reply, uploads)
            self.assertEqual(first, stored(NONE, 1))
            for answer in rest:
                assert isinstance(answer.allocation, Allocation)
                self.assertTrue(answer.statuses == {1: 201} or answer.allocation.already_have)
        self.assertEqual((self.service.commits, self.store.upload_count), (0, 0))

    def test_who_has_gone(self) -> None:
        """What was begun for a client that is lost is stored all the same, and nothing is kept of it."""
        workers = self.slow()
        connection, transport = self.connect()
        connection.dataReceived(bundle([make_upload(0, {1: b"abcd"})]))
        self.settle()
        self.assertGreater(self.service._held_bytes, 0)
        transport.lose()
        workers.finish()
        self.settle()
        self.assertEqual(transport.written, b"")
        self.assertEqual(self.data(0, 1), b"abcd")
        self.assertEqual((self.service.commits, self.service._held_bytes), (0, 0))


class OrderTests(BundleTestCase):
    """Requests behind a bundle, on its connection."""

    def setUp(self) -> None:
        super().setUp()
        self.disk = self.slow()
        self.uploads = [
            make_upload(0, {0: b"abcd"}, 1),
            make_upload(1, {0: b"abcd"}),
            make_upload(2, {}, 0),
        ]
        self.connection: GbsConnection
        self.transport: MemoryTransport
        self.connection, self.transport = self.connect()
        self.connection.dataReceived(bundle(self.uploads))
        self.settle()
        self.assertEqual((self.service.commits, self.replies()), (2, []))

    def replies(self) -> list[Reply]:
        """Return what has been answered."""
        return parse_replies(self.transport.written)

    def goes_on(self, *requests: bytes) -> None:
        """Send requests and check that all are carried out at once, though not answered yet."""
        before = self.service.requests.total() + self.service.commits
        self.connection.dataReceived(b"".join(requests))
        self.assertEqual(
            self.service.requests.total() + self.service.commits, before + len(requests)
        )
        self.assertFalse(self.transport.paused)
        self.settle()
        self.assertEqual(self.replies(), [])

    def waits(self, request: bytes) -> None:
        """Send a request and check that nothing is done about it."""
        before = (self.service.requests.total(), self.service.commits, self.files())
        self.connection.dataReceived(request)
        self.settle()
        after = (self.service.requests.total(), self.service.commits, self.files())
        self.assertEqual(after, before)
        self.assertEqual(self.replies(), [])

    def finish(self, bundles: int = 1) -> list[Reply]:
        """Let the disk finish; returns the answers behind those to bundles, which have all been stored."""
        for _ in range(5):
            self.disk.finish()
            self.settle()
        replies = self.replies()
        self.assertEqual([reply.status for reply in replies[:bundles]], [200] * bundles)
        answers = self.understand(replies[0], self.uploads)
        self.assertEqual([answer.statuses for answer in answers], [{0: 201}, {0: 201}, {}])
        self.assertFalse(self.transport.paused)
        self.assertEqual(self.connection._order.committing, {})
        self.assertEqual((self.service.commits, self.service._held_bytes), (0, 0))
        return replies[bundles:]

    def test_lists(self) -> None:
        """A list waits until what it would not show yet is there."""
        self.waits(list_shares(index(1)) + list_shares(index(0)) + VERSION)
        replies = self.finish()
        self.assertEqual([reply.status for reply in replies], [200] * 3)
        self.assertEqual(gbs_cbor_bodies.unpack_shares(replies[0].body), {0})
        self.assertEqual(gbs_cbor_bodies.unpack_shares(replies[1].body), {0})

    def test_reads(self) -> None:
        """So does a read."""
        self.waits(read(0, si=index(1)))
        (reply,) = self.finish()
        self.assertEqual((reply.status, reply.body), (200, b"abcd"))

    def test_allocations(self) -> None:
        """So does an allocation, which is then told what is there."""
        self.waits(allocate({0, 1, 2}, 4, OTHERS_SECRETS, index(0)))
        (reply,) = self.finish()
        allocation = gbs_cbor_bodies.unpack_allocation(reply.body)
        self.assertEqual(allocation, Allocation(frozenset({0}), frozenset({2})))

    def test_leases(self) -> None:
        """So does a lease, which would find nothing to be put on."""
        path = gbs_paths_headers.lease_path(index(1))
        self.waits(head("PUT", path, *lease_headers(OTHERS_SECRETS)))
        (reply,) = self.finish()
        self.assertEqual(reply.status, 204)
        self.check_lease(1, 0, OTHERS_SECRETS)

    def test_the_same_share_again(self) -> None:
        """So does a write to a share that the bundle brought: its upload is not there any more."""
        self.waits(write(0, 0, b"abcd", si=index(0)))
        (reply,) = self.finish()
        self.assertEqual(reply.status, 404)

    def test_another_share(self) -> None:
        """A write to another share of a file goes on, and both become durable."""
        self.goes_on(write(1, 0, b"efgh", si=index(0)))
        (reply,) = self.finish()
        self.assertEqual(reply.status, 201)
        self.assertEqual(self.data(0, 1), b"efgh")

    def test_other_files(self) -> None:
        """What concerns other files goes on, even those that the bundle only allocated."""
        self.goes_on(
            list_shares(index(3)),
            allocate({0}, 4, si=index(3)),
            allocate({1}, 4, si=index(2)),
            write(1, 0, b"abcd", si=index(2)),
            VERSION,
        )
        self.assertEqual([reply.status for reply in self.finish()], [200, 200, 200, 201, 200])

    def test_another_bundle(self) -> None:
        """A bundle of other files goes on: nothing waits for a round trip or for the disk."""
        self.goes_on(bundle([make_upload(3, {0: b"abcd"})]), bundle([make_upload(4, {0: b"abcd"})]))
        self.assertEqual(self.service.commits, 4)
        self.assertEqual(self.finish(bundles=3), [])
        self.assertEqual(self.data(4, 0), b"abcd")

    def test_a_bundle_of_the_same_file(self) -> None:
        """A second bundle sees what the first one stored, as an allocation in its place would."""
        again = [
            make_upload(0, {0: b"abcd", 2: b"efgh"}, secrets=OTHERS_SECRETS),
            make_upload(5, {0: b"abcd"}),
        ]
        self.connection.dataReceived(bundle(again))
        self.settle()
        (reply,) = self.finish()
        allocation = Allocation(frozenset({0}), frozenset({2}))
        self.assertEqual(
            self.understand(reply, again),
            [BundledAnswer(allocation, {0: 404, 2: 201}), stored(NONE, 0)],
        )

    def test_a_bundle_behind_a_write(self) -> None:
        """So does a bundle behind a write that is becoming durable."""
        plain = allocate({7}, 4, si=index(6)) + write(7, 0, b"abcd", si=index(6))
        again = [make_upload(6, {7: b"abcd"}, secrets=OTHERS_SECRETS)]
        self.connection.dataReceived(plain + bundle(again))
        self.settle()
        *_, reply = self.finish()
        allocation = Allocation(frozenset({7}), NONE)
        self.assertEqual(self.understand(reply, again), [BundledAnswer(allocation, {7: 404})])

    def test_other_connections(self) -> None:
        """They wait for nothing, and do not see what is not durable."""
        statuses = self.statuses(list_shares(index(0)), read(0, si=index(0)), VERSION)
        self.assertEqual(statuses, [200, 404, 200])
        self.assertEqual(self.finish(), [])


class OfferTests(BundleTestCase):
    """How a server says that it takes bundles."""

    def test_who_is_told(self) -> None:
        """Answers about the version, to allocations, and lists of shares say so, and no others do."""
        upload = make_upload(0, {0: b"abcd"})
        offers = self.ask(VERSION, allocate({1}, 4, si=index(0)), list_shares(index(0)))
        for reply in offers:
            self.assertEqual(reply.headers["pipegrid-bundles"], str(gbs_bundles.MAX_BUNDLE_BYTES))
        self.assertEqual(gbs_bundles.HEADER.decode(), "pipegrid-bundles")
        abort = head("PUT", gbs_paths_headers.abort_path(index(0), 1), *upload_header())
        corrupt = gbs_cbor_bodies.pack_corrupt("bad")
        others = self.ask(
            bundle([upload]),
            read(0, si=index(0)),
            read(9, si=index(0)),
            write(1, 0, b"ab", si=index(0)),
            abort,
            head("PUT", gbs_paths_headers.lease_path(index(0)), *lease_headers()),
            head("POST", gbs_paths_headers.corrupt_path(index(0), 0), body=corrupt) + corrupt,
            allocate({1}, 4, si=index(0)).replace(AUTHORIZATION, b"A: b"),
            VERSION.replace(AUTHORIZATION, b"A: b"),
            head("GET", "/"),
            bundle_of(b"garbage"),
        )
        statuses = [reply.status for reply in others]
        self.assertEqual(statuses, [200, 200, 404, 200, 200, 204, 200, 401, 401, 404, 400])
        for reply in others:
            self.assertNotIn("pipegrid-bundles", reply.headers)

    def test_the_longest_bundle(self) -> None:
        """What is offered is taken."""
        body = gbs_bundles.pack_bundle([make_upload(0, {0: b"abcd"})])
        (offer,) = self.ask(VERSION)
        length = int(offer.headers["pipegrid-bundles"])
        rest = length - len(body) - 5  # an item behind the bundle, which nobody looks at
        body += b"\x5a" + rest.to_bytes(4, "big") + bytes(rest)
        self.assertEqual(self.statuses(bundle_of(body), VERSION), [200, 200])
        self.assertEqual(self.data(0, 0), b"abcd")

    def test_what_is_counted(self) -> None:
        """A bundle is one request, whatever is in it; its bytes are counted as any others."""
        self.send([make_upload(file, {0: b"abcd", 1: b"efgh"}) for file in range(5)])
        self.statuses(bundle_of(b"garbage"))
        self.assertEqual(self.service.requests, {("bundle", 200): 1, ("bundle", 400): 1})
        self.assertEqual(self.service.received_bytes, 40)


class HostileTests(BundleTestCase):
    """Nothing is stored, nothing is kept, and the connection goes on."""

    def refused(self, *requests: bytes) -> list[Reply]:
        """Send requests that are refused; returns the answers, behind which the connection goes on."""
        *replies, last = self.ask(*requests, VERSION)
        self.assertEqual(last.status, 200)
        self.assertEqual(len(replies), len(requests))
        self.assertEqual((self.files(), self.store.upload_count), ({}, 0))
        self.assertEqual((self.service.commits, self.service._held_bytes), (0, 0))
        return replies

    def refuse(self, request: bytes, status: int) -> None:
        """The same, for one request."""
        (reply,) = self.refused(request)
        self.assertEqual(reply.status, status)

    def test_strangers(self) -> None:
        """Who does not know the server's secret is told so, whatever is sent."""
        request = bundle([make_upload(0, {0: b"abcd"})])
        wrong = (b"", b"Authorization: Tahoe-LAFS\r\n", AUTHORIZATION[:-1] + b"x\r\n")
        for instead in wrong:
            self.refuse(request.replace(AUTHORIZATION + b"\r\n", instead), 401)

    def test_wrong_methods(self) -> None:
        """Bundles are posted, and whoever does otherwise is told."""
        body = gbs_bundles.pack_bundle([make_upload(0, {0: b"abcd"})])
        for method in ("GET", "PUT", "PATCH", "DELETE"):
            (reply,) = self.refused(head(method, gbs_paths_headers.BUNDLE_PATH, body=body) + body)
            self.assertEqual((reply.status, reply.headers["allow"]), (405, "POST"))

    def test_wrong_paths(self) -> None:
        """There is one address."""
        body = gbs_bundles.pack_bundle([make_upload(0, {0: b"abcd"})])
        for path in (
            "/storage/v1/bundle/",
            "/storage/v1/bundles",
            "/storage/v1/bundle/0",
            "/bundle",
        ):
            self.refuse(head("POST", path, body=body) + body, 404)

    def test_wrong_headers(self) -> None:
        """Another type, an answer of another type, or secrets beside those in the bundle are refused."""
        body = gbs_bundles.pack_bundle([make_upload(0, {0: b"abcd"})])
        for line, status in (
            (b"Content-Type: text/plain", 415),
            (b"Accept: text/html", 406),
            (upload_header()[0], 400),
            (lease_headers()[0], 400),
        ):
            self.refuse(bundle_of(body, line), status)
        good = bundle_of(body, b"Content-Type: application/cbor", b"Accept: application/cbor")
        self.assertEqual(self.statuses(good), [200])

    def test_too_long(self) -> None:
        """More than the limit is passed over and not kept, whether announced or not."""
        body = gbs_bundles.pack_bundle([make_upload(0, {0: b"abcd"})])
        body = body.ljust(gbs_bundles.MAX_BUNDLE_BYTES + 1, b"\0")
        request = bundle_of(body)
        self.refuse(request, 413)
        self.refuse(chunked(request, body), 413)
        self.refuse(chunked(bundle_of(body * 5), body * 5), 413)

    def test_in_chunks(self) -> None:
        """A good one may come so."""
        body = gbs_bundles.pack_bundle([make_upload(0, {0: b"abcd"})])
        self.assertEqual(self.statuses(chunked(bundle_of(body), body), VERSION), [200, 200])
        self.assertEqual(self.data(0, 0), b"abcd")

    def test_garbage(self) -> None:
        """What is no bundle is 400, and of one with a fault nothing is done."""
        good = make_upload(0, {0: b"abcd"})
        packed = gbs_bundles.pack_bundle([good, attrs.evolve(good, share_bytes=5)])
        for body in (*BOMBS.values(), b"\x81" * 200_000, packed, packed[:-1]):
            (reply,) = self.refused(bundle_of(body))
            self.assertEqual(reply.status, 400)
            self.assertTrue(reply.body)

    def test_broken_bundles(self) -> None:
        """However a bundle is broken on its way, it is answered, and nothing fails."""
        body = gbs_bundles.pack_bundle([make_upload(file, {0: b"abcd"}, 1) for file in range(2)])
        for seed in range(200):
            random = Random(seed)
            broken = bytearray(body)
            broken[random.randrange(len(body))] = random.randrange(256)
            status, version = self.statuses(bundle_of(bytes(broken)), VERSION)
            self.assertIn(status, (200, 400))
            self.assertEqual(version, 200)

    def test_cut_off(self) -> None:
        """Of a bundle whose end does not come nothing is begun, and no file is open."""
        request = bundle([make_upload(file, {0: b"abcd" * 100}) for file in range(20)])
        start = request.index(b"\r\n\r\n") + 4
        before = open_files()
        for length in (start, start + 1, (start + len(request)) // 2, len(request) - 1):
            connection, transport = self.connect()
            connection.dataReceived(request[:length])
            self.settle()
            self.assertEqual(self.service._held_bytes, length - start)
            transport.lose()
            self.settle()
            self.assertEqual(self.service._held_bytes, 0)
            self.assertEqual((self.files(), self.store.upload_count), ({}, 0))
            self.assertEqual(left_open(before), [])

    def test_in_pieces(self) -> None:
        """However its bytes are cut, a bundle is carried out once, at its end."""
        request = bundle([make_upload(0, {0: b"abcd"})])
        connection, transport = self.connect()
        for byte in request[:-1]:
            connection.dataReceived(bytes([byte]))
        self.assertEqual(self.files(), {})
        connection.dataReceived(request[-1:] + VERSION)
        self.settle()
        self.assertEqual([reply.status for reply in parse_replies(transport.written)], [200, 200])
        self.assertEqual(self.service.requests["bundle", 200], 1)
        transport.lose()

    def test_too_many_shares_wait(self) -> None:
        """While 512 shares wait for the disk, further bundles are not begun, nor read on any connection."""
        workers = self.slow()
        most = gbs_bundles.MAX_UPLOADS
        bundles = [
            [make_upload(at, {0: b"abcd"}) for at in range(begin, begin + most)]
            for begin in range(0, 6 * most, most)
        ]
        connection, transport = self.connect()
        connection.dataReceived(b"".join(map(bundle, bundles[:5])))
        self.settle()
        self.assertEqual(self.service.commits, MAX_COMMITS)
        self.assertTrue(transport.paused)
        other, other_transport = self.connect()
        other.dataReceived(VERSION + bundle(bundles[5]))
        self.assertEqual(len(parse_replies(other_transport.written)), 1)
        self.assertEqual(self.service.commits, MAX_COMMITS)
        self.assertTrue(other_transport.paused)
        for _ in range(6 * most // 64 + 1):
            workers.finish()
            self.settle()
            self.assertLess(self.service.commits, MAX_COMMITS + most)
        for each, chosen in ((transport, bundles[:5]), (other_transport, bundles[5:])):
            self.assertFalse(each.paused)
            replies = parse_replies(each.written)[-len(chosen) :]
            for reply, uploads in zip(replies, chosen, strict=True):
                self.assertEqual(self.understand(reply, uploads), [stored(NONE, 0)] * most)

    def test_many_shares_in_one_upload(self) -> None:
        """However the shares of a bundle are divided into uploads, few wait for the disk at once."""
        workers = self.slow()
        connection, _ = self.connect()
        shares = dict.fromkeys(range(256), b"abcd")
        connection.dataReceived(bundle([make_upload(file, shares) for file in range(4)]))
        self.assertLessEqual(self.service.commits, gbs_bundles.MAX_UPLOADS)
        for _ in range(20):
            self.settle()
            workers.finish()

    def test_many_bundles_at_once(self) -> None:
        """Bundles that were begun while there was room do not all bring their shares when there is none."""
        workers = self.slow()
        most = gbs_bundles.MAX_UPLOADS
        clients = [self.connect() for _ in range(8)]
        requests = [
            bundle([make_upload(client * most + at, {0: b"abcd"}) for at in range(most)])
            for client in range(len(clients))
        ]
        for (connection, _), request in zip(clients, requests, strict=True):
            connection.dataReceived(request[:-1])
        for (connection, _), request in zip(clients, requests, strict=True):
            connection.dataReceived(request[-1:])
        self.assertLess(self.service.commits, MAX_COMMITS + most)
        for _ in range(30):
            self.settle()
            workers.finish()
        for _, transport in clients:
            self.assertEqual([reply.status for reply in parse_replies(transport.written)], [200])


class OpenFilesTests(BundleTestCase):
    """Which files are open while shares wait for the disk."""

    def setUp(self) -> None:
        super().setUp()
        self.store = self.make_store(max_open_uploads=4)
        self.disk = self.slow()
        self.asked: list[IncomingShare] = []
        suspend = IncomingShare.suspend

        def record(upload: IncomingShare) -> bool:
            self.asked.append(upload)
            return suspend(upload)

        self.patch(IncomingShare, "suspend", record)

    def uploads(self, complete: bool) -> list[IncomingShare]:
        """Return all that are, or are not, complete."""
        every = self.store._unfinished._uploads.values()
        return [upload for upload in every if upload.complete is complete]

    def test_complete_ones_are_let_be(self) -> None:
        """However many wait for the disk, none of them is closed, or looked at for that."""
        connection, _ = self.connect()
        connection.dataReceived(bundle([make_upload(file, {0: b"abcd"}) for file in range(100)]))
        connection.dataReceived(
            bundle([make_upload(file, {0: b"x" * 5000}) for file in range(100, 128)])
        )
        self.settle()
        complete = self.uploads(True)
        self.assertEqual(len(complete), 128)
        self.assertTrue(all(upload.is_open for upload in complete))
        self.assertEqual(self.asked, [])
        for _ in range(3):
            self.disk.finish()
            self.settle()
        self.assertEqual(self.store.upload_count, 0)

    def test_unfinished_ones_are_bounded(self) -> None:
        """Beside them so many unfinished ones stay open as may, and only those are closed for others."""
        connection, _ = self.connect()
        for file in range(0, 60, 3):
            si = index(file)
            connection.dataReceived(
                bundle([make_upload(file + 1, {0: b"abcd"}), make_upload(file + 2, {}, 0)])
                + allocate({0}, 8, si=si)
                + write(0, 0, b"abcd", si=si)
            )
        complete, unfinished = self.uploads(True), self.uploads(False)
        self.assertEqual((len(complete), len(unfinished)), (20, 40))
        self.assertTrue(all(upload.is_open for upload in complete))
        self.assertEqual(sum(upload.is_open for upload in unfinished), 4)
        self.assertLessEqual(set(self.asked), set(unfinished))
        # Each is closed once, and taken up once more to be written to at the most.
        self.assertLessEqual(len(self.asked), 2 * len(unfinished))

    def test_complete_in_pieces(self) -> None:
        """One whose last bytes come later is let be from then on."""
        requests = [allocate({0}, 8, si=index(file)) for file in range(20)]
        requests += [write(0, 0, b"abcd", si=index(file)) for file in range(20)]
        requests += [write(0, 4, b"efgh", si=index(file)) for file in range(20)]
        connection, _ = self.connect()
        connection.dataReceived(b"".join(requests))
        complete = self.uploads(True)
        self.assertEqual(len(complete), 20)
        self.assertTrue(all(upload.is_open for upload in complete))
        self.asked.clear()
        connection.dataReceived(bundle([make_upload(file, {}, 0) for file in range(20, 40)]))
        self.assertEqual(sum(upload.is_open for upload in self.uploads(False)), 4)
        self.assertEqual(set(self.asked) & set(complete), set())

    def test_complete_without_the_rest(self) -> None:
        """One whose rest is zeros that never come is let be, too."""
        for file in range(8):
            self.statuses(allocate({0}, 8, si=index(file)), write(0, 0, b"abcd", si=index(file)))
            self.store.upload(index(file), 0, SECRETS.upload).fill_rest()
        complete = self.uploads(True)
        self.assertEqual(len(complete), 8)
        self.asked.clear()
        self.send([make_upload(file, {}, 0) for file in range(10, 20)])
        self.assertEqual(sum(upload.is_open for upload in self.uploads(False)), 4)
        self.assertEqual(set(self.asked) & set(complete), set())

    def test_complete_and_gone(self) -> None:
        """Whoever goes once all of a share has come, before the request has ended, leaves no file open."""
        before = open_files()
        for file in range(8):
            self.statuses(allocate({0}, 8, si=index(file)))
            connection, transport = self.connect()
            # The body is longer than its range, and its end never comes.
            request = write(0, 0, b"abcdefghmore", si=index(file), end=8)
            connection.dataReceived(request[:-4])
            transport.lose()
        self.assertEqual(len(self.uploads(True)), 8)
        for _ in range(2):
            self.disk.finish()
            self.settle()
        self.assertEqual(self.uploads(True), [])
        self.assertEqual((open_files(), self.service.commits), (before, 0))
        self.assertEqual([self.data(file, 0) for file in range(8)], [b"abcdefgh"] * 8)
