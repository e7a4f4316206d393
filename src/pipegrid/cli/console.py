"""
Where a command writes and reads: results on stdout, prose and progress on stderr, and what stdin gives.

The streams are handed in, so tests need no process of their own.
"""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite

from pipegrid.cli.error_report import ExitStatus, sentence, status_of
from pipegrid.cli.startup.fast_json import plain_json
from pipegrid.core.text import harmless, printable
from pipegrid.disk.private_files import interruptible, wait_for_room
from pipegrid.errors import SinkError, SourceError

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any, BinaryIO, TextIO

CLOSED = "standard output is closed; redirect it, if only to /dev/null"

_GATHERED_BYTES = 64 << 10
"""Of results that are printed together."""
NO_TEXT = (
    "this file is not text, and would disturb the terminal; write it to a file with '-o FILE', or to the "
    "terminal with '-o -'"
)
_LOOKED_AT_BYTES = 4096
"""Of each piece. A zero byte among the first thousands is what others go by, too."""


class ResultStream(io.BufferedIOBase):
    """
    Standard output, remembering whether anybody is left to read it.

    Attributes:
        abandoned: the reader went away (``pipegrid get CAP | head -c 100``), or read no more, and the
            command was told to end.
        failed: it cannot be written to, and that was an error.
        wants_text: what is no text is refused, since it would leave a terminal that nobody can read.
        reached_terminal: text was sent through a pipe, whose reader may show it on the terminal.
        before_text: called before that happens, once; a progress bar is taken away then, for good.
        reader_left: ``abandoned`` because the reader went away.
    """

    written_in_reactor = True
    """Of the library: only the main thread may be interrupted by a signal while it waits for a reader."""

    def __init__(self, stream: BinaryIO | None) -> None:
        self._stream = stream
        self.abandoned = False
        self.failed = False
        self.wants_text = False
        self.reached_terminal = False
        self.before_text: Callable[[], None] | None = None
        self.reader_left = False

    @property
    def name(self) -> str:
        """What an error about it calls it, as ``open`` files have it."""
        return "standard output"

    def isatty(self) -> bool:
        """Whether a person reads it as it comes."""
        return self._stream is not None and self._stream.isatty()

    def writable(self) -> bool:
        """Return True, whatever happened: a failed write tells more."""
        return True

    def write(self, data: Any, /) -> int:
        """
        Write all of data.

        Raises:
            BrokenPipeError: the reader went away.
            SinkError: there is no standard output, or its disk is full, or text is wanted and this is none.
        """
        if self._stream is None:
            self.failed = True
            raise SinkError(CLOSED)
        view = memoryview(data).cast("B")
        if self.wants_text and b"\0" in bytes(view[:_LOOKED_AT_BYTES]):
            self.failed = True
            raise SinkError(NO_TEXT)
        if not self.reached_terminal and self._is_piped_text(view):
            self.reached_terminal = True
            if self.before_text is not None:
                self.before_text()
        length = len(view)
        while view:
            view = view[self._guard(partial(_written, data=view)) :]
        return length

    def _is_piped_text(self, view: memoryview) -> bool:
        """Whether this goes through a pipe, so that ``tee`` or ``less`` may show it on the terminal."""
        assert self._stream is not None
        try:
            mode = os.fstat(self._stream.fileno()).st_mode
        except (OSError, ValueError):
            return False
        is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        return is_pipe and b"\0" not in bytes(view[:_LOOKED_AT_BYTES])

    def flush(self) -> None:
        """
        Hand over what was written; raises as ``write`` does, unless that did already.

        Python calls it once more when it takes the object apart, perhaps after the stream was closed, and
        from 3.14 on tells people of what it raises then.
        """
        if self._stream is None or self._stream.closed:
            return
        while not (self.abandoned or self.failed):
            if self._guard(_is_flushed):
                return

    def _guard(self, act: Callable[[BinaryIO], int]) -> int:
        """Do a part of the work; returns what ``act`` does, having waited if that is nothing."""
        assert self._stream is not None
        try:
            with interruptible(self._stream.fileno):
                done = act(self._stream)
                if not done:
                    wait_for_room(self._stream.fileno())
                return done
        except BrokenPipeError:
            self.abandoned = self.reader_left = True
            raise
        except OSError as error:
            self.failed = True
            raise SinkError(f"cannot write to standard output: {error.strerror}") from error
        except BaseException:  # told to end while nobody read it: whatever is left would wait again
            self.abandoned = True
            raise


