"""
Bundles: one message that stores many small shares on a server, or reads many from a server. They are an
extension of GBS (``docs/reference-bundles.md``).

Messages are CBOR; both ends check them, and raise ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, NamedTuple

import attrs

from pipegrid.core.hashes import STORAGE_INDEX_BYTES, Buffer
from pipegrid.wire import cbor
from pipegrid.wire.gbs_cbor_bodies import MAX_ANSWER_BYTES, MAX_SHARE_NUMBERS
from pipegrid.wire.storage_messages import Allocation, LeaseSecrets, UploadSecrets

OFFER = b"PipeGrid-Bundles"
HEADER = OFFER.lower()
MAX_BUNDLE_BYTES = 1024 * 1024
"""
The maximum length of a bundle. If ten servers share two processors with the client, they wake up a quarter as
often as with 256 KiB, each time with a cold cache: for 1,000 files of 46 kB they take 15 to 30 % less
processor time. 2 MiB gain nothing more.
"""
MAX_UPLOADS = 128
MAX_SHARES = 128
"""The maximum number of shares sent in one bundle: each is an open file until it is durable."""
MAX_NUMBERS = 512
"""Maximum number of shares allocated by one bundle; other clients wait while the files are created."""

_BUNDLE_ITEMS = 1 + 9 * MAX_UPLOADS + MAX_NUMBERS + 2 * MAX_SHARES
_ANSWER_ITEMS = 1 + MAX_UPLOADS * (4 + 2 * MAX_SHARE_NUMBERS) + 2 * MAX_SHARES

_UINT, _BYTES, _ARRAY, _MAP = 0, 2, 4, 5
_UPLOAD_HEAD = cbor.head(_ARRAY, 7)
_STORED = 201
_LEASE_BYTES = cbor.LEASE_SECRET_BYTES
_UPLOADS_A_STEP = 16
_MAX_UPLOAD_SECRET_BYTES = 64


@attrs.frozen
class BundledUpload:
    """
    An allocation on one server, with whole shares. It replaces an allocate request and a write, whose heads
    are longer than a small share.

    Attributes:
        share_numbers: all share numbers to allocate.
        share_bytes: exact length of each share.
        shares: the content of some or all of the shares to allocate, by number.
    """

    storage_index: bytes
    secrets: UploadSecrets
    share_bytes: int
    share_numbers: AbstractSet[int]
    shares: dict[int, bytes]


class BundledAnswer(NamedTuple):
    """
    The outcome of one upload.

    Attributes:
        allocation: the allocation, or the HTTP status with which a separate request would have been rejected;
            then nothing was written.
        statuses: by share number, the HTTP status of the write: 201 if the share is stored.
    """

    allocation: Allocation | int
    statuses: Mapping[int, int]


def upload_bytes(upload: BundledUpload) -> int:
    """Return the approximate length of an upload in a bundle, never less than the exact length."""
    return _upload_bytes(len(upload.share_numbers), len(upload.shares), upload.share_bytes)


def whole_upload_bytes(share_numbers: int, share_bytes: int) -> int:
    """Return the approximate length of an upload with all of its shares, given their number and length."""
    return _upload_bytes(share_numbers, share_numbers, share_bytes)


def _upload_bytes(share_numbers: int, shares: int, share_bytes: int) -> int:
    # Storage index, secrets and their lengths take at most 192 bytes, a share number 9, the length of a share
    # 5.
    return 192 + 9 * share_numbers + shares * (14 + share_bytes)


def pack_bundle(uploads: Sequence[BundledUpload]) -> bytes:
    """Return the CBOR of a bundle, for ``unpack_bundle``."""
    return b"".join(bundle_pieces(uploads))


def bundle_pieces(uploads: Sequence[BundledUpload]) -> list[bytes]:
    """
    Return the CBOR of a bundle in pieces: the shares themselves, which are not copied, and the bytes between
    them.
    """
    between = cbor.head(_ARRAY, len(uploads))
    pieces: list[bytes] = []
    for upload in uploads:
        between += _packed_head(upload)
        for number, data in upload.shares.items():
            pieces += between + cbor.head(_UINT, number) + cbor.head(_BYTES, len(data)), data
            between = b""
    pieces.append(between)
    return pieces


def _packed_head(upload: BundledUpload) -> bytes:
    """Return the encoding of an upload up to its first share."""
    lease, numbers = upload.secrets.lease, sorted(upload.share_numbers)
    secrets = [lease.renew, lease.cancel, upload.secrets.upload]
    fields = cbor.dumps([upload.storage_index, *secrets, upload.share_bytes, numbers])
    return _UPLOAD_HEAD + fields[1:] + cbor.head(_MAP, len(upload.shares))


def unpack_bundle(body: Buffer) -> list[BundledUpload]:
    """Return the uploads in a bundle."""
    uploads: list[BundledUpload] = []
    for _ in unpack_bundle_in_steps(body, uploads):
        pass
    return uploads


def unpack_bundle_in_steps(body: Buffer, uploads: list[BundledUpload]) -> Iterator[None]:
    """
    Append the uploads of a bundle to a list, a few in each step. The last step checks the limits of the whole
    bundle.
    """
    value = cbor.loads(body, MAX_BUNDLE_BYTES, _BUNDLE_ITEMS)
    for item in cbor.expect_list(value, "the bundle", MAX_UPLOADS):
        if not len(uploads) % _UPLOADS_A_STEP:
            yield
        uploads.append(_unpack_upload(item))
    if sum(len(each.shares) for each in uploads) > MAX_SHARES:
        raise ValueError(f"more than {MAX_SHARES} shares are in the bundle")
    if sum(len(each.share_numbers) for each in uploads) > MAX_NUMBERS:
        raise ValueError(f"more than {MAX_NUMBERS} share numbers are in the bundle")
    if len({each.storage_index for each in uploads}) < len(uploads):
        raise ValueError("a storage index is twice in the bundle")


def _unpack_upload(value: Any) -> BundledUpload:
    # The usual form is checked here without function calls: each call takes a hundredth of an upload's time.
    if type(value) is not list or len(value) != 7:
        cbor.expect_fields(value, 7, "an upload")
    index, renew, cancel, upload, size, numbers, shares = value
    if type(upload) is not bytes:
        cbor.expect_bytes(upload, "the upload secret")
    if not (type(renew) is type(cancel) is bytes and len(renew) == len(cancel) == _LEASE_BYTES):
        cbor.expect_lease(renew, cancel)
    if type(index) is not bytes or len(index) != STORAGE_INDEX_BYTES:
        cbor.expect_index(index)
    secrets = UploadSecrets(LeaseSecrets(renew, cancel), upload)
    if not 1 <= len(secrets.upload) <= _MAX_UPLOAD_SECRET_BYTES:
        raise ValueError("the upload secret is empty, or too long")
    share_bytes = cbor.expect_uint(size, "the size of shares")
    share_numbers = _numbers(numbers, "the share numbers")
    if type(shares) is not dict or not shares.keys() <= share_numbers:
        raise ValueError("the shares are not a map, or one is not among the share numbers")
    for number, data in shares.items():
        if type(number) is not int:  # ``True`` equals 1, so the check above accepts it
            cbor.expect_uint(number, "a share's number")
        if type(data) is not bytes or len(data) != share_bytes:
            cbor.expect_sized(data, "a share", share_bytes)
    if shares and not share_bytes:
        raise ValueError("a share is empty")
    return BundledUpload(index, secrets, share_bytes, share_numbers, shares)


def pack_answers(answers: Sequence[BundledAnswer]) -> bytes:
    """Return the body of the response to a bundle."""
    return cbor.head(_ARRAY, len(answers)) + b"".join(map(_packed_answer, answers))


def _packed_answer(answer: BundledAnswer) -> bytes:
    allocation, statuses = answer.allocation, answer.statuses
    if isinstance(allocation, int):
        return cbor.dumps(allocation)
    if len(statuses) == 1 and statuses.keys() == allocation.allocated:
        ((number, status),) = statuses.items()
        if status == _STORED and not allocation.already_have:
            return _packed_stored(number)
    return cbor.dumps([sorted(allocation.already_have), sorted(allocation.allocated), statuses])


@lru_cache(maxsize=MAX_SHARE_NUMBERS)
def _stored(number: int) -> BundledAnswer:
    return BundledAnswer(Allocation(frozenset(), frozenset({number})), {number: _STORED})


@lru_cache(maxsize=MAX_SHARE_NUMBERS)
def _packed_stored(number: int) -> bytes:
    """Return the usual answer to an upload: one share, which is stored."""
    return cbor.dumps([[], [number], {number: _STORED}])


def unpack_answers(body: Buffer, uploads: Sequence[BundledUpload]) -> list[BundledAnswer]:
    """Return the outcomes of the uploads of a bundle, in their order."""
    numbers: list[int] = []
    for upload in uploads:
        if not len(upload.share_numbers) == len(upload.shares) == 1:
            break
        numbers += upload.shares
    else:  # compare with the usual response, which is known
        if body == cbor.head(_ARRAY, len(numbers)) + b"".join(map(_packed_stored, numbers)):
            return [_stored(number) for number in numbers]
    value = cbor.loads(body, MAX_ANSWER_BYTES, _ANSWER_ITEMS)
    answers = cbor.expect_answers(value, len(uploads), "uploads")
    return [_unpack_answer(*pair) for pair in zip(answers, uploads, strict=True)]


def _unpack_answer(value: Any, upload: BundledUpload) -> BundledAnswer:
    if type(value) is int:
        return BundledAnswer(cbor.expect_status(value), {})
    have, allocated, statuses = cbor.expect_fields(value, 3, "an answer")
    if type(statuses) is not dict or statuses.keys() != upload.shares.keys():
        raise ValueError("statuses for other shares than were sent")
    for number, status in statuses.items():
        cbor.expect_uint(number, "a share's number")
        cbor.expect_status(status)
    allocation = Allocation(_numbers(have, "already-have"), _numbers(allocated, "allocated"))
    return BundledAnswer(allocation, statuses)


def _numbers(value: Any, where: str) -> frozenset[int]:
    numbers = cbor.expect_list(value, where, MAX_SHARE_NUMBERS)
    for number in numbers:
        if type(number) is not int or not 0 <= number <= cbor.MAX_UINT:
            cbor.expect_uint(number, where)
    return frozenset(numbers)


# Bundles of reads.

MAX_READS = 64
"""Maximum number of reads in one bundle: each opens a file, during which no other client is served."""
MAX_READ_BYTES = 256 * 1024
"""The maximum number of bytes that one bundle of reads asks for."""
_LEAST_READ_BYTES = 128 * 1024
MAX_READ_BUNDLE_BYTES = 4 * 1024

READ_ANSWER_BYTES = 6
"""The maximum size of one read's item in the response, without the data."""

