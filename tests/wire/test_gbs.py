"""The bodies of GBS messages."""

from __future__ import annotations

from typing import Any

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import gbs_cbor_bodies
from pipegrid.wire.gbs_cbor_bodies import AllocateRequest
from pipegrid.wire.storage_messages import Allocation, ServerVersion, WriteAnswer
from tests import vectors

UINT = st.integers(0, (1 << 64) - 1)
NUMBERS = st.frozensets(st.integers(0, 255), max_size=256)


def exchange(name: str) -> Any:
    """Return the first exchange of this name."""
    return next(each for each in vectors.load("gbs-http")["exchanges"] if each["name"] == name)


def asked(name: str) -> bytes:
    """Return the body of a recorded request."""
    return bytes.fromhex(exchange(name)["request_body_hex"])


def answered(name: str) -> bytes:
    """Return the body of a recorded answer."""
    return bytes.fromhex(exchange(name)["response_body_hex"])


class RecordedTests(SynchronousTestCase):
    """Messages of a live Tahoe-LAFS 1.20.0 server."""

    def test_version(self) -> None:
        """Its version is understood, and ours has the same form."""
        answer = answered("version")
        version = gbs_cbor_bodies.unpack_version(answer)
        self.assertEqual(version.application, "tahoe-lafs/1.20.0")
        self.assertEqual(version.max_share_bytes, version.available_bytes)
        self.assertEqual(cbor2.loads(gbs_cbor_bodies.pack_version(version)), cbor2.loads(answer))

    def test_allocate(self) -> None:
        """Request and answer, byte for byte."""
        request, answer = asked("create"), answered("create")
        self.assertEqual(
            gbs_cbor_bodies.unpack_allocate(request), AllocateRequest(frozenset({0, 1, 2}), 100)
        )
        self.assertEqual(gbs_cbor_bodies.pack_allocate({0, 1, 2}, 100), request)
        allocation = Allocation(frozenset(), frozenset({0, 1, 2}))
        self.assertEqual(gbs_cbor_bodies.unpack_allocation(answer), allocation)
        self.assertEqual(gbs_cbor_bodies.pack_allocation(allocation), answer)

    def test_refused_allocate_requests(self) -> None:
        """What that server refused is refused here."""
        for name in (
            "create list not set",
            "create extra key",
            "create bad cbor",
            "create empty body",
            "create 257 shares",
        ):
            self.assertRaises(ValueError, gbs_cbor_bodies.unpack_allocate, asked(name))
        most = gbs_cbor_bodies.unpack_allocate(asked("create 256 shares"))
        self.assertEqual(most.share_numbers, frozenset(range(256)))

    def test_writes(self) -> None:
        """What is missing, and that nothing is."""
        answer = answered("patch 50-60")
        missing = WriteAnswer(False, ((0, 50), (60, 100)))
        self.assertEqual(gbs_cbor_bodies.unpack_required(answer, False), missing)
        self.assertEqual(gbs_cbor_bodies.pack_required(missing.required), answer)
        answer = answered("patch rest b")
        self.assertEqual(gbs_cbor_bodies.unpack_required(answer, True), WriteAnswer(True))
        self.assertEqual(gbs_cbor_bodies.pack_required(()), answer)

    def test_lists(self) -> None:
        """Share lists, empty and not."""
        answer = answered("list shares none")
        self.assertEqual(gbs_cbor_bodies.unpack_shares(answer), frozenset())
        self.assertEqual(gbs_cbor_bodies.pack_shares(frozenset()), answer)
        answer = answered("list")
        self.assertEqual(gbs_cbor_bodies.unpack_shares(answer), {0})

    def test_complaints(self) -> None:
        """A reason is any text but the empty one."""
        request = asked("corrupt ok")
        self.assertEqual(
            gbs_cbor_bodies.pack_corrupt(gbs_cbor_bodies.unpack_corrupt(request)), request
        )
        self.assertRaises(ValueError, gbs_cbor_bodies.unpack_corrupt, asked("corrupt empty reason"))


