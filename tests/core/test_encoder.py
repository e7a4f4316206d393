"""Whatever is encoded is bit for bit what every other client of the grid would make of it."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import encoder as encoder_module
from pipegrid.core import erasure
from pipegrid.core.caps import LitCap
from pipegrid.core.encoder import Encoder, ShareWrite, convergent_key
from pipegrid.core.encoding_parameters import MAX_LITERAL_BYTES, Params
from pipegrid.core.stream_cipher import StreamCipher
from pipegrid.errors import SourceError
from tests import vectors

KEY = bytes(range(16))


def chk_cases() -> list[dict[str, Any]]:
    """Return the recorded immutable files that have shares."""
    return [case for case in vectors.load("immutable")["cases"] if case["format"] == "chk"]


def encoder_for(case: dict[str, Any], plaintext: bytes) -> Encoder:
    """Return an encoder with the key that the case asks for."""
    geometry = Params(case["k"], case["n"], case["max_segment_size"]).geometry(len(plaintext))
    if case["explicit_key"] is not None:
        key = bytes.fromhex(case["explicit_key"])
    else:
        key = convergent_key(bytes.fromhex(case["convergence"]), geometry, [plaintext])
    version = 2 if case["name"].startswith("forced-v2") else None
    return Encoder(geometry, key, force_version=version)


def segments(encoder: Encoder, plaintext: bytes) -> Iterator[bytes]:
    """Yield the plaintext of each segment."""
    step = encoder.geometry.segment_bytes
    for start in range(0, len(plaintext), step):
        yield plaintext[start : start + step]


def encode(encoder: Encoder, plaintext: bytes) -> list[ShareWrite]:
    """Return every write of the file, in the order in which the encoder gives them."""
    writes = []
    for segment in segments(encoder, plaintext):
        writes += encoder.add(encoder.code(encoder.encrypt(segment)))
    return writes + encoder.finish()


def assemble(writes: Iterable[ShareWrite]) -> dict[int, bytes]:
    """Return the shares, after checking that each one's writes follow each other without gaps."""
    shares: dict[int, bytearray] = {}
    for write in writes:
        share = shares.setdefault(write.share_number, bytearray())
        assert write.offset == len(share), f"{write} does not begin at {len(share)}"
        for piece in write.pieces:
            share += piece
        assert len(share) == write.offset + write.length
    return {number: bytes(share) for number, share in shares.items()}


class VectorTests(SynchronousTestCase):
    """The recorded files, computed by another implementation."""

    def test_every_recorded_file_is_reproduced(self) -> None:
        """Key, storage index, caps, UEB and every byte of every share are those recorded."""
        cases = chk_cases()
        self.assertEqual(len(cases), 42)
        for case in cases:
            name = case["name"]
            plaintext = vectors.plaintext(case["plaintext"])
            self.assertEqual(hashlib.sha256(plaintext).hexdigest(), case["plaintext_sha256"], name)
            encoder = encoder_for(case, plaintext)
            self.assertEqual(encoder.geometry.segment_bytes, case["segment_size"], name)
            self.assertEqual(encoder.share_bytes, case["share_length"], name)
            shares = assemble(encode(encoder, plaintext))

            self.assertEqual(encoder.cap.key.hex(), case["key"], name)
            self.assertEqual(str(encoder.cap), case["cap"], name)
            self.assertEqual(str(encoder.cap.verifier()), case["verify_cap"], name)
            self.assertIn(f":{case['storage_index']}:", str(encoder.cap.verifier()), name)
            self.assertEqual(encoder.cap.ueb_hash.hex(), case["ueb_hash"], name)
            self.assertEqual(encoder.ueb.hex(), case["ueb_hex"], name)

            self.assertEqual(sorted(shares), list(range(case["n"])), name)
            found = [hashlib.sha256(shares[number]).hexdigest() for number in range(case["n"])]
            self.assertEqual(found, case["share_sha256"], name)
            for number, share in enumerate(case.get("share_hex", ())):
                self.assertEqual(shares[number].hex(), share, f"{name}, share {number}")
            for number, share in case.get("share_hex_some", {}).items():
                self.assertEqual(shares[int(number)].hex(), share, f"{name}, share {number}")

    def test_a_literal_file_has_a_cap_and_no_shares(self) -> None:
        """Files up to 55 bytes are their own cap."""
        cases = [c for c in vectors.load("immutable")["cases"] if c["format"] == "lit"]
        self.assertEqual(len(cases), 6)
        for case in cases:
            plaintext = vectors.plaintext(case["plaintext"])
            self.assertLessEqual(len(plaintext), MAX_LITERAL_BYTES)
            self.assertEqual(str(LitCap(plaintext)), case["cap"])


@st.composite
def files(draw: st.DrawFn) -> tuple[Params, bytes]:
    """Draw parameters and a plaintext of one to a few segments."""
    required = draw(st.integers(1, 5))
    total = draw(st.integers(required, 8))
    params = Params(required, total, draw(st.integers(1, 300)))
    plaintext = draw(st.binary(min_size=1, max_size=4 * params.max_segment_bytes))
    return params, plaintext


