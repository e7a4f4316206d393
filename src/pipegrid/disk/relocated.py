"""
A directory that used to be kept elsewhere: moved to its new place, with a link where it was.

Versions of before follow the link, and so have the same files and take the same lock. Whatever is in the way
of moving it, it stays where it is, whole, and is used there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from pipegrid.disk.partname import SUFFIX
from pipegrid.disk.private import make_directory, open_private
from pipegrid.disk.replacing import sync_path


def relocated(old: Path, new: Path) -> Path:
    """
    Return where the directory is now: ``new``, or ``old`` if it could not be moved.

    Args:
        old: with a file ``lock`` in it, which whoever changes it has locked.
        new: if it is there already, that is the one, and ``old`` stays as it is.
    """
    if os.path.lexists(new) or not _is_itself(old):
        return new
    lock = -1
    try:
        lock = open_private(str(old / "lock"), os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_itself(old) and not os.path.lexists(new):  # nobody else has moved it since
            _move(old, new)
    except OSError:  # somebody uses it, or the new place cannot be written
        pass
    finally:
        if lock >= 0:
            os.close(lock)
    return new if os.path.lexists(new) else old


def _is_itself(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _move(old: Path, new: Path) -> None:
    make_directory(new.parent, 0o700)
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(old, new)
        shutil.rmtree(old, ignore_errors=True)
    with suppress(OSError):  # then versions of before begin anew, as after a cache was emptied
        os.symlink(new.absolute(), old)


def _copy(old: Path, new: Path) -> None:
    """
    Copy it to another file system; it appears when all of it is on the disk, and is there for good when this
    returns: the other file system may forget the old one before this one knows the new name.

    What a process that was killed has left of its copy has one name, and goes; whoever copies has the lock.
    """
    beside = new.with_name(f".{new.name}{SUFFIX}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        shutil.copytree(old, beside, symlinks=True)
        for path in (*beside.iterdir(), beside):
            sync_path(path)
        os.rename(beside, new)
        sync_path(new.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
