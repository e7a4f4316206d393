"""Changes of one file that are written as one, and what each caller is told when that fails."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ChildExists, NoSuchChild, UnhappyError
from pipegrid.transfer.mutable.joining import JoinedWrites


class _Unhappy:
    """Stands in for a change of a file that is applied, and cannot be stored."""

    attempts = 0

    def __init__(self, edit: Any) -> None:
        self._edit = edit

    async def run(self) -> Any:
        """Apply it to what is there: nothing."""
        self._edit(b"")
        raise UnhappyError("too few servers", 1, 2)


def add(old: bytes) -> bytes:
    """Put a name there that is not yet."""
    if b"name" in old:
        raise ChildExists("it is there", "name")
    return old + b"name"


def remove(old: bytes) -> bytes:
    """Take one away that is not there."""
    raise NoSuchChild("it is not there", "other")


class JoinedFailureTests(SynchronousTestCase):
    """What is said of a change does not rest on another one that was not stored."""

    def test_unhappy(self) -> None:
        """What servers have is told; what only another change had made is not."""
        clock = Clock()
        made: Any = lambda cap, edit, **_: _Unhappy(edit)  # noqa: E731
        joined: Any = JoinedWrites(clock, made)
        waiting = [joined.join(_Cap(), edit, None, None) for edit in (remove, add, add, remove)]
        clock.advance(0)
        self.failureResultOf(waiting[0], NoSuchChild)
        for each in waiting[1:]:
            self.failureResultOf(each, UnhappyError)


class _Cap:
    """Of some file."""

    storage_index = b"i" * 16
