# mypy: ignore-errors
# ruff: noqa: B008
# Foolscap declares methods without self, and types of arguments as their defaults.
"""
The remote interfaces of a storage server, its writers and its readers. Importing this module imports
Foolscap, which is slow.

Source: how Tahoe-LAFS 1.20 behaves; names as in Tahoe-LAFS 1.20.0.
"""

from collections.abc import Sequence
from typing import Any

from foolscap.constraint import Any as AnyValue
from foolscap.constraint import ByteStringConstraint, IntegerConstraint
from foolscap.referenceable import Referenceable
from foolscap.remoteinterface import RemoteInterface
from foolscap.schema import ChoiceOf, DictOf, ListOf, SetOf, TupleOf

from pipegrid.wire import gbs_cbor_bodies
from pipegrid.wire.banana_receiver import ANSWER_COST, TOKEN_COST, AllocatedAnswers
from pipegrid.wire.storage_messages import (
    MAX_FOOLSCAP_WRITES,
    MAX_SMALL_WRITES,
    UNKNOWN_PROTOCOL,
    ServerVersion,
)

MAX_SHARES = 256
MAX_READS = 4096
"""The maximum number of reads in one message, and of tests of one share."""
MAX_SHARE_DATA_BYTES = 128 << 20
"""
The maximum of share data in one message, as over HTTPS; the protocol itself has no limit. Tahoe-LAFS sends a
whole mutable share in one message; at 3-of-10, the file may be three times as large as this limit.
"""
MAX_REASON_BYTES = 32 * 1024
MAX_READ_BYTES = (1 << 31) - 1

PROTOCOL = gbs_cbor_bodies.PROTOCOL
_REFERENCE_COST = 2048  # a reference is seven tokens, a name and a fURL
_OLD_MAX_SHARE_BYTES = (1 << 32) - 1
"""The assumed size of the largest share, for servers that are too old to report one."""

Hash = ByteStringConstraint(minLength=32, maxLength=32)
StorageIndex = ByteStringConstraint(maxLength=16)
ShareNumber = IntegerConstraint(maxBytes=8)
Offset = IntegerConstraint(maxBytes=8)
ReadSize = IntegerConstraint(maxBytes=-1)  # -1 declares a signed 32-bit integer
ShareData = ByteStringConstraint(maxLength=MAX_SHARE_DATA_BYTES)
Reason = ByteStringConstraint(maxLength=MAX_REASON_BYTES)
ReadVector = ListOf(TupleOf(Offset, ReadSize), maxLength=MAX_READS)
TestVector = ListOf(
    TupleOf(Offset, ReadSize, ByteStringConstraint(maxLength=16), ShareData), maxLength=MAX_READS
)
WriteVector = ListOf(TupleOf(Offset, ShareData), maxLength=MAX_FOOLSCAP_WRITES + MAX_SMALL_WRITES)
TestAndWriteVectors = DictOf(
    ShareNumber, TupleOf(TestVector, WriteVector, ChoiceOf(None, Offset)), maxKeys=MAX_SHARES
)
ReadData = DictOf(ShareNumber, ListOf(ShareData, maxLength=MAX_READS), maxKeys=MAX_SHARES)


class RIBucketWriter(RemoteInterface):
    """An incomplete share. Bytes that were never written are zeros."""

    def write(offset=Offset, data=ShareData):
        """Write bytes at an offset of the share."""
        return

    def close():
        """Make the share complete and visible."""
        return

    def abort():
        """Give up the upload; remove what was written of the share."""
        return


class RIBucketReader(RemoteInterface):
    """A complete share, for reading."""

    def read(offset=Offset, length=ReadSize):
        """Read bytes of the share; fewer, or none, if the share ends earlier."""
        return ShareData

    def advise_corrupt_share(reason=Reason):
        """Report to the operator that the share is corrupt."""
        return


