"""What a stream asks for: little at first, then much at a time, and never more than is allowed."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transport.foolscap.reader_references import FoolscapReaders
from tests.transport.contract import Consumer

PIECE_BYTES = 100
PIECES = 8


class Link:
    """Answers when it is told to."""

    def __init__(self, share: bytes) -> None:
        self.share = share
        self.asked: list[tuple[int, int]] = []
        self.waiting: list[Deferred[bytes]] = []

    def call(self, _reader: object, method: str, offset: int, length: int) -> Deferred[bytes]:
        assert method == "read"
        self.asked.append((offset, length))
        self.waiting.append(Deferred())
        return self.waiting[-1]

    def answer(self) -> None:
        """Answer the first question that is open."""
        at = len(self.asked) - len(self.waiting)
        offset, length = self.asked[at]
        self.waiting.pop(0).callback(self.share[offset : offset + length])


class StreamTests(SynchronousTestCase):
    """By pieces of 100 bytes, eight at a time."""

    def stream(self, share: bytes, length: int) -> tuple[Link, Consumer, Deferred[int]]:
        """Return the server, the consumer, and the end."""
        link, consumer = Link(share), Consumer()
        readers = FoolscapReaders(link, "s", 1, PIECE_BYTES, PIECES)  # type: ignore[arg-type]

        async def renew(**_: Any) -> Any:
            raise AssertionError("nothing was refused")

        streaming = readers.stream(succeed("reader"), renew, 0, length, consumer)
        return link, consumer, Deferred.fromCoroutine(streaming)

    def test_pieces_grow(self) -> None:
        """As much as was delivered, and at most half of what may be on its way."""
        link, consumer, end = self.stream(bytes(10_000), 10_000)
        self.assertEqual([size for _, size in link.asked], [100] * 8)
        while link.waiting:
            link.answer()
        sizes = [size for _, size in link.asked]
        self.assertEqual(sizes[8:], sorted(sizes[8:-1]) + sizes[-1:])
        self.assertEqual(max(sizes), 400)
        self.assertLess(len(sizes), 40)
        self.assertEqual(self.successResultOf(end), 10_000)
        self.assertEqual(consumer.data, bytes(10_000))

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 5000), st.integers(0, 1500))
    def test_within_bounds(self, length: int, missing: int) -> None:
        """All bytes in order, also of a share that ends early, and never more asked for than allowed."""
        share = random.Random(length).randbytes(max(0, length - missing))
        link, consumer, end = self.stream(share, length)
        while link.waiting:
            left = sum(size for _, size in link.asked[-len(link.waiting) :])
            self.assertLessEqual(left, PIECE_BYTES * PIECES)
            link.answer()
        self.assertEqual(self.successResultOf(end), len(share))
        self.assertEqual(consumer.data, share)
        self.assertLessEqual(max(map(len, consumer.pieces), default=0), PIECE_BYTES)
        for (offset, size), (following, _) in zip(link.asked, link.asked[1:], strict=False):
            self.assertEqual(offset + size, following)
