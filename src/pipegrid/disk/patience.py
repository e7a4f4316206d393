"""
Writing to another program, which may not read for ever, in a way that a signal can end.

A thread that waits for the reader of a pipe is woken by a signal, and goes on waiting when its handler has
returned; only a handler that raises ends that. So whoever writes says that it may have to wait, and the
handler of a signal that is to end the process asks for an error in its place. It concerns the main thread
alone, in which handlers run.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_waiting: list[Callable[[], int] | None] = []
_ended: BaseException | None = None


@contextmanager
def may_wait(fileno: Callable[[], int] | None = None) -> Iterator[None]:
    """
    What is done within may wait for another program.

    Args:
        fileno: returns where it writes to; None: it opens that.

    Raises:
        BaseException: what ``end_waiting`` was given; later also where there would be a wait.
    """
    threading = sys.modules.get("threading")  # where nobody has loaded it there is one thread
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
    Have the main thread, if it waits, do so no longer, and never again. For handlers of signals.

    Where there is room for what is being written, nobody is interrupted in the middle of that.
    """
    global _ended
    _ended = error
    if _waiting and _would_wait():
        raise error


def wait_for_room(fd: int) -> None:
    """Wait until somebody has read from a pipe that does not wait by itself."""
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
