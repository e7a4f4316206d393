"""
XML of strangers, read by the piece: elements, attributes, texts; and nothing that could grow. Pure.

Refused are document types, and with them all entities but the five of XML itself; other encodings than
UTF-8; elements within elements beyond ``MAX_DEPTH``; a tag, comment or other piece of markup of more than
``MAX_MARKUP_BYTES``; a text of more than ``MAX_TEXT_CHARS``; more than ``MAX_NAMES`` different names, since
each is kept as long as the document is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from xml.parsers import expat

from pipegrid.mirror.wanted import BadEntry, quoted

MAX_DEPTH = 32
MAX_MARKUP_BYTES = 1 << 20
MAX_TEXT_CHARS = 64 << 10
MAX_NAMES = 4096
FED_BYTES = 64 << 10
"""At once: so much may be read behind what is refused."""


class ElementReader(Protocol):
    """What is told of a document."""

    def opened(self, depth: int, name: str, attributes: Mapping[str, str]) -> bool:
        """
        An element begins.

        Args:
            depth: 1 for the outermost.
            name: as it is written, with its prefix.

        Returns:
            whether its text is wanted.
        """

    def closed(self, depth: int, name: str, text: str) -> None:
        """
        An element ends.

        Args:
            text: what stood in it, outside of other elements; "" if that was not wanted.
        """


class XmlParser:
    """
    One document.

    Args:
        reader: is told what is in it; what it raises ends the reading.
        name: of the document, for errors.
    """

    def __init__(self, reader: ElementReader, name: str) -> None:
        self._name = name
        self._names: dict[str, str] = {}
        self._reader = reader
        self._depth = 0
        self._text: list[str] = []
        self._text_chars = 0
        self._text_depth = 0
        self._fed_bytes = 0
        # What a document says of its encoding does not count.
        self._expat = parser = expat.ParserCreate("utf-8", intern=self._names)
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        parser.StartElementHandler = self._open
        parser.EndElementHandler = self._close

    def feed(self, data: bytes) -> None:
        """
        Read some more.

        Raises:
            BadEntry: it is no XML, or none that is read here.
        """
        if not self._fed_bytes and data[:1] in (b"\xfe", b"\xff"):  # expat would follow that mark
            raise BadEntry(f"{self._name} is not UTF-8")
        view = memoryview(data)
        for start in range(0, len(view), FED_BYTES):
            self._feed(bytes(view[start : start + FED_BYTES]))

    def _feed(self, data: bytes) -> None:
        self._parse(data, False)
        self._fed_bytes += len(data)
        if self._fed_bytes - self._expat.CurrentByteIndex > MAX_MARKUP_BYTES:
            raise self._refusal(f"a tag or comment of more than {MAX_MARKUP_BYTES} bytes")
        if len(self._names) > MAX_NAMES:
            raise self._refusal(f"more than {MAX_NAMES} different names of elements and attributes")

    def end(self) -> None:
        """
        That was all.

        Raises:
            BadEntry: it was not all.
        """
        self._parse(b"", True)

    def _parse(self, data: bytes, last: bool) -> None:
        try:
            self._expat.Parse(data, last)
        except expat.ExpatError as error:
            raise BadEntry(
                f"{self._name} is no XML ({error}); perhaps the mirror serves a page for everything"
            ) from None
        except UnicodeError:
            raise BadEntry(f"{self._name} is not UTF-8") from None

    def _refusal(self, what: str) -> BadEntry:
        return BadEntry(f"{self._name} has {what}; it is not read on")

    def _refuse_doctype(self, name: str, *_: object) -> None:
        raise self._refusal(f"a document type ({quoted(name)}), which no index needs")

    def _open(self, name: str, attributes: Mapping[str, str]) -> None:
        self._depth = depth = self._depth + 1
        if depth > MAX_DEPTH:
            raise self._refusal(f"elements that are nested more than {MAX_DEPTH} deep")
        if self._reader.opened(depth, name, attributes):
            self._text, self._text_chars, self._text_depth = [], 0, depth
            self._expat.CharacterDataHandler = self._add_text

    def _add_text(self, text: str) -> None:
        if self._depth != self._text_depth:
            return
        self._text_chars += len(text)
        if self._text_chars > MAX_TEXT_CHARS:
            raise self._refusal(f"a text of more than {MAX_TEXT_CHARS} characters")
        self._text.append(text)

    def _close(self, name: str) -> None:
        depth = self._depth
        text = ""
        if depth == self._text_depth:
            text = "".join(self._text)
            self._text_depth = 0
            self._expat.CharacterDataHandler = None
        self._depth = depth - 1
        self._reader.closed(depth, name, text)
