"""
Two contents of one directory, of which neither was made from the other, and edits that may be in one already.

Source: the format reference for mutable files, section 7; that of trees, 7.4.
"""

from __future__ import annotations

import math
from typing import TypeGuard

from pipegrid.core.mutable.entries import LazyEntry, pack_entries, unpack_entries


def merge_directories(first: bytes, second: bytes) -> bytes:
    """
    Return the directory with the entries of both: of two with one name, that which was linked later.

    For two versions with one sequence number, each of which somebody was told is stored. What only one of
    them has unlinked is there again: better twice than never. The order does not matter.

    Raises:
        DirectoryError: one of them is not a directory.
    """
    merged = unpack_entries(first)
    for name, entry in unpack_entries(second).items():
        other = merged.get(name)
        if other is None or _age(other) < _age(entry):
            merged[name] = entry
    return pack_entries(merged)


def made_before(before: bytes, after: bytes, current: bytes) -> bytes | None:
    """
    Return what is there now if edits have taken effect in it, all of them; else None: they are to be applied.

    They have if an entry is there byte for byte as they made it; it has the time in it. Then what others
    have made of their names came later, and stays: also what they have linked where a child was taken out.
    Only what is as it was before the edits has come back when versions were merged, and goes again.

    Args:
        before, after: the directory that the edits were applied to, and what became of it.

    Raises:
        DirectoryError: one of them is not a directory.
    """
    old, new, entries = map(unpack_entries, (before, after, current))
    changed = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    if not any(name in new and entries.get(name) == new[name] for name in changed):
        return None
    for name in changed:
        if name in old and entries.get(name) == old[name]:
            del entries[name]
            if name in new:
                entries[name] = new[name]
    return pack_entries(entries)


def later(now: float, replaced: LazyEntry | None) -> float:
    """
    Return the time of a link that is made now: after that of the one it replaces.

    Else one that was linked by a clock that goes wrong, or in the same moment, would come back in a merge.
    """
    return now if replaced is None else max(now, math.nextafter(_linked_at(replaced), math.inf))


def _age(entry: LazyEntry) -> tuple[float, bytes]:
    return _linked_at(entry), entry.stored


def _linked_at(entry: LazyEntry) -> float:
    tahoe = (entry.metadata or {}).get("tahoe")
    linked = tahoe.get("linkmotime") if isinstance(tahoe, dict) else None
    return linked if is_time(linked) else -math.inf


def is_time(value: object) -> TypeGuard[float]:
    """Say whether metadata have a time here: seconds since 1970."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
