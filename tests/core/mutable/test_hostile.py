"""What a lying server can do to a share: it is found and named, or it is harmless."""

from __future__ import annotations

import random
import struct
import tracemalloc

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import hash_tree
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.encoder import EncodedVersion, assemble, code_segment
from pipegrid.core.mutable.keys import data_key
from pipegrid.core.mutable.mutable_share import (
    MAX_HEADER_BYTES,
    MutableShare,
    Part,
    VerifiedVersions,
    parse_header,
)
from pipegrid.core.mutable.versions import SIGNED_BYTES, Format, MutableGeometry
from pipegrid.errors import CorruptionError
from tests.core.mutable.support import book, key, make, reader_of, shares_of

CONTENT = bytes(range(97))


def is_good(reader: VersionReader, share_number: int, segment: int) -> bool:
    """Check one block as whoever verifies all shares does."""
    block = reader.block(share_number, segment)
    if block is not None and not block.is_good():
        reader.condemn_block(share_number, segment)
    return block is not None and block.is_good()


def attempt(
    shares: dict[int, bytes], checked: VerifiedVersions, honest: EncodedVersion
) -> bytes | None:
    """
    Read as a reader would that was given these shares, and put what was found into ``found``.

    Returns the plaintext, or None if there were too few good shares.
    """
    reader = VersionReader(honest.version, key().readkey)
    for number, data in shares.items():
        share = MutableShare.of(number, data)
        if checked.check(share) == honest.version:
            reader.add_share(share)
            reader.missing(number, 0, honest.version.geometry.num_segments)
    made = reader.whole()
    if reader.corrupt:
        raise reader.corrupt[0]
    return made


