"""The shares that one download reads now, each with its stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.decoder import Decoder
from pipegrid.core.spans import Span
from pipegrid.core.ueb import CapCheck
from pipegrid.errors import CorruptionError, NoSuchShare, ServerError, is_absence
from pipegrid.transfer.failure_messages import SearchOutcome, too_few_shares
from pipegrid.transfer.get.hedge_policy import ReadPolicy
from pipegrid.transfer.get.share_search_policy import ShareSearch
from pipegrid.transfer.peers import Peer, TransferContext, ring
from pipegrid.transfer.results import Traffic
from pipegrid.transfer.time_limits import last_activity_s
from pipegrid.transport.interface import StreamConsumer
from pipegrid.wire.storage_messages import ServerIdentity

# Reading one share from one server, for a decoder.
#
# Short spans are requested with ``read``, long spans with one ``stream`` each. A stream is paused while the
# decoder holds more of this share than the limit, so that memory stays bounded and the link stays busy. A
# stream is not paused if the decoder needs its bytes to proceed: bytes without which earlier blocks are
# useless, and bytes of the next segment. (The decoder may hold as many later segments of a share as the limit
# permits when another share fails, and then need this share's earlier segments.)

STREAM_BYTES = 1 << 18
"""Spans of more bytes are streamed: the bytes can be used, and the server paused, while they arrive."""


TakeBytes = Callable[[bytes], bytes]
"""A function that reports arrived bytes and returns them unchanged."""


def report_arrivals(traffic: Traffic, clock: IReactorTime, server: ServerIdentity) -> TakeBytes:
    """
    Return a function that reports the bytes of one request. The first bytes are reported as received since
    the request was sent, later bytes as received at the moment of their arrival.
    """
    asked_s: float | None = clock.seconds()

    def take(data: bytes) -> bytes:
        nonlocal asked_s
        if data:
            now_s = clock.seconds()
            began_s, asked_s = asked_s, None
            traffic(server, now_s if began_s is None else began_s, now_s, len(data))
        return data

    return take


class ShareDownload:
    """
    Reads the bytes of one share from one server for the decoder.

    Args:
        ahead_bytes: maximum number of bytes of the share that the decoder may hold before the server is
            paused.
        changed: called after every event that may let the download continue.

    Attributes:
        state: ``open``, then ``missing`` (the server has no such share), ``failed`` (the server cannot be
            used) or ``closed``.
        received_bytes: bytes of the share received so far.
        period_bytes: bytes of the share received since the last check for servers that lag.
        error: why the share is missing or has failed.
        bug: an exception that is no server error; the download raises it again.
        watch: returns a function that reports the bytes of the next request; None: arrivals are not reported.
    """

    def __init__(
        self,
        decoder: Decoder,
        peer: Peer,
        share_number: int,
        storage_index: bytes,
        ahead_bytes: int,
        changed: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.share_number = share_number
        self.state = "open"
        self.error: ServerError | None = None
        self.bug: Failure | None = None
        self.watch: Callable[[], TakeBytes] | None = None
        self.received_bytes = 0
        self.period_bytes = 0
        self._decoder = decoder
        self._storage_index = storage_index
        self._ahead_bytes = ahead_bytes
        self.changed = changed
        self._calls: set[Deferred[object]] = set()
        self._streams: set[_SpanConsumer] = set()

    def __repr__(self) -> str:
        return f"<ShareDownload share {self.share_number} from {self.peer.name}: {self.state}>"

    @property
    def waiting(self) -> bool:
        """Whether requested bytes are outstanding."""
        return bool(self._calls)

    @property
    def paused(self) -> bool:
        """
        Whether the server is paused for all outstanding bytes, because the decoder holds enough of this
        share.
        """
        held_back = sum(stream.paused for stream in self._streams)
        return held_back > 0 and held_back == len(self._calls)

    def ask(self, spans: list[Span]) -> None:
        """Request these spans from the server, all at the same time."""
        for span in spans:
            if self.state != "open":
                return
            if span.length > STREAM_BYTES:
                self._stream(span)
            else:
                self._read(span)

    def _read(self, span: Span) -> None:
        call = self.peer.server.read(
            self._storage_index, self.share_number, span.offset, span.length
        )
        if self.watch is not None:
            call.addCallback(self.watch())
        self._track(call.addCallback(self._got_all, span))

    def _got_all(self, data: bytes, span: Span) -> None:
        self.take(span.offset, data)
        if len(data) < span.length and self.state == "open":
            self._decoder.ended(self.share_number, span.offset + len(data))

    def _stream(self, span: Span) -> None:
        if self.watch is None:
            consumer = _SpanConsumer(self, span)
        else:
            consumer = _WatchedConsumer(self, span, self.watch())
        self._streams.add(consumer)
        call = self.peer.server.stream(
            self._storage_index, self.share_number, span.offset, span.length, consumer
        )
        self._track(call.addBoth(self._stream_ended, consumer, span))

    def _stream_ended(
        self, result: int | Failure, consumer: _SpanConsumer, span: Span
    ) -> Failure | None:
        self._streams.discard(consumer)
        if isinstance(result, Failure):
            return result
        if result < span.length and self.state == "open":
            self._decoder.ended(self.share_number, span.offset + result)
        return None

    def _track(self, call: Deferred[object]) -> None:
        self._calls.add(call)
        call.addErrback(self._failed)
        call.addBoth(self._answered, call)

    def _answered(self, result: object, call: Deferred[object]) -> object:
        self._calls.discard(call)
        self.changed()
        return result

    def _failed(self, failure: Failure) -> None:
        if not failure.check(ServerError, CancelledError):
            self.bug = failure
            self.close("failed")
        elif self.state == "open" and isinstance(failure.value, ServerError):
            self.error = failure.value
            self.close("missing" if failure.check(NoSuchShare) else "failed")

    def take(self, offset: int, data: bytes) -> None:
        """Pass bytes to the decoder."""
        if self.state == "open" and data:
            self.received_bytes += len(data)
            self.period_bytes += len(data)
            self._decoder.received(self.share_number, offset, data)

    def balance(self) -> None:
        """Pause or resume the server, depending on how many bytes of this share the decoder holds."""
        if not self._streams:
            return
        held = self._decoder.held_of(self.share_number)
        geometry = self._decoder.geometry or self._decoder.guessed_geometry
        # If the limit were less than a block, or counted only the hashes, no segment could be decoded.
        limit = max(self._ahead_bytes, 2 * geometry.block_bytes) + self._decoder.metadata_bytes
        for stream in list(self._streams):  # a stream that is resumed may end at once
            stream.balance(held, limit)

    def awaits(self, start: int, end: int) -> bool:
        """Return whether the decoder needs some of the bytes [start, end) to proceed."""
        return self._decoder.awaits(self.share_number, start, end)

    def close(self, state: str = "closed") -> None:
        """Cancel outstanding requests and set ``state`` to this final value."""
        if self.state != "open":
            return
        self.state = state
        for call in list(self._calls):
            call.cancel()


class _SpanConsumer(StreamConsumer):
    """Passes one stream's bytes to the decoder, and pauses and resumes their producer."""

    def __init__(self, reader: ShareDownload, span: Span) -> None:
        self._reader = reader
        self._offset = span.offset
        self._end = span.end
        self._can_wait = span.can_wait
        self.paused = False

    def write(self, data: bytes) -> None:
        offset = self._offset
        self._offset += len(data)
        reader = self._reader
        reader.take(offset, data)
        reader.balance()
        reader.changed()

    def balance(self, held: int, ahead_bytes: int) -> None:
        """
        Pause the producer above ``ahead_bytes``; resume it below half of that, or when the decoder needs
        outstanding bytes.
        """
        if self._producer is None or not self._can_wait:
            return
        if not self.paused:
            if held >= ahead_bytes and not self._is_awaited():
                self.paused = True
                self._producer.pauseProducing()
        elif held <= ahead_bytes // 2 or self._is_awaited():
            self.paused = False
            self._producer.resumeProducing()

    def _is_awaited(self) -> bool:
        return self._reader.awaits(self._offset, self._end)


