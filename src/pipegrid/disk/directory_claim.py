"""
Finds out and records which process runs on a node's directory.

A Tahoe-LAFS node keeps ``running.process`` in its directory: its process id, and when that process was
created, in seconds since 1970. A killed node leaves the file, and another process may have got the same id;
so both values must match. A gateway and an introducer write the same file, and hold a lock as long as they
run. A storage server can use the directory of a running gateway, but not of a running node or introducer.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.file_system_calls import lock_if_free
from pipegrid.disk.private_files import make_private
from pipegrid.disk.safe_open import open_locked, read_file
from pipegrid.errors import UsageError

NAME = "running.process"
LOCK_NAME = "private/gateway.lock"
INTRODUCER_LOCK_NAME = "private/introducer.lock"
TOLERANCE_S = 2.0
_MAX_BYTES = 1000


def refuse_if_running(directory: Path, proc: Path = Path("/proc")) -> None:
    """
    Raise UsageError if a Tahoe-LAFS node or an introducer runs in the directory, as far as this system
    reports processes. A running gateway is not an error.

    Args:
        proc: the path of the kernel's file system of processes.
    """
    pid = _running_pid(directory, proc)
    if pid is not None and not _gateway_runs(directory):
        raise _in_use(directory, pid)


class DirectoryClaim:
    """
    The exclusive right of one gateway, or one introducer, to a directory, until ``release``.

    Args:
        lock_name: the name of the file to lock, relative to the directory.
        program: what this process is, for errors.

    Raises:
        UsageError: another gateway or introducer, or a Tahoe-LAFS node, runs in the directory.
        OSError: the directory cannot be written to.
    """

    def __init__(
        self,
        directory: Path,
        *,
        lock_name: str = LOCK_NAME,
        program: str = "gateway",
    ) -> None:
        self._directory = directory
        make_private(str(directory / "private"))
        lock = open_locked(str(directory / lock_name), os.O_RDWR | os.O_CREAT, mode=0o600)
        if lock is None:
            raise UsageError(
                f"another {program} runs in {directory}; stop it first, or give each a directory of its own"
            )
        self._lock: int | None = lock
        try:
            pid = _running_pid(directory)
            if pid is not None and pid != os.getpid():
                raise _in_use(directory, pid)
            began_s = process_began(os.getpid())
            shown_s = time.time() if began_s is None else began_s
            text = f"{os.getpid()} {shown_s:.2f}\n"
            replace_file(directory / NAME, text.encode("ascii"), mode=0o644, durable=False)
        except BaseException:
            self._unlock()
            raise

    def release(self) -> None:
        """Release the directory; a second call does nothing."""
        if self._lock is not None:
            with suppress(OSError):
                os.unlink(self._directory / NAME)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def process_began(pid: int, proc: Path = Path("/proc")) -> float | None:
    """
    Return when a process was created, in seconds since 1970; None if the process has ended, or the time is
    unknown.
    """
    with suppress(OSError, ValueError, IndexError):
        # The second field is the program's name in brackets, which may contain any characters; the 22nd field
        # is the start time, in clock ticks since boot.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        boot_s = next(
            int(line.split()[1])
            for line in (proc / "stat").read_text("ascii", "replace").splitlines()
            if line.startswith("btime ")
        )
        return boot_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None


def _running_pid(directory: Path, proc: Path = Path("/proc")) -> int | None:
    try:
        pid_text, made_text = read_file(directory / NAME, _MAX_BYTES).split()
        pid, made_s = int(pid_text), float(made_text)
    except (OSError, ValueError):
        return None
    began_s = process_began(pid, proc)
    runs = began_s is not None and abs(began_s - made_s) <= TOLERANCE_S
    return pid if runs else None


def _gateway_runs(directory: Path) -> bool:
    path = str(directory / LOCK_NAME)
    if not os.path.exists(path):
        return False
    free = lock_if_free(path)
    if free is None:
        return True
    os.close(free)
    return False


def _in_use(directory: Path, pid: int) -> UsageError:
    return UsageError(f"the node of {directory} is still running, as process {pid}; stop it first")
