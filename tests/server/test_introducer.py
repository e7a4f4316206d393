"""An introducer: what subscribers receive and when, what a connection may cost, and the whole node."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from foolscap.api import Referenceable
from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.logger import formatEvent
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer

from pipegrid.disk.atomic_write import replace_file
from pipegrid.errors import RemoteCallError, ServerRefused, UsageError
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.server import introducer_announcement_file, introducer_registry, introducer_service
from pipegrid.server.introducer_pages import IntroducerPages
from pipegrid.server.introducer_process import IntroducerNode, IntroducerSettings
from pipegrid.server.introducer_registry import MAX_PER_CONNECTION, MAX_UNITS, UNIT_BYTES
from pipegrid.server.introducer_service import (
    ACKNOWLEDGED_S,
    BURST,
    LOG_S,
    MAX_LOG_LINES,
    MAX_SUBSCRIPTIONS,
    NEWS_APART_S,
    NEWS_BYTES,
    NEWS_SUBSCRIBERS,
    REFILL_S,
    IntroducerService,
    LimitedLog,
)
from pipegrid.wire.announcements import Signed
from pipegrid.wire.foolscap_broker import make_tub
from pipegrid.wire.introducer_protocol import (
    LOST_AFTER_S,
    PROTOCOL_KEY,
    RIIntroducerSubscriberClient,
    call,
    connect_introducer,
)
from pipegrid.wire.server_address import parse_furl
from tests.server.test_introducer_registry import announced


class FakeBroker:
    """One client's connection."""

    def __init__(self, host: str) -> None:
        self.transport = self
        self.host = host
        self.refusals: list[str] = []
        self.watchers: list[Any] = []

    def getPeer(self) -> FakeBroker:
        """Return what has the address."""
        return self

    def notifyOnDisconnect(self, callback: Any, *args: Any) -> None:
        """As Foolscap's."""
        self.watchers.append((callback, args))

    def refuse(self, reason: str) -> None:
        """Note why it ends, and end it."""
        self.refusals.append(reason)
        self.lose()

    def lose(self) -> None:
        """End it."""
        watchers, self.watchers = self.watchers, []
        for callback, args in watchers:
            callback(*args)


class FakeClient:
    """A reference to a client's object, which is its own tracker."""

    def __init__(self, host: str = "192.0.2.1") -> None:
        self.tracker = self
        self.broker = FakeBroker(host)
        self.heard: list[set[Signed]] = []
        self.answer: Deferred[None] | None = None

    def callRemote(self, name: str, announcements: set[Signed]) -> Deferred[None]:
        """Receive announcements."""
        assert name == "announce_v2"
        self.heard.append(announcements)
        return succeed(None) if self.answer is None else self.answer