class _WatchedConsumer(_SpanConsumer):
    """Passes on one stream's bytes, and reports their arrival."""

    def __init__(self, reader: ShareDownload, span: Span, take: TakeBytes) -> None:
        super().__init__(reader, span)
        self._take = take

    def write(self, data: bytes) -> None:
        super().write(self._take(data))


# The shares that a download reads: from which servers, which servers have other copies, and which copies are
# damaged.
#
# The first requests go to the servers where the shares should be. The servers' lists of shares are passed to
# ``ShareSearch``, which names another copy of a share when a reader ends or a copy is damaged. A damaged copy
# is used, for its good blocks, only if no other copy is left.
#
# The download decides how many shares are read, what is requested of each and how long to wait.


class DownloadRequest(NamedTuple):
    """
    What to fetch, and what is known of the file's shares.

    Attributes:
        cap: if this is a verify cap, the ciphertext is delivered.
        start, length: the range of plaintext; it lies within the file.
        avoid: copies that are known to be damaged, each as share number and server.
        holders: maps a share number to the servers that have it, if all are known; in this case no server is
            asked for its list.
        asks_lists: ask for lists along with the first requests, even if earlier downloads have guessed right.
        traffic: gets the bytes of shares that arrive.
    """

    cap: ChkCap | ChkVerifierCap
    start: int
    length: int
    avoid: Collection[tuple[int, Peer]] = ()
    holders: Mapping[int, Sequence[Peer]] | None = None
    asks_lists: bool = False
    traffic: Traffic | None = None


