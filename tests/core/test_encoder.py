"""Whatever is encoded is bit for bit what every other client of the grid would make of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoder import Encoder, ShareWrite, convergent_key
from pipegrid.core.params import Params
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
