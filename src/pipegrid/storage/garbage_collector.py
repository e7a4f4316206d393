"""Removal of shares whose leases have expired, and of what abandoned uploads have left."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.safe_open import is_directory
from pipegrid.storage import share_file
from pipegrid.storage.mutable import slot_file as slotfiles
from pipegrid.storage.share_file import Expiry
from pipegrid.storage.space_quota import file_bytes
from pipegrid.storage.uploads import incoming_files as sidecar

# A file is removed only while its lock is held, so other processes may use the directory at the same time.

_NUMBER = re.compile(r"[0-9]+\Z")
_SLOT_COPY = re.compile(r"[a-z2-7]{26}\.[0-9]+\.slot\Z")
_UPLOAD = re.compile(r"[a-z2-7]{26}\.[0-9]+\Z")


def remove_abandoned(incoming: str, too_old: float, worthless: float) -> int:
    """
    Remove unfinished uploads that no process has open and that have not changed for a long time.

    Args:
        incoming: the directory of unfinished uploads.
        too_old: uploads with a note are removed if they were last changed before this time; seconds since
            1970.
        worthless: the same for uploads without a note, which cannot be resumed.

    Returns:
        how many uploads were removed.
    """
    removed = 0
    for name in _names(incoming):
        if _UPLOAD.match(name):
            noted = os.path.lexists(f"{incoming}/{name}{sidecar.SUFFIX}")
            removed += _remove_leftover(f"{incoming}/{name}", too_old if noted else worthless)
        elif _SLOT_COPY.match(name):  # a copy that a killed process left
            _remove_leftover(f"{incoming}/{name}", worthless)
        elif name.endswith(sidecar.SUFFIX):
            _remove_orphan(f"{incoming}/{name}")
    for directory, name in _walk(incoming):  # uploads that a Tahoe-LAFS server left
        if _NUMBER.match(name):
            removed += _remove_leftover(f"{directory}/{name}", worthless)
    for outer in _directories(incoming):
        for inner in _directories(outer):
            disk.remove_empty(inner)
        disk.remove_empty(outer)
    return removed


def remove_expired(
    shares: str,
    expiry: Expiry,
    now: float,
    gone: Callable[[str, int], object] = lambda directory, size: None,
    changing: Callable[[str, str], AbstractContextManager[object]] = lambda *_: nullcontext(),
) -> int:
    """
    Remove shares whose leases have all expired; return how many were removed.

    Args:
        gone: called for each removed share, with the directory of its storage index and the length of its
            file.
        changing: returns a context manager that is entered while a share may be removed; called with the
            share's directory and path.
    """
    removed = 0
    threshold = expiry.threshold(now)
    for directory, name in _walk(shares):
        if not _NUMBER.match(name):
            continue
        path = f"{directory}/{name}"
        with changing(directory, path):
            size = file_bytes(path)  # a lease that is added after this keeps the share
            if _remove_if_expired(directory, path, expiry, threshold):
                gone(directory, size)
                removed += 1
    return removed


def _remove_if_expired(directory: str, path: str, expiry: Expiry, threshold: float) -> bool:
    if slotfiles.is_mutable_file(path):
        return expiry.mutable and slotfiles.remove_if_expired(path, threshold)
    if expiry.immutable and share_file.remove_if_expired(path, threshold):
        disk.remove_empty(directory)
        return True
    return False


def _walk(top: str) -> Iterator[tuple[str, str]]:
    """
    Yield (directory, file name) for all files in the directories two levels below top. Directories that are
    symbolic links are skipped.
    """
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
    """Remove an unfinished upload that no process has open and that was last changed before ``too_old``."""
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
    """
    Remove a note whose upload does not exist. An upload that is just beginning has no note yet, so its note
    cannot be removed here.
    """
    with suppress(OSError):
        if not os.path.lexists(note_path.removesuffix(sidecar.SUFFIX)):
            disk.remove(note_path)
