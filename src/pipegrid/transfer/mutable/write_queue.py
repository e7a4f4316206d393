"""
Queues for the writes of one process to mutable files: one write to a file at a time; edits that wait are
written together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.argument_checks import check_kind
from pipegrid.core.caps import MutableCap
from pipegrid.errors import UsageError
from pipegrid.transfer.mutable.base_version_search import ModifyOptions, Redo
from pipegrid.transfer.mutable.modify import REMEMBERED_TRIES, ContentEdit, Modification
from pipegrid.transfer.mutable.publish import WriteResult

T = TypeVar("T")

MAX_JOINED = 100_000
"""Maximum number of waiting edits of one file; only a caller that does not wait for its edits exceeds it."""

MAX_PARSED_BYTES = 32 << 20
"""Maximum memory of kept parsed contents, which the next change of the file need not parse again."""

Merge = Callable[[Sequence[bytes]], bytes]


class StepwiseEdit(ABC):
    """
    An edit that can be joined with others of its class, so that the content is parsed and serialized only
    once.
    """

    def __call__(self, old: bytes) -> bytes:
        """Return the new content, if this edit is applied alone."""
        return self.close(self.step(self.open(old)))

    @abstractmethod
    def open(self, content: bytes) -> Any:
        """Parse the content; the result is the same for all edits of the class."""

    @abstractmethod
    def step(self, opened: Any) -> Any:
        """Return the edited form of parsed content, without changing the argument."""

    @abstractmethod
    def close(self, opened: Any) -> bytes:
        """Return the parsed content, with all edits applied, as bytes."""

    def memory_bytes(self, opened: Any) -> int:
        """
        Return about how many bytes of memory parsed content takes; 0: parsed content is not worth keeping.
        """
        return 0

    def may_be_stored(self) -> None:  # noqa: B027
        """
        Be notified that the edited content is perhaps stored, so that this edit will perhaps be applied to
        content that contains it already.
        """


class _Parsed(NamedTuple):
    """Content, and the result of ``edit.open`` for this content."""

    data: bytes
    edit: StepwiseEdit
    opened: Any
    memory_bytes: int


class _ParsedContents:
    """The parsed contents of the files that were written most recently, up to ``MAX_PARSED_BYTES``."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Parsed] = OrderedDict()
        self._used_bytes = 0

    def of(self, index: bytes, data: bytes) -> _Parsed | None:
        """Return the parsed content of a file, if it is kept and is that of ``data``; otherwise None."""
        found = self._kept.get(index)
        return found if found is not None and found.data == data else None

    def keep(self, index: bytes, parsed: _Parsed | None) -> None:
        """Keep the parsed content of a file, in place of any earlier content of that file."""
        before = self._kept.pop(index, None)
        self._used_bytes -= 0 if before is None else before.memory_bytes
        if parsed is None or not 0 < parsed.memory_bytes <= MAX_PARSED_BYTES:
            return
        self._kept[index] = parsed
        self._used_bytes += parsed.memory_bytes
        while self._used_bytes > MAX_PARSED_BYTES:
            self._used_bytes -= self._kept.popitem(last=False)[1].memory_bytes


class _Content:
    """
    Content to which joined edits are applied one after another, as bytes or as parsed by a ``StepwiseEdit``.

    Args:
        parsed: the same content in parsed form, if it is known.

    Attributes:
        is_changed: whether an edit has changed anything.
    """

    def __init__(self, data: bytes, parsed: _Parsed | None = None) -> None:
        self.is_changed = False
        self._data: bytes | None = data
        self._opened: tuple[StepwiseEdit, Any] | None = None
        if parsed is not None:
            self._opened = parsed.edit, parsed.opened

    def apply(self, edit: ContentEdit) -> None:
        """Apply an edit; if it raises, the content is unchanged."""
        if isinstance(edit, StepwiseEdit):
            before = self._open(edit)
            made = edit.step(before)
            if made is not before:
                self._opened, self._data, self.is_changed = (edit, made), None, True
        else:
            made = edit(self.data)
            what = "what a function makes of a mutable file"
            check_kind(made, (bytes, bytearray, memoryview), what, "bytes")
            self.is_changed = self.is_changed or made != self.data
            self._data, self._opened = made, None

    def _open(self, edit: StepwiseEdit) -> Any:
        if self._opened is None or type(self._opened[0]).open is not type(edit).open:
            self._opened = edit, edit.open(self.data)
        return self._opened[1]

    def fails(self, edit: ContentEdit) -> bool:
        """Return whether an edit would fail on this content, without applying it."""
        try:
            if isinstance(edit, StepwiseEdit):
                edit.step(self._open(edit))
            else:
                edit(self.data)
        except Exception:
            return True
        return False

    @property
    def data(self) -> bytes:
        if self._data is None:
            assert self._opened is not None
            edit, opened = self._opened
            self._data = edit.close(opened)
        return self._data

    @property
    def parsed(self) -> _Parsed | None:
        """The content in parsed form; None if only its bytes are known."""
        if self._opened is None:
            return None
        edit, opened = self._opened
        return _Parsed(self.data, edit, opened, edit.memory_bytes(opened))


