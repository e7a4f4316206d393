"""
Capabilities: a class for each kind, a strict parser, and checks of what a cap grants.

Every cap has exactly one spelling, except for obsolete hints in MDMF caps, which are ignored. Text of an
unknown kind becomes an ``UnknownCap``, which can be copied but not opened.

Source: Tahoe-LAFS's ``uri.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Protocol, get_args

import attrs

from pipegrid.argument_checks import check_kind, shown
from pipegrid.core import base32, hashes
from pipegrid.core.encoding_parameters import MAX_LITERAL_BYTES
from pipegrid.core.text import counted, printable
from pipegrid.errors import CapError, UsageError, naming

_START = "URI:"
_PREFIXES = ("ro.", "imm.")
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,19})\Z")


@attrs.frozen
class ChkCap:
    """
    Read cap of an immutable file. It is also the file's read-only cap, since an immutable file cannot be
    written.
    """

    key: bytes = attrs.field(repr=False)
    ueb_hash: bytes
    required_shares: int
    total_shares: int
    size: int

    def __str__(self) -> str:
        return "URI:CHK:" + _chk_fields(self.key, self)

    @property
    def storage_index(self) -> bytes:
        """16 bytes that name the file's shares."""
        return hashes.storage_index(self.key)

    def readonly(self) -> ChkCap:
        """Return this cap itself: it grants reading, but not writing."""
        return self

    def verifier(self) -> ChkVerifierCap:
        """Return the verify cap, which grants checking the shares but not reading the file."""
        return ChkVerifierCap(
            self.storage_index, self.ueb_hash, self.required_shares, self.total_shares, self.size
        )


@attrs.frozen
class ChkVerifierCap:
    """Verify cap of an immutable file, which grants checking its shares."""

    storage_index: bytes
    ueb_hash: bytes
    required_shares: int
    total_shares: int
    size: int

    def __str__(self) -> str:
        return "URI:CHK-Verifier:" + _chk_fields(self.storage_index, self)

    def readonly(self) -> ChkVerifierCap:
        """Return this cap itself: it does not grant writing."""
        return self

    def verifier(self) -> ChkVerifierCap:
        return self


@attrs.frozen
class LitCap:
    """
    Literal cap, which contains a small file as a whole. The file has no shares, so nothing can be verified.
    """

    data: bytes = attrs.field(repr=False)

    def __str__(self) -> str:
        return "URI:LIT:" + base32.encode(self.data)

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def storage_index(self) -> None:
        """None: a literal file has no shares."""
        return

    def readonly(self) -> LitCap:
        return self

    def verifier(self) -> None:
        """Return None: a literal file has no shares to verify."""
        return


@attrs.frozen
class MutableCap:
    """
    Cap of one mutable file, SDMF (``SSK``) or MDMF.

    Attributes:
        kind: ``SSK`` or ``MDMF``.
        access: what the cap grants: ``write``, ``read`` or ``verify``.
        secret: 16 bytes: the write key, the read key, or the storage index, depending on access.
        fingerprint: 32-byte hash of the public key.
    """

    kind: str
    access: str
    secret: bytes = attrs.field(repr=False)
    fingerprint: bytes

    def __str__(self) -> str:
        suffix = {"write": "", "read": "-RO", "verify": "-Verifier"}[self.access]
        fields = f"{base32.encode(self.secret)}:{base32.encode(self.fingerprint)}"
        return f"URI:{self.kind}{suffix}:{fields}"

    @property
    def storage_index(self) -> bytes:
        """16 bytes that name the file's shares."""
        return self.verifier().secret

    def readonly(self) -> MutableCap:
        """Return the read cap, or this cap itself if it does not grant writing."""
        if self.access != "write":
            return self
        tag = b"allmydata_mutable_writekey_to_readkey_v1"
        return attrs.evolve(
            self, access="read", secret=hashes.tagged_hash(tag, self.secret)[: hashes.KEY_BYTES]
        )

    def verifier(self) -> MutableCap:
        """Return the verify cap, which grants checking the shares but not reading the file."""
        if self.access == "verify":
            return self
        tag = b"allmydata_mutable_readkey_to_storage_index_v1"
        secret = hashes.tagged_hash(tag, self.readonly().secret)[: hashes.STORAGE_INDEX_BYTES]
        return attrs.evolve(self, access="verify", secret=secret)


