"""Sprints: real sockets, and servers that do what they are told, each connection in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import file_system_calls
from pipegrid.disk.durability import Policy
from pipegrid.mirror import epoll_driver, epoll_file_store
from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.connection_scheduler import FetchSchedule
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.epoll_connection import Connection, Lost
from pipegrid.mirror.epoll_response_head import UnsupportedResponse, parse_head
from pipegrid.mirror.epoll_socket_cache import SocketCache, can_use_epoll
from pipegrid.mirror.fetch_run import MirrorRun
from pipegrid.mirror.file_scheduler import Scheduler, Tally
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.mirror_urls import parse_url
from pipegrid.mirror.preconnect_mirrors import begin, place_of

PATIENCE_S = 30


def ok(body: bytes, more: bytes = b"") -> bytes:
    """A plain answer."""
    return b"HTTP/1.1 200 OK\r\nServer: x\r\n%sContent-Length: %d\r\n\r\n%s" % (
        more,
        len(body),
        body,
    )


class Server:
    """
    A web server.

    Attributes:
        answer: returns all bytes to send for a path, or None to end the connection.
        reads_first: so many requests are read before the first is answered.
        connections: how many there were; ``asked``: paths, in the order in which they came.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.answer: Callable[[str, int], bytes | None] = lambda path, _: ok(files[path])
        self.reads_first = 1
        self.piece = random.Random(1)
        self.connections = 0
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more; may be called again."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        heads: list[bytes] = []
        rest, count = b"", 0
        with connection:
            try:
                while True:
                    while len(heads) < (self.reads_first if not count else 1):
                        got = connection.recv(1 << 16)
                        if not got:
                            return
                        *more, rest = (rest + got).split(b"\r\n\r\n")
                        heads += more
                    path = unquote(heads.pop(0).split(b" ")[1].decode()).removeprefix("/")
                    self.asked.append(path)
                    count += 1
                    data = self.answer(path, count)
                    if data is None:
                        return
                    closes = b"\r\nConnection: close" in data.partition(b"\r\n\r\n")[0]
                    while data:  # in pieces of any size
                        size = self.piece.choice((1, 100, 70_000, 1 << 20))
                        connection.sendall(data[:size])
                        data = data[size:]
                    if closes:
                        return
            except OSError:
                return


class HeadTests(SynchronousTestCase):
    """What is understood."""

    def test_good_ones(self) -> None:
        """Status, length, and whether it is the last; however it is written."""
        for head, expected in (
            (b"HTTP/1.1 200 OK\r\nContent-Length: 12", (200, 12, False)),
            (b"HTTP/1.1 200\r\ncontent-LENGTH:7 \r\nConnection: Close", (200, 7, True)),
            (b"HTTP/1.1 404 No\r\nConnection: keep-alive\r\nContent-Length: 0", (404, 0, False)),
            (b"HTTP/1.1 200 OK\r\nX-Content-Length: 3\r\nContent-Length: 4", (200, 4, False)),
        ):
            found = parse_head(head)
            self.assertEqual((found.status, found.length, found.closes), expected, head)

    def test_odd_ones(self) -> None:
        """All else is for others to understand."""
        for head in (
            b"HTTP/1.0 200 OK\r\nContent-Length: 12",
            b"HTTP/1.1 2x0 OK\r\nContent-Length: 12",
            b"HTTP/1.1 200 OK",
            b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nContent-Length: 13",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1_0",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3",
            b"HTTP/1.1 204 OK\r\nContent-Length: 0",
            b"HTTP/1.1 100 Continue",
            b"SSH-2.0-OpenSSH",
        ):
            self.assertRaises(UnsupportedResponse, parse_head, head)


