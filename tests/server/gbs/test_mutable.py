"""Mutable shares over HTTPS, beyond what was recorded."""

from __future__ import annotations

import gc
import os
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred

from pipegrid.core import base32
from pipegrid.reactor import process_settings
from pipegrid.server.gbs import storage_operations as http_service
from pipegrid.wire import gbs_cbor_bodies, gbs_mutable, gbs_paths_headers
from pipegrid.wire.storage_messages import ShareChange, SlotResult
from tests.server.gbs import support as http
from tests.storage.support import SECRETS, SI

PATH = f"/storage/v1/mutable/{base32.encode(SI)}"
WRITER = {
    gbs_paths_headers.RENEW_SECRET: SECRETS.lease.renew,
    gbs_paths_headers.CANCEL_SECRET: SECRETS.lease.cancel,
    gbs_paths_headers.WRITE_ENABLER: b"w" * 32,
}


def change(
    changes: dict[int, ShareChange],
    reads: Any = (),
    secrets: dict[str, bytes] = WRITER,
    body: bytes | None = None,
) -> bytes:
    """Return a read-test-write request."""
    body = gbs_mutable.pack_request(changes, reads) if body is None else body
    headers = http.secret_headers(secrets)
    return http.head("POST", f"{PATH}/read-test-write", *headers, body=body) + body


def get(rest: str, *headers: bytes) -> bytes:
    """Return a request for what is below the slot."""
    return http.head("GET", f"{PATH}/{rest}", *headers)


def put(number: int, data: bytes) -> bytes:
    """Return a request that writes one share."""
    return change({number: ShareChange((), ((0, data),))})


