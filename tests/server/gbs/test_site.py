"""The GBS server's connections: order, back-pressure, bounds, time, and hostile clients."""

from __future__ import annotations

import errno
import os
import random
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent

from pipegrid.disk import file_system_calls as disk
from pipegrid.reactor import process_settings
from pipegrid.server.gbs.http_connection import (
    HEAD_TIMEOUT_S,
    IDLE_TIMEOUT_S,
    MANY,
    STUCK_TIMEOUT_S,
    TICK_S,
)
from pipegrid.server.gbs.request_order import MAX_UNANSWERED, MAX_UNAUTHENTICATED_REQUESTS
from pipegrid.server.gbs.request_parser import (
    FEW_CHUNKS,
    LEAST_CHUNK_BYTES,
    MAX_HEAD_BYTES,
    RequestParser,
)
from pipegrid.testing.grid import abandon_store
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers
from tests.server.gbs.support import (
    AUTHORIZATION,
    VERSION,
    Reply,
    ServerTestCase,
    allocate,
    head,
    lease_headers,
    list_shares,
    parse_replies,
    read,
    upload_header,
    write,
)
from tests.storage.support import OTHERS_SECRETS, SECRETS, SI

OTHER_SI = bytes(range(100, 116))
BIG = random.Random(3).randbytes(700_000)


TWICE = (HealthCheck.differing_executors,)
"""Also run by a class that inherits them, in another setting."""


def _fail(*_: object) -> bytes:
    """Do what a disk does that cannot be read."""
    raise OSError(errno.EIO, "broken")


