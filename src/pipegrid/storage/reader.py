"""Reading a complete share from its file."""

from __future__ import annotations

import os

from pipegrid.errors import ServerRefused
from pipegrid.storage import containers, disk


class ShareReader:
    """An open complete share; use it as a context manager. Its data never changes."""

    def __init__(self, fd: int, share_bytes: int, name: str) -> None:
        self._fd = fd
        self.share_bytes = share_bytes
        self._name = name

    def __enter__(self) -> ShareReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, offset: int, length: int) -> bytes:
        """Return at most length bytes; fewer, or none, past the end."""
        length = min(length, self.share_bytes - offset)
        if length <= 0 or offset < 0:
            return b""
        try:
            data = os.pread(self._fd, length, containers.HEADER_BYTES + offset)
            while len(data) < length:  # one call gives 2 GiB at most
                at = containers.HEADER_BYTES + offset + len(data)
                more = os.pread(self._fd, length - len(data), at)
                if not more:
                    break
                data += more
        except OSError as error:
            raise disk.disk_error(error, f"read {self._name}") from error
        return data

    def close(self) -> None:
        """Close the file; doing so twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_reader(path: str) -> ShareReader | None:
    """
    Open a share file, or return None if there is none.

    Raises:
        ServerRefused: there is one, but it is not immutable, or damaged, or the disk failed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise disk.disk_error(error, f"open the share {path!r}") from error
    try:
        header = containers.parse_header(os.pread(fd, containers.HEADER_BYTES, 0))
        length = containers.share_bytes(header, os.fstat(fd).st_size)
    except OSError as error:
        os.close(fd)
        raise disk.disk_error(error, f"read the share {path!r}") from error
    except ValueError as error:
        os.close(fd)
        raise ServerRefused(
            f"cannot read the share {path!r}: {error}; use another server's"
        ) from error
    return ShareReader(fd, length, f"the share {path!r}")
