"""
Which names of a directory on a grid a local directory can hold; pure.

A name on a grid is any text, and its exact bytes, where the metadata say them, are any bytes. What becomes a
local name is one component of a path, and never one that leads elsewhere: not empty, ``.`` or ``..``, without
``/`` and NUL, no longer than a name may be. Nor is it one that would meet another: the same as that of
another entry, as file systems see it that fold cases or compose letters, or the hidden name of a part of
ours.
"""

from __future__ import annotations

import os
import unicodedata

from pipegrid.core.text import printable
from pipegrid.disk.partname import SUFFIX
from pipegrid.errors import SinkError, naming

MAX_NAME_BYTES = 255
"""Of a file's name, on nearly all file systems."""


def local_name(name: str, exact: bytes | None = None) -> str:
    """
    Return the local name of an entry, as ``os.fsdecode`` gives it.

    Args:
        name: of the entry.
        exact: what the metadata say of its bytes, if they are not those of the name.

    Raises:
        SinkError: no file can be called so.
    """
    try:
        data = name.encode("utf-8") if exact is None else exact
    except UnicodeEncodeError:  # half a character
        raise _unfit(name, "it is no text") from None
    if not data:
        raise _unfit(name, "it is empty")
    if data in (b".", b".."):
        raise _unfit(os.fsdecode(data), "it leads to another directory")
    if b"/" in data:
        raise _unfit(os.fsdecode(data), "there is a slash in it")
    if b"\0" in data:
        raise _unfit(os.fsdecode(data), "there is a zero byte in it")
    if len(data) > MAX_NAME_BYTES:
        raise _unfit(
            os.fsdecode(data[:40]) + "...",
            f"it has {len(data)} bytes, and a name may have {MAX_NAME_BYTES}",
        )
    if data.startswith(b".") and data.endswith(SUFFIX.encode()):
        raise _unfit(os.fsdecode(data), "parts of files that are being fetched are called so")
    return os.fsdecode(data)


class TakenNames:
    """
    The names of one directory that were given to its entries.

    Args:
        folds: the file system holds names to be the same that differ in case, or in how their letters are
            composed.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._taken: dict[str, str] = {}

    def take(self, name: str) -> None:
        """
        Give a name to an entry.

        Raises:
            SinkError: another one has it.
        """
        key = unicodedata.normalize("NFC", name).casefold() if self._folds else name
        other = self._taken.get(key)
        if other is not None:
            raise same_name(other, name)
        self._taken[key] = name


def same_name(name: str, second: str) -> SinkError:
    """Return the error for the second of two entries that are one file here."""
    return SinkError(
        f"two entries of this directory would both be '{printable(name)}' here, and the second, "
        f"'{printable(second)}', was left out; fetch it by its own path to another place"
    )


def _unfit(name: str, why: str) -> SinkError:
    text = (
        f"no file here can be called '{printable(name)}', since {why}; it was left out: fetch it by its cap, "
        "which Directory.list shows"
    )
    return naming(SinkError(text), "Directory.list")
