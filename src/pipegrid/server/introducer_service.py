"""
An introducer's Foolscap object: it receives announcements, and sends them to subscribers.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
from foolscap.api import Referenceable
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.text import counted, printable
from pipegrid.errors import ServerRefused
from pipegrid.reactor.deferreds import Timer
from pipegrid.server.foolscap.remote_objects import client_of
from pipegrid.server.introducer_registry import (
    AnnouncementRegistry,
    AnnouncementVerdict,
    ListedServer,
    ListingKey,
    RefusedAnnouncement,
    units_of,
)
from pipegrid.version import __version__
from pipegrid.wire.announcements import Signed, signer
from pipegrid.wire.introducer_protocol import PROTOCOL_KEY, RIIntroducer

# mypy: disable-error-code="misc"

# Limits on the work that a client may cause:
#
# * Each unknown announcement must be verified, and may be sent to all subscribers. A connection may send
#   ``BURST`` of them, and then one every ``REFILL_S``; further ones are refused without being read. A node
#   sends one or two when it connects, and then none. A changed announcement counts once per unit. Repeating a
#   known announcement is not counted.
# * A connection may subscribe ``MAX_SUBSCRIPTIONS`` times.
# * A subscriber first gets all listed servers in one message, and then news. Messages of news are at least
#   ``NEWS_APART_S`` apart, longer if there are many subscribers (``news_apart_s``), and have at most about
#   ``NEWS_BYTES``. A message is sent only after the previous one is acknowledged. If a server announces again
#   meanwhile, only its last announcement waits, so no more announcements wait than are listed.
# * A subscriber that acknowledges nothing for ``ACKNOWLEDGED_S`` is disconnected.

BURST = 32
REFILL_S = 10.0
MAX_SUBSCRIPTIONS = 2
NEWS_APART_S = 1.0
NEWS_SUBSCRIBERS = 50
"""Up to this many subscribers get news every ``NEWS_APART_S``; with more, all wait longer, in proportion."""
NEWS_BYTES = 64 << 10
ACKNOWLEDGED_S = 120.0
SNAPSHOT_S = 1.0
"""For how long one set of all announcements is sent to further subscribers; a thousand may share it."""

MAX_LOG_LINES = 20
"""The most lines about clients and announcements in ``LOG_S``; further ones are only counted."""
LOG_S = 60.0

log = Logger()


class LimitedLog:
    """
    Logs new servers, and the errors of clients, in at most ``MAX_LOG_LINES`` lines per ``LOG_S``.

    Args:
        clock: measures the period to which the limit applies.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._timer = Timer(clock, self._next)
        self._left = MAX_LOG_LINES
        self._dropped = 0

    def turned_away(self, peer: str, reason: str) -> None:
        """Log why a client was rejected."""
        self._line("turned {peer} away: {reason}", peer=peer, reason=reason)

    def refused(self, peer: str, server: str, reason: str) -> None:
        """Log why an announcement was refused, or ignored."""
        self._line(
            "the announcement of server {server} by {peer} is not accepted: {reason}",
            server=server,
            peer=peer,
            reason=reason,
        )

    def stop(self) -> None:
        """Stop the timer that logs how many lines were left out, since the introducer stops."""
        self._timer.stop()

    def listed(self, server: ListedServer) -> None:
        """Log that a new server is listed."""
        self._line(
            "server {server} ({nickname}) is listed for service {service}",
            server=server.server_id,
            nickname=server.nickname,
            service=server.service,
        )

    def _line(self, line: str, **values: str) -> None:
        if not self._timer.is_set:
            self._timer.set(LOG_S)
        if self._left:
            self._left -= 1
            log.info(line, **{name: printable(value) for name, value in values.items()})
        else:
            self._dropped += 1

    def _next(self) -> None:
        if self._dropped:
            log.info("{events}", events=counted(self._dropped, "more event") + " not logged")
        self._left, self._dropped = MAX_LOG_LINES, 0


