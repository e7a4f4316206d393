"""Opening the file of a share, of either kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from pipegrid.disk import files as disk
from pipegrid.errors import ServerRefused

T = TypeVar("T")


def open_container(
    path: str, flags: int, start_bytes: int, understand: Callable[[str, int, bytes], T | None]
) -> T | None:
    """
    Open a file and return what it is understood to be, or None if there is none, or one of another kind.

    Args:
        understand: given the path, the descriptor and the first bytes; raises ValueError if they are damaged.

    Raises:
        ServerRefused: there is one, but it is damaged, or the disk failed.
    """
    try:
        # A named pipe in a share's place would keep the thread that opens it for ever.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise disk.disk_error(error, f"open the share {path!r}") from error
    found = None
    try:
        found = understand(path, fd, os.pread(fd, start_bytes, 0))
    except OSError as error:
        raise disk.disk_error(error, f"read the share {path!r}") from error
    except ValueError as error:
        raise damaged(path, error) from error
    finally:
        if found is None:
            os.close(fd)
    return found


def damaged(path: str, error: ValueError) -> ServerRefused:
    """Return the error to report for a share that is not understood."""
    return ServerRefused(f"cannot use the share {path!r}: {error}; use another server's")
