"""
A storage server in memory: the contract without disk, wire or time, for tests of what stands above.

It passes the same suite as the real transports, so tests may believe it. It answers at once, unless
told otherwise:

* ``delay_s`` on a clock lets every answer (not the deed) come that much later;
* ``fail_next`` lets the next call of an operation fail, ``hang`` lets all of them stay unanswered;
* ``capacity_bytes`` is the room that it has.

``calls`` lists what was asked, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, execute
from twisted.internet.interfaces import IConsumer, IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import ConflictingWrite, NoSuchShare, ServerError, ServerRefused, WrongSecret
from pipegrid.transport.interface import StoresApart, disconnected
from pipegrid.wire.storage_messages import (
    Allocation,
    Changes,
    LeaseSecrets,
    Numbers,
    Pieces,
    Reads,
    ServerIdentity,
    ServerVersion,
    SlotData,
    SlotResult,
    SlotSecrets,
    UploadSecrets,
    WriteAnswer,
)
from tests.transport.contents import Key, MemoryStorage
from tests.transport.memorystream import MemoryStream

T = TypeVar("T")


class MemoryServer(StoresApart):
    """
    Implements ``transport.interface.StorageServer`` with dictionaries.

    Args:
        storage: what it serves; by default nothing yet, with room for anything.
        clock, delay_s: see the module.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        storage: MemoryStorage | None = None,
        clock: IReactorTime | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.storage = MemoryStorage() if storage is None else storage
        self.takes_whole_bytes = 0
        self.delay_s = delay_s
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.identity = identity
        self._clock = clock
        self._failures: dict[str | None, deque[Exception]] = {}
        self._hanging: set[str | None] = set()
        self._unanswered: dict[Deferred[Any], IDelayedCall | None] = {}
        self._leaving = False

    def __repr__(self) -> str:
        return f"<MemoryServer {self.identity.nickname!r}, {len(self.storage.shares)} shares>"

    # For tests.

    def fail_next(self, error: Exception, operation: str | None = None) -> None:
        """Let the next call (of this operation, if named) fail, and do nothing. Calls add up."""
        self._failures.setdefault(operation, deque()).append(error)

    def hang(self, operation: str | None = None, hanging: bool = True) -> None:
        """Let no further call (of this operation, if named) be carried out or answered."""
        if hanging:
            self._hanging.add(operation)
        else:
            self._hanging.discard(operation)

    # The contract.

    def version(self) -> Deferred[ServerVersion]:
        """Ask what the server says of itself."""

        def version() -> ServerVersion:
            room = self.storage.available_bytes()
            return ServerVersion((1 << 62) if room is None else room, room, "memory")

        return self._answer("version", version)

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """Ask for room; see the contract."""
        storage = self.storage
        numbers = frozenset(share_numbers)

        def allocate() -> Allocation:
            have = storage.numbers(storage_index)
            if have:
                storage.lease(storage_index, secrets.lease)
            allocated = set()
            for number in sorted(numbers - have):
                if storage.begin((storage_index, number), share_bytes, secrets.upload):
                    storage.lease(storage_index, secrets.lease)
                    allocated.add(number)
            return Allocation(have, frozenset(allocated))

        return self._answer("allocate", allocate, storage_index, numbers, share_bytes)

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        *,
        release: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        """Write to an unfinished share; see the contract."""
        key = (storage_index, share_number)
        end = offset + sum(map(len, data))

        def write() -> WriteAnswer:
            upload = self.storage.upload(key, upload_secret)
            if offset < 0 or end > len(upload.data):
                raise ServerRefused(
                    f"bytes {offset} to {end} lie outside of share {share_number}, for which "
                    f"{len(upload.data)} bytes were allocated; write within them"
                )
            new = b"".join(data)
            for begin, stop in upload.received.overlap(offset, end):
                if upload.data[begin:stop] != new[begin - offset : stop - offset]:
                    raise ConflictingWrite(
                        f"other bytes were written to share {share_number} before; abort the upload"
                    )
            upload.data[offset:end] = new
            upload.received.add(offset, end)
            required = tuple(upload.received.gaps(0, len(upload.data)))
            complete = bool(upload.data) and not required
            if complete:
                self.storage.shares[key] = bytes(upload.data)
                del self.storage.uploads[key]
            return WriteAnswer(complete, required)

        return self._answer("write", write, storage_index, share_number, offset, end - offset)

    @property
    def whole_bytes(self) -> int:
        """As much as a test wants."""
        return self.takes_whole_bytes

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Forget an unfinished upload; see the contract."""
        key = (storage_index, share_number)

        def abort() -> None:
            self.storage.upload(key, upload_secret)
            del self.storage.uploads[key]

        return self._answer("abort", abort, *key)

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all complete shares."""
        return self._answer(
            "list_shares", lambda: self.storage.numbers(storage_index), storage_index
        )

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from a complete share; see the contract."""
        return self._read("read", self.storage.share, storage_index, share_number, offset, length)

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see the contract."""

        def begin(data: bytes) -> Deferred[int]:
            done: Deferred[int] = Deferred(lambda _: stream.end())
            stream = MemoryStream(data, consumer, done)
            self._track(done)
            stream.begin()
            return done

        share = self.storage.share
        data = self._read("stream", share, storage_index, share_number, offset, length)
        return data.addCallback(begin)

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index."""

        def add_lease() -> None:
            if not self.storage.numbers(storage_index):
                raise NoSuchShare("there are no shares of this index; upload them first")
            self.storage.lease(storage_index, lease)

        return self._answer("add_lease", add_lease, storage_index)

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a share looked corrupt."""
        key = (storage_index, share_number)
        return self._advise("advise_corrupt_share", self.storage.share, key, reason)

    # Slots.

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> Deferred[SlotResult]:
        """Test, read and write a slot; see the contract."""
        storage = self.storage
        changes, reads = dict(changes), tuple(reads)

        def change() -> SlotResult:
            enabler = storage.write_enablers.get(storage_index, secrets.write_enabler)
            if storage_index in storage.slots and enabler != secrets.write_enabler:
                raise WrongSecret("these shares are written with another write enabler")
            data = storage.read_slot(storage_index, reads)
            success = storage.change_slot(storage_index, changes)
            if success and changes:
                storage.write_enablers[storage_index] = secrets.write_enabler
                storage.lease(storage_index, secrets.lease)
            return SlotResult(success, data)

        return self._answer("read_test_write", change, storage_index, changes, reads)

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares."""
        return self._answer(
            "list_slot", lambda: frozenset(self.storage.slots.get(storage_index, ())), storage_index
        )

    def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> Deferred[SlotData]:
        """Read from every share of a slot."""
        return self._answer(
            "read_slot",
            lambda: self.storage.read_slot(storage_index, reads),
            storage_index,
            tuple(reads),
        )

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from one mutable share; see the contract."""
        share = self.storage.slot_share
        return self._read("read_slot_share", share, storage_index, share_number, offset, length)

    def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of a slot."""

        def add_lease() -> None:
            if storage_index not in self.storage.slots:
                raise NoSuchShare("there are no shares of this index; store the file first")
            self.storage.lease(storage_index, lease)

        return self._answer("add_slot_lease", add_lease, storage_index)

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a mutable share looked corrupt."""
        key = (storage_index, share_number)
        return self._advise("advise_corrupt_slot_share", self.storage.slot_share, key, reason)

    def disconnect(self) -> Deferred[None]:
        """Give up unanswered requests; the server can be used again afterwards."""
        self._leaving = True
        for waiting in list(self._unanswered):
            waiting.cancel()
        self._leaving = False
        return execute(lambda: None)

    # How answers come about.

    def _read(
        self, operation: str, share: Callable[[Key], bytes], index: bytes, number: int, *span: int
    ) -> Deferred[bytes]:
        offset, length = span

        def read() -> bytes:
            return share((index, number))[offset : offset + length]

        return self._answer(operation, read, index, number, offset, length)

    def _advise(
        self, operation: str, share: Callable[[Key], bytes], key: Key, reason: str
    ) -> Deferred[None]:
        def advise() -> None:
            share(key)  # there has to be one
            self.storage.advisories.append((*key, reason))

        return self._answer(operation, advise, *key, reason)

    def _answer(self, operation: str, deed: Callable[[], T], *arguments: Any) -> Deferred[T]:
        self.calls.append((operation, arguments))
        waiting: Deferred[T] = Deferred()
        call = None
        if not self._hanging & {operation, None}:
            outcome = self._outcome(operation, deed)
            if self.delay_s:
                assert self._clock is not None, "a delay needs a clock"
                call = self._clock.callLater(self.delay_s, waiting.callback, outcome)
            else:
                waiting.callback(outcome)
        return self._track(waiting, call)

    def _outcome(self, operation: str, deed: Callable[[], T]) -> T | Failure:
        for name in (operation, None):
            if self._failures.get(name):
                return Failure(self._failures[name].popleft())
        try:
            return deed()
        except ServerError as error:
            error.server = error.server or self.identity.nickname
            return Failure()

    def _track(self, waiting: Deferred[T], call: IDelayedCall | None = None) -> Deferred[T]:
        """Know it for ``disconnect`` until it has fired, been cancelled or failed."""
        self._unanswered[waiting] = call
        return waiting.addBoth(self._arrived, waiting)

    def _arrived(self, result: T, waiting: Deferred[Any]) -> T | Failure:
        call = self._unanswered.pop(waiting)
        if call is not None and call.active():
            call.cancel()
        if self._leaving and isinstance(result, Failure) and result.check(CancelledError):
            return Failure(disconnected(self.identity.nickname))
        return result
