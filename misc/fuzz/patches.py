"""
Patches of indexes: only ``PatchError`` is raised; patches merged on paper give what they give one behind the
other, worked out line by line.
"""

from __future__ import annotations

from misc.fuzz.choices import Choices
from pipegrid.mirror.decompression import PatchError
from pipegrid.mirror.pdiff import END, LineEdit, Piece, merge, parse

LINES = 12


def run(data: bytes) -> None:
    """Take the bytes for up to three patches of an index of a few lines."""
    choices = Choices(data)
    count = 1 + choices.below(3)
    patches = [choices.take(choices.below(200)) for _ in range(count - 1)] + [choices.rest()]
    parsed = []
    for patch in patches:
        try:
            edits = parse(patch, "x")
        except PatchError as error:
            assert str(error)
            assert "\n" not in str(error), "a refusal of several lines"
            return
        _check(edits)
        parsed.append(edits)
    lines = [b"line %d\n" % number for number in range(LINES)]
    one_by_one: list[bytes] | None = lines
    for edits in parsed:
        one_by_one = None if one_by_one is None else _edited(one_by_one, edits)
    if one_by_one is not None:
        assert _written(merge(parsed), lines) == one_by_one, "merged they give another index"
    else:
        merge(parsed)


def _check(edits: list[LineEdit]) -> None:
    at = 0
    for edit in edits:
        assert at <= edit.first <= edit.last, "edits overlap, or are out of order"
        assert all(line.endswith(b"\n") for line in edit.text), "a line has no end"
        at = edit.last


def _edited(lines: list[bytes], edits: list[LineEdit]) -> list[bytes] | None:
    """Return what an editor would make of the lines; None if it would refuse."""
    result = list(lines)
    for edit in reversed(edits):
        if edit.last > len(lines):
            return None
        result[edit.first : edit.last] = edit.text
    return result


def _written(pieces: list[Piece], lines: list[bytes]) -> list[bytes]:
    out: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, list):
            out += piece
        else:
            out += lines[piece[0] : len(lines) if piece[1] == END else piece[1]]
    return out


def seeds() -> dict[str, bytes]:
    """Return patches as archives have them."""
    return {
        "all": b"\x009d\n5,7c\nnew\nlines\n.\n1a\nmore\n.\n",
        "dot": b"\x003a\n..\n.\ns/.//\na\nmore\n.\n",
        "cut-off": b"\x005,7c\nnew\n",
        "upwards": b"\x001d\n5d\n",
        "two": b"\x01\x053,4d\n5c\nx\n.\n",
    }
