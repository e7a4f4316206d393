"""
Names of a directory's children: any text, compared in Unicode's composed form (NFC).

Composing is quadratic in the length of a run of combining marks, so that a name of a megabyte of them would
take minutes. No language stacks more than a handful; the Unicode Standard's stream-safe form allows 30, and
a name with more is left as it is.

Source: the format reference, section 8.5; Unicode Standard Annex 15, section 13.
"""

from __future__ import annotations

import unicodedata

MAX_COMBINING_MARKS = 30


def composed(name: str) -> str:
    """Return a name in NFC, or as it is if more marks follow each other than any writing has."""
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