@attrs.define(eq=False)
class _Client:
    """
    One connection that has announced or subscribed.

    Attributes:
        place: the client's address.
        tokens: how many announcements the client may send at ``filled_s``.
    """

    broker: Any
    place: str
    filled_s: float
    tokens: float = BURST
    subscribers: dict[tuple[Any, str], Subscriber] = attrs.field(factory=dict)

    def may_announce(self, now_s: float) -> bool:
        """Return whether the client may send another announcement, and count it if so."""
        passed_s = max(0.0, now_s - self.filled_s)
        self.tokens = min(BURST, self.tokens + passed_s / REFILL_S)
        self.filled_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def charge(self, tokens: int) -> None:
        """
        Count more tokens for the last announcement; if too few are left, the next announcement must wait
        longer.
        """
        self.tokens -= min(tokens, BURST)


class Subscriber:
    """
    Sends announcements to one subscriber.

    Args:
        reference: the subscriber's object.
        everything: returns all announcements of the service.
        clock: for pauses and the timeout.
        apart_s: returns the shortest time between two messages.
    """

    def __init__(
        self,
        reference: Any,
        everything: Callable[[], set[Signed]],
        clock: IReactorTime,
        apart_s: Callable[[], float],
    ) -> None:
        self._reference = reference
        self._apart_s = apart_s
        self._everything: Callable[[], set[Signed]] | None = everything
        self._clock = clock
        self._news: dict[ListingKey, ListedServer] = {}
        self._waits = False  # whether a message is unacknowledged
        self._sent_s = float("-inf")
        self._timer = Timer(clock, self._send)
        self._stopped = False
        self._schedule()

    def add(self, server: ListedServer) -> None:
        """Send a new announcement with the next message of news."""
        if self._everything is None:  # else the first message contains it
            self._news[server.index] = server
            self._schedule()

    def stop(self) -> None:
        """Send nothing more, since the connection is lost."""
        self._stopped = True
        self._news.clear()
        self._timer.stop()

    def _schedule(self) -> None:
        if not (self._waits or self._stopped or self._timer.is_set):
            pause_s = self._sent_s + self._apart_s() - self._clock.seconds()
            self._timer.set(max(0.0, pause_s))

    def _send(self) -> None:
        announcements = self._next_news() if self._everything is None else self._everything()
        self._everything = None
        self._waits = True
        self._sent_s = self._clock.seconds()
        sent: Deferred[Any] = self._reference.callRemote("announce_v2", announcements)
        sent.addTimeout(ACKNOWLEDGED_S, self._clock)
        sent.addBoth(self._acknowledged)

    def _next_news(self) -> set[Signed]:
        found: set[Signed] = set()
        size = 0
        while self._news and size < NEWS_BYTES:
            server = self._news.pop(next(iter(self._news)))
            found.add(server.signed)
            size += len(server.signed[0])
        return found

    def _acknowledged(self, result: Any) -> None:
        # Other errors are ignored: a subscriber that fails to process one message may still process the next.
        self._waits = False
        if isinstance(result, Failure) and isinstance(result.value, TimeoutError):
            self._reference.tracker.broker.refuse(
                f"it has not acknowledged announcements for {ACKNOWLEDGED_S:g} s"
            )
        elif self._news:
            self._schedule()