class SprintCase(SynchronousTestCase):
    """What whole ones need."""

    spare_processors = 1

    def setUp(self) -> None:
        self.patch(epoll_file_store, "SPARE_PROCESSORS", self.spare_processors)
        rng = random.Random(1)
        sizes = [0, 1, 5000, 128 << 10, (128 << 10) + 1, 256 << 10, 3_000_000]
        sizes += [rng.randrange(30_000) for _ in range(60)]
        self.files = {
            f"pool/{number % 7}/file{number:03}.deb": rng.randbytes(size)
            for number, size in enumerate(sizes)
        }
        self.dest = Path(self.mktemp())

    def server(self, files: Mapping[str, bytes] | None = None) -> Server:
        """Start one."""
        server = Server(self.files if files is None else files)
        self.addCleanup(server.close)
        return server

    def run_on_epoll(
        self,
        *servers: Server,
        policy: Policy = "batch",
        stopped: Callable[[], bool] = lambda: False,
        connections: int = 4,
    ) -> tuple[MirrorRun, bool]:
        """Run one, over all files; returns it, and whether that was all."""
        destination = Destination(str(self.dest))
        try:
            work = MirrorRun(destination, [parse_url(each.url) for each in servers], VerifyPolicy())
            entries = [
                (path, len(data), {"sha256": sha256(data).digest()})
                for path, data in self.files.items()
            ]
            done = work.run_on_epoll(entries, policy, connections, stopped)
        finally:
            destination.close()
        work.sum_up()
        work.plan._check_invariants()
        self.assertEqual(os.listdir(self.dest / ".pipegrid-mirror/incoming"), [])
        return work, done

    def found(self) -> dict[str, bytes]:
        """What is there."""
        return {
            str(path.relative_to(self.dest)): path.read_bytes()
            for path in self.dest.rglob("*")
            if path.is_file() and ".pipegrid-mirror" not in path.parts
        }


