"""Bundles and their answers: what is packed is read back, and nothing else is let through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import attrs
import cbor2
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import gbs_bundles, gbs_cbor_bodies
from pipegrid.wire.gbs_bundles import BundledAnswer, BundledUpload
from pipegrid.wire.storage_messages import Allocation, LeaseSecrets, UploadSecrets
from tests.wire.test_cbor import BOMBS

LARGEST = (1 << 64) - 1
INDEX, RENEW, CANCEL, SECRET = b"i" * 16, b"r" * 32, b"c" * 32, b"u" * 32
INDEX_AT, RENEW_AT, CANCEL_AT, SECRET_AT, SIZE_AT, NUMBERS_AT, SHARES_AT = range(7)
GOOD: list[Any] = [INDEX, RENEW, CANCEL, SECRET, 4, [1, 7], {7: b"abcd"}]
OTHER: list[Any] = [b"o" * 16, *GOOD[1:]]
GOOD_ANSWER: list[Any] = [[1], [7], {7: 201}]


def make_upload(
    numbers: set[int],
    shares: dict[int, bytes],
    share_bytes: int = 4,
    secret: bytes = SECRET,
    index: int = 0,
) -> BundledUpload:
    """Return an upload."""
    secrets = UploadSecrets(LeaseSecrets(RENEW, CANCEL), secret)
    return BundledUpload(index.to_bytes(16, "big"), secrets, share_bytes, numbers, shares)


def edge_uploads() -> Iterator[BundledUpload]:
    """Yield uploads at the limits of what may be said."""
    yield make_upload(set(), {}, 0, b"u")
    yield make_upload(set(range(256)), {}, LARGEST, b"u" * 64)
    yield make_upload(set(range(256)), dict.fromkeys(range(100), b"abcd"))
    yield make_upload(set(range(LARGEST - 255, LARGEST + 1)), {LARGEST: b"abcd"})
    yield make_upload({0, 255, 256, 65536, 1 << 32}, {0: b"a", 256: b"b", 1 << 32: b"c"}, 1)
    for size in (23, 24, 255, 256, 65535, 65536, 200_000):
        yield make_upload({3}, {3: bytes(size)}, size)


def random_upload(random: Random, most_shares: int) -> BundledUpload:
    """Return any upload of so many shares."""
    widest = random.choice((8, 255, 70_000, LARGEST))
    numbers = {random.randint(0, widest) for _ in range(random.choice((0, 1, 2, 10, 256)))}
    share_bytes = random.choice((1, 23, 24, 300))
    chosen = random.sample(sorted(numbers), random.randint(0, min(len(numbers), most_shares)))
    shares = {number: random.randbytes(share_bytes) for number in chosen}
    if not shares:
        share_bytes = random.choice((0, 1, 70_000, LARGEST))
    secrets = UploadSecrets(
        LeaseSecrets(random.randbytes(32), random.randbytes(32)),
        random.randbytes(random.randint(1, 64)),
    )
    return BundledUpload(random.randbytes(16), secrets, share_bytes, numbers, shares)


def random_uploads(random: Random) -> list[BundledUpload]:
    """Return what fits into one bundle."""
    count, most_shares = random.choice(((0, 0), (1, 100), (2, 30), (30, 4)))
    uploads = [random_upload(random, most_shares) for _ in range(count)]
    while sum(len(each.share_numbers) for each in uploads) > gbs_bundles.MAX_NUMBERS:
        uploads.pop()
    return uploads


def random_answer(random: Random, upload: BundledUpload) -> BundledAnswer:
    """Return any answer to an upload."""
    if random.random() < 0.2:
        return BundledAnswer(random.randint(200, 599), {})
    have = frozenset(random.sample(range(256), random.choice((0, 1, 5, 256))))
    allocated = frozenset(number for number in upload.share_numbers if random.random() < 0.7)
    statuses = {number: random.choice((200, 201, 404, 599)) for number in upload.shares}
    return BundledAnswer(Allocation(have, allocated), statuses)


def with_field(at: int, value: Any) -> bytes:
    """Return a bundle of a good upload, and of one in which a field has another value."""
    fields = list(GOOD)
    fields[at] = value
    return cbor2.dumps([OTHER, fields])


def padded(body: bytes, length: int) -> bytes:
    """Return a message with one more item behind it, which nobody looks at, so that it has that length."""
    rest = length - len(body) - 5
    return body + b"\x5a" + rest.to_bytes(4, "big") + bytes(rest)


class BundleTests(SynchronousTestCase):
    """What clients send."""

    def refuse(self, body: bytes, why: object) -> None:
        """Expect that a bundle is refused."""
        try:
            uploads = gbs_bundles.unpack_bundle(body)
        except ValueError:
            return
        self.fail(f"{why!r:.200} was read as {uploads!r:.200}")

    def test_random_bundles_are_read_back(self) -> None:
        """Every bundle comes back from its bytes, in its order."""
        for seed in range(150):
            random = Random(seed)
            uploads = random_uploads(random)
            unpacked = gbs_bundles.unpack_bundle(gbs_bundles.pack_bundle(uploads))
            self.assertEqual(unpacked, uploads, seed)

    def test_edges_are_read_back(self) -> None:
        """So do uploads at the limits, with types that nobody has to check again."""
        for upload in edge_uploads():
            (unpacked,) = gbs_bundles.unpack_bundle(gbs_bundles.pack_bundle([upload]))
            self.assertEqual(unpacked, upload)
            self.assertIs(type(unpacked.storage_index), bytes)
            self.assertLessEqual({type(number) for number in unpacked.share_numbers}, {int})
            self.assertLessEqual({type(data) for data in unpacked.shares.values()}, {bytes})

    def test_the_most_uploads(self) -> None:
        """As many as are allowed are taken, and one more is not."""
        most = gbs_bundles.MAX_UPLOADS
        for shares in ({}, {1: b"abcd"}):
            uploads = [make_upload({1}, shares, index=at) for at in range(most + 1)]
            full = gbs_bundles.pack_bundle(uploads[:most])
            self.assertEqual(gbs_bundles.unpack_bundle(full), uploads[:most])
            self.refuse(gbs_bundles.pack_bundle(uploads), "one upload too many")

    def test_the_most_numbers(self) -> None:
        """Of shares to be allocated, too, there are so many in a bundle, with data or without."""
        uploads = [make_upload(set(range(256)), {}, index=at) for at in range(2)]
        self.assertEqual(gbs_bundles.unpack_bundle(gbs_bundles.pack_bundle(uploads)), uploads)
        uploads.append(make_upload({0}, {}, index=2))
        self.refuse(gbs_bundles.pack_bundle(uploads), "one number too many")

    def test_the_most_shares(self) -> None:
        """It is the shares of all uploads together that are bounded."""
        half = gbs_bundles.MAX_SHARES // 2
        uploads = [
            make_upload(set(range(half)), dict.fromkeys(range(half), b"abcd"), index=at)
            for at in range(2)
        ]
        packed = gbs_bundles.pack_bundle(uploads)
        self.assertEqual(gbs_bundles.unpack_bundle(packed), uploads)
        one_more = make_upload({1}, {1: b"abcd"}, index=2)
        self.refuse(gbs_bundles.pack_bundle([*uploads, one_more]), "one share too many")

    def test_an_index_twice(self) -> None:
        """Each upload has a storage index of its own: the second could not see what became of the first."""
        uploads = [make_upload({at}, {at: b"abcd"}, index=1) for at in range(2)]
        self.refuse(gbs_bundles.pack_bundle(uploads), "one index twice")

    def test_the_longest_bundle(self) -> None:
        """As long as is allowed is taken, and a byte more is not, whatever it is."""
        body = padded(cbor2.dumps([GOOD]), gbs_bundles.MAX_BUNDLE_BYTES)
        self.assertEqual(len(gbs_bundles.unpack_bundle(body)), 1)
        self.refuse(body + b"\0", "a byte too many")

    def test_no_list_of_lists(self) -> None:
        """A bundle is a list of uploads, and each a list of seven fields."""
        self.assertEqual(len(gbs_bundles.unpack_bundle(cbor2.dumps([OTHER, GOOD]))), 2)
        for value in (None, 0, True, b"", "", {}, {0: GOOD}, {1}, cbor2.CBORTag(4711, [GOOD])):
            self.refuse(cbor2.dumps(value), value)
            self.refuse(cbor2.dumps([OTHER, value]), value)
        for fields in ([], GOOD[:6], [*GOOD, 0], [GOOD]):
            self.refuse(cbor2.dumps([OTHER, fields]), fields)

    def test_wrong_secrets_and_indexes(self) -> None:
        """Each is bytes, of its length."""
        for at, sizes in (
            (INDEX_AT, (0, 15, 17)),
            (RENEW_AT, (0, 31, 33)),
            (CANCEL_AT, (0, 31, 33)),
            (SECRET_AT, (0, 65)),
        ):
            for size in sizes:
                self.refuse(with_field(at, b"x" * size), (at, size))
            for value in (GOOD[at].decode(), None, 1, [1] * len(GOOD[at])):
                self.refuse(with_field(at, value), (at, value))

    def test_wrong_sizes(self) -> None:
        """The size of shares is a whole number, that of the shares that are there, and then not 0."""
        for value in (-1, 3, 5, 4.0, "4", b"4", None, [4]):
            self.refuse(with_field(SIZE_AT, value), value)
        for value in (-1, 1 << 64, True, 1.0):
            self.refuse(cbor2.dumps([[*GOOD[:SIZE_AT], value, [1], {}]]), value)
        self.refuse(cbor2.dumps([[*GOOD[:SIZE_AT], True, [1], {1: b"x"}]]), "True is no size")
        self.refuse(cbor2.dumps([[*GOOD[:SIZE_AT], 0, [1], {1: b""}]]), "an empty share")

    def test_wrong_numbers(self) -> None:
        """Share numbers are a list of at most 256 whole numbers."""
        for value in (None, 7, {7}, {7: 7}, b"\x07", list(range(257))):
            self.refuse(with_field(NUMBERS_AT, value), value)
        for number in (-1, 1 << 64, True, 1.0, "1", b"1", None, [1]):
            self.refuse(with_field(NUMBERS_AT, [7, number]), number)

    def test_wrong_shares(self) -> None:
        """Shares are a map from some of the share numbers to bytes of the right length."""
        for value in (None, 7, [7], [b"abcd"], {7}, b"abcd"):
            self.refuse(with_field(SHARES_AT, value), value)
        for number in (0, 8, -1, "7", b"7", None, (7,)):
            self.refuse(with_field(SHARES_AT, {7: b"abcd", number: b"abcd"}), number)
        for data in (b"", b"abc", b"abcde", "abcd", None, 4, [1, 2, 3, 4]):
            self.refuse(with_field(SHARES_AT, {1: b"abcd", 7: data}), data)

    def test_a_share_twice(self) -> None:
        """Of two shares with one number neither is taken."""
        body = gbs_bundles.pack_bundle([make_upload({7}, {7: b"abcd"})])
        entry = b"\x07\x44abcd"
        self.assertTrue(body.endswith(b"\xa1" + entry))
        self.refuse(body[: -len(entry) - 1] + b"\xa2" + entry + entry, "a share twice")

    def test_true_is_no_number_of_a_share(self) -> None:
        """Nor is whatever else Python finds among the numbers because it equals 1."""
        for number in (True, 1.0, cbor2.CBORSimpleValue(1)):
            self.refuse(with_field(SHARES_AT, {number: b"abcd"}), number)

    def test_truncated_anywhere(self) -> None:
        """A bundle that ends early is none, wherever it ends."""
        body = gbs_bundles.pack_bundle(
            [make_upload({1, 300}, {1: b"abcd", 300: b"efgh"}), make_upload(set(), {}, index=1)]
        )
        self.assertEqual(len(gbs_bundles.unpack_bundle(body)), 2)
        for length in range(len(body)):
            self.refuse(body[:length], length)

    def test_bombs(self) -> None:
        """What is nested deeply, or declares absurd lengths, is refused alone and in any field."""
        for name, bomb in BOMBS.items():
            self.refuse(bomb, name)
            for at, field in enumerate(GOOD):
                fields = [cbor2.dumps(each) for each in GOOD]
                self.assertEqual(fields[at], cbor2.dumps(field))
                fields[at] = bomb
                # "Nothing", in the place of a field, is a field too few.
                self.refuse(b"\x81\x87" + b"".join(fields), (name, at))

    def test_broken_bundles(self) -> None:
        """However a good bundle is broken, it is refused, or is one that could have been sent."""
        for seed in range(400):
            random = Random(seed)
            good = [make_upload({1, 7}, {7: b"abcd"}, index=index) for index in range(2)]
            body = bytearray(gbs_bundles.pack_bundle(good))
            for _ in range(random.randint(1, 3)):
                body[random.randrange(len(body))] = random.randrange(256)
            with contextlib.suppress(ValueError):
                uploads = gbs_bundles.unpack_bundle(bytes(body))
                again = gbs_bundles.unpack_bundle(gbs_bundles.pack_bundle(uploads))
                self.assertEqual(again, uploads, seed)


class LengthTests(SynchronousTestCase):
    """How long an upload is said to be."""

    def check(self, upload: BundledUpload) -> None:
        """Compare what is said with what is."""
        alone = len(gbs_bundles.pack_bundle([upload])) - 1
        self.assertGreaterEqual(gbs_bundles.upload_bytes(upload), alone, upload)

    def test_never_less_than_it_is(self) -> None:
        """Who adds up the lengths of uploads gets no bundle that is longer."""
        for upload in edge_uploads():
            self.check(upload)
        for seed in range(400):
            self.check(random_upload(Random(seed), 20))

    def test_all_fields_at_their_longest(self) -> None:
        """Not even with the longest secret, and numbers of nine bytes everywhere."""
        numbers = set(range(LARGEST - 255, LARGEST + 1))
        for size in (1, 255, 256, 65536):
            for count in (1, 3, 256):
                shares = {LARGEST - at: bytes(size) for at in range(count)}
                self.check(make_upload(numbers, shares, size, b"u" * 64))
        self.check(make_upload(numbers, {}, LARGEST, b"u" * 64))


class AnswerTests(SynchronousTestCase):
    """What servers answer."""

    def setUp(self) -> None:
        self.uploads = [make_upload({1, 7}, {7: b"abcd"})]

    def refuse_body(self, body: bytes, uploads: Sequence[BundledUpload]) -> None:
        """Expect that what a server says of these uploads is refused."""
        try:
            answers = gbs_bundles.unpack_answers(body, uploads)
        except ValueError:
            return
        self.fail(f"{body!r:.200} was read as {answers!r:.200}")

    def refuse(self, value: Any) -> None:
        """Expect that an answer is refused, and that a good one before it does not help."""
        for uploads, values in (
            (self.uploads, [value]),
            (self.uploads * 2, [GOOD_ANSWER, value]),
        ):
            self.refuse_body(cbor2.dumps(values), uploads)

    def test_random_answers_are_read_back(self) -> None:
        """Every answer comes back from its bytes, in its order."""
        for seed in range(150):
            random = Random(seed)
            uploads = random_uploads(random)
            answers = [random_answer(random, upload) for upload in uploads]
            body = gbs_bundles.pack_answers(answers)
            self.assertEqual(gbs_bundles.unpack_answers(body, uploads), answers, seed)

    def test_edges_are_read_back(self) -> None:
        """So do answers with all numbers, or none, and with the first and last status."""
        everything = frozenset(range(256))
        uploads = [make_upload(set(range(256)), dict.fromkeys(range(256), b"abcd"))]
        for status in (200, 599):
            statuses = dict.fromkeys(range(256), status)
            for allocation in (
                Allocation(everything, everything),
                Allocation(frozenset(), everything),
            ):
                answers = [BundledAnswer(allocation, statuses)]
                body = gbs_bundles.pack_answers(answers)
                self.assertEqual(gbs_bundles.unpack_answers(body, uploads), answers)
            refused = [BundledAnswer(status, {})]
            body = gbs_bundles.pack_answers(refused)
            self.assertEqual(gbs_bundles.unpack_answers(body, uploads), refused)

    def test_the_usual_answer(self) -> None:
        """That all is stored, and nothing was there, is read as any other answer is."""
        for number in (0, 23, 24, 255, 256, LARGEST):
            uploads = [make_upload({each}, {each: b"abcd"}) for each in (number, 7, number)]
            answers = [
                BundledAnswer(Allocation(frozenset(), frozenset(each.shares)), {n: 201})
                for each in uploads
                for n in each.shares
            ]
            body = gbs_bundles.pack_answers(answers)
            self.assertEqual(gbs_bundles.unpack_answers(body, uploads), answers)
            self.assertEqual(gbs_bundles.unpack_answers(body + b"!", uploads), answers)
            two = [make_upload({7, 8}, {7: b"abcd", 8: b"efgh"}), make_upload({number}, {})]
            self.refuse_body(body, [uploads[0], *two])

    def test_the_longest_answer_is_taken(self) -> None:
        """Whatever fits into one bundle, its answer is one that is read."""
        numbers = range(LARGEST - 255, LARGEST + 1)
        for count, shares in (
            (gbs_bundles.MAX_UPLOADS, {}),
            (gbs_bundles.MAX_UPLOADS, {LARGEST: b"a"}),
            (49, dict.fromkeys(numbers, b"a")),
        ):
            uploads = [make_upload(set(shares), shares, 1, index=at) for at in range(count)]
            bundle = gbs_bundles.pack_bundle(uploads)
            self.assertLessEqual(len(bundle), gbs_bundles.MAX_BUNDLE_BYTES)
            allocation = Allocation(frozenset(range(256)), frozenset())
            statuses = dict.fromkeys(shares, 404)
            answers = [BundledAnswer(allocation, statuses)] * count
            body = gbs_bundles.pack_answers(answers)
            self.assertEqual(gbs_bundles.unpack_answers(body, uploads), answers)

    def test_another_number_of_answers(self) -> None:
        """There is one answer for each upload."""
        two = cbor2.dumps([GOOD_ANSWER, 500])
        self.assertEqual(len(gbs_bundles.unpack_answers(two, self.uploads * 2)), 2)
        for count in (0, 1, 3):
            self.refuse_body(two, self.uploads * count)

    def test_no_list_of_answers(self) -> None:
        """All of them are a list, and each a status, or a list of three fields."""
        for value in (None, b"", "", {}, {0: GOOD_ANSWER}, {1}, 1.0, cbor2.CBORTag(4711, [])):
            self.refuse(value)
            self.refuse_body(cbor2.dumps(value), self.uploads)
            self.refuse_body(cbor2.dumps(value), [])
        for fields in ([], GOOD_ANSWER[:2], [*GOOD_ANSWER, 0], [GOOD_ANSWER]):
            self.refuse(fields)

    def test_no_status(self) -> None:
        """A status is 200 to 599, for an allocation as for a write."""
        for status in (-1, 0, 1, 199, 600, 1 << 64, True, False, 201.0, "201", None):
            self.refuse(status)
            self.refuse([[1], [7], {7: status}])

    def test_statuses_for_other_shares(self) -> None:
        """There is a status for each share that was sent, and for no other."""
        for statuses in ({}, {1: 201}, {7: 201, 1: 201}, {"7": 201}, {7: 201, None: 201}):
            self.refuse([[1], [7], statuses])
        for value in (None, [201], [[7, 201]], 201, {7}):
            self.refuse([[1], [7], value])

    def test_true_is_no_number_of_a_share(self) -> None:
        """Nor is whatever else would be taken for share 1 because it equals 1."""
        self.uploads = [make_upload({1}, {1: b"abcd"})]
        for number in (True, 1.0, cbor2.CBORSimpleValue(1)):
            self.refuse_body(cbor2.dumps([[[], [1], {number: 201}]]), self.uploads)

    def test_wrong_numbers(self) -> None:
        """Those that are there, and those that were allocated, are lists of at most 256 numbers."""
        wrongs: tuple[Any, ...] = (None, 7, {7}, {7: 7}, b"\x07", list(range(257)))
        items: tuple[Any, ...] = (-1, 1 << 64, True, 1.0, "1", b"1", None, [1])
        for value in (*wrongs, *([7, item] for item in items)):
            self.refuse([value, [7], {7: 201}])
            self.refuse([[1], value, {7: 201}])

    def test_too_long(self) -> None:
        """An answer as long as any may be is taken, and a byte more is not."""
        body = padded(cbor2.dumps([GOOD_ANSWER]), gbs_cbor_bodies.MAX_ANSWER_BYTES)
        self.assertEqual(len(gbs_bundles.unpack_answers(body, self.uploads)), 1)
        self.refuse_body(body + b"\0", self.uploads)

    def test_truncated_anywhere(self) -> None:
        """An answer that ends early is none, wherever it ends."""
        uploads = [make_upload({1, 300}, {1: b"abcd", 300: b"efgh"}), *self.uploads]
        answers = [
            BundledAnswer(Allocation(frozenset({1}), frozenset({300})), {1: 201, 300: 404}),
            BundledAnswer(503, {}),
        ]
        body = gbs_bundles.pack_answers(answers)
        self.assertEqual(gbs_bundles.unpack_answers(body, uploads), answers)
        for length in range(len(body)):
            self.refuse_body(body[:length], uploads)

    def test_bombs(self) -> None:
        """What is nested deeply, or declares absurd lengths, is refused alone and in any field."""
        for bomb in BOMBS.values():
            bodies = [bomb, b"\x81" + bomb]
            for at in range(3):
                fields = [cbor2.dumps(each) for each in GOOD_ANSWER]
                fields[at] = bomb
                bodies.append(b"\x81\x83" + b"".join(fields))
            for body in bodies:
                self.refuse_body(body, self.uploads)

    def test_broken_answers(self) -> None:
        """However a good answer is broken, it is refused, or speaks of the shares that were sent."""
        good = BundledAnswer(Allocation(frozenset({1}), frozenset({7})), {7: 201})
        for seed in range(400):
            random = Random(seed)
            body = bytearray(gbs_bundles.pack_answers([good, good]))
            body[random.randrange(len(body))] = random.randrange(256)
            with contextlib.suppress(ValueError):
                for each in gbs_bundles.unpack_answers(bytes(body), self.uploads * 2):
                    statuses = [each.allocation] if type(each.allocation) is int else []
                    self.assertLessEqual(set(statuses), set(range(200, 600)))
                    self.assertEqual(set(each.statuses), set() if statuses else {7})


class ValueTests(SynchronousTestCase):
    """The values themselves."""

    def test_secrets_are_not_shown(self) -> None:
        """What is logged of an upload shows none of its secrets."""
        upload = attrs.evolve(make_upload({1}, {}), storage_index=bytes(16))
        for secret in (RENEW, CANCEL, SECRET):
            self.assertNotIn(secret.decode(), repr(upload))
