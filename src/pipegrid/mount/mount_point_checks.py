"""The directory where a tree is mounted: whether it can be used, and how it is freed."""

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
"""The name of the file system in the system's table of mounts."""

PROGRAMS = ("fusermount3", "fusermount")
UNMOUNT_S = 10.0

READ_AHEAD_KIB = 1024
"""The longest request of FUSE. Linux's default is 128 KiB, and each request costs four changes of threads."""

_INSTALL = "install your system's package of FUSE, such as fuse3 on Debian"


def check_fuse() -> None:
    """
    Check that this system has FUSE, and that this user may use it.

    Raises:
        UsageError: it has not, or the user may not.
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
    Return the path of the program that unmounts for users.

    Raises:
        UsageError: there is none.
    """
    found = next((path for path in map(shutil.which, PROGRAMS) if path is not None), None)
    if found is None:
        raise UsageError(f"FUSE is not installed, since there is no {PROGRAMS[0]}: {_INSTALL}")
    return found


def check_mount_point(directory: str, say: Callable[[str], object]) -> str:
    """
    Return the absolute path of a directory where a tree can be mounted.

    What a killed mount has left there is unmounted first.

    Args:
        say: called with a sentence then.

    Raises:
        UsageError: the directory does not exist, is in use, is not empty, or may not be used.
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
        os.statvfs(path)  # the kernel may remember what ``stat`` shows
        return
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            return  # it is reported later
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
    """Return the command that unmounts, for a message."""
    return f"'{PROGRAMS[0]} -u {shlex.quote(printable(path))}'"


def mounted_type(path: str) -> str | None:
    """Return the type of the file system that is mounted exactly there; None: none."""
    kinds = [each.kind for each in mounted_file_systems() if each.path == path]
    return kinds[-1] if kinds else None  # the last one hides the others


def set_read_ahead(path: str, settings: str = "/sys/class/bdi") -> bool:
    """
    Let the kernel read a mounted tree ahead in requests of ``READ_AHEAD_KIB``, if this process may; blocks.

    Returns:
        False: it may not, as only root may, and few containers; or the system has no such setting.
    """
    try:
        os.statvfs(path)  # returns when FUSE is set up: before, it would set its own value
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
    Unmount a tree of this user; blocks. Returns whether that succeeded.

    Args:
        lazy: also if programs use it; it is freed when they end.
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
