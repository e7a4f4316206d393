"""
When a complete share becomes visible, and what has to be on the disk before that is acknowledged.

========  ====================================================================  ========================
policy    a share is acknowledged after                                         what a power cut may take
========  ====================================================================  ========================
none      its rename                                                            what the kernel still had
batch     its group's data is synced, all are renamed, the renames are synced   nothing acknowledged
strict    its own ``fsync``, its rename, ``fsync`` of its directories           nothing acknowledged
========  ====================================================================  ========================

**Order.** Data before name, name before word: a share is renamed only after its bytes are durable, so a
name never stands for bytes that were lost; it is acknowledged only after the rename is. A process killed in
between leaves files in ``incoming``, or shares that are complete though nobody was told.

**Threads.** What waits for the disk to write runs in a thread, and the renames in between in the caller's: a
rename takes some microseconds, less than fighting for the interpreter's lock over each of a hundred
(measured: a fifth of what a small share costs).

**Groups.** A disk takes about as long to sync a hundred small files as one, so ``batch`` commits in groups.
While one is being committed the next one gathers, and starts when it has finished: under load the groups grow
by themselves until they match the disk. An idle disk lets the first share wait a few milliseconds for
company. Size bounds close a group early, so that neither open files nor the wait for one huge share grow
without end.

**One call for all.** A group's data is synced by ``syncfs``, and so are its renames: one ``fsync`` of
the last directory would do where one journal orders everything (ext4, XFS), but not elsewhere (btrfs logs
directory by directory); the second ``syncfs`` costs the same (measured on ext4, 1000 files in groups of 100:
0.08 to 0.11 s either way, against 0.16 to 0.41 s for an ``fsync`` of every directory) and is right
everywhere. A share and the directories that name it are on one device, since a rename cannot cross to
another; so each device is synced once, whatever directories changed. It also writes other programs' data;
who minds that takes ``strict``. Where it is missing, or does
not report errors (Linux before 5.8), every file and every directory gets its own ``fsync``.

**Failures.** After a failed sync the kernel calls the lost pages clean, and a second sync would succeed for
nothing. So the uploads of that group are discarded, and their writers are told to send them again. An error
reaches only descriptors that were open when it happened: ``syncfs`` is therefore called on the descriptor of
the group that was opened first, and a resumed upload, whose first bytes went through an older one, gets an
``fsync`` besides.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import Deferred, execute
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import NoSuchShare, PipegridError
from pipegrid.storage import disk

P = ParamSpec("P")
T = TypeVar("T")

Policy = Literal["none", "batch", "strict"]

LINGER_S = 0.003
MAX_GROUP_SHARES = 64
MAX_GROUP_BYTES = 64 << 20


class Workers(Protocol):
    """As much of ``flow.workers`` as is needed here."""

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Fire with what the function returns, or fail with what it raises."""


class Committable(Protocol):
    """A complete share that is not visible yet; ``storage.uploads.Upload`` is one."""

    share_bytes: int
    opened: int
    resumed: bool
    gone: bool

    @property
    def device(self) -> int:
        """The number of the file system that it is on."""

    @property
    def descriptor(self) -> int:
        """Its open file."""

    def sync(self) -> None:
        """Make its own bytes durable."""

    def publish(self) -> tuple[str, ...]:
        """Rename it into place; returns the directories that changed."""

    def discard(self) -> None:
        """Remove it."""


