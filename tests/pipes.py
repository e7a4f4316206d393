"""Named pipes in the place of files: whoever opens one as a file waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LIMIT_S = 10


@contextmanager
def pipe_in_place(path: Path) -> Iterator[None]:
    """Put a named pipe in a file's place; what is done meanwhile, in this thread, must not wait for it."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"waits for the named pipe {path}")

    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        path.unlink(missing_ok=True)
