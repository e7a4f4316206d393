"""
What several servers failed with, as one sentence says it to a person: each reason once, with all whose it is.

Pure. Reasons come as sentences about one server, often with advice behind a semicolon, which is left out: the
sentence that they become part of has its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
