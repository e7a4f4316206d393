"""Texts and JSON fields for the health of files and the damage to their shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipegrid.cli.console import Console, say_some
from pipegrid.cli.error_report import sentence
from pipegrid.core.text import counted, printable
from pipegrid.errors import CorruptionError
from pipegrid.transfer import results


def corruption_fields(corrupt: Sequence[CorruptionError]) -> list[dict[str, Any]]:
    """Return corruption errors in the JSON form that the docs describe."""
    return [
        {
            "share_number": error.share_number,
            "offset": error.offset,
            "server": error.server,
            "problem": sentence(error),
        }
        for error in corrupt
    ]


def warn_of_corruption(
    console: Console, corrupt: Sequence[CorruptionError], lead: str = ""
) -> None:
    """
    Report damage that was worked around; ``lead`` begins each line, and names the file if there are several.
    """
    say_some(console, [f"{lead}worked around damage: {located(error)}" for error in corrupt])


def located(error: CorruptionError) -> str:
    """Return what is damaged, after the server's name if that is known and not in the text."""
    text = sentence(error)
    where = printable(error.server)
    return f"{where}: {text}" if where and where not in text else text


MAX_DOWN = 5
"""How many servers a line about one file names."""


def summary(result: results.CheckResult) -> str:
    """Return the health of a file in one line."""
    if result.total_shares == 0:
        return "healthy: the cap contains the file"
    found = f"{len(result.good_shares)} of {counted(result.total_shares, 'share')}"
    down = f"; {are_down(result.unreachable)}" if result.unreachable else ""
    if result.state == "reachable":
        return f"reachable: {found}{down}"
    state: str = "on too few servers" if result.state == "unspread" else result.state
    if result.healthy and _waits(result):
        state = "healthy on the reachable servers"
    text = (
        f"{state}: {found} good, any {result.required_shares} restore the file; "
        f"happiness {result.happiness}"
    )
    if result.is_complete and not result.is_spread:
        text += f", and {result.possible_happiness} is possible"
    if result.corrupt:
        text += f"; {counted(len(result.corrupt), 'problem')} found"
    return text + down


def _waits(result: results.CheckResult) -> bool:
    """Return whether servers are down whose shares could increase the happiness."""
    most = min(result.total_shares, result.happiness + len(result.unreachable))
    return bool(result.unreachable) and result.happiness < most


def are_down(servers: Sequence[str]) -> str:
    """Return a clause which says that servers are down; it names at most ``MAX_DOWN`` of them."""
    names = ", ".join(printable(name) for name in servers[:MAX_DOWN])
    if len(servers) == 1:
        return f"server {names} is down"
    more = f" and {len(servers) - MAX_DOWN} more" if len(servers) > MAX_DOWN else ""
    return f"servers {names}{more} are down"


def lost(result: results.CheckResult | results.RenewResult) -> str:
    """
    Return the word for a file that cannot be restored: "unavailable" if unreachable servers may have its
    shares, else "lost".
    """
    return "unavailable" if result.unreachable else "lost"


def say_more(console: Console, result: results.CheckResult, lead: str = "") -> None:
    """
    Report damaged shares and remarks; with ``-v``, report the servers of all shares.

    Args:
        lead: the beginning of every line; it names the file if there are several.
    """
    good = result.good_shares
    spare = " (a good copy exists)"
    say_some(
        console,
        [
            lead + located(error) + (spare if error.share_number in good else "")
            for error in result.corrupt
        ],
    )
    if not (good or result.corrupt or result.unreachable) and result.total_shares:
        console.note(
            f"{lead}no server has a share of the file; check that the cap was copied right, and "
            "that this is the grid that it is for"
        )
    for remark in result.remarks:
        console.note(f"{lead}{remark}")
    for number, servers in sorted(result.good_shares.items()):
        console.detail(f"{lead}share {number}: {', '.join(servers)}")


def fields(result: results.CheckResult) -> dict[str, Any]:
    """Return the health of a file in the JSON form that the docs describe, without the cap."""
    return {
        "healthy": result.healthy,
        "recoverable": result.recoverable,
        "required_shares": result.required_shares,
        "total_shares": result.total_shares,
        "happiness": result.happiness,
        "possible_happiness": result.possible_happiness,
        "state": result.state,
        "good_shares": result.good_shares,
        "corrupt": corruption_fields(result.corrupt),
        "unreachable": result.unreachable,
        "remarks": result.remarks,
    }


def lacks_servers_only(
    outcome: results.CheckResult | results.RenewResult | results.RepairResult,
) -> bool:
    """Return whether an object's only problem is that servers are down."""
    return (
        isinstance(outcome, results.CheckResult)
        and outcome.state == "reachable"
        and not outcome.lease_problems
    )


def is_well(outcome: results.CheckResult | results.RenewResult | results.RepairResult) -> bool:
    """Return whether an object has no problem to report."""
    if isinstance(outcome, results.CheckResult):
        return outcome.healthy and not (outcome.corrupt or outcome.lease_problems)
    if isinstance(outcome, results.RenewResult):
        return outcome.recoverable and not (outcome.reasons or outcome.unreachable)
    return outcome.whole and not (outcome.uploaded or outcome.reasons or outcome.before.corrupt)