MakesChanges = Callable[[MutableCap, ContentEdit, ModifyOptions], Modification]
"""A function that returns the ``Modification`` which applies an edit to the file of a cap."""


class _WriteQueue:
    """The waiting and running writes of this process to one file, one after another."""

    __slots__ = ("lock", "merge", "runs", "waiting")

    def __init__(self) -> None:
        self.lock = DeferredLock()
        self.waiting: list[tuple[ContentEdit, Redo | None, Deferred[WriteResult]]] = []
        self.merge: Merge | None = None
        self.runs = False


class _Tries:
    """
    Records which of the joined edits took effect in attempts whose outcome is uncertain, and which of these
    edits would fail if such an attempt was stored.
    """

    def __init__(self) -> None:
        self._last: tuple[int, bytes, dict[int, ContentEdit]] | None = None
        self._passed_on: deque[set[int]] = deque(maxlen=REMEMBERED_TRIES)

    def begin(self, unsure: int) -> None:
        """
        Begin another attempt to apply the edits. ``unsure``: the number of uncertain writes so far; if it has
        grown, the last attempt may be stored.
        """
        last, self._last = self._last, None
        if last is not None and unsure > last[0]:
            _, base, made = last
            for edit in made.values():
                if isinstance(edit, StepwiseEdit):
                    edit.may_be_stored()
            self._passed_on.append(_passed_on(base, made))

    def end(self, unsure: int, base: bytes, made: dict[int, ContentEdit]) -> None:
        """Record the edits that took effect in this attempt, in their order."""
        self._last = unsure, base, made

    def is_passed_on(self, index: int) -> bool:
        """Return whether an edit that fails now may be stored already, hidden by later edits."""
        return any(index in each for each in self._passed_on)


def _passed_on(base: bytes, made: dict[int, ContentEdit]) -> set[int]:
    """
    Return the numbers of the edits that fail after all edits were applied, but do not fail if applied twice
    in a row.

    An edit that fails when applied twice in a row, such as a rotation of names, proves nothing about the
    edits after it.
    """
    if len(made) < 2:
        return set()
    content, found = _Content(base), set[int]()
    for index, edit in made.items():
        with suppress(Exception):  # an edit may fail although it succeeded before
            content.apply(edit)
            if not content.fails(edit):
                found.add(index)
    return {index for index in found if content.fails(made[index])}


