"""
Text from people and servers: made safe to print, decoded strictly, normalised, and caps as pasted.

Source of names: the format reference, section 8.5; Unicode Standard Annex 15, section 13.
"""

from __future__ import annotations

import re
import unicodedata

from pipegrid.errors import UsageError

# Terminals obey control characters, so untrusted text is escaped before it is shown.

_FEW = 16
_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def printable(text: str) -> str:
    r"""
    Return text on one line, with control characters escaped as ``\n`` or ``\x1b``.

    So are characters that reverse the direction of text, and other invisible ones. Bytes that are not text
    stay surrogates, as in Python; the caller handles them.
    """
    return _shown(text, "")


def harmless(text: str) -> str:
    """Return escaped text as ``printable`` does, but keep line ends and tabs."""
    return _shown(text, "\n\t")


def _shown(text: str, allowed: str) -> str:
    """
    Escape each distinct character once: a server does this with up to 32 KiB of untrusted text.

    Few characters are replaced one after the other, which takes a twentieth of the time of a table.
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
    """Return ``1 share``, ``2 shares``; with ``nouns`` if the plural is not the noun with an s."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def amount(size: int | None) -> str:
    """Return a number of bytes as people read it: three digits and a unit."""
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
        name: of the file, for errors.
        first_line: the number of the first given line.
        keep_ends: keep CRLF; else all lines end with ``\n``.

    Raises:
        UsageError: it is in another encoding, such as UTF-16 or Latin-1; names file and line.
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


# Names of children are compared in Unicode's composed form (NFC). Composing takes quadratic time in the
# length of a run of combining marks, so a name of a megabyte of them would take minutes. No language needs
# more than a few; the Unicode Standard's stream-safe form allows 30, and a name with more is left
# unchanged.

MAX_COMBINING_MARKS = 30


def composed(name: str) -> str:
    """Return a name in NFC, or unchanged if it has too long a run of combining marks."""
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


# Caps as copied from mails and browsers: quoted, broken over lines, or in the URL of a gateway's page. The
# gateway is not contacted. They cannot be confused with other text, since nothing else begins like a cap,
# and a path ``http://`` has an empty name in it. Other text is returned unchanged, and the cap parser
# reports it.

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
    Return a cap or path without the text around it that copying added.

    Removed are: blanks and quotation marks around it, marks of quoted mail before it, line ends within the
    cap (those in names after it stay), a gateway's URL before it, and then, or after ``URI%3A``, percent
    signs.
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
        return text  # a name that contains a slash has no path
    return "/".join(parts)


def _joined(text: str) -> str:
    if "\n" not in text:
        return text
    cap, slash, names = text.partition("/")
    return _BREAK.sub("", cap) + slash + names
