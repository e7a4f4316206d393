"""
Names of the members of an archive: those of a tree, made harmless for whichever system extracts it; pure.

A name on a grid is any text. A member's path has to stay below the directory that it is extracted to, and
must not meet another member's there, nor a device, nor look like a name of another kind. So what Windows,
macOS or Linux could misunderstand is replaced, and of names that some file system takes for one, the later
ones get a number.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from pipegrid.core.text import composed

MAX_NAME_BYTES = 200
"""Of one name in UTF-8; file systems take 255."""

MAX_PATH_BYTES = 60_000
"""Of a member's path; the archive has 16 bits for its length."""

_MEANINGFUL = frozenset('/\\:*?"<>|')
_DEVICE = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\u00b9\u00b2\u00b3])\Z")


def harmless_name(name: str) -> str:
    """Return a name that every system takes for the name of a file or directory, and for nothing else."""
    safe = "".join(c if _is_harmless(c) else "_" for c in composed(name))
    kept = safe.rstrip(" .")
    safe = kept + "_" * (len(safe) - len(kept)) or "_"
    if _DEVICE.match(safe.partition(".")[0].rstrip(" ").casefold()):
        safe = "_" + safe
    return _shortened(safe)


def _is_harmless(char: str) -> bool:
    return char == " " or (char.isprintable() and char not in _MEANINGFUL)


def _shortened(name: str, more: str = "") -> str:
    """Return a name with an addition before its extension, and of a length that every system takes."""
    stem, dot, extension = name.rpartition(".")
    if not stem or len(extension.encode()) > 20:
        stem, dot, extension = name, "", ""
    end = f"{more}{dot}{extension}"
    most = MAX_NAME_BYTES - len(end.encode())
    short = stem.encode()[:most].decode("utf-8", "ignore")
    return (short if short == stem else short.rstrip(" .")) + end


class MemberNames:
    """The names of one directory of an archive that are taken."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self, name: str) -> str:
        """Return the harmless form of a name, with a number if an earlier one could be the same file."""
        wanted = chosen = harmless_name(name)
        key = _folded(wanted)
        number = self._taken.get(key, 0)
        while _folded(chosen) in self._taken:
            number += 1
            chosen = _shortened(wanted, f" ({number + 1})")
        self._taken[key] = number
        self._taken.setdefault(_folded(chosen), 0)
        return chosen


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def is_program(metadata: Mapping[str, object]) -> bool:
    """Return whether an entry says that its owner may run the file."""
    mode = metadata.get("st_mode")
    return isinstance(mode, int) and bool(mode & 0o100)


def changed_at(metadata: Mapping[str, object]) -> int | None:
    """Return when a file was changed, in seconds since 1970; None if its entry does not say."""
    tahoe = metadata.get("tahoe")
    linked = tahoe.get("linkmotime") if isinstance(tahoe, Mapping) else None
    for found in (metadata.get("mtime"), linked):
        if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < 1 << 31:
            return int(found)
    return None
