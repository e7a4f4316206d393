"""
The streams of a command: results on stdout, messages and progress on stderr, and input from stdin.

They are arguments, so that tests need no process of their own.
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

TYPE_CHECKING = False  # as in ``typing``, which is slow to import
if TYPE_CHECKING:
    from typing import Any, BinaryIO, TextIO

CLOSED = "standard output is closed; redirect it, if only to /dev/null"

_GATHERED_BYTES = 64 << 10
"""The size of results that are printed together."""
NO_TEXT = (
    "this file is not text, and would disturb the terminal; write it to a file with '-o FILE', or to the "
    "terminal with '-o -'"
)
_LOOKED_AT_BYTES = 4096
"""
The beginning of each piece that is checked. A zero byte in it means that it is not text, as for other
programs.
"""


class ResultStream(io.BufferedIOBase):
    """
    Standard output, with a record of failures.

    Attributes:
        abandoned: the reader closed its end (``pipegrid get CAP | head -c 100``), or stopped reading and
            the command was interrupted.
        failed: writing to it has failed with an error.
        wants_text: anything but text is refused, since it could make the terminal unusable.
        reached_terminal: text was sent through a pipe, whose reader may show it on the terminal.
        before_text: called once before that happens; the progress bar is then removed for good.
        reader_left: ``abandoned`` because the reader closed its end.
    """

    written_in_reactor = True
    """
    For the library: only a write in the main thread can be interrupted by a signal while it waits for a
    reader.
    """

    def __init__(self, stream: BinaryIO | None) -> None:
        self._stream = stream
        self.abandoned = False
        self.failed = False
        self.wants_text = False
        self.reached_terminal = False
        self.before_text: Callable[[], None] | None = None
        self.reader_left = False

    name = "standard output"
    """For errors, as files from ``open`` have it."""

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def writable(self) -> bool:
        """Return True also after failures: the failed write has the reason."""
        return True

    def write(self, data: Any, /) -> int:
        """
        Write all of data.

        Raises:
            BrokenPipeError: the reader closed its end.
            SinkError: standard output is closed, its disk is full, or data is not text as required.
        """
        if self._stream is None:
            self.failed = True
            raise SinkError(CLOSED)
        view = memoryview(data).cast("B")
        if self.wants_text and b"\0" in bytes(view[:_LOOKED_AT_BYTES]):
            self.failed = True
            raise SinkError(NO_TEXT)
        if not self.reached_terminal and writes_to_pipe(self._stream):
            # From a pipe, ``tee`` or ``less`` may show text on the terminal.
            self.reached_terminal = b"\0" not in bytes(view[:_LOOKED_AT_BYTES])
            if self.reached_terminal and self.before_text is not None:
                self.before_text()
        length = len(view)
        while view:
            view = view[self._guard(partial(write_some, data=view)) :]
        return length

    def flush(self) -> None:
        """
        Flush the stream; raises as ``write`` does, unless that has raised already.

        Python calls it once more when it deletes the object, perhaps after the stream was closed, and from
        3.14 on prints what it raises then.
        """
        if self._stream is None or self._stream.closed:
            return
        while not (self.abandoned or self.failed):
            if self._guard(flush_some):
                return

    def _guard(self, act: Callable[[BinaryIO], int]) -> int:
        """Call ``act``, after waiting until it writes something; return its result."""
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
        except BaseException:  # ended while no process read it: the rest would block again
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
        """Whether a progress bar is wanted and would be visible on a terminal."""
        if self.verbosity < 0 or self.results.reached_terminal or not self.stderr.isatty():
            return False
        return os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")

    def get_ready(self) -> None:
        """Load the modules that results will need."""
        if self.json:
            import json  # noqa: F401

    def result(self, text: str, fields: dict[str, Any]) -> None:
        """Print one result: text for people, or its documented fields with ``--json``."""
        self._print(self._line(text, fields))

    def result_once(self, text: str, fields: dict[str, Any]) -> None:
        """Print one result, but not the same text as the last time."""
        if self.json or text != self._said_once:
            self._said_once = text
            self.result(text, fields)

    def json_result(self, fields: dict[str, Any]) -> None:
        """Print one result with ``--json``; nothing otherwise."""
        if self.json:
            self.result("", fields)

    def results_of(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Print many results together; one write for each took much of a listing's time."""
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
        # A path may contain bytes that are not text; they are printed unchanged.
        return harmless(text).encode("utf-8", "surrogateescape") + b"\n"

    def _print(self, lines: bytes | bytearray) -> None:
        with self._aside():
            self.results.write(lines)
            self.results.flush()

    def say(self, text: str) -> None:
        """Print a message for the user, unless quiet."""
        if self.verbosity >= 0:
            self._prose(text)

    def note(self, text: str) -> None:
        """Print a message that names the program, unless quiet."""
        self.say(f"pipegrid: {text}")

    def fault(self, text: str) -> None:
        """Print such a message about an error that counts in the exit status, even if quiet."""
        self._prose(f"pipegrid: {text}")

    def detail(self, text: str) -> None:
        """Print a detail, only with ``-v``."""
        if self.verbosity > 0:
            self._prose(text)

    def complain(self, error: BaseException, about: str = "") -> ExitStatus:
        """
        Print an error, in one sentence; with ``-v``, the traceback first.

        Args:
            about: the name of the item, such as a file, if the error may not have it.

        Returns:
            The exit status for the error.
        """
        if self.results.reader_left and isinstance(error, BrokenPipeError):
            return ExitStatus.FAILED
        if self.verbosity > 0:
            import traceback  # only some runs need it

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
        Print the error of one of several items, as ``complain`` does, and in JSON if wanted.

        Args:
            fields: the JSON fields that identify the item.
            one_of_several: whether it is one of several arguments: then the status is 1 where it would be 2
                for it alone, since the command line as a whole was valid.
            more: further JSON fields, after the error.
        """
        if self.results.reader_left:  # the reader has closed its end, so the command stops
            raise BrokenPipeError
        status = self.complain(error, about)
        if one_of_several and status == ExitStatus.USAGE:
            status = ExitStatus.FAILED
        if self.results.failed:  # its error is reported separately
            return status
        self.json_result({**fields, "error": sentence(error), "exit_status": int(status), **more})
        return status

    def print_within(self, aside: Callable[[], AbstractContextManager[None]] | None) -> None:
        """Print every line, result or message, within this context, so that a progress bar can be hidden."""
        self._aside = aside or nullcontext

    def _prose(self, text: str) -> None:
        data = harmless(text).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        try:
            with self._aside():
                self.stderr.write(data + "\n")
                self.stderr.flush()
        except (OSError, ValueError):
            pass  # stderr is closed too; the exit status remains


def _names(text: str, about: str) -> bool:
    """Return whether a sentence contains a name; the word 'a' in it does not count for a file ``a``."""
    if about not in text:
        return False
    import re

    name = re.escape(about)
    if len(about) < 8:  # as a path, in quotes, or before a colon
        name = rf"/{name}(?!\w)|'{name}'|(?<![\w.]){name}:"
    return re.search(name, text) is not None


def _json_line(fields: dict[str, Any]) -> bytes:
    """Return an object as a line of valid UTF-8, whatever bytes a path in it has."""
    plain = plain_json(fields)
    if plain is not None:
        return plain
    import json  # some runs never need it, others only at the end

    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (
        ValueError
    ):  # an entry of a directory may contain 1e999, or NaN, which JSON does not have
        fields = _finite(fields)
        text = json.dumps(fields, ensure_ascii=False)
    try:
        if not text.isprintable():  # JSON does not escape all control characters of terminals
            text = json.dumps(fields)
        line = text.encode("utf-8")
    except UnicodeEncodeError:  # a byte 0xff that is not text becomes the lone surrogate \udcff
        line = json.dumps(fields).encode("ascii")
    return line + b"\n"


def _finite(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


# Standard input, and files that are read as a whole.


class NoInput:
    """Closed standard input; reading it raises an error."""

    name = "standard input"

    def read(self, length: int = -1, /) -> bytes:
        """Raise SourceError: standard input is closed."""
        raise SourceError("cannot read standard input: it is closed")


def read_given(path: str, stdin: BinaryIO | None, most: int) -> bytes:
    """
    Return the content of a file, or its beginning.

    Args:
        path: ``-`` is standard input.

    Raises:
        SourceError: standard input is closed.
        OSError: it cannot be read.
        ValueError: the path is invalid.
    """
    if path != "-":
        with open(path, "rb") as file:
            return file.read(most)
    return NoInput().read() if stdin is None else read_whole(stdin, most)


def read_whole(file: BinaryIO, most: int) -> bytes:
    """
    Return the content of a stream, or its beginning, however long that takes.

    Another program may have made standard input non-blocking: then a read returns only what has arrived, or
    None.
    """
    try:
        waits = os.get_blocking(file.fileno())
    except (OSError, ValueError):  # it has no descriptor
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
    Return the source for ``Grid.put`` of a file that a command names; it can stop waiting for a pipe or
    terminal.

    Args:
        path: ``-`` is standard input.
        stdin: None if it is closed.
    """
    if path != "-":
        return path
    return NoInput() if stdin is None else stdin


MAX_LINES = 20
"""Of one kind, on a screen; a file of ten shares has fewer problems, but ten thousand files may be given."""


def say_some(console: Console, lines: Sequence[str]) -> None:
    """Print the first of many lines, and how many more there are, which ``-v`` prints as well."""
    shown = len(lines) if console.verbosity > 0 or len(lines) <= MAX_LINES else MAX_LINES - 1
    for line in lines[:shown]:
        console.note(line)
    if shown < len(lines):
        console.note(f"and {len(lines) - shown} more like that; -v names them")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """
    Return rows as lines with their columns aligned; the last of a row may have any length.

    Args:
        rows: may have different lengths.
        right: numbers of the columns that are aligned at the right.
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
    """Return each reason once, with all its servers, if their names are its first word."""
    servers: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, rest = reason.partition(" ")
        servers.setdefault(rest, []).append(name)
    return [
        f"{names[0]} {rest}" if len(names) == 1 else f"{', '.join(names)}: {rest}"
        for rest, names in servers.items()
    ]
