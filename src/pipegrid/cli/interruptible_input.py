"""
Standard input, and other pipes, that a thread can wait for without being stuck.

A pipe may stay silent for ever, and a thread that reads it cannot be cancelled. So this one waits
for either the pipe or a word from the reactor's thread. A named pipe that nobody writes to could not even be
opened by a thread that waits.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from contextlib import suppress
from typing import BinaryIO

from pipegrid.errors import SourceError


class InterruptibleInput:
    """
    A pipe or terminal as a file object of which only ``read`` is there.

    Attributes:
        name: what errors call it.
    """

    def __init__(self, file: BinaryIO, name: str = "standard input") -> None:
        self.name = name
        self._file = file
        self._fd = file.fileno()
        self._given_up, self._give_up = os.pipe()

    def read(self, length: int = -1, /) -> bytes:
        """
        Return the next bytes, at most ``length``; none at the end.

        Raises:
            OSError: it cannot be read, or nobody wants it any more.
        """
        poll = select.poll()
        for fd in (self._fd, self._given_up):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._given_up in ready:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            with suppress(BlockingIOError):  # another reader was quicker
                return os.read(self._fd, length if length > 0 else 1 << 16)

    def give_up(self) -> None:
        """Make a ``read`` that waits, or is yet to come, fail. From any thread; once."""
        os.close(self._give_up)


class NoInput:
    """Standard input where there is none; reading it says so."""

    name = "standard input"

    def read(self, length: int = -1, /) -> bytes:
        """Raises SourceError, always: standard input is closed."""
        raise SourceError("cannot read standard input: it is closed")


def read_given(path: str, stdin: BinaryIO | None, most: int) -> bytes:
    """
    Return what is in a file, or its beginning.

    Args:
        path: ``-`` is standard input.

    Raises:
        SourceError: there is no standard input.
        OSError: it cannot be read.
        ValueError: no file can be called so.
    """
    if path != "-":
        with open(path, "rb") as file:
            return file.read(most)
    return NoInput().read() if stdin is None else read_whole(stdin, most)


def read_whole(file: BinaryIO, most: int) -> bytes:
    """
    Return what there is to read, or its beginning, however long that takes.

    Another program may have made standard input one that does not wait: then a read returns what is there by
    now, or None, and not what there will be.
    """
    try:
        waits = os.get_blocking(file.fileno())
    except (OSError, ValueError):  # not a file at all
        waits = True
    if waits:
        return file.read(most)
    data = b""
    while len(data) < most:
        piece: bytes | None = file.read(most - len(data))
        if piece is None:
            select.select([file], [], [])
        elif not piece:
            break
        else:
            data += piece
    return data


def interruptible(file: BinaryIO) -> BinaryIO | InterruptibleInput:
    """Return standard input in a form that nobody gets stuck on; a regular file is fine as it is."""
    try:
        regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # not a file at all
        return file
    return file if regular else InterruptibleInput(file)


def opened(path: str, stdin: BinaryIO | None) -> str | BinaryIO | InterruptibleInput | NoInput:
    """
    Return what a thread may read of what a command names: the path itself, if nobody waits there for ever.

    Args:
        path: ``-`` is standard input.
        stdin: None: it is closed.
    """
    if path != "-":
        return _waiting(path) or path
    return NoInput() if stdin is None else interruptible(stdin)


def _waiting(path: str) -> InterruptibleInput | None:
    """Open a named pipe or a device, which may never end; None: it is another thing, or cannot be opened."""
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):  # who opens it next says so
        return None
    return InterruptibleInput(os.fdopen(fd, "rb", buffering=0), path)
