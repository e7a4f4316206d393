"""
What is held back until the turn is over, and what was sent together: who waits for which part of a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.http11.replaying import Answered
from pipegrid.wire.gbs_bundles import BundledUpload
from pipegrid.wire.messages import Allocation, Stored, WriteAnswer

T = TypeVar("T")


class UploadPart(Generic[T]):
    """
    One call's part of an upload.

    Attributes:
        result: what the caller has got.
        wanted: whether the caller still waits.
    """

    __slots__ = ("_cancelled", "_instead", "result", "wanted")

    def __init__(self, cancelled: Callable[[], None]) -> None:
        self.wanted = True
        self.result: Deferred[T] = Deferred(self._cancel)
        self._cancelled: Callable[[], None] | None = cancelled
        self._instead: Deferred[T] | None = None

    def fire(self, value: T) -> None:
        """Tell the caller, if it still waits."""
        if self.wanted:
            self._end()
            self.result.callback(value)

    def fail(self, error: Exception | Failure) -> None:
        """Tell the caller, if it still waits."""
        if self.wanted:
            self._end()
            self.result.errback(error)

    def follow(self, request: Deferred[T]) -> None:
        """Have the result of an ordinary request, which was made after all."""
        self._instead = request if self.wanted else None
        request.addCallbacks(self.fire, self.fail)

    def _end(self) -> None:
        self.wanted = False
        self._cancelled = self._instead = None  # both lead back to here

    def _cancel(self, _: Deferred[T]) -> None:
        cancelled, instead = self._cancelled, self._instead
        self._end()
        if instead is not None:
            instead.cancel()
        elif cancelled is not None:
            cancelled()


class HeldAllocation:
    """
    One allocation, and the whole shares that have joined it.

    Attributes:
        bundle: what it was sent in, if it was.
    """

    __slots__ = ("allocation", "bundle", "upload", "writes")

    def __init__(self, upload: BundledUpload, cancelled: Callable[[], None]) -> None:
        self.upload = upload
        self.allocation: UploadPart[Allocation] = UploadPart(cancelled)
        self.writes: dict[int, UploadPart[WriteAnswer]] = {}
        self.bundle: SentBundle | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.upload.shares) == len(self.upload.share_numbers)

    @property
    def is_wanted(self) -> bool:
        return self.allocation.wanted or any(write.wanted for write in self.writes.values())

    def fail(self, error: Exception | Failure) -> None:
        self.allocation.fail(error)
        for write in self.writes.values():
            write.fail(error)


class Whole(UploadPart[Stored]):
    """
    One call that allocates shares and writes all of them whole; what it waits for is its answer.

    Attributes:
        upload: what it asks for.
        bundle: what it was sent in, if it was.
    """

    __slots__ = ("bundle", "upload")

    is_complete = True

    def __init__(self, upload: BundledUpload, cancelled: Callable[[], None]) -> None:
        super().__init__(cancelled)
        self.upload = upload
        self.bundle: SentBundle | None = None

    @property
    def is_wanted(self) -> bool:
        return self.wanted


class SentBundle:
    """What was sent together in one bundle, and the request that it went in."""

    __slots__ = ("held", "request")

    def __init__(self, held: Sequence[HeldAllocation | Whole]) -> None:
        self.held = held
        self.request: Deferred[Answered] | None = None

    def take_apart(self) -> Sequence[HeldAllocation | Whole]:
        """Return what was sent; it forgets that, since each would keep the other, and share data."""
        held, self.held, self.request = self.held, (), None
        return held
