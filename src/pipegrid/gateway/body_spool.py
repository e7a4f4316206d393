"""
Bodies of requests: in memory while they are small, then in a file without a name in the temporary directory.

An immutable file is read twice, once for its key and once for its shares, so its body is kept until it is
stored. A file without a name is deleted when the request or the process ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pipegrid.disk.atomic_write import open_spool
from pipegrid.disk.private_files import make_private
from pipegrid.errors import PipegridError

IN_MEMORY_BYTES = 64 << 10
_LOOK_BYTES = 16 << 20
"""The free space of the disk is checked again whenever this many bytes of a body were written."""


class BodyRefused(PipegridError):
    """
    The body of a request cannot be accepted.

    Attributes:
        status: HTTP status of the response.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SpoolSpace:
    """
    Disk space for the bodies of all requests.

    Args:
        directory: directory of the bodies; created when the first body needs it.
        spare_bytes: disk space that bodies leave free.

    Attributes:
        used_bytes: size of all bodies that are in files now.
    """

    def __init__(self, directory: Path, spare_bytes: int) -> None:
        self.used_bytes = 0
        self._directory = directory
        self._spare_bytes = spare_bytes

    def open(self) -> int:
        """
        Open a file without a name, and return its descriptor.

        Raises:
            OSError: the file cannot be created.
        """
        make_private(str(self._directory))
        return open_spool(str(self._directory))

    def check(self, wanted_bytes: int) -> None:
        """
        Check that the disk has space for ``wanted_bytes``, in addition to the space that bodies leave free.

        Raises:
            BodyRefused: the disk has too little space.
            OSError: the directory cannot be created.
        """
        make_private(str(self._directory))
        with suppress(OSError):
            found = os.statvfs(self._directory)
            free_bytes = found.f_bavail * found.f_frsize
            if free_bytes < wanted_bytes + self._spare_bytes:
                raise BodyRefused(
                    f"the body does not fit into {self._directory}, where {free_bytes} bytes are free, and "
                    f"{self._spare_bytes} of them stay so; free some, or set [node] tempdir to a larger disk",
                    507,
                )

    def full(self, error: OSError) -> BodyRefused:
        """Return the error for a body that could not be written."""
        return BodyRefused(
            f"cannot keep the body of the request in {self._directory}: {error.strerror}; free some space, "
            "or set [node] tempdir to another disk",
            507,
        )


class BodySpool:
    """
    The body of one request, as it arrives.

    An error while the body arrives is kept in ``refused``, and raised later by ``check``: the request is
    answered only after its body.

    Args:
        expected_bytes: size that the request announced; None: not announced.

    Attributes:
        size: number of bytes that were accepted.
        most_bytes: maximum size, set by ``allow``; None: limited only by the space on the disk.
        refused: why the body is dropped; None: it is kept.
        hasher: hashes the bytes as they arrive; None: no hash is needed.
    """

    def __init__(self, space: SpoolSpace, expected_bytes: int | None = None) -> None:
        self.size = 0
        self.most_bytes: int | None = None
        self.refused: BodyRefused | None = None
        self.hasher: hashlib._Hash | None = None
        self._space = space
        self._expected_bytes = expected_bytes
        self._pieces: list[bytes] = []
        self._fd: int | None = None
        self._look_at = 0
        self._closed = False
        if expected_bytes is not None and expected_bytes > IN_MEMORY_BYTES:
            self._attempt(lambda: space.check(expected_bytes))

    def allow(self, most_bytes: int) -> None:
        """Accept at most this many bytes; a body whose announced size is larger is refused at once."""
        self.most_bytes = most_bytes
        expected_bytes = self._expected_bytes
        if self.refused is None and expected_bytes is not None and expected_bytes > most_bytes:
            text = f"the body has {expected_bytes} bytes, and at most {most_bytes} are allowed"
            self.refuse(BodyRefused(text, 413))

    def refuse(self, error: BodyRefused) -> None:
        """Drop the bytes of the body that have arrived, and all that follow."""
        self.refused = error
        self._drop()

    def write(self, data: bytes) -> None:
        """Keep the next bytes of the body."""
        if self.refused is not None or self._closed:
            return
        if self.hasher is not None:
            self.hasher.update(data)
        if self.most_bytes is not None and self.size + len(data) > self.most_bytes:
            text = f"the body has more than {self.most_bytes} bytes, which are the most that are allowed"
            self.refuse(BodyRefused(text, 413))
        elif self._fd is None and self.size + len(data) <= IN_MEMORY_BYTES:
            self._pieces.append(data)
            self.size += len(data)
        else:
            self._attempt(lambda: self._write(data))

    def check(self) -> None:
        """
        Check that the body was not dropped.

        Raises:
            BodyRefused: it was dropped.
        """
        if self.refused is not None:
            raise self.refused

    def read_all(self, most_bytes: int, what: str) -> bytes:
        """
        Return the whole of a small body.

        Args:
            what: what the error message calls the body.

        Raises:
            BodyRefused: the body was dropped, or has more than ``most_bytes``.
        """
        self.check()
        if self.size > most_bytes:
            raise BodyRefused(
                f"{what} has {self.size} bytes, and at most {most_bytes} are allowed", 413
            )
        return self.read_at(0, self.size)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range of the body; the result is shorter if the range extends beyond the end."""
        if self._fd is None:
            return b"".join(self._pieces)[offset : offset + length]
        found = os.pread(self._fd, length, offset)
        while len(found) < length:
            more = os.pread(self._fd, length - len(found), offset + len(found))
            if not more:
                break
            found += more
        return found

    @contextmanager
    def opened(self) -> Iterator[bytes | BinaryIO]:
        """
        Yield the body for ``Grid.put``: bytes, or a file that is open until the ``with`` block ends.

        Raises:
            BodyRefused: the body was dropped.
        """
        self.check()
        if self._fd is None:
            yield b"".join(self._pieces)
        else:
            with os.fdopen(os.dup(self._fd), "rb") as file:
                file.seek(0)
                yield file

    def close(self) -> None:
        """Free the memory or disk space of the body; a second call does nothing."""
        self._closed = True
        self._drop()

    def _write(self, data: bytes) -> None:
        pieces = [data]
        if self._fd is None:
            self._fd = self._space.open()
            pieces = [*self._pieces, data]
            self._pieces, self.size = [], 0
        if self.size >= self._look_at:
            self._look_at = self.size + _LOOK_BYTES
            self._space.check(0)
        for piece in pieces:
            view = memoryview(piece)
            while view:
                written = os.pwrite(self._fd, view, self.size)
                view = view[written:]
                self.size += written
                self._space.used_bytes += written

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BodyRefused as error:
            self.refuse(error)
        except OSError as error:
            self.refuse(self._space.full(error))

    def _drop(self) -> None:
        self._pieces = []
        fd, self._fd = self._fd, None
        if fd is not None:
            self._space.used_bytes -= self.size
            os.close(fd)
