"""The directory where a tree is mounted: checks whether it can be used, and unmounts it."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable

from pipegrid.core.text import printable
from pipegrid.disk.mount_table import mounted_file_systems
from pipegrid.errors import UsageError

DEVICE = "/dev/fuse"
FILE_SYSTEM = "pipegrid"
"""Name of the file system in the system's mount table."""

PROGRAMS = ("fusermount3", "fusermount")
UNMOUNT_S = 10.0

READ_AHEAD_KIB = 1024
"""Read-ahead of the kernel in KiB. Linux's default is 128; each request costs four switches of threads."""

_INSTALL = "install your system's package of FUSE, such as fuse3 on Debian"


def check_fuse() -> None:
    """
    Check that this system has FUSE, and that this user may use it.

    Raises:
        UsageError: FUSE is not installed, or the user may not use it.
    """
    unmounter()
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise UsageError(
            f"this system has no FUSE, since {DEVICE} is missing: {_INSTALL}; in a container, start it with "
            f"--device {DEVICE} --cap-add SYS_ADMIN"
        ) from None
    except OSError as error:
        raise UsageError(
            f"FUSE cannot be used, since {DEVICE} cannot be opened: {error.strerror}; the system's "
            "administrator can permit it"
        ) from error


def unmounter() -> str:
    """
    Return the path of the program with which users unmount, such as ``fusermount3``.

    Raises:
        UsageError: the program is not installed.
    """
    found = next((path for path in map(shutil.which, PROGRAMS) if path is not None), None)
    if found is None:
        raise UsageError(f"FUSE is not installed, since there is no {PROGRAMS[0]}: {_INSTALL}")
    return found


def check_mount_point(directory: str, say: Callable[[str], object]) -> str:
    """
    Return the absolute path of a directory where a tree can be mounted.

    If a killed process of PipeGrid has left its mount on the directory, that is unmounted first.

    Args:
        say: called with a sentence if such a mount is unmounted.

    Raises:
        UsageError: the directory does not exist, is in use, is not empty, or is not writable.
    """
    path = os.path.realpath(directory)
    shown = printable(directory)
    _unmount_dead(path, shown, say)
    if mounted_type(path) is not None:
        raise UsageError(
            f"{shown} is in use: something is mounted there; unmount it with {unmount_command(path)}, or "
            "choose another directory"
        )
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise UsageError(
            f"there is no directory {shown}; make it with 'mkdir {shlex.quote(shown)}'"
        ) from None
    except NotADirectoryError:
        raise UsageError(f"{shown} is not a directory; choose an empty one") from None
    except OSError as error:
        raise UsageError(
            f"{shown} cannot be used: {error.strerror}; choose another directory"
        ) from error
    if names:
        raise UsageError(
            f"{shown} is not empty, and its files would be hidden; choose an empty directory"
        )
    if not os.access(path, os.W_OK):
        raise UsageError(
            f"you may not write to {shown}, so nothing can be mounted there; choose another one"
        )
    return path


def _unmount_dead(path: str, shown: str, say: Callable[[str], object]) -> None:
    if not (mounted_type(path) or "").startswith("fuse"):
        return
    try:
        os.statvfs(path)  # not ``stat``, whose result the kernel may have cached
        return
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            return  # reported later
    if mounted_type(path) == f"fuse.{FILE_SYSTEM}":
        unmount(path, lazy=True)
        if mounted_type(path) is None:
            say(f"{shown} was left by a mount whose process was killed; it has been unmounted")
            return
    raise UsageError(
        f"{shown} is left of a mount whose process has ended (Transport endpoint is not connected); "
        f"remove it with {unmount_command(path)}"
    )


def unmount_command(path: str) -> str:
    """Return the command that unmounts a directory, for a message."""
    return f"'{PROGRAMS[0]} -u {shlex.quote(printable(path))}'"


def mounted_type(path: str) -> str | None:
    """Return the type of the file system that is mounted on a directory itself; None: none is."""
    kinds = [each.kind for each in mounted_file_systems() if each.path == path]
    return kinds[-1] if kinds else None  # the last mount hides the others


def set_read_ahead(path: str, settings: str = "/sys/class/bdi") -> bool:
    """
    Make the kernel read a mounted tree at least ``READ_AHEAD_KIB`` ahead, if possible; blocks the thread.

    Returns:
        False: the setting does not exist, or this process cannot change it; usually only root can.
    """
    try:
        os.statvfs(path)  # waits until FUSE is set up; FUSE would override an earlier setting
        device = [each.device for each in mounted_file_systems() if each.path == path][-1]
        name = f"{os.major(device)}:{os.minor(device)}"
        with open(f"{settings}/{name}/read_ahead_kb", "r+") as file:
            if int(file.read()) < READ_AHEAD_KIB:
                file.seek(0)
                file.write(f"{READ_AHEAD_KIB}\n")
    except (OSError, IndexError, ValueError):
        return False
    return True


def unmount(path: str, lazy: bool = False) -> bool:
    """
    Unmount a tree of this user, and return whether that succeeded; blocks the thread up to ``UNMOUNT_S``.

    Args:
        lazy: detach the tree even if programs use it; it is unmounted when they have closed their files.
    """
    options = ["-u", "-z"] if lazy else ["-u"]
    try:
        done = subprocess.run(
            [unmounter(), *options, "--", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=UNMOUNT_S,
        )
    except (OSError, subprocess.TimeoutExpired, UsageError):
        return False
    return done.returncode == 0