class WriteQueues:
    """
    The writes of this process to all its files.

    The writes of one process to one file wait for each other, so that a process never conflicts with itself.

    Edits that arrive while their file is being written wait, and are then applied one after another and
    written together: a thousand links into a directory take a few versions. If an edit raises, only its
    caller gets the error, once the other edits have been written without it. If these other edits cannot be
    stored, and the edit failed on content that included their changes, its caller gets their error instead.

    An edit that was applied in an earlier attempt with an uncertain outcome may fail only because that
    attempt's version was stored. Such an edit counts as successful if it fails on that version, but does not
    fail when it is applied twice in a row: then another edit of that version has hidden its change.

    Args:
        change: returns the modification of a file.
    """

    def __init__(self, clock: IReactorTime, change: MakesChanges) -> None:
        self._clock = clock
        self._change = change
        self._queues: dict[bytes, _WriteQueue] = {}
        self._parsed = _ParsedContents()
        self._running: set[Deferred[Any]] = set()

    def join(
        self, cap: MutableCap, edit: ContentEdit, merge: Merge | None, redo: Redo | None
    ) -> Deferred[WriteResult]:
        """Apply an edit together with others that wait; see ``MutableFiles.modify``."""
        queue = self._queues.setdefault(cap.storage_index, _WriteQueue())
        if merge is not None:
            queue.merge = merge
        if len(queue.waiting) >= MAX_JOINED:
            raise UsageError(
                f"{MAX_JOINED} changes of one file wait already; wait for some of them"
            )

        def cancelled(gone: Deferred[WriteResult]) -> None:
            queue.waiting = [each for each in queue.waiting if each[2] is not gone]

        waiting: Deferred[WriteResult] = Deferred(cancelled)
        queue.waiting.append((edit, redo, waiting))
        if not queue.runs:
            queue.runs = True
            running = Deferred.fromCoroutine(self._run_queue(cap, queue))
            self._running.add(running)
            running.addErrback(lambda failure: failure.trap(CancelledError))
            running.addBoth(lambda _: self._running.discard(running))
        return waiting

    def close(self) -> None:
        for running in list(self._running):
            running.cancel()

    async def _run_queue(self, cap: MutableCap, queue: _WriteQueue) -> None:
        try:
            await deferLater(self._clock, 0)  # edits requested in this reactor turn are one change
            while queue.waiting:
                await self.in_turn(cap.storage_index, lambda: self._apply_waiting(cap, queue))
        finally:
            queue.runs = False
            left, queue.waiting = queue.waiting, []
            self._forget_queue(cap.storage_index, queue)
            for *_, waiting in left:
                if not waiting.called:
                    waiting.errback(CancelledError())

    async def _apply_waiting(self, cap: MutableCap, queue: _WriteQueue) -> None:
        joined, queue.waiting = queue.waiting, []
        failures: dict[int, Failure] = {}
        final: dict[int, Failure] = {}
        resting: set[int] = set()  # edits that failed on content with other edits' changes
        tries = _Tries()

        def edit_all(old: bytes) -> bytes:
            if change.unsure:
                # The other edits may have been written without the failed edits, so the failed edits must not
                # be applied after them.
                final.update(failures)
            failures.clear()
            failures.update(final)
            resting.intersection_update(final)
            tries.begin(change.unsure)
            parsed = self._parsed.of(cap.storage_index, old)
            content, made = _Content(old, parsed), dict[int, ContentEdit]()
            for index, (edit, _, waiting) in enumerate(joined):
                if waiting.called or index in final:  # no caller waits, or the edit has failed
                    continue
                try:
                    content.apply(edit)
                except Exception:
                    failure = Failure()
                    if tries.is_passed_on(index):
                        continue
                    failures[index] = failure
                    if content.is_changed:
                        resting.add(index)
                else:
                    made[index] = edit
            tries.end(change.unsure, old, made)
            self._parsed.keep(cap.storage_index, content.parsed)
            return content.data

        redos = {redo for _, redo, _ in joined}
        redo = redos.pop() if len(redos) == 1 else None
        how = ModifyOptions(merge=queue.merge, redo=redo, is_uncertain=lambda: bool(failures))
        change = self._change(cap, edit_all, how)
        try:
            result: Any = await change.run()
        except Exception:
            result = Failure()
            for index in resting:
                failures.pop(index, None)
        for index, (*_, waiting) in enumerate(joined):
            if not waiting.called:
                waiting.callback(failures.get(index, result))
        if isinstance(result, Failure) and result.check(CancelledError):
            result.raiseException()  # the edits that wait are cancelled, too

    async def in_turn(self, index: bytes, write: Callable[[], Awaitable[T]]) -> T:
        """Call ``write`` for a file once this process's other writes to that file have ended."""
        queue = self._queues.setdefault(index, _WriteQueue())
        await queue.lock.acquire()
        try:
            return await write()
        finally:
            queue.lock.release()
            self._forget_queue(index, queue)

    def _forget_queue(self, index: bytes, queue: _WriteQueue) -> None:
        idle = not (queue.waiting or queue.runs or queue.lock.locked or queue.lock.waiting)
        if idle and self._queues.get(index) is queue:
            del self._queues[index]
