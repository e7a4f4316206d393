"""
What is typed in a shell, taken apart as that shell does, and names put into it so that they stay one word.

A line ends where the cursor is, so its last word may have a quote that is still open. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./^-]")
"""ASCII that no shell takes for more than it is, within a word."""

_ESCAPES = dict(zip("ntrabfveE", "\n\t\r\a\b\f\v\x1b\x1b", strict=True))
_CODE = re.compile(r"x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})")


class TypedLine(NamedTuple):
    """
    A line up to the cursor.

    Attributes:
        words: those that are ended, as the command is given them; the first is its name.
        last: the word that the cursor is in or behind, likewise; empty: none has begun.
        quote: that is open there: ``'``, ``"`` or ``$'``; empty: none.
        kept: of ``last``, what stands before the place from which on bash replaces it.
    """

    words: list[str]
    last: str
    quote: str
    kept: str


def split(text: str, breaks: str = "", fish: bool = False) -> TypedLine:
    """
    Take a line apart.

    Args:
        breaks: characters behind which, where they are not quoted, bash begins to replace ($COMP_WORDBREAKS).
        fish: it is fish's, whose quotes know escapes.
    """
    words: list[str] = []
    last = quote = broken = opened = ""
    begun = False
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\" and (quote != "'" or fish):
            added, at = _escaped(text, at, quote, fish)
            last += added
            begun = True
        elif quote:
            if char == quote[-1]:
                quote = ""
            else:
                last += char
        elif char in " \t\n":
            if begun:
                words.append(last)
            last, broken, begun = "", "", False
        elif char in "'\"":
            # $'...' is bash's and zsh's own.
            ansi = char == "'" and text[at - 2 : at - 1] == "$" and not fish and last.endswith("$")
            last = last[:-1] if ansi else last
            quote, opened, begun = "$'" if ansi else char, last, True
        else:
            last += char
            begun = True
            if char in breaks:
                broken = last
    return TypedLine(words, last, quote, opened if quote else broken)


def _escaped(text: str, at: int, quote: str, fish: bool) -> tuple[str, int]:
    """Return what is meant behind a backslash, and where it ends."""
    if at == len(text):
        return "", at
    char = text[at]
    if quote == "$'" or (fish and not quote):
        found = _CODE.match(text, at)
        if found is not None:
            digits = found[0].lstrip("xuU")
            number = int(digits, 8 if found[4] else 16)
            return (chr(number) if number < 0x110000 else ""), found.end()
        if char in _ESCAPES:
            return _ESCAPES[char], at + 1
    if char == "\n":
        return "", at + 1  # the line goes on
    special = {"'": "\\'", '"': '\\"$' if fish else '\\"$`'}.get(quote)
    if special is not None and char not in special:
        return "\\" + char, at + 1
    return char, at + 1


def for_bash(value: str, quote: str, ended: bool) -> str:
    """
    Return how bash is to have a value.

    Args:
        quote: that is open where it goes.
        ended: nothing will be added to it, so that the quote can be closed.
    """
    add = {"": _bare, "'": _in_single, '"': _in_double, "$'": _in_ansi}[quote]
    return "".join(map(add, value)) + (quote[-1:] if ended else "")


def _bare(char: str) -> str:
    if _SAFE.match(char) or (char > "\x7f" and char.isprintable()):
        return char
    return f"\\{char}" if char.isprintable() else f"$'{_in_ansi(char)}'"


def _in_single(char: str) -> str:
    if char == "'":
        return "'\\''"
    return char if char.isprintable() else f"'$'{_in_ansi(char)}''"


def _in_double(char: str) -> str:
    if char in '\\"$`':
        return f"\\{char}"
    if char == "!":  # which an escape would not hide from the history
        return '"\\!"'
    return char if char.isprintable() else f"\"$'{_in_ansi(char)}'\""


def _in_ansi(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\U{ord(char):08x}" if ord(char) > 0x7F else f"\\x{ord(char):02x}"
