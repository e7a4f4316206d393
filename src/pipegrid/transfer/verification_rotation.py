"""
Verification of a part of all objects in each run, so that a round of several runs verifies each object once.

A hash of its storage index gives each object a point on a circle. A run verifies the objects of one arc, and
the next run those of the following arc. So an object that exists during a whole round is verified in that
round, whatever other objects are added and removed. The position on the circle is part of the client's own
state, and begins at a random point: several machines that verify the same objects begin with different ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.private_files import open_private
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import SinkError

CIRCLE = 1 << 64
"""Number of points on the circle."""

MAX_BYTES = 1 << 20
MAX_KEYS = 1000
"""Maximum number of checks with a remembered position; beyond it, the least recently run is forgotten."""

_TAG = b"pipegrid verification round v1"


def width_of(percent: Fraction) -> int:
    """Return how many points an arc of this many percent has, rounded up; ``percent`` must be more than 0."""
    return min(CIRCLE, -(-CIRCLE * percent.numerator // (100 * percent.denominator)))


class VerifiedPart:
    """
    The objects that one run verifies: those on one arc of the circle.

    Attributes:
        begin: first point of the arc.
        width: number of points of the arc.
        verified: number of objects of the arc that were verified so far.
        was_reached: whether servers had shares of any object, on the arc or not; False suggests that there
            was no network.
    """

    __slots__ = ("begin", "verified", "was_reached", "width")

    def __init__(self, begin: int, width: int) -> None:
        self.begin = begin
        self.width = width
        self.verified = 0
        self.was_reached = True

    def has(self, storage_index: bytes) -> bool:
        """Return whether an object is on the arc."""
        digest = hashlib.sha256(_TAG + storage_index).digest()
        point = int.from_bytes(digest[:8], "big")
        return (point - self.begin) % CIRCLE < self.width


class VerificationRound(NamedTuple):
    """
    How much of a round is done.

    Attributes:
        position: the point at which the next arc begins.
        covered: number of points that this round has covered.
    """

    position: int
    covered: int = 0

    def after(self, width: int) -> VerificationRound:
        """
        Return the state after an arc of this width was verified; if this ends the round, a new round begins.
        """
        covered = self.covered + width
        return VerificationRound(
            (self.position + width) % CIRCLE, covered if covered < CIRCLE else 0
        )

    def runs_left(self, width: int) -> int:
        """Return how many more arcs of this width it takes to end the round."""
        return -(-(CIRCLE - self.covered) // width)


class VerificationRounds:
    """
    The positions of one client's verification rounds, in a file in the directory of its state.

    Args:
        directory: the directory of the client's state.
        key: identifies one check: its command-line arguments. Only a hash of the key is written.

    Attributes:
        state: how much of this check's round is done.
        warning: a sentence about a damaged file, or "".

    Raises:
        SinkError: the directory cannot be written.
    """

    def __init__(self, directory: Path, key: object) -> None:
        self._path = directory / "verification.json"
        self._key = hashlib.sha256(_TAG + repr(key).encode("utf-8", "backslashreplace")).hexdigest()
        self.warning = ""
        with self._locked():
            positions = self._read()
            if self._key not in positions:
                positions[self._key] = VerificationRound(secrets.randbelow(CIRCLE))
                self._write(positions)
            self.state = positions[self._key]

    def finish(self, width: int) -> VerificationRound:
        """
        Record that the arc of this width from ``state`` on was verified; return the new state.

        If another run has changed the position meanwhile, that position is kept.

        Raises:
            SinkError: the position cannot be written, so the next run verifies the same arc again.
        """
        with self._locked():
            positions = self._read()
            if positions.get(self._key) == self.state:
                del positions[self._key]
                positions[self._key] = self.state.after(width)
                self._write(positions)
            self.state = positions.get(self._key, self.state)
        return self.state

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_private(str(self._path.with_suffix(".lock")), os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise SinkError(
                f"cannot write in {self._path.parent}: {error.strerror}; the next check verifies the same "
                "part again"
            ) from error

    def _read(self) -> dict[str, VerificationRound]:
        try:
            document = json.loads(read_file(self._path, MAX_BYTES))
            return {str(key): _state_of(value) for key, value in document.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.warning = f"{printable(str(self._path))} is damaged; a new round begins"
            return {}

    def _write(self, positions: dict[str, VerificationRound]) -> None:
        kept = dict(list(positions.items())[-MAX_KEYS:])
        document = {key: [f"{each.position:x}", f"{each.covered:x}"] for key, each in kept.items()}
        replace_file(self._path, json.dumps(document).encode("ascii"))


def _state_of(value: Any) -> VerificationRound:
    position, covered = (int(each, 16) for each in value)
    if not (0 <= position < CIRCLE and 0 <= covered < CIRCLE):
        raise ValueError("no points")
    return VerificationRound(position, covered)
