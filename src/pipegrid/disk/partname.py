"""
The hidden name beside a file under which its bytes come together: one for each target.
"""

from __future__ import annotations

import os

SUFFIX = ".pipegrid-part"


def is_part_name(name: str) -> bool:
    """Whether a file of this name is the part of another one, which belongs to nobody's data."""
    return name.startswith(".") and name.endswith(SUFFIX)


def part_path(target: str, inside: int | None = None) -> str:
    """
    Return the hidden name beside a target; too long a name is cut, and made one of its own by a hash.

    Args:
        target: with all links resolved; or a name alone.
        inside: then the descriptor of its directory.
    """
    directory, name = os.path.split(target)
    try:
        longest = os.pathconf(directory or "." if inside is None else inside, "PC_NAME_MAX")
    except (OSError, ValueError):
        longest = 255
    hidden = f".{name}{SUFFIX}"
    if len(os.fsencode(hidden)) > longest:
        from hashlib import sha256  # OpenSSL takes three milliseconds to load

        digest = sha256(os.fsencode(name)).hexdigest()[:16]
        room = longest - len(f"..{digest}{SUFFIX}")
        cut = os.fsencode(name)[: max(0, room)].decode("utf-8", "ignore")
        hidden = f".{cut}.{digest}{SUFFIX}"
    return os.path.join(directory, hidden)
