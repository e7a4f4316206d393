# mypy: ignore-errors
# ruff: noqa: B008
# Foolscap's way to declare: no self, and what an argument may be as its default.
"""
What is said over Foolscap: the remote interfaces of a storage server, of its writers and its readers.

Foolscap knows an interface by its name, the same on both ends, and holds every argument and every answer to
what is declared here: shapes that do not fit never reach our code. Importing this module imports Foolscap,
which takes its time; import it where Foolscap is really spoken.

``write``s carry as many bytes as the client likes, and so do a slot's: the protocol has no limit. Ours is
what HTTPS takes: no client writes more than some 2 MB of an immutable share at a time, but Tahoe-LAFS's
sends a whole mutable share in one message.

Source: the format reference, storage protocols, sections 2.2 and 2.3; the names of writers and readers are
those that a server of Tahoe-LAFS 1.20.0 gives them.
"""

from collections.abc import Sequence
from typing import Any

from foolscap.constraint import Any as AnyValue
from foolscap.constraint import ByteStringConstraint, IntegerConstraint
from foolscap.referenceable import Referenceable
from foolscap.remoteinterface import RemoteInterface
from foolscap.schema import ChoiceOf, DictOf, ListOf, SetOf, TupleOf

from pipegrid.wire import gbs_messages
from pipegrid.wire.foolscap_receiver import ANSWER_COST, TOKEN_COST, AllocatedAnswers
from pipegrid.wire.messages import (
    MAX_BLOCK_WRITES,
    MAX_SMALL_WRITES,
    UNKNOWN_PROTOCOL,
    ServerVersion,
)

MAX_SHARES = 256
MAX_READS = 4096
"""Reads of one message, or tests of one share."""
MAX_SHARE_DATA_BYTES = 128 << 20
"""Of one message; a mutable file of three times as much has such shares at 3-of-10."""
MAX_REASON_BYTES = 32 * 1024
MAX_READ_BYTES = (1 << 31) - 1

PROTOCOL = gbs_messages.PROTOCOL
_REFERENCE_COST = 2048  # seven tokens, a name and a fURL
_OLD_MAX_SHARE_BYTES = (1 << 32) - 1
"""What servers take that are too old to say it."""

Hash = ByteStringConstraint(minLength=32, maxLength=32)
StorageIndex = ByteStringConstraint(maxLength=16)
ShareNumber = IntegerConstraint(maxBytes=8)
Offset = IntegerConstraint(maxBytes=8)
ReadSize = IntegerConstraint(maxBytes=-1)  # Foolscap's way to say: signed, 32 bits
ShareData = ByteStringConstraint(maxLength=MAX_SHARE_DATA_BYTES)
Reason = ByteStringConstraint(maxLength=MAX_REASON_BYTES)
ReadVector = ListOf(TupleOf(Offset, ReadSize), maxLength=MAX_READS)
TestVector = ListOf(
    TupleOf(Offset, ReadSize, ByteStringConstraint(maxLength=16), ShareData), maxLength=MAX_READS
)
WriteVector = ListOf(TupleOf(Offset, ShareData), maxLength=MAX_BLOCK_WRITES + MAX_SMALL_WRITES)
TestAndWriteVectors = DictOf(
    ShareNumber, TupleOf(TestVector, WriteVector, ChoiceOf(None, Offset)), maxKeys=MAX_SHARES
)
ReadData = DictOf(ShareNumber, ListOf(ShareData, maxLength=MAX_READS), maxKeys=MAX_SHARES)


class RIBucketWriter(RemoteInterface):
    """One share that is being written. Bytes never written are zeros."""

    def write(offset=Offset, data=ShareData):
        """Write bytes at an offset of the share."""
        return

    def close():
        """Make the share complete and visible."""
        return

    def abort():
        """Give the upload up; what was written of the share is removed."""
        return


class RIBucketReader(RemoteInterface):
    """One complete share, to be read or to be called corrupt."""

    def read(offset=Offset, length=ReadSize):
        """Read bytes; fewer, or none, past the end."""
        return ShareData

    def advise_corrupt_share(reason=Reason):
        """Tell the operator that the share looked corrupt."""
        return