class HostileShareTests(SynchronousTestCase):
    """Shares from servers that lie."""

    def _flips(self, format: Format) -> dict[str, int]:
        """Flip each byte of a share, and tell what became of each part of it."""
        honest = make(CONTENT, format, 2, 3, None if format is Format.SDMF else 40)
        shares = shares_of(honest)
        good = MutableShare.of(1, shares[1])
        assert good.header is not None
        sections = good.header.sections
        harmless: dict[str, int] = {}
        key_at = range(*sections.private_key)
        for at in range(len(shares[1])):
            if at in key_at and at % 100:
                continue  # all alike, and each takes a hash of all
            damaged = bytearray(shares[1])
            damaged[at] ^= 1 << (at % 8)
            try:
                # Its version and key are unknown, as to the first reader of it; the other share is good.
                made = attempt({1: bytes(damaged), 2: shares[2]}, book(format=format), honest)
            except CorruptionError as error:
                self.assertEqual(error.share_number, 1, at)
                self.assertIsNotNone(str(error))
                continue
            self.assertEqual(made, CONTENT, at)
            name = next(
                (
                    name
                    for name in ("public_key", "signature", "chain", "tree", "data", "private_key")
                    if at in range(*getattr(sections, name))
                ),
                "header" if at < MAX_HEADER_BYTES else "gap",
            )
            harmless[name] = harmless.get(name, 0) + 1
            if name != "gap":
                share = MutableShare.of(1, bytes(damaged))
                with self.assertRaises(CorruptionError, msg=str(at)):
                    book(format=format).open_signing_key(share)
                    self.assertNotEqual(share.missing(Part.PRIVATE_KEY), [])
        return harmless

    def test_each_byte_of_an_sdmf_share(self) -> None:
        """A flip passes only in the encrypted private key and its place, where writers find it."""
        harmless = self._flips(Format.SDMF)
        self.assertEqual(harmless.keys(), {"header", "private_key"})

    def test_each_byte_of_an_mdmf_share(self) -> None:
        """The same for MDMF, but for the gap that holds nothing."""
        harmless = self._flips(Format.MDMF)
        self.assertEqual(harmless.keys(), {"header", "gap", "private_key"})

    def test_writers_find_a_damaged_private_key(self) -> None:
        """A flip in the private key is named when it is opened."""
        share = make(CONTENT).share(2)
        start, end = MutableShare.of(2, share).range_of(Part.PRIVATE_KEY)
        for at in range(start, end, 100):
            damaged = bytearray(share)
            damaged[at] ^= 16
            error = self.assertRaises(
                CorruptionError, book().open_signing_key, MutableShare.of(2, bytes(damaged))
            )
            self.assertEqual(error.share_number, 2)

    def test_a_version_of_another_file(self) -> None:
        """A share of another file, signed by its own key, is found by the public key."""
        foreign = make(CONTENT, with_key=1).share(0)
        for checked in (book(), VerifiedVersions(key().cap(Format.SDMF), key())):
            error = self.assertRaises(CorruptionError, checked.check, MutableShare.of(0, foreign))
            self.assertEqual(error.share_number, 0)

    def test_an_older_version_is_told_apart(self) -> None:
        """A signed older version is a version of its own; its blocks cannot stand for the newer one's."""
        old, new = make(CONTENT, sequence_number=1), make(CONTENT[::-1], sequence_number=2)
        checked = book()
        seen = checked.check(MutableShare.of(1, old.share(1)))
        self.assertEqual(seen, old.version)
        start = MutableShare.of(1, new.share(1)).range_of(Part.TREE_ROOT)[0]
        mixed = bytearray(new.share(1))
        mixed[start:] = old.share(1)[start:]
        self.assertRaises(
            CorruptionError, attempt, {1: bytes(mixed), 2: new.share(2)}, checked, new
        )

    def test_a_share_under_another_number(self) -> None:
        """Share 0 handed out as share 1 does not prove itself."""
        honest = make(CONTENT, Format.SDMF, 2, 3)
        shares = {1: honest.share(0), 2: honest.share(2)}
        error = self.assertRaises(CorruptionError, attempt, shares, book(), honest)
        self.assertEqual(error.share_number, 1)

    def test_a_share_number_that_cannot_be(self) -> None:
        """A server that calls its share number 200 of 3 is found out, also when the version is known."""
        honest = make(CONTENT, Format.SDMF, 2, 3)
        checked = book()
        for _ in range(2):
            lying = MutableShare.of(200, honest.share(0))
            error = self.assertRaises(CorruptionError, checked.check, lying)
            self.assertEqual(error.share_number, 200)
            checked.trust(honest.version)

    def test_other_counts(self) -> None:
        """k and n that differ make another version, which nobody signed; so do sizes."""
        share = make(CONTENT, Format.MDMF, 2, 3, 40).share(1)
        for at, values in ((41, (1, 3)), (42, (4, 255)), (50, (42,)), (58, (96, 98))):
            for value in values:
                damaged = bytearray(share)
                damaged[at] = value
                with self.assertRaises(CorruptionError, msg=str((at, value))) as caught:
                    book().check(MutableShare.of(1, bytes(damaged)))
                self.assertEqual(caught.exception.share_number, 1)

    def test_offsets(self) -> None:
        """Offsets that overlap, run backwards, or point to 2^63 are refused before anything is read there."""
        for format, width_of in ((Format.SDMF, ">LLLLQQ"), (Format.MDMF, ">QQQQQQQQ")):
            share = make(CONTENT, format).share(0)
            at = SIGNED_BYTES[format]
            offsets = struct.unpack_from(width_of, share, at)
            tried = 0
            rng = random.Random(7)
            for index, offset in enumerate(offsets):
                most = (1 << 32) - 1 if width_of[1 + index] == "L" else (1 << 64) - 1
                values = {0, 1, offset - 1, offset + 1, offset + 32, most, most // 2 + 1, most // 2}
                values |= set(offsets) | {rng.randrange(most) for _ in range(5)}
                for value in values - {offset}:
                    changed = list(offsets)
                    changed[index] = value
                    header = share[:at] + struct.pack(width_of, *changed)
                    if (format, index) == (Format.MDMF, 5) and value == offsets[6]:
                        continue
                    try:
                        parsed = parse_header(header)
                    except ValueError:
                        tried += 1
                        continue
                    # Only where a private key may be a little shorter; what is proven is the same.
                    assert parsed is not None
                    sections = parsed.sections
                    length = sections.private_key[1] - sections.private_key[0]
                    self.assertNotEqual(length, len(key().encrypted))
                    self.assertLess(abs(length - len(key().encrypted)), 256)
            self.assertGreater(tried, 80)

    def test_lies_cost_no_memory(self) -> None:
        """Signed sizes beyond all bounds take no memory before their bytes have come."""
        prefix = b"\1" + bytes(8) + bytes(32) + b"\1\1" + (1 << 12).to_bytes(8, "big")
        geometry = MutableGeometry(Format.MDMF, 1 << 50, 1, 1, 1 << 12)
        public, private = len(key().public_der), len(key().encrypted)
        at = MAX_HEADER_BYTES
        offsets = [at, at + private, at + private, at + private + 256]
        data = at + private + 256 + public
        offsets += [data, data, data + geometry.data_bytes]
        offsets.append(offsets[-1] + geometry.tree_bytes)
        header = prefix + (1 << 50).to_bytes(8, "big") + struct.pack(">8Q", *offsets)
        tracemalloc.start()
        try:
            share = MutableShare(0)
            share.answered(0, len(header), header)
            assert share.header is not None
            reader = VersionReader(share.header.version, bytes(16))
            reader.add_share(share)
            gaps = reader.missing(0, 0, 8)
            self.assertLess(sum(b - a for a, b in gaps), 200_000)
            share.put(share.range_of(Part.TREE_ROOT)[0], share.header.version.root_hash)
            gaps = reader.missing(0, 0, 8)
            self.assertLess(sum(b - a for a, b in gaps), 200_000)
            self.assertIsNone(reader.job(0))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.assertLess(peak, 500_000)

    def test_formats_to_come(self) -> None:
        """A share of a format that is not known is named as such, not taken apart."""
        data = b"\2" + make(CONTENT).share(0)[1:]
        error = self.assertRaises(CorruptionError, MutableShare.of, 0, data)
        self.assertIn("format", str(error))

    def test_salts_that_differ(self) -> None:
        """An author who signs shares with different salts makes an inconsistent file, not two readings."""
        geometry = MutableGeometry(Format.MDMF, len(CONTENT), 2, 2)
        one = code_segment(geometry, 0, CONTENT, bytes(16), key().readkey)
        other = code_segment(geometry, 0, CONTENT, b"s" * 16, key().readkey)
        self.assertNotEqual(data_key(bytes(16), bytes(16)), data_key(b"s" * 16, bytes(16)))
        mixed = type(one)(
            0,
            (one.block_hashes[0], other.block_hashes[1]),
            {0: one.blocks[0], 1: other.blocks[1]},
        )
        lying = assemble([mixed], geometry, 1, key(), b"")
        reader = reader_of(shares_of(lying), [0, 1], book(format=Format.MDMF), key().readkey)
        error = self.assertRaises(CorruptionError, reader.whole)
        self.assertIsNone(error.share_number)
        self.assertIn("salts", str(error))

    def test_bad_shares_are_replaced(self) -> None:
        """Bad shares are named one by one, and another server's copies take their place."""
        honest = make(CONTENT, Format.SDMF, 3, 5)
        shares = shares_of(honest)
        damaged = {}
        for number in (0, 3):
            share = bytearray(shares[number])
            share[MutableShare.of(number, shares[number]).header.sections.data[0]] ^= 1  # type: ignore[union-attr]
            damaged[number] = bytes(share)
        checked = book()
        reader = reader_of({**shares, **damaged}, [0, 3, 4], checked, key().readkey)
        self.assertIsNone(reader.whole())
        self.assertEqual({error.share_number for error in reader.corrupt}, {0, 3})
        self.assertEqual((reader.lacking, reader.shares_in_use), (2, [4]))
        self.assertEqual(reader.missing(0, 0, 1), [])
        for number in (0, 1):
            good = MutableShare.of(number, shares[number])
            self.assertEqual(checked.check(good), honest.version)
            reader.add_share(good)
        self.assertEqual(reader.whole(), CONTENT)
        self.assertEqual(len(reader.corrupt), 2)

    def test_verifying(self) -> None:
        """Each block of each share can be checked by itself; a bad one is named by its place."""
        honest = make(CONTENT, Format.MDMF, 2, 3, 10)
        shares = shares_of(honest)
        header = MutableShare.of(2, shares[2]).header
        assert header is not None
        bad = bytearray(shares[2])
        at = header.sections.data[0] + header.version.geometry.stored_range(4, 5)[0]
        bad[at] ^= 1
        checked = book(format=Format.MDMF)
        reader = reader_of({**shares, 2: bytes(bad)}, [0, 1, 2], checked, None)
        found = [
            (number, segment)
            for number in range(3)
            for segment in range(10)
            if not is_good(reader, number, segment)
        ]
        self.assertEqual(found, [(2, segment) for segment in range(4, 10)])
        self.assertEqual([(e.share_number, e.offset) for e in reader.corrupt], [(2, at)])
        self.assertTrue(reader.prove_share(0))
        self.assertFalse(reader.prove_share(2))

    def test_a_chain_that_lies(self) -> None:
        """A chain of another share, nodes outside the tree, and a root of another's blocks are found."""
        honest = make(CONTENT, Format.SDMF, 2, 5)
        share = honest.share(1)
        header = MutableShare.of(1, share).header
        assert header is not None
        start, end = header.sections.chain
        chains = [
            honest.share(2)[start:end],
            struct.pack(">H", hash_tree.num_nodes(5)) + share[start + 2 : end],
            struct.pack(">H", 65535) + share[start + 2 : end],
            share[start : start + 34] * 3,
            bytes(end - start),
        ]
        for chain in chains:
            lying = share[:start] + chain + share[end:]
            error = self.assertRaises(
                CorruptionError, attempt, {1: lying, 0: honest.share(0)}, book(), honest
            )
            self.assertEqual(error.share_number, 1)
            self.assertTrue(start <= (error.offset or 0) < end)
