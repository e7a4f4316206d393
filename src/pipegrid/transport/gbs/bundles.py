"""
Bundles: small shares that are gathered and stored in one request, and reads of many small shares in one
request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import ServerError
from pipegrid.http11.exchange import RawRequest, RawResponse
from pipegrid.http11.upload_connection import Answered
from pipegrid.reactor.deferreds import Timer
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.transport.gbs.response_outcomes import GbsAnswers
from pipegrid.wire import gbs_bundles
from pipegrid.wire.gbs_bundles import MAX_READS, BundledAnswer, BundledRead, BundledUpload
from pipegrid.wire.storage_messages import (
    Allocation,
    Numbers,
    Pieces,
    Shares,
    Stored,
    UploadSecrets,
    WriteAnswer,
)

# Uploads that are held until the end of the turn, and uploads that were sent in a bundle, with the Deferred
# of each caller.

T = TypeVar("T")


class UploadPart(Generic[T]):
    """
    One call's part of an upload.

    Attributes:
        result: the Deferred that the caller has received.
        wanted: whether the caller still waits for the result.
    """

    __slots__ = ("_cancelled", "_instead", "result", "wanted")

    def __init__(self, cancelled: Callable[[], None]) -> None:
        self.wanted = True
        self.result: Deferred[T] = Deferred(self._cancel)
        self._cancelled: Callable[[], None] | None = cancelled
        self._instead: Deferred[T] | None = None

    def fire(self, value: T) -> None:
        """Fire the caller's Deferred if the caller still waits for it."""
        if self.wanted:
            self._end()
            self.result.callback(value)

    def fail(self, error: Exception | Failure) -> None:
        """Fail the caller's Deferred if the caller still waits for it."""
        if self.wanted:
            self._end()
            self.result.errback(error)

    def follow(self, request: Deferred[T]) -> None:
        """Use the result of an ordinary request that was sent in place of the bundle."""
        self._instead = request if self.wanted else None
        request.addCallbacks(self.fire, self.fail)

    def _end(self) -> None:
        self.wanted = False
        self._cancelled = self._instead = None  # break cycles: both attributes refer to this object

    def _cancel(self, _: Deferred[T]) -> None:
        cancelled, instead = self._cancelled, self._instead
        self._end()
        if instead is not None:
            instead.cancel()
        elif cancelled is not None:
            cancelled()


class HeldAllocation:
    """
    One allocation, and the whole shares that are sent with it.

    Attributes:
        bundle: the bundle in which the allocation was sent, if any.
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
    def wanted(self) -> bool:
        return self.allocation.wanted or any(write.wanted for write in self.writes.values())

    def fail(self, error: Exception | Failure) -> None:
        self.allocation.fail(error)
        for write in self.writes.values():
            write.fail(error)


class WholeCall(UploadPart[Stored]):
    """
    One call that allocates shares and writes all of them whole; the call has a single result.

    Attributes:
        upload: the allocation and the shares.
        bundle: the bundle in which the upload was sent, if any.
    """

    __slots__ = ("bundle", "upload")

    is_complete = True

    def __init__(self, upload: BundledUpload, cancelled: Callable[[], None]) -> None:
        super().__init__(cancelled)
        self.upload = upload
        self.bundle: SentBundle | None = None


class SentBundle:
    """The uploads that were sent in one bundle, and the bundle's request."""

    __slots__ = ("held", "request")

    def __init__(self, held: Sequence[HeldAllocation | WholeCall]) -> None:
        self.held = held
        self.request: Deferred[Answered] | None = None

    def take_apart(self) -> Sequence[HeldAllocation | WholeCall]:
        """
        Return the uploads and drop the references to them: a cycle of references would keep the share data in
        memory.
        """
        held, self.held, self.request = self.held, (), None
        return held


