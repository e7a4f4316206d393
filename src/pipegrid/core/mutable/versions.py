"""
Versions of a mutable file: their sizes, their order, and the choice of the version to read.

Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves; ``dirnodes.rst``.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Hashable, Iterable
from functools import total_ordering
from typing import NamedTuple

import attrs

from pipegrid.argument_checks import check_whole
from pipegrid.core.caps import MutableCap
from pipegrid.core.encoding_parameters import round_up
from pipegrid.core.hash_tree import num_nodes, padded_leaves
from pipegrid.core.hashes import HASH_BYTES, Buffer
from pipegrid.core.layout import CHAIN_ENTRY_BYTES
from pipegrid.errors import UsageError

MDMF_SEGMENT_BYTES = 1 << 17
"""The segment size that all writers of MDMF use, after rounding it up to a multiple of k."""

SMALL_SEGMENT_BYTES = 1 << 12
MAX_SMALL_SEGMENTS = 1 << 12
"""
The maximum number of segments if they are shorter than ``SMALL_SEGMENT_BYTES``; a file with more is not read.
Each segment takes a third of a millisecond, however few bytes it has.
"""

MAX_MUTABLE_SHARES = 255
"""The maximum of k and n, which are stored as one byte each."""

MAX_MUTABLE_BYTES = 1 << 60
"""The maximum size of a file; offsets in it stay below 2^63."""

SALT_BYTES = 16


class Format(enum.Enum):
    """The two formats of mutable files; the value is the first byte of a share."""

    SDMF = 0
    MDMF = 1

    @classmethod
    def of(cls, cap: MutableCap) -> Format:
        """Return the format of the file that a cap names."""
        return cls.MDMF if cap.kind == "MDMF" else cls.SDMF

    @property
    def cap_kind(self) -> str:
        """The ``kind`` of a ``MutableCap``: ``SSK`` or ``MDMF``."""
        return "MDMF" if self is Format.MDMF else "SSK"


def usual_segment_bytes(format: Format, size: int, required_shares: int) -> int:
    """Return the segment size that every writer uses for a file of this size."""
    if format is Format.MDMF:
        return round_up(MDMF_SEGMENT_BYTES, required_shares)
    return round_up(size, required_shares)


@attrs.frozen
class MutableGeometry:
    """
    Sizes of one version, in bytes unless the name says otherwise.

    SDMF has one segment, MDMF as many as needed; an empty file has none.

    Attributes:
        size: the length of the plaintext, 0 or more.
        segment_bytes: the segment size (S); by default ``usual_segment_bytes``.
        num_segments: 0 for an empty file.
        num_salts: how many salts a writer draws: one for SDMF (even for an empty file), one per segment for
            MDMF.
        tail_bytes: plaintext in the last segment, 0 for an empty file.
        salt_bytes: the length of the salt before each block: 16 for MDMF, 0 for SDMF.
        block_bytes: one share's part of a full segment, without the salt.
        tail_block_bytes: one share's part of the last segment, without the salt.
        data_bytes: all blocks of one share, with their salts.
        tree_bytes: the stored block hash tree.
        chain_bytes: the stored share hash chain: the sibling path, without the leaf.

    Raises:
        UsageError: no file can have these sizes.
    """

    format: Format
    size: int
    required_shares: int
    total_shares: int
    segment_bytes: int = attrs.field()

    num_segments: int = attrs.field(init=False)
    num_salts: int = attrs.field(init=False)
    tail_bytes: int = attrs.field(init=False)
    salt_bytes: int = attrs.field(init=False)
    block_bytes: int = attrs.field(init=False)
    tail_block_bytes: int = attrs.field(init=False)
    data_bytes: int = attrs.field(init=False)
    tree_bytes: int = attrs.field(init=False)
    chain_bytes: int = attrs.field(init=False)

    @segment_bytes.default
    def _usual(self) -> int:
        if self.required_shares < 1:
            return 0  # rejected below
        return usual_segment_bytes(self.format, self.size, self.required_shares)

    def __attrs_post_init__(self) -> None:
        k, n = self.required_shares, self.total_shares
        check_whole(k, "the number of required shares")
        check_whole(n, "the number of total shares")
        if not 1 <= k <= n <= MAX_MUTABLE_SHARES:
            raise UsageError(
                f"cannot encode a mutable file as {k} of {n}: choose "
                f"1 <= required shares <= total shares <= {MAX_MUTABLE_SHARES}"
            )
        if not 0 <= self.size <= MAX_MUTABLE_BYTES:
            raise UsageError(f"a mutable file cannot have {self.size} bytes")
        sdmf = self.format is Format.SDMF
        s = self.segment_bytes
        if s % k or s < 0 or (sdmf and s != round_up(self.size, k)) or (not sdmf and s < 1):
            raise UsageError(
                f"a mutable file of {self.size} bytes cannot have segments of {s} bytes in {k} blocks"
            )
        num_segments = -(-self.size // s) if s else 0
        tail = self.size - (num_segments - 1) * s if num_segments else 0
        salt = 0 if sdmf else SALT_BYTES
        block, tail_block = s // k, -(-tail // k)
        derive = object.__setattr__  # the way that attrs documents to set frozen fields
        derive(self, "num_segments", num_segments)
        derive(self, "num_salts", 1 if sdmf else num_segments)
        derive(self, "tail_bytes", tail)
        derive(self, "salt_bytes", salt)
        derive(self, "block_bytes", block)
        derive(self, "tail_block_bytes", tail_block)
        full = max(num_segments - 1, 0)
        data = full * (salt + block) + (salt + tail_block if num_segments else 0)
        derive(self, "data_bytes", data)
        derive(self, "tree_bytes", HASH_BYTES * num_nodes(num_segments))
        derive(self, "chain_bytes", CHAIN_ENTRY_BYTES * (padded_leaves(n).bit_length() - 1))

    @property
    def is_too_fine(self) -> bool:
        """
        Whether the file has so many small segments that reading it takes far longer than its size suggests.
        """
        return self.segment_bytes < SMALL_SEGMENT_BYTES and self.num_segments > MAX_SMALL_SEGMENTS

    def segment_length(self, segment: int) -> int:
        """Return how many bytes of plaintext a segment has."""
        return self.tail_bytes if segment == self.num_segments - 1 else self.segment_bytes

    def block_length(self, segment: int) -> int:
        """Return how many bytes of a segment one share holds, without the salt."""
        return self.tail_block_bytes if segment == self.num_segments - 1 else self.block_bytes

    def stored_range(self, first: int, end: int) -> tuple[int, int]:
        """
        Return the range of the salts and blocks of segments [first, end), counted from the start of the
        share's blocks.
        """
        step = self.salt_bytes + self.block_bytes
        return first * step, self.data_bytes if end == self.num_segments else end * step


MAX_SEQUENCE_NUMBER = (1 << 64) - 1
FIRST_SEQUENCE_NUMBER = 1

MAX_MDMF_SEGMENT_BYTES = 16 << 20
"""The maximum size of a segment, which has to be held as a whole; writers use 128 KiB."""

_SDMF = struct.Struct(">BQ32s16sBBQQ")
_MDMF = struct.Struct(">BQ32sBBQQ")
_CHECKSTRING_BYTES = {Format.SDMF: 57, Format.MDMF: 41}
SIGNED_BYTES = {Format.SDMF: _SDMF.size, Format.MDMF: _MDMF.size}
"""How many bytes at the start of a share the signature covers: 75 for SDMF, 59 for MDMF."""


@total_ordering
@attrs.frozen(eq=True, order=False)
class Version:
    """
    One version, as its author signed it. Versions are ordered by sequence number, then root hash.

    The root hash proves everything else in the version's shares that matters.

    Attributes:
        salt: 16 bytes for SDMF; empty for MDMF, which has one salt before each block.
        segment_bytes: the segment size (S).
        size: the length of the plaintext in bytes.
        geometry: all sizes that follow from these fields.

    Raises:
        UsageError: no version can have these fields.
    """

    format: Format
    sequence_number: int
    root_hash: bytes
    salt: bytes = attrs.field(repr=False)
    required_shares: int
    total_shares: int
    segment_bytes: int
    size: int
    geometry: MutableGeometry = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        assert len(self.root_hash) == HASH_BYTES
        assert len(self.salt) == (SALT_BYTES if self.format is Format.SDMF else 0)
        if not 0 <= self.sequence_number <= MAX_SEQUENCE_NUMBER:
            raise UsageError(f"no version has the sequence number {self.sequence_number}")
        geometry = MutableGeometry(
            self.format, self.size, self.required_shares, self.total_shares, self.segment_bytes
        )
        object.__setattr__(self, "geometry", geometry)

    @property
    def signed_prefix(self) -> bytes:
        """The first bytes of every share of the version, which its author signed."""
        counts = (self.required_shares, self.total_shares, self.segment_bytes, self.size)
        number = self.format.value
        if self.format is Format.SDMF:
            return _SDMF.pack(number, self.sequence_number, self.root_hash, self.salt, *counts)
        return _MDMF.pack(number, self.sequence_number, self.root_hash, *counts)

    @property
    def name(self) -> str:
        """The version as shown to people: the sequence number and the beginning of the root hash."""
        return f"{self.sequence_number} ({self.root_hash.hex()[:8]})"

    def __lt__(self, other: Version) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return self._rank() < other._rank()

    def _rank(self) -> tuple[int, bytes, bytes]:
        # The root hash of SDMF does not cover the salt, so ``signed_prefix``, which does, decides between
        # equal root hashes.
        return self.sequence_number, self.root_hash, self.signed_prefix


def parse_version(data: Buffer) -> Version | None:
    """
    Return the version at the start of a share, or None if there are too few bytes.

    The version is not verified here: ``VerifiedVersions.check`` checks the signature.

    Raises:
        ValueError: this is not a share, or its version is impossible. The text of the error completes a
            sentence that begins with "it is".
    """
    if not len(data):
        return None
    try:
        format = Format(data[0])
    except ValueError:
        raise ValueError(f"of a mutable format that is not known here ({data[0]})") from None
    if len(data) < SIGNED_BYTES[format]:
        return None
    if format is Format.SDMF:
        _, number, root, salt, k, n, segment_bytes, size = _SDMF.unpack_from(data)
        too_large = False
    else:
        _, number, root, k, n, segment_bytes, size = _MDMF.unpack_from(data)
        salt = b""
        too_large = segment_bytes > MAX_MDMF_SEGMENT_BYTES
    if too_large or size > MAX_MUTABLE_BYTES:
        raise ValueError(
            f"of a version that cannot be used: {size} bytes in segments of {segment_bytes}"
        )
    try:
        version = Version(format, number, root, salt, k, n, segment_bytes, size)
    except UsageError:
        raise ValueError(
            f"of a version that cannot be: {size} bytes in segments of {segment_bytes}, {k} of {n} shares"
        ) from None
    if version.geometry.is_too_fine:
        raise ValueError(
            f"of a version that is not read: {size} bytes in {version.geometry.num_segments} segments of "
            f"{segment_bytes}, and of segments below {SMALL_SEGMENT_BYTES} at most {MAX_SMALL_SEGMENTS} are"
        )
    return version


def checkstring_order(data: Buffer) -> tuple[int, bytes] | None:
    """
    Return the sequence number and root hash in a share's first 41 bytes, or None if the share is shorter.

    A writer whose write was rejected learns from them which version the server has. The byte that names the
    format is ignored, so that versions of unknown formats are not overwritten by versions with lower sequence
    numbers.
    """
    if len(data) < _CHECKSTRING_BYTES[Format.MDMF]:
        return None
    number, root = struct.unpack_from(">Q32s", data, 1)
    return number, root


class Holding(NamedTuple):
    """The fact that a server holds a share of a version whose signature was checked."""

    server: Hashable
    share_number: int
    version: Version


class Choice(NamedTuple):
    """
    A summary of the versions that servers hold.

    Attributes:
        best: the recoverable version (servers hold k distinct shares of it) with the highest sequence number,
            or None. Among equal sequence numbers, the version that most servers hold is chosen, since it may
            have been acknowledged; then the one with the highest root hash.
        recoverable: all recoverable versions, the highest first.
        unrecoverable: all other versions, the highest first.
        rivals: other recoverable versions with the sequence number of the best one. Their writers did not
            know of each other, and both succeeded.
        newer_unrecoverable: the unrecoverable versions above the best one. Their writes were not completed,
            or their servers are absent.
        highest_sequence_number: the highest number of all versions, 0 if there are none.
        shares: for each version and share number, the servers that hold the share; all in the order in which
            they were found.
    """

    best: Version | None
    recoverable: tuple[Version, ...]
    unrecoverable: tuple[Version, ...]
    shares: dict[Version, dict[int, tuple[Hashable, ...]]]

    @property
    def rivals(self) -> tuple[Version, ...]:
        best = self.best
        if best is None:
            return ()
        number = best.sequence_number
        return tuple(v for v in self.recoverable if v.sequence_number == number and v != best)

    @property
    def newer_unrecoverable(self) -> tuple[Version, ...]:
        return tuple(v for v in self.unrecoverable if self.best is None or v > self.best)

    @property
    def highest_sequence_number(self) -> int:
        return max((v.sequence_number for v in self.shares), default=0)

    def missing_shares(self, version: Version) -> set[int]:
        """Return the share numbers of a version that no server holds."""
        return set(range(version.total_shares)) - self.shares.get(version, {}).keys()

    def healthy(self) -> bool:
        """Return whether there is exactly one version, it is recoverable, and no share of it is missing."""
        best = self.best
        return best is not None and len(self.shares) == 1 and not self.missing_shares(best)


def choose(holdings: Iterable[Holding]) -> Choice:
    """
    Summarize the versions that were found. The order of the holdings does not affect which version is the
    best.
    """
    found: dict[Version, dict[int, dict[Hashable, None]]] = {}
    for holding in holdings:
        by_number = found.setdefault(holding.version, {})
        by_number.setdefault(holding.share_number, {})[holding.server] = None
    shares = {
        version: {number: tuple(servers) for number, servers in sorted(by_number.items())}
        for version, by_number in found.items()
    }
    ordered = sorted(shares, reverse=True)
    recoverable = tuple(v for v in ordered if _is_recoverable(v, shares[v]))
    unrecoverable = tuple(v for v in ordered if v not in recoverable)

    def rank(version: Version) -> tuple[int, int, Version]:
        servers = {server for held in shares[version].values() for server in held}
        return version.sequence_number, len(servers), version

    best = max(recoverable, key=rank, default=None)
    return Choice(best, recoverable, unrecoverable, shares)


def next_sequence_number(highest_seen: int) -> int:
    """
    Return the sequence number for the next version.

    Args:
        highest_seen: the highest sequence number that any server has, or that this client remembers.

    Raises:
        UsageError: no higher number is left, which only a malicious writer can cause.
    """
    if highest_seen >= MAX_SEQUENCE_NUMBER:
        raise UsageError(
            "this mutable file has the highest possible sequence number, so it cannot be overwritten; "
            "store its contents as a new one"
        )
    return highest_seen + 1


def _is_recoverable(version: Version, by_number: dict[int, tuple[Hashable, ...]]) -> bool:
    usable = sum(number < version.total_shares for number in by_number)
    return usable >= version.required_shares
