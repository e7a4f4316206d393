"""What a decoder restores, refuses, asks for and finds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap, parse_cap
from pipegrid.core.decoder import Decoder
from pipegrid.core.spans import Span
from pipegrid.errors import CorruptionError
from tests import vectors
from tests.core import simple_encoder
from tests.core.simple_encoder import Encoded, encode

properties = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def content(size: int, seed: str = "x") -> bytes:
    """Return size bytes that do not compress."""
    return hashlib.shake_128(seed.encode()).digest(size)


class Grid:
    """Shares by number; reads them as servers would, and counts round trips and spans."""

    def __init__(
        self,
        decoder: Decoder,
        shares: dict[int, bytes],
        *,
        ahead_bytes: int = 1 << 20,
        shuffle: random.Random | None = None,
    ) -> None:
        self.decoder = decoder
        self.shares = shares
        self.ahead_bytes = ahead_bytes
        self.shuffle = shuffle
        self.rounds = 0
        self.asked: dict[int, list[Span]] = {number: [] for number in shares}
        self.plaintext = b""
        for number in shares:
            decoder.add_share(number)

    def run(self) -> bytes:
        """Read until the decoder is done, or wants no more."""
        while not self.decoder.done:
            deliveries = []
            for number in self.decoder.shares_in_use:
                spans = self.decoder.wanted(number, self.ahead_bytes)
                self.asked[number] += spans
                deliveries += [piece for span in spans for piece in self._read(number, span)]
            if self.shuffle is not None:
                self.shuffle.shuffle(deliveries)
            self.rounds += bool(deliveries)
            for number, offset, data in deliveries:
                if data:
                    self.decoder.received(number, offset, data)
                else:
                    self.decoder.ended(number, offset)
            if not self._work() and not deliveries:
                break
        return self.plaintext

    def _read(self, number: int, span: Span) -> Iterable[tuple[int, int, bytes]]:
        data = self.shares[number][span.offset : span.end]
        position = 0
        while position < len(data):
            step = len(data) if self.shuffle is None else self.shuffle.choice([1, 7, 32, 300])
            yield number, span.offset + position, data[position : position + step]
            position += step
        if len(data) < span.length:
            yield number, span.offset + len(data), b""

    def _work(self) -> bool:
        worked = False
        while (job := self.decoder.next_job()) is not None:
            worked = True
            for piece in self.decoder.finish(job.run()):
                self.plaintext += piece
        return worked


def decode(encoded: Encoded, numbers: Iterable[int], **options: int) -> bytes:
    """Return what these shares restore."""
    decoder = Decoder(encoded.cap, **options)
    return Grid(decoder, {number: encoded.shares[number] for number in numbers}).run()


def flip(data: bytes, offset: int, bit: int = 0) -> bytes:
    """Return data with one bit changed."""
    changed = bytearray(data)
    changed[offset] ^= 1 << bit
    return bytes(changed)


CASES = [case for case in vectors.load("immutable")["cases"] if case["format"] == "chk"]


class VectorTests(SynchronousTestCase):
    """The recorded files."""

    def test_the_test_encoder_makes_the_recorded_shares(self) -> None:
        """Every share of every recorded file comes out with its recorded hash, and the cap too."""
        for case in CASES:
            encoded = encode_case(case)
            self.assertEqual(str(encoded.cap), case["cap"], case["name"])
            self.assertEqual(
                [hashlib.sha256(share).hexdigest() for share in encoded.shares],
                case["share_sha256"],
                case["name"],
            )

    def test_recorded_files_come_back(self) -> None:
        """Every recorded file is restored from several choices of k shares."""
        for case in CASES:
            encoded = encode_case(case)
            k, n = case["k"], case["n"]
            chooser = random.Random(case["name"])
            for numbers in (range(k), range(n - k, n), chooser.sample(range(n), k)):
                plaintext = decode(encoded, numbers)
                self.assertEqual(
                    hashlib.sha256(plaintext).hexdigest(), case["plaintext_sha256"], case["name"]
                )


def encode_case(case: dict[str, object]) -> Encoded:
    """Rebuild a recorded file."""
    cap = parse_cap(str(case["cap"]))
    assert isinstance(cap, ChkCap)
    plaintext = case["plaintext"]
    assert isinstance(plaintext, dict)
    k, n, most = case["k"], case["n"], case["max_segment_size"]
    version = case["share_layout_version"]
    assert isinstance(k, int)
    assert isinstance(n, int)
    assert isinstance(most, int)
    assert isinstance(version, int)
    return simple_encoder.encode(
        vectors.plaintext(plaintext), k, n, most, key=cap.key, version=version
    )


class PropertyTests(SynchronousTestCase):
    """What holds for every file."""

    @properties
    @given(
        k=st.integers(1, 6),
        spare=st.integers(0, 5),
        size=st.integers(56, 900),
        most=st.integers(20, 400),
        guess=st.sampled_from([1 << 20, 100, 399]),
        seed=st.integers(0, 1 << 30),
    )
    def test_any_k_shares_restore(
        self, k: int, spare: int, size: int, most: int, guess: int, seed: int
    ) -> None:
        """Any k of n shares give the file, whatever the guess, the split and the order."""
        chooser = random.Random(seed)
        encoded = encode(content(size, str(seed)), k, k + spare, most)
        numbers = chooser.sample(range(k + spare), k)
        decoder = Decoder(encoded.cap, guess_segment_bytes=guess)
        grid = Grid(
            decoder,
            {number: encoded.shares[number] for number in numbers},
            ahead_bytes=chooser.choice([1, 200, 1 << 20]),
            shuffle=chooser,
        )
        self.assertEqual(grid.run(), encoded.plaintext)
        self.assertEqual(decoder.corrupt, [])
        self.assertEqual(decoder.lacking, 0)

    @properties
    @given(st.integers(0, 1100), st.integers(0, 1100), st.booleans())
    def test_any_range_costs_only_its_segments(self, start: int, length: int, right: bool) -> None:
        """A range is the slice of the file; only blocks of its segments are asked for."""
        encoded = FILE
        guess = FILE_SEGMENT if right else 1 << 20
        decoder = Decoder(encoded.cap, start, length, guess_segment_bytes=guess, merge_gap_bytes=0)
        grid = Grid(decoder, {1: encoded.shares[1], 3: encoded.shares[3]})
        self.assertEqual(grid.run(), encoded.plaintext[start : start + length])
        if not right:
            return
        stop = min(start + length, len(encoded.plaintext))
        data = encoded.sections[1]
        block = FILE_SEGMENT // 2
        allowed = set[int]()
        if start < stop:
            first, last = start // FILE_SEGMENT, (stop - 1) // FILE_SEGMENT
            allowed = set(range(data.start + first * block, data.start + (last + 1) * block))
        for spans in grid.asked.values():
            asked = {i for span in spans for i in range(span.offset, span.end)}
            self.assertLessEqual(asked & set(range(data.start, data.end)), allowed)

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def test_a_flipped_bit_is_harmless_or_found(self, data: st.DataObject) -> None:
        """With a share to spare, one flipped bit changes nothing, and if it matters it is named."""
        encoded = FILE
        number = data.draw(st.integers(0, 2))
        section = data.draw(st.sampled_from(encoded.sections))
        offset = data.draw(st.integers(section.start, section.end - 1))
        shares = dict(enumerate(encoded.shares[:3]))
        shares[number] = flip(shares[number], offset, data.draw(st.integers(0, 7)))
        guess = data.draw(st.sampled_from([FILE_SEGMENT, 1 << 20]))
        decoder = Decoder(encoded.cap, guess_segment_bytes=guess)
        self.assertEqual(Grid(decoder, shares).run(), encoded.plaintext)
        for error in decoder.corrupt:
            self.assertEqual(error.share_number, number)
            assert error.offset is not None
            self.assertEqual(encoded.section(error.offset).name, section.name, str(error))
        self.assertLessEqual(len(decoder.corrupt), 1)
        always = {"data", "share_hashes"} if number < 2 else set()
        if number == 0:
            always |= {"uri_extension"}
        if section.name in always:
            self.assertEqual(len(decoder.corrupt), 1, section.name)

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def test_without_a_spare_share_nothing_wrong_leaves(self, data: st.DataObject) -> None:
        """With k shares and a flipped bit the file comes right, or short with the share named."""
        encoded = FILE
        shares = {0: encoded.shares[0], 3: encoded.shares[3]}
        number = data.draw(st.sampled_from([0, 3]))
        offset = data.draw(st.integers(0, len(shares[number]) - 1))
        shares[number] = flip(shares[number], offset, data.draw(st.integers(0, 7)))
        decoder = Decoder(encoded.cap, guess_segment_bytes=FILE_SEGMENT)
        plaintext = Grid(decoder, shares).run()
        if plaintext != encoded.plaintext:
            self.assertTrue(encoded.plaintext.startswith(plaintext))
            self.assertEqual(decoder.lacking, 1)
            self.assertEqual([error.share_number for error in decoder.corrupt], [number])

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def test_a_lying_header_neither_stalls_nor_swells(self, data: st.DataObject) -> None:
        """
        Sections that overlap, lie far away or in each other: the decoder restores, or says what lacks.
        """
        encoded = FILE
        places = [s.start for s in encoded.sections] + [0, 1, 36, 68, 2**31, 2**32 - 1]
        share = bytearray(encoded.shares[0])
        for field in data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)):
            value = data.draw(st.sampled_from(places)) + data.draw(st.sampled_from([0, 0, 34, 64]))
            share[4 * field : 4 * field + 4] = min(value, 2**32 - 1).to_bytes(4, "big")
        shares = {0: bytes(share), 1: encoded.shares[1]}
        start, length = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 1000))
        decoder = Decoder(
            encoded.cap,
            start,
            length,
            guess_segment_bytes=data.draw(st.sampled_from([FILE_SEGMENT, 1 << 20])),
        )
        grid = Grid(decoder, shares, ahead_bytes=data.draw(st.sampled_from([1, 1 << 20])))
        plaintext = grid.run()
        wanted = encoded.plaintext[start : start + length]
        self.assertTrue(wanted.startswith(plaintext))
        self.assertEqual(decoder.done, plaintext == wanted)
        if not decoder.done:
            self.assertEqual(decoder.lacking, 1)
            self.assertNotEqual(decoder.corrupt, [])
        asked = sum(span.length for span in grid.asked[0])
        self.assertLess(asked, 3 * len(encoded.shares[0]) + 30_000)

    @properties
    @given(st.data())
    def test_a_truncated_share_is_replaced(self, data: st.DataObject) -> None:
        """A share that ends too early is named where it matters, and another is used."""
        encoded = FILE
        keep = data.draw(st.integers(0, len(encoded.shares[0]) - 1))
        shares = dict(enumerate(encoded.shares[:3]))
        shares[0] = shares[0][:keep]
        guess = data.draw(st.sampled_from([FILE_SEGMENT, 1 << 20]))
        decoder = Decoder(encoded.cap, guess_segment_bytes=guess)
        self.assertEqual(Grid(decoder, shares).run(), encoded.plaintext)
        self.assertEqual({error.share_number for error in decoder.corrupt}, {0})

    def test_an_end_that_is_known_before_the_ueb_stalls_nothing(self) -> None:
        """A tree of segment hashes that lies past the end is missed, though the end came first."""
        encoded = encode(content(100, "far"), 1, 1, 10, version=2)
        share = flip(encoded.shares[0], 37)  # the offset of that tree, far away now
        decoder = Decoder(encoded.cap)
        decoder.add_share(0)
        while spans := sorted(decoder.wanted(0, 1 << 16), key=lambda span: -span.offset):
            for span in spans:
                if data := share[span.offset : span.end]:
                    decoder.received(0, span.offset, data)
                else:
                    decoder.ended(0, span.offset)
            self.assertIsNone(decoder.next_job())
        self.assertEqual(decoder.lacking, 1)
        self.assertEqual([error.share_number for error in decoder.corrupt], [0])


FILE_SEGMENT = 202
FILE = encode(content(1000, "file"), 2, 4, FILE_SEGMENT)


class BadShareTests(SynchronousTestCase):
    """Shares that are not what they claim to be."""

    def found(self, shares: dict[int, bytes], encoded: Encoded = FILE) -> Decoder:
        """Check that the file comes right all the same; return the decoder."""
        decoder = Decoder(encoded.cap)
        self.assertEqual(Grid(decoder, shares).run(), encoded.plaintext)
        return decoder

    def test_swapped_shares_are_refused(self) -> None:
        """Share 1 handed out as share 0 is found out, though its hashes are sound."""
        decoder = self.found({0: FILE.shares[1], 2: FILE.shares[2], 3: FILE.shares[3]})
        self.assertEqual(decoder.bad_shares, [0])
        self.assertEqual(decoder.shares_in_use, [2, 3])

    def test_shares_of_another_file_are_refused(self) -> None:
        """A share of another file of the same shape gives nothing."""
        other = encode(content(1000, "other"), 2, 4, FILE_SEGMENT)
        decoder = self.found({0: other.shares[0], 2: FILE.shares[2], 3: FILE.shares[3]})
        self.assertEqual(decoder.bad_shares, [0])

    def test_empty_shares_are_refused(self) -> None:
        """A share without a byte ends within its header."""
        decoder = self.found({0: b"", 2: FILE.shares[2], 3: FILE.shares[3]})
        self.assertEqual([e.offset for e in decoder.corrupt], [0])
        self.assertIn("share 0", str(decoder.corrupt[0]))

    def test_noise_is_refused(self) -> None:
        """Random bytes of any length give neither plaintext nor an unforeseen error."""
        chooser = random.Random(7)
        for length in (1, 35, 36, 68, 500, 5000):
            noise = b"\0\0\0\1" + chooser.randbytes(length)
            self.found({0: noise, 1: b"\0\0\0\2" + noise, 2: FILE.shares[2], 3: FILE.shares[3]})

    def test_a_chain_without_its_own_leaf_is_refused(self) -> None:
        """Neither an empty chain nor one that repeats another node passes."""
        chain = next(s for s in FILE.sections if s.name == "share_hashes")
        share = bytearray(FILE.shares[0])
        for at in range(chain.start, chain.end, 34):
            if share[at : at + 2] == b"\0\3":  # the leaf of share 0 of 4
                share[at : at + 34] = share[at + 34 : at + 68] or share[at - 34 : at]
        empty = bytearray(FILE.shares[0])
        empty[0x20:0x24] = empty[0x1C:0x20]
        del empty[chain.start : chain.end]
        for bad in (share, empty):
            decoder = self.found({0: bytes(bad), 2: FILE.shares[2], 3: FILE.shares[3]})
            (error,) = decoder.corrupt
            self.assertIn("lacks its own leaf", str(error))

    def test_nodes_outside_the_tree_are_refused(self) -> None:
        """A chain that names a node which the tree does not have is corrupt."""
        chain = next(s for s in FILE.sections if s.name == "share_hashes")
        share = flip(FILE.shares[0], chain.start, 3)
        decoder = self.found({0: share, 2: FILE.shares[2], 3: FILE.shares[3]})
        self.assertIn("outside the tree", str(decoder.corrupt[0]))

    def test_an_overlong_ueb_is_refused(self) -> None:
        """A UEB that claims 2000 bytes is corrupt; the share's blocks are still good."""
        start = FILE.sections[-1].start
        share = FILE.shares[0][:start] + (2000).to_bytes(4, "big") + bytes(2000)
        decoder = self.found({0: share, 2: FILE.shares[2]})
        self.assertEqual([e.offset for e in decoder.corrupt], [start])
        self.assertEqual(decoder.bad_shares, [])

    def test_metadata_may_come_from_another_share(self) -> None:
        """A share whose UEB or tree of segment hashes is bad still gives its blocks."""
        for name in ("uri_extension", "crypttext_hash_tree"):
            section = next(s for s in FILE.sections if s.name == name)
            share = flip(FILE.shares[0], section.start + 40)
            decoder = self.found({0: share, 2: FILE.shares[2]})
            self.assertEqual([e.share_number for e in decoder.corrupt], [0])

    def test_a_bad_share_can_be_had_elsewhere(self) -> None:
        """A share that was bad at one server begins anew at another."""
        decoder = Decoder(FILE.cap)
        Grid(decoder, {0: b"rubbish", 1: FILE.shares[1]}).run()
        self.assertEqual(decoder.lacking, 1)
        decoder.drop_share(0)
        grid = Grid(decoder, {0: FILE.shares[0], 1: FILE.shares[1]})
        self.assertEqual(decoder.lacking, 0)
        self.assertEqual(grid.run(), FILE.plaintext)

    def test_damaged_shares_together_restore_the_file(self) -> None:
        """As a last resort, shares with bad blocks in different segments make up for each other."""
        shares = {n: flip(FILE.shares[n], 36 + 101 * n) for n in range(3)}  # share n, segment n
        decoder = Decoder(FILE.cap)
        grid = Grid(decoder, shares, ahead_bytes=202)
        self.assertNotEqual(grid.run(), FILE.plaintext)
        self.assertEqual(decoder.lacking, 1)
        self.assertNotEqual(decoder.use_damaged_shares(), [])
        self.assertEqual(decoder.lacking, 0)
        self.assertEqual(grid.run(), FILE.plaintext)
        self.assertEqual([e.offset for e in decoder.corrupt], [36, 36 + 101])

    def test_a_share_without_sound_hashes_is_beyond_use(self) -> None:
        """The last resort does not bring back a share whose chain or tree is wrong."""
        chain = next(s for s in FILE.sections if s.name == "share_hashes")
        shares = {0: flip(FILE.shares[0], chain.start + 10), 1: FILE.shares[1]}
        decoder = Decoder(FILE.cap)
        grid = Grid(decoder, shares)
        grid.run()
        self.assertEqual(decoder.use_damaged_shares(), [])
        self.assertEqual(grid.run(), b"")
        self.assertEqual(decoder.lacking, 1)

    def test_a_segment_that_nobody_has_stays_lacking(self) -> None:
        """Where too few good blocks of one segment are left, the decoder says so."""
        shares = {n: flip(FILE.shares[n], 36 + 101 * 3) for n in (0, 2)}
        decoder = Decoder(FILE.cap)
        decoder.use_damaged_shares()
        grid = Grid(decoder, {**shares, 3: FILE.shares[3]})
        self.assertEqual(grid.run(), FILE.plaintext[: 3 * FILE_SEGMENT])
        self.assertEqual(decoder.lacking, 1)
        self.assertEqual(decoder.bad_shares, [])

    def test_a_malicious_writer_is_found_out(self) -> None:
        """Shares that agree with each other but not with the segment hashes are refused."""
        for size in (100, 1000):
            encoded = encode(content(size), 2, 4, 202, spoil_ciphertext_tree=True)
            grid = Grid(Decoder(encoded.cap), dict(enumerate(encoded.shares)))
            error = self.assertRaises(CorruptionError, grid.run)
            assert isinstance(error, CorruptionError)
            self.assertIsNone(error.share_number)
            self.assertEqual(grid.plaintext, b"")

    def test_an_impossible_segment_size_is_refused(self) -> None:
        """A UEB may not name a segment size that is zero or no multiple of k."""
        for value in (b"0", b"201", b"x"):
            encoded = encode(content(1000), 2, 4, 202, replace_ueb={b"segment_size": value})
            grid = Grid(Decoder(encoded.cap), dict(enumerate(encoded.shares)))
            self.assertRaises(CorruptionError, grid.run)


