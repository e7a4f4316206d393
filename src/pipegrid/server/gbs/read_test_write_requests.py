"""
GBS requests for mutable slots, and the queue that orders these requests.

Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, execute
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.atomic_write import open_spool
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.disk.private_files import make_private
from pipegrid.errors import NoSpace, Overloaded, PipegridError, UsageError
from pipegrid.reactor.tcp_transport import gather
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.body_receivers import InSteps, Service
from pipegrid.server.gbs.request_check import AdmittedRequest, Operation
from pipegrid.server.gbs.responses import Answer
from pipegrid.storage.mutable.slots import Slots
from pipegrid.wire import gbs_mutable, gbs_paths_headers
from pipegrid.wire.gbs_mutable import ReadTestWrite
from pipegrid.wire.gbs_paths_headers import WRITE_ENABLER
from pipegrid.wire.storage_messages import SlotResult, SlotSecrets

# Calls that sync wait for the disk, so they run in a worker thread. Calls that only read take less time than
# switching threads, so they run in the reactor's thread. But the reactor would wait for the slot's lock if a
# worker held it. So each call for a slot waits until the previous one has ended, which also keeps their
# order.

P = ParamSpec("P")
T = TypeVar("T")


class SlotQueue:
    """
    Runs the calls for one slot one after the other, in order.

    Both protocols share one queue, since a client may write over one protocol and read over the other. The
    callers limit how many calls wait: a connection has only a few unanswered requests.

    Attributes:
        durable: whether the policy requires syncing written data; pass it to ``Slots``.
    """

    def __init__(self, durability: GroupCommit) -> None:
        self.durable = durability.policy != "none"
        self._durability = durability
        self._busy: dict[bytes, deque[Callable[[], Deferred[Any]]]] = {}

    def __repr__(self) -> str:
        return f"<SlotQueue, {len(self._busy)} slots busy>"

    def write(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call a function that syncs, in a worker thread if necessary; fires with its result."""
        return self._call(storage_index, lambda: self._durability.run(function, *args, **kwargs))

    def read(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """
        Call a function that only reads, in this thread; at once unless an earlier call for this slot is
        running.
        """
        return self._call(storage_index, lambda: execute(function, *args, **kwargs))

    def _call(self, storage_index: bytes, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        # Cancelling stops only the waiting; the function is called nevertheless.
        outcome: Deferred[T] = Deferred()

        def start_and_report() -> Deferred[Any]:
            def pass_on(result: Any) -> None:
                if not outcome.called:
                    outcome.callback(result)

            return start().addBoth(pass_on)

        if storage_index in self._busy:
            self._busy[storage_index].append(start_and_report)
        else:
            self._busy[storage_index] = deque([start_and_report])
            self._run(storage_index)
        return outcome

    def _run(self, storage_index: bytes) -> None:
        """Run waiting calls, until one does not finish at once."""
        waiting = self._busy[storage_index]
        while waiting:
            running = waiting.popleft()()
            if not running.called:
                running.addCallback(lambda _: self._run(storage_index))
                return
        del self._busy[storage_index]


SPOOL_BYTES = 1 << 20
"""Memory counted for a spooled request, without its small parts; half of it collects the next write."""
INLINE_ANSWER_BYTES = 64 * 1024
"""Answers longer than this are counted, and sent in pieces."""


class SpooledRequest:
    """
    A read-test-write that is too long for memory: its large strings are in an unnamed file.

    One client may send many such requests at the same time, so each counts ``SPOOL_BYTES`` against the memory
    for messages, in addition to its small parts.

    Args:
        slots: provides the directory for the file.

    Raises (all methods that write):
        NoSpace: the disk is full.
        ServerRefused: the disk failed.
    """

    def __init__(self, slots: Slots) -> None:
        self.message = gbs_mutable.receive_request(self._keep)
        self._slots = slots
        self._fd: int | None = None
        self._pieces: list[bytes | bytearray] = []
        self._gathered_bytes = 0
        self._written_bytes = 0

    def unpack(self) -> ReadTestWrite:
        """Return the parsed request; call this in a worker thread, since it may take seconds."""
        self._write_out()
        fd = -1 if self._fd is None else self._fd
        try:
            return gbs_mutable.unpack_received(self.message, partial(disk.FilePart, fd))
        except ValueError as error:
            raise UsageError(str(error)) from error

    def close(self) -> None:
        """Close the file; since the file is unnamed, this removes it."""
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
        if not self._slots.has_space(size):
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
    A read-test-write: collects its body, which may be large, and carries it out.

    The body is parsed in as many turns as needed. If it is longer than a server holds in memory, or chunked,
    it is parsed as it arrives, and its large strings go to the disk. The parsed request is in memory until it
    is carried out, and the data that it reads until the answer is sent. The memory of both is counted; for
    the data, before they are read.

    Args:
        body_bytes: length of the body; None if it is chunked.
    """

    def __init__(
        self,
        service: Service,
        admitted: AdmittedRequest,
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
            return  # ``_carry_out_spooled`` parses it
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
        Test, read and write. Calls that write may have to wait for the disk, so they run in a thread. So do
        calls that read much: 56 MiB take 20 ms.
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
        with closing(spooled):
            return self._change_slot(spooled.unpack())

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
        """
        Count the data that will be read; returns whether that is allowed. May be called in a worker thread.
        """
        if more_bytes <= INLINE_ANSWER_BYTES:
            return True
        if not self.service.hold(more_bytes, more_bytes > self.service.large_bytes):
            return False
        self._read_bytes = more_bytes
        return True

    def _answer_result(self, result: SlotResult) -> Answer:
        if not self._read_bytes:
            return responses.cbor(gbs_mutable.pack_answer(result))
        stream = responses.ResponsePieces(gbs_mutable.pack_answer_in_pieces(result), self._sent)
        return responses.make(200, content_type=gbs_paths_headers.CONTENT_TYPE, stream=stream)

    def _not_read(self, failure: Failure) -> Failure | Answer:
        self._sent()
        return responses.BUSY if failure.check(Overloaded) else failure

    def _sent(self) -> None:
        self.service.hold(-self._read_bytes)
        self._read_bytes = 0