class SprintTests(SprintCase):
    """Whole ones."""

    def test_all_of_it(self) -> None:
        """Whatever the durability; and a second time nothing is asked for."""
        policies: tuple[Policy, ...] = ("none", "batch", "strict")
        for policy in policies:
            self.dest = Path(self.mktemp())
            server = self.server()
            work, done = self.run_on_epoll(server, policy=policy)
            self.assertTrue(done)
            self.assertEqual(self.found(), self.files)
            report = work.report
            self.assertEqual(
                (report.fetched_files, report.retries, report.failed_files),
                (len(self.files), 0, 0),
            )
            self.assertEqual(report.tallies[0].received_bytes, sum(map(len, self.files.values())))
            self.assertEqual(sorted(server.asked), sorted(self.files))
            server.asked.clear()
            again, done = self.run_on_epoll(server, policy=policy)
            self.assertEqual((done, server.asked), (True, []))
            self.assertEqual(again.report.present_files, len(self.files))

    def test_nobody_waits_for_answers(self) -> None:
        """A server that reads all requests before it answers one gets them, the largest file first."""
        server = self.server()
        server.reads_first = len(self.files)
        _, done = self.run_on_epoll(server, connections=1)
        self.assertTrue(done)
        self.assertEqual(server.connections, 1)
        sizes = [len(self.files[path]) for path in server.asked]
        self.assertEqual(sizes, sorted(sizes, reverse=True))

    def test_the_end_waits_for_nothing(self) -> None:
        """When the last byte has come, what came last is stored at once: nobody else will come."""
        self.patch(epoll_driver, "WATCH_S", PATIENCE_S)
        began_s = time.monotonic()
        files = self.files
        for connections, names in ((1, [*files]), (3, [*files]), (1, ["pool/2/file002.deb"])):
            self.files = {name: files[name] for name in names}
            self.dest = Path(self.mktemp())
            _, done = self.run_on_epoll(self.server(), connections=connections)
            self.assertTrue(done)
        self.assertLess(time.monotonic() - began_s, PATIENCE_S / 2)

    def test_the_end_comes_at_once(self) -> None:
        """So it is if all has come before it is known that nothing more is wanted."""
        self.patch(epoll_driver, "WATCH_S", PATIENCE_S)
        fill = epoll_driver.EpollDriver._fill

        def fill_and_wait(running: epoll_driver.EpollDriver) -> None:
            fill(running)
            owed = [each.sock for each in running._connections.values() if each.is_outstanding]
            if owed:
                select.select(owed, [], [], PATIENCE_S)

        self.patch(epoll_driver.EpollDriver, "_fill", fill_and_wait)
        began_s = time.monotonic()
        self.files = {"index": b"x" * 100}
        server = self.server()
        server.piece = random.Random()
        self.patch(server.piece, "choice", max)
        _, done = self.run_on_epoll(server, connections=1)
        self.assertTrue(done)
        self.assertLess(time.monotonic() - began_s, PATIENCE_S / 2)

    def test_few_pages(self) -> None:
        """Long files that come side by side, each holding pages, do not wait for one another."""
        self.patch(epoll_file_store, "MAX_PAGES", 3)
        rng = random.Random(3)
        self.files = {f"long{number}": rng.randbytes(900_000) for number in range(6)}
        _, done = self.run_on_epoll(self.server(), self.server())
        self.assertEqual((done, self.found()), (True, self.files))

    def test_begun_ahead(self) -> None:
        """Connections that were begun before are used first; what nobody takes is closed."""
        server = self.server()
        address = parse_url(server.url)
        with contextlib.closing(SocketCache([address], 2)) as ahead:
            schedule = FetchSchedule(Scheduler(1), [address], [Tally(address.url)], 4)
            destination = Destination(str(self.dest))
            self.addCleanup(destination.close)
            new_store = partial(epoll_file_store.FileStore, destination, "batch", False)
            driver = epoll_driver.EpollDriver(
                schedule, new_store, list, lambda: False, lambda: None, ahead
            )
            for _ in range(3):
                driver._open(schedule.mirrors[0].own)
            self.assertIsNone(ahead.take(address))
            self.assertEqual(len(schedule.mirrors[0].own.connections), 3)
            driver._close()
        ahead = SocketCache([address, parse_url("http://nobody.invalid/")], 2)
        first = ahead.take(address)
        assert first is not None
        first[0].close()
        ahead.close()
        self.assertIsNone(ahead.take(address))

    def test_left_to_others(self) -> None:
        """What a sprint does not need any more the next one uses, unless it has ended meanwhile."""
        server = self.server()
        address = parse_url(server.url)
        destination = Destination(str(self.dest))
        self.addCleanup(destination.close)
        with contextlib.closing(SocketCache([address])) as ahead:
            for path, data in list(self.files.items())[:3]:
                work = MirrorRun(destination, [address], VerifyPolicy())
                entry = (path, len(data), {"sha256": sha256(data).digest()})
                self.assertTrue(work.run_on_epoll([entry], "batch", 1, preconnected=ahead))
            self.assertEqual((server.connections, len(server.asked)), (1, 3))
            begun = ahead.take(address)
            assert begun is not None
            self.assertEqual(begun[1], 3)
            ahead.give(address, *begun)
            begun[0].shutdown(socket.SHUT_RDWR)
            self.assertIsNone(ahead.take(address))

    def test_tls_on_the_way(self) -> None:
        """TLS begins when the connection is there, and not while it is being made."""
        listening = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.addCleanup(listening.close)
        place: Any = (socket.AF_INET, listening.getsockname())
        waiting = [begin(place) for _ in range(4)]  # more than may wait: the last is not answered
        secured: list[int] = []

        def secure(sock: socket.socket) -> Any:
            secured.append(sock.fileno())
            raise ConnectionError("reached")

        runner: Any = None
        address = parse_url("http://nobody.invalid/")
        host = FetchSchedule(Scheduler(1), [address], [Tally("")], 4).mirrors[0].own
        connection = Connection(runner, host, waiting.pop(), secure)
        self.addCleanup(connection.close)
        connection.write()
        self.assertEqual((secured, connection.wants_to_write), ([], True))
        ready = begin(place_of(*parse_url(self.server().url).place))
        there = Connection(runner, host, ready, secure)
        self.addCleanup(there.close)
        select.select([], [ready], [], PATIENCE_S)
        self.assertRaises(Lost, there.write)
        self.assertEqual(secured, [ready.fileno()])
        for each in waiting:
            each.close()

    def test_connections_that_end(self) -> None:
        """What was asked behind the last answer is asked again, and that is nobody's fault."""
        server = self.server()

        def answer(path: str, count: int) -> bytes:
            return ok(self.files[path], b"Connection: close\r\n" if count == 10 else b"")

        server.answer = answer
        work, done = self.run_on_epoll(server)
        self.assertTrue(done)
        self.assertEqual(self.found(), self.files)
        self.assertEqual((work.report.retries, work.report.tallies[0].broken), (0, 0))

    def test_missing_and_wrong(self) -> None:
        """What one mirror lacks or has wrong comes from the other; nothing wrong gets a name."""
        rng = random.Random(2)
        some = sorted(path for path, data in self.files.items() if data)
        for kind in ("missing", "garbled", "short"):
            self.dest = Path(self.mktemp())
            bad = set(rng.sample(some, 9))
            bad_one, good_one = self.server(), self.server()

            def answer(path: str, _: int, bad: set[str] = bad, kind: str = kind) -> bytes:
                data = self.files[path]
                if path not in bad:
                    return ok(data)
                if kind == "missing":
                    return b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone"
                return ok(data[:-1] + bytes([data[-1] ^ 1]) if kind == "garbled" else data[:-1])

            bad_one.answer = answer
            work, done = self.run_on_epoll(bad_one, good_one)
            self.assertTrue(done, kind)
            self.assertEqual(self.found(), self.files)
            asked = len(bad & set(bad_one.asked))
            refused = work.report.tallies[0].refused
            self.assertEqual(work.report.retries, refused)
            if kind == "missing":
                self.assertEqual(refused, asked)
            else:  # nothing on a connection is read behind a wrong file: it is asked for again
                self.assertLessEqual(refused, asked)

    def test_as_nginx_says_it(self) -> None:
        """Its usual heads, and what only looks like them."""
        server = self.server()

        def answer(path: str, count: int) -> bytes:
            body = self.files[path]
            lines = [
                b"HTTP/1.1 200 OK",
                b"Server: nginx/1.26.3",
                b"Date: Mon, 23 Nov 2026 02:36:10 GMT",
                b"Content-Type: application/octet-stream",
                b"Content-Length: %d" % len(body),
                b"Last-Modified: Mon, 23 Nov 2026 02:36:10 GMT",
                b"Connection: %s" % (b"close" if count == 15 else b"keep-alive"),
                b'ETag: "656-1"',
                b"Accept-Ranges: bytes",
            ]
            if count % 2:
                del lines[3]
            return b"\r\n".join([*lines, b"", body])

        server.answer = answer
        work, done = self.run_on_epoll(server)
        self.assertTrue(done)
        self.assertEqual((self.found(), work.report.retries), (self.files, 0))

    def test_what_nobody_has(self) -> None:
        """It has failed, for the reasons of all."""
        servers = self.server(), self.server()
        lacking = sorted(self.files)[5]
        for server in servers:
            server.answer = lambda path, _: (
                ok(self.files[path])
                if path != lacking
                else b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
            )
        work, done = self.run_on_epoll(*servers)
        self.assertTrue(done)
        ((path, why),) = work.report.failed
        self.assertEqual((path, why.count("it answers 404")), (lacking, 2))
        del self.files[lacking]
        self.assertEqual(self.found(), self.files)

    def test_what_is_not_plain_is_left(self) -> None:
        """No mirror takes part any more; what there is is whole, and the rest waits for others."""

        def broken(path: str, count: int) -> bytes | None:
            return ok(self.files[path]) if count < 5 else None

        answers: tuple[Callable[[str, int], bytes | None], ...] = (
            lambda path, _: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            lambda path, _: b"HTTP/1.0 200 OK\r\n\r\n" + self.files[path],
            lambda path, _: b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
            lambda path, _: b"\x16\x03\x01 this is no HTTP\r\n\r\n",
            lambda path, _: b"x" * 100_000,
            lambda path, _: b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000 + ok(self.files[path]),
            lambda path, _: b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
            lambda path, _: b"HTTP/1.1 200 OK\r\nX: " + b"y" * 90_000 + b"\r\n\r\n",
            lambda path, _: ok(
                b"Content-Length: 3\r\n" + self.files[path], b"Content-Length: 9\r\n"
            ),
            lambda path, _: ok(self.files[path] or b"x", b"Connection: close\r\n")[:-1],
            broken,
        )
        for number, answer in enumerate(answers):
            self.dest = Path(self.mktemp())
            server = self.server()
            server.answer = answer
            work, done = self.run_on_epoll(server)
            self.assertFalse(done, number)
            found = self.found()
            self.assertLess(len(found), len(self.files))
            for path, data in found.items():
                self.assertEqual(data, self.files[path])
            self.assertEqual(
                len(found) + sum(1 for _ in work.plan.waiting()), len(self.files), number
            )
            # The other way of doing it finds a mirror that may be asked for all of it.
            self.assertTrue(all(not each.refused_by for each in work.plan.waiting()))
            if number < 2:  # it does what it may, and nothing of it is a fault
                self.assertEqual((work.report.retries, work.report.tallies[0].broken), (0, 0))

    def test_others_go_on(self) -> None:
        """A mirror that cannot be reached, and one that breaks off, are left out; the third does it all."""
        gone, breaking, good = self.server(), self.server(), self.server()
        gone.close()
        breaking.answer = lambda path, _: None
        work, done = self.run_on_epoll(gone, breaking, good)
        self.assertTrue(done)
        self.assertEqual(self.found(), self.files)
        self.assertEqual(work.report.tallies[2].files, len(self.files))

    def test_silence(self) -> None:
        """A mirror that does not answer is left, as soon as it is known to stall."""
        self.patch(epoll_driver, "ALONE_STALL_S", 0.05)
        server = self.server()
        server.reads_first = 1 << 30
        work, done = self.run_on_epoll(server)
        self.assertEqual((done, self.found()), (False, {}))
        self.assertGreaterEqual(work.report.tallies[0].broken, 1)

    def test_a_link_in_the_way(self) -> None:
        """What cannot have its name is said so, and the others are there."""
        self.dest.mkdir()
        elsewhere = Path(self.mktemp())
        elsewhere.mkdir()
        (self.dest / "pool").mkdir()
        self.files["late/x"] = b"x"
        server = self.server()

        def answer(path: str, _: int) -> bytes:
            with contextlib.suppress(FileExistsError):  # each connection has a thread of its own
                (self.dest / "late").symlink_to(elsewhere.absolute())
            return ok(self.files[path])

        server.answer = answer
        work, done = self.run_on_epoll(server)
        self.assertTrue(done)
        ((path, why),) = work.report.failed
        self.assertEqual(path, "late/x")
        self.assertIn("symbolic link", why)
        self.assertEqual(list(elsewhere.iterdir()), [])

    def test_a_full_disk(self) -> None:
        """One sentence; nothing is left lying around."""
        destination_open = Destination.open_incoming
        count = 0

        def full(destination: Destination, wanted: Any) -> Any:
            nonlocal count
            count += 1
            if count > 20:
                raise OSError(28, "No space left on device")
            return destination_open(destination, wanted)

        self.patch(Destination, "open_incoming", full)
        error = self.assertRaises(MirrorError, self.run_on_epoll, self.server())
        self.assertIn("the disk is full; free some space", str(error))
        self.assertEqual(os.listdir(self.dest / ".pipegrid-mirror/incoming"), [])

    def test_a_disk_that_fills(self) -> None:
        """The same in the thread, in the middle of long files: their pages and descriptors are given back."""
        write, count = file_system_calls.write_all_pieces, 0

        def full(*arguments: Any) -> None:
            nonlocal count
            count += 1
            if count > 2:
                raise OSError(28, "No space left on device")
            write(*arguments)

        self.patch(epoll_file_store, "write_all_pieces", full)
        self.files = {f"long{number}": bytes([number]) * 3_000_000 for number in range(6)}
        server = self.server()
        error = self.assertRaises(MirrorError, self.run_on_epoll, server)
        self.assertIn("the disk is full; free some space", str(error))
        self.assertEqual(os.listdir(self.dest / ".pipegrid-mirror/incoming"), [])
        opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        self.assertEqual([path for path in opened if str(self.dest.absolute()) in path], [])
        self.patch(epoll_file_store, "write_all_pieces", write)
        _, done = self.run_on_epoll(server)
        self.assertEqual((done, self.found()), (True, self.files))

    def test_answers_that_nobody_asked_for(self) -> None:
        """They are taken for others' at most, which the hash does not let pass."""
        server = self.server()
        server.answer = lambda path, _: ok(self.files[path]) + ok(b"what nobody asked for") * 3
        self.run_on_epoll(server)
        for path, data in self.found().items():
            self.assertEqual(data, self.files[path])

    def test_stopped(self) -> None:
        """Nothing begun is left; the next run goes on."""
        server = self.server()
        _, done = self.run_on_epoll(server, stopped=lambda: len(server.asked) > 9)
        self.assertFalse(done)
        _, done = self.run_on_epoll(server)
        self.assertTrue(done)
        self.assertEqual(self.found(), self.files)

    def test_no_part_for_proxies(self) -> None:
        """They are asked otherwise."""
        plain = parse_url("http://a.example/")
        self.assertTrue(can_use_epoll([plain]))
        proxied = plain.replaced(proxy=object())
        self.assertFalse(can_use_epoll([plain, proxied]))


class BusyTests(SprintTests):
    """The same without a thread for long files, as where there are few processors."""

    spare_processors = 1 << 30
