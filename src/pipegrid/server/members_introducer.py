"""
An introducer for the members of a grid, on the port of one member's storage server.

It has the server's key and a secret of its own, so invitations can name it as any other introducer: servers
that join later announce themselves here, and so reach those who joined before. The server lists itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.logger import Logger

from pipegrid.reactor.workers import Workers
from pipegrid.server import identity
from pipegrid.server.identity import MEMBERS_FURL_NAME, Identity
from pipegrid.server.introducer_listing import ListingFile
from pipegrid.server.introducer_registry import RefusedAnnouncement
from pipegrid.server.introducer_service import IntroducerService, LimitedLog
from pipegrid.wire.announcements import Signed

_HERE = "127.0.0.1"

log = Logger()


class MembersIntroducer:
    """
    The introducer of a storage server.

    Args:
        directory: the server's.
        workers: write what is listed.

    Attributes:
        service: the object that its fURL leads to.
        secret: the last part of that fURL.

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
        Write the fURL, which invitations name, and keep what is listed.

        Args:
            who: the server's key.
            hints: the addresses of the server.

        Raises:
            UsageError: it cannot be written.
        """
        furl = who.furl(hints, self.secret)
        identity.keep_furl(self._directory, furl, MEMBERS_FURL_NAME)
        self._listing.start()

    def list_own(self, signed: Signed) -> None:
        """List the server itself."""
        try:
            self.service.registry.publish(signed, self, _HERE)
        except RefusedAnnouncement as error:
            log.warn("the server is not listed by its own introducer: {error}", error=str(error))

    def refuse(self, reason: str) -> None:
        """Log that the server itself has been displaced by others."""
        log.warn("its own introducer does not list the server: {reason}", reason=reason)

    async def stop(self) -> None:
        """Write what is listed."""
        self._log_limit.stop()
        await self._listing.stop()
