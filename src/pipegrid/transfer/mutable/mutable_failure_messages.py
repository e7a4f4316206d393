"""Error messages for mutable files that cannot be read or written."""

from __future__ import annotations

from pipegrid.core.mutable.mutable_share import without_advice
from pipegrid.core.mutable.versions import Version
from pipegrid.core.text import counted
from pipegrid.errors import CapError, NotEnoughSharesError, RollbackError
from pipegrid.transfer.mutable.servermap import ServerMap
from pipegrid.transfer.mutable.version_cache import CachedVersion


def not_writable() -> CapError:
    """Return the error for a write with a cap that does not grant writing."""
    return CapError(
        "this cap does not write a mutable file; use its write cap, which begins with URI:SSK: or URI:MDMF:"
    )


def rollback(best: Version, known: CachedVersion) -> RollbackError:
    """Return the error for a version that is older than one seen before."""
    return RollbackError(
        f"the servers offer version {best.sequence_number} of this mutable file, although version "
        f"{known.sequence_number} was seen before: the newer one was lost, its servers cannot be reached, "
        "or a server shows the older one on purpose; try again with more servers, or make the older one "
        "the newest: "
        "repair it with force ('pipegrid repair -f'), which takes its write cap",
        best.sequence_number,
        known.sequence_number,
    )


def unreadable(found: ServerMap, k: int) -> NotEnoughSharesError:
    """
    Return the error for a file of which no version can be read. ``k``: number of shares that the file usually
    needs.
    """
    choice = found.choice()
    most = max((len(shares) for shares in choice.shares.values()), default=0)
    needed = max((v.required_shares for v in choice.shares), default=k)
    silent = f"; {_silent(found)}" if found.failed else ""
    return NotEnoughSharesError(
        f"no version of this mutable file can be read: of one, {_shares(most)} found, and {needed} are "
        f"needed{silent}{_wrong(found)}; try again when more servers can be reached, or check the cap",
        most,
        needed,
        len(found.failed),
    )


def nothing_to_change(found: ServerMap, k: int) -> NotEnoughSharesError:
    """Return the error for a file without a version that can be changed. ``k``: see ``unreadable``."""
    choice = found.choice()
    versions = choice.unrecoverable
    if not versions and found.corrupt:
        return unreadable(found, k)
    if not versions:
        why = _silent(found) if found.failed else "no server has one"
        return NotEnoughSharesError(
            f"no share of this mutable file was found: {why}; check the cap, and that the servers can be "
            "reached",
            0,
            k,
        )
    most = max(versions, key=lambda v: len(choice.shares[v]))
    have = len(choice.shares[most])
    return NotEnoughSharesError(
        f"no version of this mutable file can be read: of {len(versions)} that were found the best has "
        f"{have} of the {most.required_shares} shares that are needed; try again when more servers can "
        "be reached",
        have,
        most.required_shares,
    )


def _shares(number: int) -> str:
    return counted(number, "share was", "shares were")


def _silent(found: ServerMap) -> str:
    return f"{counted(len(found.failed), 'server')} did not answer"


def _wrong(found: ServerMap) -> str:
    if not found.corrupt:
        return ""
    many = counted(len(found.corrupt), "share is damaged", "shares are damaged")
    return f"; {many} ({without_advice(found.corrupt[0])})"
