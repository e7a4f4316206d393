"""
The file with an introducer's announcements, for its next process; and the introducer that a storage server
runs.

A storage server is an introducer for the members of a grid that has no other. This introducer has the
server's port and key, and a secret of its own, so invitations name it like any introducer: servers that join
later announce themselves to it, and so become known to earlier members.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from pipegrid.core.text import counted
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file
from pipegrid.reactor.deferreds import Timer
from pipegrid.reactor.workers import Workers
from pipegrid.server import identity
from pipegrid.server.identity import MEMBERS_FURL_NAME, Identity
from pipegrid.server.introducer_registry import RefusedAnnouncement
from pipegrid.server.introducer_service import IntroducerService, LimitedLog
from pipegrid.wire.announcements import Signed

LISTED_NAME = "private/introducer-announcements.json"
"""File of the listed announcements, for the next process; Tahoe-LAFS's introducer does not read the file."""

DAMAGED_SUFFIX = ".damaged"
MAX_LISTED_BYTES = 16 << 20
"""The largest ``LISTED_NAME`` file; all units take 4 MiB, and a third more in base64."""

TICK_S = 60.0
SAVE_AFTER_S = 1.0
SAVES_APART_S = 30.0
SAVE_TIMES_S = 600.0
"""How often the file is written if nothing but times has changed."""

_HERE = "127.0.0.1"

log = Logger()


