"""Text from others, made fit to be shown: a terminal obeys what stands between its letters."""

from __future__ import annotations

_FEW = 16


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