FileCap = ChkCap | ChkVerifierCap | LitCap | MutableCap


@attrs.frozen
class DirectoryCap:
    """
    Cap of a directory. It wraps the cap of the file that holds the packed entries, and its text begins with
    ``URI:DIR2``.
    """

    file: FileCap

    def __str__(self) -> str:
        return _START + _as_directory(str(self.file).removeprefix(_START))

    @property
    def storage_index(self) -> bytes | None:
        """16 bytes that name the shares of the directory's file, or None for a literal directory."""
        return self.file.storage_index

    def readonly(self) -> DirectoryCap:
        """Return the directory's read cap, which does not grant writing."""
        return DirectoryCap(self.file.readonly())

    def verifier(self) -> DirectoryCap | None:
        """Return the directory's verify cap, or None for a literal directory."""
        verifier = self.file.verifier()
        return None if verifier is None else DirectoryCap(verifier)


@attrs.frozen
class UnknownCap:
    """A cap of a kind that this version does not know; its text is kept unchanged."""

    text: str = attrs.field(repr=False)

    def __str__(self) -> str:
        return self.text


Cap = ChkCap | ChkVerifierCap | LitCap | MutableCap | DirectoryCap | UnknownCap


def _as_directory(text: str) -> str:
    """
    Turn a file cap's text without ``URI:`` (kind and fields) into the text for the directory whose entries
    the file holds.
    """
    # The caps of SDMF directories are named ``DIR2``, without the kind of their file.
    return f"DIR2{text[3:]}" if text.startswith("SSK") else f"DIR2-{text}"


def _chk_fields(secret: bytes, cap: ChkCap | ChkVerifierCap) -> str:
    return (
        f"{base32.encode(secret)}:{base32.encode(cap.ueb_hash)}"
        f":{cap.required_shares}:{cap.total_shares}:{cap.size}"
    )


def parse_cap(text: str) -> Cap:
    """
    Parse a cap.

    A prefix ``ro.`` (read-only) or ``imm.`` (immutable) is removed if it is true of the cap. If it is not,
    the result is an ``UnknownCap``, which cannot be opened.

    Raises:
        CapError: text names a known kind but is not a well-formed cap of that kind.
        UsageError: text is not a ``str``.
    """
    check_kind(text, str, "a capability", "text", secret=True)
    if text.startswith(_PREFIXES):
        prefix = text[: text.index(".") + 1]
        cap = _parse_bare(text[len(prefix) :])
        return cap if _keeps_promise(cap, prefix) else UnknownCap(text)
    return _parse_bare(text)


def as_cap(cap: str | Cap) -> Cap:
    """
    Return a cap that is given as an object or as text; blanks around the text are removed.

    Raises:
        CapError: as ``parse_cap``.
        UsageError: the argument is neither a cap nor text.
    """
    if isinstance(cap, str):
        return parse_cap(cap.strip())
    kind = "text, or what a put gave as 'result.cap'"
    check_kind(cap, get_args(Cap), "a capability", kind, secret=True)
    return cap


def shown_cap(cap: object) -> str:
    """
    Return the ``repr`` of a cap object, which contains no secret. For text, return only its type, since the
    text may be secret.
    """
    return repr(cap) if isinstance(cap, (*get_args(Cap), type(None))) else shown(cap, secret=True)


def _parse_bare(text: str) -> Cap:
    """
    Parse the text of a cap after its prefix, if any. Text that begins with yet another prefix, or in any
    other unexpected way, becomes an ``UnknownCap``.
    """
    end = text.find(":", len(_START))
    parse = _PARSERS.get(text[len(_START) : end]) if end >= 0 and text.startswith(_START) else None
    return UnknownCap(text) if parse is None else parse(text[end + 1 :])


def _keeps_promise(cap: Cap, prefix: str) -> bool:
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, (ChkCap, ChkVerifierCap, LitCap)):
        return True
    return isinstance(file, MutableCap) and prefix == "ro." and file.access != "write"


class _FileParser(Protocol):
    def __call__(self, fields: str, what: str) -> FileCap:
        """Parse the fields of a cap; error messages call the cap's kind ``what``."""


def _parse_chk(fields: str, what: str) -> ChkCap:
    return ChkCap(*_parse_chk_fields(fields, what))


