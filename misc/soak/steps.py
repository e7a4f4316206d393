"""
Every step that a command takes on the file system, as a place where it is killed, or where the disk fails.

A step is a call by which something below a directory changes: a file or directory made, named, linked,
removed, cut, synced, written to, given a mode, times or an attribute. The command runs in this process, with
those calls of ``os`` counted, from any thread; so are ``syncfs``, and what buffered files write. What C
libraries do by themselves (SQLite) is no step.

    python -m misc.soak.steps --root DIR --log FILE [--at N --how kill|torn|ENOSPC|EIO|...] -- ARGUMENTS

* without ``--at``: nothing happens but that each step is written to the log, a line each: name and path;
* ``kill``: the process is killed (SIGKILL) just before step N, so that N - 1 have been taken;
* ``torn``: a step that writes writes half of its bytes, and the process is killed; other steps as ``kill``;
* an errno's name: step N fails with it, and every later one below the directory that would need room, too, if
  it is ENOSPC (as on a full disk: all that makes a file or writes to one), until there is a file of the log's
  name and ``.well`` behind it: somebody has made room. EROFS: every later one (a file system that was mounted
  read-only after an error), until then.

The log has what was taken until then; its last line is the step that was not.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

_BY_PATH = (
    "unlink",
    "remove",
    "rmdir",
    "mkdir",
    "truncate",
    "utime",
    "chmod",
    "setxattr",
    "removexattr",
    "mkfifo",
)
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_BY_FD = (
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "fsync",
    "fdatasync",
    "ftruncate",
    "fchmod",
    "posix_fallocate",
)
_WRITES = ("write", "pwrite", "writev", "pwritev")
_NEEDS_ROOM = (*_WRITES, "open", "mkdir", "symlink", "link", "posix_fallocate", "setxattr")
_MAKES = os.O_CREAT | os.O_TRUNC


class Steps:
    """
    Counts the steps, and does at one of them what is to be done.

    Args:
        root: steps elsewhere do not count.
        log: a descriptor; each step is a line.
        at: the number of the step, from 1 on; 0: none.
        how: see above.
    """

    def __init__(self, root: str, log: int, at: int, how: str) -> None:
        self._root = os.path.realpath(root) + os.sep
        self._log = log
        self._at = at
        self._how = how
        self._well = os.readlink(f"/proc/self/fd/{log}") + ".well"
        self._taken = 0
        self._lock = threading.RLock()
        self._write = os.write
        self._kill = os.kill

    def install(self) -> None:
        """Put itself between the program and ``os``."""
        for name in (*_BY_PATH, *_TWO_PATHS, *_BY_FD):
            if hasattr(os, name):
                setattr(os, name, self._counting(name, getattr(os, name)))
        os.open = self._opening(os.open)
        opened = self._opening_file(io.open)
        for module in (io, builtins):
            setattr(module, "open", opened)  # noqa: B010
        from pipegrid.disk import durability

        loaded = durability.load_syncfs()
        if loaded is not None:
            counted = self._counting("syncfs", loaded)
            durability.load_syncfs = lambda: counted

    def _path(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> str:
        """Return what a call is about; empty if that is not below the root."""
        place = arguments[1] if name in _TWO_PATHS and len(arguments) > 1 else arguments[0]
        inside = keywords.get("dst_dir_fd") if name in _TWO_PATHS else None
        inside = keywords.get("dir_fd") if inside is None else inside
        try:
            if isinstance(place, int):
                path = os.readlink(f"/proc/self/fd/{place}")
                if not path.startswith(os.sep):  # a pipe or a socket
                    return ""
            else:
                path = os.fsdecode(place)
                base = os.getcwd() if inside is None else os.readlink(f"/proc/self/fd/{inside}")
                path = os.path.join(base, path)
        except OSError:
            return ""
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        return path if (path + os.sep).startswith(self._root) else ""

    def _step(self, name: str, path: str, half: Callable[[], object] | None = None) -> None:
        with self._lock:
            self._taken += 1
            self._write(self._log, os.fsencode(f"{self._taken} {name} {path}\n"))
            fails = self._taken == self._at
            if self._how in ("ENOSPC", "EROFS") and self._at and self._taken > self._at:
                needs = self._how == "EROFS" or name in _NEEDS_ROOM
                fails = needs and not os.path.lexists(self._well)
            if not fails:
                return
            if self._how in ("kill", "torn"):
                if half is not None and self._how == "torn":
                    half()
                self._kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, self._how)
            names = () if name in (*_BY_FD, "syncfs") else (path,)  # as the system's calls have it
            raise OSError(number, os.strerror(number), *names)

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            path = self._path(name, arguments, keywords)
            if path:
                half = None
                if name in _WRITES:
                    half = lambda: real(arguments[0], _half(arguments[1]), *arguments[2:])  # noqa: E731
                self._step(name, path, half)
            return real(*arguments, **keywords)

        return counted

    def _opening(self, real: Callable[..., Any]) -> Any:
        def opened(path: Any, flags: int, *rest: Any, **keywords: Any) -> Any:
            if flags & _MAKES:
                found = self._path("open", (path,), keywords)
                if found:
                    self._step(_opens(found), found)
            return real(path, flags, *rest, **keywords)

        return opened

    def _opening_file(self, real: Callable[..., Any]) -> Any:
        def opened(file: Any, mode: str = "r", *rest: Any, **keywords: Any) -> Any:
            if not any(letter in mode for letter in "wax+"):
                return real(file, mode, *rest, **keywords)
            if not isinstance(file, int):
                found = self._path("open", (file,), {})
                if found:
                    self._step(_opens(found), found)
            return _written_by_os(file, mode, *rest, **keywords)

        return opened


class _Raw(io.FileIO):
    """A file that is written by ``os.write``, so that its steps count."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)


def _written_by_os(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """Open a file to write to, as ``io.open`` does."""
    raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffer = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffer
    return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)


def _opens(path: str) -> str:
    """Return what opening a file to write to it is: one that is there needs no room."""
    return "reopen" if os.path.lexists(path) else "open"


def _half(data: Any) -> Any:
    """Return the first half of what is to be written, or of the pieces of it."""
    if isinstance(data, (list, tuple)):
        whole = b"".join(bytes(piece) for piece in data)
        return [whole[: len(whole) // 2]]
    whole = bytes(data)
    return whole[: len(whole) // 2]


def main() -> None:
    """Run the command line of the package, its steps counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--root", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--how", default="kill")
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args()
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    Steps(options.root, log, options.at, options.how).install()
    import pipegrid.cli

    sys.argv = ["pipegrid", *options.arguments]
    pipegrid.cli.main()


if __name__ == "__main__":
    main()
