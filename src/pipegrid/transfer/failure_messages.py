"""The sentences that explain why a transfer failed or fell short, and what the user can do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

from pipegrid.core.text import counted
from pipegrid.errors import NotEnoughSharesError, UnhappyError, naming

# What several servers failed with, as one sentence says it to a person: each reason once, with all whose
# it is.
#
# Pure. Reasons come as sentences about one server, often with advice behind a semicolon, which is left
# out: the sentence that they become part of has its own.

MOST_REASONS = 3
MOST_NAMES = 3

_SHARE = re.compile(r"\bshare \d+")
_NAME = "\0"


def said_once(reasons: Mapping[str, str]) -> str:
    """Return them as one text of a few reasons; empty if there are none."""
    texts = each_once(reasons)
    more = len(texts) - MOST_REASONS
    return "; ".join(texts[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def each_once(reasons: Mapping[str, str]) -> list[str]:
    """
    Return each reason once, with all servers whose it is; the most frequent one first.

    Args:
        reasons: nickname of a server to what it failed with.
    """
    servers: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        servers.setdefault(_template(name, reason), []).append(name)
    return [
        template.replace(_NAME, names[0]) + _others(names[1:])
        for template, names in sorted(servers.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _template(name: str, reason: str) -> str:
    """Return a reason without the server's name and number of the share, which tell equal ones apart."""
    text = reason.partition("; ")[0].strip().rstrip(".")
    named = text
    if name:  # which may be a word that comes again, such as "a", and is then no part of an address
        named = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|[.:]\w)", _NAME, text)
    return _SHARE.sub("a share", named if _NAME in named else f"{_NAME}: {text}")


def _others(names: Sequence[str]) -> str:
    """Return whose reason it is besides."""
    if not names:
        return ""
    if len(names) > MOST_NAMES:
        return f" ({', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more too)"
    return f" ({', '.join(names)} too)"


# Saying that too few shares were found, and why, once for each reason.


@attrs.frozen
class SearchOutcome:
    """
    How a search for the shares of a file ended.

    Attributes:
        found: how many different good shares were found.
        servers: how many there are.
        reasons: server to the sentence that says why it was of no use.
        was_any: some server has had a share, good or not, or could not be asked.
        absent: servers that were out of reach.
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
        """How many shares the servers out of reach may have; see ``NotEnoughSharesError``."""
        return self.absent * -(-self.total_shares // max(1, self.servers))


def too_few_shares(verb: str, outcome: SearchOutcome) -> NotEnoughSharesError:
    """
    Return the error of a search that found too few.

    Args:
        verb: what cannot be done to the file.
    """
    found, needed, servers = outcome.found, outcome.required_shares, outcome.servers
    because = said_once(outcome.reasons)
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


# Why a file could not be stored, as one sentence says it to a person.

LESS = "less with happy"
"""What an error advises, and names an argument; also where only its text is handed on."""


def no_room(server: str, room_bytes: int, needed_bytes: int) -> str:
    """Return the reason of a server that is full, or read-only, which is the same from here."""
    if not room_bytes:
        return f"{server} has no space for a share of {needed_bytes} bytes, or is read-only"
    return f"{server} has space for {room_bytes} bytes, but a share takes {needed_bytes}"


def too_slow(server: str) -> str:
    """Return the reason of a server that was not waited for any more."""
    return f"{server} was much slower than the others"


def not_told(server: str) -> str:
    """Return the reason of a server that refuses shares, and seems to have room."""
    return f"{server} accepts no share of this file at present, and does not say why"


def too_few_servers(file_name: str, servers: int, happy: int, uncertified: int = 0) -> UnhappyError:
    """
    Return the error of a grid that has fewer servers than shares are to be spread over.

    Args:
        servers: how many may be given shares.
        uncertified: how many there are besides, which may not.
    """
    if uncertified:
        text = (
            f"cannot store {file_name}: its shares must be on at least {happy} servers but only {servers} "
            f"of {servers + uncertified} have a valid certificate of a grid manager; see "
            f"'pipegrid status', or ask for {LESS}"
        )
        return naming(UnhappyError(text, servers, happy), LESS)
    text = (
        f"cannot store {file_name}: its shares must be on at least {happy} servers but only {servers} are "
        f"known; add servers or ask for {LESS}"
    )
    return naming(UnhappyError(text, servers, happy), LESS)


@attrs.frozen
class PlacementOutcome:
    """
    How far the shares of a file came.

    Attributes:
        reached: servers of happiness that they have reached.
        happy: how many were wanted.
        stored: how many different shares are stored.
        reasons: nickname of a server to what went wrong there.
        full: the same of those that have no space.
        contended: whether another client seems to be storing the file.
        absent: servers that were out of reach.
    """

    reached: int
    happy: int
    stored: int
    required_shares: int
    full: Mapping[str, str]
    reasons: Mapping[str, str] = attrs.Factory(dict)
    contended: bool = False
    absent: int = 0


def not_spread(file_name: str, outcome: PlacementOutcome) -> UnhappyError:
    """Return the error of a file that could not be spread over enough servers."""
    reached, happy, stored = outcome.reached, outcome.happy, outcome.stored
    why = said_once({**outcome.reasons, **outcome.full}) or "too few accepted it"
    named: tuple[str, ...] = ()
    if outcome.contended:
        advice = "another client may be storing it at this moment; try again when it has finished"
    elif outcome.full:
        advice, named = f"free space there, add servers or ask for {LESS}", (LESS,)
    else:
        advice = "try again when more servers work"
    if reached >= happy:
        text = (
            f"cannot store {file_name}: only {stored} of its shares could be stored, and it takes "
            f"{outcome.required_shares} to get it back ({why}); {advice}"
        )
        return naming(UnhappyError(text, stored, outcome.required_shares, outcome.absent), *named)
    text = (
        f"cannot store {file_name}: its shares reached only {reached} of the {happy} servers wanted "
        f"({why}); {advice}"
    )
    return naming(UnhappyError(text, reached, happy, outcome.absent), *named)


# What was written to fewer servers than wanted: counted, to be reported once for all writes of a run.
#
# Such a write has succeeded. But the loss of fewer servers than usual is enough to lose what was written,
# until a repair has spread it; the user should know.

MOST_SERVERS = 1000
"""Of so many servers reasons are kept."""


class Shortfall:
    """
    The writes of one client that reached fewer servers than wanted.

    Attributes:
        writes: how many.
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
            reached: servers of happiness.
            wanted: as many as there are, or shares if these are fewer.
            reasons: nickname of a server to what kept it from taking shares.
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
        """Return what is to be said: one sentence, or none."""
        if not self.writes:
            return ()
        reached, wanted = self._least
        least = "" if self.writes == 1 else "at least "
        why = said_once(self._reasons)
        text = f"{counted(self.writes, 'write')} reached fewer servers than wanted"
        return (
            f"{text} ({least}{reached} of {wanted}){f': {why}' if why else ''}; "
            "run 'pipegrid check --repair' when more servers take shares",
        )
