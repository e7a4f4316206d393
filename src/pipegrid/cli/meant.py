"""What is meant by the name of a local file where a cap is wanted: the cap that stands in it."""

from __future__ import annotations

import os
import shlex
import stat

from pipegrid.core.text import CAP_STARTS, as_pasted, printable
from pipegrid.errors import CapError

_LOOKED_AT_BYTES = 4096


def caps_in_file(text: str, by_option: bool) -> str | None:
    """
    Return what to say where a file that holds caps was named in the place of one; None: it is no such file.

    Args:
        by_option: the command takes ``--cap-file``.
    """
    path = text.strip()
    if not _holds_cap(path):
        return None
    shown = printable(shlex.quote(path))
    remedy = f"did you mean --cap-file {shown}?" if by_option else "give that cap itself"
    return f"{shown} is no cap, but a file that holds one; {remedy}"


def check_no_file(text: str) -> None:
    """
    Raises:
        CapError: a file that holds caps was named in the place of a cap, and there is no ``--cap-file``.
    """
    if not as_pasted(text).startswith(CAP_STARTS) and (hint := caps_in_file(text, by_option=False)):
        raise CapError(hint)


def _holds_cap(path: str) -> bool:
    """Return whether the first line of a file that counts begins with a cap."""
    try:
        # A pipe, which would be waited for, and a device are not opened.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            start = file.read(_LOOKED_AT_BYTES)
    except (OSError, ValueError):
        return False
    for line in start.decode("utf-8-sig", "replace").split("\n"):
        bare = as_pasted(line)
        if bare and not bare.startswith("#"):
            return bare.startswith(CAP_STARTS)
    return False
