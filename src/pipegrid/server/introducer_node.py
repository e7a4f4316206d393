"""The process of an introducer: its directory, ports and timers, and the file of what it has listed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from pipegrid.core.text import counted
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.directory_claim import INTRODUCER_LOCK_NAME, DirectoryClaim
from pipegrid.disk.private_files import make_directory
from pipegrid.disk.safe_open import read_file
from pipegrid.reactor.deferreds import Timer
from pipegrid.reactor.workers import Workers
from pipegrid.server import identity, systemd
from pipegrid.server.fair_scheduler import FairTurns
from pipegrid.server.foolscap.broker import HeldMemory
from pipegrid.server.foolscap.port import FoolscapPort
from pipegrid.server.identity import INTRODUCER_FURL_NAME
from pipegrid.server.introducer_pages import IntroducerPages
from pipegrid.server.introducer_service import IntroducerService, LimitedLog
from pipegrid.server.listener import (
    MAX_CLOSING,
    MAX_CONNECTIONS,
    ConnectionLimits,
    PortListener,
    ProtocolDetector,
)
from pipegrid.server.serve import endpoint_text, listen, raise_file_limit, until_cancelled, where
from pipegrid.wire.banana_receiver import Bounds

DEFAULT_PORT = "tcp:8099"
LISTED_NAME = "private/introducer-announcements.json"
"""What is listed, for the next process. Tahoe-LAFS does not read it: its introducer keeps nothing."""

DAMAGED_SUFFIX = ".damaged"
MAX_LISTED_BYTES = 16 << 20
"""The limit of that file; all units take 4 MiB, and a third more in base64."""

MAX_MEMORY_BYTES = 16 << 20
"""For messages of all connections that are being received or carried out."""

FREE_BYTES = 1024
"""
Smaller messages are not counted; a connection may have 128 of them waiting, so that all may have 128 MB.
"""

BOUNDS = Bounds(turn_tokens=256)
"""A call may take 64 KiB, twice the longest announcement."""

TICK_S = 60.0
SAVE_AFTER_S = 1.0
SAVES_APART_S = 30.0
SAVE_TIMES_S = 600.0
"""How often the file is written although nothing has changed but the times in it."""

log = Logger()


@attrs.frozen(kw_only=True)
class IntroducerSettings:
    """
    Settings of an introducer.

    Attributes:
        directory: the node's: its identity is in ``private``.
        port: a TCP port, or a Twisted endpoint; several are separated by commas.
        location: ``host:port`` for clients, several separated by commas, also as hints of Foolscap
            (``tcp:host:port``); None: the port's own interface, or the host's name.
        keeps_location: whether the location is also written to the directory's fURL if that has another.
        status: a port (on 127.0.0.1) or endpoint for the status pages, or None.
        max_connections: at a time; the limit of open files may allow less.
        max_per_address: of these, from one address; None for half of them.
    """

    directory: Path
    port: str = DEFAULT_PORT
    location: str | None = None
    keeps_location: bool = True
    status: str | None = None
    max_connections: int = MAX_CONNECTIONS
    max_per_address: int | None = None


class FoolscapOnly(Factory):
    """
    Accepts no protocol inside TLS: an introducer speaks Foolscap alone.

    Attributes:
        refused: how many connections were rejected.
    """

    noisy = False

    def __init__(self, clock: IReactorTime, log_limit: LimitedLog) -> None:
        self.refused = 0
        self.turns: FairTurns[Any] = FairTurns(clock)
        self._log = log_limit

    def buildProtocol(self, addr: IAddress | None) -> None:
        """Reject a connection that begins with anything but Foolscap, and log that."""
        self.refused += 1
        self.note_hostile(str(getattr(addr, "host", addr)), "it does not speak Foolscap")

    def note_hostile(self, peer: str, reason: str) -> None:
        """Log why a client was rejected."""
        self._log.turned_away(peer, reason)


class IntroducerNode:
    """
    A running introducer, made by ``start``.

    Attributes:
        furl: its address for servers and clients.
        hints: the addresses in it.
        listening: the address of its first port.
        status_port: of the status pages, or None.
    """

    def __init__(self, reactor: Any, settings: IntroducerSettings) -> None:
        self.settings = settings
        self.furl = ""
        self.hints: tuple[str, ...] = ()
        self.listening: Any = None
        self.status_port: int | None = None
        self._reactor = reactor
        self._path = settings.directory / LISTED_NAME
        self._log_limit = LimitedLog(reactor)
        self.service = IntroducerService(reactor, self._log_limit)
        self._workers = Workers(reactor, threads=1)
        self._save_timer = Timer(reactor, self._save)
        self._saving: Deferred[None] | None = None
        self._save_failed = False
        self._tick = LoopingCall(self._pass_time)
        self._tick.clock = reactor
        self._unsaved_s = 0.0
        self._saved_s = float("-inf")
        self._claim: DirectoryClaim | None = None
        self._foolscap: FoolscapPort | None = None
        self._front: PortListener | None = None
        self._ports: list[Any] = []
        self._alive: LoopingCall | None = None
        self._serves = False

    async def start(self) -> None:
        """
        Listen.

        Raises:
            UsageError: another node has the directory, a port is in use, or a setting is invalid.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close all connections, and write what is listed."""
        if self._serves:
            systemd.notify(systemd.STOPPING)
        for port in self._ports:
            await port.stopListening()
        if self._tick.running:
            self._tick.stop()
        if self._alive is not None:
            self._alive.stop()
        if self._foolscap is not None:
            await self._foolscap.stop()
        if self._front is not None:
            await self._front.stop()
        self._log_limit.stop()
        self._save_timer.stop()
        if self._serves:
            await self._saved()
            self._save()
            await self._saved()
            log.info("stopped the introducer of {directory}", directory=self._directory)
        await self._workers.stop()
        if self._claim is not None:
            self._claim.release()

    @property
    def _directory(self) -> str:
        return str(self.settings.directory)

    async def _start(self) -> None:
        settings = self.settings
        try:
            make_directory(settings.directory, 0o700)
            self._claim = DirectoryClaim(
                settings.directory, lock_name=INTRODUCER_LOCK_NAME, program="introducer"
            )
        except OSError as error:
            raise identity.unusable(error, settings.directory) from error
        who = identity.load_or_create(settings.directory, INTRODUCER_FURL_NAME)
        self._restore()
        rejected = FoolscapOnly(self._reactor, self._log_limit)
        self._foolscap = FoolscapPort(
            who,
            self.service,
            memory=HeldMemory(lambda more: True, MAX_MEMORY_BYTES),
            note_hostile=rejected.note_hostile,
            bounds=BOUNDS,
            free_bytes=FREE_BYTES,
        )
        crowd: ConnectionLimits[ProtocolDetector] = ConnectionLimits(
            min(settings.max_connections, raise_file_limit()),
            settings.max_per_address,
            MAX_CLOSING,
        )
        self._front = PortListener(rejected, who.contexts(), self._reactor, self._foolscap, crowd)
        for text in settings.port.split(","):
            await self._listen(endpoint_text(text.strip()), self._front)
        self.listening = self._ports[0].getHost()
        self.hints = where(settings.location, self.listening)
        furl = self._foolscap.located(self.hints)
        if settings.keeps_location or not identity.load_furl(
            settings.directory, INTRODUCER_FURL_NAME
        ):
            identity.keep_furl(settings.directory, furl, INTRODUCER_FURL_NAME)
        self.furl = str(furl)
        if settings.status is not None:
            pages = IntroducerPages(self.service, lambda: len(crowd), lambda: rejected.refused)
            text = endpoint_text(settings.status, "127.0.0.1")
            port = await self._listen(text, pages.factory(self._reactor))
            self.status_port = getattr(port.getHost(), "port", None)
        self.service.changed = self._save_soon
        self._tick.start(TICK_S, now=False)
        self._alive = systemd.stay_alive(self._reactor)
        self._serves = True
        systemd.notify(systemd.READY)
        log.info("the introducer of {directory} listens", directory=self._directory)

    async def _listen(self, text: str, factory: Any) -> Any:
        port = await listen(self._reactor, text, factory)
        self._ports.append(port)
        return port

    # What is listed, on the disk.

    def _restore(self) -> None:
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
        """Rename the file, which would be overwritten: a later version may understand it."""
        kept = self._path.with_name(self._path.name + DAMAGED_SUFFIX)
        try:
            self._path.replace(kept)
        except OSError as error:
            raise identity.unusable(error, self._path) from error
        log.warn("it is kept as {path}", path=str(kept))

    def _pass_time(self) -> None:
        removed = self.service.registry.tick()
        if removed:
            log.info("{servers} removed, absent for long", servers=counted(removed, "server"))
        self._unsaved_s += TICK_S
        if removed or self._unsaved_s >= SAVE_TIMES_S:
            self._save_soon()

    def _save_soon(self) -> None:
        pause_s = self._saved_s + SAVES_APART_S - self._reactor.seconds()
        self._save_timer.set(max(SAVE_AFTER_S, pause_s))

    def _save(self) -> None:
        self._saved_s = self._reactor.seconds()
        if self._saving is not None:  # a slow disk
            self._save_soon()
            return
        self._unsaved_s = 0.0
        data = self.service.registry.as_json()
        self._saving = self._workers.run(replace_file, self._path, data)
        self._saving.addCallbacks(self._did_save, self._did_not_save)

    def _did_save(self, _: None) -> None:
        self._saving = None
        self._save_failed = False

    def _did_not_save(self, failure: Any) -> None:
        self._saving = None
        if failure.check(OSError) is None:
            log.failure("what is listed was not written", failure)
        elif not self._save_failed:  # once per outage
            self._save_failed = True
            log.warn(
                "cannot write {path}: {reason}; it is tried again",
                path=str(self._path),
                reason=failure.value.strerror,
            )
        self._unsaved_s = SAVE_TIMES_S  # at the next tick

    async def _saved(self) -> None:
        """Return when nothing is being written."""
        if self._saving is not None:
            done: Deferred[None] = Deferred()
            self._saving.addBoth(lambda _: done.callback(None))
            await done


async def introduce(
    reactor: Any,
    settings: IntroducerSettings,
    announce: Callable[[IntroducerNode], Awaitable[None] | None],
) -> None:
    """Run an introducer; see ``serve.until_cancelled``."""
    await until_cancelled(IntroducerNode(reactor, settings), announce)
