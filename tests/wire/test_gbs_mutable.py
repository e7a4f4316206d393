"""Read-test-write messages: what is packed comes back, and nothing else does."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import cbor, gbs_mutable
from pipegrid.wire.storage_messages import ShareChange, SlotResult
from tests.wire.unpacking import unpack_request

UINTS = st.integers(0, (1 << 64) - 1)
CHANGES = st.builds(
    ShareChange,
    st.lists(st.tuples(UINTS, UINTS, st.binary(max_size=20)), max_size=4).map(tuple),
    st.lists(st.tuples(UINTS, st.binary(max_size=20)), max_size=4).map(tuple),
    st.none() | UINTS,
)


def request(**changes: Any) -> dict[str, Any]:
    """Return a good request, but for the changes to its only share."""
    share = {"test": [], "write": [], "new-length": None, **changes}
    return {"test-write-vectors": {0: share}, "read-vector": []}


class RequestTests(SynchronousTestCase):
    """Requests and answers."""

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(
        st.dictionaries(st.integers(0, 255), CHANGES, max_size=4),
        st.lists(st.tuples(UINTS, UINTS), max_size=30),
    )
    def test_requests_come_back(
        self, changes: dict[int, ShareChange], reads: list[tuple[int, int]]
    ) -> None:
        """Unpacking gives what was packed."""
        unpacked = unpack_request(gbs_mutable.pack_request(changes, reads))
        self.assertEqual(unpacked, gbs_mutable.ReadTestWrite(changes, tuple(reads)))

    def test_answers_come_back(self) -> None:
        """Unpacking gives what was packed; other shapes and longer answers are refused."""
        result = SlotResult(True, {0: (b"a", b""), 7: ()})
        body = gbs_mutable.pack_answer(result)
        self.assertEqual(gbs_mutable.unpack_answer(body, 1000), result)
        self.assertRaises(ValueError, gbs_mutable.unpack_answer, body, len(body) - 1)
        for wrong in (
            {},
            {"success": 1, "data": {}},
            {"success": True, "data": []},
            {"success": True, "data": {"0": []}},
            {"success": True, "data": {256: []}},
            {"success": True, "data": {0: "a"}},
            {"success": True, "data": {0: ["a"]}},
            {"success": True, "data": {0: [b""] * 31}},
        ):
            body = cbor.dumps(wrong)
            self.assertRaises(ValueError, gbs_mutable.unpack_answer, body, 1000)

    def test_wrong_requests(self) -> None:
        """Missing and extra keys, wrong types, and more items than allowed are refused."""
        test = {"offset": 0, "size": 1, "specimen": b""}
        write = {"offset": 0, "data": b""}
        read = {"offset": 0, "size": 1}
        good = request(test=[test] * 30, write=[write] * 100)
        unpack_request(cbor.dumps({**good, "read-vector": [read] * 30}))
        share = good["test-write-vectors"][0]
        wrong: list[Any] = [
            {},
            {**good, "more": 1},
            {**good, "read-vector": [read] * 31},
            {**good, "read-vector": [{"offset": 0}]},
            {**good, "read-vector": [{"offset": -1, "size": 1}]},
            {**good, "read-vector": [{"offset": 0, "size": 1 << 64}]},
            {**good, "test-write-vectors": []},
            {**good, "test-write-vectors": {256: share}},
            {**good, "test-write-vectors": {"0": share}},
            {**good, "test-write-vectors": {True: share}},
            request(test=[test] * 31),
            request(test=[{**test, "specimen": "text"}]),
            request(test=[{**test, "operator": "eq"}]),
            request(test=None),
            request(write=[{"offset": 0}]),
            request(write=[{**write, "data": "text"}]),
            request(write=[{**write, "offset": 1.0}]),
            request(more=1),
        ]
        wrong += [request(**{"new-length": value}) for value in (-1, "1", True, 1 << 64)]
        for message in wrong:
            body = cbor.dumps(message)
            self.assertRaises(ValueError, unpack_request, body)