def _parse_chk_verifier(fields: str, what: str) -> ChkVerifierCap:
    return ChkVerifierCap(*_parse_chk_fields(fields, what))


def _parse_chk_fields(fields: str, what: str) -> tuple[bytes, bytes, int, int, int]:
    parts = fields.split(":")
    if len(parts) != 5:
        raise _wrong_fields(what, len(parts), 5)
    secret = _parse_bytes(parts[0], hashes.KEY_BYTES, what)
    ueb_hash = _parse_bytes(parts[1], hashes.HASH_BYTES, what)
    k, n, size = (_parse_number(part, what) for part in parts[2:])
    if not 1 <= k <= n <= 256:
        raise CapError(f"this {what} cap asks for {k} of {n} shares, which no file has")
    if size < 1:
        raise CapError(f"this {what} cap has a size of {size}, which no encoded file has")
    return secret, ueb_hash, k, n, size


def _parse_lit(fields: str, what: str) -> LitCap:
    # Literal caps longer than those that PipeGrid writes are valid.
    try:
        return LitCap(base32.decode(fields))
    except ValueError as error:
        raise _damaged(what, error) from None


def _mutable_parser(kind: str, access: str) -> _FileParser:
    def parse(fields: str, what: str) -> MutableCap:
        parts = fields.split(":")
        if len(parts) < 2 or (kind == "SSK" and len(parts) != 2):
            raise _wrong_fields(what, len(parts), 2)
        # MDMF caps may have obsolete hints after the fingerprint, which are ignored.
        secret = _parse_bytes(parts[0], hashes.KEY_BYTES, what)
        return MutableCap(kind, access, secret, _parse_bytes(parts[1], hashes.HASH_BYTES, what))

    return parse


def _directory_parser(parse: _FileParser) -> Callable[[str], DirectoryCap]:
    return lambda fields: DirectoryCap(parse(fields, "directory"))


def _wrong_fields(what: str, count: int, wanted: int) -> CapError:
    return CapError(
        f"this {what} cap has {counted(count, 'field')} instead of {wanted}; copy it whole"
    )


def _damaged(what: str, why: object) -> CapError:
    return CapError(f"this {what} cap is damaged: {why}; copy it whole")


def _parse_bytes(text: str, length: int, what: str) -> bytes:
    try:
        data = base32.decode(text)
    except ValueError as error:
        raise _damaged(what, error) from None
    if len(data) != length:
        raise _damaged(what, f"a field has {len(data)} bytes instead of {length}")
    return data


def _parse_number(text: str, what: str) -> int:
    if not _NUMBER.match(text):
        # The error does not show the text: if the fields are out of order, the text may be the key.
        raise _damaged(what, "a count or size in it is not a number")
    return int(text)


_PARSERS: dict[str, Callable[[str], Cap]] = {}


def _register() -> None:
    files: dict[str, tuple[_FileParser, str]] = {
        "CHK": (_parse_chk, "file"),
        "CHK-Verifier": (_parse_chk_verifier, "verifier"),
        "LIT": (_parse_lit, "literal"),
    }
    for kind in ("SSK", "MDMF"):
        files[kind] = _mutable_parser(kind, "write"), kind
        files[f"{kind}-RO"] = _mutable_parser(kind, "read"), kind
        files[f"{kind}-Verifier"] = _mutable_parser(kind, "verify"), kind
    for kind, (parse, what) in files.items():
        _PARSERS[kind] = partial(parse, what=what)
        _PARSERS[_as_directory(kind)] = _directory_parser(parse)


_register()


def immutable_size(cap: Cap | None) -> int | None:
    """Return the file size that an immutable file's cap contains; None for a cap of another kind."""
    return cap.size if isinstance(cap, (ChkCap, LitCap)) else None


def is_literal_size(size: int) -> bool:
    """Return whether a file of ``size`` bytes is stored in its cap, as a literal."""
    return size <= MAX_LITERAL_BYTES


# Functions that check which caps an operation accepts, and the errors about other caps.


