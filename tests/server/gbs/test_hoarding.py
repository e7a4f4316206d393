"""Who allocates without end, and who finds room all the same, over HTTPS."""

from __future__ import annotations

from twisted.internet.address import IPv4Address

from pipegrid.server.gbs.connection import GbsConnection
from pipegrid.wire import gbs, gbs_bundles, gbs_http
from pipegrid.wire.messages import LeaseSecrets, UploadSecrets
from tests.server.gbs import support as http
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
        return gbs.unpack_allocation(reply.body).allocated

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
        self.assertEqual(gbs.unpack_version(reply.body).available_bytes, 10**9)
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
    """Requests that take long, many at once."""

    def test_others_have_their_turn(self) -> None:
        """Of a hundred requests for leases four are carried out before whoever else has come is served."""
        self.put(0, b"share")
        lease = http.head("PUT", gbs_http.lease_path(SI), *http.lease_headers(SECRETS))
        connection, transport = self.connect()
        connection.dataReceived(lease * 100)
        other, answered = self.connect()
        other.dataReceived(http.VERSION)
        self.assertEqual([reply.status for reply in http.parse_replies(answered.written)], [200])
        self.assertEqual(self.service.requests["lease", 204], 4)
        self.assertTrue(transport.paused)
        self.settle()
        replies = http.parse_replies(transport.written)
        self.assertEqual([reply.status for reply in replies], [204] * 100)
        self.assertFalse(transport.paused)
