"""Byte ranges as users give them: ``A-B`` with both ends included, as in HTTP."""

from __future__ import annotations

import re

from pipegrid.errors import UsageError

_RANGE = re.compile(r"([0-9]{1,20})?-([0-9]{1,20})?")


def resolve(text: str, size: int) -> tuple[int, int]:
    """
    Return the start and the length that a range means in a file of ``size`` bytes.

    ``0-99`` is the first hundred bytes, ``100-`` all from byte 100 on, ``-100`` the last hundred.

    Raises:
        UsageError: text is no range, or reaches outside the file.
    """
    match = _RANGE.fullmatch(text)
    if match is None or text == "-":
        raise UsageError(f"{text!r} is not a range; write 0-99, 100- or -100")
    first, last = match[1], match[2]
    if first is None:
        length = int(last)
        start, end = size - length, size
    else:
        start = int(first)
        end = size if last is None else int(last) + 1
        if end <= start and last is not None:
            raise UsageError(f"the range {text} ends before it begins")
    if not 0 <= start < end <= size:
        raise UsageError(f"the range {text} reaches outside the file, which has {_extent(size)}")
    return start, end - start


def _extent(size: int) -> str:
    if size == 0:
        return "no bytes at all"
    return "one byte, number 0" if size == 1 else f"{size} bytes, 0 to {size - 1}"
