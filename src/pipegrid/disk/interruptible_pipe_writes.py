"""Lets a signal interrupt writes to pipes that wait for a reader."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TYPE_CHECKING = False  # defined as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from typing import BinaryIO


# A thread that waits for the reader of a pipe continues to wait after a signal's handler has returned; only
# an exception from the handler ends the wait. So a writer declares that it may wait, and the handler of a
# terminating signal raises an error during such a wait. This concerns only the main thread, in which handlers
# run.

_waiting: list[Callable[[], int] | None] = []
_ended: BaseException | None = None


@contextmanager
def interruptible(fileno: Callable[[], int] | None = None) -> Iterator[None]:
    """
    Declare that the code in this context may wait for another program.

    Args:
        fileno: returns the descriptor that is written; None while the pipe is being opened.

    Raises:
        BaseException: the error given to ``end_waiting``; once given, it is also raised instead of any later
            wait.
    """
    threading = sys.modules.get("threading")  # if it is not imported, there is only one thread
    if threading is not None and threading.current_thread() is not threading.main_thread():
        yield
        return
    _waiting.append(fileno)
    try:
        if _ended is not None and _would_wait():
            raise _ended
        yield
    finally:
        _waiting.pop()


def end_waiting(error: BaseException) -> None:
    """
    Stop the main thread from waiting, now and later. Called by signal handlers.

    A write that does not need to wait is not interrupted.
    """
    global _ended
    _ended = error
    if _waiting and _would_wait():
        raise error


def wait_for_space(fd: int) -> None:
    """Wait until a non-blocking pipe can be written."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


def _would_wait() -> bool:
    fileno = _waiting[-1]
    if fileno is None:
        return True
    poll = select.poll()
    poll.register(fileno(), select.POLLOUT)
    return not poll.poll(0)


def write_some(stream: BinaryIO, data: memoryview) -> int:
    """
    Write as many bytes as a stream accepts now; return how many.

    An unbuffered stream (``PYTHONUNBUFFERED``, as in many containers) accepts only what fits on the disk or
    in the pipe. So does every stream if another program has made the pipe non-blocking.
    """
    try:
        taken: int | None = stream.write(data)
    except BlockingIOError as error:
        return error.characters_written
    if taken is None:  # objects other than raw files write everything
        return 0 if isinstance(stream, io.RawIOBase) else len(data)
    return taken


def flush_some(stream: BinaryIO) -> bool:
    """Flush as many bytes as a stream accepts now; return whether all were flushed."""
    try:
        stream.flush()
    except BlockingIOError:
        return False
    return True


def is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def writes_to_pipe(stream: BinaryIO) -> bool:
    """Return whether a stream writes to a pipe or socket, so that another program reads it."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