class Disk:
    """The calls that make things durable; tests record them."""

    @cached_property
    def _syncfs(self) -> Callable[[int], None] | None:
        return load_syncfs()

    def sync_data(self, shares: Sequence[Committable]) -> None:
        """Make the bytes of all the shares durable."""
        if self._syncfs is None:
            for share in shares:
                share.sync()
            return
        first_opened: dict[int, Committable] = {}
        for share in sorted(shares, key=lambda share: share.opened):
            with suppress(NoSuchShare):  # given up at this very moment
                first_opened.setdefault(share.device, share)
        for share in first_opened.values():
            self._syncfs(share.descriptor)
        for share in shares:
            if share.resumed:
                share.sync()

    def sync_names(self, directories: Mapping[str, int]) -> None:
        """
        Make all changes of names in these directories durable, with one call where that works.

        Args:
            directories: each with its device.
        """
        if self._syncfs is None:
            self.sync_directories(directories)
            return
        for directory in {device: name for name, device in directories.items()}.values():
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._syncfs(fd)
            finally:
                os.close(fd)

    def sync_directories(self, directories: Iterable[str]) -> None:
        """Make the names in each of these directories durable, one by one."""
        for directory in dict.fromkeys(directories):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def load_syncfs() -> Callable[[int], None] | None:
    """Return a function that syncs the file system of a descriptor, or None if it cannot be trusted."""
    system, _, release = os.uname()[:3]
    numbers = [int(part) if part.isdigit() else 0 for part in release.split(".")[:2]]
    if system != "Linux" or numbers < [5, 8]:
        return None
    import ctypes  # costs a millisecond that most commands need not spend

    try:
        function = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None

    def syncfs(fd: int) -> None:
        if function(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return syncfs


Outcome = PipegridError | None
"""What became of one share of a group: None if it is as durable as the policy demands."""


class Commit:
    """
    Makes one group of shares durable and visible, in three steps to be called in their order.

    The outer two wait for the disk and belong in a thread, ``publish`` in the thread that uses the store.
    """

    def __init__(self, shares: Sequence[Committable], policy: Policy, disk_calls: Disk) -> None:
        self._shares = shares
        self._policy = policy
        self._disk = disk_calls
        self._outcomes: dict[Committable, Outcome] = {}
        self._changed: dict[str, int] = {}

    @property
    def outcomes(self) -> list[Outcome]:
        """What became of each share, in order; complete when all steps are done."""
        return [self._outcomes[share] for share in self._shares]

    def sync_data(self) -> None:
        """Make the bytes of all shares durable. Those that were given up meanwhile are left out."""
        lost = NoSuchShare("the upload was given up before it was durable; begin it anew")
        self._outcomes = {share: lost for share in self._shares if share.gone}
        shares = self._going_on()
        if self._policy == "none" or not shares:
            return
        try:
            if self._policy == "strict":
                for share in shares:
                    share.sync()
            else:
                self._disk.sync_data(shares)
        except OSError as error:
            for share in shares:
                share.discard()
            what = "make shares durable, so their uploads were discarded and must begin anew"
            for share in shares:
                self._outcomes[share] = disk.disk_error(error, what)

    def publish(self) -> None:
        """Rename them into their places."""
        for share in self._going_on():
            self._outcomes[share] = self._publish(share)

    def sync_names(self) -> None:
        """Make the renames durable."""
        if self._policy == "none" or not self._changed:
            return
        try:
            if self._policy == "strict":
                self._disk.sync_directories(self._changed)
            else:
                self._disk.sync_names(self._changed)
        except OSError as error:
            # They are whole and visible, but the next power cut may take them: so nobody says "stored".
            what = "make the names of shares durable"
            for share, outcome in self._outcomes.items():
                self._outcomes[share] = outcome or disk.disk_error(error, what)

    def _publish(self, share: Committable) -> Outcome:
        try:
            device = share.device
            self._changed.update(dict.fromkeys(share.publish(), device))
        except PipegridError as error:
            return error
        return None

    def _going_on(self) -> list[Committable]:
        return [share for share in self._shares if share not in self._outcomes]


def commit_group(shares: Sequence[Committable], policy: Policy, disk_calls: Disk) -> list[Outcome]:
    """Make the shares durable and visible, in this thread; returns one outcome for each."""
    commit = Commit(shares, policy, disk_calls)
    commit.sync_data()
    commit.publish()
    commit.sync_names()
    return commit.outcomes


class Grouping(Generic[T]):
    """
    Decides when waiting things become a group. Pure: it is told the time, in seconds.

    Invariant: while nothing runs, whatever waits either may be taken now or has a time when it may.
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
        """Return how many wait."""
        return len(self._waiting)

    def add(self, item: T, size_bytes: int, now_s: float) -> None:
        """Let one more wait."""
        if not self._waiting:
            self._since_s = now_s
        self._waiting.append((item, size_bytes))
        self._waiting_bytes += size_bytes

    def hurry(self) -> None:
        """Close the group that gathers now, as soon as nothing runs."""
        self._hurry = bool(self._waiting)

    def finished(self) -> None:
        """The group that ran has come to its end; who waited for it waits no longer."""
        self._running = False
        self.hurry()

    def wait_s(self, now_s: float) -> float | None:
        """Return how long until ``take`` gives something without further events; None for never."""
        if self._running or not self._waiting:
            return None
        full = len(self._waiting) >= self._max_items or self._waiting_bytes >= self._max_bytes
        if self._hurry or full:
            return 0.0
        return max(0.0, self._since_s + self._linger_s - now_s)

    def take(self, now_s: float) -> list[T]:
        """Return the group to run now, in the order of arrival; nothing if it is not yet time."""
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


class Durability:
    """
    Commits complete shares as a policy demands. Several stores may share one, if their loads come together.

    Args:
        workers: where blocking calls run; ``none`` renames at once, in the calling thread, since
            one rename takes less than the way to a thread and back.
        clock: for the wait for company.
    """

    def __init__(
        self,
        workers: Workers,
        clock: IReactorTime,
        policy: Policy = "batch",
        disk_calls: Disk | None = None,
        grouping: Grouping[Committable] | None = None,
    ) -> None:
        self.policy = policy
        self._workers = workers
        self._clock = clock
        self._disk = disk_calls
        self._grouping = Grouping[Committable]() if grouping is None else grouping
        self._waiters: dict[Committable, list[Deferred[None]]] = {}
        self._timer: IDelayedCall | None = None
        self._idle: list[Deferred[None]] = []

    def commit(self, share: Committable) -> Deferred[None]:
        """
        Make a complete share durable and visible; fires when that may be acknowledged.

        Cancelling it gives up waiting; the share is committed all the same. Committing a share that
        is being committed only waits for it, too.

        Raises:
            ServerRefused: the disk failed, and the share is not to be counted on.
            NoSpace: the disk turned out to be full.
            NoSuchShare: the upload is gone.
        """
        waiting: Deferred[None] = Deferred(lambda d: self._waiters_of(share).remove(d))
        if share in self._waiters:
            self._waiters[share].append(waiting)
            return waiting
        self._waiters[share] = [waiting]
        if self.policy == "batch":
            self._grouping.add(share, share.share_bytes, self._clock.seconds())
            self._advance()
        elif self.policy == "strict":
            self._run([share])
        else:
            self._settle([share], commit_group([share], "none", self._disk_calls()))
        return waiting

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call a function that syncs what it writes, in a thread; here and now if nothing is synced."""
        if self.policy == "none":
            return execute(function, *args, **kwargs)
        return self._workers.run(function, *args, **kwargs)

    def flush(self) -> Deferred[None]:
        """Close the group that gathers; fires when everything is committed or has failed."""
        waiting: Deferred[None] = Deferred(self._idle_remove)
        self._idle.append(waiting)
        self._grouping.hurry()
        self._advance()
        self._look_idle()
        return waiting

    def _waiters_of(self, share: Committable) -> list[Deferred[None]]:
        return self._waiters[share]

    def _idle_remove(self, waiting: Deferred[None]) -> None:
        self._idle.remove(waiting)

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

    def _run(self, group: list[Committable]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        commit = Commit(group, self.policy, self._disk_calls())
        done: Deferred[Any] = self._workers.run(commit.sync_data)
        done.addCallback(lambda _: commit.publish())
        done.addCallback(lambda _: self._workers.run(commit.sync_names))
        done.addCallback(lambda _: commit.outcomes)
        done.addBoth(self._finished, group)

    def _finished(self, result: list[Outcome] | Failure, group: list[Committable]) -> None:
        if self.policy == "batch":
            self._grouping.finished()
        self._settle(group, result)
        self._advance()
        self._look_idle()

    def _settle(self, group: Sequence[Committable], result: list[Outcome] | Failure) -> None:
        outcomes: Sequence[Any] = [result] * len(group) if isinstance(result, Failure) else result
        for share, outcome in zip(group, outcomes, strict=True):
            for waiting in self._waiters.pop(share):
                if outcome is None:
                    waiting.callback(None)
                else:
                    waiting.errback(outcome)

    def _look_idle(self) -> None:
        if not self._waiters:
            idle, self._idle = self._idle, []
            for waiting in idle:
                waiting.callback(None)
