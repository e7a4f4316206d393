"""Shares: the recorded ones byte for byte both ways, any file from any k of them, in any split."""

from __future__ import annotations

import base64
import hashlib
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import parse_cap
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.encoder import encode
from pipegrid.core.mutable.keys import load_signing_key
from pipegrid.core.mutable.mutable_share import MutableShare, Part, VerifiedVersions
from pipegrid.core.mutable.versions import Format, MutableGeometry
from pipegrid.errors import CorruptionError, UsageError
from tests import vectors
from tests.core.mutable.support import (
    book,
    key,
    make,
    reader_of,
    recorded_shares,
    shares_of,
)

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
CASES = vectors.load("mutable")["cases"]
TREES = vectors.load("trees")["mutable_directories"]

formats = st.sampled_from(Format)


@st.composite
def files(draw: st.DrawFn) -> tuple[Format, int, int, int | None, bytes]:
    """Return format, k, n, segment size and contents of some small file."""
    format = draw(formats)
    n = draw(st.integers(1, 6))
    k = draw(st.integers(1, n))
    segment = None if format is Format.SDMF else k * draw(st.integers(1, 12))
    size = draw(st.integers(0, 5 * (segment or 40)))
    return format, k, n, segment, hashlib.shake_128(bytes([k, n])).digest(size)


class RecordedShareTests(SynchronousTestCase):
    """The shares that Tahoe-LAFS wrote."""

    def test_made_again(self) -> None:
        """From plaintext, salts and the recorded signature every share is the recorded one."""
        checked = 0
        for case in CASES:
            signing = load_signing_key(bytes.fromhex(case["private_key_pkcs8_der"]))
            content = vectors.plaintext(case["plaintext"])
            format = Format[case["format"].upper()]
            encoded = encode(
                content,
                MutableGeometry(format, len(content), case["k"], case["n"]),
                1,
                signing,
                [bytes.fromhex(salt) for salt in case["segment_salts"]],
            )
            self.assertEqual(len(encoded.writes), case["n"])
            recorded = recorded_shares(case)
            known = recorded.get(0, b"") or self._head(case)
            start, end = MutableShare.of(0, encoded.share(0)).range_of(Part.SIGNATURE)
            signature = known[start:end]
            self.assertTrue(
                signing.verifying().is_signature(signature, encoded.version.signed_prefix)
            )
            for number in range(case["n"]):
                made = encoded.share(number)
                made = made[:start] + signature + made[end:]
                digest = hashlib.sha256(made).hexdigest()
                self.assertEqual(digest, case["share_sha256"][str(number)], (case["name"], number))
                checked += 1
                if number in recorded:
                    self.assertEqual(made, recorded[number])
        self.assertGreater(checked, 60)

    def _head(self, case: dict[str, object]) -> bytes:
        head = case["share_head_base64"]
        text = head["0"] if isinstance(head, dict) else head
        return base64.b64decode(str(text))

    def test_read(self) -> None:
        """Recorded shares prove themselves to every kind of cap, and restore the plaintext."""
        for case in CASES:
            shares = recorded_shares(case)
            if not shares:
                continue
            k = case["k"]
            for numbers in (sorted(shares)[:k], sorted(shares)[-k:]):
                for name in ("cap", "readcap", "verifycap"):
                    cap = parse_cap(case[name])
                    checked = VerifiedVersions(cap)  # type: ignore[arg-type]
                    reader = reader_of(shares, numbers, checked, bytes.fromhex(case["readkey"]))
                    self.assertEqual(reader.whole(), vectors.plaintext(case["plaintext"]))
                    self.assertEqual(reader.corrupt, [])
                share = MutableShare.of(numbers[0], shares[numbers[0]])
                opened = VerifiedVersions(parse_cap(case["cap"])).open_signing_key(share)  # type: ignore[arg-type]
                assert opened is not None
                self.assertEqual(opened.der.hex(), case["private_key_pkcs8_der"])

    def test_read_directories(self) -> None:
        """The shares of recorded directories, of several versions, give the recorded bytes."""
        for case in TREES:
            signing = load_signing_key(bytes.fromhex(case["private_key_pkcs8_der"]))
            format = Format[case["format"]]
            checked = VerifiedVersions(signing.cap(format))
            for recorded in case["versions"]:
                shares = {int(n): bytes.fromhex(s) for n, s in recorded["shares"].items()}
                for numbers in (sorted(shares)[: case["k"]], sorted(shares)[-case["k"] :]):
                    reader = reader_of(shares, numbers, checked, signing.readkey)
                    self.assertEqual(reader.whole(), bytes.fromhex(recorded["packed_hex"]))
                self.assertEqual(reader.version.sequence_number, recorded["sequence_number"])
                self.assertEqual(reader.version.root_hash.hex(), recorded["root_hash"])
                self._made_again(recorded, shares, format, case)

    def _made_again(
        self,
        recorded: dict[str, str],
        shares: dict[int, bytes],
        format: Format,
        case: dict[str, int],
    ) -> None:
        signing = load_signing_key(bytes.fromhex(str(case["private_key_pkcs8_der"])))
        content = bytes.fromhex(recorded["packed_hex"])
        encoded = encode(
            content,
            MutableGeometry(format, len(content), case["k"], case["n"]),
            int(recorded["sequence_number"]),
            signing,
            [bytes.fromhex(recorded["salt"])],
        )
        for number, share in shares.items():
            made = encoded.share(number)
            start, end = MutableShare.of(number, made).range_of(Part.SIGNATURE)
            made = made[:start] + share[start:end] + made[end:]
            self.assertEqual(made, share[: len(made)])  # old bytes may follow


