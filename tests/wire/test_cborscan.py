"""CBOR messages whose bytes would become much more in memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import cbor, gbs_bundles, gbs_cbor_bodies, gbs_mutable
from pipegrid.wire.storage_messages import ShareChange, SlotResult
from tests.wire.unpacking import unpack_request

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary()
    | st.text(),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.integers(), inner, max_size=30),
    max_leaves=60,
)  # fmt: skip

UNPACKERS: dict[str, tuple[Callable[[bytes], Any], int]] = {
    "an allocation": (gbs_cbor_bodies.unpack_allocate, gbs_cbor_bodies.MAX_ALLOCATE_BYTES),
    "a complaint": (gbs_cbor_bodies.unpack_corrupt, gbs_cbor_bodies.MAX_CORRUPT_BYTES),
    "a bundle": (gbs_bundles.unpack_bundle, gbs_bundles.MAX_BUNDLE_BYTES),
    "a read-test-write": (unpack_request, 8 << 20),
    "a server's version": (gbs_cbor_bodies.unpack_version, gbs_cbor_bodies.MAX_ANSWER_BYTES),
    "the answer to an allocation": (
        gbs_cbor_bodies.unpack_allocation,
        gbs_cbor_bodies.MAX_ANSWER_BYTES,
    ),
    "the answer to a write": (
        lambda body: gbs_cbor_bodies.unpack_required(body, complete=False),
        gbs_cbor_bodies.MAX_ANSWER_BYTES,
    ),
    "a list of shares": (gbs_cbor_bodies.unpack_shares, gbs_cbor_bodies.MAX_ANSWER_BYTES),
    "the answer to a bundle": (
        lambda body: gbs_bundles.unpack_answers(body, []),
        gbs_cbor_bodies.MAX_ANSWER_BYTES,
    ),
    "the answer to a read-test-write": (
        lambda body: gbs_mutable.unpack_answer(body, 8 << 20),
        8 << 20,
    ),
}
MAX_BUILT_BYTES = 8 << 20
"""What the largest of them may take beside its strings."""


def array_of(item: bytes, length: int) -> bytes:
    """Return an array that fills so many bytes with one item over and over."""
    count = (length - 5) // len(item)
    return b"\x9a" + count.to_bytes(4, "big") + item * count


class CostTests(SynchronousTestCase):
    """No message costs much more than its bytes."""

    def test_elements_are_counted_before_they_are_built(self) -> None:
        """As long as a message may be, of the smallest things there are: refused, and in little memory."""
        for name, (unpack, length) in UNPACKERS.items():
            for item in (b"\x80", b"\xa0", b"\x00", b"\x41x", b"\xd9\x01\x02\x80"):
                for body in (array_of(item, length), b"\x9f" + item * ((length - 1) // len(item))):
                    tracemalloc.start()
                    try:
                        self.assertRaises(ValueError, unpack, body)
                        peak = tracemalloc.get_traced_memory()[1]
                    finally:
                        tracemalloc.stop()
                    self.assertLess(peak, MAX_BUILT_BYTES, (name, item))

    def test_the_decoder_is_not_asked(self) -> None:
        """What has too many items does not reach the decoder at all."""
        body = array_of(b"\xa0", 8 << 20)
        with mock.patch.object(cbor2, "loads") as loads:
            self.assertRaises(ValueError, unpack_request, body)
        self.assertFalse(loads.called)

    def test_keys_of_the_same_hash(self) -> None:
        """Maps and sets are short, so that keys which collide cost nothing; also in messages of few items."""
        numbers = range(cbor.MAX_KEYS + 1)
        for value in (dict.fromkeys(numbers), set(numbers)):
            body = cbor2.dumps([value, "x" * 1024])
            self.assertRaises(ValueError, cbor.count_items, body, 10_000)
            value.pop(0) if isinstance(value, dict) else value.remove(0)
            body = cbor2.dumps([value, "x" * 1024])
            self.assertEqual(cbor.loads(body, 10_000, 10_000)[0], value)
        for head in (b"\xbf", b"\xd9\x01\x02\x9f"):
            body = cbor2.dumps("x" * 1024) + head + b"\x00\x00\xff"
            self.assertRaises(ValueError, cbor.count_items, body, 10_000)
            self.assertRaises(ValueError, cbor.loads, body, 10_000, 10_000)

    def test_long_strings_are_passed_over(self) -> None:
        """A megabyte of data is one step of the walk."""
        body = gbs_mutable.pack_request({0: ShareChange((), ((0, bytes(1 << 20)),))}, [])
        self.assertLess(cbor.count_items(body, 50), 20)

    def test_the_largest_messages_pass(self) -> None:
        """What the protocol allows is allowed: 256 numbers, 30 tests and writes a share, 8192 ranges."""
        numbers = frozenset(range(256))
        allocate = gbs_cbor_bodies.unpack_allocate(gbs_cbor_bodies.pack_allocate(numbers, 1 << 40))
        self.assertEqual(allocate.share_numbers, numbers)
        ranges = [(2 * at, 2 * at + 1) for at in range(8192)]
        body = gbs_cbor_bodies.pack_required(ranges)
        self.assertEqual(len(gbs_cbor_bodies.unpack_required(body, False).required), 8192)
        writes = tuple((at, b"x") for at in range(16))
        changes = {number: ShareChange((), writes, 7) for number in range(256)}
        body = gbs_mutable.pack_request(changes, [(0, 1)] * 30)
        self.assertEqual(unpack_request(body).changes, changes)
        tests = ((1 << 40, 1, b"x"),) * 30
        writes = tuple((at << 30, b"x") for at in range(30))
        changes = {number: ShareChange(tests, writes, 7) for number in range(256)}
        body = gbs_mutable.pack_request(changes, [(0, 1)] * 30)
        self.assertEqual(unpack_request(body).changes, changes)
        changes[0] = ShareChange((*tests, tests[0]), writes)
        body = gbs_mutable.pack_request(changes, [])
        self.assertRaises(ValueError, unpack_request, body)
        result = SlotResult(True, dict.fromkeys(range(256), (b"",) * 30))
        self.assertEqual(
            gbs_mutable.unpack_answer(gbs_mutable.pack_answer(result), 1 << 20), result
        )

    def test_a_share_of_an_mdmf_file(self) -> None:
        """A write for each segment of 128 KiB: 1 GB at k = 60; as many that have no blocks are refused."""
        for size, segments in ((2201, 8200), (531, 20_000)):
            data = bytes(size)
            writes = tuple((at * size, data) for at in range(segments))
            body = gbs_mutable.pack_request({3: ShareChange(((0, 1, b""),), writes)}, [(0, 57)])
            self.assertEqual(unpack_request(body).changes[3].writes, writes)
        writes = tuple((at, b"x") for at in range(20_000))
        body = gbs_mutable.pack_request({3: ShareChange((), writes)}, [])
        with self.assertRaisesRegex(ValueError, "more than .* items"):
            unpack_request(body)

    def test_a_message_costs_what_it_becomes(self) -> None:
        """Strings that are copied count twice, since they are; those that are views do not."""
        for size, cost in ((2000, 2 * 2000), (8192, 0)):
            writes = tuple((at * size, bytes(size)) for at in range(1000))
            body = gbs_mutable.pack_request({3: ShareChange((), writes)}, [])
            steps = gbs_mutable.unpack_request_in_steps(body)
            self.assertLess(abs(next(steps) - 1000 * (cost + 5 * gbs_mutable.ITEM_BYTES)), 70_000)


class WalkTests(SynchronousTestCase):
    """The walk and the decoder agree about what is in a message."""

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(VALUES)
    def test_whatever_is_packed_can_be_counted(self, value: Any) -> None:
        """Every message that is one comes to its end, with not an item more than it has bytes."""
        body = cbor2.dumps(value)
        self.assertLessEqual(1, cbor.count_items(body, len(body)))
        items = cbor.count_items(body, len(body))
        self.assertRaises(ValueError, cbor.count_items, body, items - 1)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.binary(max_size=64))
    def test_garbage_is_counted_or_refused(self, data: bytes) -> None:
        """Any bytes are counted, or a ValueError."""
        with contextlib.suppress(ValueError):
            self.assertLessEqual(cbor.count_items(data, 64), len(data))

    def test_cut_anywhere(self) -> None:
        """A message that ends early is refused by the walk or the decoder, wherever it ends."""
        body = gbs_mutable.pack_request({3: ShareChange((), ((1 << 40, bytes(70000)),))}, [(0, 1)])
        for end in (*range(1, 80), *range(len(body) - 80, len(body))):
            self.assertRaises(ValueError, unpack_request, body[:end])

    def test_strange_heads(self) -> None:
        """Heads without meaning, and tags in their long forms, are refused."""
        padding = bytes(1100)
        for head in (
            b"\x1c",
            b"\x3f",
            b"\x5c",
            b"\x7d",
            b"\x9e",
            b"\xbc",
            b"\xda",
            b"\xdb",
            b"\xfc",
        ):
            body = head + padding
            self.assertRaises(ValueError, cbor.count_items, body, 10_000)


class ReceivedMessageTests(SynchronousTestCase):
    """Messages that come in pieces are what they would be as a whole."""

    def receive(self, body: bytes, size: int, most: int | None = None) -> Any:
        """Return what a message is that comes in pieces of so many bytes."""
        kept = bytearray()
        message = cbor.ReceivedMessage(kept.extend, lambda length: length if most is None else most)
        for at in range(0, len(body), size):
            message.feed(memoryview(body)[at : at + size])
        message.finish()
        self.assertEqual(message.items, cbor.count_items(body, len(body)))
        return message.build(lambda begin, end: bytes(kept[begin:end]))

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(VALUES, st.integers(1, 300), st.binary(min_size=200, max_size=1000))
    def test_whatever_is_packed(self, value: Any, size: int, long: bytes) -> None:
        """In pieces of any length."""
        body = cbor2.dumps([long, value, {1: long}, set(range(30)), long])
        try:
            whole = cbor.loads(body, 1 << 20, len(body))
        except ValueError:  # a number of more than 64 bits
            self.assertRaises(ValueError, self.receive, body, size)
        else:
            self.assertEqual(repr(self.receive(body, size)), repr(whole))

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.binary(min_size=1, max_size=64))
    def test_garbage(self, data: bytes) -> None:
        """What the walk refuses is refused in pieces."""
        try:
            cbor.count_items(data, 64)
        except ValueError:
            self.assertRaises(ValueError, self.receive, data, 3)

    def test_refused(self) -> None:
        """Many keys, sets and items, and places that a client makes up."""
        for body in (
            cbor2.dumps(dict.fromkeys(range(cbor.MAX_KEYS + 1))),
            cbor2.dumps(set(range(cbor.MAX_KEYS + 1))),
            b"\xd9\x01\x02\x9f\x00\xff",
            b"\xbf\xff",
            b"\xda\x70\x67\x62\x64\x1a\x00\x00\x00\x00",
            b"\x5c",
        ):
            self.assertRaises(ValueError, self.receive, body, 2)
        self.assertRaisesRegex(ValueError, "more than 9 items", self.receive, b"\x89" * 10, 4, 9)


class ViewTests(SynchronousTestCase):
    """Large byte strings are in memory once."""

    def test_data_is_not_copied(self) -> None:
        """Unpacking a request of 16 MiB takes next to nothing beside it."""
        data = bytes(8 << 20)
        changes = {n: ShareChange(((0, 3, b"abc"),), ((0, data), (9, b"x"))) for n in range(2)}
        body = bytearray(gbs_mutable.pack_request(changes, []))
        tracemalloc.start()
        try:
            unpacked = unpack_request(body)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.assertLess(peak, 1 << 20)
        self.assertEqual(unpacked.changes, changes)

    def test_their_places_cannot_be_forged(self) -> None:
        """A tag that stands for such a string is refused in what comes, in long messages as in short ones."""
        forged = b"\xda" + cbor.VIEW_TAG.to_bytes(4, "big") + b"\x00"
        for rest in (b"", bytes(20_000)):
            share = {"test": [], "write": [{"offset": 0, "data": 1}], "new-length": None}
            body = cbor2.dumps({"test-write-vectors": {0: share}, "read-vector": []})
            body = body.replace(b"ddata\x01", b"ddata" + forged) + cbor2.dumps(rest)
            self.assertRaises(ValueError, unpack_request, body)

    def test_answers_in_pieces(self) -> None:
        """An answer in pieces is the same answer."""
        cases: tuple[dict[int, tuple[bytes, ...]], ...] = (
            {},
            {0: (b"", b"x" * 30, b"y" * 70_000), 200: (), 255: (b"z" * 300,) * 30},
            dict.fromkeys(range(256), (b"a",)),
        )
        for data in cases:
            for success in (True, False):
                result = SlotResult(success, data)
                pieces = gbs_mutable.pack_answer_in_pieces(result)
                self.assertEqual(b"".join(pieces), gbs_mutable.pack_answer(result))
