"""``--scratch DIR``: where a measurement or a soak makes its files."""

from __future__ import annotations

import argparse
from pathlib import Path


def scratch_directory(text: str) -> Path:
    """
    Return a directory that is there, made if it is not; a type for ``argparse``.

    Raises:
        argparse.ArgumentTypeError: it cannot be made.
    """
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {error.strerror}") from None
    return path
