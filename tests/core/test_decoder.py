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
