"""
The bodies of read-test-write requests and their answers, over GBS.

Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from pipegrid.core.hashes import Buffer
from pipegrid.wire import cbor
from pipegrid.wire.gbs_cbor_bodies import MAX_SHARE_NUMBERS
from pipegrid.wire.storage_messages import (
    BLOCK_WRITE_BYTES,
    MAX_BLOCK_WRITES,
    MAX_SHARE_TESTS,
    MAX_SMALL_WRITES,
    ShareChange,
    SlotResult,
)

MAX_REQUEST_BYTES = 1 << 48
"""
The maximum length of a request, in effect no limit but the space on the server's disk: Tahoe-LAFS's client
writes a whole share in one request, 350 MB for a file of 1 GB at k = 3.
"""
MAX_MEMORY_BYTES = 32 << 20
"""
The longest request that is held in memory. The data to write are views of the request, except strings below 4
KiB, which are copied and counted. The byte strings of a longer request are written to the disk as they
arrive.
"""
MAX_READS = 30

_SHARE_ITEMS = 9 + 7 * MAX_SHARE_TESTS + 5 * MAX_SMALL_WRITES
MAX_SMALL_ITEMS = 10 + _SHARE_ITEMS * MAX_SHARE_NUMBERS + 5 * MAX_READS
"""Maximum number of items in a request without blocks: all shares, each with all tests and small writes."""
MAX_REQUEST_ITEMS = MAX_SMALL_ITEMS + 5 * MAX_BLOCK_WRITES
ITEM_BYTES = 80
"""The memory in bytes that each item takes, without its content; 51 to 79 were measured."""
MAX_ANSWER_ITEMS = 5 + (2 + MAX_READS) * MAX_SHARE_NUMBERS

_COPIED_BYTES = 4096
_VECTORS_A_STEP = 64

_CHANGES = "test-write-vectors"
_READS = "read-vector"
_REQUEST_KEYS = frozenset({_CHANGES, _READS})
_CHANGE_KEYS = frozenset({"test", "write", "new-length"})
_TEST_KEYS = frozenset({"offset", "size", "specimen"})
_WRITE_KEYS = frozenset({"offset", "data"})
_READ_KEYS = frozenset({"offset", "size"})
_ANSWER_KEYS = frozenset({"success", "data"})


class ReadTestWrite(NamedTuple):
    """
    The body of a read-test-write request.

    Attributes:
        changes: by share number, at most 256.
        reads: ``(offset, size)``, at most 30.
    """

    changes: dict[int, ShareChange]
    reads: tuple[tuple[int, int], ...]


def most_items(length: int) -> int:
    """
    Return how many items a request of this length may have: only blocks, which take bytes, permit more items.
    """
    return min(MAX_REQUEST_ITEMS, MAX_SMALL_ITEMS + 5 * (length // BLOCK_WRITE_BYTES))


def pack_request(changes: Mapping[int, ShareChange], reads: Sequence[tuple[int, int]]) -> bytes:
    """Return the body of a read-test-write request."""
    return b"".join(pack_request_in_pieces(changes, reads))


def pack_request_in_pieces(
    changes: Mapping[int, ShareChange], reads: Sequence[tuple[int, int]]
) -> list[Buffer]:
    """Return the body of a read-test-write request in pieces; long data to write are not copied."""
    packed: list[Buffer] = []
    small: list[bytes] = [cbor.head(5, 2), cbor.dumps(_CHANGES), cbor.head(5, len(changes))]
    for number, change in changes.items():
        small += [cbor.dumps(number), cbor.head(5, 3), cbor.dumps("test")]
        names = ("offset", "size", "specimen")
        small.append(cbor.dumps([dict(zip(names, test, strict=True)) for test in change.tests]))
        small += [cbor.dumps("write"), cbor.head(4, len(change.writes))]
        for offset, data in change.writes:
            small += [cbor.head(5, 2), cbor.dumps("offset"), cbor.dumps(offset)]
            small += [cbor.dumps("data"), cbor.head(2, len(data))]
            if len(data) > _COPIED_BYTES:
                packed += [b"".join(small), data]
                small = []
            else:
                small.append(bytes(data))
        small += [cbor.dumps("new-length"), cbor.dumps(change.new_length)]
    small += [
        cbor.dumps(_READS),
        cbor.dumps([{"offset": offset, "size": size} for offset, size in reads]),
    ]
    packed.append(b"".join(small))
    return packed


def unpack_request_in_steps(body: Buffer) -> Generator[int, None, ReadTestWrite]:
    """
    Parse a request in steps.

    Each step yields the bytes of memory that it takes, the first step before anything is decoded. For 100,000
    items, the first two steps take some tens of milliseconds, the others a millisecond or two.

    Args:
        body: must not change as long as the result is used: long specimens and data are views of the body.
    """
    items, copied, build = cbor.scan_views(body, MAX_MEMORY_BYTES, most_items(len(body)))
    cost = items * ITEM_BYTES + 2 * copied
    yield cost
    return (yield from _unpack(build(), cost))


def receive_request(keep: Callable[[Buffer], None]) -> cbor.ReceivedMessage:
    """
    Return a parser for a request that arrives in pieces.

    Args:
        keep: called with the bytes of the request's large byte strings, consecutively.
    """
    return cbor.ReceivedMessage(keep, most_items)


def cost_of(message: cbor.ReceivedMessage) -> int:
    """Return how much memory the received part of a request takes."""
    return message.items * ITEM_BYTES + message.cost_bytes


def unpack_received(
    message: cbor.ReceivedMessage, part: Callable[[int, int], Any]
) -> ReadTestWrite:
    """
    Parse a request that arrived in pieces. This may take seconds: call it in a worker thread.

    Args:
        part: returns the value of a large byte string, given its begin and end in the bytes given to
            ``keep``.

    Raises:
        ValueError: the request is malformed.
    """
    message.finish()
    built = message.build(part)
    found: list[ReadTestWrite] = []

    def unpack() -> Generator[int, None, None]:
        found.append((yield from _unpack(built, 0)))

    for _ in unpack():
        pass
    return found[0]


def _unpack(built: Any, cost: int) -> Generator[int, None, ReadTestWrite]:
    message = cbor.expect_map(built, _REQUEST_KEYS, "the request")
    changes = message[_CHANGES]
    if type(changes) is not dict or len(changes) > MAX_SHARE_NUMBERS:
        raise ValueError(f"{_CHANGES} is not a map of at most {MAX_SHARE_NUMBERS} shares")
    reads = []
    for item in cbor.expect_list(message[_READS], _READS, MAX_READS):
        read = cbor.expect_map(item, _READ_KEYS, "a read")
        reads.append(
            (cbor.expect_uint(read["offset"], "offset"), cbor.expect_uint(read["size"], "size"))
        )
    unpacked: dict[int, ShareChange] = {}
    for number, value in changes.items():
        yield cost
        change = yield from _unpack_change(value, cost)
        unpacked[_expect_number(number)] = change
    return ReadTestWrite(unpacked, tuple(reads))


def pack_answer(result: SlotResult) -> bytes:
    """Return the CBOR of the answer to a read-test-write request."""
    data = {number: list(pieces) for number, pieces in result.data.items()}
    return cbor.dumps({"success": result.success, "data": data})


def pack_answer_in_pieces(result: SlotResult) -> list[bytes]:
    """Return the CBOR of the answer in pieces, so that data read from long shares is in memory only once."""
    head = cbor.dumps({"success": result.success})
    pieces = [b"\xa2", head[1:], cbor.dumps("data"), cbor.head(5, len(result.data))]
    for number, read in result.data.items():
        pieces.append(cbor.dumps(number) + cbor.head(4, len(read)))
        for data in read:
            pieces.append(cbor.head(2, len(data)))
            pieces.append(data)
    return pieces


def unpack_answer(body: Buffer, limit_bytes: int) -> SlotResult:
    """
    Parse the answer to a read-test-write request.

    Args:
        limit_bytes: the length of the longest possible answer to the request.
    """
    message = cbor.expect_map(
        cbor.loads(body, limit_bytes, MAX_ANSWER_ITEMS), _ANSWER_KEYS, "the answer"
    )
    success, data = message["success"], message["data"]
    if type(success) is not bool:
        raise ValueError("success is neither true nor false")
    if type(data) is not dict or len(data) > MAX_SHARE_NUMBERS:
        raise ValueError(f"data is not a map of at most {MAX_SHARE_NUMBERS} shares")
    unpacked = {}
    for number, pieces in data.items():
        listed = cbor.expect_list(pieces, "data", MAX_READS)
        unpacked[_expect_number(number)] = tuple(cbor.expect_bytes(each, "data") for each in listed)
    return SlotResult(success, unpacked)


def _expect_number(value: Any) -> int:
    return cbor.expect_uint(value, "a share number", MAX_SHARE_NUMBERS - 1)


def _unpack_change(value: Any, cost: int) -> Generator[int, None, ShareChange]:
    change = cbor.expect_map(value, _CHANGE_KEYS, "a share's test and write vectors")
    tests, writes = [], []
    for item in cbor.expect_list(change["test"], "test", MAX_SHARE_TESTS):
        test = cbor.expect_map(item, _TEST_KEYS, "a test")
        specimen = cbor.expect_view(test["specimen"], "specimen")
        offset = cbor.expect_uint(test["offset"], "offset")
        tests.append((offset, cbor.expect_uint(test["size"], "size"), specimen))
    for item in cbor.expect_list(change["write"], "write", None):
        write = cbor.expect_map(item, _WRITE_KEYS, "a write")
        data = cbor.expect_view(write["data"], "data")
        writes.append((cbor.expect_uint(write["offset"], "offset"), data))
        if not len(writes) % _VECTORS_A_STEP:
            yield cost
    new_length = change["new-length"]
    if new_length is not None:
        new_length = cbor.expect_uint(new_length, "new-length")
    return ShareChange(tuple(tests), tuple(writes), new_length)