def _written(stream: BinaryIO, data: memoryview) -> int:
    """
    Return how many bytes a stream takes now.

    An unbuffered one (``PYTHONUNBUFFERED``, as in many containers) takes what the disk has room for, or the
    pipe; and where another program has a pipe not wait, no stream does.
    """
    try:
        taken: int | None = stream.write(data)
    except BlockingIOError as error:
        return error.characters_written
    if taken is None:  # what tells nothing takes all, but for a file of the system's
        return 0 if isinstance(stream, io.RawIOBase) else len(data)
    return taken


def _is_flushed(stream: BinaryIO) -> bool:
    try:
        stream.flush()
    except BlockingIOError:
        return False
    return True


class Console:
    """
    The streams of one command, and how much to say on them.

    Attributes:
        json: results are JSON objects, one a line.
        verbosity: -1 quiet, 0 normal, 1 with details and tracebacks.
    """

    def __init__(self, stdin: BinaryIO | None, stdout: BinaryIO | None, stderr: TextIO) -> None:
        self.stdin = stdin
        self.results = ResultStream(stdout)
        self.stderr = stderr
        self.json = False
        self.verbosity = 0
        self._aside: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def data_sink(self) -> BinaryIO:
        """Standard output as a place for a file's bytes."""
        sink: BinaryIO = self.results  # type: ignore[assignment]  # as a file, but for its name
        return sink

    @property
    def shows_progress(self) -> bool:
        """Whether a progress bar would be seen and is wanted, and can be drawn over."""
        if self.verbosity < 0 or self.results.reached_terminal or not self.stderr.isatty():
            return False
        return os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")

    def get_ready(self) -> None:
        """Load what results will need."""
        if self.json:
            import json  # noqa: F401

    def result(self, text: str, fields: dict[str, Any]) -> None:
        """Print one result: text for people, or its documented fields under ``--json``."""
        self._print(self._line(text, fields))

    def json_result(self, fields: dict[str, Any]) -> None:
        """Print one result under ``--json``; people are told nothing."""
        if self.json:
            self.result("", fields)

    def results_of(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Print many that are at hand; a write for each took much of a listing's time."""
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
        # A path may hold bytes that are no text; they come out as they went in.
        return harmless(text).encode("utf-8", "surrogateescape") + b"\n"

    def _print(self, lines: bytes | bytearray) -> None:
        with self._aside():
            self.results.write(lines)
            self.results.flush()

    def say(self, text: str) -> None:
        """Tell the user something, unless quiet."""
        if self.verbosity >= 0:
            self._prose(text)

    def fault(self, text: str) -> None:
        """Tell the user of something that went wrong, and counts in the exit status; quiet or not."""
        self._prose(text)

    def detail(self, text: str) -> None:
        """Tell the user something that only ``-v`` asks for."""
        if self.verbosity > 0:
            self._prose(text)

    def complain(self, error: BaseException, about: str = "") -> ExitStatus:
        """
        Tell the user what went wrong, in one sentence; with ``-v``, the traceback first.

        Args:
            about: which of several things it was, such as a file's name, if the error may not say.

        Returns:
            The exit status that tells a script the same.
        """
        if self.results.reader_left and isinstance(error, BrokenPipeError):
            return ExitStatus.FAILED
        if self.verbosity > 0:
            import traceback  # which those need that are told more than a sentence

            self._prose("".join(traceback.format_exception(error)).rstrip())
        text = sentence(error)
        about = printable(about)
        about = f"{about}: " if about and not _names(text, about) else ""
        self._prose(f"pipegrid: {about}{text}")
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
        Tell what went wrong with one of several things, as ``complain`` does, and in JSON if that is wanted.

        Args:
            fields: say in JSON which of them it was.
            one_of_several: it is one of several arguments: then the status is 1 where it would be 2 for it
                alone, since the command line as a whole made sense.
            more: what JSON says behind the error.
        """
        if self.results.reader_left:  # nobody wants to know: the command ends
            raise BrokenPipeError
        status = self.complain(error, about)
        if one_of_several and status == ExitStatus.USAGE:
            status = ExitStatus.FAILED
        if self.results.failed:  # nothing can be told there, as was just said or is about to be
            return status
        self.json_result({**fields, "error": sentence(error), "exit_status": int(status), **more})
        return status

    def print_within(self, aside: Callable[[], AbstractContextManager[None]] | None) -> None:
        """Have every line, result or prose, printed within this, so that a progress bar makes room."""
        self._aside = aside or nullcontext

    def _prose(self, text: str) -> None:
        data = harmless(text).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        try:
            with self._aside():
                self.stderr.write(data + "\n")
                self.stderr.flush()
        except (OSError, ValueError):
            pass  # nobody listens; the exit status still tells


def _names(text: str, about: str) -> bool:
    """Return whether a sentence names something; that 'a' is a word of it does not tell of a file ``a``."""
    if about not in text:
        return False
    import re

    name = re.escape(about)
    if len(about) < 8:  # as a path, in quotes, or before a colon
        name = rf"/{name}(?!\w)|'{name}'|(?<![\w.]){name}:"
    return re.search(name, text) is not None


def _json_line(fields: dict[str, Any]) -> bytes:
    """Return an object as a line of valid UTF-8, whatever bytes a path in it is made of."""
    plain = plain_json(fields)
    if plain is not None:
        return plain
    import json  # which some never need, and others not before the end

    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except ValueError:  # an entry of a directory may say 1e999, or NaN, which is no JSON
        fields = _finite(fields)
        text = json.dumps(fields, ensure_ascii=False)
    try:
        if not text.isprintable():  # a terminal obeys more than JSON has escapes for
            text = json.dumps(fields)
        line = text.encode("utf-8")
    except UnicodeEncodeError:  # a byte 0xff that is no text becomes the lone surrogate \udcff
        line = json.dumps(fields).encode("ascii")
    return line + b"\n"


def _finite(value: Any) -> Any:
    """Return the same with null for numbers that JSON has not."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


# Standard input, and files that are read as a whole.


class NoInput:
    """Standard input where there is none; reading it says so."""

    name = "standard input"

    def read(self, length: int = -1, /) -> bytes:
        """Raises SourceError, always: standard input is closed."""
        raise SourceError("cannot read standard input: it is closed")


def read_given(path: str, stdin: BinaryIO | None, most: int) -> bytes:
    """
    Return what is in a file, or its beginning.

    Args:
        path: ``-`` is standard input.

    Raises:
        SourceError: there is no standard input.
        OSError: it cannot be read.
        ValueError: no file can be called so.
    """
    if path != "-":
        with open(path, "rb") as file:
            return file.read(most)
    return NoInput().read() if stdin is None else read_whole(stdin, most)


def read_whole(file: BinaryIO, most: int) -> bytes:
    """
    Return what there is to read, or its beginning, however long that takes.

    Another program may have made standard input one that does not wait: then a read returns what is there by
    now, or None, and not what there will be.
    """
    try:
        waits = os.get_blocking(file.fileno())
    except (OSError, ValueError):  # not a file at all
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
    Return what ``Grid.put`` reads of what a command names; it can stop waiting for a pipe or terminal.

    Args:
        path: ``-`` is standard input.
        stdin: None: it is closed.
    """
    if path != "-":
        return path
    return NoInput() if stdin is None else stdin
