"""Text from others, made fit to be shown: a terminal obeys what stands between its letters."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""
    Return text on one line: control characters, as file names may hold them, as ``\n`` or ``\x1b``.

    So are those that reverse what follows, and other letters that nobody sees. Bytes that are no text stay
    as Python keeps them (surrogates), for whoever writes them to deal with.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_safe(char) else ascii(char)[1:-1] for char in text)


def harmless(text: str) -> str:
    """Return the same of text that may have several lines, and tabs."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" or _is_safe(char) else ascii(char)[1:-1] for char in text)


def _is_safe(char: str) -> bool:
    return char.isprintable() or "\ud800" <= char <= "\udfff"
