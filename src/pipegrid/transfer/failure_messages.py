"""Error messages for transfers that failed or reached too few servers, with advice for the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pipegrid.core.text import counted
from pipegrid.errors import NotEnoughSharesError, UnhappyError, naming

# The failures of several servers as one sentence: each reason once, with the servers that it concerns.
#
# Pure. Each reason is a sentence about one server, often with advice after a semicolon. That advice is left
# out, since the combined sentence has its own advice.

MOST_REASONS = 3
MOST_NAMES = 3

_SHARE = re.compile(r"\bshare \d+")
_NAME = "\0"


def joined_once(reasons: Mapping[str, str]) -> str:
    """
    Return one text with the most frequent reasons, at most ``MOST_REASONS``, and the number of other reasons;
    empty if there are no reasons.
    """
    texts = each_once(reasons)
    more = len(texts) - MOST_REASONS
    return "; ".join(texts[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def each_once(reasons: Mapping[str, str]) -> list[str]:
    """
    Return each reason once, the most frequent one first; name at most ``MOST_NAMES`` + 1 servers that it
    concerns, and count the others.

    Args:
        reasons: maps a server's nickname to its failure.
    """
    servers: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        servers.setdefault(_template(name, reason), []).append(name)
    return [
        template.replace(_NAME, names[0]) + _others(names[1:])
        for template, names in sorted(servers.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _template(name: str, reason: str) -> str:
    """
    Return a reason with placeholders for the server's name and the share number, so that the same failure of
    two servers gives equal texts.
    """
    text = reason.partition("; ")[0].strip().rstrip(".")
    named = text
    if name:
        # The name may be a common word, such as "a", so do not replace parts of addresses and other words.
        named = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|[.:]\w)", _NAME, text)
    return _SHARE.sub("a share", named if _NAME in named else f"{_NAME}: {text}")


def _others(names: Sequence[str]) -> str:
    """
    Return, in parentheses, the other servers that the same reason concerns; at most ``MOST_NAMES`` by name.
    """
    if not names:
        return ""
    if len(names) > MOST_NAMES:
        return f" ({', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more too)"
    return f" ({', '.join(names)} too)"


# The error for too few shares, with the reason of each failure once.


class SearchOutcome(NamedTuple):
    """
    The outcome of a search for the shares of a file.

    Attributes:
        found: number of different good shares found.
        servers: number of servers of the grid.
        reasons: maps a server's nickname to the sentence that describes its failure.
        was_any: whether some server had a share, good or damaged.
        absent: number of servers that were unreachable.
    """

    found: int
    required_shares: int
    total_shares: int
    servers: int
    reasons: Mapping[str, str]
    was_any: bool
    absent: int = 0

    @property
    def absent_shares(self) -> int:
        """
        Number of shares that the unreachable servers have if all shares are spread evenly over the grid.
        """
        return self.absent * -(-self.total_shares // max(1, self.servers))


def too_few_shares(verb: str, outcome: SearchOutcome) -> NotEnoughSharesError:
    """
    Return the error for a search that found too few shares.

    Args:
        verb: names what cannot be done to the file, such as "read".
    """
    found, needed, servers = outcome.found, outcome.required_shares, outcome.servers
    because = joined_once(outcome.reasons)
    if not found and not outcome.reasons and not outcome.was_any:
        text = (
            f"no share of the file is on any of {counted(servers, 'server')}; check that the cap was copied "
            "right, and that it belongs to this grid"
        )
    else:
        are = "is" if needed == 1 else "are"
        text = (
            f"cannot {verb} the file: found {counted(found, 'good share')} on {counted(servers, 'server')}, "
            f"but {needed} {are} needed{f' ({because})' if because else ''}; "
            "try again when more servers work"
        )
    return NotEnoughSharesError(text, found, needed, outcome.absent, outcome.absent_shares)


# Why a file could not be stored, as one sentence.

LESS = "less with happy"
"""
Advice in error messages: to ask for fewer servers by the argument ``happy`` of the library; other code finds
this advice in a message by this constant.
"""


def servers_full(server: str, space_bytes: int, needed_bytes: int) -> str:
    """Return the sentence for a server that is full or read-only; a client cannot distinguish the two."""
    if not space_bytes:
        return f"{server} has no space for a share of {needed_bytes} bytes, or is read-only"
    return f"{server} has space for {space_bytes} bytes, but a share takes {needed_bytes}"


def too_slow(server: str) -> str:
    """Return the sentence for a server that was given up as a straggler."""
    return f"{server} was much slower than the others"


def not_reported(server: str) -> str:
    """Return the sentence for a server that refuses shares although it seems to have space."""
    return f"{server} accepts no share of this file at present, and does not say why"


def too_few_servers(file_name: str, servers: int, happy: int, uncertified: int = 0) -> UnhappyError:
    """
    Return the error for a grid with fewer servers than happiness needs.

    Args:
        servers: number of servers that may get shares.
        uncertified: number of further servers, which lack a valid certificate.
    """
    why = "are known; add servers"
    if uncertified:
        all_servers = servers + uncertified
        why = f"of {all_servers} have a valid certificate of a grid manager; see 'pipegrid status',"
    text = (
        f"cannot store {file_name}: its shares must be on at least {happy} servers but only {servers} "
        f"{why} or ask for {LESS}"
    )
    return naming(UnhappyError(text, servers, happy), LESS)


class PlacementOutcome(NamedTuple):
    """
    How many servers the shares of a file reached.

    Attributes:
        reached: servers of happiness reached.
        happy: servers of happiness wanted.
        stored: number of different shares stored.
        reasons: maps a server's nickname to its failure.
        full: maps the nickname of a server without space to the sentence about its space.
        contended: whether another client seems to be storing the file.
        absent: number of servers that were unreachable.
    """

    reached: int
    happy: int
    stored: int
    required_shares: int
    full: Mapping[str, str]
    reasons: Mapping[str, str] = MappingProxyType({})
    contended: bool = False
    absent: int = 0


def not_spread(file_name: str, outcome: PlacementOutcome) -> UnhappyError:
    """Return the error for a file that could not be spread over enough servers."""
    reached, happy, stored = outcome.reached, outcome.happy, outcome.stored
    why = joined_once({**outcome.reasons, **outcome.full}) or "too few accepted it"
    named: tuple[str, ...] = ()
    if outcome.contended:
        advice = "another client may be storing it at this moment; try again when it has finished"
    elif outcome.full:
        advice, named = f"free space there, add servers or ask for {LESS}", (LESS,)
    else:
        advice = "try again when more servers work"
    if reached >= happy:
        reached, happy = stored, outcome.required_shares
        what = f"only {stored} of its shares could be stored, and it takes {happy} to get it back"
    else:
        what = f"its shares reached only {reached} of the {happy} servers wanted"
    text = f"cannot store {file_name}: {what} ({why}); {advice}"
    return naming(UnhappyError(text, reached, happy, outcome.absent), *named)


# Writes that reached fewer servers than wanted: counted, and reported once for all writes of a command.
#
# Such a write has succeeded. But until a repair has spread its shares, the loss of fewer servers than usual
# can destroy the data, so the user should know.

MOST_SERVERS = 1000
"""Maximum number of servers whose reasons are kept."""


class Shortfall:
    """
    The writes of one client that reached fewer servers than wanted.

    Attributes:
        writes: number of such writes.
    """

    def __init__(self) -> None:
        self.writes = 0
        self._least = (0, 0)
        self._reasons: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Shortfall: {self.writes} writes>"

    def note(self, reached: int, wanted: int, reasons: Mapping[str, str]) -> None:
        """
        Count a write if it reached too few servers.

        Args:
            reached: servers of happiness reached.
            wanted: the smaller of the number of servers and the number of shares.
            reasons: maps a server's nickname to the reason why the server accepted no share.
        """
        if reached >= wanted:
            return
        if not self.writes or reached < self._least[0]:
            self._least = reached, wanted
        self.writes += 1
        for name, why in reasons.items():
            if len(self._reasons) < MOST_SERVERS:
                self._reasons[name] = why

    def sentences(self) -> tuple[str, ...]:
        """Return a tuple with one sentence for the user; an empty tuple if no write fell short."""
        if not self.writes:
            return ()
        reached, wanted = self._least
        least = "" if self.writes == 1 else "at least "
        why = joined_once(self._reasons)
        text = f"{counted(self.writes, 'write')} reached fewer servers than wanted"
        return (
            f"{text} ({least}{reached} of {wanted}){f': {why}' if why else ''}; "
            "run 'pipegrid check --repair' when more servers take shares",
        )
