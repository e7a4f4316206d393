"""The process of an introducer: its directory, ports and timers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from pipegrid.disk.directory_claim import INTRODUCER_LOCK_NAME, DirectoryClaim
from pipegrid.disk.private_files import make_directory
from pipegrid.reactor.workers import Workers
from pipegrid.server import identity, systemd
from pipegrid.server.connection_turns import FairTurns
from pipegrid.server.foolscap.broker import HeldMemory, MessageLimits
from pipegrid.server.foolscap.port import FoolscapPort
from pipegrid.server.identity import INTRODUCER_FURL_NAME
from pipegrid.server.introducer_announcement_file import ListingFile
from pipegrid.server.introducer_pages import IntroducerPages
from pipegrid.server.introducer_service import IntroducerService, LimitedLog
from pipegrid.server.listener import (
    MAX_CONNECTIONS,
    ConnectionLimits,
    PortListener,
    ProtocolDetector,
)
from pipegrid.server.serve import endpoint_text, listen, raise_file_limit, until_cancelled, where
from pipegrid.wire.banana_receiver import Bounds

DEFAULT_PORT = "tcp:8099"
MAX_MEMORY_BYTES = 16 << 20
"""The most memory, over all connections, for messages that are being received or carried out."""

FREE_BYTES = 1024
"""Messages up to this size are not counted; of these, all connections together can hold 128 MB."""

BOUNDS = Bounds(turn_tokens=256)
"""The bounds of a message: a call may take 64 KiB, twice the longest announcement."""

log = Logger()


@attrs.frozen(kw_only=True)
class IntroducerSettings:
    """
    Settings of an introducer.

    Attributes:
        directory: the node's directory; its identity is in ``private``.
        port: a TCP port, or a Twisted endpoint; several are separated by commas.
        location: ``host:port`` for clients, several separated by commas, also as hints of Foolscap
            (``tcp:host:port``); None: the port's own interface, or the host's name.
        keeps_location: whether an existing fURL file in the directory gets this location; a missing file
            always does.
        status: a port (on 127.0.0.1) or endpoint for the status pages, or None.
        max_connections: the most connections at a time; the limit of open files may allow less.
        max_per_address: the most connections from one address; None for half of ``max_connections``.
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
    Rejects connections that begin with TLS, since an introducer speaks only Foolscap, which starts TLS later.

    Attributes:
        refused: how many connections were rejected.
    """

    noisy = False

    def __init__(self, clock: IReactorTime, log_limit: LimitedLog) -> None:
        self.refused = 0
        self.turns: FairTurns[Any] = FairTurns(clock)
        self._log = log_limit

    def buildProtocol(self, addr: IAddress | None) -> None:
        """Reject a connection that does not begin with Foolscap, and log that."""
        self.refused += 1
        self.note_hostile(str(getattr(addr, "host", addr)), "it does not speak Foolscap")

    def note_hostile(self, peer: str, reason: str) -> None:
        """Log why a client was rejected."""
        self._log.turned_away(peer, reason)


class IntroducerNode:
    """
    A running introducer, made by ``start``.

    Attributes:
        furl: the introducer's address for servers and clients.
        hints: the addresses in the fURL.
        listening: the address of the first port.
        status_port: the port of the status pages, or None.
    """

    def __init__(self, reactor: Any, settings: IntroducerSettings) -> None:
        self.settings = settings
        self._directory = str(settings.directory)
        self.furl = ""
        self.hints: tuple[str, ...] = ()
        self.listening: Any = None
        self.status_port: int | None = None
        self._reactor = reactor
        self._log_limit = LimitedLog(reactor)
        self.service = IntroducerService(reactor, self._log_limit)
        self._workers = Workers(reactor, threads=1)
        self._listing = ListingFile(reactor, self.service, settings.directory, self._workers)
        self._claim: DirectoryClaim | None = None
        self._foolscap: FoolscapPort | None = None
        self._front: PortListener | None = None
        self._ports: list[Any] = []
        self._alive: LoopingCall | None = None
        self._serves = False

    async def start(self) -> None:
        """
        Listen on the ports.

        Raises:
            UsageError: another node has the directory, a port is in use, or a setting is invalid.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close all connections, and write the listed announcements."""
        if self._serves:
            systemd.notify(systemd.STOPPING)
        for port in self._ports:
            await port.stopListening()
        if self._alive is not None:
            self._alive.stop()
        if self._foolscap is not None:
            await self._foolscap.stop()
        if self._front is not None:
            await self._front.stop()
        self._log_limit.stop()
        await self._listing.stop()
        if self._serves:
            log.info("stopped the introducer of {directory}", directory=self._directory)
        await self._workers.stop()
        if self._claim is not None:
            self._claim.release()

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
        self._listing.restore()
        rejected = FoolscapOnly(self._reactor, self._log_limit)
        self._foolscap = FoolscapPort(
            who,
            self.service,
            limits=MessageLimits(
                HeldMemory(lambda more: True, MAX_MEMORY_BYTES), BOUNDS, FREE_BYTES
            ),
            note_hostile=rejected.note_hostile,
        )
        crowd: ConnectionLimits[ProtocolDetector] = ConnectionLimits(
            min(settings.max_connections, raise_file_limit()), settings.max_per_address
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
        self._listing.start()
        self._alive = systemd.stay_alive(self._reactor)
        self._serves = True
        systemd.notify(systemd.READY)
        log.info("the introducer of {directory} listens", directory=self._directory)

    async def _listen(self, text: str, factory: Any) -> Any:
        port = await listen(self._reactor, text, factory)
        self._ports.append(port)
        return port


async def introduce(
    reactor: Any,
    settings: IntroducerSettings,
    announce: Callable[[IntroducerNode], Awaitable[None] | None],
) -> None:
    """Run an introducer; see ``serve.until_cancelled``."""
    await until_cancelled(IntroducerNode(reactor, settings), announce)