class ListingFile:
    """
    Keeps the file of an introducer's announcements, and calls the registry's ``tick`` regularly.

    Args:
        directory: the node's directory.
        workers: write the file.
    """

    def __init__(
        self, reactor: Any, service: IntroducerService, directory: Path, workers: Workers
    ) -> None:
        self.service = service
        self._reactor = reactor
        self._path = directory / LISTED_NAME
        self._workers = workers
        self._save_timer = Timer(reactor, self._save)
        self._saving: Deferred[None] | None = None
        self._save_failed = False
        self._tick = LoopingCall(self._pass_time)
        self._tick.clock = reactor
        self._unsaved_s = 0.0
        self._saved_s = float("-inf")

    def start(self) -> None:
        """Write the file from now on whenever the listed announcements change."""
        self.service.changed = self._save_soon
        self._tick.start(TICK_S, now=False)

    async def stop(self) -> None:
        """Stop the timers; if ``start`` was called, write the file."""
        started, self.service.changed = self._tick.running, lambda: None
        if started:
            self._tick.stop()
        self._save_timer.stop()
        if started:
            await self._saved()
            self._save_timer.stop()
            self._save_now()

    def restore(self) -> None:
        """
        List the announcements that the last process listed.

        Raises:
            UsageError: the file cannot be read, or a damaged one cannot be renamed.
        """
        try:
            data = read_file(self._path, MAX_LISTED_BYTES + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            raise identity.unusable(error, self._path) from error
        try:
            if len(data) > MAX_LISTED_BYTES:
                raise ValueError(f"it has more than {MAX_LISTED_BYTES} bytes")
            skipped = self.service.registry.restore(data)
        except ValueError as error:
            log.warn(
                "cannot understand {path}: {error}; servers are listed again when they announce themselves",
                path=str(self._path),
                error=str(error),
            )
            self._keep_damaged()
            return
        count = len(self.service.registry)
        log.info(
            "{servers} listed from {path}", servers=counted(count, "server"), path=str(self._path)
        )
        if skipped:
            log.warn(
                "{entries} of {path} skipped: damaged, or without space",
                entries=counted(skipped, "entry", "entries"),
                path=str(self._path),
            )

    def _keep_damaged(self) -> None:
        """
        Rename the damaged file, which would be overwritten otherwise: a later version may understand it.
        """
        kept = self._path.with_name(self._path.name + DAMAGED_SUFFIX)
        try:
            self._path.replace(kept)
        except OSError as error:
            raise identity.unusable(error, self._path) from error
        log.warn("it is kept as {path}", path=str(kept))

    def _pass_time(self) -> None:
        removed = self.service.registry.tick()
        if removed:
            log.info(
                "{servers} removed, not connected for a long time",
                servers=counted(removed, "server"),
            )
        self._unsaved_s += TICK_S
        if removed or self._unsaved_s >= SAVE_TIMES_S:
            self._save_soon()

    def _save_soon(self) -> None:
        pause_s = self._saved_s + SAVES_APART_S - self._reactor.seconds()
        self._save_timer.set(max(SAVE_AFTER_S, pause_s))

    def _save(self) -> None:
        self._saved_s = self._reactor.seconds()
        if self._saving is not None:  # the last write is not finished
            self._save_soon()
            return
        self._unsaved_s = 0.0
        data = self.service.registry.as_json()
        self._saving = self._workers.run(replace_file, self._path, data)
        self._saving.addCallbacks(self._did_save, self._did_not_save)

    def _save_now(self) -> None:
        """Write the file in this thread, since a stopping reactor may have stopped the workers already."""
        try:
            replace_file(self._path, self.service.registry.as_json())
        except OSError as error:
            log.warn(
                "cannot write {path}: {reason}", path=str(self._path), reason=str(error.strerror)
            )

    def _did_save(self, _: None) -> None:
        self._saving = None
        self._save_failed = False

    def _did_not_save(self, failure: Any) -> None:
        self._saving = None
        if failure.check(CancelledError):  # the reactor is stopping
            return
        if failure.check(OSError) is None:
            log.failure("the listed announcements were not saved", failure)
        elif not self._save_failed:  # warn once per outage
            self._save_failed = True
            log.warn(
                "cannot write {path}: {reason}; it is tried again",
                path=str(self._path),
                reason=failure.value.strerror,
            )
        self._unsaved_s = SAVE_TIMES_S  # so the next tick writes again

    async def _saved(self) -> None:
        """Return when no write is in progress."""
        if self._saving is not None:
            done: Deferred[None] = Deferred()
            self._saving.addBoth(lambda _: done.callback(None))
            await done


class MembersIntroducer:
    """
    The introducer that a storage server runs.

    Args:
        directory: the server's directory.
        workers: write the file of announcements.

    Attributes:
        service: the object to which the introducer's fURL leads.
        secret: the last part of the fURL.

    Raises:
        UsageError: a file in the directory is damaged, or cannot be read.
    """

    def __init__(self, reactor: Any, directory: Path, workers: Workers) -> None:
        self._directory = directory
        self._log_limit = LimitedLog(reactor)
        self.service = IntroducerService(reactor, self._log_limit)
        known = identity.load_furl(directory, MEMBERS_FURL_NAME)
        self.secret = identity.new_swissnum() if known is None else known.swissnum
        self._listing = ListingFile(reactor, self.service, directory, workers)
        self._listing.restore()

    def start(self, who: Identity, hints: Sequence[str]) -> None:
        """
        Write the fURL, which invitations name, and begin to store the listed announcements.

        Args:
            who: the server's key.
            hints: the addresses of the server.

        Raises:
            UsageError: the fURL cannot be written.
        """
        furl = who.furl(hints, self.secret)
        identity.keep_furl(self._directory, furl, MEMBERS_FURL_NAME)
        self._listing.start()

    def list_own(self, signed: Signed) -> None:
        """List the storage server that runs this introducer, like servers that announce themselves."""
        try:
            self.service.registry.publish(signed, self, _HERE)
        except RefusedAnnouncement as error:
            log.warn("the server is not listed by its own introducer: {error}", error=str(error))

    def refuse(self, reason: str) -> None:
        """Log that the storage server itself has been displaced by other servers."""
        log.warn("its own introducer does not list the server: {reason}", reason=reason)

    async def stop(self) -> None:
        """Stop the timers, and write the listed announcements for the next process."""
        self._log_limit.stop()
        await self._listing.stop()
