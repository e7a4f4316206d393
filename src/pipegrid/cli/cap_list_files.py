"""Cap files: lines with a cap and perhaps a name. Also the file that keeps caps that could not be printed."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pipegrid.cli.console import Console, read_given
from pipegrid.cli.error_report import UnprintedCap, sentence, unreadable
from pipegrid.core.text import CAP_STARTS, as_pasted, decode_text, printable
from pipegrid.disk.private_files import open_private
from pipegrid.errors import CapError, SinkError, SourceError, UsageError

# Cap files: one cap or path per line, optionally followed by the name of its file, as ``put -l`` prints them.
#
#     URI:CHK:...:3:10:5000  holiday.jpg
#     home:photos/a day at sea.jpg
#     home:photos/a day at sea.jpg  sea.jpg
#     # lines that begin with '#', and empty lines, are skipped
#
# Two spaces separate the cap and the name. After a cap without a path any white space is accepted, since
# people write such lines (the name then does not begin with a space). A path may contain single spaces, so it
# ends at two spaces or a tab. In a name ``\n`` is a line feed, ``\\`` a backslash, ``\x1b`` a character that
# a terminal would not print, and ``\udce9`` the byte E9 of a name that is not UTF-8.

MAX_BYTES = 16 << 20
"""The largest size of a cap file; one cap with a name has about 150 bytes."""

MAX_CAPS = 100_000

_ESCAPE = re.compile(r"\\(?:([\\nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_NO_TEXT = re.compile("[\ud800-\udfff]")
"""Bytes of a name that are not UTF-8, as Python represents them."""

_BEHIND_A_PATH = re.compile(r"  |\t")
_SHORT = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


class CapLine(NamedTuple):
    """
    A line with a cap.

    Attributes:
        text: the cap.
        name: the name of the cap's file, or None.
        where: the position of the line for errors; empty for the only cap of a command line.
    """

    text: str
    name: str | None
    where: str


def as_line(cap: str, name: str) -> str:
    """Return the line of a cap file for a cap and a name, without a line feed."""
    return f"{cap}  {escaped(name)}"


def escaped(name: str) -> str:
    """Return a name escaped to one line that is valid UTF-8 and printable; ``unescaped`` reads it."""
    text = printable(name.replace("\\", "\\\\"))
    return _NO_TEXT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def unescaped(text: str) -> str:
    """Return the name that ``escaped`` turned into ``text``; backslashes of no known escape stay."""

    def character(match: re.Match[str]) -> str:
        short, *codes = match.groups()
        if short:
            return _SHORT[short]
        number = int(next(code for code in codes if code), 16)
        return chr(number) if number <= 0x10FFFF else match[0]

    return _ESCAPE.sub(character, text)


def read_cap_file(path: str, stdin: BinaryIO | None) -> list[CapLine]:
    """
    Return the lines of a cap file; ``-`` is standard input.

    Raises:
        SourceError: the file cannot be read.
        UsageError: the file is not a cap file; the caps themselves are not checked.
    """
    name = "standard input" if path == "-" else path
    try:
        data = read_given(path, stdin, MAX_BYTES + 1)
    except OSError as error:
        raise unreadable(name, error) from error
    except ValueError as error:
        raise SourceError(f"{path!r} is not a path: {error}; give another") from error
    return parse_cap_file(data, name)


def parse_cap_file(data: bytes, name: str) -> list[CapLine]:
    """
    Return the lines that contain a cap.

    Args:
        name: the name of the cap file, for errors.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{name} is larger than {MAX_BYTES >> 20} MiB; a cap file has one cap per line, so choose another"
        )
    found = []
    for number, line in enumerate(decode_text(data, name).split("\n"), 1):
        line = line.lstrip()
        if not line or line.startswith("#"):
            continue
        cap = _cap_of(line)
        rest = line[len(cap) :]
        rest = rest[2:] if rest.startswith("  ") else rest.lstrip()
        where = f"{name}:{number}"
        found.append(CapLine(cap, _name(rest, where), where))
        if len(found) > MAX_CAPS:
            raise UsageError(f"{name} holds more than {MAX_CAPS} caps; split it")
    if not found:
        raise UsageError(f"{name} contains no caps; write one per line")
    return found


