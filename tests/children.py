"""Which processes this one has begun, and nobody has waited for."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def children() -> set[int]:
    """Return the numbers of all that run, or have ended and stay until somebody waits for them."""
    found = set()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(OSError):  # it has just gone
                # Behind the name, in brackets, come the state and the parent.
                fields = (each / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.add(int(each.name))
    return found