class MutableTests(http.ServerTestCase):
    """Requests and answers."""

    def test_a_slow_change(self) -> None:
        """One that comes at two kilobytes a second is waited for; one that drips is not."""
        steady, steady_transport = self.connect()
        request = put(0, b"x" * 250_000)
        drips, drips_transport = self.connect()
        drips.dataReceived(request[:1000])
        for at in range(0, len(request), 2000):
            steady.dataReceived(request[at : at + 2000])
            if not drips_transport.closing:
                drips.dataReceived(request[1000 + at // 2000 :][:1])
            self.clock.advance(1)
        self.assertFalse(steady_transport.closing)
        self.assertIn(b" 200 ", steady_transport.written)
        self.assertTrue(drips_transport.closing)

    def result(self, reply: http.Reply) -> SlotResult:
        """Return what an answer says."""
        self.assertEqual(reply.status, 200)
        return gbs_mutable.unpack_answer(reply.body, 1 << 20)

    def test_pipelined_requests_see_each_other(self) -> None:
        """On one connection every request sees what those before it did."""
        replies = self.ask(
            put(0, b"one"), get("0"), put(0, b"two"), change({}, [(0, 9)]), get("shares")
        )
        self.assertEqual([reply.status for reply in replies], [200] * 5)
        self.assertEqual(replies[1].body, b"one")
        self.assertEqual(self.result(replies[3]), SlotResult(True, {0: (b"two",)}))
        self.assertEqual(gbs_cbor_bodies.unpack_shares(replies[4].body), {0})

    def test_other_connections_wait_for_a_write(self) -> None:
        """Who asks about a slot while it is written and synced is answered with what was written."""
        late: list[Deferred[None]] = []
        run = self.durability.run

        def run_late(*args: Any, **kwargs: Any) -> Deferred[Any]:
            late.append(Deferred())
            return late[-1].addCallback(lambda _: run(*args, **kwargs))

        with mock.patch.object(self.durability, "run", run_late):
            writer, writers_transport = self.connect()
            writer.dataReceived(put(0, b"one"))
            reader, readers_transport = self.connect()
            reader.dataReceived(get("0"))
            self.settle()
            self.assertEqual((writers_transport.written, readers_transport.written), (b"", b""))
            late.pop().callback(None)
            self.settle()
        (reply,) = http.parse_replies(readers_transport.written)
        self.assertEqual(reply.body, b"one")
        self.assertEqual(len(http.parse_replies(writers_transport.written)), 1)

    def test_secrets_are_exactly_those(self) -> None:
        """A missing or superfluous secret is a 400, and so is a write enabler that cannot make a share."""
        for secrets in (
            {},
            {name: WRITER[name] for name in sorted(WRITER)[1:]},
            {**WRITER, gbs_paths_headers.UPLOAD_SECRET: b"u"},
            {**WRITER, gbs_paths_headers.WRITE_ENABLER: b"short"},
        ):
            self.assertEqual(self.statuses(change({0: ShareChange()}, (), secrets)), [400])
        self.assertFalse(self.final(0).exists())

    def test_wrong_write_enablers(self) -> None:
        """They are refused whatever is asked."""
        self.ask(put(0, b"abc"))
        wrong = {**WRITER, gbs_paths_headers.WRITE_ENABLER: b"W" * 32}
        for request in (change({}, [(0, 3)], wrong), change({1: ShareChange()}, (), wrong)):
            (reply,) = self.ask(request)
            self.assertEqual((reply.status, reply.body), (401, b""))

    def test_impossible_requests(self) -> None:
        """A body that is no message, a share that cannot be and a write beyond all bounds are 400."""
        absurd = ShareChange((), ((1 << 62, b"x"),))
        for request in (
            change({}, body=b"no message"),
            change({256: ShareChange()}),
            change({0: absurd}),
        ):
            self.assertEqual(self.statuses(request), [400])
        self.assertEqual(self.statuses(get("256")), [404])
        self.assertEqual(self.statuses(http.head("PUT", f"{PATH}/0")), [405])

    def test_a_full_disk(self) -> None:
        """No room is said as for immutable shares."""
        self.free = 10
        self.assertEqual(self.statuses(put(0, b"abc")), [507])

    def test_bodies_are_bounded(self) -> None:
        """One body beyond its limit is a 413, all together beyond theirs a 503; memory is given back."""
        with mock.patch.object(http_service, "MAX_HELD_BYTES", 300):
            self.assertEqual(self.statuses(put(0, b"x" * 400)), [503])
            self.assertEqual(self.statuses(*[put(0, b"x" * 20)] * 5), [200] * 5)
            connection, transport = self.connect()
            connection.dataReceived(put(0, b"x" * 100)[:-1])
            self.assertEqual(self.statuses(put(0, b"y" * 100)), [503])
            transport.lose()
            self.assertEqual(self.statuses(put(0, b"y" * 100)), [200])
        length = b"Content-Length: %d" % (gbs_mutable.MAX_REQUEST_BYTES + 1)
        headers = [*http.secret_headers(WRITER), length]
        connection, transport = self.connect()
        connection.dataReceived(http.head("POST", f"{PATH}/read-test-write", *headers))
        connection.dataReceived(b"x" * 1000)
        self.assertEqual(self.service._held_bytes, 0)

    def test_long_answers_are_held_until_they_are_sent(self) -> None:
        """What a read vector reads counts from before it is read until the client has taken it."""
        data = os.urandom(100_000)
        self.assertEqual(self.statuses(put(0, data)), [200])
        again = change({}, [(0, 100_000)] * 30)
        connection, transport = self.connect(room=200_000)
        connection.dataReceived(again)
        self.settle()
        self.assertEqual(self.service._held_bytes, 3_000_000)
        self.assertLess(len(transport.written), 600_000)
        with mock.patch.object(http_service, "MAX_HELD_BYTES", 5_900_000):
            # Nothing is changed by what cannot be answered.
            change_it = {0: ShareChange((), ((0, b"other"),))}
            self.assertEqual(self.statuses(change(change_it, [(0, 100_000)] * 30)), [503])
            self.assertEqual(self.statuses(change({}, [(0, 5)])), [200])
        for _ in range(30):
            transport.read()
        (reply,) = http.parse_replies(transport.written)
        result = gbs_mutable.unpack_answer(reply.body, 1 << 24)
        self.assertEqual(result, SlotResult(True, {0: (data,) * 30}))
        self.assertEqual(self.service._held_bytes, 0)
        connection, transport = self.connect(room=200_000)
        connection.dataReceived(again)
        transport.lose()
        self.assertEqual(self.service._held_bytes, 0)

    def test_an_answer_that_nobody_waits_for(self) -> None:
        """What was read for a client that has gone meanwhile is forgotten."""
        self.assertEqual(self.statuses(put(0, bytes(100_000))), [200])
        waiting: list[tuple[Any, Any, Any]] = []

        class SlowWorkers:
            def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Deferred[Any]:
                outcome: Deferred[Any] = Deferred()
                waiting.append((function, args, outcome))
                return outcome

        self.durability._workers = SlowWorkers()
        connection, transport = self.connect()
        connection.dataReceived(change({0: ShareChange()}, [(0, 100_000)]))
        transport.lose()
        ((function, args, outcome),) = waiting
        outcome.callback(function(*args))
        self.assertEqual(self.service._held_bytes, 0)

    def test_memory_is_given_back(self) -> None:
        """Once large messages are done with, the system gets their memory back, and is not asked twice."""
        given: list[None] = []
        self.patch(process_settings, "trim_heap", lambda: given.append(None))
        self.assertEqual(self.statuses(put(0, bytes(1 << 20))), [200])
        self.assertEqual(len(given), 0)
        self.assertEqual(self.statuses(put(0, bytes(17 << 20))), [200])
        self.assertEqual(len(given), 1)
        self.assertEqual(self.statuses(http.VERSION), [200])
        self.assertEqual(len(given), 1)
        connection, _ = self.connect()
        connection.dataReceived(put(0, bytes(17 << 20)))
        self.settle()
        self.assertEqual(len(given), 1)
        self.clock.advance(5)  # connections that stay do not keep it
        self.assertEqual(len(given), 2)

    def test_large_messages_leave_room_for_small_ones(self) -> None:
        """Who fills the memory for messages with large ones does not keep out the others."""
        with (
            mock.patch.object(http_service, "MAX_HELD_BYTES", 64 << 20),
            mock.patch.object(self.service, "large_bytes", 1 << 20),
        ):
            connection, transport = self.connect()
            connection.dataReceived(put(0, bytes((32 << 20) - 1000))[: 31 << 20])
            self.assertEqual(self.statuses(put(1, bytes(3 << 20))), [503])
            self.assertEqual(self.statuses(put(1, bytes(1 << 19))), [200])
            transport.lose()
            self.assertEqual(self.statuses(put(1, bytes(3 << 20))), [200])
        self.assertEqual(self.service._held_bytes, 0)

    def test_the_largest_calls_of_tahoe_lafs(self) -> None:
        """255 shares with 30 tests and writes each, and a share of an MDMF file of 1 GB at k = 60."""
        tests = ((0, 1, b""),) * 30
        writes = tuple((at, b"x") for at in range(30))
        many = {number: ShareChange(tests, writes) for number in range(255)}
        blocks = {255: ShareChange((), tuple((at * 2201, bytes(2201)) for at in range(8200)))}
        for changes in (many, blocks):
            body = gbs_mutable.pack_request(changes, [(0, 57)] * 30)
            self.assertEqual(self.statuses(change({}, body=body)), [200])
        self.assertEqual(self.service._held_bytes, 0)
        (whole,) = self.store.slots.readv(SI, (255,), [(0, 1 << 25)])[255]
        self.assertEqual(len(whole), 8200 * 2201)

    def long(
        self, changes: dict[int, ShareChange], reads: Any = (), chunked: bool = False
    ) -> http.Reply:
        """Ask as if 1,000 bytes were too much for memory; all is given back."""
        body = gbs_mutable.pack_request(changes, reads)
        with mock.patch.object(gbs_mutable, "MAX_MEMORY_BYTES", 1000):
            if chunked:
                headers = [*http.secret_headers(WRITER), b"Transfer-Encoding: chunked"]
                head = http.head("POST", f"{PATH}/read-test-write", *headers)
                pieces = [body[at : at + 333] for at in range(0, len(body), 333)]
                chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in pieces]
                (reply,) = self.ask(b"".join([head, *chunks, b"0\r\n\r\n"]))
            else:
                (reply,) = self.ask(change({}, body=body))
        self.assertEqual(self.service._held_bytes, 0)
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.open_before)
        return reply

    def test_requests_too_long_for_memory(self) -> None:
        """They do what others do: test long specimens and short ones, write in order, delete, read."""
        self.statuses(http.VERSION)
        gc.collect()  # what other tests have left may close files at any time
        self.open_before = len(os.listdir("/proc/self/fd"))
        data = os.urandom(3 << 20)
        blocks = tuple((at, data[at : at + 5000]) for at in range(0, len(data), 5000))
        writes = (*blocks, (7, b"short"), (9, b"x" * 300))
        wanted = bytearray(data)
        wanted[7:12], wanted[9:309] = b"short", b"x" * 300
        for number, chunked in ((0, False), (1, True)):
            new = {number: ShareChange(((0, 1, b""),), writes)}
            self.assertTrue(self.result(self.long(new, (), chunked)).success)
            (found,) = self.ask(get(str(number)))
            self.assertEqual(found.body, wanted)
        tests = ((0, len(wanted), bytes(wanted)), (7, 2, b"sh"))
        change_it = {0: ShareChange(tests, ((0, b"y" * 2000),), 2000)}
        result = self.result(self.long(change_it, [(0, 3)]))
        self.assertEqual(
            result, SlotResult(True, {0: (b"".join([wanted[:3]]),), 1: (bytes(wanted[:3]),)})
        )
        self.assertEqual(self.result(self.long(change_it)), SlotResult(False, {0: (), 1: ()}))
        (found,) = self.ask(get("0"))
        self.assertEqual(found.body, b"y" * 2000)

    def test_long_requests_that_cannot_be_carried_out(self) -> None:
        """No message, too many items, a full disk, no memory, or a client that goes: nothing is left."""
        self.statuses(http.VERSION)
        gc.collect()  # what other tests have left may close files at any time
        self.open_before = len(os.listdir("/proc/self/fd"))
        data = bytes(3 << 20)
        new = {0: ShareChange((), ((0, data),))}
        self.assertEqual(self.long({256: ShareChange((), ((0, data),))}).status, 400)
        self.assertEqual(self.long({0: ShareChange((), ((1 << 62, data),))}).status, 400)
        many = {0: ShareChange((), tuple((at, b"x") for at in range(30_000)))}
        self.assertEqual(self.long(many).status, 400)
        self.free = 1 << 20
        self.assertEqual(self.long(new).status, 507)
        self.free = 1 << 40
        with mock.patch.object(http_service, "MAX_HELD_BYTES", 900_000):
            self.assertEqual(self.long(new).status, 503)
        with mock.patch.object(gbs_mutable, "MAX_MEMORY_BYTES", 1000):
            connection, transport = self.connect()
            connection.dataReceived(put(0, data)[:-1])
            transport.lose()
        self.assertEqual(self.service._held_bytes, 0)
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.open_before)
        self.assertFalse(self.final(0).exists())
        self.assertEqual(os.listdir(self.store.slots.incoming), [])

    def test_a_share_of_a_gigabyte_at_k_3(self) -> None:
        """350 MB in one request, in blocks as Tahoe-LAFS's client sends them, in a few MB of memory."""
        block = os.urandom(43_691)
        writes = tuple((at * len(block), block) for at in range(8192))
        pieces = gbs_mutable.pack_request_in_pieces({0: ShareChange((), writes)}, [(0, 3)])
        length = b"Content-Length: %d" % sum(map(len, pieces))
        connection, transport = self.connect()
        headers = [*http.secret_headers(WRITER), length]
        connection.dataReceived(http.head("POST", f"{PATH}/read-test-write", *headers))
        most = 0
        for piece in pieces:
            connection.dataReceived(bytes(piece))
            most = max(most, self.service._held_bytes)
        self.settle()
        (reply,) = http.parse_replies(transport.written)
        self.assertTrue(self.result(reply).success)
        self.assertLess(most, 8 << 20)
        ((tail,),) = self.store.slots.readv(SI, (0,), [(8191 * len(block), 1 << 20)]).values()
        self.assertEqual(tail, block)

    def test_a_request_of_many_items_is_refused(self) -> None:
        """Eight megabytes of one-byte elements are a 400, and the server goes on."""
        count = 8 << 20
        body = b"\x9a" + count.to_bytes(4, "big") + b"\xa0" * count
        self.assertEqual(self.statuses(change({}, body=body), http.VERSION), [400, 200])
        self.assertEqual(self.service._held_bytes, 0)

    def test_large_shares_are_streamed(self) -> None:
        """A share of a megabyte comes back whole, and its end alone."""
        data = os.urandom(1 << 20)
        replies = self.ask(put(0, data), get("0"), get("0", b"Range: bytes=1048570-2000000"))
        self.assertEqual(replies[1].body, data)
        self.assertEqual((replies[2].status, replies[2].body), (206, data[-6:]))

    def test_leases_and_complaints(self) -> None:
        """Both work on mutable shares; without shares there is nothing to lease or to complain about."""
        body = gbs_cbor_bodies.pack_corrupt("bad")
        lease = http.head("PUT", gbs_paths_headers.lease_path(SI), *http.lease_headers())
        corrupt = http.head("POST", f"{PATH}/0/corrupt", body=body) + body
        self.assertEqual(self.statuses(lease, corrupt), [404, 404])
        self.assertEqual(self.statuses(put(0, b"abc"), lease, corrupt), [200, 204, 200])

    def test_the_version_names_the_largest_mutable_share(self) -> None:
        """As large as the protocol allows."""
        (reply,) = self.ask(http.VERSION)
        self.assertIn(
            b"maximum-mutable-share-size\x1b" + (69105 * 10**12).to_bytes(8, "big"), reply.body
        )
