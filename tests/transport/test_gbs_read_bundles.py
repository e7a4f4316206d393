"""Reads of small shares that leave together, and how long their bundles are."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.http11.exchange import RawRequest, RawResponse
from pipegrid.http11.response_parser import ResponseHead
from pipegrid.transport.gbs.bundles import (
    BUSY_BYTES,
    FAST_ANSWER_S,
    FIRST_READ_BYTES,
    READ_BYTES,
    GbsReadBundles,
)
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.transport.gbs.response_outcomes import GbsAnswers
from pipegrid.wire import gbs_bundles
from pipegrid.wire.gbs_bundles import MAX_BUNDLE_BYTES, MAX_READS, BundledRead
from tests.transport.test_gbs_bundles import NURL

SIZE = 15_000


class ReadBundleTests(SynchronousTestCase):
    """Reads that are held until a turn is over."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.sent: list[tuple[RawRequest, Deferred[RawResponse]]] = []
        self.make(MAX_BUNDLE_BYTES)

    def make(self, bundle_bytes: int) -> None:
        """Make the bundles of a server that takes bundles of this length."""
        self.bundles = GbsReadBundles(
            self.clock,
            GbsRequests(NURL, 60.0),
            GbsAnswers("s0"),
            self.send,
            lambda index, number, length: Deferred(),
            lambda: gbs_bundles.read_limit_bytes(bundle_bytes),
        )

    def send(self, request: RawRequest) -> Deferred[RawResponse]:
        """Take a request."""
        answer: Deferred[RawResponse] = Deferred()
        self.sent.append((request, answer))
        return answer

    def read(self, count: int, size: int = SIZE) -> list[Deferred[bytes]]:
        """Ask for so many shares, and end the turn."""
        reads = [self.bundles.read(b"%016d" % n, 0, size) for n in range(count)]
        self.clock.advance(0)
        return reads

    def asked(self) -> list[Sequence[BundledRead]]:
        """Return the reads of each bundle that was sent."""
        return [gbs_bundles.unpack_reads(b"".join(request.body)) for request, _ in self.sent]

    def answer(self) -> None:
        """Answer the first unanswered bundle."""
        request, answer = self.sent.pop(0)
        reads = gbs_bundles.unpack_reads(b"".join(request.body))
        found = RawResponse(ResponseHead(200, b"", [(b"content-type", b"application/cbor")]))
        found.body = gbs_bundles.pack_read_answers([bytes(each.length) for each in reads])
        answer.callback(found)

    def warm_up(self) -> None:
        """Let the server answer two full bundles at once, after which it gets the longest."""
        for count in (FIRST_READ_BYTES // SIZE, 4 * FIRST_READ_BYTES // SIZE):
            self.read(count)
            self.answer()
        self.assertEqual(self.sent, [])

    def test_short_ones_on_slow_links(self) -> None:
        """The first bundles are short, and so are those after an answer that took long."""
        first, longest = FIRST_READ_BYTES // SIZE, 4 * FIRST_READ_BYTES // SIZE
        self.read(3 * first)
        self.assertEqual([len(each) for each in self.asked()], [first] * 3)
        for _ in range(3):
            self.answer()
        self.read(longest)
        self.assertEqual([len(each) for each in self.asked()], [longest])
        self.clock.advance(FAST_ANSWER_S + 0.1)
        self.answer()
        self.read(2 * first)
        self.assertEqual([len(each) for each in self.asked()], [first] * 2)

    def test_as_long_as_the_server_takes(self) -> None:
        """Reads of one turn leave in full bundles: a quarter of the server's, but 128 KiB at least."""
        self.warm_up()
        fits = READ_BYTES // SIZE
        reads = self.read(fits + 2)
        self.assertEqual([len(each) for each in self.asked()], [fits])
        self.answer()
        self.clock.advance(0)
        self.assertEqual([len(each) for each in self.asked()], [2])
        self.answer()
        self.assertEqual([self.successResultOf(each) for each in reads], [bytes(SIZE)] * (fits + 2))

        self.make(256 * 1024)
        self.read(FIRST_READ_BYTES // SIZE)
        self.answer()
        self.read(16)
        self.assertEqual([len(each) for each in self.asked()], [128 * 1024 // SIZE] * 2)

    def test_busy_servers_get_full_bundles(self) -> None:
        """What does not fill a bundle leaves as long as little is unanswered."""
        self.warm_up()
        few = BUSY_BYTES // SIZE
        for count in (few, 2, few):
            self.read(count)
        self.assertEqual([len(each) for each in self.asked()], [few, 2])
        self.read(MAX_READS, size=1)
        self.assertEqual([len(each) for each in self.asked()], [few, 2, MAX_READS])

    def test_limits(self) -> None:
        """What a server takes depends on the length of its bundles, up to a limit."""
        for bundle_bytes, most in ((0, 128), (256, 128), (800, 200), (1024, 256), (1 << 20, 256)):
            found = gbs_bundles.read_limit_bytes(bundle_bytes << 10)
            self.assertEqual(found, most << 10, bundle_bytes)
