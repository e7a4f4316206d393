"""
Listening to one introducer: connect, subscribe, check what it says; and again after every loss.

Bad announcements are one warning each and never stop the others; their number is bounded, since an
introducer passes on whatever strangers send. What the announcements mean is in ``wire.announcements``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from foolscap.api import Referenceable
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from pipegrid.grid.servers_yaml import IntroducerAddress
from pipegrid.reactor.deferreds import as_deferred
from pipegrid.version import __version__
from pipegrid.wire.announcements import (
    MAX_SERVERS,
    Announcement,
    AnnouncementBook,
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
"""Of one introducer's announcements; more are counted only."""


@attrs.frozen
class IntroducerStatus:
    """
    What is known of one introducer.

    Attributes:
        address: where it is.
        connected: it is there now, and has been asked for servers.
        reason: why it is not.
        servers: how many it has announced since the grid was opened.
    """

    name: str
    address: str
    connected: bool
    reason: str | None
    servers: int


@attrs.frozen(eq=False)
class IntroducerCallbacks:
    """
    What the client of an introducer calls.

    Attributes:
        news: given every announcement that is new.
        warn: given a sentence for every announcement that is skipped.
        verdict: called when there is something new to know: it answered, failed, or was lost.
    """

    news: Callable[[Announcement], None]
    warn: Callable[[str], None]
    verdict: Callable[[], None]


class IntroducerClient:
    """
    Listens to one introducer.

    Args:
        book: decides what is news; several introducers may share it.
        most_servers: its part of the book: no introducer may keep out what others name.
    """

    def __init__(
        self,
        address: IntroducerAddress,
        connect: Connect,
        clock: IReactorTime,
        book: AnnouncementBook,
        callbacks: IntroducerCallbacks,
        *,
        nickname: str = "",
        most_servers: int = MAX_SERVERS,
    ) -> None:
        self.address = address
        self._connect = connect
        self._clock = clock
        self._book = book
        self._news = callbacks.news
        self._warn = callbacks.warn
        self._verdict = callbacks.verdict
        self._nickname = nickname
        self._reason: str | None = "it has not answered yet"
        self._connected = False
        self.announced: set[str] = set()
        """Ids of the servers that it named."""
        self._most_servers = most_servers
        self._counted: set[str] = set()
        """Of these, and of those that it named in an earlier run, the ones that are in the book."""
        self._skipped: set[object] = set()
        self._subscriber = _Subscriber(self._heard)
        self._reconnecting = Reconnecting(
            clock, self._use, self._lost, lambda: random.uniform(0.7, 1.3)
        )
        self.answered = False
        """It has told what it knows, at least once."""
        self.failed = False
        """It was tried, and is not there."""

    @property
    def status(self) -> IntroducerStatus:
        """Whether it is connected now, why not, and how many servers it has told of."""
        return IntroducerStatus(
            self.address.name,
            self.address.furl.address,
            self._connected,
            None if self._connected else self._reason,
            len(self.announced),
        )

    @property
    def is_full(self) -> bool:
        """Whether it has named as many servers as are kept of it."""
        return len(self._counted) >= self._most_servers

    def remember(self, announcement: Announcement) -> bool:
        """Take what it said in an earlier run; returns whether it is news."""
        if self.is_full and announcement.server_id not in self._counted:
            return False
        self._counted.add(announcement.server_id)
        return self._book.remember(announcement)

    def start(self) -> None:
        """Connect, and listen until stopped."""
        self._reconnecting.start()

    def stop(self) -> None:
        """Listen no more, for good: the grid is closed."""
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
                news = self._hear(announcement)
            except ValueError as error:
                self._skip(signed, str(error))
                continue
            if news:
                self._news(announcement)
        self.answered = True
        self._verdict()

    def _hear(self, announcement: Announcement) -> bool:
        """Return whether it is news about a storage server; raises ValueError as the book does."""
        server_id = announcement.server_id
        is_storage = announcement.fields.get("service-name") == STORAGE
        if is_storage and self.is_full and server_id not in self._counted:
            raise ValueError(
                f"{self._most_servers} servers of this introducer are known already, and no more are kept"
            )
        news = self._book.hear(announcement)
        if is_storage:
            self._counted.add(server_id)
            self.announced.add(server_id)
        return news

    def _skip(self, signed: object, why: str) -> None:
        # After every reconnection the same come again; they are told once.
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
    """What the introducer calls, over Foolscap, with announcements."""

    def __init__(self, heard: Callable[[Iterable[object]], None]) -> None:
        self._heard = heard

    def remote_announce_v2(self, announcements: Any) -> None:
        self._heard(announcements)