def mutable_file(given: str | Cap, directories: bool = False) -> MutableCap | None:
    """
    Return the cap of a mutable file, be it a write, read or verify cap; None for a cap of another kind.

    Args:
        directories: also accept the cap of a mutable directory, and return the cap of the directory's file.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    if directories and isinstance(cap, DirectoryCap):
        cap = cap.file
    return cap if isinstance(cap, MutableCap) else None


def writes(cap: Cap | None) -> bool:
    """Return whether a cap allows writing a mutable file or directory."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    return isinstance(file, MutableCap) and file.access == "write"


def writable(given: str | Cap) -> MutableCap:
    """
    Return the write cap of a mutable file, or of a mutable directory's file.

    Raises:
        CapError: the cap is malformed, of another kind, or does not grant writing.
    """
    cap = mutable_file(given, directories=True)
    if cap is None:
        raise CapError(
            "this is not the cap of a mutable file, and what it names can never change; write caps begin "
            "with URI:SSK:, URI:MDMF: or URI:DIR2:"
        )
    if cap.access != "write":
        raise CapError(
            "this cap reads a mutable file but does not write it; use its write cap, or ask for it"
        )
    return cap


def readable(given: str | Cap) -> ChkCap | LitCap:
    """
    Return the read cap of an immutable file.

    Raises:
        CapError: the cap is malformed, or of another kind.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    if isinstance(cap, (ChkCap, LitCap)):
        return cap
    if isinstance(cap, ChkVerifierCap):
        raise CapError(
            "this is a verifier cap: it checks a file's shares but cannot read the file; "
            "use the cap that 'put' printed"
        )
    raise _unusable(cap)


def fetchable(given: str | Cap) -> ChkCap | LitCap | MutableCap:
    """
    Return the read cap of a file, mutable or not.

    Raises:
        CapError: the cap is malformed, or of another kind.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    if not isinstance(cap, MutableCap):
        return readable(cap)
    if cap.access == "verify":
        raise CapError(
            "this is a verifier cap: it checks a file's shares but cannot read the file; use a cap that does"
        )
    return cap


def checkable(given: str | Cap) -> ChkCap | ChkVerifierCap | LitCap:
    """
    Return the cap of an immutable file, or of an immutable directory's file, whose shares can be checked.

    Raises:
        CapError: the cap is malformed, or of another kind.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, (ChkCap, ChkVerifierCap, LitCap)):
        return file
    raise _unusable(cap)


def keepable(given: str | Cap) -> ChkCap | ChkVerifierCap | LitCap | MutableCap:
    """
    Return the cap of a file, or of a directory's file, whose shares can be checked and whose leases can be
    renewed.

    Raises:
        CapError: the cap is malformed, or of another kind.
    """
    return mutable_file(given, directories=True) or checkable(given)


def walkable(given: str | Cap) -> ChkCap | LitCap | MutableCap | DirectoryCap:
    """
    Return the cap of a directory that can be listed, or of a file that can be read.

    Raises:
        CapError: the cap is malformed, or of another kind.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    if not isinstance(cap, DirectoryCap):
        return fetchable(cap)
    if not isinstance(cap.file, ChkVerifierCap):
        return cap
    text = (
        "this is the verifier cap of a directory: it checks its shares but cannot read what is in it; "
        "use its read cap, or leave out what is in it"
    )
    raise naming(CapError(text), "or leave out what is in it")


def unknown_kind(cap: UnknownCap) -> CapError:
    """Return the error for a cap of an unknown kind; a later version of PipeGrid may know the kind."""
    start = printable(cap.text[:12] + ("..." if len(cap.text) > 12 else ""))
    return CapError(
        f"'{start}' is not a cap that PipeGrid knows; copy it whole, or use a later version"
    )


def _unusable(cap: Cap) -> CapError:
    if isinstance(cap, DirectoryCap):
        text = "this is the cap of a directory, and this works on files only; "
        return naming(CapError(f"{text}get_tree fetches all that is in it"), "get_tree")
    if isinstance(cap, MutableCap):
        return CapError("this is the cap of a mutable file, and this works on immutable ones only")
    if not isinstance(cap, UnknownCap):
        raise UsageError(
            f"a capability is text, or what a put gave as 'result.cap', not {shown(cap, secret=True)}"
        )
    start = cap.text[:12] + ("..." if len(cap.text) > 12 else "")
    return CapError(
        f"{start!r} is not a cap that PipeGrid knows; file caps begin with URI:CHK: or URI:LIT:"
    )
