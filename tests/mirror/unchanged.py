"""How to tell that a directory was left alone, and one that must be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase


def look_of(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return number, size and times of all that is there; of the last change of attributes, too."""
    if not os.path.lexists(directory):
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for path in (directory, *directory.rglob("*")):
        status = path.lstat()
        found[str(path)] = (
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
    return found


def _is_device(path: Any) -> bool:
    """Whether this is such as /dev/null, which one may write to; files may be below /dev as well."""
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def make_read_only(test: SynchronousTestCase | TestCase, code: int = errno.EROFS) -> None:
    """Have the disk refuse to be written to, as one that is mounted so, or another user's."""
    really = os.open

    def open_to_read(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not _is_device(path):
            raise OSError(code, os.strerror(code), path)
        return really(path, flags, *args, **options)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    def make_nothing(path: Any, *_: Any, **__: Any) -> None:
        raise FileExistsError(path) if os.path.lexists(path) else OSError(code, os.strerror(code))

    test.patch(os, "open", open_to_read)
    test.patch(os, "mkdir", make_nothing)
    for name in (
        *("rename", "replace", "unlink", "remove", "link", "truncate", "ftruncate"),
        *("setxattr", "removexattr"),
    ):
        test.patch(os, name, refuse)
