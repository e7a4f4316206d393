"""
Text from people and servers: escaping it for display, strict decoding, normal forms of names, and caps as
people paste them.

Source of names: Tahoe-LAFS's ``dirnodes.rst``, and how 1.20 behaves; Unicode Standard Annex 15, section 13.
"""

from __future__ import annotations

import re
import unicodedata

from pipegrid.errors import UsageError

# Terminals execute control characters, so untrusted text is escaped before it is shown.

_FEW = 16
_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def printable(text: str) -> str:
    r"""
    Return text on one line, with control characters escaped as ``\n`` or ``\x1b``.

    Characters that reverse the direction of text, and other invisible characters, are escaped, too. Bytes
    that are not text stay surrogates, as in Python; the caller handles these.
    """
    return _shown(text, "")


def harmless(text: str) -> str:
    """Return text escaped as by ``printable``, but keep line ends and tabs."""
    return _shown(text, "\n\t")


def _shown(text: str, allowed: str) -> str:
    """
    Escape each distinct character once, since a server escapes up to 32 KiB of untrusted text.

    If few characters must be escaped, they are replaced one after the other. This takes a twentieth of the
    time of ``translate``.
    """
    if text.isprintable():
        return text
    escapes = {
        char: ascii(char)[1:-1] for char in set(text) if char not in allowed and not _is_safe(char)
    }
    if len(escapes) > _FEW:
        return text.translate({ord(char): shown for char, shown in escapes.items()})
    for char, shown in escapes.items():
        text = text.replace(char, shown)
    return text


def _is_safe(char: str) -> bool:
    return char.isprintable() or "\ud800" <= char <= "\udfff"


def counted(count: int, noun: str, nouns: str = "") -> str:
    """
    Return the count with the noun, such as ``1 share`` or ``2 shares``. ``nouns`` is the plural, if it is not
    the noun with an s.
    """
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def amount(size: int | None) -> str:
    """Return a number of bytes for people: up to three digits and a unit; ``unknown`` for None."""
    if size is None:
        return "unknown"
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} PB"


def decode_text(data: bytes, name: str, *, first_line: int = 1, keep_ends: bool = False) -> str:
    r"""
    Return the text of a file that people write: UTF-8, with or without a byte order mark, LF or CRLF.

    Args:
        name: the name of the file, for errors.
        first_line: the number of the first line in ``data``, for errors.
        keep_ends: keep CRLF; otherwise all lines end with ``\n``.

    Raises:
        UsageError: the text is in another encoding, such as UTF-16 or Latin-1; the error names file and line.
    """
    data = data.removeprefix(_MARK)
    at = 0
    if data.startswith(_UTF_16_MARKS):
        wrong = "it is UTF-16"
    elif (at := data.find(b"\0")) >= 0:
        wrong = "it holds a zero byte, as UTF-16 does"
    else:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            wrong, at = "it is not UTF-8", error.start
        else:
            ended = text.replace("\r\n", "\n")
            at = ended.find("\r")
            if at < 0:
                return text if keep_ends else ended
            line = first_line + ended.count("\n", 0, at)
            raise UsageError(
                f"{name}:{line}: it holds a carriage return within the line; end lines with LF or CRLF"
            )
    line = first_line + data.count(b"\n", 0, at)
    raise UsageError(f"{name}:{line}: {wrong}; save the file as UTF-8 text")


# Names of children are compared in Unicode's composed form (NFC). The time to compose is quadratic in the
# length of a run of combining marks, so a name of a megabyte of such marks would take minutes. No language
# needs more than a few in a row; the Unicode Standard's stream-safe form allows 30. A name with a longer run
# is left unchanged.

MAX_COMBINING_MARKS = 30


def composed(name: str) -> str:
    """
    Return a name in NFC, or unchanged if it has too long a run of combining marks (``MAX_COMBINING_MARKS``).
    """
    if name.isascii() or not _is_stream_safe(name):
        return name
    return unicodedata.normalize("NFC", name)


def _is_stream_safe(name: str) -> bool:
    if len(name) <= MAX_COMBINING_MARKS:
        return True
    run = 0
    for character in name:
        run = run + 1 if unicodedata.combining(character) else 0
        if run > MAX_COMBINING_MARKS:
            return False
    return True


# Caps as people copy them from mails and browsers: quoted, broken over lines, or in the URL of a gateway's
# page. The gateway is not contacted. Caps cannot be confused with other text: nothing else begins like a cap,
# and ``http://`` is not a useful path, since it contains an empty name. Other text is returned unchanged, and
# the cap parser reports it.

CAP_STARTS = ("URI:", "ro.URI:", "imm.URI:")

_PAIRS = {
    '"': '"',
    "'": "'",
    "<": ">",
    "(": ")",
    "\u201c": "\u201d",
    "\u201e": "\u201c",
    "\u00ab": "\u00bb",
}
_GATEWAY = re.compile(r"https?://[^/?#]+/(?:uri|file|named|cap)/([^?#]+)")
_NAMED = "/@@named="
_BREAK = re.compile(r"(?<![ \t])[ \t]*\r?\n[ \t>]*")


def as_pasted(text: str) -> str:
    """
    Return a cap or path without the text that copying added around it.

    The following is removed: blanks and quotation marks around the cap, marks of quoted mail before it, line
    ends within it (but not in names after it), and the URL of a gateway before it. After such a URL, or if
    the text begins with ``URI%3A``, percent escapes are decoded.
    """
    text = text.strip()
    if text.startswith(CAP_STARTS):
        return _joined(text)
    bare = text.lstrip("> \t")
    closing = _PAIRS.get(bare[:1])
    if closing is not None and bare.endswith(closing):
        bare = bare[1:-1].strip()
    if bare.startswith(CAP_STARTS):
        return _joined(bare)
    address = _GATEWAY.match(bare)
    if address is not None:
        bare = address[1].partition(_NAMED)[0]
    elif not bare.startswith("URI%3A"):
        return text
    from urllib.parse import unquote  # rarely needed

    parts = [unquote(part) for part in _joined(bare).split("/")]
    if not parts[0].startswith(CAP_STARTS) or any("/" in part for part in parts):
        return text  # a path cannot contain a name with a slash
    return "/".join(parts)


def _joined(text: str) -> str:
    if "\n" not in text:
        return text
    cap, slash, names = text.partition("/")
    return _BREAK.sub("", cap) + slash + names
