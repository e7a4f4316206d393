"""
Which of two versions of a package is the newer one, as rpm sees it. Pure.

Source: rpm's manual, "rpm-version(7)": epoch, version and release are compared one after the other, each by
its runs of digits and of letters; ``~`` is before everything, even the end, ``^`` only behind the end.
"""

from __future__ import annotations

import re
from functools import cmp_to_key
from typing import NamedTuple

_TOKEN = re.compile(r"[0-9]+|[A-Za-z]+|~|\^")

MAX_VERSION_CHARS = 256
"""Of each of the three parts; real ones have a tenth of that."""


class RpmVersion(NamedTuple):
    """
    The version of a package.

    Attributes:
        epoch: "" counts as "0".
    """

    epoch: str
    version: str
    release: str


def compare(one: str, other: str) -> int:
    """Return -1, 0 or 1: one part of a version is older, as good, or newer than another."""
    if one == other:
        return 0
    ours, theirs = _TOKEN.findall(one), _TOKEN.findall(other)
    for mine, yours in zip(ours, theirs, strict=False):
        found = _compare_tokens(mine, yours)
        if found:
            return found
    shared = min(len(ours), len(theirs))
    if len(ours) == len(theirs):
        return 0
    longer, sign = (ours, 1) if len(ours) > shared else (theirs, -1)
    return -sign if longer[shared] == "~" else sign


def _compare_tokens(mine: str, yours: str) -> int:
    if mine == yours:
        return 0
    for mark in "~^":  # older than whatever else goes on
        if mark in (mine, yours):
            return -1 if mine == mark else 1
    if mine.isdigit() != yours.isdigit():
        return 1 if mine.isdigit() else -1
    if mine.isdigit():
        mine, yours = mine.lstrip("0"), yours.lstrip("0")
        if len(mine) != len(yours):
            return 1 if len(mine) > len(yours) else -1
    return (mine > yours) - (mine < yours)


def compare_versions(one: RpmVersion, other: RpmVersion) -> int:
    """Return -1, 0 or 1: one version is older, as good, or newer than another."""
    return (
        compare(one.epoch or "0", other.epoch or "0")
        or compare(one.version, other.version)
        or compare(one.release, other.release)
    )


newest = cmp_to_key(compare_versions)
"""A key for ``max`` and ``sorted``."""