# Small shares for a server that supports bundles (``wire.gbs_bundles``): gathered, sent together, answered
# separately.
#
# An allocation of small shares is held until the reactor's current turn is over, and a write of one of these
# shares as a whole is added to the held allocation. So a hundred small files that begin at the same time
# become a few bundles per server instead of two hundred requests. Callers see no difference: each call has
# its own Deferred, with the result or error that a separate request would have, and can be cancelled
# separately.
#
# As a rule, nothing waits longer than that turn. Complete uploads of ``SEND_BYTES`` are sent at once, so that
# servers begin while the client continues. Before any other request for a held storage index, all held
# uploads are sent. Requests for storage indexes that are not held have no such effect: a long file among a
# thousand small ones would halve the bundles (measured: a tenth of the servers' time).
#
# While a bundle is unanswered, sending the next one soon gains little, and sending a larger one gains much:
# the fixed cost of a bundle (waking up, TLS, the threads that sync, the response) equals that of eight
# shares, and the client has such costs, too. So while ``BUSY`` bundles are unanswered, uploads are held as
# long as each turn adds more, until another upload of the same length would not fit into the bundle, or
# ``BUSY_SHARES`` shares are held. The first turn that adds nothing sends them. There is no timer.
#
# If a server refuses a bundle (because it was replaced by a server that does not support bundles), it gets no
# bundle until it offers bundles again, and the refused uploads are sent as ordinary requests.

MAX_SHARE_BYTES = 64 * 1024
"""
The largest share that is sent in a bundle: copying such a share costs less than a request. With bundles,
files of 100 kB took client and servers a third less time than with separate requests (measured); twice the
size gained nothing.
"""

SEND_BYTES = 16 * 1024
"""
As soon as the complete uploads have this many bytes (one TLS record), they are sent, even before the turn is
over. A dozen of the smallest files, as many as begin in one turn, do not reach this size: a hundred files are
nine bundles for each server. With a higher limit, servers would wait for the whole turn.
"""

BUSY = 1
"""
While at least this many bundles are unanswered, uploads are held longer. With a value of three, which ten
servers rarely reach, many small files made bundles of 14 shares; with one, bundles have 42 shares, and all
processors together have a fifth less to do (measured).
"""
BUSY_SHARES = 96
"""
The maximum number of shares that are held while bundles are unanswered. With 64 shares, which is what servers
sync together, a thirtieth fewer of 10,000 small files were stored per second than with 96 (measured, 11
rounds); with 128 shares no more files were stored, but with less CPU time.
"""


class OrdinaryRequests(NamedTuple):
    """
    The ordinary requests of a server.

    Attributes:
        allocate, write: like the methods of ``StorageServer``; the last argument of ``write`` is whether an
            earlier request may have carried out the write.
        store: allocates and writes whole shares with separate requests, which are sent at the same time; its
            last argument is the same as that of ``write``.
        was_completed: finds out whether a share is present, after the response to a repeated write said that
            there is no such upload.
    """

    allocate: Callable[[bytes, Numbers, int, UploadSecrets], Deferred[Allocation]]
    write: Callable[[bytes, int, int, Pieces, bytes, bool], Deferred[WriteAnswer]]
    store: Callable[[BundledUpload, bool], Deferred[Stored]]
    was_completed: Callable[[bytes, int], Deferred[WriteAnswer]]