class RIStorageServer(RemoteInterface):
    """A storage server: immutable shares, slots of mutable shares, and leases."""

    __remote_name__ = "RIStorageServer.tahoe.allmydata.com"

    def get_version():
        """Return what the server supports."""
        return DictOf(ByteStringConstraint(maxLength=1000), AnyValue())

    def allocate_buckets(
        storage_index=StorageIndex,
        renew_secret=Hash,
        cancel_secret=Hash,
        sharenums=SetOf(ShareNumber, maxLength=MAX_SHARES),
        allocated_size=Offset,
        canary=Referenceable,
    ):
        """Return the shares that exist, and a writer for each share that may be written."""
        return TupleOf(
            SetOf(ShareNumber, maxLength=MAX_SHARES),
            DictOf(ShareNumber, RIBucketWriter, maxKeys=MAX_SHARES),
        )

    def add_lease(storage_index=StorageIndex, renew_secret=Hash, cancel_secret=Hash):
        """Add or renew a lease on each share of a storage index; it is no error if there are no shares."""
        return

    def get_buckets(storage_index=StorageIndex):
        """Return a reader for each complete share."""
        return DictOf(ShareNumber, RIBucketReader, maxKeys=MAX_SHARES)

    def slot_readv(
        storage_index=StorageIndex,
        shares=ListOf(ShareNumber, maxLength=MAX_SHARES),
        readv=ReadVector,
    ):
        """Read from mutable shares; an empty list of numbers means all."""
        return ReadData

    def slot_testv_and_readv_and_writev(
        storage_index=StorageIndex,
        secrets=TupleOf(Hash, Hash, Hash),
        tw_vectors=TestAndWriteVectors,
        r_vector=ReadVector,
    ):
        """Read, test and write mutable shares atomically."""
        return TupleOf(bool, ReadData)

    def advise_corrupt_share(
        share_type=ByteStringConstraint(maxLength=16),
        storage_index=StorageIndex,
        shnum=ShareNumber,
        reason=Reason,
    ):
        """Report to the operator that a share is corrupt."""
        return


ALLOCATED = AllocatedAnswers(
    RIStorageServer["allocate_buckets"].getResponseConstraint(), RIBucketWriter.__remote_name__
)
"""The answers to ``allocate_buckets``, which can be parsed in one piece."""


def answer_cost(method: str, arguments: tuple[Any, ...]) -> int:
    """
    Return how much memory a server's answer may take, for ``wire.banana_receiver.Bounds``.

    Args:
        arguments: the arguments of the call, in order.
    """
    if method in ("get_buckets", "allocate_buckets"):
        return ANSWER_COST + MAX_SHARES * _REFERENCE_COST
    if method == "read" and len(arguments) == 2:
        return ANSWER_COST + int(arguments[1])
    if method == "slot_readv" and len(arguments) == 3:
        return _vectors_cost(len(arguments[1]) or MAX_SHARES, arguments[2])
    if method == "slot_testv_and_readv_and_writev" and len(arguments) == 4:
        return _vectors_cost(MAX_SHARES, arguments[3])
    return ANSWER_COST


def _vectors_cost(shares: int, reads: Sequence[tuple[int, int]]) -> int:
    each = sum(min(size, MAX_SHARE_DATA_BYTES) for _, size in reads)
    data = min(shares * each, 2 * MAX_SHARE_DATA_BYTES)
    return ANSWER_COST + data + shares * (len(reads) + 4) * TOKEN_COST


def pack_version(version: ServerVersion) -> dict[bytes, Any]:
    """Return the answer to ``get_version``."""
    return {
        PROTOCOL: {
            **gbs_cbor_bodies.sizes(version),
            b"tolerates-immutable-read-overrun": True,
            b"delete-mutable-shares-with-zero-length-writev": True,
            b"fills-holes-with-zero-bytes": True,
            b"prevents-read-past-end-of-share-data": True,
        },
        gbs_cbor_bodies.APPLICATION: version.application.encode("utf-8"),
    }


def unpack_version(answer: dict[bytes, Any]) -> ServerVersion:
    """
    Parse the answer to ``get_version``. Missing sizes get the values of old servers.

    Raises:
        ValueError: the answer is malformed.
    """
    if type(answer) is dict and PROTOCOL not in answer:
        raise ValueError(UNKNOWN_PROTOCOL)
    inner = answer.get(PROTOCOL)
    application = answer.get(gbs_cbor_bodies.APPLICATION, b"unknown")
    if type(inner) is not dict or type(application) is not bytes:
        raise ValueError("something that is not a map of the storage protocol")
    largest = inner.get(gbs_cbor_bodies.IMMUTABLE_SIZE, _OLD_MAX_SHARE_BYTES)
    space = inner.get(gbs_cbor_bodies.SPACE, gbs_cbor_bodies.UNKNOWN_SPACE)
    if type(largest) is not int or type(space) is not int or largest < 0 or space < 0:
        raise ValueError("a size that is not a number")
    return ServerVersion(
        largest,
        None if space >= gbs_cbor_bodies.UNKNOWN_SPACE else space,
        application.decode("utf-8", "replace"),
    )
