"""
The streams of a command: results on stdout, messages and progress on stderr, and input from stdin.

The streams are arguments, so that tests can run commands in their own process.
"""

from __future__ import annotations

import io
import os
import select
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from math import isfinite

from pipegrid.cli.error_report import ExitStatus, sentence, status_of
from pipegrid.cli.startup.fast_json_encoder import plain_json
from pipegrid.core.text import harmless, printable
from pipegrid.disk.interruptible_pipe_writes import (
    flush_some,
    interruptible,
    wait_for_space,
    write_some,
    writes_to_pipe,
)
from pipegrid.errors import SinkError, SourceError

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from typing import Any, BinaryIO, TextIO

CLOSED = "standard output is closed; redirect it, if only to /dev/null"

_GATHERED_BYTES = 64 << 10
"""How many bytes of results are collected before they are printed together."""
NO_TEXT = (
    "this file is not text, and would disturb the terminal; write it to a file with '-o FILE', or to the "
    "terminal with '-o -'"
)
_LOOKED_AT_BYTES = 4096
"""
How many bytes at the beginning of each written piece are checked. If a zero byte is among them, the piece is
not text; other programs apply the same rule.
"""


class ResultStream(io.BufferedIOBase):
    """
    Standard output, with a record of failures.

    Attributes:
        abandoned: the reader has closed its end (``pipegrid get CAP | head -c 100``), or the command was
            interrupted while the reader did not read.
        failed: writing to standard output has failed with an error.
        wants_text: whether to refuse anything but text, which could make the terminal unusable.
        reached_terminal: text was written to a pipe, whose reader may show it on the terminal.
        before_text: called once before such text is written; it removes the progress bar for good.
        reader_left: the reader has closed its end.
    """

    written_in_reactor = True
    """The library writes in the main thread: only there can a signal interrupt a blocked write."""

    def __init__(self, stream: BinaryIO | None) -> None:
        self._stream = stream
        self.abandoned = False
        self.failed = False
        self.wants_text = False
        self.reached_terminal = False
        self.before_text: Callable[[], None] | None = None
        self.reader_left = False

    name = "standard output"
    """The name of the stream for errors; files from ``open`` also have this attribute."""

    def isatty(self) -> bool:
        """Return whether standard output is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def writable(self) -> bool:
        """Return True, even after failures: a later write raises the error that says why it fails."""
        return True

    def write(self, data: Any, /) -> int:
        """
        Write all of the data.

        Raises:
            BrokenPipeError: the reader closed its end.
            SinkError: standard output is closed, its disk is full, or the data is not text although it must
                be.
        """
        if self._stream is None:
            self.failed = True
            raise SinkError(CLOSED)
        view = memoryview(data).cast("B")
        if self.wants_text and b"\0" in bytes(view[:_LOOKED_AT_BYTES]):
            self.failed = True
            raise SinkError(NO_TEXT)
        if not self.reached_terminal and writes_to_pipe(self._stream):
            # ``tee`` or ``less`` may read the pipe and show the text on the terminal.
            self.reached_terminal = b"\0" not in bytes(view[:_LOOKED_AT_BYTES])
            if self.reached_terminal and self.before_text is not None:
                self.before_text()
        length = len(view)
        while view:
            view = view[self._guard(partial(write_some, data=view)) :]
        return length

    def flush(self) -> None:
        """
        Flush the stream; raises the errors of ``write``, but not after an earlier failure.

        Python calls this once more when it deletes the object, perhaps after the stream was closed; from 3.14
        on, Python prints errors of that call.
        """
        if self._stream is None or self._stream.closed:
            return
        while not (self.abandoned or self.failed):
            if self._guard(flush_some):
                return

    def _guard(self, act: Callable[[BinaryIO], int]) -> int:
        """
        Call ``act``; if it writes nothing, wait until the stream accepts data; return how much was written.
        """
        assert self._stream is not None
        try:
            with interruptible(self._stream.fileno):
                done = act(self._stream)
                if not done:
                    wait_for_space(self._stream.fileno())
                return done
        except BrokenPipeError:
            self.abandoned = self.reader_left = True
            raise
        except OSError as error:
            self.failed = True
            raise SinkError(f"cannot write to standard output: {error.strerror}") from error
        except BaseException:  # interrupted while the pipe was full: a write would block again
            self.abandoned = True
            raise


class Console:
    """
    The streams of one command, and how much to print on them.

    Attributes:
        json: results are JSON objects, one per line.
        verbosity: -1 quiet, 0 normal, 1 with details and tracebacks.
    """

    def __init__(self, stdin: BinaryIO | None, stdout: BinaryIO | None, stderr: TextIO) -> None:
        self.stdin = stdin
        self.results = ResultStream(stdout)
        self.stderr = stderr
        self.json = False
        self.verbosity = 0
        self._aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._said_once = ""

    @property
    def data_sink(self) -> BinaryIO:
        """Standard output as a sink for a file's bytes."""
        sink: BinaryIO = self.results  # type: ignore[assignment]  # as a file, but for its name
        return sink

    @property
    def shows_progress(self) -> bool:
        """Whether a progress bar is wanted, and stderr is a terminal that can show one."""
        if self.verbosity < 0 or self.results.reached_terminal or not self.stderr.isatty():
            return False
        return os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")

    def get_ready(self) -> None:
        """Load the modules that printing results will need."""
        if self.json:
            import json  # noqa: F401

    def result(self, text: str, fields: dict[str, Any]) -> None:
        """Print one result: ``text`` for people, or with ``--json`` the fields that the docs describe."""
        self._print(self._line(text, fields))

    def result_once(self, text: str, fields: dict[str, Any]) -> None:
        """
        Print one result, unless its text is the same as in the last call; with ``--json``, print it always.
        """
        if self.json or text != self._said_once:
            self._said_once = text
            self.result(text, fields)

    def json_result(self, fields: dict[str, Any]) -> None:
        """Print one result if ``--json`` is given; otherwise print nothing."""
        if self.json:
            self.result("", fields)

    def results_of(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Print many results together, since a write for each would take much of the time of a listing."""
        lines = bytearray()
        for text, fields in rows:
            lines += self._line(text, fields)
            if len(lines) >= _GATHERED_BYTES:
                self._print(lines)
                lines = bytearray()
        if lines:
            self._print(lines)

    def _line(self, text: str, fields: dict[str, Any]) -> bytes:
        if self.json:
            return _json_line(fields)
        # A path may contain bytes that are not UTF-8; they are printed unchanged.
        return harmless(text).encode("utf-8", "surrogateescape") + b"\n"

    def _print(self, lines: bytes | bytearray) -> None:
        with self._aside():
            self.results.write(lines)
            self.results.flush()

    def say(self, text: str) -> None:
        """Print a message for the user, unless ``-q`` is given."""
        if self.verbosity >= 0:
            self._prose(text)

    def note(self, text: str) -> None:
        """Print a message that begins with the program's name, unless ``-q`` is given."""
        self.say(f"pipegrid: {text}")

    def fault(self, text: str) -> None:
        """
        Print a message that begins with the program's name, even with ``-q``: an error that changes the exit
        status.
        """
        self._prose(f"pipegrid: {text}")

    def detail(self, text: str) -> None:
        """Print a detail if ``-v`` is given."""
        if self.verbosity > 0:
            self._prose(text)

    def complain(self, error: BaseException, about: str = "") -> ExitStatus:
        """
        Print an error in one sentence; with ``-v``, print the traceback before.

        Args:
            about: the name of the item that failed, such as a file; added if the sentence does not contain
                it.

        Returns:
            The exit status for the error.
        """
        if self.results.reader_left and isinstance(error, BrokenPipeError):
            return ExitStatus.FAILED
        if self.verbosity > 0:
            import traceback  # imported here, since it is rarely needed

            self._prose("".join(traceback.format_exception(error)).rstrip())
        text = sentence(error)
        about = printable(about)
        about = f"{about}: " if about and not _names(text, about) else ""
        self.fault(f"{about}{text}")
        return status_of(error)

    def failed(
        self,
        error: BaseException,
        about: str,
        fields: dict[str, Any],
        one_of_several: bool = False,
        **more: Any,
    ) -> ExitStatus:
        """
        Print the error of one of several items, as ``complain`` does, and with ``--json`` also as a result.

        Args:
            about: the name of the item.
            fields: the JSON fields that identify the item.
            one_of_several: whether the item is one of several arguments; then status 1 replaces 2, since the
                command line as a whole was valid.
            more: JSON fields to add after the error.
        """
        if self.results.reader_left:  # this error ends the command
            raise BrokenPipeError
        status = self.complain(error, about)
        if one_of_several and status == ExitStatus.USAGE:
            status = ExitStatus.FAILED
        if self.results.failed:  # the error of standard output is reported separately
            return status
        self.json_result({**fields, "error": sentence(error), "exit_status": int(status), **more})
        return status

    def print_within(self, aside: Callable[[], AbstractContextManager[None]] | None) -> None:
        """
        Print every following result and message within this context, which can hide a progress bar meanwhile.
        """
        self._aside = aside or nullcontext

    def _prose(self, text: str) -> None:
        data = harmless(text).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        try:
            with self._aside():
                self.stderr.write(data + "\n")
                self.stderr.flush()
        except (OSError, ValueError):
            pass  # stderr is closed, so only the exit status can report errors


def _names(text: str, about: str) -> bool:
    """Return whether a sentence contains a name; for a file ``a``, the word 'a' does not count."""
    if about not in text:
        return False
    import re

    name = re.escape(about)
    if len(about) < 8:  # at a path's end, in quotes, or before a colon
        name = rf"/{name}(?!\w)|'{name}'|(?<![\w.]){name}:"
    return re.search(name, text) is not None


def _json_line(fields: dict[str, Any]) -> bytes:
    """Return an object as a line of valid UTF-8 JSON, even if a path in it is not UTF-8."""
    plain = plain_json(fields)
    if plain is not None:
        return plain
    import json  # imported here, since many runs do not need it

    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (
        ValueError
    ):  # an entry of a directory may contain 1e999, or NaN, which JSON does not have
        fields = _finite(fields)
        text = json.dumps(fields, ensure_ascii=False)
    try:
        if not text.isprintable():  # JSON leaves some control characters
            text = json.dumps(fields)
        line = text.encode("utf-8")
    except UnicodeEncodeError:  # a byte 0xff that is not text becomes the lone surrogate \udcff
        line = json.dumps(fields).encode("ascii")
    return line + b"\n"


def _finite(value: Any) -> Any:
    """Return the value with null instead of infinite numbers and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


# Standard input, and files that are read completely.


class NoInput:
    """A stream in place of closed standard input; reading it raises an error."""

    name = "standard input"

    def read(self, length: int = -1, /) -> bytes:
        """Raise SourceError, since standard input is closed."""
        raise SourceError("cannot read standard input: it is closed")


def read_given(path: str, stdin: BinaryIO | None, most: int) -> bytes:
    """
    Return the content of a file, at most its first ``most`` bytes.

    Args:
        path: the path of the file; ``-`` is standard input.

    Raises:
        SourceError: standard input is closed.
        OSError: the file cannot be read.
        ValueError: the path is invalid.
    """
    if path != "-":
        with open(path, "rb") as file:
            return file.read(most)
    return NoInput().read() if stdin is None else read_whole(stdin, most)


def read_whole(file: BinaryIO, most: int) -> bytes:
    """
    Return the content of a stream, at most its first ``most`` bytes, after waiting for all of them.

    Another program may have made standard input non-blocking: then one read returns only the bytes that have
    arrived, or None.
    """
    try:
        waits = os.get_blocking(file.fileno())
    except (OSError, ValueError):  # the stream has no file descriptor
        waits = True
    if waits:
        return file.read(most)
    data = b""
    while len(data) < most:
        piece: bytes | None = file.read(most - len(data))
        if piece is None:
            select.select([file], [], [])
        elif not piece:
            break
        else:
            data += piece
    return data


def source_of(path: str, stdin: BinaryIO | None) -> Any:
    """
    Return what to pass to ``Grid.put`` for a file on the command line: its path, or standard input.

    Args:
        path: the path of the file; ``-`` is standard input.
        stdin: standard input, or None if it is closed.
    """
    if path != "-":
        return path
    return NoInput() if stdin is None else stdin


MAX_LINES = 20
"""How many lines of one kind are shown: enough for the problems of one file, but few enough for a screen."""


def say_some(console: Console, lines: Sequence[str]) -> None:
    """Print at most ``MAX_LINES`` lines, and how many more there are; with ``-v``, print all."""
    shown = len(lines) if console.verbosity > 0 or len(lines) <= MAX_LINES else MAX_LINES - 1
    for line in lines[:shown]:
        console.note(line)
    if shown < len(lines):
        console.note(f"and {len(lines) - shown} more like that; -v names them")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """
    Return rows as lines with aligned columns; the last cell of each row may have any length.

    Args:
        rows: the cells of each row; rows may have different numbers of cells.
        right: the numbers of the columns to align at the right.
    """
    all_but_last = zip_longest(*(row[:-1] for row in rows), fillvalue="")
    widths = [max(map(len, column)) for column in all_but_last]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths[number]) if number in right else cell.ljust(widths[number])
            for number, cell in enumerate(row[:-1])
        ]
        lines.append("  ".join([*cells, *row[-1:]]).rstrip())
    return lines


def grouped(reasons: Sequence[str]) -> list[str]:
    """
    Return each reason once, with the names of all its servers; the first word of each given reason is a
    server's name.
    """
    servers: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, rest = reason.partition(" ")
        servers.setdefault(rest, []).append(name)
    return [
        f"{names[0]} {rest}" if len(names) == 1 else f"{', '.join(names)}: {rest}"
        for rest, names in servers.items()
    ]