class GbsBundles:
    """
    The uploads that are held for one server, and the uploads sent in bundles.

    Args:
        send: sends a request on the uploads' connection.
        ordinary: sends ordinary requests for uploads that cannot be sent in a bundle after all.
        max_bytes: size of the largest bundle that the server has announced; 0: none.

    Attributes:
        max_bytes: size of the largest bundle that the server accepts; 0 if it has not offered bundles.
    """

    def __init__(
        self,
        clock: IReactorTime,
        requests: GbsRequests,
        answers: GbsAnswers,
        send: Callable[[RawRequest], Deferred[Answered]],
        ordinary: OrdinaryRequests,
        max_bytes: int = 0,
    ) -> None:
        self.max_bytes = max_bytes
        self._requests = requests
        self._answers = answers
        self._send = send
        self._ordinary = ordinary
        self._held: dict[bytes, HeldAllocation | WholeCall] = {}
        self._complete_bytes = self._complete_shares = 0
        self._unanswered = 0
        self._held_before = 0  # number of held uploads at the end of the last turn
        self._turn = Timer(clock, self._turn_over)

    def __repr__(self) -> str:
        return f"<GbsBundles of up to {self.max_bytes} bytes, {len(self._held)} held>"

    def heard(self, answer: RawResponse) -> None:
        """Check whether a response (to an allocation, a version request or a list request) offers bundles."""
        if not self.max_bytes:
            for name, value in answer.header_list:
                if name == gbs_bundles.HEADER and value.isdigit() and len(value) < 10:
                    self.max_bytes = int(value)

    def store(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored] | None:
        """Hold whole shares with their allocation for a bundle; return None if they cannot be held."""
        if not self._may_hold(storage_index, len(shares), share_bytes):
            return None
        upload = BundledUpload(storage_index, secrets, share_bytes, shares.keys(), dict(shares))
        held = self._held[storage_index] = WholeCall(upload, lambda: self._cancelled(held))
        self._turn.set(0)
        self._is_complete(upload)
        return held.result

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation] | None:
        """Hold an allocation for a bundle; return None if it cannot be held."""
        if not self._may_hold(storage_index, len(share_numbers), share_bytes):
            return None
        numbers = frozenset(share_numbers)  # the caller's object may change before the turn is over
        upload = BundledUpload(storage_index, secrets, share_bytes, numbers, {})
        held = self._held[storage_index] = HeldAllocation(upload, lambda: self._cancelled(held))
        self._turn.set(0)
        return held.allocation.result

    def _may_hold(self, storage_index: bytes, shares: int, share_bytes: int) -> bool:
        if not (0 < share_bytes <= MAX_SHARE_BYTES and 0 < shares <= gbs_bundles.MAX_SHARES):
            return False
        fits = gbs_bundles.whole_upload_bytes(shares, share_bytes) <= self._limit_bytes
        return fits and storage_index not in self._held

    @property
    def _limit_bytes(self) -> int:
        return min(self.max_bytes, gbs_bundles.MAX_BUNDLE_BYTES)

    def write(
        self, storage_index: bytes, share_number: int, data: Pieces, upload_secret: bytes
    ) -> Deferred[WriteAnswer] | None:
        """Add a write of a whole share to the held allocation; return None if the write cannot be added."""
        held = self._held.get(storage_index)
        if held is None or isinstance(held, WholeCall):
            return None
        upload = held.upload
        if (
            share_number not in upload.share_numbers
            or share_number in upload.shares
            or upload.secrets.upload != upload_secret
            or sum(map(len, data)) != upload.share_bytes
        ):
            return None
        upload.shares[share_number] = b"".join(data)
        write = held.writes[share_number] = UploadPart[WriteAnswer](
            lambda: self._cancelled(held, share_number)
        )
        if held.is_complete:
            self._is_complete(upload)
        return write.result

    def _is_complete(self, upload: BundledUpload) -> None:
        more = gbs_bundles.upload_bytes(upload)
        self._complete_bytes += more
        self._complete_shares += len(upload.shares)
        if self._unanswered < BUSY:
            enough = self._complete_bytes >= SEND_BYTES
        else:
            full = self._complete_bytes + more > self._limit_bytes
            enough = full or self._complete_shares >= BUSY_SHARES
        if enough:
            self._send_held([one for one in self._held.values() if one.is_complete])

    def _turn_over(self) -> None:
        before, self._held_before = self._held_before, len(self._held)
        if self._unanswered >= BUSY and len(self._held) > before:
            self._turn.set(0)
        elif self._held:
            self._send_held(list(self._held.values()))

    def flush(self, storage_index: bytes) -> None:
        """
        Send all held uploads if one of them has this storage index, since another request for the index
        follows.
        """
        if storage_index in self._held:
            self._send_held(list(self._held.values()))

    def give_up(self, reason: Callable[[], Exception]) -> None:
        held, self._held = list(self._held.values()), {}
        self._complete_bytes = self._complete_shares = self._held_before = 0
        self._end_turn_if_empty()
        for one in held:
            one.fail(reason())

    def _send_held(self, chosen: Sequence[HeldAllocation | WholeCall]) -> None:
        for one in chosen:
            del self._held[one.upload.storage_index]
        self._complete_bytes = self._complete_shares = self._held_before = 0
        self._end_turn_if_empty()
        bundled: list[HeldAllocation | WholeCall] = []
        size = shares = numbers = 0
        limit_bytes = self._limit_bytes
        for one in chosen:
            if not (one.upload.shares and self.max_bytes):
                self._send_apart(one)
                continue
            more = gbs_bundles.upload_bytes(one.upload)
            if bundled and (
                size + more > limit_bytes
                or shares + len(one.upload.shares) > gbs_bundles.MAX_SHARES
                or numbers + len(one.upload.share_numbers) > gbs_bundles.MAX_NUMBERS
            ):
                self._send_bundle(bundled)
                bundled, size, shares, numbers = [], 0, 0, 0
            bundled.append(one)
            size += more
            shares += len(one.upload.shares)
            numbers += len(one.upload.share_numbers)
        if bundled:
            self._send_bundle(bundled)

    def _send_bundle(self, held: Sequence[HeldAllocation | WholeCall]) -> None:
        uploads = [one.upload for one in held]
        bundle = SentBundle(held)
        for one in held:
            one.bundle = bundle
        request = bundle.request = self._send(self._requests.bundle(uploads))
        self._unanswered += 1
        request.addBoth(self._ended)
        request.addCallbacks(self._answered, self._failed, (bundle, uploads), {}, (bundle,))

    # Responses.

    def _ended(self, result: Answered | Failure) -> Answered | Failure:
        self._unanswered -= 1
        return result

    def _answered(
        self, answered: Answered, bundle: SentBundle, uploads: Sequence[BundledUpload]
    ) -> None:
        answer, repeated = answered
        held = bundle.take_apart()
        if answer.status != 200:
            self.max_bytes = 0
            for one in held:
                self._send_apart(one, repeated)
            return
        try:
            results = self._answers.bundle(answer, uploads)
        except ServerError as error:
            for one in held:
                one.fail(error)
            return
        for one, result in zip(held, results, strict=True):
            if isinstance(one, WholeCall):
                self._settle_whole(one, result, repeated)
            else:
                self._settle(one, result, repeated)

    def _settle_whole(self, whole: WholeCall, result: BundledAnswer, repeated: bool) -> None:
        allocation = result.allocation
        if isinstance(allocation, int):
            whole.fail(self._answers.refused_allocation(allocation))
            return
        refused = {
            number: status
            for number, status in result.statuses.items()
            if status != 201 and number not in allocation.already_have
        }
        if not refused:
            whole.fire(Stored(allocation))
        elif repeated and 404 in refused.values() and whole.wanted:
            whole.follow(Deferred.fromCoroutine(self._find_out(whole.upload, allocation, refused)))
        else:
            whole.fire(Stored(allocation, self._refusals(whole.upload, refused)))

    def _refusals(
        self, upload: BundledUpload, refused: Mapping[int, int]
    ) -> dict[int, ServerError]:
        return {
            number: self._answers.refused_write(status, number, upload.share_bytes)
            for number, status in refused.items()
        }

    async def _find_out(
        self, upload: BundledUpload, allocation: Allocation, refused: Mapping[int, int]
    ) -> Stored:
        """
        Find out whether shares exist for which the response to a repeated bundle says that there is no
        upload.
        """
        failed = self._refusals(upload, refused)
        for number in [number for number, status in refused.items() if status == 404]:
            try:
                await self._ordinary.was_completed(upload.storage_index, number)
                del failed[number]
            except ServerError as error:  # noqa: PERF203  it is rare that there are several
                failed[number] = error
        return Stored(allocation, failed)

    def _settle(self, held: HeldAllocation, result: BundledAnswer, repeated: bool) -> None:
        allocation = result.allocation
        if isinstance(allocation, int):
            held.fail(self._answers.refused_allocation(allocation))
            return
        held.allocation.fire(allocation)
        for number, write in held.writes.items():
            status = result.statuses[number]
            if status == 201:
                write.fire(WriteAnswer(True))
            elif repeated and status == 404:
                if number in allocation.already_have:
                    write.fire(WriteAnswer(True))  # the first attempt has stored the share
                elif write.wanted:
                    write.follow(self._ordinary.was_completed(held.upload.storage_index, number))
            else:
                write.fail(self._answers.refused_write(status, number, held.upload.share_bytes))

    def _failed(self, failure: Failure, bundle: SentBundle) -> None:
        for one in bundle.take_apart():
            one.fail(failure)

    def _send_apart(self, held: HeldAllocation | WholeCall, repeated: bool = False) -> None:
        """
        Send ordinary requests for the parts of an upload whose callers still wait.

        Args:
            repeated: whether a bundle may have carried out the upload before.
        """
        if not held.wanted:
            return
        upload = held.upload
        if isinstance(held, WholeCall):
            held.follow(self._ordinary.store(upload, repeated))
            return
        index, secrets = upload.storage_index, upload.secrets
        # Allocate even if the caller of ``allocate`` no longer waits: the writes need the allocation.
        held.allocation.follow(
            self._ordinary.allocate(index, upload.share_numbers, upload.share_bytes, secrets)
        )
        for number, write in held.writes.items():
            if write.wanted:
                data = [upload.shares[number]]
                write.follow(self._ordinary.write(index, number, 0, data, secrets.upload, repeated))

    def _cancelled(self, held: HeldAllocation | WholeCall, share_number: int | None = None) -> None:
        """
        Drop a held share, drop a held upload, or cancel a sent bundle, if no caller waits for it any more.
        """
        bundle, storage_index = held.bundle, held.upload.storage_index
        if bundle is None:
            if self._held.get(storage_index) is not held:
                return  # it is being sent or failed now, without its cancelled parts
            if share_number is not None and isinstance(held, HeldAllocation):
                held.upload.shares.pop(share_number, None)
                held.writes.pop(share_number, None)
            if not held.wanted:
                del self._held[storage_index]
                self._end_turn_if_empty()
        elif bundle.request is not None and not any(one.wanted for one in bundle.held):
            bundle.request.cancel()

    def _end_turn_if_empty(self) -> None:
        if not self._held:
            self._turn.stop()


