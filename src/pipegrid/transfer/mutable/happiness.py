"""
How many servers have to answer, and to take shares, before a write of a mutable file counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipegrid.core.mutable.versions import Version
from pipegrid.core.placement import servers_of_happiness
from pipegrid.core.text import counted
from pipegrid.errors import NoSpace, ServerError, ServerRefused, UnhappyError, WrongSecret
from pipegrid.transfer.mutable.mapping import ShareMap
from pipegrid.transfer.mutable.publishing import Outcome
from pipegrid.transfer.mutable.slot import Slot, quorum
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.reasons import said_once


def check_quorum(slot: Slot, found: ShareMap, version: Version) -> None:
    """Raise UnhappyError if so few servers have answered that no write can reach enough of them."""
    wanted = quorum(slot, version.total_shares)
    if found.answered < wanted:
        few = counted(found.answered, "server has", "servers have")
        raise UnhappyError(
            f"only {few} answered, and {wanted} have to take shares of this mutable "
            f"file; nothing was written{_because(found.failed)}; try again when more servers can "
            "be reached",
            found.answered,
            wanted,
        )


def is_happy(slot: Slot, version: Version, outcome: Outcome) -> bool:
    """Return whether enough servers took shares, and enough of them."""
    reached = servers_of_happiness({number: set(peers) for number, peers in outcome.placed.items()})
    wanted = quorum(slot, version.total_shares)
    return reached >= wanted and len(outcome.placed) >= version.required_shares


def check_happy(slot: Slot, version: Version, outcome: Outcome) -> None:
    """Raise UnhappyError if the shares were not taken by enough servers, or there are too few of them."""
    if not is_happy(slot, version, outcome):
        wanted = quorum(slot, version.total_shares)
        placed = {number: set(peers) for number, peers in outcome.placed.items()}
        reached = servers_of_happiness(placed)
        few = counted(reached, "server")
        failed = {**slot.wrong_enabler, **outcome.failed}
        for peer in slot.peers:
            if (reason := peer.no_uploads()) is not None:
                failed.setdefault(peer, ServerRefused(reason))
        raise UnhappyError(
            f"version {version.name} of this mutable file has reached only {few} of happiness, "
            f"and {wanted} are wanted{_because(failed)}; {_advice(failed)}",
            reached,
            wanted,
        )


def _advice(failed: Mapping[Peer, ServerError]) -> str:
    if any(isinstance(error, NoSpace) for error in failed.values()):
        return "make room there, or add servers"
    if any(isinstance(error, WrongSecret) for error in failed.values()):
        return (
            "such a file was moved there from another server, or somebody else made it: repair it from "
            "another client, or delete it there"
        )
    return "try again when more servers can be reached"


def _because(failed: Mapping[Peer, ServerError]) -> str:
    told = said_once({peer.name: str(error) for peer, error in failed.items()})
    return f": {told}" if told else ""