def bounded(max_examples: int) -> settings:
    """Return settings that keep the suite quick and the same every time."""
    return settings(max_examples=max_examples, deadline=None, derandomize=True, database=None)


class StepTests(SynchronousTestCase):
    """The steps may be cut, ordered and repeated as it suits the caller."""

    @bounded(60)
    @given(files(), st.data())
    def test_any_split_of_a_segment_gives_the_same_shares(
        self, file: tuple[Params, bytes], data: st.DataObject
    ) -> None:
        """A segment may come in any pieces, in any kind of buffer, empty ones among them."""
        params, plaintext = file
        geometry = params.geometry(len(plaintext))
        plain, split = Encoder(geometry, KEY), Encoder(geometry, KEY)
        writes = []
        for segment in segments(split, plaintext):
            cuts = sorted(data.draw(st.lists(st.integers(0, len(segment)), max_size=5)))
            kind = data.draw(st.sampled_from([bytes, bytearray, memoryview]))
            pieces = [
                kind(segment[start:end])
                for start, end in zip([0, *cuts], [*cuts, len(segment)], strict=True)
            ]
            writes += split.add(split.code(split.encrypt(pieces)))
        writes += split.finish()
        self.assertEqual(assemble(writes), assemble(encode(plain, plaintext)))
        self.assertEqual(split.cap, plain.cap)

    @bounded(60)
    @given(files(), st.data())
    def test_segments_may_be_coded_and_added_in_any_order(
        self, file: tuple[Params, bytes], data: st.DataObject
    ) -> None:
        """Only encryption is strictly in order."""
        params, plaintext = file
        geometry = params.geometry(len(plaintext))
        plain, mixed = Encoder(geometry, KEY), Encoder(geometry, KEY)
        encrypted = [mixed.encrypt(segment) for segment in segments(mixed, plaintext)]
        writes = []
        for segment in data.draw(st.permutations(encrypted)):
            writes += mixed.add(mixed.code(segment))
        writes += mixed.finish()
        writes.sort(key=lambda write: write.offset)
        self.assertEqual(assemble(writes), assemble(encode(plain, plaintext)))

    @bounded(60)
    @given(files(), st.data())
    def test_recoding_gives_the_same_writes(
        self, file: tuple[Params, bytes], data: st.DataObject
    ) -> None:
        """A share that must move is made again from the source, whichever shares are asked for."""
        params, plaintext = file
        encoder = Encoder(params.geometry(len(plaintext)), KEY)
        shares = assemble(encode(encoder, plaintext))
        wanted = data.draw(st.sets(st.integers(0, params.total_shares - 1)))
        writes = []
        for index, segment in enumerate(segments(encoder, plaintext)):
            writes += encoder.recode(index, segment, wanted)
        writes += [encoder.trailer(number) for number in wanted]
        self.assertEqual(assemble(writes), {number: shares[number] for number in wanted})

    @bounded(60)
    @given(files(), st.data())
    def test_a_subset_of_shares_costs_nothing_but_the_rest(
        self, file: tuple[Params, bytes], data: st.DataObject
    ) -> None:
        """Only the shares asked for are written, and the cap is that of the whole file."""
        params, plaintext = file
        geometry = params.geometry(len(plaintext))
        whole, part = Encoder(geometry, KEY), Encoder(geometry, KEY)
        shares = assemble(encode(whole, plaintext))
        wanted = data.draw(st.sets(st.integers(0, params.total_shares - 1)))
        writes = []
        for segment in segments(part, plaintext):
            writes += part.add(part.code(part.encrypt(segment), wanted))
        writes += part.finish(wanted)
        self.assertEqual(assemble(writes), {number: shares[number] for number in wanted})
        self.assertEqual(part.cap, whole.cap)

    def test_every_share_is_as_long_as_announced(self) -> None:
        """The share length is known before the first byte, in both layout versions."""
        plaintext = bytes(1000)
        for version in (None, 1, 2):
            geometry = Params(3, 10, 300).geometry(len(plaintext))
            encoder = Encoder(geometry, KEY, force_version=version)
            for share in assemble(encode(encoder, plaintext)).values():
                self.assertEqual(len(share), encoder.share_bytes)

    def test_blocks_of_several_stripes_are_coded_right(self) -> None:
        """Parity pieces stay apart, and one behind the other they are the block."""
        plaintext = b"".join(bytes([i % 251]) * 1000 for i in range(1800))
        encoder = Encoder(Params(2, 4, 2 << 20).geometry(len(plaintext)), KEY)
        coded = encoder.code(encoder.encrypt(plaintext))
        self.assertGreater(len(coded.blocks[2]), 1)
        encoder.add(coded)
        [write] = encoder.recode(0, plaintext, {3})
        self.assertEqual(b"".join(write.pieces[1:]), b"".join(coded.blocks[3]))
        blocks = {number: b"".join(coded.blocks[number]) for number in (2, 3)}
        ciphertext = b"".join(erasure.decode(blocks, 2, 4, len(plaintext)))
        decrypted = bytearray(len(plaintext))
        StreamCipher(KEY).apply(ciphertext, decrypted)
        self.assertEqual(bytes(decrypted), plaintext)

    def test_whatever_was_in_memory_before(self) -> None:
        """Buffers are filled whole, padding included; nothing that was in them gets into a share."""
        plaintext = random.Random(3).randbytes(3 * erasure.QUICK_BYTES + 1)
        geometry = Params(3, 10).geometry(len(plaintext))
        found = []
        for before in (b"\0", b"\xaa"):
            for module in (encoder_module, erasure):
                self.patch(module, "uninitialised", lambda size, b=before: bytearray(b * size))
            found.append(assemble(encode(Encoder(geometry, KEY), plaintext)))
        self.assertEqual(*found)

    def test_the_plaintext_is_left_as_it_was(self) -> None:
        """A buffer given to the encoder may be used again at once."""
        buffer = bytearray(b"x" * 500)
        geometry = Params(3, 10).geometry(len(buffer))
        first, second = Encoder(geometry, KEY), Encoder(geometry, KEY)
        expected = assemble(encode(first, bytes(buffer)))
        segment = second.encrypt(buffer)
        self.assertEqual(buffer, b"x" * 500)
        buffer[:] = bytes(500)
        found = second.add(second.code(segment)) + second.finish()
        self.assertEqual(assemble(found), expected)


