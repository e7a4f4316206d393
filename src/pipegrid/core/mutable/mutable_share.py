"""
One share of a mutable file: the layout of its header's offset table for SDMF and MDMF, and the verification
of its version.

Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

import enum
import itertools
import struct
from typing import NamedTuple

from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import HASH_BYTES, Buffer
from pipegrid.core.mutable.keys import (
    MAX_PRIVATE_KEY_BYTES,
    MIN_PRIVATE_KEY_BYTES,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    SigningKey,
    VerifyingKey,
    load_verifying_key,
    open_signing_key,
)
from pipegrid.core.mutable.versions import Format, MutableGeometry, Version, parse_version
from pipegrid.core.received_share import ShareBytes
from pipegrid.core.spans import Range, Spans
from pipegrid.errors import CorruptionError

_SDMF = struct.Struct(">LLLLQQ")
_MDMF = struct.Struct(">QQQQQQQQ")
HEADER_BYTES = {Format.SDMF: 107, Format.MDMF: 123}
MAX_HEADER_BYTES = 123

MDMF_DATA_OFFSET = 2167
"""Where MDMF blocks start: after space for the largest keys, signature, and hash chain (of 255 shares)."""


class Sections(NamedTuple):
    """
    The ranges [start, end) of the parts of one share, in bytes from the start of the share data.

    The offset table that gives these ranges is not signed. But the signed version determines the length of
    every section except the two keys, whose lengths are limited. So an inconsistent table is rejected before
    any part is read and memory is used for it.

    Attributes:
        end: the share's end; bytes after it are left over from a longer version.
    """

    public_key: Range
    signature: Range
    chain: Range
    tree: Range
    data: Range
    private_key: Range
    end: int


class Header(NamedTuple):
    """
    The version that a share claims, and the offsets of its parts. Neither version nor offsets are
    authenticated.
    """

    version: Version
    sections: Sections

    def pack(self) -> bytes:
        """Return the stored form of the header: 107 bytes for SDMF, 123 for MDMF."""
        s = self.sections
        if self.version.format is Format.SDMF:
            offsets = _SDMF.pack(
                s.signature[0], s.chain[0], s.tree[0], s.data[0], s.private_key[0], s.end
            )
        else:
            starts = s.private_key[0], s.chain[0], s.signature[0]
            offsets = _MDMF.pack(*starts, *s.public_key, s.data[0], s.tree[0], s.end)
        return self.version.signed_prefix + offsets


def parse_header(data: Buffer) -> Header | None:
    """
    Return the header, or None if data is shorter than ``header_bytes(data)``.

    Raises:
        ValueError: data is not a header, or its sections do not fit the version. The text of the error
            completes a sentence that begins with "it is".
    """
    version = parse_version(data)
    if version is None or len(data) < HEADER_BYTES[version.format]:
        return None
    at = len(version.signed_prefix)
    form = _SDMF if version.format is Format.SDMF else _MDMF
    order: list[int] = [HEADER_BYTES[version.format], *form.unpack_from(data, at)]
    ranges = list(itertools.pairwise(order))
    if any(a > b for a, b in ranges):
        raise ValueError("one whose header names parts that overlap or are out of order")
    if version.format is Format.SDMF:
        public, signature, chain, tree, blocks, private = ranges
    else:  # MDMF has unused space before the private key and before the blocks
        _, private, chain, signature, public, _, blocks, tree = ranges
    sections = Sections(public, signature, chain, tree, blocks, private, order[-1])
    _check_lengths(sections, version.geometry)
    return Header(version, sections)


def header_bytes(data: Buffer) -> int:
    """Return the length of the header, by the first byte of data; the maximum length if data is empty."""
    return HEADER_BYTES[Format.SDMF] if len(data) and data[0] == 0 else MAX_HEADER_BYTES


def new_sections(
    geometry: MutableGeometry, public_key_bytes: int, private_key_bytes: int
) -> Sections:
    """Return the ranges where a writer puts the parts of a new share."""
    chain, tree, data = geometry.chain_bytes, geometry.tree_bytes, geometry.data_bytes
    if geometry.format is Format.SDMF:
        public, signature, chain_at, tree_at, blocks, private = _one_behind_the_other(
            HEADER_BYTES[Format.SDMF],
            (public_key_bytes, SIGNATURE_BYTES, chain, tree, data, private_key_bytes),
        )
        return Sections(public, signature, chain_at, tree_at, blocks, private, private[1])
    private, chain_at, signature, public = _one_behind_the_other(
        MAX_HEADER_BYTES, (private_key_bytes, chain, SIGNATURE_BYTES, public_key_bytes)
    )
    data_at = max(MDMF_DATA_OFFSET, public[1])
    blocks, tree_at = _one_behind_the_other(data_at, (data, tree))
    return Sections(public, signature, chain_at, tree_at, blocks, private, tree_at[1])


def _one_behind_the_other(start: int, lengths: tuple[int, ...]) -> list[Range]:
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=start)))


def _check_lengths(sections: Sections, geometry: MutableGeometry) -> None:
    exact = (
        ("signature", sections.signature, SIGNATURE_BYTES),
        ("share hash chain", sections.chain, geometry.chain_bytes),
        ("tree of block hashes", sections.tree, geometry.tree_bytes),
        ("blocks", sections.data, geometry.data_bytes),
    )
    for name, (start, end), length in exact:
        if end - start != length:
            raise ValueError(f"one whose header gives its {name} {end - start} bytes, not {length}")
    public = sections.public_key[1] - sections.public_key[0]
    private = sections.private_key[1] - sections.private_key[0]
    if public not in PUBLIC_KEY_BYTES:
        raise ValueError(f"one whose header gives its public key {public} bytes")
    if not MIN_PRIVATE_KEY_BYTES <= private <= MAX_PRIVATE_KEY_BYTES:
        raise ValueError(f"one whose header gives its private key {private} bytes")


class Part(enum.Enum):
    """The parts of a share. The values are their names in errors, after the words "before the end of its"."""

    HEADER = "header"
    PUBLIC_KEY = "public key"
    SIGNATURE = "signature"
    CHAIN = "share hash chain"
    TREE_ROOT = "tree of block hashes"
    PRIVATE_KEY = "private key"


class MutableShare:
    """
    The bytes of one share that have arrived from one server, in any order and in pieces of any size.

    ``range_of`` and ``missing`` return the ranges of the share's parts, so that a reader can request them.
    Only the header is checked here, for consistency; ``VerifiedVersions`` verifies the version, and
    ``VersionReader`` everything else. The reader limits memory by limiting what it requests.

    Attributes:
        number: the share number.
        header: None until it has arrived.
        store: the bytes, which are kept until they are released.
    """

    __slots__ = ("header", "number", "store")

    def __init__(self, number: int) -> None:
        self.number = number
        self.header: Header | None = None
        self.store = ShareBytes()

    @classmethod
    def of(cls, number: int, data: Buffer) -> MutableShare:
        """
        Return a share whose bytes are all known.

        Raises:
            CorruptionError: the share has no good header.
        """
        share = cls(number)
        share.answered(0, len(data) + 1, data)
        return share

    def answered(self, offset: int, length: int, data: Buffer) -> None:
        """
        Store the response to a read of ``length`` bytes. A shorter response means that the share ends there.

        The buffer is kept by reference and must not change any more.

        Raises:
            CorruptionError: the header is wrong or incomplete.
        """
        self.put(offset, data)
        if len(data) < length:
            self.set_end(offset + len(data))

    def put(self, offset: int, data: Buffer) -> None:
        """
        Store bytes of the share; bytes that arrived before are ignored.

        Raises:
            CorruptionError: the header is wrong.
        """
        self.store.ask(offset, offset + len(data))
        self.store.put(offset, data)
        self._read_header()

    def set_end(self, offset: int) -> None:
        """
        Record that the share has no bytes from offset on.

        Raises:
            CorruptionError: the header is incomplete.
        """
        self.store.set_end(offset)
        if self.header is None:
            self.missing(Part.HEADER)

    def range_of(self, part: Part) -> Range:
        """Return the range of a part. Unless the part is the header, the header must have arrived."""
        if part is Part.HEADER:
            have = self.store.read(0, 1) if self.store.has(0, 1) else b""
            return 0, header_bytes(have)
        assert self.header is not None, "where its parts are is not known yet"
        sections = self.header.sections
        if part is Part.TREE_ROOT:
            return sections.tree[0], sections.tree[0] + HASH_BYTES
        at: Range = getattr(sections, part.name.lower())
        return at

    def has(self, part: Part) -> bool:
        """Return whether all bytes of a part have arrived."""
        if part is not Part.HEADER and self.header is None:
            return False
        return self.store.has(*self.range_of(part))

    def read(self, part: Part) -> bytes:
        """Return a copy of a part, all of which must have arrived."""
        return self.store.read(*self.range_of(part))

    def missing(self, *parts: Part) -> list[Range]:
        """
        Return the ranges [start, end) of these parts that have not arrived; an empty list if all have.

        Until the header is known, only its range is returned.

        Raises:
            CorruptionError: the share ends before the end of a part.
        """
        if self.header is None:
            parts = (Part.HEADER,)
        wanted = Spans()
        for part in parts:
            wanted.update(self.missing_range(self.range_of(part), part.value))
        return list(wanted)

    def missing_range(self, wanted: Range, what: str) -> list[Range]:
        """
        Return the gaps [start, end) in a range whose bytes have not arrived.

        Args:
            what: the name of the part in the error.

        Raises:
            CorruptionError: the share ends before the end of the range.
        """
        start, end = wanted
        gaps = self.store.missing(start, end)
        share_end = self.store.end
        if gaps and share_end is not None and share_end < end:
            raise damaged(
                self.number, f"it ends at byte {share_end}, before the end of its {what}", start
            )
        return gaps

    def _read_header(self) -> None:
        if self.header is not None or not self.store.has(0, 1):
            return
        length = header_bytes(self.store.read(0, 1))
        data = self.store.read(0, length) if self.store.has(0, length) else self.store.read(0, 1)
        try:
            self.header = parse_header(data)
        except ValueError as error:
            raise damaged(self.number, f"it is {error}", 0) from None


_ADVICE = "; another server may have a good one"


def without_advice(error: CorruptionError) -> str:
    """
    Return the text of an error from ``damaged`` without its advice, for the case that no server has a good
    share.
    """
    return str(error).removesuffix(_ADVICE)


def damaged(share_number: int, what: str, offset: int | None) -> CorruptionError:
    """Return the error for a damaged share, with the advice that another server may have a good one."""
    return CorruptionError(
        f"share {share_number} is damaged: {what}{_ADVICE}",
        share_number,
        offset,
    )


class VerifiedVersions:
    """
    The verified keys and versions of one file. The cap's fingerprint verifies the public key once, and this
    key verifies the signature of each version once. Of further shares of such a version, only the header is
    needed.

    Attributes:
        cap: a write, read or verify cap.
        verifying_key: None until a share or ``signing_key`` has provided it.
        signing_key: as it was given; otherwise None until a share has provided it, which requires a write
            cap.
    """

    def __init__(self, cap: MutableCap, signing_key: SigningKey | None = None) -> None:
        """Start without versions. ``signing_key`` is the key if it was verified before."""
        self.cap = cap
        self.signing_key = signing_key
        self.verifying_key = None if signing_key is None else signing_key.verifying()
        self._signed: set[Version] = set()

    def trust(self, version: Version) -> None:
        """Accept a version as signed, because this process wrote it or has checked it before."""
        self._signed.add(version)

    def missing(self, share: MutableShare) -> list[Range]:
        """
        Return the ranges of a share that ``check`` still needs; for a known version only the range of the
        header.

        Raises:
            CorruptionError: the share ends too early.
        """
        return share.missing(*self._needed(share))

    def check(self, share: MutableShare) -> Version | None:
        """
        Return a share's verified version, or None while bytes are ``missing``.

        Raises:
            CorruptionError: the public key does not match the cap, the version was not signed with this key,
                or the version has no share of this number.
        """
        if self.missing(share):
            return None
        header = share.header
        assert header is not None
        if share.number >= header.version.total_shares:
            total = header.version.total_shares
            raise damaged(share.number, f"its version has only {total} shares", 0)
        if header.version in self._signed:
            return header.version
        if self.verifying_key is None:
            public_der = share.read(Part.PUBLIC_KEY)
            self.verifying_key = load_verifying_key(public_der, self.cap, share.number)
        check_signed(share, header.version, self.verifying_key)
        self._signed.add(header.version)
        return header.version

    def open_signing_key(self, share: MutableShare) -> SigningKey | None:
        """
        Return the signing key; if it is not known yet, take it from this share. None while the share's
        private key has not arrived.

        Raises:
            CorruptionError: the share's private key does not match the write cap.
        """
        if self.signing_key is None and share.has(Part.PRIVATE_KEY):
            encrypted = share.read(Part.PRIVATE_KEY)
            self.signing_key = open_signing_key(encrypted, self.cap, share.number)
            self.verifying_key = self.verifying_key or self.signing_key.verifying()
        return self.signing_key

    def _needed(self, share: MutableShare) -> tuple[Part, ...]:
        if share.header is None or share.header.version in self._signed:
            return (Part.HEADER,)
        if self.verifying_key is None:
            return (Part.HEADER, Part.PUBLIC_KEY, Part.SIGNATURE)
        return (Part.HEADER, Part.SIGNATURE)


def check_signed(share: MutableShare, version: Version, key: VerifyingKey) -> None:
    """
    Check the signature of a share's version; the signature must have arrived.

    Raises:
        CorruptionError: the signature is wrong; the error names the share, and the offset of the signature.
    """
    if not key.is_signature(share.read(Part.SIGNATURE), version.signed_prefix):
        offset = share.range_of(Part.SIGNATURE)[0]
        raise damaged(share.number, "its signature does not match its content", offset)
