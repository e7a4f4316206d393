"""How the health of a file is shown: what ``check`` and ``repair`` found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipegrid.cli.console import Console
from pipegrid.cli.render import corruption_fields, located, plural

if TYPE_CHECKING:
    from pipegrid.transfer.results import CheckResult


def summary(result: CheckResult) -> str:
    """Return it in one line."""
    if result.total_shares == 0:
        return "healthy: the file is in its cap"
    state = "healthy" if result.healthy else "damaged" if result.recoverable else "lost"
    text = (
        f"{state}: {len(result.good_shares)} of {plural(result.total_shares, 'share')} good, "
        f"any {result.required_shares} restore the file; happiness {result.happiness}"
    )
    if result.corrupt:
        text += f"; {plural(len(result.corrupt), 'problem')} found"
    if result.unreachable:
        text += f"; {plural(len(result.unreachable), 'server')} out of reach"
    return text


def say_more(console: Console, result: CheckResult) -> None:
    """Tell what is damaged or out of reach, and with ``-v`` what is where."""
    for error in result.corrupt:
        console.say(f"pipegrid: {located(error)}")
    for nickname in result.unreachable:
        console.say(f"pipegrid: {nickname} is out of reach")
    for number, servers in sorted(result.good_shares.items()):
        console.detail(f"share {number}: {', '.join(servers)}")


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
    }