@implementer(RIIntroducer)
class IntroducerService(Referenceable):
    """
    The object to which an introducer's fURL leads.

    Args:
        clock: a clock that cannot be set.
        log_limit: logs new servers and refused announcements.

    Attributes:
        registry: the listed servers.
        outcomes: the number of announcements with each outcome.
    """

    def __init__(self, clock: IReactorTime, log_limit: LimitedLog) -> None:
        self.registry = AnnouncementRegistry(clock.seconds, self._changed, self._displaced)
        self.outcomes: Counter[str] = Counter()
        self.changed: Callable[[], None] = lambda: None
        """Called when the listed announcements have changed."""
        self._clock = clock
        self._log = log_limit
        self._clients: dict[Any, _Client] = {}
        self._subscriptions = 0
        self._snapshots: dict[str, tuple[float, set[Signed]]] = {}

    @property
    def subscribers(self) -> Counter[str]:
        """How many subscribers each service has."""
        return Counter(
            service for client in self._clients.values() for _, service in client.subscribers
        )

    def news_apart_s(self) -> float:
        """Return the shortest time between two messages to a subscriber."""
        return NEWS_APART_S * max(1.0, self._subscriptions / NEWS_SUBSCRIBERS)

    def stop(self) -> None:
        """Stop all timers, since the connections end."""
        for client in list(self._clients.values()):
            self._lost(client)

    # Remote calls.

    def remote_get_version(self) -> dict[bytes, Any]:
        """Return which versions of the protocol are supported."""
        return {
            PROTOCOL_KEY: {},
            b"application-version": f"pipegrid/{__version__}".encode("ascii"),
        }

    def remote_publish_v2(self, announcement: Any, canary: Any) -> None:
        """List an announcement, and send it to subscribers if it is new or changed."""
        client = self._client(canary)
        reason = "rate"
        try:
            known = self.registry.knows(announcement)
            if not known and not client.may_announce(self._clock.seconds()):
                raise RefusedAnnouncement(
                    "rate", f"this connection may announce one server every {REFILL_S:g} s, no more"
                )
            outcome = self.registry.publish(announcement, client.broker, client.place)
            reason = outcome.value
            if outcome is AnnouncementVerdict.CHANGED:
                client.charge(units_of(announcement) - 1)
            if outcome is AnnouncementVerdict.OLD:
                self._note(client, announcement, "a later one is known")
        except RefusedAnnouncement as error:
            reason = error.reason
            self._note(client, announcement, str(error))
            raise ServerRefused(f"the announcement is refused: {error}") from None
        finally:
            self.outcomes[reason] += 1

    def remote_subscribe_v2(
        self, subscriber: Any, service_name: bytes, subscriber_info: dict[bytes, Any]
    ) -> None:
        """Send all listed announcements of a service to a subscriber, and new ones as they arrive."""
        client = self._client(subscriber)
        service = service_name[:256].decode("utf-8", "replace")
        key = subscriber, service
        if key in client.subscribers:
            return
        if len(client.subscribers) >= MAX_SUBSCRIPTIONS:
            raise ServerRefused(f"a connection may subscribe {MAX_SUBSCRIPTIONS} times")
        everything = partial(self._snapshot, service)
        self._subscriptions += 1
        call = subscriber, everything, self._clock, self.news_apart_s
        client.subscribers[key] = Subscriber(*call)

    # Connections.

    def _client(self, reference: Any) -> _Client:
        broker = reference.tracker.broker
        client = self._clients.get(broker)
        if client is None:
            place = client_of(reference).address
            client = _Client(broker, place, self._clock.seconds())
            self._clients[broker] = client
            broker.notifyOnDisconnect(self._lost, client)
        return client

    def _lost(self, client: _Client) -> None:
        if self._clients.pop(client.broker, None) is not None:
            self._subscriptions -= len(client.subscribers)
            for subscriber in client.subscribers.values():
                subscriber.stop()
            self.registry.lost(client.broker)

    def _displaced(self, broker: Any) -> None:
        """
        End the connection of a server that gave way to another one, so that the server announces itself again
        later.
        """
        reason = "its server gave way to others; it may announce it again"
        self._clock.callLater(0, broker.refuse, reason)

    def _changed(self, server: ListedServer, is_new: bool) -> None:
        if is_new:
            self._log.listed(server)
        self._snapshots.pop(server.service, None)
        for client in self._clients.values():
            for (_, service), subscriber in client.subscribers.items():
                if service == server.service:
                    subscriber.add(server)
        self.changed()

    def _snapshot(self, service: str) -> set[Signed]:
        """Return all announcements of a service; subscribers at about the same time get the same set."""
        now_s = self._clock.seconds()
        made_s, found = self._snapshots.get(service, (float("-inf"), set()))
        if now_s - made_s > SNAPSHOT_S:
            found = {each.signed for each in self.registry.of_service(service)}
            self._snapshots = {service: (now_s, found)}  # only one: any client may name services
        return found

    def _note(self, client: _Client, announcement: object, reason: str) -> None:
        self._log.refused(client.place, signer(announcement), reason)
