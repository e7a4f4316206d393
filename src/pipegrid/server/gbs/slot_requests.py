"""GBS requests for mutable slots, and the queue in which they wait for one another."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, execute
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.disk import files as disk
from pipegrid.disk.atomic_write import open_spool
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.disk.private_output import make_private
from pipegrid.errors import NoSpace, Overloaded, PipegridError, UsageError
from pipegrid.reactor.sockets import gather
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.receivers import InSteps, Service
from pipegrid.server.gbs.request_check import Admitted, Operation
from pipegrid.server.gbs.responses import Answer
from pipegrid.storage.mutable.slots import Slots
from pipegrid.wire import gbs_messages, gbs_mutable
from pipegrid.wire.gbs_messages import WRITE_ENABLER
from pipegrid.wire.gbs_mutable import ReadTestWrite
from pipegrid.wire.messages import SlotResult, SlotSecrets

# Calling ``Slots`` without blocking the reactor, and in order.
#
# What syncs is called in a thread, since it waits for the disk. What only reads takes less than the way to a
# thread and back, and is called here; but it would wait for the slot's lock if a thread had that. So
# calls that concern one slot wait for each other. That also gives them the order in which they came.

P = ParamSpec("P")
T = TypeVar("T")

_Start = Callable[[], Deferred[Any]]


class SlotQueue:
    """
    Runs what concerns one slot one after the other, in the order of the calls.

    Both protocols' faces share one, since who writes over one may read over the other. How many calls wait is
    bounded by whoever calls: a connection has but a few unanswered requests.

    Attributes:
        durable: whether the policy wants what was written synced; hand it on to ``Slots``.
    """

    def __init__(self, durability: GroupCommit) -> None:
        self.durable = durability.policy != "none"
        self._durability = durability
        self._busy: dict[bytes, deque[_Start]] = {}

    def __repr__(self) -> str:
        return f"<SlotQueue, {len(self._busy)} slots busy>"

    def write(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call a function that syncs, in a thread if it has to; fires with what it returns."""
        return self._call(storage_index, lambda: self._durability.run(function, *args, **kwargs))

    def read(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call a function that only reads, here; at once unless writes to this slot are under way."""
        return self._call(storage_index, lambda: execute(function, *args, **kwargs))

    def _call(self, storage_index: bytes, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        # Cancelling gives up waiting for the outcome; what was asked for happens all the same.
        outcome: Deferred[T] = Deferred()

        def start_and_tell() -> Deferred[Any]:
            def tell(result: Any) -> None:
                if not outcome.called:
                    outcome.callback(result)

            return start().addBoth(tell)

        if storage_index in self._busy:
            self._busy[storage_index].append(start_and_tell)
        else:
            self._busy[storage_index] = deque([start_and_tell])
            self._run(storage_index)
        return outcome

    def _run(self, storage_index: bytes) -> None:
        """Run what waits, until something takes its time."""
        waiting = self._busy[storage_index]
        while waiting:
            running = waiting.popleft()()
            if not running.called:
                running.addCallback(lambda _: self._run(storage_index))
                return
        del self._busy[storage_index]


# What the GBS server does with its mutable shares, beside reading one.
#
# Source: the format reference, storage protocols, section 1.7.

SPOOL_BYTES = 1 << 20
"""What a request that goes to the disk counts, apart from its parts; half of it is gathered for a write."""
INLINE_ANSWER_BYTES = 64 * 1024
"""Up to here what was read is an answer like any other; beyond, it is held, and sent by the piece."""


class SpooledRequest:
    """
    A read-test-write that is too long for memory: its large strings are in a file without a name.

    Of one client's requests many may come at once, so each counts ``SPOOL_BYTES`` against the memory for
    messages, besides what its small parts take.

    Args:
        slots: knows where there is room for the file.

    Raises (all methods that write):
        NoSpace: the disk is full.
        ServerRefused: it failed.
    """

    def __init__(self, slots: Slots) -> None:
        self.message = gbs_mutable.receive_request(self._keep)
        self._slots = slots
        self._fd: int | None = None
        self._pieces: list[bytes | bytearray] = []
        self._gathered_bytes = 0
        self._written_bytes = 0

    def unpack(self) -> ReadTestWrite:
        """Return what is asked for; in a thread, since it may take seconds."""
        self._write_out()
        fd = -1 if self._fd is None else self._fd
        try:
            return gbs_mutable.unpack_received(self.message, partial(disk.FilePart, fd))
        except ValueError as error:
            raise UsageError(str(error)) from error

    def close(self) -> None:
        """Let go of the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _keep(self, data: Buffer) -> None:
        gather(self._pieces, bytes(data))
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= SPOOL_BYTES // 2:
            self._write_out()

    def _write_out(self) -> None:
        pieces, self._pieces = self._pieces, []
        size, self._gathered_bytes = self._gathered_bytes, 0
        if not size:
            return
        if not self._slots.has_room(size):
            raise NoSpace(
                f"there is no space for {size} more bytes of a request; use another server"
            )
        try:
            if self._fd is None:
                make_private(self._slots.incoming)
                self._fd = open_spool(self._slots.incoming)
            disk.write_all_pieces(self._fd, pieces, self._written_bytes)
        except OSError as error:
            raise disk.disk_error(error, "keep a long request") from error
        self._written_bytes += size


class SlotChangeCall(InSteps):
    """
    A read-test-write: gathers its body, which may be large, and carries it out.

    Its body is looked at in as many turns as that takes; one that is longer than a server holds in memory, or
    does not say how long it is, is taken apart while it comes, and its large strings go to the disk. What it
    became is held until it is carried out, what was read until it is sent. Both count against the server's
    memory for messages, the latter before a byte of it is read.

    Args:
        body_bytes: of the body; None: it comes in chunks.
    """

    def __init__(
        self,
        service: Service,
        admitted: Admitted,
        slots: Slots,
        queue: SlotQueue,
        body_bytes: int | None,
    ) -> None:
        shares = (admitted.target.key,)
        super().__init__(service, admitted.rule, shares, self._unpack, self._carry_out)
        is_long = body_bytes is None or body_bytes > gbs_mutable.MAX_MEMORY_BYTES
        self._spooled = SpooledRequest(slots) if is_long else None
        self._spooled_cost = 0
        self._slots = slots
        self._queue = queue
        self._admitted = admitted
        self._read_bytes = 0
        self._wanted: ReadTestWrite | None = None

    def write(self, data: bytes) -> None:
        spooled = self._spooled
        if spooled is None or self.refusal is not None:
            super().write(data)
            return
        try:
            spooled.message.feed(data)
        except ValueError as error:
            self.refuse(responses.text(400, str(error)))
            return
        except PipegridError as error:
            self.refuse(self.service.answer_error(Operation.READ_TEST_WRITE, error))
            return
        cost = SPOOL_BYTES + gbs_mutable.cost_of(spooled.message)
        if not self.charge(cost - self._spooled_cost):
            self.refuse(responses.BUSY)
        self._spooled_cost = cost

    def refuse(self, answer: Answer) -> None:
        super().refuse(answer)
        self._close()

    def abandon(self) -> None:
        super().abandon()
        self._close()

    def _close(self) -> None:
        spooled, self._spooled = self._spooled, None
        if spooled is not None:
            spooled.close()

    def _unpack(self, body: Buffer) -> Generator[object, None, None]:
        if self._spooled is not None:
            return  # in the thread that carries it out
        try:
            steps = gbs_mutable.unpack_request_in_steps(body)
            if not self.charge(next(steps)):
                self.refuse(responses.BUSY)
                return
            yield None
            self._wanted = yield from steps
        except ValueError as error:
            self.refuse(responses.text(400, str(error)))

    def _carry_out(self, _: Buffer) -> Answer | Deferred[Answer]:
        """
        Test, read, write. What writes may have to wait for the disk; what does not never does.

        But reading much takes as long as waiting would: 20 ms for 56 MiB.
        """
        spooled, self._spooled = self._spooled, None
        storage_index = self._admitted.target.storage_index
        if spooled is not None:
            call = self._queue.write(storage_index, self._carry_out_spooled, spooled)
            return call.addCallbacks(self._answer_result, self._not_read)
        wanted, self._wanted = self._wanted, None
        assert wanted is not None, "carried out before it was unpacked"
        much = sum(size for _, size in wanted.reads) > INLINE_ANSWER_BYTES
        run = self._queue.write if wanted.changes or much else self._queue.read
        call = run(storage_index, self._change_slot, wanted)
        return call.addCallbacks(self._answer_result, self._not_read)

    def _carry_out_spooled(self, spooled: SpooledRequest) -> SlotResult:
        try:
            return self._change_slot(spooled.unpack())
        finally:
            spooled.close()

    def _change_slot(self, wanted: ReadTestWrite) -> SlotResult:
        return self._slots.testv_and_readv_and_writev(
            self._admitted.target.storage_index,
            SlotSecrets(self._admitted.lease, self._admitted.secrets[WRITE_ENABLER]),
            wanted.changes,
            wanted.reads,
            self._queue.durable,
            self._may_read,
        )

    def _may_read(self, more_bytes: int) -> bool:
        """Hold what is about to be read; called in a thread, perhaps."""
        if more_bytes <= INLINE_ANSWER_BYTES:
            return True
        if not self.service.hold(more_bytes, more_bytes > self.service.large_bytes):
            return False
        self._read_bytes = more_bytes
        return True

    def _answer_result(self, result: SlotResult) -> Answer:
        if not self._read_bytes:
            return responses.cbor(gbs_mutable.pack_answer(result))
        stream = responses.AnswerPieces(gbs_mutable.pack_answer_in_pieces(result), self._sent)
        return responses.make(200, content_type=gbs_messages.CONTENT_TYPE, stream=stream)

    def _not_read(self, failure: Failure) -> Failure | Answer:
        self._sent()
        return responses.BUSY if failure.check(Overloaded) else failure

    def _sent(self) -> None:
        self.service.hold(-self._read_bytes)
        self._read_bytes = 0


class SlotHandlers:
    """Carries out the other requests, in the order that the queue keeps."""

    def __init__(self, slots: Slots, queue: SlotQueue) -> None:
        self._slots = slots
        self._queue = queue

    def list_shares(self, admitted: Admitted, body: Buffer) -> Deferred[Answer]:
        """Answer with the numbers of all mutable shares at the storage index."""
        storage_index = admitted.target.storage_index
        numbers = self._queue.read(storage_index, self._slots.list_shares, storage_index)
        return numbers.addCallback(_answer_numbers)


def _answer_numbers(numbers: frozenset[int]) -> Answer:
    return responses.cbor(gbs_messages.pack_shares(numbers))
