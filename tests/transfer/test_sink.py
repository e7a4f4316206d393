"""Where plaintext goes; what a download makes of it is in ``test_download``."""

from __future__ import annotations

import io
from typing import Any

from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.errors import SinkError
from pipegrid.transfer.get.sink import CONSUMER_BYTES, IBufferConsumer, open_sink
from tests.transfer.test_download import Consumer


class SinkTests(SynchronousTestCase):
    """Files and consumers."""

    def setUp(self) -> None:
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1

    def test_a_file(self) -> None:
        """All pieces, in order, whatever their kind; it is flushed and stays open."""
        path = self.mktemp()
        with open(path, "wb") as file:
            sink = open_sink(file, self.changed)
            self.assertTrue(sink.ready)
            sink.write([b"one ", bytearray(b"two "), memoryview(b"three")])
            sink.finish()
            with open(path, "rb") as reader:
                self.assertEqual(reader.read(), b"one two three")
            self.assertFalse(file.closed)

    def test_objects_that_do_not_tell(self) -> None:
        """Something with a write method that returns nothing has taken all."""

        class Quiet:
            taken = b""

            def write(self, data: bytes) -> None:
                self.taken += bytes(data)

            def flush(self) -> None:
                pass

        quiet: Any = Quiet()
        sink = open_sink(quiet, self.changed)
        sink.write([b"some", b"thing"])
        sink.finish()
        self.assertEqual(quiet.taken, b"something")

    def test_a_file_that_is_open_for_reading(self) -> None:
        """Is told so; there is no reason of the disk's."""
        path = self.mktemp()
        open(path, "wb").close()
        with open(path, "rb") as file, self.assertRaises(SinkError) as caught:
            open_sink(file, self.changed).write([b"x"])
        self.assertIn("give a file that is open for writing", str(caught.exception))
        self.assertNotIn("None", str(caught.exception))

    def test_a_file_that_would_block(self) -> None:
        """An unbuffered, non-blocking one that takes nothing is an error, not silence."""

        class Full(io.RawIOBase):
            def write(self, _data: Any) -> None:
                return None

        full: Any = Full()
        self.assertRaises(SinkError, open_sink(full, self.changed).write, [b"x"])

    def test_flushing_fails(self) -> None:
        """Bytes that are only in a buffer are not written: the error comes out."""
        for error, kind in (
            (OSError(28, "No space left on device"), SinkError),
            (BrokenPipeError(32, "Broken pipe"), BrokenPipeError),
        ):

            class Failing(io.BytesIO):
                def flush(self, error: OSError = error) -> None:
                    raise error

            sink = open_sink(Failing(), self.changed)
            sink.write([b"x"])
            self.assertRaises(kind, sink.finish)

    def test_a_consumer(self) -> None:
        """It gets bytes, may pause us, and is let go of once."""
        consumer = Consumer()
        sink = open_sink(consumer, self.changed)
        producer = consumer.producer
        assert producer is not None
        sink.write([bytearray(b"one "), memoryview(b"two")])
        self.assertEqual(consumer.taken, b"one two")
        producer.pauseProducing()
        self.assertFalse(sink.ready)
        self.assertEqual(self.changes, 0)
        producer.resumeProducing()
        self.assertTrue(sink.ready)
        self.assertEqual(self.changes, 1)
        sink.finish()
        sink.finish()
        self.assertIsNone(consumer.producer)

    def test_a_consumer_that_pauses_gets_nothing_more(self) -> None:
        """Not even the rest of what was finished when it paused; that is kept, and given when it resumes."""
        consumer = Consumer(pause_after=1)
        sink = open_sink(consumer, self.changed)
        data = bytes(range(256)) * 1024
        sink.write([data[:3], memoryview(data)[3:CONSUMER_BYTES], bytearray(data[CONSUMER_BYTES:])])
        self.assertEqual(consumer.taken, data[:CONSUMER_BYTES])
        self.assertFalse(sink.ready)
        self.assertEqual(sink.pending_bytes, len(data) - CONSUMER_BYTES)
        assert consumer.producer is not None
        consumer.producer.resumeProducing()
        self.assertEqual(consumer.taken, data[: 2 * CONSUMER_BYTES])
        self.assertFalse(sink.ready)
        consumer.pause_after = None
        consumer.producer.resumeProducing()
        self.assertEqual(consumer.taken, data)
        self.assertTrue(sink.ready)
        self.assertEqual(sink.pending_bytes, 0)

    def test_a_consumer_gets_pieces_of_a_fair_size(self) -> None:
        """However small those are that came from the network; nothing waits for the next segment."""
        consumer = Consumer()
        sizes: list[int] = []
        take = consumer.write

        def noting(data: bytes) -> None:
            sizes.append(len(data))
            take(data)

        consumer.write = noting  # type: ignore[method-assign]
        sink = open_sink(consumer, self.changed)
        data = bytes(range(200)) * 1000
        sink.write([memoryview(data)[at : at + 2] for at in range(0, len(data), 2)])
        self.assertEqual(consumer.taken, data)
        self.assertEqual(sizes, [CONSUMER_BYTES] * 3 + [len(data) - 3 * CONSUMER_BYTES])

    def test_a_consumer_of_buffers(self) -> None:
        """It gets them as they are: none is copied, and nothing while it has paused."""

        received: list[Any] = []

        @implementer(IBufferConsumer)
        class BufferConsumer(Consumer):
            def write(self, data: Any) -> None:
                received.append(data)

        sink: Any = open_sink(BufferConsumer(), self.changed)
        pieces = [bytes(3 * CONSUMER_BYTES), bytearray(b"ab"), memoryview(b"cde")]
        sink.pauseProducing()
        sink.write(pieces)
        self.assertEqual(received, [])
        sink.resumeProducing()
        self.assertEqual([id(each) for each in received], [id(each) for each in pieces])
        self.assertEqual(sink.pending_bytes, 0)

    def test_a_consumer_that_stops(self) -> None:
        """It wants nothing more; whoever asks is told."""
        consumer = Consumer()
        sink = open_sink(consumer, self.changed)
        sink.check()
        assert consumer.producer is not None
        consumer.producer.pauseProducing()
        consumer.producer.stopProducing()
        self.assertTrue(sink.ready, "the transfer must come and see")
        self.assertEqual(self.changes, 1)
        self.assertRaises(SinkError, sink.check)
        self.assertRaises(SinkError, sink.write, [b"x"])

    def test_a_consumer_that_fails_when_it_resumes(self) -> None:
        """The transfer ends with its error, and nothing more is written: there would be a hole."""
        consumer = Consumer(pause_after=1)
        sink = open_sink(consumer, self.changed)
        sink.write([bytes(3 * CONSUMER_BYTES)])
        producer = consumer.producer
        assert producer is not None
        full = OSError(28, "No space left on device")
        tried: list[int] = []

        def fail(data: bytes) -> None:
            tried.append(len(data))
            raise full

        consumer.write = fail  # type: ignore[method-assign]
        producer.resumeProducing()
        self.assertEqual(self.changes, 1)
        self.assertTrue(sink.ready, "the transfer must come and see")
        self.assertTrue(sink.pending_bytes, "it is not done")
        producer.resumeProducing()
        self.assertEqual(tried, [CONSUMER_BYTES])
        self.assertIs(self.assertRaises(OSError, sink.check), full)

    def test_a_consumer_that_resumes_what_has_ended(self) -> None:
        """It gets nothing of a transfer that failed or was cancelled, even if it kept the producer."""
        consumer = Consumer(pause_after=1)
        sink = open_sink(consumer, self.changed)
        sink.write([bytes(3 * CONSUMER_BYTES)])
        producer = consumer.producer
        assert producer is not None
        sink.finish()
        producer.resumeProducing()
        self.assertEqual(len(consumer.taken), CONSUMER_BYTES)
