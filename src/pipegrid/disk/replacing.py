"""
Small files of our own that are there whole or not at all: made beside their place, and then named.

A process that is killed meanwhile leaves ``.NAME.something`` beside the old file, which stays as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """
    Write a file anew, or for the first time.

    Args:
        mode: of the file afterwards.
        durable: its bytes are on the disk before its name is, and both when this returns; False where
            nothing is lost with them.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    with _beside(path, data, mode, durable) as name:
        os.replace(name, path)
    if durable:
        _sync_name(path)


def create_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """
    Write a file, durably, unless there is one: then that stands, also if it was made at the same moment.

    Raises:
        OSError: it cannot be written.
    """
    with _beside(path, data, mode, True) as name, suppress(FileExistsError):
        os.link(name, path)
    _sync_name(path)


def _sync_name(path: Path) -> None:
    """
    Have a name on the disk: the only cap of a directory that an alias has, or a key that others know.

    The file is there by now, so nothing is said of a directory that cannot be synced.
    """
    with suppress(OSError):
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _beside(path: Path, data: bytes, mode: int, durable: bool) -> Iterator[str]:
    """Give the name of a new file beside the path; it is gone in the end, unless it was renamed."""
    import tempfile  # takes 5 ms with all that it brings, and a command seldom writes here

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield name
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
