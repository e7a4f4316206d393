"""
Walking a storage directory to remove what nobody needs: abandoned uploads, expired shares.

Files are removed under their lock only, so a walk may go on beside working processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from pipegrid.disk import files as disk
from pipegrid.disk.reading import is_directory
from pipegrid.storage import leases
from pipegrid.storage.expiry import Expiry
from pipegrid.storage.mutable import files as slotfiles
from pipegrid.storage.uploads import note as sidecar

_NUMBER = re.compile(r"[0-9]+\Z")
_SLOT_COPY = re.compile(r"[a-z2-7]{26}\.[0-9]+\.slot\Z")
_UPLOAD = re.compile(r"[a-z2-7]{26}\.[0-9]+\Z")


def remove_abandoned(incoming: str, too_old: float, worthless: float) -> int:
    """
    Remove unfinished uploads that no process holds and nobody has changed for long.

    Args:
        incoming: the directory of unfinished uploads.
        too_old: since then, of those that have a note; seconds since 1970.
        worthless: the same of those without, which nobody could go on with.

    Returns:
        how many were removed.
    """
    removed = 0
    for name in _names(incoming):
        if _UPLOAD.match(name):
            noted = os.path.lexists(f"{incoming}/{name}{sidecar.SUFFIX}")
            removed += _remove_leftover(f"{incoming}/{name}", too_old if noted else worthless)
        elif _SLOT_COPY.match(name):  # made and renamed within moments, if nobody is killed
            _remove_leftover(f"{incoming}/{name}", worthless)
        elif name.endswith(sidecar.SUFFIX):
            _remove_orphan(f"{incoming}/{name}")
    for directory, name in _walk(incoming):  # what a Tahoe-LAFS server left
        if _NUMBER.match(name):
            removed += _remove_leftover(f"{directory}/{name}", worthless)
    for outer in _directories(incoming):
        for inner in _directories(outer):
            disk.remove_empty(inner)
        disk.remove_empty(outer)
    return removed


def remove_expired(shares: str, expiry: Expiry, now: float) -> int:
    """Remove shares whose leases have all run out; returns how many."""
    removed = 0
    threshold = expiry.threshold(now)
    for directory, name in _walk(shares):
        path = f"{directory}/{name}"
        if not _NUMBER.match(name):
            continue
        if slotfiles.is_mutable(path):
            removed += expiry.mutable and slotfiles.remove_if_expired(path, threshold)
        elif expiry.immutable and leases.remove_if_expired(path, threshold):
            disk.remove_empty(directory)
            removed += 1
    return removed


def _walk(top: str) -> Iterator[tuple[str, str]]:
    """Yield (directory, file name) for all that stands two levels below top, links left out."""
    for outer in _directories(top):
        for inner in _directories(outer):
            for name in _names(inner):
                yield inner, name


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if is_directory(entry)]
    except OSError:
        return []


def _remove_leftover(path: str, too_old: float) -> bool:
    """Remove an unfinished upload that no process holds and that was last changed long ago."""
    fd = disk.lock_if_free(path)
    if fd is None:
        return False
    try:
        if os.fstat(fd).st_mtime > too_old:
            return False
        disk.remove(path + sidecar.SUFFIX)
        disk.remove(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _remove_orphan(note_path: str) -> None:
    """Remove a note whose upload is gone. One whose upload is just beginning is no loss: it has none."""
    with suppress(OSError):
        if not os.path.lexists(note_path.removesuffix(sidecar.SUFFIX)):
            disk.remove(note_path)
