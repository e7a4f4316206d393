"""Private files; interruptible writes to pipes."""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from pathlib import Path


# Writing to another program, which may not read for ever, in a way that a signal can end.
#
# A thread that waits for the reader of a pipe is woken by a signal, and goes on waiting when its handler has
# returned; only a handler that raises ends that. So whoever writes says that it may have to wait, and the
# handler of a signal that is to end the process asks for an error in its place. It concerns the main thread
# alone, in which handlers run.

_waiting: list[Callable[[], int] | None] = []
_ended: BaseException | None = None


@contextmanager
def interruptible(fileno: Callable[[], int] | None = None) -> Iterator[None]:
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


# Files that tell what nobody else should read, wherever a user wants them: logs and traces; what shares
# are in; and directories that nobody else may change.


PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
_NO_MODES = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def open_private(path: str, flags: int) -> int:
    """
    Open a file for writing, made for nobody else to read if it is not there; return its descriptor.

    A name that is a symbolic link is refused: in a directory where others may write, it leads where they
    like. A file that is there and its owner's loses what others may do with it; devices and pipes stay
    as they are.

    Args:
        flags: of ``os.open``, beside ``O_CREAT``; what is there is not truncated unless they say so.

    Raises:
        OSError: it cannot be opened, or is a symbolic link.
    """
    try:
        with interruptible() if _is_pipe(path) else nullcontext():  # for its reader
            fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(
                errno.ELOOP, "it is a symbolic link; name the file that it leads to", path
            ) from error
        raise
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.fchmod(fd, stat.S_IMODE(found.st_mode) & 0o700)
    return fd


def change_mode(fd: int, mode: int) -> None:
    """
    Give an open file its mode; a file system without modes is no reason to fail.

    Raises:
        OSError: others might read what they should not, since the disk is full, or fails.
    """
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def current_umask() -> int:
    """Return what new files of this process are not allowed."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_directory(path: Path, mode: int = 0o755) -> None:
    """
    Make a directory, and those above it, unless they are there: whatever the umask allows, nobody but their
    owner may write to them, and put other secrets or shares into the place of ours.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    try:
        _make(path, mode)
    except FileNotFoundError:
        make_directory(path.parent)
        _make(path, mode)  # which may be impossible all the same, as below /proc


def make_private(path: str) -> None:
    """
    Make a directory, and those above it that are missing, all for their owner alone, unless it is there.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    try:
        os.mkdir(path, PRIVATE_DIRECTORY)
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent in ("", path):
            raise
        make_private(parent)
        with suppress(FileExistsError):
            os.mkdir(path, PRIVATE_DIRECTORY)
    except OSError:  # it may be there, whatever a disk that is not to be written to calls that
        if not os.path.isdir(path):
            raise


def keep_private(directory: str) -> str | None:
    """
    Take from a directory what others than its owner may do with it; a missing one is no error.

    Returns:
        None, or why they still may, in words of the system.
    """
    try:
        found = os.stat(directory)
        if found.st_mode & 0o077:
            os.chmod(directory, stat.S_IMODE(found.st_mode) & ~0o077)
            if os.stat(directory).st_mode & 0o077:
                return os.strerror(errno.EOPNOTSUPP)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def others_may(directory: str) -> str | None:
    """Return a directory's mode, if it lets in users who are not of its group; else None."""
    try:
        mode = stat.S_IMODE(os.stat(directory).st_mode)
    except OSError:
        return None
    return f"its mode is {mode:04o}" if mode & 0o007 else None


def _make(path: Path, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        raise
    except OSError:  # it may be there, whatever a disk that is not to be written to calls that
        if not path.is_dir():
            raise


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False
