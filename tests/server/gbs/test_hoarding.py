"""Who allocates without end, and who finds room all the same, over HTTPS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred

from pipegrid.server.connection_turns import ACTIVE_S
from pipegrid.server.gbs.http_connection import GbsConnection
from pipegrid.wire import (
    gbs_bundles,
    gbs_cbor_bodies,
    gbs_mutable,
    gbs_paths_headers,
    gbs_surveys_releases,
)
from pipegrid.wire.gbs_bundles import BundledUpload
from pipegrid.wire.gbs_surveys_releases import Question, SurveyAnswer
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, UploadSecrets
from tests.server.gbs import support as http
from tests.server.gbs.test_mutable import change
from tests.storage.support import OTHERS_SECRETS, SECRETS, SI

PLACES = 20


class Peer(http.MemoryTransport):
    """A transport from an address."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host

    def getPeer(self) -> IPv4Address:
        """Return that."""
        return IPv4Address("TCP", self.host, 4711)


class HoardingTests(http.ServerTestCase):
    """A server with twenty places for unfinished uploads."""

    def setUp(self) -> None:
        super().setUp()
        self.store = self.make_store(max_uploads=PLACES)
        self.restart()

    def come(self, host: str) -> tuple[GbsConnection, Peer]:
        """Return a connection from an address."""
        connection = self.server.buildProtocol(None)
        assert connection is not None
        transport = Peer(host)
        transport.protocol = connection
        connection.makeConnection(transport)
        return connection, transport

    def ask_from(self, host: str, *requests: bytes) -> list[http.Reply]:
        """Ask on a new connection, which is closed then."""
        connection, transport = self.come(host)
        connection.dataReceived(b"".join(requests))
        self.settle()
        replies = http.parse_replies(transport.written)
        transport.lose()
        return replies

    def allocated(self, reply: http.Reply) -> frozenset[int]:
        """Return what was granted."""
        self.assertEqual(reply.status, 200)
        return gbs_cbor_bodies.unpack_allocation(reply.body).allocated

    def hoard(self, host: str, share_bytes: int = 1, count: int = PLACES) -> int:
        """Allocate from an address; returns how many that gave."""
        (reply,) = self.ask_from(
            host, http.allocate(range(100, 100 + count), share_bytes, OTHERS_SECRETS, b"h" * 16)
        )
        return len(self.allocated(reply))

    def test_places(self) -> None:
        """All places are taken: others find one, from elsewhere and from there, and store; he does not."""
        for host in ("10.0.0.2", "10.0.0.1"):
            self.assertIn(self.hoard("10.0.0.1"), (PLACES, PLACES - 1))
            self.assertEqual(self.store.upload_count, PLACES)
            number = int(host[-1])
            replies = self.ask_from(
                host, http.allocate({number}, 4), http.write(number, 0, b"data")
            )
            self.assertEqual([reply.status for reply in replies], [200, 201])
        (reply,) = self.ask_from("10.0.0.1", http.allocate({9}, 4, OTHERS_SECRETS, b"m" * 16))
        self.assertEqual(self.allocated(reply), {9})  # the place of what was stored
        (reply,) = self.ask_from("10.0.0.1", http.allocate(range(200, 250), 4, si=b"n" * 16))
        self.assertLess(len(self.allocated(reply)), PLACES)

    def test_room(self) -> None:
        """All room is promised to one: others find some, and so do bundles."""
        self.free = 10**9
        self.assertEqual(self.hoard("10.0.0.1", 10**9, 1), 1)
        (reply,) = self.ask_from("10.0.0.1", http.VERSION)
        self.assertEqual(gbs_cbor_bodies.unpack_version(reply.body).available_bytes, 10**9)
        replies = self.ask_from("10.0.0.1", http.allocate({0}, 4), http.write(0, 0, b"data"))
        self.assertEqual([reply.status for reply in replies], [200, 201])
        self.now += 1
        self.assertEqual(self.hoard("10.0.0.1", 10**9, 1), 1)
        secrets = UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"bundled")
        upload = gbs_bundles.BundledUpload(b"b" * 16, secrets, 4, {0}, {0: b"data"})
        body = gbs_bundles.pack_bundle([upload])
        (reply,) = self.ask_from(
            "10.0.0.2", http.head("POST", "/storage/v1/bundle", body=body) + body
        )
        (answer,) = gbs_bundles.unpack_answers(reply.body, [upload])
        self.assertEqual(answer.statuses, {0: 201})

    def test_who_goes_on_from_elsewhere(self) -> None:
        """An upload belongs to whoever writes to it, with its secret, wherever that is."""
        self.ask_from("10.0.0.1", http.allocate({0}, 8))
        self.ask_from("10.0.0.2", http.write(0, 0, b"data"))
        upload = self.store.upload(SI, 0, SECRETS.upload)
        self.assertEqual(upload.client.address, "10.0.0.2")


