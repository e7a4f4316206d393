"""Finding servers through introducers: news, what is skipped, losses, memory, and when to begin."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UnhappyError
from pipegrid.flow.pipeline import Pipeline
from pipegrid.grid import introducer_discovery
from pipegrid.grid.introducer_client import MAX_WARNINGS
from pipegrid.grid.introducer_discovery import (
    FORGET_AFTER_S,
    GRACE_S,
    PATIENCE_S,
    Discovery,
    DiscoverySettings,
    cache_name,
    read_cache,
)
from pipegrid.grid.server_readiness import WAIT_FOR_S, Readiness
from pipegrid.grid.server_registry import MAX_WARNINGS as MAX_GRID_WARNINGS
from pipegrid.grid.server_registry import ServerRegistry, Warnings
from pipegrid.grid.servers_and_introducers_yaml import (
    IntroducerAddress,
    load_introducers,
    parse_introducers,
)
from pipegrid.transfer.peers import Peer, ring
from pipegrid.wire.announcements import (
    AnnouncementRecords,
    KnownServer,
    describe,
    make_signing_key,
    sign,
)
from pipegrid.wire.banana_receiver import LimitExceeded
from pipegrid.wire.introducer_protocol import PROTOCOL_KEY, reason_of
from tests.grid.introducer_support import FURL, FakeIntroducer, announced, key, nurl
from tests.transport.memory import MemoryServer


class World:
    """A grid that finds its servers under a clock."""

    def __init__(self, *introducers: FakeIntroducer, caches: list[Path], name: str = "i") -> None:
        self.clock = Clock()
        self.warnings = Warnings()
        self.opened: list[KnownServer] = []
        self.peers: list[Peer] = []
        self.members = ServerRegistry(
            self.peers, self.open_server, {key(2).server_id}, self.warnings
        )
        self._introducers = introducers
        addresses = [
            IntroducerAddress(f"i{n}" if name == "i" else name, FURL)
            for n in range(len(introducers))
        ]
        self.discovery = Discovery(
            DiscoverySettings(addresses, caches),
            self.connect,
            self.clock,
            found=self.members.found,
            warn=self.warnings.add,
        )
        for client, introducer in zip(self.discovery.clients, introducers, strict=True):
            client._connect = introducer.connect

    def connect(self, furl: str) -> Deferred[Any]:
        """Never called: every client has an introducer of its own."""
        raise AssertionError

    def open_server(self, known: KnownServer) -> Peer:
        """Open a server that lives in memory."""
        self.opened.append(known)
        if known.nurl is None:
            raise ValueError("it is reached through Foolscap only")
        server = MemoryServer(known.identity, clock=self.clock)
        return Peer(server, Pipeline(1000), "https", known.nurl.host)

    @property
    def names(self) -> list[str]:
        """Who is there."""
        return [peer.name for peer in self.peers]


class DiscoveryTestCase(SynchronousTestCase):
    """A directory for the cache."""

    def setUp(self) -> None:
        self.cache = Path(self.mktemp())

    def world(self, *introducers: FakeIntroducer, start: bool = True, name: str = "i") -> World:
        """Make a world; all of a test share one cache."""
        world = World(*introducers, caches=[self.cache], name=name)
        if start:
            world.discovery.start()
        return world


class IntroducerTests(DiscoveryTestCase):
    """Listening."""

    def test_servers_appear_and_move(self) -> None:
        """What is announced is there; later news replaces addresses, and old connections end."""
        introducer = FakeIntroducer(announced(1), announced(2))
        world = self.world(introducer)
        self.assertEqual(sorted(world.names), ["server-1", "server-2"])
        (subscriber,) = introducer.subscribers
        subscriber.remote_announce_v2({announced(3)})
        self.assertEqual(world.names[2:], ["server-3"])
        place = world.names.index("server-1")
        before = world.peers[place]
        moved = {"anonymous-storage-NURLs": [nurl(9)], "nickname": "moved"}
        subscriber.remote_announce_v2({announced(1, **moved)})  # not newer
        self.assertIs(world.peers[place], before)
        subscriber.remote_announce_v2({announced(1, seqnum=2)})  # nothing that matters
        self.assertIs(world.peers[place], before)
        subscriber.remote_announce_v2({announced(1, seqnum=3, **moved)})
        self.assertEqual(world.peers[place].address, "s9.example.org")
        self.assertEqual(len(world.peers), 3)
        self.assertEqual(world.warnings(), ())

    def test_a_server_that_is_in_the_file_by_another_name(self) -> None:
        """Counts once, as the file has it; of two announcements neither has the other skipped."""
        introducer = FakeIntroducer(
            announced(1), announced(2), announced(3, **{"anonymous-storage-NURLs": [nurl(2)]})
        )
        world = self.world(introducer, start=False)
        own = describe("alice", {"anonymous-storage-NURLs": [nurl(1)]})
        world.members.add_static(own)
        world.discovery.start()
        self.assertEqual(sorted(world.names), ["alice", "server-2", "server-3"])
        (warning,) = world.warnings()
        self.assertIn("server server-1 is skipped: it has the address of server 'alice'", warning)

    def test_a_server_that_init_named_after_its_address(self) -> None:
        """Nothing is said if the file and the announcement have the same server."""
        world = self.world(FakeIntroducer(announced(1), announced(2)), start=False)
        world.members.add_static(describe("spki-x", {"anonymous-storage-NURLs": [nurl(1)]}))
        world.discovery.start()
        self.assertEqual(sorted(world.names), ["server-2", "spki-x"])
        self.assertEqual(world.warnings(), ())

    def test_bad_announcements_do_not_stop_the_others(self) -> None:
        """Each is one sentence with its reason; the good ones among them are used."""
        message, signature, who = announced(1)
        bad: list[object] = [
            None,
            7,
            (message, signature),
            (message + b" ", signature, who),
            (message, b"v1-" + signature[3:], who),
            announced(4, **{"anonymous-storage-NURLs": ["pb://x"]}),
            announced(5, **{"anonymous-storage-NURLs": [str(FURL)]}),
            announced(6, **{"anonymous-storage-NURLs": [], "anonymous-storage-FURL": nurl(6)}),
            announced(7, **{"anonymous-storage-NURLs": [nurl(7).replace("#v=1", "#v=9")]}),
        ]
        world = self.world(FakeIntroducer(*bad, announced(2), announced(8, version=99)))
        self.assertEqual(sorted(world.names), ["server-2", "server-8"])
        self.assertEqual(len(world.warnings()), len(bad) - 2)  # three of them look the same
        text = "\n".join(world.warnings())
        for words in (
            "not a triple",
            "it was changed",
            "that is a fURL",
            "NURL",
            "not known here",
        ):
            self.assertIn(words, text)
        self.assertNotIn("secret", text)

    def test_warnings_are_bounded(self) -> None:
        """Nobody can fill a log, or the memory, with nonsense."""
        introducer = FakeIntroducer(*[(b"", b"", b"v0-%d" % n) for n in range(500)])
        world = self.world(introducer)
        introducer.lose()
        world.clock.advance(2)
        self.assertEqual(introducer.attempts, 2)
        self.assertEqual(len(world.warnings()), MAX_WARNINGS + 1)
        warnings = Warnings(map(str, range(1000)))
        self.assertEqual(len(warnings()), MAX_GRID_WARNINGS)

    def test_one_introducer_keeps_out_nobody_of_another(self) -> None:
        """Each has its part of the servers that are kept, whatever one names, now or in the next run."""
        self.patch(
            introducer_discovery, "AnnouncementRecords", partial(AnnouncementRecords, limit=6)
        )
        honest = FakeIntroducer(announced(1), announced(2))
        liar = FakeIntroducer(*map(announced, range(10, 19)))
        world = self.world(liar, honest)
        self.assertEqual(len(world.names), 5)
        self.assertLess({"server-1", "server-2"}, set(world.names))
        self.assertIn("3 servers of this introducer are known already", world.warnings()[0])
        world.discovery.stop()
        liar.known = list(map(announced, range(20, 29)))
        honest.known.append(announced(3))
        world = self.world(liar, honest)
        self.assertLess({"server-1", "server-2", "server-3"}, set(world.names))
        self.assertEqual(len(world.names), 6)
        world.discovery.stop()
        world = self.world(liar, honest)  # what it named first is in its way no more
        self.assertLess({"server-1", "server-2", "server-3"}, set(world.names))
        self.assertEqual([status.servers for status in world.discovery.statuses], [3, 3])

    def test_other_services(self) -> None:
        """Are neither counted as servers, nor in the way of these."""
        self.patch(
            introducer_discovery, "AnnouncementRecords", partial(AnnouncementRecords, limit=2)
        )
        others = [announced(number, **{"service-name": "other"}) for number in range(10, 19)]
        world = self.world(FakeIntroducer(*others, announced(1), announced(2)))
        self.assertEqual(sorted(world.names), ["server-1", "server-2"])
        self.assertEqual(world.discovery.statuses[0].servers, 2)

    def test_connections_come_back(self) -> None:
        """After a loss it subscribes anew; while it is down, with growing pauses."""
        introducer = FakeIntroducer(announced(1))
        world = self.world(introducer)
        self.assertTrue(world.discovery.statuses[0].connected)
        introducer.down = ConnectionRefusedError()
        introducer.lose()
        (status,) = world.discovery.statuses
        self.assertEqual((status.connected, status.reason), (False, "the connection was lost"))
        for _ in range(600):
            world.clock.advance(1)
        self.assertLess(introducer.attempts, 12)
        self.assertEqual(world.discovery.statuses[0].reason, "no server listens there")
        introducer.down = None
        introducer.known.append(announced(2))
        for _ in range(400):
            world.clock.advance(1)
        self.assertEqual(world.names, ["server-1", "server-2"])
        self.assertTrue(world.discovery.statuses[0].connected)
        self.assertEqual(world.discovery.statuses[0].servers, 2)

    def test_what_is_no_introducer(self) -> None:
        """Another version, or silence, is a reason."""
        other, silent = FakeIntroducer(), FakeIntroducer()
        other.version, silent.silent = {}, True
        world = self.world(other, silent, FakeIntroducer(announced(1)))
        self.assertEqual(world.names, ["server-1"])
        world.clock.advance(15)
        reasons = [status.reason for status in world.discovery.statuses]
        self.assertEqual(reasons[0], "it speaks another version of the introducer's protocol")
        self.assertEqual(reasons[1], "no answer came within 15 s")
        storage = FakeIntroducer()
        storage.version = {b"http://allmydata.org/tahoe/protocols/storage/v1": {}}
        (status,) = self.world(storage).discovery.statuses
        self.assertEqual(status.reason, "it is a storage server; give the fURL of an introducer")
        self.assertEqual(len(world.warnings()), 2)
        self.assertIn("introducer i0 at intro.example.org:1 is unreachable", world.warnings()[0])

    def test_answers_of_another_kind(self) -> None:
        """What gives a number for an introducer, or for its version, is none, and no more is said."""
        odd = [FakeIntroducer() for _ in range(4)]
        odd[0].instead = [5]
        for introducer, version in zip(odd[1:], (None, 5, [PROTOCOL_KEY]), strict=True):
            introducer.version = version
        world = self.world(*odd)
        self.assertEqual(
            {status.reason for status in world.discovery.statuses},
            {"the server there is not an introducer"},
        )

    def test_what_strangers_say_of_an_end(self) -> None:
        """A reason goes to terminals and logs: one line, not too long, nothing that a terminal obeys."""
        for error in (LimitExceeded("a\x1b[2J" + "b" * 1000), ValueError("a\x1b[2J\nb")):
            reason = reason_of(error)
            self.assertTrue(reason.isprintable(), reason)
            self.assertLess(len(reason), 300)
            self.assertIn("a\\x1b[2J", reason)
        self.assertNotIn("made-up line", reason_of(LimitExceeded("a\nmade-up line")))

    def test_stopping_leaves_nothing_behind(self) -> None:
        """No timer, no listener, whatever the introducer was doing."""
        silent, down, up = FakeIntroducer(), FakeIntroducer(), FakeIntroducer(announced(1))
        silent.silent, down.down = True, ConnectionRefusedError()
        world = self.world(silent, down, up)
        world.discovery.stop()
        self.assertEqual(world.clock.getDelayedCalls(), [])
        self.assertEqual(up.references[0].callbacks, {})


class CacheTests(DiscoveryTestCase):
    """What introducers said last time."""

    def test_the_cache_is_used_when_the_introducer_is_down(self) -> None:
        """Everybody who was there last time is there at once, and one sentence says so."""
        world = self.world(FakeIntroducer(announced(1), announced(2)))
        world.discovery.stop()
        down = FakeIntroducer()
        down.down = ConnectionRefusedError()
        world = self.world(down)
        self.assertEqual(sorted(world.names), ["server-1", "server-2"])
        (warning,) = world.warnings()
        self.assertIn("is unreachable: no server listens there; the 2 servers", warning)
        world.discovery.stop()
        self.assertEqual(len(read_cache(self.cache / cache_name("i0"))), 2)

    def test_what_is_heard_replaces_what_was_remembered(self) -> None:
        """Servers that were set back are believed."""
        self.world(FakeIntroducer(announced(1, seqnum=9))).discovery.stop()
        again = FakeIntroducer(announced(1, seqnum=1, nickname="anew"))
        world = self.world(again)
        self.assertIn("anew", world.names)
        world.clock.advance(2)
        (kept,) = read_cache(self.cache / cache_name("i0"))
        self.assertEqual(kept.fields["nickname"], "anew")
        self.assertEqual((self.cache / cache_name("i0")).stat().st_mode & 0o777, 0o600)

    def test_an_introducer_that_was_started_anew(self) -> None:
        """Servers that have not come back to it yet are remembered, for a day; then they are forgotten."""
        self.world(FakeIntroducer(announced(1), announced(2))).discovery.stop()
        path = self.cache / cache_name("i0")
        begun_s = 1_000_000.0
        for run, later_s in enumerate((0.0, FORGET_AFTER_S / 2, FORGET_AFTER_S)):
            world = self.world(FakeIntroducer(announced(1, seqnum=2 + run)), start=False)
            self.patch(world.discovery, "_now", partial(float, begun_s + later_s))
            world.discovery.start()
            self.assertEqual(sorted(world.names), ["server-1", "server-2"])
            world.discovery.stop()
            kept = {each.server_id: each.missing_since_s for each in read_cache(path)}
            self.assertEqual(kept, {key(1).server_id: None, key(2).server_id: begun_s})
        world = self.world(FakeIntroducer(announced(1, seqnum=8), announced(2)))
        world.discovery.stop()
        self.assertEqual([each.missing_since_s for each in read_cache(path)], [None, None])
        for later_s in (0.0, FORGET_AFTER_S + 1):
            world = self.world(FakeIntroducer(announced(1, seqnum=int(9 + later_s))), start=False)
            self.patch(world.discovery, "_now", partial(float, begun_s + later_s))
            world.discovery.start()
            world.discovery.stop()
        self.assertEqual([each.server_id for each in read_cache(path)], [key(1).server_id])

    def test_a_cache_that_is_no_good(self) -> None:
        """It is a warning, and replaced in time."""
        self.cache.mkdir()
        path = self.cache / cache_name("i0")
        for content in (b"{", b"a: b", b"\xff", b"7"):
            path.write_bytes(content)
            world = self.world(FakeIntroducer(announced(1)))
            self.assertEqual(world.names, ["server-1"])
            self.assertIn(str(path), world.warnings()[0])
            world.discovery.stop()
            self.assertEqual(len(read_cache(path)), 1)
        path.write_text("- {ann: {nickname: a}, key_s: v0-x}\n- 7\n- {ann: 7, key_s: x}\n- {}\n")
        (entry,) = read_cache(path)
        self.assertEqual((entry.server_id, entry.fields), ("v0-x", {"nickname": "a"}))

    def test_what_is_deep_or_long_is_not_written(self) -> None:
        """An announcement that would be megabytes of blanks takes none of the room of the others."""
        deep = "[" * 400 + "0," * 9_500 + "0" + "]" * 400
        world = self.world(FakeIntroducer(announced(1, extra=json.loads(deep)), announced(2)))
        world.clock.advance(1)
        path = self.cache / cache_name("i0")
        self.assertLess(path.stat().st_size, 2000)
        self.assertEqual(len(path.read_text().splitlines()), 2)
        self.assertEqual(len(read_cache(path)), 2)

    def test_news_without_end(self) -> None:
        """Who moves all the time does not have all that is known written each time."""
        introducer = FakeIntroducer(announced(1))
        world = self.world(introducer)
        (subscriber,) = introducer.subscribers
        path = self.cache / cache_name("i0")
        written: set[tuple[int, int]] = set()
        for number in range(2, 120):
            world.clock.advance(1)
            subscriber.remote_announce_v2({announced(1, seqnum=number)})
            if path.exists():
                written.add((path.stat().st_ino, path.stat().st_mtime_ns))
        self.assertLess(len(written), 6)
        world.discovery.stop()
        (known,) = read_cache(path)
        self.assertEqual(known.seqnum, 119)

    def test_names(self) -> None:
        """Whatever an introducer is called, its file stays in the directory."""
        for name in ("../../x", "a/b", "\0", "é" * 300, ""):
            path = Path(cache_name(name))
            self.assertEqual(path.name, str(path))
            self.assertLess(len(str(path)), 200)

    def test_names_that_look_the_same(self) -> None:
        """Two introducers whose names are all Cyrillic letters, or differ in a space, have a file each."""
        for one, other in (("дома", "мост"), ("a b", "a_b"), ("a b", "a:b")):
            self.assertNotEqual(cache_name(one), cache_name(other))
        self.assertEqual(cache_name("i0"), "introducer_i0_cache.yaml")

    def test_a_cache_by_its_former_name(self) -> None:
        """What an earlier version wrote is remembered, and written by the new name."""
        self.world(FakeIntroducer(announced(1))).discovery.stop()
        former = self.cache / "introducer_a_b_cache.yaml"
        (self.cache / cache_name("i0")).rename(former)
        down = FakeIntroducer()
        down.down = ConnectionRefusedError()
        world = self.world(down, name="a b")
        self.assertEqual(world.names, ["server-1"])
        world.discovery.stop()
        world = self.world(FakeIntroducer(announced(2)), name="a b")
        world.discovery.stop()
        self.assertEqual(len(read_cache(self.cache / cache_name("a b"))), 2)
        self.assertEqual(len(read_cache(former)), 1)


class BeginningTests(DiscoveryTestCase):
    """Work starts when enough servers are known, not when all are."""

    def test_enough_are_enough(self) -> None:
        """Nothing is waited for once there are as many as are needed."""
        silent = FakeIntroducer()
        silent.silent = True
        world = self.world(silent, FakeIntroducer(announced(1), announced(2)))
        self.successResultOf(self.wait(world, 2))
        waiting = self.wait(world, 3)
        self.assertNoResult(waiting)
        world.clock.advance(PATIENCE_S + 1)
        self.successResultOf(waiting)

    def test_servers_that_come_in_time(self) -> None:
        """The one that was missing ends the wait."""
        introducer = FakeIntroducer(announced(1))
        world = self.world(introducer)
        waiting = self.wait(world, 2)
        self.assertNoResult(waiting)
        introducer.subscribers[0].remote_announce_v2({announced(2)})
        world.clock.advance(0)
        self.successResultOf(waiting)

    def test_a_short_grace(self) -> None:
        """When all introducers have answered, there is little left to wait for."""
        world = self.world(FakeIntroducer(announced(1)))
        waiting = self.wait(world, 2)
        world.clock.advance(GRACE_S)
        self.successResultOf(waiting)

    def test_no_server_at_all(self) -> None:
        """That is said at once, with the introducer's reason."""
        down = FakeIntroducer()
        down.down = ConnectionRefusedError()
        error = self.failureResultOf(self.wait(self.world(down), 2), UnhappyError).value
        self.assertIn(
            "no storage server is known (introducer i0: no server listens there)", str(error)
        )

    def test_cancelling(self) -> None:
        """Who gives up waiting is let go, and others are not disturbed."""
        world = self.world(FakeIntroducer(announced(1)))
        one, other = self.wait(world, 2), self.wait(world, 2)
        one.cancel()
        self.failureResultOf(one)
        world.clock.advance(GRACE_S)
        self.successResultOf(other)

    def test_wait_for(self) -> None:
        """Asked to, it waits until so many have answered, as they come; and not for ever."""
        introducer = FakeIntroducer(announced(1))
        world = self.world(introducer)
        waiting = self.wait(world, 1, wait_for=2)
        world.clock.pump([0.1] * 20)
        self.assertNoResult(waiting)
        introducer.subscribers[0].remote_announce_v2({announced(2)})
        world.clock.pump([0.1] * 20)
        self.successResultOf(waiting)
        waiting = self.wait(world, 1, wait_for=3)
        world.clock.pump([0.5] * int(2 * WAIT_FOR_S + 2))
        error = self.failureResultOf(waiting, UnhappyError).value
        self.assertIn("2 of the 3 servers to wait for answered within 60 s", str(error))
        world.discovery.stop()
        world.clock.advance(2)
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def wait(self, world: World, needed: int, wait_for: int = 0) -> Deferred[None]:
        readiness = Readiness(world.peers, world.discovery, world.clock, wait_for)
        return Deferred.fromCoroutine(readiness.wait(needed))


