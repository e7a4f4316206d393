"""
The upload loop of a file that needs more than one request per server: it collects events, decides what to do,
and does it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from twisted.internet.defer import CancelledError
from twisted.python.failure import Failure

from pipegrid.errors import NoSpace, NoSuchShare, ServerError, UnhappyError, WrongSecret
from pipegrid.reactor.deferreds import Wakeup
from pipegrid.transfer.failure_messages import PlacementOutcome, not_spread, too_slow
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.put.allocation import AllocationResponse, Allocations, Refusals
from pipegrid.transfer.put.ask_first_policy import FinalByteHold, PlacementHistory
from pipegrid.transfer.put.client_put_state import ASK_S, PutContext
from pipegrid.transfer.put.encode_ahead import Segments
from pipegrid.transfer.put.file_key import KeyedFile, ShareSet, ShareTarget
from pipegrid.transfer.put.share_assignment import UploadPlan
from pipegrid.transfer.put.share_tracker import ActiveShares, StoredShares
from pipegrid.transfer.put.share_upload import ShareState, ShareUpload, is_unexplained
from pipegrid.transfer.put.small_file_upload import Handover, split_call
from pipegrid.transfer.put.straggler_policy import TICK_S, StragglerPolicy
from pipegrid.transfer.results import PutReports, PutResult
from pipegrid.wire.storage_messages import Allocation, UploadSecrets

# Which servers a put asks for existing shares before it sends, and which shares withhold their last byte
# until the servers have responded. ``PlacementHistory`` decides when the answers are worth the wait.


class Asking:
    """
    Finds out where the shares of one file are already stored.

    Args:
        history: what earlier puts of this client have found.
        shares: the shares of the file.
        began_s: when the put began.
        grace_s: see ``FinalByteHold``.

    Attributes:
        first: whether nothing is sent until the servers have responded or have taken too long.
        hold: decides how long the put waits for responses.
    """

    def __init__(
        self,
        history: PlacementHistory,
        plan: UploadPlan[Peer],
        allocations: Allocations,
        shares: ShareSet,
        began_s: float,
        grace_s: float,
    ) -> None:
        self.first = history.asks_first(shares.share_bytes)
        self._history = history
        self._plan = plan
        self._allocations = allocations
        self._shares = shares
        self._guess = plan.first()
        self.hold = FinalByteHold(
            len(set(self._guess.values())), began_s, grace_s, history.must_ask
        )

    def ask(self) -> None:
        """Query servers to which no share was sent yet, if the put must know where shares are."""
        if not self._history.must_ask:
            return
        # Ask up to 2n servers: another client may spread n shares over that many servers, or may have used a
        # smaller grid.
        total = self._plan.total_shares
        for peer in self._plan.ring[0 if self.first else total : 2 * total]:
            self._allocations.ask(peer, frozenset(), self._shares.secrets_for(peer))

    def left_s(self, now_s: float) -> float:
        """Return how many more seconds to wait for responses; 0 or less: wait no longer."""
        return self.hold.left_s(now_s) if self._allocations.waiting else 0.0

    def may_hold_back(self, now_s: float) -> bool:
        """
        Return whether the last byte of some share may have to be withheld now; never for a small file, which
        is sent at once.
        """
        return self._history.holds_back(self._shares.share_bytes, True) and self.left_s(now_s) > 0

    def holds_back(self, exceeds_window: bool) -> bool:
        """Return whether to withhold the last byte of a share; see ``PlacementHistory.holds_back``."""
        return self._history.holds_back(self._shares.share_bytes, exceeds_window)

    def ended(self, found: Mapping[int, Collection[Peer]]) -> None:
        """Record, after a successful put, whether all shares that were found were on the expected servers."""
        self._history.ended(any(self._guess[n] not in peers for n, peers in found.items()))


# The parts of an upload that query servers, send shares and record the results. ``drain`` processes their
# events since its last call: responses to allocations, lists of shares, and share uploads that have ended.
#
# Each event is recorded once: a stored share in ``StoredShares``; a failed, refused or lost share in
# ``UploadPlan``. ``Upload`` decides how to react.


class UploadEvents:
    """
    The parts of one upload that cause events and record them.

    Args:
        began_s: when the upload began.
        changed: called when there is a new event.

    Attributes:
        plan: assigns shares to servers.
        uploads: the active share uploads.
        allocations: allocation requests and their responses.
        refusals: servers that refused shares; asks them for the reason and for their shares.
        asking: queries servers before shares are sent.
        where: records which shares are stored on which servers.
    """

    def __init__(
        self,
        means: PutContext,
        file: KeyedFile,
        began_s: float,
        changed: Callable[[], None],
        reports: PutReports,
    ) -> None:
        geometry, shares, settings = file.geometry, file.shares, means.settings
        self._clock = means.grid.clock
        servers = ring(shares.storage_index, means.grid.takers)
        self.plan: UploadPlan[Peer] = UploadPlan(
            servers, geometry.total_shares, file.happy, geometry.required_shares
        )
        self.uploads = ActiveShares(self.plan, settings.silence_s)
        self.allocations = Allocations(shares, changed)
        self.refusals = Refusals(self._clock, shares, changed, means.full)
        self.asking = Asking(
            means.history, self.plan, self.allocations, shares, began_s, settings.grace_s
        )
        self.where = StoredShares(self.plan, shares.share_bytes, reports.progress, reports.found)
        self._others_uploading = self._aborted = False

    @property
    def contended(self) -> bool:
        """Whether another client seems to be storing the same file."""
        return self._others_uploading or self._aborted or self.refusals.contended

    def drain(self) -> bool:
        """Process all events since the last call; return whether there were any."""
        news = self.take_responses()
        for peer, there in self.refusals.take_lists():
            self.where.found_at(peer, there)
            news = True
        ended = self.uploads.take_ended(self._clock.seconds())
        for upload in ended:
            self._ended(upload)
        return news or bool(ended)

    def take_responses(self) -> bool:
        """Process the responses to allocations; return whether there were any."""
        answers = self.allocations.take_responses()
        if answers:
            self.asking.hold.answered(self._clock.seconds(), len(answers))
        for answer in answers:
            if not isinstance(answer.result, Failure):
                self._allocated(answer.result, answer)
            elif isinstance(answer.result.value, NoSpace):
                self._refused_all(answer, answer.result.value)
            elif answer.result.check(ServerError, CancelledError):
                self.uploads.peer_failed(answer.peer, answer.result.value)
            else:
                answer.result.raiseException()
        return bool(answers)

    def _allocated(self, allocation: Allocation, answer: AllocationResponse) -> None:
        peer = answer.peer
        there = self.where.found_at(peer, allocation.already_have, answer.sent_before)
        for upload in self.uploads.open:
            if upload.peer is peer and upload.share_number in answer.numbers:
                upload.last_activity = self._clock.seconds()
                if upload.share_number in there:
                    upload.close(ShareState.STORED)
                # A share that is not allocated: the server has no space, or has an unfinished upload of it.
                # If that upload is this client's, the writes resume it.
                upload.granted = upload.share_number in allocation.allocated

    def _refused_all(self, answer: AllocationResponse, error: ServerError) -> None:
        """
        Record a server that refuses all shares and gives the reason; shares that are being sent to it are
        refused, too.
        """
        for number in answer.numbers:
            self.refusals.note(answer.peer, number, error)
        for upload in self.uploads.open:
            if upload.peer is answer.peer and upload.share_number in answer.numbers:
                upload.last_activity = self._clock.seconds()
                upload.granted = False

    def _ended(self, upload: ShareUpload) -> None:
        peer, number = upload.peer, upload.share_number
        if upload.state is ShareState.STORED:
            self.where.stored(peer, number)
        elif upload.state is ShareState.LOST:
            # Another client with the same secrets may have aborted the share, for instance after its own put
            # failed.
            self._aborted = self._aborted or isinstance(upload.error, NoSuchShare)
            self.plan.lost(number, peer)
        elif upload.state is ShareState.REFUSED:
            if isinstance(upload.error, WrongSecret):
                self._others_uploading = True
            elif is_unexplained(upload.state, upload.error) or isinstance(upload.error, NoSpace):
                self.refusals.note(peer, number, upload.error)
            self.plan.refused(number, peer)
        elif upload.state is ShareState.FAILED:
            self.plan.failed(peer)


# Putting one file on a grid, usually in one round trip.
#
# Data flows from the source through the encoding pipeline (worker threads) and the share uploads (one per
# share) to the write pipelines (one per server). Allocations and writes are sent together, to the servers of
# the plan's optimistic first placement. Responses are compared with the plan when they arrive, and only a
# difference costs another round trip. A share that is reassigned late starts at the current segment. The
# segments that it missed, and those lost with a connection, are encoded again from the source; they are never
# kept in memory.
#
# An upload does not wait for the slowest server without need: a share upload delays the others by at most the
# grace (``UploadSettings``). When this time has passed, the share upload is dropped if happiness holds
# without its share.

_NONE: Mapping[int, Peer] = {}


class Upload:
    """
    The upload of one encoded file (not of a literal one).

    Args:
        begun: the state of a put that ``put_whole`` began but did not finish; ``put_whole`` has already
            reported the cap.

    If another client stores the same shares at the same time (``contended``), a retry finds these shares.
    """

    def __init__(
        self, means: PutContext, file: KeyedFile, reports: PutReports, begun: Handover | None
    ) -> None:
        clock = self._clock = means.grid.clock
        self._means = means
        self._file = file
        self._cap_known = reports.cap_known if begun is None else None
        self._traffic = reports.traffic
        self._changed = Wakeup(clock)
        self._uneventful = 0  # number of stored shares that will not wake the loop
        self._begun = begun
        self._started = clock.seconds() if begun is None else begun.started
        events = UploadEvents(means, file, self._started, self._changed.fire, reports)
        self._plan, self._uploads, self._where = events.plan, events.uploads, events.where
        self._allocations, self._refusals = events.allocations, events.refusals
        self._asking = events.asking
        self._events = events
        self._segments = Segments(file, means.grid, self._uploads)
        self._pace: StragglerPolicy[ShareUpload] = StragglerPolicy(
            means.settings, self._started, None if begun is None else begun.happy_since
        )
        self._superfluous = False
        self._held: list[ShareUpload] = []  # shares whose last byte is withheld
        self._dropped: set[str] = set()

    @property
    def contended(self) -> bool:
        """Whether another client seems to be storing the same file."""
        return self._events.contended

    async def run(self) -> PutResult:
        """
        Send the file and wait until it is stored.

        Raises:
            UnhappyError: the shares could not be spread over enough servers.
            SourceError: the source could not be read, or changed.
        """
        try:
            await self._store()
        except (CancelledError, GeneratorExit):
            # Unfinished shares stay allocated, so that a repeated put can resume them.
            self._release_all()
            raise
        except BaseException as error:
            # If servers failed midway, a repeated put can resume their shares when the servers are back,
            # provided that the shares are where its first placement expects them.
            resumable = isinstance(error, UnhappyError) and self._uploads.lost_midway
            self._release_all(abort=True, keep=self._plan.first() if resumable else {})
            await self._uploads.wait_for_aborts(self._clock)
            raise
        finally:
            self._segments.close()
        if self._superfluous:
            try:
                # If the caller closed the grid now, unfinished shares would stay on servers.
                await self._uploads.wait_for_aborts(self._clock)
            except BaseException:
                self._release_all()
                raise
        self._release_all()
        self._where.progress.finish()
        self._asking.ended(self._where.found)
        return self._result()

    async def _store(self) -> None:
        """Query servers if needed, send everything, and wait until the file is stored."""
        self._asking.ask()
        if self._asking.first:
            await self._await_first_responses()
        if self._begun is None:
            self._open_uploads(self._plan.opening())
        else:
            self._take_over(self._begun)
        await self._send_all()
        await self._settle()

    def _result(self) -> PutResult:
        return PutResult(
            cap=self._segments.cap,
            size=self._file.geometry.size,
            share_bytes=self._file.shares.share_bytes,
            shares_placed=self._where.names_placed(),
            shares_found=self._where.names_found(),
            happiness=self._plan.happiness(),
            elapsed_s=self._clock.seconds() - self._started,
            dropped=sorted(self._dropped),
            reasons={
                **{name: too_slow(name) for name in self._dropped},
                **self._refusals.explained,
                **self._uploads.reasons,
            },
        )

    async def _await_first_responses(self) -> None:
        """Wait until the queried servers have responded, or have taken too long."""
        self._events.take_responses()
        while (left_s := self._asking.left_s(self._clock.seconds())) > 0:
            await self._changed.wait(max(TICK_S, left_s))
            self._events.take_responses()

    def _take_over(self, begun: Handover) -> None:
        """Continue with the requests that ``put_whole`` has sent, as if this object had sent them."""
        for peer, there in begun.found.items():
            self._where.found_at(peer, there)
        for number, peer in begun.stored.items():
            self._where.stored(peer, number)
        for peer, (numbers, call) in begun.calls.items():
            allocation, writes = split_call(call, numbers)
            secrets = self._file.shares.secrets_for(peer)
            for number, write in writes.items():
                upload = self._new_upload(peer, number, secrets)
                self._uploads.add(upload)
                upload.attach_sent(write, begun.started)
            self._allocations.adopt(peer, frozenset(numbers), allocation)
        self._process_events()

    async def _send_all(self) -> None:
        """
        Send every segment and the trailers; each goes to the share uploads that are open at that moment.
        """
        await self._segments.send_blocks(self._wait_for_space)
        await self._file.check_unchanged(self._means.grid)
        await self._segments.send_trailers()
        if self._cap_known is not None:
            self._cap_known(self._segments.cap)
        if self._allocations.has_responses:
            self._process_events()
        may_hold = self._asking.may_hold_back(self._clock.seconds())
        for upload in self._uploads.open:
            if not upload.resume.missed and upload.resume.has_trailer:
                upload.finish(may_hold and self._asking.holds_back(upload.exceeds_window))
        if may_hold:
            self._held = [upload for upload in self._uploads.open if upload.sender.is_held]

    async def _settle(self) -> None:
        """
        Wait until every share is acknowledged, or until enough shares are acknowledged and the grace is over.
        """
        while True:
            self._process_events()
            if self._held and self._asking.left_s(self._clock.seconds()) <= 0:
                self._send_held()
            late = [
                upload
                for upload in self._uploads.open
                if upload.is_open and not upload.sender.all_sent and not upload.sender.is_held
            ]
            if late:
                await self._segments.send_missed(late, self._wait_for_space)
                continue
            if not self._uploads.open:
                if not self._plan.is_enough and self._refusals.ask():
                    await self._changed.wait(ASK_S)
                    continue
                break
            now = self._clock.seconds()
            wait_s = self._pace.final_wait_s(now, self._uploads.open, self._plan.is_enough)
            if wait_s is None:
                for upload in self._uploads.open:
                    self._drop(upload)
                break
            if self._held:
                wait_s = min(wait_s, self._asking.left_s(now))
            self._uneventful = 0 if self._where.progress.is_wanted else self._until_decision() - 1
            await self._changed.wait(max(TICK_S, wait_s))
            self._uneventful = 0
        if not self._plan.is_enough:
            raise self._unhappy(self._plan.happiness())

    def _send_held(self) -> None:
        """
        Send the withheld last byte of each share that has sent everything else; remember the shares that have
        not.
        """
        for upload in self._held:
            if upload.sender.is_held:
                upload.release()
        self._held = [
            upload for upload in self._held if upload.is_open and not upload.sender.all_sent
        ]

    def _until_decision(self) -> int:
        """Return how many more shares must be stored before the loop must decide again."""
        missing = self._plan.missing
        open_ones = len(self._uploads.open)
        return min(missing, open_ones) if missing > 0 else open_ones

    def _share_stored(self) -> None:
        # If each of ten stored shares woke the loop, this would take a tenth of a small put's time.
        if self._uneventful > 0:
            self._uneventful -= 1
        else:
            self._changed.fire()

    def _unhappy(self, reached: int) -> UnhappyError:
        outcome = PlacementOutcome(
            reached=reached,
            happy=self._file.happy,
            stored=len(self._plan.stored),
            required_shares=self._file.geometry.required_shares,
            reasons=self._uploads.reasons,
            full=self._refusals.explained,
            contended=self.contended,
            absent=len(self._uploads.absent),
        )
        return not_spread(self._file.name, outcome)

    def _open_uploads(self, placement: dict[int, Peer]) -> None:
        by_peer: dict[Peer, set[int]] = {}
        for number, peer in placement.items():
            by_peer.setdefault(peer, set()).add(number)
        for peer, numbers in by_peer.items():
            secrets = self._file.shares.secrets_for(peer)
            for number in sorted(numbers):
                self._uploads.add(self._new_upload(peer, number, secrets))
            self._allocations.ask(peer, frozenset(numbers), secrets)

    def _new_upload(self, peer: Peer, number: int, secrets: UploadSecrets) -> ShareUpload:
        upload = ShareUpload(
            ShareTarget(peer, number, self._file.shares, secrets),
            self._changed.fire,
            self._share_stored,
            self._clock,
            missed=self._segments.gone_by,
            recodable=True,
            turn=(number + 1) / self._file.geometry.total_shares,
        )
        upload.traffic = self._traffic
        return upload

    async def _wait_for_space(self) -> None:
        """Return when every open share upload can accept more; drop share uploads that take too long."""
        while True:
            if self._process_events() or not self._uploads.open:
                self._give_up_if_hopeless()
            wait_s = self._pace.window_wait_s(
                self._clock.seconds(), self._uploads.open, self._can_drop
            )
            if wait_s is None:
                return
            await self._changed.wait(wait_s)
            for upload in self._pace.charge_wait(self._clock.seconds(), self._uploads.open):
                self._drop(upload)

    def _give_up_if_hopeless(self) -> None:
        """
        Raise UnhappyError if too few shares can be stored, so that a large file is not sent for nothing.
        """
        hopeless = not self._plan.will_be_enough()
        if hopeless and not self._allocations.waiting and not self._refusals.ask():
            raise self._unhappy(self._plan.hoped_happiness())

    def _can_drop(self, upload: ShareUpload) -> bool:
        return self._plan.will_be_enough([upload.share_number])

    def _drop(self, upload: ShareUpload) -> None:
        """Drop a share upload, unless happiness needs it."""
        if self._can_drop(upload):
            self._dropped.add(upload.peer.name)
            self._take_back(upload)

    def _take_back(self, upload: ShareUpload) -> None:
        self._plan.dropped(upload.share_number, upload.peer)
        if upload.sender.is_held:
            # Everything but the last byte is sent; cancelling the writes would break the connection.
            upload.close(ShareState.DROPPED)
        else:
            upload.cancel(ShareState.DROPPED)
        self._uploads.abort_share(upload)
        # a share upload whose last byte was withheld may have no pending call, so nothing else may wake the
        # loop
        self._changed.fire()

    def _release_all(self, *, abort: bool = False, keep: Mapping[int, Peer] = _NONE) -> None:
        self._uploads.release(abort=abort, keep=keep)
        self._allocations.cancel()
        self._refusals.cancel()

    def _process_events(self) -> bool:
        """
        Update the plan with all new events, and open the share uploads that the plan wants now.

        Return whether there were any new events.
        """
        news = self._events.drain()
        if news:
            for number in self._plan.superfluous():
                for upload in self._uploads.open:
                    if upload.share_number == number and not upload.sender.all_sent:
                        self._take_back(upload)
                        self._superfluous = True
            self._open_uploads(self._plan.assignments())
        self._where.report(self._uploads.open)
        return news
