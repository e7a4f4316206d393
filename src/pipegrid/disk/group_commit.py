"""
Commits complete shares: with the policy ``batch`` in groups, one sync for several shares; otherwise at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import Deferred, execute, maybeDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.disk.durability import Commit, CommitOutcome, Committable, Disk, Policy, commit_group

P = ParamSpec("P")
T = TypeVar("T")

Ending = CommitOutcome | Failure
"""The outcome of the commit of one share: an error, or None if it is as durable as the policy demands."""

BEGIN_BYTES = 2 << 20
"""
When this many bytes of a share have arrived, the disk starts to write them. Otherwise the disk would start
only after the last byte, and the client would wait for the whole write: an eighth of the time of a put of 100
MB (measured).
"""

MAX_BEGINNING = 16
"""The most threads that make the disk start to write; on a busy disk they block. Syncs write the rest."""

LINGER_S = 0.003
COMPANY_SHARES = 8
"""If this many shares are committed at once, they wait for no others: they already share the disk's calls."""
MAX_GROUP_SHARES = 64
MAX_GROUP_BYTES = 64 << 20


class ThreadRunner(Protocol):
    """The methods of ``reactor.workers`` that group commits use."""

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Run a function in a thread; fires with its result, or fails with its exception."""


class Written(Protocol):
    """A share that is being written, such as ``storage.uploads.incoming_share.IncomingShare``."""

    unsent_bytes: int

    def begin_writing(self) -> None:
        """Make the disk start to write the bytes that have arrived. May block for a while; never fails."""


class Storable(Committable, Protocol):
    """
    A share whose commit may be requested several times.

    Attributes:
        stored: whether the share has been committed.
    """

    stored: bool


class Grouping(Generic[T]):
    """
    Decides when waiting items become a group. Pure: the caller passes the time, in seconds.

    A disk syncs a hundred small files in about the time of one. While one group is committed, the next group
    collects items, and starts afterwards: under load the groups grow until they match the disk. On an idle
    disk the first share waits a few milliseconds for others. Limits close a group early, so that neither the
    number of open files nor the wait for a huge share is unbounded.

    Invariant: while no group runs, the waiting items can be taken either now or at a known time.
    """

    def __init__(
        self,
        linger_s: float = LINGER_S,
        max_items: int = MAX_GROUP_SHARES,
        max_bytes: int = MAX_GROUP_BYTES,
    ) -> None:
        self._linger_s = linger_s
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[T, int]] = deque()
        self._waiting_bytes = 0
        self._since_s = 0.0
        self._hurry = False
        self._running = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, size_bytes: int, now_s: float) -> None:
        """
        Add an item of ``size_bytes``; the first item of a group starts the group's waiting time at ``now_s``.
        """
        if not self._waiting:
            self._since_s = now_s
        self._waiting.append((item, size_bytes))
        self._waiting_bytes += size_bytes

    def hurry(self) -> None:
        """Close the current group without a further wait; it runs as soon as no other group runs."""
        self._hurry = bool(self._waiting)

    def finished(self) -> None:
        """
        Record that the running group has ended; the items that arrived meanwhile form the next group at once.
        """
        self._running = False
        self.hurry()

    def wait_s(self, now_s: float) -> float | None:
        """
        Return after how many seconds ``take`` returns a group if no other event happens; None: not at all.
        """
        if self._running or not self._waiting:
            return None
        full = len(self._waiting) >= self._max_items or self._waiting_bytes >= self._max_bytes
        if self._hurry or full:
            return 0.0
        return max(0.0, self._since_s + self._linger_s - now_s)

    def take(self, now_s: float) -> list[T]:
        """
        Return the items of the group to run now, in the order of arrival; an empty list if no group may run
        now.
        """
        if self.wait_s(now_s) != 0.0:
            return []
        group: list[T] = []
        size_bytes = 0
        while self._waiting and len(group) < self._max_items and size_bytes < self._max_bytes:
            item, item_bytes = self._waiting.popleft()
            group.append(item)
            size_bytes += item_bytes
        self._waiting_bytes -= size_bytes
        self._hurry = False
        self._running = True
        return group


class GroupCommit:
    """
    Commits complete shares as a policy demands. Several share stores may use the same object; their shares
    then form common groups.

    Args:
        workers: run blocking calls in threads. With the policy ``none``, files are renamed in the calling
            thread, since a rename takes less time than using a worker thread.
        clock: measures how long a group waits for more shares.
    """

    def __init__(
        self,
        workers: ThreadRunner,
        clock: IReactorTime,
        policy: Policy = "batch",
        disk_calls: Disk | None = None,
    ) -> None:
        self.policy = policy
        self._workers = workers
        self._clock = clock
        self._disk = disk_calls
        self._grouping = Grouping[Storable]()
        self._waiters: dict[Storable, list[Callable[[Storable, Ending], None]]] = {}
        self._beginning: set[Written] = set()
        self._timer: IDelayedCall | None = None
        self._idle: list[Deferred[None]] = []

    @property
    def syncs_unnamed(self) -> bool:
        """
        Whether it is enough to sync an unnamed file's data before the file gets its name.

        ``syncfs`` guarantees the durability that the policy demands. But ``fsync`` of an unnamed file writes
        nothing to the log of btrfs, with most kernels: the name, synced next, would survive a power cut
        without the bytes.
        """
        if self.policy == "batch":
            return self._disk_calls().has_one_call
        return self.policy == "none"

    def commit(self, share: Storable) -> Deferred[None]:
        """
        Make a complete share durable and visible; fires when it may be acknowledged.

        Cancelling ends only the wait; the share is still committed. A second commit of the same share waits
        for the first commit.

        Raises:
            ServerRefused: the disk failed, and the share may be lost.
            NoSpace: the disk is full.
            NoSuchShare: the upload has been discarded.
        """

        def ended(_: Storable, outcome: Ending) -> None:
            if outcome is None:
                waiting.callback(None)
            else:
                waiting.errback(outcome)

        waiting: Deferred[None] = Deferred(lambda _: self._waiters[share].remove(ended))
        self.commit_each([share], ended)
        return waiting

    def commit_each(
        self, shares: Sequence[Storable], ended: Callable[[Storable, Ending], None]
    ) -> None:
        """
        Commit many shares, as ``commit`` does, without a Deferred for each share.

        A share that another caller has already committed is not committed again.

        Args:
            ended: called with each share and its outcome, perhaps before this method returns.
        """
        new: list[Storable] = []
        for share in shares:
            waiting = self._waiters.get(share)
            if share.stored:
                ended(share, None)
            elif waiting is None:
                self._waiters[share] = [ended]
                new.append(share)
            else:
                waiting.append(ended)
        if self.policy == "batch":
            now_s = self._clock.seconds()
            for share in new:
                self._grouping.add(share, share.share_bytes, now_s)
            if len(new) >= COMPANY_SHARES:
                self._grouping.hurry()
            self._advance()
        elif self.policy == "strict":
            for share in new:
                self._run([share])
        else:
            self._settle(new, commit_group(new, "none", self._disk_calls()))

    def written(self, share: Written) -> None:
        """
        Handle that more bytes of a share have arrived: after each ``BEGIN_BYTES``, make the disk start to
        write them.

        Does nothing with the policy ``none``, or while ``MAX_BEGINNING`` threads already do so.
        """
        if share.unsent_bytes < BEGIN_BYTES or self.policy == "none":
            return
        if share in self._beginning or len(self._beginning) >= MAX_BEGINNING:
            return
        share.unsent_bytes = 0
        self._beginning.add(share)
        began = self._workers.run(share.begin_writing)
        began.addBoth(lambda _: self._beginning.discard(share))

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """
        Call a function that syncs the data it writes: in a worker thread, or in this thread if the policy is
        ``none``.
        """
        if self.policy == "none":
            return execute(function, *args, **kwargs)
        return self._workers.run(function, *args, **kwargs)

    def flush(self) -> Deferred[None]:
        """Close the current group; fires when all commits have ended, with or without success."""
        waiting: Deferred[None] = Deferred(lambda _: self._idle.remove(waiting))
        self._idle.append(waiting)
        self._grouping.hurry()
        self._advance()
        self._look_idle()
        return waiting

    def _disk_calls(self) -> Disk:
        if self._disk is None:
            self._disk = Disk()
        return self._disk

    def _advance(self) -> None:
        now_s = self._clock.seconds()
        group = self._grouping.take(now_s)
        if group:
            self._run(group)
            return
        wait_s = self._grouping.wait_s(now_s)
        if wait_s is not None and self._timer is None:
            self._timer = self._clock.callLater(wait_s, self._lingered)

    def _lingered(self) -> None:
        self._timer = None
        self._advance()

    def _run(self, group: list[Storable]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        commit = Commit(group, self.policy, self._disk_calls())
        # A stopped reactor may have stopped the worker threads: then the shares of this group must fail.
        done: Deferred[Any] = maybeDeferred(self._workers.run, commit.sync_data)
        done.addCallback(lambda _: commit.publish())
        done.addCallback(lambda _: self._workers.run(commit.sync_names))
        done.addCallback(lambda _: commit.outcomes)
        done.addBoth(self._finished, group)

    def _finished(self, result: list[CommitOutcome] | Failure, group: list[Storable]) -> None:
        if self.policy == "batch":
            self._grouping.finished()
        self._settle(group, result)
        self._advance()
        self._look_idle()

    def _settle(self, group: Sequence[Storable], result: list[CommitOutcome] | Failure) -> None:
        outcomes: Sequence[Ending] = (
            [result] * len(group) if isinstance(result, Failure) else result
        )
        for share, outcome in zip(group, outcomes, strict=True):
            share.stored = outcome is None
            for ended in self._waiters.pop(share):
                ended(share, outcome)

    def _look_idle(self) -> None:
        if not self._waiters:
            idle, self._idle = self._idle, []
            for waiting in idle:
                waiting.callback(None)