class ServiceTests(SynchronousTestCase):
    """The object, on a clock of its own."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000.0)
        self.log = LimitedLog(self.clock)
        self.service = IntroducerService(self.clock, self.log)
        self.said: list[str] = []
        self.patch(
            introducer_service.log, "observer", lambda event: self.said.append(formatEvent(event))
        )

    def publish(self, signed: object, client: FakeClient | None = None) -> None:
        """Announce something, on a connection of its own."""
        self.service.remote_publish_v2(signed, client or FakeClient())

    def subscribe(self, client: FakeClient, service: bytes = b"storage") -> None:
        """Subscribe, and wait for what it gives."""
        self.service.remote_subscribe_v2(client, service, {})
        self.clock.advance(0)

    def test_what_a_subscriber_receives(self) -> None:
        """All servers of its service at once, an empty list included; then each new one."""
        early, late, other = FakeClient(), FakeClient(), FakeClient()
        self.subscribe(early)
        self.publish(announced(1))
        self.publish(announced(2, service="other"))
        self.clock.advance(NEWS_APART_S)
        self.subscribe(late)
        self.subscribe(other, b"other")
        self.assertEqual(early.heard, [set(), {announced(1)}])
        self.assertEqual(late.heard, [{announced(1)}])
        self.assertEqual(other.heard, [{announced(2, service="other")}])

    def test_news_are_gathered(self) -> None:
        """Messages are apart, and a later announcement replaces one that still waits."""
        client = FakeClient()
        self.subscribe(client)
        for seqnum in range(1, 5):
            self.publish(announced(1, seqnum))
        self.publish(announced(2))
        self.assertEqual(client.heard, [set()])
        self.clock.advance(NEWS_APART_S)
        self.assertEqual(client.heard[1:], [{announced(1, 4), announced(2)}])
        self.clock.advance(60.0)
        self.publish(announced(3))
        self.clock.advance(0)
        self.assertEqual(client.heard[2:], [{announced(3)}])

    def test_news_have_a_size(self) -> None:
        """Much news takes several messages; nothing is left out."""
        client = FakeClient()
        self.subscribe(client)
        size = NEWS_BYTES // 3
        for number in range(10):
            self.publish(announced(number, size=size))
        self.clock.pump([NEWS_APART_S] * 10)
        self.assertEqual([len(each) for each in client.heard], [0, 3, 3, 3, 1])

    def test_a_slow_subscriber(self) -> None:
        """It is sent nothing until it has acknowledged the last; after long, it is disconnected."""
        client = FakeClient()
        client.answer = Deferred()
        self.subscribe(client)
        self.publish(announced(1))
        self.clock.advance(ACKNOWLEDGED_S - 1)
        self.assertEqual(client.heard, [set()])
        answer, client.answer = client.answer, Deferred()
        answer.callback(None)
        self.clock.advance(0)
        self.assertEqual(client.heard, [set(), {announced(1)}])
        self.publish(announced(2))
        self.clock.advance(ACKNOWLEDGED_S)
        self.assertIn("has not acknowledged", client.broker.refusals[0])
        self.assertEqual(self.service.subscribers.total(), 0)
        self.assertEqual((len(client.heard), self.clock.getDelayedCalls()), (2, []))

    def test_a_subscriber_that_fails(self) -> None:
        """It gets the next news all the same."""
        client = FakeClient()
        client.answer = fail(ValueError("it cannot"))
        self.subscribe(client)
        client.answer = None
        self.publish(announced(1))
        self.clock.advance(NEWS_APART_S)
        self.assertEqual(client.heard[1:], [{announced(1)}])

    def test_lost_connections(self) -> None:
        """Leave nothing: no subscriber, no timer, no holder."""
        client = FakeClient()
        self.subscribe(client)
        self.publish(announced(1), client)
        self.assertEqual(self.service.subscribers, {"storage": 1})
        client.broker.lose()
        self.publish(announced(2))
        self.assertEqual(self.service.subscribers.total(), 0)
        self.assertEqual([len(each.holders) for each in self.service.registry], [0, 1])
        self.service.stop()
        self.log.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_subscriptions(self) -> None:
        """A few for each connection; one that is repeated is one."""
        client = FakeClient()
        for _ in range(5):
            self.subscribe(client)
        for number in range(1, MAX_SUBSCRIPTIONS):
            self.subscribe(client, b"service %d" % number)
        with self.assertRaises(ServerRefused):
            self.subscribe(client, b"more")
        self.assertEqual(len(client.heard), MAX_SUBSCRIPTIONS)

    def test_the_rate_of_a_connection(self) -> None:
        """After a burst, one in ten seconds; what is known costs nothing."""
        client = FakeClient()
        for seqnum in range(1, BURST + 1):
            self.publish(announced(1, seqnum), client)
        with self.assertRaisesRegex(ServerRefused, "the announcement is refused: this connection"):
            self.publish(announced(1, 1000), client)
        self.publish(announced(1, BURST), client)
        self.clock.advance(REFILL_S)
        self.publish(announced(1, 1000), client)
        self.assertEqual(self.service.outcomes, {"new": 1, "changed": BURST, "rate": 1, "known": 1})

    def test_a_large_change(self) -> None:
        """It costs as many announcements as it takes units: it is sent to all."""
        client = FakeClient()
        self.publish(announced(1, 1), client)
        for seqnum in range(2, 2 + BURST // 4):
            self.publish(announced(1, seqnum, size=3 * UNIT_BYTES), client)
        with self.assertRaises(ServerRefused):
            self.publish(announced(1, 1000), client)

    def test_news_for_many(self) -> None:
        """With twice as many subscribers news is half as frequent."""
        clients = [FakeClient() for _ in range(2 * NEWS_SUBSCRIBERS)]
        for client in clients:
            self.subscribe(client)
        self.publish(announced(1))
        self.clock.advance(NEWS_APART_S)
        self.assertEqual(len(clients[-1].heard), 1)
        self.clock.advance(NEWS_APART_S)
        self.assertEqual(len(clients[-1].heard), 2)
        for client in clients:
            client.broker.lose()
        self.assertEqual(self.service.news_apart_s(), NEWS_APART_S)

    def test_a_displaced_server(self) -> None:
        """Its connection ends, so that its server announces it again."""
        client = FakeClient()
        self.publish(announced(1))
        self.publish(announced(2), client)
        self.patch(introducer_registry, "MAX_UNITS", 2)
        self.publish(announced(3), FakeClient("198.51.100.1"))
        self.clock.advance(0)
        self.assertIn("gave way to others", client.broker.refusals[0])
        self.assertEqual({each.nickname for each in self.service.registry}, {"n1", "n3"})

    def test_the_log_has_a_limit(self) -> None:
        """So many lines in a minute; then how many were not written."""
        for number in range(3):
            self.publish(announced(number, 2))
            self.publish(announced(number, 1))
        self.assertIn(" (n0) is listed for service storage", self.said[0])
        self.assertIn("by 192.0.2.1 is not accepted: a later one is known", self.said[1])
        for _ in range(100):
            with self.assertRaises(ServerRefused):
                self.publish((b"\x1b[2J", b"v0-", b"v0-\n"))
        self.assertEqual(len(self.said), MAX_LOG_LINES)
        self.assertNotIn("\x1b", "".join(self.said))
        self.clock.advance(LOG_S)
        self.assertEqual(self.said[MAX_LOG_LINES:], ["86 more events not logged"])
        self.log.stop()

    def test_pages(self) -> None:
        """Counts as Tahoe-LAFS gives them, names escaped, and no address."""
        self.publish(announced(1, nickname="<script>\x1b", FURL="pb://secret"))
        self.publish(announced(2, service="other"))
        client = FakeClient()
        self.subscribe(client)
        pages = IntroducerPages(self.service, lambda: 5, lambda: 7)
        self.assertEqual(
            json.loads(pages.as_json()),
            {
                "subscription_summary": {"storage": 1},
                "announcement_summary": {"storage": 1, "other": 1},
            },
        )
        page = pages.as_html().decode()
        self.assertIn("Announced: other: 1, storage: 1. Subscribed: storage: 1.", page)
        self.assertIn(r"<td>&lt;script&gt;\x1b</td>", page)
        factory = pages.factory(self.clock)
        found = [factory.find(url) for url in (b"/", b"/?t=json", b"/metrics?x", b"/else")]
        kinds = [None if each is None else each.content_type.split(b";")[0] for each in found]
        self.assertEqual(kinds, [b"text/html", b"application/json", b"text/plain", None])
        assert found[2] is not None
        metrics = factory.content(found[2]).decode()
        for line in (
            'pipegrid_introducer_servers{service="other"} 1.0',
            'pipegrid_introducer_subscribers{service="storage"} 1.0',
            'pipegrid_introducer_announcements_total{outcome="new"} 2.0',
            "pipegrid_connections 5.0",
            "pipegrid_refused_connections_total 7.0",
        ):
            self.assertIn(line + "\n", metrics)
        self.assertNotIn("secret", page + metrics)


class ListingFileTests(SynchronousTestCase):
    """The file of what is listed."""

    def test_a_reactor_that_has_stopped_the_workers(self) -> None:
        """The file is written all the same, and nothing is said."""
        directory, clock = Path(self.mktemp()), Clock()
        path = directory / introducer_announcement_file.LISTED_NAME
        path.parent.mkdir(parents=True)
        service = introducer_service.IntroducerService(clock, introducer_service.LimitedLog(clock))

        class StoppedWorkers:
            """As ``Workers`` after the reactor's shutdown."""

            def run(self, *_: Any) -> Deferred[Any]:
                """Do nothing."""
                return fail(CancelledError())

        workers: Any = StoppedWorkers()
        file = introducer_announcement_file.ListingFile(clock, service, directory, workers)
        file.start()
        service.changed()
        clock.advance(introducer_announcement_file.SAVES_APART_S)
        self.assertFalse(path.exists())
        self.successResultOf(Deferred.fromCoroutine(file.stop()))
        self.assertIsInstance(json.loads(path.read_bytes()), (dict, list))
        self.assertEqual(self.flushLoggedErrors(), [])