class ShareReaders:
    """
    The shares that one download reads.

    Args:
        means: the clock, and the servers that may be used, in any order.
        policy: is notified of events, and decides how many bytes of each share the decoder may hold.
        changed: called after every event that may let the download continue.

    Attributes:
        open: maps a share number to its reader; readers that have ended are removed.
        homes: maps a share number to the server from which the share was last read.
    """

    def __init__(
        self,
        means: TransferContext,
        request: DownloadRequest,
        decoder: Decoder,
        policy: ReadPolicy,
        changed: Callable[[], None],
    ) -> None:
        self.open: dict[int, ShareDownload] = {}
        self.homes: dict[int, Peer] = {}
        cap, holders = request.cap, request.holders
        self._clock = means.clock
        self._request = request
        self._cap = cap
        self._storage_index = cap.storage_index
        self._decoder = decoder
        self._policy = policy
        self._changed = changed
        self._ring = ring(self._storage_index, means.peers)
        self._search: ShareSearch[Peer] = ShareSearch(self._ring if holders is None else [])
        for number, peers_with_it in (holders or {}).items():
            for peer in peers_with_it:
                self._search.answered(peer, [number])
        self._fit = CapCheck(cap)
        self._held_advice: list[tuple[CorruptionError, int, Peer]] = []
        for number, peer in request.avoid:
            self._search.exclude(number, peer)
        self._questions: dict[Deferred[frozenset[int]], Peer] = {}
        self._answers: list[tuple[Peer, frozenset[int] | Failure]] = []
        self._guessed: set[int] = set()
        self._damaged: list[tuple[int, Peer]] = []
        self._damaged_in_use = False
        self._reported_corrupt = 0
        self._reasons: dict[str, str] = {}
        self._absent: set[str] = (
            set()
        )  # names of servers in ``_reasons`` that were unreachable or silent

    # Questions.

    def first_burst(self, extra_shares: int, needs_lists: bool) -> None:
        """
        Open readers on the servers that should have the first shares, or on known holders if the request
        names them.

        Args:
            extra_shares: number of shares beyond k.
            needs_lists: whether to ask the servers that should have the first shares for their lists of
                shares, too.
        """
        if self._request.holders is not None:
            self.recruit(extra_shares)
            return
        racers = min(self._cap.required_shares + extra_shares, self._cap.total_shares)
        for number, peer in enumerate(self._ring[:racers]):
            if needs_lists:
                self._question(peer)
            if (number, peer) not in self._request.avoid:
                self._add(number, peer)
                self._guessed.add(number)

    def _question(self, peer: Peer) -> None:
        self._search.batches.asked(peer)
        question = peer.server.list_shares(self._storage_index)
        self._questions[question] = peer
        question.addBoth(self._question_answered, question, peer, self._clock.seconds())

    def _question_answered(
        self,
        answer: frozenset[int] | Failure,
        question: Deferred[frozenset[int]],
        peer: Peer,
        asked_s: float,
    ) -> None:
        now = self._clock.seconds()
        self._policy.answered(now, None if isinstance(answer, Failure) else now - asked_s)
        # Only record the response: the download's loop may be in the middle of a step.
        self._questions.pop(question, None)
        self._answers.append((peer, answer))
        self._changed()

    def look_at_responses(self) -> None:
        """Pass the servers' lists of shares to the search, and close readers on servers that failed."""
        answers, self._answers = self._answers, []
        for peer, answer in answers:
            if not isinstance(answer, Failure):
                total_shares = self._cap.total_shares
                self._search.answered(peer, [n for n in answer if n < total_shares])
                continue
            if not answer.check(ServerError, CancelledError):
                answer.raiseException()
            self._reasons.setdefault(peer.name, str(answer.value))
            self._note_absence(peer, answer.value)
            self._search.failed(peer)
            for reader in list(self.open.values()):
                if reader.peer is peer:
                    self.close(reader)

    # Readers.

    def _add(self, number: int, peer: Peer) -> None:
        self._decoder.add_share(number)
        self.homes[number] = peer
        reader = self.open[number] = ShareDownload(
            self._decoder,
            peer,
            number,
            self._storage_index,
            self._policy.ahead_bytes,
            self._changed,
        )
        if (traffic := self._request.traffic) is not None:
            reader.watch = partial(report_arrivals, traffic, self._clock, peer.identity)

    def close(self, reader: ShareDownload) -> None:
        """Stop reading this share; bytes that have arrived remain in use."""
        del self.open[reader.share_number]
        reader.close()
        self._decoder.drop_share(reader.share_number)
        self._policy.race.closed(reader.share_number)

    def look_at_readers(self) -> None:
        """Remove the readers that have ended, and record why."""
        seen_bytes = sum(reader.received_bytes for reader in self.open.values())
        self._policy.seen(self._clock.seconds(), seen_bytes)
        for reader in list(self.open.values()):
            if reader.state == "open":
                continue
            # restart the time limit for the share that replaces this one
            self._policy.timeouts.something_came(self._clock.seconds())
            if reader.bug is not None:
                reader.bug.raiseException()
            if reader.state == "missing":
                self._search.exclude(reader.share_number, reader.peer)
                if reader.share_number in self._guessed:
                    self._policy.misplaced()
            else:
                self._search.failed(reader.peer)
            if reader.error is not None and reader.state != "missing":
                self._reasons[reader.peer.name] = str(reader.error)
                self._note_absence(reader.peer, reader.error)
            self.close(reader)

    def _note_absence(self, peer: Peer, error: BaseException | None) -> None:
        if is_absence(error):
            self._absent.add(peer.name)

    # Damage, and replacements for readers that have ended.

    def name_corruption(self) -> None:
        """
        Add the server's name to each new corruption error, report the damage to the server, and stop using
        bad copies.
        """
        for error in self._decoder.corrupt[self._reported_corrupt :]:
            number = error.share_number
            if number is None:
                continue
            peer = self.homes[number]
            error.server = peer.name
            foreign = self._decoder.foreign_uebs.pop(number, None)
            if foreign is None:
                self._advise(error, number, peer)
            else:
                # Perhaps the cap is wrong: the server is accused only when another share proves that the cap
                # is right.
                self._fit.record(peer, foreign)
                self._held_advice.append((error, number, peer))
            if number in self._decoder.bad_shares:
                self._set_aside(number, peer)
        self._reported_corrupt = len(self._decoder.corrupt)
        if self._held_advice and self._decoder.geometry is not None:
            self._release_advice()  # another share has the UEB that the cap names, so the cap is right

    def _release_advice(self) -> None:
        held, self._held_advice = self._held_advice, []
        for advice in held:
            self._advise(*advice)

    def _advise(self, error: CorruptionError, number: int, peer: Peer) -> None:
        """Report a damaged copy to its server, without waiting for a response."""
        advice = peer.server.advise_corrupt_share(self._storage_index, number, str(error))
        advice.addErrback(lambda failure: failure.trap(ServerError, CancelledError) and None)

    def recruit(self, extra_shares: int) -> None:
        """
        Open readers until enough shares are read, if possible on servers that serve no other share.

        Args:
            extra_shares: number of shares beyond k.

        Raises:
            NotEnoughSharesError: fewer than k good shares could be read.
        """
        needed = self._cap.required_shares + extra_shares
        while len(self.open) < needed or self._lacking:
            busy = {reader.peer for reader in self.open.values()}
            found = self._search.best(self.open, busy)
            if found is None and self._lacking and self._give_up_impaired():
                continue
            if found is None:
                for peer in self._search.batches.next():
                    self._question(peer)
                break
            self._add(*found)
        if self._search.batches.exhausted and self._lacking:
            self._last_resort()

    def _give_up_impaired(self) -> bool:
        """
        Close a share that has bad blocks, if another server has the same share; return whether a share was
        closed.
        """
        impaired = {error.share_number for error in self._decoder.corrupt}
        for number, reader in self.open.items():
            others = [peer for peer in self._search.holders(number) if peer is not reader.peer]
            if number in impaired and others:
                self._set_aside(number, reader.peer)
                return True
        return False

    def _set_aside(self, number: int, peer: Peer) -> None:
        """Stop reading this damaged copy; it is used again only if no better copy is left."""
        self._damaged.append((number, peer))
        self._search.exclude(number, peer)
        if number in self.open:
            self.close(self.open[number])

    @property
    def _lacking(self) -> int:
        """
        Number of further shares that are needed. It is not simply k minus the open shares: an open share may
        be useless, and a closed share complete.
        """
        if len(self.open) >= self._cap.required_shares and not self._decoder.corrupt:
            return 0  # the usual case; this property is read for every piece that arrives
        return self._decoder.lacking

    def _last_resort(self) -> None:
        """Use damaged shares for their good blocks, once; raise if these do not suffice."""
        self._decoder.raise_failure()
        if not self._decoder.has_received_ueb and any(each.waiting for each in self.open.values()):
            return  # the cap's k may be wrong; a UEB that arrives will show whether it is
        found = self._cap.required_shares - self._decoder.lacking
        damaged, self._damaged = self._damaged, []
        if damaged and not self._damaged_in_use:
            self._damaged_in_use = True
            for number, peer in damaged:
                if number not in self.open:
                    self._add(number, peer)
            self._decoder.use_damaged_shares()
            if not self._decoder.lacking:
                return
        mismatch = self._fit.mismatch
        if mismatch is not None and self._decoder.geometry is None:
            raise mismatch
        self._release_advice()
        servers = len(self._ring)
        needed = self._cap.required_shares
        was_any = self._search.has_found_any or bool(self._decoder.corrupt)
        absent = len(self._absent)
        total_shares = self._cap.total_shares
        raise too_few_shares(
            "get",
            SearchOutcome(found, needed, total_shares, servers, self._reasons, was_any, absent),
        )

    # The end.

    def give_up_silent(self, silence_s: float, own_s: float) -> None:
        """
        Give up servers that were silent for ``silence_s`` while they had outstanding requests and were not
        paused.

        Args:
            own_s: when the last bytes of this download arrived, by the clock.
        """
        before_s = self._clock.seconds() - silence_s

        def is_silent(peer: Peer) -> bool:
            return last_activity_s(own_s, peer.last_activity, silence_s) <= before_s

        for reader in list(self.open.values()):
            name = reader.peer.name
            if reader.waiting and not reader.paused and is_silent(reader.peer):
                self._reasons[name] = f"{name} was silent for {silence_s:g} s"
                self._absent.add(name)
                reader.close("failed")
        for question, peer in list(self._questions.items()):
            if is_silent(peer):
                self._reasons[peer.name] = f"{peer.name} was silent for {silence_s:g} s"
                self._absent.add(peer.name)
                question.cancel()

    def release(self) -> None:
        """Cancel everything that is unanswered, so that no callback of this download is called afterwards."""
        for reader in list(self.open.values()):
            reader.close()
        for question in list(self._questions):
            question.cancel()
