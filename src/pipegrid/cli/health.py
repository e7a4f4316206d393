"""How the health of a file is shown: what ``check`` and ``repair`` found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipegrid.cli.console import Console
from pipegrid.cli.render import corruption_fields, located, say_some
from pipegrid.core.text import counted, printable

if TYPE_CHECKING:
    from pipegrid.transfer.results import CheckResult, RenewResult, RepairResult

MAX_DOWN = 5
"""Servers that are named in a line about a file."""

_STATES = {"unspread": "on too few servers"}


def summary(result: CheckResult) -> str:
    """Return it in one line."""
    if result.total_shares == 0:
        return "healthy: the file is in its cap"
    found = f"{len(result.good_shares)} of {counted(result.total_shares, 'share')}"
    down = f"; {are_down(result.unreachable)}" if result.unreachable else ""
    if result.state == "reachable":
        return f"reachable: {found}{down}"
    state: str = _STATES.get(result.state, result.state)
    if result.healthy and _waits(result):
        state = "healthy on the servers in reach"
    text = (
        f"{state}: {found} good, any {result.required_shares} restore the file; "
        f"happiness {result.happiness}"
    )
    if result.is_complete and not result.is_spread:
        text += f", and {result.possible_happiness} is possible"
    if result.corrupt:
        text += f"; {counted(len(result.corrupt), 'problem')} found"
    return text + down


def _waits(result: CheckResult) -> bool:
    """Whether it is as well as it can be now, and could be better with servers that are down."""
    most = min(result.total_shares, result.happiness + len(result.unreachable))
    return bool(result.unreachable) and result.happiness < most


def are_down(servers: Sequence[str]) -> str:
    """Return a clause that names the first of servers that are down."""
    names = ", ".join(printable(name) for name in servers[:MAX_DOWN])
    if len(servers) == 1:
        return f"server {names} is down"
    more = f" and {len(servers) - MAX_DOWN} more" if len(servers) > MAX_DOWN else ""
    return f"servers {names}{more} are down"


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
    for remark in result.remarks:
        console.say(f"pipegrid: {lead}{remark}")
    for number, servers in sorted(result.good_shares.items()):
        console.detail(f"{lead}share {number}: {', '.join(servers)}")


def fields(result: CheckResult) -> dict[str, Any]:
    """Return its documented JSON form, but for the cap."""
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


def lacks_servers_only(outcome: CheckResult | RenewResult | RepairResult) -> bool:
    """Whether nothing is wrong with an object but that servers are down."""
    from pipegrid.transfer.results import CheckResult

    return (
        isinstance(outcome, CheckResult)
        and outcome.state == "reachable"
        and not outcome.lease_problems
    )


def is_well(outcome: CheckResult | RenewResult | RepairResult) -> bool:
    """Whether there is nothing to tell of an object: it is whole, and nothing was in the way."""
    from pipegrid.transfer.results import CheckResult, RenewResult

    if isinstance(outcome, CheckResult):
        return outcome.healthy and not (outcome.corrupt or outcome.lease_problems)
    if isinstance(outcome, RenewResult):
        return outcome.recoverable and not (outcome.reasons or outcome.unreachable)
    return outcome.whole and not (outcome.uploaded or outcome.reasons or outcome.before.corrupt)
