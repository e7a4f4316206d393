"""
The operations of the GBS server on its share store: each checked request gets a receiver of its body, which
answers the request.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.core.text import printable
from pipegrid.disk.group_commit import Ending, GroupCommit, Storable
from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    PipegridError,
    QuotaReached,
    UsageError,
    WrongSecret,
)
from pipegrid.reactor import process_settings
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.body_receivers import (
    AllocateCall,
    Call,
    Receiver,
    Refusal,
    ShareStream,
    Write,
)
from pipegrid.server.gbs.bundles import Bundle, ReadBundle
from pipegrid.server.gbs.read_test_write_requests import SlotChangeCall, SlotQueue
from pipegrid.server.gbs.request_check import (
    AdmittedRequest,
    KnownSecrets,
    Operation,
    Request,
    admit,
)
from pipegrid.server.gbs.responses import Answer
from pipegrid.server.gbs.surveys import LeaseReleasesCall, Survey
from pipegrid.storage.share_reader import ShareReader
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.storage_paths import MAX_SHARE_NUMBER
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.wire import gbs_bundles, gbs_cbor_bodies, gbs_paths_headers
from pipegrid.wire.gbs_paths_headers import UPLOAD_SECRET, GbsTarget

INLINE_READ_BYTES = 64 * 1024
"""Reads up to this length are answered from memory; longer ones are streamed."""
MAX_COMMITS = 512
"""The most complete shares that wait to become durable, over all connections; each has an open file."""

MAX_HELD_BYTES = 192 << 20
"""
The most memory for messages, over all connections: bodies, their parsed form, and data read for long answers.
Only messages of read-test-write can be large.
"""
LARGE_MESSAGE_BYTES = 1 << 20
GIVE_BACK_BYTES = 16 << 20
"""After this much message memory was held and almost all was released, memory is given back to the system."""
SMALL_MESSAGES_BYTES = 32 << 20
"""The part of ``MAX_HELD_BYTES`` that is reserved for messages of up to a megabyte."""

log = Logger()


class GbsService:
    """
    A share store in terms of HTTP, independent of connections.

    Disk work at the speed of the page cache runs in the reactor's thread, since passing work to a worker
    thread takes longer: 35 microseconds and more, where writing 16 KiB takes 10. Waiting for the disk itself,
    to make shares durable, happens in the threads of ``disk.group_commit``.

    Args:
        swissnum: the secret that clients must know.

    Attributes:
        known: the server's secret, and those of named clients.
        requests: numbers of answers by (operation, status); for metrics.
        received_bytes, sent_bytes: share data received and sent.
        commits: how many shares wait to become durable.
        large_bytes: messages longer than this must leave some memory for shorter ones.
        slots: the queue of calls about mutable shares, which other protocols use as well.
        offer: header lines that announce this server's extensions of the protocol.
    """

    offer = b"%s: %d\r\n" % (gbs_bundles.OFFER, gbs_bundles.MAX_BUNDLE_BYTES)

    def __init__(self, store: ShareStore, durability: GroupCommit, swissnum: str) -> None:
        self.store = store
        self.requests: Counter[tuple[str, int]] = Counter()
        self.received_bytes = 0
        self.sent_bytes = 0
        self.commits = 0
        self._durability = durability
        self.known = KnownSecrets(swissnum)
        self._waiting_for_space: list[Callable[[], None]] = []
        self.slots = SlotQueue(durability)
        self.large_bytes = LARGE_MESSAGE_BYTES
        self._held_bytes = 0
        self._held_most = 0  # the maximum since memory was given back
        self._held_lock = threading.Lock()  # worker threads count the data that slots read
        self._handlers: dict[
            Operation, Callable[[AdmittedRequest, Buffer], Answer | Deferred[Answer]]
        ] = {
            Operation.CORRUPT: self._corrupt,
            Operation.VERSION: self._version,
            Operation.ABORT: self._abort,
            Operation.LIST: self._list,
            Operation.LEASE: self._lease,
            Operation.SLOT_LIST: self._list_slot,
            Operation.SLOT_CORRUPT: self._corrupt,
        }

    # Limits of the shares that wait to become durable.

    @property
    def has_space(self) -> bool:
        """Whether one more share may wait to become durable, so that a write may begin."""
        return self.has_space_for(1)

    def has_space_for(self, shares: int) -> bool:
        """
        Return whether this number of further shares may wait to become durable; at most ``MAX_COMMITS`` wait
        in all.
        """
        return self.commits + shares <= MAX_COMMITS

    def call_when_space(self, call: Callable[[], None]) -> None:
        """
        Call a function once, when fewer shares wait than now. When the function is called, the limit may be
        reached again.
        """
        self._waiting_for_space.append(call)

    @property
    def takes_whole(self) -> bool:
        """
        Whether a share that arrives as a whole is written to an unnamed file, and named when it is durable.
        """
        return self._durability.syncs_unnamed

    def received(self, upload: IncomingShare, length: int) -> None:
        """Count received share data, whether it was written or rejected."""
        self.received_bytes += length
        self._durability.written(upload)

    def reserve(self, shares: int) -> None:
        """Count shares before they begin to wait to become durable; a negative number releases that many."""
        self.commits += shares
        if shares < 0:
            self._notify_space()

    def commit(self, upload: IncomingShare) -> Deferred[None]:
        """Make a complete share durable and visible."""
        self.commits += 1
        return self._durability.commit(upload).addBoth(self._committed)

    def commit_each(
        self, uploads: Sequence[IncomingShare], ended: Callable[[IncomingShare, Ending], None]
    ) -> None:
        """
        Make complete shares durable and visible; ``ended`` is called for each share, perhaps before this
        method returns.
        """
        self.commits += len(uploads)

        def one(upload: Storable, outcome: Ending) -> None:
            assert isinstance(upload, IncomingShare)
            self.commits -= 1
            if self._waiting_for_space:
                self._notify_space()
            ended(upload, outcome)

        self._durability.commit_each(uploads, one)

    def _committed(self, result: Failure | None) -> Failure | None:
        self.commits -= 1
        self._notify_space()
        return result

    def _notify_space(self) -> None:
        # Call all functions: some connections may be closed, or have nothing to write.
        if self._waiting_for_space:
            waiting, self._waiting_for_space = self._waiting_for_space, []
            for call in waiting:
                call()

    # Requests.

    def knows_secret(self, request: Request) -> bool:
        """Return whether the client has shown one of the server's secrets."""
        return self.known.owner_of(request) is not None

    def begin(self, request: Request) -> Receiver:
        """Return the receiver of a request's body; never raises."""
        admitted = admit(request, self.known)
        if isinstance(admitted, Answer):
            return Refusal(self, request.method.decode("ascii"), admitted)
        rule = admitted.rule
        operation = rule.operation
        if operation is Operation.WRITE:
            begun: Answer | Write
            try:
                begun = self._begin_write(request, admitted)
            except Exception as error:
                begun = self.answer_error(operation, error)
            if isinstance(begun, Answer):
                return Refusal(self, operation.value, begun)
            return begun
        if operation in (Operation.READ, Operation.SLOT_READ):
            wanted = request.headers.get(b"range")
            read = self._read if operation is Operation.READ else self._read_slot
            return Call(self, rule, (admitted.target.key,), lambda _: read(admitted.target, wanted))
        if operation is Operation.ALLOCATE:
            return AllocateCall(self, admitted, self.store, self.offer)
        if operation is Operation.BUNDLE:
            return Bundle(self, rule, request.client, admitted.owner)
        if operation is Operation.SURVEY:
            return Survey(self, rule, admitted.owner)
        if operation is Operation.RELEASE_LEASES:
            return LeaseReleasesCall(self, rule)
        if operation is Operation.READ_BUNDLE:
            return ReadBundle(self, rule)
        if operation is Operation.READ_TEST_WRITE:
            return SlotChangeCall(
                self, admitted, self.store.slots, self.slots, request.content_length
            )
        handler = self._handlers[operation]
        return Call(self, rule, (admitted.target.key,), lambda body: handler(admitted, body))

    def answer_error(self, operation: Operation, error: Exception) -> Answer:
        """Return the answer for an error; details that the client must not know are only logged."""
        if isinstance(error, NoSuchShare):
            reads = operation in (Operation.READ, Operation.SLOT_READ)
            return responses.SHARE_MISSING if reads else responses.NOT_FOUND
        if isinstance(error, WrongSecret):
            return responses.WRONG_SECRET
        if isinstance(error, ConflictingWrite):
            return responses.CONFLICT
        if isinstance(error, UsageError):
            return responses.text(400, str(error))
        if isinstance(error, NoSpace):
            log.warn("{operation}: {error}", operation=operation.value, error=str(error))
            return (
                responses.QUOTA_REACHED if isinstance(error, QuotaReached) else responses.NO_SPACE
            )
        if isinstance(error, PipegridError):
            log.error("{operation}: {error}", operation=operation.value, error=str(error))
        else:
            log.failure("{operation} failed", Failure(error), operation=operation.value)
        return responses.FAILED

    def count(self, name: str, answer: Answer) -> Answer:
        """Count an answer for the metrics, and return it."""
        self.requests[name, answer.status] += 1
        return answer

    def _version(self, admitted: AdmittedRequest, body: Buffer) -> Answer:
        version = self.store.version(admitted.owner)
        return responses.cbor(gbs_cbor_bodies.pack_version(version), headers=self.offer)

    def _begin_write(self, request: Request, admitted: AdmittedRequest) -> Answer | Write:
        try:
            begin, end = gbs_paths_headers.parse_content_range(
                request.headers.get(b"content-range", b"")
            )
        except ValueError:
            return responses.BAD_CONTENT_RANGE
        length = request.content_length
        if length is not None and length < end - begin:
            return responses.text(400, "the body is shorter than its Content-Range")
        target = admitted.target
        _check_number(target)
        secret = admitted.secrets[UPLOAD_SECRET]
        upload = self.store.upload(*target.key, secret, admitted.client)
        if end > upload.share_bytes:
            return responses.BAD_CONTENT_RANGE
        return Write(self, upload, begin, end)

    def _abort(self, admitted: AdmittedRequest, body: Buffer) -> Answer:
        target = admitted.target
        _check_number(target)
        try:
            self.store.abort(*target.key, admitted.secrets[UPLOAD_SECRET])
        except NoSuchShare:
            if target.share_number in self.store.list_shares(target.storage_index):
                return responses.ABORT_TOO_LATE
            raise
        return responses.OK

    def _list(self, admitted: AdmittedRequest, body: Buffer) -> Answer:
        return self._answer_numbers(self.store.list_shares(admitted.target.storage_index))

    def _list_slot(self, admitted: AdmittedRequest, body: Buffer) -> Deferred[Answer]:
        index = admitted.target.storage_index
        numbers = self.slots.read(index, self.store.slots.list_shares, index)
        return numbers.addCallback(self._answer_numbers)

    def _answer_numbers(self, numbers: frozenset[int]) -> Answer:
        return responses.cbor(gbs_cbor_bodies.pack_shares(numbers), headers=self.offer)

    def _read(self, target: GbsTarget, wanted: bytes | None) -> Answer:
        _check_number(target)
        reader = self.store.open_share(*target.key)
        return self._answer_read(reader, wanted)

    def _read_slot(self, target: GbsTarget, wanted: bytes | None) -> Deferred[Answer]:
        _check_number(target)
        index, number = target.storage_index, target.share_number
        reader = self.slots.read(index, self.store.slots.open_share, index, number)
        return reader.addCallback(self._answer_read, wanted)

    def _answer_read(self, reader: ShareReader, wanted: bytes | None) -> Answer:
        try:
            answer = self._read_from(reader, wanted)
        except BaseException:
            reader.close()
            raise
        if answer.stream is None:
            reader.close()
        return answer

    def _read_from(self, reader: ShareReader, wanted: bytes | None) -> Answer:
        begin, end = 0, reader.share_bytes
        status, headers = 200, b""
        if wanted is not None:
            try:
                begin, end = gbs_paths_headers.parse_range(wanted)
            except ValueError:
                return responses.BAD_RANGE
            end = min(end, reader.share_bytes)
            if begin >= end:
                return responses.EMPTY_RANGE
            status = 206
            headers = b"Content-Range: %s\r\n" % gbs_paths_headers.format_content_range(begin, end)
        self.sent_bytes += end - begin
        if end - begin > INLINE_READ_BYTES:
            stream = ShareStream(reader, begin, end)
            return responses.make(
                status,
                content_type=gbs_paths_headers.SHARE_CONTENT_TYPE,
                headers=headers,
                stream=stream,
            )
        data = reader.read_exactly(begin, end - begin)
        return responses.make(status, data, gbs_paths_headers.SHARE_CONTENT_TYPE, headers)

    def _corrupt(self, admitted: AdmittedRequest, body: Buffer) -> Answer:
        try:
            reason = gbs_cbor_bodies.unpack_corrupt(body)
        except ValueError as error:
            return responses.text(400, str(error))
        target = admitted.target
        _check_number(target)
        mutable = admitted.rule.operation is Operation.SLOT_CORRUPT
        self.note_corrupt(target.storage_index, target.share_number, reason, mutable)
        return responses.OK

    def note_corrupt(self, storage_index: bytes, number: int, reason: str, mutable: bool) -> None:
        """
        Record a client's advisory about a share, and log it, unless there are too many advisories already.
        """
        if self.store.advise_corrupt_share(storage_index, number, reason, mutable):
            log.warn(
                "a client found share {number} of {index} corrupt: {reason}",
                number=number,
                index=storage_index.hex(),
                reason=printable(reason[:200]),
            )

    def _lease(self, admitted: AdmittedRequest, body: Buffer) -> Answer | Deferred[Answer]:
        index = admitted.target.storage_index
        added = self.slots.read(index, self.store.add_lease, index, admitted.lease)
        return added.addCallback(lambda _: responses.LEASE_ADDED)

    # Memory of large bodies.

    def hold(self, more_bytes: int, large: bool = False) -> bool:
        """
        Count memory for messages, or release it if the number is negative; returns whether that is allowed.
        May be called in any thread.

        Args:
            large: whether the memory belongs to a message of more than ``LARGE_MESSAGE_BYTES``.
        """
        with self._held_lock:
            limit = MAX_HELD_BYTES - SMALL_MESSAGES_BYTES if large else MAX_HELD_BYTES
            if more_bytes > 0 and self._held_bytes + more_bytes > limit:
                return False
            self._held_bytes += more_bytes
            self._held_most = max(self._held_most, self._held_bytes)
        return True

    def tidy(self) -> None:
        """
        If large messages took much memory and have released almost all, give it back to the system; called
        periodically.
        """
        if self._held_most > GIVE_BACK_BYTES and self._held_bytes < LARGE_MESSAGE_BYTES:
            self._held_most = 0
            process_settings.trim_heap()


def _check_number(target: GbsTarget) -> None:
    if target.share_number > MAX_SHARE_NUMBER:
        raise NoSuchShare(f"share number {target.share_number} is not valid")
