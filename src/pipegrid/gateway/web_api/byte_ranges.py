"""
Ranges, entity tags, media types and file names of downloads.

A malformed range is ignored, as RFC 9110 requires; of several ranges, only the first is used.
"""

from __future__ import annotations

import mimetypes
import re
from urllib.parse import quote

import attrs

from pipegrid.core import base32
from pipegrid.core.caps import Cap, ChkCap, DirectoryCap
from pipegrid.gateway.http_response import WebError

_RANGE = re.compile(r"\s*bytes\s*=\s*(?:([0-9]{1,19})\s*)?-\s*(?:([0-9]{1,19})\s*)?(?:,|\Z)", re.I)
_TOKEN = re.compile(r'(?:W/)?"?([^",\s]{1,200})"?')
_TYPES = mimetypes.MimeTypes()
_ADDED_TYPES = {
    "audio/flac": (".flac",),
    "audio/mp4": (".m4a", ".m4b"),
    "audio/ogg": (".ogg", ".oga", ".opus", ".spx"),
    "image/avif": (".avif",),
    "image/webp": (".webp",),
    "text/markdown": (".md", ".markdown"),
    "video/ogg": (".ogv",),
    "video/webm": (".webm",),
    "video/x-matroska": (".mkv",),
}
"""Media types that browsers can show, and that some versions of Python do not know."""
for _type, _suffixes in _ADDED_TYPES.items():
    for _suffix in _suffixes:
        _TYPES.add_type(_type, _suffix)


@attrs.frozen
class ByteRange:
    """
    A part of a file.

    Attributes:
        start, length: in bytes.
        size: size of the whole file.
        partial: whether the request asked for a range.
    """

    start: int
    length: int
    size: int
    partial: bool

    @property
    def content_range(self) -> str:
        """The value of the ``Content-Range`` header for this part."""
        return f"bytes {self.start}-{self.start + self.length - 1}/{self.size}"


def parse_range(header: str | None, size: int) -> ByteRange:
    """
    Return the part of a file of ``size`` bytes that a ``Range`` header requests.

    Raises:
        WebError: the range has an end, and begins after the end of the file.
    """
    whole = ByteRange(0, size, size, False)
    match = _RANGE.match(header) if header else None
    first, last = (match[1], match[2]) if match is not None else (None, None)
    if first:
        start, stop = int(first), int(last) + 1 if last else size
        # A range without an end extends to the end of the file; if it begins there or later, it is empty and
        # ignored.
        if stop <= start:
            return whole
    elif last:
        start, stop = max(0, size - int(last)), size
    else:
        return whole
    if start >= size:
        raise WebError(
            416,
            f"the range begins after the end of the file, which has {size} bytes",
            {"Content-Range": f"bytes */{size}"},
        )
    return ByteRange(start, min(stop, size) - start, size, True)


def entity_tag(cap: Cap | None, operation: str) -> str | None:
    """Return the entity tag of an immutable object, without quotes; None for other objects."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if not isinstance(file, ChkCap):
        return None
    index = base32.encode(file.storage_index)
    return f"{'DIR:' if isinstance(cap, DirectoryCap) else ''}{index}-{operation}"


def matches(header: str | None, tag: str) -> bool:
    """Return whether an ``If-None-Match`` header is ``*`` or contains a tag, with or without quotes."""
    if not header:
        return False
    return header.strip() == "*" or tag in _TOKEN.findall(header[:10_000])


def content_type(name: str) -> str:
    """Return the media type that a file's name implies; ``text/plain`` if it implies none."""
    found, encoding = _TYPES.guess_type("x/" + name.lower().replace("/", "_"), strict=False)
    if encoding is not None:  # compressed: use the type of the compression
        found = _PACKED.get(encoding, "application/octet-stream")
    return found or "text/plain"


_PACKED = {
    "gzip": "application/gzip",
    "bzip2": "application/x-bzip2",
    "xz": "application/x-xz",
    "compress": "application/x-compress",
    "br": "application/x-brotli",
}


def disposition(name: str) -> str:
    """Return the ``Content-Disposition`` that makes a browser save a file under a name (RFC 6266)."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in '"\\%' else "_" for c in name)
    text = f'attachment; filename="{plain}"'
    if plain != name:
        text += f"; filename*=UTF-8''{quote(name, safe='')}"
    return text