class ShareTests(SynchronousTestCase):
    """Shares that are made here."""

    @EXAMPLES
    @given(files(), st.randoms(use_true_random=False))
    def test_any_k_restore(
        self, file: tuple[Format, int, int, int | None, bytes], rng: random.Random
    ) -> None:
        """Any k shares restore the file, the rest of them missing."""
        format, k, n, segment, content = file
        encoded = make(content, format, k, n, segment)
        shares = shares_of(encoded)
        reader = reader_of(shares, rng.sample(range(n), k), book(format=format), key().readkey)
        self.assertEqual(reader.whole(), content)
        self.assertEqual(reader.version, encoded.version)

    @EXAMPLES
    @given(files(), st.randoms(use_true_random=False))
    def test_any_split(
        self, file: tuple[Format, int, int, int | None, bytes], rng: random.Random
    ) -> None:
        """Whatever pieces answers come in, and in what order, nothing else is asked and nothing twice."""
        format, k, n, segment, content = file
        encoded = make(content, format, k, n, segment)
        checked = book(format=format)
        reader: VersionReader | None = None
        parts = {number: encoded.share(number) for number in rng.sample(range(n), k)}
        opened = {number: MutableShare(number) for number in parts}
        for number, share in opened.items():
            while gaps := checked.missing(share):
                self._answer(share, parts[number], gaps, rng)
            version = checked.check(share)
            assert version is not None
            reader = reader or VersionReader(version, key().readkey)
            reader.add_share(share)
        assert reader is not None
        restored = b""
        for index in range(encoded.version.geometry.num_segments):
            for number, share in opened.items():
                while gaps := reader.missing(number, index, index + 1):
                    self._answer(share, parts[number], gaps, rng)
            job = reader.job(index)
            assert job is not None
            pieces = reader.finish(job.run())
            assert pieces is not None
            restored += b"".join(pieces)
        self.assertEqual(restored, content)
        self.assertEqual(reader.corrupt, [])

    def _answer(
        self, share: MutableShare, data: bytes, gaps: list[tuple[int, int]], rng: random.Random
    ) -> None:
        pieces = []
        for start, end in gaps:
            self.assertLessEqual(end, max(len(data), 123), "bytes are asked that are not there")
            while start < end:
                step = rng.randint(1, end - start)
                pieces.append((start, data[start : start + step]))
                start += step
        rng.shuffle(pieces)
        for offset, piece in pieces:
            share.put(offset, piece)

    def test_ranges_of_segments(self) -> None:
        """Parts of a segment are decrypted where they are."""
        content = random.Random(3).randbytes(1000)
        encoded = make(content, Format.MDMF, 3, 5, 300)
        reader = reader_of(shares_of(encoded), [1, 3, 4], book(format=Format.MDMF), key().readkey)
        for segment, start, end in ((0, 0, 1), (1, 17, 250), (2, 299, 300), (3, 5, 1 << 40)):
            job = reader.job(segment, start, end)
            assert job is not None
            made = b"".join(job.run().plaintext)
            first = segment * 300
            self.assertEqual(made, content[first + start : min(first + end, first + 300)])

    def test_ciphertext_without_read_key(self) -> None:
        """Without the read key the ciphertext comes, and the plaintext does not."""
        content = bytes(500)
        encoded = make(content, Format.SDMF, 2, 3)
        reader = reader_of(shares_of(encoded), [0, 2], book(), None)
        made = reader.whole()
        assert made is not None
        self.assertEqual(len(made), 500)
        self.assertNotEqual(made, content)

    def test_a_large_tree(self) -> None:
        """Of a tree that is not read whole, the nodes for the next segments are asked for, in their time."""
        segments = 3000
        content = random.Random(1).randbytes(segments)
        encoded = make(content, Format.MDMF, 1, 1, 1)
        data = encoded.share(0)
        share = MutableShare(0)
        share.answered(0, 4000, data[:4000])
        checked = book(format=Format.MDMF)
        version = checked.check(share)
        assert version is not None
        reader = VersionReader(version, key().readkey)
        reader.add_share(share)
        asked = []
        for index in range(segments):
            gaps = reader.missing(0, index, index + 1)
            asked.append(sum(b - a for a, b in gaps))
            for a, b in gaps:
                share.answered(a, b - a, data[a:b])
            job = reader.job(index)
            assert job is not None
            self.assertEqual(b"".join(reader.finish(job.run()) or ()), content[index : index + 1])
        self.assertLess(max(asked), 80_000)
        self.assertGreater(sum(count > 10_000 for count in asked), 1)
        self.assertLess(share.store.held_bytes, 6000)

    def test_one_read_is_enough_for_a_small_share(self) -> None:
        """With a first read of 4000 bytes nothing of a small file's share is lacking."""
        for format in Format:
            share = MutableShare(0)
            data = make(b"x" * 1000, format, 3, 10).share(0)
            share.answered(0, 4000, data[:4000])
            self.assertEqual(share.missing(*Part), [])
            self.assertEqual(share.store.end, len(data))

    def test_stale_bytes_behind_the_end(self) -> None:
        """What a longer version left behind a share's end changes nothing."""
        encoded = make(b"short", Format.SDMF, 1, 2)
        shares = {number: share + b"old" * 500 for number, share in shares_of(encoded).items()}
        reader = reader_of(shares, [1], book(), key().readkey)
        self.assertEqual(reader.whole(), b"short")

    def test_writes_are_whole_and_not_copied(self) -> None:
        """Writes are disjoint and in order; primary blocks of a full segment are views of one buffer."""
        encoded = make(bytes(range(200)), Format.MDMF, 2, 3, 100)
        for number, writes in encoded.writes.items():
            self.assertEqual(writes[0].offset, 0)
            for before, after in itertools.pairwise(writes):
                self.assertLess(before.offset + before.length, after.offset)
            self.assertEqual(writes[-1].offset + writes[-1].length, encoded.share_bytes)
            self.assertEqual({write.share_number for write in writes}, {number})
        self.assertTrue(
            any(isinstance(piece, memoryview) for piece in encoded.writes[0][-1].pieces)
        )

    def test_only_some_shares(self) -> None:
        """A repairer makes only the shares that are missing; they are those of the same version."""
        content = b"some content, long enough"
        geometry = MutableGeometry(Format.SDMF, len(content), 2, 4)
        some = encode(content, geometry, 1, key(), [bytes(16)], {1, 3})
        everything = encode(content, geometry, 1, key(), [bytes(16)])
        self.assertEqual(some.writes.keys(), {1, 3})
        self.assertEqual(some.version, everything.version)

    def test_counts_that_cannot_be(self) -> None:
        """More than 255 shares, or other absurd counts, are refused with a sentence."""
        for k, n in ((0, 1), (3, 2), (1, 256), (256, 256)):
            self.assertRaises(UsageError, MutableGeometry, Format.SDMF, 10, k, n)
        for size in (-1, 1 << 61):
            self.assertRaises(UsageError, MutableGeometry, Format.MDMF, size, 1, 1)
        encoded = make(b"x", Format.SDMF, 255, 255)
        self.assertEqual(
            reader_of(shares_of(encoded), range(255), book(), key().readkey).whole(), b"x"
        )

    def test_a_share_that_ends_early(self) -> None:
        """A share cut off anywhere is damaged, named with the part that is cut."""
        data = make(b"x" * 100, Format.SDMF, 2, 3).share(1)
        for length in range(0, len(data), 7):
            share = MutableShare(1)
            try:
                share.answered(0, len(data), data[:length])
                checked = book()
                version = checked.check(share)
                assert version is not None
            except CorruptionError as error:
                self.assertIn("ends at byte", str(error))
                self.assertEqual(error.share_number, 1)
                self.assertLess(length, 107 + 294 + 256)
                continue
            reader = VersionReader(version, key().readkey)
            reader.add_share(share)
            self.assertEqual(reader.missing(1, 0, 1), [])
            cut_off = length < share.header.sections.data[1]  # type: ignore[union-attr]
            self.assertEqual(len(reader.corrupt), cut_off, length)