class ReadingTests(SynchronousTestCase):
    """What is asked for, and in how many round trips."""

    def test_a_small_file_is_one_span(self) -> None:
        """With a right guess a file of one segment is one read of the whole share, once."""
        encoded = encode(content(50_000))
        decoder = Decoder(encoded.cap)
        grid = Grid(decoder, {n: encoded.shares[n] for n in (1, 4, 8)})
        self.assertEqual(grid.run(), encoded.plaintext)
        length = len(encoded.shares[1])
        self.assertEqual(grid.asked[4], [Span(0, length)])
        self.assertEqual(grid.rounds, 1)

    def test_a_large_file_reads_its_tail_beside_its_first_blocks(self) -> None:
        """Trees, chain and UEB come in one span before the blocks: one round trip."""
        encoded = encode(content(40_000), 2, 4, 2000)
        decoder = Decoder(encoded.cap, guess_segment_bytes=2000, merge_gap_bytes=200)
        decoder.add_share(0)
        spans = decoder.wanted(0, 4000)
        tail = encoded.sections[3].start + 32
        self.assertEqual(spans[0], Span(tail, len(encoded.shares[0]) - tail))
        self.assertEqual(spans[1], Span(0, 36 + 4 * 1000))
        self.assertEqual(decoder.wanted(0, 4000), [])

    def test_a_wrong_guess_costs_one_round_trip_more(self) -> None:
        """The header and UEB at their real places put the next reads right."""
        encoded = encode(content(300_000), 2, 4, 1 << 17)
        grid = Grid(Decoder(encoded.cap, merge_gap_bytes=0), dict(enumerate(encoded.shares[:2])))
        self.assertEqual(grid.run(), encoded.plaintext)
        self.assertEqual(grid.rounds, 2)

    def test_both_layouts_and_foreign_ones_are_read(self) -> None:
        """Sections are found through the offset table, wherever a writer put them."""
        for version in (1, 2):
            for gap in (0, 50, 20_000):
                encoded = encode(content(1000), 2, 4, 202, version=version, gap=gap)
                for guess in (202, 1 << 20):
                    self.assertEqual(
                        decode(encoded, (1, 2), guess_segment_bytes=guess), encoded.plaintext
                    )

    def test_reading_ahead_is_bounded(self) -> None:
        """Blocks are asked at most ahead_bytes beyond what has left, and at least one."""
        encoded = encode(content(40_000), 2, 4, 2000)
        decoder = Decoder(encoded.cap, guess_segment_bytes=2000)
        grid = Grid(decoder, dict(enumerate(encoded.shares[:2])), ahead_bytes=3000)
        for number in (0, 1):
            for span in decoder.wanted(number, 3000):
                decoder.received(number, 0, encoded.shares[number])
                self.assertLessEqual(span.length, len(encoded.shares[0]))
        metadata = 2 * (36 + 2 * 63 * 32 + 34 * 3 + 400)
        self.assertLessEqual(decoder.held_bytes, 2 * 3000 + metadata)
        self.assertEqual(decoder.wanted(0, 3000), [])
        self.assertEqual(grid.run(), encoded.plaintext)
        self.assertEqual(decoder.wanted(0, 3000), [])

    def test_a_lying_header_does_not_make_us_read_more(self) -> None:
        """A share that claims one giant segment is asked for no more than it would be anyway."""
        encoded = encode(content(1 << 20), 2, 4, 1000)
        share = bytearray(encoded.shares[0])
        share[4:8] = b"\x7f\0\0\0"
        decoder = Decoder(encoded.cap, guess_segment_bytes=1000)
        decoder.add_share(0)
        total = 0
        while spans := decoder.wanted(0, 2000):
            for span in spans:
                total += span.length
                if span.offset < len(share) // 2:
                    decoder.received(0, span.offset, bytes(share[span.offset : span.end]))
        self.assertLess(total, 500_000)
        self.assertLess(decoder.held_bytes, 500_000)

    def test_a_dropped_share_is_replaced(self) -> None:
        """Another share takes over; what the lost one gave is still used."""
        encoded = encode(content(40_000), 2, 4, 2000)
        decoder = Decoder(encoded.cap, guess_segment_bytes=2000)
        for number in (0, 1):
            decoder.add_share(number)
            for span in decoder.wanted(number, 2000):
                decoder.received(
                    number, span.offset, encoded.shares[number][span.offset : span.end]
                )
        decoder.drop_share(0)
        self.assertEqual(decoder.lacking, 1)
        self.assertEqual(decoder.shares_in_use, [1])
        job = decoder.next_job()
        assert job is not None
        first = b"".join(decoder.finish(job.run()))
        self.assertEqual(first, encoded.plaintext[:2000])
        rest = Grid(decoder, {1: encoded.shares[1], 3: encoded.shares[3]}).run()
        self.assertEqual(first + rest, encoded.plaintext)

    def test_a_share_that_came_whole_needs_no_server(self) -> None:
        """When all that is needed has come, losing the servers does no harm."""
        decoder = Decoder(FILE.cap, guess_segment_bytes=FILE_SEGMENT)
        for number in (0, 2):
            decoder.add_share(number)
            decoder.wanted(number, 1 << 20)
            decoder.received(number, 0, FILE.shares[number])
            decoder.drop_share(number)
        self.assertEqual(decoder.lacking, 0)
        self.assertEqual(Grid(decoder, {}).run(), FILE.plaintext)

    def test_results_leave_in_order(self) -> None:
        """Jobs may finish in any order; plaintext does not."""
        decoder = Decoder(FILE.cap, guess_segment_bytes=FILE_SEGMENT)
        for number in (0, 2):
            decoder.add_share(number)
            decoder.wanted(number, 1 << 20)
            decoder.received(number, 0, FILE.shares[number])
        results = []
        while (job := decoder.next_job()) is not None:
            results.append(job.run())
        self.assertEqual(len(results), 5)
        plaintext = b""
        for result in reversed(results):
            self.assertFalse(plaintext)
            plaintext += b"".join(decoder.finish(result))
        self.assertEqual(plaintext, FILE.plaintext)
        self.assertTrue(decoder.done)
        self.assertEqual(decoder.held_bytes, 0)

    def test_an_empty_range_needs_nothing(self) -> None:
        """Past the end of the file there is nothing to do."""
        decoder = Decoder(FILE.cap, 5000, 10)
        decoder.add_share(0)
        self.assertTrue(decoder.done)
        self.assertEqual(decoder.wanted(0, 1 << 20), [])
        self.assertEqual(decoder.lacking, 0)

    def test_large_trees_are_read_in_parts(self) -> None:
        """Of a tree over thousands of segments a short range reads only what proves it."""
        encoded = encode(content(6000), 2, 3, 2)
        shares = {0: encoded.shares[0], 2: encoded.shares[2]}
        for guess in (2, 1 << 20):
            decoder = Decoder(encoded.cap, guess_segment_bytes=guess)
            self.assertEqual(Grid(decoder, shares).run(), encoded.plaintext)
            self.assertEqual(decoder.corrupt, [])
        decoder = Decoder(encoded.cap, 4999, 3, guess_segment_bytes=2, merge_gap_bytes=0)
        grid = Grid(decoder, shares)
        self.assertEqual(grid.run(), encoded.plaintext[4999:5002])
        self.assertEqual(grid.rounds, 1)
        for spans in grid.asked.values():
            self.assertLess(sum(span.length for span in spans), 3000)
