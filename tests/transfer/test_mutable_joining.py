"""Changes of one file that are written as one, and what each caller is told when that fails."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ChildExists, NoSuchChild, UnhappyError
from pipegrid.testing.clock import HeapClock
from pipegrid.transfer.mutable.write_queue import WriteQueues


class _Unhappy:
    """Stands in for a change of a file that is applied, and cannot be stored."""

    unsure = 0

    def __init__(self, edit: Any) -> None:
        self._edit = edit

    async def run(self) -> Any:
        """Apply it to what is there: nothing."""
        self._edit(b"")
        raise UnhappyError("too few servers", 1, 2)


class _Again:
    """Stands in for a change that is applied twice: what was written first may be stored, or was refused."""

    unsure = 0

    def __init__(self, edit: Any, second: bytes, refused: bool) -> None:
        self._edit = edit
        self._second = second
        self._refused = refused

    async def run(self) -> Any:
        """Apply it to what is there, and to what others have made of that."""
        self._edit(b"a ")
        self.unsure = 0 if self._refused else 1
        return self._edit(self._second)


def rename(old: bytes) -> bytes:
    """Give one another name, if it does not have that already."""
    if b"a " not in old and b"x " not in old:
        raise NoSuchChild("it is not there", "a")
    return old.replace(b"a ", b"x ")


def turn(old: bytes) -> bytes:
    """Make one of another, and fail with what that has made."""
    if b"a " not in old:
        raise NoSuchChild("it is not there", "a")
    return old.replace(b"a ", b"b ")


def take_out(old: bytes) -> bytes:
    """Take one out if it is there."""
    return old.replace(b"x ", b"")


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
        clock = HeapClock()
        made: Any = lambda cap, edit, how: _Unhappy(edit)  # noqa: E731
        joined: Any = WriteQueues(clock, made)
        waiting = [joined.join(_Cap(), edit, None, None) for edit in (remove, add, add, remove)]
        clock.advance(0)
        self.failureResultOf(waiting[0], NoSuchChild)
        for each in waiting[1:]:
            self.failureResultOf(each, UnhappyError)

    def again(self, edits: list[Any], second: bytes, refused: bool = False) -> list[Any]:
        """Return what becomes of edits that are applied again."""
        clock = HeapClock()
        made: Any = lambda cap, edit, how: _Again(edit, second, refused)  # noqa: E731
        joined: Any = WriteQueues(clock, made)
        waiting = [joined.join(_Cap(), edit, None, None) for edit in edits]
        clock.advance(0)
        outcomes: list[Any] = []
        for each in waiting:
            each.addErrback(lambda failure: failure.type).addCallback(outcomes.append)
        return outcomes

    def test_passed_on(self) -> None:
        """What one behind it has taken out is not missed; what is gone for another reason is."""
        self.assertEqual(self.again([rename, take_out], b"other "), [b"other ", b"other "])
        self.assertEqual(self.again([rename, add], b"other "), [NoSuchChild, b"other name"])
        self.assertEqual(self.again([rename], b"other "), [NoSuchChild])

    def test_refused_by_all(self) -> None:
        """What no server took was passed on by nobody."""
        found = self.again([rename, take_out], b"other ", refused=True)
        self.assertEqual(found, [NoSuchChild, b"other "])

    def test_failing_with_what_it_made(self) -> None:
        """That a change fails with all that was made says nothing if it does so with what it made itself."""
        self.assertEqual(self.again([turn, add], b"other "), [NoSuchChild, b"other name"])
        found = self.again([turn, add], b"other ", refused=True)
        self.assertEqual(found, [NoSuchChild, b"other name"])

    def test_resting_on_what_was_refused(self) -> None:
        """What was in the way only by another change, which has failed now, is not there."""

        def rename_only(old: bytes) -> bytes:
            """Fail if it was made before, too."""
            return turn(old).replace(b"b ", b"name")

        self.assertEqual(
            self.again([rename_only, add], b"other ", refused=True), [NoSuchChild, b"other name"]
        )


class _Endless:
    """Stands in for a change whose servers never answer."""

    unsure = 0
    begun = 0

    async def run(self) -> Any:
        """Wait."""
        _Endless.begun += 1
        return await Deferred()


class JoinedEndTests(SynchronousTestCase):
    """A program that ends has its changes given up, those that wait for others too."""

    def test_closing(self) -> None:
        """What is under way ends, what waits behind it is not begun, and everybody is told, once."""
        clock = HeapClock()
        self.patch(_Endless, "begun", 0)
        made: Any = lambda cap, edit, how: _Endless()  # noqa: E731
        joined: Any = WriteQueues(clock, made)
        first = joined.join(_Cap(), add, None, None)
        clock.advance(0)
        behind = [joined.join(_Cap(), add, None, None) for _ in range(2)]
        # Who hears of the end of one may give up the next before it is told.
        ended: list[Any] = []
        behind[0].addErrback(ended.append).addCallback(lambda _: behind[1].cancel())
        joined.close()
        clock.advance(0)
        self.assertEqual(_Endless.begun, 1)
        for each in (first, behind[1]):
            self.failureResultOf(each, CancelledError)
        self.assertEqual(len(ended), 1)
        self.assertEqual(clock.getDelayedCalls(), [])


class _Cap:
    """Of some file."""

    storage_index = b"i" * 16
