"""How the health of a file is shown: what ``check`` and ``repair`` found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipegrid.cli.console import Console
from pipegrid.cli.render import corruption_fields, located, say_some
from pipegrid.core.text import counted

if TYPE_CHECKING:
    from pipegrid.transfer.results import CheckResult, RenewResult, RepairResult


def summary(result: CheckResult) -> str:
    """Return it in one line."""
    if result.total_shares == 0:
        return "healthy: the file is in its cap"
    state = "healthy" if result.healthy else "damaged" if result.recoverable else lost(result)
    text = (
        f"{state}: {len(result.good_shares)} of {counted(result.total_shares, 'share')} good, "
        f"any {result.required_shares} restore the file; happiness {result.happiness}"
    )
    if result.corrupt:
        text += f"; {counted(len(result.corrupt), 'problem')} found"
    if result.unreachable:
        text += f"; {counted(len(result.unreachable), 'server')} out of reach"
    return text


def lost(result: CheckResult | RenewResult) -> str:
    """Return what to call a file that cannot be restored: who is out of reach may have what is missing."""
    return "unavailable" if result.unreachable else "lost"


def say_more(console: Console, result: CheckResult, lead: str = "") -> None:
    """
    Tell what is damaged or out of reach, and with ``-v`` what is where.

    Args:
        lead: what every line begins with, where several files are told of.
    """
    good = result.good_shares
    spare = " (there is a good copy of it)"
    say_some(
        console,
        [
            lead + located(error) + (spare if error.share_number in good else "")
            for error in result.corrupt
        ],
    )
    if not (good or result.corrupt or result.unreachable) and result.total_shares:
        console.say(
            f"pipegrid: {lead}no server has a share of the file; check that the cap was copied right, and "
            "that this is the grid that it is for"
        )
    say_unreachable(console, result.unreachable, lead)
    for remark in result.remarks:
        console.say(f"pipegrid: {lead}{remark}")
    for number, servers in sorted(result.good_shares.items()):
        console.detail(f"{lead}share {number}: {', '.join(servers)}")


def say_unreachable(console: Console, servers: Sequence[str], lead: str = "") -> None:
    """Name the servers that are out of reach, in one line."""
    if servers:
        verb = "is" if len(servers) == 1 else "are"
        console.say(f"pipegrid: {lead}{', '.join(servers)} {verb} out of reach")


def fields(result: CheckResult) -> dict[str, Any]:
    """Return its documented JSON form, but for the cap."""
    return {
        "healthy": result.healthy,
        "recoverable": result.recoverable,
        "required_shares": result.required_shares,
        "total_shares": result.total_shares,
        "happiness": result.happiness,
        "good_shares": result.good_shares,
        "corrupt": corruption_fields(result.corrupt),
        "unreachable": result.unreachable,
        "remarks": result.remarks,
    }


def is_well(outcome: CheckResult | RenewResult | RepairResult) -> bool:
    """Whether there is nothing to tell of an object: it is whole, and nothing was in the way."""
    from pipegrid.transfer.results import CheckResult, RenewResult

    if isinstance(outcome, CheckResult):
        return outcome.healthy and not (outcome.corrupt or outcome.lease_problems)
    if isinstance(outcome, RenewResult):
        return outcome.recoverable and not (outcome.reasons or outcome.unreachable)
    return outcome.whole and not (outcome.uploaded or outcome.reasons or outcome.before.corrupt)
