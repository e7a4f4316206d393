"""Which caps an operation can use, and what to say of the others."""

from __future__ import annotations

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
from pipegrid.errors import CapError


def readable(given: str | Cap) -> ChkCap | LitCap:
    """Return the cap of a file that can be read; CapError for any other."""
    cap = parse_cap(given) if isinstance(given, str) else given
    if isinstance(cap, (ChkCap, LitCap)):
        return cap
    raise CapError(f"{_kind(cap)} cannot be read as a file; give the read cap of a file")


def checkable(given: str | Cap) -> ChkCap | ChkVerifierCap | LitCap:
    """Return the cap of an immutable file or directory's file; CapError for any other."""
    cap = parse_cap(given) if isinstance(given, str) else given
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, (ChkCap, ChkVerifierCap, LitCap)):
        return file
    raise CapError(f"{_kind(cap)} cannot be checked; give the cap of an immutable file")


def _kind(cap: Cap) -> str:
    if isinstance(cap, DirectoryCap):
        return "a directory"
    if isinstance(cap, MutableCap):
        return "a mutable file"
    if isinstance(cap, ChkVerifierCap):
        return "a file known by its verify cap"
    assert isinstance(cap, UnknownCap)
    return "a cap of an unknown kind"