class MembersTests(DiscoveryTestCase):
    """Static servers, preferred ones, and those that cannot be used."""

    def test_static_entries_win(self) -> None:
        """Whatever is announced under the id of an entry in servers.yaml, the entry stands."""
        world = self.world(FakeIntroducer(announced(1), announced(3)), start=False)
        fields = {"nickname": "mine", "anonymous-storage-NURLs": [nurl(7)]}
        world.members.add_static(describe(key(1).server_id, fields))
        world.discovery.start()
        self.assertEqual(world.names, ["mine", "server-3"])
        self.assertEqual(world.peers[0].address, "s7.example.org")

    def test_preferred_servers_come_first(self) -> None:
        """On every file's ring."""
        world = self.world(FakeIntroducer(*[announced(n) for n in range(1, 9)]))
        for n in range(20):
            self.assertEqual(ring(bytes([n]) * 16, world.peers)[0].name, "server-2")

    def test_servers_of_other_protocols(self) -> None:
        """They are skipped with a sentence, and in the status; a NURL announced later brings them in."""
        only = {"anonymous-storage-NURLs": None, "anonymous-storage-FURL": str(FURL)}
        introducer = FakeIntroducer(announced(1, **only), announced(3))
        world = self.world(introducer)
        self.assertEqual(world.names, ["server-3"])
        self.assertIn("server-1 is skipped: it is reached through Foolscap", world.warnings()[0])
        (status,) = world.members.unusable.values()
        self.assertEqual((status.nickname, status.address), ("server-1", "intro.example.org:1"))
        introducer.subscribers[0].remote_announce_v2({announced(1, seqnum=2)})
        self.assertEqual(world.names, ["server-3", "server-1"])
        self.assertEqual(world.members.unusable, {})

    def test_many_servers(self) -> None:
        """A thousand are no trouble."""
        keys = [make_signing_key() for _ in range(200)]
        fields = {"service-name": "storage", "anonymous-storage-NURLs": [nurl(1)]}
        world = self.world(FakeIntroducer(*[sign(fields, each) for each in keys]))
        self.assertEqual(len(world.peers), 200)


