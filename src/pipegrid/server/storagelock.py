"""One server has a storage directory: the lock that tells, and who can do without it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from twisted.logger import Logger

from pipegrid.disk import files as disk
from pipegrid.disk.private import make_directory
from pipegrid.errors import UsageError

_NOT_TO_BE_WRITTEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

log = Logger()


def lock_storage(storage: Path, read_only: bool = False) -> int | None:
    """
    Take the storage directory for this process; returns what to close to let it go.

    What the lock guards is what one server alone may do: promise room, adopt unfinished uploads, remove.
    Shares, leases and slots that are changed are locked each by itself, for any number of processes. So
    who takes no shares, and may not write there, need not have the lock, and does none of that.

    Args:
        read_only: where the lock's file cannot be written to, return None.

    Raises:
        UsageError: another server has it, or it cannot be made.
    """
    path = storage / "serve.lock"
    try:
        # Mutable shares hold the secret that changes them, as the format has it: nobody else may read them.
        make_directory(storage, 0o700)
        fd = disk.open_locked(str(path), os.O_RDWR | os.O_CREAT, mode=0o600)
    except disk.CannotLock as error:
        raise UsageError(f"cannot lock {path}: {error.strerror}; choose another disk") from error
    except OSError as error:
        if read_only and error.errno in _NOT_TO_BE_WRITTEN and storage.is_dir():
            log.info("{storage} cannot be written to; it is served as it is", storage=str(storage))
            return None
        raise UsageError(
            f"cannot use the storage directory {storage}: {error.strerror}; choose another"
        ) from error
    if fd is None:
        raise UsageError(
            f"another server is serving {storage}; stop it, or choose another directory"
        )
    return fd
