"""
The format of Debian's control files: paragraphs of fields. Pure.

Source: Debian policy, chapter 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from pipegrid.mirror.archive_file import (
    BadEntry,
)

MAX_PARAGRAPH_BYTES = 8 << 20
"""The longest paragraph of an index: a package's files in Sources, or its provides, take some kilobytes."""


def paragraphs(
    blocks: Iterable[bytes], fields: frozenset[str], name: str, usual: frozenset[str] = frozenset()
) -> Iterator[dict[str, str]]:
    """
    Yield the paragraphs of a control file, with the fields in ``fields``.

    As in apt: names of fields in any case; the last of repeated fields counts; lines may also end in a
    carriage return.

    Args:
        blocks: its bytes, in pieces of any size.
        name: of the file, for errors.
        usual: a paragraph with these fields, written as here, is not examined further; that is faster.

    Yields:
        each paragraph's fields by name; empty without any of them.

    Raises:
        BadEntry: a paragraph is longer than ``MAX_PARAGRAPH_BYTES``.
    """
    for paragraph in raw_paragraphs(blocks, name):
        yield parse_paragraph(paragraph, fields, usual)


def raw_paragraphs(blocks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """
    Yield the bytes of each paragraph of a control file, without the blank lines between them.

    Raises:
        BadEntry: as ``paragraphs``.
    """
    rest = b""
    for block in blocks:
        rest += block
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        start = 0
        while (end := rest.find(b"\n\n", start)) >= 0:
            if end > start:
                paragraph = rest[start:end]
                if not paragraph.isspace():
                    yield paragraph
            start = end + 2
        rest = rest[start:]
        if len(rest) > MAX_PARAGRAPH_BYTES:
            raise BadEntry(f"a paragraph of {name} is longer than {MAX_PARAGRAPH_BYTES} bytes")
    if not rest.isspace() and rest:
        yield rest


def parse_paragraph(data: bytes, fields: frozenset[str], usual: frozenset[str]) -> dict[str, str]:
    data = b"\n" + data
    places: dict[str, int] = {}
    for field, mark in _marks(fields):
        start = data.rfind(mark)
        if start >= 0:
            places[field] = start + len(mark)
    if not usual or not usual <= places.keys():
        exact = {field.lower().encode("ascii"): field for field in fields}
        places = {exact[m[1].lower()]: m.end() for m in _any_case(fields).finditer(data)}
    return {field: _value(data, start) for field, start in places.items()}


def _value(data: bytes, start: int) -> str:
    end = data.find(b"\n", start)
    while end >= 0 and data[end + 1 : end + 2] in (b" ", b"\t"):  # some have many lines
        end = data.find(b"\n", end + 1)
    value = data[start : end if end >= 0 else len(data)]
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:  # old maintainers' names; the requested fields are ASCII
        text = value.decode("latin-1")
    first, newline, more = text.partition("\n")
    if not newline:
        return first.strip()
    more = more.removeprefix(" ").removeprefix("\t")
    more = more.replace("\n ", "\n").replace("\n\t", "\n")
    return f"{first.strip()}\n{more}"


@lru_cache(maxsize=8)
def _marks(fields: frozenset[str]) -> tuple[tuple[str, bytes], ...]:
    """Return the beginnings of lines with these fields, and the ends of the lines before them."""
    return tuple((field, b"\n%s:" % field.encode("ascii")) for field in sorted(fields))


@lru_cache(maxsize=8)
def _any_case(fields: frozenset[str]) -> re.Pattern[bytes]:
    """Return a pattern for the beginnings of these fields, in any case, with spaces before the colon."""
    names = "|".join(map(re.escape, sorted(fields)))
    return re.compile(rf"\n({names})[ \t]*:".encode("ascii"), re.IGNORECASE)


def lines_of_text(text: str) -> Iterator[str]:
    """Yield the lines of a field that are not blank, one after the other, without keeping all."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        if end < 0:
            end = len(text)
        if end > start and (line := text[start:end].strip()):
            yield line
        start = end + 1
