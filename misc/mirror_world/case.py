"""One repository of the world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """
    A repository, and how it is read.

    Attributes:
        make: makes it in a directory that is not there yet.
        suite: of a Debian archive, such as ``stable`` or ``./``; "": it is an RPM repository.
        components: of a Debian archive that is not flat.
        is_signed: by the key of ``signing``; mirror and readers look at that.
        is_skipping: an entry cannot be used, so that the status of a mirroring is 1.
    """

    name: str
    make: Callable[[Path], None]
    suite: str = ""
    components: tuple[str, ...] = ()
    is_skipping: bool = False
    is_signed: bool = False