def _cap_of(line: str) -> str:
    """Return the cap or path at the beginning of a line."""
    cap = line.split(maxsplit=1)[0]
    if "/" not in cap and cap.startswith(CAP_STARTS):
        return cap
    return _BEHIND_A_PATH.split(line, 1)[0]


def _name(text: str, where: str) -> str | None:
    if not text.strip():
        return None
    name = unescaped(text)
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise UsageError(f"{where}: no file can have this name; correct the name after the cap")
    return name


# A local file was given instead of a cap: perhaps the user meant the cap that is in the file.

_LOOKED_AT_BYTES = 4096


def caps_in_file(text: str, by_option: bool) -> str | None:
    """
    Return the error message for a local file of caps that was given as a cap; None if ``text`` is no such
    file.

    Args:
        by_option: whether the command has ``--cap-file``.
    """
    path = text.strip()
    if not _holds_cap(path):
        return None
    shown = printable(shlex.quote(path))
    remedy = f"did you mean --cap-file {shown}?" if by_option else "give that cap itself"
    return f"{shown} is not a cap, but a file that contains one; {remedy}"


def check_no_file(text: str) -> None:
    """
    Check that an argument of a command without ``--cap-file`` is not a file of caps.

    Raises:
        CapError: the argument is a file of caps instead of a cap.
    """
    if not as_pasted(text).startswith(CAP_STARTS) and (hint := caps_in_file(text, by_option=False)):
        raise CapError(hint)


def _holds_cap(path: str) -> bool:
    """Return whether the first line of a file, apart from empty lines and comments, begins with a cap."""
    try:
        # Pipes and devices are not opened: reading them could block.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            start = file.read(_LOOKED_AT_BYTES)
    except (OSError, ValueError):
        return False
    lines = map(as_pasted, start.decode("utf-8-sig", "replace").split("\n"))
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith(CAP_STARTS)


UNPRINTED = "unprinted.caps"
"""The name of the cap file for unprinted caps, in the client's private directory."""


def print_cap(
    console: Console,
    directory: Path | None,
    text: str,
    fields: dict[str, Any],
    cap: str,
    name: str = "",
) -> None:
    """
    Print a cap; if printing fails, save the cap in a file.

    Args:
        directory: the client's directory; None: the cap is not saved, since this is not its only copy.
        text: the output for people; ``fields``: the output for ``--json``.
        name: the name of the cap's file, or "".

    Raises:
        UnprintedCap: the cap could not be printed; the message says where it is saved.
    """
    try:
        console.result(text, fields)
    except (BrokenPipeError, SinkError) as error:
        if directory is None:
            raise
        raise keep_caps(directory, [as_line(cap, name) if name else cap], error) from error


def keep_caps(directory: Path, lines: Sequence[str], error: Exception) -> UnprintedCap:
    """
    Append lines to the cap file for caps that could not be printed.

    Args:
        error: why the caps could not be printed.

    Returns:
        An error that gives the reason and the file, or, if the file cannot be written, the caps themselves.
    """
    gone = isinstance(error, BrokenPipeError)
    why = "no program reads standard output any more" if gone else sentence(error)
    count = "the cap is" if len(lines) == 1 else f"{len(lines)} caps are"
    path = directory / "private" / UNPRINTED
    try:
        fd = open_private(str(path), os.O_WRONLY | os.O_APPEND)
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as second:
        return UnprintedCap(
            f"{why}; {count} not saved either, since {printable(str(path))} cannot be written "
            f"({second.strerror}): {' '.join(lines)}"
        )
    return UnprintedCap(f"{why}; {count} saved in {printable(str(path))}")
