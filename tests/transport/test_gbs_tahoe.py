"""Answers recorded from a Tahoe-LAFS 1.20.0 server, chunked as it sends them, understood by this client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    ServerError,
    ServerProtocolError,
    ServerRefused,
    WrongSecret,
    WrongSwissnum,
)
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.uploads import CROWD_BYTES
from pipegrid.wire.storage_messages import Allocation, SlotResult, WriteAnswer
from tests import vectors
from tests.scratch import scratch_path
from tests.transport.contract import SECRETS, SI, Consumer
from tests.transport.gbs_world import PORT, GbsWorld
from tests.transport.slot_contract import SLOT, SLOT_SECRETS, made

RECORDED = {each["name"]: each for each in vectors.load("gbs-http")["exchanges"]}


def render(status: int, headers: dict[str, list[str]], body: bytes) -> bytes:
    """Return an answer as Tahoe's server puts it on the wire."""
    lines = [f"HTTP/1.1 {status} Whatever", "Server: TwistedWeb/24.7.0"]
    lines += [f"{name}: {value}" for name, values in headers.items() for value in values]
    if "transfer-encoding" in headers:
        body = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (body[:7], body[7:]) if c)
        body += b"0\r\n\r\n"
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def recorded(name: str) -> bytes:
    """Return a recorded answer."""
    exchange = RECORDED[name]
    body = bytes.fromhex(exchange["response_body_hex"])
    return render(exchange["status"], exchange["response_headers"], body)


class Parrot(Protocol):
    """Gives the same answer to every request, in small pieces."""

    answer = b""
    transport: Any

    def dataReceived(self, data: bytes) -> None:
        for _ in range(data.count(b"HTTP/1.1\r\n")):
            for start in range(0, len(self.answer), 50):
                self.transport.write(self.answer[start : start + 50])


