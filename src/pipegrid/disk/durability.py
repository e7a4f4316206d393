"""
Makes a group of complete shares durable and visible, in the order that each durability policy requires.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Literal, Protocol

from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.atomic_write import CANNOT_SYNC, sync_directory
from pipegrid.errors import NoSuchShare, PipegridError

Policy = Literal["none", "batch", "strict"]


class Committable(Protocol):
    """A complete share that is not visible yet, such as ``storage.uploads.incoming_share.IncomingShare``."""

    share_bytes: int
    opened: int
    resumed: bool
    gone: bool

    @property
    def device(self) -> int:
        """The device number of the share's file system."""

    @property
    def descriptor(self) -> int:
        """The descriptor of the share's open file, for ``syncfs`` of its file system."""

    def sync(self) -> None:
        """Make the bytes of this share durable."""

    def publish(self) -> tuple[str, ...]:
        """Rename the share into its place; return the directories that changed."""

    def discard(self) -> None:
        """Remove the share's file, and release the space reserved for it."""


class Disk:
    """The system calls that make files durable; tests record them."""

    @property
    def has_one_call(self) -> bool:
        """Whether ``syncfs`` is available: one call syncs all earlier writes of a file system."""
        return self._syncfs is not None

    @cached_property
    def _syncfs(self) -> Callable[[int], None] | None:
        return load_syncfs()

    def load(self) -> None:
        """Load ``syncfs`` now rather than at the first sync, since loading takes two milliseconds."""
        self._syncfs  # noqa: B018

    def sync_data(self, shares: Sequence[Committable]) -> None:
        """Make the bytes of all the shares durable."""
        if self._syncfs is None:
            for share in shares:
                share.sync()
            return
        first_opened: dict[int, Committable] = {}
        for share in sorted(shares, key=lambda share: share.opened):
            with suppress(NoSuchShare):  # this upload was discarded just now
                first_opened.setdefault(share.device, share)
        rejected = {
            device
            for device, share in first_opened.items()
            if not self._sync_all_of(share.descriptor)
        }
        for share in shares:
            if share.resumed or (not share.gone and share.device in rejected):
                share.sync()

    def sync_names(self, directories: Mapping[str, int]) -> None:
        """
        Make all changes of names in these directories durable, with one ``syncfs`` per file system if
        possible.

        Args:
            directories: each with the number of its device.
        """
        if self.has_one_call:
            one_of_each = {device: name for name, device in directories.items()}
            _on_each(one_of_each.values(), self._sync_all_of)
        if not self.has_one_call:  # ``syncfs`` may have been rejected just now
            self.sync_directories(directories)

    def _sync_all_of(self, fd: int) -> bool:
        """
        Sync a file system; return False if it, or a sandbox, rejects ``syncfs``, which is then not called
        again.
        """
        if self._syncfs is None:
            return False
        try:
            self._syncfs(fd)
        except OSError as error:
            if error.errno not in CANNOT_SYNC:
                raise
            self._syncfs = None
            return False
        return True

    def sync_directories(self, directories: Iterable[str]) -> None:
        """Make the names in each of these directories durable, one by one."""
        _on_each(dict.fromkeys(directories), sync_directory)


def _on_each(directories: Iterable[str], call: Callable[[int], object]) -> None:
    for directory in directories:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            call(fd)
        finally:
            os.close(fd)


