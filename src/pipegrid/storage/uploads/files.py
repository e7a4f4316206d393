"""
The files of unfinished uploads: made, taken up again, given up, and moved to where complete shares are.

What they mean is in ``table`` and ``upload``, how they are filled in ``writer``; here are the races
with other processes, each of which may make, lock, rename and remove the same names.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from pipegrid.core import base32
from pipegrid.disk import files as disk
from pipegrid.disk.private import PRIVATE_DIRECTORY, PRIVATE_FILE, make_private
from pipegrid.disk.unnamed import give_name
from pipegrid.storage import containers
from pipegrid.storage.paths import SHARE_NUMBERS
from pipegrid.storage.uploads import note as sidecar

_NOTED = re.compile(r"([a-z2-7]{26})\.([0-9]+)" + re.escape(sidecar.SUFFIX))


def open_new(path: str) -> int | None:
    """Open, or make, and lock a file in ``incoming``; None if somebody else has the lock."""
    flags = os.O_RDWR | os.O_CREAT
    return _in_directory(path, lambda: disk.open_locked(path, flags, mode=PRIVATE_FILE))


def create(path: str) -> int | None:
    """Make and lock a file in ``incoming``; None if there is one."""
    try:
        return disk.create_locked(path, PRIVATE_FILE)
    except FileNotFoundError:
        return _in_directory(path, lambda: disk.create_locked(path, PRIVATE_FILE))


def open_empty(path: str, final_path: str) -> int | None:
    """Open and lock a file in ``incoming`` that is empty; None: another process has it, or had it."""
    fd = open_new(path)
    if fd is not None and (os.fstat(fd).st_size or os.path.lexists(final_path)):
        os.close(fd)
        fd = None
    return fd


def _in_directory(path: str, call: Callable[[], int | None]) -> int | None:
    """Call, having made the directory if it turns out to be missing."""
    for _ in range(8):  # a Tahoe-LAFS server that starts may remove the directory
        with suppress(FileNotFoundError):
            return call()
        make_private(os.path.dirname(path))
    raise FileNotFoundError(errno.ENOENT, "the directory vanishes", path)


def give_up(path: str, fd: int) -> None:
    """Remove a file that was just made, and close it; what cannot be removed is left to housekeeping."""
    with suppress(OSError):
        disk.remove(path)
    os.close(fd)


def remove_own(path: str, fd: int) -> None:
    """Remove an unfinished upload and its note, if its file is still the one that is open."""
    if disk.names_file(path, fd):
        disk.remove(path + sidecar.SUFFIX)
        disk.remove(path)


def resume(
    incoming_path: str, boot_id: bytes, secret_hash: bytes | None = None
) -> tuple[int, sidecar.Note] | None:
    """
    Take up an upload that no process has open.

    Args:
        secret_hash: of the upload that it has to be of; None: of any.

    Returns:
        the locked file and what its note says, or None if there is nothing to take up: no file, no
        note to believe, or somebody else has the lock.
    """
    try:
        fd = disk.open_locked(incoming_path, os.O_RDWR)
    except FileNotFoundError:
        return None
    if fd is None:
        return None
    try:
        note = read_note(incoming_path, fd, boot_id)
    except BaseException:
        os.close(fd)
        raise
    if note is None or secret_hash not in (None, note.secret_hash):
        os.close(fd)
        return None
    return fd, note


def write_note(incoming_path: str, note: sidecar.Note) -> None:
    """Note what has arrived of an unfinished upload beside its file."""
    fd = os.open(
        incoming_path + sidecar.SUFFIX,
        os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        PRIVATE_FILE,
    )
    try:
        disk.write_all(fd, note.pack(), 0)
    finally:
        os.close(fd)


def read_note(incoming_path: str, fd: int, boot_id: bytes) -> sidecar.Note | None:
    """Return the note about a file whose lock is held, or None if there is none to believe."""
    try:
        note_fd = os.open(
            incoming_path + sidecar.SUFFIX,
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        )
    except OSError:
        return None
    try:
        note = sidecar.parse(os.read(note_fd, 4096))
    except (OSError, ValueError):
        return None
    finally:
        os.close(note_fd)
    status = os.fstat(fd)
    whole = containers.container_bytes(note.share_bytes)
    if (note.boot_id, note.inode, whole) != (boot_id, status.st_ino, status.st_size):
        return None
    return note


def noted(directory: str) -> Iterator[tuple[bytes, int]]:
    """Yield storage index and number of all unfinished uploads with a note; none if there is no directory."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        match = _NOTED.fullmatch(name)
        if match is not None and match[2] in SHARE_NUMBERS:
            with suppress(ValueError):  # 26 characters that are no 16 bytes
                yield base32.decode(match[1]), SHARE_NUMBERS[match[2]]


def rename(incoming: str, final: str, new_index: bool) -> tuple[str, ...]:
    """
    Move a complete share to its place, making directories only when they turn out to be missing.

    Args:
        new_index: expect no directory to be there.

    Returns:
        the directories that changed.

    Raises:
        FileExistsError: the share itself is there now.
    """
    return _place(final, new_index, partial(_moved, incoming, final))


def name(fd: int, final: str, new_index: bool) -> tuple[str, ...]:
    """
    Give a complete share that has no name its place, as ``rename`` does with one in ``incoming``.

    Raises:
        FileExistsError: the share is there now.
    """
    return _place(final, new_index, partial(_named, fd, final))


def _place(final: str, new_index: bool, move: Callable[[], bool]) -> tuple[str, ...]:
    inner = final.rpartition("/")[0]  # as ``Paths`` makes them
    outer = inner.rpartition("/")[0]
    if not new_index:
        if os.path.lexists(final):  # of what has no name nobody knows before (see ``whole``)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
        if move():
            return (inner,)
    for _ in range(8):  # a collector of garbage may remove the directory before our file is in it
        try:
            os.mkdir(inner, PRIVATE_DIRECTORY)
        except FileExistsError:
            if os.path.lexists(final):
                raise
        except FileNotFoundError:
            _make_both(outer, inner)
        if move():
            break
    else:
        raise FileNotFoundError(errno.ENOENT, "the directory vanishes", inner)
    return inner, outer, outer.rpartition("/")[0]


def _make_both(outer: str, inner: str) -> None:
    """Make two directories, without looking around: as a rule it is just these that lack."""
    try:
        with suppress(FileExistsError):
            os.mkdir(outer, PRIVATE_DIRECTORY)
        with suppress(FileExistsError):
            os.mkdir(inner, PRIVATE_DIRECTORY)
    except FileNotFoundError:
        make_private(inner)


def _moved(incoming: str, final: str) -> bool:
    try:
        os.rename(incoming, final)
    except FileNotFoundError:
        return False
    return True


def _named(fd: int, final: str) -> bool:
    try:
        give_name(fd, final)
    except FileNotFoundError:
        return False
    return True