class RIStorageServer(RemoteInterface):
    """What a storage server offers its clients: immutable shares, slots of mutable ones, leases."""

    __remote_name__ = "RIStorageServer.tahoe.allmydata.com"

    def get_version():
        """Say what the server can do."""
        return DictOf(ByteStringConstraint(maxLength=1000), AnyValue())

    def allocate_buckets(
        storage_index=StorageIndex,
        renew_secret=Hash,
        cancel_secret=Hash,
        sharenums=SetOf(ShareNumber, maxLength=MAX_SHARES),
        allocated_size=Offset,
        canary=Referenceable,
    ):
        """Answer with the shares that are there, and a writer for each that may be written."""
        return TupleOf(
            SetOf(ShareNumber, maxLength=MAX_SHARES),
            DictOf(ShareNumber, RIBucketWriter, maxKeys=MAX_SHARES),
        )

    def add_lease(storage_index=StorageIndex, renew_secret=Hash, cancel_secret=Hash):
        """Add or renew a lease on all shares of an index, of which there may be none."""
        return

    def get_buckets(storage_index=StorageIndex):
        """Answer with a reader for each complete share."""
        return DictOf(ShareNumber, RIBucketReader, maxKeys=MAX_SHARES)

    def slot_readv(
        storage_index=StorageIndex,
        shares=ListOf(ShareNumber, maxLength=MAX_SHARES),
        readv=ReadVector,
    ):
        """Read from mutable shares; no numbers mean all."""
        return ReadData

    def slot_testv_and_readv_and_writev(
        storage_index=StorageIndex,
        secrets=TupleOf(Hash, Hash, Hash),
        tw_vectors=TestAndWriteVectors,
        r_vector=ReadVector,
    ):
        """Read, test and write mutable shares in one step."""
        return TupleOf(bool, ReadData)

    def advise_corrupt_share(
        share_type=ByteStringConstraint(maxLength=16),
        storage_index=StorageIndex,
        shnum=ShareNumber,
        reason=Reason,
    ):
        """Tell the operator that a share looked corrupt."""
        return


ALLOCATED = AllocatedAnswers(
    RIStorageServer["allocate_buckets"].getResponseConstraint(), RIBucketWriter.__remote_name__
)
"""What is recognized as a whole where it comes."""


def answer_cost(method: str, arguments: tuple[Any, ...]) -> int:
    """
    Return how much memory a server's answer may take, for ``wire.foolscap_receiver.Bounds``.

    Args:
        arguments: of the call, in order.
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
            **gbs_messages.sizes(version),
            b"tolerates-immutable-read-overrun": True,
            b"delete-mutable-shares-with-zero-length-writev": True,
            b"fills-holes-with-zero-bytes": True,
            b"prevents-read-past-end-of-share-data": True,
        },
        gbs_messages.APPLICATION: version.application.encode("utf-8"),
    }


def unpack_version(answer: dict[bytes, Any]) -> ServerVersion:
    """
    Return what the answer to ``get_version`` says. Sizes that are missing are as of old.

    Raises:
        ValueError: it is something else.
    """
    if type(answer) is dict and PROTOCOL not in answer:
        raise ValueError(UNKNOWN_PROTOCOL)
    inner = answer.get(PROTOCOL)
    application = answer.get(gbs_messages.APPLICATION, b"unknown")
    if type(inner) is not dict or type(application) is not bytes:
        raise ValueError("something that is not a map of the storage protocol")
    largest = inner.get(gbs_messages.IMMUTABLE_SIZE, _OLD_MAX_SHARE_BYTES)
    space = inner.get(gbs_messages.SPACE, gbs_messages.UNKNOWN_SPACE)
    if type(largest) is not int or type(space) is not int or largest < 0 or space < 0:
        raise ValueError("a size that is not a number")
    return ServerVersion(
        largest,
        None if space >= gbs_messages.UNKNOWN_SPACE else space,
        application.decode("utf-8", "replace"),
    )
