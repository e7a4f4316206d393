"""
Why a file could not be stored, as one sentence says it to a person.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipegrid.errors import UnhappyError, naming
from pipegrid.transfer.reasons import said_once

LESS = "less with happy"
"""What an error advises, and names an argument; also where only its text is handed on."""


def no_room(server: str, room_bytes: int, needed_bytes: int) -> str:
    """Return the reason of a server that is full, or read-only, which is the same from here."""
    if not room_bytes:
        return f"{server} has no room, or is read-only, where a share takes {needed_bytes} bytes"
    return f"{server} has room for {room_bytes} bytes, where a share takes {needed_bytes}"


def too_slow(server: str) -> str:
    """Return the reason of a server that was not waited for any more."""
    return f"{server} was much slower than the others"


def not_told(server: str) -> str:
    """Return the reason of a server that refuses shares, and seems to have room."""
    return f"{server} takes no share of this file at present, and does not say why"


def too_few_servers(file_name: str, servers: int, happy: int, uncertified: int = 0) -> UnhappyError:
    """
    Return the error of a grid that has fewer servers than shares are to be spread over.

    Args:
        servers: how many may be given shares.
        uncertified: how many there are besides, which may not.
    """
    if uncertified:
        text = (
            f"cannot store {file_name}: its shares shall be on at least {happy} servers but only {servers} "
            f"of {servers + uncertified} have a valid certificate of a grid manager; see "
            f"'pipegrid status', or ask for {LESS}"
        )
        return naming(UnhappyError(text, servers, happy), LESS)
    text = (
        f"cannot store {file_name}: its shares shall be on at least {happy} servers but only "
        f"{servers} are there; add servers or ask for {LESS}"
    )
    return naming(UnhappyError(text, servers, happy), LESS)


def not_spread(
    file_name: str,
    *,
    reached: int,
    happy: int,
    stored: int,
    required_shares: int,
    reasons: Mapping[str, str],
    full: Mapping[str, str],
    contended: bool,
    absent: int = 0,
) -> UnhappyError:
    """
    Return the error of a file that could not be spread over enough servers.

    Args:
        reached: servers of happiness that its shares have reached.
        stored: how many different shares are there.
        reasons: nickname of a server to what went wrong there.
        full: the same of those that have no room.
        contended: whether somebody else seems to be storing it.
        absent: servers that were out of reach.
    """
    why = said_once({**reasons, **full}) or "too few accepted it"
    named: tuple[str, ...] = ()
    if contended:
        advice = "somebody else may be storing it at this moment, so try again when that is done"
    elif full:
        advice, named = f"make room there, add servers or ask for {LESS}", (LESS,)
    else:
        advice = "try again when more servers work"
    if reached >= happy:
        text = (
            f"cannot store {file_name}: only {stored} of its shares could be stored, and it takes "
            f"{required_shares} to get it back ({why}); {advice}"
        )
        return naming(UnhappyError(text, stored, required_shares, absent), *named)
    text = (
        f"cannot store {file_name}: its shares reached only {reached} of the {happy} servers wanted "
        f"({why}); {advice}"
    )
    return naming(UnhappyError(text, reached, happy, absent), *named)
