"""
Text from others: made fit to be shown, since a terminal obeys what stands between its letters; and read.

All files that people write are read by ``decode_text``, so that none is misunderstood in silence.
"""

from __future__ import annotations

from pipegrid.errors import UsageError

_FEW = 16
_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def printable(text: str) -> str:
    r"""
    Return text on one line: control characters, as file names may hold them, as ``\n`` or ``\x1b``.

    So are those that reverse what follows, and other letters that nobody sees. Bytes that are no text stay
    as Python keeps them (surrogates), for whoever writes them to deal with.
    """
    return _shown(text, "")


def harmless(text: str) -> str:
    """Return the same of text that may have several lines, and tabs."""
    return _shown(text, "\n\t")


def _shown(text: str, kept: str) -> str:
    """
    Do it, judging each character once: a server does this with what strangers send, 32 KiB at a time.

    Few of them are replaced one after the other, which takes a twentieth of the time of a table.
    """
    if text.isprintable():
        return text
    strange = {
        char: ascii(char)[1:-1] for char in set(text) if char not in kept and not _is_safe(char)
    }
    if len(strange) > _FEW:
        return text.translate({ord(char): shown for char, shown in strange.items()})
    for char, shown in strange.items():
        text = text.replace(char, shown)
    return text


def _is_safe(char: str) -> bool:
    return char.isprintable() or "\ud800" <= char <= "\udfff"


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Return ``1 share``, ``2 shares``; of ``nouns`` if that is not the noun with an s."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def decode_text(data: bytes, name: str, *, first_line: int = 1, keep_ends: bool = False) -> str:
    r"""
    Return the text of a file that people write: UTF-8, with or without a byte order mark, LF or CRLF.

    Args:
        name: of the file, for errors.
        first_line: the number of the first line that is given.
        keep_ends: CRLF stays; else lines end with ``\n`` alone.

    Raises:
        UsageError: it is anything else, such as UTF-16 or Latin-1; file and line are named.
    """
    data = data.removeprefix(_MARK)
    wrong = ""
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
            if "\r" not in text:
                return text
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
