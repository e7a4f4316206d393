"""
Saying that too few shares were found, and why, once for each reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipegrid.core.text import counted
from pipegrid.errors import NotEnoughSharesError

_TOLD_REASONS = 3
_TOLD_SERVERS = 3


def too_few_shares(
    verb: str,
    found: int,
    needed: int,
    servers: int,
    reasons: Mapping[str, str],
    was_any: bool,
    absent: int = 0,
    absent_shares: int | None = None,
) -> NotEnoughSharesError:
    """
    Return the error.

    Args:
        verb: what cannot be done to the file.
        servers: how many there are.
        reasons: server to the sentence that says why it was of no use.
        was_any: some server has had a share, good or not, or could not be asked.
        absent: servers that were out of reach.
        absent_shares: see ``NotEnoughSharesError``.
    """
    because = told_once(reasons)
    if not found and not reasons and not was_any:
        text = (
            f"no share of the file is on any of {counted(servers, 'server')}; check that the cap was copied "
            "right, and that this is the grid that it is for"
        )
    else:
        are = "is" if needed == 1 else "are"
        text = (
            f"cannot {verb} the file: found {counted(found, 'good share')} on {counted(servers, 'server')}, "
            f"but {needed} {are} needed{f' ({because})' if because else ''}; "
            "try again when more servers work"
        )
    return NotEnoughSharesError(text, found, needed, absent, absent_shares)


def told_once(reasons: Mapping[str, str], most: int = _TOLD_REASONS) -> str:
    """Return the sentences, each once, and whom it is about; at most a few of both."""
    told = each_once(reasons)
    texts = told[:most]
    if len(told) > most:
        texts.append(counted(len(told) - most, "other reason"))
    return "; ".join(texts)


def each_once(reasons: Mapping[str, str]) -> list[str]:
    """Return the sentences, each once, and whom it is about, those that are about most servers first."""
    by_reason: dict[str, list[str]] = {}
    for server, reason in sorted(reasons.items()):
        # "alice is down" and "bob is down" are one reason.
        name = rf"(?<![\w.-]){re.escape(server)}(?![\w-]|[.:]\w)"  # and no part of an address
        by_reason.setdefault(re.sub(name, "…", reason) if server else reason, []).append(server)
    told = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    texts = []
    for reason, servers in told:
        if len(servers) == 1:
            texts.append(reason.replace("…", servers[0]))
        elif "…" in reason:
            texts.append(f"{listed(servers)}: {reason.replace('…', 'the server')}")
        else:
            texts.append(f"{reason}: {listed(servers)}")
    return texts


def listed(names: list[str]) -> str:
    """Return the first few names, and how many others there are."""
    others = len(names) - _TOLD_SERVERS
    if others > 1:
        return f"{', '.join(names[:_TOLD_SERVERS])} and {others} others"
    return ", ".join(names)