class SlowWorkers:
    """Threads that take their time: ``finish`` lets everything waiting happen."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Deferred[Any], Callable[[], Any]]] = []

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Deferred[Any]:
        """Remember it."""
        deferred: Deferred[Any] = Deferred()
        self.waiting.append((deferred, lambda: function(*args, **kwargs)))
        return deferred

    def finish(self) -> None:
        """Do it: the data of groups, then their names."""
        for _ in range(2):
            waiting, self.waiting = self.waiting, []
            for deferred, call in waiting:
                deferred.callback(call())


class OrderTests(ServerTestCase):
    """Requests are carried out in order, and answered in order."""

    def test_one_round_trip(self) -> None:
        """Allocate, write and list, sent at once: the list holds the share."""
        replies = self.ask(allocate({3}, 10), write(3, 0, b"0123456789"), list_shares(), read(3))
        self.assertEqual([reply.status for reply in replies], [200, 201, 200, 200])
        self.assertEqual(gbs_cbor_bodies.unpack_shares(replies[2].body), {3})
        self.assertEqual(replies[3].body, b"0123456789")

    def test_writes_behind_a_refused_allocation_are_harmless(self) -> None:
        """They are answered 404 or 401, and the connection goes on."""
        self.statuses(allocate({1}, 10, OTHERS_SECRETS))
        self.free = 0
        self.now += 1  # for so long the disk is not asked again
        requests = (allocate({0, 1}, 10), write(0, 0, b"x" * 10), write(1, 0, b"x" * 10), VERSION)
        self.assertEqual(self.statuses(*requests), [200, 404, 401, 200])

    def test_large_pipelined_reads(self) -> None:
        """Many large reads sent at once to a client that reads slowly are answered whole, in order."""
        self.put(0, BIG)
        connection, transport = self.connect(room=50_000)
        ranges = [(0, 700_000), (5, 300_005), (600_000, 700_000), (1, 2), (0, 65_537)]
        connection.dataReceived(b"".join(read(0, *pair) for pair in ranges) + VERSION)
        for _ in range(200):
            self.assertLess(transport.unread, 300_000)
            transport.read()
        replies = parse_replies(transport.written)
        self.assertEqual([reply.status for reply in replies], [206] * 5 + [200])
        for reply, (begin, end) in zip(replies, ranges, strict=False):
            self.assertEqual(reply.body, BIG[begin:end])

    def test_a_share_that_gets_shorter_while_it_is_sent(self) -> None:
        """What is behind it is not taken for its end: the connection ends, and the log has a sentence."""
        self.put(0, BIG)
        for broken in (False, True):
            connection, transport = self.connect(room=50_000)
            connection.dataReceived(read(0) + VERSION)
            os.truncate(self.final(0), 300_000)
            with (
                capturedLogs() as logged,
                mock.patch.object(os, "pread", _fail if broken else os.pread),
            ):
                for _ in range(20):
                    transport.read()
            self.assertTrue(transport.aborted)
            self.assertEqual(transport.written.count(b"HTTP/1.1"), 1)
            self.assertEqual(["log_failure" in event for event in logged], [False])
            self.assertIn(str(self.final(0)), formatEvent(logged[0]))
            self.final(0).unlink()
            self.put(0, BIG)

    def test_shares_become_durable_together(self) -> None:
        """Pipelined shares, of one connection or several, share one commit; answers wait for it."""
        self.workers = workers = SlowWorkers()
        self.restart()
        clients = [self.connect() for _ in range(3)]
        for number, (connection, _) in enumerate(clients):
            for share in range(5):
                si = bytes([number, share]) * 8
                connection.dataReceived(allocate({share}, 4, si=si))
                connection.dataReceived(write(share, 0, b"abcd", si=si))
        self.settle()
        self.assertEqual(len(workers.waiting), 1)
        self.assertEqual(self.service.commits, 15)
        for _, transport in clients:
            self.assertEqual(len(parse_replies(transport.written)), 1)  # the first allocation
        workers.finish()
        self.settle()
        for _, transport in clients:
            statuses = [reply.status for reply in parse_replies(transport.written)]
            self.assertEqual(statuses, [200, 201] * 5)

    def test_who_might_notice_waits(self) -> None:
        """What concerns a share that is becoming durable waits; another share of it does not."""
        self.workers = workers = SlowWorkers()
        self.restart()
        connection, transport = self.connect()
        connection.dataReceived(allocate({0, 1}, 4) + write(0, 0, b"abcd") + write(1, 0, b"abcd"))
        self.settle()
        self.assertEqual(self.service.commits, 2)
        connection.dataReceived(list_shares() + VERSION)
        connection.dataReceived(write(0, 0, b"abcd"))
        self.settle()
        self.assertEqual([r.status for r in parse_replies(transport.written)], [200])
        self.assertTrue(transport.paused)
        workers.finish()
        self.settle()
        replies = parse_replies(transport.written)
        self.assertEqual([r.status for r in replies], [200, 201, 201, 200, 200, 404])
        self.assertEqual(gbs_cbor_bodies.unpack_shares(replies[3].body), {0, 1})
        self.assertFalse(transport.paused)

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=TWICE)
    @given(st.data())
    def test_any_split(self, data: st.DataObject) -> None:
        """However the bytes are cut, the answers are the same."""
        self.examples = getattr(self, "examples", 0) + 1
        si = self.examples.to_bytes(16, "big")
        stream = b"".join(
            (
                allocate({0, 1}, 300, si=si),
                write(0, 0, b"a" * 100, si=si),
                head("GET", "/nowhere"),
                head(
                    "POST",
                    gbs_paths_headers.allocate_path(si),
                    b"Content-Type: text/plain",
                    body=b"xx",
                ),
                b"xx",
                write(0, 100, b"b" * 200, si=si),
                write(1, 0, b"b" * 10, si=si, end=20),
                list_shares(si),
                read(0, 50, 400, si=si),
            )
        )
        cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=30), "cuts")
        edges = [0, *sorted(cuts), len(stream)]
        connection, transport = self.connect()
        for begin, end in pairwise(edges):
            connection.dataReceived(stream[begin:end])
        self.settle()
        replies = parse_replies(transport.written)
        expected = [200, 200, 404, 400, 201, 400, 200, 206]
        self.assertEqual([reply.status for reply in replies], expected)
        self.assertEqual(replies[-1].body, b"a" * 50 + b"b" * 200)
        transport.lose()

    def test_byte_by_byte(self) -> None:
        """Even single bytes do."""
        connection, transport = self.connect()
        for byte in allocate({0}, 5) + write(0, 0, b"hello") + read(0):
            connection.dataReceived(bytes([byte]))
        self.settle()
        self.assertEqual(parse_replies(transport.written)[-1].body, b"hello")


class HttpTests(ServerTestCase):
    """The finer points of HTTP."""

    def test_expect_continue(self) -> None:
        """A client that waits to be told so is told to send its body, in its turn."""
        body = gbs_cbor_bodies.pack_allocate({0}, 5)
        lines = [*lease_headers(), *upload_header(), b"Expect: 100-continue"]
        connection, transport = self.connect()
        request = head("POST", gbs_paths_headers.allocate_path(SI), *lines, body=body)
        connection.dataReceived(VERSION + request)
        written = bytes(transport.written)
        self.assertTrue(written.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"))
        self.assertTrue(written.startswith(b"HTTP/1.1 200"))
        connection.dataReceived(body)
        self.assertEqual(parse_replies(transport.written[len(written) :])[0].status, 200)
        self.assertEqual(connection._order.waiting_bytes, 0)  # it is counted like any other answer

    def test_head(self) -> None:
        """HEAD gets the head of what GET gets, also of large shares, which are not held open."""
        self.put(0, BIG)
        connection, transport = self.connect()
        connection.dataReceived(head("HEAD", gbs_paths_headers.share_path(SI, 0)) + VERSION)
        first, _, rest = bytes(transport.written).partition(b"\r\n\r\n")
        self.assertIn(b"Content-Length: 700000", first)
        self.assertEqual(parse_replies(rest)[0].status, 200)

    def test_chunked_bodies(self) -> None:
        """Bodies in chunks are taken, within the same limits."""
        self.statuses(allocate({0}, 10))
        content_range = b"Content-Range: bytes 0-9/*"
        chunked = b"Transfer-Encoding: chunked"
        path = gbs_paths_headers.share_path(SI, 0)
        good = head("PATCH", path, *upload_header(), content_range, chunked)
        short = b"4\r\n0123\r\n0\r\n\r\n"
        self.assertEqual(self.statuses(good + short), [400])
        body = b"4\r\n0123\r\n6;x=y\r\n456789\r\n0\r\nTrailer: x\r\n\r\n"
        self.assertEqual(self.statuses(good + body, VERSION), [201, 200])
        lines = [*lease_headers(), *upload_header(), chunked]
        big = head("POST", gbs_paths_headers.allocate_path(SI), *lines)
        big += b"2001\r\n" + b"x" * 0x2001 + b"\r\n0\r\n\r\n"
        self.assertEqual(self.statuses(big, VERSION), [413, 200])

    def test_tiny_chunks(self) -> None:
        """A body may come in a thousand of them, or in chunks of a sensible size; then it is refused."""
        size = 100_000
        self.statuses(allocate({0}, size))
        lines = [*upload_header(), b"Content-Range: bytes 0-%d/*" % (size - 1)]
        lines.append(b"Transfer-Encoding: chunked")
        patch = head("PATCH", gbs_paths_headers.share_path(SI, 0), *lines)
        (reply,) = self.ask(patch + b"2\r\nxx\r\n" * (FEW_CHUNKS + 1))
        self.assertEqual((reply.status, b"too small" in reply.body), (400, True))
        few = FEW_CHUNKS - 1
        rest = size - 2 * few
        body = b"2\r\nxx\r\n" * few + b"%x\r\n%s\r\n0\r\n\r\n" % (rest, b"x" * rest)
        self.assertEqual(self.statuses(patch + body), [201])

    def test_small_chunks(self) -> None:
        """Share data in small ones take as much memory as their bytes, until they are written."""
        size, most, least = 102_400, 100, LEAST_CHUNK_BYTES
        self.statuses(allocate({0}, size))
        lines = [*upload_header(), b"Content-Range: bytes 0-%d/*" % (size - 1)]
        lines.append(b"Transfer-Encoding: chunked")
        connection, transport = self.connect()
        connection.dataReceived(head("PATCH", gbs_paths_headers.share_path(SI, 0), *lines))
        chunk = b"%x\r\n%s\r\n" % (least, b"x" * least)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for _ in range(size // least // most):
            connection.dataReceived(chunk * most)
        self.assertLess(tracemalloc.get_traced_memory()[0], 2 * size)
        connection.dataReceived(b"0\r\n\r\n")
        self.settle()
        self.assertEqual([reply.status for reply in parse_replies(transport.written)], [201])
        (reply,) = self.ask(read(0, 0, size))
        self.assertEqual(reply.body, b"x" * size)

    def test_memory_of_many(self) -> None:
        """What a crowd has let go of is given back to the system, once, when most of it is gone."""
        given: list[None] = []
        self.patch(process_settings, "trim_heap", lambda: given.append(None))
        transports = [self.connect()[1] for _ in range(MANY)]
        for transport in transports[: MANY // 2]:
            transport.lose()
        self.clock.advance(TICK_S)
        self.assertEqual(given, [])
        for transport in transports[MANY // 2 :]:
            transport.lose()
        self.assertEqual(given, [None])
        self.connect()[1].lose()
        self.assertEqual(given, [None])

    def test_chunks_are_handed_on_together(self) -> None:
        """What one read brings of a body is one piece, whatever chunks it has."""
        listener = mock.Mock()
        parser = RequestParser(listener)
        parser.feed(
            head("POST", gbs_paths_headers.allocate_path(SI), b"Transfer-Encoding: chunked")
        )
        parser.feed(b"1\r\nx\r\n" * 900 + b"2\r\nyz\r\n0\r\n\r\n" + VERSION)
        listener.body_found.assert_called_once_with(b"x" * 900 + b"yz")
        self.assertEqual(len(listener.end_found.mock_calls), 2)
        self.assertEqual(
            [call[0] for call in listener.mock_calls[2:5]],
            ["body_found", "end_found", "request_began"],
        )

    def test_closing(self) -> None:
        """Who wants the connection closed, or speaks HTTP/1.0, finds it closed after the answer."""
        for request in (
            head("GET", gbs_paths_headers.VERSION_PATH, b"Connection: close"),
            VERSION.replace(b"HTTP/1.1", b"HTTP/1.0"),
        ):
            connection, transport = self.connect()
            connection.dataReceived(request + VERSION)
            self.assertTrue(transport.closing)
            replies = parse_replies(transport.written)
            self.assertEqual([reply.headers["connection"] for reply in replies], ["close"])
        keep = VERSION.replace(b"HTTP/1.1", b"HTTP/1.0").replace(
            b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"
        )
        connection, transport = self.connect()
        connection.dataReceived(keep + VERSION)
        self.assertFalse(transport.closing)
        self.assertEqual(len(parse_replies(transport.written)), 2)

    def test_order_of_refusals(self) -> None:
        """404 and 405 come before 401, that before 400, that before the body's faults."""
        path = gbs_paths_headers.allocate_path(SI)
        nobody = AUTHORIZATION + b"\r\n"

        def unauthorised(request: bytes) -> bytes:
            return request.replace(nobody, b"")

        wrong_type = head("POST", path, b"Content-Type: text/plain", body=b"")
        secrets = [*lease_headers(), *upload_header()]
        for request, status in (
            (unauthorised(head("GET", "/x")), 404),
            (unauthorised(head("DELETE", path)), 405),
            (unauthorised(wrong_type), 401),
            (wrong_type, 400),
            (head("POST", path, *secrets, b"Content-Type: text/plain", body=b""), 415),
            (head("POST", path, *secrets, b"Accept: */*", body=b""), 406),
            (head("POST", path, *secrets, body=b""), 400),
            (head("POST", path, *secrets, body=b"x" * 8193) + b"x" * 8193, 413),
        ):
            self.assertEqual(self.statuses(request, VERSION), [status, 200])

    def test_bodies_that_nobody_wants_pass(self) -> None:
        """A refused request's body is read past, however large, and not kept."""
        big = b"x" * 3_000_000
        self.assertEqual(self.statuses(write(7, 0, big), VERSION), [404, 200])
        self.assertEqual(self.statuses(write(7, 0, big).replace(AUTHORIZATION, b"A: b")), [401])


