"""
Making a group of complete shares durable and visible: what is done, in which order.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Literal, Protocol

from pipegrid.disk import files as disk
from pipegrid.disk.atomic_write import sync_directory
from pipegrid.errors import NoSuchShare, PipegridError

Policy = Literal["none", "batch", "strict"]


class Committable(Protocol):
    """A complete share that is not visible yet; ``storage.uploads.incoming_share.IncomingShare`` is one."""

    share_bytes: int
    opened: int
    resumed: bool
    gone: bool

    @property
    def device(self) -> int:
        """The number of the file system that it is on."""

    @property
    def descriptor(self) -> int:
        """The number of its open file, by which its file system is found."""

    def sync(self) -> None:
        """Make its own bytes durable."""

    def publish(self) -> tuple[str, ...]:
        """Rename it into place; returns the directories that changed."""

    def discard(self) -> None:
        """Remove the file, and give back what was promised of the disk."""


class Disk:
    """The calls that make things durable; tests record them."""

    @property
    def has_one_call(self) -> bool:
        """Whether one call makes all durable that a file system was given before."""
        return self._syncfs is not None

    @cached_property
    def _syncfs(self) -> Callable[[int], None] | None:
        return load_syncfs()

    def load(self) -> None:
        """Load what it takes now, rather than when there is something to sync: that is two milliseconds."""
        self._syncfs  # noqa: B018

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
        _on_each({device: name for name, device in directories.items()}.values(), self._syncfs)

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


CommitOutcome = PipegridError | None
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
        self._outcomes: dict[Committable, CommitOutcome] = {}
        self._changed: dict[str, int] = {}

    @property
    def outcomes(self) -> list[CommitOutcome]:
        """What became of each share, in order; complete when all steps are done."""
        return [self._outcomes[share] for share in self._shares]

    def sync_data(self, before: Commit | None = None) -> None:
        """
        Make the bytes of all shares durable. Those that were given up meanwhile are left out.

        Args:
            before: a group that was published, whose ``sync_names`` this is as well: for groups one behind
                the other, none of which is in a hurry, half of the calls do.
        """
        lost = NoSuchShare("the upload was discarded before it was durable; begin it again")
        self._outcomes = {share: lost for share in self._shares if share.gone}
        shares = self._going_on()
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
        except OSError as error:
            for share in shares:
                share.discard()
            what = "make shares durable, so their uploads were discarded and must begin again"
            for share in shares:
                self._outcomes[share] = disk.disk_error(error, what)
            if before is not None:
                before._blame(error)

    def _covers(self, before: Commit, shares: Sequence[Committable]) -> bool:
        """Return whether one call for the data of shares makes the names of a group durable, too."""
        return (
            self._policy == "batch"
            and self._disk.has_one_call
            and {share.device for share in shares}.issuperset(before._changed.values())
        )

    def publish(self) -> None:
        """Rename them into their places."""
        for share in self._going_on():
            self._outcomes[share] = self._publish(share)

    def sync_names(self) -> None:
        """Make the renames durable; where the disk cannot, the outcomes of the shares become errors."""
        if self._policy == "none" or not self._changed:
            return
        try:
            if self._policy == "strict":
                self._disk.sync_directories(self._changed)
            else:
                self._disk.sync_names(self._changed)
        except OSError as error:
            self._blame(error)

    def _blame(self, error: OSError) -> None:
        """They are whole and visible, but the next power cut may take them: so nobody says "stored"."""
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

    def _going_on(self) -> list[Committable]:
        return [share for share in self._shares if share not in self._outcomes]


def commit_group(
    shares: Sequence[Committable], policy: Policy, disk_calls: Disk
) -> list[CommitOutcome]:
    """Make the shares durable and visible, in this thread; returns one outcome for each."""
    commit = Commit(shares, policy, disk_calls)
    commit.sync_data()
    commit.publish()
    commit.sync_names()
    return commit.outcomes
