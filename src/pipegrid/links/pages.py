"""
What a relay has under way: bytes, or pages that the kernel moves from socket to socket.

A relay stands for a network, so it should not take the processors of what it connects. Linux moves pages from
a socket to a pipe, and from there to another socket (``splice``), where reading and writing would copy each
byte twice. So bulk data waits for its time in pipes (``Pages``), each read in one of its own; what is small,
or comes where there is no splice, or when all pipes are in use, is read as always (``Copied``).

This sets a method of Twisted's sockets (``doRead``), as reactors call it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pipegrid.reactor.sockets import Buffer, is_free, send_now

BULK_BYTES = 32 << 10
"""After a read of so much, the next one is of pages: for less, copying is cheaper than two more calls."""

PIPE_BYTES = 256 << 10
"""
Asked for each pipe: as many pages at least as the pieces that a read comes in.

A user without privileges has 64 MiB for all pipes, used or not.
"""

MAX_PIPES = 192
"""For all connections of a link."""


class Copied:
    """Bytes that were read into memory; ``Pages`` are those that stay in the kernel."""

    __slots__ = ("_data",)

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data)

    def deliver(self, size_bytes: int, socket: Any) -> Buffer:
        """
        Send the first so many bytes, of those that there are; they are gone from here.

        Args:
            socket: as ``reactor.sockets.socket_of`` returned it; None: send nothing.

        Returns:
            Those of them that the socket did not take.
        """
        part, self._data = self._data[:size_bytes], self._data[size_bytes:]
        sent = send_now(socket, part) if socket is not None else 0
        return part[sent:]

    def cut(self, size_bytes: int) -> None:
        """Forget so many bytes at the end."""
        self._data = self._data[: len(self._data) - size_bytes]


class Pages:
    """Bytes in a pipe of the kernel's, which goes back to the others when the last of them has left."""

    __slots__ = ("_inside_bytes", "_length", "_pipe", "_pipes")

    def __init__(self, pipes: Pipes, pipe: tuple[int, int], size_bytes: int) -> None:
        self._pipes = pipes
        self._pipe = pipe
        self._length = self._inside_bytes = size_bytes

    def __len__(self) -> int:
        return self._length

    def deliver(self, size_bytes: int, socket: Any) -> Buffer:
        """Send the first so many bytes, as ``Copied.deliver`` does; only what is returned is copied."""
        sent = 0
        if socket is not None and is_free(socket):
            with suppress(OSError):  # it takes nothing now, or is lost: the reactor will find out
                sent = os.splice(
                    self._pipe[0], socket.fileno(), size_bytes, flags=os.SPLICE_F_NONBLOCK
                )
        rest = os.read(self._pipe[0], size_bytes - sent) if sent < size_bytes else b""
        self._inside_bytes -= size_bytes
        self.cut(size_bytes)
        return rest

    def cut(self, size_bytes: int) -> None:
        """Forget so many bytes at the end."""
        self._length -= size_bytes
        if not self._length:
            self._pipes.give_back(self._pipe, self._inside_bytes == 0)


class Pipes:
    """
    The pipes of a link: bounded, and kept for the next read as long as there are connections.

    Args:
        limit: how many there may be.
    """

    def __init__(self, limit: int = MAX_PIPES) -> None:
        self._limit = limit
        self._idle: list[tuple[int, int]] = []
        self._count = 0
        self._users = 0

    def __len__(self) -> int:
        return self._count

    def join(self) -> None:
        """There is one more connection."""
        self._users += 1

    def leave(self) -> None:
        """There is one less; after the last one nothing is kept."""
        self._users -= 1
        while self._idle and not self._users:
            self._close(self._idle.pop())

    def take(self) -> tuple[int, int] | None:
        """Return both ends of an empty pipe, for reading and writing, or None if there is none."""
        if self._idle:
            return self._idle.pop()
        if self._count >= self._limit or not hasattr(os, "splice"):
            return None
        try:
            pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # too many files
            return None
        import fcntl  # wherever there is splice

        with suppress(OSError, AttributeError):  # a smaller one does, too
            fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._count += 1
        return pipe

    def give_back(self, pipe: tuple[int, int], empty: bool = True) -> None:
        """Take a pipe back; one that is not empty cannot be used again."""
        if empty and self._users:
            self._idle.append(pipe)
        else:
            self._close(pipe)

    def _close(self, pipe: tuple[int, int]) -> None:
        self._count -= 1
        for end in pipe:
            os.close(end)


class PageReader:
    """
    Reads a socket of Twisted's: bulk data as pages, all else as Twisted does.

    Args:
        socket: as ``reactor.sockets.socket_of`` returned it.
        read_bytes: at a time.
        received: is called with what was read as pages.
    """

    def __init__(
        self, socket: Any, pipes: Pipes, read_bytes: int, received: Callable[[Pages], object]
    ) -> None:
        self._socket = socket
        self._pipes = pipes
        self._read_bytes = read_bytes
        self._received = received
        self._copying = socket.doRead
        self._bulk = False
        socket.doRead = self._read

    def note(self, size_bytes: int) -> None:
        """So much was read; decides how to read next."""
        self._bulk = size_bytes >= BULK_BYTES

    def _read(self) -> Any:
        pipe = self._pipes.take() if self._bulk else None
        if pipe is None:
            return self._copying()
        size_bytes = 0
        with suppress(OSError):  # there is nothing now, or it is lost
            size_bytes = os.splice(
                self._socket.fileno(), pipe[1], self._read_bytes, flags=os.SPLICE_F_NONBLOCK
            )
        self.note(size_bytes)
        if not size_bytes:
            self._pipes.give_back(pipe)
            return self._copying()  # as Twisted tells of an end or a loss, or of nothing
        self._received(Pages(self._pipes, pipe, size_bytes))
        return None
