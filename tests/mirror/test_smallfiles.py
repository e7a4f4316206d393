"""Release files without a reactor: how long a mirror is waited for, and what is not believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import mirror_without_reactor
from pipegrid.mirror.epoll_response_head import MAX_HEAD_BYTES, UnsupportedResponse
from tests.mirror.test_sprint import ok

MOST_BYTES = 8 << 20


class Wire:
    """A connection, and the time that passes while it is waited for: seconds and what comes then, or None."""

    def __init__(self, pieces: Iterator[tuple[float, bytes | None]]) -> None:
        self._pieces = pieces
        self.now_s = 1000.0

    def monotonic(self) -> float:
        """The time."""
        return self.now_s

    def recv(self, _: int) -> bytes:
        """The next piece."""
        seconds, data = next(self._pieces, (0.0, b""))
        self.now_s += seconds
        if data is None:
            raise TimeoutError
        return data


class WaitingTests(SynchronousTestCase):
    """Mirrors of all paces."""

    def ask(
        self, pieces: Iterator[tuple[float, bytes | None]], stops_s: float = 1e9
    ) -> tuple[dict[str, bytes], float]:
        """Return what came of a file, and how long that took."""
        wire: Any = Wire(pieces)
        self.patch(mirror_without_reactor, "time", wire)
        asking = mirror_without_reactor._Asking(wire, lambda: wire.now_s > 1000 + stops_s)
        try:
            answers = asking.answers([("a", MOST_BYTES)])
        except UnsupportedResponse:
            answers = {}
        return {path: body for path, (_, body) in answers.items()}, wire.now_s - 1000

    def test_slow(self) -> None:
        """Twenty kilobytes a second are enough, however long that takes, and so are fifteen in gusts."""
        body = bytes(900_000)
        data = ok(body)
        for step, gap_s in ((2000, 0.1), (60_000, 4.0)):

            def pieces(
                step: int = step, gap_s: float = gap_s
            ) -> Iterator[tuple[float, bytes | None]]:
                for at in range(0, len(data), step):
                    yield from [(0.1, None)] * int(gap_s * 10 - 1)
                    yield 0.1, data[at : at + step]

            found, taken_s = self.ask(pieces())
            self.assertEqual(found, {"a": body})
            self.assertGreater(taken_s, 40)

    def test_silence(self) -> None:
        """Nothing, from the beginning or in the middle, is waited for a few seconds."""
        for start in (b"", ok(bytes(90_000))[:50_000]):
            pieces = [(0.0, start)] * bool(start) + [(0.1, None)] * 1000
            found, taken_s = self.ask(iter(pieces))
            self.assertEqual(found, {})
            self.assertLess(taken_s, mirror_without_reactor.STALL_S + 1)

    def test_drips(self) -> None:
        """A byte at a time, in a head or in a body, is next to nothing, though something always comes."""
        head = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 60_000
        for data in (ok(bytes(50_000)), head):
            found, taken_s = self.ask((0.05, bytes([byte])) for byte in data)
            self.assertEqual(found, {})
            self.assertLess(taken_s, mirror_without_reactor.STALL_S + 1)

    def test_in_all(self) -> None:
        """Who gives just enough is not waited for for ever."""
        data = ok(bytes(MOST_BYTES))
        found, taken_s = self.ask((4.0, data[at : at + 4096]) for at in range(0, len(data), 4096))
        self.assertEqual(found, {})
        self.assertLess(taken_s, mirror_without_reactor.MOST_S + 5)

    def test_stopped(self) -> None:
        """It ends when it is told to, also while something comes all the time."""
        data = ok(bytes(1_000_000))
        pieces = ((0.05, data[at : at + 1000]) for at in range(0, len(data), 1000))
        found, taken_s = self.ask(pieces, stops_s=1.0)
        self.assertEqual(found, {})
        self.assertLess(taken_s, 1.2)


class EnemyTests(SynchronousTestCase):
    """What is for others to understand, or for nobody."""

    def test_answers(self) -> None:
        """Nothing of it is taken for a file."""
        for data in (
            b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
            b"HTTP/1.1 103 Early Hints\r\nContent-Length: 1\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
            b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\nContent-Length: 1\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
            b"HTTP/1.1 302 Found\r\nLocation: http://a.example/\r\n b\r\nContent-Length: 1\r\n\r\nx",
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1\r\n\r\nx",
            b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcdefgh",
            ok(bytes(MOST_BYTES + 1)),
            b"HTTP/1.1 404 No\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000),
            b"",
        ):
            wire: Any = Wire((0.0, data[at : at + 65_536]) for at in range(0, len(data), 65_536))
            asking = mirror_without_reactor._Asking(wire, lambda: False)
            self.assertRaises(UnsupportedResponse, asking.answers, [("a", MOST_BYTES)])
            self.assertLess(len(asking._data), 2 * MAX_HEAD_BYTES + 2)
