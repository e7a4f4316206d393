"""
The client of one introducer: it connects, subscribes, checks announcements, and reconnects.

Each bad announcement causes one warning and never stops the others. The number of warnings is bounded, since
an introducer forwards untrusted input. ``wire.announcements`` parses the announcements.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from foolscap.api import Referenceable
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from pipegrid.grid.servers_and_introducers_yaml import IntroducerAddress
from pipegrid.reactor.deferreds import as_deferred
from pipegrid.version import __version__
from pipegrid.wire.announcements import (
    MAX_SERVERS,
    Announcement,
    AnnouncementRecords,
    signer,
    verify,
)
from pipegrid.wire.announcements import SERVICE as STORAGE
from pipegrid.wire.introducer_protocol import (
    SERVICE,
    Connect,
    Reconnecting,
    RIIntroducerSubscriberClient,
    call,
    connect_introducer,
    reason_of,
    until_lost,
)

MAX_WARNINGS = 20
"""The most warnings about one introducer's announcements; a last one says that more are skipped."""


@attrs.frozen
class IntroducerStatus:
    """
    The state of one introducer.

    Attributes:
        name: the introducer's name in the user's file.
        address: the address in the introducer's fURL.
        connected: whether the client is connected and subscribed now.
        reason: why the client is not connected; None if it is.
        servers: how many servers the introducer has announced since the grid was opened.
    """

    name: str
    address: str
    connected: bool
    reason: str | None
    servers: int


@attrs.frozen(eq=False)
class IntroducerCallbacks:
    """
    The functions that the client of an introducer calls.

    Attributes:
        on_announcement: called with every new announcement of a storage server.
        warn: called with a sentence for each skipped announcement, up to ``MAX_WARNINGS``.
        verdict: called when the introducer's state changes (it responded or failed, or its connection was
            lost), and after each message with announcements.
    """

    on_announcement: Callable[[Announcement], None]
    warn: Callable[[str], None]
    verdict: Callable[[], None]


class IntroducerClient:
    """
    Receives the announcements of one introducer.

    Args:
        records: decides which announcements are new; the clients of several introducers may share it.
        most_servers: the most servers of this introducer in the records, so that they cannot displace servers
            of other introducers.
    """

    def __init__(
        self,
        address: IntroducerAddress,
        connect: Connect,
        clock: IReactorTime,
        records: AnnouncementRecords,
        callbacks: IntroducerCallbacks,
        *,
        nickname: str = "",
        most_servers: int = MAX_SERVERS,
    ) -> None:
        self.address = address
        self._connect = connect
        self._clock = clock
        self._records = records
        self._on_announcement = callbacks.on_announcement
        self._warn = callbacks.warn
        self._verdict = callbacks.verdict
        self._nickname = nickname
        self._reason: str | None = "it has not answered yet"
        self._connected = False
        self.announced: set[str] = set()
        """Ids of the servers that the introducer has announced."""
        self._most_servers = most_servers
        self._counted: set[str] = set()
        """Ids of the servers, announced now or cached from an earlier run, that are in the records."""
        self._skipped: set[object] = set()
        self._subscriber = _Subscriber(self._heard)
        self._reconnecting = Reconnecting(
            clock, self._use, self._lost, lambda: random.uniform(0.7, 1.3)
        )
        self.answered = False
        """Whether the introducer has responded at least once."""
        self.failed = False
        """Whether connecting to the introducer has failed."""

    @property
    def status(self) -> IntroducerStatus:
        """
        Whether the client is connected, or else why not; and how many servers the introducer has announced.
        """
        return IntroducerStatus(
            self.address.name,
            self.address.furl.address,
            self._connected,
            None if self._connected else self._reason,
            len(self.announced),
        )

    @property
    def is_full(self) -> bool:
        """Whether the client keeps no further servers of this introducer."""
        return len(self._counted) >= self._most_servers

    def remember(self, announcement: Announcement) -> bool:
        """
        Accept a cached announcement from an earlier run, unless the client ``is_full``; returns whether it is
        new.
        """
        if self.is_full and announcement.server_id not in self._counted:
            return False
        self._counted.add(announcement.server_id)
        return self._records.remember(announcement)

    def start(self) -> None:
        """Connect, and receive announcements until ``stop`` is called."""
        self._reconnecting.start()

    def stop(self) -> None:
        """Unsubscribe and do not reconnect; called when the grid is closed."""
        self._connected = False
        self._reason = "the grid is closed"
        self._reconnecting.stop()

    @as_deferred
    async def _use(self) -> None:
        reference = await connect_introducer(self._connect, self.address.furl, self._clock)
        lost = until_lost(reference)
        information = {
            b"version": 0,
            b"nickname": self._nickname,
            b"app-versions": [],
            b"my-version": f"pipegrid/{__version__}",
            b"oldest-supported": "1.0.0",
        }
        await call(reference, "subscribe_v2", self._subscriber, SERVICE, information)
        self._connected, self.failed = True, False
        self._verdict()
        await lost

    def _lost(self, error: Exception | None) -> None:
        self._connected, self.failed = False, True
        self._reason = reason_of(error)
        self._verdict()

    def _heard(self, announcements: Iterable[object]) -> None:
        for signed in announcements:
            try:
                announcement = verify(signed)
                on_announcement = self._hear(announcement)
            except ValueError as error:
                self._skip(signed, str(error))
                continue
            if on_announcement:
                self._on_announcement(announcement)
        self.answered = True
        self._verdict()

    def _hear(self, announcement: Announcement) -> bool:
        """
        Record an announcement; returns whether it is new and of a storage server.

        Raises:
            ValueError: the announcement is not valid, or the client keeps no further servers of the
                introducer.
        """
        server_id = announcement.server_id
        is_storage = announcement.fields.get("service-name") == STORAGE
        if is_storage and self.is_full and server_id not in self._counted:
            raise ValueError(
                f"{self._most_servers} servers of this introducer are known already, and no more are kept"
            )
        on_announcement = self._records.hear(announcement)
        if is_storage:
            self._counted.add(server_id)
            self.announced.add(server_id)
        return on_announcement

    def _skip(self, signed: object, why: str) -> None:
        # The introducer repeats its announcements after every reconnection; warn of each only once.
        who = signer(signed)
        if (who, why) in self._skipped or len(self._skipped) > MAX_WARNINGS:
            return
        self._skipped.add((who, why))
        name = self.address.name
        if len(self._skipped) > MAX_WARNINGS:
            self._warn(f"introducer {name}: more announcements are skipped, and not listed")
            return
        self._warn(f"introducer {name}: the announcement of server {who} is skipped: {why}")


@implementer(RIIntroducerSubscriberClient)  # type: ignore[misc]
class _Subscriber(Referenceable):  # type: ignore[misc]
    """The Foolscap object that the introducer calls with announcements."""

    def __init__(self, heard: Callable[[Iterable[object]], None]) -> None:
        self._heard = heard

    def remote_announce_v2(self, announcements: Any) -> None:
        self._heard(announcements)
