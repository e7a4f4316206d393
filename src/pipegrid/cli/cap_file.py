"""Cap files: lines of a cap and a name, read within bounds."""

from __future__ import annotations

import os
import re
import shlex
import stat
from typing import BinaryIO, NamedTuple

from pipegrid.cli.console import read_given
from pipegrid.cli.error_report import unreadable
from pipegrid.core.text import CAP_STARTS, as_pasted, decode_text, printable
from pipegrid.errors import CapError, SourceError, UsageError

# Cap files: one cap or path a line, perhaps with the name of its file behind it, as ``put -l`` prints them.
#
#     URI:CHK:...:3:10:5000  holiday.jpg
#     home:photos/a day at sea.jpg
#     home:photos/a day at sea.jpg  sea.jpg
#     # lines that begin like this, and empty ones, count for nothing
#
# Between cap and name are two spaces. Behind a cap without a path any blanks will do that a person writes by
# hand (then the name does not begin with one); a path has blanks of its own, so two of them, or a tab,
# end it. In a name ``\n`` stands for the end of a line, ``\\`` for a backslash, ``\x1b`` for any
# character that a terminal would not print, and ``\udce9`` for the byte E9 of a name that is no UTF-8.

MAX_BYTES = 16 << 20
"""That a cap file may have; a cap with a name has some 150."""

MAX_CAPS = 100_000

_ESCAPE = re.compile(r"\\(?:([\\nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_NO_TEXT = re.compile("[\ud800-\udfff]")
"""Bytes of a name that is no UTF-8, as Python keeps them."""

_BEHIND_A_PATH = re.compile(r"  |\t")
_SHORT = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


class CapLine(NamedTuple):
    """
    A cap as it stands somewhere.

    Attributes:
        text: the cap.
        name: of its file, or None.
        where: for errors; empty for the only one on the command line.
    """

    text: str
    name: str | None
    where: str


def as_line(cap: str, name: str) -> str:
    """Return the line of a cap file, without its end."""
    return f"{cap}  {escaped(name)}"


def escaped(name: str) -> str:
    """Return a name on one line, in UTF-8, as a terminal can show it and ``unescaped`` reads it."""
    text = printable(name.replace("\\", "\\\\"))
    return _NO_TEXT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def unescaped(text: str) -> str:
    """Return the name that ``escaped`` made this of; other backslashes stay what they are."""

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
        SourceError: it cannot be read.
        UsageError: it is no cap file, as far as can be told without looking at the caps.
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
    Return the lines with a cap in them.

    Args:
        name: of the file, for errors.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{name} is larger than {MAX_BYTES >> 20} MiB; a cap file has one cap per line, so choose another"
        )
    lines = decode_text(data, name).split("\n")
    found = []
    for number, line in enumerate(lines, 1):
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
        raise UsageError(f"{name} holds no cap; write one per line")
    return found


def _cap_of(line: str) -> str:
    """Return the cap or path with which a line begins."""
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


# What is meant by the name of a local file where a cap is wanted: the cap that stands in it.

_LOOKED_AT_BYTES = 4096


def caps_in_file(text: str, by_option: bool) -> str | None:
    """
    Return what to say where a file that holds caps was named in the place of one; None: it is no such file.

    Args:
        by_option: the command takes ``--cap-file``.
    """
    path = text.strip()
    if not _holds_cap(path):
        return None
    shown = printable(shlex.quote(path))
    remedy = f"did you mean --cap-file {shown}?" if by_option else "give that cap itself"
    return f"{shown} is not a cap, but a file that contains one; {remedy}"


def check_no_file(text: str) -> None:
    """
    Raises:
        CapError: a file that holds caps was named in the place of a cap, and there is no ``--cap-file``.
    """
    if not as_pasted(text).startswith(CAP_STARTS) and (hint := caps_in_file(text, by_option=False)):
        raise CapError(hint)


def _holds_cap(path: str) -> bool:
    """Return whether the first line of a file that counts begins with a cap."""
    try:
        # A pipe, which would be waited for, and a device are not opened.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            start = file.read(_LOOKED_AT_BYTES)
    except (OSError, ValueError):
        return False
    for line in start.decode("utf-8-sig", "replace").split("\n"):
        bare = as_pasted(line)
        if bare and not bare.startswith("#"):
            return bare.startswith(CAP_STARTS)
    return False
