"""
The log of commands that serve: lines on stderr, and JSON in a file that can be rotated.

The log contains untrusted text: control characters are escaped, and each message stays on one line. Only the
log file's owner can read it, since it shows which shares exist.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from twisted.logger import (
    ILogObserver,
    eventAsText,
    formatTime,
    globalLogPublisher,
    jsonFileLogObserver,
)
from zope.interface import provider

from pipegrid.cli.console import Console
from pipegrid.core.clamped_dates import within_calendar
from pipegrid.core.text import printable
from pipegrid.disk.private_files import open_private
from pipegrid.errors import UsageError


class LogFile:
    """
    A log file, to which text is appended, and which can be opened again.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = self._open()
        except OSError as error:
            raise UsageError(
                f"cannot write the log to {path}: {error.strerror}; choose another file"
            ) from error

    def write(self, text: str) -> None:
        """Append text; readers of the file see it after ``flush``. The log's observer calls both."""
        self._file.write(text)

    def flush(self) -> None:
        """
        Write the buffered text to the file.

        Raises:
            OSError: the disk does not accept it.
        """
        self._file.flush()

    def reopen(self) -> None:
        """
        Continue in a file under the same name, which is made if the previous file was moved.

        Raises:
            OSError: the file cannot be opened; the previous file stays in use.
        """
        old, self._file = self._file, self._open()
        with suppress(OSError):
            old.close()

    def close(self) -> None:
        """Close the file; an error in writing the rest of its buffer is ignored."""
        with suppress(OSError):
            self._file.close()

    def _open(self) -> Any:
        fd = open_private(self._path, os.O_WRONLY | os.O_APPEND)
        return os.fdopen(fd, "a", encoding="utf-8")


@contextmanager
def logging_to(console: Console, path: str | None, reactor: Any) -> Iterator[None]:
    """
    Log to stderr and, if a path is given, to a file, which SIGHUP opens again.

    Raises:
        UsageError: the file cannot be written.
    """
    file = None if path is None else LogFile(path)

    @provider(ILogObserver)
    def observe(event: Any) -> None:
        if str(event.get("log_namespace", "")).startswith("pipegrid"):
            console.say(line(event))

    def reopen() -> None:
        if file is None:
            return
        try:
            file.reopen()
        except OSError as error:
            console.note(
                f"cannot open {path} again: {error.strerror}; the old log file stays in use"
            )

    observers: list[Any] = [observe]
    if file is not None:
        written: Any = file
        observers.append(jsonFileLogObserver(written, recordSeparator=""))
    for observer in observers:
        globalLogPublisher.addObserver(observer)
    # Without a log file SIGHUP does nothing, so that a closing terminal does not end the server.
    before = signal.signal(signal.SIGHUP, lambda *_: reactor.callFromThread(reopen))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
        for observer in observers:
            globalLogPublisher.removeObserver(observer)
        if file is not None:
            file.close()


def line(event: Any) -> str:
    """Return a log event as one line for people, followed by the lines of its traceback if it has one."""
    # Values are untrusted, so they are escaped; the text between them is trusted, and a traceback keeps its
    # lines.
    safe = {
        key: printable(value) if isinstance(value, str) and key != "log_format" else value
        for key, value in event.items()
    }
    text = eventAsText(safe, includeTimestamp=False, includeSystem=False)
    when = event.get("log_time")
    shown = formatTime(None if when is None else within_calendar(when))
    return f"{shown} {text}".rstrip("\n")