class TahoeTests(SynchronousTestCase):
    """Each recorded answer has the one meaning that the contract has for it."""

    def setUp(self) -> None:
        self.world = GbsWorld(scratch_path(self))
        self.addCleanup(self.world.close)

    def ask(self, answer: bytes, question: Callable[[GbsServer], Deferred[Any]]) -> Any:
        """Return what the client makes of an answer to a question."""
        host = self.world.network.host("s9")
        protocol: Any = type("Parrot", (Parrot,), {"answer": answer})
        port = host.listen(PORT, Factory.forProtocol(protocol))
        server = self.world.connect(9)
        try:
            return self.world.run(question(server))
        finally:
            self.world.run(server.disconnect())
            port.stopListening()

    def fails(
        self, error: type[ServerError], answer: bytes, question: Callable[[GbsServer], Any]
    ) -> ServerError:
        """Expect exactly this error, with a sentence that names the server."""
        with self.assertRaises(error) as caught:
            self.ask(answer, question)
        found: ServerError = caught.exception
        if error is not ServerProtocolError:  # of which HTTP has kinds of its own
            self.assertIs(type(found), error)
        self.assertEqual(found.server, "s9")
        self.assertIn("s9", str(found))
        self.assertLess(len(str(found)), 400)
        return found

    def before_it(self, bundles: bool) -> int:
        """Return how many bytes a server is sent that never answers."""
        heard = [0]

        class Deaf(Protocol):
            def dataReceived(self, data: bytes) -> None:
                heard[0] += len(data)

        name = "s8" if bundles else "s9"
        port = self.world.network.host(name).listen(PORT, Factory.forProtocol(Deaf))
        self.addCleanup(port.stopListening)
        server = self.world.connect(int(name[1:]))
        server._uploads.bundles.max_bytes = (1 << 20) * bundles
        for number in range(200):
            index = number.to_bytes(16, "big")
            server.write(index, 0, 50, [b"x" * 10_000], SECRETS.upload).addErrback(lambda _: None)
        self.world.clock.advance(5)
        self.world.run(server.disconnect())
        return heard[0]

    def test_how_much_waits_there(self) -> None:
        """A server that takes each share apart has a quarter of a megabyte before it, others have all."""
        self.assertLess(abs(self.before_it(bundles=False) - CROWD_BYTES), 20_000)
        self.assertGreater(self.before_it(bundles=True), 200 * 10_000)

    def test_version(self) -> None:
        """The version has byte strings for keys."""
        version = self.ask(recorded("version"), lambda s: s.version())
        self.assertIn("tahoe-lafs/1.20.0", version.application)
        self.assertEqual(version.available_bytes, version.max_share_bytes)

    def test_allocate(self) -> None:
        """Sets are sets, whether shares are there, are granted, or are in neither."""
        for name, have, allocated in (
            ("create", (), (0, 1, 2)),
            ("create again same secret", (), ()),
            ("create again after done", (0,), ()),
        ):
            found = self.ask(recorded(name), lambda s: s.allocate(SI, {0, 1, 2}, 100, SECRETS))
            self.assertEqual(found, Allocation(frozenset(have), frozenset(allocated)), name)

    def test_write(self) -> None:
        """A write is acknowledged with what is missing, or completes the share."""
        for name, complete, required in (
            ("patch 50-60", False, ((0, 50), (60, 100))),
            ("patch rest a", False, ((65, 100),)),
            ("patch rest b", True, ()),
        ):
            found = self.ask(recorded(name), self.write)
            self.assertEqual(found, WriteAnswer(complete, required), name)

    def write(self, server: GbsServer) -> Deferred[WriteAnswer]:
        """Write something."""
        return server.write(SI, 0, 50, [b"x" * 10], SECRETS.upload)

    def test_refused_writes(self) -> None:
        """Each refusal of a write is another error."""
        for name, error in (
            ("patch wrong secret", WrongSecret),
            ("patch conflict", ConflictingWrite),
            ("patch unknown share", NoSuchShare),
            ("patch after complete", NoSuchShare),
            ("patch beyond allocated", ServerRefused),
            ("patch no CR", ServerRefused),
            ("patch no secret", ServerProtocolError),
            ("badauth", WrongSwissnum),
        ):
            self.fails(error, recorded(name), self.write)
        self.fails(NoSpace, render(507, {"content-length": ["0"]}, b""), self.write)

    def test_wrong_swissnum(self) -> None:
        """Whoever has a wrong address is told so, whatever they ask."""
        for question in (
            lambda s: s.version(),
            lambda s: s.list_shares(SI),
            lambda s: s.read(SI, 0, 0, 10),
            lambda s: s.allocate(SI, {0}, 10, SECRETS),
            lambda s: s.stream(SI, 0, 0, 10, Consumer()),
        ):
            error = self.fails(WrongSwissnum, recorded("badauth"), question)
            self.assertIn("NURL", str(error))

    def test_abort(self) -> None:
        """An abort works, or there is nothing to abort."""
        for name, error in (("abort done", NoSuchShare), ("abort 1 again", NoSuchShare)):
            self.fails(error, recorded(name), lambda s: s.abort(SI, 0, SECRETS.upload))
        self.fails(
            WrongSecret, recorded("abort wrong secret"), lambda s: s.abort(SI, 0, SECRETS.upload)
        )
        self.assertIsNone(self.ask(recorded("abort 1"), lambda s: s.abort(SI, 0, SECRETS.upload)))

    def test_list(self) -> None:
        """A list may be empty."""
        self.assertEqual(self.ask(recorded("list shares none"), lambda s: s.list_shares(SI)), set())
        self.assertEqual(self.ask(recorded("list"), lambda s: s.list_shares(SI)), {0})
        self.fails(ServerProtocolError, recorded("404 path"), lambda s: s.list_shares(SI))

    def test_read(self) -> None:
        """A read may be cut, or empty; only what was asked for is taken."""
        for name, offset, length, expected in (
            ("read bytes=0-9", 0, 10, bytes(range(10))),
            ("read bytes=90-200", 90, 111, bytes(range(90, 100))),
            ("read bytes=100-110", 100, 11, b""),
        ):
            data = self.ask(recorded(name), lambda s: s.read(SI, 0, offset, length))  # noqa: B023
            self.assertEqual(data, expected, name)
            consumer = Consumer()
            count = self.ask(
                recorded(name),
                lambda s: s.stream(SI, 0, offset, length, consumer),  # noqa: B023
            )
            self.assertEqual((count, consumer.data), (len(expected), expected), name)
        for name, error in (
            ("read missing", NoSuchShare),
            ("read bytes=0-9", ServerProtocolError),
            ("read full no range", ServerProtocolError),
            ("read garbage", ServerProtocolError),
            ("imm as mutable read", ServerRefused),
        ):
            self.fails(error, recorded(name), lambda s: s.read(SI, 0, 5, 20))
            consumer = Consumer()
            self.fails(
                error,
                recorded(name),
                lambda s: s.stream(SI, 0, 5, 20, consumer),  # noqa: B023
            )
            self.assertEqual((consumer.producer, consumer.data), (None, b""), name)

    def test_leases_and_complaints(self) -> None:
        """Both are taken, or there is no share."""
        self.assertIsNone(self.ask(recorded("lease ok"), lambda s: s.add_lease(SI, SECRETS.lease)))
        self.fails(NoSuchShare, recorded("lease missing"), lambda s: s.add_lease(SI, SECRETS.lease))
        self.assertIsNone(
            self.ask(recorded("corrupt ok"), lambda s: s.advise_corrupt_share(SI, 0, "bad"))
        )
        self.fails(
            NoSuchShare,
            recorded("corrupt missing"),
            lambda s: s.advise_corrupt_share(SI, 77, "bad"),
        )

    def test_slots(self) -> None:
        """Answers about mutable shares: changed or not, another write enabler, nothing there."""

        def change(reads: list[tuple[int, int]]) -> Callable[[GbsServer], Deferred[Any]]:
            return lambda server: server.read_test_write(SLOT, SLOT_SECRETS, {0: made(b"x")}, reads)

        for name, reads, expected in (
            ("mut write", [(0, 9)], SlotResult(True, {})),
            ("mut write testfail", [(0, 5), (8, 4)], SlotResult(False, {0: (b"01234", b"89")})),
            ("mut delete", [(0, 4)], SlotResult(True, {0: (b"0123",)})),
        ):
            self.assertEqual(self.ask(recorded(name), change(reads)), expected)
        for name, error in (
            ("mut bad we", WrongSecret),
            ("mut missing new-length", ServerProtocolError),
            ("badauth", WrongSwissnum),
            ("mut write testfail", ServerProtocolError),  # not what was asked for
        ):
            self.fails(error, recorded(name), change([]))
        self.fails(NoSpace, render(507, {"content-length": ["0"]}, b""), change([]))
        self.assertEqual(self.ask(recorded("mut list none"), lambda s: s.list_slot(SLOT)), set())
        read = self.ask(recorded("mut list none"), lambda s: s.read_slot(SLOT, [(0, 9)]))
        self.assertEqual(read, {})
        self.fails(
            NoSuchShare, recorded("mut read none"), lambda s: s.read_slot_share(SLOT, 0, 0, 9)
        )
        self.assertEqual(
            self.ask(recorded("mut read"), lambda s: s.read_slot_share(SLOT, 0, 0, 100)),
            bytes.fromhex(RECORDED["mut read"]["response_body_hex"]),
        )
        self.assertIsNone(
            self.ask(recorded("mut lease"), lambda s: s.add_slot_lease(SLOT, SECRETS.lease))
        )
        self.assertIsNone(
            self.ask(recorded("mut corrupt"), lambda s: s.advise_corrupt_slot_share(SLOT, 0, "b"))
        )

    def test_strangers(self) -> None:
        """What no storage server says is named as such, in a bounded excerpt without surprises."""
        chunked = {"transfer-encoding": ["chunked"]}
        rude = render(403, chunked, b"no \x1b[31m way\r\n" * 500)
        error = self.fails(ServerProtocolError, rude, lambda s: s.list_shares(SI))
        self.assertIn("403", str(error))
        self.assertNotIn("\x1b", str(error))
        for body in (b"", b"\xff", b"\xa0", b"\x9f" * 50, b"\xd9\x01\x02\x9b" + b"\xff" * 8):
            for question in (
                lambda s: s.version(),
                lambda s: s.list_shares(SI),
                lambda s: s.allocate(SI, {0}, 10, SECRETS),
                self.write,
            ):
                self.fails(ServerProtocolError, render(200, chunked, body), question)
        self.fails(ServerProtocolError, b"SSH-2.0-OpenSSH_9\r\n\r\n", lambda s: s.version())
        self.fails(ServerProtocolError, b"SSH-2.0-OpenSSH_9\r\n\r\n", self.write)

    def test_megabytes_for_a_404(self) -> None:
        """A refusal that does not end is not read to its end."""
        flood = render(404, {"content-length": [str(50 << 20)]}, b"x" * (2 << 20))
        for question in (
            lambda s: s.read(SI, 0, 0, 10),
            lambda s: s.stream(SI, 0, 0, 1 << 30, Consumer()),
            self.write,
        ):
            self.fails(ServerProtocolError, flood, question)

    def test_more_than_was_announced(self) -> None:
        """Bytes beyond the range that an answer names are no part of a share."""
        headers = {"content-range": ["bytes 0-9/*"], "content-length": ["5000"]}
        long = render(206, headers, b"x" * 5000)
        consumer = Consumer()
        self.fails(ServerProtocolError, long, lambda s: s.read(SI, 0, 0, 10))
        self.fails(ServerProtocolError, long, lambda s: s.stream(SI, 0, 0, 10, consumer))
        self.assertIsNone(consumer.producer)
        headers = {"content-range": ["bytes 0-9/*"], "content-length": ["4"]}
        short = render(206, headers, b"x" * 4)
        self.fails(ServerProtocolError, short, lambda s: s.read(SI, 0, 0, 10))