_READ_BUNDLE_ITEMS = 1 + 4 * MAX_READS
_READS_ANSWER_ITEMS = 1 + MAX_READS
_MAX_READS_ANSWER_BYTES = MAX_READ_BYTES + (1 + MAX_READS) * READ_ANSWER_BYTES


def read_limit_bytes(bundle_bytes: int) -> int:
    """
    Return the maximum number of bytes that a server sends for one read bundle, given the longest bundle that
    it accepts.
    """
    return min(MAX_READ_BYTES, max(_LEAST_READ_BYTES, bundle_bytes // 4))


class BundledRead(NamedTuple):
    """
    A read of the beginning of a share, or of the whole share if it is not longer than ``length``.

    Attributes:
        storage_index: 16 bytes.
        length: 1 to ``MAX_READ_BYTES``.
    """

    storage_index: bytes
    share_number: int
    length: int


def pack_reads(reads: Sequence[BundledRead]) -> bytes:
    """Return a bundle of at most ``MAX_READS`` reads, for at most ``MAX_READ_BYTES`` bytes in total."""
    return cbor.dumps([[each.storage_index, each.share_number, each.length] for each in reads])


def unpack_reads(body: Buffer) -> list[BundledRead]:
    """Return the reads of a bundle."""
    value = cbor.loads(body, MAX_READ_BUNDLE_BYTES, _READ_BUNDLE_ITEMS)
    reads = [_unpack_read(each) for each in cbor.expect_list(value, "the bundle", MAX_READS)]
    if sum(each.length for each in reads) > MAX_READ_BYTES:
        raise ValueError(f"a bundle for more than {MAX_READ_BYTES} bytes")
    return reads


def _unpack_read(value: Any) -> BundledRead:
    index, number, length = cbor.expect_fields(value, 3, "a read")
    cbor.expect_uint(number, "a share's number")
    if not cbor.expect_uint(length, "a read's length", MAX_READ_BYTES):
        raise ValueError("a read of no bytes")
    return BundledRead(cbor.expect_index(index), number, length)


def pack_read_answers(answers: Sequence[bytes | int]) -> bytes:
    """Return the response to a read bundle; a number is the HTTP status with which one read was rejected."""
    return cbor.dumps(list(answers))


def unpack_read_answers(body: Buffer, reads: Sequence[BundledRead]) -> list[bytes | int]:
    """
    Return, for each read of a bundle in order, the bytes or the HTTP status with which the read was rejected.
    """
    value = cbor.loads(body, _MAX_READS_ANSWER_BYTES, _READS_ANSWER_ITEMS)
    answers = cbor.expect_answers(value, len(reads), "reads")
    for answer, read in zip(answers, reads, strict=True):
        if type(answer) is int:
            cbor.expect_status(answer)
        elif len(cbor.expect_bytes(answer, "a read")) > read.length:
            raise ValueError("a read has more bytes than were asked for")
    return answers