# Reads of one turn of the reactor are held until the turn is over, and are sent together. While a server
# still has to send ``BUSY_BYTES``, another small request gains nothing, and a larger one saves work at both
# ends. Meanwhile reads are held until a bundle is full, or until fewer bytes are unanswered. There is no
# timer.

READ_BYTES = 240 * 1024
"""
The maximum number of bytes that one bundle asks for. Servers that share the client's processors wake up less
often for larger bundles: with 56 KiB, a restore of 1,000 files of 46 kB took a fifth longer (measured).
"""

FIRST_READ_BYTES = 56 * 1024
FAST_ANSWER_S = 1.0
"""
The first bundles ask for at most ``FIRST_READ_BYTES``, and so does a bundle after a response that took more
than ``FAST_ANSWER_S``: no file can be decoded before all of its bundle has arrived, and on a slow link the
servers' responses wait for one another.
"""

BUSY_BYTES = READ_BYTES // 2
"""While this many bytes or more are unanswered, only full bundles are sent."""

OUTSTANDING_BYTES = 2 * READ_BYTES
"""
While at most this many bytes of responses are outstanding, another bundle is sent on the same connection. A
server that supports bundles waits when its transport is full; a server built on Twisted's HTTP drops the
connection.
"""

MAX_SMALL_READ_BYTES = READ_BYTES // 4
"""The longest read that is sent in a bundle: bundles gain nothing for longer shares."""

