"""Which caps reading and checking can use, and what to say of the others."""

from __future__ import annotations

from pipegrid.arguments import shown
from pipegrid.core.caps import (
    Cap,
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    UnknownCap,
    parse_cap,
)
from pipegrid.core.text import printable
from pipegrid.errors import CapError, UsageError, naming


def mutable_file(given: str | Cap, directories: bool = False) -> MutableCap | None:
    """
    Return the cap of a mutable file, whatever it grants, or None if it is another kind.

    Args:
        directories: also of the file that holds a mutable directory.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    if directories and isinstance(cap, DirectoryCap):
        cap = cap.file
    return cap if isinstance(cap, MutableCap) else None


def writes(cap: Cap | None) -> bool:
    """Return whether a cap changes a mutable file, or a mutable directory."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    return isinstance(file, MutableCap) and file.access == "write"


def writable(given: str | Cap) -> MutableCap:
    """
    Return the cap that writes a mutable file, or the file of a mutable directory.

    Raises:
        CapError: it is malformed, of another kind, or does not grant that.
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
    Return the cap of a file whose content it grants.

    Raises:
        CapError: it is malformed, or of another kind.
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
    Return the cap of a file, one that can change included, whose content it grants.

    Raises:
        CapError: it is malformed, or of another kind.
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
    Return the cap of a file, or of a directory's file, whose shares can be checked.

    Raises:
        CapError: it is malformed, or of another kind.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, (ChkCap, ChkVerifierCap, LitCap)):
        return file
    raise _unusable(cap)


def keepable(given: str | Cap) -> ChkCap | ChkVerifierCap | LitCap | MutableCap:
    """
    Return the cap of a file or of a directory's file, also of one that can change, that can be looked after.

    Raises:
        CapError: it is malformed, or of another kind.
    """
    return mutable_file(given, directories=True) or checkable(given)


def walkable(given: str | Cap) -> ChkCap | LitCap | MutableCap | DirectoryCap:
    """
    Return the cap of a directory that can be entered, or of a file that can be read.

    Raises:
        CapError: it is malformed, or of another kind.
    """
    cap = parse_cap(given.strip()) if isinstance(given, str) else given
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(cap, DirectoryCap) and not isinstance(file, ChkVerifierCap):
        return cap
    if isinstance(cap, DirectoryCap):
        text = (
            "this is the verifier cap of a directory: it checks its shares but cannot read what is in it; "
            "use its read cap, or do so without walking through it"
        )
        raise naming(CapError(text), "so without walking through it")
    return fetchable(cap)


def unknown_kind(cap: UnknownCap) -> CapError:
    """Return the error for a cap of a kind that is not known, perhaps one to come."""
    start = printable(cap.text[:12] + ("..." if len(cap.text) > 12 else ""))
    return CapError(
        f"'{start}' is no cap that PipeGrid knows; copy it whole, or use a later version"
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
        f"{start!r} is no cap that PipeGrid knows; file caps begin with URI:CHK: or URI:LIT:"
    )
