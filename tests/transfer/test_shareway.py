"""How a way makes messages of an encoder's writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer, ClientSecrets
from pipegrid.errors import ConflictingWrite, NoSuchShare, WriteLost
from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import FixedWindow
from pipegrid.testing.clock import HeapClock
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put import write_batches
from pipegrid.transfer.put.file_key import ShareSet, ShareTarget
from pipegrid.transfer.put.share_upload import ShareState, ShareUpload
from pipegrid.wire.storage_messages import LeaseSecrets, UploadSecrets, WriteAnswer
from tests.transfer.world import identity
from tests.transport.memory import MemoryServer

SI = b"i" * 16
SECRETS = UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"u" * 32)
BLOCK = 1000
MESSAGE = 10 * BLOCK
SHARE_BYTES = 50 * BLOCK
SHARES = ShareSet(SI, SHARE_BYTES, ClientSecrets(b"l" * 32).for_file(SI))


class Server(MemoryServer):
    """Notes writes; whoever tests answers them."""

    def __init__(self) -> None:
        super().__init__(identity(0))
        self.writes: list[tuple[int, int]] = []
        self.answers: list[Deferred[WriteAnswer]] = []
        self.again: list[bool] = []
        self.network: list[Callable[[], None]] | None = None
        """Where what bytes are let go by is kept, if whoever tests says when; None: it has them at once."""

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Sequence[Buffer],
        upload_secret: bytes,
        *,
        release: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        self.writes.append((offset, sum(map(len, data))))
        self.again.append(again)
        self.answers.append(Deferred())
        if release is not None and self.network is not None:
            self.network.append(release)
        elif release is not None:
            release()
        return self.answers[-1]


class WayTestCase(SynchronousTestCase):
    """One way, whose messages are ten blocks."""

    def setUp(self) -> None:
        self.patch(write_batches, "BATCH_BYTES", MESSAGE)
        self.patch(write_batches, "MIN_BATCH_BYTES", BLOCK)
        self.patch(write_batches, "UNKEPT_BATCH_BYTES", BLOCK)
        self.server = Server()

    def make_way(self, **options: Any) -> ShareUpload:
        peer = Peer(self.server, Pipeline(1 << 20, held_limit_bytes=1 << 20))
        target = ShareTarget(peer, 0, SHARES, SECRETS)
        return ShareUpload(target, self.changed, self.changed, HeapClock(), **options)

    def changed(self) -> None:
        """Nobody waits."""

    def send(self, way: ShareUpload, first: int, after: int) -> None:
        for segment in range(first, after):
            way.sender.send(ShareWrite(0, segment * BLOCK, (bytes(BLOCK),)), segment)


class TurnTests(WayTestCase):
    """Ways that get equally much at the same time do not all send at the same time."""

    def test_only_the_second_message_is_shorter(self) -> None:
        """From then on each way's messages are full at another moment."""
        way = self.make_way(turn=0.3)
        self.send(way, 0, 45)
        way.finish()
        self.assertEqual(
            [length // BLOCK for _, length in self.server.writes], [10, 3, 10, 10, 10, 2]
        )

    def test_moments_are_spread_evenly(self) -> None:
        """Ten ways with ten turns: one is full with each block."""
        full_at = []
        for number in range(10):
            self.server.writes.clear()
            self.send(self.make_way(turn=(number + 1) / 10), 0, 25)
            offset, length = self.server.writes[1]
            full_at.append((offset + length) // BLOCK)
        self.assertEqual(full_at, list(range(11, 21)))

    def test_by_default_all_are_full(self) -> None:
        """Whoever has one way needs no turns."""
        self.send(self.make_way(), 0, 30)
        self.assertEqual([length for _, length in self.server.writes], [MESSAGE] * 3)


class FullWindowTests(WayTestCase):
    """While a window is full, the message that comes next is gathered."""

    def setUp(self) -> None:
        super().setUp()
        window = FixedWindow(MESSAGE)
        window.gathers = True
        peer = Peer(self.server, Pipeline(window))
        self.patch(write_batches, "BATCH_BYTES", MESSAGE // 2)
        self.way = ShareUpload(
            ShareTarget(peer, 0, SHARES, SECRETS), self.changed, self.changed, HeapClock()
        )

    def test_it_leaves_with_the_answer(self) -> None:
        """And nobody has to give anything to the way first: coding went on meanwhile."""
        self.send(self.way, 0, 14)
        self.assertEqual((len(self.server.writes), self.way.blocked), (2, False))
        self.assertTrue(self.way.has_space)
        self.send(self.way, 14, 15)
        self.assertEqual((len(self.server.writes), self.way.blocked), (2, True))
        self.assertFalse(self.way.has_space)
        self.server.answers[0].callback(WriteAnswer(False, ((0, SHARE_BYTES),)))
        self.assertEqual(self.server.writes[2:], [(MESSAGE, MESSAGE // 2)])
        self.assertFalse(self.way.blocked)

    def test_what_is_not_a_message_waits_for_the_rest(self) -> None:
        """Room alone makes no message small."""
        self.send(self.way, 0, 14)
        self.server.answers[0].callback(WriteAnswer(False, ((0, SHARE_BYTES),)))
        self.assertEqual(len(self.server.writes), 2)
        self.send(self.way, 14, 15)
        self.assertEqual(self.server.writes[2:], [(MESSAGE, MESSAGE // 2)])

    def make_holding(self) -> list[int]:
        """Make a way that may hold a window of bytes; returns what is told of its changes."""
        told: list[int] = []
        self.server.network = []
        window = FixedWindow(MESSAGE)
        window.gathers = True
        self.way = ShareUpload(
            ShareTarget(
                Peer(self.server, Pipeline(window, held_limit_bytes=MESSAGE)), 0, SHARES, SECRETS
            ),
            lambda: told.append(len(self.server.writes)),
            self.changed,
            HeapClock(),
            recodable=True,
        )
        self.send(self.way, 0, 12)  # two messages, and what may be had beside what is held
        self.assertEqual(self.server.writes, [(0, MESSAGE // 2), (MESSAGE // 2, MESSAGE // 2)])
        self.assertTrue(self.way.blocked)
        return told

    def test_what_was_full_while_others_were_held(self) -> None:
        """It grows when the network has these: small messages cost servers as much as large ones."""
        told = self.make_holding()
        for release in self.server.network or []:
            release()
        self.assertTrue(told)
        self.assertFalse(self.way.blocked)
        self.send(self.way, 12, 15)
        self.assertTrue(self.way.blocked)
        self.server.answers[0].callback(WriteAnswer(False, ((MESSAGE // 2, SHARE_BYTES),)))
        self.assertEqual(self.server.writes[2:], [(MESSAGE, MESSAGE // 2)])

    def test_what_is_little_when_the_answer_comes(self) -> None:
        """It does not leave alone, though it was all that memory allowed before."""
        self.make_holding()
        self.server.answers[0].callback(WriteAnswer(False, ((MESSAGE // 2, SHARE_BYTES),)))
        self.assertEqual((len(self.server.writes), self.way.blocked), (2, False))
        self.send(self.way, 12, 15)
        self.assertEqual(self.server.writes[2:], [(MESSAGE, MESSAGE // 2)])

    def test_what_the_answer_says_is_there(self) -> None:
        """It is not sent after all."""
        self.send(self.way, 0, 15)
        self.server.answers[0].callback(WriteAnswer(False, ((20 * BLOCK, SHARE_BYTES),)))
        self.assertEqual(len(self.server.writes), 2)
        self.assertFalse(self.way.blocked)

    def test_a_fixed_window(self) -> None:
        """Whoever asks for so much in flight gets no more in memory."""
        way = ShareUpload(
            ShareTarget(Peer(self.server, Pipeline(MESSAGE)), 0, SHARES, SECRETS),
            self.changed,
            self.changed,
            HeapClock(),
        )
        self.send(way, 0, 9)
        self.assertFalse(way.blocked)
        self.send(way, 9, 10)
        self.assertTrue(way.blocked)

    def test_closed(self) -> None:
        """It holds up nobody any more."""
        self.send(self.way, 0, 15)
        self.way.close(ShareState.DROPPED)
        self.assertFalse(self.way.blocked)


class AlreadyThereTests(WayTestCase):
    """What the server says that it has is not sent to it."""

    def answer(self, number: int, *required: tuple[int, int]) -> None:
        """Answer a write with what is still needed, in blocks."""
        ranges = tuple((begin * BLOCK, end * BLOCK) for begin, end in required)
        self.server.answers[number].callback(WriteAnswer(False, ranges))

    def sent(self) -> list[tuple[int, int]]:
        """Return what was written, in blocks: from, and to before."""
        return [(at // BLOCK, (at + length) // BLOCK) for at, length in self.server.writes]

    def end(self, way: ShareUpload, first: int = SHARE_BYTES // BLOCK - 1) -> None:
        """Send the trailer, which is the last block."""
        way.sender.send(ShareWrite(0, first * BLOCK, (bytes(BLOCK),)))
        way.finish()

    def test_what_is_there_is_passed_over(self) -> None:
        """After the first answer, by block; what is missing goes in messages as ever."""
        way = self.make_way()
        self.send(way, 0, 10)
        self.answer(0, (10, 12), (30, 50))
        self.assertEqual(way.acknowledged_bytes, 28 * BLOCK)
        self.send(way, 10, 49)
        self.end(way)
        self.assertEqual(self.sent(), [(0, 10), (10, 12), (30, 40), (40, 50)])
        self.assertEqual((way.resume.has_trailer, way.sender.all_sent), (True, True))

    def test_the_message_that_is_being_gathered(self) -> None:
        """It is not sent either if all of it is there; else all of it is, and not more."""
        way = self.make_way()
        self.send(way, 0, 15)
        self.answer(0, (20, 50))
        self.send(way, 15, 20)
        self.assertEqual(self.sent(), [(0, 10)])
        self.send(way, 20, 30)
        self.assertEqual(self.sent(), [(0, 10), (20, 30)])

    def test_a_gathered_message_of_which_some_is_missing(self) -> None:
        """It goes at once when what follows is there: nobody knows how long the next one takes."""
        way = self.make_way()
        self.send(way, 0, 15)
        self.answer(0, (14, 15), (20, 50))
        self.send(way, 15, 16)
        self.assertEqual(self.sent(), [(0, 10), (10, 15)])

    def test_only_the_last_bytes_are_missing(self) -> None:
        """The first message, and they."""
        way = self.make_way()
        self.send(way, 0, 10)
        self.answer(0, (49, 50))
        self.send(way, 10, 49)
        self.end(way)
        self.assertEqual(self.sent(), [(0, 10), (49, 50)])
        self.server.answers[1].callback(WriteAnswer(True))
        self.assertEqual((way.state, way.acknowledged_bytes), ("stored", SHARE_BYTES))

    def test_a_block_that_is_there_in_part(self) -> None:
        """It is sent whole; servers take equal bytes twice."""
        way = self.make_way()
        self.send(way, 0, 10)
        self.server.answers[0].callback(WriteAnswer(False, ((25 * BLOCK + 1, SHARE_BYTES),)))
        self.send(way, 10, 35)
        self.assertEqual(self.sent(), [(0, 10), (25, 35)])

    def test_an_answer_that_comes_late(self) -> None:
        """It knows nothing of what was sent behind its write, and makes nobody send that again."""
        way = self.make_way()
        self.send(way, 0, 30)
        self.answer(0, (10, 50))
        self.send(way, 30, 40)
        self.answer(1, (20, 50))
        self.assertEqual(self.sent(), [(0, 10), (10, 20), (20, 30), (30, 40)])
        self.assertEqual(way.acknowledged_bytes, 20 * BLOCK)

    def test_segments_that_are_sent_again(self) -> None:
        """Of what was lost with a connection, only what the server does not have; the rest counts as sent."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 30)
        self.server.answers[1].errback(WriteLost("the connection was lost"))
        self.answer(0, (10, 15), (20, 50))
        self.assertEqual(way.resume.missed, range(10, 20))
        self.send(way, 10, 20)
        way.sender.flush()
        self.assertFalse(way.resume.missed)
        self.assertEqual(self.sent()[3:], [(10, 15)])

    def doubtful(self, *, recodable: bool) -> ShareUpload:
        """Return a way whose server said that it has what it has not."""
        way = self.make_way(recodable=recodable)
        self.send(way, 0, 10)
        self.answer(0, (49, 50))
        self.send(way, 10, 49)
        self.end(way)
        self.answer(1, (30, 40))
        self.assertEqual((way.state, way.ended), ("uncertain", False))
        self.assertEqual(self.server.calls, [])
        way.resolve_uncertain()
        return way

    def test_what_was_passed_over_wrongly(self) -> None:
        """The list is asked; then all of it is sent, and nothing that the server says is believed."""
        way = self.doubtful(recodable=True)
        self.assertEqual([name for name, _ in self.server.calls], ["list_shares"])
        self.assertEqual(
            (way.state, way.resume.missed, way.sender.all_sent), ("open", range(10, 49), False)
        )
        self.assertTrue(way.resume.has_trailer, "that was sent")
        self.send(way, 10, 20)
        self.answer(2, (49, 50))
        self.send(way, 20, 49)
        way.finish()
        self.assertEqual(self.sent()[2:], [(10, 20), (20, 30), (30, 40), (40, 49)])
        for number in (3, 4, 5):
            self.answer(number, (49, 50))
        way.resolve_uncertain()
        self.assertEqual(way.state, "lost", "once is enough")

    def test_a_share_that_is_there_after_all(self) -> None:
        """Somebody else's write completed it."""
        self.server.storage.shares[SI, 0] = b"x"
        way = self.doubtful(recodable=True)
        self.assertEqual(way.state, "stored")

    def test_who_cannot_make_them_again(self) -> None:
        """A repair's way is lost then."""
        way = self.doubtful(recodable=False)
        self.assertEqual(way.state, "lost")

    def test_a_trailer_that_was_passed_over_wrongly(self) -> None:
        """It is sent after all."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 10)
        self.answer(0, (10, 11))
        self.send(way, 10, 49)
        self.end(way)
        self.assertEqual(self.sent(), [(0, 10), (10, 11)])
        self.answer(1, (49, 50))
        way.resolve_uncertain()
        self.assertEqual((way.state, way.resume.has_trailer), ("open", False))

    def test_the_server_has_nothing_any_more(self) -> None:
        """It knows no such upload: the share is lost, and begins anew with another way."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 10)
        self.answer(0, (49, 50))
        self.send(way, 10, 49)
        self.end(way)
        self.server.answers[1].errback(NoSuchShare("forgotten"))
        way.resolve_uncertain()
        self.assertEqual(way.state, "lost")

    def test_a_server_that_says_nothing(self) -> None:
        """Of an empty answer nothing follows; all is sent."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 10)
        self.server.answers[0].callback(WriteAnswer(False))
        self.send(way, 10, 49)
        self.end(way)
        self.assertEqual(sum(length for _, length in self.server.writes), SHARE_BYTES)
        self.assertEqual(way.acknowledged_bytes, 10 * BLOCK)

    def test_other_bytes_are_there(self) -> None:
        """The share is lost, and its upload to be forgotten."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 10)
        self.server.answers[0].errback(ConflictingWrite("other bytes"))
        self.assertEqual(way.state, "lost")
        self.assertIsInstance(way.error, ConflictingWrite)


class LostTests(WayTestCase):
    """What a way knows of messages that were lost."""

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            self.server.answers[number].errback(WriteLost("the connection was lost"))

    def test_segments_of_lost_messages_are_missed(self) -> None:
        """From the first that was lost to the last; those that were acknowledged are not."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 45)
        self.server.answers[0].callback(WriteAnswer(False))
        self.lose(1, 2, 3)
        self.assertEqual((way.state, way.resume.missed), ("open", range(10, 40)))
        self.assertFalse(way.needs_segment(11))
        self.send(way, 45, 46)
        self.assertEqual(way.resume.missed, range(10, 40), "what goes by now is something else")
        for segment in range(10, 40):
            self.assertTrue(way.needs_segment(segment))
            self.send(way, segment, segment + 1)
        self.assertFalse(way.resume.missed)
        way.sender.flush()
        self.assertEqual(
            self.server.writes[-3:], [(10_000, 10_000), (20_000, 10_000), (30_000, 10_000)]
        )
        self.assertEqual(self.server.again, [False] * 4 + [True] * (len(self.server.again) - 4))

    def test_lost_while_it_is_sent_again(self) -> None:
        """Then what was lost first is the next again."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 30)
        self.lose(1, 2)
        self.send(way, 10, 20)
        self.assertEqual(way.resume.missed, range(20, 30))
        self.lose(3)
        self.assertEqual(way.resume.missed, range(10, 30))
        self.lose(0)
        self.assertEqual(way.resume.missed, range(30))

    def test_a_lost_trailer(self) -> None:
        """It has not gone by, then, and not all is sent."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 15)
        way.sender.send(ShareWrite(0, 15 * BLOCK, (bytes(BLOCK),)))
        way.finish()
        self.assertEqual((way.resume.has_trailer, way.sender.all_sent), (True, True))
        self.server.answers[0].callback(WriteAnswer(False))
        self.lose(1)
        self.assertEqual((way.resume.has_trailer, way.sender.all_sent), (False, False))
        self.assertEqual((way.state, way.resume.missed), ("open", range(10, 15)))

    def test_a_way_that_has_ended_misses_nothing(self) -> None:
        """It is over."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 10)
        way.close(ShareState.DROPPED)
        self.lose(0)
        self.assertEqual((way.state, way.resume.missed, way.error), ("dropped", range(0), None))

    def test_a_doubtful_way_asks(self) -> None:
        """What the server says of its list is the answer to this as well."""
        way = self.make_way(recodable=True)
        self.send(way, 0, 20)
        way.close(ShareState.UNCERTAIN)
        self.lose(0, 1)
        self.assertEqual(way.state, "uncertain")
        way.resolve_uncertain()
        self.assertEqual(way.state, "lost")

    def test_who_cannot_make_them_again_keeps_them(self) -> None:
        """A repair's ways let go of nothing."""
        way = self.make_way()
        self.send(way, 0, 10)
        self.assertEqual(way.peer.pipeline.bytes_held, MESSAGE)