class SchemaTests(SynchronousTestCase):
    """Every message has one shape."""

    def test_wrong_shapes_of_allocate(self) -> None:
        """Missing and unknown keys, wrong types and counts are refused."""
        good: dict[Any, Any] = {"share-numbers": {1}, "allocated-size": 10}
        gbs_cbor_bodies.unpack_allocate(cbor2.dumps(good))
        for wrong in (
            {"share-numbers": {1}},
            {**good, "more": 1},
            {**good, b"allocated-size": 10},
            {b"share-numbers": {1}, b"allocated-size": 10},
            {**good, "share-numbers": [1]},
            {**good, "share-numbers": {"1"}},
            {**good, "share-numbers": {-1}},
            {**good, "share-numbers": {True}},
            {**good, "share-numbers": {(1,)}},
            {**good, "share-numbers": {1: 1}},
            {**good, "share-numbers": None},
            {**good, "share-numbers": cbor2.CBORTag(257, [1])},
            {**good, "share-numbers": cbor2.CBORTag(258, 1)},
            {**good, "share-numbers": cbor2.CBORTag(258, {1: 1})},
            {**good, "share-numbers": set(range(257))},
            {**good, "allocated-size": -1},
            {**good, "allocated-size": 1.0},
            {**good, "allocated-size": "10"},
            {**good, "allocated-size": 1 << 64},
            {**good, "allocated-size": True},
            [good],
            {1},
            "good",
            None,
        ):
            with self.assertRaises(ValueError, msg=repr(wrong)):
                gbs_cbor_bodies.unpack_allocate(cbor2.dumps(wrong))

    def test_body_limits(self) -> None:
        """Bodies over the protocol's limits are not parsed."""
        padded = cbor2.dumps({"share-numbers": {1}, "allocated-size": 10})
        self.assertRaises(ValueError, gbs_cbor_bodies.unpack_allocate, padded.ljust(8193, b"\0"))
        self.assertRaises(
            ValueError, gbs_cbor_bodies.unpack_corrupt, cbor2.dumps({"reason": "x" * 32768})
        )

    def test_long_complaints_are_cut(self) -> None:
        """A reason of any length makes a body that servers take; an empty one says something."""
        for reason in ("x" * 100_000, "ä" * 40_000, "\ud800"):
            body = gbs_cbor_bodies.pack_corrupt(reason)
            self.assertLessEqual(len(body), gbs_cbor_bodies.MAX_CORRUPT_BYTES)
            self.assertTrue(gbs_cbor_bodies.unpack_corrupt(body))
        self.assertEqual(
            gbs_cbor_bodies.unpack_corrupt(gbs_cbor_bodies.pack_corrupt("")), "unknown"
        )

    def test_lies_about_writes(self) -> None:
        """Empty or backward ranges, and "complete" with bytes missing, are refused."""
        wrongs: list[Any] = [
            {"required": [{"begin": 5, "end": 5}]},
            {"required": [{"begin": 5, "end": 4}]},
            {"required": [{"begin": 5}]},
            {"required": [[5, 6]]},
            {"required": {5}},
            {"required": [{"begin": i, "end": i + 1} for i in range(0, 20000, 2)]},
            {},
        ]
        for wrong in wrongs:
            with self.assertRaises(ValueError):
                gbs_cbor_bodies.unpack_required(cbor2.dumps(wrong), False)
        missing = gbs_cbor_bodies.pack_required([(0, 5)])
        self.assertRaises(ValueError, gbs_cbor_bodies.unpack_required, missing, True)

    def test_versions_of_other_servers(self) -> None:
        """2^64 means that the space is unknown; keys of a later time are ignored."""
        key = b"http://allmydata.org/tahoe/protocols/storage/v1"
        inner = {
            b"maximum-immutable-share-size": 1 << 64,
            b"maximum-mutable-share-size": 1,
            b"available-space": 1 << 64,
            b"later": True,
        }
        version = gbs_cbor_bodies.unpack_version(
            cbor2.dumps({key: inner, b"application-version": b"x\xff"})
        )
        self.assertIsNone(version.available_bytes)
        wrongs: list[Any] = [{}, {key: 1}, {key: {}}, {key: {**inner, b"available-space": b""}}, 1]
        for wrong in wrongs:
            with self.assertRaises(ValueError):
                gbs_cbor_bodies.unpack_version(cbor2.dumps(wrong))

    def test_a_server_of_a_version_to_come(self) -> None:
        """It is none of ours, which is not the same as talking nonsense."""
        later = {
            b"http://allmydata.org/tahoe/protocols/storage/v9": {},
            b"application-version": b"x",
        }
        with self.assertRaisesRegex(ValueError, "a newer PipeGrid may know them"):
            gbs_cbor_bodies.unpack_version(cbor2.dumps(later))

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(NUMBERS, NUMBERS, UINT, st.text(max_size=100))
    def test_packing_and_unpacking_agree(
        self, some: frozenset[int], others: frozenset[int], size: int, text: str
    ) -> None:
        """Every message comes back from its bytes."""
        request = AllocateRequest(some, size)
        self.assertEqual(
            gbs_cbor_bodies.unpack_allocate(gbs_cbor_bodies.pack_allocate(some, size)), request
        )
        allocation = Allocation(some, others)
        self.assertEqual(
            gbs_cbor_bodies.unpack_allocation(gbs_cbor_bodies.pack_allocation(allocation)),
            allocation,
        )
        self.assertEqual(gbs_cbor_bodies.unpack_shares(gbs_cbor_bodies.pack_shares(some)), some)
        required = tuple((n * 10, n * 10 + 1) for n in sorted(some))
        result = WriteAnswer(False, required)
        self.assertEqual(
            gbs_cbor_bodies.unpack_required(gbs_cbor_bodies.pack_required(required), False), result
        )
        version = ServerVersion(size, size if size < (1 << 64) - 1 else None, text)
        self.assertEqual(
            gbs_cbor_bodies.unpack_version(gbs_cbor_bodies.pack_version(version)), version
        )
