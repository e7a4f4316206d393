"""
The answer that says nothing, recognized as a whole.

It is what a server answers to each write and each ``close``: seven tokens, for which Foolscap makes, asks and
ends two objects, always to the same effect.

Source: Foolscap 24.9's documentation ("specifications/pb"), and what it sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipegrid.wire.banana import CLOSE, INT, OPEN, VOCAB

OPENED = 2
"""Objects in such an answer, itself included."""

TOKENS = 7

NUMBER = rb"[\x00-\x7f]{1,5}"
"""What matches a number of a token, in base 128."""


def nothing_pattern(words: Mapping[int, bytes]) -> re.Pattern[bytes] | None:
    """
    Return what matches such an answer; its group ``request`` is the number of the call, in base 128.

    Args:
        words: what numbers abbreviate on this connection.

    Returns:
        None: it cannot be recognized here.
    """
    numbers = {word: number for number, word in words.items()}
    answer, none = numbers.get(b"answer"), numbers.get(b"none")
    if answer is None or none is None or max(answer, none) > 0x7F:
        return None
    return re.compile(
        b"".join(
            (
                *(
                    b"(?P<outer>",
                    NUMBER,
                    b")",
                    byte_pattern(OPEN),
                    byte_pattern(answer),
                    byte_pattern(VOCAB),
                ),
                *(b"(?P<request>", NUMBER, b")", byte_pattern(INT)),
                *(
                    b"(?P<inner>",
                    NUMBER,
                    b")",
                    byte_pattern(OPEN),
                    byte_pattern(none),
                    byte_pattern(VOCAB),
                ),
                *(b"(?P=inner)", byte_pattern(CLOSE), b"(?P=outer)", byte_pattern(CLOSE)),
            )
        )
    )


def number_of(digits: bytes) -> int:
    """Return a token's number, given its digits in base 128, the lowest first."""
    value = 0
    for digit in reversed(digits):
        value = value << 7 | digit
    return value


def byte_pattern(value: int) -> bytes:
    """Return what matches this byte."""
    return re.escape(bytes((value,)))