NOT_TAKEN = (404, 405)
"""HTTP statuses of a server that does not support read bundles, surveys, or releases of leases."""


class _HeldRead:
    """
    A read in a bundle, or waiting for one.

    Attributes:
        result: the Deferred of the caller; None after the caller has cancelled the read.
        alone: the ordinary request for the read; None if there is no such request.
    """

    __slots__ = ("alone", "read", "result")

    def __init__(self, read: BundledRead) -> None:
        self.read = read
        self.result: Deferred[bytes] | None = None
        self.alone: Deferred[None] | None = None


class GbsReadBundles:
    """
    The read bundles of one server.

    Args:
        send: sends a request in no particular order; fails with the contract's errors.
        read_alone: reads the beginning of a share by an ordinary request.
        limit_bytes: returns the maximum number of bytes that the server sends for one bundle.

    Attributes:
        taken: whether read bundles are used: the server has not refused one.
    """

    def __init__(
        self,
        clock: IReactorTime,
        requests: GbsRequests,
        answers: GbsAnswers,
        send: Callable[[RawRequest], Deferred[RawResponse]],
        read_alone: Callable[[bytes, int, int], Deferred[bytes]],
        limit_bytes: Callable[[], int],
    ) -> None:
        self.taken = True
        self._requests = requests
        self._answers = answers
        self._send = send
        self._read_alone = read_alone
        self._limit_bytes = limit_bytes
        self._held: dict[_HeldRead, None] = {}  # in order
        self._most_bytes = FIRST_READ_BYTES
        self._unanswered_bytes = 0
        self._clock = clock
        self._turn = Timer(clock, self._turn_over)

    def read(self, storage_index: bytes, share_number: int, length: int) -> Deferred[bytes]:
        """
        Read the beginning of a share.

        Args:
            length: at most ``MAX_SMALL_READ_BYTES``.

        Returns:
            A Deferred with the results and errors of ``StorageServer.read``.
        """
        held = _HeldRead(BundledRead(storage_index, share_number, length))

        def cancel(_: Deferred[bytes]) -> None:
            held.result = None
            self._held.pop(held, None)
            if held.alone is not None:
                held.alone.cancel()

        result = held.result = Deferred(cancel)
        self._turn.set(0)
        self._held[held] = None
        return result

    def give_up(self, reason: Callable[[], Exception]) -> None:
        """Fail all held reads, each with an error that ``reason`` returns."""
        held, self._held = self._held, {}
        self._turn.stop()
        for each in held:
            _tell(Failure(reason()), each)

    def _turn_over(self) -> None:
        held, self._held = list(self._held), {}
        start, size = 0, 0
        most_bytes = min(self._most_bytes, self._limit_bytes())
        for end, each in enumerate(held):
            length = each.read.length
            if end > start and (size + length > most_bytes or end - start == MAX_READS):
                self._send_bundle(held[start:end], size)
                start, size = end, 0
            size += length
        if held and self._unanswered_bytes < BUSY_BYTES:
            self._send_bundle(held[start:], size)
            start = len(held)
        rest = [each for each in held[start:] if each.result is not None]
        self._held = dict.fromkeys(rest) | self._held

    def _send_bundle(self, held: Sequence[_HeldRead], size: int) -> None:
        self._unanswered_bytes += size
        if len(held) == 1 or not self.taken:
            sent = self._send_alone(held)
        else:
            reads = [each.read for each in held]
            sent = self._send(self._requests.read_bundle(reads)).addCallbacks(
                self._answered, self._failed, callbackArgs=(held,), errbackArgs=(held,)
            )
        sent.addBoth(self._ended, size, self._clock.seconds())

    def _ended(self, _: object, size: int, sent_s: float) -> None:
        self._unanswered_bytes -= size
        if self._clock.seconds() > sent_s + FAST_ANSWER_S:
            self._most_bytes = FIRST_READ_BYTES
        elif 2 * size > self._most_bytes:
            self._most_bytes = min(4 * self._most_bytes, READ_BYTES)
        if self._held and self._unanswered_bytes < BUSY_BYTES:
            self._turn.set(0)

    def _send_alone(self, held: Sequence[_HeldRead]) -> Deferred[None]:
        """Send an ordinary request for each read; fires when all are answered."""
        return DeferredList([self._read(each) for each in held]).addCallback(lambda _: None)

    def _read(self, held: _HeldRead) -> Deferred[None]:
        held.alone = self._read_alone(*held.read).addBoth(_tell, held)
        return held.alone

    def _answered(self, answer: RawResponse, held: Sequence[_HeldRead]) -> Deferred[None] | None:
        if answer.status in NOT_TAKEN:
            self.taken = False
            return self._send_alone([each for each in held if each.result is not None])
        try:
            results = self._answers.bundled_reads(answer, [each.read for each in held])
        except Exception:
            self._failed(Failure(), held)
            return None
        for each, result in zip(held, results, strict=True):
            _tell(result if isinstance(result, bytes) else Failure(result), each)
        return None

    def _failed(self, failure: Failure, held: Sequence[_HeldRead]) -> None:
        for each in held:
            _tell(failure, each)


def _tell(result: bytes | Failure, held: _HeldRead) -> None:
    waiting, held.result = held.result, None
    if waiting is not None:
        waiting.callback(result)
