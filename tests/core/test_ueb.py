"""The UEB is written byte for byte as recorded, and read with tolerance but not blindly."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import hashes, ueb
from pipegrid.core.encoding_parameters import Geometry, Params
from tests import vectors

GEOMETRY = Params().geometry(1000)
HASHES = (b"c" * 32, b"r" * 32, b"s" * 32)
EXAMPLES = settings(max_examples=300, deadline=None, derandomize=True)


def field(key: bytes, value: bytes) -> bytes:
    """Return one packed field."""
    return key + b":" + hashes.netstring(value)


def record(**changes: bytes | None) -> bytes:
    """Return the least record that a reader takes, with fields changed, added or (None) removed."""
    fields: dict[str, bytes | None] = {
        "crypttext_root_hash": b"r" * 32,
        "segment_size": b"999",
        "share_root_hash": b"s" * 32,
    }
    fields.update(changes)
    return b"".join(
        field(key.encode("ascii"), value) for key, value in fields.items() if value is not None
    )


class UebTests(SynchronousTestCase):
    """Packing and parsing."""

    def test_recorded_ones(self) -> None:
        """Every recorded UEB is what we pack, has the recorded hash and is read back."""
        checked = 0
        for case in vectors.load("immutable")["cases"]:
            if case["format"] == "lit":
                continue
            packed = bytes.fromhex(case["ueb_hex"])
            size = len(vectors.plaintext(case["plaintext"]))
            geometry = Geometry(size, case["k"], case["n"], case["segment_size"])
            parsed = ueb.parse(packed)
            self.assertEqual(parsed.segment_bytes, case["segment_size"])
            self.assertEqual(ueb.disagreements(parsed, geometry), [])
            again = ueb.pack(
                geometry,
                parsed.fields[b"crypttext_hash"],
                parsed.crypttext_root_hash,
                parsed.share_root_hash,
            )
            self.assertEqual(again, packed, case["name"])
            self.assertEqual(ueb.packed_length(geometry), len(packed))
            self.assertEqual(hashes.UEB.hash(packed).hex(), case["ueb_hash"])
            checked += 1
        self.assertEqual(checked, 42)

    def test_round_trip(self) -> None:
        """What is packed is parsed again."""
        parsed = ueb.parse(ueb.pack(GEOMETRY, *HASHES))
        self.assertEqual(parsed.segment_bytes, GEOMETRY.segment_bytes)
        self.assertEqual(parsed.crypttext_root_hash, HASHES[1])
        self.assertEqual(parsed.share_root_hash, HASHES[2])
        self.assertEqual(parsed.fields[b"size"], b"1000")

    def test_tolerates_unknown_fields(self) -> None:
        """Fields of old or newer writers do no harm, and order does not matter."""
        parsed = ueb.parse(field(b"zoo", b"x:,") + record(plaintext_hash=b"p" * 32))
        self.assertEqual(parsed.segment_bytes, 999)
        self.assertEqual(parsed.fields[b"zoo"], b"x:,")

    def test_refuses_what_a_reader_cannot_use(self) -> None:
        """Missing fields, hashes of other lengths and sizes that are no positive number are refused."""
        ueb.parse(record())
        for changes in (
            {"segment_size": None},
            {"crypttext_root_hash": None},
            {"share_root_hash": None},
            {"share_root_hash": b"s" * 31},
            {"crypttext_root_hash": b"r" * 33},
            {"segment_size": b""},
            {"segment_size": b"0"},
            {"segment_size": b"-3"},
            {"segment_size": b"+3"},
            {"segment_size": b" 3"},
            {"segment_size": b"3_0"},
            {"segment_size": "٣".encode()},
            {"segment_size": b"9" * 500},
        ):
            with self.assertRaises(ValueError, msg=str(changes)):
                ueb.parse(record(**changes))

    def test_refuses_broken_framing(self) -> None:
        """Lengths that are missing, signed, huge or wrong are refused."""
        good = record()
        for tail in (
            b"x",
            b":",
            b"x:",
            b"x:1",
            b"x::a,",
            b"x:-1:,",
            b"x:+1:a,",
            b"x:1:a",
            b"x:1:ab",
            b"x:2:a,",
            b"x:99999999999:a,",
            b"x:" + b"9" * 1500 + b":a,",
        ):
            with self.assertRaises(ValueError, msg=repr(tail)):
                ueb.parse(good + tail)

    def test_refuses_excessive_length(self) -> None:
        """Two thousand bytes and more are no UEB."""
        base = len(record(pad=b""))
        pad = bytes(ueb.MAX_UEB_BYTES - base - 3)  # its length takes three digits more than 0's one
        self.assertEqual(len(record(pad=pad)), ueb.MAX_UEB_BYTES)
        ueb.parse(record(pad=pad))
        self.assertRaises(ValueError, ueb.parse, record(pad=pad + b"x"))

    def test_reports_disagreements(self) -> None:
        """A verifier learns which numbers are not those of the cap."""
        parsed = ueb.parse(ueb.pack(GEOMETRY, *HASHES))
        other = Params(4, 10).geometry(1000)
        self.assertEqual(
            ueb.disagreements(parsed, other),
            [b"codec_params", b"needed_shares", b"segment_size", b"tail_codec_params"],
        )
        self.assertIn(b"num_segments", ueb.disagreements(ueb.parse(record()), GEOMETRY))

    @EXAMPLES
    @given(st.binary(max_size=200))
    def test_any_bytes(self, data: bytes) -> None:
        """Arbitrary bytes are refused with ValueError and nothing else."""
        self.assertRaises(ValueError, ueb.parse, data)

    @EXAMPLES
    @given(st.integers(0, 400), st.integers(0, 400), st.binary(max_size=6))
    def test_any_damage(self, start: int, length: int, patch: bytes) -> None:
        """A record damaged anywhere is read or refused with ValueError."""
        packed = ueb.pack(GEOMETRY, *HASHES)
        with contextlib.suppress(ValueError):
            ueb.parse(packed[:start] + patch + packed[start + length :])