class WriteTests(ServerTestCase):
    """Share data."""

    def test_bodies_go_to_the_disk_while_they_come(self) -> None:
        """Of a body of any size only a little is held."""
        self.statuses(allocate({0}, len(BIG)))
        connection, _ = self.connect()
        request = write(0, 0, BIG)
        connection.dataReceived(request[:-200_000])
        received = len(BIG) - self.store.upload(SI, 0, SECRETS.upload).remaining_bytes
        self.assertGreater(received, 350_000)
        connection.dataReceived(request[-200_000:])
        self.settle()
        self.assertEqual(self.get(0), BIG)

    def test_an_upload_outlives_its_connection_and_its_server(self) -> None:
        """What came before the connection was lost, or the server killed, need not be sent again."""
        self.statuses(allocate({0}, len(BIG)))
        connection, transport = self.connect()
        connection.dataReceived(write(0, 0, BIG)[:400_000])
        transport.lose()
        abandon_store(self.store)
        self.store = self.make_store()
        self.restart()
        (reply,) = self.ask(write(0, 0, BIG[:10]))
        ((begin, end),) = gbs_cbor_bodies.unpack_required(reply.body, False).required
        self.assertGreater(begin, 390_000)
        self.assertEqual(end, len(BIG))
        self.assertEqual(self.statuses(write(0, begin, BIG[begin:])), [201])
        self.assertEqual(self.get(0), BIG)

    def test_an_upload_that_is_aborted_in_the_middle_of_a_body(self) -> None:
        """The rest of the body comes too late, however short the share is: 404, and nothing is logged."""
        abort = head("PUT", gbs_paths_headers.abort_path(SI, 0), *upload_header())
        for size in (100, 20_000, len(BIG)):
            data = BIG[:size]
            self.statuses(allocate({0}, size))
            connection, transport = self.connect()
            request = write(0, 0, data)
            connection.dataReceived(request[:-50])
            self.assertEqual(self.statuses(abort), [200])
            connection.dataReceived(request[-50:] + list_shares())
            self.settle()
            statuses = [reply.status for reply in parse_replies(transport.written)]
            self.assertEqual(statuses, [404, 200], size)
            self.assertEqual(self.statuses(read(0)), [404])
            transport.lose()

    def test_a_full_disk(self) -> None:
        """A disk that is full while writing is said to be; the upload stays, and the connection."""
        self.statuses(allocate({0}, 10))

        def full(fd: int, pieces: Any, offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with mock.patch.object(disk, "write_pieces", full):
            self.assertEqual(self.statuses(write(0, 0, b"0123456789"), VERSION), [507, 200])
        self.assertEqual(self.statuses(write(0, 0, b"0123456789")), [201])

    def test_what_cannot_be_made_durable_is_not_acknowledged(self) -> None:
        """A commit that fails is a 500, and the share is not there."""
        self.statuses(allocate({0}, 4))

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with mock.patch("pipegrid.disk.durability.Disk.sync_data", broken):
            self.assertEqual(self.statuses(write(0, 0, b"abcd"), list_shares()), [500, 200])
        self.assertEqual(self.statuses(read(0)), [404])

    def test_too_many_waiting_commits(self) -> None:
        """Beyond a bound, writes wait until shares have become durable; none is lost."""
        self.workers = workers = SlowWorkers()
        self.restart()
        sis = [bytes([n]) * 16 for n in range(10)]
        with mock.patch("pipegrid.server.gbs.storage_operations.MAX_COMMITS", 3):
            connection, transport = self.connect()
            for si in sis:
                connection.dataReceived(allocate({0}, 4, si=si) + write(0, 0, b"abcd", si=si))
            for _ in range(20):
                self.settle()
                self.assertLessEqual(self.service.commits, 3)
                workers.finish()
        statuses = [reply.status for reply in parse_replies(transport.written)]
        self.assertEqual(statuses, [200, 201] * 10)


class HostileTests(ServerTestCase):
    """Nothing crashes, nothing grows, and the log says why."""

    def refused(self, data: bytes, pieces: int = 4096) -> Reply:
        """Send what is not acceptable; returns the one answer, after which the connection is closed."""
        connection, transport = self.connect()
        for at in range(0, len(data), pieces):
            connection.dataReceived(data[at : at + pieces])
        self.assertTrue(transport.closing)
        (reply,) = parse_replies(transport.written)
        return reply

    def test_head_floods(self) -> None:
        """Heads beyond 16 KiB or 500 headers are refused, in whatever form they grow."""
        start = b"GET /storage/v1/version HTTP/1.1\r\n"
        many = b"".join(b"A%d: b\r\n" % n for n in range(501))
        for flood in (
            start + many + b"\r\n",
            start + b"A: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
            start + b"A" * (2 * MAX_HEAD_BYTES),
            start + b"A: " + b"x" * (2 * MAX_HEAD_BYTES),
            b"GET /" + b"x" * (2 * MAX_HEAD_BYTES),
            start + (b"A: " + b"x" * 1000 + b"\r\n") * 20,
        ):
            self.assertEqual(self.refused(flood).status, 431)
        trailers = b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: " + b"x" * (3 * MAX_HEAD_BYTES)
        self.assertEqual(self.refused(b"POST / HTTP/1.1\r\n" + trailers).status, 431)

    def test_no_http(self) -> None:
        """Garbage and contradictions end the connection with one 400."""
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,
            b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET / HTTP/1.1\r\nA b: c\r\n\r\n",
            b"BREW / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
        ):
            self.assertEqual(self.refused(data).status, 400, data[:60])

    def test_codings_that_nobody_knows(self) -> None:
        """Who sends a packed body means other bytes than would be kept; what follows is not looked at."""
        self.statuses(allocate({0}, 4))
        lines = [*upload_header(), b"Content-Range: bytes 0-3/*"]
        path = gbs_paths_headers.share_path(SI, 0)
        for coding in (
            b"gzip, chunked",
            b"chunked, chunked",
            b"x",
            b"gzip\r\nTransfer-Encoding: chunked",
        ):
            packed = head("PATCH", path, *lines, b"Transfer-Encoding: " + coding)
            reply = self.refused(packed + b"4\r\n0123\r\n0\r\n\r\n" + VERSION)
            self.assertIn(reply.status, (400, 501), coding)
        self.assertEqual(self.statuses(read(0)), [404])

    def test_chunks_over_http10(self) -> None:
        """It has none: what passes such a request on sees its end elsewhere, so the connection ends."""
        old = head(
            "GET",
            gbs_paths_headers.VERSION_PATH,
            b"Transfer-Encoding: chunked",
            b"Connection: keep-alive",
        )
        old = old.replace(b"HTTP/1.1", b"HTTP/1.0")
        self.assertEqual(self.refused(old + b"0\r\n\r\n" + VERSION).status, 400)

    def test_upgrades(self) -> None:
        """Who wants to speak another protocol gets an answer in this one, and the end."""
        upgrade = head(
            "GET", gbs_paths_headers.VERSION_PATH, b"Connection: upgrade", b"Upgrade: h2c"
        )
        self.assertEqual(self.statuses(upgrade), [200, 400])

    def test_answers_before_garbage_are_sent(self) -> None:
        """What came before the garbage is answered."""
        connection, transport = self.connect()
        connection.dataReceived(VERSION + VERSION + b"\0\0\0\r\n")
        statuses = [reply.status for reply in parse_replies(transport.written)]
        self.assertEqual(statuses, [200, 200, 400])

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=TWICE)
    @given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
    def test_mutated_requests(self, junk: bytes, begin: int, skip: int) -> None:
        """Junk anywhere in a request gives answers or none, but no failure."""
        request = allocate({0}, 5)
        connection, transport = self.connect()
        connection.dataReceived(request[:begin] + junk + request[begin + skip :])
        self.settle()
        parse_replies(transport.written)
        transport.lose()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_strange_paths(self) -> None:
        """Dots, escapes, NULs and absurd numbers lead nowhere, and to no file."""
        secret = self.root / "secret"
        secret.parent.mkdir(exist_ok=True)
        secret.write_bytes(b"x" * 200)
        share = gbs_paths_headers.share_path(SI, 0)
        for path in (
            "/../../secret",
            share + "/../../../../secret",
            share.replace("0", "..%2f..%2fsecret"),
            "/storage/v1/immutable/%2e%2e/0",
            share + "%00",
            share[:-1] + "9" * 200,
            share[:-1] + "256",
            share[:-1] + "99999",
        ):
            self.assertEqual(self.statuses(head("GET", path), VERSION), [404, 200], path)

    def test_the_absolute_form(self) -> None:
        """Where a proxy would be asked leads to the same, whatever the Host header says (RFC 9112, 3.2.2)."""
        version = gbs_paths_headers.VERSION_PATH
        for origin in (
            "http://host",
            "HTTPS://other.example:8098",
            "https://[2001:db8::1]:8098",
            "http://host:",
        ):
            replies = self.ask(head("GET", origin + version), head("GET", f"{origin}{version}?x"))
            self.assertEqual([reply.status for reply in replies], [200, 200], origin)
        share = "http://x" + gbs_paths_headers.share_path(SI, 0)
        self.assertEqual(self.statuses(allocate({0}, 3), write(0, 0, b"abc")), [200, 201])
        (reply,) = self.ask(head("GET", share, b"Range: bytes=1-2"))
        self.assertEqual((reply.status, reply.body), (206, b"bc"))
        asked = f"GET http://host{version} HTTP/1.1\r\nHost: another\r\n\r\n".encode()
        self.assertEqual(
            self.statuses(asked, VERSION), [401, 200]
        )  # the secret is asked for as ever

    def test_hosts(self) -> None:
        """A request of HTTP/1.1 names its host, once (RFC 9112, 3.2); one of HTTP/1.0 need not."""
        first = (
            f"GET {gbs_paths_headers.VERSION_PATH} HTTP/1.1\r\n".encode() + AUTHORIZATION + b"\r\n"
        )

        def asked(*hosts: bytes) -> bytes:
            return first + b"".join(b"Host: %s\r\n" % each for each in hosts) + b"\r\n"

        for host in (
            *(
                b"x",
                b"",
                b"a.example:8098",
                b"127.0.0.1:80",
                b"[2001:db8::1]:8098",
                b"[fe80::1%25eth0]",
            ),
            *(b"x:", b":80", b"a_b-c~d", b"%c3%a9.example", b"[v1.a:b]", b"  x  "),
        ):
            self.assertEqual(self.statuses(asked(host)), [200], host)
        for wrong in (
            *(
                b"a b",
                b"a/b",
                b"user@x",
                b"x:y",
                b"x:80:90",
                b"2001:db8::1",
                b"[x",
                b"x]",
                b"[]",
                b"a,b/",
            ),
            *(b"%zz", b"http://x", b"\xff", b"x#", b"x?y"),
        ):
            self.assertEqual(self.statuses(asked(wrong), VERSION), [400, 200], wrong)
        self.assertEqual(self.statuses(asked(), VERSION), [400, 200])
        self.assertEqual(self.statuses(asked(b"x", b"x"), VERSION), [400, 200])
        old = [request.replace(b"HTTP/1.1", b"HTTP/1.0") for request in (asked(), asked(b"x"))]
        for request in old:
            self.assertEqual(self.statuses(request), [200])
        self.assertEqual(
            self.statuses(old[0].replace(b"\r\n\r\n", b"\r\nHost: a b\r\n\r\n")), [400]
        )
        # Before it is asked for the secret, and for a place; a body is passed over.
        nowhere = b"POST /nowhere HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
        self.assertEqual(self.statuses(nowhere, VERSION), [400, 200])
        absolute = asked().replace(b"GET ", b"GET http://host")
        self.assertEqual(self.statuses(absolute, VERSION), [400, 200])

    def test_absolute_forms_that_lead_nowhere(self) -> None:
        """Neither do schemes and hosts that are none, users' names, or a path behind a fragment."""
        version = gbs_paths_headers.VERSION_PATH
        for url in (
            f"ftp://host{version}",
            f"http://{version}",
            f"http://:80{version}",
            f"http://user:word@host{version}",
            f"http://host/x/..{version}",
            f"http://host:80:80{version}",
            f"http://host#{version}",
            f"http://a/http://host{version}",
            "http://host",
            "http://host?" + version,
            "*",
            "http://" + "h" * 15000,
        ):
            connection, transport = self.connect()
            connection.dataReceived(head("GET", url))
            self.settle()
            (reply,) = parse_replies(transport.written)
            self.assertIn(reply.status, (400, 404), url)
            transport.lose()
        connection, transport = self.connect()
        connection.dataReceived(head("GET", "http://" + "h" * MAX_HEAD_BYTES + version))
        self.settle()
        (reply,) = parse_replies(transport.written)
        self.assertEqual(reply.status, 431)

    def test_cbor_bombs(self) -> None:
        """Bombs within the size limit are 400."""
        secrets = [*lease_headers(), *upload_header()]
        for bomb in (
            b"\x9b\x7f" + b"\xff" * 7,
            b"\x81" * 8192,
            b"\xd9\x01\x02" * 2700,
            b"\xbf" * 99,
        ):
            request = head("POST", gbs_paths_headers.allocate_path(SI), *secrets, body=bomb) + bomb
            self.assertEqual(self.statuses(request, VERSION), [400, 200])

    def test_a_client_that_never_reads(self) -> None:
        """It is read from no further, memory stays bounded, and one day it is cut off."""
        self.put(0, BIG)
        connection, transport = self.connect(room=10_000)
        sent = 0
        while not transport.paused and sent < 5000:
            connection.dataReceived(read(0, 0, 60_000) * 10)
            sent += 10
        self.assertTrue(transport.paused)
        self.assertLess(sent, 100)
        self.assertLess(len(transport.written), 400_000)
        for _ in range(int(STUCK_TIMEOUT_S) - 10):
            self.clock.advance(1)
        self.assertFalse(transport.aborted)
        self.clock.pump([1] * 30)
        self.assertTrue(transport.aborted)
        self.assertEqual(self.server.connections, set())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_unanswered_requests_are_bounded(self) -> None:
        """While nothing becomes durable, no more than so many requests are begun, or read."""
        self.workers = workers = SlowWorkers()
        self.restart()
        connection, transport = self.connect()
        count = 0
        while not transport.paused and count < 1000:
            si = count.to_bytes(16, "big")
            connection.dataReceived(allocate({0}, 4, si=si) + write(0, 0, b"abcd", si=si))
            count += 1
        self.assertLess(count, MAX_UNANSWERED)
        self.assertLessEqual(self.service.commits, MAX_UNANSWERED)
        for _ in range(20):
            self.settle()
            workers.finish()
        statuses = [reply.status for reply in parse_replies(transport.written)]
        self.assertEqual(statuses, [200, 201] * count)

    def test_slow_loris(self) -> None:
        """A head that dribbles in is waited for no longer than its time, bytes or no bytes."""
        connection, transport = self.connect()
        connection.dataReceived(b"GET / HTTP/1.1\r\n")
        for _ in range(int(HEAD_TIMEOUT_S) - 1):
            self.clock.advance(1)
            connection.dataReceived(b"A: b\r\n")
        self.assertFalse(transport.closing)
        for _ in range(10):
            self.clock.advance(1)
            if not transport.closing:
                connection.dataReceived(b"A: b\r\n")
        self.assertTrue(transport.closing)
        self.assertEqual(transport.written, b"")
        self.clock.pump([5] * 8)
        self.assertTrue(transport.aborted)

    def test_slow_messages(self) -> None:
        """So is a message's body; share data may take its time while it comes."""
        secrets = [*lease_headers(), *upload_header()]
        slow, slow_transport = self.connect()
        slow.dataReceived(
            head("POST", gbs_paths_headers.allocate_path(SI), *secrets, body=b"x" * 1000)
        )
        self.statuses(allocate({0}, 1000))
        data, data_transport = self.connect()
        request = write(0, 0, b"x" * 1000)
        data.dataReceived(request[:-1000])
        for _ in range(100):
            self.clock.advance(1)
            if not slow_transport.closing:
                slow.dataReceived(b"x")
            data.dataReceived(b"x")
        self.assertTrue(slow_transport.closing)
        self.assertFalse(data_transport.closing)

    def test_idle_connections(self) -> None:
        """A thousand silent ones are kept, then closed; whoever has not shown the secret has half as long."""
        clients = [self.connect() for _ in range(1000)]
        known, strangers = clients[:500], clients[500:]
        for connection, _ in known:
            connection.dataReceived(VERSION)
        for connection, _ in strangers[:250]:
            connection.dataReceived(VERSION.replace(b"Authorization: ", b"Authorisation: "))
        for wait_s, some in ((HEAD_TIMEOUT_S, strangers), (IDLE_TIMEOUT_S, known)):
            self.clock.pump([1] * int(wait_s - self.clock.seconds()))
            self.assertFalse(any(transport.closing for _, transport in some))
            self.clock.pump([1] * 6)
            self.assertTrue(all(transport.closing for _, transport in some))
        for _, transport in clients:
            transport.lose()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_refused_bodies(self) -> None:
        """The body of a request that nobody has asked for has the time of a head, however it comes."""
        connection, transport = self.connect()
        request = write(0, 0, b"x" * 10**6).replace(
            b"Authorization: Tahoe", b"Authorization: nobody"
        )
        connection.dataReceived(request[: -(10**6)])
        for _ in range(int(HEAD_TIMEOUT_S) - 1):
            self.clock.advance(1)
            connection.dataReceived(b"x")
        self.assertFalse(transport.closing)
        for _ in range(10):
            self.clock.advance(1)
            if not transport.closing:
                connection.dataReceived(b"x")
        self.assertTrue(transport.closing)

    def test_refused_bodies_of_those_who_know_the_secret(self) -> None:
        """They may take as long as share data: on a slow line they may be behind a refused allocation."""
        connection, transport = self.connect()
        connection.dataReceived(VERSION + write(0, 0, b"x" * 1000)[:-1000])
        for _ in range(200):
            self.clock.advance(1)
            connection.dataReceived(b"x")
        self.assertFalse(transport.closing)

    def test_what_is_of_use(self) -> None:
        """Requests and bodies that get on are; a byte now and then is not."""
        connection, _ = self.connect()
        told: list[None] = []
        connection.on_known = lambda: told.append(None)
        connection.dataReceived(VERSION + allocate({0}, 100_000))
        self.assertEqual(told, [None])
        self.clock.pump([1] * 20)
        self.assertGreaterEqual(connection.quiet_s(), 15)
        connection.dataReceived(write(0, 0, b"x" * 100_000)[:-100_000])
        for _ in range(15):
            self.clock.advance(1)
            connection.dataReceived(b"x" * 1000)
            self.assertLessEqual(connection.quiet_s(), 20)
        self.assertLessEqual(connection.quiet_s(), 5)
        for _ in range(20):
            self.clock.advance(1)
            connection.dataReceived(b"x")
        self.assertGreaterEqual(connection.quiet_s(), 14)

    def test_use_is_noted_when_it_happens(self) -> None:
        """Not when somebody first has to make room: else all of a crowd were of use at that moment."""
        connections = [self.connect()[0] for _ in range(3)]
        connections[0].dataReceived(VERSION)
        self.clock.advance(1)
        connections[1].dataReceived(allocate({0}, 100_000) + write(0, 0, b"x" * 100_000)[:-50_000])
        connections[1].dataReceived(b"x" * 5000)
        self.clock.advance(1.5)
        self.assertEqual([each.quiet_s() for each in connections], [2.5, 1.5, 2.5])
        connections[1].dataReceived(b"x" * 5000)
        self.assertEqual(connections[1].quiet_s(), 0.0)

    def test_an_answer_that_is_owed_is_of_use(self) -> None:
        """Nobody is cut while a share of his becomes durable."""
        self.workers = SlowWorkers()
        self.restart()
        connection, _ = self.connect()
        connection.dataReceived(allocate({0}, 4) + write(0, 0, b"abcd"))
        self.clock.pump([1] * 50)
        self.assertEqual(connection.quiet_s(), 0.0)

    def test_strangers_requests_are_few(self) -> None:
        """Where the secret does not come, a connection ends behind 32 answers; else it goes on."""
        connection, transport = self.connect()
        connection.dataReceived(head("GET", "/").replace(b"Authorization: ", b"A: ") * 100)
        replies = parse_replies(transport.written)
        self.assertEqual([reply.status for reply in replies], [404] * MAX_UNAUTHENTICATED_REQUESTS)
        self.assertEqual(replies[-1].headers["connection"], "close")
        self.assertTrue(transport.closing)
        requests = [VERSION, *[head("GET", "/")] * 99]
        self.assertEqual(self.statuses(*requests), [200] + [404] * 99)

    def test_waiting_for_an_answer_is_not_idling(self) -> None:
        """Whom we owe an answer is not closed."""
        self.workers = SlowWorkers()
        self.restart()
        connection, transport = self.connect()
        connection.dataReceived(allocate({0}, 4) + write(0, 0, b"abcd"))
        self.clock.pump([1] * 200)
        self.assertFalse(transport.closing)

    def test_failures_within_are_500(self) -> None:
        """A defect of ours is logged and answered, and the connection goes on."""
        self.patch(self.store, "version", lambda owner: 1 // 0)
        self.assertEqual(self.statuses(VERSION, list_shares()), [500, 200])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class StopTests(ServerTestCase):
    """The end."""

    def test_what_was_begun_is_answered(self) -> None:
        """Stopping waits for answers that are due, closes the idle, and refuses the new."""
        self.workers = workers = SlowWorkers()
        self.restart()
        connection, transport = self.connect()
        _, idle = self.connect()
        connection.dataReceived(allocate({0}, 4) + write(0, 0, b"abcd"))
        self.settle()
        stopped = self.server.stop()
        self.assertTrue(idle.closing)
        self.assertFalse(transport.closing)
        self.assertIsNone(self.server.buildProtocol(None))
        connection.dataReceived(VERSION)
        workers.finish()
        self.settle()
        self.assertTrue(transport.closing)
        statuses = [reply.status for reply in parse_replies(transport.written)]
        self.assertEqual(statuses, [200, 201])
        idle.lose()
        self.assertNoResult(stopped)
        transport.lose()
        self.successResultOf(stopped)
        self.clock.advance(20)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stopping_takes_no_longer_than_its_grace(self) -> None:
        """Who does not finish is cut off."""
        connection, transport = self.connect()
        self.statuses(allocate({0}, 40))
        connection.dataReceived(write(0, 0, b"a" * 40)[:-5])
        stopped = self.server.stop()
        self.assertNoResult(stopped)
        self.clock.advance(10)
        self.successResultOf(stopped)
        self.assertTrue(transport.aborted)
        self.assertEqual(self.statuses_after_restart(), [201])

    def statuses_after_restart(self) -> list[int]:
        """The upload goes on with another server."""
        self.store.close()
        self.store = self.make_store()
        self.restart()
        return self.statuses(write(0, 35, b"a" * 5))


class PassedOnOrderTests(OrderTests):
    """The same, if what is left of any body is handed on as it is."""

    def setUp(self) -> None:
        self.patch(RequestParser, "passed_on_bytes", 1)
        super().setUp()


class PassedOnWriteTests(WriteTests):
    """The same, if what is left of any body is handed on as it is."""

    def setUp(self) -> None:
        self.patch(RequestParser, "passed_on_bytes", 1)
        super().setUp()


class PassedOnHostileTests(HostileTests):
    """The same, if what is left of any body is handed on as it is."""

    def setUp(self) -> None:
        self.patch(RequestParser, "passed_on_bytes", 1)
        super().setUp()