@implementer(RIIntroducerSubscriberClient)  # type: ignore[misc]
class Subscribed(Referenceable):  # type: ignore[misc]
    """A real subscriber."""

    def __init__(self) -> None:
        self.heard: set[Signed] = set()
        self.waiting: list[tuple[int, Deferred[None]]] = []

    def remote_announce_v2(self, announcements: set[Signed]) -> None:
        """Note them."""
        self.heard |= announcements
        for count, each in self.waiting:
            if len(self.heard) >= count and not each.called:
                each.callback(None)

    def have(self, count: int) -> Deferred[None]:
        """Fire when there are so many."""
        enough: Deferred[None] = Deferred()
        self.waiting.append((count, enough))
        self.remote_announce_v2(set())
        return enough


class LoneClient(Protocol):
    """A client of another protocol."""

    def __init__(self) -> None:
        self.lost: Deferred[None] = Deferred()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Note it."""
        self.lost.callback(None)


class NodeTests(TestCase):
    """A whole node, on a loopback port, and clients of Foolscap."""

    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor

        self.reactor: Any = reactor
        self.directory = Path(self.mktemp()).absolute()
        self.port = "tcp:0:interface=127.0.0.1"
        self.tubs: list[Any] = []
        self.node: IntroducerNode | None = None
        self.patch(introducer_service, "NEWS_APART_S", 0.01)
        self.addCleanup(lambda: Deferred.fromCoroutine(self._end()))

    async def _end(self) -> None:
        for tub in self.tubs:
            await tub.stopService()
        await self.stop()

    async def start(self) -> IntroducerNode:
        """Start the node, and again at the same port."""
        settings = IntroducerSettings(directory=self.directory, port=self.port)
        self.node = IntroducerNode(self.reactor, settings)
        await self.node.start()
        self.port = f"tcp:{self.node.listening.port}:interface=127.0.0.1"
        return self.node

    async def stop(self) -> None:
        """Stop the node, if it runs."""
        node, self.node = self.node, None
        if node is not None:
            await node.stop()

    async def connect(self) -> Any:
        """Return a reference of a client."""
        assert self.node is not None
        tub = make_tub(LOST_AFTER_S, DIRECT_CONNECTIONS)
        tub.startService()
        self.tubs.append(tub)
        return await connect_introducer(tub.getReference, parse_furl(self.node.furl), self.reactor)

    def test_a_restart(self) -> Deferred[None]:
        """It has the same fURL, and lists what it listed, to a client that comes first."""
        return Deferred.fromCoroutine(self._restart())

    async def _restart(self) -> None:
        furl = (await self.start()).furl
        server, client = await self.connect(), await self.connect()
        subscriber = Subscribed()
        await client.callRemote("subscribe_v2", subscriber, b"storage", {b"version": 0})
        await server.callRemote("publish_v2", announced(1), Referenceable())
        await subscriber.have(1)
        await self.stop()
        self.assertEqual(
            (self.directory / introducer_announcement_file.LISTED_NAME).stat().st_mode & 0o77, 0
        )
        self.assertEqual((await self.start()).furl, furl)
        client = await self.connect()
        again = Subscribed()
        await client.callRemote("subscribe_v2", again, b"storage", {b"version": 0})
        await again.have(1)
        self.assertEqual(again.heard, {announced(1)})

    def test_a_damaged_list(self) -> Deferred[None]:
        """It begins with none, and says so."""
        return Deferred.fromCoroutine(self._damaged())

    async def _damaged(self) -> None:
        said: list[str] = []
        self.patch(
            introducer_announcement_file.log,
            "observer",
            lambda event: said.append(formatEvent(event)),
        )
        path = self.directory / introducer_announcement_file.LISTED_NAME
        path.parent.mkdir(parents=True)
        path.write_text('{"format": 1, "announcements": [')
        node = await self.start()
        self.assertEqual(len(node.service.registry), 0)
        self.assertIn(f"cannot understand {path}: ", said[0])
        kept = path.with_name(f"{path.name}.damaged")
        self.assertEqual(kept.read_text(), '{"format": 1, "announcements": [')

    def test_a_location_for_once(self) -> Deferred[None]:
        """It is not written over the fURL that is there."""
        return Deferred.fromCoroutine(self._once())

    async def _once(self) -> None:
        node = await self.start()
        before, path = node.furl, self.directory / "private/introducer.furl"
        await self.stop()
        settings = IntroducerSettings(
            directory=self.directory,
            port="tcp:0:interface=127.0.0.1",
            location="example.org:1",
            keeps_location=False,
        )
        self.node = IntroducerNode(self.reactor, settings)
        await self.node.start()
        self.assertIn("@tcp:example.org:1/", self.node.furl)
        self.assertEqual(path.read_text().strip(), before)

    def test_a_full_disk(self) -> Deferred[None]:
        """That is said once, and the introducer goes on; when there is space again it writes."""
        return Deferred.fromCoroutine(self._full())

    async def _full(self) -> None:
        said: list[str] = []
        self.patch(
            introducer_announcement_file.log,
            "observer",
            lambda event: said.append(formatEvent(event)),
        )

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        node = await self.start()
        self.patch(introducer_announcement_file, "replace_file", full)
        path = self.directory / introducer_announcement_file.LISTED_NAME
        for _ in range(2):
            node._listing._save()
            await node._listing._saved()
        server = await self.connect()
        await call(server, "publish_v2", announced(1), Referenceable())
        self.assertEqual(
            [each for each in said if "cannot" in each],
            [f"cannot write {path}: No space left on device; it is tried again"],
        )
        self.patch(introducer_announcement_file, "replace_file", replace_file)
        await self.stop()
        self.assertEqual(len(json.loads(path.read_bytes())["announcements"]), 1)

    def test_other_protocols(self) -> Deferred[None]:
        """What does not begin as Foolscap does is disconnected, and logged."""
        return Deferred.fromCoroutine(self._other())

    async def _other(self) -> None:
        said: list[str] = []
        self.patch(
            introducer_service.log, "observer", lambda event: said.append(formatEvent(event))
        )
        node = await self.start()
        client = LoneClient()
        endpoint = TCP4ClientEndpoint(self.reactor, "127.0.0.1", node.listening.port)
        await connectProtocol(endpoint, client)
        assert client.transport is not None
        client.transport.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
        await client.lost
        self.assertEqual(said, ["turned 127.0.0.1 away: it does not speak Foolscap"])

    def test_one_at_a_time(self) -> Deferred[None]:
        """A second one in the directory does not start, and the first is not disturbed."""
        return Deferred.fromCoroutine(self._second())

    async def _second(self) -> None:
        await self.start()
        second = IntroducerNode(
            self.reactor, IntroducerSettings(directory=self.directory, port="0")
        )
        with self.assertRaisesRegex(UsageError, "another introducer runs in"):
            await second.start()
        self.assertTrue((self.directory / "running.process").exists())
        self.assertIn(PROTOCOL_KEY, await (await self.connect()).callRemote("get_version"))
        await self.stop()
        self.assertFalse((self.directory / "running.process").exists())

    def test_a_hostile_client(self) -> Deferred[None]:
        """Forged, replayed, oversized, too many: all is refused, and the known server stays listed."""
        return Deferred.fromCoroutine(self._hostile())

    async def _hostile(self) -> None:
        node = await self.start()
        server, enemy = await self.connect(), await self.connect()
        await server.callRemote("publish_v2", announced(1, 5), Referenceable())
        message, signature, key = announced(1, 6)
        for wrong in (
            (message, signature, announced(2)[2]),
            (message[:-1], signature, key),
            "text",
        ):
            with self.assertRaisesRegex(RemoteCallError, "the announcement is refused: it"):
                await call(enemy, "publish_v2", wrong, Referenceable())
        await enemy.callRemote("publish_v2", announced(1, 4), Referenceable())  # ignored
        large = announced(3, size=40_000)
        with self.assertRaisesRegex(RemoteCallError, "bytes, and 32768 are allowed"):
            await call(enemy, "publish_v2", large, Referenceable())
        refused = 0
        for number in range(100, 200):
            try:
                await call(enemy, "publish_v2", announced(number), Referenceable())
            except RemoteCallError:  # noqa: PERF203  most of them
                refused += 1
        self.assertEqual(refused, 100 - MAX_PER_CONNECTION)
        huge = announced(4, size=200_000)
        with self.assertRaisesRegex(Exception, "larger than its kind may be|lost"):
            await call(enemy, "publish_v2", huge, Referenceable())
        listed = {each.seqnum for each in node.service.registry if each.nickname == "n1"}
        self.assertEqual(listed, {5})
        self.assertEqual(len(node.service.registry), 1 + MAX_PER_CONNECTION)
        self.assertLess(len(node.service.registry), MAX_UNITS)
