"""File systems that give no locks, as some across the network do."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def failing_locks(number: int) -> Iterator[None]:
    """Have every lock of the kind that belongs to an open file fail with an error of this number."""

    def fail(fd: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    with mock.patch.object(fcntl, "flock", fail):
        yield