def load_syncfs() -> Callable[[int], None] | None:
    """
    Return a function that syncs the file system of a descriptor; None if the system has none, or one that
    reports no errors.
    """
    system, _, release = os.uname()[:3]
    numbers = [int(part) if part.isdigit() else 0 for part in release.split(".")[:2]]
    if system != "Linux" or numbers < [5, 8]:
        return None
    import ctypes  # importing it takes a millisecond, and most commands do not need it

    try:
        function = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None

    def syncfs(fd: int) -> None:
        if function(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return syncfs


CommitOutcome = PipegridError | None
"""The outcome for one share of a group: an error, or None if it is as durable as the policy demands."""


class Commit:
    """
    Makes one group of shares durable and visible, in three steps: ``sync_data``, ``publish``, ``sync_names``.

    ``sync_data`` and ``sync_names`` wait for the disk, so they run in a thread. ``publish`` runs in the
    caller's thread: a rename takes some microseconds, less than acquiring the GIL for each of a hundred
    shares (measured: a fifth of the cost of a small share).

    A share is acknowledged after:

    * ``none``: its rename. A power cut may lose what the kernel still had in memory.
    * ``batch``: the data of its group is synced, all its shares are renamed, and the renames are synced.
    * ``strict``: its own ``fsync``, its rename, and ``fsync`` of its directories.

    With ``batch`` and ``strict``, a share is renamed only after its bytes are durable, and acknowledged only
    after its rename is durable. A process killed between these steps leaves files in ``incoming``, or
    complete shares that were not acknowledged.

    ``syncfs`` syncs the data of a group, and a second ``syncfs`` its renames. One ``fsync`` of the last
    directory is enough where one journal orders everything (ext4, XFS), but not on other file systems (btrfs
    logs each directory separately). The second ``syncfs`` costs no more than such an ``fsync`` (measured on
    ext4, 1000 files in groups of 100: 0.08 to 0.11 s for both calls, against 0.16 to 0.41 s for an ``fsync``
    of every directory). A share and its directories are on one device, since a rename cannot cross devices,
    so each device is synced once. ``syncfs`` also writes other programs' data; ``strict`` avoids that. Where
    ``syncfs`` is missing, or does not report errors (Linux before 5.8), every file and every directory gets
    its own ``fsync``.

    After a failed sync the kernel marks the lost pages as clean, so a second sync would succeed without
    writing them. So the uploads of that group are discarded, and their clients must send them again. The
    kernel reports an error only to descriptors that were open when it happened. So ``syncfs`` is called on
    the descriptor that was opened first. A resumed upload wrote its first bytes through an earlier
    descriptor, so it also gets an ``fsync``.
    """

    def __init__(self, shares: Sequence[Committable], policy: Policy, disk_calls: Disk) -> None:
        self._shares = shares
        self._policy = policy
        self._disk = disk_calls
        self._outcomes: dict[Committable, CommitOutcome] = {}
        self._changed: dict[str, int] = {}

    @property
    def outcomes(self) -> list[CommitOutcome]:
        """The outcome for each share, in order; available after all three steps."""
        return [self._outcomes[share] for share in self._shares]

    def sync_data(self, before: Commit | None = None) -> None:
        """
        Make the bytes of all shares durable, except shares whose upload was discarded meanwhile. If the disk
        fails, discard the shares.

        Args:
            before: the preceding group, already published; this call syncs its names, too. For consecutive
                groups that are not urgent, this halves the number of ``syncfs`` calls.
        """
        lost = NoSuchShare("the upload was discarded before it was durable; begin it again")
        self._outcomes = {share: lost for share in self._shares if share.gone}
        shares = self._remaining()
        if before is not None and not self._covers(before, shares):
            before.sync_names()
            before = None
        if self._policy == "none" or not shares:
            return
        try:
            if self._policy == "strict":
                for share in shares:
                    share.sync()
            else:
                self._disk.sync_data(shares)
                if before is not None and not self._disk.has_one_call:
                    before.sync_names()
        except OSError as error:
            for share in shares:
                share.discard()
            what = "make shares durable, so their uploads were discarded and must begin again"
            for share in shares:
                self._outcomes[share] = disk.disk_error(error, what)
            if before is not None:
                before._mark_not_durable(error)

    def _covers(self, before: Commit, shares: Sequence[Committable]) -> bool:
        """
        Return whether one ``syncfs`` for the data of ``shares`` also makes the names of the group ``before``
        durable.
        """
        return (
            self._policy == "batch"
            and self._disk.has_one_call
            and {share.device for share in shares}.issuperset(before._changed.values())
        )

    def publish(self) -> None:
        """Rename the shares into their places."""
        for share in self._remaining():
            self._outcomes[share] = self._publish(share)

    def sync_names(self) -> None:
        """Make the renames durable; if the disk fails, the outcomes of the shares become errors."""
        if self._policy == "none" or not self._changed:
            return
        try:
            if self._policy == "strict":
                self._disk.sync_directories(self._changed)
            else:
                self._disk.sync_names(self._changed)
        except OSError as error:
            self._mark_not_durable(error)

    def _mark_not_durable(self, error: OSError) -> None:
        """
        Change the outcome of each share that is visible but not durable to an error, so that it is not
        acknowledged.
        """
        what = "make the names of shares durable"
        for share, outcome in self._outcomes.items():
            self._outcomes[share] = outcome or disk.disk_error(error, what)

    def _publish(self, share: Committable) -> CommitOutcome:
        try:
            device = share.device
            for name in share.publish():
                self._changed[name] = device
        except PipegridError as error:
            return error
        return None

    def _remaining(self) -> list[Committable]:
        return [share for share in self._shares if share not in self._outcomes]


def commit_group(
    shares: Sequence[Committable], policy: Policy, disk_calls: Disk
) -> list[CommitOutcome]:
    """Make the shares durable and visible, in this thread; return one outcome for each share."""
    commit = Commit(shares, policy, disk_calls)
    commit.sync_data()
    commit.publish()
    commit.sync_names()
    return commit.outcomes