class TurnTests(http.ServerTestCase):
    """Requests that take long, many at once: a lease takes 0.2 ms here, as does a file that is made."""

    def setUp(self) -> None:
        super().setUp()
        self.clock.rightNow = 1000.0
        self.restart()
        self.made: list[str] = []
        self.slow_down(self.store, "add_lease")
        self.slow_down(self.store._unfinished, "allocate")
        self.slow_down(self.store._unfinished, "take_whole")

    def slow_down(self, what: object, name: str) -> None:
        """Have a call take time."""
        really = getattr(what, name)

        def slowly(*arguments: object) -> object:
            self.clock.rightNow += 0.0002
            self.made.append(name)
            return really(*arguments)

        self.patch(what, name, slowly)

    def whoever_comes_is_served(self) -> None:
        """Have another client ask for something, which is answered at once."""
        other, answered = self.connect()
        other.dataReceived(http.VERSION)
        self.assertEqual([reply.status for reply in http.parse_replies(answered.written)], [200])
        answered.lose()

    def longest_turn(self, begin: Callable[[], None]) -> int:
        """Begin with something; returns how many slow calls were made in one turn, at most."""
        most = 0
        begin()
        while self.made:
            most = max(most, len(self.made))
            self.made.clear()
            self.whoever_comes_is_served()
            http.one_turn(self.clock)
        return most

    def test_others_have_their_turn(self) -> None:
        """Of a hundred requests for leases few are carried out before whoever else has come is served."""
        self.put(0, b"share")
        lease = http.head("PUT", gbs_paths_headers.lease_path(SI), *http.lease_headers(SECRETS))
        self.whoever_comes_is_served()
        connection, transport = self.connect()
        self.made.clear()
        self.assertLessEqual(self.longest_turn(lambda: connection.dataReceived(lease * 100)), 4)
        replies = http.parse_replies(transport.written)
        self.assertEqual([reply.status for reply in replies], [204] * 100)
        self.assertFalse(transport.paused)

    def test_who_waits_is_not_read(self) -> None:
        """What else it sends stays with the kernel."""
        self.put(0, b"share")
        lease = http.head("PUT", gbs_paths_headers.lease_path(SI), *http.lease_headers(SECRETS))
        self.whoever_comes_is_served()
        connection, transport = self.connect()
        connection.dataReceived(lease * 100)
        self.assertTrue(transport.paused)
        self.assertLess(self.service.requests["lease", 204], 6)

    def test_many_clients(self) -> None:
        """However many ask, few calls are made in a turn."""
        self.put(0, b"share")
        lease = http.head("PUT", gbs_paths_headers.lease_path(SI), *http.lease_headers(SECRETS))
        clients = [self.connect() for _ in range(10)]
        for connection, _ in clients:
            connection.spending.spend(1.0, self.clock.seconds())

        def begin() -> None:
            for connection, _ in clients:
                connection.dataReceived(lease * 5)

        self.whoever_comes_is_served()
        self.made.clear()
        self.assertLessEqual(self.longest_turn(begin), 4)
        for _, transport in clients:
            self.assertEqual(len(http.parse_replies(transport.written)), 5)

    def test_who_is_alone(self) -> None:
        """What one client pipelines is done in one turn, if another has worked, but not lately."""
        self.put(0, b"share")
        self.whoever_comes_is_served()
        lease = http.head("PUT", gbs_paths_headers.lease_path(SI), *http.lease_headers(SECRETS))
        connection, transport = self.connect()
        self.clock.rightNow += ACTIVE_S + 0.001
        timers = len(self.clock.getDelayedCalls())
        connection.dataReceived(lease * 90)
        self.assertEqual(len(http.parse_replies(transport.written)), 90)
        self.assertEqual(len(self.clock.getDelayedCalls()), timers)

    def test_one_allocation_of_many(self) -> None:
        """It takes many turns, is answered at its end, and what comes behind it sees all of it."""
        self.whoever_comes_is_served()
        connection, transport = self.connect()
        requests = http.allocate(range(256), 4) + http.write(255, 0, b"data")
        self.made.clear()
        self.assertLessEqual(self.longest_turn(lambda: connection.dataReceived(requests)), 4)
        self.settle()
        first, second = http.parse_replies(transport.written)
        self.assertEqual(len(gbs_cbor_bodies.unpack_allocation(first.body).allocated), 256)
        self.assertEqual(second.status, 201)

    def test_a_bundle_of_allocations(self) -> None:
        """The same of a bundle, which counts as waiting for the disk from its beginning."""
        self.whoever_comes_is_served()
        connection, transport = self.connect()
        uploads = [
            BundledUpload(bytes([file]) * 16, SECRETS, 4, set(range(4)), {0: b"abcd"})
            for file in range(128)
        ]
        body = gbs_bundles.pack_bundle(uploads)
        request = http.head("POST", gbs_paths_headers.BUNDLE_PATH, body=body) + body
        self.made.clear()
        connection.dataReceived(request)
        self.assertEqual(self.service.commits, 128)
        self.assertLessEqual(self.longest_turn(lambda: None), 4)
        for _ in range(20):
            self.settle()
        (reply,) = http.parse_replies(transport.written)
        found = gbs_bundles.unpack_answers(reply.body, uploads)
        self.assertEqual([each.statuses for each in found], [{0: 201}] * 128)
        self.assertEqual((self.service.commits, self.service._held_bytes), (0, 0))

    def test_looking_at_a_bundle(self) -> None:
        """It takes many turns if it takes long, whether it is good or not; what it names waits with it."""
        self.slow_down(gbs_bundles, "_unpack_upload")
        self.whoever_comes_is_served()
        uploads = [BundledUpload(bytes([file]) * 16, SECRETS, 4, {0}, {}) for file in range(128)]
        for bundle, status in ((uploads, 200), ([*uploads[:127], uploads[0]], 400)):
            connection, transport = self.connect()
            body = gbs_bundles.pack_bundle(bundle)
            request = http.head("POST", gbs_paths_headers.BUNDLE_PATH, body=body) + body
            self.made.clear()
            self.assertLessEqual(self.longest_turn(partial(connection.dataReceived, request)), 20)
            (reply,) = http.parse_replies(transport.written)
            self.assertEqual(reply.status, status)
            self.assertEqual(self.service._held_bytes, 0)

    def test_a_survey(self) -> None:
        """A question in a step, and others are served between; the answer is in the order of questions."""
        self.put(0, b"share")
        self.whoever_comes_is_served()
        connection, transport = self.connect()
        other = bytes(16)
        questions = [Question(SI if number % 2 else other, SECRETS.lease) for number in range(64)]
        body = gbs_surveys_releases.pack_survey(questions)
        request = http.head("POST", gbs_paths_headers.SURVEY_PATH, body=body) + body
        self.made.clear()
        self.assertLessEqual(self.longest_turn(lambda: connection.dataReceived(request)), 4)
        (reply,) = http.parse_replies(transport.written)
        found = gbs_surveys_releases.unpack_survey_answers(reply.body, questions)
        nothing = SurveyAnswer(frozenset(), 404, ())
        self.assertEqual(found, [nothing, SurveyAnswer(frozenset({0}), 204, ())] * 32)

    def test_looking_at_a_change(self) -> None:
        """A read-test-write of many shares is looked at in many turns, and then carried out once."""
        self.slow_down(gbs_mutable, "_unpack_change")
        self.whoever_comes_is_served()
        connection, transport = self.connect()
        changes = {number: ShareChange((), ((0, b"data"),)) for number in range(200)}
        self.made.clear()
        self.assertLessEqual(self.longest_turn(lambda: connection.dataReceived(change(changes))), 4)
        self.settle()
        (reply,) = http.parse_replies(transport.written)
        self.assertEqual(reply.status, 200)
        self.assertEqual(self.store.slots.list_shares(SI), set(range(200)))
        self.assertEqual(self.service._held_bytes, 0)

    def test_reading_much_is_done_elsewhere(self) -> None:
        """In a thread, while others are served; little is read at once."""
        self.ask(change({0: ShareChange((), ((0, bytes(70_000)),))}))
        elsewhere: list[Any] = []
        really = self.durability.run

        def run(function: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
            elsewhere.append(function)
            return really(function, *arguments)

        self.patch(self.durability, "run", run)
        for size in (65536, 65537):
            (reply,) = self.ask(change({}, [(0, size)]))
            self.assertEqual(reply.status, 200)
            self.assertGreater(len(reply.body), size)
        self.assertEqual([each.__name__ for each in elsewhere], ["_change_slot"])

    def test_a_bundle_whose_client_goes(self) -> None:
        """In the middle: what was written is stored, the rest is not begun, and nothing is kept."""
        self.put(0, b"share")  # the first of all goes the long way
        self.whoever_comes_is_served()
        self.made.clear()
        connection, transport = self.connect()
        uploads = [
            BundledUpload(bytes([file]) * 16, SECRETS, 4, {0}, {0: b"abcd"}) for file in range(128)
        ]
        body = gbs_bundles.pack_bundle(uploads)
        connection.dataReceived(http.head("POST", gbs_paths_headers.BUNDLE_PATH, body=body) + body)
        begun = len(self.made)
        self.assertLess(begun, 6)
        transport.lose()
        for _ in range(5):
            self.settle()
        self.assertEqual(len(self.made), begun)
        stored = [file for file in range(128) if self.store.list_shares(bytes([file]) * 16)]
        self.assertEqual(stored, list(range(begun)))
        self.assertEqual((self.service.commits, self.service._held_bytes), (0, 0))
        self.assertEqual(self.store.upload_count, 0)

    def test_finished_meanwhile(self) -> None:
        """A share that somebody else finishes between two steps is neither allocated anew nor lost."""
        steps = self.store.allocate_in_steps(SI, {0, 1}, 4, SECRETS)
        next(steps)
        self.store.allocate(SI, {1}, 4, OTHERS_SECRETS)
        self.store.upload(SI, 1, OTHERS_SECRETS.upload).write(0, [b"data"])
        self.service.commit(self.store.upload(SI, 1, OTHERS_SECRETS.upload))
        self.settle()
        self.assertEqual(self.store.list_shares(SI), {1})
        with self.assertRaises(StopIteration) as done:
            next(steps)
        self.assertEqual(done.exception.value.allocated, {0})
        with self.store.open_share(SI, 1) as reader:
            self.assertEqual(reader.read(0, 4), b"data")
