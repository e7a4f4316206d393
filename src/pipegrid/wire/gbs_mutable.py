"""
The bodies of read-test-write requests and their answers; see ``gbs`` for those of everything else.

Source: the format reference, storage protocols, section 1.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pipegrid.core.hashes import Buffer
from pipegrid.wire import cbor
from pipegrid.wire.gbs import MAX_SHARE_NUMBERS
from pipegrid.wire.messages import ShareChange, SlotResult

MAX_REQUEST_BYTES = 256 << 20
"""The protocol allows 2^48. But a request is held in memory, and for a moment three times."""
MAX_TESTS = 30
MAX_READS = 30

_CHANGES = "test-write-vectors"
_READS = "read-vector"
_REQUEST_KEYS = frozenset({_CHANGES, _READS})
_CHANGE_KEYS = frozenset({"test", "write", "new-length"})
_TEST_KEYS = frozenset({"offset", "size", "specimen"})
_WRITE_KEYS = frozenset({"offset", "data"})
_READ_KEYS = frozenset({"offset", "size"})
_ANSWER_KEYS = frozenset({"success", "data"})


@attrs.frozen
class ReadTestWrite:
    """
    The body of a read-test-write request.

    Attributes:
        changes: by share number, at most 256.
        reads: ``(offset, size)``, at most 30.
    """

    changes: dict[int, ShareChange]
    reads: tuple[tuple[int, int], ...]


def pack_request(changes: Mapping[int, ShareChange], reads: Sequence[tuple[int, int]]) -> bytes:
    """Return the body of a request."""
    return cbor.dumps(
        {
            _CHANGES: {number: _pack_change(change) for number, change in changes.items()},
            _READS: [{"offset": offset, "size": size} for offset, size in reads],
        }
    )


def unpack_request(body: Buffer) -> ReadTestWrite:
    """Return what a request asks for."""
    message = cbor.expect_map(cbor.loads(body, MAX_REQUEST_BYTES), _REQUEST_KEYS, "the request")
    changes = message[_CHANGES]
    if type(changes) is not dict or len(changes) > MAX_SHARE_NUMBERS:
        raise ValueError(f"{_CHANGES} is no map of at most {MAX_SHARE_NUMBERS} shares")
    reads = []
    for item in cbor.expect_list(message[_READS], _READS, MAX_READS):
        read = cbor.expect_map(item, _READ_KEYS, "a read")
        reads.append(
            (cbor.expect_uint(read["offset"], "offset"), cbor.expect_uint(read["size"], "size"))
        )
    return ReadTestWrite(
        {_expect_number(number): _unpack_change(change) for number, change in changes.items()},
        tuple(reads),
    )


def pack_answer(result: SlotResult) -> bytes:
    """Return the answer."""
    data = {number: list(pieces) for number, pieces in result.data.items()}
    return cbor.dumps({"success": result.success, "data": data})


def unpack_answer(body: Buffer, limit_bytes: int) -> SlotResult:
    """
    Return what a server answered.

    Args:
        limit_bytes: what may come, given what was asked for.
    """
    message = cbor.expect_map(cbor.loads(body, limit_bytes), _ANSWER_KEYS, "the answer")
    success, data = message["success"], message["data"]
    if type(success) is not bool:
        raise ValueError("success is neither true nor false")
    if type(data) is not dict or len(data) > MAX_SHARE_NUMBERS:
        raise ValueError(f"data is no map of at most {MAX_SHARE_NUMBERS} shares")
    return SlotResult(
        success,
        {
            _expect_number(number): tuple(
                cbor.expect_bytes(piece, "data")
                for piece in cbor.expect_list(pieces, "data", MAX_READS)
            )
            for number, pieces in data.items()
        },
    )


def _expect_number(value: Any) -> int:
    return cbor.expect_uint(value, "a share number", MAX_SHARE_NUMBERS - 1)


def _pack_change(change: ShareChange) -> dict[str, Any]:
    return {
        "test": [
            {"offset": offset, "size": size, "specimen": specimen}
            for offset, size, specimen in change.tests
        ],
        "write": [{"offset": offset, "data": data} for offset, data in change.writes],
        "new-length": change.new_length,
    }


def _unpack_change(value: Any) -> ShareChange:
    change = cbor.expect_map(value, _CHANGE_KEYS, "a share's test and write vectors")
    tests, writes = [], []
    for item in cbor.expect_list(change["test"], "test", MAX_TESTS):
        test = cbor.expect_map(item, _TEST_KEYS, "a test")
        specimen = cbor.expect_bytes(test["specimen"], "specimen")
        offset = cbor.expect_uint(test["offset"], "offset")
        tests.append((offset, cbor.expect_uint(test["size"], "size"), specimen))
    for item in cbor.expect_list(change["write"], "write", None):
        write = cbor.expect_map(item, _WRITE_KEYS, "a write")
        data = cbor.expect_bytes(write["data"], "data")
        writes.append((cbor.expect_uint(write["offset"], "offset"), data))
    new_length = change["new-length"]
    if new_length is not None:
        new_length = cbor.expect_uint(new_length, "new-length")
    return ShareChange(tuple(tests), tuple(writes), new_length)
