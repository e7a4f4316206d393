"""
Verification of a part of all objects in each run, so that a round of runs verifies everything once.

A hash of its storage index gives each object a point on a circle. A run verifies the objects of one arc, and
the next run those of the arc after it. So an object that is there during a whole round is verified in it,
whatever else is added and removed. The position is the client's own state, and begins at a random point:
several machines that verify the same objects do not begin with the same ones.
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
"""Points on the circle."""

MAX_BYTES = 1 << 20
MAX_KEYS = 1000
"""Checks whose position is remembered; the one that was not run for longest is forgotten first."""

_TAG = b"pipegrid verification round v1"


def width_of(percent: Fraction) -> int:
    """Return the points of an arc of this many percent, more than 0; rounded up."""
    return min(CIRCLE, -(-CIRCLE * percent.numerator // (100 * percent.denominator)))


class VerifiedPart:
    """
    The objects that one run verifies.

    Attributes:
        begin: of the arc.
        width: of the arc.
        verified: objects of it that were verified so far.
        was_reached: whether servers had shares of any object, in the part or not; without a network none has.
    """

    __slots__ = ("begin", "verified", "was_reached", "width")

    def __init__(self, begin: int, width: int) -> None:
        self.begin = begin
        self.width = width
        self.verified = 0
        self.was_reached = True

    def has(self, storage_index: bytes) -> bool:
        """Return whether an object is among them."""
        digest = hashlib.sha256(_TAG + storage_index).digest()
        point = int.from_bytes(digest[:8], "big")
        return (point - self.begin) % CIRCLE < self.width


class VerificationRound(NamedTuple):
    """
    How far a round is.

    Attributes:
        position: where the next arc begins.
        covered: points that this round has covered.
    """

    position: int
    covered: int = 0

    def after(self, width: int) -> VerificationRound:
        """Return the state after an arc; the round that it ends is followed by a new one."""
        covered = self.covered + width
        return VerificationRound(
            (self.position + width) % CIRCLE, covered if covered < CIRCLE else 0
        )

    def runs_left(self, width: int) -> int:
        """Return how many arcs of this width end the round."""
        return -(-(CIRCLE - self.covered) // width)


class VerificationRounds:
    """
    The positions of one client, in a file of its state.

    Args:
        directory: of the state.
        key: names one check: what it is given on the command line. It is only written as a hash.

    Attributes:
        state: how far the round of this check is.
        warning: a sentence about a file that was damaged, or "".

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
        Record that an arc from ``state`` was verified; returns the new state.

        If another run has moved the position meanwhile, it stays.

        Raises:
            SinkError: it cannot be written, so the next run verifies the same arc again.
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
