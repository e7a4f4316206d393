"""
Patches of indexes: ed scripts, read, checked and merged, without a file or a clock.

Archives publish what has changed in an index as ``diff --ed`` writes it: commands from the last line to
the first,

    LINE[,LINE]d            these lines go
    LINE[,LINE]c, text, .   these become the text
    LINEa, text, .          the text comes behind this line
    s/.//, a                behind a text that ends in "..": the line is ".", and the text goes on

A patch is for the result of the one before it. ``merge`` works them out on paper: what is left is one
list of pieces, each a range of lines of the first index or lines of a patch, in the order in which they
are written. So any number of patches costs one pass over the index, and the hash of the result proves all
of it: index, patches and order.

Sources: POSIX ed; the ``Index`` files of Debian's archive.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import NamedTuple

from pipegrid.mirror.unpacking import PatchError
from pipegrid.mirror.wanted import quoted

MAX_LINE_NUMBER = 1 << 40
END = 1 << 62
"""Stands for the end of the index, whose length nobody knows before it is read."""

MAX_EDITS = 1_000_000
"""Of all patches of an index: each takes 150 bytes."""

MAX_STEPS = 20_000_000
"""Pieces that merging goes over, for each patch all of them: ten seconds, as long as fetching the index."""

_COMMAND = re.compile(rb"([0-9]{1,13})(?:,([0-9]{1,13}))?([acd])")


class LineEdit(NamedTuple):
    """
    One change: the lines from ``first`` up to and without ``last`` (from 0) become ``text``.

    Attributes:
        text: whole lines, each with its end.
    """

    first: int
    last: int
    text: list[bytes]


Piece = tuple[int, int] | list[bytes]
"""Lines of the index from the first up to and without the second (from 0), or lines as they are."""


_NONE: list[bytes] = []


def parse(patch: bytes, name: str, most: int = MAX_EDITS) -> list[LineEdit]:
    """
    Read an ed script.

    Args:
        name: of the patch, for errors.
        most: edits that it may have.

    Returns:
        The edits, from the first line to the last, none overlapping.

    Raises:
        PatchError: it is not one, is cut off, has too many commands, or has them not in descending order.
    """
    edits: list[LineEdit] = []
    lines = BytesIO(patch).readlines()  # splitlines would take a carriage return for an end, too
    if lines and not lines[-1].endswith(b"\n"):
        raise PatchError(f"the patch {name} is cut off: its last line has no end")
    at, count = 0, len(lines)
    before = END
    while at < count:
        number = at + 1
        command = lines[at].rstrip(b"\n")
        at += 1
        match = _COMMAND.fullmatch(command)
        if match is None:
            raise PatchError(
                f"the patch {name} has no command in line {number}: {quoted(command.decode('latin-1'), 40)}"
            )
        kind = match[3]
        first = int(match[1])
        last = int(match[2] or first)
        if kind == b"a":
            if match[2]:
                raise PatchError(f"the patch {name} appends to a range in line {number}")
            begin = end = first
        else:
            begin, end = first - 1, last
        if begin < 0 or end < begin or (kind != b"a" and last < first) or end > before:
            raise PatchError(f"the commands of the patch {name} are not in order, in line {number}")
        if len(edits) == most:
            raise PatchError(f"the patch {name} has too many commands; fetch the index again")
        text = _NONE
        if kind != b"d":
            at = _read_text(lines, at, text := [], name)
        edits.append(LineEdit(begin, end, text))
        before = begin
    edits.reverse()
    return edits


def _read_text(lines: Sequence[bytes], at: int, text: list[bytes], name: str) -> int:
    """Append the lines up to the one that is a dot; returns where the next command stands."""
    count = len(lines)
    while True:
        while at < count and lines[at] != b".\n":
            text.append(lines[at])
            at += 1
        if at >= count:
            raise PatchError(f"the patch {name} is cut off: a text in it has no end")
        at += 1
        # A line that is a dot was written as two; the first is taken away again, and the text goes on.
        if not (at < count and lines[at] == b"s/.//\n"):
            return at
        if not text or text[-1][:1] != b".":
            raise PatchError(f"the patch {name} takes away what is not there, in line {at + 1}")
        text[-1] = text[-1][1:]
        at += 1
        if not (at < count and lines[at] == b"a\n"):
            return at
        at += 1


def merge(patches: Sequence[Sequence[LineEdit]]) -> list[Piece]:
    """
    Return what the result of all the patches, one behind the other, consists of.

    Args:
        patches: the edits of each, as ``parse`` returns them; the first is for the index.

    Returns:
        Pieces; the ranges rise, and the last one ends at ``END`` unless everything behind was replaced.

    Raises:
        PatchError: that would take more than ``MAX_STEPS``.
    """
    pieces: list[Piece] = [(0, END)]
    steps = 0
    for edits in patches:
        steps += len(pieces) + len(edits)
        if steps > MAX_STEPS:
            raise PatchError(
                "the patches change too much, one after the other; fetch the index again"
            )
        pieces = _apply(pieces, edits)
    return pieces


def _apply(pieces: list[Piece], edits: Sequence[LineEdit]) -> list[Piece]:
    out: list[Piece] = []
    rest = _Lines(pieces)
    at = 0
    for edit in edits:
        rest.take(edit.first - at, out)
        rest.skip(edit.last - edit.first)
        if edit.text:
            _add(out, edit.text)
        at = edit.last
    rest.take(2 * END, out)  # lines of patches stand before those of the index, too
    return out


class _Lines:
    """The lines of pieces, taken from the front."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = iter(pieces)
        self._piece: Piece | None = next(self._pieces, None)
        self._taken = 0  # of its lines, if it is a list: what is left of a long one is not copied

    def take(self, count: int, out: list[Piece]) -> None:
        """Move so many lines to ``out``, or all that there are."""
        for piece in self._next(count):
            _add(out, piece)

    def skip(self, count: int) -> None:
        """Leave out the next ``count`` lines."""
        for _ in self._next(count):
            pass

    def _next(self, count: int) -> Iterator[Piece]:
        while count > 0 and self._piece is not None:
            piece, taken = self._piece, self._taken
            size = len(piece) - taken if isinstance(piece, list) else piece[1] - piece[0]
            if size <= count:
                yield piece[taken:] if isinstance(piece, list) else piece
                self._piece, self._taken = next(self._pieces, None), 0
                count -= size
            elif isinstance(piece, list):
                self._taken += count
                yield piece[taken : self._taken]
                return
            else:
                middle = piece[0] + count
                yield (piece[0], middle)
                self._piece = (middle, piece[1])
                return


def _add(out: list[Piece], piece: Piece) -> None:
    last = out[-1] if out else None
    if isinstance(piece, list):
        if isinstance(last, list):
            last.extend(piece)
        else:
            out.append(list(piece))
    elif isinstance(last, tuple) and last[1] == piece[0]:
        out[-1] = (last[0], piece[1])
    elif piece[1] > piece[0]:
        out.append(piece)
