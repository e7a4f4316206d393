"""CBOR from strangers."""

from __future__ import annotations

import contextlib
import tracemalloc

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import cbor, gbs_cbor_bodies

BOMBS = {
    "an array that says it has 2^63 items": b"\x9b\x7f" + b"\xff" * 7,
    "an array that says it has 16 million items": b"\x9a\x00\xff\xff\xff" + b"\0" * 100,
    "a map that says it has 2^63 entries": b"\xbb\x7f" + b"\xff" * 7,
    "bytes that say they are 2^63": b"\x5b\x7f" + b"\xff" * 7 + b"x" * 100,
    "text that says it is 2^31": b"\x7a\x7f" + b"\xff" * 3 + b"x" * 100,
    "arrays in arrays": b"\x81" * 8000 + b"\0",
    "sets in sets": b"\xd9\x01\x02\x81" * 2000 + b"\0",
    "maps in maps": b"\xa1\x00" * 4000 + b"\0",
    "tags on tags": b"\xd9\x01\x02" * 2600 + b"\x80",
    "unfinished arrays": b"\x9f" * 8000,
    "a reference to itself": bytes.fromhex("d81c81d81d00"),
    "a regular expression": cbor2.dumps(cbor2.CBORTag(35, "(a+)+$")),
    "an enormous decimal": bytes.fromhex("c4821a3b9ac9ff01"),
    "an enormous bigfloat": bytes.fromhex("c5821a3b9ac9ff01"),
    "a repeated string": bytes.fromhex("d9010082644141414144d81900"),
    "nothing": b"",
    "a break": b"\xff\xff",
    "broken text": b"\x61\xff",
    "a key twice": bytes.fromhex("a2616101616102"),
}


class LoadsTests(SynchronousTestCase):
    """Nothing hostile gets far."""

    def test_bombs_are_refused_cheaply(self) -> None:
        """Whatever lengths and depths a message declares, it costs no more than a small one."""
        for name, bomb in BOMBS.items():
            tracemalloc.start()
            try:
                self.assertRaises(
                    ValueError, cbor.loads, bomb, gbs_cbor_bodies.MAX_ALLOCATE_BYTES, 300
                )
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            self.assertLess(peak, 1 << 19, name)

    def test_too_long_is_refused_unread(self) -> None:
        """The limit is looked at first."""
        self.assertEqual(cbor.loads(b"\x00", 1, 1), 0)
        self.assertRaises(ValueError, cbor.loads, b"\x00\x00", 1, 1)

    def test_unknown_tags_do_not_pass_a_check(self) -> None:
        """A tag that nobody knows makes a value that no check lets through."""
        value = cbor.loads(cbor2.dumps(cbor2.CBORTag(4711, [1])), 100, 10)
        self.assertRaises(ValueError, cbor.expect_uint_set, value, "x", 10)
        self.assertRaises(ValueError, cbor.expect_list, value, "x", 10)
        self.assertRaises(ValueError, cbor.expect_uint, value, "x")
        self.assertRaises(ValueError, cbor.expect_map, value, frozenset(), "x")

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.binary(max_size=64))
    def test_garbage_is_an_error_or_a_value(self, data: bytes) -> None:
        """Any bytes give a value or ValueError, and no other error."""
        for unpack in (
            gbs_cbor_bodies.unpack_allocate,
            gbs_cbor_bodies.unpack_corrupt,
            gbs_cbor_bodies.unpack_shares,
        ):
            with contextlib.suppress(ValueError):
                unpack(data)

    def test_true_is_no_number(self) -> None:
        """Booleans and floats are not taken for whole numbers."""
        for value in (True, 1.0, -1, 1 << 64, "1", None):
            self.assertRaises(ValueError, cbor.expect_uint, value, "x")
            if value is not None:
                self.assertRaises(ValueError, cbor.expect_uint_set, {value}, "x", 10)
