"""Receivers of request bodies, and streams of long answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.errors import NoSuchShare, PipegridError
from pipegrid.reactor.tcp_transport import gather
from pipegrid.server.connection_turns import FairTurns
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.request_check import AdmittedRequest, Operation, Rule
from pipegrid.server.gbs.responses import STREAM_PIECE_BYTES, Answer
from pipegrid.storage.share_reader import ShareReader
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.storage_paths import MAX_SHARE_NUMBER, ShareKey, possible_numbers
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.wire import gbs_cbor_bodies
from pipegrid.wire.gbs_paths_headers import UPLOAD_SECRET
from pipegrid.wire.storage_messages import Allocation, UploadSecrets

# Share data is written to the incoming file as it arrives; only small pieces are collected until they are
# long enough for a system call. Other bodies are collected as a whole, up to a limit. The service counts and
# limits the memory of all bodies.

GATHER_BYTES = 128 * 1024
"""How many bytes of share data one write collects, except at the end; it replaces about eight writes."""

log = Logger()


class Service(Protocol):
    """The part of the GBS service that receivers use."""

    large_bytes: int

    def hold(self, more_bytes: int, large: bool = False) -> bool:
        """
        Count memory for messages, or release it if the number is negative; returns whether that is allowed.
        """

    def received(self, upload: IncomingShare, length: int) -> None:
        """Count received share data, whether it was written or rejected."""

    def commit(self, upload: IncomingShare) -> Deferred[None]:
        """Make a complete share durable and visible."""

    def answer_error(self, operation: Operation, error: Exception) -> Answer:
        """Return the answer for an error."""

    def count(self, name: str, answer: Answer) -> Answer:
        """Count an answer for the metrics, and return it."""


class Receiver(Protocol):
    """
    Accepts the body of one request, and answers the request.

    Attributes:
        shares: the shares for which the answer waits, if it is not ready at once.
    """

    shares: Sequence[ShareKey]

    def write(self, data: bytes) -> None:
        """Accept the next bytes of the body."""

    def finish(self) -> Answer | Deferred[Answer]:
        """Return the answer; called when the body is complete."""

    def abandon(self) -> None:
        """Stop, since the rest of the body will not arrive."""


class Refusal:
    """Ignores the body, and returns a given answer."""

    shares: Sequence[ShareKey] = ()

    def __init__(self, service: Service, name: str, answer: Answer) -> None:
        self._service = service
        self._name = name
        self._answer = answer

    def write(self, data: bytes) -> None:
        """Ignore part of the body."""

    def finish(self) -> Answer:
        return self._service.count(self._name, self._answer)

    def abandon(self) -> None:
        """Do nothing, since no part of the body was kept."""


class Call:
    """
    Collects a small body, and calls a function with it.

    Attributes:
        body: the bytes that have arrived.
        refusal: the answer, if the request is rejected already.
    """

    def __init__(
        self,
        service: Service,
        rule: Rule,
        shares: Sequence[ShareKey],
        handler: Callable[[Buffer], Answer | Deferred[Answer]],
    ) -> None:
        self.service = service
        self.shares = shares
        self.body = bytearray()
        self.refusal: Answer | None = None
        self._operation = rule.operation
        self._limit_bytes = rule.body_limit_bytes or 0
        self._handler = handler
        self._held_bytes = 0

    def write(self, data: bytes) -> None:
        """
        Collect bytes, and reject the request if there are too many. The body is ignored if it is not used, or
        the request is rejected.
        """
        if not self._limit_bytes or self.refusal is not None:
            return
        if len(self.body) + len(data) > self._limit_bytes:
            self.refuse(responses.TOO_LARGE)
        elif not self.charge(len(data)):
            self.refuse(responses.BUSY)
        else:
            self.body += data

    def refuse(self, answer: Answer) -> None:
        """Set the answer that rejects the request; the rest of the body is ignored."""
        self.refusal = answer
        self._release()

    def finish(self) -> Answer | Deferred[Answer]:
        if self.refusal is not None:
            return self._count(self.refusal)
        body, self.body = self.body, bytearray()
        try:
            answer = self._handler(body)
        except Exception as error:
            answer = self.service.answer_error(self._operation, error)
        if isinstance(answer, Deferred):
            # Until there is an answer, the request is in memory, in its parsed form.
            answer.addErrback(self._failed).addCallback(self._ended)
            return answer.result if answer.called and isinstance(answer.result, Answer) else answer
        return self._ended(answer)

    def abandon(self) -> None:
        self._release()

    def charge(self, more_bytes: int) -> bool:
        """
        Count memory for the body, collected or parsed, until there is an answer; returns whether that is
        allowed.
        """
        large = self._held_bytes + more_bytes > self.service.large_bytes
        if not self.service.hold(more_bytes, large):
            return False
        self._held_bytes += more_bytes
        return True

    def _ended(self, answer: Answer) -> Answer:
        self._release()
        return self._count(answer)

    def _failed(self, failure: Failure) -> Answer:
        return self.service.answer_error(self._operation, reason_of(failure))

    def _count(self, answer: Answer) -> Answer:
        return self.service.count(self._operation.value, answer)

    def _release(self) -> None:
        self.service.hold(-self._held_bytes)
        self._held_bytes = 0
        self.body = bytearray()


def reason_of(failure: Failure) -> Exception:
    """Return the exception that a Deferred failed with."""
    assert isinstance(failure.value, Exception)
    return failure.value


class ReadService(Service, Protocol):
    """The part of the GBS service that reads several shares for one message, in addition to ``Service``."""

    store: ShareStore
    sent_bytes: int


def read_part(
    service: ReadService, storage_index: bytes, share_number: int, offset: int, length: int
) -> bytes | int:
    """
    Return bytes of an immutable share, fewer if the range exceeds the share. If a ``GET`` of these bytes
    would be rejected, return its HTTP status.
    """
    try:
        if share_number > MAX_SHARE_NUMBER:
            raise NoSuchShare(f"share number {share_number} is not valid")
        with service.store.open_share(storage_index, share_number) as reader:
            wanted = min(length, max(0, reader.share_bytes - offset))
            data = reader.read_exactly(offset, wanted) if wanted else b""
    except Exception as error:
        return service.answer_error(Operation.READ, error).status
    service.sent_bytes += len(data)
    return data


class InSteps(Call):
    """
    A call that is carried out in steps, in as many turns as needed.

    Later requests of the connection wait until all steps are done, so the result is the same as without
    steps.

    Args:
        steps: called with the body; returns an iterator that does one step at a time. Its exceptions become
            the answer.
    """

    def __init__(
        self,
        service: Service,
        rule: Rule,
        shares: Sequence[ShareKey],
        steps: Callable[[Buffer], Iterator[object]],
        handler: Callable[[Buffer], Answer | Deferred[Answer]],
    ) -> None:
        super().__init__(service, rule, shares, handler)
        self._make_steps = steps
        self._steps: Iterator[object] | None = None

    def advance(self, turns: FairTurns[Any]) -> bool:
        """Do at least one step; returns whether all steps are done, so that ``finish`` may be called."""
        if self._steps is None:
            if self.refusal is not None:
                return True
            self._steps = self._make_steps(self.body)
        try:
            for _ in self._steps:
                if turns.over:
                    return False
        except Exception as error:
            self.refuse(self.service.answer_error(self._operation, error))
        return True


class Write:
    """Writes share data to the incoming file as it arrives."""

    def __init__(self, service: Service, upload: IncomingShare, begin: int, end: int) -> None:
        self.shares: Sequence[ShareKey] = ((upload.storage_index, upload.share_number),)
        self._service = service
        self._upload = upload
        self._at = begin
        self._end = end
        self._left = end - begin
        self._pieces: list[bytes | bytearray] = []
        self._gathered = 0
        self._answer: Answer | None = None

    def write(self, data: bytes) -> None:
        """Collect bytes, and write them to the file when there are enough."""
        if len(data) > self._left:  # the body may be longer than its range
            data = data[: self._left]
        if not data or self._answer is not None:
            return
        gather(self._pieces, data)
        self._left -= len(data)
        self._gathered += len(data)
        if self._gathered >= GATHER_BYTES:
            self._write_out()

    def finish(self) -> Answer | Deferred[Answer]:
        """Return the acknowledgement of the write; if the share is complete, only after it is durable."""
        service = self._service
        if self._pieces:
            self._write_out()
        if self._answer is None and self._left:
            self._answer = responses.text(400, "the body is shorter than its Content-Range")
        if self._answer is not None:
            return service.count("write", self._answer)
        upload = self._upload
        if upload.complete:
            return service.commit(upload).addCallbacks(self._stored, self._failed)
        try:
            upload.checkpoint()
            answer = responses.cbor(gbs_cbor_bodies.pack_required(upload.required()))
        except Exception as error:
            answer = service.answer_error(Operation.WRITE, error)
        return service.count("write", answer)

    def abandon(self) -> None:
        """
        Keep the bytes that have arrived, so that the client can resume. If the share is complete, store it.
        """
        if self._pieces:
            self._write_out()
        upload = self._upload
        if self._answer is None and upload.complete and upload.is_open:
            # An uncommitted complete share would stay open, perhaps for ever: its client may never ask for it
            # again.
            self._service.commit(upload).addErrback(self._answer_to)  # logs it
            return
        try:
            upload.checkpoint()
        except PipegridError as error:
            log.warn("{error}", error=str(error))

    def _write_out(self) -> None:
        pieces, self._pieces = self._pieces, []
        try:
            self._upload.write(self._at, pieces)
        except Exception as error:
            self._answer = self._service.answer_error(Operation.WRITE, error)
        self._service.received(self._upload, self._gathered)
        self._at += self._gathered
        self._gathered = 0

    def _stored(self, _: None) -> Answer:
        return self._service.count("write", responses.SHARE_COMPLETE)

    def _failed(self, failure: Failure) -> Answer:
        return self._service.count("write", self._answer_to(failure))

    def _answer_to(self, failure: Failure) -> Answer:
        return self._service.answer_error(Operation.WRITE, reason_of(failure))


class ShareStream:
    """A range of a share, which is read while it is sent."""

    def __init__(self, reader: ShareReader, begin: int, end: int) -> None:
        self.length = end - begin
        self._reader = reader
        self._at = begin
        self._end = end

    def read(self) -> bytes:
        size = min(STREAM_PIECE_BYTES, self._end - self._at)
        # An exception ends the connection. Otherwise the client would take the next answer for the rest of
        # the share.
        data = self._reader.read_exactly(self._at, size)
        self._at += size
        return data

    def close(self) -> None:
        self._reader.close()


def is_over_quota(
    store: ShareStore,
    wanted: AbstractSet[int],
    share_bytes: int,
    allocation: Allocation,
    owner: int,
) -> bool:
    """
    Return whether an allocation has no share because of a quota, either the server's or that of the named
    client with the number ``owner``.

    Clients get an error only for this reason; other rejected shares are missing from the answer without a
    reason.
    """
    if not wanted or allocation.allocated or allocation.already_have:
        return False
    return store.quota_refuses(share_bytes, owner)


class AllocateCall(InSteps):
    """
    A request to allocate shares of one file; with many shares it takes several turns.

    Args:
        headers: whole header lines to add to the answer.
    """

    def __init__(
        self, service: Service, admitted: AdmittedRequest, store: ShareStore, headers: bytes
    ) -> None:
        shares = (admitted.target.key,)
        super().__init__(service, admitted.rule, shares, self._allocate, self._say)
        self._admitted = admitted
        self._store = store
        self._headers = headers
        self._allocation = Allocation(frozenset(), frozenset())
        self._refuses_all = False

    def _allocate(self, body: Buffer) -> Iterator[None]:
        try:
            wanted = gbs_cbor_bodies.unpack_allocate(body)
        except ValueError as error:
            self.refuse(responses.text(400, str(error)))
            return
        allocation = yield from self._store.allocate_in_steps(
            self._admitted.target.storage_index,
            possible_numbers(wanted.share_numbers),
            wanted.share_bytes,
            UploadSecrets(self._admitted.lease, self._admitted.secrets[UPLOAD_SECRET]),
            self._admitted.client,
        )
        self._allocation = allocation
        self._refuses_all = is_over_quota(
            self._store,
            wanted.share_numbers,
            wanted.share_bytes,
            allocation,
            self._admitted.owner,
        )

    def _say(self, _: Buffer) -> Answer:
        allocation = self._allocation
        if self._refuses_all:
            return responses.QUOTA_REACHED
        return responses.cbor(gbs_cbor_bodies.pack_allocation(allocation), headers=self._headers)
