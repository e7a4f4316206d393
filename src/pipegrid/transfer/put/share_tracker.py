"""The open and ended share uploads and the stored shares of one upload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime

from pipegrid.errors import NoSuchShare, ServerError, ServerTimeout, is_absence
from pipegrid.reactor.deferreds import Wakeup
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.share_assignment import UploadPlan
from pipegrid.transfer.put.share_upload import ShareState, ShareUpload, is_unexplained
from pipegrid.transfer.put.straggler_policy import is_silent
from pipegrid.transfer.results import Progress, ProgressReport

# The share uploads of one put: which are open, which have ended, and why some have failed.
#
# The caller decides how the end of a share upload affects the placement.

_NONE: Mapping[int, Peer] = {}

FORGET_S = 2.0
"""Maximum seconds to wait for servers to abort shares; they drop unfinished shares after half an hour."""


class ActiveShares:
    """
    The share uploads of one put.

    Args:
        silence_s: a server that acknowledges nothing for this many seconds is given up.

    Attributes:
        open: share uploads that have not ended.
        ended: share uploads that have ended; some of their writes may still be unanswered.
        reasons: maps a server's nickname to its failure.
        absent: nicknames of servers that were unreachable, or did not respond in time.
    """

    def __init__(self, plan: UploadPlan[Peer], silence_s: float) -> None:
        self.open: list[ShareUpload] = []
        self.ended: list[ShareUpload] = []
        self.reasons: dict[str, str] = {}
        self.absent: set[str] = set()
        self._plan = plan
        self._forgetting: set[Deferred[None]] = set()
        self._silence_s = silence_s

    def add(self, upload: ShareUpload) -> None:
        """Add a share upload that has begun."""
        self._plan.sending(upload.share_number, upload.peer)
        self.open.append(upload)

    def peer_failed(self, peer: Peer, error: BaseException | None) -> None:
        """Record that a server is gone, and end all share uploads to it."""
        self.reasons[peer.name] = str(error)
        self._note_absence(peer.name, error)
        self._plan.failed(peer)
        for upload in self.open:
            if upload.peer is peer:
                upload.cancel(ShareState.FAILED)

    @property
    def lost_midway(self) -> bool:
        """Whether some server failed after it had taken a part of its share, but not all of it."""
        return any(
            upload.state is ShareState.FAILED and upload.acknowledged_bytes
            for upload in [*self.open, *self.ended]
        )

    def take_ended(self, now: float) -> list[ShareUpload]:
        """
        Return the share uploads that have ended since the last call; give up silent servers first.

        Raise any exception of a share upload that is no server error.
        """
        for upload in self.open:
            upload.resolve_uncertain()
            if is_silent(upload, now, self._silence_s):
                silent = f"{upload.peer.name} was silent for {self._silence_s:g} s"
                self.peer_failed(upload.peer, ServerTimeout(silent))
        ended = [upload for upload in self.open if upload.ended]
        if ended:
            self.open = [upload for upload in self.open if not upload.ended]
            self.ended += ended
        for upload in ended:
            if upload.bug is not None:
                upload.bug.raiseException()
            there = upload.state in (
                ShareState.STORED,
                ShareState.FOUND,
            )
            if not (there or upload.error is None or is_unexplained(upload.state, upload.error)):
                self._note(upload.peer.name, upload.error)
            if upload.is_useless:
                self.abort_share(upload)
        return ended

    def _note(self, server: str, error: ServerError) -> None:
        """Record why a share is not stored; ``NoSuchShare`` does not replace an earlier reason."""
        if isinstance(error, NoSuchShare):
            self.reasons.setdefault(server, str(error))
        else:
            self.reasons[server] = str(error)
        self._note_absence(server, error)

    def _note_absence(self, server: str, error: BaseException | None) -> None:
        if is_absence(error):
            self.absent.add(server)

    def release(self, *, abort: bool = False, keep: Mapping[int, Peer] = _NONE) -> None:
        """
        Cancel everything that is unanswered, so that no callback of this put is called afterwards.

        Args:
            abort: also abort unfinished shares on servers; otherwise a repeated put can resume them.
            keep: the shares that are not aborted; maps a share number to its server.
        """
        unfinished = [upload for upload in self.open if not upload.ended]
        for upload in [*self.open, *self.ended]:
            upload.cancel(ShareState.DROPPED)
            upload.detach()
        if abort:
            for upload in unfinished:
                if keep.get(upload.share_number) is not upload.peer:
                    self.abort_share(upload)

    def abort_share(self, upload: ShareUpload) -> None:
        """Abort the unfinished share of a share upload that has ended."""
        aborted = upload.abort()
        self._forgetting.add(aborted)
        aborted.addBoth(lambda _: self._forgetting.discard(aborted))

    async def wait_for_aborts(self, clock: IReactorTime) -> None:
        """
        Wait a short time until servers have aborted shares.

        When the put fails, its caller may close all connections at once; requests that are not sent by that
        time are lost.
        """
        if self._forgetting:
            over = Wakeup(clock)
            DeferredList(list(self._forgetting)).addCallback(over.fire)
            await over.wait(FORGET_S)


# Where the shares of one upload are: which shares servers had before, which were placed, and how many bytes
# are stored.
#
# Pure: the caller reports responses and ended share uploads; the plan is notified of stored shares.


class StoredShares:
    """
    The stored shares of one upload.

    Args:
        plan: is notified of stored shares.
        share_bytes: size of one share.
        progress: called with acknowledged and total bytes of all shares.
        found: called with the bytes of shares that servers had before this upload, and the total bytes of all
            shares.

    Attributes:
        placed: maps a share number to the server to which this upload has sent the share.
        found: maps a share number to the servers that had the share before this upload.
        progress: reports the acknowledged bytes.
    """

    def __init__(
        self,
        plan: UploadPlan[Peer],
        share_bytes: int,
        progress: Progress | None = None,
        found: Progress | None = None,
    ) -> None:
        self.placed: dict[int, Peer] = {}
        self.found: dict[int, set[Peer]] = {}
        self._plan = plan
        self._share_bytes = share_bytes
        self._found_parts: dict[int, int] = {}
        self.progress = ProgressReport(progress, plan.total_shares * share_bytes)
        self._found_before = ProgressReport(found, plan.total_shares * share_bytes)

    def found_at(
        self, peer: Peer, numbers: frozenset[int], sent_before: frozenset[int] = frozenset()
    ) -> set[int]:
        """
        Record that a server has shares; return those with a valid share number.

        Args:
            sent_before: shares that may come from this upload, so that they do not count as found.
        """
        if not numbers:
            return set()
        there = {n for n in numbers if n < self._plan.total_shares}
        self._plan.found(peer, there)
        for number in there - sent_before:
            if self.placed.get(number) is not peer:
                self.found.setdefault(number, set()).add(peer)
        return there

    def stored(self, peer: Peer, number: int) -> None:
        """Record that a share that this upload sent is complete on the server."""
        self._plan.found(peer, [number])
        if peer not in self.found.get(number, ()):
            self.placed[number] = peer

    def names_placed(self) -> dict[int, str]:
        """Return a dict from share number to the name of the server to which this upload sent the share."""
        return {number: peer.name for number, peer in sorted(self.placed.items())}

    def names_found(self) -> dict[int, list[str]]:
        """Return a dict from share number to the names of the servers that had the share before."""
        return {
            number: sorted(peer.name for peer in peers)
            for number, peers in sorted(self.found.items())
        }

    def report(self, uploads: Sequence[ShareUpload]) -> None:
        """Report the bytes found and the bytes acknowledged, if the put's caller wants these reports."""
        if self._found_before.is_wanted:
            self._found_before.report(self.found_bytes(uploads))
        if self.progress.is_wanted:
            self.progress.report(self.acknowledged_bytes(uploads))

    def found_bytes(self, uploads: Iterable[ShareUpload]) -> int:
        """
        Return how many bytes of all shares were stored before this upload: whole shares, and parts from
        interrupted uploads.
        """
        for upload in uploads:
            number = upload.share_number
            self._found_parts[number] = max(self._found_parts.get(number, 0), upload.found_bytes)
        whole: Mapping[int, int] = dict.fromkeys(self.found, self._share_bytes)
        return sum({**self._found_parts, **whole}.values())

    def acknowledged_bytes(self, uploads: Iterable[ShareUpload]) -> int:
        """
        Return how many bytes of all shares are stored now: complete shares, and acknowledged bytes that were
        not lost.
        """
        done = dict.fromkeys(self._plan.stored, self._share_bytes)
        for (
            upload
        ) in uploads:  # two uploads may have the same share, and one may have sent a part twice
            number = upload.share_number
            done[number] = max(
                done.get(number, 0), min(upload.acknowledged_bytes, self._share_bytes)
            )
        return sum(done.values())
