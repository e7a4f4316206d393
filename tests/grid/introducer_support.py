"""An introducer for tests: one that lives in memory, and one behind a real Foolscap connection."""

from __future__ import annotations

from typing import Any

from foolscap.api import Referenceable
from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from pipegrid.wire import announcements, server_address
from pipegrid.wire.announcements import AnnouncementKey
from pipegrid.wire.introducer_protocol import PROTOCOL_KEY, RIIntroducer

FURL = server_address.parse_furl(
    "pb://wu6jggkgtfgdo2e4s22ywi3uc3knlx7u@tcp:intro.example.org:1/introducer"
)


def key(number: int) -> AnnouncementKey:
    """Return the key of a server of the test's."""
    return AnnouncementKey(bytes([number]) * 32)


def nurl(number: int) -> str:
    """Return an address for it."""
    return f"pb://{'A' * 42}{'AEIMQUYcgkosw048'[number % 16]}@s{number}.example.org:1/secret{number}#v=1"


def announced(number: int, **fields: Any) -> announcements.Signed:
    """Return the announcement of a server of the test's."""
    content = {
        "service-name": "storage",
        "nickname": f"server-{number}",
        "anonymous-storage-NURLs": [nurl(number)],
        "seqnum": 1,
        **fields,
    }
    return announcements.sign(content, key(number))


class FakeIntroducer:
    """
    Stands in for a tub's ``getReference``, the introducer behind it included.

    Attributes:
        down: what connecting fails with, if anything.
        silent: connections are never made.
        instead: what is found in the place of an introducer, if anything.
        taken: fires when the introducer says that it has taken an announcement; None: at once.
        subscribers: everybody who listens, ever.
        attempts: how often somebody connected.
    """

    def __init__(self, *known: Any) -> None:
        self.known = list(known)
        self.down: Exception | None = None
        self.silent = False
        self.version: Any = {PROTOCOL_KEY: {}}
        self.instead: list[Any] = []
        self.taken: Deferred[None] | None = None
        self.subscribers: list[Any] = []
        self.published: list[Any] = []
        self.attempts = 0
        self.references: list[FakeReference] = []

    def connect(self, _furl: str) -> Deferred[Any]:
        """Be ``getReference``."""
        self.attempts += 1
        if self.silent:
            return Deferred()
        if self.down is not None:
            return fail(self.down)
        if self.instead:
            return succeed(self.instead[0])
        reference = FakeReference(self)
        self.references.append(reference)
        return succeed(reference)

    def lose(self) -> None:
        """Lose all connections."""
        references, self.references = self.references, []
        for reference in references:
            for callback in list(reference.callbacks.values()):
                callback()


class FakeReference:
    """A remote reference."""

    def __init__(self, introducer: FakeIntroducer) -> None:
        self._introducer = introducer
        self.callbacks: dict[int, Any] = {}

    def notifyOnDisconnect(self, callback: Any) -> int:
        """As Foolscap's."""
        self.callbacks[len(self.callbacks)] = callback
        return len(self.callbacks) - 1

    def dontNotifyOnDisconnect(self, marker: int) -> None:
        """As Foolscap's."""
        del self.callbacks[marker]

    def callRemote(self, name: str, *arguments: Any) -> Deferred[Any]:
        """As Foolscap's."""
        if name == "get_version":
            return succeed(self._introducer.version)
        if name == "publish_v2":
            self._introducer.published.append(arguments[0])
            return succeed(None) if self._introducer.taken is None else self._introducer.taken
        assert name == "subscribe_v2"
        subscriber, service, information = arguments
        assert service == b"storage"
        assert all(isinstance(each, bytes) for each in information)
        self._introducer.subscribers.append(subscriber)
        if self._introducer.known:
            subscriber.remote_announce_v2(set(self._introducer.known))
        return succeed(None)


@implementer(RIIntroducer)  # type: ignore[misc]
class RealIntroducer(Referenceable):  # type: ignore[misc]
    """A small introducer, to be registered with a tub."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self.subscribers: list[Any] = []
        self.hesitates = False

    def remote_get_version(self) -> dict[bytes, Any]:
        """Tell the protocol."""
        return {PROTOCOL_KEY: {}, b"application-version": b"test"}

    def remote_publish_v2(self, announcement: Any, _canary: Any) -> None:
        """Tell everybody."""
        self.known.append(announcement)
        for subscriber in self.subscribers:
            subscriber.callRemoteOnly("announce_v2", {announcement})

    def remote_subscribe_v2(self, subscriber: Any, _service: bytes, _information: Any) -> None:
        """Tell somebody all, and all that comes."""
        self.subscribers.append(subscriber)
        if not self.hesitates:
            subscriber.callRemoteOnly("announce_v2", set(self.known))

    def tell(self) -> None:
        """Tell everybody all, at last."""
        self.hesitates = False
        for subscriber in self.subscribers:
            subscriber.callRemoteOnly("announce_v2", set(self.known))
