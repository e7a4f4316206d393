"""Storage of the files that the Twisted driver receives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timezone
from hashlib import new as new_hash
from itertools import count
from time import time
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.disk import file_system_calls
from pipegrid.disk.durability import Disk, Policy, commit_group
from pipegrid.errors import PipegridError
from pipegrid.http11 import Limits
from pipegrid.mirror.archive_file import ArchiveFile, BadEntry, MirrorError
from pipegrid.mirror.destination import Destination
from pipegrid.reactor.workers import CpuWorkers

# From received bytes to verified files under their final names.
#
# The reactor only collects bytes. One thread hashes, writes, syncs and renames, each time for all files that
# have arrived since the previous group. So groups are larger if the disk is slower, and no file waits for a
# group to become full.
#
# **Order.** A file gets its final name after its bytes are as durable as the policy demands, and counts as
# present after its name is as durable (``disk.durability``). A file with the wrong hash never gets a final
# name.
#
# **Bounds.** While more than ``MAX_HELD_BYTES`` are collected or being stored, nothing is read from the
# mirrors.

STREAM_BYTES = 1 << 20
"""The size from which on a file is hashed and written while it is received, in pieces of this size."""

MAX_HELD_BYTES = 24 << 20
RESUME_BYTES = MAX_HELD_BYTES // 2

MAX_GROUP_FILES = 128
"""The maximum number of files in a group: all of them are open until the group is durable."""

MAX_GROUP_BYTES = 8 << 20


class FileReceiver:
    """
    One file that is being received, in one response of a mirror.

    Attributes:
        size_bytes: how much has been received.
    """

    __slots__ = ("_gathered_bytes", "_sink", "arrival", "is_over", "pieces", "size_bytes")

    def __init__(self, sink: ArchiveSink, wanted: ArchiveFile) -> None:
        self._sink = sink
        self.arrival = StagedFile(sink.destination, wanted, sink.staged)
        self.pieces: list[bytes] = []
        self.size_bytes = 0
        self.is_over = False
        self._gathered_bytes = 0

    def write(self, data: bytes) -> None:
        """Add a received piece of the file."""
        size = len(data)
        self.pieces.append(data)
        self.size_bytes += size
        self._gathered_bytes += size
        self._sink.hold(size)
        if self._gathered_bytes >= STREAM_BYTES:
            self._sink.stream(self.arrival, self.take())

    def take(self) -> list[bytes]:
        """Return the collected pieces, and stop keeping them."""
        pieces, self.pieces = self.pieces, []
        self._gathered_bytes = 0
        return pieces

    def finish(self, ended: Callable[[str | None], None]) -> None:
        """
        Store the file, which is complete.

        Args:
            ended: called with None when the file has its final name; or with a clause that says why it is
                wrong.
        """
        self.is_over = True
        self._sink.finish(self.arrival, self.take(), ended)

    def discard(self) -> None:
        """Drop the file. Does nothing if called again, or after ``finish``."""
        if not self.is_over:
            self.is_over = True
            self._sink.drop(self.arrival, self.take())


class StagedFile:
    """
    A file in ``incoming`` that has no final name yet; a ``disk.durability.Committable``. Only for the sink's
    thread.

    Attributes:
        wrong: a clause that says why it is not the wanted file; None if no fault is known.
    """

    resumed = False
    gone = False
    _openings = count()

    def __init__(self, destination: Destination, wanted: ArchiveFile, staged: bool) -> None:
        self.wanted = wanted
        self._staged = staged
        self.wrong: str | None = None
        self.share_bytes = 0
        self.opened = 0
        self._destination = destination
        self._hasher: Any = None
        self._fd = -1
        self._name = ""

    @property
    def device(self) -> int:
        return self._destination.device

    @property
    def descriptor(self) -> int:
        return self._fd

    def write(self, pieces: list[bytes]) -> None:
        """Hash and write some pieces."""
        self._hash(pieces)
        self._append(pieces)

    def end(self, pieces: list[bytes]) -> bool:
        """
        Hash the last pieces. If the whole file has the wanted hash, write them; otherwise remove the file.
        Return whether it has the hash.
        """
        wanted = self.wanted
        self._hash(pieces)
        if self._hasher.digest() != wanted.digest:
            self.wrong = f"its {wanted.algorithm} is another one"
            self.discard()
            return False
        self._append(pieces)
        self._destination.note(self._fd, wanted)
        return True

    def _hash(self, pieces: list[bytes]) -> None:
        if self._hasher is None:
            self._hasher = new_hash(self.wanted.algorithm)
        for piece in pieces:
            self._hasher.update(piece)

    def _append(self, pieces: list[bytes]) -> None:
        if self._fd < 0:
            self._fd, self._name = self._destination.open_incoming(self.wanted)
            self.opened = next(self._openings)
        if pieces:
            file_system_calls.write_all_pieces(self._fd, pieces, self.share_bytes)
            self.share_bytes += sum(map(len, pieces))

    def sync(self) -> None:
        os.fsync(self._fd)

    def publish(self) -> tuple[str, ...]:
        try:
            directory = self._destination.publish(self._name, self.wanted.path, self._staged)
        except BadEntry:
            self.discard()
            raise
        except OSError as error:
            self.discard()
            raise self._destination.error(error, "hold the files") from error
        os.close(self._fd)
        self._fd = -1
        return (directory,)

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._destination.discard(self._name)


class ArchiveSink:
    """
    Stores the files that mirrors send.

    Args:
        workers: must have only one thread, so that jobs are done in order.
        full: called with True when reading from mirrors must pause, and with False when it may continue.
        broken: called once if the destination accepts no more files.
        noted: called with the size of each received piece.
        staged: whether the files are kept where clients do not see them; see ``Destination.release``.

    Attributes:
        held_bytes: how many bytes are collected or being stored.
    """

    def __init__(
        self,
        destination: Destination,
        workers: CpuWorkers,
        policy: Policy,
        full: Callable[[bool], None],
        broken: Callable[[PipegridError], None],
        noted: Callable[[int], None] | None = None,
        staged: bool = False,
    ) -> None:
        self.destination = destination
        self.held_bytes = 0
        self._workers = workers
        self._policy = policy
        self._full = full
        self._broken = broken
        self._noted = noted
        self.staged = staged
        self._disk = Disk()
        self._is_full = False
        self._error: PipegridError | None = None
        self._ready: list[tuple[StagedFile, list[bytes], int, Callable[[str | None], None]]] = []
        self._busy = False
        self._idle: list[Deferred[None]] = []

    def hold(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        if self._noted is not None:
            self._noted(size_bytes)
        if self.held_bytes > MAX_HELD_BYTES and not self._is_full:
            self._is_full = True
            self._full(True)

    def stream(self, arrival: StagedFile, pieces: list[bytes]) -> None:
        """Hash and write a part of a long file in the thread, after all earlier jobs."""
        size = sum(map(len, pieces))
        done = self._workers.run(arrival.write, pieces)
        done.addErrback(lambda failure: self._fail(failure.value))
        done.addBoth(lambda _: self._release(size))

    def finish(
        self, arrival: StagedFile, pieces: list[bytes], ended: Callable[[str | None], None]
    ) -> None:
        """Store a complete file, after all earlier ones; for ``ended`` see ``FileReceiver.finish``."""
        if self._error is not None:
            self.drop(arrival, pieces)
            return
        self._ready.append((arrival, pieces, sum(map(len, pieces)), ended))
        if not self._busy:
            self._next_group()

    def drop(self, arrival: StagedFile, pieces: list[bytes]) -> None:
        """Drop a file; ``pieces`` are its collected pieces."""
        self._release(sum(map(len, pieces)))
        # A queued part of the file may still be written, which opens the file; so it is removed after that,
        # in the same thread.
        self._workers.run(arrival.discard).addErrback(lambda _: None)

    def flush(self) -> Deferred[None]:
        """
        Return a Deferred that fires when all complete files have their final names, or storing has failed.
        """
        waiting: Deferred[None] = Deferred()
        self._idle.append(waiting)
        self._look_idle()
        return waiting

    def _next_group(self) -> None:
        group = self._ready[:MAX_GROUP_FILES]
        size = 0
        for index, entry in enumerate(group):
            size += entry[2]
            if size >= MAX_GROUP_BYTES:
                del group[index + 1 :]
                break
        del self._ready[: len(group)]
        self._busy = True
        done = self._workers.run(self._store, group)
        done.addErrback(lambda failure: self._fail(failure.value))
        done.addBoth(self._stored, group, size)

    def _store(self, group: Sequence[tuple[StagedFile, list[bytes], int, Any]]) -> None:
        """
        Hash, write, sync and rename a group of files. After an error, such as a full disk, no file stays
        open. Runs in the destination's thread.
        """
        try:
            right = [arrival for arrival, pieces, _, _ in group if arrival.end(pieces)]
            outcomes = commit_group(right, self._policy, self._disk)
            for arrival, outcome in zip(right, outcomes, strict=True):
                if isinstance(outcome, BadEntry):
                    arrival.wrong = str(outcome)
                elif outcome is not None:
                    raise self.destination.error(outcome, "keep files")
        except BaseException:
            for arrival, *_ in group:
                arrival.discard()
            raise

    def _stored(self, _: object, group: Sequence[tuple[Any, Any, int, Any]], size: int) -> None:
        self._busy = False
        if self._error is None:
            for arrival, _pieces, _size, ended in group:
                ended(arrival.wrong)
        self._release(size)
        if self._ready and not self._busy and self._error is None:
            self._next_group()
        self._look_idle()

    def _release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        if self._is_full and self.held_bytes <= RESUME_BYTES:
            self._is_full = False
            self._full(False)

    def _fail(self, error: BaseException | None) -> None:
        if self._error is not None:
            return
        if isinstance(error, OSError):
            error = self.destination.error(error, "hold the files")
        elif not isinstance(error, PipegridError):
            error = MirrorError(f"{self.destination.path} cannot hold the files: {error!r}")
        self._error = error
        ready, self._ready = self._ready, []
        for arrival, pieces, _, _ in ready:
            self.drop(arrival, pieces)
        self._broken(error)

    def _look_idle(self) -> None:
        if not (self._busy or self._ready) or self._error is not None:
            idle, self._idle = self._idle, []
            for waiting in idle:
                waiting.callback(None)


# How long an overloaded mirror asks the client to wait.

MAX_RETRY_AFTER_S = 120.0
"""The maximum wait. A mirror that asks the client to wait longer is asked again after this time."""

MAX_DATE_BYTES = 64


def retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float:
    """
    Return the seconds that ``Retry-After`` asks for, at most ``MAX_RETRY_AFTER_S``; 0.0 without the field.
    """
    for name, value in headers:
        if name == b"retry-after":
            if value.isdigit() and len(value) < 10:
                return min(float(value), MAX_RETRY_AFTER_S)
            then = _seconds_of(value)
            dates = [_seconds_of(date) for key, date in headers if key == b"date"]
            now = next((each for each in dates if each is not None), time())
            return 0.0 if then is None else min(max(0.0, then - now), MAX_RETRY_AFTER_S)
    return 0.0


def _seconds_of(date: bytes) -> float | None:
    """Return the seconds since 1970 of a date in any of HTTP's three formats; None if it is not a date."""
    from email.utils import parsedate_to_datetime

    if len(date) > MAX_DATE_BYTES:
        return None
    try:
        found = parsedate_to_datetime(date.decode("latin-1"))
        return found.replace(tzinfo=found.tzinfo or timezone.utc).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


LIMITS = Limits(
    max_requests_in_flight=4096,
    max_response_budget_bytes=16 << 20,
    max_attempts=1,
    timeout_s=60.0,
    idle_timeout_s=300.0,
    blocked_after_s=float("inf"),
)
"""
Outstanding requests are limited by their bytes rather than by their number. The schedule's limits of silence
are shorter than the one here. Only the disk and the rate limit pause reading, for any time.
"""