class ChangedSourceTests(SynchronousTestCase):
    """A file that changes under the encoder is noticed, not stored half old and half new."""

    def setUp(self) -> None:
        """Encode a file of four segments."""
        self.plaintext = bytes(range(250)) * 4
        self.encoder = Encoder(Params(3, 10, 300).geometry(1000), KEY)
        encode(self.encoder, self.plaintext)

    def test_one_changed_byte_is_noticed_by_every_share_that_it_touches(self) -> None:
        """Parity depends on every byte; a primary block on its own."""
        segment = bytearray(self.plaintext[300:600])
        segment[150] ^= 1  # in the second block of three
        for number in (1, *range(3, 10)):
            with self.assertRaises(SourceError) as raised:
                self.encoder.recode(1, segment, {number})
            self.assertIn("changed while it was read", str(raised.exception))
        self.assertEqual(len(self.encoder.recode(1, segment, {0, 2})), 2)

    def test_a_changed_file_is_noticed_where_all_blocks_are_alike(self) -> None:
        """With one required share there is one block; it is checked all the same."""
        encoder = Encoder(Params(1, 3).geometry(100), KEY)
        encode(encoder, bytes(100))
        with self.assertRaises(SourceError):
            encoder.recode(0, b"x" * 100, {2})

    def test_a_segment_of_another_length_is_refused(self) -> None:
        """A file that grew or shrank is noticed before anything is encrypted."""
        encoder = Encoder(Params(3, 10, 300).geometry(1000), KEY)
        for wrong in (b"", bytes(299), bytes(301), [bytes(300), b"x"]):
            with self.assertRaises(SourceError):
                encoder.encrypt(wrong)
        with self.assertRaises(SourceError):
            self.encoder.recode(3, bytes(300), {1})
        self.assertEqual(encoder.encrypt(bytes(300)).number, 0)


class MisuseTests(SynchronousTestCase):
    """Calls out of order are broken invariants of the caller."""

    def test_calls_out_of_order_are_refused(self) -> None:
        """No cap before the end, no segment twice, none too many, none left out."""
        encoder = Encoder(Params(1, 1, 10).geometry(15), KEY)
        first = encoder.code(encoder.encrypt(bytes(10)))
        encoder.add(first)
        self.assertRaises(AssertionError, encoder.add, first)
        self.assertRaises(AssertionError, encoder.finish)
        self.assertRaises(AssertionError, encoder.trailer, 0)
        self.assertRaises(AssertionError, encoder.recode, 1, bytes(5), {0})
        self.assertRaises(AssertionError, lambda: encoder.cap)
        encoder.add(encoder.code(encoder.encrypt(bytes(5))))
        self.assertRaises(AssertionError, encoder.encrypt, bytes(5))
        encoder.finish()
        self.assertEqual(encoder.cap.size, 15)


class MemoryTests(SynchronousTestCase):
    """What is kept of a file does not grow with it, hashes apart."""

    def test_the_hashes_of_ten_gigabytes_are_a_few_megabytes(self) -> None:
        """32 bytes for each block and each segment, and no objects around them."""
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        encoder = Encoder(Params(3, 10).geometry(10_000_000_000), KEY)
        after, _ = tracemalloc.get_traced_memory()
        hashes_bytes = 32 * 11 * encoder.geometry.num_segments
        self.assertGreater(after - before, hashes_bytes)  # the tables are there from the start
        self.assertLess(after - before, hashes_bytes + 100_000)