class FileTests(SynchronousTestCase):
    """``introducers.yaml``."""

    def test_entries(self) -> None:
        """Good ones are used, bad ones are a sentence each."""
        entries = {
            "good": {"furl": str(FURL)},
            "nurl": {"furl": nurl(1)},
            "none": {},
            "text": "x",
            "bad": {"furl": 7},
        }
        found = parse_introducers(json.dumps({"introducers": entries}).encode(), "some.yaml")
        self.assertEqual(found.addresses, (IntroducerAddress("good", FURL),))
        self.assertEqual(len(found.warnings), 4)
        self.assertIn(
            "introducer 'nurl' is skipped: that is a storage server's NURL", found.warnings[0]
        )
        again = parse_introducers(found.as_text().encode(), "x")
        self.assertEqual(again.addresses, found.addresses)
        for text in (b"", b"introducers:\n", b"{}"):
            self.assertEqual(parse_introducers(text, "x").addresses, ())
        many = {f"i{n}": {"furl": str(FURL)} for n in range(100)}
        found = parse_introducers(json.dumps({"introducers": many}).encode(), "x")
        self.assertEqual((len(found.addresses), len(found.warnings)), (32, 68))

    def test_the_old_setting(self) -> None:
        """``introducer.furl`` of tahoe.cfg is one more."""
        directory = Path(self.mktemp())
        found = load_introducers(directory, str(FURL))
        self.assertEqual(found.addresses, (IntroducerAddress("default", FURL),))
        found = load_introducers(directory, "nonsense")
        self.assertIn("[client] introducer.furl", found.warnings[0])
